"""The scan over ticks on one device.

A tick runs these steps, in this order:

    load        stashes in host memory -> the device, while it computes
    receive     received messages   -> inbox slots
    cross       outgoing messages of the tick before, between devices that are far -> received messages
    embed       batch, on all devices; for an embedding that all devices share
    pair        a forward and a backward of another microbatch, with layers that communicate: see `jpipe.engine.pairs`
    forward     inbox, batch        -> stashes, loss, outgoing activations
    commit      statistics          -> mutable state; with several columns per stage only
    head        loss, gradients, on all devices; for a head that all devices share
    backward    inbox, stashes      -> gradients, stashes, outgoing gradients
    weight_grad stashes             -> gradients
    embed_backward                  -> gradients, on all devices
    update      gradients           -> parameters, optimizer state
    store       staged stashes      -> host memory; loaded stash -> its slot
    move        outgoing messages   -> received messages, on other devices

A tick leaves out the operations that its phase does not have: see `Lowered.phases`.

A tick writes a ring before it reads the ring, so that XLA updates all buffers in place.

A message between devices that are far (`Schedule.message_ticks`) leaves when the tick after begins, and is received
when that tick has ended: no operation of it waits for the message, and the message waits for none.

Under overlap a channel belongs to one operation. A message of a forward moves while the tick's
backwards run, and is received in the next tick. A message of a backward moves while the next tick's
forwards run, and is received before that tick's backwards. A message that stays on its device does not
move: it is received in the next tick from where it was sent.

*The rule of operations.* An operation gets two records. `written` has the arrays that it writes,
and it returns them. `read` has all other arrays. The two records have no array in common: an
operation that wrote one value of a ring and read another would force XLA to copy the ring.
`TickArrays.split` makes the records, and an access to an array that a record does not hold raises.

A device runs an operation of one lane under a guard, see `jpipe.engine.guard`. JAX's profiler shows
each program of an operation as, for example, "forward/stage1-2".

The buffers live in the donated training state. As temporaries of the step they would be paged in
anew by every step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.engine import spills, vocabulary
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, TickStash, Written
from jpipe.engine.cast_weights import recasts, with_cast_weights
from jpipe.engine.context import (
    Device,
    StageContext,
    TrainingDevice,
    TrainingStage,
)
from jpipe.engine.copies import sum_over_copies
from jpipe.engine.guard import Branch, run_one_of
from jpipe.engine.losses import loss_of
from jpipe.engine.operations import OPERATIONS, PREDICTION, Operation, Stage
from jpipe.engine.pairs import pair
from jpipe.engine.scopes import Scope, lane_scope, ticks_text
from jpipe.engine.shapes import microbatch_shapes
from jpipe.engine.spec import ForwardPass, PassSpec
from jpipe.engine.stage_branches import number_of, position_of
from jpipe.engine.training import TrainingPass
from jpipe.engine.transport import move, put_row, receive
from jpipe.engine.updates import UPDATE_WRITES, update
from jpipe.lowering.lower import TickRange
from jpipe.lowering.tick_scalars import LaneScalars, TickScalars
from jpipe.mesh import row_axes

RESULTS = ("loss", "aux", "count", "skipped", "gradient_norm")
"""Arrays of a training pass that the host reads: see `TickArrays`."""


class PassInputs(NamedTuple):
    """The inputs of a pass over a table: global arrays, or in `shard_map` the parts of a device.

    Attributes:
      kept: arrays by group. In a training they are those of `PipelineState.kept`, in a forward-only table those of
        "parameters", "mutable_state" and "message_compression".
      in_flight: the groups "gradients" and "buffers"; in a forward-only table "buffers" alone.
      counters: "round", int32 `[D]`, number of earlier passes; "started", int32 `[D]`, microbatches before
        round 0; "key", `[D]`, the random key of training.
      num_entered: int32 `[D]`, microbatches that have entered the pipe since round 0, including
        this round's. Cells of microbatches before the first or after the last do nothing.
      batch: tree of `[replicas, N, microbatch, ...]` arrays; None if nothing enters.
      rows: see `PassSpec.place_rows`.
    """

    kept: Mapping[str, Any]
    in_flight: Mapping[str, Any]
    counters: Mapping[str, jax.Array]
    num_entered: jax.Array
    batch: Any
    rows: jax.Array


def training_pass(spec: TrainingPass, inputs: PassInputs) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Runs one pass over the table, on one device. Its results are those of `jpipe.engine.engine.run_training`."""
    device = TrainingDevice.here(spec, inputs.counters, inputs.num_entered)
    buffers = inputs.in_flight["buffers"]
    held = {**inputs.kept, "gradients": inputs.in_flight["gradients"], **buffers}
    # Apart, because XLA may copy an array that the branch of an update passes through.
    constant, parameters = spec.stages.parameters.constant, held["parameters"]
    held["constants"] = {name: a for name, a in parameters.items() if name in constant}
    held["parameters"] = {name: a for name, a in parameters.items() if name not in constant}
    held["op_count"] = jnp.zeros((), jnp.int32)
    batch = _local_batch(spec, inputs.batch)
    weights = _take_weights(device, held.get("minibatch_weights"), batch)
    if "minibatch_weights" in held:
        held["minibatch_weights"] = weights
    batch, batches = _take_batch(device, held.get("batches"), batch)
    if batches is not None:
        held["batches"] = batches
    arrays = TickArrays(**held, **_empty_results(spec), **loss_of(spec).arrays(spec), cast_weights={})
    arrays = with_cast_weights(spec, arrays)
    device = device.with_weights(weights).with_batch(batch)
    arrays = _scan(device, inputs.rows[0], arrays)
    arrays = arrays.replace(parameters={name: {**arrays.constants, **arrays.parameters}[name] for name in parameters})
    return (
        {name: getattr(arrays, name) for name in inputs.kept},
        {
            "gradients": arrays.gradients,
            "buffers": {name: getattr(arrays, name) for name in buffers},
        },
        {name: getattr(arrays, name) for name in RESULTS},
    )


