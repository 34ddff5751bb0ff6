"""The ways to cut a graph of layers in two: the nodes up to an antichain, and the rest."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class States:
    """The states of a graph: sets of nodes that contain every predecessor of their nodes.

    A state is given by its antichain: its nodes without a successor in the state. A stage is the
    difference of two states, one inside the other. n nodes, S states, smaller states first; the
    first is empty, the last is the whole graph.

    Attributes:
      members: [n, S] bool, whether the node is in the state.
      antichain: [n, S] bool, whether it is in the state and none of its successors is.
      next: for each state, the states that it can grow to in one step.
    """

    members: np.ndarray
    antichain: np.ndarray
    next: tuple[tuple[int, ...], ...]

    @property
    def num_states(self) -> int:
        """S, with the empty state and the whole graph."""
        return len(self.next)

    @functools.cached_property
    def contains(self) -> np.ndarray:
        """[S, S] bool at [i, j]: whether state j contains all nodes of state i and more."""
        contains = np.zeros((self.num_states, self.num_states), bool)
        for i in range(self.num_states - 1, -1, -1):
            for j in self.next[i]:
                contains[i] |= contains[j]
                contains[i, j] = True
        return contains

    @functools.cached_property
    def longest_chain(self) -> int:
        """The most stages that the graph can be cut into."""
        longest = [0] * self.num_states
        for i, following in enumerate(self.next):
            for j in following:
                longest[j] = max(longest[j], longest[i] + 1)
        return longest[-1]

    def total(self, costs: Sequence[float]) -> np.ndarray:
        """[S]: the sum over each state of one cost per node."""
        return np.asarray(costs, np.float64) @ self.members


def states(
    predecessors: Sequence[Sequence[int]],
    successors: Sequence[Sequence[int]],
    max_states: int,
    *,
    from_first_source: bool = False,
) -> States:
    """Enumerates the states of a graph. Time and memory grow linearly with their number.

    A chain of n nodes has n + 1 states; n independent nodes have 2^n.

    Args:
      predecessors: for each node, the positions of its predecessors, all before its own.
      successors: for each node, the positions of its successors.
      max_states: the most states to enumerate.
      from_first_source: keep only the states that grow out of the first source. They grow by nodes
        that read something in the state, each with everything else that it needs. Nodes that
        depend on other sources then come with the first node that needs them, not at any time.

    Returns:
      The `States`.

    Raises:
      ValueError: if there are more than `max_states`.

    Example:
      >>> diamond = [(), (0,), (0,), (1, 2)], [(1, 2), (3,), (3,), ()]
      >>> states(*diamond, max_states=100).members.astype(int)
      array([[0, 1, 1, 1, 1, 1],
             [0, 0, 1, 0, 1, 1],
             [0, 0, 0, 1, 1, 1],
             [0, 0, 0, 0, 0, 1]])
    """
    # A set of nodes is a number: node v is bit v.
    num_nodes = len(predecessors)
    direct = [sum(1 << u for u in nodes) for nodes in predecessors]
    readers = [sum(1 << w for w in nodes) for nodes in successors]
    needed: list[int] = []
    for v, nodes in enumerate(predecessors):
        needed.append(functools.reduce(int.__or__, (needed[u] for u in nodes), 1 << v))
    sources = [v for v, nodes in enumerate(predecessors) if not nodes]

    def frontier(state: int, old: int, new: int) -> int:
        """The nodes that a state can grow by, after the nodes `new` were added to it."""
        reading = functools.reduce(int.__or__, (readers[v] for v in _positions(new)), 0)
        if from_first_source:
            now = (old | reading) & ~state
            more = (v for v in sources if not state >> v & 1)
            return now or 1 << next(more, num_nodes) & (1 << num_nodes) - 1
        free = (v for v in _positions(reading) if not direct[v] & ~state)
        return old & ~new | sum(1 << v for v in free)

    start = sources[:1] if from_first_source else sources
    entries = [(0, 0, sum(1 << v for v in start))]  # state, antichain, frontier
    position = {0: 0}
    following: list[list[int]] = []
    for state, antichain, candidates in entries:  # grows while it is read
        following.append([])
        for v in _positions(candidates):
            grown = state | needed[v]
            if grown not in position:
                if len(entries) >= max_states:
                    raise ValueError(
                        f"the graph has more than {max_states:,} states (ways to cut it in two): there are as many "
                        f"with up to {grown.bit_count()} of its {num_nodes} nodes. Parallel branches multiply them."
                    )
                position[grown] = len(entries)
                entries.append(
                    (
                        grown,
                        antichain & ~needed[v] | 1 << v,
                        frontier(grown, candidates, grown & ~state),
                    )
                )
            following[-1].append(position[grown])

    order = sorted(range(len(entries)), key=lambda s: entries[s][0].bit_count())
    rank = {s: r for r, s in enumerate(order)}
    return States(
        members=_bits([entries[s][0] for s in order], num_nodes),
        antichain=_bits([entries[s][1] for s in order], num_nodes),
        next=tuple(tuple(rank[s] for s in following[o]) for o in order),
    )


def _positions(number: int) -> Iterator[int]:
    """The positions of the bits that are set, lowest first."""
    while number:
        bit = number & -number
        yield bit.bit_length() - 1
        number ^= bit


def _bits(numbers: Sequence[int], num_bits: int) -> np.ndarray:
    """[num_bits, len(numbers)] bool: row b has bit b of each number."""
    size = -(-num_bits // 8)
    raw = b"".join(number.to_bytes(size, "little") for number in numbers)
    octets = np.frombuffer(raw, np.uint8).reshape(len(numbers), size)
    bits = np.unpackbits(octets, axis=1, count=num_bits, bitorder="little")
    return np.ascontiguousarray(bits.T).astype(bool)
