"""The searches: the rule of acceptance, the optimum on small graphs, limits and budgets."""

import collections
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import soap_graphs

from jpipe import soap
from jpipe.soap.exhaustive import _PartialStrategy as PartialStrategy
from jpipe.soap.search import accepted_up_to, walk
from jpipe.soap.shards import Shards
from jpipe.soap.simulate import full_simulation
from jpipe.soap.tasks import Tasks


class Toy:
    """One operator, whose configuration is a number; seconds by a list."""

    num_operators = 1

    def __init__(self, seconds):
        self._seconds = seconds
        self.state, self._new = 0, None

    @property
    def seconds(self):
        return self._seconds[self.state]

    def draw(self, operator, rng):
        return int(rng.integers(len(self._seconds)))

    def try_change(self, operator, config, limit=math.inf, memory_limit=math.inf):
        self._new = config
        seconds = self._seconds[config]
        return seconds if seconds <= limit else math.inf

    def keep(self):
        self.state = self._new

    def undo(self):
        self._new = None


def test_chain_visits_states_as_often_as_it_should():
    """The stationary distribution is proportional to exp(-beta * seconds)."""
    seconds, beta, num_turns = [1.0, 1.2, 1.5, 3.0], 2.0, 60_000
    toy = Toy(seconds)
    visits = collections.Counter()
    chain = walk(toy, toy, beta, np.random.default_rng(0))
    for _ in itertools.islice(chain, num_turns):
        visits[toy.state] += 1
    wanted = np.exp(-beta * np.array(seconds))
    wanted /= wanted.sum()
    found = np.array([visits[i] for i in range(len(seconds))]) / num_turns
    # Three standard deviations of a share p of n turns that depend on each other little.
    error = 3 * np.sqrt(wanted * (1 - wanted) / num_turns) * 2
    assert (abs(found - wanted) < error).all(), (found, wanted)


def test_rule_of_acceptance():
    """min(1, exp(beta (before - after))) is the chance that a uniform number lets a step be taken."""
    uniform = (np.arange(10_000) + 0.5) / 10_000
    for before, after, beta in [(2.0, 1.0, 3.0), (1.0, 1.1, 3.0), (1.0, 2.0, 0.5)]:
        taken = [after <= accepted_up_to(before, beta, u) for u in uniform]
        chance = min(1.0, math.exp(beta * (before - after)))
        assert np.mean(taken) == pytest.approx(chance, abs=1e-3)


def brute_force(graph, machine, strategies):
    """The least seconds of all strategies, each built and simulated by itself, and a function: the fewest bytes of those
    that are at most a tolerance slower.
    """
    costs = soap.Analytic(machine)
    shards = Shards(graph, costs)  # regions are computed once
    results = []
    for strategy in strategies:
        tasks = Tasks(graph, machine, costs, strategy, shards=shards)
        results.append((full_simulation(tasks).seconds, tasks.sent_bytes))
    best = min(seconds for seconds, _ in results)
    return best, lambda tolerance: min(sent for seconds, sent in results if seconds <= best * (1 + tolerance))


def small_cases(count):
    """Random graphs whose spaces have at most a few thousand strategies."""
    seed = cases = 0
    while cases < count:
        rng = np.random.default_rng(seed)
        num_devices = int(rng.choice([2, 3]))
        graph = soap_graphs.random_graph(rng, 4)
        machine = soap_graphs.machine(num_devices, overhead=1e-7)
        space = soap.Space(graph, num_devices)
        seed += 1
        if 20 < space.size < 1500:
            cases += 1
            yield seed, graph, machine, space


def test_exhaustive_search_finds_the_optimum():
    for _, graph, machine, space in small_cases(4):
        best, _ = brute_force(graph, machine, soap_graphs.all_strategies(space))
        found = soap.exhaustive(graph, machine, space=space)
        assert found.seconds == best
        assert soap.simulate(graph, machine, found.strategy).seconds == best
        assert found.simulations < space.size


def test_search_finds_the_optimum_of_small_graphs():
    for seed, graph, machine, space in small_cases(4):
        best, fewest = brute_force(graph, machine, soap_graphs.all_strategies(space))
        for tolerance in (0.0, 0.02):
            found = soap.search(graph, machine, max_proposals=1200, seed=seed, tolerance=tolerance)
            assert found.fastest_seconds == best
            assert found.is_local_optimum
            assert found.seconds <= best * (1 + tolerance)
            assert found.simulated.sent_bytes == fewest(tolerance)


