"""Reads, writes and adds leaves of packed arrays, in a traced function."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jpipe.packing.places import Place
from jpipe.packing.specs import axes, split_as

Lead = Sequence | Callable[[str], Sequence]
"""The indices of the leading axes of packed arrays: equal for all, or a function of the array's name."""


def row_of(array: jax.Array, lead: Sequence, spec: Sequence) -> jax.Array:
    """One row of a packed array, `[1, ...]`, in the layout that all reads have: see `_row_major`.

    Args:
      array: the packed array.
      lead: the index of the row.
      spec: see `Packing.specs`; () for leaves that are not split.
    """
    row = lax.dynamic_index_in_dim(array, *lead, allow_negative_indices=False)
    return row if any(spec) else with_last_dim_innermost(row)


def _row_major(place: Place, block: jax.Array) -> jax.Array:
    """Gives `block` a fixed layout on TPUs and GPUs: the last dim is innermost.

    The array that the block is read from or written to gets the same layout. Without this, each
    branch of a `cond` would choose its own layout, and the whole array would be copied in every
    tick. A block that is split has none, because XLA would gather it first.
    """
    if any(place.spec):
        return block
    return with_last_dim_innermost(block)


@functools.partial(jax.jit, inline=True)  # traced once per shape and dtype
def with_last_dim_innermost(block: jax.Array) -> jax.Array:
    """A value with the layout that blocks have on TPUs and GPUs, see `_row_major`."""
    layout = Layout(tuple(range(block.ndim)))
    return lax.platform_dependent(
        block,
        tpu=lambda block: with_layout_constraint(block, layout),
        cuda=lambda block: with_layout_constraint(block, layout),
        default=lambda block: block,
    )


def read(
    arrays: Mapping[str, jax.Array],
    place: Place,
    lead: Lead,
    i: jax.Array | int = 0,
) -> jax.Array:
    """Reads leaf i at a place.

    Args:
      arrays: packed arrays `[*leading axes, n, *shape]`.
      place: the place.
      lead: indices of the leading axes.
      i: number of the leaf.
    """
    if place.empty is not None:
        return jnp.zeros(place.shape, place.empty)
    lead = _indices(lead, place.array)
    array = place.rows_of(arrays[place.array], len(lead))
    start = _start(array, place, lead, i)
    sizes = [1] * len(lead) + list(place.block)
    block = lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)
    if place.on_host:
        block = jax.device_put(block, jax.memory.Space.Device)
    block = _row_major(place, block)
    return split_as(place.spec, block.reshape(place.shape))


def write(
    arrays: Mapping[str, jax.Array],
    place: Place,
    lead: Lead,
    value: jax.Array,
    i: jax.Array | int = 0,
) -> dict:
    """Replaces leaf i at `place` by `value`; see `read`."""
    return dict(write_all(arrays, [place], lead, [value], i))


def read_all(
    arrays: Mapping[str, jax.Array],
    places: Sequence[Place],
    lead: Lead,
    i: jax.Array | int = 0,
) -> list[jax.Array]:
    """Reads leaf i of every place; see `read`."""
    return [read(arrays, p, lead, i) for p in places]


def write_all(
    arrays: Mapping[str, jax.Array],
    places: Sequence[Place],
    lead: Lead,
    values: Sequence[jax.Array],
    i: jax.Array | int = 0,
    *,
    joined: bool = False,
) -> Mapping[str, jax.Array]:
    """Replaces leaf i of every place; see `read`.

    Args:
      arrays: packed arrays.
      places: the places.
      lead: indices of the leading axes.
      values: one per place.
      i: number of the leaf.
      joined: whether leaves that lie side by side are written at once, which takes fewer kernels.
    """
    for place, leading, block in _blocks(places, values, lead, joined):
        old = arrays[place.array]
        array = place.rows_of(old, len(leading))
        array = _updated(array, block, _start(array, place, leading, i))
        arrays = {**arrays, place.array: array.reshape(old.shape)}
    return arrays


def add_all(
    arrays: Mapping[str, jax.Array],
    places: Sequence[Place],
    lead: Lead,
    values: Sequence[jax.Array],
    i: jax.Array | int = 0,
    *,
    joined: bool = False,
) -> Mapping[str, jax.Array]:
    """Adds a value to leaf i of every place, in the dtype of its array; see `write_all`."""
    alone = [place for place in places if not joined or place.on_host]
    for place, value in zip(places, values, strict=True):
        if place in alone:
            # In the shape of the leaf: at a constant index XLA for CPUs would else read in the kernel
            # that writes, and that kernel would then go over the whole array.
            old = read(arrays, place, lead, i)
            arrays = write(arrays, place, lead, old + value.astype(old.dtype), i)
    left = [
        (p, v if p.empty is not None else v.astype(arrays[p.array].dtype))
        for p, v in zip(places, values)
        if p not in alone
    ]
    left_places, left_values = [p for p, _ in left], [v for _, v in left]
    for place, leading, block in _blocks(left_places, left_values, lead, joined=True):
        array = arrays[place.array]
        start = _start(array, place, leading, i)
        # XLA for GPUs reads, adds and writes in one kernel only if the block is not reshaped between.
        old = lax.dynamic_slice(array, start, block.shape, allow_negative_indices=False)
        array = _updated(array, _row_major(place, old) + block, start)
        arrays = {**arrays, place.array: array}
    return arrays


