"""Gradients in groups that are compressed alike: see `jpipe.engine.gradients`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jpipe.compress import Compressor
from jpipe.packing import Place
from jpipe.stages.stage_update import StageUpdate


class GradientGroup(NamedTuple):
    """Gradients of one shape in one packed array. A loop goes over them.

    Attributes:
      name: name of the group.
      place: the place of one of them; the others begin elsewhere.
      like: shape and dtype of one of them.
      starts: the first index of each gradient of each update, int32 `[n]`.
    """

    name: str
    place: Place
    like: jax.ShapeDtypeStruct
    starts: tuple[np.ndarray, ...]

    @property
    def num_gradients(self) -> int:
        """The largest number of gradients of an update."""
        return max(map(len, self.starts))


def gradient_groups(updates: Sequence[StageUpdate], arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[GradientGroup]:
    """The gradients of all updates in groups; a tied weight counts once in its stage.

    Args:
      updates: the updates of the stages, and of the parts of vocabulary layers.
      arrays: the packed gradients.
    """
    starts_by_group: dict[tuple, tuple[Place, list[list[int]]]] = {}
    for u, update in enumerate(updates):
        for placed, row in update.gradients:
            (place,) = placed.places
            key = place.array, place.shape
            _, starts = starts_by_group.setdefault(key, (place, [[] for _ in updates]))
            starts[u].append(int(place.start(row)))
    return [
        GradientGroup(
            f"{array} {list(shape)}",
            place,
            jax.ShapeDtypeStruct(shape, arrays[array].dtype),
            tuple(np.array(update_starts, np.int32) for update_starts in starts),
        )
        for (array, shape), (place, starts) in starts_by_group.items()
    ]


def compressor_states(compressor: Compressor, groups: Sequence[GradientGroup], num_chunks: int) -> dict[str, object]:
    """Group -> state of the compressor for each gradient before training, `[R, n, ...]`. It is equal for all gradients.

    Args:
      compressor: the compressor of the gradients.
      groups: the groups of the gradients.
      num_chunks: R.
    """

    def repeated(a: jax.Array, group: GradientGroup) -> jax.Array:
        lead = num_chunks, group.num_gradients
        return jax.numpy.broadcast_to(a, (*lead, *a.shape))

    return {
        group.name: jax.tree.map(lambda a, group=group: repeated(a, group), compressor.init(group.like))
        for group in groups
    }
