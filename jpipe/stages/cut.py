"""Cuts traced layers into stages: stage programs and packed parameters.

    layers ── traced ──> kinds ── boundaries ──> stages ── equal lists of kinds ──> programs

Consecutive layers of one kind in a stage are one *run*, a loop over rows of the packed arrays. Stages with the same list
of kinds share a *program*, whatever the length of their runs, so a trunk of equal layers compiles once.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jpipe.layers.backward import LayerProgram
from jpipe.layers.equations import Equations
from jpipe.layers.layer import Layer
from jpipe.layers.trace import Mutable, Traced
from jpipe.packing import Leaf, Packing
from jpipe.solvers import min_max
from jpipe.stages.messages import Portal, find_portals, pack_messages, stage_of_layer


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind in a program.

    Attributes:
      kind: position in `Stages.kinds`.
      longest: the most layers that a stage of the program has here.
      stash, pop: `(name, leaves)` of the skips that start and end here; a run with any is one layer.
      parameters, state, input_stash, weight_stash, crossing: places of one layer's leaves; leaf i of a place is
        layer i's.
    """

    kind: int
    longest: int
    stash: tuple[tuple[str, tuple], ...]
    pop: tuple[tuple[str, tuple], ...]
    parameters: tuple = ()
    state: tuple = ()
    input_stash: tuple = ()
    weight_stash: tuple = ()
    crossing: tuple = ()


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """What the stages with one list of kinds run.

    Attributes:
      runs: in order.
      stages: the stages that run it.
      loss_stash: places of the loss's stash, if the last stage is among them.
    """

    runs: tuple[LayerRun, ...]
    stages: tuple[int, ...]
    loss_stash: tuple = ()


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut into stages, for one microbatch shape.

    Attributes:
      layers: the layers.
      kinds: `LayerProgram` of each kind; kind_of_layer: which one a layer is.
      mutable: `Mutable` of each kind.
      loss: the program of the loss; loss_weight: the weight of a microbatch: see `Traced`.
      outputs: abstract values and tree structure of the model's outputs.
      inputs: abstract microbatch of `batch["inputs"]`, as a list of leaves.
      starts: first layer of each stage, and the number of layers at the end.
      programs: the programs; program_of_stage: which one a stage runs.
      lengths: `[S][runs]`: how many layers a stage has in each run of its program.
      parameters, state, input_stash, weight_stash, crossing: how programs' leaves are packed.
      activations, gradients: how the messages between stages are packed; owner s is the message from stage s
        to stage s + 1, and its gradient.
      portals: the ways of skips between stages.
      ties: tied weights, each as `(layer, leaf)` pairs; the first is the one the optimizer knows.
    """

    layers: Sequence[Layer]
    kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    mutable: Sequence[Mutable]
    loss: LayerProgram | None
    loss_weight: Equations | None
    inputs: Sequence[jax.ShapeDtypeStruct]
    outputs: tuple[tuple, Any]
    starts: Sequence[int]
    programs: Sequence[StageProgram]
    program_of_stage: Sequence[int]
    lengths: Sequence[Sequence[int]]
    parameters: Packing
    state: Packing
    input_stash: Packing
    weight_stash: Packing
    crossing: Packing
    activations: Packing
    gradients: Packing
    portals: Sequence[Portal] = ()
    ties: Sequence[Sequence[tuple[int, int]]] = ()

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    def stage_of(self, layer: int) -> int:
        """The stage of a layer."""
        return stage_of_layer(self.starts, layer)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.starts[stage], self.starts[stage + 1])

    def layer_runs(self, stage: int) -> list[tuple[int, LayerRun, int]]:
        """`(layer, run, row)` for each layer of a stage: its leaves are rows `row` of the run's places."""
        runs = self.programs[self.program_of_stage[stage]].runs
        rows = [(run, i) for run, n in zip(runs, self.lengths[stage]) for i in range(n)]
        return [
            (layer, *row)
            for layer, row in zip(self.layers_of(stage), rows, strict=True)
        ]


BALANCES = ("flops", "time", "memory")


def check_boundaries(
    boundaries: Sequence[int] | str | None, num_layers: int, num_stages: int
) -> list[int] | None:
    """`boundaries` as a list of starts, one a stage, and the number of layers; None for one of `BALANCES`."""
    if num_stages > num_layers:
        raise ValueError(
            f"a schedule of {num_stages} stages needs at least as many layers, got {num_layers}. "
            f"Use `num_stages={num_layers}` or fewer, or split the layers more finely."
        )
    if boundaries is None or (isinstance(boundaries, str) and boundaries in BALANCES):
        return None
    want = "the layer index at which each stage after the first begins"
    if isinstance(boundaries, str) or not hasattr(boundaries, "__iter__"):
        boundaries_are_indices = False
    else:
        boundaries = list(boundaries)
        boundaries_are_indices = all(hasattr(b, "__index__") for b in boundaries)
    if not boundaries_are_indices:
        raise ValueError(
            f"`boundaries` must be a list of whole numbers ({want}), one of {', '.join(map(repr, BALANCES))} to balance "
            f"by that, or None to balance by FLOPs, got {boundaries!r}."
        )
    starts = [0, *(int(b) for b in boundaries), num_layers]
    if len(starts) != num_stages + 1:
        raise ValueError(
            f"`boundaries` must hold {num_stages - 1} numbers for {num_stages} stages ({want}), got {list(boundaries)}."
        )
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        if start >= stop:
            raise ValueError(
                f"`boundaries` must rise within 1..{num_layers - 1} ({want}), got {list(boundaries)}: "
                f"stage {s} would hold layers {start}..{stop - 1}, which is none. Give every stage at least one layer."
            )
    return starts


