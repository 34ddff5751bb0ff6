"""Slices of sequences: what a layer hands on from one slice to the next.

In a schedule with slices a stage runs a layer once for each slice of the positions of a sequence, in order. Two
functions say what a layer needs of the slices before: `whole_sequence`, values at all positions so far, and `carry`, a
state. Outside of such a schedule both do what they say for the whole sequence at once, so a layer is its own plain
model.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir

from jpipe._util.suggest import suggests

Outputs = TypeVar("Outputs")


@dataclasses.dataclass
class Slice:
    """One slice of the sequences of a microbatch, while a layer is traced for it.

    Attributes:
      num_slices: k, slices of a sequence.
      length: positions of the slice at the inputs of the model.
      number: int32 `[]`, number of the slice.
      given: what the slice before has handed on, in the order of the calls; None while the layer is asked what it
        hands on.
      handed: what this slice hands on.
      kept: for each of these, whether it is of `whole_sequence`: a backward finds it where it lies, because a later
        slice only adds to it.
    """

    num_slices: int
    length: int
    number: Any
    given: list[jax.Array] | None = None
    handed: list[jax.Array] = dataclasses.field(default_factory=list)
    kept: list[bool] = dataclasses.field(default_factory=list)

    def whole(self, values: jax.Array, axis: int) -> jax.Array:
        """See `whole_sequence`."""
        shape = list(values.shape)
        shape[axis] *= self.num_slices
        (before,) = self._before([jnp.zeros(shape, values.dtype)])
        whole = appended_p.bind(before, values, self.number, axis=axis)
        self._hand_on([whole], kept=True)
        return whole

    def carry(self, step: Callable[[Any], tuple[Any, Outputs]], initial: Any) -> Outputs:
        """See `carry`."""
        first, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, initial))
        state = [lax.select(self.number == 0, a, b) for a, b in zip(first, self._before(first), strict=True)]
        after, outputs = step(tree.unflatten(state))
        leaves, tree_after = jax.tree.flatten(jax.tree.map(jnp.asarray, after))
        shapes, shapes_after = ([f"{a.dtype}{list(a.shape)}" for a in values] for values in (first, leaves))
        if tree_after != tree or shapes_after != shapes:
            raise ValueError(
                "`step` of `jpipe.carry` must return a state like `initial`, because the next slice begins with it, "
                f"got {', '.join(shapes_after)} ({tree_after}) after {', '.join(shapes)} ({tree})."
            )
        self._hand_on(leaves, kept=False)
        return outputs

    def _before(self, like: list[jax.Array]) -> list[jax.Array]:
        """What the slice before has handed on in the place of what is handed on next."""
        start = len(self.handed)
        return like if self.given is None else self.given[start : start + len(like)]

    def _hand_on(self, values: list[jax.Array], *, kept: bool) -> None:
        self.handed += values
        self.kept += [kept] * len(values)


_CURRENT: contextvars.ContextVar[Slice | None] = contextvars.ContextVar("jpipe_slice", default=None)


@contextlib.contextmanager
def in_slice(current: Slice) -> Iterator[Slice]:
    """A context in which layers run on one slice."""
    token = _CURRENT.set(current)
    try:
        yield current
    finally:
        _CURRENT.reset(token)


def current_slice() -> Slice | None:
    """The slice that a layer runs on; None: it runs on whole sequences."""
    return _CURRENT.get()


@suggests
def carry(step: Callable[[Any], tuple[Any, Outputs]], initial: Any) -> Outputs:
    """Runs a recurrence over the positions of a sequence, which may come in slices.

    It is `step(initial)[1]`. In a schedule with slices, such as `jpipe.schedules.seq_one_f_one_b`, the first slice of a
    sequence begins with `initial` and every other one with the state that the slice before has returned. The gradient
    goes back through all slices.

    As `jpipe.report`, call it in the layer's own code, and not inside of a function that `jax.jit`, `jax.checkpoint`,
    `jax.lax.scan` or `jax.vmap` transforms there. A state lies on the device of its stage, with the slices in flight.

    Args:
      step: `state -> (state, outputs)`, over the positions of its slice; such as a call of `jax.lax.scan`.
      initial: the state before the first position, any pytree of arrays. It may depend on weights.

    Returns:
      The outputs of `step`.

    Raises:
      ValueError: if the shapes or dtypes of the state change, in a schedule with slices.

    Example:
      >>> def decayed_sum(x):  # [batch, positions]
      ...     cell = lambda h, a: (0.5 * h + a, 0.5 * h + a)
      ...     return carry(lambda h: jax.lax.scan(cell, h, x.T), jnp.zeros(x.shape[0])).T
      >>> decayed_sum(jnp.ones((1, 3))).tolist()
      [[1.0, 1.5, 1.75]]

    References:
      Sun et al., "Seq1F1B", 2024, arXiv:2406.03488.
    """
    current = _CURRENT.get()
    return step(initial)[1] if current is None else current.carry(step, initial)


@suggests
def whole_sequence(values: jax.Array, axis: int = 1) -> jax.Array:
    """Values at all positions of a sequence, which may come in slices: the keys or values of attention.

    It is `values`. In a schedule with slices, such as `jpipe.schedules.seq_one_f_one_b`, it is an array of all
    positions, with the values of this slice and of those before it in their places. *Positions after the slice hold
    finite numbers without a meaning*: mask them, as a causal mask does. `first_position` says where the slice begins.
    The gradient goes back to the slices that gave the values. `jpipe.attention` with `is_causal=True` does all this by
    itself.

    The array lies once on the device of its stage for all slices of a sequence, and no slice stashes it. For where it
    may be called see `carry`.

    Args:
      values: `[..., positions, ...]`, of the slice.
      axis: the axis of positions.

    Returns:
      The values of the whole sequence, with k times as many positions.

    Raises:
      ValueError: if there is no such axis.

    Example:
      >>> whole_sequence(jnp.ones((2, 8, 4))).shape
      (2, 8, 4)
    """
    if not hasattr(axis, "__index__") or not -values.ndim <= axis < values.ndim:
        raise ValueError(f"`axis` must be an axis of `values`, which have {values.ndim}, got {axis!r}.")
    current = _CURRENT.get()
    return values if current is None else current.whole(values, axis % values.ndim)


@suggests
def first_position() -> jax.Array | int:
    """The position in its sequence at which the slice begins that a layer runs on: 0 for whole sequences.

    A layer with positional embeddings adds it to its positions. Positions count as at the inputs of the model.

    Returns:
      0, or an int32 scalar in a schedule with slices.

    Example:
      >>> (first_position() + jnp.arange(4)).tolist()
      [0, 1, 2, 3]
    """
    current = _CURRENT.get()
    return 0 if current is None else current.number * current.length


@suggests
def sequence_length(length: int) -> int:
    """The positions of the whole sequence of which a layer sees `length`: `length` itself for whole sequences.

    A layer with a table of positions checks with it that the table is long enough.

    Args:
      length: positions of the slice.

    Returns:
      `length`, or k times as many in a schedule with k slices.

    Example:
      >>> sequence_length(8)
      8
    """
    current = _CURRENT.get()
    return length if current is None else current.num_slices * length


def first_of_slice(length: int) -> jax.Array:
    """int32 `[]`, the position at which the current slice begins in an array that has `length` positions of it."""
    current = _CURRENT.get()
    assert current is not None
    return current.number * length


# -- Values of a slice among those of the sequence


def _appended(before: jax.Array, values: jax.Array, number: jax.Array, *, axis: int) -> jax.Array:
    """`before`, or zeros for the first slice, with `values` in the place of slice `number`."""
    before = lax.select(number == 0, jnp.zeros_like(before), before)
    return lax.dynamic_update_slice_in_dim(before, values, number * values.shape[axis], axis)


appended_p = jex.Primitive("appended")
"""`appended(before, values, number, axis)`: see `_appended`. It is an equation of its own, so that a backward may take
`before` itself for the result: by then it has the values of all slices."""
appended_p.def_impl(_appended)


@appended_p.def_abstract_eval
def _appended_aval(before: Any, values: Any, number: Any, *, axis: int) -> Any:
    del values, number, axis
    return before


def _appended_jvp(primals: Any, tangents: Any, *, axis: int) -> tuple:
    before, values, number = primals
    tangent_before, tangent_values, _ = map(ad.instantiate_zeros, tangents)
    tangent = appended_p.bind(tangent_before, tangent_values, number, axis=axis)
    return appended_p.bind(before, values, number, axis=axis), tangent


def _appended_transpose(by_whole: Any, before: Any, values: Any, number: jax.Array, *, axis: int) -> list:
    length = values.aval.shape[axis]
    by_values = lax.dynamic_slice_in_dim(by_whole, number * length, length, axis)
    # Slices before read the gradient at their own positions alone, so what lies behind may stay.
    return [by_whole, by_values, None]


ad.primitive_jvps[appended_p] = _appended_jvp
ad.primitive_transposes[appended_p] = _appended_transpose
mlir.register_lowering(appended_p, mlir.lower_fun(_appended, multiple_results=False))
