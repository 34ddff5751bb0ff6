"""A place for each leaf of each owner."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jpipe.packing.places import Leaf, Place, cut_shape, num_chunks, stored_shape
from jpipe.packing.pools import StageCounts, pool_key, tightened, with_short_vectors


@dataclasses.dataclass(frozen=True)
class Packing:
    """Arrays that can hold the leaves of any one owner.

    Attributes:
      arrays: name -> shape and dtype: `[n, *shape]` for pools, `[size]` for vectors.
      places: the `Place` of each leaf of each owner.
      used_bytes: bytes of the leaves of each owner.
      specs: name -> spec of the leaves, for pools whose leaves are split.
      on_host: the names of the arrays in host memory.
      constant: the names of the arrays that never change, of frozen weights.
    """

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    places: Sequence[Sequence[Place]]
    used_bytes: Sequence[int]
    specs: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    on_host: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        owners: Sequence[Sequence[Leaf | tuple]],
        occupancy: float = 0.5,
        devices: Sequence[Sequence[int]] | None = None,
        tight: bool = False,
    ) -> "Packing":
        """Packs the leaves of each owner.

        Args:
          owners: a list of `Leaf` or `(aval, count)` for each owner. Leaves of one count that follow
            each other in the list belong together: leaf 0 of all of them is stored first, then leaf
            1. So the values that a layer writes lie side by side.
          occupancy: a shape and dtype gets a pool if, on average over the devices, at least this
            fraction of the pool's rows is used. Leaves that are split or in host memory always get a pool.
          devices: the device of each stage that an owner stands for, for each owner. An array has rows for the
            stages of a device that use it: see `jpipe.lowering.array_rows`. None: every owner is one stage,
            on a device of its own.
          tight: whether more leaves go into vectors if that brings padding within `MOST_PADDING`. For
            arrays that are large and live long, such as weights: a leaf of a vector is laid out anew
            on TPUs whenever it is read. The leaves that most stages have come first, so that they lie at the same
            indices in all of these.
        """
        leaves_of_owners = [[Leaf(*leaf) for leaf in leaves] for leaves in owners]
        stages = StageCounts.of([[o] for o in range(len(owners))] if devices is None else devices)
        counts: dict = collections.defaultdict(lambda: [0] * len(owners))
        in_vectors: dict = collections.defaultdict(lambda: [0] * len(owners))
        for o, leaves in enumerate(leaves_of_owners):
            for leaf in leaves:
                if not leaf.in_vector and not leaf.is_empty:
                    counts[pool_key(leaf)][o] += leaf.count
                    in_vectors[leaf.vector, pool_key(leaf)][o] += leaf.count
        pooled = {
            key
            for key, n in counts.items()
            if any(key[2]) or key[3] or stages.used(n) >= occupancy * stages.allocated(n)
        }
        if tight:
            pooled = tightened(pooled, counts, stages)
        pooled = with_short_vectors(pooled, in_vectors)
        sizes: dict = collections.defaultdict(int)
        dtypes, places, used, specs, on_host = {}, [], [], {}, set()
        groups_of_owners = list(map(_groups, leaves_of_owners))
        if tight:
            groups_of_owners = _shared_first(leaves_of_owners, groups_of_owners, stages.number.sum(axis=1).tolist())
        for leaves, groups in zip(leaves_of_owners, groups_of_owners, strict=True):
            next_free: dict = collections.defaultdict(int)
            place_of_leaf: dict[int, Place] = {}
            for group in groups:
                count = leaves[group[0]].count
                used_together: dict = collections.Counter()
                for number in group:
                    leaf = leaves[number]
                    shape, dtype, spec, chunk = key = pool_key(leaf)
                    if leaf.is_empty:
                        place_of_leaf[number] = Place("", 0, 0, count, shape, True, empty=dtype)
                        continue
                    is_on_host = chunk > 0
                    assert not (leaf.in_vector and is_on_host)
                    flat = leaf.in_vector or key not in pooled
                    name = f"{dtype}" if flat else f"{dtype}{list(shape)}"
                    if flat and leaf.vector:
                        name += f" {leaf.vector}"
                    if any(spec):
                        name += f" split {list(spec)}"
                    if is_on_host:
                        name = f"host {name}"
                        on_host.add(name)
                    if any(spec):
                        specs[name] = spec
                    row = () if flat else stored_shape(shape, spec, is_on_host)
                    rows = 1
                    if is_on_host and not any(spec):
                        rows = num_chunks(row, chunk)
                        row = cut_shape(row, rows)
                    dtypes[name] = row, dtype
                    base = next_free[name] + used_together[name]
                    place = Place(name, base, 0, count, shape, flat, spec, is_on_host, rows)
                    place_of_leaf[number] = place.read_as(leaf)
                    used_together[name] += math.prod(shape) if flat else rows
                for number in group:
                    place = place_of_leaf[number]
                    place_of_leaf[number] = dataclasses.replace(place, stride=used_together[place.array])
                for name, stride in used_together.items():
                    next_free[name] += count * stride
            places.append(tuple(place_of_leaf[number] for number in range(len(leaves))))
            used.append(
                sum(count * math.prod(aval.shape) * np.dtype(aval.dtype).itemsize for aval, count, *_ in leaves)
            )
            for name, size in next_free.items():
                sizes[name] = max(sizes[name], size)
        arrays = {
            name: jax.ShapeDtypeStruct((sizes[name], *dtypes[name][0]), dtypes[name][1]) for name in sorted(sizes)
        }
        return cls(arrays, tuple(places), tuple(used), specs, frozenset(on_host))

    def named(self, prefix: str) -> "Packing":
        """Prefixes the names of the arrays with `prefix`, so that they can lie beside those of other packings."""

        def renamed(place: Place) -> Place:
            return dataclasses.replace(place, array=f"{prefix} {place.array}")

        return dataclasses.replace(
            self,
            arrays={f"{prefix} {name}": a for name, a in self.arrays.items()},
            places=tuple(tuple(map(renamed, places)) for places in self.places),
            specs={f"{prefix} {name}": spec for name, spec in self.specs.items()},
            on_host=frozenset(f"{prefix} {name}" for name in self.on_host),
        )

    def with_constants(self, other: "Packing") -> "Packing":
        """Joins the leaves of another packing of the same owners, in arrays of other names that never change."""
        both = self.beside([other])
        pairs = zip(self.places, other.places, strict=True), zip(self.used_bytes, other.used_bytes, strict=True)
        return dataclasses.replace(
            both,
            places=tuple((*mine, *theirs) for mine, theirs in pairs[0]),
            used_bytes=tuple(mine + theirs for mine, theirs in pairs[1]),
            constant=both.constant | other.arrays.keys(),
        )

    def beside(self, others: Iterable["Packing"]) -> "Packing":
        """Joins the arrays and the owners of other packings, whose arrays have other names."""
        packings = [self, *others]
        return Packing(
            {name: a for pack in packings for name, a in pack.arrays.items()},
            tuple(places for pack in packings for places in pack.places),
            tuple(used for pack in packings for used in pack.used_bytes),
            {name: spec for pack in packings for name, spec in pack.specs.items()},
            frozenset().union(*(pack.on_host for pack in packings)),
            frozenset().union(*(pack.constant for pack in packings)),
        )

    @property
    def row_bytes(self) -> dict[str, int]:
        """Name -> bytes of the array, or of one of its rows if it has several."""
        return {name: math.prod(a.shape) * a.dtype.itemsize for name, a in self.arrays.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, with one row each."""
        return sum(self.row_bytes.values())


