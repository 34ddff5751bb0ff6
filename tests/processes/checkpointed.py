"""Saves or restores a training in one or several processes.

python -m jpipe.launch -n 2 --devices 4 tests/processes/checkpointed.py save LAYOUT SCHEDULE FOLDER
python tests/processes/checkpointed.py restore LAYOUT SCHEDULE FOLDER
"""

import pathlib
import pickle
import sys

import jax
import optax
from families import cross_entropy, schedule_named
from processes import everything

import jpipe


def main(action: str, layout: str, schedule: str, folder: str) -> None:
    """Trains three steps and saves, or restores; then two steps, whose results are written."""
    mesh = everything.LAYOUTS[layout]()
    layers, batches = everything.model(mesh)

    def own(batch: dict) -> dict:
        rows = jpipe.distributed.process_rows(mesh, 16)
        return {name: a[rows] for name, a in batch.items()}

    pipe = jpipe.Pipeline(
        layers,
        loss=cross_entropy,
        optimizer=optax.adam(0.1),
        schedule=schedule_named(schedule, mesh.shape["stage"], everything.N),
        mesh=mesh,
    )
    checkpoints = jpipe.Checkpoints(pathlib.Path(folder) / "checkpoints")
    if action == "save":
        state = pipe.init(jax.random.key(3), own(batches[0]))
        for batch in batches:
            state, _ = pipe.step(state, own(batch))
        checkpoints.save(3, state, run={"by": jax.process_count()})
    else:
        state, step, _ = checkpoints.restore(pipe, own(batches[0]))
        assert step == 3
    found = []
    for batch in batches[:2]:
        state, metrics = pipe.step(state, own(batch))
        found.append(everything.host(metrics))
    found.append(pipe.get_params(state))
    checkpoints.close()
    if jax.process_index() == 0:
        path = pathlib.Path(folder) / f"{action} {jax.process_count()}"
        path.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    jpipe.distributed.initialize()
    main(*sys.argv[1:])