@pytest.mark.exhaustive
def test_search_finds_the_optimum_of_lenet():
    """On four devices, against the best of 1.9e19 strategies."""
    graph, machine = soap_graphs.lenet(), soap.p100_cluster().with_devices(4)
    found = soap.search(graph, machine, max_proposals=1000, seed=0)
    best = soap.exhaustive(graph, machine)
    assert best.seconds < min(found.starts.values())
    assert found.fastest_seconds == best.seconds
    assert found.is_local_optimum
    assert soap.simulate(graph, machine, best.strategy).seconds == best.seconds


@pytest.mark.exhaustive
def test_search_finds_the_optimum_of_a_recurrent_model():
    """On four devices, against the best of the 65,536 strategies that split samples and weights over all devices."""
    graph, machine = soap_graphs.next_word(64, 2, 512, 2048), soap.p100_cluster()
    machine = machine.with_devices(4)
    space = soap.Space(graph, 4, kinds="SP", whole=True)
    assert space.size == 65_536
    start = soap.random_strategy(space, np.random.default_rng(0))
    options = dict(space=space, starts={"random": start}, seed=0)
    found = soap.search(graph, machine, max_proposals=1000, **options)
    best = soap.exhaustive(graph, machine, space=space, start=start)
    assert found.fastest_seconds == best.seconds < found.starts["random"]


@pytest.mark.slow
def test_search_finds_the_optimum_in_95_of_100_seeds():
    """Random graphs of at most 6 operators; 8000 proposals each, and the polish."""
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng(1000 + seed)
        graph = soap_graphs.random_graph(rng, 6)
        machine = soap_graphs.machine(2, overhead=1e-7)
        found = soap.search(graph, machine, max_proposals=8000, seed=seed)
        best = soap.exhaustive(graph, machine, start=found.fastest)
        hits += found.fastest_seconds == best.seconds
    assert hits >= 95


def test_bounds_hold_for_every_strategy():
    """What the exhaustive search says of the beginning of a strategy is true of random ones, whole and split sums
    too.
    """
    machine = soap_graphs.machine(4, inside=2)
    for name, sync in (("lenet", "ring"), ("next_word", "server")):
        graph = getattr(soap_graphs, name)()
        space, rng = soap.Space(graph, 4), np.random.default_rng(0)
        start = soap.data_parallel(graph, 4)
        costs = soap.Analytic(machine)
        simulator = soap.Simulator(graph, machine, costs, start, sync=sync)
        branch = PartialStrategy(simulator, space, math.inf, 1)
        strategies = [soap.random_strategy(space, rng) for _ in range(15)]
        for strategy in [*soap.default_starts(graph, 4).values(), *strategies]:
            strategy = [c if c in set(space.configs(i)) else space.draw(i, rng) for i, c in enumerate(strategy)]
            loads, bounds = [], []
            for i, config in enumerate(strategy):
                loads.append(branch._decide(i, config))
                bounds.append(branch._bound(i))
            for each in reversed(loads):
                branch._take_back(each)
            found = soap.simulate(graph, machine, strategy, costs, sync=sync)
            assert max(bounds) <= found.seconds * (1 + 1e-9)


@pytest.mark.exhaustive
def test_operators_change_together():
    """A polish alone finds what no change of one operator, nor of two, does."""
    graph, machine = soap_graphs.lenet(), soap.p100_cluster().with_devices(4)
    start = soap.data_parallel(graph, 4)
    options = dict(max_proposals=1, starts={"data_parallel": start}, seed=0)
    found = soap.search(graph, machine, **options)
    changed = [i for i, (a, b) in enumerate(zip(start, found.strategy)) if a != b]
    single = [soap.simulate(graph, machine, (*start[:i], found.strategy[i], *start[i + 1 :])) for i in changed]
    assert len(changed) >= 3
    assert min(each.seconds for each in single) >= found.starts["data_parallel"]
    assert found.seconds < 0.98 * found.starts["data_parallel"]


