"""Optimizers whose states have the same names: which of them may take over a state."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from jpipe.optim import nadamw
from jpipe.optim.identity import difference, identity

PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
ALIKE = [
    {
        "adam": optax.adam(1e-3),
        "other numbers": optax.adam(2e-3, b1=0.8, eps=1e-6),
        "with a decay": optax.adamw(1e-3, weight_decay=0.1),
        "of matrices": optax.adamw(1e-3, mask=lambda p: jax.tree.map(jnp.ndim, p)),
        "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    },
    {"nadam": optax.nadam(1e-3), "nadamw": optax.nadamw(1e-3)},
    {"yogi": optax.yogi(1e-3)},
    {"adabelief": optax.adabelief(1e-3)},
    {"radam": optax.radam(1e-3)},
    {"adamax": optax.adamax(1e-3)},
    {"with a schedule": optax.adam(optax.cosine_decay_schedule(1e-3, 10))},
    {"ours": nadamw(1e-3)},
    {"momentum": optax.sgd(0.1, momentum=0.9)},
    {"nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True)},
]
"""Groups of optimizers that may take over each other's states, and no other group's."""

WRAPPERS = {
    "nothing": lambda make: make(1e-3),
    "chain": lambda make: optax.chain(optax.identity(), make(1e-3)),
    "mask": lambda make: optax.masked(make(1e-3), {"w": True, "b": False}),
    "accumulation": lambda make: optax.MultiSteps(make(1e-3), 2),
    "labels": lambda make: optax.partition({"a": make(1e-3)}, lambda params: jax.tree.map(lambda _: "a", params)),
    "finite": lambda make: optax.apply_if_finite(make(1e-3), 2),
    "hyperparameters": lambda make: optax.inject_hyperparams(make)(learning_rate=1e-3),
}


def named():
    return [(i, name, o) for i, of in enumerate(ALIKE) for name, o in of.items()]


@pytest.mark.parametrize("one, other", itertools.combinations(named(), 2), ids=lambda item: item[1])
def test_who_may_take_over_a_state(one, other):
    found = difference(identity(one[2], PARAMS), identity(other[2], PARAMS))
    assert (found is None) == (one[0] == other[0])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_hide_nothing(wrapper):
    wrap = WRAPPERS[wrapper]
    adam = identity(wrap(optax.adam), PARAMS)
    assert difference(identity(wrap(functools.partial(optax.adam)), PARAMS), adam) is None
    for make in (optax.nadam, optax.yogi, optax.adabelief):
        assert difference(identity(wrap(make), PARAMS), adam)


def test_a_switch_of_a_later_version_does_not_count():
    found = identity(optax.adam(1e-3), PARAMS)
    assert difference(found, {**found, "switches": {"scale_by_adam.new": [True]}}) is None