def _groups(leaves: Sequence[Leaf]) -> list[list[int]]:
    """The numbers of the leaves of an owner that lie together: neighbours of one count."""
    groups = itertools.groupby(range(len(leaves)), lambda number: leaves[number].count)
    return [list(group) for _, group in groups]


def _shared_first(
    leaves_of_owners: Sequence[Sequence[Leaf]], groups_of_owners: Sequence[list[list[int]]], num_stages: Sequence[int]
) -> list[list[list[int]]]:
    """The groups of each owner, those that most stages have first. Leaves of count 1 are groups by themselves.

    Args:
      leaves_of_owners: the leaves.
      groups_of_owners: the numbers of the leaves of each group.
      num_stages: the number of stages that each owner stands for.
    """
    named: list[list[tuple]] = []
    holders: collections.Counter = collections.Counter()
    for leaves, groups, number in zip(leaves_of_owners, groups_of_owners, num_stages, strict=True):
        before: collections.Counter = collections.Counter()
        named.append([])
        for group in groups:
            for part in [group] if leaves[group[0]].count > 1 else [[n] for n in group]:
                keys = tuple(pool_key(leaves[n]) for n in part)
                name = keys, before[keys]
                before[keys] += 1
                holders[name] += number
                named[-1].append((name, part))
    return [[part for _, part in sorted(owner, key=lambda item: -holders[item[0]])] for owner in named]
