"""Arrays that the compiled step keeps inside of a tick, as blocks on the axis of the table."""

import re
from typing import Any

import numpy as np

from jpipe._util.hlo import HloProgram, HloValue, program_of, short
from jpipe.engine.scopes import Scope
from jpipe.memory._block import Block
from jpipe.memory._builder import Builder

_ALL = re.compile(r"/update/cond$")
_SMALL = 1 / 1000
"""Temporaries below this share of all of them count as idle."""


def temporaries(compiled: Any, builder: Builder, num_bytes: int) -> list[Block]:
    """The temporaries of a step on a device.

    A branch for an operation runs in the ticks in which the device runs the operation. Without a buffer assignment
    there is one block of all bytes.
    """
    program = program_of(compiled)
    if program is None:
        return [builder.always("temporaries of the step", "temporary", num_bytes)]
    scopes = _scopes(program)
    loop = _tick_loop(program, scopes)
    blocks: list[Block] = []
    offset = 0
    for allocation in program.allocations:
        if allocation.is_temporary:
            values = [v for v in allocation.values if v.num_bytes >= _SMALL * num_bytes]
            for value in values:
                blocks += _blocks(value, program, scopes, loop, builder)
            offset += allocation.num_bytes
    assert offset == num_bytes, (offset, num_bytes)
    return blocks


def _scopes(program: HloProgram) -> dict[int, tuple[str, set[int], int, int, int]]:
    """Id of a conditional -> operation, stages, lane, and the positions where its branches begin and end."""
    scopes: dict[int, tuple[str, set[int], int, int, int]] = {}
    lanes: dict[Scope, int] = {}
    for position, instruction in enumerate(program.order):
        if instruction.opcode != "conditional":
            continue
        spans = [program.span_of[c] for c in instruction.called]
        begin, end = min(a for a, _ in spans), position + 1
        scope = Scope.found_in(instruction.op_name)
        if scope is not None:
            lane = lanes.get(scope, 0)
            scopes[instruction.id] = scope.operation, set(scope.stages), lane, begin, end
            lanes[scope] = lane + 1
        elif _ALL.search(instruction.op_name):
            scopes[instruction.id] = "update", set(), 0, begin, end
    return scopes


def _tick_loop(program: HloProgram, scopes: dict) -> tuple[int, int]:
    """The positions where the body of the loop over ticks begins and ends."""
    for number in scopes:
        calls = [c for c in program.enclosing(program.position[number]) if c.opcode == "while"]
        if calls:
            spans = [program.span_of[c] for c in calls[0].called]
            return min(a for a, _ in spans), program.position[calls[0].id] + 1
    return 0, len(program.order)  # a table of one tick


def _blocks(
    value: HloValue,
    program: HloProgram,
    scopes: dict,
    loop: tuple[int, int],
    builder: Builder,
) -> list[Block]:
    """The blocks of a value: one for each tick in which it lives."""
    T, clock = builder.schedule.num_ticks, builder.clock
    name = short(value.instruction.op_name)
    if value.instruction.source:
        name += " at " + "/".join(value.instruction.source.split("/")[-2:])
    inside = [s for s in scopes.values() if s[3] <= value.start and value.end <= s[4]]
    if value.start < loop[0] or value.end > loop[1]:
        start = 0.0 if value.start < loop[0] else clock.period
        if value.end <= loop[0] or value.start >= loop[1]:
            return []  # before or after all ticks
        accesses = [(0.0, "write"), (clock.period, "read")]
        return [
            builder.block(
                f"{name}, all ticks",
                "temporary",
                value.num_bytes,
                min(start, 0.0),
                clock.period,
                accesses,
            )
        ]
    blocks = []
    for t in range(T):
        running = _running(t, scopes, builder)
        if inside and not any(s in running for s in inside):
            continue
        stage = None
        words = f"tick {t}"
        if inside:
            operation, stages, lane, *_ = inside[0]
            words += f", {operation.replace('_', ' ')}"
            if operation != "update":
                stage = int(builder.lowered.operations[operation].stage[t, builder.device, lane])
                words += f" of stage {stage}"
        xs, ys = [loop[0]], [clock.at(t, "receive", 0.0)]
        for operation, _, lane, begin, end in running:
            xs += [begin, end]
            ys += [clock.at(t, operation, f, lane) for f in (0.0, 1.0)]
        xs.append(loop[1])
        ys.append(clock.at(t, "move", 1.0))
        at = [value.start, value.end, *value.writes, *value.reads]
        start, stop, *times = (clock.rounded(x) for x in np.interp(at, xs, np.maximum.accumulate(ys)).tolist())
        if start == stop:
            continue
        kinds = ["write"] * len(value.writes) + ["read"] * len(value.reads)
        accesses = [(x, k) for x, k in zip(times, kinds) if start <= x <= stop]
        blocks.append(
            builder.block(
                f"{words}: {name} ({value.instruction.name})",
                "temporary",
                value.num_bytes,
                start,
                stop,
                accesses,
                stage=stage,
            )
        )
    return blocks


def _running(t: int, scopes: dict, builder: Builder) -> list[tuple]:
    """The scopes that the device runs in a tick, in their order."""
    running = []
    for scope in scopes.values():
        operation, stages, lane, *_ = scope
        table = builder.lowered.operations[operation].stage
        if operation == "update":
            runs = bool((table[t] >= 0).any())  # all devices enter an update together
        else:
            runs = lane < table.shape[2] and int(table[t, builder.device, lane]) in stages
        if runs:
            running.append(scope)
    return sorted(running, key=lambda s: s[3])
