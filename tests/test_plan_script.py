"""`train/plan.py`, as it is typed: graphs through every solver, a model through to a run, and wrong words."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jpipe.plan import Graph, Node, read_graph
from train import flags, plan
from train.config import TrainConfig

ROOT = pathlib.Path(__file__).parents[1]
CHAIN = Graph(
    tuple(
        Node(name, forward=t, backward=t, activation_bytes=(1e6,), parameter_bytes=1e6)
        for name, t in zip("abcdef", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    ),
    tuple((i, i + 1) for i in range(5)),
)


@pytest.fixture
def chain(tmp_path):
    path = tmp_path / "chain.json"
    CHAIN.save(path)
    return str(path)


def run(capsys, *words):
    """Exit code, what it printed, what it complained of."""
    try:
        code = plan.main(list(words))
    except SystemExit as error:  # argparse's
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("solver", plan.SOLVERS)
def test_every_solver_answers_in_json(capsys, chain, solver):
    words = ["--graph", chain, "--solver", solver, "--devices", "2", "--json"]
    if solver not in ("min-max", "block"):
        words += ["--bandwidth", "1GB"]
    code, out, _ = run(capsys, *words)
    found = json.loads(out)
    assert code == 0 and list(found) == [
        "solver",
        "objective",
        "stages",
        "optimal",
        "bound",
        "data_parallel",
        "solver_seconds",
    ]
    assert found["solver"] == solver
    nodes = [node for stage in found["stages"] for node in stage["nodes"]]
    assert nodes == list("abcdef")
    # Half of 42 cannot be had: 20 and 22, or for PipeDream two replicas of everything.
    times = {n.id: n.seconds for n in CHAIN.nodes}
    compute = [sum(times[n] for n in s["nodes"]) for s in found["stages"]]
    slowest = max(t / stage["replicas"] for t, stage in zip(compute, found["stages"]))
    np.testing.assert_allclose(found["objective"], slowest, atol=0.01)
    assert found["bound"] <= found["objective"] * (1 + 1e-9)


def test_and_in_words(capsys, chain):
    words = "--solver pipedream --hierarchy 2x2 --bandwidths 1e9,100MB".split()
    code, out, _ = run(capsys, "--graph", chain, *words)
    assert code == 0 and "data parallelism" in out and "optimal" in out


def test_published_configuration(capsys):
    if "JPIPE_DATA" not in os.environ:
        pytest.skip("JPIPE_DATA names no directory with PipeDream's profiles.")
    path = pathlib.Path(os.environ["JPIPE_DATA"], "pipedream-profiles", "vgg16.txt")
    words = f"--graph {path} --format pipedream --solver pipedream --json".split()
    for devices, bandwidth, replicas, seconds in (
        (4, "1e9", [3, 1], 0.205520896),
        (8, "3.125e9", [7, 1], 0.0936611288),
        (16, "3e9", [15, 1], 0.0456574832),
    ):
        more = f"--devices {devices} --bandwidth {bandwidth}".split()
        _, out, _ = run(capsys, *words, *more)
        found = json.loads(out)
        assert [stage["replicas"] for stage in found["stages"]] == replicas
        assert float(f"{found['objective']:.9g}") == seconds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "name either a configuration.*or a graph"),
        ("--graph chain.json --config c.py", "name either"),
        ("--graph chain.json", "needs a `--solver`: pipedream, ideals"),
        ("--graph chain.json --solver ideal", "invalid choice: 'ideal'"),
        ("--graph none.json --solver ideals", "No such file.*none.json"),
        ("--graph chain.json --solver ideals", "for how many devices"),
        ("--graph chain.json --solver ideals --devices 2", "bandwidth"),
        ("--graph chain.json --solver pipedream --devices 2", "needs `--bandwidth"),
        ("--graph chain.json --solver min-max --devices 9", r"in 1\.\.6.*got 9"),
        ("--graph chain.json --solver min-max --devices 0", "whole number of at least"),
        ("--graph chain.json --solver block --devices 2 --straight", "`--straight` is"),
        ("--graph chain.json --solver ideals --devices 2 --memory lots", "2GiB"),
        (
            "--graph chain.json --format placement --solver ideals --devices 2",
            "must be an object, got",
        ),
        (
            "--graph chain.json --format pipedream --solver ideals --devices 2",
            "chain.json:1: a node must be",
        ),
        (
            "--graph chain.json --solver pipedream --hierarchy 2x2 --devices 3 --bandwidth 1",
            "has 4 devices, `--devices` says 3",
        ),
        ("--graph chain.json --solver ideals --config.x=1", "option of a config"),
        ("--config configs/quickstart.py", "how many devices"),
        ("--config configs/quick.py --devices 2", "Did you mean"),
        ("--config configs/quickstart.py --devices 2 --microbatches 7", "must divide"),
        ("--config configs/quickstart.py --devices 2 --save planned", "Python file"),
        ("--config configs/quickstart.py --devices 2 --config.batchsize=3", "unknown"),
        (
            "--config configs/quickstart.py --devices 2 --asynchronous --config.pipeline.loss_scale=dynamic",
            "Leave out `--asynchronous`",
        ),
    ],
)
def test_wrong_words(capsys, chain, monkeypatch, words, message):
    if "--config " in words:
        monkeypatch.chdir(ROOT)
    else:
        monkeypatch.chdir(pathlib.Path(chain).parent)
    given = words.split() or ["--devices", "2"]
    code, out, error = run(capsys, *given)
    assert code == 2 and out == ""
    assert re.search(message, error, re.DOTALL), error


def test_sizes():
    assert plan.size("2GiB") == 2 * 2**30 and plan.size("500MB") == 5e8
    assert plan.size("1.25e9") == 1.25e9 and plan.size("3K") == 3000


def test_a_model_is_planned_and_the_plan_runs(tmp_path):
    """Profiled, priced, saved; what is saved trains, and a second call measures nothing anew."""
    saved, profiles = tmp_path / "planned.py", tmp_path / "profiles"
    command = [sys.executable, "train/plan.py", "--config", "configs/quickstart.py"]
    command += ["--config.model=MLP", "--config.model.widths=16,16,16"]
    command += ["--config.batch_size=16", "--config.num_steps=2"]
    command += (
        f"--devices 2 --microbatches 4 --profiles {profiles} --memory 1GiB".split()
    )
    result = subprocess.run(
        [*command, "--save", str(saved)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for words in (
        "profile of a microbatch of 4",
        "machine: 2 devices",
        "why not",
        "s0 ",
    ):
        assert words in result.stdout
    (profile,) = profiles.iterdir()
    measured = profile.read_text()
    config = flags.load(str(saved), TrainConfig)
    assert config.model.widths == (16, 16, 16) and config.num_steps == 2

    again = subprocess.run(
        [*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert profile.read_text() == measured
    best, *others = json.loads(again.stdout)
    assert best["fits"] and not best["why"] and all(o["why"] for o in others)

    train = [sys.executable, "train/train.py", "--config", str(saved)]
    train += [f"--config.run_dir={tmp_path / 'run'}"]
    result = subprocess.run(train, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_graphs_of_our_own_are_read_by_default(chain):
    assert read_graph(chain) == CHAIN
