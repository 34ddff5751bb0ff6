"""Machines, costs, strategies in files: what they read, and what they refuse."""

import json

import pytest
import soap_graphs

from jpipe import soap, solvers

FILE = """
name = "workstations"
flops = 1e13
memory_bandwidth = 7e11
memory_bytes = 1.6e10
levels = [
  {size = 4, bandwidth = 2e10, latency = 5e-6},
  {size = 2, bandwidth = 1e9, latency = 1e-5, shared = true},
]
links = [{first = 0, second = 1, bandwidth = 4e10}]
"""


def written(tmp_path, text, name="machine.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_machine_file(tmp_path):
    machine = soap.read_machine(written(tmp_path, FILE))
    assert machine.num_devices == 8 and machine.name == "workstations"
    assert machine.message_seconds(0, 1, 4e9) == 0.1
    assert machine.message_seconds(2, 3, 4e9) == 5e-6 + 0.2
    assert machine.message_seconds(0, 7, 4e9) == 1e-5 + 4.0
    # Messages that leave a server share its network card; others do not wait for each other.
    assert machine.link(0, 7)[0] == machine.link(3, 4)[0] != machine.link(4, 3)[0]
    assert machine.link(2, 3)[0] != machine.link(3, 2)[0]
    fields = {
        "flops": 1e13,
        "memory_bandwidth": 7e11,
        "levels": [{"size": 2, "bandwidth": 1e9}],
    }
    path = written(tmp_path, json.dumps(fields), "two.json")
    assert soap.read_machine(path).name == "two"


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("bandwidth = 4e10", "bandwidth = 0", "between devices 0 and 1 is dead"),
        ("bandwidth = 1e9", "bandwidth = 0.0", "level 1 is dead"),
        ("bandwidth = 1e9", "bandwidth = nan", "level 1 is dead"),
        ("latency = 1e-5", "latency = -1.0", "level 1: the latency must be seconds"),
        ("second = 1", "second = 9", "there is no device 9"),
        ("second = 1", "second = 0", "begins and ends at one device"),
        ("size = 4", "size = 0", "`size` of level 0"),
        ("flops = 1e13", "flops = -1.0", "`flops` must be above 0"),
        ("flops = 1e13", "", "lacks `flops`"),
        ("flops = 1e13", "flops = 'fast'", "`flops` .* must be a number"),
        ("flops", "flop", "no field 'flop'. Did you mean 'flops'"),
        ("flops", "product_item_bytes = 0\nflops", "`product_item_bytes` must be"),
        ("flops", "on_chip_bytes = 1.5\nflops", "`on_chip_bytes` must be a whole"),
        ("flops", "on_chip_bytes = -1\nflops", "`on_chip_bytes` must be a whole"),
        ("flops", "overlap = 1\nflops", "`overlap` must be true or false, got 1"),
        ("flops", "overlap = false\nflops", None),
        ("levels = [", "levels = [3,", r"`levels\[0\]` must have named fields"),
        ("levels = [", "levels = [", None),
        ("flops = 1e13", "flops = = 3", "is not TOML"),
    ],
)
def test_wrong_machine_files(tmp_path, old, new, words):
    path = written(tmp_path, FILE.replace(old, new, 1))
    if words is None:
        soap.read_machine(path)
        return
    with pytest.raises(ValueError, match=words):
        soap.read_machine(path)


def test_presets():
    """Section 8.1 of the FlexFlow paper."""
    p100, k80 = soap.read_machine("p100"), soap.read_machine("k80")
    assert (p100.num_devices, k80.num_devices) == (16, 64)
    assert [level.size for level in p100.levels] == [4, 4]
    assert [level.size for level in k80.levels] == [4, 16]
    with pytest.raises(ValueError, match="no machine 'p10'.*Did you mean 'p100'"):
        soap.read_machine("p10")
    assert p100.with_devices(8).num_devices == 8
    assert [level.size for level in p100.with_devices(2).levels] == [2, 1]
    with pytest.raises(ValueError, match="6 devices do not fill groups of 4"):
        p100.with_devices(6)


