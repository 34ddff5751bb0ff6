"""Does a wider dtype for sums of gradients pay for its bytes? Training with weights in bfloat16 and many microbatches.

    python benchmarks/accumulate_dtype.py

A network learns what another one computes, with weights in bfloat16 and their master copies in float32, as in practice.
Its gradients are summed over 64 microbatches, in bfloat16 (`accumulate_dtype=None`) or in float32. The control has
weights in float32. Everything else is equal: data, optimizer and, but for rounding, first weights. A line has the error
of the first minibatch's gradient against a sum in float64, and the loss of each seed on rows that were not trained on.
"""

import argparse
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402

WIDTHS = (32, 128, 128, 128, 8)
WAYS = {
    "bfloat16, sums in bfloat16": (jnp.bfloat16, None),
    "bfloat16, sums in float32": (jnp.bfloat16, jnp.float32),
    "float32": (jnp.float32, None),
}


def layers(dtype) -> list:
    """A multilayer perceptron."""

    def layer(a: int, b: int, last: bool):
        class Layer(nnx.Module):
            def __init__(self, *, rngs):
                self.linear = nnx.Linear(a, b, param_dtype=dtype, dtype=dtype, rngs=rngs)

            def __call__(self, x):
                y = self.linear(x)
                return y if last else jnp.tanh(y)

        return Layer

    pairs = list(zip(WIDTHS, WIDTHS[1:]))
    return [layer(a, b, i == len(pairs) - 1) for i, (a, b) in enumerate(pairs)]


def loss(outputs, batch):
    return jnp.mean((outputs.astype(jnp.float32) - batch["targets"]) ** 2)


def rows(rng: np.random.Generator, teacher: list, number: int) -> dict:
    """Inputs, and what the teacher computes of them."""
    inputs = x = rng.standard_normal((number, WIDTHS[0]))
    for matrix in teacher[:-1]:
        x = np.tanh(x @ matrix)
    targets = x @ teacher[-1]
    return {"inputs": inputs.astype("f"), "targets": targets.astype("f")}


def pipeline(dtype, sums, args) -> jpipe.Pipeline:
    """Two stages under 1F1B."""
    optimizer = optax.adamw(args.learning_rate, weight_decay=0.0)
    return jpipe.Pipeline(
        layers(dtype),
        loss=loss,
        optimizer=jpipe.optim.master_weights(optimizer),
        schedule=jpipe.schedules.one_f_one_b(2, args.microbatches),
        accumulate_dtype=sums,
    )


def gradient_error(pipe: jpipe.Pipeline, state, batch: dict, sums, args) -> float:
    """The relative error of a minibatch's gradient, summed in a dtype, against a sum in float64."""
    weights = jax.tree.map(jnp.asarray, pipe.get_params(state))
    models = [nnx.split(make(rngs=nnx.Rngs(0))) for make in layers(jnp.bfloat16)]

    def of_microbatch(weights: list, part: dict):
        x = part["inputs"].astype(jnp.bfloat16)
        for (graph, _), params in zip(models, weights):
            x = nnx.merge(graph, nnx.State(params))(x)
        return loss(x, part) / args.microbatches

    parts = jax.tree.map(lambda a: a.reshape(args.microbatches, -1, *a.shape[1:]), batch)
    gradient = jax.jit(jax.grad(of_microbatch))
    exact, summed = 0.0, None
    for m in range(args.microbatches):
        tree = gradient(weights, jax.tree.map(lambda a, m=m: a[m], parts))
        flat = np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
        exact = exact + flat.astype(np.float64)
        flat = flat.astype(sums)
        summed = flat if summed is None else (summed + flat).astype(sums)
    rounded = summed.astype(jnp.bfloat16).astype(np.float64)
    return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))


def run(pipe: jpipe.Pipeline, seed: int, dtype, sums, args) -> tuple[float, float]:
    """The error of the first gradient, and the final loss on new rows."""
    rng = np.random.default_rng(seed)
    teacher = [rng.standard_normal((a, b)) * 1.5 / np.sqrt(a) for a, b in zip(WIDTHS, WIDTHS[1:])]
    new = rows(rng, teacher, 4096)
    batches = [rows(rng, teacher, args.microbatches * args.rows) for _ in range(args.steps)]
    state = pipe.init(jax.random.key(seed), batches[0])
    error = np.nan
    if dtype == jnp.bfloat16:
        error = gradient_error(pipe, state, batches[0], sums or jnp.bfloat16, args)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    return error, float(pipe.evaluate(state, new)["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    args = parser.parse_args()
    print(f"{args.microbatches} microbatches of {args.rows} rows, {args.steps} steps, {args.seeds} seeds")
    print(f"{'weights':28} {'error of a gradient':>20} {'loss on new rows, by seed':>40} {'mean':>9}")
    start = time.time()
    for name, (dtype, sums) in WAYS.items():
        pipe = pipeline(dtype, sums, args)  # compiled once for all seeds
        results = [run(pipe, seed, dtype, sums, args) for seed in range(args.seeds)]
        errors, losses = zip(*results)
        each = " ".join(f"{value:.5f}" for value in losses)
        print(
            f"{name:28} {np.mean(errors):20.5f} {each:>40} {np.mean(losses):9.5f}",
            flush=True,
        )
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
