"""List scheduling: builds a table tick by tick, and a rule picks among ready operations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe._table.counts import check_counts
from jpipe.simulate import TRANSFERS


class Job(NamedTuple):
    """The "forward", "backward" or "weight_grad" of a microbatch on a stage."""

    kind: str
    stage: int
    microbatch: int


_KINDS = ("forward", "backward", "weight_grad")


class Progress:
    """Counts the operations that every stage has started. A rule reads it.

    Attributes:
      device: `[S]`, the device of each stage.
      forward, backward, weight_grad: `[S]`, the number of operations started per stage.
    """

    def __init__(self, device: Sequence[int]):
        self.device = np.asarray(device)
        counts = np.zeros((3, len(self.device)), int)
        self.forward, self.backward, self.weight_grad = counts
        num_devices = int(self.device.max()) + 1
        self._started = {kind: [0] * num_devices for kind in _KINDS}

    def started(self, kind: str, device: int) -> int:
        """Operations of a kind that a device has started, over its stages."""
        return self._started[kind][device]

    def in_flight(self, device: int) -> int:
        """Microbatches with a forward and no weight gradient, over a device's stages."""
        return self.started("forward", device) - self.started("weight_grad", device)

    def pending(self, device: int) -> int:
        """Weight gradients that a device could compute and has not started."""
        return self.started("backward", device) - self.started("weight_grad", device)

    def start(self, operation: Job) -> None:
        """Counts an operation."""
        kind, stage, _ = operation
        getattr(self, kind)[stage] += 1
        self._started[kind][self.device[stage]] += 1


Rule = Callable[[int, list[Job], Progress], Job | None]
"""`(device, ready operations, progress) -> the operation to run, or None to wait`.

It depends on the progress of its device alone: it is asked again when the device is free or one more operation is
ready."""


def list_schedule(
    device: Sequence[int],
    num_microbatches: int,
    choose: Rule,
    lengths: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    """Arguments of `Schedule.from_ticks` for a synchronous table in unit ticks.

    Time advances from event to event: the end of an operation, or the arrival of a
    message. At each event the free devices choose an operation. If all operations have
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
    ahead = _Ahead(device, N, lengths)
    D = int(progress.device.max()) + 1
    ticks = {kind: np.full((N, S), -1) for kind in _KINDS}
    next_tick, free_from = [0] * D, [0.0] * D
    ask_from = [0.0] * D  # before, the device is busy, or nothing new is ready
    now, num_started = 0.0, 0
    while num_started < 3 * S * N:
        for d in range(D):
            if max(free_from[d], ask_from[d]) > now:
                continue
            ready, ask_from[d] = ahead.ready(d, now)
            operation = choose(d, ready, progress)
            if operation is None:
                continue
            kind, s, m = operation
            ask_from[d] = free_from[d] = now + lengths[kind][s]
            # Its readers on other devices may become ready, so their devices are asked again.
            for other, time in ahead.start(operation, free_from[d]):
                ask_from[other] = min(ask_from[other], time)
            tick: float = now
            if not equal:
                # Times are no ticks: the device keeps its order, and each operation takes the first tick after its
                # inputs.
                after = [ticks[o.kind][m, o.stage] + 1 for o in inputs(operation, S)]
                tick = max(next_tick[d], *after, 0)
                next_tick[d] = int(tick) + 1
            ticks[kind][m, s] = tick
            progress.start(operation)
            num_started += 1
        # The same time again, after an operation that takes no time.
        now_or_later = [t for t in map(max, free_from, ask_from) if t < np.inf]
        if not now_or_later and num_started < 3 * S * N:
            raise RuntimeError(
                f"every device waits at time {now:g}, with {3 * S * N - num_started} "
                "operations left: the rule chose none of those that are ready."
            )
        now = min(now_or_later, default=now)
    return dict(device=np.asarray(device), **ticks)


class _Ahead:
    """The next operation of every kind and stage, and from when on its inputs can be read.

    Args:
      device: `[S]`, the device of each stage.
      num_microbatches: N.
      lengths: see `list_schedule`.
    """

    def __init__(
        self,
        device: Sequence[int],
        num_microbatches: int,
        lengths: Mapping[str, Sequence[float]],
    ):
        self._num_microbatches, S = num_microbatches, len(device)
        self._ends: dict[tuple[str, int], list[float]] = {(kind, s): [] for kind in _KINDS for s in range(S)}
        self._device_of = {key: int(device[key[1]]) for key in self._ends}
        # For each kind and stage the ends of what it reads, and the seconds of the messages.
        self._inputs: dict[tuple[str, int], list[tuple[list[float], float]]] = {}
        self._readers: dict[tuple[str, int], list[tuple[str, int]]] = {key: [] for key in self._ends}
        for kind, s in self._ends:
            self._inputs[kind, s] = []
            for source, r, _ in inputs(Job(kind, s, 0), S):
                transfer = float(lengths[TRANSFERS[source]][min(r, s)])
                seconds = transfer if device[r] != device[s] else 0.0
                self._inputs[kind, s].append((self._ends[source, r], seconds))
                self._readers[source, r].append((kind, s))
        # Infinite where an input has not started, or nothing is left.
        self._readable_from = dict.fromkeys(self._ends, np.inf)
        self._readable_from["forward", 0] = 0.0
        self._on_device: list[list[tuple[str, int]]] = [
            [key for key in self._ends if self._device_of[key] == d] for d in range(max(device) + 1)
        ]

    def ready(self, device: int, now: float) -> tuple[list[Job], float]:
        """The operations of a device whose inputs can be read, and when one more can; infinite: not known."""
        operations, next_time = [], np.inf
        for key in self._on_device[device]:
            time = self._readable_from[key]
            if time <= now:
                operations.append(Job(*key, len(self._ends[key])))
            elif time < next_time:
                next_time = time
        return operations, next_time

    def start(self, operation: Job, end: float) -> list[tuple[int, float]]:
        """Starts an operation: the devices of its readers, and from when on they can read all their inputs.

        Args:
          operation: the next of its kind and stage.
          end: its end.
        """
        kind, s, m = operation
        self._ends[kind, s].append(end)
        self._update((kind, s))
        readers = []
        for key in self._readers[kind, s]:
            if len(self._ends[key]) == m:
                self._update(key)
                readers.append((self._device_of[key], self._readable_from[key]))
        return readers

    def _update(self, key: tuple[str, int]) -> None:
        """Finds when the inputs of the next operation of a kind and stage can be read."""
        m, time = len(self._ends[key]), 0.0
        if m == self._num_microbatches:
            time = np.inf
        else:
            for ends, seconds in self._inputs[key]:
                time = max(time, ends[m] + seconds) if m < len(ends) else np.inf
        self._readable_from[key] = time


def inputs(operation: Job, num_stages: int) -> list[Job]:
    """The operations whose results an operation reads."""
    kind, s, m = operation
    sources = {
        "forward": [("forward", s - 1)],
        "backward": [("forward", s), ("backward", s + 1)],
        "weight_grad": [("backward", s)],
    }[kind]
    return [Job(k, r, m) for k, r in sources if 0 <= r < num_stages]
