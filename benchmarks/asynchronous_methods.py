"""Optimizers and corrections for late gradients, at the delays of 8 and of 100 stages, on one device.

    python benchmarks/asynchronous_methods.py --out methods.json --text train.txt --held-out valid.txt

trains a small byte-level GPT. A layer reads the weights that it would read as one of S stages: delays fall evenly from S - 1
at the first layer to 0 at the last, which is a pipeline in unit ticks with one microbatch per update that keeps the weights of
each forward for its backward (PipeDream). Every method gets the rates of its own grid with the first seed, and the best of them
with the other seeds. A method is compiled once: the rate is a number in the optimizer's state. Results are written after
each method, and a method that is in the file is not run again.
"""

import argparse
import gzip
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe import optim
from jpipe.locations import locations
from models import CrossEntropy, Transformer

SEQ_LEN, BATCH, EVALUATIONS = 64, 4, 40


class Method(NamedTuple):
    """A method.

    Attributes:
      chain: `scale -> transforms`: `scale` multiplies by minus the learning rate.
      rates: the grid.
      hooks: arguments of the pipeline.
      late: whether gradients are late.
    """

    chain: Callable[[Any], list]
    rates: tuple[float, ...]
    hooks: dict = {}
    late: bool = True


ADAM = (2e-3, 4e-3, 8e-3, 1.6e-2)
SLOW = (1e-3, 2e-3, 4e-3, 8e-3)


def adam(*, b1: float = 0.9) -> Any:
    return optax.scale_by_adam(b1, 0.95)


def muon() -> Any:
    """Muon for matrices, Adam for the rest, at one rate."""
    return optax.contrib.muon(-1.0, adam_learning_rate=-0.3, adam_b2=0.95)


def methods(num_steps: int) -> dict[str, Method]:
    t1 = optim.scale_by_delay(num_steps)
    ahead = dict(forward_params=optim.predicted_params)
    return {
        "synchronous AdamW": Method(lambda scale: [adam(), scale], ADAM, late=False),
        "synchronous Muon": Method(lambda scale: [muon(), scale], ADAM, late=False),
        "AdamW": Method(lambda scale: [adam(), scale], SLOW),
        "+T1": Method(lambda scale: [adam(), scale, t1], ADAM),
        "prediction": Method(
            lambda scale: [adam(), scale, optim.predict_weights()], SLOW, ahead
        ),
        "prediction +T1": Method(
            lambda scale: [adam(), scale, t1, optim.predict_weights()], ADAM, ahead
        ),
        "NAdamW": Method(lambda scale: [optim.scale_by_nadam(0.99, 0.95), scale], SLOW),
        "DC-ASGD": Method(
            lambda scale: [optim.compensate_delay(2.0), adam(), scale], SLOW
        ),
        "error feedback": Method(
            lambda scale: [adam(), scale, optim.error_feedback()], SLOW
        ),
        "basis rotation": Method(
            lambda scale: [optim.scale_by_basis_rotation(0.9, 0.95), scale], ADAM
        ),
        "basis rotation +T1": Method(
            lambda scale: [optim.scale_by_basis_rotation(0.9, 0.95), scale, t1], ADAM
        ),
        "Muon": Method(lambda scale: [muon(), scale], ADAM),
        "Muon +T1": Method(lambda scale: [muon(), scale, t1], ADAM),
        "Muon, error feedback": Method(
            lambda scale: [muon(), scale, optim.error_feedback()], ADAM
        ),
    }


