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
      memory: what to do where memory could run out. "exact": merge only groups without memory.
        "ignored": do not count the memory of merged groups, so that the best split of the result
        is a lower bound. "kept": count it, so that every split of the result is a split of the
        problem, but perhaps none of the best.
    """
    count = len(problem.groups)
    device, host = problem.device.copy(), problem.host.copy()
    sizes = problem.memory.copy()
    all_fits = problem.memory_is_enough
    preds = [set(of) for of in problem.predecessors]
    succs = [set(of) for of in problem.successors]
    nets_of: list[dict[frozenset[int], float]] = [{} for _ in range(count)]
    for net, cost in problem.nets.items():
        for g in net:
            nets_of[g][net] = cost
    before, after = reach(problem)
    members = [list(nodes) for nodes in problem.groups]
    alive = np.ones(count, bool)

    def is_free(c, d):
        if problem.num_hosts and math.isfinite(host[d]) and host[c]:
            return False
        if math.isfinite(device[d]):
            if sizes[c] and not all_fits and memory == "exact":
                return False
            apart = sum(cost for net, cost in nets_of[c].items() if d not in net)
            if device[c] + apart > nets_of[c].get(frozenset((c, d)), 0.0):
                return False
        return not ordered or (
            all(p == d or before[d] >> p & 1 for p in preds[c])
            and all(s == d or after[d] >> s & 1 for s in succs[c])
        )

    queue = list(range(count))
    waiting = set(queue)
    while queue:
        c = queue.pop()
        waiting.discard(c)
        if not alive[c]:
            continue
        near = (preds[c] | succs[c] if ordered else set()).union(*nets_of[c]) - {c}
        candidates = sorted(near) if near else np.flatnonzero(alive).tolist()
        d = next((d for d in candidates if d != c and is_free(c, d)), None)
        if d is None:
            continue
        alive[c] = False
        members[d] += members[c]
        device[d] += device[c]
        host[d] += host[c]
        if memory != "ignored" or math.isinf(device[d]):
            sizes[d] += sizes[c]
        for x in preds[c]:
            succs[x].discard(c)
            if x != d:
                succs[x].add(d)
                preds[d].add(x)
        for x in succs[c]:
            preds[x].discard(c)
            if x != d:
                preds[x].add(d)
                succs[d].add(x)
        for net, cost in list(nets_of[c].items()):
            for g in net:
                del nets_of[g][net]
            moved = net - {c} | {d}
            if len(moved) > 1:
                cost += nets_of[d].get(moved, 0.0)
                for g in moved:
                    nets_of[g][moved] = cost
        for g in near | {d}:
            if alive[g] and g not in waiting:
                waiting.add(g)
                queue.append(g)

    new = np.cumsum(alive) - 1
    kept = np.flatnonzero(alive)
    place = {v: p for p, v in enumerate(problem.graph.topological_order)}
    return dataclasses.replace(
        problem,
        groups=tuple(tuple(sorted(members[g], key=place.__getitem__)) for g in kept),
        device=device[kept],
        host=host[kept],
        memory=sizes[kept],
        order=tuple(sorted((int(new[a]), int(new[b])) for a in kept for b in succs[a])),
        nets={
            frozenset(int(new[x]) for x in net): cost
            for g in kept
            for net, cost in nets_of[g].items()
        },
    )