def test_polish_in_a_space_in_which_nothing_can_follow():
    graph, machine = soap_graphs.next_word(8, 2, 8, 16), soap_graphs.machine(4)
    space = soap.Space(graph, 4, whole=True)
    found = soap.search(graph, machine, space=space, max_proposals=50, seed=0)
    assert found.is_local_optimum
    for i, config in enumerate(found.strategy):
        assert config in space.configs(i)


@pytest.mark.exhaustive
def test_no_single_change_improves_what_is_found():
    graph, machine = soap_graphs.recurrent(), soap_graphs.machine(2)
    found = soap.search(graph, machine, max_proposals=600, seed=1)
    assert found.is_local_optimum
    space = soap.Space(graph, 2)
    for i in range(space.num_operators):
        for config in space.configs(i):
            other = (*found.fastest[:i], config, *found.fastest[i + 1 :])
            seconds = soap.simulate(graph, machine, other).seconds
            assert seconds >= found.fastest_seconds


def test_search_is_never_worse_than_its_starts_and_repeats_itself():
    graph, machine = soap_graphs.lenet(), soap_graphs.machine(4)
    options = dict(max_proposals=200, seed=3, polish=False)
    found = soap.search(graph, machine, **options)
    assert found.seconds <= min(found.starts.values())
    assert set(found.starts) == {
        "data_parallel",
        "megatron",
        "one_weird_trick",
        "random",
    }
    assert found.proposals <= 200
    again = soap.search(graph, machine, **options)
    assert again.strategy == found.strategy and again.seconds == found.seconds
    seconds = [seconds for _, seconds in found.history]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == found.fastest_seconds
    assert soap.simulate(graph, machine, found.strategy) == found.simulated
    fastest = soap.simulate(graph, machine, found.fastest)
    assert fastest.seconds == found.fastest_seconds
    assert found.seconds <= 1.001 * fastest.seconds
    assert found.simulated.sent_bytes <= fastest.sent_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_seeds", "budgets"),
    [(3, (1, 45, 200)), pytest.param(30, (1, 7, 20, 45, 130, 400, 900), marks=pytest.mark.exhaustive)],
)
def test_more_budget_never_finds_less(num_seeds, budgets):
    """The search of a larger budget begins with that of a smaller one, with and without limits of the polish."""
    machine = soap_graphs.machine(4, overhead=1e-7)
    for seed in range(num_seeds):
        graph = soap_graphs.random_graph(np.random.default_rng(seed), 4)
        for limit in (lambda n: None, lambda n: n, lambda n: 40):
            before = [math.inf]
            for proposals in budgets:
                found = soap.search(
                    graph, machine, max_proposals=proposals, max_polish_proposals=limit(proposals), seed=seed
                )
                seconds = [seconds for _, seconds in found.history[: len(before)]]
                assert found.fastest_seconds <= before[-1]
                assert before == [math.inf] or seconds == before  # its beginning
                before = [seconds for _, seconds in found.history]
                assert before[-1] == found.fastest_seconds


def test_bytes_that_cost_no_seconds_are_not_sent():
    """On links so fast that transfers cost next to nothing, the result sends less than the fastest strategy."""
    graph = soap_graphs.lenet(64)
    machine = soap.Machine("fast links", (soap.Level(4, 1e13),), 1e10, 1e10, 1e-6)
    found = soap.search(graph, machine, max_proposals=30, max_polish_proposals=2000, seed=0)
    assert found.fastest_seconds < found.seconds <= 1.001 * found.fastest_seconds
    assert found.simulated.sent_bytes < soap.simulate(graph, machine, found.fastest).sent_bytes


# -- Sets of devices that are not regular


def irregular_machine(num_devices, rng):
    """Every link is unlike the others."""
    links = tuple(
        soap.Link(a, b, 10 ** rng.uniform(8, 10), 10 ** rng.uniform(-7, -5))
        for a, b in itertools.combinations(range(num_devices), 2)
    )
    return soap.Machine("irregular", (soap.Level(num_devices, 1e9),), 1e9, 1e10, 1e-7, links=links)


def gated():
    """A product that a function of another one multiplies."""

    def loss(w, x):
        return (x @ w["value"]) * jnp.tanh(x @ w["gate"])

    square = soap_graphs.weight(12, 12)
    return soap.trace(loss, {"gate": square, "value": square}, square)


