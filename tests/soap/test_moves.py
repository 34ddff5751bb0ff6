"""Steps from one split of an array to another, and the collectives that they become."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives

from jpipe import soap
from jpipe.soap.moves import steps_between

SIZES = {"a": 2, "b": 2}


def all_specs(num_dims):
    """Every way to place no, some or all of the axes on dims, in every order."""
    for places in itertools.product([None, *range(num_dims)], repeat=len(SIZES)):
        for order in itertools.permutations(zip(SIZES, places)):
            yield tuple(
                tuple(name for name, place in order if place == dim)
                for dim in range(num_dims)
            )


def is_one_move(before, after):
    """Whether axes move from the end of one dim, or from nowhere, to the end of one other dim, or to nowhere."""
    places = [
        {name: dim for dim, names in enumerate(spec) for name in names}
        for spec in (before, after)
    ]
    moved = [name for name in SIZES if places[0].get(name) != places[1].get(name)]
    ways = {tuple(each.get(name) for each in places) for name in moved}
    if len(ways) != 1:
        return False
    ((start, end),) = ways
    if start is not None and before[start][: len(after[start])] != after[start]:
        return False
    if end is not None and after[end][: len(before[end])] != before[end]:
        return False
    kept = [dim for dim in range(len(before)) if dim not in (start, end)]
    return all(before[dim] == after[dim] for dim in kept)


def is_fetch(before, after):
    """Whether the same axes split an array before and after."""
    return sorted(itertools.chain(*before)) == sorted(itertools.chain(*after))


def test_every_step_is_one_move():
    specs = set(all_specs(3))
    with_steps = 0
    for source, target in itertools.product(specs, repeat=2):
        steps = steps_between((4, 4, 4), source, target, SIZES)
        with_steps += bool(steps)
        if steps:
            before = source
            for step in steps:
                is_right = is_fetch if step.is_fetched else is_one_move
                assert is_right(before, step.spec), (source, target, steps)
                before = step.spec
            assert before == target
        elif source != target and not is_one_move(source, target):
            # Only a permutation leads there: axes change their order in a dim, or places with each other.
            gone = [
                names
                for names, after in zip(source, target)
                if names and after[: len(names)] != names
            ]
            assert gone, (source, target)
    assert with_steps > len(specs)


def test_no_step_splits_a_dim_unevenly():
    slices = (("a",), (), ()), (("a",), ("b",), ()), ((), ("b",), ())
    assert steps_between((4, 4, 4), slices[0], slices[2], SIZES) == (
        (slices[1], False),
        (slices[2], False),
    )
    assert steps_between((4, 3, 4), slices[0], slices[2], SIZES) == ()


@pytest.mark.parametrize("source", [(("b", "a"), ()), (("a", "b"), ())])
def test_another_order_of_axes_is_a_fetch(source):
    target = (("a",), ("b",)) if source[0] == ("b", "a") else (("b",), ("a",))
    assert steps_between((4, 4), source, target, SIZES) == ((target, True),)


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_one_dim_to_two_is_no_gather(devices):
    """Positions in four parts, then halves of samples and channels: each device sends parts, and none gets the whole array."""

    def loss(w, x):
        return jnp.sum(jnp.cumsum(jnp.einsum("bld,de->ble", x, w), 1) ** 2)

    shape = (8, 16, 32)
    args = np.random.default_rng(0).normal(size=(4, 32)), np.ones((8, 16, 4))
    args = [jnp.asarray(a, jnp.float32) for a in args]
    graph = soap.trace(loss, *args)
    product, total = (
        next(i for i, o in enumerate(graph.operators) if o.kind == kind)
        for kind in ("dot_general", "cumsum")
    )
    loops = [loop.size for loop in graph.operators[total].loops]
    strategy = list(soap.data_parallel(graph, 4))
    strategy[product] = soap.Config((1, 4, 1, 1), (0, 1, 2, 3))
    degrees = tuple(2 if size in (8, 32) else 1 for size in loops)
    strategy[total] = soap.Config(degrees, devices)
    run = jax.jit(
        jax.value_and_grad(soap.apply(loss, graph, strategy, soap.device_mesh(4)))
    )
    value, gradient = run(*args)
    expected = jax.value_and_grad(loss)(*args)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5)
    found = collectives(run.lower(*args).compile().as_text())
    assert "collective-permute" in {each.kind for each in found}
    whole = 4 * np.prod(shape)
    assert all(each.num_bytes < whole for each in found)
