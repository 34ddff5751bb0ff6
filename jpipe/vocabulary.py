"""Operations on a vocabulary that all devices of a pipeline share.

The embedding of a large vocabulary, and the head that computes its logits, weigh as much as several blocks.
On the first and the last stage alone they make these stages larger, and the last stage slower, than all others.
With a rule such as `("vocab", "stage")`, or with the axis "stage" in the metadata of a parameter, all stages compute
these layers together instead: each device keeps an equal part of the rows of the parameter, looks up its own tokens,
and computes its own logits.

A layer uses the functions of this module on its matrix, and the loss uses them on the logits. Outside of a
pipeline they get whole arrays, and compute what the usual functions compute. Inside, `lookup` and `logits` get a
part of the matrix, and `logits` returns `SplitLogits`, of which no device has all:

    embedding   every device: the rows of its tokens, zeros for others   -> one sum over devices
    head        every device: x from the last stage                      -> the logits of its tokens
    loss        maximum, sum of exponentials, and the label's logit      -> three reductions of one number per label
    gradient    every device: that of its own rows; that of x            -> one sum over devices

Letters: V tokens, D width, P devices.

References:
  Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv:2411.05288. There, passes of the
  vocabulary are placed between those of the stages. Here all devices meet in every tick anyhow, so no pass is added.
  Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3 (a sum forwards, the identity backwards, and conversely).
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

__all__ = [
    "SplitLogits",
    "VocabularyError",
    "argmax",
    "chunked_cross_entropy",
    "cross_entropy",
    "logits",
    "lookup",
]


class VocabularyError(ValueError):
    """Layers cannot be split over all stages in this pipeline; leave the rule with "stage" out of its `axis_rules`."""


@dataclasses.dataclass
class Splitting:
    """The split of the layer that runs now.

    Attributes:
      axis: the axis of the mesh whose devices have a part each.
      num_parts: P.
      rows: rows of a part -> V, of the matrices that are split.
      used: whether the layer has called `lookup` or `logits` on a part.
    """

    axis: str
    num_parts: int
    rows: Mapping[int, int]
    used: bool = False

    def first_row(self, num_rows: int) -> jax.Array:
        """Number of the first token of this device's part."""
        return lax.axis_index(self.axis) * num_rows


_SPLITTING: contextvars.ContextVar[Splitting | None] = contextvars.ContextVar("jpipe_vocabulary", default=None)


@contextlib.contextmanager
def splitting(axis: str, num_parts: int, rows: Mapping[int, int]) -> Iterator[Splitting]:
    """A context in which a layer gets parts of matrices. For the arguments see `Splitting`."""
    current = Splitting(axis, num_parts, rows)
    token = _SPLITTING.set(current)
    try:
        yield current
    finally:
        _SPLITTING.reset(token)


def _splitting(table: jax.Array, name: str) -> Splitting | None:
    """The splitting of a matrix, or None if the matrix is whole."""
    if table.ndim != 2:
        raise ValueError(
            f"`table` of `jpipe.vocabulary.{name}` must be a matrix [V, D] with one row for each token, got shape "
            f"{table.shape}. Transpose a kernel [D, V]: `kernel.T`."
        )
    current = _SPLITTING.get()
    if current is None or table.shape[0] not in current.rows:
        return None
    current.used = True
    return current


# -- Collectives with the gradients of values that are equal on all devices


def _is_split_by_compiler() -> bool:
    """Returns whether the mesh of the surroundings has axes over which the compiler splits values."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def _reduced(reduce: Callable[[jax.Array, str], jax.Array], x: jax.Array, axis: str) -> jax.Array:
    """Reduces over devices.

    XLA for CPUs cannot reduce numbers of 16 bits that the compiler splits over other axes.
    """
    if x.dtype.itemsize != 2 or not _is_split_by_compiler():
        return reduce(x, axis)
    return lax.platform_dependent(
        x,
        cpu=lambda x: reduce(x.astype(jnp.float32), axis).astype(x.dtype),
        default=lambda x: reduce(x, axis),
    )


def sum_over(x: jax.Array, axis: str) -> jax.Array:
    """The sum over the devices of an axis."""
    return _reduced(lax.psum, x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_of_parts(x: jax.Array, axis: str) -> jax.Array:
    """The sum over devices. Each device's part gets the gradient of the sum."""
    return sum_over(x, axis)


