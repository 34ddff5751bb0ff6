"""Messages between devices, and skips, by `ppermute`.

A message takes this way:

    operation of the source: `send` encodes it and writes it into `sent_activations` or `sent_gradients`
    `move`: `ppermute`                              -> `received`
    `receive`: write it into its inbox              -> `inbox`
    operation of the target reads its slot of the inbox, and `arrived` decodes it

The encoded leaves in between are the *wire*: see `jpipe.stages.codecs`.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import StageContext
from jpipe.engine.guard import Branch, run_one_of
from jpipe.engine.scopes import message_text, receive_text
from jpipe.engine.spec import PassSpec
from jpipe.layers.avals import is_inexact
from jpipe.lowering.arrivals import RECEIVED_BEFORE
from jpipe.lowering.channels import Channel
from jpipe.lowering.tick_scalars import TickScalars
from jpipe.mesh import STAGE
from jpipe.stages.codecs import LeafCodec, is_gradient, state_key, support_inbox
from jpipe.stages.messages import MessageParts, with_gradients

Record = TypeVar("Record", bound=TickArrays)

SENT = {"forward": "sent_activations", "backward": "sent_gradients"}
"""Operation -> the array of `TickArrays` that it sends from."""


def put_row(array: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """`array` with row `index`, not negative, replaced."""
    return lax.dynamic_update_index_in_dim(array, row, index, 0, allow_negative_indices=False)


# -- Between devices


def receive(
    spec: PassSpec,
    arrays: TickArrays,
    scalars: TickScalars,
    received: Mapping[int, Packed],
) -> TickArrays:
    """Writes messages, by channel, into their inboxes: all, or in a branch those that are for the device."""
    channels = spec.lowered.channels
    messages = [(number, inbox) for number in received for inbox in channels[number].arrives]

    def put(messages: Iterable[tuple[int, str]], arrays: Record, _: ReadOnly | None = None) -> Record:
        inboxes = dict(arrays.inbox)
        for number, inbox in messages:
            slot = scalars.channel(number).slot(inbox)
            array = inboxes[inbox]
            inboxes[inbox] = {name: put_row(a, received[number][name], slot) for name, a in array.items()}
        return arrays.replace(inbox=inboxes)

    for before in RECEIVED_BEFORE:
        here = [message for message in messages if channels[message[0]].received_before == before]
        arrivals = spec.lowered.arrivals.get(before)
        if arrivals is None or not here:
            arrays = put(here, arrays)
            continue
        branches = []
        for chosen, devices in zip(arrivals.messages, arrivals.devices, strict=True):
            stages = [s for s, copies in enumerate(spec.lowered.copies) if any(d in devices for d, _ in copies)]
            run = functools.partial(put, [message for message in here if message in chosen])
            branches.append(Branch(receive_text(before, stages), ["inbox"], run))
        arrays = run_one_of(spec.lowered.target, scalars.arrivals(before), branches, arrays)
    return arrays


def move(
    spec: PassSpec,
    arrays: TickArrays,
    scalars: TickScalars,
    after: str | None,
    *,
    late: bool = False,
    crosses: bool = False,
) -> dict[int, Packed]:
    """Sends the messages of the channels that an operation feeds.

    Args:
      spec: the pass.
      arrays: arrays with the outgoing messages.
      scalars: the scalars of the tick.
      after: the operation: "forward" or "backward"; None: the channels that both feed, at the end
        of the tick.
      late, crosses: the kind of channels: see `Channel`.

    Returns:
      Channel -> the received message.
    """
    received = {}
    for number, channel in enumerate(spec.lowered.channels):
        if (channel.operation, channel.late, channel.crosses) != (after, late or crosses, crosses):
            continue
        message = _select_output(arrays, scalars, number, channel)
        transfer = functools.partial(_transfer, channel)
        with jax.named_scope(message_text(number)):
            if after is None:
                # At the end of a tick, reading `op_count` delays the transfer until all operations of the tick have
                # run: a transfer between two operations would make all devices wait for each other twice per tick.
                now = scalars.channel(number).sends & (arrays.op_count >= 0)
                message = lax.cond(now, transfer, lambda message: message, message)
            else:
                # Outside of a branch, so that the transfer can run beside the compute.
                message = transfer(message)
        received[number] = message
    return received


def _select_output(arrays: TickArrays, scalars: TickScalars, number: int, channel: Channel) -> Packed:
    """The output that the device sends through a channel in this tick."""
    outputs = {**arrays.sent_activations, **arrays.sent_gradients}
    first, *others = channel.lanes
    message = outputs[first]
    for j in others:
        chosen = scalars.channel(number).lane == j
        message = jax.tree.map(functools.partial(jnp.where, chosen), outputs[j], message)
    return message


def _transfer(channel: Channel, message: Packed) -> Packed:
    """One permutation of devices."""
    if channel.pairs is None:
        return message
    return jax.tree.map(lambda a: lax.ppermute(a, STAGE, channel.pairs), message)


# -- At the ends


class MessageEnd(NamedTuple):
    """A message at a stage that sends or receives it.

    Attributes:
      stage: the stage.
      inbox: the inbox of the message.
      codecs: the codecs of its leaves; if it has gradients, of the leaves of the activation that have one.
      places: the places of the wires in the message.
      support_places: those of the part of the wires of activations that their sender keeps, in an inbox of its own.
      first: number of the first leaf in the message.
    """

    stage: StageContext
    inbox: str
    codecs: Sequence[LeafCodec]
    places: Sequence[packing.Place]
    support_places: Sequence[packing.Place]
    first: int = 0

    def wires(self, read: TickArrays) -> list[list[jax.Array]]:
        """The wires of each leaf that have arrived."""
        lengths = [len(codec.wire(self._gradient)) for codec in self.codecs]
        return self._read(read, self.inbox, self.places, lengths)

    def arrived(self, read: TickArrays) -> list[jax.Array]:
        """The leaves that have arrived."""
        wires = self.wires(read)
        if not self._gradient:
            return [codec.decode(wire) for codec, wire in zip(self.codecs, wires, strict=True)]
        lengths = [len(codec.support_wire()) for codec in self.codecs]
        supports = self._read(read, support_inbox(self.inbox), self.support_places, lengths)
        return [codec.decode(*parts) for codec, *parts in zip(self.codecs, wires, supports, strict=True)]

    def _read(
        self, read: TickArrays, inbox: str, places: Sequence[packing.Place], lengths: Sequence[int]
    ) -> list[list[jax.Array]]:
        """Lists of arrays in the slot of an inbox."""
        if not places:
            return [[] for _ in lengths]
        arrays = iter(packing.read_all(read.inbox[inbox], places, [self.stage.scalars.slot(inbox)]))
        return [list(itertools.islice(arrays, length)) for length in lengths]

    def send(
        self,
        written: Written,
        read: ReadOnly,
        values: Sequence[jax.Array],
        arrived: Sequence[list[jax.Array]] = (),
    ) -> Written:
        """Encodes values, and writes them to their places in the lane's message.

        Args:
          written: arrays with the outgoing messages, and in training with the states of compressors.
          read: all other arrays.
          values: the leaves.
          arrived: for gradients the wires of each leaf that have arrived; `[]` each if no codec reads them.
        """
        states = read if "message_compression" in read else written
        kept: dict[str, Any] = dict(states.message_compression)
        wires: list[jax.Array] = []
        supports: list[jax.Array] = []
        for i, (codec, value) in enumerate(zip(self.codecs, values, strict=True)):
            first_state = jax.eval_shape(functools.partial(codec.first_state, self._gradient))
            key = state_key(self.inbox, self.first + i, first_state)
            state = self._state(codec, kept.get(key))
            if self._gradient:
                wire, state = codec.encode_gradient(value, state, arrived[i])
            else:
                wire, state = codec.encode(value, state)
                supports += codec.support(wire)
            wires += wire
            if key in kept:
                (chunk,) = self.stage.column("message_compression")(key)
                kept[key] = jax.tree.map(lambda a, b, chunk=chunk: put_row(a, b, chunk), kept[key], state)
        if "message_compression" in written:
            written = written.replace(message_compression=kept)
        written = self._write(written, self.inbox, self.places, wires)
        kept_in = support_inbox(self.inbox)
        if supports and _is_sent(self.stage, kept_in):
            written = self._write(written, kept_in, self.support_places, supports)
        return written

    def _write(
        self, written: Written, inbox: str, places: Sequence[packing.Place], wires: Sequence[jax.Array]
    ) -> Written:
        """Writes arrays to their places in the lane's message to an inbox."""
        lane = self.stage.scalars
        name = SENT[lane.operation]
        outputs = getattr(written, name)
        j = self.stage.spec.lowered.outgoing.index((inbox, lane.lane))
        return written.replace(**{name: {**outputs, j: packing.write_all(outputs[j], places, [], wires)}})

    @property
    def _gradient(self) -> bool:
        return is_gradient(self.inbox)

    def _state(self, codec: LeafCodec, kept: Any) -> Any:
        """The state of a leaf's compressor: the first one if none is kept, as in evaluation with other shapes."""
        if kept is None:
            return codec.first_state(self._gradient)
        (chunk,) = self.stage.column("message_compression")(self.inbox)
        return jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, chunk, keepdims=False, allow_negative_indices=False),
            kept,
        )


