"""Where stages begin, and what cannot be cut so.

Letters: S stages.
"""

import itertools
from collections.abc import Sequence

from jpipe._util.foreign import shown

BALANCES = ("flops", "time", "memory", "placement")
"""What boundaries can balance between stages."""


def check_boundaries(boundaries: Sequence[int] | str | None, num_layers: int, num_stages: int) -> list[int] | None:
    """Checks `boundaries`. Returns the first layer of each stage, followed by the number of layers.

    Args:
      boundaries: the layer index at which each stage after the first begins, one of `BALANCES`, or
        None.
      num_layers: number of layers.
      num_stages: S.

    Returns:
      The list, or None if the boundaries are to be balanced.

    Raises:
      ValueError: if the boundaries do not cut the layers into stages with at least one layer each.
    """
    if num_stages > num_layers:
        raise ValueError(
            f"a schedule of {num_stages} stages needs at least as many layers, got {num_layers}. "
            f"Use `num_stages={num_layers}` or fewer, or split the layers more finely."
        )
    if boundaries is None or (isinstance(boundaries, str) and boundaries in BALANCES):
        return None
    want = "the layer index at which each stage after the first begins"
    are_indices = not isinstance(boundaries, str) and hasattr(boundaries, "__iter__")
    indices: list = [*boundaries] if are_indices else []
    if not are_indices or not all(hasattr(b, "__index__") for b in indices):
        raise ValueError(
            f"`boundaries` must be a list of whole numbers ({want}), one of {', '.join(map(repr, BALANCES))} to "
            f"balance by that, or None to balance by FLOPs, got {shown(indices or boundaries)}. A whole model also "
            'takes paths of modules, such as ["blocks.4"].'
        )
    starts = [0, *map(int, indices), num_layers]
    if len(starts) != num_stages + 1:
        raise ValueError(
            f"`boundaries` must hold {num_stages - 1} numbers for {num_stages} stages ({want}), got {shown(indices)}."
        )
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        if start >= stop:
            raise ValueError(
                f"`boundaries` must rise within 1..{num_layers - 1} ({want}), got {shown(indices)}: "
                f"stage {s} would hold layers {start}..{stop - 1}, which is none. Give every stage at least one layer."
            )
    return starts


def check_inner(starts: Sequence[int], inner: range) -> None:
    """Raises `ValueError` if a stage has no layer but those that all stages run.

    Args:
      starts: first layer of each stage, and the number of layers at the end.
      inner: the layers that belong to one stage each.
    """
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        if max(start, inner.start) >= min(stop, inner.stop):
            raise ValueError(
                f"stage {s} would hold layer {start} alone, which is split over all stages. Choose `boundaries` within "
                f"{inner.start + 1}..{inner.stop - 1}, got {list(starts[1:-1])}."
            )
