"""Messages as permutations of devices: the choice of a channel for each message.

A collective costs more than the bytes that it moves, so messages share as few channels as possible.
One channel is one permutation of devices, and one `ppermute` per tick in the engine.

A message that has a tick to travel (`Schedule.message_ticks` above 1) leaves when the next tick begins, and is read in
the tick after that one. No operation of the tick in between waits for it, and it waits for none of them. It has a
channel of its own: a permutation ends when its slowest message has arrived.

Letters: T ticks, D devices, S stages, N microbatches.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe.lowering.operations import Operations
from jpipe.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Route:
    """A kind of message, with its senders and receivers.

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

    @property
    def stays(self) -> bool:
        """Whether its messages stay on the stage that sends them."""
        return all(source == target for source, target in self.target.items())


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
      crosses: whether its messages have the whole tick after the one that sends them to travel.
      sends: bool `[T]`, whether any device sends.
      lane: int32 `[T, D]`, the output that a device sends, as a position in `Lowered.outgoing`.
      lanes: all outputs that the channel ever sends, as positions in `Lowered.outgoing`.
      arrives: inbox -> int32 `[T, D, 2]`, the column and the position of the message that is
        readable from tick t, which determine its slot; column -1: no message. Holds only inboxes
        that the channel fills in some tick.
    """

    operation: str | None
    pairs: tuple[tuple[int, int], ...] | None
    crosses: bool
    sends: np.ndarray
    lane: np.ndarray
    lanes: tuple[int, ...]
    arrives: Mapping[str, np.ndarray]

    @property
    def late(self) -> bool:
        """True if a message leaves in the tick after the one that computes it, before the tick's forwards.

        A message that crosses then travels during the whole tick. Of the others, the message of a backward then
        travels while forwards run. A message that stays on its device then goes from where it was written to its
        inbox: if it were kept as a received one, too, XLA would copy it in every tick.
        """
        is_local = self.pairs is None and self.operation is not None
        return self.crosses or is_local or self.operation == "backward"

    @property
    def received_before(self) -> str:
        """The operation of a tick before which its messages go to their inboxes."""
        return "backward" if self.operation == "backward" and not self.crosses else "forward"

    @property
    def waits(self) -> bool:
        """True if a message that has arrived is kept apart until the next tick begins, and goes to its inbox then."""
        return self.crosses or not self.late


class _Messages(NamedTuple):
    """The messages of a route, in the order of ticks, devices and lanes; one entry of every array for each.

    Attributes:
      inbox: the inbox of the route.
      tick: the tick that sends the message.
      source: the device that sends it.
      target: the device that receives it.
      output: position in `Lowered.outgoing`.
      column: the column that reads the message.
      position: the position of the microbatch in that column's order.
      ticks: the ticks after which the message is in its inbox: see `ticks_to_arrive`.
    """

    inbox: str
    tick: np.ndarray
    source: np.ndarray
    target: np.ndarray
    output: np.ndarray
    column: np.ndarray
    position: np.ndarray
    ticks: np.ndarray

    def only(self, which: np.ndarray) -> "_Messages":
        """The messages that `which` selects."""
        return _Messages(self.inbox, *(values[which] for values in self[1:]))


def ticks_to_arrive(schedule: Schedule, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The ticks after which messages between devices are in their inboxes, 1 or 2.

    A message that the table gives still more ticks waits there: a loop ends every transfer in the tick that begins it.
    """
    return np.minimum(schedule.ticks_between(source, target), 2)


