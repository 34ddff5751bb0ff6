"""Sums of gradients that lie apart, as on GPUs: see `jpipe.gradients.apart`, and `jpipe.layers.products` for products
that are computed in the dtype of the sum.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, Family, cross_entropy, schedule_named
from helpers import assert_close

import jpipe
from jpipe.checkpoints import Checkpoints
from jpipe.gradients import apart
from jpipe.layers.backward import trace_layer
from jpipe.layers.products import ProductRule
from jpipe.lowering.target import GPU, TARGETS
from jpipe.packing import Part
from models import MLP

exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
UNLIKE = FAMILIES["mlp"]
EQUAL = Family(MLP(num_inputs=8, widths=(8,) * 5, num_outputs=8).layers(), (8,))
KEY = jax.random.key(0)
N = 4
AS_ON_GPUS = dataclasses.replace(GPU, compiler_options={}, profiled_options={}, touches_idle=False)
CASES = [
    # schedule, stages, layers, options
    ("one_f_one_b", 3, EQUAL, {}),
    ("pipedream/unit", 3, UNLIKE, {}),
    ("interleaved", 4, EQUAL, {}),
    exhaustive("zero_bubble_v", 2, UNLIKE, {}),
    exhaustive("zero_bubble_v", 4, EQUAL, {}),
    exhaustive("dual_pipe_v", 4, EQUAL, {"mesh": {"data": 2}}),
    exhaustive("one_f_one_b", 3, UNLIKE, {}),
    exhaustive("one_f_one_b", 2, EQUAL, {"mesh": {"data": 2}}),
    exhaustive("pipedream_2bw/unit", 2, UNLIKE, {"mesh": {"data": 2}}),
    exhaustive("interleaved", 4, EQUAL, {"mesh": {"data": 2}}),
    exhaustive("gpipe", 2, EQUAL, {"ties": [[(1, "linear.kernel"), (3, "linear.kernel")]]}),
    exhaustive("gpipe", 2, EQUAL, {"trainable": lambda path, _: "bias" in path}),
    exhaustive("zero_bubble_h1", 3, EQUAL, {}),
    exhaustive("pipedream_2bw/unit", 3, EQUAL, {}),
    exhaustive("pipemare/unit", 3, EQUAL, {}),
    exhaustive("pipedream/2-1", 2, EQUAL, {}),
    exhaustive("one_f_one_b", 2, EQUAL, {"mesh": {"fsdp": 2}}),
    exhaustive("one_f_one_b", 2, EQUAL, {"mesh": {"data": 2}, "compress_gradients": jpipe.compress.PowerSGD(rank=1)}),
    exhaustive("pipedream_2bw/paired", 2, EQUAL, {"mesh": {"data": 2}, "shard_optimizer": True}),
    exhaustive("one_f_one_b", 2, EQUAL, {"accumulate_gradients": jpipe.compress.StreamingPCA(1)}),
]


def named(value):
    """A part of the name of a case, the same in every process."""
    if isinstance(value, Family):
        return "equal" if value is EQUAL else "unlike"
    return " ".join(value) if isinstance(value, dict) else str(value)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    monkeypatch.setattr(apart, "SMALL", 8)


def pipeline(monkeypatch, sums_apart, schedule, num_stages, family, mesh=None, **options):
    monkeypatch.setitem(TARGETS, "cpu", dataclasses.replace(AS_ON_GPUS, sums_apart=sums_apart))
    table = schedule_named(schedule, num_stages, N)
    if mesh is not None:
        options["mesh"] = jpipe.make_mesh(stage=table.num_devices, **mesh)
    optimizer = optax.chain(jpipe.optim.clip_by_global_norm(0.5), optax.adam(0.02))
    return jpipe.Pipeline(family.layers, loss=cross_entropy, optimizer=optimizer, schedule=table, **options)


def trained(pipe, family, num_steps=4):
    """The losses and norms of a few steps, and the weights after them."""
    batches = family.batches(num_steps, 2 * N)
    state, values = pipe.init(KEY, batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        values += [metrics["loss"], metrics["gradient_norm"]]
    if not pipe.schedule.synchronous:
        state, metrics = pipe.flush(state)
        values.append(metrics["loss"])
    return np.array(values), jax.tree.map(np.asarray, pipe.get_params(state)), state


@pytest.mark.first_case
@pytest.mark.parametrize("schedule, num_stages, family, options", CASES, ids=named)
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold", "ignore:.*accumulate")
def test_training_is_that_of_packed_sums(schedule, num_stages, family, options, monkeypatch):
    case = schedule, num_stages, family
    packed = pipeline(monkeypatch, False, *case, **options)
    want_values, want, want_state = trained(packed, family)
    pipe = pipeline(monkeypatch, True, *case, **options)
    values, params, state = trained(pipe, family)
    sizes, want_sizes = ([a.shape for a in s.gradients.values()] for s in (state, want_state))
    only_small = {"trainable", "accumulate_gradients"} & options.keys()
    assert (len(sizes) > len(want_sizes)) != bool(only_small), (sizes, want_sizes)
    assert sum(map(np.prod, sizes)) == sum(map(np.prod, want_sizes))
    assert pipe.memory(family.batches(1, 2 * N)[0]).gradients == packed.memory(family.batches(1, 2 * N)[0]).gradients
    np.testing.assert_allclose(values, want_values, rtol=2e-5)
    assert_close(params, want, "float32")


def test_sums_in_flight_go_into_checkpoints(tmp_path, monkeypatch):
    pipe = pipeline(monkeypatch, True, "pipedream_2bw/unit", 3, EQUAL)
    first, second = EQUAL.batches(2, 2 * N)
    state, _ = pipe.step(pipe.init(KEY, first), first)
    assert any(np.asarray(a).any() for a in state.gradients.values())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        restored = checkpoints.restore(pipe, second).state
        for name, array in state.gradients.items():
            np.testing.assert_array_equal(restored.gradients[name], array, err_msg=name)
        packed = pipeline(monkeypatch, False, "pipedream_2bw/unit", 3, EQUAL)
        with pytest.raises(ValueError, match="microbatches in flight"):
            checkpoints.restore(packed, second)


def test_parts_that_overlap_no_other_leaf():
    """Brute force over random leaves of two stages."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        bounds = [np.sort(rng.choice(40, 6, replace=False)) for _ in range(2)]
        leaves = {Part("a", int(a), int(b)) for edges in bounds for a, b in zip(edges[::2], edges[1::2])}
        parts = apart._without_overlap(leaves)
        want = {p for p in leaves if not any(p.overlaps(q) for q in leaves if q != p)}
        assert set(parts) == want
        covered = sorted([*parts, *apart._between(parts, "a", 40)])
        assert [(p.start, q.stop) for p, q in zip(covered[1:], covered)] == [(q.stop, q.stop) for q in covered[:-1]]
        assert covered[0].start == 0 and covered[-1].stop == 40


