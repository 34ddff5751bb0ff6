"""Whole models in a pipeline that computes in another dtype than their weights have, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jpipe

KEY, ROWS, N = jax.random.key(3), 8, 4
F64 = {"param_dtype": jnp.float64}
WIDE = np.sqrt(np.float64(3.0))  # a number of its own dtype, by which a model widens what it computes


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.linear = nnx.RMSNorm(8, **F64, rngs=rngs), nnx.Linear(8, 8, **F64, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x))) / jnp.asarray(WIDE)


class Blocks(nnx.Module):
    def __init__(self, *, rngs):
        self.stem, self.head = nnx.Linear(4, 8, **F64, rngs=rngs), nnx.Linear(8, 3, **F64, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(nn.Module):
    """A Linen model, whose first activation is read at its end too."""

    @nn.compact
    def __call__(self, x):
        first = nn.Dense(8, **F64)(x) / jnp.asarray(WIDE)
        x = first
        for _ in range(3):
            x = jnp.tanh(nn.Dense(8, **F64)(x)) / jnp.asarray(WIDE)
        return nn.Dense(3, **F64)(x + first)


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


@pytest.mark.first_case
@pytest.mark.parametrize("model", [lambda rngs: Blocks(rngs=rngs), Skips()], ids=["nnx", "linen"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
@pytest.mark.filterwarnings("ignore:.*bubble")
def test_training_is_that_of_the_plain_model_with_cast_weights(model, schedule):
    rng = np.random.default_rng(0)
    shapes = {"inputs": (ROWS, 4), "targets": (ROWS, 3)}
    batches = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(3)]
    with jax.enable_x64(True):
        pipe = jpipe.Pipeline(
            model,
            loss=loss,
            optimizer=optax.sgd(0.1),
            schedule=getattr(jpipe.schedules, schedule)(3, N),
            compute_dtype=jnp.float32,
        )
        state = pipe.init(KEY, batches[0])
        params = jax.tree.map(np.asarray, pipe.get_params(state))

        def plain(params, batch):
            narrow = jax.tree.map(lambda a: a.astype(jnp.float32), (params, batch["inputs"]))
            if isinstance(model, nn.Module):
                outputs = model.apply({"params": narrow[0]}, narrow[1])
            else:
                outputs = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: model(nnx.Rngs(0)))), narrow[0])(narrow[1])
            assert outputs.dtype == jnp.float64  # the model widens
            return loss(outputs, batch)

        want = params
        for batch in batches:
            state, metrics = pipe.step(state, batch)
            value, gradient = jax.value_and_grad(plain)(want, batch)
            want = jax.tree.map(lambda a, g: a - 0.1 * g, want, gradient)
            np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
        got = jax.tree.leaves(pipe.get_params(state))
        for a, b in zip(got, jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        evaluated = pipe.evaluate(state, batches[0])["loss"]
        np.testing.assert_allclose(evaluated, plain(want, batches[0]), rtol=1e-5)
