"""PipeDream's cost models of a stage: the paper's and its program's."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jpipe.solvers._states import States


@dataclasses.dataclass(frozen=True)
class LinkLevel:
    """Components joined by links of one speed.

    Attributes:
      size: M, the number of components.
      bandwidth: the bandwidth of each link.
      below: M of the level below; 1 if the components are devices.
      devices: number of devices per component.
    """

    size: int
    bandwidth: float
    below: int
    devices: int

    def behind(self, behind: int, used: int, m: int) -> int:
        """Devices in later stages, per replica of a stage on m components.

        Args:
          behind: devices in later stages per copy of the whole level.
          used: components in use up to the end of this stage.
          m: components of this stage.
        """
        return -(-(behind + (self.size - used) * self.devices) // m)


def neighbours_within(neighbours: Sequence[Sequence[int]], kept: Sequence[int]) -> list[list[int]]:
    """The neighbours of the kept nodes, as positions in `kept`."""
    row = {v: n for n, v in enumerate(kept)}
    return [[row[u] for u in neighbours[v] if u in row] for v in kept]


class StageCosts:
    """The costs of a stage, by the two states that it lies between.

    Attributes:
      contains: [S, S] bool at [i, j], whether state j contains state i and more.
      seconds: [S], the sum over all nodes in a state.
      parameters: [S] bytes.
      memory: [S] bytes.
      cut: [S] bytes of the outputs that leave a state.
      limit: bytes per device.
      transfers: whether moving activations takes time.
    """

    _sums: ClassVar = ("seconds", "parameters", "memory", "cut")

    def __init__(self, graph, kept, state_set, placed, limit, transfers):
        nodes = [graph.nodes[v] for v in kept]
        self.contains = state_set.contains
        self.seconds = state_set.total([node.seconds for node in nodes])
        self.parameters = state_set.total([node.parameter_bytes for node in nodes])
        self.memory = np.array([node.device_bytes for node in graph.nodes]) @ placed
        sizes = np.array([node.output_bytes for node in nodes])
        self.cut = sizes @ self._handed_on(
            state_set,
            neighbours_within(graph.predecessors, kept),
            neighbours_within(graph.successors, kept),
        )
        self.limit = limit
        self.transfers = transfers

    def at(self, chosen: np.ndarray) -> "StageCosts":
        """The costs for a part of the states."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part.contains = self.contains[np.ix_(chosen, chosen)]
        for name in self._sums:
            setattr(part, name, getattr(self, name)[chosen])
        return part

    def between(self, sums: np.ndarray, i, j) -> np.ndarray:
        """A sum over the stage from i to j. Rounding must not make it negative."""
        return np.maximum(sums[j] - sums[i], 0.0)

    def device(self, i, j, behind: int) -> np.ndarray:
        """Seconds of the stage from i to j on one device; infinite if the stage is impossible.

        Args:
          i: state at which the stage begins.
          j: state at which the stage ends.
          behind: number of devices in later stages.
        """
        seconds = np.where(self.contains[i, j], self.between(self.seconds, i, j), np.inf)
        if self.limit < math.inf:
            needed = (1 + behind) * self.between(self.memory, i, j)
            seconds = np.where(needed <= self.limit, seconds, np.inf)
        return seconds

    def replicated(self, seconds: np.ndarray, i, j, level: LinkLevel, m: int, first: bool) -> np.ndarray:
        """Seconds of m replicas of a component that takes `seconds`.

        Args:
          seconds: time of one component for a minibatch.
          i: state at which the stage begins.
          j: state at which the stage ends.
          level: the level of the components.
          m: number of replicas.
          first: whether the stage is the first.
        """
        raise NotImplementedError

    def moving(self, i, j, level: LinkLevel, m: int) -> np.ndarray:
        """Seconds to move activations in and out of m replicas."""
        raise NotImplementedError

    def _handed_on(self, state_set: States, predecessors, successors) -> np.ndarray:
        """[n, S] bool: whether a node's output leaves the state."""
        raise NotImplementedError


class _Sosp19(StageCosts):
    def replicated(self, seconds, i, j, level, m, first):
        reduced = 2 * (m - 1) * self.between(self.parameters, i, j) / level.bandwidth
        return np.maximum(seconds, reduced) / m

    def moving(self, i, j, level, m):
        return 2 * self.cut[i] / level.bandwidth

    def _handed_on(self, state_set, predecessors, successors):
        """Outputs that a node outside reads."""
        inside = state_set.members
        return np.array([inside[v] & ~inside[after].all(axis=0) for v, after in enumerate(successors)])


class _Repo(StageCosts):
    def replicated(self, seconds, i, j, level, m, first):
        parameters = self.between(self.parameters, i, j)
        reduced = 4 * (m - 1) * parameters / (level.bandwidth * m)
        return (seconds + (reduced / level.below if first else reduced)) / m

    def moving(self, i, j, level, m):
        out = np.where(j == len(self.cut) - 1, 0.0, self.cut[j])
        return 2 * np.maximum(self.cut[i], out) / (level.bandwidth * m)

    def _handed_on(self, state_set, predecessors, successors):
        """The antichain, and nodes before one of its nodes that another branch reads too.

        That is more than the nodes outside read: an output that two nodes of the antichain read
        counts too.
        """
        num_nodes = len(predecessors)
        before = np.eye(num_nodes, dtype=bool)  # [v, u]: u is v or precedes it
        for v, nodes in enumerate(predecessors):
            for u in nodes:
                before[v] |= before[u]
        handed_on = state_set.antichain.copy()
        beside = np.zeros_like(before)
        for u, after in enumerate(successors):
            beside[:, u] = before[:, u] & ~before[:, after].all(axis=1)
        for v in range(num_nodes):
            handed_on[beside[v]] |= state_set.antichain[v]
        return handed_on


class StageBytes(StageCosts):
    """The bytes that a device needs, in the place of seconds."""

    def device(self, i, j, behind):
        needed = (1 + behind) * self.between(self.memory, i, j)
        return np.where(self.contains[i, j], needed, np.inf)

    def replicated(self, seconds, i, j, level, m, first):
        return seconds

    def moving(self, i, j, level, m):
        return 0.0 * self.cut[i]


COST_MODELS: dict[str, type[StageCosts]] = {"pipedream-repo": _Repo, "sosp19": _Sosp19}


def data_parallel_seconds(costs: StageCosts, levels: list[LinkLevel]) -> float:
    seconds = costs.seconds[-1]
    for level in levels:
        seconds = costs.replicated(seconds, 0, -1, level, level.size, first=True)
    return float(seconds)
