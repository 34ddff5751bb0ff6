"""PipeMare: no flush, one weight version."""

from collections.abc import Sequence

import numpy as np

from jpipe._table.messages import MessageTicks, wrong_message_ticks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.copies import has_copies
from jpipe.schedules.steady import steady_ticks


def refusal(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    replicas: Sequence[int] | None,
    max_delay: int | None,
    *,
    message_ticks: MessageTicks = 1,
) -> str | None:
    """The reason why `pipemare` refuses these arguments; None if it accepts them."""
    if wrong := wrong_counts_or_ticks(num_stages, num_microbatches, ticks, replicas):
        return wrong
    if wrong := wrong_message_ticks(message_ticks, num_stages if replicas is None else sum(replicas)):
        return wrong
    if max_delay is None:
        return None
    if not isinstance(max_delay, int | np.integer) or isinstance(max_delay, bool) or max_delay < 1:
        return (
            "`max_delay` must be a whole number of updates, at least 1, or None for no bound, got "
            f"{shown(max_delay)}: a pipeline that never drains has microbatches in flight at every update."
        )
    table = _table(num_stages, num_microbatches, ticks, replicas, message_ticks)
    delay = int(table.facts().forward_delay.max())
    if delay <= max_delay:
        return None
    advice = "Use more microbatches"
    if message_ticks == 1 and (replicas is None or not has_copies(replicas)):
        flight = num_stages - 1 if ticks == "unit" else 2 * num_stages - 1
        advice = f"Use {-(-flight // max_delay)} microbatches or more"
    return (
        f"a microbatch would cross {delay} updates between its forward and its backward, more than `max_delay` "
        f"{max_delay}: {num_microbatches} microbatches per update are too few for {num_stages} stages in {ticks} "
        f"ticks. {advice}, or allow a longer delay."
    )


def _table(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    replicas: Sequence[int] | None,
    message_ticks: MessageTicks,
) -> Schedule:
    """The table, whatever its delays."""
    steady = steady_ticks(num_stages, num_microbatches, ticks, replicas, message_ticks)
    return Schedule.from_ticks("pipemare", **steady)


@suggests
def pipemare(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    replicas: Sequence[int] | None = None,
    max_delay: int | None = None,
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """PipeMare: forwards and backwards read the newest weights.

    The pipeline never drains. The table is the round that repeats; a microbatch with a
    negative number entered in an earlier round. A stage updates when it has the gradients
    of a whole minibatch. Microbatches that are in flight at that time have read older
    weights, so a gradient is applied `forward_delay` versions after the weights that its
    forward read. Without PipeMare's corrections, which are Optax transforms
    (`jpipe.optim`), this is naive asynchronous training.

    *Unit* ticks: the delay of stage s is ceil((S - 1 - s) / N). *Paired* ticks, which are
    the paper's accounting: ceil((2 (S - 1 - s) + 1) / N), about twice as much. Neither
    layout has a bubble, and a smaller delay loses less accuracy (`docs/asynchronous.md`
    has an experiment), so unit ticks are the default. Paired ticks are fewer and larger
    and do not split the backward, which is faster on a CPU and for layers that take a few
    microseconds.

    With enough microbatches per update a microbatch crosses at most one update between its
    forward and its backward. Then the mismatch of their weights is so small that it needs no
    correction: this is PACI, whose bound ceil((S - 1) / N) is that of unit ticks. `max_delay`
    asks for such a bound.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per update, at least 1.
      ticks: "unit" or "paired".
      replicas: the number of copies r_s of each stage, such as (3, 1); None: one each. A copy
        takes every r_s-th microbatch, and all copies of a stage update together.
        *Paired* ticks move as many microbatches as the largest number L: N / L, rounded up,
        stands for N above. *Unit* ticks are PipeDream's runtime order: a copy that has n
        microbatches of a minibatch has a delay of at most ceil(w_s / n), with
        w_s = floor((R - 1 - sum of r_i over earlier stages) / r_s) of R devices, and a round
        takes about as long as the copy with the most microbatches.
      max_delay: the largest delay allowed on any stage, in updates, at least 1; PACI has 1.
        None: any.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of one round. Without copies it has T = 3 N unit or N paired ticks, and no
      bubble.

    Raises:
      ValueError: if either count is below 1, `ticks` is neither of the two, `replicas` or
        `message_ticks` do not fit, or a delay is longer than `max_delay`. The message says how many
        microbatches are enough.

    Example:
      Table 1 of the paper for S = 4, N = 2.

      >>> pipemare(4, 2, ticks="paired").facts().forward_delay.tolist()
      [4, 3, 2, 1]
      >>> pipemare(4, 2).facts().forward_delay.tolist()
      [2, 1, 1, 0]

      PACI for S = 4.

      >>> pipemare(4, 3, max_delay=1).facts().forward_delay.tolist()
      [1, 1, 1, 0]

    References:
      Yang et al., MLSys 2021, arXiv:1910.05124, section 2 and Table 1. Elam et al., Breaking the
      Bubble (PACI), 2026, arXiv:2606.07881.
    """
    raise_refusal(refusal(num_stages, num_microbatches, ticks, replicas, max_delay, message_ticks=message_ticks))
    return _table(num_stages, num_microbatches, ticks, replicas, message_ticks)