class Trainer:
    """One method at the delays of S stages, compiled once."""

    def __init__(self, method: Method, num_stages: int, num_steps: int):
        model = Transformer(seq_len=SEQ_LEN, dim=32, num_heads=4, num_blocks=4)
        layers = model.layers()
        late = np.linspace(num_stages - 1, 0, len(layers)).round().astype(int)
        self.delays = late if method.late else np.zeros_like(late)
        self.num_steps = num_steps
        cosine = optax.cosine_decay_schedule(1.0, num_steps)
        scale = optax.chain(
            optax.inject_hyperparams(optax.scale)(step_size=-1.0),
            optax.scale_by_schedule(lambda t: cosine(t) * jnp.minimum(1, (t + 1) / 50)),
        )
        self.pipe = jpipe.Pipeline(
            layers,
            loss=CrossEntropy(),
            has_aux=True,
            optimizer=optax.chain(
                optim.clip_by_global_norm(1.0),
                *method.chain(scale),
                optim.ema_weights(0.99),
            ),
            schedule=jpipe.schedules.with_delays(self.delays),
            boundaries=list(range(1, len(layers))),
            **method.hooks,
        )

    def run(
        self, rate: float, seed: int, text: np.ndarray, held_out: np.ndarray
    ) -> dict:
        """Bits per byte of the held-out text at the end: of the weights, and of their average."""
        pipe, draw = self.pipe, np.random.default_rng(seed)
        state = with_rate(pipe.init(jax.random.key(seed), batch_of(text, draw)), -rate)
        losses = []
        for step in range(self.num_steps):
            state, metrics = pipe.step(state, batch_of(text, draw))
            if (step + 1) % 50 == 0:
                losses.append(float(metrics["loss"]))
                if not math.isfinite(losses[-1]):
                    return {"bits": math.inf, "averaged": math.inf, "losses": losses}
        averaged = pipe.with_params(state, optim.averaged_params)
        bits = [
            bits_per_byte(pipe, one, held_out, np.random.default_rng(0))
            for one in (state, averaged)
        ]
        return {"bits": bits[0], "averaged": bits[1], "losses": losses}


def with_rate(state: jpipe.PipelineState, step_size: float) -> jpipe.PipelineState:
    """The state with another learning rate, which is a number in the optimizer's state of each stage."""
    for of_layer in locations(state.program, 0).optimizer_state:
        for path, location in of_layer.items():
            if "step_size" in path:
                array = state.optimizer_state[location.array]
                index = location.blocks[0].in_array
                state.optimizer_state[location.array] = array.at[index].set(step_size)
    return state


def batch_of(text: np.ndarray, draw: np.random.Generator, size: int = BATCH) -> dict:
    starts = draw.integers(0, len(text) - SEQ_LEN - 1, size)
    rows = np.stack([text[s : s + SEQ_LEN + 1] for s in starts]).astype(np.int32)
    return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}


def bits_per_byte(pipe: Any, state: Any, text: np.ndarray, draw: Any) -> float:
    losses = [
        float(pipe.evaluate(state, batch_of(text, draw, 16))["loss"])
        for _ in range(EVALUATIONS)
    ]
    return statistics.mean(losses) / math.log(2)


def read(path: str) -> np.ndarray:
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rb") as file:
        return np.frombuffer(file.read(), np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--stages", type=int, nargs="+", default=[8, 100])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+")
    options = parser.parse_args()
    text, held_out = read(options.text), read(options.held_out)
    path = pathlib.Path(options.out)
    results = json.loads(path.read_text()) if path.exists() else {}
    known = methods(options.steps)
    for num_stages in options.stages:
        for name in options.methods or known:
            method = known[name]
            key = f"{name}, {num_stages} stages" if method.late else name
            if key in results:
                continue
            start = time.perf_counter()
            trainer = Trainer(method, num_stages, options.steps)
            runs = {
                rate: [trainer.run(rate, 0, text, held_out)] for rate in method.rates
            }
            best = min(runs, key=lambda rate: runs[rate][0]["bits"])
            for seed in range(1, options.seeds):
                runs[best].append(trainer.run(best, seed, text, held_out))
            bits, averaged = (
                [run[which] for run in runs[best]] for which in ("bits", "averaged")
            )
            results[key] = {
                "rate": best,
                "bits": bits,
                "averaged": averaged,
                "delays": trainer.delays.tolist(),
                "grid": {str(rate): of[0]["bits"] for rate, of in runs.items()},
                "losses": [run["losses"] for run in runs[best]],
                "steps": options.steps,
                "seconds": time.perf_counter() - start,
            }
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(
                f"{key:40} rate {best:<7g} bits {statistics.mean(bits):.4f} +- {statistics.pstdev(bits):.4f}  average "
                f"{statistics.mean(averaged):.4f}  {results[key]['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
