"""Chooses the values of forwards that are kept for backwards: as few bytes as possible.

The derivative of an equation reads some of its operands and results. Which values a device has to keep for that does
not follow from
one equation: compilers compute elementwise results again where a backward reads them, as a part of the operator that
reads them. The softmax of scores is kept once, as the scores, and the maximum of a product and a constant as the
product.

So the kept values are a minimum cut, as those of a pipeline's forward are (`jpipe.layers.residuals`): the values with
the least bytes from which elementwise equations compute all that the derivatives read. Weights and inputs of the
function are there anyway. What is read by a primitive that compilers do not fuse with others, such as a pooling or a
sort, is kept as it is. So is the mask of a function with a derivative rule of its own, as `jax.nn.relu`:
`jpipe.soap.apply` has it computed together with the result.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jpipe.layers.cut import SINK, SOURCE, Network
from jpipe.soap.flatten import FlatEquation, Value, item_bytes
from jpipe.soap.fuse import Refs
from jpipe.soap.rules import ELEMENTWISE

_LINEAR = frozenset(
    """add add_any complex concatenate conj convert_element_type copy copy_p cumsum imag neg pad real
    reduce_precision reduce_sum reduce_window_sum stack stack_turns sub""".split()
)
"""Their derivatives read nothing."""

_FROM_RESULT = frozenset("exp exp2 expm1 logistic sqrt tan tanh".split())
"""Their derivatives read the result alone."""

_MASKED = frozenset("abs clamp max min".split())
"""Their derivatives read a mask: a byte per element."""

_FIRST_INDEX = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}
"""Their derivatives read the operands from this one on, which are indices."""

_FUSED = {"conv_general_dilated", "dot_general", *ELEMENTWISE} | {
    f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum")
}
"""Primitives that may compute an elementwise operand as a part of themselves."""


@dataclasses.dataclass(frozen=True)
class KeptValues:
    """The values that are kept for backwards.

    Attributes:
      kept_for: each kept value, and the first operator whose backward reads it or what is computed from it.
      reads: per operator, the values of other operators that its backward reads or computes something from.
      masks: kept masks -> the equation whose result has their shape.
    """

    kept_for: Mapping[Value, int]
    reads: Sequence[set[Value]]
    masks: Mapping[Value, FlatEquation]


def residuals_of(operators: Sequence[Sequence[FlatEquation]], refs: Refs, weights: Iterable[Value]) -> KeptValues:
    """Chooses the values that are kept for the backwards of operators.

    Args:
      operators: the equations of each, in an order in which they can run.
      refs: see `Refs`.
      weights: the weights whose gradients are computed.
    """
    analysis = _Analysis(refs, weights)
    for equations in operators:
        analysis.add(equations)
    return analysis.result()


def derivative_reads(equation: FlatEquation, differentiated: Sequence[bool]) -> tuple[list[Value], bool]:
    """The values that the derivative of an equation reads.

    Args:
      equation: the equation whose results have gradients.
      differentiated: whether each operand has a gradient.

    Returns:
      The operands and results, and whether it reads a mask that follows from the operands.
    """
    name, inputs = equation.primitive, equation.inputs
    if name in _LINEAR:
        return [], False
    if name in _FROM_RESULT:
        return list(equation.outputs), False
    if name in _MASKED:
        return [], True
    if name in _FIRST_INDEX:
        return inputs[_FIRST_INDEX[name] :], False
    if name == "select_n":
        return inputs[:1], False
    if name in ("mul", "dot_general", "conv_general_dilated"):
        first, second = differentiated
        return [v for v, read in zip(inputs, (second, first)) if read], False
    if name == "div":
        return inputs[0 if differentiated[1] else 1 :], False
    if name in ("reduce_window_max", "reduce_window_min"):
        return inputs[:1], False
    if name in ELEMENTWISE:
        return list(inputs), False
    return [*inputs, *equation.outputs], False


class _Analysis:
    """The values of a program, and which of them are read."""

    def __init__(self, refs: Refs, weights: Iterable[Value]):
        self._refs = refs
        self._has_gradient = set(weights)
        self._operator: dict[Value, int] = {}
        self._bytes: dict[Value, int] = {}
        # Value -> the values from which it is computed again; None: it is not.
        self._sources: dict[Value, list[Value] | None] = {}
        self._masks: dict[Value, FlatEquation] = {}
        self._read: list[dict[Value, None]] = []

    def add(self, equations: Sequence[FlatEquation]) -> None:
        """Adds an operator."""
        self._read.append({})
        for equation in equations:
            self._add(equation)

    def _base(self, value: Value) -> Value:
        return self._refs[value][0] if value in self._refs else value

    def _add(self, equation: FlatEquation) -> None:
        bases = [self._base(value) for value in equation.inputs]
        operands = [base for base in bases if base in self._sources]
        is_cheap = equation.primitive in ELEMENTWISE
        for value in equation.outputs:
            self._place(value, equation, operands if is_cheap else None)
        differentiated = [base in self._has_gradient for base in bases]
        results = [v for v in equation.outputs if jnp.issubdtype(v.dtype, jnp.inexact)]
        if not any(differentiated) or not results:
            return
        self._has_gradient.update(results)
        read = self._read[-1]
        values, is_masked = derivative_reads(equation, differentiated)
        for base in map(self._base, values):
            if base in self._sources:
                read[base] = None
                if equation.primitive not in _FUSED:
                    self._sources[base] = None
        if is_masked and operands:
            mask = Value(equation.outputs[0].shape, np.dtype(bool))
            is_cheap = not equation.in_custom_jvp
            self._place(mask, equation, operands if is_cheap else None)
            self._masks[mask] = equation
            read[mask] = None

    def _place(self, value: Value, equation: FlatEquation, sources: list[Value] | None) -> None:
        self._sources[value] = sources
        self._operator[value] = len(self._read) - 1
        num_bytes = math.prod(value.shape) * item_bytes(value.dtype)
        self._bytes[value] = num_bytes * equation.repeats

    def result(self) -> KeptValues:
        """The kept values, and their readers."""
        kept = self._cut()
        kept_for: dict[Value, int] = {}
        reads: list[set[Value]] = []
        for operator, read in enumerate(self._read):
            for value in self._back_to(read, kept.__contains__):
                kept_for.setdefault(value, operator)

            def is_elsewhere(value: Value, operator: int = operator) -> bool:
                return self._operator[value] != operator

            ends = self._back_to(read, lambda v: v in kept or is_elsewhere(v))
            reads.append({value for value in ends if is_elsewhere(value)})
        masks = {mask: self._masks[mask] for mask in kept_for if mask in self._masks}
        return KeptValues(kept_for, reads, masks)

    def _back_to(self, values: Iterable[Value], is_end: Callable[[Value], bool]) -> set[Value]:
        """The ends that a walk back from `values` reaches."""
        ends: set[Value] = set()
        seen = set(values)
        waiting = list(seen)
        while waiting:
            value = waiting.pop()
            if is_end(value):
                ends.add(value)
                continue
            sources = self._sources[value]
            assert sources is not None, "what nothing computes again is kept"
            new = [source for source in sources if source not in seen]
            seen.update(new)
            waiting += new
        return ends

    def _cut(self) -> set[Value]:
        kept: set[Value] = set()
        read = {value for values in self._read for value in values}
        for part in self._parts(read):
            network = Network()
            for value in part:
                sources = self._sources[value]
                if sources is None:
                    network.connect(SOURCE, (value, "in"))
                for source in sources or ():
                    network.connect((source, "out"), (value, "in"))
                network.connect((value, "in"), (value, "out"), self._bytes[value])
                if value in read:
                    network.connect((value, "out"), SINK)
            after = network.sink_side()
            kept.update(v for v in part if (v, "out") in after and (v, "in") not in after)
        return kept

    def _parts(self, read: Iterable[Value]) -> list[list[Value]]:
        """The values from which `read` is computed, in parts without common values."""
        above: dict[Value, Value] = {}

        def root(value: Value) -> Value:
            while above.setdefault(value, value) is not value:
                above[value] = above[above[value]]
                value = above[value]
            return value

        waiting = list(read)
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            for source in self._sources[value] or ():
                above[root(source)] = root(value)
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        parts: dict[Value, list[Value]] = {}
        for value in self._sources:  # in the order of the program
            if value in seen:
                parts.setdefault(root(value), []).append(value)
        return list(parts.values())
