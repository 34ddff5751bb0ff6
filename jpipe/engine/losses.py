"""The loss on the last stage: of each microbatch in its forward, or of the whole minibatch between two phases."""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import ReadOnly, TickArrays, Written
from jpipe.engine.context import StageContext, TrainingDevice, TrainingStage
from jpipe.engine.guard import Branch, run_one_of
from jpipe.engine.stage_layers import read_stash, rings_of, with_rings, write_stash
from jpipe.engine.training import TrainingPass
from jpipe.engine.transport import put_row
from jpipe.layers.avals import is_inexact
from jpipe.layers.model_tree import num_keys
from jpipe.lowering.tick_scalars import LaneScalars
from jpipe.mesh import DATA


def microbatch(stage: StageContext, leaves: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Takes the microbatch `[microbatch, ...]` out of leaves `[num_batches * N, microbatch, ...]`."""
    return stage.stages.values.constrained(microbatch_of(stage.scalars, leaves))


def microbatch_of(lane: LaneScalars, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Takes the lane's microbatch `[microbatch, ...]` out of leaves `[num_batches * N, microbatch, ...]`."""
    return [lax.dynamic_index_in_dim(a, lane.microbatch, keepdims=False, allow_negative_indices=False) for a in leaves]


class StageLoss(abc.ABC):
    """What the last stage does for the loss.

    Attributes:
      writes: names of the arrays that a forward writes.
    """

    writes: Sequence[str]

    @abc.abstractmethod
    def forward(self, stage: TrainingStage, written: Written, outputs: list[jax.Array], stashes: bool) -> Written:
        """Takes the outputs of a microbatch; `stashes`: whether the forward keeps what its backward reads."""

    @abc.abstractmethod
    def forward_again(self, stage: TrainingStage, written: Written, outputs: list[jax.Array]) -> Written:
        """Takes the outputs that a backward computes again."""

    @abc.abstractmethod
    def gradients(self, stage: TrainingStage, written: Written, read: ReadOnly) -> list[jax.Array]:
        """The gradients of the minibatch's loss by the outputs of the lane's microbatch, times the loss scale."""

    def arrays(self, spec: TrainingPass) -> dict[str, list[jax.Array]]:
        """The arrays that live in one pass, before its first tick."""
        del spec
        return {}

    def before_backwards(self, device: TrainingDevice, arrays: TickArrays) -> TickArrays:
        """Runs where all forwards of a minibatch have run, and none of its backwards, if the table has such a tick."""
        del device
        return arrays


class LossOfMicrobatches(StageLoss):
    """The loss of a minibatch is a sum over microbatches. A forward computes its term, and stashes for the backward."""

    writes = ("loss", "aux", "count")

    def forward(self, stage: TrainingStage, written: Written, outputs: list[jax.Array], stashes: bool) -> Written:
        """See `StageLoss`."""
        if stashes:
            values, aux, written = _loss_and_stash(stage, written, outputs)
        else:
            extra = _loss_extra(stage)
            values, aux = stage.spec.loss.forward([], outputs, extra)
        return written.replace(
            loss=written.loss + values[0][None],
            aux=[a + b[None] for a, b in zip(written.aux, aux)],
            count=written.count + 1,
        )

    def forward_again(self, stage: TrainingStage, written: Written, outputs: list[jax.Array]) -> Written:
        """See `StageLoss`."""
        return _loss_and_stash(stage, written, outputs)[-1]

    def gradients(self, stage: TrainingStage, written: Written, read: ReadOnly) -> list[jax.Array]:
        """See `StageLoss`."""
        loss, rings = stage.spec.loss, rings_of(written, read)
        places = stage.program.loss_stash
        again = loss.recomputes
        stash = read_stash(rings, "input_stash", places, stage.slot, recomputes=again)
        gradients = loss_gradients(stage.device, stage.scalars, read)
        return loss.backward([], stash, gradients)[1]


def _loss_extra(stage: TrainingStage) -> list[jax.Array]:
    """The arguments of the loss beside outputs: the microbatch, and a random key if the loss takes one."""
    batch = microbatch(stage, stage.device.batch)
    if len(stage.spec.loss.extra) == len(batch):
        return batch
    return [*batch, loss_key(stage.device, stage.scalars)]


def loss_key(device: TrainingDevice, lane: LaneScalars) -> jax.Array:
    """The data of the random key of the loss for the lane's microbatch."""
    number = num_keys(device.spec.stages.layers)  # layers draw by the numbers below
    return jax.random.key_data(device.random_key(number, lane.microbatch_number))


def _loss_and_stash(
    stage: TrainingStage, written: Written, outputs: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array], Written]:
    """Returns values and aux of the loss, and the arrays with its stash."""
    extra = _loss_extra(stage)
    values, stash, aux = stage.spec.loss.forward_and_stash([], outputs, extra)
    places = stage.program.loss_stash
    rings = write_stash(rings_of(written), "input_stash", places, stash, stage.slot)
    return values, aux, with_rings(written, rings)


