"""The operations of an embedding and a head that all devices run together.

    embed            weights, batch       -> embedded, which the forward of the first stage reads
    head             weights, head_input  -> loss, head_gradient, gradients
    embed_backward   embedded_gradient    -> gradients

All devices enter such an operation in the same tick, because the table is the same on all of them. So it may
communicate: the first stage has no copy of the embedding, and the last stage none of the head. The head takes its
gradient in its forward. From forward to backward the last stage keeps the gradient by the head's inputs, which is
smaller than logits.

The backward of the embedding runs its forward again, with the weights that the backward of the first stage reads. Of a
sum of looked up rows nothing is left of that in the compiled program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing, vocabulary
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.cast_weights import WeightReader
from jpipe.engine.context import Device, TrainingDevice
from jpipe.engine.guard import Branch, run_one_of
from jpipe.engine.losses import loss_gradients, loss_key, microbatch_of
from jpipe.engine.operations import as_stored, from_stored
from jpipe.engine.stage_layers import gathered_along_fsdp
from jpipe.engine.transport import put_row
from jpipe.layers.avals import is_inexact
from jpipe.lowering.rings import HEAD_GRADIENT
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import STAGE
from jpipe.stages.vocabulary import PartedLeaf, VocabularyLayer

_COLUMN = 0
"""A device has one part of a vocabulary layer, whatever the number of its stages."""


def embed(device: Device, scalars: TickScalars, arrays: TickArrays, *, again: bool = False) -> TickArrays:
    """Computes the embedding of the microbatch that the first stage runs in this tick.

    Args:
      device: the device.
      scalars: the scalars of the tick.
      arrays: all arrays.
      again: whether it is the microbatch that the first stage runs backward, and its forward again.
    """
    layer = device.spec.stages.vocabulary.embedding
    if layer is None:
        return arrays
    lane = scalars.lane("embed_backward" if again else "embed", 0)

    def run(written: Written, read: ReadOnly) -> Written:
        weights = _weights(device, layer, read, lane, "backward" if again else "forward")
        outputs = _embedded(device, layer, lane, weights)
        stages = device.spec.stages
        outputs += stages.vocabulary.first_sums()
        return written.replace(
            embedded=as_stored(stages, outputs, written.embedded),
            op_count=written.op_count + 1,
        )

    return _run(device, "embed", lane, ["embedded", "op_count"], run, arrays)


def embed_backward(device: TrainingDevice, scalars: TickScalars, arrays: TickArrays) -> TickArrays:
    """Computes the gradient of the embedding for the microbatch that the first stage runs backward in this tick."""
    layer = device.spec.stages.vocabulary.embedding
    if layer is None:
        return arrays
    lane, home = scalars.lane("embed_backward", 0), _device_of(device, 0)

    def run(written: Written, read: ReadOnly) -> Written:
        def inexact_outputs(weights: list) -> list:
            return [a for a in _embedded(device, layer, lane, weights) if is_inexact(a)]

        weights = _weights(device, layer, read, lane, "backward")
        outputs, backward = jax.vjp(inexact_outputs, weights)
        # What follows are gradients of sums of reported values, which begin with zeros.
        gradient = read.embedded_gradient[: len(outputs)]
        gradient = from_stored(device.spec.stages, gradient, outputs)
        (weight_gradients,) = backward(_from_device(device, home, gradient))
        gradients = _add_gradients(device, layer, written.gradients, weight_gradients)
        return written.replace(gradients=gradients, op_count=written.op_count + 1)

    writes = ["gradients", "op_count"]
    return _run(device, "embed_backward", lane, writes, run, arrays)


def head(device: Device, scalars: TickScalars, arrays: TickArrays) -> TickArrays:
    """Computes the head and the loss of the microbatch whose forward the last stage has run in this tick."""
    layer = device.spec.stages.vocabulary.head
    if layer is None:
        return arrays
    lane = scalars.lane("head", 0)
    home = _device_of(device, device.spec.stages.num_stages - 1)

    if not isinstance(device, TrainingDevice):
        return _collect_outputs(device, layer, lane, home, arrays)

    def run(written: Written, read: ReadOnly) -> Written:
        weights = _weights(device, layer, read, lane, "forward")
        inputs = _head_inputs(device, home, read)
        is_home = device.position == home
        loss, aux, weight_gradients, input_gradients = _loss_and_gradients(device, lane, read, weights, inputs)
        slot = lane.slot(HEAD_GRADIENT)
        return written.replace(
            loss=written.loss + jnp.where(is_home, loss, 0)[None],
            aux=[a + jnp.where(is_home, b, 0)[None] for a, b in zip(written.aux, aux, strict=True)],
            count=written.count + is_home.astype(jnp.int32),
            head_gradient=[
                put_row(ring, a, slot) for ring, a in zip(written.head_gradient, input_gradients, strict=True)
            ],
            gradients=_add_gradients(device, layer, written.gradients, weight_gradients),
            op_count=written.op_count + 1,
        )

    writes = ["loss", "aux", "count", HEAD_GRADIENT, "gradients", "op_count"]
    return _run(device, "head", lane, writes, run, arrays)


def _collect_outputs(
    device: Device,
    layer: VocabularyLayer,
    lane: LaneScalars,
    home: int,
    arrays: TickArrays,
) -> TickArrays:
    """Runs the head of a forward-only table, and collects its outputs."""

    def collect(written: Written, read: ReadOnly) -> Written:
        weights = _weights(device, layer, read, lane, "forward")
        inputs = _head_inputs(device, home, read)
        outputs = _head_outputs(device, lane, weights, inputs, train=False)
        values = zip(written.outputs, jax.tree.leaves(_gathered_logits(outputs)))
        return written.replace(
            outputs=[put_row(a, y, lane.microbatch) for a, y in values],
            op_count=written.op_count + 1,
        )

    return _run(device, "head", lane, ["outputs", "op_count"], collect, arrays)


def _run(
    device: Device,
    name: str,
    lane: LaneScalars,
    writes: Sequence[str],
    run: Any,
    arrays: TickArrays,
) -> TickArrays:
    """Runs an operation on all devices, or on none of them."""
    target = device.spec.lowered.target
    return run_one_of(target, lane.program, [Branch(name, writes, run)], arrays)


def _device_of(device: Device, stage: int) -> int:
    return device.spec.lowered.placement[stage][0]


# -- Parts


def whole_of(leaf: PartedLeaf, part: jax.Array) -> jax.Array:
    """The whole of a leaf, from the parts of all devices. All devices call this."""
    part = packing.split_as((None,) * len(leaf.spec), part)
    whole = lax.all_gather(part, STAGE, axis=leaf.dim, tiled=True)
    return lax.slice_in_dim(whole, 0, leaf.aval.shape[leaf.dim], axis=leaf.dim)


def part_of(device: TrainingDevice, leaf: PartedLeaf, whole: jax.Array) -> jax.Array:
    """This device's part of a leaf."""
    padded = jnp.pad(whole, leaf.padding())
    start = device.position * leaf.num_rows
    return lax.dynamic_slice_in_dim(padded, start, leaf.num_rows, leaf.dim)


