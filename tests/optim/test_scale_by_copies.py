"""Learning rates scaled by copies, against a plain loop over weights of all versions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import delay_with_copies

import jpipe
from jpipe.optim import scale_by_copies

COPIES, N, RATE, ROWS, DIM = (2, 1), 4, 0.2, 8, 3


def loop(weights, batches, delay):
    """Two stages that multiply by their weights. Microbatch b of minibatch t reads the weights `delay(s, b)` older."""
    versions = [[w] for w in weights]
    for t, batch in enumerate(batches):
        sums = [np.zeros(DIM), np.zeros(DIM)]
        for b in range(N):
            rows = slice(b * ROWS // N, (b + 1) * ROWS // N)
            x, y = batch["inputs"][rows], batch["targets"][rows]
            a, c = (versions[s][max(t - delay(s, b), 0)] for s in range(2))
            cotangent = 2 * (x * a * c - y) / x.size
            sums[1] += (cotangent * x * a).sum(axis=0) / N
            sums[0] += (cotangent * c * x).sum(axis=0) / N
        for s in range(2):
            rate = RATE * COPIES[s] / COPIES[0]
            versions[s].append(versions[s][-1] - rate * sums[s])
    return [v[-1] for v in versions]


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["one_f_one_b", "pipedream"])
def test_equals_a_plain_loop(name):
    rng = np.random.default_rng(0)
    weights = [1 + 0.3 * rng.normal(size=DIM) for _ in range(2)]
    batches = [{n: rng.normal(size=(ROWS, DIM)) for n in ("inputs", "targets")} for _ in range(4)]
    delay = delay_with_copies(COPIES, N, "unit") if name == "pipedream" else lambda s, b: 0
    expected = loop(weights, batches, delay)
    plain = loop(weights, batches, lambda s, b: 0)
    assert (name == "pipedream") == (not np.allclose(expected[0], plain[0]))
    with jax.enable_x64(True):
        pipe = jpipe.Pipeline(
            [jpipe.InitApply(lambda key, x, w=w: jnp.asarray(w), lambda p, x: x * p[None]) for w in weights],
            loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
            optimizer=optax.chain(optax.sgd(RATE), scale_by_copies([*COPIES], first=COPIES[0])),
            schedule=jpipe.schedules.get(name)(2, N, replicas=COPIES),
            boundaries=[1],
        )
        state = pipe.init(jax.random.key(0), batches[0])
        for batch in batches:
            state, _ = pipe.step(state, batch)
        state, _ = pipe.flush(state)
        for found, value in zip(pipe.get_params(state), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-9)


def test_keeps_dtypes_and_refuses_wrong_copies():
    transform, updates = scale_by_copies(3, first=2), {"w": jnp.ones(2, jnp.bfloat16)}
    scaled, _ = transform.update(updates, transform.init(updates))
    assert scaled["w"].dtype == jnp.bfloat16 and scaled["w"][0] == 1.5
    with pytest.raises(ValueError, match=r"`copies\[1\]` must be above 0, got 0: it is a number of copies"):
        scale_by_copies([1, 0])
    with pytest.raises(ValueError, match="`first` must be above 0, got -1"):
        scale_by_copies(1, first=-1)
    with pytest.raises(ValueError, match="leaves out"):
        scale_by_copies([1]).update([jnp.ones(1)] * 2, optax.EmptyState())
