"""Puts groups of a placement problem together that some best split has together."""

import dataclasses
import math

import numpy as np

from jpipe.solvers._placement import Problem, reach


def merge(problem: Problem, *, ordered: bool = True, memory: str = "exact") -> Problem:
    """Puts groups together that some best split has together.

    Take a split with groups C and D in different stages, and move C to D's stage. D's stage gains
    at most C's time and the nets that contain C but not D. C's stage gains at most these nets too.
    Both stages lose the nets of C and D alone. No other stage gains anything, because a net with
    both was partly in D's stage before. So if C's time and the former nets cost no more than the
    latter, and C takes no time on a host, the split is no worse. The order is kept if all groups
    that must be before C must be before D, and likewise after. The published case is a C that
    takes no time and has no neighbour but D.

    Only memory can then run out.

    Args:
      problem: the groups.
      ordered: whether stages must be in order; if not, more groups can be merged.
      memory: the rule where memory could run out. "exact": merge only groups without memory.
        "ignored": do not count the memory of merged groups, so that the best split of the result
        is a lower bound. "kept": count it, so that every split of the result is a split of the
        problem, but perhaps none of the best.
    """
    groups = _MergedGroups(problem, ordered, memory)
    queue = list(range(len(problem.groups)))
    waiting = set(queue)
    while queue:
        c = queue.pop()
        waiting.discard(c)
        if not groups.alive[c]:
            continue
        near = groups.near(c)
        # A group without neighbours may join any other one.
        candidates = sorted(near) if near else np.flatnonzero(groups.alive).tolist()
        d = next((d for d in candidates if d != c and groups.may_join(c, d)), None)
        if d is None:
            continue
        groups.join(c, d)
        # What C touched may now join D, or each other.
        again = [g for g in near | {d} if groups.alive[g] and g not in waiting]
        waiting.update(again)
        queue += again
    return groups.problem()


class _MergedGroups:
    """The groups of a problem while they are merged.

    Attributes:
      alive: whether each group is still a group of its own.
    """

    def __init__(self, problem: Problem, ordered: bool, memory: str):
        self._problem, self._ordered, self._memory = problem, ordered, memory
        self._keeps_memory_apart = memory == "exact" and not problem.memory_is_enough
        self._device, self._host = problem.device.copy(), problem.host.copy()
        self._sizes = problem.memory.copy()
        self._preds = [set(groups) for groups in problem.predecessors]
        self._succs = [set(groups) for groups in problem.successors]
        self._before, self._after = reach(problem)
        self._members = [list(nodes) for nodes in problem.groups]
        self._nets_of: list[dict[frozenset[int], float]] = [{} for _ in problem.groups]
        for net, cost in problem.nets.items():
            for g in net:
                self._nets_of[g][net] = cost
        self.alive = np.ones(len(problem.groups), bool)

    def near(self, c: int) -> set[int]:
        """The groups that share an edge or a net with `c`."""
        adjacent = self._preds[c] | self._succs[c] if self._ordered else set()
        return adjacent.union(*self._nets_of[c]) - {c}

    def may_join(self, c: int, d: int) -> bool:
        """Returns whether some best split has `c` and `d` together."""
        nets = self._nets_of[c]
        # The stage of D may be on a host: C must take no time there.
        if self._problem.num_hosts and math.isfinite(self._host[d]) and self._host[c]:
            return False
        # It may be on a device: C must save it as much as C costs it, and take none of its memory if that can run out.
        if math.isfinite(self._device[d]):
            if self._sizes[c] and self._keeps_memory_apart:
                return False
            apart = sum(cost for net, cost in nets.items() if d not in net)
            if self._device[c] + apart > nets.get(frozenset((c, d)), 0.0):
                return False
        # All that must come before C, or after it, must do so for D.
        return not self._ordered or (
            all(p == d or self._before[d] >> p & 1 for p in self._preds[c])
            and all(s == d or self._after[d] >> s & 1 for s in self._succs[c])
        )

    def join(self, c: int, d: int) -> None:
        """Takes `c` into `d`."""
        self.alive[c] = False
        self._members[d] += self._members[c]
        self._device[d] += self._device[c]
        self._host[d] += self._host[c]
        if self._memory != "ignored" or math.isinf(self._device[d]):
            self._sizes[d] += self._sizes[c]
        for to, back in ((self._preds, self._succs), (self._succs, self._preds)):
            for x in to[c]:
                back[x].discard(c)
                if x != d:
                    back[x].add(d)
                    to[d].add(x)
        nets_of = self._nets_of
        for net, cost in list(nets_of[c].items()):
            for g in net:
                del nets_of[g][net]
            moved = net - {c} | {d}
            if len(moved) > 1:  # a net of C and D alone crosses no border any more
                cost += nets_of[d].get(moved, 0.0)
                for g in moved:
                    nets_of[g][moved] = cost

    def problem(self) -> Problem:
        """The problem of the groups that are left, numbered anew."""
        new = np.cumsum(self.alive) - 1
        kept = np.flatnonzero(self.alive)
        order = self._problem.graph.topological_order
        place = {v: p for p, v in enumerate(order)}
        members = (sorted(self._members[g], key=place.__getitem__) for g in kept)
        edges = ((int(new[a]), int(new[b])) for a in kept for b in self._succs[a])
        return dataclasses.replace(
            self._problem,
            groups=tuple(map(tuple, members)),
            device=self._device[kept],
            host=self._host[kept],
            memory=self._sizes[kept],
            order=tuple(sorted(edges)),
            nets={frozenset(int(new[x]) for x in net): cost for g in kept for net, cost in self._nets_of[g].items()},
        )
