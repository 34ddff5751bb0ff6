"""Stages that a solver of device placement chooses for whole models, against plain JAX and brute force."""

import contextlib
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import schedule_named
from flax import linen as nn
from flax import nnx
from helpers import refused

import jpipe
from jpipe.plan import placement
from jpipe.segments.placement import Crossing, Placement
from jpipe.solvers import ideals

KEY = jax.random.key(3)
ROWS, N = 8, 4
RATE = 1e9
"""Operations per second of the devices of the tests."""


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Seconds follow from operations, so that stages are the same in each run."""

    def costs_of(settings, traced, microbatch):
        seconds = tuple(flops / RATE for flops in (*traced.flops, 0.0))
        memory = (1.0,) * len(traced.layers)
        return placement.Costs(tuple(s / 3 for s in seconds), tuple(2 * s / 3 for s in seconds), memory)

    monkeypatch.setattr(placement, "costs_of", costs_of)
    monkeypatch.setattr(placement, "bandwidth_of", lambda settings: 1e12)


class Towers(nnx.Module):
    """Two inputs, each with a tower of its own."""

    def __init__(self, *, rngs):
        self.left = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.right = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, inputs, other):
        x, y = inputs, other
        for layer in self.left:
            x = x + nnx.gelu(layer(x))
        for layer in self.right:
            y = nnx.tanh(layer(y))
        return self.head(jnp.concatenate([x, y], -1))


class Mixed(nnx.Module):
    """A block with branches, whose convolutions have batch norms, and dropout."""

    def __init__(self, rate=0.0, *, rngs):
        def conv(size):
            return nnx.Conv(4, 4, (size, size), use_bias=False, rngs=rngs)

        self.paths = nnx.List([nnx.List([conv(1)]), nnx.List([conv(1), conv(3)])])
        self.norms = nnx.List([nnx.BatchNorm(4, rngs=rngs) for _ in range(3)])
        self.last, self.dropout = nnx.Conv(8, 4, (1, 1), rngs=rngs), nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        norms, results = iter(self.norms), []
        for path in self.paths:
            y = x
            for conv in path:
                y = self.dropout(nnx.relu(next(norms)(conv(y))))
            results.append(y)
        return self.head(self.last(jnp.concatenate(results, -1)).mean((1, 2)))


class Translation(nn.Module):
    """Every layer of the decoder reads the outputs of the encoder."""

    @nn.compact
    def __call__(self, inputs, targets):
        x, y = nn.Embed(16, 8)(inputs), nn.Embed(16, 8)(targets)
        x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(nn.LayerNorm()(x))))
        for _ in range(2):
            weights = jax.nn.softmax(nn.Dense(8)(nn.LayerNorm()(y)) @ nn.Dense(8)(x).swapaxes(1, 2))
            y = y + weights @ nn.Dense(8)(x)
        return nn.Dense(5)(y)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for _ in range(2):
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(x)))
            skips.append(x)
            x = nn.Dense(8)(x)
        for _ in range(2):
            x = nn.Dense(8)(jnp.concatenate([x, skips.pop()], -1))
            x = x + nn.Dense(8)(nn.silu(nn.Dense(16)(x)))
        return nn.Dense(5)(x)


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


TOKENS = np.random.default_rng(0).integers(0, 16, (ROWS, 6))
CASES = {
    "towers": (Towers, {"inputs": numbers(ROWS, 6), "other": numbers(ROWS, 6)[::-1]}),
    "branches": (Mixed, {"inputs": numbers(ROWS, 4, 4, 4)}),
    "translation": (Translation, {"inputs": TOKENS, "targets": TOKENS[::-1]}),
    "U-Net": (UNet, {"inputs": numbers(ROWS, 8)}),
}


def loss(outputs, batch):
    return jnp.mean((outputs - 1) ** 2)


def pipeline(model, num_stages, *, schedule="one_f_one_b", boundaries="placement", **options):
    options = {"loss": loss, "optimizer": optax.sgd(0.01, momentum=0.9), **options}
    schedule = schedule_named(schedule, num_stages, N)
    return jpipe.Pipeline(model, schedule=schedule, boundaries=boundaries, **options)


def plain(model, params, state):
    """`(params, batch) -> outputs` of a model in training."""
    if isinstance(model, nn.Module):
        return lambda p, batch: model.apply({"params": p}, *batch.values())
    graph, _, rest = nnx.split(model, nnx.Param, ...)

    def outputs(p, batch):
        return nnx.merge(graph, nnx.State(p), jax.tree.map(jnp.asarray, rest))(*batch.values())

    return outputs


def check_training(pipe, model, batch):
    """Two steps and an evaluation against plain JAX, where a microbatch is normalised by itself."""
    state = pipe.init(KEY, batch)
    params = pipe.get_params(state)
    outputs = plain(model, params, None)
    rows = ROWS // N

    @jax.jit
    @jax.value_and_grad
    def step(p):
        parts = [{name: a[i : i + rows] for name, a in batch.items()} for i in range(0, ROWS, rows)]
        return sum(loss(outputs(p, part), part) for part in parts) / N

    optimizer = optax.sgd(0.01, momentum=0.9)
    moments = optimizer.init(params)
    for _ in range(2):
        want, gradients = step(params)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), pipe.get_params(state), params)
    return state


def rarely(*case):
    return pytest.param(*case, marks=pytest.mark.exhaustive)


class Annealed(nnx.Module):
    """Each block reads a count of the calls, which no data enters."""

    def __init__(self, *, rngs):
        self.calls = nnx.Variable(jnp.zeros(()))
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = x + jnp.tanh(layer(x)) / self.calls[...]
        return x


def test_blocks_that_read_a_count_may_be_on_any_stages():
    model, batch = Annealed(rngs=nnx.Rngs(0)), {"inputs": numbers(ROWS, 6)}
    pipe = pipeline(model, 2)
    state = pipe.init(KEY, batch)
    want = np.mean([loss(model(rows), None) for rows in batch["inputs"].reshape(N, -1, 6)])
    state, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    assert pipe.get_mutable_state(state)["calls"] == N


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        ("towers", 2),
        ("branches", 3),
        ("translation", 3),
        ("U-Net", 2),
        rarely("towers", 3),
        rarely("branches", 2),
        rarely("translation", 2),
        rarely("U-Net", 3),
    ],
)
def test_training_is_that_of_the_plain_model(name, num_stages):
    make, batch = CASES[name]
    model = make() if issubclass(make, nn.Module) else make(rngs=nnx.Rngs(0))
    pipe = pipeline(model, num_stages)
    state = check_training(pipe, model, batch)
    assert len(pipe.partition(batch)) == num_stages
    few = jax.tree.map(lambda a: a[:3], batch)
    params = pipe.get_params(state)
    if name == "branches":
        nnx.update(model, params)
        nnx.update(model, pipe.get_mutable_state(state))
        model.eval()
        want = model(few["inputs"])
    else:
        want = plain(model, params, None)(params, few)
    np.testing.assert_allclose(pipe.predict(state, few), want, atol=2e-5)
    np.testing.assert_allclose(pipe.evaluate(state, few)["loss"], loss(want, few), rtol=1e-4)
    half = jax.tree.map(lambda a: a[: ROWS // 2], batch)  # another shape is cut at the same places
    names = [record.names for record in pipe.partition(batch)]
    assert [record.names for record in pipe.partition(half)] == names
    _, metrics = pipe.step(state, half)
    assert np.isfinite(metrics["loss"])


def orders(graph, rng, num_groups):
    """Random groups of the steps of a model, none before what it needs."""
    group = {}
    for item in graph.steps:
        lowest = max((group[m] for m in graph.needs[item]), default=0)
        group[item] = rng.randint(lowest, num_groups - 1)
    ranks = {g: n for n, g in enumerate(sorted(set(group.values())))}
    of_step = {n: ranks[group[item]] for item, ns in graph.steps.items() for n in ns}
    return tuple(of_step[n] for n in range(len(of_step)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [rarely("towers"), "branches", rarely("translation"), rarely("U-Net")])
def test_every_order_of_the_products_trains_as_one_stage_does(name, monkeypatch):
    """Dropout, running statistics and printed values included."""
    make, batch = CASES[name]
    rng = random.Random(1)

    def model():
        if make is Mixed:
            return Mixed(0.5, rngs=nnx.Rngs(0))
        return make() if issubclass(make, nn.Module) else make(rngs=nnx.Rngs(0))

    def trained(pipe):
        state = pipe.init(KEY, batch)
        for _ in range(2):
            state, metrics = pipe.step(state, batch)
        found = metrics["loss"], pipe.get_params(state), pipe.get_mutable_state(state), pipe.evaluate(state, batch)
        return jax.tree.map(np.asarray, found)

    def place(settings, microbatch, key_impl, memory_limit):
        while True:
            groups = orders(settings.steps(microbatch, key_impl), rng, 3)
            if max(groups) == 2:
                return Placement(groups)

    want = trained(pipeline(model(), 1))
    monkeypatch.setattr(placement, "placement_of", place)
    got = trained(pipeline(model(), 3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, want)


class Auxiliary(nnx.Module):
    """A second head, in training alone."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.second, self.head = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(6, 5, rngs=rngs)
        self.deterministic = False

    def __call__(self, x):
        x = nnx.relu(self.layers[0](x))
        if not self.deterministic:
            jpipe.report("second", jnp.mean(self.second(x) ** 2))
        for layer in self.layers[1:]:
            x = nnx.relu(layer(x))
        return self.head(x)


