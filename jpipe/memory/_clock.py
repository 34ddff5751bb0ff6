"""The times at which operations of a table run on one device: in ticks, or in seconds of a profile.

Letters: T ticks, D devices, S stages.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jpipe.lowering.lower import Lowered
from jpipe.memory._block import on_grid


class Clock:
    """Times on one device.

    On the axis of ticks, the phases of a tick are equally long. In seconds, an operation takes what the profile says,
    in
    lockstep: a tick ends when its busiest device has finished, updates begin when all devices have computed, and
    everything else takes no time.

    Args:
      lowered: the table.
      starts: the first layer of each stage, then the number of layers.
      device: the device.
      profile: the result of `Pipeline.profile`, or None.

    Attributes:
      phases: `(operation, lane)` of each part of a tick; the first is "receive", the last "move".
      period: the length of a step.
      unit: "ticks" or "seconds".
      tick_starts: `[T]`.
    """

    def __init__(self, lowered: Lowered, starts: Sequence[int], device: int, profile: Any = None):
        self.lowered, self.starts, self.device = lowered, starts, device
        operations = lowered.operations
        self.phases: list[tuple[str, int]] = [("receive", 0)]
        for name in lowered.tick_order:
            if name in operations:
                lanes = 1 if name == "update" else operations[name].num_lanes
                self.phases += [(name, lane) for lane in range(lanes)]
        self.phases.append(("move", 0))
        self._number = {phase: i for i, phase in enumerate(self.phases)}
        T, P = lowered.schedule.num_ticks, len(self.phases)
        self.unit = "ticks" if profile is None else "seconds"
        self._layers: dict[str, list[float]] = {}
        if profile is None:
            bounds = np.arange(T)[:, None] + np.arange(P + 1) / P
        else:
            self._read(profile)
            bounds = self._bounds_in_seconds()
        self._bounds = bounds
        self.period = on_grid(float(bounds[-1, -1]))
        self.tick_starts = tuple(on_grid(t) for t in bounds[:, 0].tolist())

    def at(self, tick: int, operation: str, fraction: float = 0.0, lane: int = 0) -> float:
        """The time at which a fraction of a phase is over; ticks count on over all steps."""
        rounds, t = divmod(int(tick), len(self._bounds))
        i = self._number[operation, lane]
        first, last = self._bounds[t, i : i + 2].tolist()
        return on_grid(rounds * self.period + first + fraction * (last - first))

    def rounded(self, time: float) -> float:
        """The time on the grid of all times, see `on_grid`."""
        return on_grid(time)

    def layer(self, operation: str, stage: int, layers: range, layer: int) -> float:
        """The fraction of an operation of a stage that is over when half of a layer is."""
        before = [i for i in layers if i < layer]
        if operation == "backward":
            before = [i for i in layers if i > layer]
        seconds = self._layers.get(operation)
        of = (lambda i: 1.0) if seconds is None else (lambda i: seconds[i])
        whole = sum(map(of, layers))
        if not whole:
            return 0.5
        return (sum(map(of, before)) + of(layer) / 2) / whole

    def _read(self, profile: Any) -> None:
        if len(profile.layers) != self.starts[-1]:
            raise ValueError(
                f"`profile` has {len(profile.layers)} layers and the pipeline {self.starts[-1]}. Make it by "
                "`pipe.profile(batch)` of this pipeline."
            )
        split = self.lowered.schedule.splits_backward
        names = {"forward": "forward", "update": "update"}
        names["backward"] = "input_grad" if split else "backward"
        if split:
            names["weight_grad"] = "weight_grad"
        self._layers = {op: profile.seconds(name) for op, name in names.items()}

    def _bounds_in_seconds(self) -> np.ndarray:
        """`[T, P + 1]`: where the phases of the device begin and end."""
        T, D = self.lowered.schedule.num_ticks, self.lowered.schedule.num_devices
        lengths = np.zeros((T, D, len(self.phases)))
        for i, (name, lane) in enumerate(self.phases):
            if name not in self._layers:
                continue
            layer_seconds = self._layers[name]
            stages = self.lowered.operations[name].stage
            lanes = range(stages.shape[2]) if name == "update" else [lane]
            for t, d, j in np.argwhere(stages >= 0).tolist():
                if j in lanes:
                    s = int(stages[t, d, j])
                    lengths[t, d, i] += sum(layer_seconds[self.starts[s] : self.starts[s + 1]])
        update = self._number.get(("update", 0))
        work = lengths.copy()
        if update is not None:
            work[:, :, update] = 0
        computed = work.sum(axis=2).max(axis=1)
        ends = computed + (0 if update is None else lengths[:, :, update].max(axis=1))
        tick_start = np.concatenate([[0.0], np.cumsum(ends)])
        bounds = np.zeros((T, len(self.phases) + 1))
        mine = lengths[:, self.device]
        bounds[:, 1:] = np.cumsum(mine, axis=1)
        if update is not None:
            bounds[:, update] = computed
            bounds[:, update + 1] = computed + mine[:, update]
        bounds[:, -2:] = np.maximum(bounds[:, -2:], ends[:, None])
        bounds[:, -2] = np.where(ends > 0, ends, 0)
        if update is not None:
            bounds[:, update + 1] = ends  # the update is the last phase but the move
        return bounds + tick_start[:-1, None]
