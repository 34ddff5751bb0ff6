import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe


def scales(transform, num_steps, **extra_args):
    """What each update multiplies a gradient of 1 by."""
    state, found = transform.init(jnp.ones(1)), []
    for _ in range(num_steps):
        updates, state = transform.update(jnp.ones(1), state, **extra_args)
        found.append(float(updates[0]))
    return found


@pytest.mark.parametrize("delay", [0, 0.5, 1, 2.5, 7])
def test_is_the_formula(delay):
    with jax.enable_x64(True):
        found = scales(jpipe.optim.scale_by_delay(4), 7, delay=delay)
    expected = [max(delay, 1) ** -(1 - min(k / 4, 1)) for k in range(7)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("delay", [0, 1])
def test_scales_nothing_without_delay(delay):
    assert scales(jpipe.optim.scale_by_delay(4), 6, delay=delay) == [1.0] * 6


def test_scales_nothing_after_annealing():
    assert scales(jpipe.optim.scale_by_delay(2), 5, delay=3)[2:] == [1.0] * 3


def test_divides_for_ever_with_endless_annealing():
    assert scales(jpipe.optim.scale_by_delay(math.inf), 5, delay=4) == [0.25] * 5


@pytest.mark.parametrize(
    "delay",
    [
        [{"w": 4, "b": 2}, {"w": 1, "b": 8}, 2],  # as the params
        [{"w": 4, "b": 2}, {"w": 1, "b": 8}, {"w": 9}],  # more than the stage has
        [{"w": jnp.float32(4), "b": 2.0}, {"w": 1, "b": 8}, None],
    ],
)
@pytest.mark.parametrize("as_extra_argument", [False, True])
def test_takes_a_delay_for_each_weight(delay, as_extra_argument):
    grads = [{"w": jnp.ones(2), "b": jnp.ones(3)}, {"w": jnp.ones(1), "b": None}, None]
    made_with, extra = (None, {"delay": delay}) if as_extra_argument else (delay, {})
    scale = jpipe.optim.scale_by_delay(math.inf, made_with)
    found, _ = scale.update(grads, scale.init(grads), **extra)
    expected = [
        {"w": jnp.full(2, 0.25), "b": jnp.full(3, 0.5)},
        {"w": jnp.ones(1), "b": None},
        None,
    ]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_takes_a_delay_for_a_branch():
    grads = [{"w": jnp.ones(2), "b": jnp.ones(3)}, None, {"w": jnp.ones(2)}]
    scale = jpipe.optim.scale_by_delay(math.inf, [4, 2, 1])
    found, _ = scale.update(grads, scale.init(grads))
    assert float(found[0]["w"][0]) == float(found[0]["b"][0]) == 0.25
    assert float(found[2]["w"][0]) == 1


def test_its_own_delay_goes_before_the_extra_argument():
    scale = jpipe.optim.scale_by_delay(math.inf, delay=4)
    assert scales(scale, 1, delay=2) == [0.25]


def test_delay_may_be_an_array_from_before_tracing():
    scale, delay = jpipe.optim.scale_by_delay(math.inf), jnp.float32(4)
    update = jax.jit(lambda g, state: scale.update(g, state, delay=delay))
    assert float(update(jnp.ones(1), scale.init(jnp.ones(1)))[0][0]) == 0.25
    with pytest.raises(ValueError, match="`delay` must be a number of updates"):
        jpipe.optim.scale_by_delay(4, -delay)


def test_fits_behind_adam():
    """Before Adam it would be undone."""
    chain = optax.chain(optax.adam(1e-3), jpipe.optim.scale_by_delay(math.inf, 5))
    plain = optax.adam(1e-3 / 5)
    params, grads = jnp.ones(3), jnp.arange(3.0)
    found, _ = chain.update(grads, chain.init(params), params)
    expected, _ = plain.update(grads, plain.init(params), params)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("steps", [0, -1, math.nan])
def test_refuses_annealing_that_never_is(steps):
    with pytest.raises(ValueError, match="`annealing_steps` must be above 0, got"):
        jpipe.optim.scale_by_delay(steps)


@pytest.mark.parametrize(
    "delay, where",
    [
        (-1, "`delay`"),
        (math.nan, "`delay`"),
        (math.inf, "`delay`"),
        ("four", "`delay`"),
        (np.ones(2), "`delay`"),
        ([1, {"w": -2.0}], r"`delay\[1\]\['w'\]`"),
    ],
)
def test_refuses_delays_that_are_none(delay, where):
    with pytest.raises(ValueError, match=f"{where} must be a number of updates"):
        jpipe.optim.scale_by_delay(4, delay)
    scale = jpipe.optim.scale_by_delay(4)
    with pytest.raises(ValueError, match=f"{where} must be a number of updates"):
        scale.update(jnp.ones(2), scale.init(jnp.ones(2)), delay=delay)


def test_refuses_to_guess_the_delay():
    scale = jpipe.optim.scale_by_delay(4)
    with pytest.raises(ValueError, match=r"`scale_by_delay` needs a delay, got none.*delay=4\)"):
        scale.update(jnp.ones(2), scale.init(jnp.ones(2)))


@pytest.mark.parametrize("delay", [{"w": 1}, {"w": 1, "b": {"c": 1}}, [1, 2], {}])
def test_refuses_delays_that_do_not_fit(delay):
    grads = {"w": jnp.ones(2), "b": jnp.ones(2)}
    scale = jpipe.optim.scale_by_delay(4, delay)
    with pytest.raises(ValueError, match=r"which leaves out \['(b|w)'\]"):
        scale.update(grads, scale.init(grads))
