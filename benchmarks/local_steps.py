"""What learners that train apart lose in quality: a multilayer perceptron on digits, several seeds, at equal steps.

    python benchmarks/local_steps.py
    python benchmarks/local_steps.py --seeds 1 --steps 40

Four learners of two stages train on 8 CPU devices, each on a quarter of every batch of 128. All weights come together
after the last step, and are evaluated on held-out digits. Every setting but plain data parallelism sends the same
numbers in 20 steps: each weight once. `--schedule pipemare` has stages with late weights beside late means. `--out
FILE` also writes the results as JSON.
"""

import argparse
import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
H, LEARNERS, ROWS = 20, 4, 128


def settings() -> dict[str, tuple]:
    """The local steps of each setting, and the steps between outer steps."""
    import optax

    import jpipe

    mean = optax.sgd(1.0)

    def sparse(delay: int, correction: float | None) -> tuple:
        return jpipe.LocalSteps(mean, H, jpipe.SparseAverage(delay, correction)), 1

    return {
        "data parallel": (None, 1),
        "local SGD": (jpipe.LocalSteps(mean), H),
        "DiLoCo": (jpipe.LocalSteps(optax.sgd(0.7, momentum=0.9, nesterov=True)), H),
        "sparse, at once": sparse(0, None),
        "sparse, 10 steps late, uncorrected": sparse(10, None),
        "sparse, 10 steps late, correction 0.0": sparse(10, 0.0),
        "sparse, 10 steps late, correction 0.5": sparse(10, 0.5),
    }


def train(schedule: str, local_steps: object, every: int, seeds: int, steps: int) -> list[tuple[float, float]]:
    """For each seed the loss and the accuracy on the held-out digits."""
    import jax
    import optax

    import jpipe
    from models import MLP
    from train.data import shuffled
    from train.mnist import MNIST
    from train.train import evaluate

    model = MLP(widths=(128, 128, 128))
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optax.adamw(optax.cosine_decay_schedule(2e-3, steps), weight_decay=1e-2),
        schedule=jpipe.schedules.get(schedule)(2, 2),
        mesh=jpipe.make_mesh(stage=2, data=LEARNERS),
        local_steps=local_steps,
    )
    data = MNIST(max_shift=2).load()
    results = []
    for seed in range(seeds):
        batches = shuffled(data.train, ROWS, seed)
        first = next(batches)
        state = pipe.init(jax.random.key(seed), first)
        for step in range(1, steps + 1):
            state, metrics = pipe.step(state, next(batches))
            if step == steps:
                state, _ = pipe.flush(state)
            if local_steps is not None and step % every == 0:
                # On CPUs collectives of programs that overlap can wait for each other.
                jax.block_until_ready((state.arrays(), metrics))
                whole = step == steps or every == H
                state = pipe.outer_step(state, None if whole else step // every % H)
        held_out = evaluate(pipe, state, data.test, ROWS)
        results.append((held_out["loss"], model.loss().metrics(held_out)["accuracy"]))
    return results


def main() -> None:
    """Trains all settings and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="one_f_one_b", help="by its name in `jpipe.schedules`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", 2 * LEARNERS)
    rows = {}
    print("| learners | held-out loss | held-out accuracy |\n|---|---|---|")
    for name, (local_steps, every) in settings().items():
        rows[name] = train(args.schedule, local_steps, every, args.seeds, args.steps)
        losses, accuracies = zip(*rows[name], strict=True)
        spreads = [statistics.stdev(values) if args.seeds > 1 else 0.0 for values in (losses, accuracies)]
        loss = f"{statistics.mean(losses):.4f} ± {spreads[0]:.4f}"
        accuracy = f"{100 * statistics.mean(accuracies):.2f} ± {100 * spreads[1]:.2f} %"
        print(f"| {name} | {loss} | {accuracy} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
