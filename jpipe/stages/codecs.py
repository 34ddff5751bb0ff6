"""Codecs of the leaves of messages between stages, and the states of their compressors.

    forward     output ── encode ──> wire ── inbox of the next stage ── decode ──> input
    backward    gradient by the input ── encode ──> wire ── inbox of the stage before ── decode ──> gradient

Where a sparse compressor sends some entries of an activation, the receiver knows these entries from the wire,
and the gradient by the others is 0. So it sends the gradient by the same entries (Gupta et al.,
arXiv:2010.08899, section 3.2), and keeps the wire until its backward. Their places do not travel again: the
sender keeps the part of its wire that names them, the *support*, in an inbox of its own. Other compressors round,
and the gradient by what is rounded passes as if it was not (a straight-through estimate).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.compress import Compressor, SparseCompressor
from jpipe.layers.avals import is_inexact
from jpipe.packing import Leaf


class MessageCompression(NamedTuple):
    """The compression of messages.

    Attributes:
      activations: compressor of activations and skips; None: they go as they are.
      gradients: compressor of their gradients; None: they go as they are, or by the entries that `activations`
        has sent.
    """

    activations: Compressor | None = None
    gradients: Compressor | None = None

    @property
    def is_sparse(self) -> bool:
        """True if a backward reads which entries of an activation were sent."""
        return isinstance(self.activations, SparseCompressor)


NO_COMPRESSION = MessageCompression()
"""Messages go as they are."""


class LeafCodec(NamedTuple):
    """The codec of one leaf of messages.

    Attributes:
      leaf: shape and dtype of the leaf.
      compression: the compression of the leaf and of its gradient.
    """

    leaf: Leaf
    compression: MessageCompression

    def wire(self, gradient: bool = False) -> list[Leaf]:
        """The arrays that are sent for the leaf, or for its gradient."""
        compressor = self._compressor(gradient)
        if compressor is None:
            return [self.leaf]
        wire = _wire_of(compressor, self.leaf.aval)
        return [Leaf(wire[name]) for name in self._sent(gradient)]

    def support_wire(self) -> list[Leaf]:
        """The arrays of the leaf's wire that its sender keeps until the gradient by the leaf arrives without them."""
        wire = _wire_of(self.compression.activations, self.leaf.aval) if self._support else {}
        return [Leaf(wire[name]) for name in self._support]

    def support(self, wire: Sequence[jax.Array]) -> list[jax.Array]:
        """Those of the wire of the leaf."""
        return [self._named(wire)[name] for name in self._support]

    def first_state(self, gradient: bool = False) -> Any:
        """The state of the compressor, before the first message."""
        compressor = self.compression.gradients if gradient else self.compression.activations
        return () if compressor is None else compressor.init(self.leaf.aval)

    def encode(self, x: jax.Array, state: Any) -> tuple[list[jax.Array], Any]:
        """Returns the wire of the leaf, and the next state."""
        compressor = self.compression.activations
        if compressor is None:
            return [x], state
        wire, state = compressor.encode(x, state)
        return _in_order(wire), state

    def encode_gradient(self, x: jax.Array, state: Any, arrived: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        """Returns the wire of the gradient, and the next state.

        Args:
          x: the gradient by the leaf that has arrived.
          state: the state of the compressor of gradients.
          arrived: the wire of the leaf; read if the compressor is sparse.
        """
        sparse, compressor = self.compression
        if isinstance(sparse, SparseCompressor):
            support = sparse.support(self._named(arrived))
            wire = sparse.encode_at(x, support)
            if compressor is None:
                return [wire[name] for name in self._sent(gradient=True)], state
            x = sparse.decode(wire, self.leaf.aval)
        if compressor is None:
            return [x], state
        wire, state = compressor.encode(x, state)
        return _in_order(wire), state

    def decode(self, wire: Sequence[jax.Array], support: Sequence[jax.Array] | None = None) -> jax.Array:
        """Decodes the leaf, or its gradient, for which `support` is what the sender of the leaf has kept."""
        gradient = support is not None
        compressor = self._compressor(gradient)
        if compressor is None:
            (x,) = wire
            return x
        kept = zip(self._support, support or (), strict=True) if gradient else ()
        return compressor.decode({**self._named(wire, gradient), **dict(kept)}, self.leaf.aval)

    def _compressor(self, gradient: bool) -> Compressor | None:
        activations, gradients = self.compression
        if not gradient or (gradients is None and self.compression.is_sparse):
            return activations
        return gradients

    @property
    def _support(self) -> Sequence[str]:
        """The names of `support_wire`."""
        sparse, gradients = self.compression
        if gradients is not None or not isinstance(sparse, SparseCompressor):
            return ()
        return _support_of(sparse, self.leaf.aval)

    def _sent(self, gradient: bool) -> list[str]:
        """The names of `wire`."""
        compressor = self._compressor(gradient)
        assert compressor is not None
        kept = self._support if gradient else ()
        return [name for name in sorted(_wire_of(compressor, self.leaf.aval)) if name not in kept]

    def _named(self, wire: Sequence[jax.Array], gradient: bool = False) -> dict[str, jax.Array]:
        return dict(zip(self._sent(gradient), wire, strict=True))


def codecs_of(leaves: Sequence[Leaf], compression: MessageCompression, what: str) -> tuple[LeafCodec, ...]:
    """The codec of each leaf of a message. Leaves that are not of floating point go as they are.

    Args:
      leaves: the leaves of the message.
      compression: the compression of messages.
      what: names the message in errors.

    Raises:
      ValueError: if a leaf cannot be compressed, or no leaf can.
    """
    inexact = [leaf for leaf in leaves if is_inexact(leaf.aval)]
    compressors = [c for c in compression if c is not None]
    if compressors and leaves and not inexact:
        dtypes = ", ".join(str(leaf.aval.dtype) for leaf in leaves)
        raise ValueError(
            f"`compress_messages` compresses floating-point arrays, and {what} has none: its arrays are of {dtypes}. "
            "Leave `compress_messages` out, or choose boundaries at which the model passes on real numbers."
        )
    for leaf in inexact:
        for compressor in compressors:
            compressor.check(leaf.aval, what)
    return tuple(LeafCodec(leaf, compression if is_inexact(leaf.aval) else NO_COMPRESSION) for leaf in leaves)


def state_key(message: str, number: int, first_state: Any) -> str:
    """Names the state of the compressor of a leaf. States of unlike shapes have names of their own.

    Args:
      message: the inbox of the message.
      number: the number of the leaf in the message.
      first_state: the state of the codec before the first message.
    """
    shapes = [f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(first_state)]
    return f"{message} {number} {' '.join(shapes)}"


def inbox_of(key: str) -> str:
    """The inbox of the messages of a `state_key`."""
    return key.partition(" ")[0]


def first_states(messages: Mapping[str, Sequence[Sequence[LeafCodec]]], num_chunks: int) -> dict[str, Any]:
    """The states of the compressors of all messages on a device, before the first message: `[R, ...]`.

    Args:
      messages: inbox -> the codecs of every message that goes there.
      num_chunks: R.
    """
    states: dict[str, Any] = {}
    for inbox, codec_lists in messages.items():
        gradient = is_gradient(inbox)
        for codecs in codec_lists:
            for number, codec in enumerate(codecs):
                state = codec.first_state(gradient)
                if jax.tree.leaves(state):
                    key = state_key(inbox, number, state)
                    states[key] = jax.tree.map(lambda a: jnp.broadcast_to(a, (num_chunks, *a.shape)), state)
    return states


def is_gradient(inbox: str) -> bool:
    """Returns whether the messages of an inbox are gradients."""
    return inbox.endswith("gradient")


def support_inbox(inbox: str) -> str:
    """The inbox in which the sender of an activation keeps its support, by the inbox of the activation or its gradient.

    Example:
      >>> support_inbox("activation"), support_inbox("gradient"), support_inbox("skip0.gradient")
      ('activation.support', 'activation.support', 'skip0.support')
    """
    activation = "activation" if inbox == "gradient" else inbox.removesuffix(".gradient")
    return f"{activation}.support"


@functools.cache
def _wire_of(compressor: Compressor, like: jax.ShapeDtypeStruct) -> Mapping[str, jax.ShapeDtypeStruct]:
    return compressor.wire_of(like)


@functools.cache
def _support_of(compressor: SparseCompressor, like: jax.ShapeDtypeStruct) -> Sequence[str]:
    """The arrays of a wire that name entries; none if the wire has all entries."""
    wire = _wire_of(compressor, like)
    return sorted(set(wire) & set(jax.eval_shape(compressor.support, wire)))


def _in_order(wire: Mapping[str, jax.Array]) -> list[jax.Array]:
    return [wire[name] for name in sorted(wire)]
