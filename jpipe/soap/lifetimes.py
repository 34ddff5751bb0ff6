"""The lifetimes of arrays on devices in a step, for the most memory that a device needs at a time.

An operator that reads parts of other devices gets an array of all that it reads, its own part included. From then on it
is the one that is kept, if no other backward reads the writer's. Its backward computes the gradient by the whole array,
before parts of it are sent back and added up. XLA's programs hold these arrays: for a product of 8,192 x 8,192 numbers
split in four columns, an all-gather of all of them, in the backward a product of the same shape, and the reduce-scatter
of that.

Facts of the machine and its compiler change what is held, and are stated by `jpipe.soap.Machine`:

- `product_item_bytes`: TPUs multiply float32 arrays as bfloat16. The compiler writes an array as bfloat16 if products
  alone read it, and rounds what they receive before it gathers it (`bf16[8192,8192] all-gather` where the program has
  float32). So both take 2 bytes per element. Gradients stay float32.
- `on_chip_bytes`: the compiler leaves arrays that the next operator uses up in the on-chip memory (layouts with
  `S(1)`), as far as they fit, but for messages and arrays of whose parts messages consist. Inputs of the function are
  copied there from the start of the step to their last use (`cross_program_prefetch`), and take room from the others.

What is not known before compiling: the bytes of fragments, how many operators later XLA's scheduler computes the
gradient by a weight (it holds what that reads until then), and whether a mask is written at once, or later from the
float32 array below it. `jpipe.soap.apply` has masks written at once where a function has a derivative rule of its own,
as `jax.nn.relu` has.
"""

from collections.abc import Iterable

from jpipe.soap.graph import PRODUCTS, OperatorGraph


class Lifetimes:
    """The lifetimes of arrays on a device, by positions in the order of the step.

    The forwards of n operators are at 0 to n - 1, and the backwards follow in reverse order, at n to 2 n - 1. The
    updates are at 2 n, after all backwards, as with a clipping of gradients.

    Attributes:
      end: the position of the updates.
      read_by_products: numbers of the tensors that operators write and products alone read, of all forwards and
        derivatives.
    """

    def __init__(self, graph: OperatorGraph):
        self._graph = graph
        self.end = 2 * len(graph.operators)
        self._readers: dict[int, list[int]] = {}
        for i, operator in enumerate(graph.operators):
            for operand in operator.inputs:
                self._readers.setdefault(operand.tensor, []).append(i)
        self.read_by_products = frozenset(
            tensor
            for tensor, readers in self._readers.items()
            if all(graph.operators[i].kind in PRODUCTS for i in readers)
            and graph.tensors[tensor].kept_for != graph.tensors[tensor].producer
            and tensor not in graph.results
        )

    def first_reader(self, tensor: int) -> int:
        """The first operator that reads a tensor."""
        return self._readers[tensor][0]

    def backward(self, operator: int) -> int:
        """The position of a backward."""
        return self.end - 1 - operator

    def value(self, operator: int, tensor: int) -> tuple[int, int]:
        """Lifetime of an operator's result: from its forward to its last reader, or to the backward that needs it.

        An elementwise operator that reads it last writes its own result to the same place.
        """
        operators = self._graph.operators
        kept_for = self._graph.tensors[tensor].kept_for
        if kept_for is not None and operators[kept_for].has_backward:
            return operator, self.backward(kept_for)
        last = max(self._readers.get(tensor, [operator]))
        in_place = operators[last].kind == "elementwise"
        return operator, max(operator, last - in_place)

    def received(self, operator: int, position: int) -> tuple[int, int]:
        """Lifetime of an operand from other devices: from the operator's forward to its backward, if that reads it."""
        reader = self._graph.operators[operator]
        if reader.has_backward and reader.inputs[position].kept:
            return operator, self.backward(operator)
        return operator, operator

    def input(self, reader: int) -> tuple[int, int]:
        """The last position of an input of the function, and the last position at which its first reader needs it."""
        has_backward = self._graph.operators[reader].has_backward
        return self.end, self.backward(reader) if has_backward else reader

    def replaced(self, reader: int, position: int) -> tuple[int, int] | None:
        """The part of the lifetime `value` in which a reader's own array replaces the writer's; None if it never does.

        The reader's array, which is put together of parts from several devices, is the one that its backward reads. If
        no other backward reads the writer's array, it is there until its last reader.
        """
        operators = self._graph.operators
        tensor = operators[reader].inputs[position].tensor
        kept_at = [
            (i, k)
            for i in sorted(set(self._readers[tensor]))
            for k, operand in enumerate(operators[i].inputs)
            if operand.tensor == tensor and operand.kept
        ]
        is_other = any(i != reader for i, _ in kept_at)
        if self._graph.tensors[tensor].kept_for != reader or is_other:
            return None
        # An operator may read it at several positions: the first of them counts.
        if not operators[reader].has_backward or kept_at[:1] != [(reader, position)]:
            return None
        return max(self._readers[tensor]) + 1, self.backward(reader)

    def gradient(self, operator: int, tensor: int) -> tuple[int, int] | None:
        """Lifetime of the gradient by a result: from the first backward that adds to it to the backward that reads it;
        None without a gradient.

        The gradient by a result of the whole function is there for the backward that reads it. An elementwise backward
        writes its results to the place of what it reads, which is therefore not held beside them.
        """
        readers = self._readers.get(tensor, [operator])
        differentiated = self._differentiated(readers)
        if not differentiated or not self._graph.operators[operator].has_backward:
            return None
        first, last = self.backward(max(differentiated)), self.backward(operator)
        in_place = self._graph.operators[operator].kind == "elementwise"
        return first, max(first, last - in_place)

    def weight_gradient(self, weight: int) -> tuple[int, int]:
        """Lifetime of the gradient by a weight: from the first backward that adds to it to the updates."""
        readers = [i for i, _ in self._graph.readers_of_weight[weight]]
        return self.backward(max(readers)), self.end

    def _differentiated(self, operators: Iterable[int]) -> list[int]:
        """The operators, out of some, that have a backward."""
        return [i for i in operators if self._graph.operators[i].has_backward]