_sum_of_parts.defvjp(lambda x, axis: (sum_over(x, axis), None), lambda axis, _, g: (g,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _to_all_parts(x: jax.Array, axis: str) -> jax.Array:
    """A value that is equal on all devices. Its gradient is the sum of the gradients of the parts."""
    return x


_to_all_parts.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (sum_over(g, axis),))


# -- Layers


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows of an embedding matrix.

    Args:
      table: `[V, D]`, or this device's part of its rows.
      tokens: integers `[...]`, from 0 to V - 1. Results for other numbers are not defined.

    Returns:
      `[..., D]`, whole on every device.

    Example:
      >>> table = jnp.arange(6.0).reshape(3, 2)
      >>> lookup(table, jnp.array([2, 0])).tolist()
      [[4.0, 5.0], [0.0, 1.0]]
    """
    current = _splitting(table, "lookup")
    if current is None:
        return jnp.take(table, tokens, axis=0)
    number, inside = _within(current, tokens, table.shape[0])
    rows = jnp.take(table, number, axis=0)
    return _sum_of_parts(jnp.where(inside[..., None], rows, 0), current.axis)


def logits(x: jax.Array, table: jax.Array, bias: jax.Array | None = None) -> Any:
    """`x @ table.T + bias`, the logits of all tokens.

    Args:
      x: `[..., D]`, whole on every device.
      table: `[V, D]`, or this device's part of its rows.
      bias: `[V]`, or this device's part, or None.

    Returns:
      `[..., V]`; `SplitLogits` if the matrix is a part.
    """
    current = _splitting(table, "logits")
    if current is None:
        return _plus_bias(x @ table.T, bias)
    values = _plus_bias(_to_all_parts(x, current.axis) @ table.T, bias)
    num_tokens = current.rows[table.shape[0]]
    return SplitLogits(values, num_tokens, current.axis, current.num_parts)


def _plus_bias(values: jax.Array, bias: jax.Array | None) -> jax.Array:
    return values if bias is None else values + jnp.broadcast_to(bias, values.shape)


def _within(current: Splitting, tokens: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """The row of each token in this device's part, and whether it is there."""
    number = tokens - current.first_row(num_rows).astype(tokens.dtype)
    inside = (number >= 0) & (number < num_rows)
    return jnp.where(inside, number, 0), inside


# -- Logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitLogits:
    """Logits `[..., V]`, of which each device has those of its own tokens.

    Only the functions of this module take them. Others raise a `TypeError`.

    Attributes:
      values: `[..., rows]` on each device; the last device may have columns of no token.
      num_tokens: V.
      axis: the axis of the mesh whose devices have a part each.
      num_parts: P.
    """

    values: jax.Array
    num_tokens: int = dataclasses.field(metadata=dict(static=True))
    axis: str = dataclasses.field(metadata=dict(static=True))
    num_parts: int = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., V]`."""
        return (*self.values.shape[:-1], self.num_tokens)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def astype(self, dtype: Any) -> "SplitLogits":
        """The logits in another dtype."""
        return dataclasses.replace(self, values=self.values.astype(dtype))

    def __jax_array__(self) -> jax.Array:
        raise TypeError(
            f"logits of shape {self.shape} are split over the {self.num_parts} devices of the axis {self.axis!r}, and "
            "no device has all of them. Use the functions of `jpipe.vocabulary`, such as "
            "`jpipe.vocabulary.cross_entropy(logits, labels)`, or leave the axis out of the parameter's partition."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(jax.Array, name):
            raise AttributeError(f"`SplitLogits` has no attribute {name!r}.")
        self.__jax_array__()

    def local_values(self) -> tuple[jax.Array, Splitting]:
        """This device's logits, the least number in columns of no token, and how they are split."""
        current = Splitting(self.axis, self.num_parts, {})
        num_rows = self.values.shape[-1]
        if num_rows * self.num_parts == self.num_tokens:
            return self.values, current
        tokens = current.first_row(num_rows) + jnp.arange(num_rows)
        least = jnp.asarray(jnp.finfo(self.dtype).min, self.dtype)
        return jnp.where(tokens < self.num_tokens, self.values, least), current

    def gathered(self) -> jax.Array:
        """The logits of all tokens, `[..., V]`, on every device."""
        whole = lax.all_gather(self.values, self.axis, axis=self.ndim - 1, tiled=True)
        return lax.slice_in_dim(whole, 0, self.num_tokens, axis=self.ndim - 1)


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """Softmax cross-entropy with integer labels.

    Args:
      logits: `[..., V]` or `SplitLogits`.
      labels: integers `[...]`, from 0 to V - 1.

    Returns:
      `[...]`, the negative logarithm of the probability of each label, in nats.

    Example:
      >>> float(cross_entropy(jnp.zeros(4), jnp.array(1)) - jnp.log(4))
      0.0
    """
    if not isinstance(logits, SplitLogits):
        if jax.sharding.get_abstract_mesh().empty:
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jax.nn.logsumexp(logits, axis=-1) - _picked(logits, labels)
    values, current = logits.local_values()
    largest = lax.stop_gradient(values).max(axis=-1)
    largest = _reduced(lax.pmax, largest, current.axis)
    total = jnp.exp(values - largest[..., None]).sum(axis=-1)
    num_rows = values.shape[-1]
    if _is_split_by_compiler():
        first = current.first_row(num_rows).astype(labels.dtype)
        picked = _picked(values, labels - first)
    else:
        number, inside = _within(current, labels, num_rows)
        picked = jnp.take_along_axis(values, number[..., None], axis=-1)[..., 0]
        picked = jnp.where(inside, picked, 0)
    total, picked = _sum_of_parts(jnp.stack([total, picked]), current.axis)
    return jnp.log(total) + largest - picked


def _picked(values: jax.Array, number: jax.Array) -> jax.Array:
    """The value `[...]` at a number `[...]` along the last dim, 0 where there is none.

    Where the compiler splits rows and vocabulary, XLA for CPUs and TPUs cannot look it up.
    """
    numbers = lax.broadcasted_iota(number.dtype, values.shape, values.ndim - 1)
    return jnp.where(numbers == number[..., None], values, 0).sum(axis=-1)


# -- Logits that are never whole


def chunked_cross_entropy(x: jax.Array, table: jax.Array, labels: jax.Array, *, chunk: int | None = None) -> jax.Array:
    """`cross_entropy(logits(x, table), labels)`, where the logits of all positions would be too large.

    The logits of some positions are computed at a time, and once more in the backward. They are in float32 at least,
    as the sum over positions of the gradient of `table` is. A model that calls it returns its loss.

    Args:
      x: `[..., T, D]`, the inputs of the head.
      table: `[V, D]`, such as the matrix of an embedding.
      labels: integers `[..., T]`, from 0 to V - 1. A position with a negative label has loss 0 and no gradient.
      chunk: the number of positions whose logits are computed at a time. None: their logits are about as many numbers
        as `x` has.

    Returns:
      float32 or wider `[..., T]`, in nats.

    Raises:
      ValueError: if shapes do not fit, `labels` are no integers, or `chunk` is less than 1.
      VocabularyError: if the rows of `table` are split over stages.

    References:
      Hsu et al., "Liger Kernel", arXiv:2410.10989, section 3.2 (chunks of the inputs, and how many).

    Example:
      >>> x, table = jnp.ones((5, 2)), jnp.ones((4, 2))
      >>> float(chunked_cross_entropy(x, table, jnp.arange(5) % 4, chunk=2)[4] - jnp.log(4))
      0.0
    """
    if _splitting(table, "chunked_cross_entropy") is not None:
        raise VocabularyError(
            "`jpipe.vocabulary.chunked_cross_entropy` takes a whole matrix, and the rows of `table` are split over all "
            'stages. Leave "stage" out of its axes, or use `logits` and `cross_entropy`, which take parts.'
        )
    if x.ndim < 2 or x.shape[-1] != table.shape[1] or labels.shape != x.shape[:-1]:
        raise ValueError(
            "`jpipe.vocabulary.chunked_cross_entropy` takes `x` [..., T, D], `table` [V, D] and `labels` [..., T], got "
            f"shapes {x.shape}, {table.shape} and {labels.shape}."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"`labels` must be integers, the numbers of tokens, got dtype {labels.dtype}.")
    num_positions, (num_tokens, dim) = labels.shape[-1], table.shape
    if chunk is None:
        chunk = -(-num_positions // -(-num_tokens // dim))
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"`chunk` must be an integer of at least 1, a number of positions, got {chunk!r}.")
    return _chunked(x, table, labels, min(chunk, num_positions))


def _for_each_chunk(num_positions: int, chunk: int, body: Callable[[Any, int, Any], Any], state: Any) -> Any:
    """`state = body(first position, number of positions, state)` for each chunk. The last one may be shorter."""
    whole = num_positions // chunk
    state, _ = lax.scan(lambda state, i: (body(i * chunk, chunk, state), None), state, jnp.arange(whole))
    left = num_positions - whole * chunk
    return body(whole * chunk, left, state) if left else state


def _chunk_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """`[..., V]`, in float32 at least."""
    dtype = jnp.promote_types(jnp.result_type(x, table), jnp.float32)
    return lax.dot_general(x, table, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _chunked(x: jax.Array, table: jax.Array, labels: jax.Array, chunk: int) -> jax.Array:
    return _chunked_forward(x, table, labels, chunk)[0]


def _chunked_forward(x: jax.Array, table: jax.Array, labels: jax.Array, chunk: int) -> tuple[jax.Array, tuple]:
    axis = labels.ndim - 1

    def body(first: Any, number: int, state: tuple) -> tuple:
        values = _chunk_logits(lax.dynamic_slice_in_dim(x, first, number, axis), table)
        chosen = lax.dynamic_slice_in_dim(labels, first, number, axis)
        log_sum = jax.nn.logsumexp(values, axis=-1)
        losses = jnp.where(chosen < 0, 0, log_sum - _picked(values, chosen))
        return tuple(
            lax.dynamic_update_slice_in_dim(a, b, first, axis) for a, b in zip(state, (losses, log_sum), strict=True)
        )

    empty = jnp.zeros(labels.shape, jax.eval_shape(_chunk_logits, x, table).dtype)
    losses, log_sums = _for_each_chunk(labels.shape[-1], chunk, body, (empty, empty))
    return losses, (x, table, labels, log_sums)


def _chunked_backward(chunk: int, residuals: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, table, labels, log_sums = residuals
    axis = labels.ndim - 1

    def body(first: Any, number: int, state: tuple) -> tuple:
        x_gradient, table_gradient = state
        inputs, chosen, log_sum, g = (
            lax.dynamic_slice_in_dim(a, first, number, axis) for a in (x, labels, log_sums, gradient)
        )
        probabilities = jnp.exp(_chunk_logits(inputs, table) - log_sum[..., None])
        is_label = lax.broadcasted_iota(labels.dtype, probabilities.shape, axis + 1) == chosen[..., None]
        g = jnp.where(chosen < 0, 0, g)
        by_logits = ((probabilities - is_label) * g[..., None]).astype(x.dtype)
        over = tuple(range(axis + 1))
        added = lax.dot_general(
            by_logits, inputs, ((over, over), ((), ())), preferred_element_type=table_gradient.dtype
        )
        by_inputs = (by_logits @ table).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(x_gradient, by_inputs, first, axis), table_gradient + added

    empty = jnp.zeros_like(x), jnp.zeros(table.shape, log_sums.dtype)
    x_gradient, table_gradient = _for_each_chunk(labels.shape[-1], chunk, body, empty)
    return x_gradient, table_gradient.astype(table.dtype), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def argmax(logits: Any) -> jax.Array:
    """The token with the largest logit, the first of several; integers `[...]`.

    Args:
      logits: `[..., V]` or `SplitLogits`.
    """
    if not isinstance(logits, SplitLogits):
        return jnp.argmax(logits, axis=-1)
    values, current = logits.local_values()
    values = lax.stop_gradient(values)
    largest = values.max(axis=-1)
    token = values.argmax(axis=-1) + current.first_row(values.shape[-1])
    is_largest = largest == _reduced(lax.pmax, largest, current.axis)
    return lax.pmin(jnp.where(is_largest, token, logits.num_tokens), current.axis)
