"""The steps from one split of an array to another. They send no more bytes than needed.

Where a constraint moves the axes of one dim to two other dims, or the reverse, XLA (jaxlib 0.10.2) uses no all-to-all:
it gathers the array whole on every device and slices it. So an array is first sliced along all axes that are new, which
sends nothing. Then devices fetch from each other what they have in a split by all axes, old and new, and at last gather
along those that are not wanted. Only a move of axes from the end of one dim to the end of one other is left to XLA, as
an all-to-all.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpipe.soap.regions import overlaps

Spec = tuple[tuple[str, ...], ...]
"""The axes of the mesh over which each dim is split."""


def as_entries(spec: Spec) -> tuple:
    """A spec as the entries of a `PartitionSpec`: an axis, several, or None."""
    return tuple(names[0] if len(names) == 1 else (tuple(names) or None) for names in spec)


def boxes_of(shape: Sequence[int], spec: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> np.ndarray:
    """`[devices, rank, 2]`, the part of an array that each device has, in the order of the mesh."""
    count = math.prod(sizes.values())
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), count)
    axis_places = dict(zip(sizes, places))
    boxes = np.zeros((count, len(shape), 2), np.int64)
    for dim, (size, names) in enumerate(zip(shape, spec)):
        part = np.zeros(count, np.int64)
        for name in names:
            part = part * sizes[name] + axis_places[name]
        length = size // math.prod(sizes[name] for name in names)
        boxes[:, dim, 0] = part * length
        boxes[:, dim, 1] = part * length + length
    return boxes


class Step(NamedTuple):
    """One step.

    Attributes:
      spec: the split to which it leads.
      is_fetched: whether devices fetch their parts from each other; otherwise the compiler sends them.
    """

    spec: Spec
    is_fetched: bool


def steps_between(
    shape: Sequence[int],
    source: Spec,
    target: Spec,
    sizes: Mapping[str, int],
    *,
    by_compiler: bool = True,
) -> tuple[Step, ...]:
    """The steps from one split of an array to another: slices, one exchange, and gathers, so that the exchange sends as
    little as possible.

    Args:
      shape: the shape of the array.
      source, target: the axes over which each dim is split.
      sizes: axis -> number of devices.
      by_compiler: whether exchanges that the compiler does as an all-to-all are left to it.

    Returns:
      Nothing where the compiler goes to `target` in one step that sends no more, or the array is too small for such
      steps.

    Example:
      >>> sizes = {"a": 2, "b": 2}
      >>> steps_between((4, 4, 4), ((), ("a", "b"), ()), (("a",), (), ("b",)), sizes)
      (Step(spec=(('a',), (), ('b',)), is_fetched=True),)
    """
    return _steps(tuple(shape), source, target, tuple(sizes.items()), by_compiler)


@functools.lru_cache(4096)
def _steps(
    shape: tuple[int, ...],
    source: Spec,
    target: Spec,
    axes: tuple[tuple[str, int], ...],
    by_compiler: bool,
) -> tuple[Step, ...]:
    sizes = dict(axes)
    used, wanted = (set(itertools.chain(*spec)) for spec in (source, target))
    new = [name for name in sizes if name in wanted - used]
    left = [name for name in sizes if name in used - wanted]
    ways = [
        (_sent(shape, sliced, split, sizes), sliced, split)
        for sliced in _with_axes(shape, source, new, sizes)
        for split in _with_axes(shape, target, left, sizes)
    ]
    if not ways:
        return ()
    # Of ways that send the same, one that XLA goes alone.
    _, sliced, split = min(ways, key=lambda w: (w[0], not _is_all_to_all(*w[1:])))
    steps = []
    if sliced != source:
        steps.append(Step(sliced, False))
    if split != sliced:
        is_left = by_compiler and _is_all_to_all(sliced, split)
        steps.append(Step(split, not is_left))
    if split != target:
        steps.append(Step(target, False))
    return tuple(steps) if len(steps) > 1 or any(s.is_fetched for s in steps) else ()


def _with_axes(shape: Sequence[int], spec: Spec, names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[Spec]:
    """All splits with more axes, each at the end of a dim that it divides evenly."""
    if not names:
        yield spec
        return
    for first, (dim, size) in itertools.product(names, enumerate(shape)):
        taken = (*spec[dim], first)
        if size % math.prod(sizes[name] for name in taken) == 0:
            others = [name for name in names if name != first]
            more = (*spec[:dim], taken, *spec[dim + 1 :])
            yield from _with_axes(shape, more, others, sizes)


def _sent(shape: Sequence[int], source: Spec, target: Spec, sizes: Mapping[str, int]) -> int:
    """Elements of an array that all devices get from others to split it in another way."""
    has, wanted = (boxes_of(shape, spec, sizes) for spec in (source, target))
    needed = (wanted[:, :, 1] - wanted[:, :, 0]).prod(axis=1).sum()
    return int(needed - np.trace(overlaps(has, wanted)))


def is_direct(
    shape: Sequence[int],
    source: Spec,
    target: Spec,
    sizes: Mapping[str, int],
) -> bool:
    """Returns whether the steps between two splits send no more than devices need and do not have."""
    specs = [
        source,
        *(step.spec for step in steps_between(shape, source, target, sizes)),
    ]
    if specs[-1] != target:
        specs.append(target)
    sent = sum(_sent(shape, *pair, sizes) for pair in itertools.pairwise(specs))
    return sent <= _sent(shape, source, target, sizes)


def _is_all_to_all(before: Spec, after: Spec) -> bool:
    """Returns whether the last axes of one dim become the last of one other, in the same order."""
    changed = [dim for dim, (a, b) in enumerate(zip(before, after)) if a != b]
    if len(changed) != 2:
        return False
    taken, given = sorted(changed, key=lambda dim: len(after[dim]) - len(before[dim]))
    moved = before[taken][len(after[taken]) :]
    return before[taken][: len(after[taken])] == after[taken] and (*before[given], *moved) == after[given]
