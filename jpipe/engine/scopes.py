"""The names of a step in profiles and in compiled programs: the loop over ticks, and in it the branch of an operation
for some stages, an update, a message.

Example:
  >>> Scope("forward", (1, 2, 3, 5)).text
  'forward/stage1-3,5'
  >>> Scope.found_in("jit(step)/while/body/forward/stage1-3,5/cond")
  Scope(operation='forward', stages=(1, 2, 3, 5))
  >>> TickPlace.of("jit(step)/ticks0-8/while/body/closed_call/forward/stage1-3/cond/branch_1_fun/dot_general")
  TickPlace(ticks=range(0, 8), operation='forward', lane=0, in_branch=True)
  >>> TickPlace.of("jit(step)/ticks0-8/while/body/closed_call/pair/cond/branch_1_fun/backward/stage0/dot_general")
  TickPlace(ticks=range(0, 8), operation='backward', lane=0, in_branch=True)
  >>> Scope.found_in("jit(step)/while/body/pair/cond/branch_1_fun/forward/stage1-3,5/cond")
"""

import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

_COND = re.compile(r"/(\w+)/stage([\d,-]+)/cond$")
_TICKS = re.compile(r"(?:^|/)ticks(\d+)-(\d+)/")
_PLACE = re.compile(
    r"(?:^|/)(?:(?:lane(\d+)/)?(\w+)/stage\d[\d,-]*|(message\d+|update|embed|embed_backward|head))(?=/|$)"
)
_LANE = re.compile(r"/lane(\d+)/")
_CHOSEN = re.compile(r"cond/branch_\d+_fun(/|$)")
_RUN = re.compile(r"/cond/branch_1_fun(/|$)")

PAIR = "pair"
"""The name of a branch of both passes: see `jpipe.engine.pairs`. In it each pass has its own name."""


def ticks_text(ticks: range) -> str:
    """The name of the loop over some ticks."""
    return f"ticks{ticks.start}-{ticks.stop}"


def lane_scope(lane: int) -> contextlib.AbstractContextManager:
    """Names a lane of an operation. The first one has no name, because most tables have no other."""
    return jax.named_scope(f"lane{lane}") if lane else contextlib.nullcontext()


def message_text(channel: int) -> str:
    """The name of the messages of a channel."""
    return f"message{channel}"


def receive_text(before: str, stages: Sequence[int]) -> str:
    """The name of a branch that receives the messages for some stages, before an operation."""
    return f"receive/{before}/for{','.join(map(str, stages))}"


class Scope(NamedTuple):
    """A branch of a tick.

    Attributes:
      operation: its name.
      stages: the stages whose program the branch is, ascending.
    """

    operation: str
    stages: Sequence[int]

    @property
    def text(self) -> str:
        """The name of the branch; neighbours among the stages are joined."""
        starts = [s for s in self.stages if s - 1 not in self.stages]
        ends = [s for s in self.stages if s + 1 not in self.stages]
        ranges = zip(starts, ends, strict=True)
        stages = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
        return f"{self.operation}/stage{stages}"

    @classmethod
    def found_in(cls, op_name: str) -> "Scope | None":
        """The scope whose branch is the conditional of this name in a compiled program; None if it is no such
        branch.
        """
        match = _COND.search(op_name)
        if match is None or f"/{PAIR}/" in op_name:  # a choice inside of one of both passes
            return None
        stages: list[int] = []
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            stages += range(int(first), int(last or first) + 1)
        return cls(match[1], tuple(stages))


class TickPlace(NamedTuple):
    """Where an instruction of a compiled program belongs in a tick.

    Attributes:
      ticks: the ticks of the loop around it; None: it is outside of the loops.
      operation: "forward", "backward", "weight_grad", "commit", "update", "embed", "head", "embed_backward", or
        "message" and the number of the channel.
      lane: the lane of the operation.
      in_branch: whether it is in the branch that a device runs if the table says so.
    """

    ticks: range | None
    operation: str
    lane: int
    in_branch: bool

    @classmethod
    def of(cls, op_name: str) -> "TickPlace | None":
        """The place that the name of an instruction states; None if it is part of no operation."""
        loop = _TICKS.search(op_name)
        text = op_name if loop is None else op_name[loop.end() :]
        match = _PLACE.search(text)
        if match is None:
            return None
        in_branch = bool(_CHOSEN.search(text[: match.start() + 1])) or bool(_RUN.match(text[match.end() :]))
        return cls(ticks_of(op_name), match[2] or match[3], int(match[1] or 0), in_branch)


def ticks_of(op_name: str) -> range | None:
    """The ticks of the loop that the name of an instruction states; None if it is outside of the loops."""
    loop = _TICKS.search(op_name)
    return None if loop is None else range(int(loop[1]), int(loop[2]))


def lane_of(op_name: str) -> int:
    """The lane that the name of a conditional states."""
    match = _LANE.search(op_name)
    return 0 if match is None else int(match[1])