@pytest.mark.exhaustive
def test_evaluation_may_lack_products_of_training():
    def with_second(outputs, batch, *, reported):
        return loss(outputs, batch) + reported["second"]

    batch, model = {"inputs": numbers(ROWS, 6)}, Auxiliary(rngs=nnx.Rngs(0))
    pipe = pipeline(model, 2, loss=with_second)
    state = pipe.init(KEY, batch)
    assert "second" in " ".join(name for record in pipe.partition(batch) for name in record.names)
    x = nnx.relu(model.layers[0](batch["inputs"]))
    want = loss(model(batch["inputs"]), batch) + jnp.mean(model.second(x) ** 2)
    want_outputs = model(batch["inputs"])
    np.testing.assert_allclose(pipe.predict(state, batch), want_outputs, atol=1e-5)
    _, metrics = pipe.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


# -- The cut


class Uneven(nnx.Module):
    """Two towers, each of which is half of the work; the trace has one inside of the other."""

    def __init__(self, *, rngs):
        self.left = nnx.List([nnx.Linear(6, 18, rngs=rngs), nnx.Linear(18, 2, rngs=rngs)])
        self.right = nnx.List([nnx.Linear(6, 11, rngs=rngs), nnx.Linear(11, 6, rngs=rngs)])

    def __call__(self, inputs, other):
        x = self.left[0](inputs)
        y = self.right[1](self.right[0](other))
        return self.left[1](x) * y.mean()


