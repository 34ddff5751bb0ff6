"""The names of branches in profiles and in compiled programs: an operation, and the stages that it is for.

Example:
  >>> Scope("forward", (1, 2, 3, 5)).text
  'forward/stage1-3,5'
  >>> Scope.found_in("jit(step)/while/body/forward/stage1-3,5/cond")
  Scope(operation='forward', stages=(1, 2, 3, 5))
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_COND = re.compile(r"/(\w+)/stage([\d,-]+)/cond$")


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
        if match is None:
            return None
        stages: list[int] = []
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            stages += range(int(first), int(last or first) + 1)
        return cls(match[1], tuple(stages))
