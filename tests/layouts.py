"""A small training, and pipelines of every layout that can go on with it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy
from flax import nnx

import jpipe
from jpipe import schedules
from jpipe._processes.sharing import is_shared
from models import Transformer

DIM, ROWS = 8, 16


class Block(nnx.Module):
    """A layer with mutable state and random draws."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.linear(x))))


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def batches(count, first=0):
    rng = np.random.default_rng(first)
    return [
        {name: rng.normal(size=(ROWS, DIM)).astype(np.float32) for name in ("inputs", "targets")} for _ in range(count)
    ]


def pipeline(schedule, num_layers=8, data=1, in_turn=False, **options):
    options = {"optimizer": optax.adam(1e-2), "loss": loss} | options
    mesh = mesh_of(schedule, in_turn, data=data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jpipe.schedule.warn", lambda *_: None)  # of a bubble
        return jpipe.Pipeline([Block] * num_layers, schedule=schedule, mesh=mesh, **options)


def mesh_of(schedule, in_turn, **sizes):
    """A mesh with devices of all processes; see `devices_of_all_processes`."""
    sizes |= {"stage": schedule.num_devices}
    devices = devices_of_all_processes(math.prod(sizes.values()), in_turn)
    return jpipe.make_mesh(**sizes, ring=schedule.ring, devices=devices)


def devices_of_all_processes(count, in_turn):
    """As many of the first devices of each process; this process's own if there are too few for all.

    Args:
      count: devices of all processes.
      in_turn: whether neighbours are of different processes.
    """
    if count < jax.process_count():
        return jax.local_devices()[:count]
    share = count // jax.process_count()
    processes = range(jax.process_count())
    devices = np.array([jax.local_devices(process)[:share] for process in processes])
    return list(devices.ravel(order="F" if in_turn else "C"))


def own_rows(mesh, batch):
    """The rows of a batch that this process gives."""
    if not is_shared(mesh):
        return batch
    rows = jpipe.distributed.process_rows(mesh, ROWS)
    return {name: a[rows] for name, a in batch.items()}


def trained(pipe, state, batches):
    losses = []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def arrays_of(state):
    leaves = jax.tree.leaves_with_path({**state.kept(), **state.in_flight()})
    return {jax.tree_util.keystr(path): np.asarray(a) for path, a in leaves}


# -- Layouts

NAMES = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zero_bubble_h1",
    "pipedream",
    "pipemare",
)
LAYOUTS = [
    (name, S, data)
    for name in NAMES
    for S in (1, 2, 4)
    for data in (1, 2)
    if name != "interleaved" or S > 1  # two stages or more on each device
]


def schedule_of(layout):
    name, S, *_ = layout
    return getattr(schedules, name)(S, 4)


@functools.cache
def of_layout(layout):
    """The pipeline of a layout, made once.

    In several processes, stages lie across them for half of the schedules and replicas for the others.
    """
    name, _, data = layout
    in_turn = NAMES.index(name) % 2 == 1
    return pipeline(schedule_of(layout), data=data, in_turn=in_turn)


@functools.cache
def source():
    """A state after two steps, which the pipelines of all layouts adopt."""
    pipe = pipeline(schedules.gpipe(2, 4))
    return trained(pipe, pipe.init(jax.random.key(3), batches(1)[0]), batches(2))[0]


# -- Layouts whose layers are split over the axis "model"

PARTS = [
    # Schedule, stages, replicas, parts of a layer, and whether neighbours are of different processes.
    ("one_f_one_b", 2, 1, 2, False),  # stages across processes
    ("one_f_one_b", 2, 1, 2, True),  # parts across processes
    ("gpipe", 1, 1, 2, False),
    ("gpipe", 4, 1, 1, False),
    ("zero_bubble_h1", 1, 2, 2, True),
    ("pipedream", 2, 2, 2, False),
    ("pipedream", 2, 1, 2, True),
]


def batches_of_parts(count, first=0):
    return FAMILIES["transformer"].batches(first + count, ROWS)[first:]


@functools.cache
def of_parts(optimizer, layout):
    """The pipeline of one of `PARTS`, made once.

    Args:
      optimizer: "adam", whose state is split as the weights are, or "sgd", which has none.
      layout: one of `PARTS`.
    """
    _, _, data, model, in_turn = layout
    size = dict(vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=2)
    schedule = schedule_of(layout)
    return jpipe.Pipeline(
        Transformer(**size).layers(),
        loss=cross_entropy,
        optimizer={"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1)}[optimizer],
        schedule=schedule,
        mesh=mesh_of(schedule, in_turn, data=data, model=model),
    )