def loss_gradients(device: TrainingDevice, lane: LaneScalars, read: TickArrays) -> list[jax.Array]:
    """The gradients of the minibatch's loss by `LossTerms.values` of a microbatch, times the loss scale."""
    divisors: list[Any] = [device.spec.schedule.num_microbatches]
    if device.minibatch_weights is not None:
        divisors.insert(0, device.minibatch_weights[lane.minibatch])
    # A weight may have more bits than its sum, and a gradient has the dtype of what it is taken by.
    gradients = [
        (jnp.ones((), value.dtype) / divisor).astype(value.dtype)
        for value, divisor in zip(device.spec.loss.outputs, divisors)
    ]
    scale = device.loss_scale(read)
    if scale is None:
        return gradients
    return [gradient * scale.astype(gradient.dtype) for gradient in gradients]


class LossOfWholeBatch(StageLoss):
    """The loss sees the outputs of all microbatches of all replicas. A forward keeps its outputs.

    Between the last forward and the first backward the last stage computes the loss, and its gradient by all outputs.
    A backward reads the part of its microbatch.
    """

    writes = ("outputs",)

    def forward(self, stage: TrainingStage, written: Written, outputs: list[jax.Array], stashes: bool) -> Written:
        """See `StageLoss`."""
        index = stage.scalars.microbatch
        values = zip(written.outputs, outputs, strict=True)
        return written.replace(outputs=[put_row(a, y, index) for a, y in values])

    def forward_again(self, stage: TrainingStage, written: Written, outputs: list[jax.Array]) -> Written:
        """See `StageLoss`."""
        return written

    def gradients(self, stage: TrainingStage, written: Written, read: ReadOnly) -> list[jax.Array]:
        """See `StageLoss`."""
        return microbatch_of(stage.scalars, read.output_gradients)

    def arrays(self, spec: TrainingPass) -> dict[str, list[jax.Array]]:
        """See `StageLoss`."""
        N, (leaves, _) = spec.schedule.num_microbatches, spec.stages.outputs
        outputs = [jnp.zeros((N, *y.shape), y.dtype) for y in leaves]
        return {"outputs": outputs, "output_gradients": [a for a in outputs if is_inexact(a)]}

    def before_backwards(self, device: TrainingDevice, arrays: TickArrays) -> TickArrays:
        """See `StageLoss`."""
        spec, N = device.spec, device.spec.schedule.num_microbatches
        num_replicas, home = spec.num_replicas, spec.lowered.placement[-1][0]

        def rows_of_all(a: jax.Array) -> jax.Array:
            """All rows of the minibatch, in its order, of the microbatches `[N, microbatch, ...]` of each replica."""
            if num_replicas > 1:
                a = lax.all_gather(a, DATA)
            return a.reshape(-1, *a.shape[2 + (num_replicas > 1) :])

        outputs, batch = ([rows_of_all(a) for a in leaves] for leaves in (arrays.outputs, device.batch))

        def of_replica(gradient: jax.Array, like: jax.Array) -> jax.Array:
            parts = gradient.reshape(num_replicas, *like.shape)
            return lax.dynamic_index_in_dim(parts, device.replica, keepdims=False)

        def run(written: Written, read: ReadOnly) -> Written:
            values, stash, aux = spec.loss.forward_and_stash([], outputs, batch)
            # The gradient of a stage is the mean over its replicas, and that of the loss the sum over them.
            gradient = jnp.full((), num_replicas, values[0].dtype)
            scale = device.loss_scale(read)
            if scale is not None:
                gradient *= scale.astype(gradient.dtype)
            _, gradients = spec.loss.backward([], stash, [gradient])
            return written.replace(
                loss=written.loss + N * values[0][None],
                aux=[a + N * b[None] for a, b in zip(written.aux, aux, strict=True)],
                count=written.count + N,
                output_gradients=[of_replica(g, a) for g, a in zip(gradients, written.output_gradients, strict=True)],
            )

        number = jnp.where(device.position == home, 0, -1)
        branch = Branch("loss", ["loss", "aux", "count", "output_gradients"], run)
        return run_one_of(spec.lowered.target, number, [branch], arrays)


def loss_of(spec: TrainingPass) -> StageLoss:
    """What the last stage of a pass does for the loss."""
    return LossOfWholeBatch() if spec.has_whole_batch_loss else LossOfMicrobatches()
