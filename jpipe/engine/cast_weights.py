"""Weights in the form that layers compute with, made once for all microbatches between two updates.

A layer casts its weights wherever it reads them: in the forward and in the backward of every microbatch. Some do so
because of `compute_dtype`, others by themselves, as most modules with a `dtype` do. On GPUs the casts are kernels of
their own, which read four bytes of each weight and write two. XLA for TPUs casts all weights of a stage at the start of
its forward and of its backward. So a pass casts all these weights when it begins, and those of a stage again after its
update, if a later tick reads them. The copies are temporaries of the step.

Where layers are unrolled, each weight that most stages have at the same indices of an array gets a copy of its own: XLA
would first slice a weight out of a copy of all, for each product with a bias. Each small weight of any stage has a
copy, too, if its layers know its row. The small weights of an array are read by one kernel for all of their copies, and
a few others cast them.

Where each row of the weights, of a stage or of a version, is read in branches of its own, the copies of each row are
apart too. XLA would else slice them.

A weight whose dims a layer reads in another order, as cuDNN reads those of convolutions, has a copy in this order, cast
or not. XLA would else slice it out of its vector and transpose it, in each pass. Copies of unlike stages are side by
side on every device, so they may not take more than `MOST` times the bytes of one stage's.

The weights that a forward or a backward reads first have copies that are whole along the axis "fsdp". XLA gathers those
of other layers while the layer before computes, but moves no gather into the branch before.
"""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays, Written
from jpipe.engine.context import TrainingDevice
from jpipe.engine.lanes import run_lanes
from jpipe.engine.spec import PassSpec
from jpipe.layers.avals import is_narrower
from jpipe.lowering.target import Target
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import FSDP
from jpipe.packing import Part, Place

SMALL = 2**14
"""The most numbers of a weight that is read and cast together with others."""

MOST = 2
"""The most bytes of copies in another order or split, in those that the stage with most of them reads."""

Record = TypeVar("Record", bound=TickArrays)


def with_cast_weights(spec: PassSpec, arrays: Record) -> Record:
    """The arrays at the start of a pass, with all weights cast, unless layers cast them wherever they read them."""
    if not spec.lowered.target.casts_once:
        return arrays
    sources = {"constants": arrays.constants, **_sources(arrays)}
    return arrays.replace(cast_weights=_cast(spec, sources))


def recasts(spec: PassSpec) -> bool:
    """Returns whether later ticks of a pass read weights that an update has changed, and read them cast."""
    return spec.lowered.target.casts_once and not spec.schedule.synchronous


def recast_weights(device: TrainingDevice, scalars: TickScalars, arrays: TickArrays) -> TickArrays:
    """Casts the weights that the updates of a tick have changed, if `recasts`."""
    spec = device.spec
    if not recasts(spec):
        return arrays
    sources = _sources(arrays)
    if spec.ties or spec.schedule.has_copies:  # weights of other lanes have changed too
        return arrays.replace(cast_weights={**arrays.cast_weights, **_cast(spec, sources)})

    def recast_lane(lane: LaneScalars, _: object, num_updates: jax.Array | int, written: Written) -> Written:
        lead, cast = device.lead("parameters", lane.row), written.cast_weights

        def recast_array(use: str, name: str, parts: Mapping[Part, np.dtype]) -> dict[str, jax.Array]:
            (number,), num_apart = lead(name), _num_rows_apart(spec, name)
            row = lax.dynamic_index_in_dim(sources[use][name], number, allow_negative_indices=False)
            if num_apart > 1:
                new: dict[str, jax.Array] = {}
                for r in range(num_apart):
                    old = {part: cast[use][part.row_name(r)] for part in parts}
                    kept = _Kept(old, (num_updates == 0) | (number != r))
                    new |= {part.row_name(r): copy for part, copy in _copies(row, parts, kept).items()}
                return new
            old = {part: cast[use][part.name] for part in parts}
            old_rows = {
                part: lax.dynamic_index_in_dim(copy, number, allow_negative_indices=False) for part, copy in old.items()
            }
            return {
                part.name: lax.dynamic_update_slice_in_dim(old[part], copy, number, 0, allow_negative_indices=False)
                for part, copy in _copies(row, parts, _Kept(old_rows, num_updates == 0)).items()
            }

        recast: dict[str, dict[str, jax.Array]] = {}
        for use, parts_of_arrays in _parts(spec, sources).items():
            recast[use] = {}
            for name, parts in parts_of_arrays.items():
                recast[use] |= recast_array(use, name, parts)
        return written.replace(cast_weights={**cast, **recast})

    return run_lanes(device, scalars, "cast", ["cast_weights"], recast_lane, arrays)


