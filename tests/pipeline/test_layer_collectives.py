"""Layers that own a collective: plain JAX's numbers in every schedule, and the collectives in the branch of their stage.

The plain layers are written without a mesh.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
import pytest
from collectives import collectives
from flax import linen, nnx
from helpers import assert_close, refused, use_target
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jpipe

D, T, B, N = 8, 4, 8, 2
RATE = 0.05
KEY = jax.random.key(3)


def mesh_of(**sizes) -> Mesh:
    """A mesh with axes of any name."""
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def square(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(count=3):
    rng = np.random.default_rng(0)
    return [{n: rng.normal(size=(B, T, D)).astype(np.float32) for n in ("inputs", "targets")} for _ in range(count)]


def weights(rngs, *shape):
    return nnx.Param(jax.random.normal(rngs.params(), shape) / 4)


def linear(p, x):
    return x @ p["kernel"] + jnp.broadcast_to(p["bias"], (*x.shape[:-1], p["bias"].size))


# -- Attention over a ring: `lax.ppermute` in a loop


class RingAttention(nnx.Module):
    """Attention of positions that are split over "context"; keys and values go round."""

    def __init__(self, rngs):
        self.qkv, self.out = nnx.Linear(D, 3 * D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        split = P(None, "context")
        attend = jax.shard_map(ring, in_specs=(split,) * 3, out_specs=split)
        return x + self.out(attend(*jnp.split(self.qkv(x), 3, -1)))


def ring(q, k, v):
    n = lax.axis_size("context")

    def turn(carry, _):
        k, v, total, weight = carry
        scores = jnp.exp(jnp.einsum("btd,bsd->bts", q, k) / D)
        total += jnp.einsum("bts,bsd->btd", scores, v)
        weight += scores.sum(-1, keepdims=True)
        k, v = (lax.ppermute(a, "context", [(i, (i + 1) % n) for i in range(n)]) for a in (k, v))
        return (k, v, total, weight), None

    carry, _ = lax.scan(turn, (k, v, jnp.zeros_like(q), jnp.zeros_like(q[..., :1])), length=n)
    return carry[2] / carry[3]


def plain_attention(p, x):
    q, k, v = jnp.split(linear(p["qkv"], x), 3, -1)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / D)
    return x + linear(p["out"], jnp.einsum("bts,bsd->btd", scores, v))


# -- Experts: two `lax.all_to_all`


class Experts(nnx.Module):
    """Each row goes to the device of its expert and back. E experts on as many devices of "expert"."""

    E = 4

    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.normal(0.25), ("expert", None, None))
        self.gate, self.w = weights(rngs, D, self.E), nnx.Param(split(rngs.params(), (self.E, D, D)))

    def __call__(self, x):
        specs = P("expert"), P(), P("expert")
        run = jax.shard_map(dispatch, in_specs=specs, out_specs=P("expert"), axis_names={"expert"})
        return x + run(x.reshape(-1, D), self.gate[...], self.w[...]).reshape(x.shape)


def dispatch(rows, gate, w):  # [R, D], [D, E], [1, D, D]
    probability = jax.nn.softmax(rows @ gate)
    chosen = jax.nn.one_hot(probability.argmax(-1), Experts.E)
    slots = jnp.einsum("re,rd->erd", chosen, rows)
    arrived = lax.all_to_all(slots, "expert", 0, 0, tiled=True)
    back = lax.all_to_all(jnp.tanh(arrived @ w[0]), "expert", 0, 0, tiled=True)
    return jnp.einsum("re,erd->rd", chosen * probability, back)


def plain_experts(p, x):
    probability = jax.nn.softmax(x @ p["gate"])
    chosen = jax.nn.one_hot(probability.argmax(-1), Experts.E) * probability
    return x + sum(chosen[..., e, None] * jnp.tanh(x @ p["w"][e]) for e in range(Experts.E))


# -- Tensor parallelism with an explicit `lax.psum`, in every form of a layer


def partial_mlp(x, up, down):
    return lax.psum(jnp.tanh(x @ up) @ down, "model")


def split_mlp(x, up, down, **options):
    """`options` name the mesh in one of three ways."""
    run = jax.shard_map(partial_mlp, in_specs=(P(), P(None, "model"), P("model")), out_specs=P(), **options)
    return x + run(x, up, down)


class SplitMLP(nnx.Module):
    def __init__(self, rngs, **options):
        self.up, self.down, self.options = weights(rngs, D, 2 * D), weights(rngs, 2 * D, D), options

    def __call__(self, x):
        return split_mlp(x, self.up[...], self.down[...], **self.options)


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.initializers.normal(0.25)
        return split_mlp(x, self.param("up", init, (D, 2 * D)), self.param("down", init, (2 * D, D)))


def init_pair(key, x):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (D, 2 * D)) / 4, "down": jax.random.normal(down, (2 * D, D)) / 4}


def plain_mlp(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


class RematMLP(SplitMLP):
    def __call__(self, x):
        return jax.checkpoint(split_mlp)(x, self.up[...], self.down[...])


class LoopOfMLPs(nnx.Module):
    """`jax.checkpoint` in `lax.scan`."""

    def __init__(self, rngs):
        self.up, self.down = weights(rngs, 2, D, 2 * D), weights(rngs, 2, 2 * D, D)

    def __call__(self, x):
        block = jax.checkpoint(lambda x, w: (split_mlp(x, *w), None))
        return lax.scan(block, x, (self.up[...], self.down[...]))[0]


def plain_loop(p, x):
    for up, down in zip(p["up"], p["down"]):
        x = plain_mlp({"up": up, "down": down}, x)
    return x


class Model(nnx.Module):
    """A whole model, which the pipeline cuts."""

    def __init__(self, rngs):
        self.embed, self.blocks = nnx.Linear(D, D, rngs=rngs), nnx.List([SplitMLP(rngs) for _ in range(3)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def plain_model(p, x):
    x = linear(p["embed"], x)
    for _, block in sorted(p["blocks"].items()):
        x = plain_mlp(block, x)
    return x


# -- Pallas kernels


def _double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...] + 1


@jax.custom_vjp
def double(x):
    block = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i * 1, 0, 0))
    call = pl.pallas_call(
        _double,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0],),
        in_specs=[block],
        out_specs=block,
        interpret=True,
    )
    return call(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (2 * g,))


class Kernel(nnx.Module):
    """A kernel on whole activations, or on their parts over an axis."""

    def __init__(self, rngs, axis=None):
        self.lin, self.axis = nnx.Linear(D, D, rngs=rngs), axis

    def __call__(self, x):
        run = double
        if self.axis is not None:
            split = P(None, None, self.axis)
            run = jax.shard_map(double, in_specs=split, out_specs=split, check_vma=False)
        return run(jnp.tanh(self.lin(x)))


def plain_kernel(p, x):
    return 2 * jnp.tanh(linear(p["lin"], x)) + 1


# -- Training


class Case(NamedTuple):
    """A model.

    Attributes:
      axes: of the mesh.
      model: a function from the mesh to layers, or to a whole model.
      plain: `(parameters, x) -> outputs`, of a layer or of the whole model.
      kinds: the collectives that the layers own, as XLA calls them.
    """

    axes: dict[str, int]
    model: Callable[[Mesh], Any]
    plain: Callable[[Any, jax.Array], jax.Array]
    kinds: tuple[str, ...]


def same(layer):
    """Four layers."""
    return lambda mesh: [layer] * 4


MODEL_AXIS = {"stage": 2, "model": 2}
SUM = ("all-reduce",)
CASES = {
    "ring": Case({"stage": 2, "context": 4}, same(RingAttention), plain_attention, ("all-gather",)),
    "experts": Case({"stage": 2, "expert": Experts.E}, same(Experts), plain_experts, ("all-to-all",)),
    "nnx": Case(MODEL_AXIS, same(SplitMLP), plain_mlp, SUM),
    "data": Case({"data": 2, **MODEL_AXIS}, same(SplitMLP), plain_mlp, SUM),
    "mesh given": Case(
        MODEL_AXIS, lambda mesh: [functools.partial(SplitMLP, mesh=mesh)] * 4, plain_mlp, SUM
    ),
    "axes given": Case(
        {"stage": 2, "fsdp": 2, "model": 2}, same(functools.partial(SplitMLP, axis_names={"model"})), plain_mlp, SUM
    ),
    "one device": Case({"stage": 2, "model": 1}, same(SplitMLP), plain_mlp, ()),
    "linen": Case(MODEL_AXIS, same(LinenMLP()), plain_mlp, SUM),
    "pair": Case(MODEL_AXIS, same(jpipe.InitApply(init_pair, lambda p, x: split_mlp(x, **p))), plain_mlp, SUM),
    "remat": Case(MODEL_AXIS, same(RematMLP), plain_mlp, SUM),
    "loop": Case(MODEL_AXIS, same(LoopOfMLPs), plain_loop, SUM),
    "whole model": Case(MODEL_AXIS, lambda mesh: Model, plain_model, SUM),
    "kernel, fsdp": Case({"stage": 2, "fsdp": 2}, same(Kernel), plain_kernel, ()),
    "kernel, model": Case(MODEL_AXIS, same(Kernel), plain_kernel, ()),
    "kernel in a map": Case(MODEL_AXIS, same(functools.partial(Kernel, axis="model")), plain_kernel, ()),
}  # fmt: skip
SCHEDULES = {
    "1f1b": jpipe.schedules.one_f_one_b,
    "zero bubble": jpipe.schedules.zero_bubble_h1,
    "gpipe": jpipe.schedules.gpipe,
    "interleaved": lambda S, N: jpipe.schedules.interleaved(2 * S, N, num_chunks=2),
    "pipedream_2bw": jpipe.schedules.pipedream_2bw,
    "pipedream": jpipe.schedules.pipedream,
    "pipemare": jpipe.schedules.pipemare,
}


def pipeline(case, schedule="1f1b"):
    mesh = mesh_of(**case.axes)
    return jpipe.Pipeline(
        case.model(mesh),
        loss=square,
        optimizer=optax.sgd(RATE),
        schedule=SCHEDULES[schedule](2, N),
        mesh=mesh,
    )


def plain(case, params, x):
    if not isinstance(params, list):
        return case.plain(params, x)
    for p in params:
        x = case.plain(p, x)
    return x


def plain_training(case, params, delay):
    """SGD whose gradients are those of the weights `delay` updates ago: losses and weights."""
    value_and_grad = jax.jit(jax.value_and_grad(lambda p, b: square(plain(case, p, b["inputs"]), b)))
    versions, losses = [params], []
    for t, batch in enumerate(batches()):
        loss, gradient = value_and_grad(versions[max(t - delay, 0)], batch)
        versions.append(jax.tree.map(lambda w, g: w - RATE * g, versions[-1], gradient))
        losses.append(float(loss))
    return losses, versions[-1]


EVERY = ["1f1b", "zero bubble", "pipedream_2bw"]
RUNS = [
    pytest.param(name, schedule, marks=[] if j == i % 3 else pytest.mark.exhaustive)
    for i, name in enumerate(CASES)
    for j, schedule in enumerate(EVERY)
]


@pytest.mark.first_case
@pytest.mark.parametrize("name, schedule", RUNS)
def test_equals_plain_jax(name, schedule):
    case = CASES[name]
    pipe = pipeline(case, schedule)
    first, *_ = batches()
    state = pipe.init(KEY, first)
    losses, params = plain_training(case, pipe.get_params(state), delay=int(schedule == "pipedream_2bw"))
    total = 0.0
    for batch in batches():
        state, metrics = pipe.step(state, batch)
        total += float(np.nan_to_num(metrics["loss"])) * int(metrics["num_microbatches"])
    state, metrics = pipe.flush(state)
    total += float(np.nan_to_num(metrics["loss"])) * int(metrics["num_microbatches"])
    np.testing.assert_allclose(total / (3 * N), np.mean(losses), rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")
    outputs = plain(case, params, first["inputs"])
    np.testing.assert_allclose(pipe.evaluate(state, first)["loss"], square(outputs, first), rtol=1e-5)
    assert_close(pipe.predict(state, {"inputs": first["inputs"]}), outputs, "float32")
    assert_in_branches(pipe, case, first)


def assert_in_branches(pipe, case, batch):
    """The program has the collectives of the layers, in branches, between devices of one stage and one replica."""
    of_layers = [c for c in collectives(pipe.compile(batch).as_text()) if "/cond/branch_1_fun/" in c.name]
    place = np.argwhere(np.ones(tuple(case.axes.values())))
    own = [i for i, name in enumerate(case.axes) if name in ("stage", "data")]
    for kind in case.kinds:
        found = [c for c in of_layers if c.kind == kind and "/shard_map/" in c.name.partition("/cond/")[2]]
        assert len(found) >= 2, kind  # forward and backward
        for group in (group for c in found for group in c.groups):
            assert len(group) > 1 and len(np.unique(place[group][:, own], axis=0)) == 1
    # In a permute the devices of other stages would have to take part, as they do in that of the messages.
    permutes = [c.name for c in of_layers if c.kind == "collective-permute"]
    assert all(name.endswith("/cond/branch_1_fun/ppermute") for name in permutes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "pipedream", "pipemare"])
@pytest.mark.parametrize("name", ["ring", "experts"])
def test_every_schedule_ends(name, schedule):
    """No device waits for ever, and all schedules that wait for each minibatch compute the same."""
    case = CASES[name]
    pipe = pipeline(case, schedule)
    first, *_ = batches()
    state = pipe.init(KEY, first)
    losses, params = plain_training(case, pipe.get_params(state), delay=0)
    for batch in batches():
        state, metrics = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    if schedule in ("gpipe", "interleaved"):
        np.testing.assert_allclose(metrics["loss"], losses[-1], rtol=1e-5)
        assert_close(pipe.get_params(state), params, "float32")
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(pipe.get_params(state)))


class Dropped(nnx.Module):
    """Dropout whose mask is drawn part by part, on the device of the part or in one place."""

    def __init__(self, rngs, in_map):
        self.mlp, self.rngs, self.in_map = SplitMLP(rngs), rngs.fork(), in_map

    def __call__(self, x):
        key = self.rngs.dropout()

        def kept(key, part, shape):
            return 2.0 * jax.random.bernoulli(jax.random.fold_in(key, part), 0.5, shape)

        if self.in_map:
            drop = jax.shard_map(
                lambda x, key: x * kept(key, lax.axis_index("model"), x.shape),
                in_specs=(P(None, None, "model"), P()),
                out_specs=P(None, None, "model"),
            )
            return self.mlp(drop(x, key))
        shape = (*x.shape[:-1], D // 2)
        return self.mlp(x * jnp.concatenate([kept(key, part, shape) for part in range(2)], axis=-1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule", ["zero bubble", *(pytest.param(s, marks=pytest.mark.exhaustive) for s in ("1f1b", "pipedream"))]
)
def test_random_keys_reach_the_devices(schedule):
    def trained(in_map):
        layers = [functools.partial(Dropped, in_map=in_map)] * 4
        pipe = pipeline(Case(MODEL_AXIS, lambda mesh: layers, None, ()), schedule)
        first, *_ = batches()
        state = pipe.init(KEY, first)
        for batch in batches():
            state, metrics = pipe.step(state, batch)
        return pipe.get_params(state), metrics["loss"]

    assert_close(trained(in_map=True), trained(in_map=False), "float32")


@pytest.mark.exhaustive
def test_all_devices_of_gpus_take_the_branches(monkeypatch):
    """Where one `switch` holds all programs of a stage, the collectives are in its branches too."""
    use_target(monkeypatch, "gpu")
    case = CASES["experts"]
    pipe = pipeline(case)
    first, *_ = batches()
    state = pipe.init(KEY, first)
    losses, params = plain_training(case, pipe.get_params(state), delay=0)
    for batch in batches():
        state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], losses[-1], rtol=1e-5)
    assert_close(pipe.get_params(state), params, "float32")


# -- Costs, and refusals


@pytest.mark.exhaustive
def test_layers_are_measured_alone():
    """On one device, without a mesh: the FLOPs of all devices together."""
    case = CASES["nnx"]
    pipe = pipeline(case)
    first, *_ = batches()
    plain_layers = [jpipe.InitApply(init_pair, lambda p, x: plain_mlp(p, x)) for _ in range(4)]
    other = jpipe.Pipeline(
        plain_layers, loss=square, optimizer=optax.sgd(RATE), schedule=SCHEDULES["1f1b"](2, N), mesh=pipe.mesh
    )
    for ours, wanted in zip(pipe.partition(first), other.partition(first), strict=True):
        np.testing.assert_allclose(ours.flops, wanted.flops, rtol=0.05)
    assert pipe.profile(first).layers[0].backward.median > 0
    assert pipe.memory_timeline(first)


def mapped_over(axis, **options):
    """A layer."""
    spec = P(None, None, axis)
    return jpipe.Function(lambda x: jax.shard_map(jnp.tanh, in_specs=spec, out_specs=spec, **options)(x))


REFUSED = {
    "stage": (MODEL_AXIS, mapped_over(None, axis_names={"stage"}), "devices of one stage and one replica"),
    "data": ({"data": 2, **MODEL_AXIS}, mapped_over("data"), "map and communicate over 'model'"),
    "no such axis": (MODEL_AXIS, mapped_over("expert"), "map and communicate over 'model'"),
    "no axis": ({"stage": 2}, mapped_over(None), "the axes 'stage' alone"),
    "no axis but a mesh": ({"stage": 2}, mapped_over(None, mesh=mesh_of(stage=2)), "and the pipeline itself does"),
    "another mesh": (MODEL_AXIS, mapped_over("model", mesh=mesh_of(model=4)), "Leave out `mesh=`, or give `pipe.mesh`"),
    "explicit axes": (
        MODEL_AXIS,
        mapped_over("model", mesh=jax.make_mesh((2, 2), ("stage", "model"))),
        "`jax.make_mesh` makes explicit axes",
    ),
    "outside of a map": (MODEL_AXIS, jpipe.Function(lambda x: lax.psum(x, "model")), "call psum under `jax.shard_map`"),
    "constraint": (
        {"data": 2, **MODEL_AXIS},
        jpipe.Function(lambda x: lax.with_sharding_constraint(x, P("data", None, "model"))),
        "names 'data', and the pipeline itself splits over it",
    ),
    "sum over stages": (
        MODEL_AXIS,
        jpipe.Function(
            lambda x: jax.shard_map(
                lambda x: lax.psum(x, "stage"), in_specs=P(), out_specs=P(), check_vma=False
            )(x)
        ),
        "map and communicate over 'model'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("axes, layer, words", REFUSED.values(), ids=REFUSED)
def test_other_axes_are_refused(axes, layer, words):
    pipe = pipeline(Case(axes, lambda mesh: [layer] * 2, None, ()))
    with refused(words):
        pipe.init(KEY, batches()[0])


def shifted(x, whole):
    """The values of a map, which JAX leaves split, moved by one position."""
    spec = P(None, "context")
    x = jax.shard_map(jnp.tanh, in_specs=spec, out_specs=spec)(x)
    if whole:
        x = lax.with_sharding_constraint(x, P())
    return jnp.roll(x, 1, axis=1)


@pytest.mark.first_case
@pytest.mark.parametrize("whole", [False, True])
def test_permutes_of_xla_itself(whole):
    """On CPUs they would end the process, or give wrong numbers."""
    layers = [functools.partial(nnx.Linear, D, D), jpipe.Function(functools.partial(shifted, whole=whole))] * 2
    pipe = pipeline(Case({"stage": 2, "context": 4}, lambda mesh: layers, None, ()))
    first, *_ = batches()
    state = pipe.init(KEY, first)
    if not whole:
        with pytest.raises(ValueError, match=r"XLA exchanges parts of a value \(f32\[4,1,8\] on a device\)"):
            pipe.step(state, first)
        with pytest.raises(ValueError, match="inside of the `jax.shard_map`, or make the value whole before"):
            pipe.predict(state, {"inputs": first["inputs"]})
        return
    x = first["inputs"]
    for p in pipe.get_params(state):
        x = jnp.roll(jnp.tanh(linear(p, x)), 1, axis=1) if p else x
    _, metrics = pipe.step(state, first)
    np.testing.assert_allclose(metrics["loss"], square(x, first), rtol=1e-5)


def test_axes_before_those_of_the_pipeline():
    """XLA ends the process since JAX 0.11."""
    case = CASES["nnx"]._replace(axes={"model": 2, "stage": 2})
    pipe, (first, *_) = pipeline(case), batches()
    if jaxlib.version.__version_info__ >= (0, 11):
        with refused("Make the mesh with its axes in the order"):
            pipe.init(KEY, first)
        return
    state = pipe.init(KEY, first)
    losses, _ = plain_training(case, pipe.get_params(state), delay=0)
    _, metrics = pipe.step(state, first)
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=1e-5)


@pytest.mark.first_case
@pytest.mark.parametrize("mesh", [None, mesh_of(a=4), jax.make_mesh((2, 2), ("stage", "model"))], ids=str)
def test_meshes_of_the_surroundings_change_nothing(mesh):
    """The user's mesh may be any, and the pipeline's may have explicit axes."""
    case, (first, *_) = CASES["nnx"], batches()
    pipe = jpipe.Pipeline(
        case.model(None),
        loss=square,
        optimizer=optax.sgd(RATE),
        schedule=SCHEDULES["gpipe"](2, N),
        mesh=mesh if mesh is not None and "stage" in mesh.shape else mesh_of(**MODEL_AXIS),
    )
    state = pipe.init(KEY, first)
    losses, _ = plain_training(case, pipe.get_params(state), delay=0)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        _, metrics = pipe.step(state, first)
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=1e-5)


# -- What is stashed


class SplitMlp(nnx.Module):
    """Hidden units are split over "model", by hand; GELU has a derivative of several arrays."""

    def __init__(self, is_split, *, rngs):
        self.up, self.down, self.is_split = weights(rngs, D, 4 * D), weights(rngs, 4 * D, D), is_split

    def __call__(self, x):
        def hidden(x, up, down):
            y = jax.nn.gelu(x @ up) * jax.nn.sigmoid(x.mean(-1, keepdims=True)) @ down
            return lax.psum(y, "model") if self.is_split else y

        if self.is_split:
            hidden = jax.shard_map(hidden, in_specs=(P(), P(None, "model"), P("model", None)), out_specs=P())
        return x + jnp.tanh(hidden(x, self.up[...], self.down[...]))


@pytest.mark.first_case
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1", "pipemare"])
def test_a_map_stashes_what_the_same_layer_without_one_does(schedule):
    """Not every array that the derivative of its elementwise operations reads."""
    stashes, trained = [], []
    for is_split in (False, True):
        pipe = jpipe.Pipeline(
            [functools.partial(SplitMlp, is_split)] * 2,
            loss=square,
            optimizer=optax.sgd(RATE),
            schedule=jpipe.schedules.get(schedule)(2, N),
            mesh=jpipe.make_mesh(stage=2, **({"model": 2} if is_split else {})),
        )
        state = pipe.init(KEY, batches()[0])
        for batch in batches():
            state, _ = pipe.step(state, batch)
        trained.append(pipe.get_params(pipe.flush(state)[0]))
        traced = pipe._program(batches()[0]).traced
        kept = zip(traced.layer_kinds[-1].stash, traced.kept_specs.stash[-1], strict=True)
        stashes.append(sorted(a.size // (2 if "model" in spec else 1) for a, spec in kept))
    hidden = B // N * T * 4 * D
    assert stashes[1] == sorted(size // 2 if size == hidden else size for size in stashes[0])
    assert_close(trained[1], trained[0], "float32")
