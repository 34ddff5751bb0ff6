"""What a stage does in a tick: forward, backward, weight gradient.

Each operation is a function `(stage, written, read) -> written`, with a function beside it that
names the arrays that it writes. Nothing here communicates with other devices, except for the mean
of statistics over replicas.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import Device, StageContext
from jpipe.engine.factors import FactorSum, accumulators_of, with_accumulators
from jpipe.engine.guard import guarded
from jpipe.engine.stage_layers import (
    Fetched,
    Rings,
    StageWeights,
    add_gradients,
    for_each_layer,
    read_layer_stash,
    read_stash,
    run_layers,
    split_leaves,
    write_stash,
)
from jpipe.engine.transport import (
    SENT,
    arrived_skip_gradients,
    neighbour_end,
    put_row,
    send_skip_gradients,
    send_skips,
    wires_with_gradients,
)
from jpipe.layers.avals import is_inexact
from jpipe.layers.backward import LayerProgram
from jpipe.layers.state_update import StateUpdate
from jpipe.lowering.rings import HEAD_GRADIENT, STASHES
from jpipe.lowering.scalars import LaneScalars
from jpipe.stages.cut import LayerRun, Stages

FORWARD_STASHES, SPLIT = ["input_stash", "weight_stash"], "split_residuals"
# Rings by the operation that writes them: a forward, or a backward without weight gradient.


class Operation(NamedTuple):
    """One kind of operation.

    Attributes:
      run: `(stage, written, read) -> written`.
      writes: `stage -> names` of the arrays in `written`.
    """

    run: Callable[[StageContext, Written, ReadOnly], Written]
    writes: Callable[[StageContext], list[str]]


# -- What operations read of a microbatch


def _microbatch(stage: StageContext, leaves: tuple[jax.Array, ...]) -> list[jax.Array]:
    """The microbatch `[microbatch, ...]` out of leaves `[num_batches * N, microbatch, ...]`."""
    return stage.stages.values.constrained(microbatch_of(stage.scalars, leaves))


def microbatch_of(lane: LaneScalars, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The lane's microbatch `[microbatch, ...]` out of leaves `[num_batches * N, microbatch, ...]`."""
    return [
        lax.dynamic_index_in_dim(
            a, lane.microbatch, keepdims=False, allow_negative_indices=False
        )
        for a in leaves
    ]


def as_stored(
    stages: Stages, values: Sequence[jax.Array], old: Sequence[jax.Array]
) -> list[jax.Array]:
    """Leaves of an activation, as those that they replace: see `jpipe.engine.layout.stored_shapes`."""
    stored = [a.reshape(b.shape) for a, b in zip(values, old, strict=True)]
    return stages.values.constrained(stored, 1) if stages.values.sizes else stored


def from_stored(
    stages: Stages, values: Sequence[jax.Array], avals: Iterable
) -> list[jax.Array]:
    """The inverse of `as_stored`."""
    values = [a.reshape(like.shape) for a, like in zip(values, avals, strict=True)]
    return stages.values.constrained(values)


def _stage_inputs(stage: StageContext, read: ReadOnly) -> list[jax.Array]:
    """Inputs of the stage: from the batch on the first stage, from the inbox on others."""

    def from_inbox() -> list[jax.Array]:
        return neighbour_end(stage, -1, "activation").arrived(read)

    def first() -> list[jax.Array]:
        if stage.stages.vocabulary.embedding is not None:
            avals = stage.stages.vocabulary.embedded
            return from_stored(stage.stages, read.embedded, avals)
        return _microbatch(stage, stage.device.inputs)

    return stage.if_first(first, from_inbox)


def _rings(*records: TickArrays) -> Rings:
    """The rings of stashes that the records hold, by name."""
    return {
        name: getattr(record, name)
        for record in records
        for name in STASHES
        if name in record
    }


def _with_rings(written: Written, rings: Rings) -> Written:
    """The record with new values for the rings that it holds."""
    return written.replace(**{n: rings[n] for n in STASHES if n in written})


