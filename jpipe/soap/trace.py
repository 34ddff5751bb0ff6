"""The operator graph of a JAX function."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpipe._util.warn import warn
from jpipe.soap.flatten import FlatEquation, FlatProgram, Value, flatten, item_bytes
from jpipe.soap.fuse import Fusion, Group, Refs, operand_step
from jpipe.soap.graph import (
    ATTRIBUTE,
    PRODUCTS,
    SAMPLE,
    Input,
    Operator,
    OperatorGraph,
    Tensor,
    with_kinds,
)
from jpipe.soap.regions import Access, followed, identity, plain
from jpipe.soap.residuals import residuals_of
from jpipe.soap.rules import ELEMENTWISE, RANDOM, RULES, Nest, unsplittable, views


def trace(
    function: Callable[..., Any],
    weights: Any,
    *inputs: Any,
    backward: bool = True,
    max_equations: int = 4000,
) -> OperatorGraph:
    """Traces a function into operators that can be split.

    Calls are inlined and loops (`lax.scan`) unrolled. Elementwise equations that follow each other are one operator.
    Transposes, reshapes, slices, broadcasts and casts of weights are no operators: they say which elements an operator
    reads.

    Args:
      function: the function from `(weights, *inputs)` to outputs, for training usually a loss. It is traced, not run.
      weights: a pytree of arrays or of `jax.ShapeDtypeStruct`.
      inputs: pytrees of the same. The first dim of the first leaf counts samples, and so does the first dim of every
        other leaf that has the same size.
      backward: whether the graph is of a training step: gradients with respect to `weights`, and their sums.
      max_equations: about how many equations a loop may be unrolled into. Of a longer one, each unrolled turn stands
        for several.

    Returns:
      An `OperatorGraph`.

    Raises:
      ValueError: if the function has no operator.

    Warns:
      UserWarning: once, with the names of all primitives without a rule. Their operators are not split.
    """
    closed = jax.make_jaxpr(function)(weights, *inputs)
    program = flatten(closed, max_equations)
    paths, _ = jax.tree_util.tree_flatten_with_path(weights)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    graph = _GraphBuilder(program, names, backward).build()
    if not graph.operators:
        raise ValueError(
            "the function has no operator: its results do not depend on arithmetic of its arguments, so there is "
            "nothing to split. Pass a function that computes, such as a loss."
        )
    return graph


@dataclasses.dataclass(frozen=True)
class Member:
    """An equation of an operator, and the parts of its arrays that a shard has.

    Attributes:
      equation: the equation.
      reads: per input, the box of it that a box of the operator's loops needs.
      writes: per output and dim, the loop that it follows, or None.
      inner: per input, if another equation of the operator computes it: that value, and per dim of that value the dim
        of the input that it becomes, or None.
      tensors: per input, number of the graph's tensor that it is or shows; None if it is none.
      sources: per input, the result of an equation that it is or shows, and which box of that a box of it needs.
    """

    equation: FlatEquation
    reads: tuple[Access, ...]
    writes: tuple[tuple[int | None, ...], ...]
    inner: tuple[tuple[Value, list[int | None]] | None, ...]
    tensors: tuple[int | None, ...]
    sources: tuple[tuple[Value, Access], ...]

    @property
    def primitive(self) -> str:
        return self.equation.primitive


class _GraphBuilder:
    def __init__(self, program: FlatProgram, names: Sequence[str], backward: bool):
        self._program = program
        self._backward = backward
        self._names = names
        self._tensors: list[Tensor] = []
        self._number: dict[Value, int] = {}
        self._refs: dict[Value, tuple[Value, Access]] = {}
        self._is_weight: set[Value] = set()
        self._unknown: dict[str, None] = {}
        self._repeats: dict[Value, int] = {}  # how often its operator runs

    def build(self) -> OperatorGraph:
        equations = self._resolve()
        refs: Refs = self._refs
        fusion = Fusion(equations, refs, self._program.results)
        operators: list[Operator] = []
        counts: dict[str, int] = {}
        for group in fusion.groups:
            given = equations, len(operators), counts, fusion.readers
            operators.append(self._operator(group, *given))
        if self._unknown:
            warn(
                f"no rule for {', '.join(self._unknown)}: such operators are not split, and one device reads all of "
                "their inputs. Add a rule to `jpipe.soap.rules.RULES` to split them."
            )
        results = [self._number[base] for value in self._program.results if (base := refs[value][0]) in self._number]
        _mark_samples(operators, self._tensors)
        if self._backward:
            self._keep_residuals(operators)
        return OperatorGraph(operators, self._tensors, results)

    def _keep_residuals(self, operators: list[Operator]) -> None:
        """Marks the arrays that the backwards read."""
        chosen = residuals_of(
            [[m.equation for m in operator.equations] for operator in operators],
            self._refs,
            [v for v in self._is_weight if self._tensors[self._number[v]].has_gradient],
        )
        inside: dict[int, list[int]] = {}
        dims_of = {
            value: (i, dims)
            for i, operator in enumerate(operators)
            for member in operator.equations
            for value, dims in zip(member.equation.outputs, member.writes)
        }
        for value, reader in chosen.kept_for.items():
            number = self._number.get(value)
            if number is None:  # the operator keeps it for itself
                like = chosen.masks[value].outputs[0] if value in chosen.masks else value
                producer, dims = dims_of[like]
                number = len(self._tensors)
                tensor = Tensor(value.shape, item_bytes(value.dtype), producer, tuple(dims))
                self._tensors.append(tensor)
                inside.setdefault(producer, []).append(number)
            self._tensors[number] = dataclasses.replace(self._tensors[number], kept_for=reader)
        for i, operator in enumerate(operators):
            numbers = {self._number[v] for v in chosen.reads[i] if v in self._number}
            inputs = tuple(dataclasses.replace(operand, kept=operand.tensor in numbers) for operand in operator.inputs)
            operators[i] = dataclasses.replace(operator, inputs=inputs, residuals=tuple(inside.get(i, ())))

    def _resolve(self) -> list[FlatEquation]:
        """The equations that compute something; everything else becomes a reference."""
        batch_size = None
        for i, value in enumerate(self._program.arguments):
            weight = i < len(self._names)
            floating = jnp.issubdtype(value.dtype, jnp.inexact)
            samples = [False] * len(value.shape)
            if not weight and value.shape:
                batch_size = value.shape[0] if batch_size is None else batch_size
                samples[0] = value.shape[0] == batch_size
            if weight:
                self._is_weight.add(value)
            self._number[value] = len(self._tensors)
            self._tensors.append(
                Tensor(
                    value.shape,
                    item_bytes(value.dtype),
                    weight=self._names[i] if weight else None,
                    has_gradient=weight and floating and self._backward,
                    samples=tuple(samples),
                )
            )
            self._refs[value] = value, (identity(value.shape),)
        kept = []
        for equation in self._program.equations:
            for value in equation.inputs:
                self._refs.setdefault(value, (value, (identity(value.shape),)))
            if equation.primitive in RANDOM:
                for value in equation.outputs:
                    value.constant = True
            accesses = self._view(equation)
            for i, value in enumerate(equation.outputs):
                if accesses is None:
                    self._refs[value] = value, (identity(value.shape),)
                else:
                    base, access = self._refs[equation.inputs[min(i, len(equation.inputs) - 1)]]
                    value.constant = value.constant or base.constant
                    self._refs[value] = base, (*accesses[i], *access)
            is_constant = all(value.constant for value in equation.outputs)
            if accesses is None and not is_constant:
                kept.append(equation)
        for value in self._program.results:
            self._refs.setdefault(value, (value, (identity(value.shape),)))
        return kept

    def _view(self, equation: FlatEquation) -> Sequence[Access] | None:
        if not equation.inputs or not equation.outputs:
            return None
        if equation.primitive in ("convert_element_type", "copy", "reduce_precision"):
            base, _ = self._refs[equation.inputs[0]]
            if base in self._is_weight:  # a cast of a weight is made where it is read
                return [(identity(equation.outputs[0].shape),)]
            return None
        return views(equation)

    def _operator(
        self,
        group: Group,
        equations: Sequence[FlatEquation],
        number: int,
        counts: dict[str, int],
        readers: dict[Value, list[int]],
    ) -> Operator:
        nest, members = self._run(group, equations) if group.is_run else self._single(equations[group.equations[0]])
        first = members[0].equation
        repeats = first.repeats
        inputs: dict[tuple[Value, Access], None] = {}
        for member in members:
            triples = zip(member.equation.inputs, member.reads, member.inner)
            for value, access, inner in triples:
                base, below = self._refs[value]
                if inner is None and base in self._number:
                    inputs[base, (*access, *below)] = None
        # A stack reads every turn's value.
        most = math.inf if first.primitive == "stack_turns" else repeats
        read = [
            Input(self._number[base], access, int(min(self._repeats.get(base, 1), most))) for base, access in inputs
        ]
        written = {loop for dims in nest.writes for loop in dims}
        loops = with_kinds(
            nest.sizes,
            [loop in written for loop in range(len(nest.sizes))],
            nest.can_split,
            read,
            self._tensors,
        )
        differentiable = sum(self._tensors[operand.tensor].has_gradient for operand in read)
        kind = "elementwise" if group.is_run else first.primitive
        factor = float(differentiable if kind in PRODUCTS else min(differentiable, 2))
        outputs = []
        results = (v for member in members for v in member.equation.outputs)
        for value, dims in zip(results, nest.writes):
            if set(group.equations).issuperset(readers.get(value, ())):
                continue
            floating = jnp.issubdtype(value.dtype, jnp.inexact)
            self._number[value] = len(self._tensors)
            self._repeats[value] = repeats
            outputs.append(len(self._tensors))
            samples = tuple(d is not None and loops[d].samples for d in dims)
            self._tensors.append(
                Tensor(
                    value.shape,
                    item_bytes(value.dtype),
                    number,
                    tuple(dims),
                    has_gradient=floating and differentiable > 0,
                    samples=samples,
                )
            )
        if not any(self._tensors[t].has_gradient for t in outputs):
            factor = 0.0
        counts[kind] = counts.get(kind, 0) + 1
        return Operator(
            name=f"{kind}_{counts[kind] - 1}",
            kind=kind,
            loops=loops,
            inputs=tuple(read),
            outputs=tuple(outputs),
            flops_per_point=nest.flops,
            backward_factor=factor,
            repeats=repeats,
            equations=members,
        )

    def _single(self, equation: FlatEquation) -> tuple[Nest, list[Member]]:
        rule = RULES.get(equation.primitive)
        if rule is None:
            if equation.primitive not in ELEMENTWISE:
                self._unknown.setdefault(f"`{equation.primitive}`")
            rule = unsplittable
        nest = rule(equation)
        nothing = (None,) * len(equation.inputs)
        member = self._member(equation, nest.reads, nest.writes, nothing)
        return nest, [member]

    def _member(self, equation: FlatEquation, reads: Any, writes: Any, inner: Any) -> Member:
        sources = tuple(self._refs[value] for value in equation.inputs)
        tensors = tuple(self._number.get(base) for base, _ in sources)
        return Member(
            equation,
            tuple(reads),
            writes,
            inner=tuple(inner),
            tensors=tensors,
            sources=sources,
        )

    def _run(self, group: Group, equations: Sequence[FlatEquation]) -> tuple[Nest, list[Member]]:
        members, work = [], 0
        made: set[Value] = set()
        for k in group.equations:
            equation = equations[k]
            (output,) = equation.outputs
            steps = [operand_step(group, output, v.shape) for v in equation.inputs]
            if output in group.rows:
                loops = (*group.dims[output], group.rows[output])
                steps = [plain(value.shape, loops) for value in equation.inputs]
            inner = [
                (base, followed(below)) if base in made else None
                for base, below in (self._refs[value] for value in equation.inputs)
            ]
            reads, writes = ((step,) for step in steps), (group.dims[output],)
            members.append(self._member(equation, reads, writes, inner))
            made.add(output)
            work += math.prod((equation.inputs or equation.outputs)[0].shape)
        points = math.prod(group.sizes)
        nest = Nest(
            tuple(group.sizes),
            tuple(group.can_split),
            (),
            tuple(dims for member in members for dims in member.writes),
            work / points if points else 0.0,
        )
        return nest, members


def _mark_samples(operators: list[Operator], tensors: list[Tensor]) -> None:
    """Propagates the sample kind backwards: a loop is a sample loop if a later operator reads it as one.

    A recurrent state that begins with zeros has rows too, which its first operator does not show.
    """
    for i in reversed(range(len(operators))):
        for operand in operators[i].inputs:
            tensor = tensors[operand.tensor]
            if tensor.producer is None:
                continue
            producer = operators[tensor.producer]
            loops = list(producer.loops)
            for dim, loop in zip(tensor.writes, followed(operand.access)):
                if loop is None or dim is None or not operators[i].loops[loop].samples:
                    continue
                if loops[dim].kind == ATTRIBUTE:
                    loops[dim] = dataclasses.replace(loops[dim], kind=SAMPLE, samples=True)
            operators[tensor.producer] = dataclasses.replace(producer, loops=tuple(loops))
            samples = tuple(d is not None and loops[d].samples for d in tensor.writes)
            tensors[operand.tensor] = dataclasses.replace(tensor, samples=samples)
