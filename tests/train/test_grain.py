"""A loader of the package Grain whose state is in the checkpoints of a training: every example is trained on once."""

import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import log_of
from processes.launching import ROOT

import jpipe
from train import flags
from train.config import TrainConfig
from train.data import position_of, shares, shuffled
from train.streamed import Grain
from train.train import main

MODULE = """
import grain
import numpy as np


def example(number):
    rng = np.random.default_rng(number)
    return {"inputs": rng.normal(size=(28, 28, 1)).astype(np.float32), "labels": np.int32(number % 10)}


def numbers():
    return grain.MapDataset.source(range(40)).seed(3).shuffle().map(example).repeat()


def stream():
    return numbers().to_iter_dataset()


def ends():
    return grain.MapDataset.source(range(40)).map(example)


def batches():
    return iter(ends())
"""
NUM_EXAMPLES, BATCH_SIZE = 48, 8


def loader():
    """An epoch in a random order, as an iterator with a state."""
    grain = pytest.importorskip("grain")

    def example(number):
        return {"inputs": np.full(4, number, np.float32), "targets": np.float32(number)}

    data = grain.MapDataset.source(np.arange(NUM_EXAMPLES)).shuffle(seed=0).map(example)
    return iter(data.batch(BATCH_SIZE).to_iter_dataset())


def pipeline(num_stages):
    return jpipe.Pipeline(
        [functools.partial(nnx.Linear, 4, 4) for _ in range(4)],
        loss=lambda outputs, batch: jnp.mean((outputs.sum(-1) / 100 - batch["targets"] / 100) ** 2),
        optimizer=optax.sgd(1e-4),
        schedule=jpipe.schedules.one_f_one_b(num_stages, 2),
    )


def rows_of(process, num_processes, num_rows):
    return np.arange(num_rows).reshape(num_processes, -1)[process]


@pytest.mark.first_case
@pytest.mark.parametrize("stages, processes", [((2, 2), (1, 2)), ((2, 4), (4, 1))])
def test_every_example_is_trained_on_once(stages, processes, tmp_path):
    """The run goes on with other stages, and with other processes, each of which draws all and gives its rows."""

    def trained(pipe, state, batches, num_processes, num_steps):
        seen = []
        for _ in range(num_steps):
            batch = next(batches)
            parts = [
                next(shares([batch], functools.partial(rows_of, p, num_processes)))["targets"]
                for p in range(num_processes)
            ]
            seen += np.concatenate(parts).astype(int).tolist()
            state, metrics = pipe.step(state, batch)
        return state, metrics, seen

    pipe, batches = pipeline(stages[0]), loader()
    shapes = next(loader())
    state = pipe.init(jax.random.key(0), shapes)
    with jpipe.Checkpoints(tmp_path) as checkpoints:
        state, _, before = trained(pipe, state, batches, processes[0], 2)
        checkpoints.save(2, state, run={"data": batches.get_state()})
        checkpoints.wait()
        _, want, lost = trained(pipe, state, batches, processes[0], 2)  # then it is killed
        other, batches = pipeline(stages[1]), loader()
        restored = checkpoints.restore(other, shapes)
    batches.set_state(restored.run["data"])
    state, got, again = trained(other, restored.state, batches, processes[1], 2)
    assert sorted(again) == sorted(lost)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    _, _, after = trained(other, state, batches, processes[1], 2)
    assert sorted(before + again + after) == list(range(NUM_EXAMPLES))
    assert not list(itertools.islice(batches, 1))


