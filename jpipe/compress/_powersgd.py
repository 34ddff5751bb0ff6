"""PowerSGD: a power iteration that goes on from array to array."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.compress._compressor import Compressor, Replicas, Wire
from jpipe.compress._matrix import check_rank, is_whole, matrix_shape, orthonormal


class PowerSGDState(NamedTuple):
    """Between two arrays.

    Attributes:
      q: float `[columns, rank]`, the factor of the array before.
    """

    q: jax.Array


@dataclasses.dataclass(frozen=True)
class PowerSGD(Compressor):
    """Sends a matrix M as P Q^T of a low rank, by one step of a power iteration.

        P = M Q;  P = an orthonormal basis of P;  Q = M^T P

    The Q of one array is where the next one begins. The last dim of an array gives the columns of M, all other
    dims its rows. Arrays of less than 2 dims are sent whole, as `values`, and so are arrays whose factors
    would be no smaller, so at the full rank, the smaller of both, nothing is lost.

    Replicas do not exchange wires. They take the mean of P before it becomes a basis, and the mean of Q: all have
    the same factors, those of the mean of their matrices. What a replica has sent is this P Q^T, as in Algorithm 2.

    Attributes:
      rank: columns of P and Q.
      seed: of the first Q.

    Raises:
      ValueError: if `rank` is below 1.

    References:
      Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, arXiv:1905.13727, Algorithms 1 and 2.
    """

    rank: int
    seed: int = 0

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(
                f"`rank` of PowerSGD must be at least 1, got {self.rank}: it is the number of columns of the "
                "factors. 1 to 10 are usual."
            )

    def check(self, like: Any, what: str = "the array") -> None:
        """As in `Compressor`; refuses a rank above the smaller dim as well."""
        super().check(like, what)
        check_rank(self, like, what)

    def init(self, like: Any) -> Any:
        """A random Q; `()` for an array that is sent whole."""
        if is_whole(like, self.rank):
            return ()
        _, columns = matrix_shape(like)
        key = jax.random.key(self.seed)
        dtype = jnp.promote_types(like.dtype, jnp.float32)
        return PowerSGDState(jax.random.normal(key, (columns, self.rank), dtype))

    def encode(self, x: jax.Array, state: Any) -> tuple[Wire, Any]:
        """`p` `[rows, rank]` and `q` `[columns, rank]`; or `values`."""
        if is_whole(x, self.rank):
            return {"values": x}, state
        p, q = self._step(x, state, lambda factor: factor)
        return {"p": p.astype(x.dtype), "q": q.astype(x.dtype)}, PowerSGDState(q)

    def decode(self, wire: Mapping[str, jax.Array], like: Any) -> jax.Array:
        """P Q^T."""
        if "values" in wire:
            return wire["values"].astype(like.dtype)
        return self._product(wire["p"], wire["q"], like)

    def mean_over(
        self, x: jax.Array, state: Any, replicas: Replicas
    ) -> tuple[jax.Array, jax.Array, Any]:
        """As in `Compressor`, by means of factors."""
        if is_whole(x, self.rank):
            return replicas.mean(x), x, state
        p, q = self._step(x, state, replicas.mean)
        mean = self._product(p, q, x)
        return mean, mean, PowerSGDState(q)

    def exchanged_bytes(self, like: Any, number: int) -> int:
        """As in `Compressor`; a mean sends and receives 2 (number - 1) / number of its bytes."""
        return round(2 * (number - 1) / number * self.wire_bytes(like))

    def _step(self, x: jax.Array, state: PowerSGDState, mean: Any) -> tuple:
        """P, an orthonormal basis, and Q."""
        matrix = x.reshape(matrix_shape(x)).astype(state.q.dtype)
        p = orthonormal(mean(matrix @ state.q))
        return p, mean(matrix.T @ p)

    def _product(self, p: jax.Array, q: jax.Array, like: Any) -> jax.Array:
        return (p @ q.T).reshape(like.shape).astype(like.dtype)
