"""Cuts traced layers into stages: stage programs and packed parameters.

    layers ── traced ──> kinds ── boundaries ──> stages ── equal lists of kinds ──> programs

Consecutive layers of one kind in a stage are one *run*: a loop over rows of the packed arrays.
Stages with the same list of kinds share a *program*, even if their runs have different lengths, so
a trunk of equal layers compiles once.

Letters: S stages.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jpipe._util.foreign import shown
from jpipe.gradients.sums import (
    AS_PARAMETERS,
    FACTORS,
    SUMS,
    GradientSum,
    GradientSums,
    PlacedSum,
    places_of,
)
from jpipe.layers.avals import is_inexact, num_bytes
from jpipe.layers.backward import LayerProgram
from jpipe.layers.layer import Layer
from jpipe.layers.sharding import ValueSplit, read_in_parts
from jpipe.layers.state_update import StateUpdate
from jpipe.layers.trace import Traced, TrainingTrace
from jpipe.lowering.target import CPU, Target
from jpipe.packing import CHUNK, Leaf, Packing, Place
from jpipe.stages.codecs import NO_COMPRESSION, LeafCodec, MessageCompression, codecs_of
from jpipe.stages.groups import Groups, Signature, devices_of_use, group, pack_weights
from jpipe.stages.messages import Portal, find_portals, pack_messages, stage_of_layer
from jpipe.stages.min_max import min_max
from jpipe.stages.offload import NO_OFFLOAD, Offload
from jpipe.stages.shared_stash import SharedStashes, SharedValue
from jpipe.stages.vocabulary import NO_VOCABULARY, Vocabulary, VocabularyLayer


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind in a program.

    Attributes:
      kind: position in `Stages.layer_kinds`.
      longest: the largest number of layers that a stage of the program has in this run.
      stash: `(name, leaves)` of the skips that start here. A run with skips is one layer.
      pop: `(name, leaves)` of the skips that end here.
      parameters: places of one layer's weights; leaf i of a place belongs to layer i of the run.
      gradients: the sums of the gradients of those that are trained.
      state: places of one layer's mutable state.
      statistics: places of the statistics of a minibatch, kept until the state moves.
      input_stash: places of the stashed values that only the input gradient reads.
      weight_stash: places of the stashed values that the weight gradient reads.
      split_residuals: places of the values that the input gradient computes and the weight gradient reads.
      shared: the values of the stash that are in one place for all layers of the run.
      carry, carry_gradient: places of what goes from a slice of a sequence to the next one, and of the gradient by it.
    """

    kind: int
    longest: int
    stash: tuple[tuple[str, tuple], ...]
    pop: tuple[tuple[str, tuple], ...]
    parameters: tuple = ()
    gradients: tuple[PlacedSum, ...] = ()
    state: tuple = ()
    statistics: tuple = ()
    input_stash: tuple = ()
    weight_stash: tuple = ()
    split_residuals: tuple = ()
    shared: tuple[SharedValue, ...] = ()
    carry: tuple = ()
    carry_gradient: tuple = ()

    @property
    def gradient_places(self) -> list[Place]:
        """Places of the leaves that the gradients are summed in."""
        return places_of(self.gradients)


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """The program of all stages that have one list of kinds.

    Attributes:
      runs: its runs of layers, in order.
      stages: the stages that share it, ascending.
      loss_stash: places of the loss's stash, if the last stage is one of them.
    """

    runs: tuple[LayerRun, ...]
    stages: tuple[int, ...]
    loss_stash: tuple = ()


class Vectors(NamedTuple):
    """The choice of leaves of a stage that lie in vectors, and the update of these vectors.

    Attributes:
      weights: `occupancy` of `Packing.of` for weights, mutable state, and arrays with the shapes of weights:
        gradients, the optimizer's state.
      stashes: `occupancy` for the stash of a microbatch.
      update_block: elements of a vector that an update changes at once. It needs temporary memory for as many of
        each array that it reads and writes.
      equal_blocks: whether all stages have blocks of one size, see `jpipe.stages.vector_blocks.in_blocks`.
      whole: whether an update changes all of a vector at once that it reads and writes in place.
    """

    weights: float = 0.5
    stashes: float = 0.5
    update_block: int = CHUNK
    equal_blocks: bool = True
    whole: bool = False


