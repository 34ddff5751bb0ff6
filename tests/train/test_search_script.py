"""`train/search.py`, as it is typed."""

import json

import pytest

from jpipe import soap
from train import flags, search
from train.config import TrainConfig

SMALL = ["--config", "configs/quickstart.py", "--config.batch_size=16"]


def run(capsys, *words):
    """Exit code, what it printed, what it complained of."""
    try:
        code = search.main(list(words))
    except SystemExit as error:  # argparse's
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_and_files(capsys, tmp_path):
    words = ["--devices", "2", "--machine", "p100", "--proposals", "20", "--json"]
    path, pictures = tmp_path / "strategy.json", tmp_path / "pictures"
    files = ["--save", str(path), "--draw", str(pictures)]
    code, out, _ = run(capsys, *SMALL, *words, *files)
    found = json.loads(out)
    assert code == 0
    assert set(found) >= {
        "data_parallel_seconds",
        "expert_seconds",
        "best_seconds",
        "proposals",
        "seconds",
        "strategy",
        "memory_bytes",
    }
    assert found["best_seconds"] <= found["data_parallel_seconds"]
    assert found["best_seconds"] <= found["expert_seconds"]
    for record in found["strategy"]:
        assert set(record) == {"operator", "degrees", "devices"}
    _, config = flags.parse([*SMALL], TrainConfig)
    graph = search.graph_of(config)
    machine = soap.p100_cluster().with_devices(2)
    strategy = soap.load_strategy(path, graph, 2)
    simulated = soap.simulate(graph, machine, strategy)
    assert simulated.seconds == found["best_seconds"]
    assert max(simulated.memory_bytes) == found["memory_bytes"]
    weights = {w for i in range(len(graph.operators)) for w in graph.weights_of(i)}
    assert "0.conv.kernel" in weights
    for name in ("timeline.svg", "search.svg"):
        assert (pictures / name).read_text().lstrip().startswith("<?xml")


@pytest.mark.exhaustive
def test_a_strategy_for_stages(capsys, tmp_path):
    path = tmp_path / "strategy.json"
    words = ["--devices", "2", "--proposals", "20", "--in-stages", "--save", str(path)]
    assert run(capsys, *SMALL, *words)[0] == 0
    _, config = flags.parse([*SMALL], TrainConfig)
    graph = search.graph_of(config, whole=False)
    space = soap.Space(graph, 2, in_stages=True)
    assert space.can_run(soap.load_strategy(path, graph, 2))


def test_table(capsys):
    code, out, _ = run(capsys, *SMALL, "--devices", "2", "--proposals", "8")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["operator", "loops", "S", "A", "P", "R", "devices"]
    assert lines[1].startswith("conv_general_dilated_0 (0.conv.kernel)")
    assert any(line.startswith("data parallel") for line in lines)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name a configuration and a number of devices"),
        (["--devices", "6"], "6 devices do not fill groups of 4"),
        (["--devices", "2", "--machine", "p10"], "there is no machine 'p10'"),
        (["--devices", "2", "--machine", "p.toml"], "there is no machine 'p.toml'"),
        (["--devices", "2", "--save", "none/here.json"], "there is no folder `none`"),
        (["--devices", "2", "--save", "tests"], "this is a folder"),
        (["--devices", "2", "--budget", "0s"], "must be a time above 0"),
        pytest.param(
            ["--devices", "2", "--memory", "1KB", "--proposals", "4"],
            "fits into 1000 ",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_wrong_words(capsys, words, message):
    code, _, error = run(capsys, *SMALL, *words)
    assert code == 2 and message in error


def test_a_dead_link(capsys, tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(
        "flops = 1e12\nmemory_bandwidth = 1e11\n"
        "levels = [{size = 2, bandwidth = 1e9}]\n"
        "links = [{first = 0, second = 1, bandwidth = 0}]\n"
    )
    code, _, error = run(capsys, *SMALL, "--devices", "2", "--machine", str(path))
    assert code == 2 and "the link between devices 0 and 1 is dead" in error
