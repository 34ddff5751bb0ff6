"""Where the instructions of a compiled step belong: their loop over ticks, and the operation of a tick that they are
part of.

The *statement* of an instruction is the instruction of the body of that loop, or of the program, in which it runs. A
statement runs once in every tick, so its k-th run is in the k-th tick.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jpipe._util.hlo import HloProgram, Instruction
from jpipe.engine.scopes import TickPlace, lane_of, ticks_of


class Key(NamedTuple):
    """What a device may run in a tick: a lane of an operation.

    The names of instructions do not tell the stage: of branches that compute the same, XLA keeps the names of one.

    Attributes:
      operation: its name, see `TickPlace`.
      lane: its lane.
    """

    operation: str
    lane: int


class Place(NamedTuple):
    """The place of an instruction.

    Attributes:
      loop: the ticks of the loop around it; None: it is outside of the loops.
      statement: the name of its statement.
      position: that of the statement in the program.
      key: the operation that it is part of, or None.
      runs: whether it runs only if the device runs the operation. The conditional around it runs in every tick.
      counts: whether its time is time of the operation. What computes the predicate of a conditional is not.
    """

    loop: range | None
    statement: str
    position: int
    key: Key | None
    runs: bool
    counts: bool


def places_of(module: bytes) -> Mapping[str, Place]:
    """The place of every instruction of a step, by name.

    Args:
      module: a serialized `HloModuleProto` with a schedule.
    """
    program = HloProgram(module, b"")
    branches = _branches(program)
    places: dict[str, Place] = {}
    for at, instruction in enumerate(program.order):
        chain = [*program.enclosing(at), instruction]
        loop, depth = _loop(chain)
        if depth is None:  # the condition of a loop
            continue
        statement = chain[depth]
        place = _innermost_known(chain[depth:], branches)
        key = None if place is None else Key(place.operation, place.lane)
        if loop is None and place is not None:
            loop = place.ticks
        if key is not None and statement.opcode == "conditional":
            key = key._replace(lane=lane_of(statement.op_name))
        guard = statement.opcode == "conditional" and instruction is statement
        inside = place is not None and place.in_branch
        places[instruction.name] = Place(
            loop, statement.name, program.position[statement.id], key, inside, inside or guard
        )
    # A lane that is busy in all ticks may have no branch: all of it runs.
    guarded = {(place.loop, place.key) for place in places.values() if place.runs}
    return {
        name: place
        if place.key is None or (place.loop, place.key) in guarded
        else place._replace(runs=True, counts=True)
        for name, place in places.items()
    }


def _loop(chain: Sequence[Instruction]) -> tuple[range | None, int | None]:
    """The ticks of the loop around an instruction, and the number of its statement among the calls around it.

    The number is None for an instruction that decides whether the loop goes on.
    """
    for depth, call in enumerate(chain[:-1]):
        ticks = ticks_of(call.op_name)
        if call.opcode == "while" and ticks is not None and call.op_name.endswith("/while"):
            is_condition = chain[depth + 1].id >> 32 == call.called[1]
            return ticks, None if is_condition else depth + 1
    return None, 0


def _branches(program: HloProgram) -> dict[int, TickPlace]:
    """Branch of a conditional -> its place, which instructions without a name share."""
    branches: dict[int, TickPlace] = {}
    for instruction in program.order:
        place = TickPlace.of(instruction.op_name)
        if place is not None and place.in_branch:
            branches.setdefault(instruction.id >> 32, place)
    return branches


def _innermost_known(chain: Sequence[Instruction], branches: Mapping[int, TickPlace]) -> TickPlace | None:
    """The place that a statement, or what runs in it, states: that of the branch which runs, if there is one."""
    known = None
    for depth, call in enumerate(chain):
        place = TickPlace.of(call.op_name)
        if place is None and depth:
            place = branches.get(call.id >> 32)
        if place is not None and (known is None or place.in_branch):
            known = place
        if known is not None and known.in_branch:
            break
    return known
