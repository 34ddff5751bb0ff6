"""Draws the measured Gantt charts of two schedules of one model on two CPU devices, for `docs/how_to/trace.md`.

    python benchmarks/trace_schedules.py --out docs/images/trace.svg

Eight dense layers, 512 wide, on 6 microbatches of 256 rows: 1F1B with two stages, and interleaved 1F1B with two stages
on each device. Each device computes on one core, so that the two do not share cores. Five steps are traced after three
others, and the step of median length is drawn.
"""

import argparse
import functools
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jpipe

WIDTH, ROWS, NUM_MICROBATCHES = 512, 256, 6


def traced(schedule: jpipe.Schedule) -> jpipe.trace.Trace:
    """The trace of five steps."""
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, WIDTH, WIDTH) for _ in range(8)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(1e-3),
        schedule=schedule,
    )
    shape = NUM_MICROBATCHES * ROWS, WIDTH
    batch = {"inputs": jnp.ones(shape), "targets": jnp.zeros(shape)}
    state = pipe.init(jax.random.key(0), batch)
    for _ in range(3):
        state, _ = pipe.step(state, batch)
    _, trace = pipe.trace(state, batch, num_steps=5)
    return trace


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="a file that ends in .svg, .png or .pdf")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    schedules = jpipe.schedules.one_f_one_b(2, NUM_MICROBATCHES), jpipe.schedules.interleaved(4, NUM_MICROBATCHES)
    traces = [traced(schedule) for schedule in schedules]
    jpipe.trace.draw(traces, args.out)
    print("\n\n".join(map(str, traces)))


if __name__ == "__main__":
    main()
