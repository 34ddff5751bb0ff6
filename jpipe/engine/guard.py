"""How a device leaves out an operation that other devices run in the same tick.

The policy is a decision of the lowering: see `jpipe.lowering.lower.guard_of`.

"cond": one `lax.cond` per program of an operation. XLA updates its buffers in place on CPUs and TPUs.

"switch": one `lax.switch` over the programs of an operation, and a branch for a device that is idle.
On GPUs XLA keeps the buffers in place if it analyses live ranges by region. The host decides about a
conditional unless the conditional is part of a CUDA graph. `compiler_options` asks XLA for both.
Before JAX 0.12 XLA copied every buffer that a branch passes through without a change. There the idle
branch, and a program that does not write all buffers of the operation, write one element of each
large buffer back to its place.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import ReadOnly, TickArrays, Written
from jpipe.lowering.lower import GUARDS
from jpipe.packing import is_on_host

WrittenArrays = TypeVar("WrittenArrays")
ReadArrays = TypeVar("ReadArrays")
Record = TypeVar("Record", bound=TickArrays)

_COPIES_WHAT_PASSES = jax.__version_info__ < (0, 12)
"""Whether XLA for GPUs copies the buffers that a branch passes through."""

_LARGE = 2**20  # bytes; XLA may copy smaller buffers

_GRAPH_COMMANDS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUDNN",
    "CONVOLUTION",
    "CUSTOM_CALL",
    "CONDITIONAL",
    "DYNAMIC_SLICE_FUSION",
    "WHILE",
)


def compiler_options(policy: str) -> dict[str, Any]:
    """The options of XLA that a policy needs, for `jax.jit`."""
    if policy == "switch":
        return {
            "xla_gpu_copy_insertion_use_region_analysis": True,
            # A conditional is one command. By default XLA makes no CUDA graph of so few.
            "xla_gpu_graph_min_graph_size": 1,
            # All messages of a tick travel at the same time.
            "xla_gpu_collective_permute_combine_threshold_bytes": 0,
            "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
            # XLA's default, and WHILE and CONVOLUTION: an update is a conditional with loops inside, and stages
            # have convolutions.
            "xla_gpu_enable_command_buffer": ",".join(_GRAPH_COMMANDS),
        }
    return {}


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
    policy: str,
    number: jax.Array | int,
    branches: Sequence[Branch],
    arrays: TickArrays,
) -> TickArrays:
    """The arrays after branch `number`, or as they are if `number` is negative.

    The number may differ between devices of the axis "stage", so no branch may communicate along
    that axis, unless the number is the same on all of them.

    Args:
      policy: one of `jpipe.lowering.lower.GUARDS`.
      number: int32 `[]`; a Python integer is a branch that always runs.
      branches: the programs.
      arrays: all arrays of the tick.
    """
    if isinstance(number, int):
        branch = branches[number]
        with jax.named_scope(branch.name):
            return _replaced(arrays, branch.run(*arrays.split(branch.writes)))
    if policy == "cond":
        for b, branch in enumerate(branches):
            written, read = arrays.split(branch.writes)
            with jax.named_scope(branch.name):
                written = guarded(policy, number == b, branch.run, written, read)
            arrays = _replaced(arrays, written)
        return arrays
    if policy != "switch":
        raise AssertionError(f"a policy of {GUARDS} is missing here: {policy!r}")
    writes = [name for name in arrays if any(name in b.writes for b in branches)]
    written, read = arrays.split(writes)
    passed = functools.partial(_passed, policy, number)

    def run(branch: Branch, written: Written) -> Written:
        of_branch = _replaced(arrays, written).split(branch.writes)
        with jax.named_scope(branch.name):
            result = _replaced(written, branch.run(*of_branch))
        # Other branches may write arrays that this one passes through.
        return jax.tree.map(
            lambda new, old: passed(old) if new is old else new,
            result,
            written,
        )

    runs = [functools.partial(run, branch) for branch in branches]
    return _replaced(arrays, lax.switch(number + 1, [passed, *runs], written))


def guarded(
    policy: str,
    predicate: jax.Array | bool,
    operation: Callable[[WrittenArrays, ReadArrays], WrittenArrays],
    written: WrittenArrays,
    read: ReadArrays,
) -> WrittenArrays:
    """`operation(written, read)` where `predicate` holds, else `written` as it is.

    Args:
      policy: one of `jpipe.lowering.lower.GUARDS`.
      predicate: bool `[]`; like the number of `run_one_of`.
      operation: `(written, read) -> written`.
      written: tree of the arrays that the operation writes.
      read: tree of the arrays that it only reads.
    """
    if policy not in GUARDS:
        raise AssertionError(f"a policy of {GUARDS} is missing here: {policy!r}")
    passed = functools.partial(_passed, policy, jnp.asarray(predicate, jnp.int32) - 1)
    return lax.cond(predicate, lambda arrays: operation(arrays, read), passed, written)


def _replaced(arrays: Record, written: TickArrays) -> Record:
    return arrays.replace(**{name: getattr(written, name) for name in written})


def _passed(policy: str, number: jax.Array, tree: WrittenArrays) -> WrittenArrays:
    """The arrays as they are, in a branch beside another one that changes them.

    Args:
      policy: one of `jpipe.lowering.lower.GUARDS`.
      number: int32 `[]`, at least -1, although the compiler does not know it.
      tree: the arrays.
    """
    if policy == "cond" or not _COPIES_WHAT_PASSES:
        return tree

    def touched(array: jax.Array) -> jax.Array:
        if is_on_host(array) or array.size * array.dtype.itemsize < _LARGE:
            return array
        # XLA writes in place if it reads the array at the same index, and if it does not know the
        # index. An index outside of the array is moved into it.
        start = [number] * array.ndim
        slice_, write = lax.dynamic_slice, lax.dynamic_update_slice
        element = slice_(array, start, [1] * array.ndim, allow_negative_indices=False)
        # XLA removes a write that it knows to change nothing, and copies an element by a copy of
        # its own. The selection is part of the kernel that writes.
        element = jnp.where(number < -1, jnp.zeros_like(element), element)
        return write(array, element, start, allow_negative_indices=False)

    return jax.tree.map(touched, tree)
