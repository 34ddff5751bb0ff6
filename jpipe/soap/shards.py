"""Seconds and exchanges of shards, on whatever devices they run. Each fact is computed once."""

from collections.abc import Iterator, Sequence

import numpy as np

from jpipe.soap.costs import Costs
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.regions import overlaps
from jpipe.soap.strategy import Regions, local_shape


class Shards:
    """Seconds of shards, the boxes that they read and write, and the overlaps of these.

    Several task graphs of one operator graph may share it.

    Args:
      graph: the operators.
      costs: seconds of operators.
    """

    def __init__(self, graph: OperatorGraph, costs: Costs):
        self.graph = graph
        self.costs = costs
        self.regions = Regions(graph)
        self._seconds: dict[tuple, tuple[float, float]] = {}
        self._pairs: dict[tuple, list[tuple[int, int, int]]] = {}
        self._pair_arrays: dict[tuple, np.ndarray] = {}
        self._parts: dict[tuple, list[tuple[int, list[tuple[int, int]]]]] = {}
        self._sums: dict[tuple, list[tuple[int, list[int], int]]] = {}

    def seconds(self, operator: int, degrees: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of the forward and of the backward of a shard."""
        key = operator, degrees
        if key not in self._seconds:
            shape = local_shape(self.graph.operators[operator], degrees)
            self._seconds[key] = self.costs.seconds(self.graph, operator, shape)
        return self._seconds[key]

    def edge_pairs(self, number: int, above: tuple[int, ...], below: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """`(shard of the producer, shard of the consumer, bytes)` of each pair that shares elements."""
        key = number, above, below
        pairs = self._pairs.get(key)
        if pairs is None:
            source, target, position = self.graph.edges[number]
            operand = self.graph.operators[target].inputs[position]
            shared = overlaps(
                self.regions.writes(source, operand.tensor, above),
                self.regions.reads(target, position, below),
            )
            shared *= self.graph.tensors[operand.tensor].item_bytes * operand.repeats
            # In the order of the consumer, and from different producers at once.
            b, a = np.nonzero(shared.T)
            pairs = list(zip(a.tolist(), b.tolist(), shared.T[b, a].tolist()))
            self._pairs[key] = pairs
            self._pair_arrays[key] = np.array([a, b, shared.T[b, a]])
        return pairs

    def edge_arrays(self, number: int, above: tuple[int, ...], below: tuple[int, ...]) -> np.ndarray:
        """`[3, pairs]`: `edge_pairs` as arrays."""
        self.edge_pairs(number, above, below)
        return self._pair_arrays[number, above, below]

    def sums(self, operator: int, tensor: int, degrees: tuple[int, ...]) -> list[tuple[int, list[int], int]]:
        """`(owner, shards, bytes)`: a shard adds up its part of what several shards computed. Empty if results are
        whole.
        """
        key = operator, tensor, degrees
        if key not in self._sums:
            computed = self.regions.results(operator, tensor, degrees)
            members: dict[bytes, list[int]] = {}
            for shard, box in enumerate(computed):
                members.setdefault(box.tobytes(), []).append(shard)
            terms = []
            if len(members) < len(computed):
                owned = self.regions.writes(operator, tensor, degrees)
                sizes = np.prod(owned[:, :, 1] - owned[:, :, 0], axis=1)
                item = self.graph.tensors[tensor].item_bytes
                repeats = self.graph.operators[operator].repeats
                terms = [
                    (owner, shards, int(sizes[owner]) * item * repeats)
                    for shards in members.values()
                    for owner in shards
                    if sizes[owner]
                ]
            self._sums[key] = terms
        return self._sums[key]

    def gradient_returns(self, number: int) -> bool:
        """Returns whether a gradient is sent back along an edge."""
        source, target, position = self.graph.edges[number]
        operators = self.graph.operators
        tensor = operators[target].inputs[position].tensor
        return (
            operators[source].has_backward
            and operators[target].has_backward
            and self.graph.tensors[tensor].has_gradient
        )

    def weight_parts(self, weight: int, degrees: Sequence[tuple[int, ...]]) -> list[tuple[int, list[tuple[int, int]]]]:
        """Parts of a weight: bytes, and the `(operator, shard)`s that read each.

        Args:
          weight: number of the tensor.
          degrees: the degrees of each of its readers, in the order of `graph.readers_of_weight`.
        """
        key = weight, tuple(degrees)
        if key not in self._parts:
            self._parts[key] = list(self._split_weight(weight, degrees))
        return self._parts[key]

    def _split_weight(
        self, weight: int, degrees: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        value = self.graph.tensors[weight]
        owners: list[tuple[int, int]] = []
        boxes = []
        readers = self.graph.readers_of_weight[weight]
        for (i, position), degrees_of_reader in zip(readers, degrees):
            reads = self.regions.reads(i, position, degrees_of_reader)
            owners += [(i, shard) for shard in range(len(reads))]
            boxes.append(reads)
        every = np.concatenate(boxes)
        cuts = [np.unique(every[:, d]) for d in range(every.shape[1])]
        grid = np.stack(np.meshgrid(*(np.arange(len(c) - 1) for c in cuts), indexing="ij"))
        cells = grid.reshape(len(cuts), -1)
        low = np.stack([c[i] for c, i in zip(cuts, cells)], axis=1)
        high = np.stack([c[i + 1] for c, i in zip(cuts, cells)], axis=1)
        sizes = np.prod(high - low, axis=1) * value.item_bytes
        inside = (every[None, :, :, 0] <= low[:, None]) & (high[:, None] <= every[None, :, :, 1])
        holds = np.asarray(inside.all(axis=2))
        parts: dict[bytes, tuple[int, list[tuple[int, int]]]] = {}
        for row, size in zip(holds, sizes.tolist()):
            if row.any():
                name = row.tobytes()
                total, _ = parts.get(name, (0, []))
                parts[name] = total + size, [owners[k] for k in np.flatnonzero(row)]
        yield from parts.values()