class WeightReader(NamedTuple):
    """The weights that a forward or a backward reads.

    Attributes:
      arrays: arrays with the weights, as they are stored.
      copies: name of an array -> its parts that have copies -> the copy.
      rows_apart: the names of those arrays whose copies are of one row alone.
    """

    arrays: Packed
    copies: Mapping[str, Mapping[Part, jax.Array]]
    rows_apart: Collection[str] = ()

    @classmethod
    def of(cls, spec: PassSpec, read: TickArrays, weight_pass: str, row: int = 0) -> "WeightReader":
        """The weights for a pass, "forward" or "backward".

        Args:
          spec: the pass.
          read: the arrays.
          weight_pass: its name.
          row: the row of the weights, if a branch is for this one alone.
        """
        newest = weight_pass if weight_pass in read.read_parameters else "parameters"
        sources = {"constants": read.constants, newest: _sources(read)[newest]}
        copies: dict[str, dict[Part, jax.Array]] = {}
        cast = {use: source for use, source in sources.items() if use in read.cast_weights}
        rows_apart = [name for source in cast.values() for name in source if _num_rows_apart(spec, name) > 1]
        for use, parts_of_arrays in _parts(spec, cast).items():
            for array, parts in parts_of_arrays.items():
                number = row if array in rows_apart else 0
                copies[array] = {part: read.cast_weights[use][part.row_name(number)] for part in parts}
        return cls({**sources["constants"], **sources[newest]}, copies, rows_apart)

    def copied_alone(self, place: Place, i: jax.Array | int) -> Part | None:
        """The part that is the weight of layer i at a place; None if it has no copy of its own."""
        if not isinstance(i, int):
            return None
        leaf, parts = Part.of_leaf(place, i), self.copies.get(place.array, {})
        return next((part for part in (leaf, leaf.as_stored) if part in parts), None)

    def read(self, place: Place, lead: packing.Lead, i: jax.Array | int = 0) -> jax.Array:
        """The weight of layer i at a place, in the dtype that it is stored in.

        A layer casts it back to the dtype of a copy, and XLA removes both casts.
        """
        parts = self.copies.get(place.array, {})
        part = self.copied_alone(place, i) or next((part for part in parts if part.holds(place, i)), None)
        if part is None:
            return packing.read(self.arrays, place, lead, i)
        there = dataclasses.replace(place, base=place.base - part.start, spec=part.spec or place.spec)
        row = [0] if place.array in self.rows_apart else lead
        value = packing.read({place.array: parts[part]}, there, row, i).astype(self.arrays[place.array].dtype)
        return part.restored(value[None])[0]


def _sources(arrays: TickArrays) -> Mapping[str, Packed]:
    """The arrays with weights that change, by their use: the newest ones, and those of parameter hooks by pass."""
    return {"parameters": arrays.parameters, **arrays.read_parameters}


def _cast(spec: PassSpec, sources: Mapping[str, Packed]) -> Mapping[str, Packed]:
    """The copies of weights that layers read cast to fewer bytes, in another order or gathered, by their use."""
    copies: dict[str, dict[str, jax.Array]] = {}
    for use, parts_of_arrays in _parts(spec, sources).items():
        copies[use] = {}
        for name, parts in parts_of_arrays.items():
            array, number = sources[use][name], _num_rows_apart(spec, name)
            for r, row in enumerate(jnp.split(array, number) if number > 1 else [array]):
                copies[use] |= {part.row_name(r): copy for part, copy in _copies(row, parts).items()}
    return copies


