"""A pipeline that is dropped leaves nothing behind."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe.program import Program


def use_a_pipeline(name):
    """Makes a pipeline, calls all its compiled functions and drops it."""
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, 4, 4)] * 2,
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(1e-3),
        schedule=getattr(jpipe.schedules, name)(2, 2),
    )
    batch = {"inputs": np.ones((4, 4), np.float32)}
    state = pipe.init(jax.random.key(0), batch)
    state, _ = pipe.step(state, batch)
    state, _ = pipe.flush(state)
    pipe.evaluate(state, batch)
    pipe.predict(state, batch)
    state = pipe.with_params(state, lambda params, _: params)
    pipe.get_params(state)


def left_behind(forget_executables):
    """Programs, and executables of XLA."""
    forget_executables()
    gc.collect()
    programs = sum(isinstance(one, Program) for one in gc.get_objects())
    return programs, len(jax.devices()[0].client.live_executables())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [pytest.param("one_f_one_b", marks=pytest.mark.exhaustive), "pipedream"])
def test_nothing_is_left_of_a_pipeline(name, forget_executables):
    use_a_pipeline(name)  # small functions that all pipelines share are compiled
    before = left_behind(forget_executables)
    for _ in range(2):
        use_a_pipeline(name)
    assert left_behind(forget_executables) == before