def neighbour_end(stage: StageContext, offset: int, inbox: str) -> MessageEnd:
    """The end of a message from the stage before (offset -1) or to the stage after (offset 0), or of its gradient.

    Stages that share a program have messages of one shape, and the first of them gives the places.
    """
    stages, num_messages = stage.stages, stage.stages.num_stages - 1
    owners = [s + offset for s in stage.program.stages]
    owner = next(o for o in owners if 0 <= o < num_messages)
    places = MessageParts(*(packing.places[owner] for packing in stages.messages))
    return _end(stage, inbox, stages.codecs[owner], places)


def _end(
    stage: StageContext, inbox: str, codecs: Sequence[LeafCodec], places: MessageParts, first: int = 0
) -> MessageEnd:
    """The end of a message of activations, or of gradients."""
    if is_gradient(inbox):
        return MessageEnd(stage, inbox, with_gradients(codecs), places.gradients, places.supports, first)
    return MessageEnd(stage, inbox, codecs, places.activations, places.supports, first)


# -- Skips


def _skip_ends(stage: StageContext, end: str, gradient: bool) -> Iterator[tuple[str, MessageEnd]]:
    """Skip -> its end, for skips whose `end`, "source" or "target", is in the stage's program."""
    for i, portal in enumerate(stage.stages.portals):
        if getattr(portal, end) not in stage.program.stages:
            continue
        inbox = f"skip{i}.gradient" if gradient else f"skip{i}"
        first = 0
        for name in portal.names:
            message_end = _end(stage, inbox, portal.codecs[name], portal.places[name], first)
            yield name, message_end
            first += len(message_end.codecs)


