"""Emulation: the weight versions of any table, on one device without a pipeline."""

import numpy as np
from numpy.typing import ArrayLike

from jpipe._table.counts import wrong_counts
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import IDLE, Schedule
from jpipe.schedules.arguments import raise_refusal

__all__ = ["emulated", "random_delays", "with_delays"]


@suggests
def emulated(schedule: Schedule) -> Schedule:
    """The table of one device that computes what `schedule` computes on many.

    The device runs one microbatch after the other through all stages, forward and backward, and then
    updates all stages; with `update_every` each stage after as many microbatches as in `schedule`. Every
    forward and every backward reads the weight version that it reads in `schedule`, so losses and weights
    are equal, up to rounding. A step of the new table completes the minibatch that enters, while an
    asynchronous pipeline completes it some steps later: numbers of a step belong to its own minibatch,
    and `flush` has nothing to complete.

    The table is for studies of late gradients on one device, and for checks of a pipeline. It saves no
    memory and no time.

    Args:
      schedule: any table that trains. Columns of one stage become one column.

    Returns:
      A `Schedule` on one device, of T = N (2 S - 1) ticks. Its `emulates` is `schedule`.

    Raises:
      ValueError: if it is no table, or only runs forward.

    Example:
      >>> from jpipe.schedules import pipemare
      >>> table = emulated(pipemare(4, 2))
      >>> table.num_devices, table.facts().forward_delay.tolist()
      (1, [2, 1, 1, 0])
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"`schedule` must be a `jpipe.Schedule`, got {shown(schedule)}. Call a builder of `jpipe.schedules`, such "
            "as `jpipe.schedules.pipemare(8, 4)`."
        )
    if schedule.forward_only:
        raise ValueError(
            f"`schedule` {shown(schedule.name)} only runs forward: emulation is for training, where the passes read "
            "weights of different ages. Pass a schedule that trains."
        )
    if schedule.num_slices > 1:
        raise ValueError(
            f"`schedule` {shown(schedule.name)} has slices of sequences, whose backwards come in reverse order: "
            "emulation runs one microbatch after the other. Slices change no number, so emulate a schedule without."
        )
    if schedule.emulates is not None:
        return schedule
    forward, backward = schedule.forward_versions(), schedule.backward_versions()
    forward, backward = schedule.by_stage(forward), schedule.by_stage(backward)
    return _sequential(schedule.name, forward, backward, schedule, schedule.microbatches_per_update)


@suggests
def with_delays(
    delays: ArrayLike,
    num_microbatches: int = 1,
    *,
    backward_delays: ArrayLike | None = None,
) -> Schedule:
    """A table of one device whose passes read weights of given ages.

    It is for studies of delays that no pipeline has: constant, growing with depth, random. One microbatch
    after the other runs through all stages, as in `emulated`.

    Args:
      delays: int `[S]` or `[N, S]`, at least 0: how many updates lie between the weights that the forward of
        a stage reads (of a microbatch on a stage) and the weights that its gradient is applied to.
      num_microbatches: N, microbatches per update.
      backward_delays: delays of backwards. None: `delays`, so a gradient is taken at one set of weights.

    Returns:
      A `Schedule` on one device.

    Raises:
      ValueError: if a delay is not a whole number of at least 0, a backward is to read older weights than its
        forward, or a shape does not fit.

    Example:
      >>> with_delays([3, 2, 1, 0]).facts().forward_delay.tolist()
      [3, 2, 1, 0]
    """
    raise_refusal(wrong_counts(num_microbatches=num_microbatches))
    forward = _delays("delays", delays, num_microbatches)
    backward = forward
    if backward_delays is not None:
        backward = _delays("backward_delays", backward_delays, num_microbatches)
        if backward.shape != forward.shape:
            raise ValueError(
                f"`backward_delays` are for {backward.shape[1]} stages and `delays` for {forward.shape[1]}. Give one "
                "for each stage in both."
            )
        for m, s in np.argwhere(backward > forward)[:1].tolist():
            raise ValueError(
                f"`backward_delays` must be at most `delays`, got {backward[m, s]} above {forward[m, s]} for "
                f"microbatch {m} on stage {s}: a backward runs after its forward, and reads weights that are as old or "
                "newer."
            )
    return _sequential("with_delays", -forward, -backward)


@suggests
def random_delays(num_stages: int, num_microbatches: int, most: int, seed: int = 0) -> np.ndarray:
    """Delays for `with_delays`, each drawn evenly from 0, 1, ... `most`.

    The draws are for one minibatch. Every minibatch has the same ones.

    Args:
      num_stages: S.
      num_microbatches: N.
      most: the largest delay, in updates.
      seed: the seed of the draws.

    Returns:
      int64 `[N, S]`.

    Raises:
      ValueError: if a count is below 1 or `most` is negative.

    Example:
      >>> random_delays(3, 2, most=4).shape
      (2, 3)
    """
    raise_refusal(wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches))
    if not isinstance(most, int | np.integer) or most < 0:
        raise ValueError(f"`most` must be a whole number of updates, at least 0, got {shown(most)}.")
    draw = np.random.default_rng(seed)
    return draw.integers(0, most, (num_microbatches, num_stages), endpoint=True)


def _delays(name: str, delays: ArrayLike, num_microbatches: int) -> np.ndarray:
    """Delays as int64 `[N, S]`, checked."""
    given = np.asarray(delays)
    if given.dtype.kind not in "iu" or given.size == 0 or (given < 0).any():
        raise ValueError(
            f"`{name}` must be whole numbers of updates, at least 0, one for each stage, got {shown(delays)}."
        )
    if given.ndim not in (1, 2) or given.ndim == 2 and len(given) != num_microbatches:
        raise ValueError(
            f"`{name}` must have shape [stages] or [{num_microbatches}, stages], the first axis for "
            f"`num_microbatches`, got shape {given.shape}."
        )
    stages = given.shape[-1]
    ticks = num_microbatches * (2 * stages - 1)
    raise_refusal(wrong_counts(num_stages=stages, ticks=ticks))
    return np.tile(given, (1 if given.ndim == 2 else num_microbatches, 1)).astype(int)


def _sequential(
    name: str,
    forward_version: np.ndarray,
    backward_version: np.ndarray,
    emulates: Schedule | None = None,
    update_every: np.ndarray | None = None,
) -> Schedule:
    """One microbatch after the other through all stages, on one device.

    Args:
      name: the name of the schedule.
      forward_version: int `[N, S]`, the version that each forward reads, relative to its own minibatch.
      backward_version: int `[N, S]`, the version that each backward reads, relative to its own minibatch.
      emulates: see `Schedule`.
      update_every: int `[S]`, the microbatches of an update of each stage; None: N.
    """
    N, S = forward_version.shape
    # The last stage runs a microbatch forward and backward in one tick.
    first = np.arange(N)[:, None] * (2 * S - 1)
    stage = np.arange(S)
    every = np.full(S, N) if update_every is None else update_every
    applied = np.arange(1, N // every.min() + 1)[:, None] * every
    update = np.where(applied <= N, applied * (2 * S - 1) - 1, IDLE)
    return Schedule.from_ticks(
        name,
        first + stage,
        first + 2 * (S - 1) - stage,
        device=np.zeros(S, int),
        num_ticks=N * (2 * S - 1),
        update=update,
        forward_version=forward_version,
        backward_version=backward_version,
        emulates=emulates,
    )
