"""Moves of mutable state after a minibatch, by the statistics that its forwards have kept."""

import functools

import jax
import jax.numpy as jnp

from jpipe import packing
from jpipe.engine.arrays import ReadOnly, Written
from jpipe.engine.context import TrainingStage
from jpipe.engine.guard import guarded
from jpipe.engine.stage_layers import for_each_layer
from jpipe.engine.stage_weights import Fetched
from jpipe.layers.state_update import StateUpdate
from jpipe.stages.cut import LayerRun


def _updates_of(stage: TrainingStage) -> list[StateUpdate]:
    """The `StateUpdate` of each run of the program."""
    return [stage.stages.mutable[run.kind] for run in stage.program.runs]


def has_statistics(stage: TrainingStage) -> bool:
    """Returns whether forwards of the program keep statistics."""
    return any(update.statistics for update in _updates_of(stage))


def has_sequences(stage: TrainingStage) -> bool:
    """Returns whether every forward of the program moves mutable state."""
    return any(update.sequence for update in _updates_of(stage))


def commits_by_itself(stage: TrainingStage) -> bool:
    """Returns whether the last forward of a minibatch moves mutable state. Copies of a stage move it in a commit."""
    if stage.spec.schedule.has_copies:
        return False
    averaged = stage.spec.num_replicas > 1
    return has_statistics(stage) or (averaged and has_sequences(stage))


def commit_state(stage: TrainingStage, written: Written) -> Written:
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


def _committed(stage: TrainingStage, arrays: tuple, _: None) -> tuple:
    """Returns mutable state and statistics after a minibatch."""
    for r, run in enumerate(stage.program.runs):
        update = stage.stages.mutable[run.kind]
        if update.statistics or (stage.spec.num_replicas > 1 and update.varying):
            layer = functools.partial(_commit_layer, stage, run)
            arrays = for_each_layer(stage, r, layer, arrays)
    return arrays


def commit_writes(stage: TrainingStage) -> list[str]:
    """The arrays that `commit` writes."""
    return ["mutable_state", "statistics"]


def commit(stage: TrainingStage, written: Written, read: ReadOnly) -> Written:
    """Moves the mutable state of a stage with copies, after the sum of their statistics."""
    arrays = written.mutable_state, written.statistics
    state, statistics = _committed(stage, arrays, None)
    return written.replace(mutable_state=state, statistics=statistics)


def _commit_layer(
    stage: TrainingStage,
    run: LayerRun,
    i: jax.Array | int,
    _: Fetched,
    arrays: tuple,
) -> tuple:
    """Moves the mutable state of layer i after a minibatch, and empties its statistics.

    Statistics move running statistics. State that microbatches have moved one after the other becomes its mean over
    replicas.
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
        sums = kept
        if stage.spec.schedule.has_copies:
            sum_copies = functools.partial(jnp.sum, axis=0, keepdims=True)
            sums = [a[0] for a in update.pooled(kept, sum_copies)]
        if device.spec.num_replicas > 1:
            sums = update.pooled(sums, device.sum_over_replicas)
        new |= dict(zip(update.deferred, update.moved(old, sums)))
        zeros = [jnp.zeros_like(a) for a in kept]
        statistics = write(statistics, run.statistics, columns[1], zeros)
    moved = sorted({*update.deferred, *update.varying})
    places, values = [run.state[j] for j in moved], [new[j] for j in moved]
    return write(state, places, columns[0], values), statistics
