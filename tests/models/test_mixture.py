"""Mixtures of experts on one device and on a mesh, against a plain loop over positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType

from jpipe.layers.report import collect
from models import MixtureTransformer, experts
from models.mixture import Mixture

B, T, D, F, E, K = 4, 6, 8, 6, 4, 2
INIT = nnx.initializers.normal(0.4)


def mixture(**options):
    return Mixture(D, F, E, options.pop("num_chosen", K), kernel_init=INIT, out_init=INIT, rngs=nnx.Rngs(0), **options)


def pure(layer):
    """The layer as a function."""
    graph, state = nnx.split(layer)
    return lambda x: nnx.merge(graph, state, copy=True)(x)


def inputs(seed=1):
    return jax.random.normal(jax.random.key(seed), (B, T, D))


def gelu(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain(layer, x, num_chosen=K, capacity=None, sigmoid=False):
    """Position by position, in float64: results, and the reported values."""
    kernel, up, down = (np.asarray(a[...], np.float64) for a in (layer.kernel, layer.experts_in, layer.experts_out))
    bias = np.zeros(E) if layer.bias is None else np.asarray(layer.bias[...], np.float64)
    x, y = np.asarray(x, np.float64), np.zeros(x.shape)
    loads, shares, z, dropped = [], [], [], 0
    for b in range(B):
        load, share = np.zeros(E), np.zeros(E)
        for t in range(T):
            logits = x[b, t] @ kernel
            scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits) / np.exp(logits).sum()
            chosen = sorted(range(E), key=lambda e: -(scores + bias)[e])[:num_chosen]
            gates = scores[chosen] / (scores[chosen].sum() if num_chosen > 1 else 1)
            for e, gate in zip(chosen, gates):
                load[e] += 1
                if capacity is not None and load[e] > math.ceil(capacity * num_chosen * T / E):
                    dropped += 1
                else:
                    y[b, t] += gate * gelu(x[b, t] @ up[e]) @ down[e]
            share += scores / scores.sum() / T
            z.append(np.log(np.exp(logits).sum()) ** 2)
        loads.append(load / load.sum())
        shares.append(share)
    if layer.shared is not None:
        shared = layer.shared
        y += gelu(x @ shared.linear_in.kernel[...]) @ np.asarray(shared.linear_out.kernel[...])
    mean_load = np.mean(loads, 0)
    reported = {
        "router_balance": E * np.mean([(f * p).sum() for f, p in zip(loads, shares)]),
        "router_z": np.mean(z),
        "router_dropped": dropped / (B * T * num_chosen),
        "router_excess": E * mean_load.max() - 1,
    }
    return y, reported, mean_load


CASES = {
    "dropless": {},
    "one expert": {"num_chosen": 1},
    "capacity": {"capacity": 0.75},
    "sigmoid": {"scores": "sigmoid", "bias_rate": 0.01},
    "shared": {"num_shared": 2, "capacity": 1.0},
}


@pytest.mark.first_case
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_a_loop_over_positions(options):
    layer, x = mixture(**options), inputs()
    if layer.bias is not None:
        layer.bias[...] = jnp.array([0.3, -0.2, 0.0, 0.1])
    names = {"num_chosen", "capacity"} & set(options)
    want, reported, load = plain(layer, x, sigmoid="scores" in options, **{name: options[name] for name in names})
    with collect() as got:
        y = layer(x)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    assert set(got) == set(reported)
    for name, value in reported.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert (reported["router_dropped"] > 0) == (options.get("capacity") == 0.75) or "num_shared" in options
    np.testing.assert_allclose(layer.load[...], load, rtol=1e-6)
    if layer.bias is not None:
        moved = np.array([0.3, -0.2, 0.0, 0.1]) + 0.01 * np.sign(1 / E - load)
        np.testing.assert_allclose(layer.bias[...], moved, rtol=1e-6)


def test_state_stays_in_evaluation():
    layer = mixture(bias_rate=0.1)
    layer.eval()
    layer(inputs())
    assert (layer.load[...] == 1 / E).all() and (layer.bias[...] == 0).all()


def test_a_large_capacity_drops_nothing():
    x = inputs()
    np.testing.assert_allclose(mixture(capacity=E / 1.0)(x), mixture()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.first_case
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_no_position_depends_on_a_later_one(capacity):
    layer, x = pure(mixture(capacity=capacity)), inputs()
    gradient = np.stack([jax.grad(lambda x, t=t: layer(x)[0, t].sum())(x)[0] for t in range(T)])  # [T, T, D]
    size = np.abs(gradient).max(-1)
    assert (size[np.triu_indices(T, 1)] == 0).all() and (np.diag(size) > 0).any()
    changed = layer(x.at[:, T // 2 :].set(inputs(2)[:, T // 2 :]))
    np.testing.assert_allclose(changed[:, : T // 2], layer(x)[:, : T // 2], rtol=1e-6)


@pytest.mark.parametrize("num_chosen", [1, 2])
def test_the_router_learns(num_chosen):
    layer = mixture(num_chosen=num_chosen)
    gradient = nnx.grad(lambda layer: (layer(inputs()) ** 2).sum())(layer)
    assert np.abs(gradient["kernel"][...]).max() > 1e-3


def test_scores_are_float32():
    """Two experts whose scores are equal in bfloat16 are told apart."""
    layer = mixture(num_chosen=1)
    layer.kernel[...] = jnp.zeros((D, E)).at[0].set(jnp.array([0.0, 1.0, 1.001, 0.0]))
    x = jnp.ones((1, 1, D), jnp.bfloat16)
    layer(x)
    np.testing.assert_array_equal(layer.load[...], [0, 0, 1, 0])


# -- On a mesh


def emulated_ragged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` by its definition, for backends without it."""
    me = lax.axis_index(axis_name)
    gathered = [lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    place = jnp.arange(output.shape[0])
    for rows, starts, sizes, targets in zip(*gathered):
        start, size, target = starts[me], sizes[me], targets[me]
        index = jnp.clip(start + place - target, 0, rows.shape[0] - 1)
        output = jnp.where(((place >= target) & (place < target + size))[:, None], rows[index], output)
    return output


RULES = (("batch", ("fsdp", "expert")), ("expert", "expert"), ("mlp", "model"), ("length", "context"))
MESHES = {
    "expert": {"expert": 4},
    "two axes": {"fsdp": 2, "expert": 2},
    "hidden": {"expert": 2, "model": 2},
    "positions": {"expert": 2, "context": 2},
    "fsdp": {"fsdp": 2},
}


def on_mesh(function, sizes, rules, x):
    names = tuple(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), names, (AxisType.Auto,) * len(names))
    present = [
        (name, tuple(a for a in ((axes,) if isinstance(axes, str) else axes) if a in names)) for name, axes in rules
    ]
    with jax.set_mesh(mesh), linen.logical_axis_rules([(name, axes) for name, axes in present if axes]):
        return jax.jit(function)(x)


