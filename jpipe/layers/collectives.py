"""Collectives in a layer that cannot run as they are.

`jax.lax.ppermute`. XLA lets all devices of a program take part in a collective permute, whatever pairs it names: on
CPUs all of them wait for each other, and on GPUs they form one communicator. A pipeline runs the layers of a stage in a
branch that the devices of other stages do not take. These wait in another permute at that time, of the messages between
stages, and both would get values of the other permute, without an error. So a permute becomes all-gathers of pairs of
devices, in which only the pair takes part. A ring of an even number of devices takes two, and a device sends its value
twice.

Collectives over several axes at once, if these are axes of `jax.vmap`, which knows them over one axis alone; and
`jax.lax.ragged_all_to_all`, which it does not know. Of `jax.lax.ragged_dot` it knows the first dim alone.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class _Round(NamedTuple):
    """An all-gather.

    Attributes:
      groups: the devices that take part together, as positions along the axis; None: all.
      position: per device, the position of its source in its group; -1 if the source is not in it.
    """

    groups: list[list[int]] | None
    position: np.ndarray


_KEEPS: contextvars.ContextVar[bool] = contextvars.ContextVar("jpipe_keeps_collectives", default=False)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """A context in which collectives stay as they are: the equations that are traced in it run later, on a mesh."""
    token = _KEEPS.set(True)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def replaced(name: str, params: Mapping[str, Any]) -> Callable[..., list] | None:
    """The function that computes the results of a collective in these surroundings; None if it can run as it is."""
    if name not in NAMES or _KEEPS.get():
        return None
    names = params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    has_devices = set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)
    if name == "ppermute":
        return _each(functools.partial(_permute, names, tuple(map(tuple, params["perm"])), has_devices))
    if has_devices or (len(names) == 1 and name != _RAGGED):
        return None
    return _UNDER_VMAP[name](names, params)


def run_each_alone(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """An operation, which `jax.vmap` calls for each element by itself if it does not know the operation.

    Args:
      name: of the primitive.
      compute: its arrays -> its results.
    """
    if name != "ragged_dot_general" or _KEEPS.get() or jax.sharding.get_abstract_mesh().manual_axes:
        return compute
    alone = jax.custom_batching.custom_vmap(compute)

    @alone.def_vmap
    def rule(size: int, has_elements: Sequence[bool], *values: jax.Array) -> tuple[Any, Any]:
        elements = [alone(*(v[i] if has else v for v, has in zip(values, has_elements))) for i in range(size)]
        return jnp.stack(elements), True

    return alone


def _permute(
    names: tuple[str, ...], perm: tuple[tuple[int, int], ...], has_devices: bool, value: jax.Array
) -> jax.Array:
    index = lax.axis_index(names)
    result = jnp.zeros_like(value)
    for groups, position in _rounds(lax.axis_size(names), perm, in_pairs=has_devices):
        gathered = lax.all_gather(value, names, axis_index_groups=groups) if has_devices else _gathered(names, value)
        source = jnp.asarray(position)[index]
        result = jnp.where(source >= 0, gathered[jnp.maximum(source, 0)], result)
    return result


def _gathered(names: tuple[str, ...], value: jax.Array) -> jax.Array:
    """`[devices, ...]`: the values of all."""
    gathered = value
    for name in reversed(names):
        gathered = lax.all_gather(gathered, name)
    return gathered.reshape(-1, *value.shape)


def _all_gather(names: tuple[str, ...], params: Mapping[str, Any], value: jax.Array) -> jax.Array:
    return _joined(_gathered(names, value), params["all_gather_dimension"], params["tiled"])


def _reduce_scatter(names: tuple[str, ...], params: Mapping[str, Any], value: jax.Array) -> jax.Array:
    return _share(names, lax.psum(value, names), params["scatter_dimension"], params["tiled"])


def _all_to_all(names: tuple[str, ...], params: Mapping[str, Any], value: jax.Array) -> jax.Array:
    shares = _share(names, _gathered(names, value), params["split_axis"] + 1, params["tiled"])
    return _joined(shares, params["concat_axis"], params["tiled"])


def _ragged_all_to_all(names: tuple[str, ...], operand: jax.Array, output: jax.Array, *counts: jax.Array) -> list:
    """See `jax.lax.ragged_all_to_all`: each device writes rows of its operand into the outputs of all."""
    starts, sizes, targets, _ = counts
    me, place = lax.axis_index(names), jnp.arange(output.shape[0])
    sources = zip(*(_gathered(names, value) for value in (operand, starts, sizes, targets)), strict=True)
    for rows, starts, sizes, targets in sources:
        turn = place - targets[me]
        values = rows[jnp.clip(starts[me] + turn, 0, rows.shape[0] - 1)]
        is_written = ((turn >= 0) & (turn < sizes[me])).reshape(-1, *[1] * (values.ndim - 1))
        output = jnp.where(is_written, values, output)
    return [output]


def _each(function: Callable[[jax.Array], jax.Array]) -> Callable[..., list]:
    """The function of each operand."""
    return lambda *values: list(map(function, values))


def _of_each(function: Callable[..., jax.Array]) -> Callable[..., Callable[..., list]]:
    return lambda names, params: _each(functools.partial(function, names, params))


def _joined(values: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """`[devices, ...]` -> the values one after the other along a dim, which is a new one unless `tiled`."""
    return jnp.concatenate(list(values), dim) if tiled else jnp.moveaxis(values, 0, dim)


def _share(names: tuple[str, ...], value: jax.Array, dim: int, tiled: bool) -> jax.Array:
    """The share of this device of a dim, which is left out unless `tiled`."""
    size = value.shape[dim] // lax.axis_size(names)
    share = lax.dynamic_slice_in_dim(value, lax.axis_index(names) * size, size, dim)
    return share if tiled else lax.squeeze(share, (dim,))


_RAGGED = "ragged_all_to_all"
_UNDER_VMAP: Mapping[str, Callable[[tuple[str, ...], Mapping[str, Any]], Callable[..., list]]] = {
    "all_gather": _of_each(_all_gather),
    "all_to_all": _of_each(_all_to_all),
    "reduce_scatter": _of_each(_reduce_scatter),
    _RAGGED: lambda names, params: functools.partial(_ragged_all_to_all, names),
}
NAMES = ("ppermute", *_UNDER_VMAP)
"""The names of the primitives."""


@functools.cache
def _rounds(size: int, perm: tuple[tuple[int, int], ...], *, in_pairs: bool) -> list[_Round]:
    """The all-gathers that bring each value from its source to its target."""
    source_of = {target: source for source, target in perm}
    if size % 2 or not in_pairs:  # the groups of an all-gather have one size, and an axis of `jax.vmap` has no groups
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