# -- In the training script


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file of a user, and the options that name it."""
    pytest.importorskip("grain")
    (tmp_path / "grains_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "grains_of_a_user"


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["numbers", "stream"])
def test_a_stream_goes_on_where_it_was(name, module):
    data = Grain(f"{module}:{name}", f"{module}:ends").load()
    whole = shuffled(data.train, 8, seed=0)
    want = [next(whole)["labels"].tolist() for _ in range(8)]
    assert sorted(sum(want[:5], [])) == sorted(n % 10 for n in range(40))  # an epoch
    parted = shuffled(data.train, 8, seed=0)
    for _ in range(4):  # three were trained on; the fourth waits
        next(parted)
    position = json.loads(json.dumps(position_of(parted)))
    again = shuffled(data.train, 8, seed=0, first=3, position=position)
    assert [next(again)["labels"].tolist() for _ in range(5)] == want[3:]
    with pytest.raises(ValueError, match="does not say how far its run had read the data"):
        shuffled(data.train, 8, seed=0, first=3)


@pytest.mark.exhaustive
def test_a_run_with_a_stream_is_resumed(module, tmp_path):
    words = ["model=MLP", "model.widths=8", f"data=grain:{module}:stream", f"data.test={module}:ends", "batch_size=8"]
    words += ["pipeline.num_stages=1", "pipeline.num_microbatches=2", "checkpoint.every=2", "log_every=1"]
    words = ["--config", "quickstart", *(f"--config.{word}" for word in words)]

    def losses(folder):
        records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main([*words, "--config.num_steps=6", f"--config.run_dir={whole}"]) == 0
    assert main([*words, "--config.num_steps=6", f"--config.run_dir={parted}"]) == 0
    newest = parted / "checkpoints"
    for step in sorted(newest.iterdir()):
        if step.name.endswith("6"):  # it is lost, and 4 is the newest
            for path in sorted(step.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            step.rmdir()
    assert main(["--resume", str(parted)]) == 0
    assert losses(parted) == losses(whole)


@pytest.mark.exhaustive
def test_processes_share_the_rows_of_a_stream(module, tmp_path):
    """Two processes with replicas, then one with two stages: the losses are those of one process all the way."""
    words = ["model=MLP", "model.widths=8,8", f"data=grain:{module}:stream", f"data.test={module}:ends", "batch_size=8"]
    words += ["pipeline.num_stages=2", "pipeline.num_microbatches=2", "checkpoint.every=2", "log_every=1"]
    words = [f"--config.{word}" for word in words]

    def losses(folder, num_processes, *arguments):
        path = os.pathsep.join([str(ROOT), str(tmp_path)])
        launched = ["-m", "jpipe.launch", "-n", str(num_processes), "--devices", str(2 * num_processes)]
        done = subprocess.run(
            [sys.executable, *launched, str(ROOT / "train" / "train.py"), *arguments],
            env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in log_of(folder) if "loss" in record]

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    first = ["--config", "quickstart", *words]
    losses(parted, 2, *first, "--config.num_steps=4", "--config.mesh.data=2", f"--config.run_dir={parted}")
    again = ["--resume", str(parted), "--config.num_steps=8", "--config.mesh.data=1"]
    want = losses(whole, 1, *first, "--config.num_steps=8", f"--config.run_dir={whole}")
    np.testing.assert_allclose(losses(parted, 1, *again), want, rtol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "`data.module` must be package.module:name, got None"),
        ({"module": "{0}:numbers"}, "`data.test` must be package.module:name, got None"),
        ({"module": "{0}:batches", "test": "{0}:ends"}, "must return a grain.MapDataset or a grain.IterDataset"),
        ({"module": "{0}:numbers", "test": "{0}:numbers"}, "must return held-out examples with a length"),
    ],
)
def test_wrong_streams(options, message, module):
    with pytest.raises(ValueError, match=message):
        Grain(**{name: value.format(module) for name, value in options.items()}).load()


def test_a_stream_that_ends_says_so(module):
    batches = shuffled(Grain(f"{module}:ends", f"{module}:ends").load().train, 16, seed=0)
    assert len(list(itertools.islice(batches, 2))) == 2
    with pytest.raises(ValueError, match="has no more examples. Let it go on without end"):
        next(batches)


def test_the_short_form_of_an_import_path():
    _, config = flags.parse(
        ["--config", "quickstart", "--config.data=grain:a.b:c", "--config.data.test=d:e"], TrainConfig
    )
    assert config.data == Grain("a.b:c", "d:e")
    with pytest.raises(ValueError, match="`--config.data` must be MNIST, .*got 'grains:a:b'"):
        flags.parse(["--config", "quickstart", "--config.data=grains:a:b"], TrainConfig)


def test_without_grain_the_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package grain, which is not installed"):
        Grain("a:b", "c:d").load()