# -- Weights and their gradients


def _weights(
    device: Device,
    layer: VocabularyLayer,
    read: TickArrays,
    lane: LaneScalars,
    weight_pass: str,
) -> list[jax.Array]:
    """The parameters that the layer reads: this device's part, or the whole."""
    weights = WeightReader.of(device.spec, read, weight_pass)
    parts = [weights.read(place, [lane.row]) for place in layer.places]
    stages = device.spec.stages
    kind = stages.layer_kinds[stages.kind_of_layer[layer.index]]
    parts = gathered_along_fsdp(layer.places, parts, kind.read_dtypes)
    return [part if leaf.is_split else whole_of(leaf, part) for leaf, part in zip(layer.leaves, parts, strict=True)]


def _add_gradients(device: TrainingDevice, layer: VocabularyLayer, gradients: Packed, values: Sequence) -> Packed:
    """Adds the gradients of the layer's weights to this device's accumulators."""
    parts = [
        value if leaf.is_split else part_of(device, leaf, value)
        for leaf, value in zip(layer.leaves, values, strict=True)
    ]
    return packing.add_all(gradients, layer.places, [_COLUMN], gathered_along_fsdp(layer.places, parts))


# -- Forwards


def _from_device(device: Device, home: int, values: Sequence) -> list[jax.Array]:
    """The values of one device, on all devices."""

    def sent(value: jax.Array) -> jax.Array:
        zero = jnp.zeros_like(value)
        value = jnp.where(device.position == home, value, zero)
        if value.dtype == bool:
            return lax.psum(value.astype(jnp.int32), STAGE).astype(bool)
        return vocabulary.sum_over(value, STAGE)

    return [sent(value) for value in values]


