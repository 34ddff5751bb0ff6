"""The optimizer on each stage: any Optax chain that treats every layer by itself.

    optimizer ── traced on the model and on each stage ──> flat updates ── unequal? refused
    flat update ── parameter hooks ── independent parts ── joined in vectors, grouped if equal ──> `StageUpdate`

The chain sees a list with one entry per layer of the model, and None for layers of other stages, so
paths and labels are the same at any number of stages. Stages whose updates are the same program
share it.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from jpipe.gradients.sums import FACTORS, PlacedSum
from jpipe.layers.avals import num_bytes, real_dtype
from jpipe.layers.equations import Equations
from jpipe.lowering.scalars import UPDATE
from jpipe.packing import Leaf, Packing, Place
from jpipe.stages.cut import Stages, Vectors
from jpipe.stages.extra_args import PASSES, STALE_PARAMS
from jpipe.stages.flat_update import (
    FlatUpdate,
    check_global_norm,
    check_layers_apart,
    check_state_dtypes,
    flat_hook,
    flat_update,
    with_hooks,
    with_sums,
)
from jpipe.stages.groups import devices_of_owners
from jpipe.stages.offload import NO_OFFLOAD, Offload
from jpipe.stages.optimizer_tree import leaves_seen, seen_by_optimizer
from jpipe.stages.shares import ReplicaCounts
from jpipe.stages.stage_update import MergedUpdate, StageUpdate, merge_updates
from jpipe.stages.update_groups import (
    Grouped,
    PackedDraft,
    group_updates,
)
from jpipe.stages.vector_blocks import (
    PackedLeaf,
    PackedPart,
    in_blocks,
    in_chunks,
    is_elementwise,
    on_shape,
)
from jpipe.stages.vocabulary import PartedLeaf


@dataclasses.dataclass(frozen=True)
class StageUpdates:
    """The updates of all stages.

    Attributes:
      by_operation: name of an operation of the table that updates -> the distinct updates of which a lane runs one:
        "update" -> those of stages, and for each unit of vocabulary layers its operation -> its update.
      program_of_stage: `[S]`, position in `programs`.
      state: the packing of the optimizer's state, one owner for each program and share, then one for each unit.
      norm_dtype: dtype of the gradient's norm, at least float32.
      reads_stale: whether the optimizer reads the weights of `STALE_PARAMS`.
    """

    by_operation: Mapping[str, Sequence[StageUpdate]]
    program_of_stage: Sequence[int]
    state: Packing
    norm_dtype: np.dtype
    reads_stale: bool = False

    @property
    def programs(self) -> Sequence[StageUpdate]:
        """The distinct updates of stages."""
        return self.by_operation[UPDATE]

    @property
    def distinct(self) -> list[StageUpdate]:
        """The distinct updates of stages, then those of units."""
        return [*itertools.chain(*self.by_operation.values())]

    @property
    def owner_updates(self) -> list[StageUpdate]:
        """The update of each of `Stages.owners`."""
        return [*(self.programs[u] for u in self.program_of_stage), *self.distinct[len(self.programs) :]]

    @property
    def together(self) -> list[str]:
        """The operations of units."""
        return [name for name in self.by_operation if name != UPDATE]

    @functools.cached_property
    def merged(self) -> dict[str, list[MergedUpdate]]:
        """The updates of each operation, with loops for several stages at once."""
        return {name: merge_updates(programs) for name, programs in self.by_operation.items()}

    def gradient_arrays(self, operation: str) -> set[str]:
        """The names of the packed arrays of plain sums that an operation reads."""
        return {name for program in self.by_operation[operation] for name in program.gradient_arrays}


class _Placed(NamedTuple):
    """The places of a parameter, and of the sum of its gradient, on a stage.

    Attributes:
      parameter: place of the weight.
      gradient: the sum of its gradient, with its places.
      row: the row at both places.
    """

    parameter: Place
    gradient: PlacedSum
    row: int


def _leaf_copies(stages: Stages, owner: int) -> tuple[tuple[_Placed, ...], ...]:
    """The copies of each leaf of `seen_by_optimizer` on a stage, or on another of `Stages.owners`."""
    places = {
        (layer, j): _Placed(run.parameters[j], gradient, row)
        for layer, run, row in stages.layer_runs(owner)
        for j, gradient in zip(stages.layer_kinds[run.kind].trained, run.gradients, strict=True)
    }
    copies = {leaf: [place] for leaf, place in places.items()}
    for first, *others in stages.ties:
        # Tied weights of a unit have one place.
        other_places = [places[leaf] for leaf in others if leaf in places and places[leaf] != places.get(first)]
        copies.setdefault(first, []).extend(other_places)
        for leaf in others:
            copies.pop(leaf, None)
    return tuple(tuple(copies[leaf]) for leaf in leaves_seen(stages, stages.owners[owner]))


# -- From a flat update to a stage update


def _state_leaves(flat: FlatUpdate, parameters: Sequence, offload: Offload) -> list[Leaf]:
    """The optimizer's state, each leaf split as the parameter that it belongs to.

    Args:
      flat: the update.
      parameters: `(place, row)` of the copies of each parameter leaf.
      offload: the part of the bytes that is in host memory: the state of the largest parameters, so that
        transfers are few. State that belongs to no parameter stays on the device.
    """
    places = {path: copies[0][0] for path, copies in zip(flat.parameters, parameters)}
    is_split = any(place.spec for place in places.values())
    owners = flat.owners()
    on_host = _largest_owners(owners, flat.state_avals, offload.optimizer)
    leaves = []
    num_found: collections.Counter[str | None] = collections.Counter()
    for aval, owner in zip(flat.state_avals, owners):
        spec: tuple = (None,) * len(aval.shape) if is_split else ()
        if owner is not None and is_split:
            spec = places[owner].spec
        vector = 0 if owner is None else num_found[owner]
        num_found[owner] += 1
        leaf = Leaf(
            aval,
            1,
            spec,
            on_host=owner in on_host,
            chunk=offload.chunk,
            vector=vector,
        )
        leaves.append(leaf)
    return leaves


def _largest_owners(owners: Sequence[str | None], avals: Sequence[jax.ShapeDtypeStruct], share: float) -> set[str]:
    """The largest owners that have a share of the bytes of all arrays with an owner."""
    sizes: collections.Counter[str] = collections.Counter()
    for owner, aval in zip(owners, avals, strict=True):
        if owner is not None:
            sizes[owner] += num_bytes([aval])
    wanted, largest, total = share * sum(sizes.values()), set(), 0
    for owner, size in sizes.most_common():
        if total >= wanted:
            break
        largest.add(owner)
        total += size
    return largest


# -- All stages


class _UpdateDraft(NamedTuple):
    """An update of a stage, or of another of `Stages.owners`, before the optimizer's state is packed, which needs all
    stages.

    Attributes:
      equations: the equations of `with_hooks` and `with_sums`.
      param_hooks: pass -> hook.
      parameters: `(place, row)` of the copies of each parameter leaf.
      gradients: `(sum, row)` of the gradient of each parameter leaf.
      replicas: the replicas that share the update.
      reads_stale: whether `equations` reads the weights of `STALE_PARAMS`, which come after the state.
      parted: the split of each parameter leaf over devices; None: it is not split.
      parted_state: the split of each leaf of the optimizer's state over devices.
      state_leaves: leaves of the optimizer's state.
    """

    equations: Equations
    param_hooks: Mapping[str, Callable]
    parameters: Sequence
    gradients: Sequence[tuple[PlacedSum, int]]
    replicas: ReplicaCounts
    reads_stale: bool
    parted: Sequence[PartedLeaf | None]
    parted_state: Sequence[PartedLeaf | None]
    state_leaves: Sequence[Leaf] = ()


def _draft(
    stages: Stages,
    owner: int,
    optimizer: optax.GradientTransformationExtraArgs,
    flat: FlatUpdate,
    hooks: Mapping[str, Callable],
    replicas: ReplicaCounts,
) -> _UpdateDraft:
    """The update of one of `Stages.owners`, without leaves of the state.

    The optimizer sees whole layers, also where a device has parts of them: its update may depend on their shapes.

    Args:
      stages: the model.
      owner: position in `Stages.owners`.
      optimizer: any Optax chain.
      flat: the optimizer on the layers of the owner, flat.
      hooks: see `make_updates`.
      replicas: the replicas that share the update.
    """
    check_state_dtypes(flat)
    tree = seen_by_optimizer(stages, stages.owners[owner], [layer.parameters for layer in stages.layers])
    flat_hooks = {name: flat_hook(name, hook, optimizer, tree) for name, hook in hooks.items()}
    placed = _leaf_copies(stages, owner)
    copies = tuple(tuple((copy.parameter, copy.row) for copy in leaf_copies) for leaf_copies in placed)
    gradients = tuple((first.gradient, first.row) for first, *_ in placed)
    equations = with_sums(with_hooks(flat, flat_hooks), [placed.sum for placed, _ in gradients])
    parted = [stages.vocabulary.parted.get(first.parameter) for first, *_ in placed]
    parted_of = dict(zip(flat.parameters, parted, strict=True))
    state_owners = flat.owners() if any(parted) else [None] * len(flat.state)
    parted_state = [None if path is None else parted_of[path] for path in state_owners]
    return _UpdateDraft(equations, flat_hooks, copies, gradients, replicas, flat.reads_stale, parted, parted_state)


def _in_parts(draft: _UpdateDraft, state: Sequence[Place], devices: Sequence[int]) -> PackedDraft:
    """Cuts an update on packed arrays into parts that can each run alone.

    Args:
      draft: the update.
      state: the place of each leaf of the optimizer's state if nobody shares it.
      devices: the device of each copy of each stage that has this update.
    """
    equations = draft.equations
    state_leaves = [
        PackedLeaf("optimizer_state", [(place, 0)], leaf) for place, leaf in zip(state, draft.parted_state, strict=True)
    ]
    weights = [
        PackedLeaf("parameters", copies, leaf) for copies, leaf in zip(draft.parameters, draft.parted, strict=True)
    ]
    gradients = [
        PackedLeaf(placed.sum.group, [(place, row)], leaf)
        for (placed, row), leaf in zip(draft.gradients, draft.parted, strict=True)
        for place in placed.places
    ]
    hooked = [weight._replace(arrays=name) for name in draft.param_hooks for weight in weights]
    stale = [weight._replace(arrays=STALE_PARAMS) for weight in weights]
    inputs = weights + gradients + state_leaves + stale * draft.reads_stale
    outputs = weights + state_leaves + hooked
    # Every part may read scalars, constants of the optimizer, and extra arguments.
    shapes = {v.aval.shape for v in equations.inputs[: len(weights)]}
    constants = {
        v
        for v, after in zip(
            equations.inputs[len(weights) + len(gradients) :][: len(state_leaves)],
            equations.outputs[len(weights) :],
        )
        if v is after and v.aval.shape not in shapes
    }
    common = [
        i
        for i, v in enumerate(equations.inputs)
        if (v.aval.size == 1 and not _is_factor(inputs[i : i + 1])) or v in constants or i >= len(inputs)
    ]
    parts = [
        _on_parts(
            PackedPart(
                part.equations,
                [inputs[i] for i in part.inputs[: len(part.inputs) - len(common)]],
                [outputs[i] for i in part.outputs],
            )
        )
        for part in equations.parts(common)
    ]
    common_inputs = [inputs[i] for i in common if i < len(inputs)]
    return PackedDraft(parts, common_inputs, state, draft.replicas, devices)


def _in_blocks(
    drafts: Sequence[PackedDraft],
    vectors: Vectors,
    whole: Mapping[tuple[str, str], int] | None = None,
) -> list[PackedDraft]:
    """The updates of all stages, with vectors cut into blocks and leaves in host memory into chunks; `whole` as in
    `in_blocks`.
    """
    # Replicas that share an update cut each block in their own way, and so do not overlap blocks.
    alone = all(draft.replicas.number == 1 for draft in drafts)
    equal = vectors.equal_blocks and alone
    blocks = in_blocks(
        [d.parts for d in drafts],
        vectors.update_block,
        equal=equal,
        whole=whole if alone else None,
    )
    return [
        draft._replace(parts=in_chunks(parts) if draft.replicas.number == 1 else parts)
        for draft, parts in zip(drafts, blocks, strict=True)
    ]


def _is_factor(leaf: Sequence[PackedLeaf]) -> bool:
    return any(a.arrays == FACTORS for a in leaf)


def make_updates(
    stages: Stages,
    optimizer: optax.GradientTransformation,
    hooks: Mapping[str, Callable] | None = None,
    replicas: Sequence[ReplicaCounts] | None = None,
    axis_sizes: Mapping[str, int] | None = None,
    offload: Offload = NO_OFFLOAD,
    devices: Sequence[Sequence[int]] | None = None,
    one_row: bool = False,
) -> StageUpdates:
    """Traces the optimizer on every stage.

    Args:
      stages: the model, cut.
      optimizer: any Optax chain.
      hooks: pass of `PASSES` -> function of trees that gives the weights of the pass, see
        `StageUpdate.param_hooks`.
      replicas: the replicas that share the update of each stage; None: every replica updates all weights.
      axis_sizes: sizes of the axes of the mesh that leaves may be split over.
      offload: the part of the optimizer's state in host memory.
      devices: the devices of the copies of each stage; None: every stage is on a device of its own.
      one_row: whether a device has one version of the weights of one stage.

    Returns:
      The updates of all stages.

    Raises:
      ValueError: if the update of a stage's layers depends on layers of other stages, the optimizer
        asks for other arguments than `EXTRA_ARGS`, its state holds anything but numbers, or a hook
        returns other shapes than it gets.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    parameters = [layer.parameters for layer in stages.layers]
    tree = seen_by_optimizer(stages, range(len(stages.layers)), parameters)
    norm_dtype = real_dtype(tree)
    whole = flat_update(optimizer, tree, norm_dtype, "the model")
    units, alone = stages.vocabulary.units, ReplicaCounts(1, 1)
    names = [*(f"stage {s}" for s in range(stages.num_stages)), *(f"the {unit.name}" for unit in units)]
    flat_of = functools.partial(flat_update, optimizer, norm_dtype=norm_dtype, reads_stale=whole.reads_stale)
    flats = [
        flat_of(seen_by_optimizer(stages, layers, parameters), where=f"{name} by itself")
        for name, layers in zip(names, stages.owners, strict=True)
    ]
    if stages.num_stages > 1:
        check_layers_apart(whole, flats)
    check_global_norm(optimizer, tree, norm_dtype, whole)

    drafts: dict[tuple, _UpdateDraft] = {}
    program_of_stage = []
    for s, flat in enumerate(flats[: stages.num_stages]):
        draft = _draft(stages, s, optimizer, flat, hooks or {}, alone if replicas is None else replicas[s])
        key = stages.program_of_stage[s], draft.parameters, draft.equations.text(), draft.replicas
        if key not in drafts:
            drafts[key] = draft._replace(state_leaves=_state_leaves(flat, draft.parameters, offload))
        program_of_stage.append(list(drafts).index(key))
    devices_of = devices_of_owners(program_of_stage, devices)
    whole_state = Packing.of(
        [d.state_leaves for d in drafts.values()],
        stages.vectors.weights,
        devices_of,
        tight=True,
    )
    sizes = None
    if one_row and stages.vectors.whole and not whole.reads_stale:
        sizes = _sizes_of_vectors(stages, whole_state)
    updates_of = functools.partial(_stage_updates, vectors=stages.vectors, axis_sizes=axis_sizes or {})
    stage_updates, packing = updates_of([*drafts.values()], whole_state, devices_of, sizes=sizes)
    by_operation, packings = {UPDATE: stage_updates}, []
    for owner, unit in enumerate(units, stages.num_stages):
        draft = _draft(stages, owner, optimizer, flats[owner], hooks or {}, alone)
        state = Packing.of([_state_of_parts(flats[owner], draft)]).named(unit.name)
        by_operation[unit.update], unit_packing = updates_of([draft], state, [[0]])
        packings.append(unit_packing)
    return StageUpdates(by_operation, program_of_stage, packing.beside(packings), norm_dtype, whole.reads_stale)


