"""Places at which the user cuts a model: marks, and modules with which stages begin."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = {"inputs": X}


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, inside=False):
        y = self.norm(x)
        if inside:
            x, y = jpipe.stage_end((x, y))
        return x + self.down(nnx.gelu(self.up(y)))


class Net(nnx.Module):
    """Blocks; the numbers say behind which of them, and `inside` in which of them, there is a mark."""

    def __init__(self, behind=(), inside=(), *, rngs):
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(4, 4, rngs=rngs)
        self.behind, self.inside = tuple(behind), tuple(inside)

    def __call__(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x, i in self.inside)
            if i in self.behind:
                x = jpipe.stage_end(x)
        return self.head(x)


def pipeline(num_stages, *places, **options):
    return jpipe.Pipeline(
        Net(*places, rngs=nnx.Rngs(0)),
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(num_stages, 4),
        **options,
    )


def modules(pipe):
    """The modules whose weights each stage has."""
    names = []
    for stage in pipe.partition(BATCH):
        parts = [name.split(".") for names in stage.names for name in names.split(", ")]
        names.append(list(dict.fromkeys(".".join(part[:2]) for part in parts)))
    return names


def check(pipe):
    """One step against the plain model."""
    state = pipe.init(KEY, BATCH)
    want, grads = nnx.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(Net(rngs=nnx.Rngs(0)))
    new, metrics = pipe.step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    params = nnx.to_pure_dict(nnx.state(Net(rngs=nnx.Rngs(0)), nnx.Param))
    want = jax.tree.map(lambda a, g: a - 0.1 * g, params, nnx.to_pure_dict(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), pipe.get_params(new), want)
    few = {"inputs": X[:3]}  # the places of another number of rows
    np.testing.assert_allclose(pipe.evaluate(new, BATCH)["loss"], jnp.mean(pipe.predict(new, BATCH) ** 2), rtol=1e-5)
    assert pipe.predict(new, few).shape == (3, 4)


@pytest.mark.exhaustive
def test_a_stage_ends_at_each_mark():
    pipe = pipeline(3, (0, 2))
    assert modules(pipe) == [["blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "head"]]
    check(pipe)


@pytest.mark.exhaustive
def test_a_mark_inside_of_a_block_on_several_values():
    pipe = pipeline(2, (), (1,))
    assert modules(pipe) == [["blocks.0", "blocks.1"], ["blocks.1", "blocks.2", "blocks.3", "head"]]
    check(pipe)


def test_of_more_marks_than_needed_some_are_chosen():
    pipe = pipeline(2, (0, 1, 2))
    assert modules(pipe) == [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]


def test_boundaries_come_before_marks():
    assert modules(pipeline(2, (0,), boundaries=["blocks.3"])) == [
        ["blocks.0", "blocks.1", "blocks.2"],
        ["blocks.3", "head"],
    ]


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("boundaries", "second"),
    [
        (["blocks.2"], ["blocks.2", "blocks.3", "head"]),
        (["head"], ["head"]),
        (["blocks.3.down"], ["blocks.3", "head"]),
    ],
)
def test_a_stage_begins_with_a_module(boundaries, second):
    pipe = pipeline(2, boundaries=boundaries)
    assert modules(pipe)[1] == second
    if boundaries == ["blocks.2"]:
        check(pipe)


@pytest.mark.parametrize(
    ("num_stages", "places", "options", "message"),
    [
        (4, ((0, 1),), {}, "2 marks `jpipe.stage_end`, and 4 stages need 3"),
        (2, (), {"boundaries": ["block.2"]}, "reads no weights of such a module. Did you mean 'blocks.2'"),
        (3, (), {"boundaries": ["blocks.2"]}, "begin at 1 places of the model, and 3 stages need 2"),
        (3, (), {"boundaries": ["blocks.2", "blocks.2.norm"]}, "begin at 1 places of the model, and 3 stages need 2"),
        (3, (), {"boundaries": ["blocks.2", 3]}, "A whole model also takes paths of modules"),
        (2, (), {"boundaries": ["blocks.0"]}, "names 'blocks.0', with which the model begins"),
    ],
)
def test_wrong_places_are_told(num_stages, places, options, message):
    with pytest.raises(ValueError, match=message):
        pipeline(num_stages, *places, **options).partition(BATCH)


def test_a_mark_does_nothing_elsewhere():
    tree = {"a": jnp.ones(2), "b": jnp.arange(3)}
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), jpipe.stage_end(tree), tree))
    assert jax.grad(lambda x: jpipe.stage_end(x) ** 2)(3.0) == 6.0
