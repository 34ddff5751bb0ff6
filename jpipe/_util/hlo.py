"""Reads compiled programs: their schedule, and where the compiler put every value.

XLA hands both out as serialized protocol buffers, `HloModuleProto` and `BufferAssignmentProto`. The numbers of their
fields are part of XLA's format (`xla/service/hlo.proto`, `xla/xla_data.proto`) and stay as they are, so a reader of the
wire format is enough.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_ALIASES = ("tuple", "get-tuple-element", "bitcast", "parameter", "opt-barrier")
"""Operations that neither read nor write an array."""

_CALLS = ("while", "conditional", "call")
"""Operations whose computations run in sequence with the others."""


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """`(number, value)` of every field of a message: an int, or bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = divmod(key, 8)
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if size is None:
            size, at = _varint(data, at)
        yield number, data[at : at + size]
        at += size


def ints(value: int | bytes) -> list[int]:
    """A repeated field of integers, packed or not."""
    if isinstance(value, int):
        return [value]
    values, at = [], 0
    while at < len(value):
        result, at = _varint(value, at)
        values.append(result)
    return values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer that begins at a position, and the position after it."""
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result, at


def _all(data: bytes) -> dict[int, list]:
    by_number: dict[int, list] = {}
    for number, value in fields(data):
        by_number.setdefault(number, []).append(value)
    return by_number


class Instruction(NamedTuple):
    """One instruction of a compiled program.

    Attributes:
      id: computation and instruction in one number.
      name: the compiler's.
      opcode: the kind of operation, such as "fusion".
      op_name: its origin, in JAX's words, such as "jit(f)/while/body/dot_general".
      source: "file:line", or "".
      operands: ids.
      called: ids of computations.
      element: the element that a get-tuple-element reads.
      parameter: number of a parameter.
    """

    id: int
    name: str
    opcode: str
    op_name: str
    source: str
    operands: tuple[int, ...]
    called: tuple[int, ...]
    element: int
    parameter: int


@dataclasses.dataclass
class HloValue:
    """One value of the program, and its place.

    Attributes:
      instruction: the instruction that computes it.
      num_bytes, offset: its bytes, and their offset in its allocation.
      start: position of that instruction in the schedule.
      end: one past the position of the last instruction that needs the value.
      writes, reads: positions.
    """

    instruction: Instruction
    num_bytes: int
    offset: int
    start: int
    end: int
    writes: list[int]
    reads: list[int]


class Allocation(NamedTuple):
    """Bytes that the program allocates at once.

    Attributes:
      num_bytes: bytes of all values.
      parameter: number of the argument that lies in it, or None.
      is_result: whether a result lies in it.
      is_temporary: whether it is the program's own.
      values: the values that lie in it, in order of time.
    """

    num_bytes: int
    parameter: int | None
    is_result: bool
    is_temporary: bool
    values: list[HloValue]


class HloProgram:
    """A compiled program: its instructions in the order in which they run, and its allocations.

    Bodies of loops and branches stand where they run: once each, before the instruction that calls them.

    Args:
      module: a serialized `HloModuleProto` with a schedule.
      assignment: a serialized `BufferAssignmentProto`.

    Attributes:
      order: the instructions.
      position: id of an instruction -> its position in `order`.
      span_of: id of a computation -> positions of its first instruction and one past its last.
    """

    def __init__(self, module: bytes, assignment: bytes):
        self._read_module(_all(module))
        self.order: list[Instruction] = []
        self.position: dict[int, int] = {}
        self.span_of: dict[int, tuple[int, int]] = {}
        self._caller: dict[int, Instruction] = {}
        self._flatten(self._entry)
        self.allocations = self._read_assignment(_all(assignment))

    def enclosing(self, position: int) -> list[Instruction]:
        """The calls in which an instruction runs, from the outside."""
        calls = []
        computation = self.order[position].id >> 32
        while computation in self._caller:
            call = self._caller[computation]
            calls.append(call)
            computation = call.id >> 32
        return calls[::-1]

    # -- The module

    def _read_module(self, module: dict[int, list]) -> None:
        frames = _frames(module[17][0]) if 17 in module else []
        self._entry = module[6][0]
        self._instructions: dict[int, Instruction] = {}
        self._sequence: dict[int, list[int]] = {}
        self._root: dict[int, int] = {}
        for computation in map(_all, module[3]):
            number = computation[5][0]
            self._root[number] = computation[6][0]
            ids = []
            for data in computation[2]:
                instruction = _instruction(data, frames)
                self._instructions[instruction.id] = instruction
                ids.append(instruction.id)
            self._sequence[number] = ids
        for entry in fields(module[7][0]) if 7 in module else ():
            pair = _all(entry[1])
            listed = [i for v in _all(pair[2][0]).get(1, []) for i in ints(v)]
            self._sequence[pair[1][0]] = listed
        self._users: dict[int, list[Instruction]] = {}
        for instruction in self._instructions.values():
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(instruction)

    def _flatten(self, computation: int) -> None:
        first = len(self.order)
        for number in self._sequence[computation]:
            instruction = self._instructions[number]
            if instruction.opcode in _CALLS:
                # A loop evaluates its condition, the second, before its body.
                for called in instruction.called[::-1] if instruction.opcode == "while" else instruction.called:
                    if called not in self.span_of:
                        self._caller[called] = instruction
                        self._flatten(called)
            self.position[number] = len(self.order)
            self.order.append(instruction)
        self.span_of[computation] = first, len(self.order)

    # -- Allocations

    def _read_assignment(self, assignment: dict[int, list]) -> list[Allocation]:
        places: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for data in assignment.get(1, []):
            buffer = _all(data)
            places.setdefault(buffer.get(1, [0])[0], []).append(_place(buffer[3][0]))
        for data in assignment.get(2, []):
            alias = _all(data)
            places.setdefault(alias.get(1, [0])[0], []).append(_place(alias[2][0]))
        allocations = []
        for data in assignment.get(3, []):
            by_number = _all(data)
            flag = {n: bool(by_number.get(n, [0])[0]) for n in (3, 5, 7, 12)}
            values = []
            for assigned in map(_all, by_number.get(9, [])):
                at = places[assigned.get(1, [0])[0]]
                size, offset = (assigned.get(n, [0])[0] for n in (3, 2))
                value = self._value(at, size, offset)
                if value is not None:
                    values.append(value)
            allocations.append(
                Allocation(
                    by_number.get(2, [0])[0],
                    by_number.get(6, [0])[0] if flag[5] else None,
                    flag[7],
                    not (flag[3] or flag[5] or flag[7] or flag[12]),
                    joined(values),
                )
            )
        return allocations

    def _value(self, places: Sequence[tuple[int, tuple[int, ...]]], size: int, offset: int) -> HloValue | None:
        """A value that occurs at some places. The first place is its definition. None if it never runs."""
        defined = self._instructions[places[0][0]]
        if defined.id not in self.position:
            return None  # inside of a fusion
        start = self.position[defined.id]
        value = HloValue(defined, size, offset, start, start + 1, [], [])
        if defined.opcode not in (*_ALIASES, *_CALLS):
            value.writes.append(start)
        for number, index in places:
            if number not in self.position:
                continue
            computation = number >> 32
            if number == self._root[computation]:
                # It leaves the computation.
                value.end = max(value.end, self.span_of[computation][1])
            for user in self._users.get(number, []):
                if user.id not in self.position or (
                    user.opcode == "get-tuple-element" and index and index[0] != user.element
                ):
                    continue
                at = self.position[user.id]
                if user.opcode == "while":
                    # From here on the body's parameter holds it.
                    at = min(self.span_of[c][0] for c in user.called)
                elif user.opcode not in (*_ALIASES, *_CALLS):
                    value.reads.append(at)
                value.end = max(value.end, at + 1)
        value.reads = sorted(set(value.reads))
        return value


def joined(values: Sequence[HloValue]) -> list[HloValue]:
    """Values of one allocation; those that hold one place at the same time are joined.

    Such values are names of one array: a loop's parameter and what the body hands on. An operation that writes its
    result over its operand ends the operand.
    """
    by_place: dict[tuple[int, int], list[HloValue]] = {}
    for value in sorted(values, key=lambda v: (v.start, -v.end)):
        held = by_place.setdefault((value.offset, value.num_bytes), [])
        if held and value.start < held[-1].end - 1:
            last = held[-1]
            last.end = max(last.end, value.end)
            last.writes = sorted({*last.writes, *value.writes})
            last.reads = sorted({*last.reads, *value.reads})
            names_nothing = last.instruction.opcode in (*_ALIASES, *_CALLS)
            if names_nothing or not last.instruction.op_name:
                last.instruction = value.instruction
            continue
        held.append(value)
    result = sorted(
        (value for held in by_place.values() for value in held),
        key=lambda v: (v.start, v.end),
    )
    # An operation that writes its result over an operand of another size or name.
    for value in result:
        for other in result:
            if other.start >= value.end:
                break
            if (
                other.start == value.end - 1
                and other is not value
                and value.start < other.start
                and other.offset < value.offset + value.num_bytes
                and value.offset < other.offset + other.num_bytes
            ):
                value.end = other.start
                break
    return result


def _place(data: bytes) -> tuple[int, tuple[int, ...]]:
    location = _all(data)
    index = tuple(i for v in location.get(3, []) for i in ints(v))
    return location[4][0], index


def _instruction(data: bytes, frames: Sequence[str]) -> Instruction:
    by_number = _all(data)
    metadata = _all(by_number[7][0]) if 7 in by_number and by_number[7][0] else {}
    frame = metadata.get(15, [0])[0]
    source = frames[frame - 1] if 0 < frame <= len(frames) else ""
    if not source and 3 in metadata:
        source = f"{metadata[3][0].decode()}:{metadata.get(4, [0])[0]}"
    return Instruction(
        by_number[35][0],
        by_number[1][0].decode(),
        by_number[2][0].decode(),
        metadata.get(2, [b""])[0].decode(),
        source,
        tuple(i for v in by_number.get(36, []) for i in ints(v)),
        tuple(i for v in by_number.get(38, []) for i in ints(v)),
        by_number.get(13, [0])[0],
        by_number.get(9, [0])[0],
    )


def _frames(data: bytes) -> list[str]:
    """ "file:line" of each stack frame."""
    index = _all(data)
    files = [name.decode() for name in index.get(1, [])]
    locations = [_all(v) for v in index.get(3, [])]
    places = []
    for frame in map(_all, index.get(4, [])):
        number = frame.get(1, [0])[0]
        if not number:
            places.append("")
            continue
        location = locations[number - 1]
        file = files[location.get(1, [1])[0] - 1]
        places.append(f"{file}:{location.get(3, [0])[0]}")
    return places


def program_of(compiled: Any) -> HloProgram | None:
    """The program of `jax.stages.Compiled`; None if its compiler gives no buffer assignment."""
    analysis = compiled.memory_analysis()
    assignment = getattr(analysis, "serialized_buffer_assignment_proto", None)
    if not assignment:
        return None
    (module,) = compiled.runtime_executable().hlo_modules()[:1]
    return HloProgram(module.as_serialized_hlo_module_proto(), assignment)


@functools.lru_cache(maxsize=4096)
def short(op_name: str) -> str:
    """The end of an op_name: the operation, without the names that JAX puts around it.

    Example:
      >>> short("jit(f)/while/body/closed_call/forward/stage0-3/cond/branch_1_fun/dot_general")
      'dot_general'
    """
    return op_name.rpartition("/")[2] or "value"