def forward_pass(spec: ForwardPass, inputs: PassInputs) -> list[jax.Array]:
    """Runs one pass over a forward-only table, on one device: see `jpipe.engine.engine.run_forward`."""
    device = Device.here(spec, inputs.counters, inputs.num_entered)
    held = {"constants": {}, "read_parameters": {}, **inputs.kept, **inputs.in_flight["buffers"]}
    held["op_count"] = jnp.zeros((), jnp.int32)
    batch = _local_batch(spec, inputs.batch)
    batch, batches = _take_batch(device, held.get("batches"), batch)
    if batches is not None:
        held["batches"] = batches
    N, (leaves, _) = spec.schedule.num_microbatches, spec.stages.outputs
    outputs = [jnp.zeros((N, *y.shape), y.dtype) for y in leaves]
    arrays = with_cast_weights(spec, TickArrays(**held, outputs=outputs, cast_weights={}))
    return _scan(device.with_batch(batch), inputs.rows[0], arrays).outputs


def _local_batch(spec: PassSpec, batch: Any) -> Any:
    """This replica's part `[N, microbatch, ...]` of the minibatch that enters; None if nothing enters."""
    batch = jax.tree.map(lambda a: a[0], batch)
    if batch is None or not row_axes(spec.mesh.shape):
        return batch
    first = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], batch))
    shapes = microbatch_shapes(spec.mesh, first, spec.schedule.num_microbatches)
    return jax.tree.map(
        lambda a, like: lax.with_sharding_constraint(a, like.sharding.spec),
        batch,
        shapes,
    )


def _take_weights(device: TrainingDevice, kept: jax.Array | None, batch: Any) -> jax.Array | None:
    """The weights of the minibatches whose loss has a gradient to take in this pass, or in a later one.

    They are known before the first tick, because the first backward of a minibatch needs the weight of the whole. They
    are kept apart from the minibatches, of which a forward may be the last reader.

    Args:
      device: the device.
      kept: the weights before this pass, `[num_weights]`; None if only that of this pass's minibatch is read.
      batch: this pass's minibatch, `[N, microbatch, ...]`; None if nothing enters.

    Returns:
      `[num_weights]`; None if the loss is a mean.
    """
    spec = device.spec
    if spec.loss_weight is None:
        return None
    if batch is None:
        # Without kept weights no loss is in flight, and no operation reads this one.
        return jnp.ones(1, spec.weight_dtype) if kept is None else kept
    weights = lax.map(lambda leaves: spec.loss_weight(*leaves)[0], jax.tree.leaves(batch))
    weight = device.mean_over_replicas(weights.sum())
    if kept is None:
        return weight[None]
    return put_row(kept, weight, jnp.mod(device.round, spec.lowered.num_weights))