# -- Forward


def _updates_of(stage: StageContext) -> list[StateUpdate]:
    """How training moves the mutable state of each run of the program."""
    if stage.spec.schedule.forward_only:
        return []
    return [stage.stages.mutable[run.kind] for run in stage.program.runs]


def _has_statistics(stage: StageContext) -> bool:
    """Whether forwards of the program keep statistics."""
    return any(update.statistics for update in _updates_of(stage))


def _has_sequences(stage: StageContext) -> bool:
    """Whether every forward of the program moves mutable state."""
    return any(update.sequence for update in _updates_of(stage))


def _commits(stage: StageContext) -> bool:
    """Whether the last forward of a minibatch moves mutable state. Copies of a stage do it together, in a commit."""
    if stage.spec.schedule.has_copies:
        return False
    averaged = stage.spec.num_replicas > 1
    return _has_statistics(stage) or (averaged and _has_sequences(stage))


def forward_writes(stage: StageContext) -> list[str]:
    """The arrays that `forward` writes."""
    head = stage.stages.vocabulary.head is not None
    if stage.spec.schedule.forward_only:
        return ["head_input" if head else "outputs", SENT["forward"]]
    names = ["head_input"] if head else ["loss", "aux", "count"]
    names += [SENT["forward"], "message_compression"]
    if not stage.spec.recompute:
        names += FORWARD_STASHES
    if _commits(stage) or _has_sequences(stage):
        names += ["mutable_state"]
    if _commits(stage) or _has_statistics(stage):
        names += ["statistics"]
    return names


def forward(stage: StageContext, written: Written, read: ReadOnly) -> Written:
    """The forward of one microbatch: stashes for the backward, and a message or the loss.

    In a forward-only table the last stage writes its outputs instead of a loss.
    """
    collects = stage.spec.schedule.forward_only
    stashes = not (collects or stage.spec.recompute)
    moving = written if "mutable_state" in written else read
    result = run_layers(
        stage,
        read,
        _stage_inputs(stage, read),
        mutable_state=moving.mutable_state,
        rings=_rings(written) if stashes else None,
        statistics=written.statistics if _has_statistics(stage) else None,
        moves_state=_has_sequences(stage),
    )
    if stashes:
        assert result.rings is not None
        written = _with_rings(written, result.rings)
    if _has_statistics(stage):
        written = written.replace(statistics=result.statistics)
    if _has_sequences(stage):
        written = written.replace(mutable_state=result.mutable_state)
    if _commits(stage):
        written = _commit_state(stage, written)
    written = send_skips(stage, written, read, result.skips)

    def collect() -> Written:
        index = stage.scalars.microbatch
        values = zip(written.outputs, result.outputs)
        return written.replace(outputs=[put_row(a, y, index) for a, y in values])

    def send_activation() -> Written:
        end = neighbour_end(stage, 0, "activation")
        return end.send(written, read, result.outputs)

    def add_loss() -> Written:
        return _add_loss(stage, written, result.outputs, stashes)

    def to_head() -> Written:
        stored = as_stored(stage.stages, result.outputs, written.head_input)
        return written.replace(head_input=stored)

    if stage.stages.vocabulary.head is not None:
        return stage.if_last(to_head, send_activation)
    return stage.if_last(collect if collects else add_loss, send_activation)


def _add_loss(
    stage: StageContext, written: Written, outputs: list[jax.Array], stashes: bool
) -> Written:
    """Adds the loss of the microbatch to the sums, and writes its stash if `stashes`."""
    if stashes:
        values, aux, written = _loss_and_stash(stage, written, outputs)
    else:
        extra = _loss_extra(stage)
        values, aux = stage.stages.loss.forward([], outputs, extra)
    return written.replace(
        loss=written.loss + values[0][None],
        aux=[a + b[None] for a, b in zip(written.aux, aux)],
        count=written.count + 1,
    )