class _OpenChannel:
    """A channel while messages are assigned to it.

    Args:
      ticks: the ticks until its messages arrive; 0: they stay on their device.
      shared: payload and operation that all messages of the channel have in common.
      shape: T, D.
    """

    def __init__(self, ticks: int, shared: tuple, shape: tuple[int, int]):
        self.ticks, self.shared = ticks, shared
        self._num_devices = shape[1]
        self._target_of: dict[int, int] = {}
        self._source_of: dict[int, int] = {}
        # Whether a device sends in a tick, and whether one receives what is sent in it.
        self._sends, self._receives = (bytearray(math.prod(shape)) for _ in range(2))
        self.messages: list[_Messages] = []

    def takes(self, tick: int, source: int, target: int) -> bool:
        """Takes one more message if the channel then still is a permutation. Returns whether it does."""
        sent = tick * self._num_devices + source
        received = tick * self._num_devices + target
        if (
            self._sends[sent]
            or self._receives[received]
            or self._target_of.get(source, target) != target
            or self._source_of.get(target, source) != source
        ):
            return False
        self._sends[sent] = self._receives[received] = True
        self._target_of[source], self._source_of[target] = target, source
        return True

    def closed(self, schedule: Schedule, num_in_column: np.ndarray) -> Channel:
        """The finished channel."""
        T, D = schedule.num_ticks, schedule.num_devices
        sends, lane = np.zeros(T, bool), np.zeros((T, D), np.int32)
        arrives: dict[str, np.ndarray] = {}
        for m in self.messages:
            sends[m.tick], lane[m.tick, m.source] = True, m.output
            # After the last tick comes the first tick of the next round.
            next_round, next_tick = np.divmod(m.tick + m.ticks, T)
            cells = arrives.setdefault(m.inbox, np.full((T, D, 2), -1, np.int32))
            before = num_in_column[m.column] * next_round
            cells[next_tick, m.target] = np.stack([m.column, m.position - before], 1)
        _, operation = self.shared
        return Channel(
            operation=operation,
            pairs=tuple(sorted(self._target_of.items())) if self.ticks else None,
            crosses=self.ticks > 1,
            sends=sends,
            lane=lane,
            lanes=tuple(np.unique(np.concatenate([m.output for m in self.messages])).tolist()),
            arrives=arrives,
        )


def assign_channels(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    operations: Mapping[str, Operations],
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
    shape = schedule.num_ticks, schedule.num_devices
    open_channels: list[_OpenChannel] = []
    for route in routes:
        shared = (route.payload, route.operation if overlap else None)
        messages = _messages(schedule, position, num_in_column, operations, route, outgoing)
        candidates: dict[int, list[_OpenChannel]] = {
            ticks: [d for d in open_channels if (d.ticks, d.shared) == (ticks, shared)] for ticks in (0, 1, 2)
        }
        messages_of: dict[_OpenChannel, list[int]] = {}
        cells = zip(*(a.tolist() for a in (*messages[1:4], messages.ticks)))
        for i, (tick, source, target, arrives_after) in enumerate(cells):
            ticks = 0 if source == target else arrives_after
            for channel in candidates[ticks]:
                if channel.takes(tick, source, target):
                    break
            else:
                channel = _OpenChannel(ticks, shared, shape)
                channel.takes(tick, source, target)
                open_channels.append(channel)
                candidates[ticks].append(channel)
            messages_of.setdefault(channel, []).append(i)
        for channel, numbers in messages_of.items():
            channel.messages.append(messages.only(np.array(numbers)))
    return tuple(channel.closed(schedule, num_in_column) for channel in open_channels)


def _messages(
    schedule: Schedule,
    position: np.ndarray,
    num_in_column: np.ndarray,
    operations: Mapping[str, Operations],
    route: Route,
    outgoing: Sequence[tuple[str, int]],
) -> _Messages:
    """The messages of a route. For the arguments see `assign_channels`."""
    target_of = np.full(schedule.num_stages, -1)
    target_of[list(route.target)] = list(route.target.values())
    sends = operations[route.operation]
    cells = np.nonzero((sends.stage >= 0) & (target_of[sends.stage] >= 0))
    tick, source, lane = cells
    stage = target_of[sends.stage[cells]]
    rounds, m = np.divmod(sends.microbatch[cells].astype(int), schedule.num_microbatches)
    column = schedule.column_of_microbatch[m, stage]
    num_lanes = sends.num_lanes if route.target else 0
    outputs = [outgoing.index((route.inbox, j)) for j in range(num_lanes)]
    target = schedule.device[column]
    return _Messages(
        route.inbox,
        tick,
        source,
        target=target,
        output=np.array(outputs, int)[lane],
        column=column,
        position=position[m, column] + num_in_column[column] * rounds,
        ticks=ticks_to_arrive(schedule, source, target),
    )
