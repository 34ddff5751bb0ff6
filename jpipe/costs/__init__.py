"""The costs of a cut model: parameters and operations per stage, bytes per device."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jpipe import packing
from jpipe.engine.layout import StateLayout
from jpipe.engine.shapes import local_bytes
from jpipe.engine.state_arrays import OnReplicas
from jpipe.layers.avals import num_bytes as bytes_of
from jpipe.layers.trace import Traced
from jpipe.mesh import DATA, STAGE
from jpipe.options.settings import Settings
from jpipe.packing import Place
from jpipe.program import Program
from jpipe.stages.min_max import min_max
from jpipe.stages.update_groups import Piece
from jpipe.stages.vocabulary import PartedLeaf
from jpipe.vocabulary import VocabularyError

SHARDED_USES = ("weights", "gradients", "optimizer", "activations", "messages")
"""The uses of `Pipeline.shards`, of those of `StateArray`."""


class StageRecord(NamedTuple):
    """One row of `Pipeline.partition`.

    Attributes:
      stage: its number.
      device: the device that runs it, as a position along the axis "stage".
      layers: first layer, and one past the last.
      names: the names of the layers.
      num_parameters: the number of weights, with an equal share of the layers that all stages run together.
      parameter_bytes: their bytes.
      flops: floating-point operations of forward and backward of one microbatch, as XLA counts
        them, with an equal share of the layers that all stages run together.
      sent_bytes: bytes of one microbatch that go from it to later stages.
      seconds: of forward and backward of one microbatch, where `boundaries="placement"` has measured them; None
        elsewhere. Transfers are not counted.
    """

    stage: int
    device: int
    layers: tuple[int, int]
    names: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    flops: float
    sent_bytes: int = 0
    seconds: float | None = None


class Memory(NamedTuple):
    """Bytes per device by use. Every device allocates as much as the one with the largest stages needs.

    Left out are small arrays that do not grow with the model: counters, the random key, and the scalars of the table,
    some hundred bytes for each tick.

    Attributes:
      weights: all live versions, and the weights that `forward_params` and `backward_params`
        compute.
      optimizer: the optimizer's state.
      gradients: the accumulators.
      activations: stashes and messages in flight.
      batch: the minibatch, or the replica's share of it.
      temporaries: bytes that the compiled step needs beside its arguments.
      padding: bytes of weights, optimizer (in host memory too) and gradients that the mean device does not use.
      compression: bytes that compressed gradients keep: errors and the compressor's state.
      host: bytes in the memory of the host, see `jpipe.Offload`. All other fields are of the device's own memory.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    batch: int
    temporaries: int
    padding: int
    compression: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device's own memory, of all uses together."""
        return sum(self) - self.padding - self.host


class ShardRecord(NamedTuple):
    """One row of `Pipeline.shards`: the arrays that each device holds for one use.

    Attributes:
      use: "weights", "gradients", "optimizer", "activations" (kept from a forward to its backward),
        "messages" (between stages) or "minibatch".
      num_bytes: bytes on each device.
      split: axis of the mesh -> the share of the numbers that is split over it, above 0 and up to 1. The
        devices along any other axis hold equal or, for gradients, unlike numbers of the same size.
    """

    use: str
    num_bytes: int
    split: dict[str, float]