def _loss_extra(stage: StageContext) -> list[jax.Array]:
    """What the loss gets beside outputs: the microbatch, and a random key if the loss takes one."""
    batch = _microbatch(stage, stage.device.batch)
    if len(stage.stages.loss.extra) == len(batch):
        return batch
    return [*batch, loss_key(stage.device, stage.scalars)]


def loss_key(device: Device, lane: LaneScalars) -> jax.Array:
    """The data of the random key that the loss draws from for the lane's microbatch."""
    number = len(device.spec.stages.layers)  # layers draw by the numbers below
    return jax.random.key_data(device.random_key(number, lane.microbatch_number))


def _loss_and_stash(
    stage: StageContext, written: Written, outputs: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array], Written]:
    """Values and aux of the loss, and the arrays with its stash."""
    extra = _loss_extra(stage)
    values, stash, aux = stage.stages.loss.forward_and_stash([], outputs, extra)
    places = stage.program.loss_stash
    rings = write_stash(_rings(written), "input_stash", places, stash, stage.slot)
    return values, aux, _with_rings(written, rings)


def _commit_state(stage: StageContext, written: Written) -> Written:
    """Moves mutable state after the last microbatch of a minibatch, by the minibatch's statistics."""
    with jax.named_scope("commit"):
        state, statistics = guarded(
            stage.spec.lowered.target,
            stage.scalars.completes_minibatch == 1,
            functools.partial(_committed, stage),
            (written.mutable_state, written.statistics),
            None,
        )
    return written.replace(mutable_state=state, statistics=statistics)


def _committed(stage: StageContext, arrays: tuple, _: None) -> tuple:
    """Mutable state and statistics after a minibatch."""
    for r, run in enumerate(stage.program.runs):
        update = stage.stages.mutable[run.kind]
        if update.statistics or (stage.spec.num_replicas > 1 and update.varying):
            layer = functools.partial(_commit_layer, stage, run)
            arrays = for_each_layer(stage, r, layer, arrays)
    return arrays


def commit_writes(stage: StageContext) -> list[str]:
    """The arrays that `commit` writes."""
    return ["mutable_state", "statistics"]


def commit(stage: StageContext, written: Written, read: ReadOnly) -> Written:
    """Moves the mutable state of a stage with copies, after the sum of their statistics."""
    arrays = written.mutable_state, written.statistics
    state, statistics = _committed(stage, arrays, None)
    return written.replace(mutable_state=state, statistics=statistics)


def _commit_layer(
    stage: StageContext,
    run: LayerRun,
    i: jax.Array | int,
    _: Fetched,
    arrays: tuple,
) -> tuple:
    """Moves the mutable state of layer i after a minibatch, and empties its statistics.

    Statistics move running statistics. Of what microbatches have moved one after the other, replicas keep the mean.
    """
    state, statistics = arrays
    i, device = stage.runtime_index(i), stage.device
    update = stage.stages.mutable[run.kind]
    columns = stage.column("mutable_state"), stage.column("statistics")
    old = packing.read_all(state, run.state, columns[0], i)
    new = dict(enumerate(old))
    if device.spec.num_replicas > 1:
        for j in update.varying:
            new[j] = device.mean_over_replicas(old[j])
    # The leaves are small and many. XLA takes longer to compile a kernel for each than the kernels run.
    write = functools.partial(packing.write_all, i=i, joined=True)
    if update.statistics:
        kept = packing.read_all(statistics, run.statistics, columns[1], i)
        of_minibatch = kept
        if stage.spec.schedule.has_copies:
            of_copies = functools.partial(jnp.sum, axis=0, keepdims=True)
            of_minibatch = [a[0] for a in update.pooled(kept, of_copies)]
        if device.spec.num_replicas > 1:
            of_minibatch = update.pooled(of_minibatch, device.sum_over_replicas)
        new |= dict(zip(update.deferred, update.moved(old, of_minibatch)))
        zeros = [jnp.zeros_like(a) for a in kept]
        statistics = write(statistics, run.statistics, columns[1], zeros)
    moved = sorted({*update.deferred, *update.varying})
    places, values = [run.state[j] for j in moved], [new[j] for j in moved]
    return write(state, places, columns[0], values), statistics