def _take_batch(device: Device, kept: Any, batch: Any) -> tuple[Any, Any]:
    """Returns the minibatches that the first stage and the loss read in this pass, and those that are kept.

    Args:
      device: the device.
      kept: the latest minibatches, `[num_batches * N, microbatch, ...]`; None if only this pass's
        minibatch is read.
      batch: this pass's minibatch, `[N, microbatch, ...]`; None if nothing enters.
    """
    spec = device.spec
    N = spec.schedule.num_microbatches
    if kept is None:
        if batch is None:
            # Nothing enters and nothing is in flight: no operation reads the batch.
            shapes = spec.microbatch
            batch = jax.tree.map(lambda a: jnp.zeros((N, *a.shape), a.dtype), shapes)
        return batch, None
    if batch is not None:
        start = N * jnp.mod(device.round, spec.lowered.num_batches)
        kept = jax.tree.map(
            lambda ring, new: lax.dynamic_update_slice_in_dim(ring, new, start, 0, allow_negative_indices=False),
            kept,
            batch,
        )
    return kept, kept


def _empty_results(spec: TrainingPass) -> dict[str, Any]:
    """The arrays that are zero at the start of a pass."""
    loss = spec.loss
    return {
        "loss": jnp.zeros((1,), loss.outputs[0].dtype),
        "aux": [jnp.zeros((1, *a.shape), a.dtype) for a in loss.aux],
        "count": jnp.zeros((1,), jnp.int32),
        "skipped": jnp.zeros((spec.lowered.num_chunks,), jnp.int32),
        "gradient_norm": jnp.zeros((1,), spec.updates.norm_dtype),
    }


def _scan(device: Device, rows: jax.Array, arrays: TickArrays) -> TickArrays:
    """Runs all ticks; `rows` are the rows of the device in `ScalarTable.rows`.

    On GPUs a tick begins with the update of the tick before, and the last update follows the loop, but for tables with
    a head after the update. The loop of a synchronous table then has no update. In other tables XLA would not begin a
    transfer before an update at the end of the tick, because it does not know that most ticks leave the update out.
    """
    spec = device.spec
    updates = spec.lowered.updates
    late = spec.lowered.target.updates_between_ticks and not spec.lowered.head_after_update
    rows = spec.scalars.with_round(
        rows,
        device.round,
        device.started,
        device.num_entered,
        spec.schedule.num_microbatches,
    )
    updates_before, ticks_rows = late and bool(updates[:-1].any()), rows
    if updates_before:
        # A tick reads its row and the one before by one kernel.
        rows_before = jnp.concatenate([jnp.full_like(rows[:1], -1), rows[:-1]])
        ticks_rows = jnp.concatenate([rows, rows_before], axis=1)

    def tick(phase: TickRange, arrays: TickArrays, row: jax.Array) -> tuple[TickArrays, None]:
        if updates_before:
            row, row_before = jnp.split(row, 2)
            before = TickScalars(spec.scalars, row_before)
            arrays = _update(device, before, before.updates, arrays)
        scalars = TickScalars(spec.scalars, row, phase.ticks)
        here = None if late or not updates.any() else scalars.updates
        return _tick(device, phase, scalars, here, arrays), None

    for phase in spec.lowered.phases:
        # The ticks of the phase receive nothing of operations that it does not have.
        if isinstance(device, TrainingDevice) and "forward" not in phase.operations:
            arrays = loss_of(device.spec).before_backwards(device, arrays)
        _, pending = _received(spec, phase, arrays)
        first = TickScalars(spec.scalars, rows[phase.start])
        arrays = receive(spec, arrays, first, pending)
        with jax.named_scope(ticks_text(phase.ticks)):
            arrays, _ = lax.scan(functools.partial(tick, phase), arrays, ticks_rows[phase.start : phase.stop])
    if late and updates[-1]:
        scalars = TickScalars(spec.scalars, rows[-1], range(len(updates) - 1, len(updates)))
        arrays = _update(device, scalars, True, arrays)
    return arrays


