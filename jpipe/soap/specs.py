"""Over which axes of a mesh arrays and loops are split."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jpipe.soap.flatten import Value
from jpipe.soap.graph import REDUCTION, Operator
from jpipe.soap.moves import Spec, boxes_of
from jpipe.soap.regions import Access, followed, read_all
from jpipe.soap.strategy import Config


def factor_axes(name: str, size: int) -> dict[str, int]:
    """Axes of prime sizes that together have as many devices as one axis.

    Example:
      >>> factor_axes("model", 12), factor_axes("model", 3)
      ({'model_0': 2, 'model_1': 2, 'model_2': 3}, {'model': 3})
    """
    primes, rest = [], size
    for factor in range(2, size + 1):
        while rest % factor == 0:
            primes.append(factor)
            rest //= factor
    if len(primes) < 2:
        return {name: size}
    return {f"{name}_{i}": prime for i, prime in enumerate(primes)}


def loop_axes(config: Config, sizes: Mapping[str, int]) -> list[tuple[str, ...]] | None:
    """The axes of a mesh over which a configuration splits each loop; None if its devices are no part of the mesh.

    Devices are numbered along the mesh with the last axis running fastest. Axes that split no loop hold copies, so
    fewer shards than devices must begin at device 0.

    Args:
      config: degrees, and the device of each shard.
      sizes: axis -> number of devices.

    Example:
      >>> loop_axes(Config((2, 2), (0, 2, 1, 3)), {"a": 2, "b": 2})
      [('b',), ('a',)]
      >>> loop_axes(Config((1,), (2,)), {"a": 2, "b": 2}) is None
      True
    """
    devices = np.array(config.devices).reshape(config.degrees)
    strides: dict[int, str] = {}
    stride = math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        if size > 1:
            strides[stride] = name
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    result: list[tuple[str, ...]] = []
    for i, degree in enumerate(config.degrees):
        along = devices[tuple(slice(None) if k == i else 0 for k in range(devices.ndim))].ravel()
        names: list[str] = []
        count = 1
        while count < degree:
            name = strides.pop(int(along[count]), "")
            if not name or degree % (count * sizes[name]):
                return None
            names.insert(0, name)
            count *= sizes[name]
        result.append(tuple(names))
    order = list(sizes)
    used = [order.index(name) for names in result for name in names]
    first = grid[tuple(slice(None) if k in used else 0 for k in range(grid.ndim))]
    kept = sorted(used)
    turned = first.transpose([kept.index(k) for k in used]).reshape(config.degrees)
    return result if np.array_equal(turned, devices) else None


def view_spec(
    spec: Spec,
    view: Access,
    source: tuple[int, ...],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
) -> Spec | None:
    """The split of a view of an array if each device can make its part from its part of the array, else None.

    Args:
      spec: the split of the array.
      view: the box of the array that a box of the view needs.
      source, shape: the shapes of the array and of the view.
      sizes: axis -> number of devices.
    """
    shown: list[tuple[str, ...]] = [()] * len(shape)
    for names, dim in zip(spec, followed(view)):
        if not names:
            continue
        if dim is None or shown[dim] or shape[dim] % num_parts(names, sizes):
            return None
        shown[dim] = names
    is_local = reads_own(shown, view, shape, below=spec, source=source, sizes=sizes)
    return tuple(shown) if is_local else None


def reads_own(
    above: Sequence[tuple[str, ...]],
    view: Access,
    shape: tuple[int, ...],
    below: Sequence[tuple[str, ...]],
    source: tuple[int, ...],
    sizes: Mapping[str, int],
) -> bool:
    """Returns whether each device makes its part of a view of its part of an array.

    Args:
      above, shape: the split of the view, and its shape.
      view: the box of the array that a box of the view needs.
      below, source: the split of the array, and its shape.
      sizes: axis -> number of devices.
    """
    for size, names in (*zip(shape, above), *zip(source, below)):
        if size % num_parts(names, sizes):
            return False
    if axes_of(above) != axes_of(below):
        return False
    read = read_all(view, boxes_of(shape, above, sizes))
    has = boxes_of(source, below, sizes)
    return bool(np.all((read[..., 0] >= has[..., 0]) & (read[..., 1] <= has[..., 1])))


def written_spec(
    operator: Operator,
    value: Value,
    dims: Sequence[int | None],
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> tuple[Spec, tuple[str, ...], int | None]:
    """The split of a result, the axes along which devices have terms of it, and the dim of the parts of the sum."""
    spec = [() if d is None else axes[d] for d in dims]
    terms = tuple(
        name for k, loop in enumerate(operator.loops) if loop.kind == REDUCTION and k not in dims for name in axes[k]
    )
    dim = _summed_dim(value.shape, spec, terms, sizes)
    if dim is not None:
        spec[dim] = (*spec[dim], *terms)
    return tuple(spec), terms, dim


def tiles(
    shape: tuple[int, ...],
    access: Access,
    loops: np.ndarray,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec | None:
    """The split in which each device has what its box of loops reads; None if there is none."""
    split = [dim_map for dim_map in access[0] if dim_map.dim is not None and axes[dim_map.dim]]
    if not all(_is_even(step) for step in (split, *access[1:])):
        return None
    spec = _followed_spec(shape, access, axes, sizes)
    has = boxes_of(shape, spec, sizes)
    return spec if np.array_equal(read_all(access, loops), has) else None


def axes_of(spec: Sequence[Sequence[str]]) -> list[str]:
    """The axes over which an array is split, sorted."""
    return sorted(name for names in spec for name in names)


def num_parts(names: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in names)


def _summed_dim(
    shape: tuple[int, ...],
    spec: Sequence[tuple[str, ...]],
    terms: Sequence[str],
    sizes: Mapping[str, int],
) -> int | None:
    """The longest dim of a device's part of a result; the device keeps its part of a sum along it. None if it has all
    of it.
    """
    local = [n // num_parts(names, sizes) for n, names in zip(shape, spec)]
    if not terms or not local:
        return None
    longest = int(np.argmax(local))
    return longest if local[longest] % num_parts(terms, sizes) == 0 else None


def read_spec(
    shape: tuple[int, ...],
    access: Access,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec | None:
    """The split of an operand that loops read; None if equal parts of the loops do not read about equal parts of it."""
    if not all(_is_even(step) for step in access):
        return None
    return _followed_spec(shape, access, axes, sizes)


def _followed_spec(
    shape: tuple[int, ...],
    access: Access,
    axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
) -> Spec:
    """The axes of the loops that the dims of an operand follow."""
    spec: list[tuple[str, ...]] = []
    used: set[str] = set()
    for size, loop in zip(shape, followed(access)):
        names = () if loop is None else axes[loop]
        if used.intersection(names) or size % num_parts(names, sizes):
            names = ()
        used.update(names)
        spec.append(names)
    return tuple(spec)


def _is_even(step: Sequence) -> bool:
    """Returns whether parts of the array above need about equal parts of the one below, in order, as windows of
    do.
    """
    return all(
        dim_map.dim is None
        or dim_map.is_plain
        or (dim_map.stride > 0 and -dim_map.width < dim_map.offset <= 0 and dim_map.divisor == 1)
        for dim_map in step
    )