@pytest.mark.first_case
@pytest.mark.parametrize("exchange", ["padded", "ragged"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_devices_change_nothing(sizes, exchange, monkeypatch):
    if exchange == "ragged":
        monkeypatch.setattr(experts, "platform", lambda: "tpu")
        monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged)
    graph, parameters, state = nnx.split(mixture(bias_rate=0.1), nnx.Param, ...)

    def run(x):
        def loss(parameters, x):
            layer = nnx.merge(graph, parameters, state, copy=True)
            with collect() as reported:
                y = layer(x)
            return (y**2).sum() + sum(reported.values()), (y, dict(reported), layer.load[...], layer.bias[...])

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)

    want, got = run(inputs()), on_mesh(run, sizes, RULES, inputs())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("sizes", [{"expert": 4}, {"fsdp": 2, "expert": 2}, {"expert": 2, "model": 2}], ids=str)
def test_devices_drop_the_same(sizes):
    run = pure(mixture(capacity=0.75))
    np.testing.assert_allclose(on_mesh(run, sizes, RULES, inputs()), run(inputs()), rtol=1e-5, atol=1e-6)


def test_experts_over_an_axis_without_rows_are_refused():
    rules = (("batch", "fsdp"), ("expert", "model"))
    with pytest.raises(ValueError, match="experts over 'model', which splits no rows"):
        on_mesh(mixture(), {"fsdp": 2, "model": 2}, rules, inputs())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_chosen": 9}, "at most `num_experts` .8., got 9"),
        ({"capacity": 0.0}, "`capacity` must be above 0"),
        ({"num_shared": -1}, "`num_shared` must be at least 0"),
        ({"scores": "max"}, "`scores` must be 'softmax' or 'sigmoid'"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        MixtureTransformer(**options)
