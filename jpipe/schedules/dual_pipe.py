"""DualPipe-V: most ticks hold a forward and a whole backward of two microbatches."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jpipe._table.cells import IDLE
from jpipe._table.messages import MessageTicks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import Schedule
from jpipe.schedules.arguments import down_and_up, raise_refusal, wrong_counts_or_halves
from jpipe.schedules.list_scheduling import Job, inputs
from jpipe.schedules.message_ticks import with_message_ticks


def refusal(num_stages: int, num_microbatches: int) -> str | None:
    """The reason why `dual_pipe_v` refuses these counts; None if it accepts them."""
    if wrong := wrong_counts_or_halves("DualPipe-V", num_stages, num_microbatches):
        return wrong
    if num_microbatches < num_stages:
        return (
            f"`num_microbatches` of DualPipe-V must be at least its {num_stages} stages, got "
            f"{shown(num_microbatches)}: with fewer, devices would have no backward for their forwards. Use "
            f"{num_stages}, or zero_bubble_v."
        )
    return None


@suggests
def dual_pipe_v(num_stages: int, num_microbatches: int, *, message_ticks: MessageTicks = 1) -> Schedule:
    """DualPipe-V: two stages per device, placed down the devices and up again, and both passes in most ticks.

        s0@0  F0 F1 F2 .  .  .  .  F3 .  .  .  .  .  .  .  .        S=4, N=4;
              .  .  .  .  .  .  .  .  B0 .  B1 .  B2 .  B3 .        time runs right
              .  .  .  .  .  .  .  .  W0 .  W1 .  .  W2 .  W3
        s1@1  .  F0 .  F1 .  F2 .  .  F3 .  .  .  .  .  .  .
              .  .  .  .  .  .  .  B0 .  B1 .  B2 .  B3 .  .
              .  .  .  .  .  .  .  W0 .  W1 .  W2 .  .  .  W3
        s2@1  .  .  F0 .  F1 .  .  F2 .  F3 .  .  .  .  .  .
              .  .  .  .  .  .  B0 .  B1 .  B2 .  B3 .  .  .
              .  .  .  .  .  .  W0 .  W1 .  W2 .  .  .  W3 .
        s3@0  .  .  .  F0 .  .  F1 .  F2 .  F3 .  .  .  .  .
              .  .  .  .  B0 .  .  B1 .  B2 .  B3 .  .  .  .
              .  .  .  .  .  W0 .  W1 .  W2 .  W3 .  .  .  .

    Device d runs the stages d and S - 1 - d, as in `zero_bubble_v`. In the middle of a step every tick of a device has
    a forward of one of its stages, and the input and weight gradient of a microbatch of the other one. Neither reads
    what the other writes. So the messages in the layers of one, such as the all-to-alls of experts, can travel while
    the other computes. At both ends weight gradients wait and fill the bubble.

    If a forward and an input gradient take F, a weight gradient W, both gradients B = F + W and a tick of both passes
    P, devices that do not wait for each other take N (F + B) times 2, and (S / 2 - 1) (P + B - 3 W) more. In
    lockstep, where all devices wait for the slowest of each tick, ticks of one operation beside ticks of both cost
    more: `zero_bubble_v` is faster where the layers do not communicate.

    Args:
      num_stages: S, even: twice the number of devices.
      num_microbatches: N, at least S.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of T = 2 N + 5 S / 2 - 2 ticks; with two stages one more.

    Raises:
      ValueError: if a count is below 1, `num_stages` is odd, N is less than S, or `message_ticks` do not fit.

    Example:
      Four devices. A forward, an input gradient and a weight gradient of one of 8 stages take a unit of time each.

      >>> facts = dual_pipe_v(8, 20).facts()
      >>> facts.num_ticks, facts.in_flight.tolist()
      (58, [8, 7, 6, 5, 4, 3, 2, 1])

    References:
      DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.2.1, has DualPipe. Its authors' repository
      deepseek-ai/DualPipe has this form, which keeps each stage on one device.
    """
    raise_refusal(refusal(num_stages, num_microbatches))
    S, D = num_stages, num_stages // 2
    cells = [deque(_cells(d, D, num_microbatches)) for d in range(D)]
    waiting: list[deque] = [deque() for _ in range(D)]  # the weight gradients of each device
    ticks: dict[str, Any] = {kind: np.full((num_microbatches, S), IDLE) for kind in _KINDS}
    number = {(kind, s): 0 for kind in ("forward", "backward") for s in range(S)}  # the next microbatch of each
    tick = 0
    while any(cells):
        due = [
            d
            for d in range(D)
            if cells[d]
            and all(number[source[:2]] > number[o] for o in cells[d][0].operations for source in inputs(Job(*o, 0), S))
        ]
        for d in due:
            cell = cells[d].popleft()
            for kind, s in cell.operations:
                m = number[kind, s]
                ticks[kind][m, s] = tick
                number[kind, s] += 1
                if kind == "backward":
                    waiting[d].append((m, s))
            if cell.weight_grad:
                ticks["weight_grad"][waiting[d].popleft()] = tick
        tick += 1
    arguments = dict(ticks, device=down_and_up(S))
    return Schedule.from_ticks("dual_pipe_v", **with_message_ticks(arguments, message_ticks))


_KINDS = ("forward", "backward", "weight_grad")


class _Cell(NamedTuple):
    """What a device runs in one tick.

    Attributes:
      forward: the stage of a forward; None: no forward.
      backward: the stage of an input gradient; None: none.
      weight_grad: whether the oldest weight gradient runs that waits, which may be that of `backward`.
    """

    forward: int | None = None
    backward: int | None = None
    weight_grad: bool = False

    @property
    def operations(self) -> list[tuple[str, int]]:
        """The kind and the stage of the forward and the backward."""
        operations = (("forward", self.forward), ("backward", self.backward))
        return [(kind, s) for kind, s in operations if s is not None]


def _cells(d: int, D: int, N: int) -> Iterator[_Cell]:
    """The ticks of device `d` of `D`, in order, without those in which it waits."""
    down, up = d, 2 * D - 1 - d
    after = D - 1 - d  # devices after this one
    yield from [_Cell(down)] * (2 * after)
    yield from [_Cell(down), _Cell(up)] * (d + 1)
    # The gradient goes on to the next device before the weight gradient is computed.
    yield from [_Cell(backward=up), _Cell(weight_grad=True), _Cell(up)] * after
    for i in range(N - 2 * D + d + 1):
        if i == 0 and after == 0:  # the first backward reads the forward of the tick before
            yield from (_Cell(down), _Cell(None, up, True))
        else:
            yield _Cell(down, up, True)
        yield _Cell(up, down, True)
    yield from [_Cell(None, up, True), _Cell(up, down, True)] * after
    # Nothing is left to run forward. The later half of the weight gradients waits, so that gradients go on earlier.
    backwards = [up, down] * (d + 1)
    for i, s in enumerate(backwards):
        yield _Cell(None, s, weight_grad=i <= d)
    yield from [_Cell(weight_grad=True), _Cell(backward=down)] * after
    yield from [_Cell(weight_grad=True)] * (d + 1)
