"""Reads a training step that XLA compiled for GPUs.

XLA writes three texts about a program, see `gpu_texts.py`. `Step` joins them. `Step.executed` walks a
computation and takes the branches that one device takes in one tick, see `Activity`. `Step.tick` sums
what the device executes on the way. The thunk sequence says which parts the runtime records in a
*command buffer* (a CUDA graph), which runs without the host.

The reader knows the engine by the names of its scopes alone: an operation is guarded by a
conditional or by a loop of 0 or 1 turns with the scope "forward/stage1-2/cond" or
"forward/stage1-2/while", an update by "update/cond". An operation without a guard always runs.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpu_texts import Buffers, Hlo, Instruction, Thunk, all_bytes, parse_thunks

_GUARD = re.compile(r"/(forward|backward|weight_grad)/stage([\d,-]+)/(?:cond|while|switch)$")
# What all devices run together in most ticks.
_TOGETHER = re.compile(r"/branch_\d+_fun/(?:embed|embed_backward|head)/")
# The messages for some stages, before an operation.
_RECEIVE = re.compile(r"/receive/(\w+)/for([\d,]+)/")
_UPDATE = re.compile(r"/update/(?:cond|while)$")
# Instructions that are neither a kernel nor a call of a library.
_NO_KERNEL = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "partition-id",
    "replica-id",
    "after-all",
    "opt-barrier",
    "while",
    "conditional",
    "call",
    "copy",
    "copy-start",
    "copy-done",
}


class Activity(NamedTuple):
    """What a device does in a tick.

    Attributes:
      operations: pairs (operation, stage), the operation one of "forward", "backward" and
        "weight_grad"; empty for an idle tick.
      updates: whether the tick has an update.
      receives: the operations before which messages arrive, where devices choose those that are for them.
    """

    operations: frozenset[tuple[str, int]] = frozenset()
    updates: bool = False
    receives: frozenset[str] = frozenset()


class Permute(NamedTuple):
    """A collective permute of a tick.

    Attributes:
      megabytes: MB that a device sends.
      asynchronous: whether it runs beside the compute.
      kernels: kernels between its start and its done, in one tick.
      products: matrix products there.
    """

    megabytes: float
    asynchronous: bool
    kernels: int
    products: int


@dataclasses.dataclass
class Work:
    """What a device executes.

    Attributes:
      kernels: kernels of XLA; no copies.
      products: matrix products and convolutions of libraries.
      copies: copies from one buffer to another.
      copied: MB of these copies.
      largest_copy: MB of the largest.
      self_copied: MB of copies of a buffer onto itself, which the runtime does not leave out.
      transposed: MB of arrays that are only written in another order of their dims.
      written: MB that kernels write.
      traffic: MB that kernels without products, and copies, read and write.
      moved: the part of these of kernels and copies that only bring numbers to another place or dtype.
      cast: the part of these of kernels that change the dtype.
      host_waits: how often the device waits for the host.
      collectives: sums and other exchanges of arrays between devices, but for permutes.
      exchanged: MB of the arrays that these result in.
      bare: those with no product of the device between their start and their done.
    """

    kernels: int = 0
    products: int = 0
    copies: int = 0
    copied: float = 0.0
    largest_copy: float = 0.0
    self_copied: float = 0.0
    transposed: float = 0.0
    written: float = 0.0
    traffic: float = 0.0
    moved: float = 0.0
    cast: float = 0.0
    host_waits: int = 0
    collectives: int = 0
    exchanged: float = 0.0
    bare: int = 0


class Step:
    """A compiled training step.

    Args:
      hlo: the optimised HLO.
      buffers: the buffer assignment.
      thunks: the thunk sequence, after the passes that make command buffers.
    """

    def __init__(self, hlo: Hlo, buffers: Buffers, thunks: Sequence[Thunk]):
        self.hlo = hlo
        self.buffers = buffers
        self.one_command_buffer = [t.kind for t in thunks] == ["kCommandBuffer"]
        self._recorded: set[str] = set()
        self._under = dict(_between_starts_and_dones(hlo))
        self._match(hlo.entry, thunks, recorded=False)

    @classmethod
    def read(cls, hlo: str, folder: pathlib.Path) -> "Step":
        """The step of an HLO text and a folder of `--xla_dump_to`."""
        sequences = [
            *folder.glob("*thunk_sequence_after_thunk_passes.txt"),
            *folder.glob("*thunk_sequence.txt"),  # no pass changed anything
        ]
        texts = [
            next(folder.glob(f"*{name}.txt")).read_text() for name in ("buffer-assignment", "buffer-assignment-values")
        ]
        return cls(Hlo(hlo), Buffers(*texts), parse_thunks(sequences[0].read_text()))

    def _match(self, computation: str, thunks: Iterable[Thunk], recorded: bool) -> None:
        """Notes which loops and conditionals of a computation are in a command buffer.

        Thunks have no names, but stand in the order of the instructions.
        """
        instructions = list(self._control_flow(computation))
        matched = list(_control_flow_thunks(thunks, recorded))
        opcodes = {"kWhile": "while", "kConditional": "conditional"}
        kinds = [opcodes[thunk.kind] for thunk, _ in matched]
        if kinds != [i.opcode for i in instructions]:
            raise ValueError(
                f"the thunk sequence does not fit {computation}: it has the loops and "
                f"conditionals {kinds}, the computation has "
                f"{[i.opcode for i in instructions]}."
            )
        for instruction, (thunk, is_recorded) in zip(instructions, matched):
            if is_recorded:
                self._recorded.add(instruction.name)
            groups = thunk.groups[-1:] if thunk.kind == "kWhile" else thunk.groups
            for called, group in zip(Hlo.inner(instruction), groups, strict=True):
                self._match(called, group, is_recorded)

    def _control_flow(self, computation: str) -> Iterator[Instruction]:
        """Loops and conditionals of a computation, not those inside of them."""
        for instruction in self.hlo.computations[computation]:
            if instruction.opcode in ("while", "conditional"):
                yield instruction
            else:
                for called in Hlo.inner(instruction):
                    yield from self._control_flow(called)

    # -- What a device executes

    def tick_loops(self) -> list[Instruction]:
        """The loops over ticks, or microbatches: those at the top that have matrix products."""
        loops = [
            i
            for i in self._control_flow(self.hlo.entry)
            if i.opcode == "while" and any(map(self.hlo.is_product, self.hlo.all_of(i.calls[0])))
        ]
        if not loops:
            raise ValueError(
                "no loop of the program has a matrix product: XLA unrolled the ticks. Use more microbatches."
            )
        return loops

    def executed(
        self, instructions: Iterable[Instruction], activity: Activity, times: int = 1
    ) -> Iterator[tuple[Instruction, int]]:
        """The instructions that a device executes, each with the number of times."""
        for instruction in instructions:
            yield instruction, times
            if instruction.opcode == "while":
                turns = times * _turns(instruction, activity)
                if turns:
                    body = self.hlo.computations[instruction.calls[0]]
                    yield from self.executed(body, activity, turns)
            elif instruction.opcode == "conditional":
                branch = self.hlo.computations[self._branch(instruction, activity)]
                yield from self.executed(branch, activity, times)
            else:
                for called in Hlo.inner(instruction):
                    body = self.hlo.computations[called]
                    yield from self.executed(body, activity, times)

    def _branch(self, conditional: Instruction, activity: Activity) -> str:
        """The branch that a device takes.

        A guard's branch is taken if the device does what it guards. Any other conditional asks for
        something rare (first or last stage, end of a minibatch), which is left out. Of a choice
        between programs, the branch of the device's stage is taken, and so it is of a choice between messages in a
        tick in which some arrive.
        """
        branches, scope = conditional.branches, conditional.scope
        is_guard = _GUARD.search(scope) or _UPDATE.search(scope)
        if len(branches) > 2 or not (is_guard or "/stage" in scope):
            return self._branch_of_stage(branches, activity)
        # XLA's order: true, false of a predicate; 0, 1 of a number.
        if "true_computation=" in conditional.line:
            branches = branches[::-1]
        return branches[int(_taken(conditional, activity))]

    def _branch_of_stage(self, branches: Sequence[str], activity: Activity) -> str:
        """The branch with an operation of the device's stage, or of all stages if it is busy; else the smallest."""
        stages = {stage for _, stage in activity.operations}
        for branch in branches:
            scopes = {i.scope for i in self.hlo.all_of(branch)}
            received = filter(None, map(_RECEIVE.search, scopes))
            if any(match[1] in activity.receives and stages & _numbers(match[2]) for match in received):
                return branch
            named = [re.search(r"/(\w+)/stage([\d,-]+)/", scope) for scope in scopes]
            if any(match and _does(activity, match) for match in named):
                return branch
            if activity.operations and any(map(_TOGETHER.search, scopes)):
                return branch
        return min(branches, key=lambda name: len(self.hlo.computations[name]))

    def work(self, instructions: Iterable[Instruction], activity: Activity) -> Work:
        """The sum over the instructions that a device executes."""
        work = Work()
        for instruction, times in self.executed(instructions, activity):
            self._add(work, instruction, times, activity)
        return work

    def tick(self, loop: Instruction, activity: Activity) -> Work:
        """What a device executes in one tick of a loop."""
        return self.work(self.hlo.computations[loop.calls[0]], activity)

    def _add(self, work: Work, instruction: Instruction, times: int, activity: Activity) -> None:
        """Adds an instruction that is executed `times` times."""
        index = ""
        if instruction.opcode == "fusion-done" and not self.hlo.is_collective(instruction):
            # A kernel that runs beside others counts where its result is there.
            start = self.hlo.by_name[instruction.operands[0]]
            instruction, index = dataclasses.replace(start, opcode="fusion", shape=instruction.shape), "{1}"
        opcode, name = instruction.opcode, instruction.name
        if self.hlo.is_product(instruction):
            work.products += times
        elif self.hlo.is_collective(instruction):
            start = instruction.operands[0] if opcode.endswith("-done") else name
            under = self.executed(self._under.get(start, []), activity)
            work.collectives += times
            work.exchanged += times * all_bytes(instruction.shape) / 1e6
            work.bare += times * (not any(self.hlo.is_product(i) for i, _ in under))
        elif opcode in ("copy", "copy-start"):
            self._add_copy(work, instruction, times)
        elif opcode == "fusion":
            work.kernels += times
            self._add_traffic(work, instruction, times)
            if self.hlo.is_transpose(instruction):
                work.transposed += times * instruction.bytes / 1e6
            for result in self.hlo.results(instruction):
                work.written += times * result.written / 1e6
                place = result.index or index
                if result.operand is not None and not self.buffers.in_place(name, result.operand, place):
                    _add_moved(work, result.size / 1e6, times)
        elif opcode not in _NO_KERNEL and not opcode.endswith(("-start", "-done")):
            work.kernels += times
            self._add_traffic(work, instruction, times)
        if name in self._recorded:
            return
        if opcode == "conditional":
            work.host_waits += times
        elif opcode == "while" and instruction.trip_count is None:
            # The host asks before every turn, and once more to learn that there is none.
            work.host_waits += times * (_turns(instruction, activity) + 1)

    def _add_traffic(self, work: Work, instruction: Instruction, times: int) -> None:
        """Adds the bytes of a kernel without products, or of a copy."""
        megabytes = times * self.hlo.traffic(instruction) / 1e6
        work.traffic += megabytes
        if self.hlo.only_moves(instruction):
            work.moved += megabytes
            work.cast += megabytes * any(i.opcode == "convert" for i in self.hlo.executed(instruction))

    def _add_copy(self, work: Work, copy: Instruction, times: int) -> None:
        self._add_traffic(work, copy, times)
        megabytes = copy.bytes / 1e6
        if self.hlo.is_transpose(copy):
            work.transposed += times * megabytes
        elif self.buffers.in_place(copy.name):
            work.self_copied += times * megabytes
        else:
            _add_moved(work, megabytes, times)

    def permutes(self, loop: Instruction, activity: Activity) -> list[Permute]:
        """The collective permutes of a tick, and what a device does under each."""
        permutes = []
        bodies = {loop.calls[0]}
        bodies |= {called for i in self.hlo.all_of(loop.calls[0]) for called in Hlo.inner(i)}
        for body in sorted(bodies):
            for start in self.hlo.computations[body]:
                if start.opcode != "collective-permute-start":
                    continue
                under = self.work(self._under[start.name], activity)
                asynchronous = '"is_sync":true' not in start.line
                permutes.append(
                    Permute(
                        start.bytes / 1e6,
                        asynchronous,
                        under.kernels if asynchronous else 0,
                        under.products if asynchronous else 0,
                    )
                )
        return permutes

    def unknown_loops(self) -> int:
        """How many loops of the program have a length that XLA does not know."""
        return sum(i.opcode == "while" and i.trip_count is None for i in self.hlo.all_of(self.hlo.entry))

    def host_waits(self, num_updates: int) -> int:
        """How often a device waits for the host in a step.

        A loop of unknown length counts with one turn, so this is the least number.

        Args:
          num_updates: ticks of the step that have an update.
        """
        nothing = Activity()
        loops = self.tick_loops()
        waits = self.work(self._outside(loops), nothing).host_waits
        per_tick = [self.tick(loop, nothing).host_waits for loop in loops]
        waits += sum(n * (i.trip_count or 1) for n, i in zip(per_tick, loops))
        updating = [self.tick(loop, nothing._replace(updates=True)).host_waits for loop in loops]
        return waits + num_updates * max(b - a for a, b in zip(per_tick, updating))

    def _outside(self, loops: Sequence[Instruction]) -> list[Instruction]:
        """The entry's instructions without some loops."""
        names = {loop.name for loop in loops}
        entry = self.hlo.computations[self.hlo.entry]
        return [i for i in entry if i.name not in names]