def partition(program: Program) -> list[StageRecord]:
    """One record per stage."""
    stages, records = program.stages, []
    placement = program.settings.model.placement
    seconds = placement and placement.seconds or None
    shared = [layer.index for layer in stages.vocabulary.layers]

    def leaves_of(layers: Iterable[int]) -> list:
        return [a for i in layers for a in jax.tree.leaves(stages.layers[i].parameters)]

    def share(layers_sum: float) -> float:
        """Returns a stage's share of costs that all devices share."""
        return layers_sum / stages.num_stages

    tied = {copy for copies in stages.ties for copy in copies[1:]}
    shared_leaves = [
        a for i in shared for j, a in enumerate(jax.tree.leaves(stages.layers[i].parameters)) if (i, j) not in tied
    ]
    for s in range(stages.num_stages):
        layers = stages.layers_of(s)
        leaves = leaves_of(layers)
        num_shared = share(sum(math.prod(a.shape) for a in shared_leaves))
        records.append(
            StageRecord(
                stage=s,
                device=program.placement[s][0],
                layers=(layers.start, layers.stop),
                names=tuple(stages.layers[i].name for i in layers),
                num_parameters=round(sum(math.prod(a.shape) for a in leaves) + num_shared),
                parameter_bytes=round(bytes_of(leaves) + share(bytes_of(shared_leaves))),
                flops=sum(program.traced.flops[i] for i in layers)
                + share(sum(program.traced.flops[i] for i in shared)),
                sent_bytes=_sent_bytes(program.traced, range(*stages.starts[s : s + 2])),
                seconds=None if seconds is None else seconds[s],
            )
        )
    return records


def _sent_bytes(traced: Traced, layers: range) -> int:
    """Bytes of a microbatch that go from a stage to later ones, without compression."""
    if layers.stop == len(traced.layers):
        return 0
    skips = [leaves for first, last, leaves in traced.skips.values() if first in layers and last >= layers.stop]
    return sum(map(bytes_of, [traced.outputs[layers.stop - 1], *skips]))


def shards(program: Program) -> list[ShardRecord]:
    """The arrays that each device holds before a step, and the axes over which they are split."""
    settings, mesh = program.settings, program.settings.mesh
    uses: dict[str, list] = {use: [] for use in SHARDED_USES}
    for array, group in program.engine.layout.arrays():
        if array.use in uses and jax.tree.leaves(group.shapes):
            uses[array.use].append(group)
    records = []
    for use, groups in uses.items():
        leaves = jax.tree.leaves([group.shapes for group in groups])
        numbers = sum(math.prod(a.shape) for a in leaves)
        by_engine = {STAGE}
        if groups and all(group.held is OnReplicas.PART for group in groups):
            by_engine.add(DATA)
        split = {axis: 1.0 for axis in mesh.shape if axis in by_engine and numbers}
        for axis in mesh.shape:
            split_numbers = sum(math.prod(a.shape) for a in leaves if axis in _axes(a))
            if split_numbers:
                split[axis] = split_numbers / numbers
        num_bytes = local_bytes(leaves, settings.platform)
        records.append(ShardRecord(use, num_bytes, split))
    num_bytes = batch_bytes(program)
    split = {DATA: 1.0} if settings.num_replicas > 1 else {}
    return [*records, ShardRecord("minibatch", num_bytes, split)]


def _axes(shape: jax.ShapeDtypeStruct) -> list[str]:
    """The axes that a local shape is split over."""
    sharding: Any = shape.sharding
    return [] if sharding is None else packing.axes(tuple(sharding.spec))


def batch_bytes(program: Program) -> int:
    """Bytes of the share of a replica in a minibatch."""
    settings = program.settings
    leaf_bytes = (packing.array_bytes(a.shape, a.dtype, settings.platform) for a in jax.tree.leaves(program.minibatch))
    return sum(leaf_bytes) // settings.num_replicas


def memory(program: Program) -> Memory:
    """Bytes per device. Compiles the step if it has not been."""
    layout, platform = program.engine.layout, program.settings.platform
    num_bytes = layout.bytes_by_field(platform)
    packed = ["parameters", "read_parameters", "optimizer_state", "gradients"]
    if program.engine.stages.factors.arrays:  # then these are factors
        num_bytes["gradients"] += num_bytes.pop("compression")
        packed.append("gradient_compression")
    host_bytes = layout.host_bytes(platform)
    held = sum(layout[name].num_bytes(platform) + host_bytes.get(name, 0) for name in packed)
    analysis: Any = program.lower().compile().memory_analysis()
    return Memory(
        **num_bytes,
        host=sum(host_bytes.values()),
        batch=batch_bytes(program),
        temporaries=int(analysis.temp_size_in_bytes),
        padding=round(held - _used_bytes(program)),
    )


