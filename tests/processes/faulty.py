"""Trains a small model in several processes; one of them does what the command line says before step 5.

    python -m jpipe.launch -n 2 --devices 4 tests/processes/faulty.py FAULT PROCESS [PATH]

`FAULT` is one of `FAULTS`. Where `PATH` has "{}", the number of the process, it pickles what `train` returns.
"""

import functools
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe


def sleep():
    time.sleep(1000)


def hold_the_gil():
    re.match(r"(a*)*b", "a" * 60)


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "suspend": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleep,
    "hold the GIL": hold_the_gil,
    "raise": lambda: 1 / 0,
    "return": lambda: sys.exit(0),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "work": lambda: long_work(),
    "nothing": lambda: None,
}


def long_work():
    """Longer than a step may take."""
    with jpipe.distributed.phase("saving", limit_seconds=100):
        time.sleep(30)


def train(before_step: Callable[[int], None], num_steps: int = 8) -> dict[str, Any]:
    """Some steps on four devices; the losses and the weights."""
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, 8, 8)] * 4,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(4, 4),
        mesh=jpipe.make_mesh(stage=4, devices=jax.devices()[:4]),
    )
    batch = {"inputs": np.ones((8, 8)), "targets": np.zeros((8, 8))}
    state, losses = pipe.init(jax.random.key(0), batch), []
    for step in range(1, num_steps + 1):
        before_step(step)
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"losses": losses, "params": pipe.get_params(state)}


def main(fault: str, process: str, path: str = os.devnull) -> None:
    jpipe.distributed.initialize()
    is_faulty = jax.process_index() == int(process)

    def before_step(step: int) -> None:
        if step == 5:
            time.sleep(1.0)  # the others hear how far this process came
            print(f"fault at {time.time():.2f}", flush=True)
            if is_faulty:
                FAULTS[fault]()

    found = train(before_step)
    with open(path.format(jax.process_index()), "wb") as file:
        pickle.dump(found, file)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