def _between_starts_and_dones(hlo: Hlo) -> Iterator[tuple[str, list[Instruction]]]:
    """The name of each start, and of what it starts, and the instructions between it and its done."""
    for instructions in hlo.computations.values():
        starts: dict[str, int] = {}
        for k, instruction in enumerate(instructions):
            if instruction.opcode.endswith("-start"):
                starts[instruction.name] = k
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in starts:
                start = instructions[starts[instruction.operands[0]]]
                started = [i.name for called in Hlo.inner(start) for i in hlo.computations[called]]
                for name in (start.name, *started):
                    yield name, instructions[starts[start.name] + 1 : k]


def _control_flow_thunks(thunks: Iterable[Thunk], recorded: bool) -> Iterator[tuple[Thunk, bool]]:
    """Loops and conditionals, not those inside of them; and whether a command buffer has them."""
    for thunk in thunks:
        if thunk.kind in ("kWhile", "kConditional"):
            yield thunk, recorded
        else:
            inside = recorded or thunk.kind == "kCommandBuffer"
            for group in thunk.groups:
                yield from _control_flow_thunks(group, inside)


def _taken(instruction: Instruction, activity: Activity) -> bool:
    """Whether a device runs what a conditional or a loop guards."""
    if _UPDATE.search(instruction.scope):
        return activity.updates
    guard = _GUARD.search(instruction.scope)
    return guard is not None and _does(activity, guard)


def _does(activity: Activity, scope: re.Match) -> bool:
    """Whether a device does the operation of a scope, (operation, stages)."""
    stages = _numbers(scope[2])
    return any(name == scope[1] and stage in stages for name, stage in activity.operations)


def _turns(loop: Instruction, activity: Activity) -> int:
    """The turns of a loop; of a loop of unknown length 1, or 0 if it guards what is not done."""
    if loop.trip_count is not None:
        return loop.trip_count
    guards = _GUARD.search(loop.scope) or _UPDATE.search(loop.scope)
    return int(_taken(loop, activity)) if guards else 1


def _numbers(ranges: str) -> set[int]:
    """The numbers of printed ranges.

    Example:
      >>> sorted(_numbers("1-3,5"))
      [1, 2, 3, 5]
    """
    ends = [list(map(int, part.split("-"))) for part in ranges.split(",")]
    return {n for pair in ends for n in range(pair[0], pair[-1] + 1)}


def _add_moved(work: Work, megabytes: float, times: int) -> None:
    """Adds a copy from one buffer to another."""
    work.copies += times
    work.copied += times * megabytes
    work.largest_copy = max(work.largest_copy, megabytes)
