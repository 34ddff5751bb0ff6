"""Messages between stages: activations, their gradients, and skips between distant stages."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpipe.layers.avals import is_inexact
from jpipe.lowering.channels import Route, neighbours
from jpipe.packing import Leaf, Packing, Place


@dataclasses.dataclass(frozen=True)
class Codec:
    """How messages are encoded for their transfer between devices.

    The source encodes a packed message right before the transfer, and the target decodes it before
    it writes it into its inbox. Inboxes and stages never see an encoded message.

    Attributes:
      name: name of the codec.
      encode: packed message, a dict of arrays `[...]` -> dict of arrays that are transferred.
      decode: dict of transferred arrays -> packed message, with the shapes and dtypes of the
        argument of `encode`.
    """

    name: str
    encode: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]
    decode: Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


IDENTITY = Codec("identity", dict, dict)
"""Transfers messages as they are."""


@dataclasses.dataclass(frozen=True)
class Portal:
    """A direct message for skip connections between two stages.

    Attributes:
      source: the stage that stashes the skips.
      target: the stage that pops them.
      names: the skips in the message.
      activations: how the message is packed; one owner.
      gradients: how the message of the gradients is packed; one owner.
      places: skip -> places of its leaves in the message.
      gradient_places: skip -> places of its gradients' leaves.
    """

    source: int
    target: int
    names: tuple[str, ...]
    activations: Packing
    gradients: Packing
    places: Mapping[str, tuple[Place, ...]]
    gradient_places: Mapping[str, tuple[Place, ...]]


def pack_messages(outputs: Sequence[Sequence[Leaf]]) -> tuple[Packing, Packing]:
    """Packs the messages between neighbours.

    If all messages are alike, each leaf stays an array of its own shape. Messages that differ share
    flat vectors, and so share transfers.

    Args:
      outputs: the output leaves of every stage except the last.

    Returns:
      The packing of the activations, and the packing of their gradients.
    """
    alike = len(set(map(tuple, outputs))) <= 1
    inexact = [[leaf for leaf in leaves if is_inexact(leaf.aval)] for leaves in outputs]
    occupancy = 0.5 if alike else np.inf
    return Packing.of(outputs, occupancy), Packing.of(inexact, occupancy)


def find_portals(
    skips: Mapping[str, tuple[int, int, tuple]],
    starts: Sequence[int],
    leaf: Callable[[Any], Leaf] = Leaf,
) -> list[Portal]:
    """One portal for each pair of stages that skips connect.

    Args:
      skips: as in `Traced`.
      starts: first layer of each stage, and the number of layers at the end.
      leaf: abstract leaf -> the `Leaf` that is packed.
    """
    names_of: dict[tuple[int, int], list[str]] = {}
    for name, (first, last, _) in skips.items():
        source, target = stage_of_layer(starts, first), stage_of_layer(starts, last)
        if source != target:
            names_of.setdefault((source, target), []).append(name)
    portals = []
    for (source, target), names in names_of.items():
        leaves = {name: list(skips[name][2]) for name in names}
        inexact = {name: list(filter(is_inexact, leaves[name])) for name in names}
        activations, places = _pack_skips(leaves, leaf)
        gradients, gradient_places = _pack_skips(inexact, leaf)
        portals.append(
            Portal(
                source,
                target,
                tuple(names),
                activations,
                gradients,
                places,
                gradient_places,
            )
        )
    return portals


def _pack_skips(
    leaves: Mapping[str, Sequence], leaf: Callable[[Any], Leaf]
) -> tuple[Packing, dict[str, tuple[Place, ...]]]:
    """One message of all skips, and skip -> places of its leaves."""
    packing = Packing.of([[leaf(a) for avals in leaves.values() for a in avals]])
    places = iter(packing.places[0])
    return packing, {
        name: tuple(itertools.islice(places, len(avals)))
        for name, avals in leaves.items()
    }


def find_routes(
    num_stages: int,
    activations: Packing,
    gradients: Packing | None,
    portals: Sequence[Portal],
    codec: Codec = IDENTITY,
) -> list[tuple[Route, Packing]]:
    """Every kind of message, with its packing.

    Args:
      num_stages: S.
      activations: as in `Stages`.
      gradients: as in `Stages`; None if nothing runs backward.
      portals: as in `Stages`.
      codec: how every message is encoded for its transfer.

    Returns:
      The routes of forwards, then those of backwards.
    """
    backward = () if gradients is None else gradients.arrays
    to_next, to_previous = neighbours(num_stages, activations.arrays, backward)
    routes = [(to_next, activations)]
    for i, portal in enumerate(portals):
        target, pack = {portal.source: portal.target}, portal.activations
        routes.append((Route(f"skip{i}", "forward", target, pack.arrays), pack))
    if gradients is not None:
        routes.append((to_previous, gradients))
        for i, portal in enumerate(portals):
            target, pack = {portal.target: portal.source}, portal.gradients
            if pack.arrays:
                route = Route(f"skip{i}.gradient", "backward", target, pack.arrays)
                routes.append((route, pack))
    return [(dataclasses.replace(route, codec=codec), pack) for route, pack in routes]


def stage_of_layer(starts: Sequence[int], layer: int) -> int:
    """The stage of a layer; `starts` has the first layer of each stage."""
    return bisect.bisect_right(starts, layer) - 1