_FEW = Vectors(
    weights=math.inf,
    stashes=0.75,
    update_block=4 * CHUNK,
    equal_blocks=False,
    whole=True,
)
"""Of platforms with few arrays: a layer writes its leaves at once if they lie in one array. Before JAX 0.12 a branch
has to touch each array that only other branches write, too. But a leaf of a vector is laid out row by row, which costs
a transpose of some activations. On an H100 each kernel of a block of `CHUNK` numbers takes only 1 to 8 us, so a block
has more."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut into stages, for one microbatch shape.

    Attributes:
      layers: the layers.
      layer_kinds: `LayerProgram` of each kind.
      kind_of_layer: position in `layer_kinds` of each layer.
      mutable: `StateUpdate` of each kind.
      inputs: abstract leaves of `batch["inputs"]`, of one microbatch.
      outputs: abstract leaves and tree structure of the model's outputs.
      starts: first layer of each stage, and the number of layers at the end.
      programs: the programs.
      program_of_stage: position in `programs` of the program of each stage.
      lengths: `[S][runs]`: number of layers of a stage in each run of its program.
      parameters: the packing of the weights, see `pack_weights`; one owner per program, then one per unit of
        `vocabulary`.
      accumulators: the packing of the gradients that are summed as they are.
      factors: the packing of the factors of all other gradients.
      state: the packing of mutable state.
      statistics: the packing of the statistics of a minibatch. If stages have copies, each leaf has a
        first axis `[D]` with the part of each device.
      input_stash: the packing of the stashed values that only the input gradient reads.
      weight_stash: the packing of the stashed values that the weight gradient reads.
      split_residuals: the packing of the values that the input gradient computes and the weight gradient reads.
      carry, carry_gradient: the packings of what goes from slice to slice, and of the gradient by it.
      vectors: the leaves that lie in vectors, and the updates of these vectors.
      codecs: `[S - 1]`, the codec of each output leaf of a stage for the next stage.
      activations: the packing of messages; owner s is the message from stage s to stage s + 1.
      gradients: the packing of the gradients of messages.
      portals: the direct messages of skips between stages.
      values: the split of the values between layers over automatic axes of the mesh.
      ties: tied weights, each as `(layer, leaf)` pairs; the optimizer knows the first pair.
      vocabulary: the layers that all stages run together, and that are of no stage.
      gradient_sums: the sums of the gradients.
    """

    layers: Sequence[Layer]
    layer_kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    mutable: Sequence[StateUpdate]
    inputs: Sequence[jax.ShapeDtypeStruct]
    outputs: tuple[tuple, Any]
    starts: Sequence[int]
    programs: Sequence[StageProgram]
    program_of_stage: Sequence[int]
    lengths: Sequence[Sequence[int]]
    parameters: Packing
    accumulators: Packing
    factors: Packing
    state: Packing
    statistics: Packing
    input_stash: Packing
    weight_stash: Packing
    split_residuals: Packing
    carry: Packing
    carry_gradient: Packing
    vectors: Vectors
    codecs: Sequence[tuple[LeafCodec, ...]]
    activations: Packing
    gradients: Packing
    values: ValueSplit
    portals: Sequence[Portal] = ()
    ties: Sequence[Sequence[tuple[int, int]]] = ()
    vocabulary: Vocabulary = NO_VOCABULARY
    gradient_sums: GradientSums = AS_PARAMETERS

    @property
    def num_stages(self) -> int:
        """Number of stages, S."""
        return len(self.starts) - 1

    def stage_of(self, layer: int) -> int:
        """The stage of a layer."""
        return stage_of_layer(self.starts, layer)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage, without vocabulary layers."""
        inner = self.vocabulary.inner(len(self.layers))
        return range(
            max(self.starts[stage], inner.start),
            min(self.starts[stage + 1], inner.stop),
        )

    @property
    def owners(self) -> list[tuple[int, ...]]:
        """The layers that one update changes: those of each stage, then those of each unit of vocabulary layers."""
        layers_of_stages = [tuple(self.layers_of(s)) for s in range(self.num_stages)]
        return layers_of_stages + [unit.indices for unit in self.vocabulary.units]

    def layer_runs(self, owner: int) -> list[tuple[int, LayerRun, int]]:
        """`(layer, run, row)` for each layer of a stage, or of another of `owners`.

        The layer's leaves are in row `row` of the run's places.
        """
        if owner >= self.num_stages:
            layers = self.vocabulary.units[owner - self.num_stages].layers
            return [(layer.index, self._vocabulary_run(layer), 0) for layer in layers]
        runs = self.programs[self.program_of_stage[owner]].runs
        rows = [(run, i) for run, n in zip(runs, self.lengths[owner]) for i in range(n)]
        return [(layer, *row) for layer, row in zip(self.layers_of(owner), rows, strict=True)]

    def _vocabulary_run(self, layer: VocabularyLayer) -> LayerRun:
        """The run of a vocabulary layer."""
        sums = [self.gradient_sums.plain(Leaf(leaf.part)) for leaf in layer.leaves]
        gradients = tuple(
            PlacedSum(gradient_sum, (place,)) for gradient_sum, place in zip(sums, layer.places, strict=True)
        )
        return LayerRun(self.kind_of_layer[layer.index], 1, (), (), parameters=layer.places, gradients=gradients)


BALANCES = ("flops", "time", "memory", "placement")
"""What boundaries can balance between stages."""


def check_boundaries(boundaries: Sequence[int] | str | None, num_layers: int, num_stages: int) -> list[int] | None:
    """Checks `boundaries`. Returns the first layer of each stage, followed by the number of layers.

    Args:
      boundaries: the layer index at which each stage after the first begins, one of `BALANCES`, or
        None.
      num_layers: number of layers.
      num_stages: S.

    Returns:
      The list, or None if the boundaries are to be balanced.

    Raises:
      ValueError: if the boundaries do not cut the layers into stages with at least one layer each.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"a schedule of {num_stages} stages needs at least as many layers, got {num_layers}. "
            f"Use `num_stages={num_layers}` or fewer, or split the layers more finely."
        )
    if boundaries is None or (isinstance(boundaries, str) and boundaries in BALANCES):
        return None
    want = "the layer index at which each stage after the first begins"
    are_indices = not isinstance(boundaries, str) and hasattr(boundaries, "__iter__")
    indices: list = [*boundaries] if are_indices else []
    if not are_indices or not all(hasattr(b, "__index__") for b in indices):
        raise ValueError(
            f"`boundaries` must be a list of whole numbers ({want}), one of {', '.join(map(repr, BALANCES))} to "
            f"balance by that, or None to balance by FLOPs, got {shown(indices or boundaries)}. A whole model also "
            'takes paths of modules, such as ["blocks.4"].'
        )
    starts = [0, *map(int, indices), num_layers]
    if len(starts) != num_stages + 1:
        raise ValueError(
            f"`boundaries` must hold {num_stages - 1} numbers for {num_stages} stages ({want}), got {shown(indices)}."
        )
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        if start >= stop:
            raise ValueError(
                f"`boundaries` must rise within 1..{num_layers - 1} ({want}), got {shown(indices)}: "
                f"stage {s} would hold layers {start}..{stop - 1}, which is none. Give every stage at least one layer."
            )
    return starts


