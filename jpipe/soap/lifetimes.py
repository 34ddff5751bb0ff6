"""How long devices hold what a step computes: for the most memory that they need at a time."""

from collections.abc import Iterable
from typing import NamedTuple

from jpipe.soap.graph import OperatorGraph


class Held(NamedTuple):
    """Bytes that a device holds for a part of the step.

    Attributes:
      device: the device.
      first, last: positions in the order of the step: see `Lifetimes`.
      num_bytes: the bytes.
    """

    device: int
    first: int
    last: int
    num_bytes: int


class Lifetimes:
    """How long a device holds what the step computes, by positions in its order.

    The forwards of n operators are at 0 to n - 1, and the backwards follow in reverse order, at n to 2 n - 1. The updates are at
    2 n, after all backwards, as with a clipping of gradients.

    Attributes:
      end: the position of the updates.
    """

    def __init__(self, graph: OperatorGraph):
        self._graph = graph
        self.end = 2 * len(graph.operators)
        self._readers: dict[int, list[int]] = {}
        for i, operator in enumerate(graph.operators):
            for each in operator.inputs:
                self._readers.setdefault(each.tensor, []).append(i)

    def first_reader(self, tensor: int) -> int:
        """The first operator that reads a tensor."""
        return self._readers[tensor][0]

    def backward(self, operator: int) -> int:
        """The position of a backward."""
        return self.end - 1 - operator

    def value(self, operator: int, tensor: int) -> tuple[int, int]:
        """Of what an operator writes: from its forward to its last reader, or to the last backward for which it is kept."""
        last = max(self._readers.get(tensor, [operator]))
        kept_for = self._graph.tensors[tensor].kept_for
        if kept_for is not None and self._graph.operators[kept_for].has_backward:
            last = self.backward(kept_for)
        return operator, last

    def received(self, operator: int, position: int) -> tuple[int, int]:
        """Of what an operator gets from other devices: from its forward to its backward, if that reads it."""
        each = self._graph.operators[operator]
        if each.has_backward and each.inputs[position].kept:
            return operator, self.backward(operator)
        return operator, operator

    def gradient(self, operator: int, tensor: int) -> tuple[int, int] | None:
        """Of the gradient by a result: from the first backward that adds to it to the backward that reads it; None: there is none.

        The gradient by a result of the whole function is there for the backward that reads it. An elementwise backward writes its results to the place of what it reads, which is therefore not held beside them.
        """
        readers = self._readers.get(tensor, [operator])
        differentiated = self._differentiated(readers)
        if not differentiated or not self._graph.operators[operator].has_backward:
            return None
        first, last = self.backward(max(differentiated)), self.backward(operator)
        in_place = self._graph.operators[operator].kind == "elementwise"
        return first, max(first, last - in_place)

    def weight_gradient(self, weight: int) -> tuple[int, int]:
        """Of the gradient by a weight: from the first backward that adds to it to the updates."""
        readers = [i for i, _ in self._graph.readers_of_weight[weight]]
        return self.backward(max(readers)), self.end

    def _differentiated(self, operators: Iterable[int]) -> list[int]:
        """Those of some operators that have a backward."""
        return [i for i in operators if self._graph.operators[i].has_backward]
