"""Batch norm in microbatches, as torchgpipe's deferred batch norm.

A microbatch is normalised by its own statistics. The running statistics move once per minibatch, by the statistics of
the whole minibatch, as in Flax without microbatches. So in a traced layer every call of a batch norm *records* the
statistics of its microbatch, and computes its running statistics from what was recorded, with Flax's formula.
`recorded` takes the records out of a layer. `with_statistics` runs the layer with other statistics in their place: from
the statistics of the minibatch follow the running statistics, whatever calls, loops and momenta stand between.

References:
  Kim et al., "torchgpipe", arXiv:2004.09910, section 3.2 (deferred batch normalisation).
"""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from flax import linen, nnx
from jax.interpreters import ad, batching

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.layers.equations import loop_counts

Record = tuple[jax.Array, ...]
"""`(mean, variance)` of the rows that one call saw, or `(mean, variance, number of rows)` if a mask left out some."""


class BatchNormError(ValueError):
    """A batch norm stands where its statistics cannot be taken out."""


statistics_p = jex.Primitive("batch_statistics")
"""`batch_statistics(*record) -> record`: marks the statistics of a call in the equations of a layer."""

statistics_p.multiple_results = True
statistics_p.def_impl(lambda *record: list(record))
statistics_p.def_abstract_eval(lambda *record: list(record))


def _jvp(primals: Sequence, tangents: Sequence) -> tuple[list, list]:
    """Running statistics have no gradient."""
    record = statistics_p.bind(*primals)
    no_tangent: Any = ad.Zero
    return record, [no_tangent.from_primal_value(value) for value in record]


def _batched(record: Sequence, dims: Sequence) -> tuple[list, list]:
    """Under `vmap` a call has a record for each element, along the first axis."""
    (size,) = {a.shape[d] for a, d in zip(record, dims) if d is not None}
    values = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(record, dims)
    ]
    return statistics_p.bind(*values), [0] * len(values)


ad.primitive_jvps[statistics_p] = _jvp
batching.primitive_batchers[statistics_p] = _batched


# -- Calls of batch norms


_RECORDS: contextvars.ContextVar[bool] = contextvars.ContextVar("records", default=False)


