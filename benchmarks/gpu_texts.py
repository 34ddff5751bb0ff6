"""Parses what XLA writes about a program for GPUs.

- `Hlo`: the optimised HLO, computations of instructions in the order of execution;
- `Buffers`: the buffer assignment, where in memory each value lies;
- `parse_thunks`: the thunk sequence, what the runtime executes.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Bytes per number of XLA's types.
_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4}
_BYTES |= {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "pred": 1, "s8": 1, "u8": 1}

# Operations that move an array, perhaps in another layout, and compute nothing.
_MOVES = {"parameter", "copy", "copy-start", "transpose", "bitcast"}
# Operations that change at most the place, the order or the dtype of numbers.
_SLICES = {"slice", "dynamic-slice", "dynamic-update-slice", "concatenate"}
_RENAMES = {"reshape", "convert", "tuple", "get-tuple-element", "constant", "broadcast", "pad"}
# What devices exchange within an operation or an update. Messages are permutes, which do not count here.
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast"}
# Operations that do not change where the array of a `dynamic-update-slice` comes from.
_VIEWS = {"bitcast", "reshape", "convert"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
      name: its name, with "%".
      shape: the printed shape of its result, with the layout.
      opcode: what it does.
      operands: names of the instructions whose results it reads.
      scope: JAX's name of the operation that it comes from.
      branches: computations of a conditional, in the order of XLA.
      calls: computations that it calls: of a fusion, a call, or the body of a loop.
      trip_count: turns of a loop, None if XLA does not know the number.
      line: the printed line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    scope: str
    branches: tuple[str, ...]
    calls: tuple[str, ...]
    trip_count: int | None
    line: str

    @classmethod
    def parse(cls, line: str) -> "Instruction":
        """The instruction of a printed line.

        Example:
          >>> i = Instruction.parse("  ROOT %a.1 = f32[2]{0} add(%x, %y), metadata={}")
          >>> i.name, i.shape, i.opcode, i.operands
          ('%a.1', 'f32[2]{0}', 'add', ('%x', '%y'))
        """
        name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
        if rest.startswith("("):
            end = _closing(rest)
            shape, rest = rest[: end + 1], rest[end + 2 :]
        else:
            shape, rest = rest.split(" ", 1)
        opcode = rest.split("(", 1)[0]
        arguments = rest[len(opcode) :]
        scope = re.search(r'op_name="([^"]*)"', line)
        turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        branches = re.search(r"branch_computations=\{([^}]*)\}", line)
        either = re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", line)
        return cls(
            name=name,
            shape=shape,
            opcode=opcode,
            operands=tuple(re.findall(r"%[\w.\-]+", arguments[: _closing(arguments) + 1])),
            scope=scope[1] if scope else "",
            branches=tuple(branches[1].split(", ") if branches else either),
            calls=tuple(re.findall(r"(?:calls|body|to_apply)=(%[\w.\-]+)", line)),
            trip_count=int(turns[1]) if turns else None,
            line=line,
        )

    @property
    def bytes(self) -> int:
        """Bytes of the result; of a tuple, of its first array."""
        return shape_bytes(self.shape)

    @property
    def layout(self) -> str:
        """The layout of the result: the order of its dims in memory."""
        layout = re.search(r"\{([\d,]*)", self.shape)
        return layout[1] if layout else ""


def _closing(text: str) -> int:
    """The position of the parenthesis that closes the first one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    raise ValueError(f"an instruction has an open parenthesis: {text[:80]!r}.")


def shape_bytes(shape: str) -> int:
    """Bytes of the first array of a printed shape.

    Example:
      >>> shape_bytes("(bf16[4,1000]{1,0}, u32[])")
      8000
    """
    array = re.search(r"(\w+)\[([\d,]*)\]", shape)
    if array is None:  # a token
        return 0
    size = _BYTES.get(array[1], 4)
    for n in array[2].split(","):
        size *= int(n) if n else 1
    return size


def all_bytes(shape: str) -> int:
    """Bytes of all arrays of a printed shape.

    Example:
      >>> all_bytes("(bf16[4,1000]{1,0}, f32[5])")
      8020
    """
    return sum(shape_bytes(array) for array in re.findall(r"\w+\[[\d,]*\]", shape))


class Result(NamedTuple):
    """An array that a fusion writes.

    Attributes:
      index: of the result, as XLA prints it; "" if the fusion has one result.
      size: bytes of the array.
      written: bytes that the fusion writes if it gets the array in place.
      operand: number of the operand whose slice it replaces; None if it writes the whole array.
    """

    index: str
    size: int
    written: int
    operand: int | None


