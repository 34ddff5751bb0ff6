"""`jax.lax.ppermute` in a layer.

XLA lets all devices of a program take part in a collective permute, whatever pairs it names: on CPUs all of them wait
for each other, and on GPUs they form one communicator. A pipeline runs the layers of a stage in a branch that the
devices of other stages do not take. These wait in another permute at that time, of the messages between stages, and
both would get values of the other permute, without an error. So a permute becomes all-gathers of pairs of devices, in
which only the pair takes part. A ring of an even number of devices takes two, and a device sends its value twice.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NAME = "ppermute"
"""The name of the primitive."""


class _Round(NamedTuple):
    """An all-gather.

    Attributes:
      groups: the devices that take part together, as positions along the axis; None: all.
      position: per device, the position of its source in its group; -1 if the source is not in it.
    """

    groups: list[list[int]] | None
    position: np.ndarray


def permute(value: jax.Array, axis_name: str | tuple[str, ...], perm: Sequence[tuple[int, int]]) -> jax.Array:
    """`jax.lax.ppermute` of the devices along an axis, which may run in a branch that only they take."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):  # an axis of `jax.vmap`
        return lax.ppermute(value, axis_name, perm)
    index = lax.axis_index(axis_name)
    result = jnp.zeros_like(value)
    for groups, position in _rounds(lax.axis_size(axis_name), tuple(map(tuple, perm))):
        gathered = lax.all_gather(value, axis_name, axis_index_groups=groups)
        source = jnp.asarray(position)[index]
        result = jnp.where(source >= 0, gathered[jnp.maximum(source, 0)], result)
    return result


@functools.cache
def _rounds(size: int, perm: tuple[tuple[int, int], ...]) -> list[_Round]:
    """The all-gathers that bring each value from its source to its target."""
    source_of = {target: source for source, target in perm}
    if size % 2:  # the groups of an all-gather have one size
        return [_Round(None, np.array([source_of.get(i, -1) for i in range(size)], np.int32))]
    matchings: list[dict[int, int]] = [{}]  # device -> the other one of its pair
    for source, target in perm:
        if source == target or any(pairs.get(source) == target for pairs in matchings):
            continue
        free = (pairs for pairs in matchings if source not in pairs and target not in pairs)
        pairs = next(free, None)
        if pairs is None:
            matchings.append(pairs := {})
        pairs |= {source: target, target: source}
    rounds = []
    for pairs in matchings:
        others = [i for i in range(size) if i not in pairs]
        pairs |= {a: b for a, b in zip(others[::2], others[1::2])}
        groups = sorted({tuple(sorted(pair)) for pair in pairs.items()})
        position = np.full(size, -1, np.int32)
        for group in groups:
            for i in group:
                if source_of.get(i) in group:
                    position[i] = group.index(source_of[i])
        rounds.append(_Round([list(group) for group in groups], position))
    return rounds