def _received(spec: PassSpec, phase: TickRange, arrays: TickArrays) -> tuple[dict[int, Packed], dict[int, Packed]]:
    """The received messages by channel: those of channels that move in a phase's ticks, and those of the others."""
    moving: dict[int, Packed] = {}
    resting: dict[int, Packed] = {}
    for number, message in arrays.received.items():
        operation = spec.lowered.channels[number].operation
        moves = operation is None or operation in phase.operations
        (moving if moves else resting)[number] = message
    return moving, resting


def _tick(
    device: Device,
    phase: TickRange,
    scalars: TickScalars,
    updates: jax.Array | None,
    arrays: TickArrays,
) -> TickArrays:
    """Runs one tick: see the top of this file.

    Args:
      device: the device.
      phase: the phase of the tick.
      scalars: the scalars of the tick.
      updates: bool `[]`, whether any device updates; None: the tick does not hold its update.
      arrays: all arrays.
    """
    spec = device.spec

    def moved(arrays: TickArrays, after: str | None, **kind: bool) -> dict:
        if after is not None and after not in phase.operations:
            return {}
        return move(spec, arrays, scalars, after, **kind)

    training = device if isinstance(device, TrainingDevice) else None
    stashes = {name: TickStash() for name in spec.tick_stashes}
    arrays = arrays.replace(**stashes)
    transfers = spills.begin(spec, scalars, arrays)
    received, resting = _received(spec, phase, arrays)
    received |= moved(arrays, after="forward", late=True)
    arrays = receive(spec, arrays, scalars, received)
    crossing: dict[int, Packed] = {}
    for after in (None, "forward", "backward"):
        crossing |= moved(arrays, after, crosses=True)
    gradients = moved(arrays, after="backward", late=True)
    arrays = vocabulary.embed(device, scalars, arrays)
    paired: jax.Array | bool = False
    if training and training.spec.pairs:
        arrays, gradients = receive(spec, arrays, scalars, gradients), {}
        arrays, paired = _run_pair(training, scalars, arrays)
    if "forward" in phase.operations:
        arrays = _run_operation("forward", device, scalars, arrays, paired)
    if training and "commit" in phase.operations and training.spec.commits:
        statistics = sum_over_copies(training, scalars, "commit", arrays.statistics)
        arrays = arrays.replace(statistics=statistics)
        arrays = _run_operation("commit", device, scalars, arrays)
    if not spec.lowered.head_after_update:
        arrays = vocabulary.head(device, scalars, arrays)
    if training and training.spec.numbers.runs_forward_again:
        arrays = vocabulary.embed(device, scalars, arrays, again=True)
    arrays = receive(spec, arrays, scalars, gradients)
    activations = moved(arrays, after="forward")
    for name in ("backward", "weight_grad"):
        if name in phase.operations:
            arrays = _run_operation(name, device, scalars, arrays, paired if name == "backward" else False)
    if training:
        arrays = vocabulary.embed_backward(training, scalars, arrays)
    if updates is not None and "update" in phase.operations:
        arrays = _update(device, scalars, updates, arrays)
    if spec.lowered.head_after_update:
        arrays = vocabulary.head(device, scalars, arrays)
    arrays = spills.end(spec, scalars, arrays, transfers)
    moved_last = moved(arrays, after=None)
    arrays = arrays.replace(**{name: {} for name in spec.tick_stashes})
    return arrays.replace(received=resting | crossing | activations | moved_last)


def _update(
    device: Device,
    scalars: TickScalars,
    updates: jax.Array | bool,
    arrays: TickArrays,
) -> TickArrays:
    """Runs the update of a tick.

    Args:
      device: the device.
      scalars: the scalars of the tick.
      updates: bool `[]`, whether any device updates. It is the same on all devices, because updates
        hold collectives along "stage".
      arrays: all arrays.
    """
    if not isinstance(device, TrainingDevice):
        return arrays  # nothing updates in a forward-only table
    spec = device.spec
    number: jax.Array | int = 0
    if not (updates is True or spec.updates_in_every_tick):
        number = jnp.where(updates, 0, -1)
    names = [*UPDATE_WRITES, *["cast_weights"] * recasts(spec)]
    writes = [name for name in names if name in arrays]

    def run(written: Written, _: ReadOnly) -> Written:
        return cast(Written, update(device, scalars, updates, written))

    branch = Branch("update", writes, run)
    return run_one_of(spec.lowered.target, number, [branch], arrays)


