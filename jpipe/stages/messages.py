"""Messages between stages: activations, their gradients, and skips past stages."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jpipe.layers.backward import is_inexact
from jpipe.lowering.lower import Route, neighbours
from jpipe.packing import Leaf, Packing


@dataclasses.dataclass(frozen=True)
class Portal:
    """The way of skips from one stage to a later one, past the stages between.

    Attributes:
      source, target: the stages.
      names: the skips that take it.
      activations, gradients: how the message and its gradient are packed; one owner.
      places, gradient_places: of each skip's leaves in them.
    """

    source: int
    target: int
    names: tuple[str, ...]
    activations: Packing
    gradients: Packing
    places: Mapping[str, tuple]
    gradient_places: Mapping[str, tuple]


def pack_messages(ends: Sequence[Sequence[Leaf]]) -> tuple[Packing, Packing]:
    """How the outputs of all stages but the last travel, and how the gradients that come back for them do.

    One kind of message stays an array of its own shape; several share flat vectors, so that they share transfers.
    """
    alike = len(set(map(tuple, ends))) <= 1
    returned = [[leaf for leaf in leaves if is_inexact(leaf.aval)] for leaves in ends]
    occupancy = 0.5 if alike else np.inf
    return Packing.of(ends, occupancy), Packing.of(returned, occupancy)


def find_portals(
    skips: Mapping[str, tuple[int, int, tuple]],
    starts: Sequence[int],
    whole: Callable[[Any], Leaf] = Leaf,
) -> list[Portal]:
    """One portal for each pair of stages that skips connect.

    Args:
      skips: as of `Traced`.
      starts: first layer of each stage, and the number of layers at the end.
      whole: how an abstract leaf travels.
    """
    ways: dict[tuple[int, int], list[str]] = {}
    for name, (first, last, _) in skips.items():
        way = stage_of_layer(starts, first), stage_of_layer(starts, last)
        if way[0] != way[1]:
            ways.setdefault(way, []).append(name)
    portals = []
    for (source, target), names in ways.items():
        packings, places = [], []
        for wanted in (lambda a: True, is_inexact):
            leaves = {n: [a for a in skips[n][2] if wanted(a)] for n in names}
            sent = [whole(a) for n in names for a in leaves[n]]
            packing = Packing.of([sent])
            left = iter(packing.places[0])
            packings.append(packing)
            places.append(
                {n: tuple(itertools.islice(left, len(leaves[n]))) for n in names}
            )
        portals.append(Portal(source, target, tuple(names), *packings, *places))
    return portals


def find_routes(
    num_stages: int,
    activations: Packing,
    gradients: Packing | None,
    portals: Sequence[Portal],
) -> list[tuple[Route, Packing]]:
    """Every kind of message: its way, and how it is packed.

    Args:
      num_stages: S.
      activations, gradients, portals: as of `Stages`; gradients are None if nothing runs backward.
    """
    backward = () if gradients is None else gradients.arrays
    down, up = neighbours(num_stages, activations.arrays, backward)
    found = [(down, activations)]
    for i, portal in enumerate(portals):
        way, pack = {portal.source: portal.target}, portal.activations
        found.append((Route(f"skip{i}", "forward", way, pack.arrays), pack))
    if gradients is None:
        return found
    found.append((up, gradients))
    for i, portal in enumerate(portals):
        way, pack = {portal.target: portal.source}, portal.gradients
        if pack.arrays:
            route = Route(f"skip{i}.gradient", "backward", way, pack.arrays)
            found.append((route, pack))
    return found


def stage_of_layer(starts: Sequence[int], layer: int) -> int:
    return bisect.bisect_right(starts, layer) - 1
