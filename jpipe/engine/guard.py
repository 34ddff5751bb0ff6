"""Guards: a device leaves out an operation that other devices run in the same tick.

The platform decides: see `Target.switches` and `Target.touches_idle` of `jpipe.lowering.target`.

- One `lax.cond` per program of an operation. XLA updates its buffers in place on CPUs and TPUs.
- One `lax.switch` over the programs of an operation, and a branch for a device that is idle.
  On GPUs XLA keeps the buffers in place if it analyses live ranges by region. The host decides about a
  conditional unless the conditional is part of a CUDA graph. `Target.compiler_options` asks XLA for both.
  Before JAX 0.12 XLA copied every buffer that a branch passes through without a change. There the idle
  branch, and a program that does not write all buffers of the operation, write one element of each
  large buffer back to its place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import ReadOnly, TickArrays, Written
from jpipe.lowering.target import Target
from jpipe.packing import is_on_host

WrittenArrays = TypeVar("WrittenArrays")
ReadArrays = TypeVar("ReadArrays")
Record = TypeVar("Record", bound=TickArrays)

_LARGE = 2**20  # bytes; XLA may copy smaller buffers


class Branch(NamedTuple):
    """One program of an operation.

    Attributes:
      name: its name in profiles.
      writes: names of the arrays that it writes.
      run: `(written, read) -> written`.
    """

    name: str
    writes: Sequence[str]
    run: Callable[[Written, ReadOnly], Written]


def run_one_of(
    target: Target,
    number: jax.Array | int,
    branches: Sequence[Branch],
    arrays: TickArrays,
) -> TickArrays:
    """Runs branch `number`. The arrays stay as they are if `number` is negative.

    The number may differ between devices of the axis "stage", so no branch may communicate along
    that axis, unless the number is the same on all of them.

    Args:
      target: facts of the platform.
      number: int32 `[]`; a Python integer is a branch that always runs.
      branches: the programs.
      arrays: all arrays of the tick.
    """
    if isinstance(number, int):
        branch = branches[number]
        with jax.named_scope(branch.name):
            return replaced(arrays, branch.run(*arrays.split(branch.writes)))
    if not target.switches:
        for b, branch in enumerate(branches):
            written, read = arrays.split(branch.writes)
            with jax.named_scope(branch.name):
                written = guarded(target, number == b, branch.run, written, read)
            arrays = replaced(arrays, written)
        return arrays
    writes = [name for name in arrays if any(name in b.writes for b in branches)]
    written, read = arrays.split(writes)
    passed = functools.partial(_passed, target, number)

    def run(branch: Branch, written: Written) -> Written:
        branch_arrays = replaced(arrays, written).split(branch.writes)
        with jax.named_scope(branch.name):
            result = replaced(written, branch.run(*branch_arrays))
        # Other branches may write arrays that this one passes through.
        return jax.tree.map(
            lambda new, old: passed(old) if new is old else new,
            result,
            written,
        )

    runs = [functools.partial(run, branch) for branch in branches]
    return replaced(arrays, lax.switch(number + 1, [passed, *runs], written))


def guarded(
    target: Target,
    predicate: jax.Array | bool,
    operation: Callable[[WrittenArrays, ReadArrays], WrittenArrays],
    written: WrittenArrays,
    read: ReadArrays,
) -> WrittenArrays:
    """Returns `operation(written, read)` where `predicate` holds, else `written` as it is.

    Args:
      target: facts of the platform.
      predicate: bool `[]`; like the number of `run_one_of`.
      operation: `(written, read) -> written`.
      written: tree of the arrays that the operation writes.
      read: tree of the arrays that it only reads.
    """
    passed = functools.partial(_passed, target, jnp.asarray(predicate, jnp.int32) - 1)
    return lax.cond(predicate, lambda arrays: operation(arrays, read), passed, written)


def _is_split_by_compiler() -> bool:
    """Returns whether the mesh has axes of several devices that are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[name] > 1 for name in mesh.auto_axes)


def replaced(arrays: Record, written: TickArrays) -> Record:
    """The record with the arrays of another one in the place of its own."""
    return arrays.replace(**{name: getattr(written, name) for name in written})


def _passed(target: Target, number: jax.Array, tree: WrittenArrays) -> WrittenArrays:
    """The arrays as they are, in a branch beside another one that changes them.

    Args:
      target: facts of the platform.
      number: int32 `[]`, at least -1, although the compiler does not know it.
      tree: the arrays.
    """
    if not target.touches_idle:
        return tree

    def touched(array: jax.Array) -> jax.Array:
        if is_on_host(array) or array.size * array.dtype.itemsize < _LARGE:
            return array
        # XLA writes in place if it reads the array at the same index, and if it does not know the
        # index. An index outside of the array is moved into it. To find an element of a dim that the
        # compiler splits, XLA would gather the array, so there a whole row is written: the first dim
        # counts slots or leaves, and is never split.
        whole_row = _is_split_by_compiler()
        size = [n if whole_row and dim else 1 for dim, n in enumerate(array.shape)]
        start = [number if n == 1 else 0 for n in size]
        slice_, write = lax.dynamic_slice, lax.dynamic_update_slice
        element = slice_(array, start, size, allow_negative_indices=False)
        # XLA removes a write that it knows to change nothing, and copies an element by a copy of
        # its own. The selection is part of the kernel that writes.
        element = jnp.where(number < -1, jnp.zeros_like(element), element)
        return write(array, element, start, allow_negative_indices=False)

    return jax.tree.map(touched, tree)
