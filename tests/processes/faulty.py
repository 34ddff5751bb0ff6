"""Trains a small model in several processes; one of them does what the command line says before step 5.

    python -m jpipe.launch -n 2 --devices 4 tests/processes/faulty.py FAULT PROCESS [PATH]

`FAULT` is one of `FAULTS`. Where `PATH` has "{}", the number of the process, it pickles what `train` returns.
"""

import functools
import itertools
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe


def sleep(*_):
    time.sleep(1000)


def hold_the_gil(*_):
    re.match(r"(a*)*b", "a" * 60)


FAULTS: dict[str, Callable[..., Any]] = {
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "suspend": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleep,
    "hold the GIL": hold_the_gil,
    "raise": lambda *_: 1 / 0,
    "return": lambda *_: sys.exit(0),
    "SIGTERM": lambda *_: os.kill(os.getpid(), signal.SIGTERM),
    "work": lambda *_: long_work(),
    "nothing": lambda *_: None,
    "evaluate": lambda pipe, state, batches: pipe.evaluate(state, batch_of(0)),
    "predict": lambda pipe, state, batches: pipe.predict(state, batch_of(0)),
    "get_params": lambda pipe, state, batches: pipe.get_params(state),
    "save": lambda pipe, state, batches: save(state),
    "another shape": lambda pipe, state, batches: pipe.step(state, batch_of(7)),
    "leave out a step": lambda pipe, state, batches: next(batches),
}
"""Functions of the pipeline, its state and the batches that are left."""


def save(state):
    with tempfile.TemporaryDirectory() as folder:
        with jpipe.Checkpoints(folder) as checkpoints:
            checkpoints.save(5, state)


def long_work():
    """Longer than a step may take."""
    with jpipe.distributed.phase("saving", limit_seconds=100):
        time.sleep(30)


def batch_of(step: int) -> dict[str, np.ndarray]:
    """The batch of a step, which differs from the others; that of step 7 also in its rows."""
    num_rows = 16 if step == 7 else 8
    return {"inputs": np.full((num_rows, 8), step / 8), "targets": np.zeros((num_rows, 8))}


def train(before_step: Callable[..., None], num_steps: int = 8) -> dict[str, Any]:
    """Some steps on four devices; the losses and the weights."""
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, 8, 8)] * 4,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(4, 4),
        mesh=jpipe.make_mesh(stage=4, devices=jax.devices()[:4]),
    )
    batches = map(batch_of, itertools.count(1))
    state, losses = pipe.init(jax.random.key(0), batch_of(0)), []
    for step in range(1, num_steps + 1):
        before_step(step, pipe, state, batches)
        state, metrics = pipe.step(state, next(batches))
        losses.append(float(metrics["loss"]))
    return {"losses": losses, "params": pipe.get_params(state)}


def main(fault: str, process: str, path: str = os.devnull) -> None:
    jpipe.distributed.initialize()
    is_faulty = jax.process_index() == int(process)

    def before_step(step: int, *of_training: Any) -> None:
        if step == 5:
            time.sleep(1.0)  # the others hear how far this process came
            print(f"fault at {time.time():.2f}", flush=True)
            if is_faulty:
                FAULTS[fault](*of_training)
        elif step > 5 and fault == "leave out a step":
            time.sleep(0.5)  # until the watchdog has looked

    found = train(before_step)
    with open(path.format(jax.process_index()), "wb") as file:
        pickle.dump(found, file)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