def all_configs(operator, num_devices, kinds):
    """Every split of some kinds of loops over every list of different devices."""
    sizes = [loop.size if loop.can_split and loop.kind in kinds else 1 for loop in operator.loops]
    for degrees in itertools.product(range(1, num_devices + 1), repeat=len(sizes)):
        if all(size % degree == 0 for size, degree in zip(sizes, degrees)):
            for devices in itertools.permutations(range(num_devices), math.prod(degrees)):
                yield soap.Config(degrees, devices)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_seeds", [2, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_irregular_sets_of_devices(num_seeds):
    """No change of two operators at an edge helps, to any sets of devices and degrees. That is nearly always the
    optimum, within 0.2 %, and better than the best of regular sets.
    """
    graph, gains, optima, num_devices = gated(), 0, 0, 3
    for seed in range(num_seeds):
        machine = irregular_machine(num_devices, np.random.default_rng(seed))
        space = soap.Space(graph, num_devices, kinds="S", irregular=True)
        every = [tuple(all_configs(operator, num_devices, "S")) for operator in graph.operators]
        for i, configs in enumerate(every):
            regular = space.configs(i)
            assert set(space.irregular_configs(i, regular[0])) == set(configs) - set(regular)
        rng = np.random.default_rng(seed)
        starts = {"random": soap.random_strategy(space, rng)}
        found = soap.search(graph, machine, space=space, starts=starts, max_proposals=400, seed=seed)
        for first, second, _ in graph.edges:
            near = [configs if i in (first, second) else [found.fastest[i]] for i, configs in enumerate(every)]
            assert brute_force(graph, machine, itertools.product(*near))[0] == found.fastest_seconds
        best, _ = brute_force(graph, machine, itertools.product(*every))
        assert found.fastest_seconds <= 1.002 * best
        optima += found.fastest_seconds == best
        regular = soap.Space(graph, num_devices, kinds="S")
        regular = soap.search(graph, machine, space=regular, starts=starts, max_proposals=400, seed=seed)
        gains += best < regular.fastest_seconds
    assert gains and optima > 0.9 * num_seeds


def test_irregular_sets_on_many_devices_are_near():
    graph = gated()
    space = soap.Space(graph, 8, irregular=True)
    config = soap.Config((1, 4, 1), (0, 2, 4, 6))
    near = list(space.irregular_configs(0, config))
    assert not set(near) & {*space.configs(0), config}
    devices = {each.devices for each in near}
    assert {(0, 2, 5, 6), (6, 2, 4, 0), (0, 2, 4), (2, 4, 6, 1, 3, 5)} <= devices
    for each in near:
        soap.strategy.check_config(graph.operators[0], each, 8)
        assert len(set(each.devices)) == len(each.devices)
    assert not list(soap.Space(graph, 8).irregular_configs(0, config))


def test_irregular_sets_are_not_executed():
    """Neither does a search for execution give them, nor does a program run them."""
    graph, machine = gated(), irregular_machine(4, np.random.default_rng(0))
    space = soap.Space(graph, 4, executable=True)
    found = soap.search(graph, machine, space=space, starts=soap.starts_of(space), max_proposals=40, seed=0)
    assert space.can_run(found.strategy) and space.can_run(found.fastest)
    third = [soap.Config((3, *(1 for _ in o.loops[1:])), (0, 2, 3)) for o in graph.operators]
    assert not space.can_run(third)
    with pytest.raises(ValueError, match="is no split over the mesh .* runs on the whole mesh"):
        soap.apply(lambda w, x: x, graph, third, soap.device_mesh(4))


@pytest.mark.exhaustive
def test_memory_limit():
    graph = soap_graphs.lenet(8)
    machine = soap_graphs.machine(4)
    options = dict(max_proposals=200, seed=0)
    free = soap.search(graph, machine, max_polish_proposals=4000, **options)
    limit = 0.97 * max(free.simulated.memory_bytes)
    options["polish"] = False
    found = soap.search(graph, machine, memory_limit=limit, **options)
    assert max(found.simulated.memory_bytes) <= limit
    assert found.fastest_seconds >= free.fastest_seconds
    with pytest.raises(ValueError, match="no strategy was found that fits into 1000 "):
        soap.search(graph, machine, max_proposals=8, memory_limit=1000)
    small = soap.trace(lambda w, x: (x @ w).sum(), soap_graphs.weight(4, 4), soap_graphs.weight(4, 4))
    with pytest.raises(ValueError, match="no strategy of the space fits into 10 "):
        soap.exhaustive(small, soap_graphs.machine(2), memory_limit=10)