def layer(parameters, inputs, _):
    """A dense layer in bfloat16, and a weight that is read twice."""
    kernel, twice = (p.astype(jnp.bfloat16) for p in parameters)
    x = inputs @ kernel
    return (x @ twice) @ twice


def gradients(rule):
    aval = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    inputs = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    program = trace_layer(layer, [aval((8, 8)), aval((8, 8))], inputs, products=rule)
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(2)]
    x, gy = (jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16) for _ in range(2))
    _, stash, _ = program.forward_and_stash(weights, [x], [])
    (by_kernel, by_twice), _ = program.backward(weights, stash, [gy])
    twice = weights[1].astype(jnp.bfloat16)
    d = (gy @ twice.T) @ twice.T
    return by_kernel, by_twice, np.asarray(x, np.float64).T @ np.asarray(d, np.float64)


def test_products_have_the_dtype_of_the_sum():
    rounded, *others, exact = gradients(ProductRule())
    widened, *others_widened, _ = gradients(ProductRule(widened=True))
    assert widened.dtype == rounded.dtype == jnp.float32
    np.testing.assert_allclose(widened, exact, rtol=1e-5, atol=1e-5)
    assert np.abs(rounded - exact).max() > 1e-3 * np.abs(exact).max()
    np.testing.assert_array_equal(others, others_widened)  # a sum of two products is no product
