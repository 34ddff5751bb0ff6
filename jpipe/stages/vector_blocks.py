"""Updates that work element by element, on blocks of flat vectors.

Stages of unlike layers keep most weights in flat vectors (`jpipe.packing`), and each shape would get a
loop of its own in the compiled update. An update such as Adam's does not depend on the shape. So leaves
that follow each other in every vector that their update reads and writes are updated as one vector, in
blocks of one size. Stages of unlike size have blocks of the same size, so that one loop updates them all
(`jpipe.stages.stage_update`): the last block of a vector may begin before the end of the block in front of
it, and keeps the numbers that this one has updated. If an optimizer treats neighbours differently, such as
kernels and biases under a mask, each is a vector of its own here.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.layers.elementwise import ELEMENTWISE
from jpipe.layers.equations import Equations, bind, value_of
from jpipe.packing import Place
from jpipe.stages.vocabulary import PartedLeaf


class PackedLeaf(NamedTuple):
    """One input or output of an update, in packed arrays.

    Attributes:
      arrays: "parameters", "gradients", "optimizer_state", or a pass whose weights a hook gives.
      copies: `(place, row)` of each copy; several if tied.
      parted: the split of a leaf whose parts are there, if the update takes the whole; None: it takes the part.
    """

    arrays: str
    copies: Sequence[tuple[Place, int]]
    parted: PartedLeaf | None = None

    def layout(self) -> tuple:
        """The facts that the leaves of one group share."""
        return self.arrays, self.parted, tuple(place.array for place, _ in self.copies)

    def starts(self) -> tuple[int, ...]:
        """The first index of each copy."""
        return tuple(int(place.start(row)) for place, row in self.copies)

    def chunk(self, number: int, num_chunks: int) -> "PackedLeaf":
        """Chunk `number` of each copy."""
        copies = [(place.chunk(row, number, num_chunks), 0) for place, row in self.copies]
        return PackedLeaf(self.arrays, copies)

    def block(self, start: int, size: int) -> "PackedLeaf":
        """`size` numbers of each copy, from number `start` on. The leaf is in vectors."""
        copies = [
            (Place(place.array, first + start, 0, 1, (size,), flat=True), 0)
            for (place, _), first in zip(self.copies, self.starts())
        ]
        return PackedLeaf(self.arrays, copies)


class PackedPart(NamedTuple):
    """A part of an update that runs alone.

    Attributes:
      equations: `(*inputs, *shared) -> outputs`.
      inputs: the places of the inputs.
      outputs: the places of the outputs.
      kept: numbers of kept elements at the start and at the end of each output: those that a part before
        this one has updated, and padding.
    """

    equations: Equations
    inputs: Sequence[PackedLeaf]
    outputs: Sequence[PackedLeaf]
    kept: tuple[int, int] = (0, 0)

    @property
    def leaves(self) -> list[PackedLeaf]:
        return [*self.inputs, *self.outputs]

    def layout(self) -> tuple:
        """The places that the part reads and writes, without the indices."""
        return (
            tuple(leaf.layout() for leaf in self.inputs),
            tuple(leaf.layout() for leaf in self.outputs),
        )


class _Vector(NamedTuple):
    """Leaves that follow each other in every array, and that one program updates element by element.

    Attributes:
      kind: vectors of one kind can be updated in the same loop.
      first: the part of the first leaf.
      size: numbers of all leaves.
    """

    kind: tuple
    first: PackedPart
    size: int

    def arrays(self) -> set[tuple[str, str]]:
        """`(arrays, name)` of each packed array that the vector is in."""
        return _arrays(self.first)


def in_blocks(
    updates: Sequence[Sequence[PackedPart]],
    size: int,
    *,
    equal: bool,
    whole: Mapping[tuple[str, str], int] | None = None,
) -> list[list[PackedPart]]:
    """Replaces parts that work element by element on vectors by blocks.

    Args:
      updates: the parts of the updates of all stages.
      size: the most numbers of a block.
      equal: whether blocks of vectors of unlike size have one size. The last block of a vector then overlaps the one
        before. Else the last block has the rest.
      whole: `(arrays, name)` -> size of each packed vector. If there is nothing else in all the packed vectors that a
        vector is in, it is one block, with the padding behind it: it is read and written in place. None: no
        vector is.
    """
    cut = [_vectors(parts) for parts in updates]
    sizes: dict[tuple, list[int]] = {}
    for _, vectors in cut:
        for vector in vectors:
            sizes.setdefault(vector.kind, []).append(vector.size)

    def blocks(vector: _Vector, num_in: Mapping) -> Iterator[PackedPart]:
        alone = all(num_in[array] == 1 for array in vector.arrays())
        padded = _padded_size(vector, whole or {})
        if alone and padded is not None:
            return iter([_whole(vector, padded)])
        if not equal:
            return _blocks(vector, size)
        return _equal_blocks(vector, min(size, _equal_size(sizes[vector.kind])))

    result = []
    for kept, vectors in cut:
        users = [_arrays(part) for part in kept] + [v.arrays() for v in vectors]
        num_in = collections.Counter(itertools.chain.from_iterable(users))
        result.append([*kept, *(part for v in vectors for part in blocks(v, num_in))])
    return result


_MOST_PADDED = 2
"""How many times as large as a vector its packed vector may be, so that updating the padding takes less time than
blocks.
"""


def _padded_size(vector: _Vector, sizes: Mapping[tuple[str, str], int]) -> int | None:
    """Common size of the packed vectors that begin with this vector, or None.

    Args:
      vector: the vector.
      sizes: see `whole` of `in_blocks`.
    """
    common_sizes = {sizes.get(array) for array in vector.arrays()}
    first = all(i == 0 for leaf in vector.first.leaves for i in leaf.starts())
    size = common_sizes.pop()
    if common_sizes or size is None or not first or size > _MOST_PADDED * vector.size:
        return None
    return size


def _arrays(part: PackedPart) -> set[tuple[str, str]]:
    """`(arrays, name)` of each packed array that a part reads or writes."""
    return {(leaf.arrays, place.array) for leaf in part.leaves for place, _ in leaf.copies}


def _vectors(parts: Sequence[PackedPart]) -> tuple[list[PackedPart], list[_Vector]]:
    """The parts of an update that are no vectors, and the vectors."""
    kept: list[PackedPart] = []
    alike: dict[tuple, list[PackedPart]] = {}
    texts: dict[str, str | None] = {}
    for part in parts:
        text = part.equations.text()
        if text not in texts:
            works = is_elementwise(part)
            texts[text] = on_shape(part, (2,)).text() if works else None
        flat = all(place.flat for leaf in part.leaves for place, _ in leaf.copies)
        flat = flat and not any(leaf.parted for leaf in part.leaves)
        if flat and texts[text] is not None:
            alike.setdefault((texts[text], part.layout()), []).append(part)
        else:
            kept.append(part)
    vectors = [_Vector(kind, first, total) for kind, members in alike.items() for first, total in _joined(members)]
    return kept, vectors


def in_chunks(parts: Sequence[PackedPart]) -> list[PackedPart]:
    """Replaces parts that work element by element on leaves cut into chunks by their chunks.

    Such leaves are in host memory. A chunk is the same numbers of every leaf of the part, so an update
    brings one chunk of each to the device at a time.
    """
    result = []
    for part in parts:
        numbers = {p.num_rows for leaf in part.leaves for p, _ in leaf.copies}
        number = max(numbers)
        if number == 1 or not is_elementwise(part):
            result.append(part)
            continue
        first = part.inputs[0].chunk(0, number).copies[0][0]
        run = on_shape(part, first.shape)
        result += [
            PackedPart(
                run,
                [leaf.chunk(c, number) for leaf in part.inputs],
                [leaf.chunk(c, number) for leaf in part.outputs],
            )
            for c in range(number)
        ]
    return result


def _size(part: PackedPart) -> int:
    return math.prod(part.outputs[0].copies[0][0].shape)


def is_elementwise(part: PackedPart) -> bool:
    """Returns whether every number of the outputs depends on the same number of each input, and on scalars."""
    inputs = part.equations.inputs[: len(part.inputs)]
    if not inputs:
        return False
    shape = inputs[0].aval.shape
    scalars = set(part.equations.inputs[len(part.inputs) :]) & part.equations.read()
    scalars |= {*part.equations.constants}
    values = [v for eqn in part.equations.equations for v in eqn.outvars]
    return (
        all(v.aval.shape == shape for v in (*inputs, *part.equations.outputs))
        and all(v.aval.size == 1 for v in scalars)
        and all(v.aval.shape == shape or v.aval.size == 1 for v in values)
        and all(_works_element_by_element(eqn) for eqn in part.equations.equations)
    )


def _works_element_by_element(eqn: Any) -> bool:
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.invars[0].aval.size == 1
    if eqn.primitive.name == "constrain":  # of the shape that the leaf has
        return False
    scalar = all(v.aval.size == 1 for v in (*eqn.invars, *eqn.outvars))
    return scalar or eqn.primitive.name in ELEMENTWISE


def on_shape(part: PackedPart, shape: tuple[int, ...]) -> Equations:
    """The equations of a part that works element by element, on leaves of another shape."""
    equations, num_inputs = part.equations, len(part.inputs)

    def run(*args: jax.Array) -> list:
        env = {**equations.constants, **dict(zip(equations.inputs, args, strict=True))}
        for eqn in equations.equations:
            values = [value_of(env, v) for v in eqn.invars]
            if eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.size > 1:
                results = [jnp.broadcast_to(jnp.reshape(values[0], ()), shape)]
            else:
                results = bind(eqn, values)
            env.update(zip(eqn.outvars, results))
        return [value_of(env, v) for v in equations.outputs]

    avals = [
        jax.ShapeDtypeStruct(shape if i < num_inputs else v.aval.shape, v.aval.dtype)
        for i, v in enumerate(equations.inputs)
    ]
    return Equations.trace(run, *avals)


def _joined(parts: Sequence[PackedPart]) -> Iterator[tuple[PackedPart, int]]:
    """The first part of each run of parts that follow each other everywhere, and the run's size."""

    def starts(part: PackedPart) -> list[tuple]:
        return [leaf.starts() for leaf in part.leaves]

    def follows(part: PackedPart, starts_before: list[tuple], size: int) -> bool:
        wanted = [tuple(i + size for i in copies) for copies in starts_before]
        return starts(part) == wanted

    run: list[PackedPart] = []
    for part in sorted(parts, key=starts):
        if run and not follows(part, starts(run[-1]), _size(run[-1])):
            yield run[0], sum(map(_size, run))
            run = []
        run.append(part)
    if run:
        yield run[0], sum(map(_size, run))


