"""`--config.mesh.local_steps`: the script's weights are those of outer steps of the library; wrong numbers."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import log_of

import jpipe
from train.config import MeshConfig
from train.learners import after_step, local_steps_of, mean_of_learners
from train.train import main

WORDS = ["model=MLP", "model.widths=8", "pipeline.num_stages=1", "pipeline.num_microbatches=2", "mesh.data=2"]
WORDS += ["batch_size=8", "num_steps=6", "log_every=1", "optimizer.warmup_steps=1", "eval_batches=1"]


def script(folder, *words):
    arguments = [f"--config.{word}" for word in (*WORDS, *words, f"run_dir={folder}")]
    return main(["--config", "configs/quickstart.py", *arguments])


def losses(folder):
    return [record["loss"] for record in log_of(folder) if "loss" in record and "test_loss" not in record]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "late",
    [
        [],
        ["mesh.fragments=2", "mesh.delay=1"],
        ["mesh.fragments=2", "asynchronous=pipemare-adamw", "pipeline.num_stages=2"],
    ],
)
def test_a_run_goes_on_where_it_was(late, tmp_path, capsys):
    options = ["mesh.local_steps=2", "checkpoint.every=3", *late]
    assert script(tmp_path / "whole", *options) == 0
    assert script(tmp_path / "parted", *options) == 0
    newest = max((tmp_path / "parted" / "checkpoints").iterdir())
    (newest / "manifest.json").unlink()  # of step 6; the learners of step 3 are apart
    assert main(["--resume", str(tmp_path / "parted")]) == 0
    assert losses(tmp_path / "parted") == losses(tmp_path / "whole")
    assert script(tmp_path / "agreeing") == 0
    assert losses(tmp_path / "agreeing")[1:] != losses(tmp_path / "whole")[1:]


def test_fragments_come_together_at_even_distances():
    class Called:
        local_steps = jpipe.LocalSteps(optax.sgd(1.0), 2)
        schedule = jpipe.schedules.gpipe(1, 1)
        calls = []

        def outer_step(self, state, fragment=None):
            self.calls.append((state, fragment))
            return state

        def flush(self, state):
            return state, {}

    config = types.SimpleNamespace(mesh=MeshConfig(data=2, local_steps=6, fragments=2), num_steps=12)
    pipe = Called()
    for step in range(1, 13):
        assert after_step(config, pipe, step, step) == step
    assert pipe.calls == [(3, 0), (6, 1), (9, 0), (12, 1)]
    pipe.local_steps = None
    after_step(config, pipe, 3, 3)
    assert len(pipe.calls) == 4
    # Late means: in the end all come together.
    pipe.local_steps = jpipe.LocalSteps(optax.sgd(1.0), 2, jpipe.SparseAverage())
    for step in (9, 12):
        after_step(config, pipe, step, step)
    assert pipe.calls[4:] == [(9, 0), (12, None)]
    # And where microbatches are in flight.
    pipe.local_steps, pipe.schedule = jpipe.LocalSteps(optax.sgd(1.0), 2), jpipe.schedules.pipemare(2, 1)
    for step in (9, 12):
        after_step(config, pipe, step, step)
    assert pipe.calls[6:] == [(9, 0), (12, None)]


def test_metrics_of_learners_are_means():
    metrics = {"loss": jnp.array([1.0, 3.0]), "skipped_updates": jnp.array([[0, 1], [1, 0]])}
    means = mean_of_learners(metrics)
    assert means["loss"] == 2 and means["skipped_updates"].tolist() == [1, 1]
    assert mean_of_learners({"loss": jnp.array(2.0)})["loss"] == 2


def test_the_outer_optimizer():
    assert local_steps_of(MeshConfig(data=2)) is None
    mean = local_steps_of(MeshConfig(data=2, local_steps=1, outer_rate=1.0, outer_momentum=0.0))
    weights, _ = mean.updated({"a": jnp.zeros((1, 2))}, {"a": jnp.ones((1, 2))}, [])
    np.testing.assert_array_equal(weights["a"], jnp.ones((1, 2)))
    diloco = local_steps_of(MeshConfig(data=2, local_steps=1))
    assert len(jax.tree.leaves(diloco.outer.init({"a": jnp.zeros(2)}))) == 1 and diloco.sparse is None
    late = local_steps_of(MeshConfig(data=2, local_steps=4, fragments=2, delay=2, correction=None))
    assert late.sparse == jpipe.SparseAverage(2, None) and late.num_fragments == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh.local_steps=4"], "`num_steps` must be a multiple of `mesh.local_steps`, got 6 and 4"),
        (["mesh.local_steps=0"], "`local_steps` must be at least 1, got 0"),
        (["mesh.local_steps=2", "mesh.fragments=4"], "`local_steps` must be a multiple of `fragments`.*got 2 and 4"),
        (["mesh.local_steps=2", "mesh.delay=2"], "`delay` must be at most `num_fragments`, got 2 and 1"),
        (["mesh.local_steps=2", "mesh.delay=1", "mesh.correction=1.5"], r"`correction` .* must lie in \[0, 1\)"),
        (["mesh.local_steps=2", "mesh.data=1"], "`mesh.local_steps` .*there is one. Set `--config.mesh.data=2`"),
        (["mesh.local_steps=2", "mesh.outer_momentum=1"], r"`outer_momentum` must lie in \[0, 1\)"),
        (["mesh.local_steps=2", "mesh.outer_rate=0"], "`outer_rate` must be above 0"),
        (["mesh.local_steps=2", "mesh.shard_optimizer=true"], "`local_steps` and `shard_optimizer` exclude each other"),
    ],
)
def test_wrong_words(words, message, tmp_path, capsys):
    assert script(tmp_path / "run", *words) == 2
    assert re.search(message, capsys.readouterr().err)
