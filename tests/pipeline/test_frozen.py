"""Frozen weights, against plain JAX that takes gradients by the trained weights alone."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import linen as nn
from flax import nnx
from helpers import assert_close, timed, use_target

import jpipe
from jpipe.layers.trace import forward_and_backward
from jpipe.plan import Machine, predict

KEY = jax.random.key(3)
DIM, ROWS, N = 4, 8, 4
WIDTH = 4 * (DIM * DIM + DIM)  # bytes of a layer


def dense():
    """`x + tanh(x k + b)`."""

    def init(key, inputs):
        keys = jax.random.split(key)
        shapes = {"bias": (DIM,), "kernel": (DIM, DIM)}
        return {name: jax.random.normal(k, shape) / 3 for k, (name, shape) in zip(keys, shapes.items())}

    return jpipe.InitApply(init, lambda p, x: x + jnp.tanh(x @ p["kernel"] + p["bias"][None]), name="dense")


LAYERS = [dense()] * 6
BOTH, NONE = {"bias": True, "kernel": True}, {"bias": False, "kernel": False}
BIAS, KERNEL = {"bias": True, "kernel": False}, {"bias": False, "kernel": True}
MASKS = {
    "biases": [BIAS] * 6,
    "last": [NONE] * 4 + [BOTH] * 2,  # two of three stages have frozen weights only
    "first": [BOTH] * 2 + [NONE] * 4,
    "mixed": [NONE, BOTH, KERNEL, NONE, NONE, BIAS],
}


@functools.cache
def batches(number=3, replicas=1):
    rng = np.random.default_rng(0)
    shape = (replicas * ROWS, DIM)
    return [{n: rng.normal(size=shape).astype(np.float32) for n in ("inputs", "targets")} for _ in range(number)]


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def optimizer(clip=jpipe.optim.clip_by_global_norm):
    """Counts frozen weights if it sees them: in the norm, and by their decay."""
    return optax.chain(clip(0.3), optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))


def make(schedule="gpipe", mask="mixed", layers=LAYERS, **options):
    table = schedule_named(schedule, 3, N)
    options = {
        "optimizer": optimizer(),
        "trainable": MASKS[mask] if isinstance(mask, str) else mask,
        "boundaries": [2, 4],
    } | options
    axes = options.pop("axes", {})
    mesh = jpipe.make_mesh(stage=table.num_devices, **axes)
    return jpipe.Pipeline(layers, loss=loss, schedule=table, mesh=mesh, **options)


def trained(pipe, data=None):
    """Losses, and the weights before and after some steps."""
    data = batches() if data is None else data
    state = pipe.init(KEY, data[0])
    before, losses = pipe.get_params(state), []
    for batch in data:
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    state, _ = pipe.flush(state)
    return losses, before, pipe.get_params(state), state


def model(params, x):
    for p in params:
        x = x + jnp.tanh(x @ p["kernel"] + p["bias"][None])
    return x


def plain(params, mask, optimizer, data, delay=0, tie=None):
    """A loop over minibatches, on versions of the trained leaves; the others are constants of the gradient."""

    def pick(tree, kept):
        return jax.tree.map(lambda a, is_kept: a if is_kept else None, tree, kept)

    def whole(leaves):
        tree = jax.tree.map(lambda a, b: b if a is None else a, leaves, frozen, is_leaf=lambda a: a is None)
        if tie:
            (i, name), (j, _) = tie
            tree[j][name] = tree[i][name]
        return tree

    frozen = pick(params, jax.tree.map(lambda a: not a, mask))
    versions = [pick(params, mask)]
    state, losses = optimizer.init(versions[0]), []
    gradient = jax.jit(jax.value_and_grad(lambda leaves, batch: loss(model(whole(leaves), batch["inputs"]), batch)))
    for number, batch in enumerate(data):
        value, grads = gradient(versions[max(number - delay, 0)], batch)
        updates, state = optimizer.update(grads, state, versions[-1])
        versions.append(optax.apply_updates(versions[-1], updates))
        losses.append(value)
    return losses, whole(versions[-1])


def check(pipe, mask="mixed", delay=0, data=None):
    """Trains in the pipeline and by plain JAX."""
    data = batches() if data is None else data
    clip = optax.clip_by_global_norm
    losses, before, after, state = trained(pipe, data)
    want_losses, want = plain(before, MASKS[mask], optimizer(clip), data, delay)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_close(after, want, "float32")
    for p, q, kept in zip(before, after, MASKS[mask]):
        for name, is_trained in kept.items():
            assert np.array_equal(p[name], q[name]) is not is_trained
    return state


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("schedule", "mask"),
    [
        ("gpipe", "mixed"),
        ("one_f_one_b", "last"),
        ("zero_bubble_h1", "mixed"),
        *(
            pytest.param(schedule, mask, marks=pytest.mark.exhaustive)
            for schedule, mask in [("gpipe", "first"), ("one_f_one_b", "biases"), ("zero_bubble_h1", "last")]
        ),
    ],
)
def test_training_equals_plain_jax(schedule, mask):
    check(make(schedule, mask), mask)


@pytest.mark.parametrize("mask", ["biases", pytest.param("last", marks=pytest.mark.exhaustive)])
def test_late_gradients_equal_plain_jax(mask):
    """Without clipping, whose norm is of several minibatches in an asynchronous schedule."""
    late = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    pipe = make("pipedream_2bw", mask, optimizer=late)
    _, before, after, _ = trained(pipe)
    assert_close(after, plain(before, MASKS[mask], late, batches(), delay=1)[1], "float32")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "predicts"),
    [
        ("pipemare", False),
        *(pytest.param(name, True, marks=pytest.mark.exhaustive) for name in ("pipemare", "pipedream")),
    ],
)
def test_late_weights_are_those_of_zero_gradients(schedule, predicts):
    """A pipeline that trains all weights, whose optimizer gets zeros for the gradients of some."""

    def frozen(params):
        return [p if p is None else {n: not m[n] for n in p} for p, m in zip(params, MASKS["mixed"])]

    transforms = [optax.sgd(0.1, momentum=0.9)] + [jpipe.optim.predict_weights()] * predicts
    hooks = {"forward_params": jpipe.optim.predicted_params} if predicts else {}
    *_, got, _ = trained(make(schedule, optimizer=optax.chain(*transforms), **hooks))
    zeroed = optax.chain(optax.masked(optax.set_to_zero(), frozen), *transforms)
    *_, want, _ = trained(make(schedule, mask=None, optimizer=zeroed, **hooks))
    assert_close(got, want, "float32")


@pytest.mark.first_case
@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"data": 2}, "shard_optimizer": True},
        {"axes": {"fsdp": 2}},
        {"offload": jpipe.Offload(weights=1.0, optimizer=0.5, gradients=0.5), "recompute": "full"},
        *(
            pytest.param(options, marks=pytest.mark.exhaustive)
            for options in [{"axes": {"data": 2}}, {"loss_scale": 8.0}, {"accumulate_dtype": jnp.float32}]
        ),
    ],
    ids=str,
)
def test_options(options):
    replicas = 2 if options.get("axes") else 1
    check(make("one_f_one_b", **options), data=batches(replicas=replicas))


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mask", ["mixed", pytest.param("last", marks=pytest.mark.exhaustive)])
def test_the_forms_for_accelerators(monkeypatch, platform, mask):
    use_target(monkeypatch, platform)
    check(make("one_f_one_b", mask), mask)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe/2-1", "pipedream/2-1"])
def test_copies_of_stages(schedule):
    def labels(params):
        return [p if p is None else {n: str(m[n]) for n in p} for p, m in zip(params, MASKS["last"])]

    def run(mask, optimizer):
        table = schedule_named(schedule, 2, N)
        pipe = jpipe.Pipeline(
            LAYERS, loss=loss, optimizer=optimizer, schedule=table, trainable=MASKS.get(mask), boundaries=[3]
        )
        return trained(pipe)[2]

    sgd = optax.sgd(0.1, momentum=0.9)
    want = run(None, optax.multi_transform({"True": sgd, "False": optax.set_to_zero()}, labels))
    assert_close(run("last", sgd), want, "float32")


def test_compute_dtype_rounds_frozen_weights_too():
    def rounded(a):
        return a.astype(jnp.bfloat16)

    pipe = make("gpipe", "biases", compute_dtype=jnp.bfloat16, optimizer=optax.sgd(0.1))
    batch = batches()[0]
    state = pipe.init(KEY, batch)
    outputs = pipe.predict(state, batch)
    want = model(jax.tree.map(rounded, pipe.get_params(state)), rounded(batch["inputs"]))
    np.testing.assert_allclose(outputs, want.astype(np.float32), rtol=0.02, atol=0.02)


# -- What is kept and computed


def test_bytes():
    """Gradients and momentum of biases alone, and one version of the kernels."""
    bias, kernel = 4 * DIM * 2, 4 * DIM * DIM * 2  # two layers a stage
    memory = make("one_f_one_b", "biases").memory(batches()[0])
    assert (memory.gradients, memory.optimizer, memory.weights) == (bias, bias, bias + kernel)
    late = make("pipedream_2bw", "biases", optimizer=optax.sgd(0.1)).memory(batches()[0])
    assert (late.gradients, late.optimizer, late.weights) == (bias, 0, 2 * bias + kernel)


def test_frozen_stages_take_no_more_than_trained_ones():
    """Every device has arrays for the largest stage, so frozen weights of one stage lie where others have trained
    ones.
    """
    for schedule, versions in (("gpipe", 1), ("pipedream_2bw", 2)):
        for mask in ("last", None):
            pipe = make(schedule, mask, optimizer=optax.sgd(0.1))
            layout = pipe._program(batches()[0]).engine.layout
            assert layout.bytes_by_field("cpu")["weights"] == 2 * WIDTH * versions


def products(pipe):
    return pipe.lower(batches()[0]).as_text().count("stablehlo.dot_general")


def test_products():
    """One product forward, one for the gradient of the inputs; one for that of each trained kernel."""
    alone = {"schedule": jpipe.schedules.gpipe(1, N), "loss": loss, "optimizer": optax.sgd(0.1)}

    def count(mask):
        return products(jpipe.Pipeline([dense(), jnp.sin, dense()], trainable=mask, **alone))

    assert count(None) == 2 + 1 + 2  # the first layer has no input gradient
    assert count([BIAS, True, BIAS]) == 2 + 1
    assert count([NONE, True, BOTH]) == 2 + 1  # nothing before the second dense layer is trained
    assert count([BOTH, True, NONE]) == 2 + 1 + 1
    assert count([NONE, True, BIAS]) == 2


def masked():
    """A layer of `(x, mask)` that hands the mask on."""

    def apply(p, xs):
        x, mask = xs
        return x + jnp.tanh(x @ p["kernel"] + mask @ p["kernel"]), mask

    return jpipe.InitApply(lambda key, xs: {"kernel": jax.random.normal(key, (DIM, DIM)) / 3}, apply, name="masked")


@pytest.mark.first_case
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_mask_that_layers_hand_on_has_no_gradient(num_stages):
    """Products of a layer: of the two values with the kernel, for the kernel twice, and for `x` once."""
    data = batches()[0]
    batch = {"inputs": (data["inputs"], data["inputs"][::-1]), "targets": data["targets"]}
    layers = [masked(), masked(), lambda xs: xs[0]]
    pipe = jpipe.Pipeline(
        layers,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(num_stages, N),
        boundaries=[1][: num_stages - 1],
    )
    assert traced_products(pipe, batch) == [2 + 2 + 1, 2 + 2 + 1, 0]
    state = pipe.init(KEY, batch)
    before = pipe.get_params(state)

    def plain_loss(params):
        xs = batch["inputs"]
        for layer, p in zip(layers, params[:2]):
            xs = layer.apply(p, xs)
        return loss(xs[0], batch)

    want, gradients = jax.value_and_grad(plain_loss)(before)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    assert_close(pipe.get_params(state), jax.tree.map(lambda a, g: a - 0.1 * g, before, gradients), "float32")


def traced_products(pipe, batch):
    """For each layer the products of its forward and its backward."""
    traced = pipe._program(batch).traced

    def count(kind):
        function, arguments = forward_and_backward(kind)
        return str(jax.make_jaxpr(function)(*arguments)).count("dot_general[")

    return [count(traced.layer_kinds[k]) for k in traced.kind_of_layer]


class Towers(nnx.Module):
    """The tower that comes second in the trace may be frozen."""

    def __init__(self, rngs):
        self.right, self.left = (
            nnx.List([nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs) for _ in range(2)]) for _ in range(2)
        )

    def __call__(self, inputs, targets):
        x, y = inputs, targets
        for layer in self.right:
            x = jnp.tanh(layer(x))
        for layer in self.left:
            y = jnp.tanh(layer(y))
        return x * y


@pytest.mark.first_case
@pytest.mark.parametrize(("schedule", "num_stages"), [("gpipe", 1), ("one_f_one_b", 2), ("zero_bubble_h1", 2)])
def test_a_frozen_tower_has_no_backward(schedule, num_stages):
    """It is not among the first layers: its products are those of the forward alone."""
    model, batch = Towers(nnx.Rngs(0)), batches()[0]
    pipe = jpipe.Pipeline(
        model,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=schedule_named(schedule, num_stages, N),
        trainable=lambda path, _: path[0] == "right",
    )
    assert sum(traced_products(pipe, batch)) == 4 + 2 + 1  # forward; for two kernels; between the two
    graph, params = nnx.split(model)
    params = nnx.to_pure_dict(params)

    def plain_loss(right):
        merged = nnx.merge(graph, nnx.State({**params, "right": right}))
        return loss(merged(batch["inputs"], batch["targets"]), batch)

    gradients = jax.grad(plain_loss)(params["right"])
    want = {**params, "right": jax.tree.map(lambda a, g: a - 0.1 * g, params["right"], gradients)}
    state, _ = pipe.step(pipe.init(KEY, batch), batch)
    assert_close(pipe.get_params(state), want, "float32")


def test_first_layers_keep_nothing_for_a_backward():
    stages = make("gpipe", "last")._program(batches()[0]).stages
    assert [len(stages.layer_kinds[k].stash) > 0 for k in stages.kind_of_layer] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("trains_v", "num_stashed"), [(False, 2), (True, 3)])
def test_what_follows_from_frozen_weights_is_not_stashed(trains_v, num_stashed):
    """Of `h = x v` the gradient of w asks, and in PipeMare a backward has other weights, unless they are frozen."""

    def apply(p, x):
        return jnp.tanh((x * p["v"]) * p["w"]) + x * x

    layer = jpipe.InitApply(lambda key, x: {"v": jnp.ones(()), "w": jnp.ones(())}, apply)
    pipe = make("pipemare", [{"v": trains_v, "w": True}] * 6, layers=[layer] * 6, optimizer=optax.sgd(0.1))
    stages = pipe._program(batches()[0]).stages
    assert len(stages.layer_kinds[stages.kind_of_layer[1]].stash) == num_stashed


def test_alike_layers_with_other_frozen_weights():
    """Both weights have the same gradient, so that the programs of the layers have equal texts."""
    layer = jpipe.InitApply(
        lambda key, x: {"a": jnp.ones(()), "b": jnp.ones(())}, lambda p, x: x + p["a"] + p["b"], name="sum"
    )
    mask = [{"a": i % 2 == 0, "b": i % 2 == 1} for i in range(6)]
    _, before, after, _ = trained(make("gpipe", mask, layers=[layer] * 6, optimizer=optax.sgd(0.1)))
    assert jax.tree.map(lambda a, b: bool(a != b), before, after) == mask


def test_replicas_exchange_what_is_trained():
    whole, part = (
        [r for r in make("gpipe", mask, axes={"data": 2}).messages(batches(replicas=2)[0]) if r.what == "weights"]
        for mask in (None, "biases")
    )
    assert sum(r.num_bytes for r in part) * (DIM + 1) == sum(r.num_bytes for r in whole) > 0


@pytest.mark.parametrize("mask", ["last", pytest.param("biases", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("schedule", ["pipedream_2bw", pytest.param("zero_bubble_h1", marks=pytest.mark.exhaustive)])
def test_predictions(schedule, mask):
    pipe = make(schedule, mask, optimizer=optax.sgd(0.1, momentum=0.9))
    batch, none = batches()[0], types.SimpleNamespace(temp_size_in_bytes=0)
    profile = pipe.profile(batch, programs=("weight_grad", "update"), min_seconds=0.001)
    for layer, kept in zip(profile.layers, MASKS[mask]):
        assert (layer.weight_grad.median > 0) == (layer.update.median > 0) == any(kept.values())
    pipe.compile = lambda batch: types.SimpleNamespace(memory_analysis=lambda: none)
    want = pipe.memory(batch)
    got = predict(schedule_named(schedule, 3, N), timed(profile, forward=1.0), [2, 4], Machine(num_devices=3)).memory
    for name in ("weights", "gradients", "optimizer", "activations"):
        assert getattr(got, name) == getattr(want, name), name
    assert abs(got.padding - want.padding) <= 1  # a mean, rounded


def test_a_timeline_has_frozen_weights_once():
    pipe = make("pipedream_2bw", "biases", optimizer=optax.sgd(0.1))
    blocks = pipe.memory_timeline(batches()[0]).blocks
    frozen = [b for b in blocks if b.name.endswith("weights, frozen")]
    assert [b.num_bytes for b in frozen] == [4 * DIM * DIM] * 2
    assert {b.use for b in frozen} == {"weights"}


# -- States


@pytest.mark.exhaustive
def test_checkpoints(tmp_path):
    """Restored into the same pipeline, into another layout, and with other weights trained."""
    pipe, data = make("one_f_one_b"), batches(4)
    *_, state = trained(pipe, data[:2])
    params = pipe.get_params(state)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        checkpoints.wait()
        for data_batch in data[2:]:
            state, _ = pipe.step(state, data_batch)
        want = pipe.get_params(state)
        for other in (make("one_f_one_b"), make("gpipe", boundaries=[1, 3])):
            again = checkpoints.restore(other, data[0]).state
            for data_batch in data[2:]:
                again, _ = other.step(again, data_batch)
            assert_close(other.get_params(again), want, "float32")
        with pytest.raises(ValueError, match="another optimizer"):
            checkpoints.restore(make("one_f_one_b", "last"), data[0])
    other = make("gpipe", "last")
    moved = other.adopt(pipe.init(KEY, data[0], params=params), optimizer="matching")
    assert_close(other.get_params(moved), params, "float32")
    with pytest.raises(ValueError, match="differs in `trainable`"):
        make("one_f_one_b", "last").step(state, data[0])


def test_weights_files(tmp_path):
    pipe = make()
    state = pipe.init(KEY, batches()[0])
    jpipe.save_params(tmp_path / "weights", pipe.get_params(state))
    loaded = jpipe.load_params(tmp_path / "weights")
    other = pipe.init(jax.random.key(0), batches()[0], params=loaded)
    assert_close(pipe.get_params(other), pipe.get_params(state), "float32")


def test_weights_that_the_optimizer_keeps():
    """`with_params` changes what the optimizer sees, and leaves frozen weights."""
    pipe = make(optimizer=optax.sgd(0.1))
    state = pipe.init(KEY, batches()[0])
    before = pipe.get_params(state)
    after = pipe.get_params(pipe.with_params(state, lambda params, _: jax.tree.map(lambda a: a + 1, params)))
    want = jax.tree.map(lambda a, is_trained: a + is_trained, before, MASKS["mixed"])
    assert_close(after, want, "float32")


# -- Ties, batch norm


@pytest.mark.first_case
@pytest.mark.parametrize("mask", [[BIAS] * 6, [BOTH] + [NONE] * 4 + [BOTH]], ids=["frozen", "trained"])
def test_ties(mask):
    tie = [(0, "kernel"), (5, "kernel")]
    pipe = make("one_f_one_b", mask, ties=[tie])
    _, before, after, _ = trained(pipe)
    seen = jax.tree.map(lambda a: a, mask)
    seen[5] = {**seen[5], "kernel": False}
    _, want = plain(before, seen, optimizer(optax.clip_by_global_norm), batches(), tie=tie)
    assert_close(after, want, "float32")


def test_frozen_ties_may_lie_on_stages_that_update_apart():
    tie = [(0, "kernel"), (5, "kernel")]
    late = optax.sgd(0.1)
    pipe = make("pipedream_2bw", "biases", ties=[tie], optimizer=late)
    _, before, after, _ = trained(pipe)
    np.testing.assert_array_equal(before[0]["kernel"], before[5]["kernel"])
    assert_close(after, plain(before, MASKS["biases"], late, batches(), delay=1)[1], "float32")


def test_a_tie_of_a_frozen_and_a_trained_weight_is_refused():
    with pytest.raises(ValueError, match=r"layer 5: 'kernel' alone. Freeze all of them or none"):
        make("gpipe", [BOTH] * 5 + [NONE], ties=[[(0, "kernel"), (5, "kernel")]]).init(KEY, batches()[0])


class Normed(nnx.Module):
    """Before the norm there is no bias, whose gradient would be a rounding error."""

    def __init__(self, *, rngs):
        self.linears = nnx.List([nnx.Linear(DIM, DIM, use_bias=i != 1, rngs=rngs) for i in range(3)])
        self.norm = nnx.BatchNorm(DIM, use_running_average=False, rngs=rngs)

    def __call__(self, x):
        return self.linears[2](self.norm(self.linears[1](jnp.tanh(self.linears[0](x)))))


def nnx_plain(module, wrt, data, optimizer):
    """Training of an NNX module as its documentation has it. Returns losses and weights."""
    keeper, losses = nnx.Optimizer(module, optimizer, wrt=wrt), []

    @nnx.jit
    def step(module, keeper, batch):
        value, grads = nnx.value_and_grad(lambda m: loss(m(batch["inputs"]), batch), argnums=nnx.DiffState(0, wrt))(
            module
        )
        keeper.update(module, grads)
        return value

    for batch in data:
        losses.append(step(module, keeper, batch))
    return losses, nnx.to_pure_dict(nnx.state(module, nnx.Param))


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["norm", "linears"])
def test_statistics_of_a_frozen_batch_norm_move(name):
    """One microbatch, so that both normalise by the same rows."""
    module, wrt, sgd = Normed(rngs=nnx.Rngs(0)), nnx.All(nnx.Param, nnx.PathContains(name)), optax.sgd(0.1)
    pipe = jpipe.Pipeline(
        module,
        loss=loss,
        optimizer=sgd,
        schedule=jpipe.schedules.one_f_one_b(2, 1),
        trainable=nnx.PathContains(name),
    )
    losses, _, after, state = trained(pipe)
    want_losses, want = nnx_plain(module, wrt, batches(), sgd)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_close(after, want, "float32")
    statistics = pipe.get_mutable_state(state)["norm"]
    np.testing.assert_allclose(statistics["mean"], module.norm.mean[...], rtol=1e-5, atol=1e-7)


# -- Whole models, filters


class Adapted(nnx.Module):
    """`nnx.LoRALinear` in the place of a linear layer."""

    def __init__(self, linear, *, rngs):
        self.first = linear(DIM, DIM, rngs=rngs)
        self.blocks = nnx.List([linear(DIM, DIM, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


def lora():
    linear = functools.partial(nnx.LoRALinear, lora_rank=2, b_initializer=nnx.initializers.normal())
    return Adapted(linear, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("schedule", ["one_f_one_b", pytest.param("zero_bubble_h1", marks=pytest.mark.exhaustive)])
def test_lora_of_a_whole_model(schedule):
    module, adam = lora(), optax.adamw(1e-2, eps=1e-3)
    pipe = jpipe.Pipeline(
        module, loss=loss, optimizer=adam, schedule=schedule_named(schedule, 2, N), trainable=nnx.LoRAParam
    )
    losses, _, after, _ = trained(pipe)
    want_losses, want = nnx_plain(module, nnx.LoRAParam, batches(), adam)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_close(after, want, "float32")


def test_lora_of_a_list_of_layers():
    def block(*, rngs):
        return nnx.LoRA(DIM, 2, DIM, base_module=nnx.Linear(DIM, DIM, rngs=rngs), rngs=rngs)

    pipe = jpipe.Pipeline(
        [block] * 4,
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, N),
        trainable=nnx.LoRAParam,
    )
    frozen = [layer.frozen for layer in pipe._program(batches()[0]).stages.layers]
    assert frozen == [(0, 1)] * 4  # of the linear layer; those of LoRA follow


class Looped(nnx.Module):
    """Blocks with stacked weights, which a loop runs; each stage has those of its turns."""

    def __init__(self, *, rngs):
        make = nnx.vmap(lambda rngs: nnx.LoRALinear(DIM, DIM, lora_rank=2, rngs=rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=4)(make)(rngs)
        self.head = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, block: x + jnp.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


@pytest.mark.exhaustive
def test_stacked_weights():
    module, sgd = Looped(rngs=nnx.Rngs(0)), optax.sgd(0.1)
    pipe = jpipe.Pipeline(
        module, loss=loss, optimizer=sgd, schedule=schedule_named("one_f_one_b", 2, N), trainable=nnx.LoRAParam
    )
    *_, after, _ = trained(pipe)
    assert_close(after, nnx_plain(module, nnx.LoRAParam, batches(), sgd)[1], "float32")


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = x + nn.tanh(nn.Dense(DIM, name=f"block_{i}")(x))
        return nn.Dense(DIM, name="head")(x)


HEAD = {("head", "bias"), ("head", "kernel")}


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("trainable", "want"),
    [
        (nnx.PathContains("head"), HEAD),
        (nnx.Not(nnx.PathContains("block", exact=False)), HEAD),
        (lambda path, leaf: leaf.ndim == 1 and path[0] == "head", {("head", "bias")}),
        ({"head": True, "block_0": False, "block_1": False, "block_2": BIAS}, HEAD | {("block_2", "bias")}),
        ({"head": "trainable", **{f"block_{i}": "frozen" for i in range(3)}}, HEAD),
        ((nnx.PathContains("head"), lambda path, _: path == ("block_0", "bias")), HEAD | {("block_0", "bias")}),
        (..., None),
    ],
)
def test_filters(trainable, want):
    pipe = jpipe.Pipeline(
        Stack(), loss=loss, optimizer=optax.sgd(0.1), schedule=jpipe.schedules.gpipe(2, N), trainable=trainable
    )
    paths = {
        tuple(key.key for key in path): j not in layer.frozen
        for layer in pipe._program(batches()[0]).stages.layers
        for j, (path, _) in enumerate(jax.tree.leaves_with_path(layer.parameters))
    }
    chosen = {path for path, is_trained in paths.items() if is_trained}
    assert chosen == (set(paths) if want is None else want)


class Quantized(nnx.Module):
    """`tanh(x (scale * kernel) + x a b)`, with a kernel of int8."""

    def __init__(self, *, rngs):
        key = rngs.params
        self.kernel = nnx.Param(jax.random.randint(key(), (DIM, DIM), -127, 128, jnp.int8))
        self.scale = nnx.Param(jnp.full(DIM, 0.01))
        self.a, self.b = (nnx.LoRAParam(jax.random.normal(key(), shape) / 3) for shape in ((DIM, 2), (2, DIM)))

    def __call__(self, x):
        return jnp.tanh(x @ (self.kernel[...] * self.scale[...][None]) + x @ self.a[...] @ self.b[...])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule, axes",
    [
        ("one_f_one_b", {}),
        pytest.param("zero_bubble_h1", {"fsdp": 2}, marks=pytest.mark.exhaustive),
        pytest.param("gpipe", {"data": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_integers_may_be_frozen(schedule, axes, tmp_path):
    module, adam = nnx.Sequential(*[Quantized(rngs=nnx.Rngs(i)) for i in range(4)]), optax.adamw(1e-2, eps=1e-3)
    options = {"loss": loss, "optimizer": adam, "schedule": schedule_named(schedule, 2, N)}
    data = batches(replicas=axes.get("data", 1))
    with pytest.raises(ValueError, match=r"parameter 'layers.0.kernel' has dtype int8.*Freeze it with `trainable`"):
        jpipe.Pipeline(module, **options).init(KEY, data[0])
    mesh = jpipe.make_mesh(stage=2, **axes)
    pipe = jpipe.Pipeline(module, trainable=nnx.LoRAParam, mesh=mesh, **options)
    losses, _, after, state = trained(pipe, data)
    want_losses, want = nnx_plain(module, nnx.LoRAParam, data, adam)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert_close(after, want, "float32")
    assert after["layers"][0]["kernel"].dtype == np.int8
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        restored = checkpoints.restore(pipe, data[0]).state
    assert_close(pipe.get_params(restored), after, "float32")