def cut(
    traced: Traced,
    starts: list[int] | None,
    num_stages: int,
    ties: Sequence[Sequence[tuple[int, int]]] = (),
    target: Target = CPU,
    vocabulary_layers: Vocabulary = NO_VOCABULARY,
    compression: MessageCompression = NO_COMPRESSION,
    gradient_sums: GradientSums = AS_PARAMETERS,
    devices: Sequence[Sequence[int]] | None = None,
    offload: Offload = NO_OFFLOAD,
    num_versions: Sequence[int] | None = None,
    hooked: bool = False,
    trained: Stages | None = None,
) -> Stages:
    """Cuts traced layers into stages.

    Args:
      traced: the layers.
      starts: first layer of each stage, and the number of layers at the end; None balances FLOPs.
      num_stages: S.
      ties: see `Stages`.
      target: facts of the platform.
      vocabulary_layers: the layers that all stages run together.
      compression: the compression of messages between stages.
      gradient_sums: the sums of the gradients.
      devices: the devices of the copies of each stage; None: every stage is on a device of its own.
      offload: the part of the weights that is in host memory.
      num_versions: number of versions of the weights of each stage; None: one.
      hooked: see `pack_weights`.
      trained: the same cut of the same layers, traced for training, whose weights and mutable state these stages read
        where they are. The kinds of layers may be others, in evaluation or at other shapes, and so may the runs.

    Raises:
      ValueError: if a message cannot be compressed.
    """
    layers = traced.layers
    if starts is None:
        starts = [0, *min_max(traced.flops, num_stages), len(layers)]
    signature_of_layer = [Signature(k, layer.stash, layer.pop) for k, layer in zip(traced.kind_of_layer, layers)]
    inner = vocabulary_layers.inner(len(layers))
    check_inner(starts, inner)
    firsts = [inner.start, *starts[1:-1], inner.stop]
    indices = () if trained is None else _indices(trained, len(layers))
    groups = group(signature_of_layer, firsts, target.ends_apart, indices)
    weights_on_host = _on_host(traced, inner, offload.weights)
    vectors = _FEW if target.few_arrays else Vectors()

    def leaves_of(name: str, signature: Signature) -> list[Leaf]:
        leaves, k = _leaves(traced, name, signature.kind), signature.kind
        if name == "statistics":
            leaves = [with_device_dim(leaf, devices) for leaf in leaves]
        if name in _NUMBERS_OF:
            leaves = _to_host(leaves, _numbers(traced, name, k), weights_on_host, offload)
        return leaves

    weights = [functools.partial(leaves_of, name) for name in ("parameters", "frozen")]
    versions = num_versions or [1] * num_stages
    options: dict[str, Any] = dict(tight=True, occupancy=vectors.weights)
    packings = {"parameters": pack_weights(groups, weights[0], weights[1], devices, versions, hooked=hooked, **options)}
    num_leaves = {name: len(leaves) for name, (_, _, leaves) in traced.skips.items()}
    shared = SharedStashes(groups, lambda signature: traced.layer_kinds[signature.kind].values_of_table, num_leaves)
    for name in _LEAVES_OF:
        if name in _NUMBERS_OF:
            continue
        loss: tuple = ()
        if name == "input_stash" and vocabulary_layers.head is None:
            loss = traced.loss_stash if isinstance(traced, TrainingTrace) else ()
        packings[name] = groups.pack(
            functools.partial(leaves_of, name),
            last=[traced.of_microbatch(a) for a in loss],
            devices=devices_of_use(name, devices),
            arranged=functools.partial(shared.written, name),
            occupancy=vectors.weights if name in ("state", "statistics") else vectors.stashes,
        )
    if trained is not None:
        packings |= _packed_as_in(trained, groups, packings)
    tied = {(traced.kind_of_layer[layer], j) for leaves in ties if len(leaves) > 1 for layer, j in leaves}
    on_host = _on_host(traced, inner, offload.gradients, lambda kind: kind.trained)
    sums = [
        gradient_sums.for_layer(
            kind,
            _to_host(_leaves(traced, "parameters", k), _numbers(traced, "parameters", k), on_host, offload),
            [n for n, j in enumerate(kind.trained) if (k, j) in tied],
        )
        for k, kind in enumerate(traced.layer_kinds)
    ]
    packings |= _pack_sums(groups, sums, devices, vectors)
    programs = [_stage_program(traced, groups, packings, sums, shared, p) for p in range(len(groups.signatures))]
    units = [unit.packing for unit in vocabulary_layers.units]
    packings["parameters"] = packings["parameters"].beside(units)
    packings["accumulators"] = packings["accumulators"].beside(map(gradient_sums.packing_of, units))
    outputs = [traced.outputs[stop - 1] for stop in starts[1:-1]]
    codecs = [
        codecs_of(
            [traced.of_microbatch(a) for a in leaves],
            compression,
            f"the message from stage {s} to stage {s + 1}",
        )
        for s, leaves in enumerate(outputs)
    ]
    activations, gradients = pack_messages(codecs)
    return Stages(
        layers=layers,
        layer_kinds=traced.layer_kinds,
        kind_of_layer=traced.kind_of_layer,
        mutable=traced.mutable,
        inputs=traced.inputs,
        outputs=(traced.outputs[-1], traced.output_tree),
        starts=starts,
        programs=programs,
        program_of_stage=groups.program_of_stage,
        lengths=groups.lengths,
        **packings,
        vectors=vectors,
        codecs=codecs,
        activations=activations,
        gradients=gradients,
        values=traced.values,
        ties=ties,
        portals=find_portals(traced.skips, starts, traced.of_microbatch, compression),
        vocabulary=vocabulary_layers,
        gradient_sums=gradient_sums,
    )


