"""Calls the methods of a pipeline and saves what they return, to compare runs in one and in several processes.

python -m jpipe.launch -n 2 --devices 4 tests/processes/everything.py LAYOUT SCHEDULE FOLDER
"""

import contextlib
import functools
import pathlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from families import FAMILIES, cross_entropy, schedule_named
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jpipe
from models import Transformer

N = 4


def mesh_of(axes: tuple[str, str], order: Any) -> Mesh:
    """Four devices, 2 x 2. The first axis crosses two processes, or with order "F" the second one."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2, order=order)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)


SHARED = "replicas that share updates"

LAYOUTS = {
    "stages": lambda: jpipe.make_mesh(stage=4, devices=jax.devices()[:4]),
    "replicas": lambda: mesh_of(("data", "stage"), "C"),
    SHARED: lambda: mesh_of(("data", "stage"), "C"),
    "stages of replicas": lambda: mesh_of(("data", "stage"), "F"),
    "parts of layers": lambda: mesh_of(("stage", "model"), "F"),
    "stages of parts": lambda: mesh_of(("stage", "model"), "C"),
    "shards of layers": lambda: mesh_of(("stage", "fsdp"), "F"),
    "stages of shards": lambda: mesh_of(("stage", "fsdp"), "C"),
}
"""What lies across two processes -> the mesh."""


class Normed(nnx.Module):
    """A layer with mutable state and random draws."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(self.norm(x)))


def model(mesh: Mesh) -> tuple[list, list[dict]]:
    """Layers, and batches of 16 rows."""
    if "model" in mesh.shape:
        family = FAMILIES["transformer"]
        size = dict(vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=2)
        return Transformer(**size).layers(), family.batches(3, 16)
    family = FAMILIES["mlp"]
    layers = [*family.layers[:-1], Normed, *family.layers[-1:]]
    return layers, family.batches(3, 16)


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@contextlib.contextmanager
def nothing_gathered() -> Iterator[None]:
    """Refuses messages between processes outside of compiled steps, such as JAX's own checks."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step compares or gathers what the processes give")

    with (
        mock.patch.object(multihost_utils, "process_allgather", refuse),
        mock.patch.object(multihost_utils, "broadcast_one_to_all", refuse),
        mock.patch.object(multihost_utils, "assert_equal", refuse),
    ):
        yield


def main(layout: str, schedule: str, folder: str) -> None:
    mesh = LAYOUTS[layout]()
    layers, batches = model(mesh)
    rows_of = functools.partial(jpipe.distributed.process_rows, mesh)

    def own(batch: dict, num_rows: int = 16) -> dict:
        return {k: v[:num_rows][rows_of(num_rows)] for k, v in batch.items()}

    def pipeline(mesh: Mesh, schedule: str, num_microbatches: int, **options: Any) -> jpipe.Pipeline:
        return jpipe.Pipeline(
            layers,
            loss=cross_entropy,
            optimizer=optax.adam(0.1),
            schedule=schedule_named(schedule, mesh.shape["stage"], num_microbatches),
            mesh=mesh,
            **options,
        )

    found: dict[str, Any] = {}
    sharing = {"shard_optimizer": layout == SHARED}
    pipe = pipeline(mesh, schedule, N, **sharing)
    found["memory"] = tuple(pipe.memory(own(batches[0])))
    state = pipe.init(jax.random.key(3), own(batches[0]))
    found["initial"] = pipe.get_params(state)
    with nothing_gathered():
        for i, batch in enumerate(batches):
            state, metrics = pipe.step(state, own(batch))
            found[f"step {i}"] = host(metrics)
    sharding = NamedSharding(mesh, PartitionSpec("data" if "data" in mesh.shape else None))
    whole = {k: jax.make_array_from_callback(v.shape, sharding, v.__getitem__) for k, v in batches[0].items()}
    state, metrics = pipe.step(state, whole)
    found["step of global arrays"] = host(metrics)
    state, metrics = pipe.flush(state)
    found["flush"] = host(metrics)
    found["params"] = pipe.get_params(state)
    found["mutable state"] = pipe.get_mutable_state(state)
    for num_rows in (16, 7, 1):
        batch = own(batches[0], num_rows)
        found[f"evaluate {num_rows}"] = host(pipe.evaluate(state, batch))
        found[f"own rows {num_rows}"] = rows_of(num_rows)
        found[f"predict {num_rows}"] = np.asarray(pipe.predict(state, batch))
    found["evaluate global"] = host(pipe.evaluate(state, whole))
    other = pipeline(
        jpipe.make_mesh(stage=4, devices=jax.devices()[:4]),
        "gpipe",
        2,
        boundaries="memory",
    )
    adopted, metrics = other.step(other.adopt(state), batches[1])
    found["adopt"], found["params of adopt"] = host(metrics), other.get_params(adopted)
    measured = pipe.profile(own(batches[0]), programs=["forward"], min_seconds=0.01)
    by_time = pipeline(mesh, schedule, N, boundaries="time", **sharing)
    by_time.init(jax.random.key(3), own(batches[0]))
    found["measured"] = measured.text(), by_time.partition(own(batches[0]))
    path = pathlib.Path(folder) / f"{jax.process_index()} of {jax.process_count()}"
    path.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    jpipe.distributed.initialize()
    main(*sys.argv[1:])
