"""How a device leaves out an operation that other devices run in the same tick."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

from jpipe.lowering.lower import GUARDS

WrittenArrays = TypeVar("WrittenArrays")
ReadArrays = TypeVar("ReadArrays")


def guarded(
    policy: str,
    predicate: jax.Array,
    operation: Callable[[WrittenArrays, ReadArrays], WrittenArrays],
    written: WrittenArrays,
    read: ReadArrays,
) -> WrittenArrays:
    """`operation(written, read)` where `predicate` holds, else `written` as it is.

    The predicate may differ between devices of the axis "stage", so the operation must not
    communicate along that axis.

    Args:
      policy: one of `jpipe.lowering.lower.GUARDS`. "cond": a `lax.cond`; a device does not compute
        what it leaves out.
      predicate: bool `[]`.
      operation: `(written, read) -> written`.
      written: tree of the arrays that the operation writes.
      read: tree of the arrays that it only reads.
    """
    if policy == "cond":
        return lax.cond(
            predicate,
            lambda arrays: operation(arrays, read),
            lambda arrays: arrays,
            written,
        )
    raise AssertionError(f"a policy of {GUARDS} is missing here: {policy!r}")