# -- Backward


def backward_writes(stage: StageContext) -> list[str]:
    """The arrays that `backward` writes."""
    names = [SENT["backward"], "message_compression", "embedded_gradient"]
    split = stage.spec.schedule.splits_backward
    names += [SPLIT] if split else weight_grad_writes(stage)
    return names + (FORWARD_STASHES if stage.spec.recompute else [])


def backward(stage: StageContext, written: Written, read: ReadOnly) -> Written:
    """The backward of one microbatch: parameter gradients and a message.

    Where the table splits backwards, it computes the input gradient only, and stashes what
    `weight_grad` needs.
    """
    split = stage.spec.schedule.splits_backward
    if stage.spec.recompute:
        written = _recompute(stage, written, read)
    gy = stage.if_last(
        lambda: _loss_gradient(stage, written, read),
        lambda: _arrived_gradient(stage, read),
    )
    rings = _rings(written, read)
    gradients = None if split else accumulators_of(written)
    factors = FactorSum.of(stage, read)
    weights = StageWeights.of(stage, read, "backward")
    column = functools.partial(stage.column, "gradients")
    skip_gradients = arrived_skip_gradients(stage, read)
    for r, run in reversed(list(enumerate(stage.program.runs))):
        kind = stage.stages.layer_kinds[run.kind]
        gy = [*gy, *(g for name, _ in run.stash for g in skip_gradients.pop(name))]

        def layer(
            i: jax.Array | int,
            fetched: Fetched,
            state: tuple,
            run: LayerRun = run,
            kind: LayerProgram = kind,
        ) -> tuple:
            gy, rings, gradients = state
            parameters = weights.for_backward(run, kind, i, fetched)
            stash = read_layer_stash(rings, run, kind, stage.slot, i)
            if split:
                gx, values = kind.input_grad(parameters, stash, gy)
                places = run.split_residuals
                rings = write_stash(
                    rings, SPLIT, places, values, stage.slot, i, stage.joins
                )
            else:
                gp, gx = kind.backward(parameters, stash, gy)
                row = stage.runtime_index(i)
                gradients = add_gradients(
                    gradients, run, gp, column, row, stage.joins, factors
                )
            return stage.stages.values.constrained(gx), rings, gradients

        fetch = functools.partial(weights.fetch, run)
        gy, rings, gradients = for_each_layer(
            stage, r, layer, (gy, rings, gradients), fetch=fetch, backwards=True
        )
        inexact = [[a for a in leaves if is_inexact(a)] for _, leaves in run.pop]
        gy, *popped = split_leaves(gy, inexact)
        # Gradients of skips from earlier stages leave with this backward; others meet the layer
        # that stashed the skip.
        skip_gradients |= {name: g for (name, _), g in zip(run.pop, popped)}
    written = _with_rings(written, rings)
    if gradients is not None:
        written = with_accumulators(written, gradients)
    written = send_skip_gradients(stage, written, read, skip_gradients)

    def send_gradient() -> Written:
        arrived = wires_with_gradients(neighbour_end(stage, -1, "activation"), read)
        return neighbour_end(stage, -1, "gradient").send(written, read, gy, arrived)

    def to_embedding() -> Written:
        if stage.stages.vocabulary.embedding is None:
            return written
        stored = as_stored(stage.stages, gy, written.embedded_gradient)
        return written.replace(embedded_gradient=stored)

    return stage.if_first(to_embedding, send_gradient)


def _recompute(stage: StageContext, written: Written, read: ReadOnly) -> Written:
    """Runs the forward again, on the weights that the backward reads, and stashes."""
    result = run_layers(
        stage,
        read,
        _stage_inputs(stage, read),
        mutable_state=read.mutable_state,
        weight_pass="backward",
        rings=_rings(written),
    )
    assert result.rings is not None
    written = _with_rings(written, result.rings)

    def with_loss() -> Written:
        if stage.stages.vocabulary.head is not None:
            return written
        return _loss_and_stash(stage, written, result.outputs)[-1]

    return stage.if_last(with_loss, lambda: written)