def _sizes_of_vectors(stages: Stages, state: Packing) -> dict[tuple[str, str], int]:
    """Size of each vector that an update reads or writes, by `(arrays, name)`."""
    packings = {"parameters": stages.parameters, "optimizer_state": state}
    packings |= {"gradients": stages.accumulators} | dict.fromkeys(PASSES, stages.parameters)
    return {
        (arrays, name): a.shape[0]
        for arrays, pack in packings.items()
        for name, a in pack.arrays.items()
        if len(a.shape) == 1
    }


def _stage_updates(
    drafts: Sequence[_UpdateDraft],
    state: Packing,
    devices: Sequence[Sequence[int]],
    vectors: Vectors,
    axis_sizes: Mapping[str, int],
    sizes: Mapping[tuple[str, str], int] | None = None,
) -> tuple[list[StageUpdate], Packing]:
    """The updates of some drafts, and the packing of their state.

    Args:
      drafts: the updates.
      state: the packing of the state if nobody shares it, one owner for each draft.
      devices: the device of each copy of each stage that has the update, for each draft.
      vectors: the choice of leaves in vectors.
      axis_sizes: see `make_updates`.
      sizes: the sizes of vectors that are changed at once, see `_sizes_of_vectors`.
    """
    in_parts = [
        _in_parts(draft, places, copy_devices)
        for draft, places, copy_devices in zip(drafts, state.places, devices, strict=True)
    ]
    grouped, packing = group_updates(_in_blocks(in_parts, vectors, sizes), state, axis_sizes, vectors.weights)
    return [_stage_update(draft, groups) for draft, groups in zip(drafts, grouped, strict=True)], packing


