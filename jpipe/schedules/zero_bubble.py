"""Zero-bubble schedules: weight gradients wait, and fill what would be a bubble."""

from jpipe.schedule import Schedule, check_counts
from jpipe.schedules.ready import Operation, Progress, place


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose stage s keeps s weight gradients waiting.

        s0 F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3      S=2, N=4; time runs right
        s1 .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3

    A stage takes forwards and input gradients in the order of 1F1B. A weight gradient runs
    where neither can, or where more than s wait. The bubble is (S - 1) (F + B - W), a third
    of that of 1F1B, with as many activations in flight on every stage as on the first of
    1F1B, min(N, S).

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1.

    Returns:
      A `Schedule` in unit ticks; for N >= S of T = 3 N + S - 1.

    Raises:
      ValueError: if either count is below 1.

    Example:
      >>> zero_bubble_h1(4, 8).facts().makespan
      27

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 2.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)

    def choose(s: int, ready: list[Operation], progress: Progress):
        of_kind = {operation.kind: operation for operation in ready}
        begun, done = progress.forward[s], progress.backward[s]
        warm = begun - done < num_stages - s and begun < num_microbatches
        turn = "forward" if warm else "backward"
        if progress.pending(s) > s or turn not in of_kind:
            turn = "weight_grad"
        return of_kind.get(turn)

    ticks = place(range(num_stages), num_microbatches, choose)
    return Schedule.from_ticks("zero_bubble_h1", **ticks)


def _backward_first(limit: int):
    """The rule: an input gradient, else a forward if fewer than `limit` are in flight, else a weight gradient.

    Of a device's forwards the one of the latest stage goes first, of its input gradients that of the earliest: both
    are the nearest to the end of their way.
    """

    def choose(device: int, ready: list[Operation], progress: Progress):
        def rank(operation: Operation):
            kind, s, _ = operation
            return {
                "backward": (0, s),
                "forward": (1, -s),
                "weight_grad": (2, s),
            }[kind]

        full = progress.in_flight(device) >= limit
        return min(
            (o for o in ready if not (full and o.kind == "forward")),
            key=rank,
            default=None,
        )

    return choose


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: no bubble between a device's first and last operation, for twice the memory.

        s0 F0 F1 F2 B0 W0 B1 F3 B2 W1 W2 B3 W3 .       S=2, N=4; time runs right
        s1 .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    An input gradient runs as soon as it can, else a forward while fewer than 2 S - 1
    microbatches are in flight, else a weight gradient. What is left of the bubble lies
    before a device's first forward and after its last weight gradient
    (`simulate(...).inner_bubble` is 0), where the next step begins earlier on the first
    stages; the optimizer's common step at the end of this table waits for all of them.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, at least 1; 2 S - 1 and more fill the pipeline.

    Returns:
      A `Schedule` in unit ticks; for N >= 2 S - 1 of T = 3 N + S - 1.

    Raises:
      ValueError: if either count is below 1.

    Example:
      >>> zero_bubble_h2(8, 24).facts().makespan
      79

    References:
      Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 2.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    rule = _backward_first(2 * num_stages - 1)
    ticks = place(range(num_stages), num_microbatches, rule)
    return Schedule.from_ticks("zero_bubble_h2", **ticks)


def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-V: two stages a device, down the devices and up again, at the memory of 1F1B.

        s0@0  F0  F1  .   .   .   .   .   B0  W0  B1  W1  .   .   S=4, N=2; time runs right
        s1@1  .   F0  .   F1  .   .   B0  .   B1  W0  W1  .   .
        s2@1  .   .   F0  .   F1  B0  .   B1  .   .   .   W0  W1
        s3@0  .   .   .   F0  B0  F1  B1  .   .   .   .   W0  W1

    Device d runs the stages d and S - 1 - d, so the last stage's gradients start on the
    device that has the first stage too. The rule is that of `zero_bubble_h2`, with at most
    S activations of a stage in flight on a device, which are as large as those of 1F1B on
    S / 2 devices.

    Args:
      num_stages: S, even: twice the devices.
      num_microbatches: N, at least 1.

    Returns:
      A `Schedule` in unit ticks, each the length of one of S stages.

    Raises:
      ValueError: if a count is below 1, or `num_stages` is odd.

    Example: 4 devices; of 51 ticks each device works 48
      >>> zero_bubble_v(8, 8).facts().makespan
      51

    References:
      Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024,
      arXiv:2405.15362, V-shape schedules.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    if num_stages % 2:
        raise ValueError(
            f"`num_stages` of ZB-V must be even, got {num_stages}: every device has two. Use {num_stages + 1}."
        )
    half = num_stages // 2
    device = [*range(half), *reversed(range(half))]
    ticks = place(device, num_microbatches, _backward_first(num_stages))
    return Schedule.from_ticks("zero_bubble_v", **ticks)
