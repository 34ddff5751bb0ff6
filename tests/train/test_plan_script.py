"""`train/plan.py`, as it is typed.

Graphs through every solver, a model through to a run, and wrong words.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import log_of, profile_of, timed

import jpipe
from jpipe import solvers
from jpipe.plan import PROGRAMS
from jpipe.solvers import Graph, Node, read_graph
from train import arguments, flags, plan
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.planned import file_of, planned_config

ROOT = pathlib.Path(__file__).parents[2]
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


@pytest.mark.parametrize("solver", solvers.names())
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
        ("--graph chain.json --solver ideals", "how many devices there are"),
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
        ("--config configs/quickstart.py", "number of devices is missing"),
        ("--config configs/quick.py --devices 2", "Did you mean"),
        ("--config configs/quickstart.py --devices 2 --microbatches 7", "must divide"),
        ("--config configs/quickstart.py --devices 2 --save planned", "Python file"),
        (
            "--config configs/quickstart.py --devices 2 --save /nope/x.py",
            "there is no folder `/nope`",
        ),
        ("--config configs/quickstart.py --devices 2 --config.batchsize=3", "unknown"),
        (
            "--config configs/quickstart.py --devices 2 --asynchronous --config.pipeline.loss_scale=dynamic",
            "Leave out `--asynchronous`",
        ),
        (
            "--config configs/quickstart.py --devices 2 --config.mesh.fsdp=2",
            "a plan gives each stage whole devices, got `--config.mesh.fsdp=2`",
        ),
        (
            "--config configs/quickstart.py --devices 2 --tensor --config.mesh.model=2",
            "a plan gives each stage whole devices, got `--config.mesh.model=2`",
        ),
        (
            "--config configs/gpt_1f1b.py --devices 2 --tensor --config.mesh.rules.vocab=stage",
            "`--config.mesh.rules.vocab` splits layers over all stages, and `--tensor`",
        ),
        (
            "--config configs/quickstart.py --devices 2 --config.strategy=s.json",
            "a strategy of its own or none, got `--config.strategy=s.json`",
        ),
        (
            "--graph chain.json --solver ideals --devices 2 --tensor",
            "`--tensor` splits the operators of a model: name a configuration",
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
    assert arguments.size("2GiB") == 2 * 2**30 and arguments.size("500MB") == 5e8
    assert arguments.size("1.25e9") == 1.25e9 and arguments.size("3K") == 3000


# -- The printed commands, word for word

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TEXTS = [plan.__doc__, *(page.read_text() for page in PAGES)]
COMMANDS = sorted({c for t in TEXTS for c in re.findall(r"python (train/plan\.py --[^`\n]+)", t)})
OF_MODELS = [c for c in COMMANDS if "--config " in c]
GPT = next(c for c in OF_MODELS if "gpt_1f1b" in c)
OF_GRAPHS = [c for c in COMMANDS if "--graph " in c]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The current folder is one in which the commands find configurations and leave files."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unmeasured(monkeypatch):
    """Layers take as long as they have FLOPs, and nothing is timed."""
    profile = jpipe.Pipeline.profile

    def counted_alone(self, batch, *, num_microbatches, **_):
        size = len(batch["inputs"]) // num_microbatches
        counted = profile(self, batch, num_microbatches=num_microbatches, programs=())
        times = dict.fromkeys(jpipe.plan.PROGRAMS, 1e-3 * size)
        return timed(counted, **times | {"backward": 2e-3 * size, "update": 1e-3})

    monkeypatch.setattr(jpipe.Pipeline, "profile", counted_alone)
    monkeypatch.setattr(jpipe.plan, "measure_machine", jpipe.plan.Machine)


def test_there_are_commands():
    assert any("gpt_1f1b" in c and "--save" in c for c in OF_MODELS)
    assert any("quickstart" in c for c in OF_MODELS) and len(OF_GRAPHS) >= 3


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("command", "more"),
    [(command, "") for command in OF_MODELS] + [(GPT, "--asynchronous"), (GPT, "--json --asynchronous")],
)
def test_printed_commands_plan_a_model(capsys, clone, unmeasured, command, more):
    """Everything but the measuring."""
    words = shlex.split(command)[1:]
    code, out, error = run(capsys, *words, *more.split())
    assert code == 0, error
    devices = int(words[words.index("--devices") + 1])
    if "--json" in more:
        best, *others = json.loads(out)
        skipped = [plan for plan in others if "seconds" not in plan]
        assert best["fits"] and not best["why"] and all(plan["why"] for plan in others)
        refused = rf"at least {2 * devices - 1} for {devices} stages in paired ticks"
        assert any(re.search(refused, plan["why"]) for plan in skipped)
    else:
        assert max(map(len, out.splitlines())) <= 120
        assert not re.search(r"\b1 (devices|stages|cores|microbatches)\b", out)
        refused = "pipedream_2bw paired: `num_microbatches` of PipeDream-2BW must be"
        assert (refused in out) == bool(more)
        assert "skipped (" in out or refused not in out
    if "--save" in words:
        saved = words[words.index("--save") + 1]
        model = type(flags.load(saved, TrainConfig).model)
        text = pathlib.Path(saved).read_text()
        for kind in (TrainConfig, PipelineConfig, OptimizerConfig, model):
            for field in dataclasses.fields(kind):
                assert re.search(rf"\b{field.name}=", text), field.name


@pytest.mark.exhaustive
def test_no_plan_fits(capsys, clone, unmeasured):
    words = "--config configs/quickstart.py --devices 2 --memory 1KiB".split()
    code, _, error = run(capsys, *words)
    assert code == 2
    assert re.search(r"no plan fits: the smallest needs [\d.]+ \wiB per device", error)
    assert "the limit is 1.0 KiB" in error


SMALL = "--config configs/quickstart.py --config.model=MLP --config.model.widths=64,64,64"
SMALL += " --config.batch_size=16 --config.num_steps=1 --microbatches 1"


@pytest.mark.exhaustive
def test_tensor_in_words_and_json(capsys, clone, unmeasured):
    """Plans with and without a strategy in one ranking; the first is saved with its strategy."""
    words = f"{SMALL} --devices 2 --cores 2 --tensor".split()
    code, out, error = run(capsys, *words, "--json", "--save", "planned.py")
    assert code == 0, error
    records = json.loads(out)
    priced = [record for record in records if "seconds" in record]
    assert {record["tensor"] for record in priced} == {1, 2}
    assert {record["tensor"] for record in records} <= {1, 2}
    # Links are free here, and one microbatch keeps neither stages nor replicas busy.
    best = priced[0]
    assert best["tensor"] == 2 and best["num_stages"] == best["num_replicas"] == 1
    for tensor in (1, 2):
        alone = [r["seconds"] for r in priced if r["tensor"] == tensor]
        assert best["seconds"] <= min(alone)
    config = flags.load("planned.py", TrainConfig)
    assert config.strategy == "planned.strategy.json" and config.mesh.model == 2
    records = json.loads(pathlib.Path(config.strategy).read_text())
    assert records
    text = pathlib.Path("planned.py").read_text()
    assert "1 stage of 2 devices" in text

    code, out, error = run(capsys, *words)
    assert code == 0 and max(map(len, out.splitlines())) <= 120, error
    (header,) = (line for line in out.splitlines() if "ms/step" in line)
    assert header.split()[:4] == ["schedule", "stages", "tensor", "replicas"]
    plain = run(capsys, *words[:-1])[1]
    assert "tensor" not in plain


@pytest.mark.exhaustive
def test_a_plan_with_a_strategy_runs(capsys, clone, unmeasured):
    """One step, by the configuration and the strategy that were saved beside each other."""
    words = f"{SMALL} --devices 4 --cores 4 --tensor --save planned.py --json"
    code, out, error = run(capsys, *words.split())
    assert code == 0, error
    best = json.loads(out)[0]
    assert best["tensor"] > 1
    train = [sys.executable, str(ROOT / "train" / "train.py"), "--config", "planned.py"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [*train, "--config.run_dir=run"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    losses = [r["loss"] for r in log_of(pathlib.Path("run")) if "loss" in r]
    assert losses and np.isfinite(losses).all()


@pytest.mark.slow
@pytest.mark.parametrize("command", OF_MODELS)
def test_printed_commands_measure_and_plan_a_model(clone, command):
    words = [sys.executable, str(ROOT / "train" / "plan.py"), *shlex.split(command)[1:]]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "profile of a microbatch" in result.stdout and "bubble" in result.stdout


@pytest.mark.parametrize("command", OF_GRAPHS)
def test_printed_commands_plan_a_graph(capsys, monkeypatch, tmp_path, command):
    if "JPIPE_DATA" not in os.environ:
        pytest.skip("JPIPE_DATA names no directory with the published graphs.")
    words = shlex.split(command)[1:]
    name = words[words.index("--graph") + 1]
    files = list(pathlib.Path(os.environ["JPIPE_DATA"]).rglob(name))
    if not files:
        pytest.skip(f"JPIPE_DATA has no {name}.")
    (tmp_path / name).symlink_to(files[0])
    monkeypatch.chdir(tmp_path)
    code, out, error = run(capsys, *words)
    assert code == 0 and ("optimal" in out), error


@pytest.mark.slow
def test_a_model_is_planned_and_the_plan_runs(tmp_path):
    """Profiled, priced, saved; what is saved trains, and a second call measures nothing anew."""
    saved, profiles = tmp_path / "planned.py", tmp_path / "profiles"
    command = [sys.executable, "train/plan.py", "--config", "configs/quickstart.py"]
    command += ["--config.model=MLP", "--config.model.widths=16,16,16"]
    command += ["--config.batch_size=16", "--config.num_steps=2"]
    command += f"--devices 2 --microbatches 4 --profiles {profiles} --memory 1GiB".split()
    result = subprocess.run([*command, "--save", str(saved)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for words in (
        "profile of a microbatch of 4",
        "machine: 2 devices",
        "plans, as predicted",
        "x the time",
        "s0 ",
    ):
        assert words in result.stdout
    (profile,) = profiles.iterdir()
    measured = profile.read_text()
    # The name of a temporary folder may be of any length.
    printed = result.stdout.replace(str(saved), saved.name)
    assert max(map(len, printed.splitlines())) <= 120
    config = flags.load(str(saved), TrainConfig)
    assert config.model.widths == (16, 16, 16) and config.num_steps == 2

    again = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert profile.read_text() == measured
    best, *others = json.loads(again.stdout)
    assert best["fits"] and not best["why"] and all(o["why"] for o in others)

    train = [sys.executable, "train/train.py", "--config", str(saved)]
    train += [f"--config.run_dir={tmp_path / 'run'}"]
    result = subprocess.run(train, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# -- Several processes


def plan_in_two_processes(*words):
    """The planning of a small model on two devices; the words come last."""
    small = "--config configs/quickstart.py --config.model=MLP --config.model.widths=16,16,16"
    small += " --config.batch_size=16 --config.num_steps=2 --microbatches 4"
    launch = ["-m", "jpipe.launch", "-n", "2", "--devices", "2", "train/plan.py"]
    return subprocess.run(
        [sys.executable, *launch, *small.split(), *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_plan_and_train(tmp_path):
    """Process 0 prints and writes. What it has measured is kept, and is not measured again."""
    saved, profiles = tmp_path / "planned.py", tmp_path / "profiles"
    words = ["--devices", "2", "--profiles", str(profiles)]
    result = plan_in_two_processes(*words, "--save", str(saved))
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "[Gloo]" not in line]
    for start in ("profile of a micro", "machine: 2 devices", "plans, as", "saved: "):
        assert sum(line.startswith(f"[0] {start}") for line in lines) == 1
    assert all(line.startswith("[0] ") for line in lines)
    (profile,) = profiles.iterdir()
    measured = profile.read_text()
    again = plan_in_two_processes(*words, "--json")
    assert again.returncode == 0 and profile.read_text() == measured, again.stderr
    (line,) = (line for line in again.stdout.splitlines() if "[Gloo]" not in line)
    best, *_ = json.loads(line.removeprefix("[0] "))
    assert best["fits"]

    train = ["-m", "jpipe.launch", "-n", "2", "--devices", "2", "train/train.py"]
    options = ["--config", str(saved), f"--config.run_dir={tmp_path / 'run'}"]
    options += ["--config.pipeline.num_stages=2", "--config.mesh.data=1"]
    options += ["--config.pipeline.boundaries=none"]
    result = subprocess.run(
        [sys.executable, *train, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--devices 2 --save /nope/x.py", "there is no folder `/nope`"),
        pytest.param("--devices 1", "of all 2 processes, 2, got 1", marks=pytest.mark.exhaustive),
        pytest.param(  # which process 0 alone finds out
            "--devices 2 --profiles /dev/null/profiles",
            "Not a directory",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_wrong_word_ends_all_processes(words, message):
    result = plan_in_two_processes(*words.split())
    assert result.returncode == 2
    for process in range(2):
        pattern = rf"^\[{process}\] plan\.py: .*{re.escape(message)}"
        assert len(re.findall(pattern, result.stderr, flags=re.M)) == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == 2, result.stderr


def test_graphs_of_our_own_are_read_by_default(chain):
    assert read_graph(chain) == CHAIN


@pytest.mark.exhaustive
def test_updates_are_measured_once_for_all_microbatch_sizes(tmp_path, monkeypatch):
    """What is kept is whole for every size; a profile of another model's updates is refused."""
    asked = []
    profile = jpipe.Pipeline.profile

    def recorded(self, batch, *, programs, min_seconds, **options):
        asked.append(("update" in programs, options["num_microbatches"]))
        programs = [p for p in programs if p in ("forward", "update")]
        return profile(self, batch, programs=programs, min_seconds=1e-3, **options)

    monkeypatch.setattr(jpipe.Pipeline, "profile", recorded)
    words = ["--config", str(ROOT / "configs" / "quickstart.py")]
    words += ["--config.model=MLP", "--config.model.widths=8,8"]
    name, config = flags.parse([*words, "--config.batch_size=8"], TrainConfig)
    args = argparse.Namespace(profiles=str(tmp_path), devices=2)
    first, second = plan._profiles(name, config, [2, 4], args)
    assert asked == [(True, 2), (False, 4)]
    assert first.seconds("update") == second.seconds("update") != [0.0] * 3
    for kept in tmp_path.iterdir():
        assert jpipe.plan.Profile.load(kept) in (first, second)
    other = dataclasses.replace(first, optimizer="another")
    with pytest.raises(ValueError, match="same `optimizer`, .* got 'another'"):
        second.with_updates_of(other)


