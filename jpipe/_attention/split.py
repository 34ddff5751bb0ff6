"""The axes of a mesh that an attention is split over."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from jax.sharding import PartitionSpec as P

from jpipe._attention.seen import Seen


@dataclasses.dataclass(frozen=True)
class Split:
    """The axes of a mesh that an attention is split over.

    Axes of rows and of heads are mapped too, so that nothing is left to the compiler: it gathers heads that one axis
    splits before another axis exchanges them.

    Attributes:
      axis: the axis of positions; None: every device has all of them.
      size: its devices.
      rows: the axes of rows.
      heads: the axes of heads.
    """

    axis: str | None
    size: int
    rows: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Any, axis: str | None, num_rows: int, num_key_heads: int) -> "Split":
        """The axis of positions, and those that logical rules give the names "batch" and "heads".

        Axes that do not divide rows or heads are left to the compiler.
        """
        rows, heads = linen.logical_to_mesh_axes(("batch", "heads")) or (None, None)
        rest = {name: mesh.shape[name] for name in mesh.auto_axes if name != axis and mesh.shape[name] > 1}
        return cls(
            axis,
            1 if axis is None else mesh.shape[axis],
            _dividing(rows, num_rows, rest),
            _dividing(heads, num_key_heads, rest),
        )

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Maps a function over the devices."""
        names = {self.axis, *self.rows, *self.heads} - {None}
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)

    def positions(self) -> P:
        """The spec of `[B, T, H, D]` that is split by positions."""
        return P(_or_none(self.rows), self.axis, _or_none(self.heads), None)

    def all_positions(self) -> P:
        """The spec of `[B, T, H, D]` whose heads are split over the axis of positions too."""
        return P(_or_none(self.rows), None, (*self.heads, self.axis), None)

    def weights(self, over_heads: bool) -> P:
        """The spec of `[B, K, G, T]`."""
        if over_heads:
            return P(_or_none(self.rows), (*self.heads, self.axis), None, None)
        return P(_or_none(self.rows), _or_none(self.heads), None, self.axis)

    def seen(self, seen: Seen, over_heads: bool) -> Seen:
        """The specs of what queries see."""
        rows, heads = _or_none(self.rows), _or_none(self.heads)
        dims = [rows, (*self.heads, self.axis) if over_heads else heads, None, None if over_heads else self.axis, None]
        mask, segments = seen.mask, None if seen.query_segments is None else P(rows, None)
        return dataclasses.replace(
            seen,
            mask=None if mask is None else P(*(d if n > 1 else None for d, n in zip(dims, mask.shape, strict=True))),
            query_segments=segments,
            key_segments=segments,
        )


def _dividing(names: Any, size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    chosen: list[str] = []
    for name in (names,) if isinstance(names, str) else names or ():
        if name in sizes and size % sizes[name] == 0:
            size //= sizes[name]
            chosen.append(name)
    return tuple(chosen)


def _or_none(names: Sequence[str]) -> tuple[str, ...] | None:
    return tuple(names) or None