def _used_bytes(program: Program) -> float:
    """Bytes of the weights, gradients and optimizer's state of layers, on the mean device."""
    engine, settings = program.engine, program.settings
    stages, updates, layout = engine.stages, engine.updates, engine.layout
    accumulators = {**stages.accumulators.arrays, **stages.factors.arrays}
    weights = gradients = 0
    parted = stages.vocabulary.parted
    # Tied parameters of a unit have one place.
    for number, copies in enumerate(engine.lowered.owner_copies):
        runs = stages.layer_runs(number)
        weight_places = {
            (place, row): j in stages.layer_kinds[run.kind].frozen
            for _, run, row in runs
            for j, place in enumerate(run.parameters)
        }
        gradient_places = {(place, row) for _, run, row in runs for place in run.gradient_places}
        num_versions = int(engine.lowered.rows.num_versions[engine.lowered.owner_homes[number]])
        weights += sum(
            (1 if is_frozen else num_versions)
            * _held_bytes(layout, stages.parameters.arrays, place, parted.get(place), len(copies))
            for (place, _), is_frozen in weight_places.items()
        )
        gradients += sum(
            _held_bytes(layout, accumulators, place, parted.get(place), len(copies)) for place, _ in gradient_places
        )
    # On all replicas together.
    state = sum(
        _held_bytes(layout, updates.state.arrays, piece.place, piece.parted, _num_holders(piece, len(copies), settings))
        for update, copies in zip(updates.owner_updates, engine.lowered.owner_copies)
        for pieces in update.state
        for piece in pieces
    )
    total = weights * (1 + len(layout["read_parameters"].shapes)) + gradients + state / settings.num_replicas
    return total / settings.schedule.num_devices


def _held_bytes(layout: StateLayout, dtype_of: Mapping, place: Place, parted: PartedLeaf | None, number: int) -> int:
    """Bytes of `number` copies of a leaf, or of a device's part of it, without the padding at the end of parts.

    Args:
      layout: the layout of the state.
      dtype_of: name of a packed array -> its shape and dtype.
      place: the place of the leaf, or of the part.
      parted: the split of the leaf over devices; None: every device has all of it.
      number: the number of copies; parts are on all devices.
    """
    if parted is not None:
        place, number = dataclasses.replace(place, shape=parted.aval.shape), number // parted.num_parts
    return number * layout.leaf_bytes([place], dtype_of)


def _num_holders(piece: Piece, num_copies: int, settings: Settings) -> int:
    """The number of replicas of a stage that hold a piece of the optimizer's state."""
    return 1 if piece.share is not None else num_copies * settings.num_replicas


def boundaries_by_flops(settings: Settings, traced: Traced, microbatch: Any) -> list[int]:
    """The boundaries that balance the floating-point operations of the stages."""
    inner = inner_layers(settings, traced, microbatch)
    flops = traced.flops[inner.start : inner.stop]
    return [inner.start + b for b in min_max(flops, settings.schedule.num_stages)]


def inner_layers(settings: Settings, traced: Traced, microbatch: Any) -> range:
    """The layers that are cut into stages: all layers except those that all stages run together.

    Raises:
      ValueError: if there are fewer than stages.
    """
    vocabulary = settings.vocabulary(traced, microbatch, None)
    inner, num_stages = vocabulary.inner(len(traced.layers)), settings.schedule.num_stages
    if vocabulary.layers and len(inner) < num_stages:
        raise VocabularyError(
            f"{num_stages} stages need at least as many layers beside those that all stages run together, got "
            f"{len(inner)}. Choose a schedule with fewer stages, or leave out the rule that splits the "
            "vocabulary over `stage`."
        )
    return inner
