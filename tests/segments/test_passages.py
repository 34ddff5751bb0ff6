"""Values that cross several places of a whole model go to the segments that read them, and to no others."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe.segments.passages import passages


def case(rng):
    """The values that cross each place, and those that each segment reads."""
    num_segments = rng.randint(2, 8)
    crossing = [[] for _ in range(num_segments - 1)]
    reads = [set() for _ in range(num_segments)]
    for value in range(rng.randint(1, 10)):
        first = rng.randrange(num_segments - 1)
        readers = sorted(rng.sample(range(first + 1, num_segments), rng.randint(1, num_segments - first - 1)))
        for k in range(first, readers[-1]):
            crossing[k].append(value)
        for k in readers:
            reads[k].add(value)
    return crossing, reads


def test_every_reader_gets_its_values_and_no_segment_gets_one_twice():
    rng = random.Random(0)
    for _ in range(300):
        crossing, reads = case(rng)
        segments = passages(crossing, reads)
        born = {}
        for k, values in enumerate(crossing):
            for value in values:
                born.setdefault(value, k)
        sent = {}
        activation = ()
        for k, segment in enumerate(segments):
            entering = [*activation, *segment.pop.values()]
            assert len(entering) == len(set(entering))
            assert reads[k] <= set(entering)
            # Beside what it reads a segment gets one value at most, so that it has an activation.
            assert len(set(entering) - reads[k]) <= 1
            assert all(sent.pop(name) == value for name, value in segment.pop.items())
            held = {*entering, *(value for value, first in born.items() if first == k)}
            assert held.issuperset(segment.activation) and held.issuperset(segment.stash.values())
            sent |= segment.stash
            activation = segment.activation
            assert activation or k == len(segments) - 1 or not crossing[k]
        assert not sent


class UNet(nn.Module):
    """Two skips; the outer one passes the stages of the inner."""

    @nn.compact
    def __call__(self, x):
        skips = []
        for _ in range(3):
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(x)))
            skips.append(x)
            x = nn.Dense(8)(x)
        for _ in range(3):
            x = nn.Dense(8)(jnp.concatenate([x, skips.pop()], -1))
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(x)))
        return nn.Dense(5)(x)


def loss(outputs, batch):
    return jnp.mean((outputs - 1) ** 2)


@pytest.mark.exhaustive
def test_a_skip_goes_past_the_stages_that_do_not_read_it():
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    batch, model = {"inputs": x}, UNet()
    pipe = jpipe.Pipeline(model, loss=loss, optimizer=optax.sgd(0.1), schedule=jpipe.schedules.one_f_one_b(4, 4))
    routes = {(record.source, record.target) for record in pipe.messages(batch) if record.what.startswith("skip")}
    assert (0, 2) in routes and (2, 0) in routes
    state = pipe.init(jax.random.key(0), batch)
    params = pipe.get_params(state)
    step = jax.jit(jax.value_and_grad(lambda p: loss(model.apply({"params": p}, x), batch)))
    for _ in range(2):
        want, grads = step(params)
        params = jax.tree.map(lambda a, g: a - 0.1 * g, params, grads)
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), pipe.get_params(state), params)
    few = model.apply({"params": params}, x[:3])
    np.testing.assert_allclose(pipe.predict(state, {"inputs": x[:3]}), few, rtol=1e-4, atol=1e-6)
