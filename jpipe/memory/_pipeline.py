"""The timeline of a pipeline's step on one device: what `Pipeline.memory_timeline` returns.

What lives from tick to tick follows from the table and the layout of the state, what lives inside of a tick from the
compiled program.

Letters: T ticks, C columns, N microbatches, V weight versions, K slots of a ring, s a stage, m a microbatch.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jpipe._util.foreign import shown
from jpipe.costs import batch_bytes
from jpipe.engine.layout import REPLICATED, ArrayGroup
from jpipe.gradients.sums import places_of
from jpipe.memory._block import Access, Block
from jpipe.memory._clock import Clock
from jpipe.memory._rings import rings
from jpipe.memory._temporaries import temporaries
from jpipe.memory._timeline import Timeline, idle_blocks
from jpipe.mesh import DEVICE_MEMORY, HOST_MEMORY
from jpipe.program import Program
from jpipe.schedule import IDLE

_TABLE = "scalars of the table"
"""The argument of a step that is no state and no minibatch."""


def pipeline_timeline(
    program: Program, device: int = 0, profile: Any = None
) -> Timeline:
    """The timeline of a step. See `Pipeline.memory_timeline`."""
    num_devices = program.settings.schedule.num_devices
    if not hasattr(device, "__index__") or not 0 <= device < num_devices:
        raise ValueError(
            f'`device` must be a position along the axis "stage", 0 to {num_devices - 1}, got {shown(device)}.'
        )
    compiled = program.lower().compile()
    builder = Builder(program, int(device), profile)
    builder.add_state()
    builder.add_batch()
    builder.add_program(compiled)
    schedule = program.settings.schedule
    title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, device {device}"
    clock = builder.clock
    return Timeline(
        tuple(builder.blocks), clock.period, clock.unit, title, clock.tick_starts
    )


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
        found = {}
        for name, operations in self.lowered.operations.items():
            for t, d, lane in np.argwhere(operations.stage >= 0).tolist():
                if d == self.device:
                    key = name, int(operations.column[t, d, lane]), t
                    found[key] = 0 if name == "update" else lane
        return found

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

    def always(
        self, name: str, use: str, num_bytes: int, accesses: Iterable = (), **of: Any
    ) -> Block:
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
        not_state = "minibatch", _TABLE, "temporaries"
        if self.program.settings.donate or name in not_state:
            return
        copies = [
            dataclasses.replace(b, name=f"new state: {b.name}", accesses=())
            for b in [*blocks, *free]
        ]
        self.blocks += copies

    def num_bytes(self, shapes: Any) -> int:
        return ArrayGroup("", shapes, REPLICATED).num_bytes(self.platform)

    def unit_bytes(self, shapes: dict, unit: Any) -> int:
        """Bytes of the arrays of a vocabulary layer."""
        mine = {n: a for n, a in shapes.items() if n.startswith(f"{unit.name} ")}
        return self.num_bytes(mine)

    # -- The state

    def add_state(self) -> None:
        groups, settings = self.layout.groups, self.program.settings
        size = {n: group.num_bytes(self.platform) for n, group in groups.items()}
        self.add("weights", size["parameters"], self._weights())
        self.add("read weights", size["read_parameters"], self._read_weights())
        self.add("optimizer", size["optimizer_state"], self._optimizer())
        factors = settings.communication.accumulate_gradients is not None
        gradients = size["gradients"] + factors * size["gradient_compression"]
        self.add("gradients", gradients, self._gradients(gradients, factors))
        if not factors:
            self._whole(
                "compression of gradients",
                "compression",
                groups["gradient_compression"].shapes,
            )
        self._whole(
            "compression of messages",
            "compression",
            groups["message_compression"].shapes,
        )
        for name, word in (
            ("mutable_state", "mutable state"),
            ("loss_scale", "loss scale"),
            ("round", "number of steps"),
            ("started", "number of earlier microbatches"),
            ("key", "random key"),
        ):
            self._whole(word, "state", groups[name].shapes)
        self._whole(_TABLE, "state", [self.engine.local_rows])
        self._buffers(groups["buffers"].shapes)

    def _whole(self, name: str, use: str, shapes: Any, accesses: Iterable = ()) -> None:
        num_bytes = self.num_bytes(shapes)
        self.add(name, num_bytes, [self.always(name, use, num_bytes, accesses)])

    def _update_time(self, stage: int, fraction: float, rounds: int = 0) -> float:
        """When the update of a stage that writes version 1 + rounds is over to a fraction."""
        column = int(self.schedule.column_of_stage[stage])
        tick = (
            int(self.schedule.update_ticks()[column]) + rounds * self.schedule.num_ticks
        )
        return self.clock.at(tick, "update", fraction)

    def _reads(self, column: int) -> list[tuple[str, int, int]]:
        """`(operation, tick, version)` of each operation of a column that reads weights of a minibatch's version."""
        schedule = self.schedule
        tables = [("forward", schedule.forward_ticks(), schedule.forward_versions())]
        backward = schedule.backward_versions()
        tables.append(("backward", schedule.backward_ticks(), backward))
        if schedule.splits_backward:
            tables.append(("weight_grad", schedule.weight_grad_ticks(), backward))
        return [
            (name, int(ticks[m, column]), int(versions[m, column]))
            for name, ticks, versions in tables
            for m in range(schedule.num_microbatches)
            if ticks[m, column] != IDLE
        ]

    def _columns_of(self, stage: int) -> list[int]:
        return [c for c in self.columns if self.schedule.stage[c] == stage]

    def _versions(
        self,
        name: str,
        num_bytes: int,
        stage: int,
        layer: int | None,
        reads: Iterable[tuple[float, str]],
        **of: Any,
    ) -> list[Block]:
        """The blocks of a version of weights: as the newest one, and later."""
        written, replaced = (self._update_time(stage, 1.0, k) for k in (0, 1))
        accesses = [
            (written, "write"),
            *reads,
            (self._update_time(stage, 0.5, 1), "read"),
        ]
        last = max(time for time, _ in accesses)
        early = [a for a in accesses if a[0] <= replaced]
        blocks = [
            self.block(
                name, "weights", num_bytes, written, replaced, early, stage=stage, **of
            )
        ]
        if last > replaced:
            late = [a for a in accesses if a[0] > replaced]
            blocks.append(
                self.block(
                    name, "version", num_bytes, replaced, last, late, stage=stage, **of
                )
            )
        return blocks

    def _version_reads(self, stage: int, layer: int) -> list[tuple[float, str]]:
        """Reads of version 1 of a layer's weights, without those that a hook computes."""
        T, hooks = self.schedule.num_ticks, self.program.settings.hooks
        return [
            (self.in_layer(name, c, tick + (1 - version) * T, layer), "read")
            for c in self._columns_of(stage)
            for name, tick, version in self._reads(c)
            if {"weight_grad": "backward"}.get(name, name) not in hooks
        ]

    def _weights(self) -> list[Block]:
        blocks = []
        shapes = self.layout["parameters"].shapes
        for s in self.held:
            for layer, run, _ in self.stages.layer_runs(s):
                # Those in host memory are on the device while their layer runs, as temporaries.
                size = self.layout.leaf_bytes(
                    [place for place in run.parameters if not place.on_host],
                    self.stages.parameters.arrays,
                )
                blocks += self._versions(
                    f"{self.words(s, layer)}: weights",
                    size,
                    s,
                    layer,
                    self._version_reads(s, layer),
                    layers=(layer, layer + 1),
                )
        for unit in self.stages.vocabulary.units:
            size = self.unit_bytes(shapes, unit)
            V = int(self.lowered.rows.num_versions[unit.home])
            blocks += [
                self.always(f"{unit.name}: weights", "weights", size // V),
                self.always(f"{unit.name}: older weights", "version", size - size // V),
            ]
        return blocks

    def _read_weights(self) -> list[Block]:
        blocks = []
        for hooked in self.layout["read_parameters"].shapes:
            for s in self.held:
                for layer, run, _ in self.stages.layer_runs(s):
                    size = self.layout.leaf_bytes(
                        run.parameters, self.stages.parameters.arrays
                    )
                    reads = [
                        (self.in_layer(name, c, tick, layer), "read")
                        for c in self._columns_of(s)
                        for name, tick, _ in self._reads(c)
                        if {"weight_grad": "backward"}.get(name, name) == hooked
                    ]
                    reads.append((self._update_time(s, 0.9), "write"))
                    name = f"{self.words(s, layer)}: weights for {hooked}"
                    size *= int(self.lowered.rows.num_versions[s])
                    blocks.append(
                        self.always(
                            name,
                            "version",
                            size,
                            reads,
                            stage=s,
                            layers=(layer, layer + 1),
                        )
                    )
        return blocks

    def _optimizer(self) -> list[Block]:
        updates, blocks = self.engine.updates, []
        for s in self.held:
            pieces = updates.programs[updates.program_of_stage[s]].state
            size: int = sum(
                self.layout.leaf_bytes([piece.place], updates.state.arrays)
                for of_leaf in pieces
                for piece in of_leaf
                if piece.share in (None, 0) and not piece.place.on_host
            )
            times = [
                (self._update_time(s, 0.4), "read"),
                (self._update_time(s, 0.8), "write"),
            ]
            layers = self.stages.layers_of(s)
            blocks.append(
                self.always(
                    f"stage {s}: optimizer",
                    "optimizer",
                    size,
                    times,
                    stage=s,
                    layers=(layers.start, layers.stop),
                )
            )
        shapes = self.layout["optimizer_state"].shapes
        for unit in self.stages.vocabulary.units:
            blocks.append(
                self.always(
                    f"{unit.name}: optimizer",
                    "optimizer",
                    self.unit_bytes(shapes, unit),
                )
            )
        return blocks

    def _gradients(self, num_bytes: int, factors: bool) -> list[Block]:
        if factors:  # factors and their compressors, of all stages
            return [self.always("gradients", "gradient", num_bytes)]
        accumulating = "weight_grad" if self.schedule.splits_backward else "backward"
        arrays = {**self.stages.accumulators.arrays, **self.stages.factors.arrays}
        blocks = []
        for s in self.held:
            for layer, run, _ in self.stages.layer_runs(s):
                places = places_of(run.gradients)
                size = self.layout.leaf_bytes(
                    [place for place in places if not place.on_host], arrays
                )
                times = [
                    (self._update_time(s, f), k)
                    for f, k in ((0.2, "read"), (0.8, "write"))
                ]
                for c in self._columns_of(s):
                    for name, tick, _ in self._reads(c):
                        if name == accumulating:
                            time = self.in_layer(name, c, tick, layer)
                            times += [(time, "read"), (time, "write")]
                name = f"{self.words(s, layer)}: gradient"
                blocks.append(
                    self.always(
                        name,
                        "gradient",
                        size,
                        times,
                        stage=s,
                        layers=(layer, layer + 1),
                    )
                )
        shapes = self.layout["gradients"].shapes
        for unit in self.stages.vocabulary.units:
            blocks.append(
                self.always(
                    f"{unit.name}: gradient", "gradient", self.unit_bytes(shapes, unit)
                )
            )
        return blocks

    # -- In flight

    def _buffers(self, shapes: dict) -> None:
        for name, num_bytes, blocks in rings(self, shapes):
            self.add(name, num_bytes, blocks)
        for name in ("statistics", "squared_norm"):
            self._whole(name.replace("_", " "), "state", shapes[name])
        if "minibatch_weights" in shapes:
            weights = shapes["minibatch_weights"]
            self._whole("weights of minibatches", "batch", weights)
        if "batches" in shapes:
            self._whole(
                "kept minibatches", "batch", shapes["batches"], self._batch_reads()
            )

    def _batch_reads(self) -> list[tuple[float, str]]:
        """When the first and the last stage read the minibatch."""
        ends = {0, self.schedule.num_stages - 1}
        return [
            (
                self.at(name, c, tick, 0.0 if self.schedule.stage[c] == 0 else 1.0),
                "read",
            )
            for c in self.columns
            if int(self.schedule.stage[c]) in ends
            for name, tick, _ in self._reads(c)
            if name == "forward"
        ]

    def add_batch(self) -> None:
        num_bytes = batch_bytes(self.program)
        reads = [] if self.lowered.num_batches > 1 else self._batch_reads()
        if self.lowered.num_batches > 1:
            reads = [(0.0, "read")]
        self.add(
            "minibatch",
            num_bytes,
            [self.always("minibatch", "batch", num_bytes, reads)],
        )

    # -- The compiled program

    def add_program(self, compiled: Any) -> None:
        """Temporaries, and results that lie in no argument."""
        analysis = compiled.memory_analysis()
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        if not self.program.settings.donate:
            # On CPUs host memory is device memory to the compiler.
            kinds = (DEVICE_MEMORY, HOST_MEMORY)[: 1 + (self.platform == "cpu")]
            results -= sum(
                g.num_bytes(self.platform, kind)
                for g in self.layout.groups.values()
                for kind in kinds
            )
        results = max(int(results), 0)
        if results:
            self.blocks.append(self.always("results of the step", "result", results))
        temp = int(analysis.temp_size_in_bytes)
        self.add("temporaries", temp, temporaries(compiled, self, temp))
