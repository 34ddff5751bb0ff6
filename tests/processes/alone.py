"""Each of several processes has a pipeline of its own devices; prints what its methods say.

python -m jpipe.launch -n 2 --devices 4 tests/processes/alone.py FOLDER
"""

import pathlib
import sys

import jax
import layouts
import numpy as np
import optax

import jpipe
from jpipe import schedules


def process_rows(pipe):
    return jpipe.distributed.process_rows(pipe.mesh, 4).tolist()


def main(folder):
    mesh = jpipe.make_mesh(stage=2, devices=jax.local_devices())
    batch = layouts.batches(1)[0]
    pipe = jpipe.Pipeline(
        [layouts.Block] * 2,
        loss=layouts.loss,
        optimizer=optax.sgd(0.1),
        donate=False,
        schedule=schedules.gpipe(2, 2),
        mesh=mesh,
    )
    state = pipe.init(jax.random.key(0), batch)
    state, metrics = pipe.step(state, batch)
    assert np.isfinite(metrics["loss"])
    checkpoints = jpipe.Checkpoints(folder / str(jax.process_index()))
    for name, call in {
        "process_rows": lambda: process_rows(pipe),
        "get_params": lambda: len(pipe.get_params(state)),
        "trace": lambda: pipe.trace(state, batch)[1].devices,
        "save": lambda: checkpoints.save(1, state),
    }.items():
        try:
            print(f"{name}: {call()}")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]!r}")


if __name__ == "__main__":
    jpipe.distributed.initialize()
    main(pathlib.Path(sys.argv[1]))
