"""The best split along closed sets of groups, by dynamic programming."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from jpipe.solvers._placement import Problem, Split, TooLarge, work_on_hosts


class ClosedSets:
    """Sets of groups that contain everything that must be before their groups.

    A stage is the difference of two closed sets, one inside the other. Count the groups of a net in
    both sets. The stage contains a part of the net if the counts differ, and the whole net if one
    count is 0 and the other is the net's size. Let partial(I) be the nets that are partly in I. A
    stage from I to J pays

        sum of partial(I) + sum of partial(J)
          - sum over nets partial in both of its cost, twice if the counts are equal

    and the last sum is a product of two matrices of zeros and ones.

    Args:
      problem: the groups.
      member: [G, N] whether a group is in a set. The empty and the full set are among them.
    """

    def __init__(self, problem: Problem, member: np.ndarray):
        self.problem = problem
        num_sets = member.shape[1]
        # All sums run in one order, so that in spite of rounding no set has a smaller sum than a
        # set inside it.
        device, host, memory, size = np.zeros((4, num_sets))
        not_device, not_host = np.zeros((2, num_sets), np.int32)
        for g in range(len(member)):
            has = member[g]
            size += has
            memory += has * problem.memory[g]
            if math.isinf(problem.device[g]):
                not_device += has
            else:
                device += has * problem.device[g]
            if math.isinf(problem.host[g]):
                not_host += has
            else:
                host += has * problem.host[g]
        rank = np.lexsort((size, device))
        self.member = np.ascontiguousarray(member[:, rank].T)
        self.device, self.host, self.memory = device[rank], host[rank], memory[rank]
        self.not_device, self.not_host = not_device[rank], not_host[rank]

        partial_cost = np.zeros(num_sets)
        features, weights = [], []
        for net, cost in problem.nets.items():
            count = member[sorted(net)].sum(axis=0, dtype=np.int32)[rank]
            partial = (count > 0) & (count < len(net))
            partial_cost += cost * partial
            features.append(partial)
            weights.append(cost if len(net) > 2 else 2 * cost)
            if len(net) > 2:
                for n in np.unique(count[partial]):
                    features.append(count == n)
                    weights.append(cost)
        self.partial_cost = partial_cost
        self.features = np.stack(features, axis=1) if features else np.zeros((num_sets, 0), bool)
        self.weights = np.array(weights)

    def __len__(self) -> int:
        return len(self.member)

    def best_split(self, below: float = math.inf, max_pairs: float = math.inf) -> tuple[float, Split] | None:
        """The split along these sets whose slowest stage takes the least time.

        Args:
          below: only splits whose slowest stage is below this count.
          max_pairs: the most pairs of sets to compare.

        Returns:
          The time of the slowest stage, and the stages; None if no split is below `below`.

        Raises:
          TooLarge: if there are more pairs.
        """
        return _SplitSearch(self, below).run(max_pairs)


_ENDS, _STARTS = 128, 2048  # sets per block; the matrices of a block fit the cache


class _SplitSearch:
    """The dynamic program over pairs of closed sets, by blocks of outer sets.

    best[j, h, I] is the slowest stage of the best split of I on exactly j devices and h hosts.
    """

    def __init__(self, sets: ClosedSets, below: float):
        self.sets, self.below = sets, below
        k, h = sets.problem.num_devices, sets.problem.num_hosts
        # There are at most as many stages as groups.
        self.k, self.h = (min(n, len(sets.problem.groups)) for n in (k, h))
        self.best = np.full((self.k + 1, self.h + 1, len(sets)), math.inf)
        self.best[0, 0, 0] = 0.0
        self.total = sets.device[-1]
        slack = 1e-9 * self.total  # for rounding
        on_hosts = [work_on_hosts(sets.problem, below * n) for n in range(1, self.h + 1)]
        # [j, h]: the most work that j devices and h hosts do, each within `below`.
        on_devices = below * np.arange(1, self.k + 1)
        self.capacity = slack + np.add.outer([0.0, *on_devices], [0.0, *on_hosts])
        self.left = self.capacity[::-1, ::-1]
        self.widest = slack + max([*on_devices[:1], *on_hosts[:1]])

    def run(self, max_pairs: float) -> tuple[float, Split] | None:
        sets, last = self.sets, len(self.sets) - 1
        firsts = np.searchsorted(sets.device, sets.device - self.widest)
        num_pairs = int((np.arange(len(sets)) - firsts).sum())
        if num_pairs > max_pairs:
            raise TooLarge(
                f"{len(sets)} closed sets have {num_pairs:.3g} pairs that could be a stage, more than "
                f"{max_pairs:.3g}. Use `linearised`."
            )
        # A set is of use only to outer sets with at least this work.
        useful_from = np.zeros(len(sets))
        for begin in range(1, last + 1, _ENDS):
            ends = np.arange(begin, min(begin + _ENDS, last + 1))
            work = sets.device[ends]
            states = [
                (j, h)
                for j, h in itertools.product(range(self.k + 1), range(self.h + 1))
                if j + h and self.total - work[-1] <= self.left[j, h] and work[0] <= self.capacity[j, h]
            ]
            if not states:
                useful_from[ends] = math.inf
                continue
            earlier = np.arange(firsts[begin], begin)
            earlier = earlier[useful_from[earlier] <= work[-1]]
            starts = np.concatenate([earlier, ends])
            pairs = [self._stages(starts[i : i + _STARTS], ends) for i in range(0, len(starts), _STARTS)]
            self._extend(sorted(states, key=sum), ends, pairs)
            useful_from[ends] = self._useful_from(ends)
        whole = self.best[:, :, last]
        j, h = np.unravel_index(np.argmin(whole), whole.shape)
        if not whole[j, h] < self.below:
            return None
        return float(whole[j, h]), self._trace(int(j), int(h))

    def _stages(self, starts: np.ndarray, ends: np.ndarray):
        """(ends, starts, loads) of the stages below `below`: on a device, and on a host."""
        sets, problem = self.sets, self.sets.problem
        inside = sets.member[starts]
        has = sets.member[ends]
        # The groups that a start can contain and an end can lack.
        columns = np.flatnonzero(inside.any(axis=0) & ~has.all(axis=0))
        is_stage = starts[None, :] != ends[:, None]
        if len(columns):
            for i in range(0, len(columns), 64):
                some = columns[i : i + 64]
                lacks = _words(~has[:, some])
                is_stage &= (lacks[:, None] & _words(inside[:, some])[None, :]) == 0
        kinds: list = []  # of the devices, of the hosts; None if there are none
        for on_host in range(2):
            if not (self.h if on_host else self.k):
                kinds.append(None)
                continue
            if on_host:
                load = sets.host[ends][:, None] - sets.host[starts][None, :]
                unable = sets.not_host
            else:
                load = (sets.device + sets.partial_cost)[ends][:, None] + (sets.partial_cost - sets.device)[starts][
                    None, :
                ]
                features = np.flatnonzero(sets.features[starts].any(axis=0) & sets.features[ends].any(axis=0))
                if len(features):
                    left = sets.features[np.ix_(ends, features)]
                    right = sets.features[np.ix_(starts, features)]
                    load -= (left * sets.weights[features]) @ right.T.astype(float)
                unable = sets.not_device
            fits = is_stage & (load < self.below)
            if unable[-1]:
                fits &= unable[ends][:, None] == unable[starts][None, :]
            if not on_host and not problem.memory_is_enough:
                taken = sets.memory[ends][:, None] - sets.memory[starts][None, :]
                fits &= taken <= problem.most_memory
            e, s = np.nonzero(fits)
            kinds.append((e, starts[s], load[e, s]))
        return kinds

    def _extend(self, states, ends: np.ndarray, pairs) -> None:
        """Fills in `best` for a block of ends.

        A state has one stage more than the states it comes from, so pairs may be in any order.
        """
        groups = [[None if p is None or not len(p[0]) else _runs(p) for p in kinds] for kinds in pairs]
        for j, h in states:
            values = np.full(len(ends), math.inf)
            for kinds in groups:
                for on_host, of in enumerate(kinds):
                    if of is None or not (h if on_host else j):
                        continue
                    heads, which, starts, load = of
                    before = self.best[j - 1 + on_host, h - on_host]
                    slowest = np.maximum(before[starts], load)
                    np.minimum.at(values, which, np.minimum.reduceat(slowest, heads))
            values[self.total - self.sets.device[ends] > self.left[j, h]] = math.inf
            # A state is never needed if fewer devices or hosts do as well.
            if j:
                values[self.best[:j, : h + 1, ends].min(axis=(0, 1)) <= values] = math.inf
            if h:
                values[self.best[j, :h, ends].min(axis=1) <= values] = math.inf
            values[~(values < self.below)] = math.inf
            self.best[j, h, ends] = values

    def _useful_from(self, ends: np.ndarray) -> np.ndarray:
        """The least work of an outer set for which these ends are of use."""
        least = np.full(len(ends), math.inf)
        for j, h in itertools.product(range(self.k + 1), range(self.h + 1)):
            reached = self.best[j, h, ends] < math.inf
            for dj, dh in ((1, 0), (0, 1)):
                if j + dj <= self.k and h + dh <= self.h:
                    need = self.total - self.left[j + dj, h + dh]
                    least[reached] = np.minimum(least[reached], need)
        return least

    def _trace(self, j: int, h: int) -> Split:
        """The stages of the best split of the full set."""
        sets, end = self.sets, len(self.sets) - 1
        stages: Split = []
        while end:
            kinds = self._stages(np.arange(end), np.array([end]))
            options = []
            for on_host, of in enumerate(kinds):
                if of is not None and (h if on_host else j):
                    _, starts, load = of
                    before = self.best[j - 1 + on_host, h - on_host, starts]
                    slowest = np.maximum(before, load)
                    if len(slowest):
                        n = int(np.argmin(slowest))
                        options.append((slowest[n], on_host, int(starts[n])))
            _, on_host, start = min(options)
            groups = np.flatnonzero(sets.member[end] & ~sets.member[start])
            stages.append((groups.tolist(), bool(on_host)))
            j, h, end = j - 1 + on_host, h - on_host, start
        return stages[::-1]


def _words(bits: np.ndarray) -> np.ndarray:
    """Packs rows of at most 64 bits into one number each."""
    packed = np.packbits(bits, axis=1)
    width = next(n for n in (1, 2, 4, 8) if n >= packed.shape[1])
    padded = np.zeros((len(bits), width), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(f"u{width}")[:, 0]


def _runs(pairs):
    """The pairs, which are sorted by end, with the position of the first pair of each end."""
    ends, starts, load = pairs
    heads = np.flatnonzero(np.diff(ends, prepend=-1))
    return heads, ends[heads], starts, load


def prefixes(problem: Problem, order: Sequence[int]) -> ClosedSets:
    """The closed sets along one order of the groups."""
    member = np.zeros((len(order), len(order) + 1), bool)
    for n, g in enumerate(order):
        member[g, n + 1 :] = True
    return ClosedSets(problem, member)
