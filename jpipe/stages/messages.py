"""Messages between stages: activations, their gradients, and skips between distant stages."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jpipe.layers.avals import is_inexact
from jpipe.lowering.channels import Route, neighbours
from jpipe.packing import Leaf, Packing, Place
from jpipe.stages.codecs import NO_COMPRESSION, LeafCodec, MessageCompression, codecs_of


@dataclasses.dataclass(frozen=True)
class Portal:
    """A direct message for skip connections between two stages.

    Attributes:
      source: the stage that stashes the skips.
      target: the stage that pops them.
      names: the skips in the message.
      activations: the packing of the message; one owner.
      gradients: the packing of the message of the gradients; one owner.
      codecs: skip -> the codec of each of its leaves.
      places: skip -> places of the wires of its leaves.
      gradient_places: skip -> places of the wires of its leaves' gradients.
    """

    source: int
    target: int
    names: tuple[str, ...]
    activations: Packing
    gradients: Packing
    codecs: Mapping[str, tuple[LeafCodec, ...]]
    places: Mapping[str, tuple[Place, ...]]
    gradient_places: Mapping[str, tuple[Place, ...]]


def pack_messages(
    messages: Sequence[Sequence[LeafCodec]],
) -> tuple[Packing, Packing]:
    """Packs the messages between neighbours.

    If all messages are alike, each array keeps its shape. Messages that differ share flat vectors, and so
    share transfers.

    Args:
      messages: the codecs of the output leaves of every stage except the last.

    Returns:
      The packing of the activations, and the packing of their gradients.
    """
    alike = len(set(map(tuple, messages))) <= 1
    occupancy = 0.5 if alike else np.inf
    wires, gradient_wires = ([_wires(codecs, gradient) for codecs in messages] for gradient in (False, True))
    return Packing.of(wires, occupancy), Packing.of(gradient_wires, occupancy)


def with_gradients(codecs: Sequence[LeafCodec]) -> list[LeafCodec]:
    """The codecs of the leaves that have gradients."""
    return [codec for codec in codecs if is_inexact(codec.leaf.aval)]


def _wires(codecs: Sequence[LeafCodec], gradient: bool) -> list[Leaf]:
    """The wires of a message."""
    sent = with_gradients(codecs) if gradient else codecs
    return [leaf for codec in sent for leaf in codec.wire(gradient)]


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
        activations, places = _pack_skips(codecs, occupancy, gradient=False)
        gradients, gradient_places = _pack_skips(codecs, occupancy, gradient=True)
        portals.append(
            Portal(
                source,
                target,
                tuple(names),
                activations,
                gradients,
                codecs,
                places,
                gradient_places,
            )
        )
    return portals


def _pack_skips(
    codecs: Mapping[str, Sequence[LeafCodec]], occupancy: float, *, gradient: bool
) -> tuple[Packing, dict[str, tuple[Place, ...]]]:
    """Packs one message of all skips. Returns also skip -> places of the wires of its leaves."""
    wires = {name: _wires(skip_codecs, gradient) for name, skip_codecs in codecs.items()}
    packing = Packing.of([[leaf for leaves in wires.values() for leaf in leaves]], occupancy)
    places = iter(packing.places[0])
    return packing, {name: tuple(itertools.islice(places, len(leaves))) for name, leaves in wires.items()}


def find_routes(
    num_stages: int,
    activations: Packing,
    gradients: Packing | None,
    portals: Sequence[Portal],
    kept: bool = False,
) -> list[tuple[Route, Packing]]:
    """The kinds of messages, with their packings.

    Args:
      num_stages: S.
      activations: see `Stages`.
      gradients: see `Stages`; None if nothing runs backward.
      portals: see `Stages`.
      kept: whether backwards read the activations that have arrived.

    Returns:
      The routes of forwards, then those of backwards.
    """
    backward = () if gradients is None else gradients.arrays
    to_next, to_previous = neighbours(num_stages, activations.arrays, backward)
    routes = [(dataclasses.replace(to_next, kept=kept), activations)]
    for i, portal in enumerate(portals):
        target, pack = {portal.source: portal.target}, portal.activations
        route = Route(f"skip{i}", "forward", target, pack.arrays, kept)
        routes.append((route, pack))
    if gradients is not None:
        routes.append((to_previous, gradients))
        for i, portal in enumerate(portals):
            target, pack = {portal.target: portal.source}, portal.gradients
            if pack.arrays:
                route = Route(f"skip{i}.gradient", "backward", target, pack.arrays)
                routes.append((route, pack))
    return routes


def stage_of_layer(starts: Sequence[int], layer: int) -> int:
    """The stage of a layer; `starts` has the first layer of each stage."""
    return bisect.bisect_right(starts, layer) - 1
