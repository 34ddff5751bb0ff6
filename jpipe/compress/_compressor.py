"""The interface of compressors of arrays."""

import abc
import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jpipe._util.foreign import shown

Wire = dict[str, jax.Array]
"""Name -> array, as it is sent."""


class Replicas(Protocol):
    """Devices that each have an array of one shape, seen by code that runs on all of them."""

    @property
    def number(self) -> int:
        """The number of replicas."""

    def gather(self, value: jax.Array) -> jax.Array:
        """`[number, ...]`, the arrays of all, in one order on all of them."""

    def mean(self, value: jax.Array) -> jax.Array:
        """The mean of the arrays of all, bit for bit the same on all of them."""


class AlongAxis(NamedTuple):
    """The replicas along an axis of a mesh, inside of `jax.shard_map`.

    Attributes:
      axis: its name.
      number: devices along it.
    """

    axis: str
    number: int

    def gather(self, value: jax.Array) -> jax.Array:
        """See `Replicas`."""
        return lax.all_gather(value, self.axis)

    def mean(self, value: jax.Array) -> jax.Array:
        """See `Replicas`."""
        return lax.pmean(value, self.axis)


class Compressor(abc.ABC):
    """Encodes arrays before they are sent, and decodes them on arrival.

    `encode` and `decode` are pure functions for `jax.jit`. The shapes and dtypes of what is sent
    depend on the shape and dtype of the array only. A compressor is a frozen dataclass: two equal
    ones encode alike.

    Below, `like` is an array or `jax.ShapeDtypeStruct` of any shape and a floating-point dtype.
    """

    def check(self, like: Any, what: str = "the array") -> None:
        """Refuses an array that cannot be compressed; nothing is traced or compiled.

        Args:
          like: the array or its shape and dtype.
          what: the name of the array in the message.

        Raises:
          ValueError: if the array is not of floating point or is empty.
        """
        if not jnp.issubdtype(like.dtype, jnp.floating):
            raise ValueError(
                f"{type(self).__name__} compresses floating-point arrays, but {what} is "
                f"{jnp.dtype(like.dtype).name}{list(like.shape)}. Send it as it is."
            )
        if size_of(like) == 0:
            raise ValueError(
                f"{type(self).__name__} cannot compress {what}: it has shape "
                f"{list(like.shape)}, so no entries. Send it as it is."
            )

    def init(self, like: Any) -> Any:
        """The state before the first `encode`: a pytree of arrays; `()` if none is needed."""
        del like
        return ()

    @abc.abstractmethod
    def encode(self, x: jax.Array, state: Any) -> tuple[Wire, Any]:
        """Encodes `x`: returns the wire, and the next state.

        Args:
          x: the array.
          state: the result of `init`, or of the `encode` before.
        """

    @abc.abstractmethod
    def decode(self, wire: Mapping[str, jax.Array], like: Any) -> jax.Array:
        """The array that was encoded, about, in `like`'s shape and dtype."""

    def mean_over(self, x: jax.Array, state: Any, replicas: Replicas) -> tuple[jax.Array, jax.Array, Any]:
        """Computes a mean over replicas from compressed arrays.

        Every replica gets the wires of all, and decodes them in one order. So all have the same mean, bit for bit.

        Args:
          x: the array of this replica.
          state: the result of `init`, or of the call before.
          replicas: all replicas.

        Returns:
          The mean, the same on all replicas; what this replica has sent, so that `x` minus it is the
          error to send later; and the next state.
        """
        wire, state = self.encode(x, state)
        return self._mean_of(wire, x, replicas), self.decode(wire, x), state

    def _mean_of(self, wire: Wire, like: jax.Array, replicas: Replicas) -> jax.Array:
        """The mean of the arrays that the wires of all replicas decode to."""
        wires = {name: replicas.gather(a) for name, a in wire.items()}
        dtype = jnp.promote_types(like.dtype, jnp.float32)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            replica_wire = {name: a[i] for name, a in wires.items()}
            return total + self.decode(replica_wire, like).astype(dtype)

        zeros = jnp.zeros(like.shape, dtype)
        total = lax.fori_loop(0, replicas.number, add, zeros)
        return (total / replicas.number).astype(like.dtype)

    def for_gradient(self, like: Any) -> "Compressor":
        """The compressor of the gradient of a weight of this shape: this one, where it need not be exact."""
        del like
        return self

    def exchanged_bytes(self, like: Any, number: int) -> int:
        """Bytes that a replica receives of the others in `mean_over`.

        Args:
          like: the array, or an abstract one.
          number: the number of replicas.
        """
        return (number - 1) * self.wire_bytes(like)

    def wire_of(self, like: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Name -> shape and dtype of the arrays that are sent."""
        like = jax.ShapeDtypeStruct(like.shape, like.dtype)
        state = jax.eval_shape(lambda: self.init(like))
        return jax.eval_shape(self.encode, like, state)[0]

    def wire_bytes(self, like: Any) -> int:
        """Bytes that are sent for one array."""
        return sum(size_of(leaf) * jnp.dtype(leaf.dtype).itemsize for leaf in self.wire_of(like).values())

    def counts(self, state: Any) -> dict[str, jax.Array]:
        """Name -> scalar for the log, such as the density that was sent; may be empty."""
        del state
        return {}


class SparseCompressor(Compressor):
    """A compressor that sends some entries exactly and the others not at all.

    Both ends know from the wire which entries were sent. The gradient of the decoded array is
    needed at these entries only, so a receiver can send it back with `encode_at`.
    """

    def _mean_of(self, wire: Wire, like: jax.Array, replicas: Replicas) -> jax.Array:
        if set(wire) == {"values"}:  # all entries
            return replicas.mean(wire["values"]).astype(like.dtype)
        return super()._mean_of(wire, like, replicas)

    @abc.abstractmethod
    def support(self, wire: Mapping[str, jax.Array]) -> Wire:
        """The part of a wire that says which entries were sent; `{}`: all of them."""

    @abc.abstractmethod
    def encode_at(self, x: jax.Array, support: Mapping[str, jax.Array]) -> Wire:
        """The wire of the entries of `x` in `support`, for `decode`.

        Args:
          x: an array of the shape that was encoded; its dtype may be another one.
          support: the support that belongs to a wire of the same compressor.
        """


def size_of(like: Any) -> int:
    """Number of entries."""
    return math.prod(like.shape)


def check_number(compressor: Any, name: str, whole: bool = True) -> None:
    """Refuses an attribute of a compressor that is no number.

    Args:
      compressor: the compressor that has the attribute.
      name: the name of the attribute.
      whole: whether it must be a whole number.

    Raises:
      ValueError: if it is none.
    """
    value = getattr(compressor, name)
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(
            f"`{name}` of {type(compressor).__name__} must be a {'whole ' * whole}number, got {shown(value)}."
        )