class _Kept(NamedTuple):
    """The copies that some rows have, and whether they keep them."""

    copies: Mapping[Part, jax.Array]
    condition: jax.Array | bool

    def or_new(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """What the rows have instead of new values."""
        return jnp.where(self.condition, old, new)


def _copies(rows: jax.Array, parts: Mapping[Part, np.dtype], kept: _Kept | None = None) -> dict[Part, jax.Array]:
    """The copies of parts of an array, in some of its rows."""
    small: dict[Part, tuple[jax.Array, np.dtype]] = {}
    copies: dict[Part, jax.Array] = {}
    for part, dtype in parts.items():
        block = part.of(rows)
        if rows.ndim == 2 and part.size <= SMALL:  # of a vector, which no axis splits
            # XLA would choose for each copy in a kernel of its own after the cast.
            if kept is not None:
                block = kept.or_new(part.restored(kept.copies[part]).astype(block.dtype), block)
            small[part] = block, dtype
        else:
            copy = part.copy(rows, dtype)
            copies[part] = copy if kept is None else kept.or_new(kept.copies[part], copy)
    cast = zip(small, cast_together([*small.values()]), strict=True)
    return {**copies, **{part: part.in_order(value) for part, value in cast}}


def cast_together(values: Sequence[tuple[jax.Array, np.dtype]]) -> list[jax.Array]:
    """Values of one dtype, each cast to another.

    XLA for GPUs joins casts of one size to one kernel if they read the result of another kernel, but not if they read
    an argument of a branch or of the program. So one kernel copies all values, and a few others cast them.
    """
    if len(values) < 2:
        return [value.astype(dtype) for value, dtype in values]
    # Else XLA may split small values over axes of the mesh, and exchange them in branches that not all devices enter.
    flat = packing.split_as((None,), jnp.concatenate([value.reshape(-1) for value, _ in values]))
    parts = jnp.split(lax.optimization_barrier(flat), np.cumsum([value.size for value, _ in values])[:-1])
    cast = [part.astype(dtype) for part, (_, dtype) in zip(parts, values, strict=True)]
    return [part.reshape(value.shape) for part, (value, _) in zip(lax.optimization_barrier(cast), values, strict=True)]


def _num_rows_apart(spec: PassSpec, name: str) -> int:
    """The number of rows of an array whose copies lie apart; 1: all rows are in one copy."""
    rows = spec.array_rows["parameters"]
    return rows.num_rows if spec.rows_apart and rows.has_all(name) else 1


def _knows_row(spec: PassSpec, name: str) -> bool:
    """Whether the row of the copies of an array that a layer reads is known when a pass is compiled."""
    return spec.array_rows["parameters"].number(name) == 1 or _num_rows_apart(spec, name) > 1


def _parts(spec: PassSpec, sources: Mapping[str, Packed]) -> dict[str, dict[str, dict[Part, np.dtype]]]:
    """The parts that have copies, with the dtypes of these, by the use of their array and its name."""
    parts = parts_with_copies(spec) if sources else {}
    return {
        use: {name: parts[name] for name, a in source.items() if not packing.is_on_host(a) and parts.get(name)}
        for use, source in sources.items()
    }


class _Weight(NamedTuple):
    """A weight of a program.

    Attributes:
      part: where it lies.
      dtype: the dtype that its layer reads it in.
      program: the number of its program; vocabulary layers come after all programs.
      num_stages: the number of stages of the program.
      alone: whether it may have a copy of its own.
      size: how many numbers it has.
      is_small: whether it is read and cast together with others.
    """

    part: Part
    dtype: np.dtype
    program: int
    num_stages: int
    alone: bool
    size: int
    is_small: bool


def parts_with_copies(spec: PassSpec) -> dict[str, dict[Part, np.dtype]]:
    """Name of an array -> the parts of it that have copies, with the dtypes of these.

    First come those in another order or split, then small weights, which may overlap. All weights in another part are
    read in one dtype, of fewer bytes than that of the array.
    """
    weights, unrolled = list(_weights(spec)), not spec.lowered.target.loops_in_branches
    changed = _changed(weights) if unrolled else []
    arrays: dict[str, list[_Weight]] = {}
    for weight in weights:
        arrays.setdefault(weight.part.array, []).append(weight)
    parts: dict[str, dict[Part, np.dtype]] = {}
    for name, members in arrays.items():
        stored = spec.stages.parameters.arrays[name].dtype
        copies = {part: _read_dtype(members, part.covers, stored) or stored for part in changed if part.array == name}
        copies |= _small_copies(members, copies, stored) if unrolled else {}
        others = [weight for weight in members if not _is_covered(weight, copies)]
        others = [weight._replace(part=weight.part.as_stored) for weight in others]
        if any(is_narrower(weight.dtype, stored) for weight in others):
            alone = _without_overlap(others) if unrolled else []
            for part in alone or [Part(name, 0, spec.stages.parameters.arrays[name].shape[0])]:
                dtype = _read_dtype(others, part.overlaps, stored)
                copies |= {} if dtype is None else {part: dtype}
        parts[name] = copies
    return parts


def _weights(spec: PassSpec) -> Iterator[_Weight]:
    """The weights of all programs and vocabulary layers, but for those in host memory."""
    stages = spec.stages
    runs = [(program.runs, len(program.stages)) for program in stages.programs]
    runs += [
        ((run,), 1) for owner in range(stages.num_stages, len(stages.owners)) for _, run, _ in stages.layer_runs(owner)
    ]
    for number, (runs_of_program, num_stages) in enumerate(runs):
        gathered = _gathered_first(spec, number) if number < len(stages.programs) else set()
        for r, run in enumerate(runs_of_program):
            dtypes = stages.layer_kinds[run.kind].read_dtypes
            for (place, dtype), i in itertools.product(zip(run.parameters, dtypes, strict=True), range(run.longest)):
                if place.array and not place.on_host:
                    size = math.prod(place.shape)
                    is_small = size <= SMALL and not any(place.spec)
                    part = _part_of(spec.lowered.target, place, i, (r, i) in gathered)
                    alone = not is_small or _knows_row(spec, place.array)
                    yield _Weight(part, dtype, number, num_stages, alone, size, is_small)


def _part_of(target: Target, place: Place, i: int, is_gathered: bool) -> Part:
    """The part that is leaf i at a place, in the order and the split of its copy."""
    part = Part.of_leaf(place, i) if target.orders_weights else Part.of_leaf(place, i).as_stored
    whole = packing.without(place.spec, FSDP)
    if not (is_gathered and _is_gathered(place)) or (part.order and packing.axes(whole)):
        return part
    return part._replace(spec=whole)


def _gathered_first(spec: PassSpec, number: int) -> set[tuple[int, int]]:
    """`(run, layer)` of those layers of a program whose weights a forward or a backward gathers first."""
    if not spec.lowered.target.gathers_first_once:
        return set()
    program, first = spec.stages.programs[number], set[tuple[int, int]]()
    runs = [r for r, run in enumerate(program.runs) if any(map(_is_gathered, run.parameters))]
    for s in program.stages:
        layers = [(r, i) for r in runs for i in range(spec.stages.lengths[s][r])]
        first.update(layers[:1], layers[-1:])
    return first


def _is_gathered(place: Place) -> bool:
    """Whether a layer gathers its weight at a place along the axis "fsdp"."""
    return FSDP in packing.axes(place.spec) and FSDP not in place.read_in_parts


def _read_dtype(weights: Sequence[_Weight], is_read: Callable[[Part], bool], stored: np.dtype) -> np.dtype | None:
    """The dtype of fewer bytes in which all those weights that are read are; None: there is no such dtype."""
    dtypes = {weight.dtype for weight in weights if is_read(weight.part)}
    return dtypes.pop() if len(dtypes) == 1 and all(is_narrower(dtype, stored) for dtype in dtypes) else None


def _small_copies(weights: Sequence[_Weight], copies: Collection[Part], stored: np.dtype) -> dict[Part, np.dtype]:
    """The parts that are small weights of an array, beside those that have copies.

    All weights that lie in a part are read in one dtype. The shortest parts come first, because a weight is read from
    the first part that holds it.
    """
    small = [w for w in weights if w.is_small and w.alone and not _is_covered(w, copies)]
    small.sort(key=lambda weight: weight.part.start)
    starts = [weight.part.start for weight in small]
    result = {}
    for part in sorted({weight.part.as_stored for weight in small}, key=lambda part: (part.size, part)):
        near = slice(bisect.bisect_left(starts, part.start), bisect.bisect_left(starts, part.stop))
        if (dtype := _read_dtype(small[near], part.covers, stored)) is not None:
            result[part] = dtype
    return result


def _is_covered(weight: _Weight, copies: Collection[Part]) -> bool:
    """Whether a weight lies in a part that has a copy."""
    is_copied_alone = weight.part in copies or weight.part.as_stored in copies  # as most are
    return is_copied_alone or any(part.covers(weight.part) for part in copies)


def _changed(weights: Sequence[_Weight]) -> list[Part]:
    """The parts in another order or split whose copies take no more than `MOST` times the room that any one stage has
    use for.
    """
    readers: dict[Part, set[int]] = {}
    sizes: dict[Part, int] = {}
    for weight in weights:
        if weight.alone and weight.part != weight.part.as_stored:
            readers.setdefault(weight.part, set()).add(weight.program)
            sizes[weight.part] = weight.size
    parts = sorted(readers, key=lambda part: (-len(readers[part]), part))
    room: collections.Counter[int] = collections.Counter()
    for part in parts:
        for number in readers[part]:
            room[number] += sizes[part]
    totals = itertools.accumulate(sizes[part] for part in parts)
    return [part for part, total in zip(parts, totals) if total <= MOST * max(room.values())]


def _without_overlap(weights: Sequence[_Weight]) -> list[Part]:
    """A part for each weight that most stages have there, and one in which all others lie.

    No two parts of weights overlap, so the copies of these take no more memory than one of the array would. Weights
    that are read together are in none.
    """
    counts: collections.Counter[Part] = collections.Counter()
    for weight in weights:
        if weight.alone and not weight.is_small:
            counts[weight.part] += weight.num_stages
    alone: list[Part] = []
    others: list[Part] = []
    for part in sorted(counts, key=lambda part: (-counts[part], part)):
        (others if any(map(part.overlaps, alone)) else alone).append(part)
    rest = [Part(others[0].array, min(p.start for p in others), max(p.stop for p in others))] if others else []
    return sorted(alone) + rest
