"""Small layers for `fuzz.py`. Every layer keeps the shape of its activation, so any sequence of them is a model.

An activation is an array `x` `[rows, D]`, or a dict of it and whatever else travels with it (`CARRIED`).
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jpipe
from jpipe import vocabulary

NUM_WORDS = 7
D = 5  # odd, so a scan over it by pairs has parts without elements
CARRIED = ("complex", "integer", "truth", "key", "number", "empty")
"""What may travel beside `x`."""

REPORT: list[Callable] = [jpipe.report]
"""What layers report by: the library, or the plain model's list."""


@contextlib.contextmanager
def reports_to(values: list):
    """Layers report into a list here."""
    REPORT.append(lambda name, value: values.append(value))
    try:
        yield
    finally:
        REPORT.pop()


def dtype():
    """That of weights: float64 under x64."""
    return jnp.result_type(float)


def wide(x):
    """Of float32 at least, for complex numbers."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def x_of(a):
    return a["x"] if isinstance(a, dict) else a


def with_x(a, x):
    return {**a, "x": x} if isinstance(a, dict) else x


def has(a, name):
    return isinstance(a, dict) and name in a


def of_x(function):
    """A function of `x` as one of activations."""
    return lambda a: with_x(a, function(x_of(a)))


class OfX(nnx.Module):
    """A module that transforms `x`, or adds a part of its result to it."""

    def __call__(self, a):
        return with_x(a, self.of_x(x_of(a)))


class Dense(OfX):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(D, D, param_dtype=dtype(), rngs=rngs)

    def of_x(self, x):
        return self.linear(x)


class Residual(OfX):
    def __init__(self, *, rngs):
        self.up = nnx.Linear(D, 3, param_dtype=dtype(), rngs=rngs)
        self.down = nnx.Linear(3, D, param_dtype=dtype(), rngs=rngs)

    def of_x(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Named(OfX):
    """Weights and a hidden activation whose dims have names, which an axis "model" or "fsdp" splits."""

    def __init__(self, *, rngs):
        def linear(rows, columns, *names):
            init = nnx.with_partitioning(nnx.initializers.normal(0.5), names, eager_sharding=False)
            return nnx.Linear(
                rows,
                columns,
                use_bias=False,
                kernel_init=init,
                param_dtype=dtype(),
                rngs=rngs,
            )

        self.up = linear(D, 4, "embed", "mlp")
        self.down = linear(4, D, "mlp", "embed")

    def of_x(self, x):
        hidden = nn.with_logical_constraint(jnp.tanh(self.up(x)), ("batch", "mlp"))
        return x + self.down(hidden)


class Words(nnx.Module):
    """The table of an embedding or a head, whose rows all stages share."""

    def __init__(self, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.5), ("vocab", None), eager_sharding=False)
        self.table = nnx.Param(init(rngs.params(), (NUM_WORDS, D), dtype()))


class Embedding(Words):
    def __call__(self, tokens):
        return vocabulary.lookup(self.table[...], tokens)


class Head(Words):
    def __call__(self, x):
        return vocabulary.logits(x, self.table[...])


class Remat(Residual):
    def __call__(self, a):
        return with_x(a, nnx.remat(lambda self, x: self.of_x(x))(self, x_of(a)))


class Layernorm(OfX):
    def __init__(self, *, rngs):
        self.norm = nnx.LayerNorm(D, param_dtype=dtype(), rngs=rngs)

    def of_x(self, x):
        return self.norm(x)


class Convolution(OfX):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(1, 2, kernel_size=(3,), param_dtype=dtype(), rngs=rngs)

    def of_x(self, x):
        return x + self.conv(x[..., None]).mean(-1)


class ScannedDense(OfX):
    def __init__(self, *, rngs):
        self.kernels = nnx.Param(jax.random.normal(rngs.params(), (3, D, D)) / 2)

    def of_x(self, x):
        def turn(x, w):
            return jnp.tanh(x @ w), x.mean(axis=-1)

        x, means = jax.lax.scan(turn, x, self.kernels[...])
        return x + means.sum(axis=0)[:, None]


class Softmax(OfX):
    def __init__(self, *, rngs):
        self.keys = nnx.Param(jax.random.normal(rngs.params(), (3, D)))

    def of_x(self, x):
        weights = jax.nn.softmax(jnp.einsum("rd,kd->rk", x, self.keys[...]))
        return x + weights @ self.keys[...]


class ComplexWeight(OfX):
    def __init__(self, *, rngs):
        real, imag = jax.random.normal(rngs.params(), (2, D, D)) / 2
        self.kernel = nnx.Param(real + 1j * imag)

    def of_x(self, x):
        z = wide(x) @ self.kernel[...]
        return (z.real + jnp.tanh(z.imag)).astype(x.dtype)


class LowWeight(OfX):
    """A weight that is kept in bfloat16."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, D, dtype=jnp.bfloat16))

    def of_x(self, x):
        return x * self.scale[...].astype(x.dtype)[None]


