"""Extra arguments of the optimizer: a new one is one entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from jpipe.engine import apply
from jpipe.stages import extra_args, flat_update
from jpipe.stages.extra_args import EXTRA_ARGS, ExtraArg


def test_a_new_extra_argument_is_one_entry(monkeypatch):
    """An argument of another shape and dtype, computed from the global norm, reaches the optimizer
    of every stage.
    """
    value = lambda facts: jnp.stack([facts.global_norm, 3.0]).astype(jnp.float16)  # noqa: E731
    entry = ExtraArg("pair", value, shape=(2,), dtype=np.float16)
    for module in (extra_args, flat_update, apply):
        monkeypatch.setattr(module, "EXTRA_ARGS", (*EXTRA_ARGS, entry))
    seen = []

    def update(grads, state, params=None, *, pair, global_norm, **extra):
        seen.append((pair.shape, pair.dtype))
        scale = pair[1].astype(global_norm.dtype) * (pair[0] > 0)
        return jax.tree.map(lambda g: -scale * g, grads), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    layers = [functools.partial(nnx.Linear, 3, 3)] * 2
    rng = np.random.default_rng(0)
    batch = {k: rng.normal(size=(4, 3)).astype("float32") for k in ("inputs", "y")}
    params = []
    for chain in (optimizer, optax.sgd(3.0)):
        pipe = jpipe.Pipeline(
            layers,
            loss=lambda outputs, batch: jnp.mean((outputs - batch["y"]) ** 2),
            optimizer=chain,
            schedule=jpipe.schedules.gpipe(2, 2),
        )
        state = pipe.init(jax.random.key(0), batch)
        state, _ = pipe.step(state, batch)
        params.append(pipe.get_params(state))
    jax.tree.map(np.testing.assert_array_equal, *params)
    assert set(seen) == {((2,), np.dtype(np.float16))}
