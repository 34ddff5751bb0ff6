"""Several processes measure other costs of one model, and place it alike; prints the placement and an error.

python -m jpipe.launch -n 2 --devices 2 tests/processes/placed.py
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe.plan import placement


def costs_of(settings, traced, microbatch):
    """Random seconds, different ones on each process."""
    rng = random.Random(jax.process_index())
    seconds = tuple(rng.uniform(1, 2) for _ in (*traced.layers, "the loss"))
    return placement.Costs(seconds, seconds, (1.0,) * len(traced.layers))


def model(params, args):
    """Branches of two products."""
    return sum((jnp.tanh(args @ w) @ w for w in params.values()), args)


def pipeline(num_stages, number):
    return jpipe.Pipeline(
        jpipe.InitApply(lambda key, x: {f"branch {i}": jnp.eye(4) for i in range(number)}, model),
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(num_stages, 2),
        boundaries="placement",
    )


def main():
    placement.costs_of = costs_of
    batch = {"inputs": np.ones((4, 4), np.float32)}
    pipe = pipeline(2, 4)
    state = pipe.init(jax.random.key(0), batch)
    _, metrics = pipe.step(state, batch)
    assert np.isfinite(metrics["loss"])
    print(f"process {jax.process_index()}: {pipe._program(batch).settings.model.placement}", flush=True)
    try:
        pipeline(2, 0).partition(batch)
    except ValueError as error:
        print(f"process {jax.process_index()}: {error}", flush=True)


if __name__ == "__main__":
    jpipe.distributed.initialize()
    main()
