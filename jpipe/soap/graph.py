"""The operator graph, which a strategy splits, without JAX.

An operator is a nest of loops, as an einsum is: a matrix product has a loop per row, per column and per term of the
sum. Every dim of what it reads and writes follows loops. To split an operator is to give each loop a degree; a shard is
one part of every loop.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jpipe.soap.regions import Access, followed

SAMPLE, ATTRIBUTE, PARAMETER, REDUCTION = "S", "A", "P", "R"
KINDS = {
    SAMPLE: "sample",
    ATTRIBUTE: "attribute",
    PARAMETER: "parameter",
    REDUCTION: "reduction",
}
PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
"""Kinds of operators that multiply and add up, whose backward does so once per operand with a gradient."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of an operator.

    Attributes:
      size: number of turns.
      kind: "S" if it runs over the samples of a batch; "P" if it splits a weight, "A" if not; "R" if it is not a dim of
        the output, so that shards hold partial results, which have to be added up.
      samples: whether it runs over samples, which a loop of kind "R" may do too.
      can_split: whether it may have a degree above 1.
    """

    size: int
    kind: str
    samples: bool = False
    can_split: bool = True


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array between operators, a weight, or an input of the function.

    Attributes:
      shape: its shape.
      item_bytes: bytes per element.
      producer: the operator that writes it; None for weights, inputs and constants.
      writes: per dim, the loop of the producer that it follows, or None.
      weight: name of the weight; None if it is none.
      has_gradient: whether the backward computes its gradient.
      samples: per dim, whether it counts samples.
      kept_for: the first operator whose backward reads it, or computes again from it what it reads; None: no backward
        does.
    """

    shape: tuple[int, ...]
    item_bytes: int
    producer: int | None = None
    writes: tuple[int | None, ...] = ()
    weight: str | None = None
    has_gradient: bool = False
    samples: tuple[bool, ...] = ()
    kept_for: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor that an operator reads.

    Attributes:
      tensor: number of the tensor.
      access: the box of the tensor that a box of loops needs.
      repeats: the number of times that the box is sent: an operator that repeats reads a new value each time.
      kept: whether the backward reads it, or computes again from it what it reads.
    """

    tensor: int
    access: Access
    repeats: int = 1
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
      name: unique in the graph.
      kind: "dot_general", "conv_general_dilated", "elementwise", "gather", ...
      loops: its loops.
      inputs: the tensors that it reads. Constants are left out.
      outputs: numbers of the tensors that it writes.
      flops_per_point: FLOPs of one turn of the innermost loop in the forward.
      backward_factor: FLOPs of the backward divided by those of the forward; 0 without a backward.
      repeats: the number of times that it runs one after the other, as the body of a loop does.
      equations: the traced equations, for measuring and executing; see `jpipe.soap.trace`.
      residuals: numbers of tensors that it computes for itself and keeps for the backward.
    """

    name: str
    kind: str
    loops: tuple[Loop, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[int, ...]
    flops_per_point: float
    backward_factor: float = 0.0
    repeats: int = 1
    equations: Any = dataclasses.field(default=None, repr=False, compare=False)
    residuals: tuple[int, ...] = ()

    @property
    def has_backward(self) -> bool:
        return self.backward_factor > 0

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        points = math.prod(loop.size for loop in self.loops)
        return self.flops_per_point * points * self.repeats


@dataclasses.dataclass(frozen=True)
class OperatorGraph:
    """Operators in an order in which they can run, and the tensors between them.

    Attributes:
      operators: the operators; every operator reads results of earlier ones.
      tensors: all tensors.
      results: numbers of the tensors that the function returns.
    """

    operators: Sequence[Operator]
    tensors: Sequence[Tensor]
    results: Sequence[int] = ()

    @functools.cached_property
    def edges(self) -> list[tuple[int, int, int]]:
        """`(producer, consumer, position of the input)` of each input that another operator writes."""
        return [
            (source, i, position)
            for i, operator in enumerate(self.operators)
            for position, operand in enumerate(operator.inputs)
            if (source := self.tensors[operand.tensor].producer) is not None
        ]

    @functools.cached_property
    def weights(self) -> list[int]:
        """Numbers of the tensors that are weights and that an operator reads."""
        return sorted(self.readers_of_weight)

    @functools.cached_property
    def readers_of_weight(self) -> Mapping[int, list[tuple[int, int]]]:
        """Weight -> `(operator, position of the input)` of each use."""
        readers: dict[int, list[tuple[int, int]]] = {}
        for i, operator in enumerate(self.operators):
            for position, operand in enumerate(operator.inputs):
                if self.tensors[operand.tensor].weight is not None:
                    readers.setdefault(operand.tensor, []).append((i, position))
        return readers

    @functools.cached_property
    def is_chain(self) -> bool:
        """True if every operator reads the result of the one before, and nothing older."""
        return all(source == i - 1 for source, i, _ in self.edges) and len({i for _, i, _ in self.edges}) == max(
            len(self.operators) - 1, 0
        )

    def weights_of(self, operator: int) -> list[str]:
        """Names of the weights that an operator reads."""
        tensors = [self.tensors[operand.tensor] for operand in self.operators[operator].inputs]
        return [tensor.weight for tensor in tensors if tensor.weight is not None]

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of a forward and a backward."""
        return sum(operator.flops * (1 + operator.backward_factor) for operator in self.operators)


def with_kinds(
    sizes: Sequence[int],
    in_output: Sequence[bool],
    can_split: Sequence[bool],
    inputs: Sequence[Input],
    tensors: Sequence[Tensor],
) -> tuple[Loop, ...]:
    """Loops whose kinds follow from the arrays that they walk through.

    Args:
      sizes: turns of each loop.
      in_output: whether a dim of an output follows the loop.
      can_split: whether it may be split.
      inputs: the tensors that the operator reads.
      tensors: all tensors.
    """
    samples = [False] * len(sizes)
    splits_weight = [False] * len(sizes)
    for operand in inputs:
        tensor = tensors[operand.tensor]
        for dim, loop in enumerate(followed(operand.access)):
            if loop is None:
                continue
            if tensor.samples and tensor.samples[dim]:
                samples[loop] = True
            if tensor.weight is not None and tensor.shape[dim] > 1:
                splits_weight[loop] = True
    return tuple(
        Loop(
            size,
            REDUCTION if not inside else SAMPLE if sample else PARAMETER if weight else ATTRIBUTE,
            sample,
            splits and size > 1,
        )
        for size, inside, splits, sample, weight in zip(sizes, in_output, can_split, samples, splits_weight)
    )