def _embedded(device: Device, layer: VocabularyLayer, lane: LaneScalars, weights: Sequence) -> list[jax.Array]:
    """The outputs of the embedding."""
    train = isinstance(device, TrainingDevice)
    stages = device.spec.stages
    inputs = stages.values.constrained(microbatch_of(lane, device.inputs))
    key = device.random_key(layer.index, lane.microbatch_number)
    outputs = stages.vocabulary.embedding_outputs(weights, jax.random.key_data(key), inputs, train)
    return stages.values.constrained(jax.tree.leaves(outputs))


def _head_inputs(device: Device, home: int, read: ReadOnly) -> list[jax.Array]:
    """The inputs of the head, from the last stage; zeros for those that it does not read."""
    layers = device.spec.stages.vocabulary
    inputs = from_stored(device.spec.stages, read.head_input, jax.tree.leaves(layers.head_inputs))
    wanted = [a for a, is_read in zip(inputs, layers.head_reads, strict=True) if is_read]
    sent = iter(_from_device(device, home, wanted))
    return [next(sent) if is_read else jnp.zeros_like(a) for a, is_read in zip(inputs, layers.head_reads, strict=True)]


def _head_outputs(device: Device, lane: LaneScalars, weights: Sequence, inputs: Sequence, train: bool) -> Any:
    layers = device.spec.stages.vocabulary
    assert layers.head is not None
    key = device.random_key(layers.head.index, lane.microbatch_number)
    return layers.head_outputs(weights, jax.random.key_data(key), inputs, train)


def _gathered_logits(outputs: Any) -> Any:
    """Replaces split logits in outputs by whole ones."""

    def is_split(a: Any) -> bool:
        return isinstance(a, vocabulary.SplitLogits)

    return jax.tree.map(lambda a: a.gathered() if is_split(a) else a, outputs, is_leaf=is_split)


def _loss_and_gradients(
    device: TrainingDevice,
    lane: LaneScalars,
    read: ReadOnly,
    weights: list[jax.Array],
    inputs: list[jax.Array],
) -> tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array]]:
    """The loss of a microbatch, its aux, and the gradients by the head's weights and by its inputs."""
    stages = device.spec.stages
    batch = stages.values.constrained(microbatch_of(lane, device.batch))
    key = loss_key(device, lane)
    exact = [None if is_inexact(a) else a for a in inputs]

    def loss(weights: list, inexact: list) -> tuple[list, list]:
        rest = iter(inexact)
        merged = [next(rest) if a is None else a for a in exact]
        outputs = _head_outputs(device, lane, weights, merged, train=True)
        terms = stages.vocabulary.loss_terms(outputs, merged, batch, key)
        return terms.values, jax.tree.leaves(terms.sums)

    inexact = [a for a in inputs if is_inexact(a)]
    values, backward, aux = jax.vjp(loss, weights, inexact, has_aux=True)
    weight_gradients, input_gradients = backward(loss_gradients(device, lane, read))
    return values[0], aux, weight_gradients, stages.values.constrained(input_gradients)