class Marked(Uneven):
    """The user's marks do not count."""

    def __call__(self, inputs, other):
        return jpipe.stage_end(super().__call__(jpipe.stage_end(inputs), other))


@pytest.mark.first_case
@pytest.mark.parametrize("make", [Uneven, Marked])
@pytest.mark.parametrize(("factor", "is_chain"), [(1.0, False), (2.0, True)])
def test_the_better_cut_as_measured_is_chosen(make, factor, is_chain, monkeypatch):
    """Stages with branches may be slower than the sum of their nodes; then the trace is cut as it is."""
    in_order = placement.costs_of

    def costs_of(settings, traced, microbatch):
        costs, groups = in_order(settings, traced, microbatch), settings.model.placement.groups
        slower = factor if list(groups) != sorted(groups) else 1.0
        return costs._replace(forward=tuple(slower * s for s in costs.forward))

    monkeypatch.setattr(placement, "costs_of", costs_of)
    pipe = pipeline(make(rngs=nnx.Rngs(0)), 2)
    marks = pytest.warns(match="marks 2 ends of stages by `jpipe.stage_end`, and they do not count")
    with marks if make is Marked else contextlib.nullcontext():
        program = pipe._program(CASES["towers"][1])
    groups = program.settings.model.placement.groups
    assert (list(groups) == sorted(groups)) == is_chain
    assert len(pipe.partition(CASES["towers"][1])) == 2