class Groups(NamedTuple):
    """Stages by the kinds of layers they run, one after the other: those with equal lists share a program.

    Attributes:
      signatures: of each program, the kinds, equal neighbours once.
      program_of_stage: `[S]`; stages_of: of each program, the stages that run it.
      lengths: `[S][runs]`, how many equal neighbours each kind stands for.
      longest: `[programs][runs]`, the most of them in any stage.
    """

    signatures: list[tuple]
    program_of_stage: list[int]
    stages_of: list[tuple[int, ...]]
    lengths: list[tuple[int, ...]]
    longest: list[tuple[int, ...]]

    def pack(
        self, leaves_of: Callable[[Any], Iterable[Leaf]], last: Sequence[Leaf] = ()
    ) -> Packing:
        """Packs what layers have of one sort, such as their parameters.

        Args:
          leaves_of: the leaves of a kind of layer.
          last: what the last stage has beside them.
        """
        owners = [
            [
                leaf._replace(count=n)
                for kind, n in zip(signature, longest, strict=True)
                for leaf in leaves_of(kind)
            ]
            for signature, longest in zip(self.signatures, self.longest, strict=True)
        ]
        owners[self.program_of_stage[-1]] += last
        return Packing.of(owners, num_stages=[len(mine) for mine in self.stages_of])


def group(kinds: Sequence, starts: Sequence[int]) -> Groups:
    """Groups the stages of layers of these kinds, which begin at `starts`; the last is the number of layers."""
    signatures, lengths, program_of_stage = [], [], []
    for start, stop in itertools.pairwise(starts):
        runs = [(k, len(list(g))) for k, g in itertools.groupby(kinds[start:stop])]
        signature = tuple(k for k, _ in runs)
        if signature not in signatures:
            signatures.append(signature)
        program_of_stage.append(signatures.index(signature))
        lengths.append(tuple(n for _, n in runs))
    stages_of = [
        tuple(s for s, q in enumerate(program_of_stage) if q == p)
        for p in range(len(signatures))
    ]
    longest = [
        tuple(max(lengths[s][r] for s in stages_of[p]) for r in range(len(sig)))
        for p, sig in enumerate(signatures)
    ]
    return Groups(signatures, program_of_stage, stages_of, lengths, longest)


def cut(
    traced: Traced,
    starts: list[int] | None,
    num_stages: int,
    ties: Sequence[Sequence[tuple[int, int]]] = (),
) -> Stages:
    """Cuts traced layers into stages; `starts=None` balances by FLOPs."""
    layers = traced.layers
    if starts is None:
        starts = [0, *min_max(traced.flops, num_stages), len(layers)]
    kinds = traced.kinds
    shared = [
        (k, layer.stash, layer.pop) for k, layer in zip(traced.kind_of_layer, layers)
    ]
    groups = group(shared, starts)
    signatures, stages_of, longest = groups.signatures, groups.stages_of, groups.longest
    # What a layer keeps, by the ring or array it is kept in: one kind's leaves.
    leaves_of: dict[str, Callable] = {
        "parameters": lambda k: kinds[k].parameters,
        "state": lambda k: traced.mutable[k].leaves,
        "input_stash": lambda k: [kinds[k].stash[i] for i in kinds[k].input_stash],
        "weight_stash": lambda k: [kinds[k].stash[i] for i in kinds[k].weight_stash],
        "crossing": lambda k: kinds[k].crossing,
    }

    specs_of: dict[str, Callable] = {
        "parameters": lambda k: traced.specs[k],
        "input_stash": lambda k: [
            traced.stash_specs[k][i] for i in kinds[k].input_stash
        ],
        "weight_stash": lambda k: [
            traced.stash_specs[k][i] for i in kinds[k].weight_stash
        ],
    }

    def packed(name: str) -> Packing:
        def leaves(shared: tuple) -> list[Leaf]:
            k, *_ = shared
            avals = leaves_of[name](k)
            specs = specs_of[name](k) if name in specs_of else [()] * len(avals)
            return [Leaf(a, spec=spec) for a, spec in zip(avals, specs, strict=True)]

        loss = traced.loss.stash if name == "input_stash" and traced.loss else ()
        return groups.pack(leaves, [traced.whole(a) for a in loss])

    packings = {name: packed(name) for name in leaves_of}
    programs = []
    for p, signature in enumerate(signatures):
        left = {name: iter(packing.places[p]) for name, packing in packings.items()}
        runs = []
        for (k, stash, pop), n in zip(signature, longest[p]):
            places = {
                name: tuple(itertools.islice(left[name], len(leaves(k))))
                for name, leaves in leaves_of.items()
            }
            skips = [
                tuple((name, traced.skips[name][2]) for name in names)
                for names in (stash, pop)
            ]
            runs.append(LayerRun(k, n, *skips, **places))
        programs.append(
            StageProgram(tuple(runs), stages_of[p], tuple(left["input_stash"]))
        )

    outputs = [traced.outputs[stop - 1] for stop in starts[1:-1]]
    messages = [[traced.whole(a) for a in leaves] for leaves in outputs]
    activations, gradients = pack_messages(messages)
    return Stages(
        layers=layers,
        kinds=kinds,
        kind_of_layer=traced.kind_of_layer,
        mutable=traced.mutable,
        loss=traced.loss,
        loss_weight=traced.loss_weight,
        inputs=traced.inputs,
        outputs=(traced.outputs[-1], traced.output_tree),
        starts=starts,
        programs=programs,
        program_of_stage=groups.program_of_stage,
        lengths=groups.lengths,
        **packings,
        activations=activations,
        gradients=gradients,
        ties=ties,
        portals=find_portals(traced.skips, starts, traced.whole),
    )
