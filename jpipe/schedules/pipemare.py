"""PipeMare: no flush, one weight version."""

from jpipe.schedule import Schedule
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.steady import steady_ticks


def pipemare(num_stages: int, num_microbatches: int, ticks: str = "unit") -> Schedule:
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

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per update, at least 1.
      ticks: "unit" or "paired".

    Returns:
      A `Schedule` of one round of T = 3 N unit or N paired ticks, without a bubble.

    Raises:
      ValueError: if either count is below 1, or `ticks` is neither of the two.

    Example:
      Table 1 of the paper for S = 4, N = 2.

      >>> pipemare(4, 2, ticks="paired").facts().forward_delay.tolist()
      [4, 3, 2, 1]
      >>> pipemare(4, 2).facts().forward_delay.tolist()
      [2, 1, 1, 0]

    References:
      Yang et al., MLSys 2021, arXiv:1910.05124, section 2 and Table 1.
    """
    raise_refusal(wrong_counts_or_ticks(num_stages, num_microbatches, ticks))
    return Schedule.from_ticks(
        "pipemare", **steady_ticks(num_stages, num_microbatches, ticks)
    )
