"""PipeMare: no flush, one weight version."""

from collections.abc import Sequence

from jpipe.schedule import Schedule
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.steady import steady_ticks


def pipemare(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    replicas: Sequence[int] | None = None,
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

    Returns:
      A `Schedule` of one round. Without copies it has T = 3 N unit or N paired ticks, and no
      bubble.

    Raises:
      ValueError: if either count is below 1, `ticks` is neither of the two, or `replicas` does
        not fit.

    Example:
      Table 1 of the paper for S = 4, N = 2.

      >>> pipemare(4, 2, ticks="paired").facts().forward_delay.tolist()
      [4, 3, 2, 1]
      >>> pipemare(4, 2).facts().forward_delay.tolist()
      [2, 1, 1, 0]

    References:
      Yang et al., MLSys 2021, arXiv:1910.05124, section 2 and Table 1.
    """
    raise_refusal(wrong_counts_or_ticks(num_stages, num_microbatches, ticks, replicas))
    steady = steady_ticks(num_stages, num_microbatches, ticks, replicas)
    return Schedule.from_ticks("pipemare", **steady)
