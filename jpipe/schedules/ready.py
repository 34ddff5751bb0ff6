"""Builds a table tick by tick: each device runs one of the operations that are ready, the one that a rule picks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe.schedule import check_counts
from jpipe.simulate import TRANSFERS


class Operation(NamedTuple):
    """One cell to be: "forward", "backward" or "weight_grad" of a microbatch on a stage."""

    kind: str
    stage: int
    microbatch: int


class Progress:
    """How far every stage is, for a rule to look at.

    Attributes:
      device: `[S]`, the device of each stage.
      forward, backward, weight_grad: `[S]`, how many microbatches have begun each.
    """

    def __init__(self, device: Sequence[int]):
        self.device = np.asarray(device)
        self.forward, self.backward, self.weight_grad = np.zeros(
            (3, len(self.device)), int
        )

    def in_flight(self, device: int) -> int:
        """Microbatches that a device has run forward and not wholly backward, over all its stages."""
        mine = self.device == device
        return int((self.forward - self.weight_grad)[mine].sum())

    def pending(self, device: int) -> int:
        """Weight gradients that a device could compute and has not."""
        mine = self.device == device
        return int((self.backward - self.weight_grad)[mine].sum())


_KINDS = ("forward", "backward", "weight_grad")
Rule = Callable[[int, list[Operation], Progress], Operation | None]


def place(
    device: Sequence[int],
    num_microbatches: int,
    choose: Rule,
    lengths: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a synchronous table in unit ticks.

    Time goes from one end of an operation to the next. Each device that is free then gets
    to choose. Where all operations are as long as each other, that makes the table; for
    other lengths every device keeps the order that it chose, each operation in the
    earliest tick after those that it waits for.

    Args:
      device: `[S]`, the device that each stage runs on.
      num_microbatches: N, at least 1.
      choose: called with the number of a free device, the operations whose inputs it can
        read (the next microbatch of each kind and stage) and the progress. Returns the
        one to run, or None to wait for something to change.
      lengths: kind of operation -> `[S]`, what it takes; and "transfer" -> `[S]`, until
        the device of the next stage can read a result, "gradient_transfer" -> `[S]`, until
        a stage's can read that of the next. None: 1 each, and no transfer.

    Raises:
      ValueError: if there are no microbatches.
      RuntimeError: if every device waits although something is left to do.

    Example: whatever is ready, backwards first
      >>> rule = lambda device, ready, progress: min(ready, default=None)
      >>> place([0, 1], 1, rule)["backward"].tolist()
      [[3, 2]]
    """
    check_counts(num_microbatches=num_microbatches)
    S, N = len(device), num_microbatches
    equal = lengths is None
    if lengths is None:
        lengths = dict.fromkeys(_KINDS, [1] * S)
        lengths |= dict.fromkeys(TRANSFERS.values(), [0] * S)
    progress = Progress(device)
    of_device = [
        np.flatnonzero(progress.device == d).tolist()
        for d in range(progress.device.max() + 1)
    ]
    ends: dict[Operation, float] = {}
    starts: dict[Operation, float] = {}
    ticks = {kind: np.full((N, S), -1) for kind in _KINDS}
    next_tick = [0] * len(of_device)
    free = [0.0] * len(of_device)

    def inputs(operation: Operation) -> list[Operation]:
        kind, s, m = operation
        needed = {
            "forward": [("forward", s - 1)],
            "backward": [("forward", s), ("backward", s + 1)],
            "weight_grad": [("backward", s)],
        }[kind]
        return [Operation(k, r, m) for k, r in needed if 0 <= r < S]

    def readable(operation: Operation) -> float:
        """When the inputs of an operation are there; never, if one has not begun."""
        return max(
            (
                ends.get(o, np.inf)
                + lengths[TRANSFERS[o.kind]][min(o.stage, operation.stage)]
                * (device[o.stage] != device[operation.stage])
                for o in inputs(operation)
            ),
            default=0.0,
        )

    now = 0.0
    while len(starts) < 3 * S * N:
        candidates = []
        for d, stages in enumerate(of_device):
            following = [
                Operation(kind, s, int(m))
                for kind in _KINDS
                for s in stages
                if (m := getattr(progress, kind)[s]) < N
            ]
            due = {o: readable(o) for o in following}
            candidates += [max(free[d], at) for at in due.values() if at < np.inf]
            if free[d] > now:
                continue
            operation = choose(d, [o for o, at in due.items() if at <= now], progress)
            if operation is None:
                continue
            kind, s, m = operation
            starts[operation] = now
            ends[operation] = free[d] = now + lengths[kind][s]
            candidates.append(free[d])
            after = [ticks[o.kind][m, o.stage] + 1 for o in inputs(operation)]
            ticks[kind][m, s] = now if equal else max(next_tick[d], *after, 0)
            next_tick[d] = int(ticks[kind][m, s]) + 1
            getattr(progress, kind)[s] += 1
        later = [at for at in [*candidates, *free] if at > now]
        if not later and len(starts) < 3 * S * N:
            raise RuntimeError(f"nothing runs at {now:g}, and all is not done.")
        now = min(later, default=now)
    return dict(device=np.asarray(device), **ticks)
