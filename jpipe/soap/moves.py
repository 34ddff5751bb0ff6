"""The way from one split of an array to another in steps that send no more than they have to.

Where a constraint moves the axes of one dim to two other dims, or the reverse, XLA (jaxlib 0.10.2) uses no all-to-all: it gathers the array
whole on every device and slices it. A step that moves axes from one dim to one other is an all-to-all between the devices along
these axes. Several of them would send more than one direct exchange does, so devices then fetch what they need from each other.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

Spec = tuple[tuple[str, ...], ...]
"""The axes of the mesh over which each dim is split."""


def as_entries(spec: Spec) -> tuple:
    """A spec as the entries of a `PartitionSpec`: an axis, several, or None."""
    return tuple(
        names[0] if len(names) == 1 else (tuple(names) or None) for names in spec
    )


class Step(NamedTuple):
    """One step.

    Attributes:
      spec: the split to which it leads.
      is_fetched: whether devices fetch what they need from each other; otherwise the compiler sends it.
    """

    spec: Spec
    is_fetched: bool


def steps_between(
    shape: Sequence[int], source: Spec, target: Spec, sizes: Mapping[str, int]
) -> tuple[Step, ...]:
    """The steps from one split of an array to another.

    The compiler slices the array along a dim, moves the last axes of a dim to the end of another one, or gathers it along a dim, in this order
    where there is a choice: so as few bytes as possible are sent. Several moves are one fetch, and so is a change of the order of the axes
    of a dim.

    Args:
      shape: of the array.
      source, target: the axes over which each dim is split.
      sizes: axis -> number of devices.

    Returns:
      Nothing where the compiler goes to `target` in one step, or no such steps lead there.

    Example:
      >>> sizes = {"a": 2, "b": 2}
      >>> steps_between((4, 4, 4), ((), ("a", "b"), ()), (("a",), (), ("b",)), sizes)
      (Step(spec=(('a',), (), ('b',)), is_fetched=True),)
    """
    specs = [source]
    while specs[-1] != target:
        splits = _following(specs[-1], target)
        following = next((s for s in splits if _is_even(shape, s, sizes)), None)
        if following is None:
            return (Step(target, True),) if _is_move(source, target) else ()
        specs.append(following)
    if len(specs) < 3:
        return ()
    steps = []
    moves = itertools.groupby(itertools.pairwise(specs), lambda each: _is_move(*each))
    for is_move, pairs in moves:
        ends = [after for _, after in pairs]
        if is_move:
            steps.append(Step(ends[-1], len(ends) > 1))
        else:
            steps += [Step(spec, False) for spec in ends]
    return tuple(steps)


def _is_move(before: Spec, after: Spec) -> bool:
    """Whether axes go from dim to dim, and none is added or dropped."""
    used, kept = (sorted(itertools.chain(*spec)) for spec in (before, after))
    return used == kept


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