def check_inner(starts: Sequence[int], inner: range) -> None:
    """Raises `ValueError` if a stage has no layer but those that all stages run.

    Args:
      starts: first layer of each stage, and the number of layers at the end.
      inner: the layers that belong to one stage each.
    """
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        if max(start, inner.start) >= min(stop, inner.stop):
            raise ValueError(
                f"stage {s} would hold layer {start} alone, which is split over all stages. Choose `boundaries` within "
                f"{inner.start + 1}..{inner.stop - 1}, got {list(starts[1:-1])}."
            )


# Use of weights -> the positions among the parameters of a layer.
_NUMBERS_OF: dict[str, Callable[[LayerProgram], tuple[int, ...]]] = {
    "parameters": lambda kind: kind.trained,
    "frozen": lambda kind: kind.frozen,
}
# Use -> abstract leaves of one layer of kind k.
_LEAVES_OF: dict[str, Callable[[Traced, int], Sequence]] = {
    "parameters": lambda traced, k: _weights_of(traced.layer_kinds[k].parameters, traced, "parameters", k),
    "frozen": lambda traced, k: _weights_of(traced.layer_kinds[k].parameters, traced, "frozen", k),
    "state": lambda traced, k: traced.mutable[k].leaves,
    "statistics": lambda traced, k: traced.mutable[k].statistics,
    "input_stash": lambda traced, k: traced.layer_kinds[k].stashed("input_stash"),
    "weight_stash": lambda traced, k: traced.layer_kinds[k].stashed("weight_stash"),
    "split_residuals": lambda traced, k: traced.layer_kinds[k].split_residuals,
    "carry": lambda traced, k: traced.layer_kinds[k].carried,
    "carry_gradient": lambda traced, k: [a for a in traced.layer_kinds[k].carried if is_inexact(a)],
}
# Use -> how each of these leaves is split over automatic axes; without an entry it is not split.
_SPECS_OF: dict[str, Callable[[Traced, int], Sequence]] = {
    "parameters": lambda traced, k: _weights_of(traced.specs[k], traced, "parameters", k),
    "frozen": lambda traced, k: _weights_of(traced.specs[k], traced, "frozen", k),
    "input_stash": lambda traced, k: _stash_specs(traced, k, "input_stash"),
    "weight_stash": lambda traced, k: _stash_specs(traced, k, "weight_stash"),
    "split_residuals": lambda traced, k: _split_residual_specs(traced, k),
    "carry": lambda traced, k: [traced.values.spec(a.shape) for a in traced.layer_kinds[k].carried],
    "carry_gradient": lambda traced, k: [
        traced.values.spec(a.shape) for a in traced.layer_kinds[k].carried if is_inexact(a)
    ],
}


