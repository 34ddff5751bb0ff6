"""Messages between stages: activations, their gradients, and skips between distant stages."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jpipe.layers.avals import is_inexact
from jpipe.lowering.channels import Route, neighbours
from jpipe.packing import Leaf, Packing, Place
from jpipe.stages.codecs import NO_COMPRESSION, LeafCodec, MessageCompression, codecs_of, support_inbox

T = TypeVar("T")


class MessageParts(NamedTuple, Generic[T]):
    """What a forward sends, what a backward sends back for it, and what the sender keeps in between.

    Attributes:
      activations: of the wires of activations.
      gradients: of the wires of their gradients.
      supports: of the parts of the wires of activations that say by which entries the gradients are.
    """

    activations: T
    gradients: T
    supports: T


@dataclasses.dataclass(frozen=True)
class Portal:
    """A direct message for skip connections between two stages.

    Attributes:
      source: the stage that stashes the skips.
      target: the stage that pops them.
      names: the skips in the message.
      packings: the packings of the message; one owner.
      codecs: skip -> the codec of each of its leaves.
      places: skip -> places of the wires of its leaves.
    """

    source: int
    target: int
    names: tuple[str, ...]
    packings: MessageParts[Packing]
    codecs: Mapping[str, tuple[LeafCodec, ...]]
    places: Mapping[str, MessageParts[tuple[Place, ...]]]


def pack_messages(messages: Sequence[Sequence[LeafCodec]], occupancy: float = 0.5) -> MessageParts[Packing]:
    """Packs the messages between neighbours.

    If all messages are alike, each array keeps its shape. Messages that differ share flat vectors, and so
    share transfers.

    Args:
      messages: the codecs of the output leaves of every stage except the last.
      occupancy: see `Packing.of`; of messages that are alike.
    """
    alike = len(set(map(tuple, messages))) <= 1
    wires = MessageParts(*zip(*map(_wires, messages), strict=True)) if messages else MessageParts((), (), ())
    return MessageParts(*(Packing.of(leaves, occupancy if alike else np.inf) for leaves in wires))


def with_gradients(codecs: Sequence[LeafCodec]) -> list[LeafCodec]:
    """The codecs of the leaves that have gradients."""
    return [codec for codec in codecs if is_inexact(codec.leaf.aval)]


def _wires(codecs: Sequence[LeafCodec]) -> MessageParts[list[Leaf]]:
    """The wires of a message."""
    return MessageParts(
        [leaf for codec in codecs for leaf in codec.wire()],
        [leaf for codec in with_gradients(codecs) for leaf in codec.wire(gradient=True)],
        [leaf for codec in codecs for leaf in codec.support_wire()],
    )


def find_portals(
    skips: Mapping[str, tuple[int, int, tuple]],
    starts: Sequence[int],
    leaf: Callable[[Any], Leaf] = Leaf,
    compression: MessageCompression = NO_COMPRESSION,
    occupancy: float = 0.5,
) -> list[Portal]:
    """Makes one portal for each pair of stages that skips connect.

    Args:
      skips: see `Traced`.
      starts: first layer of each stage, and the number of layers at the end.
      leaf: abstract leaf -> the `Leaf` that is packed.
      compression: the compression of messages.
      occupancy: see `Packing.of`.
    """
    names_of: dict[tuple[int, int], list[str]] = {}
    for name, (first, last, _) in skips.items():
        source, target = stage_of_layer(starts, first), stage_of_layer(starts, last)
        if source != target:
            names_of.setdefault((source, target), []).append(name)
    portals = []
    for (source, target), names in names_of.items():
        codecs = {
            name: codecs_of([leaf(a) for a in skips[name][2]], compression, f"the skip `{name}`") for name in names
        }
        packings, places = _pack_skips(codecs, occupancy)
        portals.append(Portal(source, target, tuple(names), packings, codecs, places))
    return portals


def _pack_skips(
    codecs: Mapping[str, Sequence[LeafCodec]], occupancy: float
) -> tuple[MessageParts[Packing], dict[str, MessageParts[tuple[Place, ...]]]]:
    """Packs one message of all skips. Returns also skip -> places of the wires of its leaves."""
    packings = pack_messages([[*itertools.chain(*codecs.values())]], occupancy)
    unread = [iter(packing.places[0]) for packing in packings]
    places = {}
    for name, leaf_codecs in codecs.items():
        lengths = map(len, _wires(leaf_codecs))
        places[name] = MessageParts(*(tuple(itertools.islice(*part)) for part in zip(unread, lengths)))
    return packings, places


def find_routes(
    num_stages: int,
    messages: MessageParts[Packing],
    portals: Sequence[Portal],
    *,
    forward_only: bool = False,
    kept: bool = False,
) -> list[tuple[Route, Packing]]:
    """The kinds of messages, with their packings.

    Args:
      num_stages: S.
      messages: see `Stages`.
      portals: see `Stages`.
      forward_only: whether nothing runs backward.
      kept: whether backwards read the activations that have arrived.

    Returns:
      The routes of forwards, then those of backwards.
    """
    to_next, to_previous = neighbours(num_stages, messages.activations.arrays, messages.gradients.arrays)
    to_next = dataclasses.replace(to_next, kept=kept)
    forwards, backwards = [(to_next, messages.activations)], [(to_previous, messages.gradients)]
    supports = [(to_next, messages.supports)]
    for i, portal in enumerate(portals):
        there, back, support = portal.packings
        route = Route(f"skip{i}", "forward", {portal.source: portal.target}, there.arrays, kept)
        forwards.append((route, there))
        supports.append((route, support))
        if back.arrays:
            backwards.append(
                (Route(f"skip{i}.gradient", "backward", {portal.target: portal.source}, back.arrays), back)
            )
    if forward_only:
        return forwards
    for route, pack in supports:
        if pack.arrays:
            stays = {source: source for source in route.target}
            forwards.append((Route(support_inbox(route.inbox), "forward", stays, pack.arrays, kept=True), pack))
    return forwards + backwards


def stage_of_layer(starts: Sequence[int], layer: int) -> int:
    """The stage of a layer; `starts` has the first layer of each stage."""
    return bisect.bisect_right(starts, layer) - 1
