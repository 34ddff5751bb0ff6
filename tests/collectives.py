"""The collective operations of a compiled program, read from its text."""

import math
import re
from typing import NamedTuple

import numpy as np

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
_KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
      kind: such as "all-gather".
      shapes: of its results, on a device.
      num_bytes: of its results.
      groups: the devices that exchange, as their positions in the mesh; None of a permutation.
      name: the operation of JAX that it comes from.
      num_pairs: of a permutation, the pairs of different devices of which the first sends to the second.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    groups: list[list[int]] | None
    name: str
    num_pairs: int = 0


def collectives(text: str) -> list[Collective]:
    """All collectives of a program, once for each place where its text has one."""
    found = []
    text = re.sub(r"/\*.*?\*/", "", text)  # the numbers of results
    pattern = rf"= (\(?[^=]*?) ({_KINDS})(?:-start)?\((.*)"
    for result, kind, rest in re.findall(pattern, text):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        shapes = tuple(tuple(map(int, filter(None, d.split(",")))) for _, d in arrays)
        num_bytes = sum(_BYTES[t] * math.prod(s) for (t, _), s in zip(arrays, shapes))
        name = re.search(r'op_name="([^"]*)"', rest)
        found.append(
            Collective(
                kind,
                shapes,
                num_bytes,
                _groups(rest),
                name[1] if name else "",
                _num_pairs(rest),
            )
        )
    return found


def _num_pairs(text: str) -> int:
    listed = re.search(r"source_target_pairs=\{(.*?\})\}", text)
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed[1]) if listed else []
    return sum(first != second for first, second in pairs)


def _groups(text: str) -> list[list[int]] | None:
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text)
    if listed:
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return [[*map(int, group.split(","))] for group in groups]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text)
    if named:
        return _groups_of_axes(*named.groups())
    pattern = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    iota = re.search(pattern, text)
    if iota is None:
        return None
    shape, dims, order = ([*map(int, p.split(","))] if p else None for p in iota.groups())
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices.transpose(order).reshape(shape).tolist()


def _groups_of_axes(mesh: str, axes: str) -> list[list[int]]:
    """The groups of devices along some axes, such as `"'a'=2,'b'=4"` and `"'b'"`; `'b':(2)2` are 2 of its parts below 2
    others.
    """
    sizes: dict[str, int] = {}
    parts = dict(re.findall(r"'(\w+)':\((\d+)\)", axes))
    lengths = dict(re.findall(r"'(\w+)':\(\d+\)(\d+)", axes))
    chosen = re.findall(r"'(\w+)'", axes)
    for name, size in re.findall(r"'(\w+)'=(\d+)", mesh):
        if name in parts:
            above, length = int(parts[name]), int(lengths[name])
            sizes |= {f"{name} above": above, name: length}
            sizes[f"{name} below"] = int(size) // above // length
        else:
            sizes[name] = int(size)
    names = list(sizes)
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    inside = [names.index(name) for name in chosen]
    outside = [i for i in range(len(names)) if i not in inside]
    count = math.prod(sizes[name] for name in chosen)
    return devices.transpose(*outside, *inside).reshape(-1, count).tolist()
