"""A training that goes on from its newest checkpoint, under `python -m jpipe.launch --restarts`; tests kill it.

    python healing.py DIRECTORY STEPS EVERY [STAGES REPLICAS]

It saves a checkpoint every EVERY steps, and after the last one writes `DIRECTORY/params.npy`. If there is a file
`DIRECTORY/last`, it has the number of steps. `DIRECTORY/log` has a line for every start, "start STEP", and for every step:
its number, the checksum of its batch, and its loss with all digits. A process whose number is in a file `DIRECTORY/gone`
removes the file and ends with the exit code of a process whose devices are gone.
"""

import os
import pathlib
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax._src import compiler, distributed

import jpipe
from jpipe import launch
from jpipe._processes import restarts as _restarts

DIM, ROWS = 8, 24
SECONDS = 0.01
"""The least duration of a step, so that kills come in many of them."""


def cache_in_every_process() -> None:
    """Lets every process write to JAX's cache of compiled programs, so that a start takes seconds.

    JAX writes in process 0 alone. On CPUs the others have programs of their own, and would compile in each start.
    """
    write, ours = compiler._cache_write, distributed.global_state

    def written(*args):
        process, ours.process_id = ours.process_id, 0
        try:
            write(*args)
        finally:
            ours.process_id = process

    compiler._cache_write = written


def pipeline(stages: int, replicas: int) -> jpipe.Pipeline:
    return jpipe.Pipeline(
        [lambda rngs: nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(4)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.adam(1e-3),
        schedule=jpipe.schedules.one_f_one_b(stages, 4),
        mesh=jpipe.make_mesh(stage=stages, data=replicas),
    )


def batches(mesh, first: int):
    """The minibatches after some steps, this process's rows of each: one stream of random numbers."""
    rng = np.random.default_rng(0)
    rows = jpipe.distributed.process_rows(mesh, ROWS)
    for step in range(10**9):
        batch = {name: rng.normal(size=(ROWS, DIM)).astype(np.float32) for name in ("inputs", "targets")}
        if step >= first:
            yield zlib.crc32(batch["inputs"].tobytes()), {name: a[rows] for name, a in batch.items()}


def main(directory: pathlib.Path, num_steps: int, every: int, stages: int = 4, replicas: int = 1) -> None:
    pipe, checkpoints = pipeline(stages, replicas), jpipe.Checkpoints(directory / "checkpoints")
    (_, batch) = next(batches(pipe.mesh, 0))
    first = jax.process_index() == 0
    if checkpoints.steps():
        state, step, _ = checkpoints.restore(pipe, batch)
    else:
        state, step = pipe.init(jax.random.key(0), batch), 0
    if (directory / "last").exists():
        num_steps = int((directory / "last").read_text())
    with open(directory / "log", "a") as log:
        if first:
            print("start", step, file=log, flush=True)
        for checksum, batch in batches(pipe.mesh, step):
            if step == num_steps:
                break
            began = time.monotonic()
            state, metrics = pipe.step(state, batch)
            step += 1
            loss = float(metrics["loss"])
            if first:
                print(step, checksum, loss.hex(), file=log, flush=True)
            if step % every == 0 or step == num_steps:
                checkpoints.save(step, state)
            time.sleep(max(0.0, SECONDS - time.monotonic() + began))
    checkpoints.close()
    params = pipe.get_params(state)
    if first:
        np.save(directory / "params.npy", np.concatenate([a.ravel() for a in jax.tree.leaves(params)]))


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    gone = folder / "gone"
    if gone.exists() and gone.read_text() == os.environ[launch.PROCESS_ID]:
        gone.unlink()
        sys.exit(_restarts.DEVICES_GONE)
    jpipe.distributed.initialize()
    cache_in_every_process()
    main(folder, *map(int, sys.argv[2:]))