def arrived_skips(stage: StageContext, read: TickArrays) -> dict[str, list[jax.Array]]:
    """Name -> leaves of the skips that earlier stages have sent to this stage."""
    ends = _skip_ends(stage, "target", gradient=False)
    return {name: end.arrived(read) for name, end in ends}


def arrived_skip_gradients(stage: StageContext, read: TickArrays) -> dict[str, list[jax.Array]]:
    """Name -> gradients of the skips that this stage has sent to later stages."""
    ends = _skip_ends(stage, "source", gradient=True)
    return {name: end.arrived(read) if end.places else [] for name, end in ends}


def send_skips(
    stage: StageContext,
    written: Written,
    read: ReadOnly,
    skips: Mapping[str, Sequence[jax.Array]],
) -> Written:
    """Sends the skips that leave the stage."""
    for name, end in _skip_ends(stage, "source", gradient=False):
        if _is_sent(stage, end.inbox):
            written = end.send(written, read, skips[name])
    return written


def send_skip_gradients(
    stage: StageContext,
    written: Written,
    read: ReadOnly,
    gradients: Mapping[str, Sequence[jax.Array]],
) -> Written:
    """Sends the gradients of the skips that the stage has popped."""
    activations = dict(_skip_ends(stage, "target", gradient=False))
    for name, end in _skip_ends(stage, "target", gradient=True):
        if _is_sent(stage, end.inbox):
            arrived = wires_with_gradients(activations[name], read)
            written = end.send(written, read, gradients[name], arrived)
    return written


def _is_sent(stage: StageContext, inbox: str) -> bool:
    return (inbox, stage.scalars.lane) in stage.spec.lowered.outgoing


def wires_with_gradients(end: MessageEnd, read: TickArrays) -> list[list[jax.Array]]:
    """The wires of each leaf with a gradient; `[]` each if they are not kept until the backward."""
    codecs = end.codecs
    if not any(codec.compression.is_sparse for codec in codecs):
        return [[] for _ in with_gradients(codecs)]
    return [wire for codec, wire in zip(codecs, end.wires(read), strict=True) if is_inexact(codec.leaf.aval)]
