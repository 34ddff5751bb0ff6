"""What emulation of many stages costs on one device, against plain training of the same model.

    python benchmarks/emulation.py                          # residual blocks, S = 1, 8, 32, 107
    python benchmarks/emulation.py --model resnet           # convolutions and norms of a ResNet, unlike each other
    python benchmarks/emulation.py --stages 1 8 --rounds 3

The plain program is JAX alone: a scan over the same microbatches, the gradient of the whole model, one update. It is
written in two ways: all layers one after the other, and a scan over equal layers where all are equal. Emulation runs
GPipe's table and PipeMare's without corrections, whose delays grow with the stages. All programs run in one process, a
few steps of each in turn, so that other load on the machine disturbs all alike. Seconds are medians. `program` is the
number of operations of the lowered program. Memory is that of the state: what `Pipeline.memory` predicts from the
table, and what the compiler reserves for arguments.
"""

import argparse
import functools
import json
import pathlib
import re
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402
from jpipe.schedules import emulated, gpipe, pipemare  # noqa: E402
from models import ResNet  # noqa: E402

NUM_LAYERS = 107
optimizer = optax.sgd(1e-3, momentum=0.9)


class Block(nnx.Module):
    """`x + V relu(U x)`."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.wide = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.narrow = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(nnx.relu(self.wide(x)))


def loss(outputs: jax.Array, batch: dict) -> jax.Array:
    return jnp.mean((outputs - batch["targets"]) ** 2)


def make_model(args: argparse.Namespace) -> tuple[list, dict]:
    """The layers, and a minibatch."""
    rng, size = np.random.default_rng(0), args.microbatches * args.rows
    if args.model == "blocks":
        layers = [functools.partial(Block, args.dim)] * NUM_LAYERS
        shape, num_outputs = (args.dim,), args.dim
    else:
        model = ResNet(
            num_channels=1,
            widths=(8, 16, 32),
            num_blocks=(8, 9, 8),  # 107 layers, each with weights
            fine_grained=True,
            num_classes=10,
        )
        layers, shape, num_outputs = model.layers(), (28, 28, 1), 10
    batch = {
        "inputs": rng.normal(size=(size, *shape)).astype(np.float32),
        "targets": rng.normal(size=(size, num_outputs)).astype(np.float32),
    }
    assert len(layers) == NUM_LAYERS
    return layers, batch


def plain_steps(layers: list, num_microbatches: int) -> dict:
    """Name -> `(step, state)`, with `step(*state, batch) -> (*state, loss)`."""
    split = [nnx.split(make(rngs=nnx.Rngs(i)), nnx.Param, ...) for i, make in enumerate(layers)]
    params = [jax.tree.map(jnp.asarray, p) for _, p, _ in split]

    def run(i: int, params: nnx.State, x: jax.Array) -> jax.Array:
        graph, _, rest = split[i]
        return nnx.merge(graph, params, rest)(x)

    def unrolled(params: list, batch: dict) -> jax.Array:
        x = batch["inputs"]
        for i, of_layer in enumerate(params):
            x = run(i, of_layer, x)
        return loss(x, batch)

    def scanned(params: nnx.State, batch: dict) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (run(0, p, x), None), batch["inputs"], params)
        return loss(x, batch)

    def program(function, params) -> tuple:
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, batch):
            cut = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)

            def add(total, microbatch):
                value, gradient = jax.value_and_grad(function)(params, microbatch)
                return jax.tree.map(lambda a, b: a + b / num_microbatches, total, (value, gradient)), None

            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            (value, gradient), _ = jax.lax.scan(add, zeros, cut)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        return step, [params, optimizer.init(params)]

    programs = {"plain": program(unrolled, params)}
    if len({str(jax.tree.map(jnp.shape, p)) for p in params}) == 1:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        programs["plain, scan over layers"] = program(scanned, stacked)
    return programs


def num_operations(lowered: jax.stages.Lowered) -> int:
    return len(re.findall(r"stablehlo\.\w+|func\.call", lowered.as_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["blocks", "resnet"], default="blocks")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 8, 32, 107])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="of a microbatch")
    parser.add_argument("--dim", type=int, default=128, help="of the blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per round")
    parser.add_argument("--out", type=pathlib.Path, help="also write JSON")
    args = parser.parse_args()
    layers, batch = make_model(args)

    programs, rows = {}, {}
    for name, (step, state) in plain_steps(layers, args.microbatches).items():
        begin = time.perf_counter()
        lowered = step.lower(*state, batch)
        compiled = lowered.compile()
        rows[name] = {
            "compile_seconds": time.perf_counter() - begin,
            "operations": num_operations(lowered),
        }

        def advance(state: list, compiled=compiled) -> list:
            *state, value = jax.block_until_ready(compiled(*state, batch))
            return state

        programs[name] = advance, state
    for S in args.stages:
        for build in (gpipe, pipemare):
            with_bubble = build(S, args.microbatches)
            pipe = jpipe.Pipeline(
                layers,
                loss=loss,
                optimizer=optimizer,
                schedule=emulated(with_bubble),
            )
            name = f"{build.__name__}, {S} stages"
            state = pipe.init(jax.random.key(0), batch)
            begin = time.perf_counter()
            lowered = pipe.lower(batch)
            operations = num_operations(lowered)
            compiled = lowered.compile()
            seconds = time.perf_counter() - begin
            memory, facts = pipe.memory(batch), pipe.schedule.facts()
            predicted = sum((memory.weights, memory.optimizer, memory.gradients, memory.activations))
            arguments = compiled.memory_analysis().argument_size_in_bytes
            rows[name] = {
                "compile_seconds": seconds,
                "operations": operations,
                "largest_delay": int(facts.forward_delay.max()),
                "versions": int(pipe._program(batch).engine.lowered.rows.num_rows),
                "predicted_bytes": predicted + memory.batch,
                "argument_bytes": int(arguments),
                "padding_bytes": memory.padding,
            }

            def advance(state, pipe=pipe):
                state, _ = jax.block_until_ready(pipe.step(state, batch))
                return state

            programs[name] = advance, state
            print(f"compiled {name}: {rows[name]}", flush=True)

    seconds: dict = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, (advance, state) in programs.items():
            state = advance(state)  # warms the caches
            for _ in range(args.steps):
                begin = time.perf_counter()
                state = advance(state)
                seconds[name].append(time.perf_counter() - begin)
            programs[name] = advance, state
    for name, values in seconds.items():
        rows[name]["seconds"] = statistics.median(values)
    plain = rows["plain"]["seconds"]
    # fmt: skip
    print(
        "| program | s per step | of plain | compiled in, s | operations | largest delay | versions | state, MB | by "
        "the compiler |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        cells = [
            name,
            f"{row['seconds']:.3f}",
            f"{row['seconds'] / plain:.2f}",
            f"{row['compile_seconds']:.1f}",
            row["operations"],
        ]
        if "versions" in row:
            cells += [
                row["largest_delay"],
                row["versions"],
                f"{row['predicted_bytes'] / 1e6:.2f}",
                f"{row['argument_bytes'] / 1e6:.2f}",
            ]
        print("| " + " | ".join(map(str, cells)) + " |")
    if args.out:
        # fmt: skip
        args.out.write_text(json.dumps({"arguments": vars(args) | {"out": None}, "programs": rows}, indent=1))


if __name__ == "__main__":
    main()