def _weights_of(values: Sequence, traced: Traced, use: str, k: int) -> list:
    """The values of those parameters of a layer of kind k that have a use."""
    return [values[j] for j in _NUMBERS_OF[use](traced.layer_kinds[k])]


def _numbers(traced: Traced, use: str, k: int) -> list[tuple[int, int]]:
    """`(k, position)` of the parameters of a layer of kind k that have a use."""
    return [(k, j) for j in _NUMBERS_OF[use](traced.layer_kinds[k])]


def with_device_dim(leaf: Leaf, devices: Sequence[Sequence[int]] | None) -> Leaf:
    """Gives a leaf of statistics a place for each device, if stages have copies on several.

    Each copy writes at its own place, so that the sum over the copies has the parts of all.
    """
    if devices is None or all(len(copies) == 1 for copies in devices):
        return leaf
    num_devices = 1 + max(itertools.chain(*devices))
    shape = (num_devices, *leaf.aval.shape)
    return leaf._replace(aval=jax.ShapeDtypeStruct(shape, leaf.aval.dtype))


def _stash_specs(traced: Traced, k: int, ring: str) -> list:
    return [traced.kept_specs.stash[k][i] for i in getattr(traced.layer_kinds[k], ring)]


def _split_residual_specs(traced: Traced, k: int) -> list:
    has_any = bool(traced.layer_kinds[k].split_residuals)  # of a table that splits backwards
    return traced.kept_specs.split_residuals[k] if has_any else []