def small_graph(function, *shapes):
    """The steps of a function of two matrices and some arrays."""
    layer = jpipe.InitApply(
        lambda key, args: {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, lambda p, args: function(p["a"], p["b"], args)
    )
    pipe = pipeline(layer, 2)
    batch = {"inputs": tuple(numbers(ROWS, *shape) for shape in shapes)}
    return pipe._settings.steps(pipe._settings.microbatch(batch), "threefry2x32")


def narrows(a, b, args):
    x = jnp.sin(args[0] @ a)
    return jnp.concatenate([x[:, :2] + jnp.cos(x[:, 2:])] * 2, -1) @ b  # half as wide between the two


def branches(a, b, args):
    x, y = jnp.sin(args[0] @ a), jnp.cos(args[1])
    x = x * y
    return jnp.tanh(x + y) @ b + x.mean() + y


@pytest.mark.parametrize(("function", "shapes"), [(narrows, [(4,)]), (branches, [(4,), (4,)])])
def test_between_products_the_fewest_bytes_cross(function, shapes):
    graph = small_graph(function, *shapes)
    assert len(graph.steps) == 2 and len(graph.items) <= 12

    def crossing_bytes(groups):
        values = graph.crossing(groups, 2)
        return sum(v.aval.size * v.aval.dtype.itemsize for v in values if v.group == 0 and v.readers != {0})

    found = graph.groups({0: 0, 1: 1}, 2)
    first, second = graph.steps
    allowed = (
        groups
        for groups in itertools.product(range(2), repeat=len(graph.items))
        if groups[first] == 0
        and groups[second] == 1
        and all(groups[m] <= groups[n] for n, before in enumerate(graph.before) for m in before)
    )
    assert crossing_bytes(found) == min(map(crossing_bytes, allowed))


def random_problem(rng):
    """Nodes with random costs, and values between them."""
    number = rng.randint(3, 6)
    seconds = [rng.randint(1, 9) for _ in range(number)]
    costs = placement.Costs((*(s / 3 for s in seconds), 0.0), (*(2 * s / 3 for s in seconds), 0.0), (1.0,) * number)
    values = []
    for k in range(number - 1):
        for _ in range(rng.randint(0, 2)):
            readers = rng.sample(range(k + 1, number), rng.randint(1, number - k - 1))
            values.append(Crossing(k, frozenset(readers), jax.ShapeDtypeStruct((rng.randint(1, 8),), np.float32)))
    order = {(value.group, reader) for value in values for reader in value.readers}
    return costs, values, order


def bottleneck(stages, costs, values, bandwidth):
    """The slowest stage, by the definition: its nodes, and twice every value that enters or leaves it."""
    loads = []
    for members in stages:
        crossing = [v for v in values if len({k in members for k in (v.group, *v.readers)}) == 2]
        moved = sum(2 * 4 * v.aval.size for v in crossing)
        loads.append(sum(costs.seconds[k] for k in members) + moved / bandwidth)
    return max(loads)


@pytest.mark.parametrize("bandwidth", [2.0, 20.0, 1e12])
def test_the_slowest_stage_is_that_of_brute_force(bandwidth):
    rng = random.Random(0)
    for _ in range(40):
        costs, values, order = random_problem(rng)
        number, num_stages = len(costs.memory), rng.randint(1, 3)
        problem = placement.Problem(costs, values, order, bandwidth)
        best = min(
            bottleneck(
                [{k for k in range(number) if stage_of[k] == s} for s in range(num_stages)], costs, values, bandwidth
            )
            for stage_of in itertools.product(range(num_stages), repeat=number)
            if all(stage_of[a] <= stage_of[b] for a, b in order)
        )
        np.testing.assert_allclose(ideals(problem.graph, num_stages).objective, best, rtol=1e-9)
        stages = placement.solved(problem, num_stages, None)
        assert len(stages) == num_stages and sorted(sum(stages, [])) == list(range(number))
        stage_of = {k: s for s, members in enumerate(stages) for k in members}
        assert all(stage_of[a] <= stage_of[b] for a, b in order)
        if bandwidth == 1e12:
            np.testing.assert_allclose(bottleneck(map(set, stages), costs, values, bandwidth), best, rtol=1e-6)


def test_nodes_are_few_and_in_an_order_in_which_they_can_run():
    graph = small_graph(lambda a, b, args: sum((args[0] @ a) @ b for _ in range(12)), (4,))
    assert placement.num_ideals(graph.needs, 10**6) == 3**12
    assert placement.num_ideals(graph.needs, 10**5) is None
    nodes = placement.merged_steps(graph, 2)
    node_of = {item: k for k, items in enumerate(nodes) for item in items}
    assert sorted(node_of) == sorted(graph.steps)
    assert all(node_of[m] <= node_of[n] for n, needs in graph.needs.items() for m in needs)
    merged = {k: {node_of[m] for n in items for m in graph.needs[n]} - {k} for k, items in enumerate(nodes)}
    assert placement.num_ideals(merged, placement.MOST_IDEALS) is not None


@pytest.mark.exhaustive
def test_with_too_many_orders_it_takes_one_and_says_so(monkeypatch):
    monkeypatch.setattr(placement, "MOST_IDEALS", 1)
    batch = CASES["towers"][1]
    with pytest.warns(UserWarning, match="too many ways to try all.*no placement takes less than"):
        pipe = pipeline(Towers, 2)
        pipe.partition(batch)
    check_training(pipe, Towers(rngs=nnx.Rngs(jax.random.fold_in(KEY, 0))), batch)


def test_unequal_towers_are_balanced_although_one_comes_first():
    """The towers side by side, where a cut of the trace has one after the other."""
    batch = CASES["towers"][1]
    pipe = pipeline(Towers, 2)
    records = pipe.partition(batch)
    names = [" ".join(record.names) for record in records]
    assert all("left" in n or "right" in n for n in names) and "head" in names[1]
    total = sum(record.seconds for record in records)
    assert max(record.seconds for record in records) < 0.6 * total
    picture = jpipe.draw.model(pipe, batch)
    assert picture.seconds == tuple(record.seconds for record in records)
    assert f"{1e3 * records[0].seconds:.3g} ms" in picture.text()
    sent = sum(a.size * 4 for a in jax.tree.leaves(pipe._program(batch).traced.outputs[records[0].layers[1] - 1]))
    assert records[0].sent_bytes >= sent and records[1].sent_bytes == 0


def test_layers_of_a_list_stay_in_order_and_transfers_count(monkeypatch):
    layers = [jpipe.InitApply(lambda key, x: jnp.ones((6, 6)), lambda w, x: x @ w) for _ in range(3)]
    wide = jpipe.InitApply(lambda key, x: jnp.ones((6, 600)), lambda w, x: x @ w)
    layers += [wide, jpipe.InitApply(lambda key, x: jnp.ones((600, 6)), lambda w, x: x @ w)]
    batch = {"inputs": numbers(ROWS, 6)}
    assert [record.layers for record in pipeline(layers, 2).partition(batch)] == [(0, 4), (4, 5)]
    monkeypatch.setattr(placement, "bandwidth_of", lambda settings: 1e6)
    assert [record.layers for record in pipeline(layers, 2).partition(batch)] != [(0, 4), (4, 5)]


# -- A state and its cut


@pytest.mark.exhaustive
def test_a_state_keeps_its_cut_in_equal_pipelines_and_files(tmp_path, monkeypatch):
    """Microbatches are in flight, so it must be the same; a pipeline with another cut takes weights."""
    batch = CASES["towers"][1]
    pipe = pipeline(Towers, 2, schedule="pipedream")
    state, _ = pipe.step(pipe.init(KEY, batch), batch)
    checkpoints = jpipe.Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    want = pipe._program(batch).settings.model.placement
    other = Placement(tuple(int(n > 0) for n in range(len(want.groups))))
    assert other.groups != want.groups
    monkeypatch.setattr(placement, "placement_of", lambda *args: other)
    restored = pipeline(Towers, 2, schedule="pipedream")
    state_there = checkpoints.restore(restored, batch).state
    assert restored._program(batch).settings.model.placement.groups == want.groups
    adopting = pipeline(Towers, 2, schedule="pipedream")
    state_here, here = adopting.step(jax.tree.map(jnp.copy, state_there), batch)
    assert adopting._program(batch).settings.model.placement.groups == want.groups
    _, there = restored.step(state_there, batch)
    state, metrics = pipe.step(state, batch)
    np.testing.assert_array_equal(there["loss"], metrics["loss"])
    np.testing.assert_array_equal(here["loss"], metrics["loss"])
    state, _ = pipe.flush(state)
    checkpoints.save(2, state)
    checkpoints.wait()
    elsewhere = pipeline(Towers, 3, boundaries="flops")
    weights = elsewhere.get_params(checkpoints.restore(elsewhere, batch).state)
    jax.tree.map(np.testing.assert_array_equal, weights, pipe.get_params(state))


# -- What it refuses


@pytest.mark.parametrize(
    ("model", "num_stages", "boundaries", "message"),
    [
        (lambda rngs: nnx.Linear(6, 6, rngs=rngs), 2, "placement", "can be placed on at most 1 stages.*has 2"),
        (Auxiliary, 6, "placement", "can be placed on at most 5 stages.*has 6"),
        (
            jpipe.InitApply(lambda key, x: {"w": jnp.ones(6)}, lambda p, x: jnp.sin(x)),
            2,
            "placement",
            "at most 0 stages",
        ),
        (Auxiliary, 2, "placment", "one of 'flops', 'time', 'memory', 'placement' to balance"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*bubble")
def test_bad_input(model, num_stages, boundaries, message):
    pipe = pipeline(model, num_stages, boundaries=boundaries)
    with refused(message):
        pipe.init(KEY, {"inputs": numbers(ROWS, 6)})
