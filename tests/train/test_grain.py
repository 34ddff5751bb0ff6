"""A loader of the package Grain whose state is in the checkpoints of a training: every example is trained on once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from train.data import shares

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
