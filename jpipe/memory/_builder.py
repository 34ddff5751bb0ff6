"""The parts of a pipeline's timeline that all blocks use: times, words, and the allocations of one device.

Letters: T ticks, C columns, N microbatches, s a stage, m a microbatch.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jpipe.engine.shapes import local_bytes
from jpipe.memory._block import Access, Block
from jpipe.memory._clock import Clock
from jpipe.memory._timeline import idle_blocks
from jpipe.program import Program
from jpipe.schedule import IDLE

TABLE = "scalars of the table"
"""The argument of a step that is no state and no minibatch."""


class Builder:
    """Collects the blocks of a device, allocation by allocation."""

    def __init__(self, program: Program, device: int, profile: Any):
        self.program, self.device = program, device
        self.engine, self.stages = program.engine, program.engine.stages
        self.lowered, self.layout = self.engine.lowered, self.engine.layout
        self.schedule = self.lowered.schedule
        self.platform = program.settings.platform
        self.clock = Clock(self.lowered, self.stages.starts, device, profile)
        columns = np.flatnonzero(self.schedule.device == device).tolist()
        self.columns: list[int] = columns
        self.held = sorted({int(self.schedule.stage[c]) for c in columns})
        self.lanes = self._lanes()
        self.blocks: list[Block] = []

    # -- Words and times

    def _lanes(self) -> dict[tuple[str, int, int], int]:
        """`(operation, column, tick in the table)` -> lane."""
        lanes = {}
        for name, operations in self.lowered.operations.items():
            for t, d, lane in np.argwhere(operations.stage >= 0).tolist():
                if d == self.device:
                    key = name, int(operations.column[t, d, lane]), t
                    lanes[key] = 0 if name == "update" else lane
        return lanes

    def at(self, name: str, column: int, tick: int, fraction: float) -> float:
        """The time at which a fraction of a column's operation is over."""
        lane = self.lanes.get((name, column, tick % self.schedule.num_ticks), 0)
        return self.clock.at(tick, name, fraction, lane)

    def in_layer(self, name: str, column: int, tick: int, layer: int | None) -> float:
        """The time at which half of a layer's part of an operation is over; None: of the loss."""
        s = int(self.schedule.stage[column])
        layers = self.stages.layers_of(s)
        if layer is None:
            fraction = 0.0 if name == "backward" else 1.0
        else:
            fraction = self.clock.layer(name, s, layers, layer)
        return self.at(name, column, tick, fraction)

    def words(self, stage: int, layer: int | None = None) -> str:
        if layer is None:
            return f"stage {stage}"
        return f"stage {stage}, layer {layer} ({self.stages.layers[layer].name})"

    def block(
        self,
        name: str,
        use: str,
        num_bytes: int,
        start: float,
        stop: float,
        accesses: Iterable[tuple[float, str]] = (),
        stage: int | None = None,
        layers: tuple[int, int] | None = None,
    ) -> Block:
        """A block whose beginning is moved into the step."""
        shift = start // self.clock.period * self.clock.period
        listed = sorted({(time - shift, kind) for time, kind in accesses})
        return Block(
            name,
            use,
            int(num_bytes),
            start - shift,
            stop - shift,
            tuple(Access(time, kind) for time, kind in listed),
            stage,
            layers,
            self.device,
        )

    def always(self, name: str, use: str, num_bytes: int, accesses: Iterable = (), **of: Any) -> Block:
        """A block that lives all the time."""
        period = self.clock.period
        inside = [(time % period, kind) for time, kind in accesses]
        return self.block(name, use, num_bytes, 0.0, period, inside, **of)

    def add(self, name: str, num_bytes: int, blocks: Sequence[Block]) -> None:
        """Adds an allocation: its blocks, and the room between them."""
        if not num_bytes:
            return
        blocks = [block for block in blocks if block.num_bytes]
        free = idle_blocks(name, num_bytes, blocks, self.clock.period, self.device)
        self.blocks += [*blocks, *free]
        not_state = "minibatch", TABLE, "temporaries"
        if self.program.settings.donate or name in not_state:
            return
        copies = [dataclasses.replace(b, name=f"new state: {b.name}", accesses=()) for b in [*blocks, *free]]
        self.blocks += copies

    def num_bytes(self, shapes: Any) -> int:
        return local_bytes(shapes, self.platform)

    def unit_bytes(self, shapes: dict, unit: Any) -> int:
        """Bytes of the arrays of a vocabulary layer."""
        mine = {n: a for n, a in shapes.items() if n.startswith(f"{unit.name} ")}
        return self.num_bytes(mine)

    def update_time(self, stage: int, fraction: float, number: int = 0) -> float:
        """The time at which the update of a stage that writes version 1 + number is over to a fraction."""
        column = int(self.schedule.column_of_stage[stage])
        rounds, i = divmod(number, int(self.schedule.updates_in_round[stage]))
        tick = int(self.schedule.update_ticks_of_round()[i, column]) + rounds * self.schedule.num_ticks
        return self.clock.at(tick, "update", fraction)

    def update_accesses(self, stage: int, accesses: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
        """The accesses of all updates of a stage in a round, each at a fraction of an update."""
        numbers = range(int(self.schedule.updates_in_round[stage]))
        return [(self.update_time(stage, f, number), kind) for number in numbers for f, kind in accesses]

    def reads(self, column: int) -> list[tuple[str, int, int]]:
        """`(operation, tick, version)` of each operation of a column; the version is relative to the round."""
        schedule, before = self.schedule, self.schedule.updates_before()
        tables = [("forward", schedule.forward_ticks(), schedule.forward_versions())]
        backward = schedule.backward_versions()
        tables.append(("backward", schedule.backward_ticks(), backward))
        if schedule.splits_backward:
            tables.append(("weight_grad", schedule.weight_grad_ticks(), backward))
        return [
            (name, int(ticks[m, column]), int(versions[m, column] + before[m, column]))
            for name, ticks, versions in tables
            for m in range(schedule.num_microbatches)
            if ticks[m, column] != IDLE
        ]

    def columns_of(self, stage: int) -> list[int]:
        return [c for c in self.columns if self.schedule.stage[c] == stage]

    def add_whole(self, name: str, use: str, num_bytes: int, accesses: Iterable = ()) -> None:
        """Adds an allocation that one block fills all the time."""
        self.add(name, num_bytes, [self.always(name, use, num_bytes, accesses)])