class Hlo:
    """The optimised HLO of a program.

    Attributes:
      computations: name -> instructions, in the order of execution.
      entry: name of the computation that the program starts with.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY ")) and line.rstrip().endswith("{"):
                name = line.removeprefix("ENTRY ").split()[0]
                current = self.computations.setdefault(name, [])
                if line.startswith("ENTRY "):
                    self.entry = name
            elif line.startswith("}"):
                current = None
            elif current is not None and " = " in line:
                current.append(Instruction.parse(line))
        if not self.entry:
            raise ValueError("the text has no ENTRY computation: it is not HLO.")
        # Parts of the program call one computation once, so a name is unique.
        self.by_name = {i.name: i for c in self.computations.values() for i in c}

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of a fusion."""
        return self.computations[instruction.calls[0]]

    def executed(self, kernel: Instruction) -> list[Instruction]:
        """The instructions that a kernel executes: those of a fusion, or the one that it is."""
        return self.fused(kernel) if kernel.opcode == "fusion" else [kernel]

    def all_of(self, computation: str) -> Iterator[Instruction]:
        """All instructions that a computation may execute, in any branch; no fused ones."""
        for instruction in self.computations[computation]:
            yield instruction
            for called in self.inner(instruction):
                yield from self.all_of(called)

    @staticmethod
    def inner(instruction: Instruction) -> tuple[str, ...]:
        """The computations that an instruction executes as lists of instructions."""
        if instruction.opcode == "conditional":
            return instruction.branches
        if instruction.opcode in ("while", "call", "async-start"):
            return instruction.calls
        return ()

    def is_product(self, instruction: Instruction) -> bool:
        """Whether an instruction is a matrix product or a convolution."""
        if instruction.opcode == "custom-call":
            return "__cublas" in instruction.line or "__cudnn" in instruction.line
        if instruction.opcode == "fusion":  # perhaps of a call with slices
            return any(map(self.is_product, self.fused(instruction)))
        return instruction.opcode in ("dot", "convolution")

    def is_collective(self, instruction: Instruction) -> bool:
        """Whether an instruction is an exchange between devices, or the wait for one; not a permute, and no start."""
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            start = self.by_name[instruction.operands[0]]
            name = start.opcode.removesuffix("-start")
            return name in _COLLECTIVES or (name == "fusion" and self._fuses_collective(start))
        return opcode in _COLLECTIVES or (opcode == "fusion" and self._fuses_collective(instruction))

    def _fuses_collective(self, fusion: Instruction) -> bool:
        return any(i.opcode in _COLLECTIVES for i in self.fused(fusion))

    def is_transpose(self, instruction: Instruction) -> bool:
        """Whether an instruction changes the order of an array's dims in memory and nothing else."""
        if instruction.opcode == "copy":
            operand = self.by_name.get(instruction.operands[0])
            return operand is not None and operand.layout != instruction.layout
        if instruction.opcode != "fusion" or instruction.shape.startswith("("):
            return False
        opcodes = {i.opcode for i in self.fused(instruction)}
        return opcodes <= _MOVES and bool(opcodes & {"copy", "transpose"})

    def only_moves(self, instruction: Instruction) -> bool:
        """Whether an instruction only brings numbers to another place or dtype. It may compute the place."""
        moves = _MOVES | _SLICES | _RENAMES
        return all(i.opcode in moves or re.match(r"(s32|u32|pred)\[\]", i.shape) for i in self.executed(instruction))

    def traffic(self, kernel: Instruction) -> int:
        """Bytes that a kernel or a copy reads and writes. Of a slice these are the bytes of the slice."""
        if kernel.opcode == "fusion":
            inside = self.fused(kernel)
            read = sum(_read_bytes(i, inside) for i in inside if i.opcode == "parameter")
            return read + sum(result.written for result in self.results(kernel))
        if kernel.opcode == "dynamic-update-slice":
            return 2 * self.by_name[kernel.operands[1]].bytes
        if kernel.opcode in ("slice", "dynamic-slice", "copy", "copy-start"):
            return 2 * kernel.bytes
        operands = (self.by_name[name] for name in kernel.operands if name in self.by_name)
        return kernel.bytes + sum(operand.bytes for operand in operands)

    def results(self, fusion: Instruction) -> Iterator["Result"]:
        """The arrays that a fusion writes."""
        inside = self.fused(fusion)
        by_name = {i.name: i for i in inside}
        root = next(i for i in inside if i.line.lstrip().startswith("ROOT "))

        def source(name: str) -> Instruction:
            instruction = by_name[name]
            while instruction.opcode in _VIEWS:
                instruction = by_name[instruction.operands[0]]
            return instruction

        is_tuple = root.opcode == "tuple"
        for k, name in enumerate(root.operands if is_tuple else [root.name]):
            result, index = source(name), f"{{{k}}}" if is_tuple else ""
            written, operand = by_name[name].bytes, None
            if result.opcode == "dynamic-update-slice":
                array = source(result.operands[0])
                if array.opcode == "parameter":
                    if _reads_only_what_it_writes(inside, source, result, array):
                        written = by_name[result.operands[1]].bytes
                    operand = int(re.search(r"parameter\((\d+)\)", array.line)[1])
            yield Result(index, by_name[name].bytes, written, operand)


