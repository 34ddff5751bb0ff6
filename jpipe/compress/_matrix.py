"""The base of compressors that send an array as the factors of a matrix of low rank."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jpipe._util.foreign import shown
from jpipe.compress._compressor import Compressor, Replicas, Wire, check_number


@dataclasses.dataclass(frozen=True)
class LowRankCompressor(Compressor):
    """Sends the factors of a matrix.

    The last dim of an array gives the columns of the matrix, all other dims its rows. Arrays of less than 2 dims
    are sent whole, as `values`, and so are arrays whose factors would be no smaller, so at the full rank, the
    smaller of both, nothing is lost.

    Replicas do not exchange wires. They take means of products with the matrix, and all have the factors of the mean of
    their matrices. What a replica has sent is the product of these.

    Attributes:
      rank: columns of the factors.
      seed: the seed of the first factors.
    """

    rank: int
    seed: int = 0

    _rank_counts: ClassVar[str] = "columns of the factors"

    def __post_init__(self):
        check_number(self, "rank")
        check_number(self, "seed")
        if self.rank < 1:
            raise ValueError(
                f"`rank` of {type(self).__name__} must be at least 1, got {shown(self.rank)}: it is the number of "
                f"{self._rank_counts}. 1 to 10 are usual."
            )

    def check(self, like: Any, what: str = "the array") -> None:
        """See `Compressor`. Refuses a rank above the smaller dim as well."""
        super().check(like, what)
        if len(like.shape) < 2:
            return
        rows, columns = matrix_shape(like)
        if self.rank > min(rows, columns):
            raise ValueError(
                f"{type(self).__name__} of rank {self.rank} cannot compress {what}: as a matrix of "
                f"{rows} x {columns} it has at most rank {min(rows, columns)}. Choose a smaller `rank`."
            )

    def is_smaller(self, rows: int, columns: int) -> bool:
        """Returns whether the factors of a matrix have fewer numbers than the matrix."""
        return self.rank * (rows + columns) < rows * columns

    def init(self, like: Any) -> Any:
        """The first factors; `()` for an array that is sent whole."""
        if self._is_whole(like):
            return ()
        return self._first(jax.random.key(self.seed), *matrix_shape(like), _matrix_dtype(like))

    def encode(self, x: jax.Array, state: Any) -> tuple[Wire, Any]:
        """The factors; or `values`."""
        if self._is_whole(x):
            return {"values": x}, state
        factors, state = self._step(_as_matrix(x), state, lambda product: product)
        return {name: a.astype(x.dtype) for name, a in factors.items()}, state

    def decode(self, wire: Mapping[str, jax.Array], like: Any) -> jax.Array:
        """The product of the factors."""
        if "values" in wire:
            return wire["values"].astype(like.dtype)
        return self._product(wire).reshape(like.shape).astype(like.dtype)

    def mean_over(self, x: jax.Array, state: Any, replicas: Replicas) -> tuple[jax.Array, jax.Array, Any]:
        """See `Compressor`. Computes the mean by means of products."""
        if self._is_whole(x):
            return replicas.mean(x), x, state
        factors, state = self._step(_as_matrix(x), state, replicas.mean)
        mean = self.decode(factors, x)
        return mean, mean, state

    def exchanged_bytes(self, like: Any, number: int) -> int:
        """See `Compressor`. A mean sends and receives 2 (number - 1) / number of its bytes."""
        if not self._is_whole(like):  # the products of `_step` are as exact as its matrix
            like = jax.ShapeDtypeStruct(like.shape, _matrix_dtype(like))
        return round(2 * (number - 1) / number * self.wire_bytes(like))

    def _is_whole(self, like: Any) -> bool:
        """Returns whether an array is sent as it is: it has less than 2 dims, or its factors are no smaller."""
        return len(like.shape) < 2 or not self.is_smaller(*matrix_shape(like))

    @abc.abstractmethod
    def _first(self, key: jax.Array, rows: int, columns: int, dtype: Any) -> Any:
        """The state before the first matrix."""

    @abc.abstractmethod
    def _step(self, matrix: jax.Array, state: Any, mean: Callable[[jax.Array], jax.Array]) -> tuple[Wire, Any]:
        """The factors of a matrix, and the next state; `mean` is taken of all products with the matrix."""

    @abc.abstractmethod
    def _product(self, factors: Mapping[str, jax.Array]) -> jax.Array:
        """The matrix of factors."""


def matrix_shape(like: Any) -> tuple[int, int]:
    """Rows and columns of an array as a matrix: its last dim gives the columns."""
    return math.prod(like.shape[:-1]), like.shape[-1]


def orthonormal(columns: jax.Array) -> jax.Array:
    """An orthonormal basis of columns `[n, k]`, each with a positive part of its column.

    It is the Q of a QR decomposition whose R has a positive diagonal.
    """
    q, r = jnp.linalg.qr(columns)
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(q.dtype)
    return q * signs[None]


def _as_matrix(x: jax.Array) -> jax.Array:
    """An array as a matrix, at least in float32."""
    return x.reshape(matrix_shape(x)).astype(_matrix_dtype(x))


def _matrix_dtype(like: Any) -> Any:
    return jnp.promote_types(like.dtype, jnp.float32)