@pytest.mark.filterwarnings("ignore:.*bubble")
def test_a_plan_with_copies_is_saved_as_a_configuration(tmp_path):
    """VGG-16's case: weights in the last layer, work before it, and a slow link."""
    light = timed(profile_of("mlp"), **dict.fromkeys(PROGRAMS, 1.0))
    weights = jax.ShapeDtypeStruct((2 * 10**8,), np.float32)
    last = dataclasses.replace(light.layers[-1], parameters=(weights,), gradients=(weights,))
    profile = dataclasses.replace(light, layers=(*light.layers[:-1], last))
    machine = jpipe.plan.Machine(4, bandwidth=(1e8, 1e8))
    best = jpipe.plan.choose(profile, machine, 24, schedule_names=["gpipe"])[0]
    assert len(best.options["replicas"]) == best.num_stages > 1

    words = ["--config", str(ROOT / "configs" / "quickstart.py")]
    words += ["--config.model=MLP", "--config.model.widths=8,8,8,8,8"]
    _, config = flags.parse([*words, "--config.batch_size=24"], TrainConfig)
    planned = planned_config(config, best)
    path = tmp_path / "planned.py"
    path.write_text(file_of(planned, best, ["--devices", "4"]))
    assert "-".join(map(str, best.options["replicas"])) in path.read_text()
    loaded = flags.load(str(path), TrainConfig)
    assert loaded == planned
    assert loaded.pipeline.replicas == best.options["replicas"]
    assert loaded.pipeline.table() == best.table()


