"""Messages as permutations of devices: which channel carries which message.

A collective costs more than the bytes that it moves, so messages share as few channels as possible.
One channel is one permutation of devices, and one `ppermute` per tick in the engine.

Letters: T ticks, D devices, S stages, N microbatches.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jpipe.schedule import Schedule

if TYPE_CHECKING:
    from jpipe.lowering.lower import Operations


@dataclasses.dataclass(frozen=True)
class Route:
    """One kind of message: who sends it, and who receives it.

    Attributes:
      inbox: name of the ring that stores the message on arrival.
      operation: the operation that sends the message and reads it: "forward" or "backward".
      target: sending stage -> receiving stage.
      payload: shapes of the message. Routes share a channel only if their payloads are equal.
      kept: whether the backward of the receiver reads a message that a forward has sent.
    """

    inbox: str
    operation: str
    target: Mapping[int, int]
    payload: Any
    kept: bool = False


def neighbours(num_stages: int, activation: Any = 0, gradient: Any = 0) -> list[Route]:
    """The two routes of every pipeline: activations to the next stage, gradients back.

    Args:
      num_stages: S.
      activation: payload of the activations.
      gradient: payload of the gradients.

    Returns:
      The route "activation" and the route "gradient".
    """
    next_stage = {s: s + 1 for s in range(num_stages - 1)}
    previous_stage = {t: s for s, t in next_stage.items()}
    return [
        Route("activation", "forward", next_stage, activation),
        Route("gradient", "backward", previous_stage, gradient),
    ]


@dataclasses.dataclass(frozen=True)
class Channel:
    """One permutation of devices, used in the ticks where some device sends.

    Attributes:
      operation: the operation whose outputs the channel carries, "forward" or "backward"; None:
        outputs of both.
      pairs: (source, target) devices; None: every device hands its message to itself.
      sends: bool `[T]`, whether any device sends.
      lane: int32 `[T, D]`, the output that a device sends, as a position in `Lowered.outgoing`.
      lanes: all outputs that the channel ever sends, as positions in `Lowered.outgoing`.
      arrives: inbox -> int32 `[T, D, 2]`, the column and the position of the message that is
        readable from tick t, which determine its slot; column -1: no message. Holds only inboxes
        that the channel fills in some tick.
    """

    operation: str | None
    pairs: tuple[tuple[int, int], ...] | None
    sends: np.ndarray
    lane: np.ndarray
    lanes: tuple[int, ...]
    arrives: Mapping[str, np.ndarray]

    @property
    def late(self) -> bool:
        """Whether a message leaves in the tick after the one that computes it, before the tick's forwards.

        The message of a backward then travels while forwards run. A message that stays on its device then goes from
        where it was written to its inbox: if it were kept as a received one, too, XLA would copy it in every tick.
        """
        is_local = self.pairs is None and self.operation is not None
        return is_local or self.operation == "backward"


@dataclasses.dataclass
class _Draft:
    """A channel while messages are assigned to it.

    Attributes:
      local: whether messages stay on their device.
      shared: payload and operation that all messages of the channel have in common.
      pairs: source device -> target device.
      lanes: (tick, source device) -> position in `Lowered.outgoing`.
      arrivals: (tick, target device) -> (inbox, (column, position)).
    """

    local: bool
    shared: tuple
    pairs: dict[int, int] = dataclasses.field(default_factory=dict)
    lanes: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    arrivals: dict[tuple[int, int], tuple] = dataclasses.field(default_factory=dict)

    def fits(self, tick: int, source: int, target: int, shared: tuple) -> bool:
        """Whether the channel can carry one more message and still be a permutation."""
        return (
            (tick, source) not in self.lanes
            and (tick, target) not in self.arrivals
            and self.local == (target == source)
            and self.shared == shared
            and self.pairs.get(source, target) == target
            and all(s == source for s, t in self.pairs.items() if t == target)
        )

    def channel(self, schedule: Schedule, num_in_column: np.ndarray) -> Channel:
        """The finished channel."""
        T, D = schedule.num_ticks, schedule.num_devices
        sends, lane = np.zeros(T, bool), np.zeros((T, D), np.int32)
        for (tick, source), output in self.lanes.items():
            sends[tick], lane[tick, source] = True, output
        arrives: dict[str, np.ndarray] = {}
        for (tick, target), (inbox, (column, position)) in self.arrivals.items():
            # A message is readable from the next tick; after the last tick, that is the first tick
            # of the next round.
            next_round, next_tick = divmod(tick + 1, T)
            cells = arrives.setdefault(inbox, np.full((T, D, 2), -1, np.int32))
            before = num_in_column[column] * next_round
            cells[next_tick, target] = column, position - before
        _, operation = self.shared
        return Channel(
            operation=operation,
            pairs=None if self.local else tuple(sorted(self.pairs.items())),
            sends=sends,
            lane=lane,
            lanes=tuple(sorted(set(self.lanes.values()))),
            arrives=arrives,
        )


def assign_channels(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    operations: Mapping[str, "Operations"],
    routes: Sequence[Route],
    outgoing: Sequence[tuple[str, int]],
    overlap: bool,
) -> tuple[Channel, ...]:
    """Assigns every message to the first channel that fits.

    Args:
      schedule: the table.
      position: int `[N, C]`, rank of each microbatch in its column's order of forwards.
      num_in_column: int `[C]`, microbatches of a minibatch that each column runs.
      operations: "forward" and "backward" -> `Operations`.
      routes: the kinds of messages.
      outgoing: (inbox, lane) of each output that a device may send.
      overlap: whether messages of forwards and messages of backwards need channels of their own.

    Returns:
      The channels, in the order of the first message of each.
    """
    N = schedule.num_microbatches
    drafts: list[_Draft] = []
    for route in routes:
        lanes = operations[route.operation]
        shared = (route.payload, route.operation if overlap else None)
        for tick, source, lane in np.argwhere(lanes.stage >= 0).tolist():
            stage = route.target.get(int(lanes.stage[tick, source, lane]))
            if stage is None:
                continue
            rounds, m = divmod(int(lanes.microbatch[tick, source, lane]), N)
            column = int(schedule.column_of_microbatch[m, stage])
            target = int(schedule.device[column])
            for draft in drafts:
                if draft.fits(tick, source, target, shared):
                    break
            else:
                draft = _Draft(target == source, shared)
                drafts.append(draft)
            draft.pairs[source] = target
            draft.lanes[tick, source] = outgoing.index((route.inbox, lane))
            before = int(num_in_column[column]) * rounds
            slot_of = (column, int(position[m, column]) + before)
            draft.arrivals[tick, target] = (route.inbox, slot_of)
    return tuple(draft.channel(schedule, num_in_column) for draft in drafts)