_SHORTEST_BLOCK = 2**14
"""Numbers of a block from which the turns of the loop take little time beside the update."""


def _equal_size(sizes: Sequence[int]) -> int:
    """The size of blocks for vectors of these sizes that updates the fewest numbers twice.

    It is the size of the smallest vector, or up to an eighth of it. Vectors below an eighth of the largest do not
    count, because the largest would have many blocks.
    """
    smallest = min(size for size in sizes if 8 * size >= max(sizes))
    most = max(1, min(8, smallest // _SHORTEST_BLOCK))

    def work(block: int) -> float:
        """The numbers that are updated, of one vector, for each number of the vector."""
        return max(-(-size // block) * block / size for size in sizes if size >= block)

    return min((-(-smallest // n) for n in range(1, most + 1)), key=work)


def _equal_blocks(vector: _Vector, size: int) -> Iterator[PackedPart]:
    """Blocks of `size` numbers, or one of the whole vector if that is shorter."""
    size = min(size, vector.size)
    run = on_shape(vector.first, (size,))
    for start in range(0, vector.size, size):
        num_done = max(0, start + size - vector.size)
        yield _block(vector, run, start - num_done, size, (num_done, 0))


def _whole(vector: _Vector, size: int) -> PackedPart:
    """One block of the vector and of the padding behind it, `size` numbers together."""
    run = on_shape(vector.first, (size,))
    return _block(vector, run, 0, size, (0, size - vector.size))


def _blocks(vector: _Vector, size: int) -> Iterator[PackedPart]:
    """Cuts the vector into blocks of `size` numbers; the last has the rest."""
    bounds = list(itertools.pairwise([*range(0, vector.size, size), vector.size]))
    runs = {n: on_shape(vector.first, (n,)) for n in {b - a for a, b in bounds}}
    for start, end in bounds:
        yield _block(vector, runs[end - start], start, end - start)


def _block(
    vector: _Vector,
    run: Equations,
    start: int,
    size: int,
    kept: tuple[int, int] = (0, 0),
) -> PackedPart:
    inputs, outputs = vector.first.inputs, vector.first.outputs
    return PackedPart(
        run,
        [leaf.block(start, size) for leaf in inputs],
        [leaf.block(start, size) for leaf in outputs],
        kept,
    )