@pytest.mark.exhaustive
def test_axes_of_stages_are_planned_and_saved(monkeypatch, tmp_path, capsys):
    """Experts that do not fit a device go to several, and the saved configuration has them."""
    from jpipe.plan import Machine, pipelines

    def measured(*args, programs=PROGRAMS, **options):
        options |= {"cache": None}
        profile = made(*args, programs=(), **options)
        return timed(profile, **dict.fromkeys(PROGRAMS, 1e-3))

    made = pipelines.profile
    monkeypatch.setattr(pipelines, "profile", measured)
    monkeypatch.setattr(jpipe.plan, "measure_machine", lambda n, **options: Machine(n, options["memory_limit"]))
    planned = tmp_path / "planned.py"
    words = (
        f"--config configs/mixture_1f1b.py --devices 2 --axes expert --microbatches 2 --profiles {tmp_path} --json "
        f"--save {planned} --config.mesh.expert=1 --config.batch_size=4 --config.model.num_blocks=1 "
        "--config.model.capacity=1.0 --config.model.seq_len=8 --config.data.seq_len=8"
    ).split()
    code, out, err = run(capsys, *words)
    assert code == 0, err
    records = json.loads(out)
    assert {tuple(r["axes"].items()) for r in records} == {(), (("expert", 2),)}
    shared = [r for r in records if r["axes"] and r["num_stages"] == 1]
    (sent,) = shared[0]["sent_along_axes"]
    assert sent["axes"] == ["expert"] and sent["num_bytes"] > 0
    least = min(r["num_bytes"] for r in records if not r["axes"])
    code, out, err = run(capsys, *words, "--memory", str(int(0.95 * least)))
    assert code == 0, err
    assert json.loads(out)[0]["axes"] == {"expert": 2}
    config = flags.load(str(planned), TrainConfig)
    assert config.mesh.expert == 2 and config.pipeline.num_stages * config.mesh.data == 1


def test_wrong_axes(capsys):
    for words, message in (
        ("--config c.py --devices 2 --axes model", "must be expert, context or both"),
        ("--config configs/mixture_1f1b.py --devices 2", "--config.mesh.expert=2.*add `--axes expert`"),
    ):
        code, _, err = run(capsys, *words.split())
        assert code == 2 and re.search(message, err, re.S)