@suggests
def minibatch_mean(value: Any) -> jax.Array:
    """The mean of a value over the microbatches of a minibatch, for mutable state.

    A call of a layer sees one microbatch. State that it computes from old state and from such means alone moves once
    per minibatch, as running statistics of batch norm do: by the mean over all its microbatches, replicas and copies.
    Outputs that read the state see one value for all microbatches of a minibatch. Outside of a pipeline's training, and
    in all that is no state, it is the value itself.

    Call it in the layer's own code, not inside of `jax.shard_map`, `lax.cond` or `lax.while_loop`.

    Args:
      value: an array of floating-point numbers, such as a mean over the rows of the microbatch.

    Returns:
      The value. It has no gradient.

    Raises:
      ValueError: if the value has no floating-point numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> class Average(nnx.Module):
      ...     def __init__(self, rngs=None):
      ...         self.average = nnx.BatchStat(jnp.zeros(()))
      ...     def __call__(self, x):  # [B, D]
      ...         self.average[...] = 0.9 * self.average[...] + 0.1 * minibatch_mean(x.mean())
      ...         return x
    """
    dtype = getattr(value, "dtype", type(value))
    if dtype is not float and not (hasattr(value, "dtype") and jnp.issubdtype(dtype, jnp.floating)):
        got = f"{dtype}{list(value.shape)}" if hasattr(value, "dtype") else shown(value)
        raise ValueError(
            f"`jpipe.minibatch_mean` takes floating-point numbers, got {got}. Convert the value, such as by "
            "`value.astype(jnp.float32)`."
        )
    array = jax.lax.stop_gradient(jnp.asarray(value))
    if not _RECORDS.get():
        return array
    mean, _ = statistics_p.bind(array, jnp.zeros_like(array))  # of equal values: the variance is 0
    return mean


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Batch norms that are called inside record their statistics. Yields a list that has an entry for each call."""
    calls: list[None] = []
    token = _RECORDS.set(True)

    def call_linen(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        norm = context.module
        is_call = isinstance(norm, linen.BatchNorm) and context.method_name == "__call__"
        if not is_call or norm.is_initializing():
            return call(*args, **kwargs)
        return _recorded_call(_LinenNorm(norm), call, calls, *args, **kwargs)

    norms: Any = nnx.BatchNorm
    plain_call = norms.__call__

    @functools.wraps(plain_call)
    def call_nnx(norm: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(plain_call, norm)
        return _recorded_call(_NnxNorm(norm), call, calls, *args, **kwargs)

    # Flax NNX has no way to intercept calls, and a module may make others inside of its call, as `nnx.bridge` does.
    norms.__call__ = call_nnx
    try:
        with linen.intercept_methods(call_linen):
            yield calls
    finally:
        _RECORDS.reset(token)
        norms.__call__ = plain_call


def _recorded_call(
    norm: "_LinenNorm | _NnxNorm",
    call: Callable[..., Any],
    calls: list,
    x: jax.Array,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a batch norm, which records its statistics if it computes any.

    With momentum 0, and running statistics of 0, what the call leaves in their place is the statistics of its rows.
    """
    mode = args[0] if args else kwargs.get("use_running_average")
    if mode is None:
        mode = norm.module.use_running_average
    if mode is not False or not norm.moves:
        return call(x, *args, **kwargs)
    calls.append(None)
    running, momentum = norm.running(), norm.module.momentum
    norm.put([jnp.zeros_like(value) for value in running])
    norm.set_momentum(0.0)
    try:
        outputs = call(x, *args, **kwargs)
    finally:
        norm.set_momentum(momentum)
    record = norm.running()
    mask = kwargs.get("mask")
    if mask is not None:
        record = [*record, _num_rows(x, mask, norm.module.axis, record[0])]
    record = statistics_p.bind(*map(jax.lax.stop_gradient, record))
    norm.put([momentum * old + (1 - momentum) * new for old, new in zip(running, record[:2])])
    return outputs


def _num_rows(x: jax.Array, mask: jax.Array, axis: Any, mean: jax.Array) -> jax.Array:
    """The number of rows of each feature that a mask lets through, in the shape and dtype of the mean."""
    axes = {a % x.ndim for a in (axis if isinstance(axis, tuple | list) else (axis,))}
    others = tuple(i for i in range(x.ndim) if i not in axes)
    rows = jnp.broadcast_to(mask, x.shape).astype(mean.dtype)
    return rows.sum(others).reshape(mean.shape)


class _LinenNorm(NamedTuple):
    """A batch norm of Linen in its call."""

    module: linen.BatchNorm

    @property
    def moves(self) -> bool:
        """True if the call may change the running statistics."""
        return self.module.is_mutable_collection("batch_stats")

    def running(self) -> list[jax.Array]:
        """The running mean and variance."""
        return [self.module.get_variable("batch_stats", n) for n in ("mean", "var")]

    def put(self, values: Sequence[jax.Array]) -> None:
        """Changes the running mean and variance."""
        for name, value in zip(("mean", "var"), values):
            self.module.put_variable("batch_stats", name, value)

    def set_momentum(self, momentum: float) -> None:
        """Changes the momentum of this call; modules of Linen are frozen."""
        object.__setattr__(self.module, "momentum", momentum)


class _NnxNorm(NamedTuple):
    """A batch norm of NNX."""

    module: nnx.BatchNorm
    moves: bool = True

    def running(self) -> list[jax.Array]:
        """The running mean and variance."""
        return [self.module.mean[...], self.module.var[...]]

    def put(self, values: Sequence[jax.Array]) -> None:
        """Changes the running mean and variance."""
        self.module.mean[...], self.module.var[...] = values

    def set_momentum(self, momentum: float) -> None:
        """Changes the momentum."""
        self.module.momentum = momentum


