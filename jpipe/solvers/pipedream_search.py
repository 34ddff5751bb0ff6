"""PipeDream's dynamic program over the states of a graph and the levels of a machine."""

import functools
import math
from collections.abc import Callable

import numpy as np

from jpipe.solvers.pipedream_costs import LinkLevel, StageCosts

_COARSE = 128  # states of the coarse search, which gives the first bound
_ROWS = 16  # rows of the tables that fit the processor's cache


class LevelSearch:
    """The dynamic program: one table per level with the least time of every stage.

    A component of depth d has d levels; depth 0 is a device. `behind` is the number of devices in
    later stages per copy of a component; it is 0 throughout if memory has no limit. Rounding it up
    at each level is exact: ceil((ceil(x) + n) / r) is ceil((x + n) / r).
    """

    def __init__(
        self,
        costs: StageCosts,
        levels: list[LinkLevel],
        straight: bool,
        bound: float | None = None,
    ):
        self._costs, self._levels, self._straight = costs, levels, straight
        self._num_states = len(costs.seconds)
        self._tables: dict[tuple[int, int], np.ndarray] = {}
        if bound is None:
            bound = self._coarse()
        # The largest useful time by depth. m replicas of a component take at least its time
        # divided by m, and no best plan contains anything slower than the bound.
        self._most = [bound]
        for level in reversed(levels):
            self._most.insert(0, self._most[0] * level.size * (1 + 1e-12))

    @functools.cached_property
    def best(self) -> float:
        """The time of the whole graph; infinite if nothing fits."""
        return float(self._rows(len(self._levels), 0, 0, 1)[-1, 0, -1])

    def stages(self) -> list[tuple[int, int, int]]:
        """(from state, to state, replicas), first to last."""
        return self._trace(len(self._levels), 0, self._num_states - 1, 0, 1)

    def _coarse(self) -> float:
        """The time of the best plan on a part of the states, which is an upper bound."""
        chain = [0]
        while chain[-1] < self._num_states - 1:
            chain.append(int(self._costs.contains[chain[-1]].argmax()))
        most = max(_COARSE, 2 * math.prod(level.size for level in self._levels))
        if self._num_states <= 2 * most:
            return math.inf
        # From each stretch of the chain, the state with the fewest bytes cut.
        stretches = np.array_split(chain[1:-1], most)
        cheapest = [s[self._costs.cut[s].argmin()] for s in stretches if len(s)]
        chosen = np.array([0, *cheapest, chain[-1]])
        coarse = self._costs.at(chosen)
        return LevelSearch(coarse, self._levels, self._straight, math.inf).best

    def _behind(self, level: LinkLevel, behind: int, used: int, m: int) -> int:
        return level.behind(behind, used, m) if self._costs.limit < math.inf else 0

    def _part(self, depth: int, i, j, behind: int) -> np.ndarray:
        """Seconds of one component of `depth` levels."""
        if depth == 0:
            return self._costs.device(i, j, behind)
        if (depth, behind) not in self._tables:
            self._tables[depth, behind] = self._table(depth, behind)
        return self._tables[depth, behind][i, j]

    def _first(self, depth: int, i, j, behind: int, m: int) -> np.ndarray:
        """Seconds of m components as the first stage, or the only one."""
        level = self._levels[depth - 1]
        behind = self._behind(level, behind, m, m)
        seconds = self._part(depth - 1, i, j, behind)
        if self._straight and m > 1:
            return np.full_like(seconds, np.inf)
        return self._costs.replicated(seconds, i, j, level, m, first=True)

    def _later(self, depth: int, i, j, behind: int, used: int, m: int) -> np.ndarray:
        """Seconds of m components as a later stage; `used` components up to its end."""
        level = self._levels[depth - 1]
        behind = self._behind(level, behind, used, m)
        seconds = self._part(depth - 1, i, j, behind)
        seconds = self._costs.replicated(seconds, i, j, level, m, first=False)
        if self._costs.transfers:
            seconds = np.maximum(seconds, self._costs.moving(i, j, level, m))
        return seconds

    def _options(self, depth: int) -> range:
        """The possible m of a later stage."""
        size = self._levels[depth - 1].size
        return range(1, min(2, size) if self._straight else size)

    def _later_stages(self, depth: int, behind: int, start: int, stop: int):
        """Seconds of the later stages that begin at the states from start to stop.

        Returns:
          A list of [used or 1, stop - start, S], one per m; and [stop - start], the state behind
          the last one at which a stage within the bound ends.
        """
        size = self._levels[depth - 1].size
        i, j = np.arange(start, stop)[:, None], np.arange(self._num_states)
        stages = []
        ends = np.zeros(stop - start, int)
        for m in self._options(depth):
            # Without a memory limit, the number of devices behind makes no difference.
            uses = range(m + 1, size + 1) if self._costs.limit < math.inf else [size]
            later = np.stack([self._later(depth, i, j, behind, used=u, m=m) for u in uses])
            later[later > self._most[depth]] = np.inf
            last = later.shape[-1] - np.isfinite(later[..., ::-1]).argmax(-1)
            last[~np.isfinite(later).any(-1)] = 0
            ends = np.maximum(ends, last.max(0))
            stages.append(later)
        return stages, ends

    def _table(self, depth: int, behind: int) -> np.ndarray:
        """[S, S]: seconds of a component of `depth` levels, from any state to any other."""
        later = functools.cache(functools.partial(self._later_stages, depth, behind))
        table = np.empty((self._num_states, self._num_states))
        for start in range(0, self._num_states, _ROWS):
            stop = min(start + _ROWS, self._num_states)
            table[start:stop] = self._rows(depth, behind, start, stop, later)[-1]
        return table

    def _rows(
        self,
        depth: int,
        behind: int,
        start: int,
        stop: int,
        later: Callable | None = None,
    ) -> np.ndarray:
        """[M, stop - start, S]: the least time with m components from states to all others."""
        size, num_states = self._levels[depth - 1].size, self._num_states
        later = later or functools.partial(self._later_stages, depth, behind)
        i, j = np.arange(start, stop)[:, None], np.arange(num_states)
        least = np.stack([self._first(depth, i, j, behind, m) for m in range(1, size + 1)])
        least[least > self._most[depth]] = np.inf
        spare = np.empty_like(least)
        for k in range(start + 1, num_states - 1):
            block = k - k % _ROWS
            if k == start + 1 or k == block:
                stages, ends = later(block, min(block + _ROWS, num_states))
            rows, columns = (
                slice(0, min(k, stop) - start),
                slice(k + 1, ends[k - block]),
            )
            before = least[:, rows, k]
            if columns.start >= columns.stop or not (before < np.inf).any():
                continue
            for m, stage in zip(self._options(depth), stages, strict=True):
                slower = spare[m:, rows, columns]
                np.maximum(
                    before[: size - m, :, None],
                    stage[:, None, k - block, columns],
                    out=slower,
                )
                best = least[m:, rows, columns]
                np.minimum(best, slower, out=best)
        return least

    def _trace(self, depth: int, i: int, j: int, behind: int, copies: int) -> list[tuple[int, int, int]]:
        """The stages of the best plan, found from the last to the first by the entries of the table."""
        if depth == 0:
            return [(i, j, copies)]
        level = self._levels[depth - 1]
        least = self._rows(depth, behind, i, i + 1)[:, 0]
        stages: list[tuple[int, int, int]] = []
        used = level.size
        while least[used - 1, j] != self._first(depth, i, j, behind, used):
            k, m = self._split(depth, i, j, behind, used=used, least=least)
            after = self._behind(level, behind, used, m)
            stages = self._trace(depth - 1, k, j, after, copies * m) + stages
            used, j = used - m, k
        after = self._behind(level, behind, used, used)
        return self._trace(depth - 1, i, j, after, copies * used) + stages

    def _split(self, depth: int, i: int, j: int, behind: int, used: int, least: np.ndarray) -> tuple[int, int]:
        """The state at which the last stage begins, and its number of components."""
        k = np.arange(i + 1, j)
        for m in self._options(depth):
            if m < used:
                last = self._later(depth, k, j, behind, used=used, m=m)
                same = np.maximum(least[used - m - 1, k], last) == least[used - 1, j]
                if same.any():
                    return int(k[same.argmax()]), m
        raise AssertionError("the tables and the costs differ")
