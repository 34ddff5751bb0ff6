"""A training that saves after every step and goes on from its newest checkpoint; tests kill it.

    python killed.py DIRECTORY STEPS
    python killed.py DIRECTORY STEPS uninterrupted

The first command writes `DIRECTORY/ready` when its first save has begun, and ends after STEPS steps. The
second one saves the last step only, and the weights after each step in `DIRECTORY/params.npz`. Under
`python -m jpipe.launch -n 2 --devices 2` each process has one stage.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe

DIM, ROWS = 16, 8


def pipeline() -> jpipe.Pipeline:
    """An asynchronous pipeline, so that a checkpoint has microbatches in flight."""
    return jpipe.Pipeline(
        [lambda rngs: nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(4)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.adam(1e-2),
        schedule=jpipe.schedules.pipedream(2, 2),
    )


def batch(step: int) -> dict[str, np.ndarray]:
    """The minibatch of a step."""
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(ROWS, DIM)).astype(np.float32) for name in ("inputs", "targets")}


def main(directory: pathlib.Path, num_steps: int) -> None:
    pipe, checkpoints = pipeline(), jpipe.Checkpoints(directory / "checkpoints", keep=3)
    if checkpoints.steps():
        state, step, _ = checkpoints.restore(pipe, batch(0))
    else:
        state, step = pipe.init(jax.random.key(0), batch(0)), 0
    while step < num_steps:
        state, _ = pipe.step(state, batch(step))
        step += 1
        checkpoints.save(step, state)
        (directory / "ready").touch()
    checkpoints.close()


def uninterrupted(directory: pathlib.Path, num_steps: int) -> None:
    pipe, params = pipeline(), {}
    state = pipe.init(jax.random.key(0), batch(0))
    for step in range(1, num_steps + 1):
        state, _ = pipe.step(state, batch(step - 1))
        params[str(step)] = flat(pipe.get_params(state))
    np.savez(directory / "params.npz", **params)
    with jpipe.Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(num_steps, state)


def flat(params: list) -> np.ndarray:
    """The weights as one vector."""
    return np.concatenate([a.ravel() for a in jax.tree.leaves(params)])


if __name__ == "__main__":
    if "JAX_NUM_CPU_DEVICES" not in os.environ:  # the launcher sets it
        jax.config.update("jax_num_cpu_devices", 2)
    jpipe.distributed.initialize()
    run = uninterrupted if sys.argv[3:] else main
    run(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
