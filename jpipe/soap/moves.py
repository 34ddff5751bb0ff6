"""The way from one split of an array to another in steps that XLA sends by one collective each.

Where a constraint moves the axes of one dim to two other dims, or the reverse, XLA (jaxlib 0.10.2) uses no all-to-all: it gathers the array
whole on every device and slices it. Each of the steps below moves axes from one dim to one other, which is an all-to-all between the
devices along these axes.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

Spec = tuple[tuple[str, ...], ...]
"""The axes of the mesh over which each dim is split."""


def as_entries(spec: Spec) -> tuple:
    """A spec as the entries of a `PartitionSpec`: an axis, several, or None."""
    return tuple(
        names[0] if len(names) == 1 else (tuple(names) or None) for names in spec
    )


def steps_between(
    shape: Sequence[int], source: Spec, target: Spec, sizes: Mapping[str, int]
) -> tuple[Spec, ...]:
    """The splits between two splits of an array, without both.

    A step slices the array along a dim, moves the last axes of a dim to the end of another one, or gathers it along a dim, in this order
    where there is a choice: so as few bytes as possible are sent. No step changes the order of the axes of a dim, for which XLA would
    use a permutation between all devices.

    Args:
      shape: of the array.
      source, target: the axes over which each dim is split.
      sizes: axis -> number of devices.

    Returns:
      Nothing where one step leads to `target`, or no such steps do.

    Example:
      >>> sizes = {"a": 2, "b": 2}
      >>> steps_between((4, 4, 4), ((), ("a", "b"), ()), (("a",), (), ("b",)), sizes)
      (((), ('a',), ('b',)),)
    """
    steps: list[Spec] = []
    present = source
    while present != target:
        splits = _following(present, target)
        following = next((s for s in splits if _is_even(shape, s, sizes)), None)
        if following is None:
            return ()
        steps.append(following)
        present = following
    return tuple(steps[:-1])


def _following(present: Spec, target: Spec) -> Iterator[Spec]:
    """Splits that one step leads to and that are nearer to `target`, the best first."""
    used, wanted = (set(itertools.chain(*spec)) for spec in (present, target))
    # A dim takes axes behind those that it keeps.
    missing = [
        after[len(before) :] if after[: len(before)] == before else ()
        for before, after in zip(present, target)
    ]
    for dim, names in enumerate(missing):
        if count := _leading(name not in used for name in names):
            yield _changed(present, {dim: present[dim] + names[:count]})
    for dim, names in enumerate(missing):
        for other, last in enumerate(present):
            for count in range(min(len(names), len(last)), 0, -1):
                if other != dim and names[:count] == last[-count:]:
                    taken = present[dim] + names[:count]
                    yield _changed(present, {dim: taken, other: last[:-count]})
    for dim, names in enumerate(present):
        if count := _leading(name not in wanted for name in reversed(names)):
            yield _changed(present, {dim: names[:-count]})


def _leading(flags: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in itertools.takewhile(bool, flags))


def _changed(spec: Spec, dims: Mapping[int, tuple[str, ...]]) -> Spec:
    return tuple(dims.get(dim, names) for dim, names in enumerate(spec))


def _is_even(shape: Sequence[int], spec: Spec, sizes: Mapping[str, int]) -> bool:
    return all(
        n % math.prod(sizes[name] for name in names) == 0
        for n, names in zip(shape, spec)
    )
