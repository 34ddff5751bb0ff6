"""Kernels that JAX splits by functions of their own, in stages on a mesh with axes for the compiler, against plain JAX.

cuDNN's attention has no lowering for CPUs. Here it has one, a plain attention.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jpipe

KEY = jax.random.key(0)
INIT = nnx.initializers.lecun_normal()
ROWS, POSITIONS, DIM, HEADS = 16, 8, 32, 4


def reference(layout, scale, mask_type, query, key, value, bias, num_seen):
    """An attention: its results, and the logarithms of the sums that its softmax divides by."""
    if layout == 0:
        query, key, value = (a.swapaxes(1, 2) for a in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(a, repeats, 1) for a in (key, value))
    logits = scale * jnp.einsum("bhtd,bhsd->bhts", query, key, preferred_element_type=jnp.float32)
    if bias.size:
        logits = logits + bias
    if "CAUSAL" in mask_type.name:
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[2:], bool)), logits, -1e9)
    if num_seen.size:
        logits = jnp.where(jnp.arange(logits.shape[3])[None, None, None] < num_seen[:, None, None, None], logits, -1e9)
    sums = jax.nn.logsumexp(logits, -1)
    out = jnp.einsum("bhts,bhsd->bhtd", jnp.exp(logits - sums[..., None]).astype(value.dtype), value)
    return out.swapaxes(1, 2) if layout == 0 else out, sums


def forward(*operands, layout, scale, mask_type, is_training, **_):
    query, key, value, bias, _, num_seen, *_ = operands
    out, sums = reference(layout, scale, mask_type, query, key, value, bias, num_seen)
    return (out, sums) if is_training else (out,)


def backward(*operands, layout, scale, mask_type, variadic_args, **_):
    *arrays, _, num_seen = operands[:6]

    def out(*arrays):
        return reference(layout, scale, mask_type, *arrays, num_seen)[0]

    gradients = jax.vjp(out, *arrays)[1](operands[-1])
    return gradients if variadic_args[1] else gradients[:3]


@pytest.fixture
def attention(monkeypatch):
    """`jax.nn.dot_product_attention` as cuDNN's kernel."""
    for primitive, function in (
        (cudnn._dot_product_attention_fwd_p, forward),
        (cudnn._dot_product_attention_bwd_p, backward),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True), platform="cpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: capability == "9.0")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


class Attends(nnx.Module):
    """A block as somebody wrote it."""

    def __init__(self, attention, options, init=INIT, *, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.query, self.out = linear(DIM, DIM, kernel_init=init), linear(DIM, DIM)
        self.key, self.value = (linear(DIM, DIM // 2, kernel_init=init) for _ in range(2))
        self.attention, self.options = attention, options

    def __call__(self, x):
        heads = (linear(x).astype(jnp.bfloat16) for linear in (self.query, self.key, self.value))
        heads = [a.reshape(*a.shape[:2], -1, DIM // HEADS) for a in heads]
        options = {name: make(len(x)) for name, make in self.options.items()}
        y = self.attention(*heads, **options)
        return x + self.out(y.reshape(x.shape).astype(x.dtype))


class Model(nnx.Module):
    def __init__(self, make, *, rngs):
        self.blocks = nnx.List([make(rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def trained(make, mesh, schedule):
    """Checks a step against plain JAX."""
    rng = np.random.default_rng(0)
    batch = {n: rng.normal(size=(ROWS, POSITIONS, DIM)).astype(np.float32) for n in ("inputs", "targets")}
    pipe = jpipe.Pipeline(
        lambda rngs: Model(functools.partial(make, init=nnx.with_partitioning(INIT, (None, "heads"))), rngs=rngs),
        loss=loss,
        optimizer=optax.sgd(1.0),
        schedule=schedule(2, 2),
        mesh=jpipe.make_mesh(stage=2, **mesh),
        axis_rules=[("heads", "model")] if "model" in mesh else [],
        boundaries=["blocks.1"],
    )
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)
    graph, _ = nnx.split(Model(make, rngs=nnx.Rngs(0)))

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        return loss(nnx.merge(graph, nnx.State(params))(batch["inputs"]), batch)

    want, gradients = plain(params)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-4)
    after = jax.tree.map(lambda a, g: a - g, params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), pipe.get_params(state), after)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients)) > 0.01


OPTIONS = {
    "causal": {"is_causal": lambda rows: True},
    "bias": {"bias": lambda rows: jnp.linspace(-1, 1, 8 * 8, dtype=jnp.bfloat16).reshape(1, 1, 8, 8)},
    "lengths": {"key_value_seq_lengths": lambda rows: 3 + jnp.arange(rows, dtype=jnp.int32) % 2},
}


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("mesh", "name", "schedule"),
    [
        ({"fsdp": 2}, "causal", jpipe.schedules.one_f_one_b),
        ({"model": 2}, "bias", jpipe.schedules.zero_bubble_h1),
        *(
            pytest.param(mesh, name, jpipe.schedules.gpipe, marks=pytest.mark.exhaustive)
            for mesh in ({"data": 2, "model": 2}, {"data": 2, "fsdp": 2})
            for name in OPTIONS
        ),
    ],
)
def test_cudnns_attention_runs_on_each_device(attention, mesh, name, schedule):
    trained(functools.partial(Attends, attention, OPTIONS[name]), mesh, schedule)


@custom_partitioning
def sine(x):
    """As packages write a kernel that they split themselves."""
    return jnp.sin(x)


def partition(mesh, arguments, result):
    split = NamedSharding(mesh, P(*arguments[0].sharding.spec))
    return mesh, jnp.sin, split, (split,)


sine.def_partition(partition, sharding_rule="... -> ...")


@jax.custom_vjp
def kernel(x):
    return sine(x)


kernel.defvjp(lambda x: (sine(x), x), lambda x, gradient: (gradient * jnp.cos(x),))


class Sines(nnx.Module):
    def __init__(self, init=INIT, *, rngs):
        self.linear = nnx.Linear(DIM, DIM, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        def turn(x, _):
            return x + kernel(self.linear(x)), None

        return jax.lax.scan(turn, x, length=2)[0]


@pytest.mark.first_case
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {}, pytest.param({"data": 2, "model": 2}, marks=pytest.mark.exhaustive)])
def test_any_other_kernel_is_computed_whole(mesh):
    trained(Sines, mesh, jpipe.schedules.one_f_one_b)