# -- Records in equations


def recorded(closed: jex.ClosedJaxpr, args: Sequence) -> tuple[list, list[Record]]:
    """The results of a traced layer for `args`, and its records in the order of their equations.

    A record inside a loop has the turns as its first axis.

    Raises:
      BatchNormError: if a batch norm is inside a branch, a loop without a known length, or a function with a derivative
        of its own.
    """
    return _run(closed.jaxpr, closed.consts, args, None)


def with_statistics(closed: jex.ClosedJaxpr, args: Sequence, records: Sequence[Record]) -> list:
    """The results of a traced layer for `args`, with `records` in the place of its own."""
    results, _ = _run(closed.jaxpr, closed.consts, args, iter(records))
    return results


def _run(jaxpr: Any, constants: Sequence, args: Sequence, given: Iterator[Record] | None) -> tuple[list, list[Record]]:
    """Evaluates a jaxpr: results and records. With `given`, these take the place of the records."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))
    records: list[Record] = []
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, jex.Literal) else env[v] for v in eqn.invars]
        if eqn.primitive is statistics_p:
            record = tuple(values) if given is None else next(given)
            results, more = list(record), [record]
        elif _num_records(eqn):
            with eqn.ctx.manager:
                results, more = _run_call(eqn, values, given)
        else:
            with eqn.ctx.manager:
                params = eqn.primitive.get_bind_params(eqn.params)
                out = eqn.primitive.bind(*values, **params)
            results = list(out) if eqn.primitive.multiple_results else [out]
            more = []
        records += more
        env.update(zip(eqn.outvars, results, strict=True))
    results = [v.val if isinstance(v, jex.Literal) else env[v] for v in jaxpr.outvars]
    return results, records


def _run_call(eqn: Any, values: Sequence, given: Iterator[Record] | None) -> tuple[list, list[Record]]:
    """`_run` for an equation with records in its jaxpr."""
    name, params = eqn.primitive.name, eqn.params
    mine = None if given is None else [next(given) for _ in range(_num_records(eqn))]
    if name == "scan":
        return _run_scan(params, values, mine)
    if name not in ("jit", "pjit", "closed_call", "remat2", "checkpoint"):
        raise BatchNormError(
            f"a batch norm is inside of `{name}`, or `jpipe.minibatch_mean` is, so whether or how often it is called "
            "is not known. Call it outside, or give the batch norm `use_running_average=True`."
        )
    inner = params["jaxpr"]
    constants = getattr(inner, "consts", ())
    inner = getattr(inner, "jaxpr", inner)

    def call(values: Sequence, mine: list[Record] | None) -> tuple[list, list[Record]]:
        return _run(inner, constants, values, None if mine is None else iter(mine))

    if "policy" in params:
        call = jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return call(values, mine)


def _run_scan(params: dict, values: Sequence, given: list[Record] | None) -> tuple[list, list[Record]]:
    """`_run_call` for a scan, whose records are stacked."""
    body, (first, num_carried) = params["jaxpr"], loop_counts(params)
    last = first + num_carried

    def turn(carry: list, scanned: tuple) -> tuple[list, tuple]:
        xs, mine = scanned
        results, records = _run(
            body.jaxpr,
            body.consts,
            [*values[:first], *carry, *xs],
            None if mine is None else iter(mine),
        )
        return results[: last - first], (results[last - first :], records)

    carry, (stacked, records) = jax.lax.scan(
        turn,
        list(values[first:last]),
        (list(values[last:]), given),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked], records


def _num_records(eqn: Any) -> int:
    """The number of records in the jaxprs of an equation."""
    params = itertools.chain(*(p if isinstance(p, tuple) else (p,) for p in eqn.params.values()))
    jaxprs = (getattr(p, "jaxpr", p) for p in params)
    return sum(
        (inner.primitive is statistics_p) + _num_records(inner)
        for jaxpr in jaxprs
        for inner in getattr(jaxpr, "eqns", ())
    )
