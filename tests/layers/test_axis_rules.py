"""Logical names of dims, rules, and how they become axes of the mesh."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import refused
from jax.sharding import PartitionSpec

import jpipe
from jpipe.layers.axis_rules import (
    AXIS_RULES,
    axes_of_dims,
    check_axis_rules,
    constraints_on,
    rules_for,
)

SIZES = {"fsdp": 2, "model": 4}


@pytest.mark.parametrize(
    "names, shape, rules, want",
    [
        (("embed", "mlp"), (8, 8), AXIS_RULES, ("fsdp", "model")),
        # An axis that does not divide the dim leaves it whole.
        (("embed", "mlp"), (8, 6), AXIS_RULES, ("fsdp", "")),
        # The order of the rules is that of priority, whatever the order of the dims.
        (("embed", "batch"), (8, 8), AXIS_RULES, ("", "fsdp")),
        (("a", "b"), (8, 8), (("b", "model"), ("a", "model")), ("", "model")),
        # The next rule for a name counts if the first cannot.
        (("a", "b"), (8, 8), (("b", "model"), ("a", "model"), ("a", "fsdp")), ("fsdp", "model")),
        (("a",), (6,), (("a", "model"), ("a", "fsdp")), ("fsdp",)),
        # None ends the search.
        (("a",), (8,), (("a", None), ("a", "fsdp")), ("",)),
        # Several axes, of which the mesh has some.
        (("a",), (8,), (("a", ("data", "fsdp", "model")),), ("fsdp model",)),
        (("a",), (8,), (("a", "expert"), ("a", "model")), ("model",)),
        # Axes stand for themselves, before all rules, and unknown names for nothing.
        (("model", "mlp"), (8, 8), AXIS_RULES, ("model", "")),
        ((("model", "fsdp"), "x"), (8, 8), AXIS_RULES, ("model fsdp", "")),
        (("stage", "data"), (8, 8), AXIS_RULES, ("", "")),
        # But a rule for a name of an axis counts.
        (("model", None), (8, 8), (("model", "fsdp"),), ("fsdp", "")),
    ],
)  # fmt: skip
def test_axes_of_dims(names, shape, rules, want):
    found = axes_of_dims(names, shape, SIZES, check_axis_rules(rules))
    assert [" ".join(axes) for axes in found] == list(want)


def test_flax_reads_the_same_rules():
    """Where every axis divides every dim, the axes are those that Flax finds."""
    rng = np.random.default_rng(0)
    names, axes = ["a", "b", "c"], ["fsdp", "model", None, ("fsdp", "model")]
    for _ in range(200):
        rules = tuple((names[rng.integers(3)], axes[rng.integers(4)]) for _ in range(rng.integers(1, 6)))
        order = tuple(rng.permutation(names)[: rng.integers(1, 4)].tolist())
        ours = axes_of_dims(order, (8,) * len(order), SIZES, rules)
        flax = linen.logical_to_mesh_axes(order, rules_for(SIZES, rules))
        theirs = [(a,) if isinstance(a, str) else tuple(a or ()) for a in flax]
        assert ours == theirs, (order, rules)


@pytest.mark.parametrize(
    "rules, got",
    [
        ("mlp", "'mlp'"),
        (("mlp", "model"), "'mlp'"),
        ([("mlp", 3)], r"\('mlp', 3\)"),
        ([("mlp",)], r"\('mlp',\)"),
        ({"mlp": "model"}, "{'mlp': 'model'}"),
    ],
)
def test_wrong_rules_are_refused(rules, got):
    with refused(f"`axis_rules` must be a sequence of pairs .*, got {got}"):
        pipeline([Named] * 2, axis_rules=rules)


class Named(nnx.Module):
    """Two matrices with logical names; `rules` are their own."""

    def __init__(self, *, rngs, hidden=8, **rules):
        normal = nnx.initializers.normal(0.5)
        split = nnx.with_partitioning
        self.up = nnx.Linear(4, hidden, kernel_init=split(normal, ("embed", "mlp"), **rules), rngs=rngs)
        self.down = nnx.Linear(hidden, 4, kernel_init=split(normal, ("mlp", "embed"), **rules), rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


BATCH = {"inputs": np.zeros((8, 4), np.float32)}


def pipeline(layers, mesh=None, **options):
    return jpipe.Pipeline(
        layers,
        loss=lambda outputs, batch: jnp.mean(jnp.square(outputs)),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        mesh=mesh,
        **options,
    )


def specs(pipe):
    """Shape of a matrix -> how it is split."""
    state = pipe.init(jax.random.key(0), BATCH)
    return {a.shape[-2:]: (*a.sharding.spec[2:], None, None)[:2] for a in state.parameters.values() if a.ndim == 4}


@pytest.mark.exhaustive
def test_one_model_on_every_mesh():
    for fsdp, model in itertools.product((1, 2), repeat=2):
        mesh = jpipe.make_mesh(stage=2, fsdp=fsdp, model=model)
        up = "fsdp" if fsdp > 1 else None, "model" if model > 1 else None
        found = specs(pipeline([Named] * 2, mesh))
        if fsdp * model > 1:
            assert found == {(4, 8): up, (8, 4): up[::-1]}


def test_rules_of_a_pipeline():
    mesh = jpipe.make_mesh(stage=2, fsdp=2, model=2)
    own = (("embed", "model"), ("mlp", "fsdp"))
    want = {(4, 8): ("model", "fsdp"), (8, 4): ("fsdp", "model")}
    assert specs(pipeline([Named] * 2, mesh, axis_rules=own)) == want
    with nnx.logical_axis_rules(own):  # Flax's own way to give them
        assert specs(pipeline([Named] * 2, mesh)) == want
        usual = {(4, 8): ("fsdp", "model"), (8, 4): ("model", "fsdp")}
        pipe = pipeline([Named] * 2, mesh, axis_rules=jpipe.AXIS_RULES)
        assert specs(pipe) == usual


def test_rules_of_a_parameter_come_first():
    mesh = jpipe.make_mesh(stage=2, fsdp=2, model=2)
    rules = (("mlp", "fsdp"), ("embed", None))

    def layer(rngs):
        return Named(rngs=rngs, sharding_rules=rules)

    want = {(4, 8): (None, "fsdp"), (8, 4): ("fsdp", None)}
    assert specs(pipeline([layer] * 2, mesh)) == want

    class Dense(linen.Module):
        rules: tuple = None

        @linen.compact
        def __call__(self, x):
            init = linen.with_logical_partitioning(linen.initializers.normal(0.5), ("embed", "mlp"), rules=self.rules)
            return linen.Dense(8, kernel_init=init)(x)[..., :4]

    assert specs(pipeline([Dense()] * 2, mesh)) == {(4, 8): ("fsdp", "model")}
    assert specs(pipeline([Dense(rules)] * 2, mesh)) == {(4, 8): (None, "fsdp")}


@pytest.mark.exhaustive
def test_the_mesh_of_the_surroundings_does_not_matter():
    mesh = jpipe.make_mesh(stage=2, fsdp=2, model=2)
    found = []
    for around in (contextlib.nullcontext, lambda: jax.set_mesh(mesh)):
        with around(), nnx.use_eager_sharding(False):
            pipe = pipeline([Named] * 2, mesh)
            state = pipe.init(jax.random.key(0), BATCH)
            found.append(pipe.step(state, BATCH)[1]["loss"])
    assert found[0] == found[1]


def test_states_of_other_rules_are_told_apart():
    mesh = jpipe.make_mesh(stage=2, model=2)
    state = pipeline([Named] * 2, mesh).init(jax.random.key(0), BATCH)
    other = pipeline([Named] * 2, mesh, axis_rules=(("embed", "model"),))
    with pytest.raises(ValueError, match="differs in `axis_rules`"):
        other.step(state, BATCH)
    other.step(other.adopt(state), BATCH)


def test_constraints_are_only_on_a_mesh():
    def split(x):
        return linen.with_logical_constraint(x, ("batch", "mlp"))

    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    with constraints_on(None, AXIS_RULES):
        assert not jax.make_jaxpr(split)(x).eqns
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,))
    with constraints_on(mesh, check_axis_rules(AXIS_RULES)):
        (eqn,) = jax.make_jaxpr(split)(x).eqns
    assert eqn.params["sharding"].spec == PartitionSpec(None, ("model",))
