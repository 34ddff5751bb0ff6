"""The optimizer on each stage: any Optax chain that treats every layer by itself.

    optimizer ── traced on the model and on each stage ──> flat updates ── unequal? refused
    flat update ── parameter hooks ── independent parts ── joined in vectors, grouped if equal ──> `StageUpdate`

The chain sees a list with one entry per layer of the model, and None for layers of other stages, so
paths and labels are the same at any number of stages. Stages whose updates are the same program
share it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from jpipe.layers.equations import Equations
from jpipe.packing import Leaf, Packing, Place
from jpipe.stages.cut import Stages
from jpipe.stages.extra_args import EXTRA_ARGS, PASSES, read_delays
from jpipe.stages.flat_update import (
    FlatUpdate,
    check_global_norm,
    check_layers_apart,
    check_state_dtypes,
    flat_hook,
    flat_update,
    norm_dtype_of,
    with_hooks,
)
from jpipe.stages.vector_blocks import PackedLeaf, PackedPart, in_blocks

__all__ = [
    "EXTRA_ARGS",
    "PASSES",
    "LeafSlots",
    "StageUpdate",
    "StageUpdates",
    "UpdateGroup",
    "make_updates",
    "read_delays",
    "stage_tree",
]


class LeafSlots(NamedTuple):
    """Where the parts of a group have one of their inputs or outputs.

    Attributes:
      arrays: "parameters", "gradients", "optimizer_state", or a pass whose weights a hook gives.
      copies: for each copy of the leaf (several if tied) its place, and int32 `[parts]`, the first
        index of each part's leaf in that array.
    """

    arrays: str
    copies: Sequence[tuple[Place, np.ndarray]]


class UpdateGroup(NamedTuple):
    """Parts of an update that are one program on different leaves.

    Attributes:
      run: `(*inputs, *shared, *extra) -> outputs`.
      inputs: where the inputs are.
      outputs: where the outputs go.
      num_parts: how many parts there are.
    """

    run: Equations
    inputs: Sequence[LeafSlots]
    outputs: Sequence[LeafSlots]
    num_parts: int


@dataclasses.dataclass(frozen=True)
class StageUpdate:
    """One program that updates a stage.

    Parts run one after the other, and each reads and writes leaves of its own. For most optimizers
    a part is one weight or a block of a vector, so an update needs temporary memory for that only.

    Attributes:
      groups: the program, in groups of equal parts.
      shared: inputs of every part: scalars among parameters, gradients and state. They are followed
        by the values of `EXTRA_ARGS`, and with hooks by the delays of `PASSES`.
      param_hooks: pass -> the function `(parameters, optimizer_state, delay) -> parameters`, of
        flat lists.
      parameters: for each parameter leaf, `(place, row)` of all its copies on the stage; several if
        tied.
      state: the place of each leaf of the optimizer's state.
    """

    groups: Sequence[UpdateGroup]
    shared: Sequence[LeafSlots]
    param_hooks: Mapping[str, Callable]
    parameters: Sequence[Sequence[tuple[Place, int]]]
    state: Sequence[Place]


@dataclasses.dataclass(frozen=True)
class StageUpdates:
    """The updates of all stages.

    Attributes:
      programs: distinct updates.
      program_of_stage: `[S]`, position in `programs`.
      state: how the optimizer's state is packed, one owner per program.
      norm_dtype: dtype of the gradient's norm, at least float32.
    """

    programs: Sequence[StageUpdate]
    program_of_stage: Sequence[int]
    state: Packing
    norm_dtype: np.dtype


# -- What the optimizer sees of a stage


def stage_tree(stages: Stages, stage: int, per_layer: Sequence) -> list:
    """What the optimizer sees on a stage: `per_layer`, with None for layers of other stages.

    A tied weight appears once, in the first of its layers.
    """
    return _seen(stages, stages.layers_of(stage), per_layer)


def _seen(stages: Stages, layers: Sequence[int], per_layer: Sequence) -> list:
    """`per_layer` with None for layers outside of `layers`, and for copies of tied weights."""
    tied_copies = {copy for copies in stages.ties for copy in copies[1:]}
    trees: list = [None] * len(stages.layers)
    for i in layers:
        leaves, tree = jax.tree.flatten(per_layer[i])
        kept = [None if (i, j) in tied_copies else a for j, a in enumerate(leaves)]
        trees[i] = tree.unflatten(kept)
    return trees


def _leaf_copies(
    stages: Stages, stage: int
) -> tuple[tuple[tuple[Place, int], ...], ...]:
    """For each leaf of `stage_tree`, `(place, row)` of its copies on the stage."""
    places = {
        (layer, j): (place, row)
        for layer, run, row in stages.layer_runs(stage)
        for j, place in enumerate(run.parameters)
    }
    copies = {leaf: [place] for leaf, place in places.items()}
    for first, *others in stages.ties:
        on_stage = [places[leaf] for leaf in others if leaf in places]
        copies.setdefault(first, []).extend(on_stage)
        for leaf in others:
            copies.pop(leaf, None)
    return tuple(tuple(copies[leaf]) for leaf in places if leaf in copies)


# -- From a flat update to a stage update


def _state_leaves(flat: FlatUpdate, parameters: Sequence) -> list[Leaf]:
    """The optimizer's state, each leaf split as the parameter that it belongs to.

    A state leaf belongs to the parameter whose path is the end of its own path, if both have the
    same shape. `optax.tree_map_params` cannot be used: it calls `optimizer.init` on a placeholder
    without layers, and functions that label parameters by path fail on that.
    """
    owners = {path: copies[0][0] for path, copies in zip(flat.parameters, parameters)}
    if not any(place.spec for place in owners.values()):
        return [Leaf(aval) for aval in flat.state_avals]

    def spec(path: str, shape: tuple) -> tuple:
        owner = next((owners[p] for p in owners if path.endswith(p)), None)
        if owner is not None and owner.shape == shape:
            return owner.spec
        return (None,) * len(shape)

    return [
        Leaf(aval, 1, spec(path, tuple(aval.shape)))
        for path, aval in zip(flat.state, flat.state_avals, strict=True)
    ]


def _stage_update(
    equations: Equations,
    param_hooks: Mapping[str, Callable],
    parameters: Sequence,
    state: Sequence[Place],
) -> StageUpdate:
    """The update `equations` on packed arrays.

    Args:
      equations: as `with_hooks` returns them.
      param_hooks: pass -> hook.
      parameters: for each parameter leaf, `(place, row)` of its copies.
      state: for each leaf of the optimizer's state, its place.
    """
    state_leaves = [PackedLeaf("optimizer_state", [(place, 0)]) for place in state]
    weights = [PackedLeaf("parameters", copies) for copies in parameters]
    gradients = [PackedLeaf("gradients", copies[:1]) for copies in parameters]
    hooked = [PackedLeaf(name, copies) for name in param_hooks for copies in parameters]
    inputs, outputs = (
        weights + gradients + state_leaves,
        weights + state_leaves + hooked,
    )
    # Every part may read scalars and extra arguments.
    common = [
        i
        for i, v in enumerate(equations.inputs)
        if v.aval.size == 1 or i >= len(inputs)
    ]
    parts = [
        PackedPart(
            part.equations,
            [inputs[i] for i in part.inputs[: len(part.inputs) - len(common)]],
            [outputs[i] for i in part.outputs],
        )
        for part in equations.parts(common)
    ]
    groups = _grouped(in_blocks(parts))
    shared = [_slots([inputs[i]]) for i in common if i < len(inputs)]
    return StageUpdate(groups, shared, param_hooks, parameters, state)


def _grouped(parts: Sequence[PackedPart]) -> list[UpdateGroup]:
    """Groups parts that are one program on leaves of the same arrays."""
    alike: dict[tuple, list[PackedPart]] = {}
    for part in parts:
        alike.setdefault((part.equations.text(), part.layout()), []).append(part)
    return [
        UpdateGroup(
            run=members[0].equations,
            inputs=[_slots(leaves) for leaves in zip(*(p.inputs for p in members))],
            outputs=[_slots(leaves) for leaves in zip(*(p.outputs for p in members))],
            num_parts=len(members),
        )
        for members in alike.values()
    ]


def _slots(leaves: Sequence[PackedLeaf]) -> LeafSlots:
    """Where a group's parts have one input or output; `leaves` has one leaf per part."""
    first = leaves[0]
    copies = []
    for c, (place, _) in enumerate(first.copies):
        starts = [leaf.starts()[c] for leaf in leaves]
        copies.append((place, np.array(starts, np.int32)))
    return LeafSlots(first.arrays, copies)


