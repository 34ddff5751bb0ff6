"""Checks whether the loss of a minibatch follows from the losses of its microbatches."""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.layers.equations import off_mesh
from jpipe.layers.loss import Loss, LossValue
from jpipe.layers.quick_jit import quick_options


def cut_warning(loss: Loss, outputs: Any, reported: Mapping[str, Any], microbatch: Any, batch: Any) -> str | None:
    """Compares the loss of four rows with those of its two halves: a warning if they do not agree, else None.

    The loss is computed for random outputs and for rows of the batch, then for rows whose integers, booleans and masks
    are drawn anew, because the first batch may hold no padding. Then the second half is masked as a whole, which shows
    a guard against a weight of 0.

    Args:
      loss: the loss.
      outputs: abstract outputs of the last layer for one microbatch.
      reported: abstract values that layers report.
      microbatch: the abstract microbatch.
      batch: a minibatch, or abstract arrays.
    """
    if "key" in loss.asks:  # random draws for four rows are not those for two
        return None
    rows = 4
    size = jax.tree.leaves(microbatch)[0].shape[0]
    if any(a.shape[:1] != (size,) for a in jax.tree.leaves(outputs)):
        return None  # outputs without rows: nothing to compare
    rng = np.random.default_rng(0)
    zeros = {name: np.zeros(a.shape, a.dtype) for name, a in reported.items()}

    compiled, halves = _compiled(loss), (slice(0, rows // 2), slice(rows // 2, rows))
    random_outputs = jax.tree.map(lambda a: _random(rng, (rows, *a.shape[1:]), a.dtype), outputs)

    def disagreement(rows_of_batch: Any, is_masked: bool = False) -> str | None:
        arguments = random_outputs, rows_of_batch
        whole = compiled(*arguments, zeros)
        first, second = (compiled(*_slice(arguments, half), zeros) for half in halves)
        return _disagreement(whole, first, second, is_masked)

    for masked in (None, 0, -1, -100):
        rows_of_batch = jax.tree.map(functools.partial(_draw, rng, rows, masked), dict(microbatch), dict(batch))
        try:
            problem = disagreement(rows_of_batch)
            if problem is None and masked is not None:
                empty = functools.partial(_without_weight, halves[1], masked)
                problem = disagreement(jax.tree.map(empty, rows_of_batch), True)
        except Exception as error:
            return (
                f"`loss` cannot be computed for {rows} rows ({type(error).__name__}: {error}), so nobody can tell "
                "whether the loss of a minibatch is the mean of its microbatches' losses. Write it for any number of "
                "rows."
            )
        if problem is not None:
            return problem
    return None


def _disagreement(whole: LossValue, first: LossValue, second: LossValue, is_masked: bool) -> str | None:
    """See `cut_warning`; `is_masked`: whether all of the second half is masked."""
    total, *parts = (float(v.total) for v in (whole, first, second))
    if not np.isfinite([total, *parts]).all():
        return None
    scale = max(abs(total), *map(abs, parts), 1e-30)
    tolerance = scale * (1e-3 if jnp.asarray(whole.total).dtype.itemsize >= 4 else 5e-2)
    added = sum(parts)
    remedy = (
        "Return `(sum, weight)`, for example `(jnp.sum(losses * mask), jnp.sum(mask))`: the sums are then divided by "
        "the weight of the whole minibatch. "
    )
    no_guard = (
        "Return the weight as it is: a guard against 0, such as `jnp.maximum(weight, 1)`, is not needed, because a "
        "microbatch may have weight 0, and it would count as weight."
    )
    if whole.weight is not None:
        weight, *weights = (float(v.weight) for v in (whole, first, second))
        if abs(total - added) <= tolerance and abs(weight - sum(weights)) <= abs(weight) * 1e-3:
            return None
        return (
            "`loss` returns `(sum, weight)` whose values for a minibatch are not the sums of the values for its "
            f"microbatches: {total:.6g} and {weight:.6g} for four rows, {added:.6g} and {sum(weights):.6g} for two "
            "halves. The gradient then depends on `num_microbatches`. Return the sum over rows, and the sum of the "
            f"rows' weights. {no_guard}"
        )
    if abs(total - added / 2) <= tolerance:
        return None
    if abs(total - added) <= tolerance and not is_masked:  # else a guarded mean is 0
        return (
            "`loss` is a sum over the rows, and the pipeline trains the mean of its microbatches' losses: gradients "
            f"are those of the sum divided by `num_microbatches`. Take the mean over the rows. {remedy.rstrip()}"
        )
    return (
        f"`loss` is not a mean over rows: it is {total:.6g} for four rows and {parts[0]:.6g} and {parts[1]:.6g} for "
        "their halves. The pipeline trains the mean of its microbatches' losses, so the result depends on "
        f"`num_microbatches`. A masked mean: {remedy[0].lower()}{remedy[1:]}{no_guard} A loss that compares rows with "
        "each other sees the rows of one microbatch only: in a table whose forwards all come first, such as GPipe's, "
        "`jpipe.WholeBatchLoss` sees those of the whole minibatch."
    )


_compiled_losses: weakref.WeakKeyDictionary[Callable, dict[tuple, Callable]] = weakref.WeakKeyDictionary()
"""A loss function -> how it is called -> the compiled loss. It goes with the function."""


def _compiled(loss: Loss) -> Callable[..., LossValue]:
    """The loss, compiled once for all pipelines that use it; quickly, because it runs a few times only."""
    options = quick_options(jax.default_backend())
    try:
        function = weakref.ref(loss.function)
        compiled = _compiled_losses.setdefault(loss.function, {})
    except TypeError:  # no weak reference, or no hash
        return jax.jit(off_mesh(loss.__call__), compiler_options=options)
    how_called = loss.has_aux, loss.asks
    if how_called not in compiled:

        def call(*args: Any) -> LossValue:
            alive = function()
            assert alive is not None, "the caller has it"
            return Loss(alive, *how_called)(*args)

        compiled[how_called] = jax.jit(off_mesh(call), compiler_options=options)
    return compiled[how_called]


def _without_weight(part: slice, masked: int, values: np.ndarray) -> np.ndarray:
    """An entry of a batch whose rows in `part` are masked, if `_draw` masks entries of its kind."""
    if _is_number_but_no_mask(values):
        return values
    values, is_signed = values.copy(), jnp.issubdtype(values.dtype, jnp.signedinteger)
    values[part] = masked if is_signed else 0
    return values


def _is_number_but_no_mask(values: np.ndarray) -> bool:
    is_number = jnp.issubdtype(values.dtype, jnp.inexact)
    return is_number and not np.isin(values, (0, 1)).all()


def _slice(tree: Any, part: slice) -> Any:
    return jax.tree.map(lambda a: a[part], tree)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(rng.normal(size=shape)).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _draw(
    rng: np.random.Generator,
    num_rows: int,
    masked: int | None,
    aval: jax.ShapeDtypeStruct,
    values: Any,
) -> np.ndarray:
    """Rows of an entry of the batch, or random ones where the batch is abstract.

    Args:
      rng: draws.
      num_rows: rows of the result.
      masked: None keeps the rows. A number takes the place of about half of all integers, and booleans and
        floating-point masks of 0 and 1 are drawn anew. Losses use numbers such as 0, -1 and -100 for labels without a
        loss.
      aval: the entry of the abstract microbatch.
      values: the entry of the batch.
    """
    shape, dtype = (num_rows, *aval.shape[1:]), aval.dtype
    if isinstance(values, jax.ShapeDtypeStruct) or not values.shape[0]:
        rows = _random(rng, shape, dtype)
    else:
        rows = np.resize(np.asarray(values)[: shape[0]].astype(dtype), shape)
    if masked is None or _is_number_but_no_mask(rows):
        return rows
    drop = rng.integers(0, 2, shape).astype(bool)
    drop.reshape(len(drop), -1)[[0, -1], 0] = False  # each half keeps some weight
    if jnp.issubdtype(dtype, jnp.inexact) or np.dtype(dtype) == np.dtype(bool):
        return np.where(drop, 0, 1).astype(dtype)
    if masked < 0 and not jnp.issubdtype(dtype, jnp.signedinteger):
        return rows
    return np.where(drop, masked, np.maximum(rows, 1)).astype(dtype)