def _read_bytes(array: Instruction, inside: Sequence[Instruction]) -> int:
    """Bytes that the instructions of a fusion read of an array."""
    read = 0
    for i in inside:
        if array.name not in i.operands:
            continue
        if i.opcode in ("bitcast", "reshape"):
            read += _read_bytes(i, inside)
        elif i.opcode in ("slice", "dynamic-slice") and i.operands[0] == array.name:
            read += i.bytes
        elif i.opcode != "dynamic-update-slice" or i.operands[0] != array.name:  # that one writes
            return array.bytes
    return min(read, array.bytes)


def _reads_only_what_it_writes(
    inside: Sequence[Instruction],
    source: Callable[[str], Instruction],
    update: Instruction,
    array: Instruction,
) -> bool:
    """Whether a fusion with an update of `array` reads no other elements of it.

    XLA writes the whole array otherwise, even if the result lies where the array lies.

    Args:
      inside: the instructions of the fusion.
      source: name of an instruction -> what it is a view of.
      update: the `dynamic-update-slice`.
      array: the parameter that it updates.
    """
    sizes = {i.name: i.bytes for i in inside}
    for i in inside:
        if i is update or i.opcode in _VIEWS:
            continue
        if all(source(name) is not array for name in i.operands):
            continue
        same_place = i.operands[1:] == update.operands[2:]
        same_size = i.bytes == sizes[update.operands[1]]
        if not (i.opcode == "dynamic-slice" and same_place and same_size):
            return False
    return True


class Place(NamedTuple):
    """Where a value lies: number of the allocation, and offset in bytes."""

    allocation: int
    offset: int


class Buffers:
    """The buffer assignment of a program.

    Args:
      assignment: the text "buffer-assignment".
      values: the text "buffer-assignment-values".
    """

    def __init__(self, assignment: str, values: str):
        places: dict[int, Place] = {}
        self._results: dict[tuple[str, str], Place] = {}
        allocation = -1
        for line in assignment.splitlines():
            if header := re.match(r"allocation (\d+):", line):
                allocation = int(header[1])
            value = re.match(
                r" value: <(\d+) (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> "
                r"\(size=\d+,offset=(\d+)\)",
                line,
            )
            if value:
                place = Place(allocation, int(value[4]))
                places[int(value[1])] = place
                self._results["%" + value[2], value[3] or ""] = place
        self._operands: dict[tuple[str, int], Place] = {}
        number, part = None, ""
        for line in values.splitlines():
            if header := re.match(r"<(\d+) ", line):
                number = int(header[1])
            elif line.startswith((" positions", " uses", " from")):
                part = line.split()[0]
            elif part == "uses:" and number in places:
                use = re.match(r"  (\S+), operand (\d+)( \{[\d,]*\})?", line)
                if use and not use[3]:
                    self._operands["%" + use[1], int(use[2])] = places[number]
            elif part == "positions:" and number in places:
                # The value of a fusion that is started has the name of the fusion, and the start is a position of it.
                position = re.match(r"  (fusion-start\S*) (\{[\d,]*\})$", line)
                if position:
                    self._results["%" + position[1], position[2]] = places[number]

    def in_place(self, name: str, operand: int = 0, result: str = "") -> bool:
        """Whether a result of an instruction lies where its operand lies."""
        source = self._operands.get((name, operand))
        return source is not None and source == self._results.get((name, result))


@dataclasses.dataclass
class Thunk:
    """A piece of work of the runtime.

    Attributes:
      kind: as XLA prints it, such as "kKernel".
      column: the column of its line in the dump.
      groups: the thunks inside of it: branches, or condition and body.
    """

    kind: str
    column: int
    groups: list[list["Thunk"]] = dataclasses.field(default_factory=list)


def parse_thunks(text: str) -> list[Thunk]:
    """The thunks of a dumped thunk sequence.

    In the dump, the groups of a thunk stand below it, two columns further right. XLA prints the
    label "condition:" without its indentation, so that this label belongs to the line above it. After
    "No thunks.", XLA begins no new line.
    """
    text = text.replace("No thunks.", "\n")
    root = Thunk("root", -1, [[]])
    open_thunks = [root]
    for line in text.splitlines():
        column = len(line) - len(line.lstrip())
        thunk = re.match(r"\s*\d+: (k\w+)", line)
        if thunk:
            while open_thunks[-1].column >= column:
                open_thunks.pop()
            parent = open_thunks[-1]
            if not parent.groups:
                parent.groups.append([])
            parent.groups[-1].append(Thunk(thunk[1], column))
            open_thunks.append(parent.groups[-1][-1])
        elif line.strip() == "condition:":
            open_thunks[-1].groups.append([])
        elif re.match(r"\s+(body|true_branch|false_branch|branch_\d+):", line):
            while open_thunks[-1].column >= column:
                open_thunks.pop()
            open_thunks[-1].groups.append([])
    return root.groups[0]
