"""The operations of a stage in a tick: forward, backward, weight gradient.

Each operation is a function `(stage, written, read) -> written`, with a function beside it that
names the arrays that it writes. Nothing here communicates with other devices, except for the mean
of statistics over replicas.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
from jax import lax

from jpipe.engine import carries, losses, sums
from jpipe.engine.arrays import Packed, ReadOnly, Written
from jpipe.engine.carries import CARRY, CARRY_GRADIENT
from jpipe.engine.commit import (
    commit,
    commit_state,
    commit_writes,
    commits_by_itself,
    has_sequences,
    has_statistics,
)
from jpipe.engine.context import StageContext, TrainingStage
from jpipe.engine.stage_branches import SPLIT
from jpipe.engine.stage_layers import (
    StageWeights,
    add_gradients,
    for_each_layer,
    read_layer_stash,
    read_stash,
    rings_of,
    run_layers,
    split_leaves,
    with_rings,
    write_stash,
)
from jpipe.engine.stage_weights import Fetched
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
from jpipe.lowering.rings import HEAD_GRADIENT
from jpipe.stages.cut import LayerRun, Stages

FORWARD_STASHES = ["input_stash", "weight_stash"]
"""The rings that a forward writes."""


Stage = TypeVar("Stage", bound=StageContext)


class Operation(NamedTuple, Generic[Stage]):
    """One kind of operation.

    Attributes:
      run: `(stage, written, read) -> written`.
      writes: `stage -> names` of the arrays in `written`.
    """

    run: Callable[[Stage, Written, ReadOnly], Written]
    writes: Callable[[Stage], list[str]]


# -- What operations read of a microbatch


def as_stored(stages: Stages, values: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
    """Converts leaves of an activation to the shapes in the state: see `jpipe.engine.shapes.stored_shapes`."""
    stored = [a.reshape(b.shape) for a, b in zip(values, old, strict=True)]
    return stages.values.constrained(stored, 1) if stages.values.sizes else stored


def from_stored(stages: Stages, values: Sequence[jax.Array], avals: Iterable) -> list[jax.Array]:
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
        return losses.microbatch(stage, stage.device.inputs)

    return stage.if_first(first, from_inbox)


# -- Forward


def predict_writes(stage: StageContext) -> list[str]:
    """The arrays that `predict` writes."""
    head = stage.stages.vocabulary.head is not None
    return ["head_input" if head else "outputs", SENT["forward"]]


def predict(stage: StageContext, written: Written, read: ReadOnly) -> Written:
    """Runs the forward of one microbatch in a forward-only table: it writes a message, or the last stage's outputs."""
    result = run_layers(stage, read, _stage_inputs(stage, read), mutable_state=read.mutable_state)
    written = send_skips(stage, written, read, result.skips)

    def collect() -> Written:
        index = stage.scalars.microbatch
        values = zip(written.outputs, result.outputs)
        return written.replace(outputs=[put_row(a, y, index) for a, y in values])

    return _send_or(collect, stage, written, read, result.outputs)


def forward_writes(stage: TrainingStage) -> list[str]:
    """The arrays that `forward` writes."""
    head = stage.stages.vocabulary.head is not None
    names = ["head_input"] if head else [*losses.loss_of(stage.spec).writes]
    names += [SENT["forward"], "message_compression"]
    if not stage.spec.numbers.runs_forward_again:
        names += FORWARD_STASHES
    if commits_by_itself(stage) or has_sequences(stage):
        names += ["mutable_state"]
    if stage.has_slices:
        names += [CARRY]
    if commits_by_itself(stage) or has_statistics(stage):
        names += ["statistics"]
    return names