def test_a_measured_machine():
    rates = dict(flops=1e9, memory_bandwidth=1e9)
    found = solvers.Machine(8, 1e9, (1e8, 1e7), latency=1e-4, devices_per_server=4)
    machine = soap.measured(found, **rates)
    assert machine.num_devices == 8 and machine.memory_bytes == 1e9
    assert machine.message_seconds(0, 1, 1e8) == pytest.approx(1.0001)
    assert machine.message_seconds(0, 4, 1e8) == pytest.approx(10.0001)
    assert soap.measured(solvers.Machine(1), **rates).num_devices == 1


def test_profile_is_kept(tmp_path):
    graph, machine = soap_graphs.lenet(), soap_graphs.machine(4)
    calls = []

    def measure(graph, operator, shape):
        calls.append((operator, shape))
        return 1.0 + operator, 2.0

    path = tmp_path / "deep" / "profile.json"
    costs = soap.Profile(machine, path, measure)
    strategy = soap.data_parallel(graph, 4)
    first = soap.simulate(graph, machine, strategy, costs)
    assert first.seconds > 3 and len(calls) == len(set(calls)) > 5
    again = soap.Profile(machine, path)
    assert soap.simulate(graph, machine, strategy, again) == first
    soap.simulate(graph, machine, strategy, soap.Profile(machine, path, measure))
    assert len(calls) == len(set(calls))
    path.write_text("[1]")
    with pytest.raises(ValueError, match="is no profile"):
        soap.Profile(machine, path)


def test_strategy_files(tmp_path):
    graph = soap_graphs.lenet()
    strategy = soap.one_weird_trick(graph, 4)
    path = tmp_path / "strategy.json"
    soap.save_strategy(path, graph, strategy, 4)
    assert soap.load_strategy(path, graph, 4) == strategy
    records = json.loads(path.read_text())["strategy"]
    assert records[0]["operator"] == "conv_general_dilated_0"
    assert records[0]["degrees"] == {"S0": 4, "A1": 1, "A2": 1, "P3": 1, "R4": 1}
    with pytest.raises(ValueError, match="is for 4 devices, got 8"):
        soap.load_strategy(path, graph, 8)
    with pytest.raises(ValueError, match="the graph has no operator"):
        soap.load_strategy(path, soap_graphs.recurrent(), 4)
    with pytest.raises(ValueError, match="lacks operator"):
        soap.from_records(graph, records[:-1], 4)
    records[0]["degrees"] = {"S0": 4}
    with pytest.raises(ValueError, match="has the loops S0, A1"):
        soap.from_records(graph, records, 4)
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no strategy"):
        soap.load_strategy(path, graph, 4)


def test_experts():
    graph = soap_graphs.lenet()
    trick = soap.one_weird_trick(graph, 4)
    for operator, config in zip(graph.operators, trick):
        split = {loop.kind for loop, degree in zip(operator.loops, config.degrees) if degree > 1}
        if operator.kind == "conv_general_dilated":
            assert split == {"S"}
        if operator.name in ("dot_general_0", "dot_general_1"):
            assert split == {"P"}
    graph = soap_graphs.transformer(num_layers=1)
    found = soap.megatron(graph, 4)
    by_weight = {}
    for i, config in enumerate(found):
        kinds = [loop.kind for loop, degree in zip(graph.operators[i].loops, config.degrees) if degree > 1]
        for name in graph.weights_of(i):
            by_weight[name.rpartition(".")[2]] = kinds
    columns, rows = ["P"], ["R"]
    assert [by_weight[name] for name in ("q", "k", "v", "in")] == [columns] * 4
    assert [by_weight[name] for name in ("o", "out")] == [rows] * 2
    assert by_weight["scale"] == []
    # Two sums per layer and direction, as the paper counts: nothing else of a layer is sent between the products.
    for strategy in soap.default_starts(graph, 4).values():
        soap.check_strategy(graph, strategy, 4)
