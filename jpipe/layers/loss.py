"""The loss in one form, traced for one microbatch.

A pipeline computes the loss of one microbatch at a time. A loss that is the mean over rows has the gradient of the
minibatch as the mean of the microbatches' gradients. A masked mean has not: every microbatch has another number of
unmasked tokens. So a loss may return `(sum, weight)`, and the engine divides all sums by the weight of the whole
minibatch:

    loss = sum_m sum(m) / sum_m weight(m)        m runs over the microbatches of all replicas

The weight of a minibatch must be known when the first backward of the minibatch runs. So the weight may depend on the
batch alone, and the engine computes it before the first tick.

What layers report is no sum over rows. Terms of reported values alone count as in a loss that is a mean, with N
microbatches:

    loss = sum_m rest(m) / sum_m weight(m) + sum_m reported(m) / N        sum(m) = rest(m) + reported(m)
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._util.suggest import suggests
from jpipe.layers.avals import is_inexact, shapes_text
from jpipe.layers.backward import LayerProgram, trace_layer
from jpipe.layers.call_arguments import as_given, batch_text
from jpipe.layers.equations import Equations
from jpipe.layers.numbers import from_numbers
from jpipe.layers.reported_terms import split_terms

OPTIONAL_ARGUMENTS = ("reported", "key")
"""Arguments of a loss beside outputs and batch, if its signature names them."""


class LossValue(NamedTuple):
    """The result of a loss.

    Attributes:
      total: scalar: the mean over the rows, or the sum that `weight` divides.
      weight: scalar, or None for a mean.
      aux: pytree of numbers; `()` without `has_aux`.
    """

    total: Any
    weight: Any
    aux: Any


class LossTerms(NamedTuple):
    """The terms that are added up over microbatches, at least in float32.

    Attributes:
      values: the scalars that have gradients: the mean over the rows; or the sum that the weight divides; or this sum
        without its terms of reported values, and these terms.
      sums: `(aux,)` for a mean; `(aux, weight)`; or `(aux, weight, values[1], terms of aux of reported values)`.
    """

    values: list
    sums: tuple

    def mean(self) -> tuple[Any, Any]:
        """The loss and aux of the rows that the loss saw."""
        if len(self.sums) == 1:
            return self.values[0], *self.sums
        return mean_of_sums(self.values[0], self.sums, np.float32(1))


def mean_of_sums(total: Any, sums: tuple, count: Any) -> tuple[Any, Any]:
    """The loss and aux of some microbatches.

    Args:
      total: the first of `LossTerms.values`, added up over the microbatches.
      sums: `LossTerms.sums`, added up.
      count: number of the microbatches.
    """
    aux, *others = sums
    divisor = others[0] if others else count

    def mean(a: Any, *reported: Any) -> Any:
        a = a / divisor.astype(a.dtype)
        return a + sum(b / count.astype(b.dtype) for b in reported)

    if len(others) < 2:
        return mean(total), jax.tree.map(mean, aux)
    return mean(total, others[1]), jax.tree.map(mean, aux, others[2])


@suggests
@dataclasses.dataclass(frozen=True)
class WholeBatchLoss:
    """A loss that sees the whole minibatch at once: the outputs of all microbatches on all replicas.

    For losses across rows, such as contrastive ones, whose value is no mean of the values of microbatches. The last
    stage computes it between the last forward and the first backward, so it needs a table whose forwards all come
    before its backwards, such as `jpipe.schedules.gpipe`. The last stage keeps the outputs of the minibatch, and each
    replica gets those of all replicas.

    Attributes:
      function: `(outputs, batch) -> scalar`, or `(scalar, aux)` with `has_aux`, for all rows of a minibatch in the
        order of the batch.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax
      >>> def contrastive(outputs, batch):
      ...     logits = outputs @ batch["texts"].T
      ...     return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()
      >>> pipe = jpipe.Pipeline(
      ...     [jpipe.InitApply(lambda key, x: jnp.eye(3), lambda w, x: x @ w)],
      ...     loss=jpipe.WholeBatchLoss(contrastive),
      ...     optimizer=optax.sgd(0.1),
      ...     schedule=jpipe.schedules.gpipe(num_stages=1, num_microbatches=2),
      ... )
      >>> batch = {"inputs": jnp.eye(4, 3), "texts": jnp.ones((4, 3))}
      >>> state = pipe.init(jax.random.key(0), batch)
      >>> state, metrics = pipe.step(state, batch)
      >>> f"{metrics['loss']:.4f}"  # the log of the number of rows
      '1.3863'
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"`function` of `WholeBatchLoss` must be a function `(outputs, batch) -> scalar`, got "
                f"{type(self.function).__name__}."
            )

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """The loss of a whole minibatch."""
        return self.function(outputs, batch)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss function of a pipeline, called in one way whatever its signature.

    Attributes:
      function: `(outputs, batch, ...) -> scalar` or `(sum, weight)`, or either with aux.
      has_aux: whether the function returns `(loss, aux)`.
      asks: the names in `OPTIONAL_ARGUMENTS` that the function takes.
      num_parts: the number of microbatches, of all replicas, whose rows the function sees at once in training; None:
        one microbatch.
    """

    function: Callable[..., Any]
    has_aux: bool = False
    asks: tuple[str, ...] = ()
    num_parts: int | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], has_aux: bool) -> "Loss":
        """Reads the signature of the user's function. A `WholeBatchLoss` is for minibatches of one microbatch."""
        if isinstance(function, WholeBatchLoss):
            loss = cls.of(function.function, has_aux)
            if loss.asks:
                raise ValueError(
                    "`WholeBatchLoss` takes a function `(outputs, batch)`, and this one takes "
                    f"`{loss.asks[0]}` too, of which each microbatch has its own. Leave it out."
                )
            return dataclasses.replace(loss, num_parts=1)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a builtin, say: outputs and batch it is
            return cls(function, has_aux)
        keywords = (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        names = {p.name for p in parameters if p.kind in keywords}
        return cls(function, has_aux, tuple(n for n in OPTIONAL_ARGUMENTS if n in names))

    def with_parts(self, number: int) -> "Loss":
        """The loss for minibatches of so many microbatches on all replicas."""
        return self if self.num_parts is None else dataclasses.replace(self, num_parts=number)

    @property
    def in_evaluation(self) -> "Loss":
        """The loss of a model in evaluation."""
        return self

    def __call__(
        self,
        outputs: Any,
        batch: Any,
        reported: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
    ) -> LossValue:
        values = {"reported": dict(reported or {}), "key": key}
        result = self.function(from_numbers(outputs), as_given(batch), **{name: values[name] for name in self.asks})
        if self.has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise LossError(
                    f"`loss` must return `(loss, aux)` with `has_aux=True`, got {_described(result)}. Return both, or "
                    "leave `has_aux` out."
                )
            result, aux = result
        else:
            aux = ()
        if isinstance(result, tuple) and len(result) == 2:
            return LossValue(*result, aux)
        return LossValue(result, None, aux)

    def terms(
        self,
        outputs: Any,
        batch: Any,
        reported: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
    ) -> LossTerms:
        """Returns the terms that the loss of a microbatch adds to that of its minibatch.

        Raises:
          LossError: if it cannot be told what of the sum is divided by its weight.
        """

        def called(reported: Any, others: tuple) -> LossValue:
            outputs, batch, key = others
            return jax.tree.map(_for_sums, self(outputs, batch, reported, key))

        arguments = dict(reported or {}), (outputs, batch, key)
        shapes = jax.eval_shape(called, *arguments) if reported else None
        if shapes is None or shapes.weight is None:
            value = called(*arguments)
            weight = () if value.weight is None else (value.weight,)
            return LossTerms([value.total], (value.aux, *weight))
        terms = split_terms(called, *arguments)
        if terms[0].mixed_by is not None:
            raise LossError(
                f"`loss` returns `(sum, weight)` and applies {terms[0].mixed_by!r} to a sum of reported values and "
                "others, so it cannot be told which part of the sum the weight divides. Add the reported values at the "
                "end, for "
                'example `(losses * mask).sum() + 0.1 * reported["penalty"]`.'
            )
        rest, from_reported = (
            jax.tree.unflatten(jax.tree.structure(shapes), values)
            for values in zip(*(a.rest_and_reported() for a in terms))
        )
        sums = (rest.aux, rest.weight, from_reported.total, from_reported.aux)
        return LossTerms([rest.total, from_reported.total], sums)


class LossError(ValueError):
    """The loss returns a value that cannot be trained."""


class TracedLoss(NamedTuple):
    """The loss, traced for one microbatch.

    Attributes:
      program: `((), [outputs, reported], [batch, key]) -> LossTerms.values`; its aux is `LossTerms.sums`.
      weight: `leaves of the batch -> [weight]`; None for a mean.
    """

    program: LayerProgram
    weight: Equations | None


def trace_loss(loss: Loss, outputs: Any, reported: Mapping[str, Any], microbatch: Any, key: Any) -> TracedLoss:
    """Traces the loss.

    Args:
      loss: the loss.
      outputs: abstract outputs of the last layer, `[M, ...]` with M rows.
      reported: abstract values that layers report, by name.
      microbatch: the abstract microbatch.
      key: implementation of random keys.

    Raises:
      ValueError: if the loss cannot take the outputs, does not return a scalar or `(sum, weight)`, or its weight
        depends on the outputs.
    """
    if loss.num_parts is not None:
        outputs, microbatch = (_together(tree, loss.num_parts, microbatch) for tree in (outputs, microbatch))
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key)))
    wants_key = "key" in loss.asks
    # Without reports and key the arguments are the outputs and the batch alone.
    inputs = (outputs, dict(reported)) if reported else (outputs,)
    extra = (microbatch, data) if wants_key else (microbatch,)

    def arguments(inputs: tuple, extra: tuple) -> tuple:
        outputs, *values = inputs
        batch, *key_data = extra
        random_key = jax.random.wrap_key_data(key_data[0], impl=key) if wants_key else None
        return outputs, batch, values[0] if values else {}, random_key

    def called(inputs: tuple, extra: tuple) -> LossValue:
        return loss(*arguments(inputs, extra))

    try:
        result = jax.eval_shape(called, inputs, extra)
    except LossError:
        raise
    except Exception as error:
        raise ValueError(
            f"`loss` cannot take outputs of {shapes_text(outputs)} and a microbatch of "
            f"{batch_text(microbatch)}: {type(error).__name__}: {error}"
        ) from error
    _check_result(loss, result)

    def function(_, inputs, extra):
        terms = loss.terms(*arguments(inputs, extra))
        if loss.num_parts is None:
            return tuple(terms)
        value, aux = terms.mean()
        return [value], (aux,)

    program = trace_layer(function, (), inputs, extra, has_aux=True)
    if result.weight is None or loss.num_parts is not None:
        return TracedLoss(program, None)
    return TracedLoss(program, _weight_of_batch(called, inputs, extra))