def forward(stage: TrainingStage, written: Written, read: ReadOnly) -> Written:
    """Runs the forward of one microbatch. It writes stashes for the backward, and a message or the loss."""
    stashes = not stage.spec.numbers.runs_forward_again
    moving = written if "mutable_state" in written else read
    result = run_layers(
        stage,
        read,
        _stage_inputs(stage, read),
        mutable_state=moving.mutable_state,
        rings=rings_of(written) if stashes else None,
        statistics=written.statistics if has_statistics(stage) else None,
        moves_state=has_sequences(stage),
        carry=written.carry if stage.has_slices else None,
        hands_on=stage.has_slices,
    )
    if stage.has_slices:
        written = written.replace(carry=result.carry)
    if result.rings is not None:
        written = with_rings(written, result.rings)
    if has_statistics(stage):
        written = written.replace(statistics=result.statistics)
    if has_sequences(stage):
        written = written.replace(mutable_state=result.mutable_state)
    if commits_by_itself(stage):
        written = commit_state(stage, written)
    written = send_skips(stage, written, read, result.skips)

    def add_loss() -> Written:
        return losses.loss_of(stage.spec).forward(stage, written, result.outputs, stashes)

    return _send_or(add_loss, stage, written, read, result.outputs)


def _send_or(
    at_end: Callable[[], Written],
    stage: StageContext,
    written: Written,
    read: ReadOnly,
    outputs: list[jax.Array],
) -> Written:
    """Sends the outputs of a stage to the next one; the last stage has `at_end()`, or gives them to a head of all
    stages.
    """

    def send_activation() -> Written:
        end = neighbour_end(stage, 0, "activation")
        return end.send(written, read, outputs)

    def to_head() -> Written:
        stored = as_stored(stage.stages, outputs, written.head_input)
        return written.replace(head_input=stored)

    if stage.stages.vocabulary.head is not None:
        return stage.if_last(to_head, send_activation)
    return stage.if_last(at_end, send_activation)


# -- Backward


def backward_writes(stage: TrainingStage) -> list[str]:
    """The arrays that `backward` writes."""
    names = [SENT["backward"], "message_compression", "embedded_gradient"]
    split = stage.spec.schedule.splits_backward
    names += [CARRY_GRADIENT] if stage.has_slices else []
    names += [SPLIT] if split else weight_grad_writes(stage)
    return names + (FORWARD_STASHES if stage.spec.numbers.runs_forward_again else [])


def backward(stage: TrainingStage, written: Written, read: ReadOnly) -> Written:
    """Runs the backward of one microbatch. It writes parameter gradients and a message.

    Where the table splits backwards, it computes the input gradient only, and stashes what
    `weight_grad` needs.
    """
    split = stage.spec.schedule.splits_backward
    if stage.spec.numbers.runs_forward_again:
        written = _recompute(stage, written, read)
    gy = stage.if_last(
        lambda: _loss_gradient(stage, written, read),
        lambda: _arrived_gradient(stage, read),
    )
    rings = rings_of(written, read)
    gradients = None if split else sums.sums_in(written)
    microbatch = sums.microbatch_of(stage, read)
    weights = StageWeights.of(stage, read, "backward")
    skip_gradients = arrived_skip_gradients(stage, read)
    by_carry = written.carry_gradient if stage.has_slices else {}
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
            gy, rings, gradients, by_carry = state
            parameters = _at_hand(stage, weights, read, run, kind, i, fetched)
            stash = read_layer_stash(rings, run, kind, stage.slot, i)
            gy = [*gy, *carries.gradient_after(stage, by_carry, run, i)]
            if split:
                gx, values = kind.input_grad(parameters, stash, gy)
                places = run.split_residuals
                rings = write_stash(rings, SPLIT, places, values, stage.slot, i, stage.joins)
            else:
                gp, gx = kind.backward(parameters, stash, gy)
                gradients = add_gradients(stage, gradients, run, gp, i, microbatch)
            gx, handed = split_leaves(gx, [run.carry_gradient])
            by_carry = carries.with_gradient(stage, by_carry, run, i, handed)
            return stage.stages.values.constrained(gx), rings, gradients, by_carry

        fetch = functools.partial(weights.fetch, run)
        before = gy, rings, gradients, by_carry
        gy, rings, gradients, by_carry = for_each_layer(stage, r, layer, before, fetch=fetch, backwards=True)
        inexact = [[a for a in leaves if is_inexact(a)] for _, leaves in run.pop]
        gy, *popped = split_leaves(gy, inexact)
        # Gradients of skips from earlier stages leave with this backward; others meet the layer
        # that stashed the skip.
        skip_gradients |= {name: g for (name, _), g in zip(run.pop, popped)}
    written = with_rings(written, rings)
    if stage.has_slices:
        written = written.replace(carry_gradient=by_carry)
    if gradients is not None:
        written = sums.with_sums(written, gradients)
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