def _run_operation(
    name: str, device: Device, scalars: TickScalars, arrays: TickArrays, paired: jax.Array | bool = False
) -> TickArrays:
    """Runs an operation: every lane, and in it the program of the lane's stage.

    Args:
      name: the operation.
      device: the device.
      scalars: the scalars of the tick.
      arrays: all arrays.
      paired: bool `[]`, whether it has run already, in a pair.
    """
    spec = device.spec
    for j in range(spec.lowered.operations[name].num_lanes):
        lane = scalars.lane(name, j)
        stages = _stages(device, lane)
        number = lane.branch if spec.drops_branches else lane.program
        if chosen := spec.branches.of_operation(name):
            number = number_of(lane, chosen)
            stages = [dataclasses.replace(stages[branch.program], branch=branch) for branch in chosen]
        branches = [
            _branch(name, stage) if _runs(spec, name, j, stage) else Branch(name, [], lambda written, _: written)
            for stage in stages
        ]
        if paired is not False:
            number = jnp.where(paired, -1, lane.program)
        with lane_scope(j):
            arrays = run_one_of(spec.lowered.target, number, branches, arrays)
    return arrays


def _run_pair(device: TrainingDevice, scalars: TickScalars, arrays: TickArrays) -> tuple[TickArrays, jax.Array]:
    """Runs a forward and a backward in one branch. Also returns bool `[]`, whether the device has both in this tick."""
    spec = device.spec
    lanes = scalars.lane("forward", 0), scalars.lane("backward", 0)
    forwards, backwards = (cast(Sequence[TrainingStage], _stages(device, lane)) for lane in lanes)
    number = position_of((lanes[0].program, lanes[1].program), spec.pairs)
    branches = [pair(forwards[p], backwards[q]) for p, q in spec.pairs]
    return run_one_of(spec.lowered.target, number, branches, arrays), number >= 0


def _stages(device: Device, lane: LaneScalars) -> Sequence[StageContext]:
    """Every stage program, for a lane."""
    columns = _columns(device, lane) if device.spec.lowered.target.indices_outside else {}
    return [device.stage(p, lane, columns) for p in device.spec.stages.programs]


def _columns(device: Device, lane: LaneScalars) -> dict[str, Callable]:
    """The leading indices of a lane's column, read here."""
    leads: dict[str, Callable] = {}
    chunk = lane.chunk
    for group in ("gradients", "mutable_state", "statistics", "message_compression"):
        if group not in device.spec.array_rows:  # of a forward-only table
            continue
        lead = device.lead(group, chunk)
        tables = device.spec.array_rows[group].tables
        read_here = {name: lead(name) for name in tables}

        def lead_of(name: str, read_here: dict = read_here) -> Sequence:
            return read_here.get(name, [chunk])

        leads[group] = lead_of
    return leads


def _runs(spec: PassSpec, name: str, lane: int, stage: StageContext) -> bool:
    """Returns whether a program ever runs in a lane. A stage with few copies has lanes of its own."""
    if not spec.schedule.has_copies:
        return True
    stages_in_lane = spec.lowered.operations[name].stage[..., lane]
    return bool(np.isin(stages_in_lane, stage.program.stages).any())


def _branch(name: str, stage: StageContext) -> Branch:
    """An operation on the stages of one program."""
    if isinstance(stage, TrainingStage):
        return _branch_of(name, OPERATIONS[name], stage)
    return _branch_of(name, PREDICTION[name], stage)


def _branch_of(name: str, operation: Operation[Stage], stage: Stage) -> Branch:
    def run(written: Written, read: ReadOnly) -> Written:
        written = operation.run(stage, written, read)
        return written.replace(op_count=written.op_count + 1)

    scope = Scope(name, stage.program.stages)
    return Branch(scope.text, [*operation.writes(stage), "op_count"], run)