def _blocks(
    places: Sequence[Place],
    values: Sequence[jax.Array],
    lead: Lead,
    joined: bool,
) -> Iterator[tuple[Place, Sequence, jax.Array]]:
    """Blocks `[1, ..., 1, rows, ...]` of values that lie side by side, with the place and the leading indices of the
    first.
    """
    pairs = [pair for pair in zip(places, values, strict=True) if pair[0].empty is None]
    groups: list[list[tuple[Place, jax.Array]]] = []
    if joined:
        pairs.sort(key=lambda pair: (pair[0].array, pair[0].base))
    for place, value in pairs:
        last = groups[-1][-1][0] if joined and groups else None
        follows = last is not None and (
            (last.array, last.step, last.base + last.block[0]) == (place.array, place.step, place.base)
            and (last.spec == place.spec or not (axes(last.spec) or axes(place.spec)))
        )
        if follows:
            groups[-1].append((place, value))
        else:
            groups.append([(place, value)])
    for group in groups:
        blocks = [split_as(p.spec, v).reshape(p.block) for p, v in group]
        block = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks)
        first = group[0][0]
        leading = _indices(lead, first.array)
        block = _row_major(first, block.reshape(*[1] * len(leading), *block.shape))
        if first.on_host:
            block = jax.device_put(block, jax.memory.Space.Host)
        yield first, leading, block


def is_on_host(array: jax.Array) -> bool:
    """Returns whether an array of a traced function is in host memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def each_row(
    array: jax.Array,
    lead: Sequence,
    change: Callable[[jax.Array], jax.Array],
    source: Sequence | None = None,
) -> jax.Array:
    """Changes every row of a pool in host memory on the device, one at a time.

    Args:
      array: the pool, `[*leading axes, n, *shape]`.
      lead: indices of the leading axes.
      change: `[1, ..., 1, *shape]` -> a new row.
      source: indices of the leading axes where a row is read; None: `lead`, where it is written.
    """
    row = [1] * (len(lead) + 1) + list(array.shape[len(lead) + 1 :])

    def turn(i: jax.Array, array: jax.Array) -> jax.Array:
        start = index(array, [*(lead if source is None else source), i])
        old = lax.dynamic_slice(array, start, row, allow_negative_indices=False)
        new = change(jax.device_put(old, jax.memory.Space.Device))
        new = jax.device_put(new, jax.memory.Space.Host)
        return _updated(array, new, index(array, [*lead, i]))

    return lax.fori_loop(0, array.shape[len(lead)], turn, array)


def sum_of_rows(array: jax.Array, sum_of_row: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sums a function of the rows of a pool in host memory `[R, n, *shape]` over n. Returns `[R]`.

    Args:
      array: the pool.
      sum_of_row: `[*shape]` -> `[]`, called with one row at a time, on the device.
    """
    num_rows, number = array.shape[:2]

    def turn(i: jax.Array, sums: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(array, i, 1, False, allow_negative_indices=False)
        row = jax.device_put(row, jax.memory.Space.Device)
        return sums + jax.vmap(sum_of_row)(row)

    like = jax.eval_shape(sum_of_row, jax.ShapeDtypeStruct(array.shape[2:], array.dtype))
    return lax.fori_loop(0, number, turn, jnp.zeros(num_rows, like.dtype))


def _updated(array: jax.Array, block: jax.Array, start: list[jax.Array]) -> jax.Array:
    return lax.dynamic_update_slice(array, block, start, allow_negative_indices=False)


def _indices(lead: Lead, array: str) -> Sequence:
    """The leading indices of an array, by its name."""
    return lead(array) if callable(lead) else lead


def _start(array: jax.Array, place: Place, lead: Sequence, i: jax.Array | int) -> list[jax.Array]:
    """The first index along every axis of leaf i at `place`. No index is negative."""
    return index(array, [*lead, place.start(i)])


def index(array: jax.Array, leading: Sequence) -> list[jax.Array]:
    """An index along every axis, 0 along the last ones.

    XLA takes indices of one dtype, and a loop counts in another one if JAX has 64-bit types.
    """
    rest = [0] * (array.ndim - len(leading))
    return [jnp.asarray(i, jnp.int32) for i in (*leading, *rest)]