def test_ctrl_c_keeps_the_best():
    graph, machine = soap_graphs.lenet(), soap_graphs.machine(4)
    calls = []

    def progress(elapsed, seconds, proposals):
        calls.append((elapsed, seconds, proposals))
        if len(calls) == 3:
            raise KeyboardInterrupt

    found = soap.search(graph, machine, budget_seconds=60, progress=progress)
    assert found.interrupted and not found.is_local_optimum
    assert found.elapsed < 30
    assert found.seconds == soap.simulate(graph, machine, found.strategy).seconds


def test_wrong_options():
    graph, machine = soap_graphs.lenet(), soap_graphs.machine(4)
    for name in ("budget_seconds", "max_proposals", "beta", "memory_limit"):
        with pytest.raises(ValueError, match=f"`{name}` must be above 0, got 0"):
            soap.search(graph, machine, **{name: 0})
    with pytest.raises(ValueError, match="`tolerance` must be a part of the seconds, at least 0, got -1"):
        soap.search(graph, machine, tolerance=-1)
    with pytest.raises(ValueError, match="`irregular` sets of devices leave some devices out"):
        soap.Space(graph, 4, executable=True, irregular=True)
    with pytest.raises(ValueError, match="`starts` must have at least one"):
        soap.search(graph, machine, starts={})
    with pytest.raises(ValueError, match="`space` is for 2 devices"):
        soap.search(graph, machine, space=soap.Space(graph, 2))
    with pytest.raises(ValueError, match="`kinds` must be letters"):
        soap.Space(graph, 4, kinds="SX")
    with pytest.raises(ValueError, match="is no chain"):
        soap.chain_optimum(soap_graphs.branches(), machine)
    with pytest.raises(RuntimeError, match="gave up after 3 simulations"):
        soap.exhaustive(graph, machine, max_simulations=3)


def test_chain_optimum_is_that_of_all_strategies():
    """Against all strategies, priced one by one."""

    def loss(w, x):
        for kernel in w:
            x = jnp.cumsum(x @ kernel, 1)
        return x

    weights = [soap_graphs.weight(8, 8) for _ in range(2)]
    graph = soap.trace(loss, weights, soap_graphs.weight(4, 8))
    assert graph.is_chain and len(graph.operators) == 4
    machine = soap_graphs.machine(2, overhead=1e-7)
    space = soap.Space(graph, 2)
    price = soap.AdditiveCosts(graph, machine)
    strategy, seconds = soap.chain_optimum(graph, machine)
    totals = [price.total(each) for each in soap_graphs.all_strategies(space)]
    assert seconds == pytest.approx(min(totals), rel=1e-12)
    assert price.total(strategy) == pytest.approx(seconds, rel=1e-12)
    assert max(totals) > 1.5 * seconds


def test_space_is_what_it_says():
    graph = soap_graphs.lenet()
    space = soap.Space(graph, 4)
    for i, operator in enumerate(graph.operators):
        configs = space.configs(i)
        assert len(set(configs)) == len(configs)
        for config in configs:
            soap.strategy.check_config(operator, config, 4)
            assert len(set(config.devices)) == len(config.devices)
    by_samples = soap.Space(graph, 4, kinds="S", whole=True)
    for i, operator in enumerate(graph.operators):
        splits = {c.degrees for c in by_samples.configs(i)}
        for degrees in splits:
            for loop, degree in zip(operator.loops, degrees):
                assert degree == 1 or loop.kind == "S"
    rng = np.random.default_rng(0)
    draws = collections.Counter(space.draw(0, rng) for _ in range(20_000))
    assert set(draws) == set(space.configs(0))
    expected = 20_000 / len(draws)
    # A multinomial share stays within five standard deviations.
    assert max(abs(n - expected) for n in draws.values()) < 5 * math.sqrt(expected)