class Lookup(OfX):
    """Integers from activations, and rows of a table for them."""

    def __init__(self, *, rngs):
        self.table = nnx.Embed(D + 1, D, param_dtype=dtype(), rngs=rngs)

    def of_x(self, x):
        return x + self.table((x > 0).sum(axis=-1))


class Branch(OfX):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(D, D, param_dtype=dtype(), rngs=rngs)

    def of_x(self, x):
        kernel, bias = self.linear.kernel[...], self.linear.bias[...]
        w, b = kernel.astype(x.dtype), bias.astype(x.dtype)

        def row(x):
            return jax.lax.cond(x[0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x + b, x)

        return jax.lax.map(row, x)


# -- Mutable state


class Buffer(nnx.Variable):
    pass


class Norm(OfX):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(
            D,
            momentum=0.8,
            use_fast_variance=False,
            param_dtype=dtype(),
            rngs=rngs,
        )

    def of_x(self, x):
        return self.norm(x)


class NormTwice(Norm):
    def of_x(self, x):
        return self.norm(x) + self.norm(3 * x + 5)


class NormMasked(Norm):
    def __call__(self, a):
        mask = a["truth"][:, None] if has(a, "truth") else None
        return with_x(a, jnp.tanh(self.norm(x_of(a), mask=mask)))


class NormRemat(Norm):
    def __call__(self, a):
        return with_x(a, nnx.remat(lambda self, x: self.norm(x))(self, x_of(a)))


class NormScanned(Norm):
    """Every turn of a loop calls the norm, and passes on what does not depend on it."""

    def of_x(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def loop(carry, _):
            norm, x, total = carry
            return norm, jnp.tanh(x) + 1, total + norm(x).astype(total.dtype)

        return loop((self.norm, x, jnp.zeros_like(x)), jnp.arange(2))[2]


class NormEval(Norm):
    """A norm that the user put into evaluation mode: its statistics are constants."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.norm.mean[...] = jnp.linspace(-0.5, 0.5, D)
        self.norm.eval()


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, a, train=True):
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.8, param_dtype=dtype())
        return with_x(a, norm(x_of(a)))


class Count(OfX):
    """Integers, which outputs read."""

    def __init__(self, *, rngs):
        self.count = Buffer(jnp.int32(0))
        self.on = Buffer(jnp.array(False))

    def of_x(self, x):
        y = x * (1 + 0.1 * jnp.where(self.on[...], self.count[...], -1)).astype(x.dtype)
        self.count[...] += 1
        self.on[...] = ~self.on[...]
        return y


class Average(OfX):
    """A moving average, which outputs read."""

    def __init__(self, *, rngs):
        self.ema = Buffer(jnp.zeros(D))
        self.low = Buffer(jnp.full(D, jnp.inf))

    def of_x(self, x):
        y = x - self.ema[...].astype(x.dtype)[None]
        mean = jax.lax.stop_gradient(x.mean(axis=0)).astype(self.ema[...].dtype)
        self.ema[...] = 0.9 * self.ema[...] + 0.1 * mean
        self.low[...] = jnp.minimum(self.low[...], mean)
        return y


class Written(OfX):
    """State that no output reads."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(D, D, param_dtype=dtype(), rngs=rngs)
        self.last = Buffer(jnp.zeros(D))
        self.turned = Buffer(jnp.exp(1j * jnp.arange(D)))

    def of_x(self, x):
        y = self.linear(x)
        self.last[...] = y.mean(axis=0).astype(self.last[...].dtype)
        self.turned[...] = self.turned[...] * jnp.exp(0.5j)
        return y


class Constants(OfX):
    def __init__(self, *, rngs):
        self.table = Buffer(jnp.linspace(0.1, 0.7, D, dtype=jnp.bfloat16))
        self.mask = Buffer(jnp.where(jnp.arange(D) % 2 == 0, 0.0, -jnp.inf))
        self.scale = nnx.Param(jnp.ones(D))

    def of_x(self, x):
        kept = jnp.where(jnp.isfinite(self.mask[...]), x, 0.5 * x)
        factor = self.scale[...].astype(x.dtype) + self.table[...].astype(x.dtype)
        return kept * factor[None]


# -- Random numbers


class Dropout(OfX):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(D, D, param_dtype=dtype(), rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)

    def of_x(self, x):
        return self.dropout(self.linear(x))


class DropoutRemat(Dropout):
    def __call__(self, a):
        return with_x(a, nnx.remat(lambda self, x: self.of_x(x))(self, x_of(a)))


class DropoutTwice(Dropout):
    """Two streams, one of which draws twice."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.other = nnx.Dropout(0.3, rngs=rngs)

    def of_x(self, x):
        return self.dropout(self.other(x)) + self.dropout(self.linear(x))


class DropoutEval(Dropout):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.dropout.eval()


# -- What else travels


def noise(a):
    if not has(a, "key"):
        return a
    pair = jax.vmap(jax.random.split)(a["key"])
    x = x_of(a)
    drawn = jax.vmap(lambda key: jax.random.normal(key, (D,), jnp.float32))(pair[:, 0])
    return {**a, "x": x + 0.1 * drawn.astype(x.dtype), "key": pair[:, 1]}


def rotate(a):
    if not has(a, "complex"):
        return a
    x, z = a["x"], a["complex"]
    z = z * jnp.exp(1j * wide(x))
    return {**a, "x": x + 0.1 * z.real.astype(x.dtype), "complex": z + x.mean()}


def others(a):
    """Changes integers, truths and numbers."""
    a = dict(a) if isinstance(a, dict) else a
    if has(a, "integer"):
        a["integer"] = a["integer"] + 1
    if has(a, "truth"):
        a["truth"] = a["truth"] ^ (x_of(a)[:, 0] > 1)
    if has(a, "number"):
        a["number"] = 3
    return a


def report(a):
    REPORT[-1]("size", (wide(x_of(a)) ** 2).mean())
    return a


def squares(parameters):
    """A penalty on weights."""
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(parameters))


def enter(a):
    """From the entries of a batch to an activation."""
    if not isinstance(a, dict):
        return a
    a = dict(a)
    if "key" in a:
        a["key"] = jax.random.wrap_key_data(a["key"])
    if "number" in a:
        a["number"] = 2.5
    if "empty" in a:
        a["empty"] = jnp.zeros((len(a["x"]), 0))
    return a


def leave(a):
    """From an activation to outputs, which all that has traveled reaches."""
    x = x_of(a)
    if has(a, "complex"):
        x = x + 0.1 * (a["complex"].imag).astype(x.dtype)
    if has(a, "integer"):
        x = x + 0.1 * jnp.sin(a["integer"].astype(x.dtype))[:, None]
    if has(a, "truth"):
        x = jnp.where(a["truth"][:, None], x, 0.5 * x)
    if has(a, "key"):
        drawn = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(a["key"])
        x = x + drawn.astype(x.dtype)[:, None]
    if has(a, "number"):
        x = x * (0.1 * a["number"])
    if has(a, "empty"):
        x = x + a["empty"].sum().astype(x.dtype)
    return x


class LinenDense(nn.Module):
    @nn.compact
    def __call__(self, a):
        return with_x(a, nn.Dense(D, param_dtype=dtype())(x_of(a)))


def _init(key, a):
    return {"w": jax.random.normal(key, (D, D)) / 2}


def _apply(parameters, a):
    return with_x(a, x_of(a) @ parameters["w"].astype(x_of(a).dtype))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
      layer: as `jpipe.Pipeline` takes it.
      norm: whether its state is that of the whole minibatch.
      state: whether microbatches move its state.
      mixed: `(weights of the forward, of the backward, x) -> x`, where both are the kernel and bias of a dense
        layer; None: the layer has no weights, or the definition of PipeMare does not say what it computes.
      low: whether it rounds to bfloat16.
      random: whether it draws from its key.
    """

    layer: Any
    norm: bool = False
    state: bool = False
    mixed: Any = None
    low: bool = False
    random: bool = False


def _plain(function):
    return Kind(jpipe.Function(function), mixed=())


KINDS: dict[str, Kind] = {
    "dense": Kind(Dense, mixed=("linear", "kernel", "bias")),
    "tanh": _plain(of_x(jnp.tanh)),
    "linen": Kind(LinenDense(), mixed=("Dense_0", "kernel", "bias")),
    "init_apply": Kind(jpipe.InitApply(_init, _apply)),
    "residual": Kind(Residual),
    "named": Kind(Named),
    "remat": Kind(Remat),
    "layernorm": Kind(Layernorm),
    "convolution": Kind(Convolution),
    "scanned": Kind(ScannedDense),
    "softmax": Kind(Softmax),
    "complex_weight": Kind(ComplexWeight),
    "low_weight": Kind(LowWeight, low=True),
    "lookup": Kind(Lookup),
    "branch": Kind(Branch),
    "norm": Kind(Norm, norm=True),
    "norm_twice": Kind(NormTwice, norm=True),
    "norm_masked": Kind(NormMasked, norm=True),
    "norm_remat": Kind(NormRemat, norm=True),
    "norm_scanned": Kind(NormScanned, norm=True),
    "norm_eval": Kind(NormEval),
    "linen_norm": Kind(
        jpipe.Linen(LinenNorm(), train={"train": True}, evaluate={"train": False}),
        norm=True,
    ),
    "count": Kind(Count, state=True),
    "average": Kind(Average, state=True),
    "written": Kind(Written, state=True),
    "constants": Kind(Constants),
    "dropout": Kind(Dropout, random=True),
    "dropout_remat": Kind(DropoutRemat, random=True),
    "dropout_twice": Kind(DropoutTwice, random=True),
    "dropout_eval": Kind(DropoutEval),
    "noise": _plain(noise),
    "rotate": _plain(rotate),
    "others": _plain(others),
    "report": _plain(report),
    "weighed": Kind(jpipe.report_weights(Dense, "size", squares)),
    "sums": _plain(of_x(lambda x: jax.lax.associative_scan(jnp.add, x, axis=1) * 0.5)),
    "products": _plain(of_x(lambda x: jax.lax.associative_scan(jnp.multiply, 1 + 0.1 * x, axis=1))),
    "sort": _plain(of_x(lambda x: jnp.sort(x, axis=-1))),
    "checkpoint": _plain(of_x(jax.checkpoint(lambda x: jnp.sin(x) * jnp.exp(-(x**2))))),
    "rows": _plain(of_x(jax.vmap(lambda x: x * jax.nn.sigmoid(x[::-1])))),
    "loop": _plain(of_x(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + 0.1 * i, x))),
    "clip": _plain(of_x(lambda x: jnp.clip(x, -1.5, 1.5))),
}