def _together(tree: Any, num_parts: int, microbatch: Any) -> Any:
    """The abstract arrays of several microbatches with all their rows."""
    num_rows = jax.tree.leaves(microbatch)[0].shape[0]

    def together(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if a.shape[:1] != (num_rows,):
            raise ValueError(
                "`WholeBatchLoss` puts the rows of all microbatches together, and the last layer returns "
                f"{shapes_text(a)}, whose first dim is not that of a microbatch, {num_rows}. Return arrays with rows."
            )
        return jax.ShapeDtypeStruct((num_parts * num_rows, *a.shape[1:]), a.dtype)

    return jax.tree.map(together, tree)


def _weight_of_batch(called: Callable, inputs: tuple, extra: tuple) -> Equations:
    """The equations of the weight, of the leaves of the batch; refuses a weight that reads the outputs."""
    input_leaves, input_tree = jax.tree.flatten(inputs)
    extra_leaves, extra_tree = jax.tree.flatten(extra)
    count = len(input_leaves)

    def flat(*leaves):
        value = called(input_tree.unflatten(leaves[:count]), extra_tree.unflatten(leaves[count:]))
        return [_for_sums(value.weight)]

    traced = Equations.trace(flat, *input_leaves, *extra_leaves)
    batch = traced.inputs[count : count + len(jax.tree.leaves(extra[0]))]
    others = [v for v in traced.inputs if v not in batch]
    if traced.depending_on(others).intersection(
        v for v in traced.outputs if hasattr(v, "aval") and not hasattr(v, "val")
    ):
        raise ValueError(
            "`loss` returns `(sum, weight)` whose weight depends on the outputs of the model, and the weight of a "
            "minibatch must be known before the last microbatch has run. Compute the weight from `batch` alone, such "
            "as "
            '`batch["mask"].sum()`. For a loss that returns `(scalar, aux)`, set `has_aux=True`.'
        )
    return traced.slice(batch, traced.outputs)


def _check_result(loss: Loss, result: LossValue) -> None:
    """Refuses a result of the wrong form."""
    total, weight, aux = result
    if not _is_scalar(total) or (weight is not None and not _is_scalar(weight)):
        shapes = total if weight is None else (total, weight)
        raise ValueError(
            "`loss` must return a floating-point scalar, the mean over the rows of one microbatch, or `(sum, weight)` "
            f"of two scalars, got {_described(shapes)}. Take the mean of the losses of the rows. For a loss that "
            "returns `(scalar, aux)`, set `has_aux=True`."
        )
    for number in (total, weight):
        if number is not None and jnp.iscomplexobj(number):
            raise ValueError(
                f"`loss` must return a real number, got dtype {number.dtype}: complex numbers have no order, so "
                "none is the smallest loss. Take its `jnp.abs(...)`, or `jnp.real(...)` of what it is computed from."
            )
    if not is_inexact(total):
        raise ValueError(
            f"`loss` must return a floating-point number, got dtype {total.dtype}, which has no gradient. Convert what "
            "the loss is computed from to float32."
        )
    for path, leaf in jax.tree.leaves_with_path(aux):
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"`loss` returns aux{jax.tree_util.keystr(path)} of dtype {leaf.dtype}, and only numbers can be "
                "averaged over the microbatches."
            )


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == ()


def _described(value: Any) -> str:
    try:
        return shapes_text(value)
    except Exception:
        return type(value).__name__


def _for_sums(a: Any) -> jax.Array:
    """A number that is added up over microbatches, in at least float32: bfloat16 counts to 256."""
    a = jnp.asarray(a)
    return a if is_inexact(a) and a.dtype.itemsize >= 4 else a.astype(np.float32)
