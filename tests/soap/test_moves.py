"""Steps from one split of an array to another, and the collectives that they become."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives

from jpipe import soap
from jpipe.soap.moves import is_direct, steps_between

SIZES = {"a": 2, "b": 2}


def all_specs(num_dims):
    """Every way to place no, some or all of the axes on dims, in every order."""
    for places in itertools.product([None, *range(num_dims)], repeat=len(SIZES)):
        for order in itertools.permutations(zip(SIZES, places)):
            yield tuple(tuple(name for name, place in order if place == dim) for dim in range(num_dims))


def axes_of(spec):
    return sorted(itertools.chain(*spec))


def extends(after, before):
    """Whether axes are added at the ends of dims, and none is dropped or moved."""
    return all(b[: len(a)] == a for a, b in zip(before, after))


def test_every_way_is_slices_an_exchange_and_gathers():
    specs = set(all_specs(3))
    for source, target in itertools.product(specs, repeat=2):
        steps = steps_between((4, 4, 4), source, target, SIZES)
        kinds, before = [], source
        for after, is_fetched in steps:
            same_axes = axes_of(before) == axes_of(after)
            assert same_axes or not is_fetched
            if same_axes:
                kinds.append("exchange")
            elif extends(after, before):
                kinds.append("slice")
            else:
                assert extends(before, after), (source, target, steps)
                kinds.append("gather")
            before = after
        assert kinds == [k for k in ("slice", "exchange", "gather") if k in kinds]
        if steps:
            assert before == target
        elif axes_of(source) == axes_of(target):
            assert sum(a != b for a, b in zip(source, target)) in (0, 2)
        else:
            assert extends(source, target) or extends(target, source)


def elements_sent(shape, specs):
    """Elements that devices get in each step, counted one by one."""
    total = 0
    grid = np.arange(np.prod(shape)).reshape(shape)
    for before, after in itertools.pairwise(specs):
        for a, b in itertools.product(range(2), repeat=2):
            has, wanted = (part_of(grid, spec, {"a": a, "b": b}) for spec in (before, after))
            total += len(set(wanted) - set(has))
    return total


def part_of(grid, spec, place):
    for dim, names in enumerate(spec):
        for name in names:
            grid = np.split(grid, 2, axis=dim)[place[name]]
    return grid.ravel().tolist()


def test_no_way_sends_more_than_another_of_slices_an_exchange_and_gathers():
    shape, specs = (4, 4), list(all_specs(2))
    rng = np.random.default_rng(0)
    for _ in range(60):
        source, target = (specs[rng.integers(len(specs))] for _ in range(2))
        steps = steps_between(shape, source, target, SIZES)
        sent = elements_sent(shape, [source, *(s.spec for s in steps), target])
        union = sorted({*axes_of(source), *axes_of(target)})
        splits = [spec for spec in specs if axes_of(spec) == union]
        ways = [
            [source, first, second, target]
            for first in splits
            for second in splits
            if extends(first, source) and extends(second, target)
        ]
        least = min(elements_sent(shape, way) for way in ways)
        direct = elements_sent(shape, [source, target])
        assert direct <= sent <= least, (source, target, steps)
        assert is_direct(shape, source, target, SIZES) == (sent == direct)


def test_no_step_splits_a_dim_unevenly():
    source, target = (("a",), (), ()), ((), ("b",), ())
    steps = steps_between((4, 4, 4), source, target, SIZES)
    assert [axes_of(step.spec) for step in steps] == [["a", "b"], ["b"]]
    assert steps_between((2, 3, 1), source, ((), (), ()), SIZES) == ()
    for after, _ in steps_between((4, 2, 3), source, target, SIZES):
        assert not after[2] and len(after[1]) < 2


@pytest.mark.first_case
@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_one_dim_to_two_is_no_gather(devices):
    """Positions in four parts, then halves of samples and channels: each device sends parts, and none gets the whole
    array.
    """

    def loss(w, x):
        return jnp.sum(jnp.cumsum(jnp.einsum("bld,de->ble", x, w), 1) ** 2)

    shape = (8, 16, 32)
    args = np.random.default_rng(0).normal(size=(4, 32)), np.ones((8, 16, 4))
    args = [jnp.asarray(a, jnp.float32) for a in args]
    graph = soap.trace(loss, *args)
    product, total = (
        next(i for i, o in enumerate(graph.operators) if o.kind == kind) for kind in ("dot_general", "cumsum")
    )
    loops = [loop.size for loop in graph.operators[total].loops]
    strategy = list(soap.data_parallel(graph, 4))
    strategy[product] = soap.Config((1, 4, 1, 1), (0, 1, 2, 3))
    degrees = tuple(2 if size in (8, 32) else 1 for size in loops)
    strategy[total] = soap.Config(degrees, devices)
    run = jax.jit(jax.value_and_grad(soap.apply(loss, graph, strategy, soap.device_mesh(4))))
    value, gradient = run(*args)
    expected = jax.value_and_grad(loss)(*args)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5)
    found = collectives(run.lower(*args).compile().as_text())
    assert "collective-permute" in {each.kind for each in found}
    whole = 4 * np.prod(shape)
    assert all(each.num_bytes < whole for each in found)
