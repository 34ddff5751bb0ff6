"""How long a pipeline takes before its second step: tracing, initialisation and compilation.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --models mlp --rounds 5

Two models on stand-in devices of the CPU, without a compilation cache: seven linear layers of unlike widths on three
stages (1F1B, Adam), and ResNet-50 on four stages and on one (GPipe, AdamW). Every run is a process of its own, and the
models take turns. Seconds are CPU time of all threads, which other load on the machine disturbs less than the time on
the clock. The table has medians over the rounds.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

STAGES = {"mlp": (3,), "resnet50": (4, 1)}
WIDTHS = (32, 48, 24, 40, 56, 32, 16, 10)
PARTS = ("init", "trace", "compile", "step")


def measure(model: str, num_stages: int) -> dict[str, float]:
    """Part of the time before the second step -> CPU seconds, in this process."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    import jpipe
    from models import ResNet

    jax.config.update("jax_num_cpu_devices", num_stages)
    jax.block_until_ready(jax.numpy.ones(3) + 1)  # starts XLA
    rng = np.random.default_rng(0)
    if model == "mlp":
        sizes = itertools.pairwise(WIDTHS)
        layers = [functools.partial(nnx.Linear, a, b) for a, b in sizes]
        shape, optimizer = (32, WIDTHS[0]), optax.adam(1e-3)
        schedule = jpipe.schedules.one_f_one_b(num_stages, 8)
    else:
        layers = ResNet.of_depth(50, num_channels=1, num_classes=10).layers()
        shape, optimizer = (16, 28, 28, 1), optax.adamw(1e-3)
        schedule = jpipe.schedules.gpipe(num_stages, 8)
    batch = {
        "inputs": rng.normal(size=shape).astype(np.float32),
        "targets": rng.integers(0, 10, shape[0]),
    }

    def loss(logits: jax.Array, batch: dict) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())

    pipe = jpipe.Pipeline(layers, loss=loss, optimizer=optimizer, schedule=schedule)
    state = jax.block_until_ready(pipe.init(jax.random.key(0), batch))
    mark()
    lowered = state.program.lower()
    mark()
    lowered.compile()
    mark()
    jax.block_until_ready(pipe.step(state, batch))
    mark()
    seconds = [b - a for a, b in itertools.pairwise(marks)]
    return dict(zip(PARTS, seconds, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    rows = [(model, stages) for model in args.models for stages in STAGES[model]]
    found: dict = {row: [] for row in rows}
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    for _ in range(args.rounds):
        for model, stages in rows:
            command = [sys.executable, __file__, "--one", model, str(stages)]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[model, stages].append(json.loads(run.stdout.splitlines()[-1]))
    print(f"| model | stages | {' | '.join(PARTS)} | together |")
    print("|---|---|" + "---|" * (len(PARTS) + 1))
    for (model, stages), runs in found.items():
        medians = [statistics.median(run[part] for run in runs) for part in PARTS]
        together = statistics.median(sum(run.values()) for run in runs)
        cells = " | ".join(f"{x:.1f}" for x in (*medians, together))
        print(f"| {model} | {stages} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