def _leaves(traced: Traced, name: str, k: int) -> list[Leaf]:
    """The leaves of one layer of kind k for one use."""
    avals = _LEAVES_OF[name](traced, k)
    specs = _SPECS_OF[name](traced, k) if name in _SPECS_OF else [()] * len(avals)
    parts: Sequence = [()] * len(avals)
    if name in _NUMBERS_OF:
        parts = _weights_of(read_in_parts(traced.layer_kinds[k]), traced, name, k)
    return [Leaf(a, spec=spec, read_in_parts=axes) for a, spec, axes in zip(avals, specs, parts, strict=True)]


def _on_host(
    traced: Traced,
    layers: range,
    share: float,
    numbers: Callable[[LayerProgram], Iterable[int]] = lambda kind: range(len(kind.parameters)),
) -> set[tuple[int, int]]:
    """`(kind of layer, leaf)` of the weights in host memory: the largest of some numbers that have a share of their
    bytes.
    """
    sizes = {
        (k, j): num_bytes([kind.parameters[j]]) for k, kind in enumerate(traced.layer_kinds) for j in numbers(kind)
    }
    count = collections.Counter(traced.kind_of_layer[i] for i in layers)
    wanted = share * sum(n * count[k] for (k, _), n in sizes.items())
    on_host: set[tuple[int, int]] = set()
    total = 0
    for k, j in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total >= wanted:
            break
        if count[k]:
            on_host.add((k, j))
            total += count[k] * sizes[k, j]
    return on_host


def _to_host(leaves: Sequence[Leaf], names: Sequence, on_host: Container, offload: Offload) -> list[Leaf]:
    """Puts those of the leaves in host memory whose names `on_host` has."""
    return [
        leaf._replace(on_host=True, chunk=offload.chunk) if name in on_host else leaf
        for leaf, name in zip(leaves, names, strict=True)
    ]


_KEPT = ("parameters", "state")
"""The leaves of layers that evaluation reads where training has them."""


def _indices(trained: Stages, num_layers: int) -> list[tuple[int, ...]]:
    """For each layer the indices of its leaves in the arrays of trained stages; `()` for vocabulary layers."""
    indices: list[tuple[int, ...]] = [()] * num_layers
    for s in range(trained.num_stages):
        for layer, run, row in trained.layer_runs(s):
            indices[layer] = tuple(int(place.start(row)) for name in _KEPT for place in getattr(run, name))
    return indices