def _loss_gradient(
    stage: StageContext, written: Written, read: ReadOnly
) -> list[jax.Array]:
    """The gradient of the minibatch's loss by the stage's outputs, times the loss scale."""
    if stage.stages.vocabulary.head is not None:
        of_head = stage.scalars.slot(HEAD_GRADIENT)
        gradients = [
            lax.dynamic_index_in_dim(
                a, of_head, keepdims=False, allow_negative_indices=False
            )
            for a in read.head_gradient
        ]
        return stage.stages.values.constrained(gradients)
    loss, rings = stage.stages.loss, _rings(written, read)
    places = stage.program.loss_stash
    again = loss.recomputes
    stash = read_stash(rings, "input_stash", places, stage.slot, recomputes=again)
    gradients = loss_gradients(stage.device, stage.scalars, read)
    return stage.stages.values.constrained(loss.backward([], stash, gradients)[1])


def loss_gradients(
    device: Device, lane: LaneScalars, read: TickArrays
) -> list[jax.Array]:
    """The gradients of the minibatch's loss by `LossTerms.values` of a microbatch, times the loss scale."""
    divisors: list[Any] = [device.spec.schedule.num_microbatches]
    if device.minibatch_weights is not None:
        divisors.insert(0, device.minibatch_weights[lane.minibatch])
    gradients = [
        jnp.ones((), value.dtype) / divisor
        for value, divisor in zip(device.spec.stages.loss.outputs, divisors)
    ]
    if device.spec.loss_scale is None:
        return gradients
    scale = read.loss_scale["scale"][0]
    return [gradient * scale.astype(gradient.dtype) for gradient in gradients]


def _arrived_gradient(stage: StageContext, read: ReadOnly) -> list[jax.Array]:
    """The gradient by the stage's outputs, from the next stage."""
    return neighbour_end(stage, 0, "gradient").arrived(read)


# -- Weight gradient


def weight_grad_writes(stage: StageContext) -> list[str]:
    """The arrays that `weight_grad` writes."""
    if stage.spec.accumulate_gradients is None:
        return ["gradients"]
    return ["gradients", "gradient_compression"]


def weight_grad(stage: StageContext, written: Written, read: ReadOnly) -> Written:
    """The parameter gradients of one microbatch, after `backward` computed its input gradient."""
    gradients = accumulators_of(written)
    factors = FactorSum.of(stage, read)
    weights = StageWeights.of(stage, read, "backward")
    column = functools.partial(stage.column, "gradients")
    for r, run in enumerate(stage.program.runs):
        kind = stage.stages.layer_kinds[run.kind]

        def layer(
            i: jax.Array | int,
            fetched: Fetched,
            gradients: Packed,
            run: LayerRun = run,
            kind: LayerProgram = kind,
        ) -> Packed:
            parameters = weights.for_backward(run, kind, i, fetched)
            stash = read_layer_stash(
                _rings(read), run, kind, stage.slot, i, only="weight_stash"
            )
            places = run.split_residuals
            values = read_stash(_rings(read), SPLIT, places, stage.slot, i)
            values = kind.weight_grad(parameters, stash, values)
            row = stage.runtime_index(i)
            return add_gradients(
                gradients, run, values, column, row, stage.joins, factors
            )

        fetch = functools.partial(weights.fetch, run)
        gradients = for_each_layer(stage, r, layer, gradients, fetch=fetch)
    return with_accumulators(written, gradients)


OPERATIONS = {
    "forward": Operation(forward, forward_writes),
    "commit": Operation(commit, commit_writes),
    "backward": Operation(backward, backward_writes),
    "weight_grad": Operation(weight_grad, weight_grad_writes),
}
"""The operations of a stage, in the order in which a tick runs them."""