# -- All stages


class _Draft(NamedTuple):
    """An update of a stage before the optimizer's state is packed, which needs all stages."""

    equations: Equations
    param_hooks: Mapping[str, Callable]
    parameters: Sequence
    state_leaves: Sequence[Leaf]


def make_updates(
    stages: Stages,
    optimizer: optax.GradientTransformation,
    hooks: Mapping[str, Callable] | None = None,
) -> StageUpdates:
    """Traces the optimizer on every stage.

    Args:
      stages: the model, cut.
      optimizer: any Optax chain.
      hooks: of `PASSES`: functions of trees that give the weights of the pass, see
        `StageUpdate.param_hooks`.

    Returns:
      The updates of all stages.

    Raises:
      ValueError: if the update of a stage's layers depends on layers of other stages, the optimizer
        asks for other arguments than `EXTRA_ARGS`, its state holds anything but numbers, or a hook
        returns other shapes than it gets.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    parameters = [layer.parameters for layer in stages.layers]
    tree = _seen(stages, range(len(stages.layers)), parameters)
    norm_dtype = norm_dtype_of(tree)
    whole = flat_update(optimizer, tree, norm_dtype, "the model")
    trees = [stage_tree(stages, s, parameters) for s in range(stages.num_stages)]
    on_stages = [
        flat_update(optimizer, tree, norm_dtype, f"stage {s} by itself")
        for s, tree in enumerate(trees)
    ]
    if stages.num_stages > 1:
        check_layers_apart(whole, on_stages)
    check_global_norm(optimizer, tree, norm_dtype, whole)

    drafts: dict[tuple, _Draft] = {}
    program_of_stage = []
    for s, (flat, tree) in enumerate(zip(on_stages, trees)):
        check_state_dtypes(flat)
        flat_hooks = {
            name: flat_hook(name, hook, optimizer, tree)
            for name, hook in (hooks or {}).items()
        }
        equations, copies = with_hooks(flat, flat_hooks), _leaf_copies(stages, s)
        key = stages.program_of_stage[s], copies, equations.text()
        if key not in drafts:
            state_leaves = _state_leaves(flat, copies)
            drafts[key] = _Draft(equations, flat_hooks, copies, state_leaves)
        program_of_stage.append(list(drafts).index(key))
    packing = Packing.of(
        [draft.state_leaves for draft in drafts.values()],
        num_stages=[program_of_stage.count(u) for u in range(len(drafts))],
    )
    programs = [
        _stage_update(draft.equations, draft.param_hooks, draft.parameters, places)
        for draft, places in zip(drafts.values(), packing.places)
    ]
    return StageUpdates(programs, program_of_stage, packing, norm_dtype)