def _at_hand(
    stage: TrainingStage,
    weights: StageWeights,
    read: ReadOnly,
    run: LayerRun,
    kind: LayerProgram,
    i: jax.Array | int,
    fetched: Fetched,
) -> list[jax.Array]:
    """What a backward of layer i of a run gets beside stash and gradients: see `LayerProgram.at_hand`."""
    parameters = weights.for_backward(run, kind, i, fetched)
    return [*parameters, *carries.kept(stage, read.carry, run, kind, i)] if stage.has_slices else parameters


def _recompute(stage: TrainingStage, written: Written, read: ReadOnly) -> Written:
    """Runs the forward again, on the weights that the backward reads, and stashes its values."""
    result = run_layers(
        stage,
        read,
        _stage_inputs(stage, read),
        mutable_state=read.mutable_state,
        weight_pass="backward",
        rings=rings_of(written),
        carry=read.carry if stage.has_slices else None,
    )
    if result.rings is not None:
        written = with_rings(written, result.rings)

    def with_loss() -> Written:
        if stage.stages.vocabulary.head is not None:
            return written
        return losses.loss_of(stage.spec).forward_again(stage, written, result.outputs)

    return stage.if_last(with_loss, lambda: written)


def _loss_gradient(stage: TrainingStage, written: Written, read: ReadOnly) -> list[jax.Array]:
    """The gradient of the minibatch's loss by the stage's outputs, times the loss scale."""
    if stage.stages.vocabulary.head is not None:
        slot = stage.scalars.slot(HEAD_GRADIENT)
        gradients = [
            lax.dynamic_index_in_dim(a, slot, keepdims=False, allow_negative_indices=False) for a in read.head_gradient
        ]
        return stage.stages.values.constrained(gradients)
    gradients = losses.loss_of(stage.spec).gradients(stage, written, read)
    return stage.stages.values.constrained(gradients)


def _arrived_gradient(stage: TrainingStage, read: ReadOnly) -> list[jax.Array]:
    """The gradient by the stage's outputs, from the next stage."""
    return neighbour_end(stage, 0, "gradient").arrived(read)


# -- Weight gradient


def weight_grad_writes(stage: TrainingStage) -> list[str]:
    """The arrays that `weight_grad` writes."""
    if stage.stages.gradient_sums.compressor is None:
        return ["gradients"]
    return ["gradients", "gradient_compression"]


def weight_grad(stage: TrainingStage, written: Written, read: ReadOnly) -> Written:
    """Computes the parameter gradients of one microbatch, after `backward` has computed its input gradient."""
    gradients = sums.sums_in(written)
    microbatch = sums.microbatch_of(stage, read)
    weights = StageWeights.of(stage, read, "backward")
    for r, run in enumerate(stage.program.runs):
        kind = stage.stages.layer_kinds[run.kind]

        def layer(
            i: jax.Array | int,
            fetched: Fetched,
            gradients: Packed,
            run: LayerRun = run,
            kind: LayerProgram = kind,
        ) -> Packed:
            parameters = _at_hand(stage, weights, read, run, kind, i, fetched)
            stash = read_layer_stash(rings_of(read), run, kind, stage.slot, i, only="weight_stash")
            places = run.split_residuals
            values = read_stash(rings_of(read), SPLIT, places, stage.slot, i)
            values = kind.weight_grad(parameters, stash, values)
            return add_gradients(stage, gradients, run, values, i, microbatch)

        fetch = functools.partial(weights.fetch, run)
        gradients = for_each_layer(stage, r, layer, gradients, fetch=fetch)
    return sums.with_sums(written, gradients)


OPERATIONS: dict[str, Operation[TrainingStage]] = {
    "forward": Operation(forward, forward_writes),
    "commit": Operation(commit, commit_writes),
    "backward": Operation(backward, backward_writes),
    "weight_grad": Operation(weight_grad, weight_grad_writes),
}
"""The operations of a stage, in the order in which a tick runs them."""

PREDICTION = {"forward": Operation(predict, predict_writes)}
"""Those of a stage in a forward-only table."""
