"""Pipeline stages of several devices, which split operators by a strategy: `jpipe.plan.tensor`."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import timed

import jpipe
from jpipe import plan, soap
from jpipe.layers.as_layers import as_layers
from jpipe.layers.loss import Loss
from jpipe.plan import Machine, tensor
from jpipe.soap.layers import layers_graph

ROWS, WIDTH, LAYERS = 8, 32, 4
SLOW = Machine(4, bandwidth=(1e6, 1e6), tick=1e-4)
FAST = Machine(4, bandwidth=(1e9, 1e9), tick=1e-4)
BATCH = {
    "inputs": np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH),
    "targets": np.zeros((ROWS, WIDTH), np.float32),
}


def _layer():
    def init(key, x):
        return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 8}

    return jpipe.InitApply(init, lambda weights, x: x @ weights["w"])


def _loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


ALL = [_layer()] * LAYERS


def traced(num_rows: int):
    batch = {k: jax.ShapeDtypeStruct((num_rows, WIDTH), jnp.float32) for k in BATCH}
    return layers_graph(as_layers(ALL), Loss.of(_loss, False), batch)


def profile(num_microbatches: int = 1, seconds: float = 1e-3) -> plan.Profile:
    """Of layers that take as long as they have rows; nothing is measured."""
    pipe = pipeline(jpipe.schedules.gpipe(1, 1), jpipe.make_mesh(stage=1))
    counted = pipe.profile(BATCH, num_microbatches=num_microbatches, programs=())
    forward = seconds / num_microbatches
    names = ("forward", "forward_and_stash", "input_grad", "weight_grad")
    times = dict.fromkeys(names, forward)
    return timed(counted, **times, backward=2 * forward, update=1e-4)


def pipeline(schedule, mesh, **options):
    return jpipe.Pipeline(
        ALL,
        loss=_loss,
        optimizer=optax.adam(0.1),
        schedule=schedule,
        mesh=mesh,
        **options,
    )


def configs(graph, of_matmul):
    """Products as `of_matmul` says, by their number; the rest whole on device 0."""
    products = itertools.count()
    return tuple(
        of_matmul(next(products)) if operator.kind == "dot_general" else soap.Config((1,) * len(operator.loops), (0,))
        for operator in graph.operators
    )


def degrees_of(graph, kind: str, number: int) -> tuple[int, ...]:
    products = [o for o in graph.operators if o.kind == "dot_general"]
    kinds = [loop.kind for loop in products[number].loops]
    return tuple(2 if k == kind else 1 for k in kinds)


def two(bandwidth: float) -> soap.Machine:
    """Two devices that compute one FLOP per second."""
    level = soap.Level(2, bandwidth)
    return soap.Machine("two", (level,), 1.0, math.inf, overhead=0.0)


def test_shares_of_columns_and_rows():
    """By hand: columns, then rows, whose partial sums two devices exchange, each half of them."""
    t = traced(ROWS)

    def config(number):
        kind = "P" if number % 2 == 0 else "R"
        return soap.Config(degrees_of(t.graph, kind, number), (0, 1))

    shares = tensor.layer_shares(t, two(1.0), configs(t.graph, config))
    half = ROWS * WIDTH * 4 / 2
    first, second, third, _, loss = shares
    for share in shares[:-1]:
        np.testing.assert_allclose([share.forward, share.backward], 0.5, rtol=1e-6)
        assert share.weight_messages == 0.0
    assert (first.forward_messages, first.backward_messages) == (0.0, 0.0)
    # The rows read what the columns wrote. Their sums, and the gradients of these, travel.
    np.testing.assert_allclose(second[2:4], half, rtol=1e-6)
    # Each of the two has half of the sum, and columns need all of it.
    np.testing.assert_allclose(third[2:4], half, rtol=1e-6)
    # The loss is computed on device 0.
    np.testing.assert_allclose(loss[2:4], half, rtol=1e-6)


def test_shares_of_samples():
    """By hand: two devices add up gradients of the weights in a ring, in which each sends all bytes once."""
    t = traced(ROWS)
    strategy = configs(t.graph, lambda number: soap.Config(degrees_of(t.graph, "S", number), (0, 1)))
    shares = tensor.layer_shares(t, two(1.0), strategy)
    for share in shares[:-1]:
        np.testing.assert_allclose([share.forward, share.backward], 0.5, rtol=1e-6)
        assert share[2:4] == (0.0, 0.0)
        np.testing.assert_allclose(share.weight_messages, WIDTH * WIDTH * 4, rtol=1e-6)


def test_costs_of_a_split_layer():
    """Measured seconds times the share, plus messages; bytes and updates of parts."""
    t = traced(ROWS)
    strategy = soap.megatron(t.graph, 2)
    machine = two(1e9)
    shares = tensor.layer_shares(t, machine, strategy)
    whole = profile()
    found = tensor.split(whole, t, machine, strategy).profile
    for before, after, share in zip(whole.layers, found.layers, shares):
        expected = {
            "forward": 1e-3 * share.forward + share.forward_messages,
            "forward_and_stash": 1e-3 * share.forward + share.forward_messages,
            "backward": 2e-3 * share.backward + share.backward_messages + share.weight_messages,
            "input_grad": 1e-3 * share.backward + share.backward_messages,
            "weight_grad": 1e-3 * share.backward + share.weight_messages,
            "update": 0.5e-4,
        }
        for name, seconds in expected.items():
            np.testing.assert_allclose(getattr(after, name).median, seconds)
        assert after.parameter_bytes == before.parameter_bytes // 2
        assert before.stash_bytes == after.stash_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("find", [soap.megatron, soap.data_parallel])
def test_bytes_are_those_of_the_engine(tmp_path, find):
    """Weights, gradients and optimizer state of `Pipeline(strategy=)`; the rest is an upper bound."""
    rows = ROWS // 4
    t = traced(rows)
    strategy = find(t.graph, 2)
    machine = two(1e9)
    found = tensor.split(profile(4), t, machine, strategy).profile
    schedule = jpipe.schedules.gpipe(2, 4)
    predicted = plan.predict(schedule, found, [2], Machine(2)).memory
    path = tmp_path / "strategy.json"
    soap.save_strategy(path, t.graph, strategy, 2)
    mesh = jpipe.make_mesh(stage=2, model=2)
    pipe = pipeline(schedule, mesh, strategy=path, boundaries=[2])
    memory = pipe.memory(BATCH)
    for use in ("weights", "gradients", "batch"):
        assert getattr(predicted, use) == getattr(memory, use), use
    # The planner counts Adam's number of updates once per layer, the engine once per stage.
    counters = 4 * (LAYERS // 2 - 1)
    assert predicted.optimizer == memory.optimizer + counters
    assert predicted.activations >= memory.activations


@pytest.fixture(scope="module")
def profiles():
    return [profile(number) for number in (1, 4)]


def splits_of(profiles, machine, numbers=(2, 4)):
    return [
        tensor.search(each, traced(each.microbatch_size), machine, T, num_proposals=20)
        for each in profiles
        for T in numbers
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "machine",
    [
        SLOW,
        FAST,
        dataclasses.replace(FAST, bandwidth=(1e9, 1e6), devices_per_server=2),
        dataclasses.replace(FAST, num_cores=2.0, cores_per_device=1.5),
        dataclasses.replace(FAST, memory_limit=30e3),
    ],
    ids=["slow links", "fast links", "two servers", "two cores", "little memory"],
)
@pytest.mark.sampled(6)
def test_never_slower_than_stages_or_a_strategy_alone(profiles, machine):
    splits = splits_of(profiles, machine)
    ranking = tensor.choose(profiles, machine, ROWS, splits)
    best = ranking[0]
    stages = plan.choose(profiles, machine, ROWS)[0]
    whole = [each.on_groups(machine) for each in splits if each.num_devices == 4]
    strategy = plan.choose(whole, tensor.groups(machine, 4), ROWS)[0]
    assert strategy.num_stages == strategy.num_replicas == 1
    for alone in (stages, strategy):
        assert best.fits >= alone.fits
        if alone.fits:
            assert best.prediction.seconds <= alone.prediction.seconds * (1 + 1e-8)
    assert {c.num_tensor_devices for c in ranking} == {1, 2, 4}
    for c in ranking:
        assert c.num_devices <= 4 and bool(c.why) == (c is not best)
    plain = tensor.choose(profiles, machine, ROWS, [])[0]
    assert plain.prediction.seconds == stages.prediction.seconds


@pytest.mark.exhaustive
def test_both_may_be_faster_than_either(profiles):
    """Servers of two devices and a slow link: operators are split inside of a server, and stages lie on both."""
    machine = Machine(4, bandwidth=(1e9, 2e6), devices_per_server=2)
    ranking = tensor.choose(profiles, machine, ROWS, splits_of(profiles, machine))
    best = ranking[0]
    assert best.num_tensor_devices == 2 and best.num_stages == 2
    alone = [c for c in ranking if c.num_tensor_devices == 1]
    alone += [c for c in ranking if c.num_tensor_devices == 4]
    fastest = min(c.prediction.seconds for c in alone)
    assert best.prediction.seconds < 0.95 * fastest


def test_the_seed_decides(profiles):
    t = traced(ROWS)
    first, again = (tensor.search(profiles[0], t, FAST, 4, num_proposals=50, seed=3) for _ in range(2))
    assert first.strategy == again.strategy
    assert first.profile == again.profile


def test_rates_explain_the_measured_seconds(profiles):
    """All layers are products of one size: the rates give back the seconds that they took."""
    t = traced(ROWS)
    machine = tensor.soap_machine(profiles[0], t, FAST, 2)
    assert machine.num_devices == 2 and machine.memory_bytes == math.inf
    assert machine.link(0, 1)[1:] == (1e9, 0.0)
    costs = soap.Analytic(machine)
    seconds = 0.0
    for i, operator in enumerate(t.graph.operators):
        if operator.kind == "dot_general":
            shape = tuple(loop.size for loop in operator.loops)
            seconds += sum(costs.seconds(t.graph, i, shape))
    # An operator computes while it reads memory, so FLOPs and bytes share what was measured.
    assert 0.5 * LAYERS * 3e-3 <= seconds <= LAYERS * 3e-3 * (1 + 1e-9)


@pytest.mark.first_case
@pytest.mark.parametrize("measured_on", [1, 2, 4])
def test_devices_that_share_cores(measured_on):
    """Four devices on two cores compute everything, each all of it: by hand."""
    t = traced(ROWS)
    machine = Machine(4, bandwidth=(1e9, 1e9), num_cores=2.0)
    everything = configs(t.graph, lambda number: soap.Config(degrees_of(t.graph, "", number), (0,)))
    measured = dataclasses.replace(profile(), num_devices=measured_on)
    group = tensor.soap_machine(measured, t, machine, 4)
    found = tensor.split(measured, t, group, everything)
    ranking = tensor.choose([measured], machine, ROWS, [found])
    (together,) = (c for c in ranking if c.num_tensor_devices == 4 and c.recompute == "none" and c.num_stages == 1)
    # What was measured on more devices than cores had half of a core, or one of two.
    of_core = min(2 / measured_on, 1.0)
    seconds = of_core * LAYERS * (3e-3 + 1e-4)
    np.testing.assert_allclose(together.prediction.seconds, seconds * 4 / 2, rtol=1e-3)


def test_groups():
    machine = Machine(8, devices_per_server=4, num_cores=4.0, cores_per_device=1.5)
    found = tensor.groups(machine, 2)
    assert (found.num_devices, found.devices_per_server) == (4, 2)
    assert (found.num_cores, found.cores_per_device) == (2.0, 1.5)
    assert tensor.groups(machine, 8).devices_per_server == 1
    with pytest.raises(ValueError, match="8 devices do not fill groups of 3"):
        tensor.groups(machine, 3)