def _packed_as_in(trained: Stages, groups: Groups, packings: dict[str, Packing]) -> dict[str, Packing]:
    """The packings of weights and mutable state, with each leaf where trained stages have it."""
    places: dict[str, list[tuple[Place, ...]]] = {name: [] for name in _KEPT}
    for (s, *_), longest, steps in zip(groups.stages_of, groups.longest, groups.steps, strict=True):
        program_places: dict[str, list[Place]] = {name: [] for name in (*_KEPT, "frozen")}
        first_of_run = itertools.accumulate(groups.lengths[s], initial=0)
        for first, count, step in zip(first_of_run, longest, steps):
            _, run, row = trained.layer_runs(s)[first]
            distances = iter(step or ())
            for name in _KEPT:
                for j, place in enumerate(getattr(run, name)):
                    base, stride = int(place.start(row)), next(distances, place.stride)
                    use = "frozen" if name == "parameters" and j in trained.layer_kinds[run.kind].frozen else name
                    program_places[use].append(dataclasses.replace(place, base=base, stride=stride, count=count))
        # The frozen weights of all runs come after the trained ones.
        program_places["parameters"] += program_places.pop("frozen")
        for name in _KEPT:
            places[name].append(tuple(program_places[name]))
    return {
        name: dataclasses.replace(getattr(trained, name), places=tuple(places[name]), used_bytes=packing.used_bytes)
        for name, packing in packings.items()
        if name in _KEPT
    }


def _pack_sums(
    groups: Groups,
    sums: Sequence[Sequence[GradientSum]],
    devices: Sequence[Sequence[int]] | None,
    vectors: Vectors,
) -> dict[str, Packing]:
    """Packs the leaves of the sums of gradients. Factors are all in pools."""

    def leaves_of(group: str) -> Callable[[Signature], list[Leaf]]:
        return lambda signature: [
            leaf for gradient_sum in sums[signature.kind] if gradient_sum.group == group for leaf in gradient_sum.leaves
        ]

    return {
        "accumulators": groups.pack(leaves_of(SUMS), devices=devices, tight=True, occupancy=vectors.weights),
        "factors": groups.pack(leaves_of(FACTORS), occupancy=0.0).named(FACTORS),
    }


def _stage_program(
    traced: Traced,
    groups: Groups,
    packings: dict[str, Packing],
    sums: Sequence[Sequence[GradientSum]],
    shared: SharedStashes,
    p: int,
) -> StageProgram:
    """Builds program number p, with the places of its leaves."""
    places = {name: iter(packing.places[p]) for name, packing in packings.items()}
    kinds = [traced.layer_kinds[signature.kind] for signature in groups.signatures[p]]
    stash_places = {
        ring: iter(shared.places(ring, p, [len(kind.stashed(ring)) for kind in kinds], places[ring]))
        for ring in ("input_stash", "weight_stash")
    }
    # The frozen weights of all runs come after the trained ones.
    num_trained = sum(len(kind.trained) for kind in kinds)
    places["frozen"] = itertools.islice(packings["parameters"].places[p], num_trained, None)

    def skips(names: Sequence[str]) -> tuple[tuple[str, tuple], ...]:
        return tuple((name, traced.skips[name][2]) for name in names)

    runs = []
    for r, (signature, longest) in enumerate(zip(groups.signatures[p], groups.longest[p])):
        k = signature.kind
        run_places: dict[str, tuple] = {
            name: tuple(itertools.islice(places[name], len(leaves_of(traced, k))))
            for name, leaves_of in _LEAVES_OF.items()
            if name not in stash_places
        }
        run_places |= {ring: next(of_runs) for ring, of_runs in stash_places.items()}
        weight_places = {
            j: place
            for use, numbers in _NUMBERS_OF.items()
            for j, place in zip(numbers(traced.layer_kinds[k]), run_places.pop(use), strict=True)
        }
        run_places["parameters"] = tuple(weight_places[j] for j in range(len(weight_places)))
        sum_places = {SUMS: places["accumulators"], FACTORS: places["factors"]}
        run_places["gradients"] = tuple(
            PlacedSum(gradient_sum, tuple(itertools.islice(sum_places[gradient_sum.group], len(gradient_sum.leaves))))
            for gradient_sum in sums[k]
        )
        stash, pop = skips(signature.stash), skips(signature.pop)
        runs.append(LayerRun(k, longest, stash, pop, **run_places, shared=shared.values[p][r]))
    # The loss's stash comes after those of the layers.
    return StageProgram(tuple(runs), groups.stages_of[p], tuple(places["input_stash"]))
