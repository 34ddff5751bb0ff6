"""Makes pipelines in two processes that differ in one thing, and prints what `init` says.

python -m jpipe.launch -n 2 --devices 2 tests/processes/disagree.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe


def pipeline(num_layers=4, learning_rate=0.1, width=8, **options):
    defaults = dict(
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(learning_rate),
        schedule=jpipe.schedules.gpipe(2, 2),
    )
    middle = [functools.partial(nnx.Linear, width, width)] * (num_layers - 2)
    ends = (
        functools.partial(nnx.Linear, 8, width),
        functools.partial(nnx.Linear, width, 8),
    )
    return jpipe.Pipeline([ends[0], *middle, ends[1]], **defaults | options)


def init(pipe=None, seed=0, num_rows=8, **given):
    batch = {"inputs": np.ones((num_rows, 8)), "targets": np.zeros((num_rows, 8))}
    return (pipe or pipeline()).init(jax.random.key(seed), batch, **given)


def scaled_params(factor):
    pipe = pipeline()
    params = pipe.get_params(init(pipe))
    return jax.tree.map(lambda a: a * factor, params)


def with_version(version):
    jpipe.__version__ = version
    init()


def evaluate(num_rows):
    pipe = pipeline()
    state = init(pipe)
    batch = {"inputs": np.ones((num_rows, 8)), "targets": np.zeros((num_rows, 8))}
    pipe.evaluate(state, batch)


one_f_one_b = jpipe.schedules.one_f_one_b
CASES = {
    "key": lambda p: init(seed=p),
    "batch": lambda p: init(num_rows=8 + 4 * p),
    "schedule": lambda p: init(pipeline(schedule=(jpipe.schedules.gpipe, one_f_one_b)[p](2, 2))),
    "ticks": lambda p: init(pipeline(schedule=one_f_one_b(2, 2, ticks=("paired", "unit")[p]))),
    "boundaries": lambda p: init(pipeline(boundaries=[1 + p])),
    "balance": lambda p: init(pipeline(boundaries=("flops", "memory")[p])),
    "number of layers": lambda p: init(pipeline(num_layers=4 + p)),
    "layers": lambda p: init(pipeline(width=8 + p)),
    "optimizer": lambda p: init(pipeline(learning_rate=0.1 + p)),
    "loss": lambda p: init(pipeline(loss=lambda y, batch: (1 + p) * jnp.mean(y**2))),
    "compute dtype": lambda p: init(pipeline(compute_dtype=(None, jnp.bfloat16)[p])),
    "params": lambda p: init(params=scaled_params(1 + p)),
    "rows": lambda p: evaluate(3 + p),
    "config": lambda p: jpipe.distributed.check_same({"the rate": str(0.1 + p)}),
    "version": lambda p: with_version(f"0.{p}"),
}
"""A name -> what a process does, by its number."""


def main():
    jpipe.distributed.initialize()
    assert jpipe.distributed.broadcast([jax.process_index(), "a"]) == [0, "a"]
    for name, run in CASES.items():
        try:
            run(jax.process_index())
            print(f"{name}: nothing")
        except ValueError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
