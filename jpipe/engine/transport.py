"""Messages between devices, and skips, by `ppermute`.

A message takes this way:

    operation of the source: `send` writes it into `sent_activations` or `sent_gradients`
    `move`: encode, `ppermute`                      -> `received`
    `receive`: decode, write it into its inbox      -> `inbox`
    operation of the target reads its slot of the inbox
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import Packed, TickArrays, Written
from jpipe.engine.spec import PassSpec
from jpipe.lowering.channels import Channel
from jpipe.lowering.scalars import LaneScalars, TickScalars
from jpipe.mesh import STAGE
from jpipe.stages.cut import StageProgram
from jpipe.stages.messages import IDENTITY, Portal

SENT = {"forward": "sent_activations", "backward": "sent_gradients"}
"""Operation -> the array of `TickArrays` that it sends from."""


def put_row(array: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """`array` with row `index`, not negative, replaced."""
    return lax.dynamic_update_index_in_dim(
        array, row, index, 0, allow_negative_indices=False
    )


# -- Between devices


def receive(
    spec: PassSpec,
    arrays: TickArrays,
    scalars: TickScalars,
    received: Mapping[int, Packed],
) -> TickArrays:
    """Writes messages, by channel, into their inboxes."""
    inboxes = dict(arrays.inbox)
    for number, encoded in received.items():
        channel = spec.lowered.channels[number]
        message = (channel.codec or IDENTITY).decode(encoded)
        for inbox in channel.arrives:
            slot = scalars.channel(number).slot(inbox)
            inboxes[inbox] = {
                name: put_row(array, message[name], slot)
                for name, array in inboxes[inbox].items()
            }
    return arrays.replace(inbox=inboxes)


def move(
    spec: PassSpec,
    arrays: TickArrays,
    scalars: TickScalars,
    sends: Sequence[jax.Array],
    after: str | None,
) -> dict[int, Packed]:
    """Sends the messages of the channels that an operation feeds.

    Args:
      spec: the pass.
      arrays: hold what is sent.
      scalars: of the tick.
      sends: channel -> bool `[]`, whether any device sends in this tick; the same on all devices.
      after: the operation: "forward" or "backward"; None: the channels that both feed, at the end
        of the tick.

    Returns:
      Channel -> the received message, encoded.
    """
    received = {}
    for number, channel in enumerate(spec.lowered.channels):
        if channel.operation != after:
            continue
        codec = channel.codec or IDENTITY
        message = codec.encode(_select_output(arrays, scalars, number, channel))
        transfer = functools.partial(_transfer, channel)
        if after is None:
            # Reading `op_count` delays the transfer until all operations of the tick have run: a
            # transfer between two operations would make all devices wait for each other twice per
            # tick.
            now = sends[number] & (arrays.op_count >= 0)
            message = lax.cond(now, transfer, lambda message: message, message)
        else:
            # Outside of a branch, so that the transfer can run beside the compute.
            message = transfer(message)
        received[number] = message
    return received


def _select_output(
    arrays: TickArrays, scalars: TickScalars, number: int, channel: Channel
) -> Packed:
    """The output that the device sends through a channel in this tick."""
    outputs = {**arrays.sent_activations, **arrays.sent_gradients}
    first, *others = channel.lanes
    message = outputs[first]
    for j in others:
        chosen = scalars.channel(number).lane == j
        message = jax.tree.map(
            functools.partial(jnp.where, chosen), outputs[j], message
        )
    return message


def _transfer(channel: Channel, message: Packed) -> Packed:
    """One permutation of devices."""
    if channel.pairs is None:
        return message
    return jax.tree.map(lambda a: lax.ppermute(a, STAGE, channel.pairs), message)


def send(
    spec: PassSpec,
    written: Written,
    lane: LaneScalars,
    inbox: str,
    places: Sequence[packing.Place],
    values: Sequence[jax.Array],
) -> Written:
    """Writes `values` to their places in the message that the lane sends to an inbox."""
    name = SENT[lane.operation]
    outputs = getattr(written, name)
    j = spec.lowered.outgoing.index((inbox, lane.lane))
    message = packing.write_all(outputs[j], places, [], values)
    return written.replace(**{name: {**outputs, j: message}})


# -- Skips


def portals_of(
    spec: PassSpec, program: StageProgram, end: str
) -> Iterator[tuple[int, Portal]]:
    """Number and record of each portal whose `end`, "source" or "target", is in a program."""
    for i, portal in enumerate(spec.stages.portals):
        if getattr(portal, end) in program.stages:
            yield i, portal


def arrived_skips(
    spec: PassSpec,
    program: StageProgram,
    inbox: Mapping[str, Packed],
    lane: LaneScalars,
) -> dict[str, list[jax.Array]]:
    """Name -> leaves of the skips that earlier stages have sent to this stage."""
    skips = {}
    for i, portal in portals_of(spec, program, "target"):
        messages, slot = inbox[f"skip{i}"], [lane.slot(f"skip{i}")]
        for name in portal.names:
            skips[name] = packing.read_all(messages, portal.places[name], slot)
    return skips


def arrived_skip_gradients(
    spec: PassSpec,
    program: StageProgram,
    inbox: Mapping[str, Packed],
    lane: LaneScalars,
) -> dict[str, list[jax.Array]]:
    """Name -> gradients of the skips that this stage has sent to later stages."""
    gradients = {}
    for i, portal in portals_of(spec, program, "source"):
        message = f"skip{i}.gradient"
        for name in portal.names:
            places = portal.gradient_places[name]
            gradients[name] = (
                packing.read_all(inbox[message], places, [lane.slot(message)])
                if places
                else []
            )
    return gradients


def send_skips(
    spec: PassSpec,
    program: StageProgram,
    written: Written,
    lane: LaneScalars,
    skips: Mapping[str, Sequence[jax.Array]],
) -> Written:
    """Sends the skips that leave the stage; in a backward, the gradients of skips that it popped."""
    backward = lane.operation == "backward"
    for i, portal in portals_of(spec, program, "target" if backward else "source"):
        inbox = f"skip{i}.gradient" if backward else f"skip{i}"
        places = portal.gradient_places if backward else portal.places
        if (inbox, lane.lane) in spec.lowered.outgoing:
            for name in portal.names:
                written = send(spec, written, lane, inbox, places[name], skips[name])
    return written
