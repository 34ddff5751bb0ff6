"""List scheduling: builds a table tick by tick, and a rule picks among ready operations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe.schedule import check_counts
from jpipe.simulate import TRANSFERS


class Operation(NamedTuple):
    """The "forward", "backward" or "weight_grad" of a microbatch on a stage."""

    kind: str
    stage: int
    microbatch: int


class Progress:
    """How many operations every stage has started. A rule reads it.

    Attributes:
      device: `[S]`, the device of each stage.
      forward, backward, weight_grad: `[S]`, the number of operations started per stage.
    """

    def __init__(self, device: Sequence[int]):
        self.device = np.asarray(device)
        counts = np.zeros((3, len(self.device)), int)
        self.forward, self.backward, self.weight_grad = counts

    def in_flight(self, device: int) -> int:
        """Microbatches with a forward and no weight gradient, over a device's stages."""
        on_device = self.device == device
        return int((self.forward - self.weight_grad)[on_device].sum())

    def pending(self, device: int) -> int:
        """Weight gradients that a device could compute and has not started."""
        on_device = self.device == device
        return int((self.backward - self.weight_grad)[on_device].sum())


_KINDS = ("forward", "backward", "weight_grad")
Rule = Callable[[int, list[Operation], Progress], Operation | None]
"""`(device, ready operations, progress) -> the operation to run, or None to wait`."""


def list_schedule(
    device: Sequence[int],
    num_microbatches: int,
    choose: Rule,
    lengths: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a synchronous table in unit ticks.

    Time advances from event to event: the end of an operation, or the arrival of a
    message. At each event every free device chooses an operation. If all operations have
    the same length, a unit of time is a tick. For other lengths every device keeps the
    order that it has chosen, and each operation goes to the earliest tick after its
    inputs.

    Args:
      device: `[S]`, the device of each stage.
      num_microbatches: N, at least 1.
      choose: called with the number of a free device, the operations whose inputs the
        device can read (the next microbatch of each kind and stage), and the progress.
        Returns the operation to run, or None to wait for the next event.
      lengths: kind of operation -> `[S]`, its time; and "transfer" -> `[S]`, the time of
        a message from a stage to the next, "gradient_transfer" -> `[S]`, the time of a
        message back. None: every operation takes 1, every message 0.

    Returns:
      `device` and the ticks of `_KINDS`, each `[N, S]`.

    Raises:
      ValueError: if `num_microbatches` is below 1.
      RuntimeError: if every device waits although operations are left.

    Example:
      The rule runs the first operation that is ready; "backward" sorts before "forward".

      >>> rule = lambda device, ready, progress: min(ready, default=None)
      >>> list_schedule([0, 1], 1, rule)["backward"].tolist()
      [[3, 2]]
    """
    check_counts(num_microbatches=num_microbatches)
    S, N = len(device), num_microbatches
    equal = lengths is None
    if lengths is None:
        lengths = dict.fromkeys(_KINDS, [1] * S)
        lengths |= dict.fromkeys(TRANSFERS.values(), [0] * S)
    progress = Progress(device)
    stages_of_device = [
        np.flatnonzero(progress.device == d).tolist()
        for d in range(progress.device.max() + 1)
    ]
    ends: dict[Operation, float] = {}
    ticks = {kind: np.full((N, S), -1) for kind in _KINDS}
    next_tick = [0] * len(stages_of_device)
    free_from = [0.0] * len(stages_of_device)

    def readable_from(operation: Operation) -> float:
        """When the inputs of an operation can be read; infinite if one has not started."""
        return max(
            (
                ends.get(source, np.inf)
                + lengths[TRANSFERS[source.kind]][min(source.stage, operation.stage)]
                * (device[source.stage] != device[operation.stage])
                for source in _inputs(operation, S)
            ),
            default=0.0,
        )

    now = 0.0
    while len(ends) < 3 * S * N:
        events = []
        for d, stages in enumerate(stages_of_device):
            following = [
                Operation(kind, s, int(m))
                for kind in _KINDS
                for s in stages
                if (m := getattr(progress, kind)[s]) < N
            ]
            readable = {o: readable_from(o) for o in following}
            events += [max(free_from[d], t) for t in readable.values() if t < np.inf]
            if free_from[d] > now:
                continue
            ready = [o for o, time in readable.items() if time <= now]
            operation = choose(d, ready, progress)
            if operation is None:
                continue
            kind, s, m = operation
            ends[operation] = free_from[d] = now + lengths[kind][s]
            events.append(free_from[d])
            after = [ticks[o.kind][m, o.stage] + 1 for o in _inputs(operation, S)]
            ticks[kind][m, s] = now if equal else max(next_tick[d], *after, 0)
            next_tick[d] = int(ticks[kind][m, s]) + 1
            getattr(progress, kind)[s] += 1
        later = [time for time in [*events, *free_from] if time > now]
        if not later and len(ends) < 3 * S * N:
            raise RuntimeError(
                f"every device waits at time {now:g}, with {3 * S * N - len(ends)} "
                "operations left: the rule chose none of those that are ready."
            )
        now = min(later, default=now)
    return dict(device=np.asarray(device), **ticks)


def _inputs(operation: Operation, num_stages: int) -> list[Operation]:
    """The operations whose results an operation reads."""
    kind, s, m = operation
    sources = {
        "forward": [("forward", s - 1)],
        "backward": [("forward", s), ("backward", s + 1)],
        "weight_grad": [("backward", s)],
    }[kind]
    return [Operation(k, r, m) for k, r in sources if 0 <= r < num_stages]
