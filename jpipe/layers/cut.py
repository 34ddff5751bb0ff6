"""Minimum cuts."""

import collections
import math
from typing import Any

SOURCE, SINK = "source", "sink"


class Network:
    """A network with capacities from `SOURCE` to `SINK`, and its maximum flow."""

    def __init__(self) -> None:
        # What can still flow from a node to another one.
        self.left: dict[Any, dict[Any, float]] = collections.defaultdict(dict)

    def connect(self, start: Any, end: Any, capacity: float = math.inf) -> None:
        self.left[start][end] = capacity
        self.left[end].setdefault(start, 0)

    def sink_side(self) -> set:
        """The nodes from which the sink can be reached at the maximum flow."""
        while path := self._shortest_path():
            edges = list(zip(path, path[1:]))
            flow = min(self.left[u][v] for u, v in edges)
            for u, v in edges:
                self.left[u][v] -= flow
                self.left[v][u] += flow
        reached, waiting = {SINK}, [SINK]
        while waiting:
            end = waiting.pop()
            starts = [u for u in self.left[end] if self.left[u][end] > 0]
            new = [u for u in starts if u not in reached]
            reached.update(new)
            waiting += new
        return reached

    def _shortest_path(self) -> list:
        """A shortest path from source to sink along edges with capacity left; empty if there is none."""
        before: dict[Any, Any] = {SOURCE: None}
        waiting = collections.deque([SOURCE])
        while waiting:
            start = waiting.popleft()
            for end, capacity in self.left[start].items():
                if capacity > 0 and end not in before:
                    before[end] = start
                    waiting.append(end)
        if SINK not in before:
            return []
        path = [SINK]
        while path[-1] != SOURCE:
            path.append(before[path[-1]])
        return path[::-1]
