"""The leaves of a layer, by use: weights, mutable state, stashes."""

import collections
import itertools
from collections.abc import Callable, Container, Iterable, Sequence

import jax

from jpipe.layers.avals import is_inexact, num_bytes
from jpipe.layers.backward import LayerProgram
from jpipe.layers.read_orders import read_orders
from jpipe.layers.sharding import read_in_parts
from jpipe.layers.trace import Traced
from jpipe.packing import Leaf
from jpipe.stages.offload import Offload

# Use of weights -> the positions among the parameters of a layer.
NUMBERS_OF: dict[str, Callable[[LayerProgram], tuple[int, ...]]] = {
    "parameters": lambda kind: kind.trained,
    "frozen": lambda kind: kind.frozen,
}
# Use -> abstract leaves of one layer of kind k.
LEAVES_OF: dict[str, Callable[[Traced, int], Sequence]] = {
    "parameters": lambda traced, k: _weights_of(traced.layer_kinds[k].parameters, traced, "parameters", k),
    "frozen": lambda traced, k: _weights_of(traced.layer_kinds[k].parameters, traced, "frozen", k),
    "state": lambda traced, k: traced.mutable[k].leaves,
    "statistics": lambda traced, k: traced.mutable[k].statistics,
    "input_stash": lambda traced, k: traced.layer_kinds[k].stashed("input_stash"),
    "weight_stash": lambda traced, k: traced.layer_kinds[k].stashed("weight_stash"),
    "split_residuals": lambda traced, k: traced.layer_kinds[k].split_residuals,
    "carry": lambda traced, k: traced.layer_kinds[k].carried,
    "carry_gradient": lambda traced, k: [a for a in traced.layer_kinds[k].carried if is_inexact(a)],
}
# Use -> how each of these leaves is split over automatic axes; without an entry it is not split.
_SPECS_OF: dict[str, Callable[[Traced, int], Sequence]] = {
    "parameters": lambda traced, k: _weights_of(traced.specs[k], traced, "parameters", k),
    "frozen": lambda traced, k: _weights_of(traced.specs[k], traced, "frozen", k),
    "input_stash": lambda traced, k: _stash_specs(traced, k, "input_stash"),
    "weight_stash": lambda traced, k: _stash_specs(traced, k, "weight_stash"),
    "split_residuals": lambda traced, k: _split_residual_specs(traced, k),
    "carry": lambda traced, k: [traced.values.spec(a.shape) for a in traced.layer_kinds[k].carried],
    "carry_gradient": lambda traced, k: [
        traced.values.spec(a.shape) for a in traced.layer_kinds[k].carried if is_inexact(a)
    ],
}


def _weights_of(values: Sequence, traced: Traced, use: str, k: int) -> list:
    """The values of those parameters of a layer of kind k that have a use."""
    return [values[j] for j in NUMBERS_OF[use](traced.layer_kinds[k])]


def numbers_of_use(traced: Traced, use: str, k: int) -> list[tuple[int, int]]:
    """`(k, position)` of the parameters of a layer of kind k that have a use."""
    return [(k, j) for j in NUMBERS_OF[use](traced.layer_kinds[k])]


def with_device_dim(leaf: Leaf, devices: Sequence[Sequence[int]] | None) -> Leaf:
    """Gives a leaf of statistics a place for each device, if stages have copies on several.

    Each copy writes at its own place, so that the sum over the copies has the parts of all.
    """
    if devices is None or all(len(copies) == 1 for copies in devices):
        return leaf
    num_devices = 1 + max(itertools.chain(*devices))
    shape = (num_devices, *leaf.aval.shape)
    return leaf._replace(aval=jax.ShapeDtypeStruct(shape, leaf.aval.dtype))


def _stash_specs(traced: Traced, k: int, ring: str) -> list:
    return [traced.kept_specs.stash[k][i] for i in getattr(traced.layer_kinds[k], ring)]


def _split_residual_specs(traced: Traced, k: int) -> list:
    has_any = bool(traced.layer_kinds[k].split_residuals)  # of a table that splits backwards
    return traced.kept_specs.split_residuals[k] if has_any else []


def layer_leaves(traced: Traced, name: str, k: int) -> list[Leaf]:
    """The leaves of one layer of kind k for one use."""
    avals = LEAVES_OF[name](traced, k)
    specs = _SPECS_OF[name](traced, k) if name in _SPECS_OF else [()] * len(avals)
    leaves = [Leaf(a, spec=spec) for a, spec in zip(avals, specs, strict=True)]
    if name not in NUMBERS_OF:
        return leaves
    parts, orders = (
        _weights_of(facts(traced.layer_kinds[k]), traced, name, k) for facts in (read_in_parts, read_orders)
    )
    return [
        leaf._replace(read_in_parts=axes, order=() if any(leaf.spec) else order)
        for leaf, axes, order in zip(leaves, parts, orders, strict=True)
    ]


def largest_on_host(
    traced: Traced,
    layers: range,
    share: float,
    numbers: Callable[[LayerProgram], Iterable[int]] = lambda kind: range(len(kind.parameters)),
) -> set[tuple[int, int]]:
    """`(kind of layer, leaf)` of the weights in host memory: the largest of some numbers that have a share of their
    bytes.
    """
    sizes = {
        (k, j): num_bytes([kind.parameters[j]]) for k, kind in enumerate(traced.layer_kinds) for j in numbers(kind)
    }
    count = collections.Counter(traced.kind_of_layer[i] for i in layers)
    wanted = share * sum(n * count[k] for (k, _), n in sizes.items())
    on_host: set[tuple[int, int]] = set()
    total = 0
    for k, j in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total >= wanted:
            break
        if count[k]:
            on_host.add((k, j))
            total += count[k] * sizes[k, j]
    return on_host


def to_host(leaves: Sequence[Leaf], names: Sequence, on_host: Container, offload: Offload) -> list[Leaf]:
    """Puts those of the leaves in host memory whose names `on_host` has."""
    return [
        leaf._replace(on_host=True, chunk=offload.chunk) if name in on_host else leaf
        for leaf, name in zip(leaves, names, strict=True)
    ]