def _stage_update(draft: _UpdateDraft, grouped: Grouped) -> StageUpdate:
    pieces = [
        [dataclasses.replace(piece, parted=leaf) for piece in leaf_pieces]
        for leaf_pieces, leaf in zip(grouped.pieces, draft.parted_state, strict=True)
    ]
    return StageUpdate(
        grouped.groups,
        grouped.common,
        draft.param_hooks,
        draft.parameters,
        draft.gradients,
        pieces,
        draft.replicas,
    )


# -- Vocabulary layers


def _state_of_parts(flat: FlatUpdate, draft: _UpdateDraft) -> list[Leaf]:
    """The optimizer's state of a unit: a device's parts, and all leaves that belong to no parameter.

    Replicas along "data" all update the same.
    """
    return [
        Leaf(aval) if leaf is None else Leaf(leaf.part_like(aval.dtype), spec=leaf.spec)
        for leaf, aval in zip(draft.parted_state, flat.state_avals, strict=True)
    ]


def _on_parts(part: PackedPart) -> PackedPart:
    """A part of an update for the parts of parameters if it works element by element; else for whole parameters."""
    ways = {leaf.parted for leaf in part.leaves}
    leaf = next(iter(ways), None)
    if len(ways) > 1 or leaf is None or not is_elementwise(part):
        return part

    def as_stored(leaves: Sequence[PackedLeaf]) -> list[PackedLeaf]:
        return [leaf._replace(parted=None) for leaf in leaves]

    run = on_shape(part, leaf.part.shape)
    return PackedPart(run, as_stored(part.inputs), as_stored(part.outputs))
