"""Runs of elementwise equations, which are one operator each.

A run may hold statistics of rows, as softmax and layer norm need them: a reduction over the last dim of an array that a
later elementwise equation reads too. The loop of that dim cannot be split then.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jpipe.soap.flatten import FlatEquation, Value
from jpipe.soap.regions import Access, DimMap, Step, followed, is_plain
from jpipe.soap.rules import ELEMENTWISE

Refs = Mapping[Value, tuple[Value, Access]]
"""Each value as what it shows of a value that an equation computes, or of an argument."""


@dataclasses.dataclass(eq=False)
class Group:
    """Equations that become one operator.

    Attributes:
      equations: positions in the program, in order.
      is_run: whether further elementwise equations may join.
      sizes, can_split: the size of each loop, and whether it may be split, in runs.
      dims: value -> the loop of each of its dims, or None for dims of size 1, in runs. Beside the values that the run
        computes, it has those of which it computes statistics.
      rows: value -> the loop over which it is a statistic.
    """

    equations: list[int]
    is_run: bool
    sizes: list[int] = dataclasses.field(default_factory=list)
    can_split: list[bool] = dataclasses.field(default_factory=list)
    dims: dict[Value, tuple[int | None, ...]] = dataclasses.field(default_factory=dict)
    rows: dict[Value, int] = dataclasses.field(default_factory=dict)


class Fusion:
    """Groups the equations of a program that are neither views nor constants.

    Args:
      equations: the equations of the operators, in the order of the program.
      refs: see `Refs`.
      results: the values that the function returns.

    Attributes:
      readers: value -> positions of the equations that read it, or a view of it; the number of equations for a result.
      groups: equations that become one operator, in an order in which they can run.
    """

    def __init__(self, equations: Sequence[FlatEquation], refs: Refs, results: Sequence[Value]):
        self._equations = equations
        self._refs = refs
        self._group_of: dict[Value, Group] = {}
        self.readers: dict[Value, list[int]] = {}
        for i, equation in enumerate(equations):
            for value in equation.inputs:
                self.readers.setdefault(refs[value][0], []).append(i)
        for value in results:
            self.readers.setdefault(refs[value][0], []).append(len(equations))
        groups: list[Group] = []
        for i, equation in enumerate(equations):
            group = self._join(i) or self._start(i)
            self._group_of |= dict.fromkeys(equation.outputs, group)
            groups.append(group)
        self.groups = self._in_order({id(g): g for g in groups}.values())

    def _sources(self, i: int) -> list[tuple[Value, Access]]:
        return [self._refs[value] for value in self._equations[i].inputs]

    def _start(self, i: int) -> Group:
        equation = self._equations[i]
        if equation.primitive not in ELEMENTWISE:
            return Group([i], False)
        group = Group([i], True)
        self._extend(group, i, {})
        return group

    def _extend(self, group: Group, i: int, loops: dict[int, int]) -> None:
        """Adds an elementwise equation, some dims of whose output follow loops already."""
        (output,) = self._equations[i].outputs
        dims: list[int | None] = []
        for d, size in enumerate(output.shape):
            if size > 1 and d not in loops:
                loops[d] = len(group.sizes)
                group.sizes.append(size)
                group.can_split.append(True)
            dims.append(loops.get(d))
        group.dims[output] = tuple(dims)

    def _join(self, i: int) -> Group | None:
        """The run that equation `i` joins, if there is one."""
        equation = self._equations[i]
        if equation.primitive.startswith("reduce_"):
            return self._join_statistics(i)
        if equation.primitive not in ELEMENTWISE:
            return None
        sources = self._sources(i)
        runs = {id(run): run for base, _ in sources if (run := self._group_of.get(base)) is not None and run.is_run}
        # Runs with most loops first: others can be taken into them.
        candidates = sorted(runs.values(), key=lambda run: -len(run.sizes))
        chosen: Group | None = None
        loops: dict[int, int] = {}
        for run in candidates:
            mine = self._loops(run, i)
            if mine is None or not self._is_free(run, chosen, i):
                continue
            missing = {d for d, n in enumerate(equation.outputs[0].shape) if n > 1}
            if (missing - set(mine)) and not self._only_for(run, chosen, i):
                continue  # another operator would find copies of what the run writes
            if chosen is None:
                chosen, loops = run, mine
            elif all(loops.get(d, n) == n or d in loops for d, n in mine.items()):
                self._merge(chosen, run, loops, mine)
        if chosen is not None:
            self._extend(chosen, i, loops)
            chosen.equations.append(i)
        return chosen

    def _join_statistics(self, i: int) -> Group | None:
        """The run that computes the statistics of rows of equation `i`: the run of their array, or a new one."""
        equation = self._equations[i]
        base, access = self._sources(i)[0]
        shape, rank = equation.inputs[0].shape, len(equation.inputs[0].shape)
        if len(equation.inputs) > 1 or rank < 2 or not is_plain(access):
            return None
        if equation.params.get("axes") != (rank - 1,) or shape[-1] < 2:
            return None
        below = followed(access)
        if not {d for d in range(rank) if shape[d] > 1} <= set(below):
            return None  # rows are repeated
        run = self._group_of.get(base)
        if run is None or not run.is_run:
            run = Group([], True)
            loops: list[int | None] = []
            for size in base.shape:
                loops.append(len(run.sizes) if size > 1 else None)
                run.sizes += [size] * (size > 1)
            run.can_split = [True] * len(run.sizes)
            run.dims[base] = tuple(loops)
        dims: list[int | None] = [None] * rank
        for loop, d in zip(run.dims[base], below):
            if d is not None:
                dims[d] = loop
        if set(dims) - {None} != set(range(len(run.sizes))):
            return None
        row = dims[-1]
        again = any(
            i < reader < len(self._equations) and self._equations[reader].primitive in ELEMENTWISE
            for value, loops in run.dims.items()
            if row in loops
            for reader in self.readers.get(value, ())
        )
        if not again:
            return None
        assert row is not None
        (output,) = equation.outputs
        run.can_split[row] = False
        run.dims[output] = tuple(dims[:-1])
        run.rows[output] = row
        run.equations.append(i)
        return run

    def _loops(self, run: Group, i: int) -> dict[int, int] | None:
        """Dims of the output of equation `i` -> loops of the run; None if they do not fit."""
        loops: dict[int, int] = {}
        for base, access in self._sources(i):
            if base not in run.dims:
                continue
            if not is_plain(access):
                return None
            shape = self._equations[i].outputs[0].shape
            for loop, d in zip(run.dims[base], followed(access)):
                if loop is None or not shape:
                    continue
                # A slice that begins at the first element is plain, too.
                if d is None or shape[d] != run.sizes[loop]:
                    return None
                if loops.setdefault(d, loop) != loop:
                    return None
        if len(set(loops.values())) < len(loops):
            return None
        # What the run writes must hold all its loops that can be split, or shards would write copies.
        can_split = {k for k, splits in enumerate(run.can_split) if splits}
        return loops if can_split <= set(loops.values()) else None

    def _only_for(self, run: Group, chosen: Group | None, i: int) -> bool:
        """Returns whether the results of the run have no readers but the run, `chosen` and equation `i`."""
        inside = {i, *run.equations, *(chosen.equations if chosen else ())}
        return all(
            reader in inside
            for value in run.dims
            if self._group_of.get(value) is run
            for reader in self.readers.get(value, ())
        )

    def _is_free(self, run: Group, chosen: Group | None, i: int) -> bool:
        """Returns whether no other operator stands between the run and the other arrays that equation `i` reads."""
        inside = {id(run), id(chosen)}
        merged = [run] if chosen is None else [run, chosen]
        first = min(g.equations[0] for g in merged)
        read = [i]
        if chosen is not None:
            read += (k for g in merged for k in g.equations)
        others = [base for k in read for base, _ in self._sources(k)]
        seen: set[int] = set()
        stack = [g for base in others if (g := self._group_of.get(base)) is not None]
        while stack:
            group = stack.pop()
            if id(group) in inside or id(group) in seen or group.equations[-1] < first:
                continue
            seen.add(id(group))
            for k in group.equations:
                for base, _ in self._sources(k):
                    before = self._group_of.get(base)
                    if before is None:
                        continue
                    if id(before) in inside:
                        return False
                    stack.append(before)
        return True

    def _merge(self, run: Group, other: Group, loops: dict[int, int], mine: dict[int, int]) -> None:
        """Takes `other` into `run`; `loops` and `mine` are their loops of one equation's dims."""
        renamed: dict[int, int] = {}
        for d, loop in mine.items():
            if d in loops:
                renamed[loop] = loops[d]
                splits = run.can_split[loops[d]] and other.can_split[loop]
                run.can_split[loops[d]] = splits
        for loop, size in enumerate(other.sizes):
            if loop not in renamed:
                renamed[loop] = len(run.sizes)
                run.sizes.append(size)
                run.can_split.append(other.can_split[loop])
        for d, loop in mine.items():
            loops.setdefault(d, renamed[loop])
        for value, dims in other.dims.items():
            run.dims[value] = tuple(None if k is None else renamed[k] for k in dims)
            if self._group_of.get(value) is other:
                self._group_of[value] = run
        run.rows |= {value: renamed[loop] for value, loop in other.rows.items()}
        run.equations = sorted([*run.equations, *other.equations])

    def _in_order(self, groups) -> list[Group]:
        """The groups, each after those that it reads, otherwise in the order of the program."""
        alive = {id(self._group_of[v]) for e in self._equations for v in e.outputs}
        waiting = sorted((g for g in groups if id(g) in alive), key=lambda g: g.equations[0])
        done: set[int] = set()
        result: list[Group] = []

        def visit(root: Group) -> None:
            stack = [(root, False)]
            while stack:
                group, ready = stack.pop()
                if id(group) in done:
                    continue
                if ready:
                    done.add(id(group))
                    result.append(group)
                    continue
                stack.append((group, True))
                for k in reversed(group.equations):
                    for base, _ in self._sources(k):
                        before = self._group_of.get(base)
                        if before is not None and before is not group:
                            if id(before) not in done:
                                stack.append((before, False))

        for group in waiting:
            visit(group)
        return result


def operand_step(group: Group, output: Value, shape: tuple[int, ...]) -> Step:
    """The step from the loops of a run to an operand of the equation that writes `output`.

    The operand is a scalar, or has the shape of the output but for dims of size 1, which are repeated.
    """
    return tuple(DimMap(size, loop if size > 1 else None) for size, loop in zip(shape, group.dims[output]))
