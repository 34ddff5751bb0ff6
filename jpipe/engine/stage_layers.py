"""The layers of a stage: loops over them, and the places of their arrays.

The functions on one layer (`write_layer_stash`, `read_layer_stash`, `add_gradients`) take arrays, the
layer's places, leading indices and the row of the layer, and nothing of the engine, so that
measuring can run a layer as the engine does.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from jpipe import packing
from jpipe.engine import carries
from jpipe.engine.arrays import Packed, TickArrays, TickStash, Written
from jpipe.engine.context import StageContext, TrainingStage
from jpipe.engine.guard import guarded
from jpipe.engine.stage_weights import Fetched, StageWeights, gathered_along_fsdp
from jpipe.engine.transport import arrived_skips
from jpipe.gradients import sums
from jpipe.gradients.sums import Microbatch
from jpipe.layers.backward import LayerProgram
from jpipe.layers.model_tree import is_whole
from jpipe.layers.products import Product
from jpipe.layers.state_update import StateUpdate
from jpipe.lowering.rings import STASHES
from jpipe.packing import Lead, Place
from jpipe.stages.cut import LayerRun

LoopState = TypeVar("LoopState")
Rings = Mapping[str, Packed | TickStash]
"""Stashes by the name of their ring."""

SlotOf = Callable[[str], Lead]
"""Ring -> leading indices of a slot."""


def rings_of(*records: TickArrays) -> Rings:
    """The rings of stashes that the records hold, by name."""
    return {name: getattr(record, name) for record in records for name in STASHES if name in record}


def with_rings(written: Written, rings: Rings) -> Written:
    """The record with new values for the rings that it holds."""
    return written.replace(**{n: rings[n] for n in STASHES if n in written})


# -- Loops


def for_each_layer(
    stage: StageContext,
    r: int,
    body: Callable[[Any, Fetched, LoopState], LoopState],
    state: LoopState,
    *,
    fetch: Callable[[Any], Fetched] = lambda i: [],
    backwards: bool = False,
) -> LoopState:
    """Runs `state = body(i, fetch(i), state)` for each layer i of run r of the program.

    Args:
      stage: the stage.
      r: number of the run.
      body: `(i, fetched, state) -> state`.
      state: the state before the first layer.
      fetch: `i -> values` that a layer needs from host memory. In a loop they come while the layer before runs, so the
        last layer stands after the loop: nothing is fetched that no layer reads.
      backwards: whether the last layer comes first.
    """
    lengths = _lengths(stage, r)
    longest = max(lengths)
    if lengths == {1}:
        return body(0, fetch(0), state)
    length = longest if len(lengths) == 1 else stage.scalars.num_layers(r)
    target = stage.spec.lowered.target
    if target.loops_in_branches and not stage.unrolls:

        def number(turn: Any) -> Any:
            return length - 1 - turn if backwards else turn

        first = fetch(number(0))
        if not first:
            turn = lambda t, s: body(number(t), first, s)  # noqa: E731
            return lax.fori_loop(0, length, turn, state)

        def ahead(turn: Any, carry: tuple) -> tuple:
            fetched, state = carry
            following = fetch(number(turn + 1))
            return following, body(number(turn), fetched, state)

        last, state = lax.fori_loop(0, length - 1, ahead, (first, state))
        return body(number(length - 1), last, state)
    # A GPU waits for the host before every turn of a loop inside of a branch, and pairs have no loops.
    for i in reversed(range(longest)) if backwards else range(longest):
        if i < min(lengths):
            state = body(i, fetch(i), state)
        else:
            run = functools.partial(lambda i, state, _: body(i, fetch(i), state), i)
            state = guarded(target, i < length, run, state, None)
    return state


def _lengths(stage: StageContext, r: int) -> set[int]:
    """The numbers of layers that run r has in the stages of the program."""
    return {stage.stages.lengths[s][r] for s in stage.program.stages}


# -- One layer


def write_stash(
    rings: Rings,
    ring: str,
    places: Sequence[Place],
    values: Sequence[jax.Array],
    slot_of: SlotOf,
    i: jax.Array | int = 0,
    joined: bool = False,
) -> Rings:
    """Writes stashed values of layer i into their slot of one ring; for `joined` see `write_all`."""
    if not places:
        return rings
    old = rings[ring]
    if isinstance(old, TickStash):
        added = {(p, i): value for p, value in zip(places, values, strict=True)}
        return {**rings, ring: TickStash(old | added)}
    packed = packing.write_all(old, places, slot_of(ring), values, i, joined=joined)
    return {**rings, ring: packed}


def read_stash(
    rings: Rings,
    ring: str,
    places: Sequence[Place],
    slot_of: SlotOf,
    i: jax.Array | int = 0,
    recomputes: bool = False,
) -> list[jax.Array]:
    """The stashed values of layer i in one ring; for `recomputes` see `LayerProgram`."""
    stash = rings[ring]
    if isinstance(stash, TickStash):
        values = [stash[place, i if place.stride else 0] for place in places]
        # Without a barrier XLA would compute a value of the forward once, and keep it for the backward.
        return lax.optimization_barrier(values) if recomputes else values
    return packing.read_all(stash, places, slot_of(ring), i) if places else []


def write_layer_stash(
    rings: Rings,
    run: LayerRun,
    kind: LayerProgram,
    stash: Sequence[jax.Array],
    slot_of: SlotOf,
    i: jax.Array | int,
    joined: bool = False,
) -> Rings:
    """Writes the stash of layer i into the rings, without shared values; for `joined` see `write_all`."""
    shared = {(v.ring, v.position) for v in run.shared}
    for ring, places, positions in (
        ("input_stash", run.input_stash, kind.input_stash),
        ("weight_stash", run.weight_stash, kind.weight_stash),
    ):
        alone = [n for n, _ in enumerate(places) if (ring, n) not in shared]
        values = [stash[positions[n]] for n in alone]
        rings = write_stash(rings, ring, [places[n] for n in alone], values, slot_of, i, joined)
    return rings


def write_shared_stash(rings: Rings, run: LayerRun, r: int, inputs: Sequence[jax.Array], slot_of: SlotOf) -> Rings:
    """Writes the values that layers of a stage share and run r has first; `inputs` are those of its layers."""
    for value in run.shared:
        if value.writer == (r, value.position):
            place = getattr(run, value.ring)[value.position]
            rings = write_stash(rings, value.ring, [place], [inputs[value.input]], slot_of)
    return rings


def read_layer_stash(
    rings: Rings,
    run: LayerRun,
    kind: LayerProgram,
    slot_of: SlotOf,
    i: jax.Array | int,
    only: str | None = None,
) -> list[jax.Array | None]:
    """The stash of layer i. If `only` is a ring, values in the other ring are None."""
    stash: list[jax.Array | None] = [None] * len(kind.stash)
    for ring, places, positions in (
        ("input_stash", run.input_stash, kind.input_stash),
        ("weight_stash", run.weight_stash, kind.weight_stash),
    ):
        if only in (None, ring):
            values = read_stash(rings, ring, places, slot_of, i, kind.recomputes)
            for j, value in zip(positions, values, strict=True):
                stash[j] = value
    return stash


def add_gradients(
    stage: TrainingStage,
    gradients: Packed,
    run: LayerRun,
    values: Sequence[jax.Array | Product],
    i: jax.Array | int,
    microbatch: Microbatch | None = None,
) -> Packed:
    """Adds the parameter gradients of layer i to the packed sums of a stage; for `microbatch` see `sums.add`.

    A gradient is first a sum over all rows, and then split. Else XLA would gather the activations of all rows to
    compute each part of it.
    """
    column, row = stage.column("gradients"), stage.runtime_index(i)

    def add_plain(arrays: Packed, places: Sequence[Place], values: Sequence[jax.Array]) -> Packed:
        arrays, places, values = stage.spec.sums.added(arrays, places, values, i, stage.branch.position)
        return packing.add_all(arrays, places, column, values, row, joined=stage.joins)

    return sums.add(
        gradients, run.gradients, column, values, row, microbatch, as_stored=gathered_along_fsdp, add_plain=add_plain
    )


def split_leaves(leaves: Sequence, tails: Sequence[Sequence]) -> list[list]:
    """Cuts `leaves` into the leading leaves and one list as long as each of `tails`.

    Example:
      >>> split_leaves([1, 2, 3, 4], ["a", "bc"])
      [[1], [2], [3, 4]]
    """
    parts, end = [], len(leaves)
    for tail in reversed(tails):
        parts.append(list(leaves[end - len(tail) : end]))
        end -= len(tail)
    return [list(leaves[:end]), *reversed(parts)]


# -- The layers of a stage


def _layer_extra(
    stage: StageContext,
    mutable_state: Packed,
    run: LayerRun,
    kind: LayerProgram,
    r: int,
    i: jax.Array | int,
) -> list[jax.Array]:
    """The arguments of layer i beside parameters and inputs: random key, mutable state, number of the slice."""
    key = jax.random.key_data(stage.device.key)
    if kind.reads_extra[0]:
        lane = stage.scalars
        number = 0 if is_whole(stage.spec.stages.layers) else lane.first_layer(r) + i  # see `num_keys`
        key = stage.device.random_key(number, lane.microbatch_number)
        key = jax.random.key_data(key)
    turn = [stage.slice_number] if len(kind.extra) > 1 + len(run.state) else []
    if not run.state:
        return [key, *turn]
    column = stage.column("mutable_state")
    return [key, *packing.read_all(mutable_state, run.state, column, i), *turn]


class _Statistics:
    """Adds the statistics of layers to those of the minibatch.

    They are few numbers. Where the platform joins writes, those of all layers are written at once.

    Args:
      stage: the stage.
      statistics: those of the minibatch so far; None: they are not kept.
    """

    def __init__(self, stage: StageContext, statistics: Packed | None):
        self._stage = stage
        self._row = () if statistics is None else stage.column("statistics")
        self._joined_at = stage.runtime_index(0)
        self._joined: list[tuple[Place, jax.Array]] = []

    def added(self, statistics: Packed, r: int, i: Any, records: Sequence[jax.Array]) -> Packed:
        """The statistics with those of layer i of run r, or as they are until `written`."""
        stage, run = self._stage, self._stage.program.runs[r]
        places: Sequence[Place] = run.statistics
        at = stage.runtime_index(i)
        joins = stage.joins and i < min(_lengths(stage, r))
        if joins:
            places, at = [place.alone(i) for place in places], self._joined_at
        kept = packing.read_all(statistics, places, self._row, at)
        kept = _with_microbatch(stage, stage.stages.mutable[run.kind], kept, records)
        if joins:
            self._joined.extend(zip(places, kept, strict=True))
            return statistics
        return packing.write_all(statistics, places, self._row, kept, at, joined=True)

    def written(self, statistics: Packed | None) -> Packed | None:
        """The statistics with all that was joined."""
        if not self._joined:
            return statistics
        assert statistics is not None
        places, kept = zip(*self._joined)
        return packing.write_all(statistics, places, self._row, kept, self._joined_at, joined=True)


def _with_microbatch(
    stage: StageContext,
    update: StateUpdate,
    kept: list[jax.Array],
    records: Sequence[jax.Array],
) -> list[jax.Array]:
    """Adds one more microbatch to the statistics of a layer."""
    if stage.spec.schedule.has_copies:  # of each device
        at = stage.device.position
        mine = [lax.dynamic_index_in_dim(a, at, keepdims=False) for a in kept]
        new = update.added(mine, records)
        return [lax.dynamic_update_index_in_dim(a, b, at, 0) for a, b in zip(kept, new)]
    return update.added(kept, records)


class LayersResult(NamedTuple):
    """The results of the forward of a stage.

    Attributes:
      outputs: outputs of the last layer, `[microbatch, ...]` each.
      skips: name -> leaves of the skips that leave the stage.
      rings: ring -> stashes, updated; None if nothing is stashed.
      statistics: updated; None if none are kept.
      mutable_state: mutable state, with the moves of every microbatch.
      carry: what layers hand on to the next slice of the sequence; as it was if they do not.
    """

    outputs: list[jax.Array]
    skips: dict[str, list[jax.Array]]
    rings: Rings | None
    statistics: Packed | None
    mutable_state: Packed
    carry: Packed


def run_layers(
    stage: StageContext,
    read: TickArrays,
    x: list[jax.Array],
    *,
    mutable_state: Packed,
    weight_pass: str = "forward",
    rings: Rings | None = None,
    statistics: Packed | None = None,
    moves_state: bool = False,
    carry: Packed | None = None,
    hands_on: bool = False,
) -> LayersResult:
    """Runs the layers of a stage forward.

    A layer writes its stash straight into `rings`, and adds the statistics of batch norms to `statistics`.

    Args:
      stage: the stage.
      read: arrays with weights and inboxes.
      x: inputs of the stage, `[microbatch, ...]` each.
      mutable_state: the layers' mutable state.
      weight_pass: the pass whose weights are read: "forward" or "backward".
      rings: ring -> stashes; None: nothing is stashed.
      statistics: the statistics of the minibatch so far; None: they are not kept.
      moves_state: whether the layers move mutable state.
      carry: what the slice before has handed on; None: microbatches are no slices.
      hands_on: whether the layers hand on to the next slice.
    """
    weights = StageWeights.of(stage, read, weight_pass)
    skips = arrived_skips(stage, read)
    # Loops carry only what they change.
    moving = mutable_state if moves_state else None
    carry = carry or {}
    handing = carry if hands_on else None
    sums = _Statistics(stage, statistics)
    for r, run in enumerate(stage.program.runs):
        kind = stage.stages.layer_kinds[run.kind]
        popped = [leaf for name, _ in run.pop for leaf in skips.pop(name)]
        if rings is not None:
            rings = write_shared_stash(rings, run, r, [*x, *popped], stage.slot)

        def layer(
            i: jax.Array | int,
            fetched: Fetched,
            state: tuple,
            r: int = r,
            run: LayerRun = run,
            kind: LayerProgram = kind,
            popped: list[jax.Array] = popped,
        ) -> tuple:
            x, rings, statistics, moving, handing = state
            parameters = weights.layer_weights(run, i, fetched)
            current = mutable_state if moving is None else moving
            extra = _layer_extra(stage, current, run, kind, r, i)
            inputs = [*x, *popped, *carries.handed_before(stage, carry if handing is None else handing, run, i)]
            if rings is None:
                y, aux = kind.forward(parameters, inputs, extra)
            else:
                y, stash, aux = kind.forward_and_stash(parameters, inputs, extra)
                rings = write_layer_stash(rings, run, kind, stash, stage.slot, i, stage.joins)
            y, handed = split_leaves(y, [kind.carried])
            if handing is not None:
                handing = carries.with_handed(stage, handing, run, i, handed)
            update = stage.stages.mutable[run.kind]
            records, new = aux[: update.num_recorded], aux[update.num_recorded :]
            if statistics is not None and records:
                statistics = sums.added(statistics, r, i, records)
            if moving is not None and update.sequence:
                moved = [run.state[j] for j in update.sequence]
                values = update.sequence_values(extra[1:], new)
                column, at = stage.column("mutable_state"), stage.runtime_index(i)
                moving = packing.write_all(moving, moved, column, values, at, joined=True)
            return stage.stages.values.constrained(y), rings, statistics, moving, handing

        fetch = functools.partial(weights.fetch, run)
        before = x, rings, statistics, moving, handing
        y, rings, statistics, moving, handing = for_each_layer(stage, r, layer, before, fetch=fetch)
        x, *stashed = split_leaves(y, [leaves for _, leaves in run.stash])
        skips |= {name: leaves for (name, _), leaves in zip(run.stash, stashed)}
    moved = mutable_state if moving is None else moving
    return LayersResult(x, skips, rings, sums.written(statistics), moved, carry if handing is None else handing)
