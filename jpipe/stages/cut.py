"""Cuts traced layers into stages: stage programs and packed parameters.

    layers ── traced ──> kinds ── boundaries ──> stages ── equal lists of kinds ──> programs

Consecutive layers of one kind in a stage are one *run*: a loop over rows of the packed arrays.
Stages with the same list of kinds share a *program*, even if their runs have different lengths, so
a trunk of equal layers compiles once.

Letters: S stages.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from jpipe.gradients.sums import (
    AS_PARAMETERS,
    FACTORS,
    SUMS,
    GradientSum,
    GradientSums,
    PlacedSum,
    places_of,
)
from jpipe.layers.backward import LayerProgram
from jpipe.layers.layer import Layer
from jpipe.layers.sharding import ValueSplit
from jpipe.layers.state_update import StateUpdate
from jpipe.layers.trace import Traced, TrainingTrace
from jpipe.lowering.target import CPU, Target
from jpipe.packing import CHUNK, Leaf, Packing, Place
from jpipe.stages.boundaries import check_inner
from jpipe.stages.codecs import NO_COMPRESSION, LeafCodec, MessageCompression, codecs_of
from jpipe.stages.groups import Groups, Signature, devices_of_use, group, pack_weights
from jpipe.stages.layer_leaves import (
    LEAVES_OF,
    NUMBERS_OF,
    largest_on_host,
    layer_leaves,
    numbers_of_use,
    to_host,
    with_device_dim,
)
from jpipe.stages.messages import MessageParts, Portal, find_portals, pack_messages, stage_of_layer
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
      messages: `occupancy` for the skips from one stage to another.
      update_block: elements of a vector that an update changes at once. It needs temporary memory for as many of
        each array that it reads and writes.
      equal_blocks: whether all stages have blocks of one size, see `jpipe.stages.vector_blocks.in_blocks`.
      whole: whether an update changes all of a vector at once that it reads and writes in place.
    """

    weights: float = 0.5
    stashes: float = 0.5
    messages: float = 0.5
    update_block: int = CHUNK
    equal_blocks: bool = True
    whole: bool = False


_FEW = Vectors(
    weights=math.inf,
    stashes=0.75,
    messages=math.inf,
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
      messages: the packings of messages; owner s is the message from stage s to stage s + 1.
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
    messages: MessageParts[Packing]
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

    def hold(self, primitives: Collection[str]) -> bool:
        """Returns whether the forward of any layer has an equation of these primitives."""
        return any(kind.forward_equations.holds(primitives) for kind in self.layer_kinds)

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
    starts = starts or [0, *min_max(traced.flops, num_stages), len(layers)]
    signature_of_layer = [Signature(k, layer.stash, layer.pop) for k, layer in zip(traced.kind_of_layer, layers)]
    inner = vocabulary_layers.inner(len(layers))
    check_inner(starts, inner)
    firsts = [inner.start, *starts[1:-1], inner.stop]
    indices = () if trained is None else _indices(trained, len(layers))
    groups = group(signature_of_layer, firsts, target.ends_apart, indices)
    weights_on_host = largest_on_host(traced, inner, offload.weights)
    vectors = _FEW if target.few_arrays else Vectors()

    def leaves_of(name: str, signature: Signature) -> list[Leaf]:
        leaves, k = layer_leaves(traced, name, signature.kind), signature.kind
        if name == "statistics":
            leaves = [with_device_dim(leaf, devices) for leaf in leaves]
        if name in NUMBERS_OF:
            leaves = to_host(leaves, numbers_of_use(traced, name, k), weights_on_host, offload)
        return leaves

    weights = [functools.partial(leaves_of, name) for name in ("parameters", "frozen")]
    versions = num_versions or [1] * num_stages
    options: dict[str, Any] = dict(tight=True, occupancy=vectors.weights)
    packings = {"parameters": pack_weights(groups, weights[0], weights[1], devices, versions, hooked=hooked, **options)}
    num_leaves = {name: len(leaves) for name, (_, _, leaves) in traced.skips.items()}
    shared = SharedStashes(groups, lambda signature: traced.layer_kinds[signature.kind].values_of_table, num_leaves)
    loss = traced.loss_stash if isinstance(traced, TrainingTrace) and vocabulary_layers.head is None else ()
    for name in filter(lambda name: name not in NUMBERS_OF, LEAVES_OF):
        packings[name] = groups.pack(
            functools.partial(leaves_of, name),
            last=[*map(traced.of_microbatch, loss)] if name == "input_stash" else (),
            devices=devices_of_use(name, devices),
            arranged=functools.partial(shared.written, name),
            occupancy=vectors.weights if name in ("state", "statistics") else vectors.stashes,
        )
    if trained is not None:
        packings |= _packed_as_in(trained, groups, packings)
    sums = _sums_of_kinds(traced, inner, ties, gradient_sums, offload)
    packings |= _pack_sums(groups, sums, devices, vectors)
    programs = [_stage_program(traced, groups, packings, sums, shared, p) for p in range(len(groups.signatures))]
    units = [unit.packing for unit in vocabulary_layers.units]
    packings["parameters"] = packings["parameters"].beside(units)
    packings["accumulators"] = packings["accumulators"].beside(map(gradient_sums.packing_of, units))
    codecs = _codecs_of_messages(traced, starts, compression)
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
        messages=pack_messages(codecs),
        values=traced.values,
        ties=ties,
        portals=find_portals(traced.skips, starts, traced.of_microbatch, compression, vectors.messages),
        vocabulary=vocabulary_layers,
        gradient_sums=gradient_sums,
    )


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


def _sums_of_kinds(
    traced: Traced,
    inner: range,
    ties: Sequence[Sequence[tuple[int, int]]],
    gradient_sums: GradientSums,
    offload: Offload,
) -> list[tuple[GradientSum, ...]]:
    """The sums of the gradients of each kind of layers. `inner` are the layers that stages have."""
    tied = {(traced.kind_of_layer[layer], j) for leaves in ties if len(leaves) > 1 for layer, j in leaves}
    on_host = largest_on_host(traced, inner, offload.gradients, lambda kind: kind.trained)
    return [
        gradient_sums.for_layer(
            kind,
            to_host(layer_leaves(traced, "parameters", k), numbers_of_use(traced, "parameters", k), on_host, offload),
            [n for n, j in enumerate(kind.trained) if (k, j) in tied],
        )
        for k, kind in enumerate(traced.layer_kinds)
    ]


def _codecs_of_messages(traced: Traced, starts: Sequence[int], compression: MessageCompression) -> list:
    """The codecs of the outputs of each stage but the last."""
    return [
        codecs_of(
            [traced.of_microbatch(a) for a in traced.outputs[stop - 1]],
            compression,
            f"the message from stage {s} to stage {s + 1}",
        )
        for s, stop in enumerate(starts[1:-1])
    ]


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
            for name, leaves_of in LEAVES_OF.items()
            if name not in stash_places
        }
        run_places |= {ring: next(of_runs) for ring, of_runs in stash_places.items()}
        weight_places = {
            j: place
            for use, numbers in NUMBERS_OF.items()
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
