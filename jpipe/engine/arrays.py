"""The arrays of one device in a tick, and the two records that an operation gets of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from jpipe.packing import Place

Packed = Mapping[str, jax.Array]
"""Packed arrays by name: see `jpipe.packing.Packing`."""


class TickStash(dict[tuple[Place, Any], jax.Array]):
    """A stash whose values are read in the tick that writes them: `(place, number of the layer) -> value`.

    A value in a ring would be written to its slot and copied out of it again. Here XLA makes it an operand of
    what reads it, as in a program without a pipeline.
    """


class TickArrays:
    """The arrays of one device that outlive a tick: the loop state of the scan over ticks.

    An array is an attribute. A record may hold only some of the arrays, and an access to another
    one raises.

    Letters: V weight versions, R columns per device, K slots of a ring, N microbatches.

    Attributes:
      aux: sums over finished microbatches of the values that the loss returns beside its value, `[1, ...]`
        each.
      batches: the minibatches that are still read, a tree of `[num_batches * N, microbatch, ...]`.
      carry: packed values that go from a slice of a sequence to the next one, `[K, ...]`.
      carry_gradient: packed gradients by them, which go from a slice to the one before, `[K, ...]`.
      cast_weights: use -> those of its weights that are cast once, packed like them: see `jpipe.engine.cast_weights`.
      constants: packed weights that are frozen, `[R, ...]`.
      count: int32 `[1]`, finished microbatches.
      embedded: outputs of an embedding that all devices run together, `[microbatch, ...]` each.
      embedded_gradient: the gradients by the outputs in `embedded` that have one.
      gradient_compression: "error", packed like `gradients`: the part that this replica has not sent yet; and "states",
        group of gradients -> state of the compressor for each, `[R, n, ...]`. Empty without compression.
      gradient_norm: `[1]`, norm of the gradient over all stages at the latest update.
      gradients: packed gradient accumulators, `[R, ...]`.
      head_gradient: the gradient by the inputs of a head that all devices run together,
        `[K, microbatch, ...]` each.
      head_input: the inputs of that head, `[microbatch, ...]` each.
      host_stash: stash -> its values in host memory, `[H + 1, ...]`, packed like the stash; the last slot discards.
      inbox: inbox -> packed messages that have arrived, `[K + 1, ...]`; the last slot discards.
      input_stash: packed values that a backward needs of its forward, `[K, ...]`.
      loss: `[1]`, sum of the losses of finished microbatches.
      loss_scale: the arrays of `LossScale`, `[1]` each.
      message_compression: the states of the compressors of messages, by `jpipe.stages.codecs.state_key`, `[R, ...]`;
        empty without compression.
      minibatch_weights: the weights of the minibatches whose loss still has a gradient to take, `[num_weights]`.
      mutable_state: packed mutable state of the layers, `[R, ...]`.
      optimizer_state: packed optimizer state, `[R, ...]`.
      output_gradients: the gradients of a loss of the whole minibatch by those of `outputs` that have one.
      outputs: outputs of the last stage, `[N, microbatch, ...]` each; in forward-only tables, and for a loss of the
        whole minibatch.
      parameters: packed weights that are trained, `[V, R, ...]`; in forward-only tables all weights.
      op_count: int32 `[]`, number of operations that have run. A value that reads it waits for all
        operations of a tick.
      read_parameters: pass -> the weights that a parameter hook gives to this pass, packed like
        `parameters`.
      received: channel -> the message that has arrived and is not in an inbox yet.
      sent_activations: output of a forward -> its packed message; keys are positions in
        `Lowered.outgoing`.
      sent_gradients: output of a backward -> its packed message; keys as of `sent_activations`.
      skipped: int32 `[R]`, skipped updates of each column.
      split_residuals: packed values that a weight gradient needs of its backward, `[K, ...]`.
      squared_norm: `[K, R]`, squared gradient norm of each column, that of version v in row v modulo K.
      staged: stash -> one slot on its way to host memory, `[1, ...]`, packed like the stash.
      statistics: sums over the microbatches of a minibatch, which move `mutable_state` at its end, packed like
        it.
      weight_stash: packed values that a weight gradient needs of its forward, `[K, ...]`.
    """

    aux: list[jax.Array]
    batches: Any
    carry: Packed
    carry_gradient: Packed
    cast_weights: Mapping[str, Packed]
    constants: Packed
    count: jax.Array
    embedded: list[jax.Array]
    embedded_gradient: list[jax.Array]
    gradient_compression: Mapping[str, Any]
    gradient_norm: jax.Array
    gradients: Packed
    head_gradient: list[jax.Array]
    head_input: list[jax.Array]
    host_stash: Mapping[str, Packed]
    inbox: Mapping[str, Packed]
    input_stash: Packed | TickStash
    loss: jax.Array
    loss_scale: Mapping[str, jax.Array]
    message_compression: Mapping[str, Any]
    minibatch_weights: jax.Array
    mutable_state: Packed
    optimizer_state: Packed
    output_gradients: list[jax.Array]
    outputs: list[jax.Array]
    parameters: Packed
    op_count: jax.Array
    read_parameters: Mapping[str, Packed]
    received: Mapping[int, Packed]
    sent_activations: Mapping[int, Packed]
    sent_gradients: Mapping[int, Packed]
    skipped: jax.Array
    split_residuals: Packed | TickStash
    squared_norm: jax.Array
    staged: Mapping[str, Packed]
    statistics: Packed
    weight_stash: Packed | TickStash

    def __init__(self, **arrays: Any):
        unknown = set(arrays) - set(_FIELDS)
        assert not unknown, f"{type(self).__name__} has no arrays {sorted(unknown)}"
        self.__dict__.update(arrays)

    def __getattr__(self, name: str) -> Any:  # called for arrays that are not held
        raise AttributeError(
            f"{type(self).__name__} does not hold `{name}`, only {', '.join(self)}. An operation takes the arrays that "
            "it writes from `written` and all others from `read`."
        )

    def __iter__(self) -> Iterator[str]:
        """The names of the arrays that the record holds."""
        return (name for name in _FIELDS if name in self.__dict__)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def replace(self, **arrays: Any) -> Self:
        """The record with other values for arrays that it holds."""
        for name in arrays:
            getattr(self, name)
        return type(self)(**{**self.__dict__, **arrays})

    def split(self, written: Sequence[str]) -> tuple["Written", "ReadOnly"]:
        """The arrays named in `written`, and all others."""
        others = [name for name in self if name not in written]
        return (
            Written(**{name: getattr(self, name) for name in written}),
            ReadOnly(**{name: getattr(self, name) for name in others}),
        )


_FIELDS = tuple(TickArrays.__annotations__)
# The order of loop state in the compiled program.


class Written(TickArrays):
    """The arrays that an operation writes. The operation returns a record of the same arrays."""


class ReadOnly(TickArrays):
    """The other arrays. An operation reads them and cannot return them."""


def _flatten(arrays: TickArrays) -> tuple[list, tuple]:
    names = tuple(arrays)
    keys = [(jax.tree_util.GetAttrKey(n), getattr(arrays, n)) for n in names]
    return keys, names


for _record in (TickArrays, Written, ReadOnly):
    jax.tree_util.register_pytree_with_keys(
        _record,
        _flatten,
        lambda names, values, record=_record: record(**dict(zip(names, values))),
    )
