"""What splitting the embedding and the head over all stages saves: padding, and the time of the last stage.

    python benchmarks/vocabulary.py                # bytes and FLOPs per device; nothing runs
    python benchmarks/vocabulary.py --measure      # and seconds per step on two devices of this CPU

Every model is cut by FLOPs, once with whole layers and once with the rule `("vocab", "stage")`. *Padding* is the part
of a device's weights that the average device does not use. *Slowest* and *last* are the FLOPs of the slowest and of the
last
stage, divided by the mean: without a bubble a tick takes as long as the slowest stage.

With `--measure` a GPT of two stages trains with both, in alternation.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax

import jpipe
from models import Transformer, Translation

RULES = {"whole": (("vocab", None),), "split": (("vocab", "stage"),)}


class Case(NamedTuple):
    """A model on a schedule.

    Attributes:
      name: in the table.
      model: of `models`.
      seq_len: positions of a row.
      schedule: the table.
    """

    name: str
    model: Any
    seq_len: int
    schedule: jpipe.Schedule


def gpt2(**sizes: Any) -> Transformer:
    """GPT-2 (Radford et al., 2019), by default the small one."""
    base = dict(vocab_size=50257, seq_len=1024, dim=768, num_heads=12, num_blocks=12)
    return Transformer(**(base | sizes))


def cases() -> Iterator[Case]:
    """The models of the table."""
    schedules = jpipe.schedules
    small = Transformer(seq_len=128, dim=128, num_heads=4, num_blocks=8)
    yield Case("configs/gpt_1f1b.py", small, 128, schedules.one_f_one_b(4, 8))
    small = Transformer(seq_len=128, dim=64, num_heads=4, num_blocks=4)
    yield Case("configs/gpt_2bw.py", small, 128, schedules.pipedream_2bw(4, 8))
    translation = Translation(
        vocab_size=259,
        dim=64,
        num_heads=4,
        mlp_dim=256,
        num_encoder_blocks=3,
        num_decoder_blocks=2,
        norm="pre",
        dropout=0.0,
    )
    table = schedules.one_f_one_b(2, 8)
    yield Case("configs/translation_1f1b.py", translation, 96, table)
    for num_stages in (4, 6):
        table = schedules.one_f_one_b(num_stages, 8)
        yield Case("GPT-2 small", gpt2(), 1024, table)
    tied = gpt2(tie_embeddings=True)
    yield Case("GPT-2 small, tied", tied, 1024, schedules.one_f_one_b(4, 8))
    yield Case("GPT-2 small, V", gpt2(), 1024, schedules.zero_bubble_v(8, 8))
    medium = gpt2(dim=1024, num_heads=16, num_blocks=24)
    yield Case("GPT-2 medium", medium, 1024, schedules.one_f_one_b(8, 8))


def pipeline(model: Any, schedule: jpipe.Schedule, rules: tuple) -> jpipe.Pipeline:
    """The pipeline of a model under rules."""
    return jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optax.adamw(1e-3),
        schedule=schedule,
        ties=model.ties(),
        axis_rules=rules,
    )


def batch_of(model: Any, seq_len: int, num_rows: int, seed: int = 0) -> dict[str, Any]:
    """A minibatch of random tokens."""
    rng = np.random.default_rng(seed)
    shape = 3, num_rows, seq_len
    tokens = rng.integers(1, model.vocab_size, shape, dtype=np.int32)
    is_pair = isinstance(model, Translation)
    inputs = {"source": tokens[0], "target": tokens[1]} if is_pair else tokens[0]
    return {"inputs": inputs, "labels": tokens[2]}


def costs(pipe: jpipe.Pipeline, batch: Any) -> tuple[float, float, float, float]:
    """Bytes of weights per device, the part that is padding, and FLOPs of the slowest and of the last stage / mean."""
    num_devices = pipe.schedule.num_devices
    records = pipe.partition(batch)
    flops = [0.0] * num_devices
    for record in records:
        flops[record.device] += record.flops
    mean = sum(flops) / num_devices
    # The groups of the state have the shapes; nothing is allocated.
    layout = pipe._program(batch).engine.layout["parameters"]
    allocated = layout.num_bytes("cpu")
    versions = pipe._program(batch).engine.rows.num_versions
    used = [record.parameter_bytes for record in records] @ versions / num_devices
    last = flops[records[-1].device]
    return allocated, 1 - used / allocated, max(flops) / mean, last / mean


def table() -> None:
    """Prints bytes and FLOPs of all cases."""
    print("| model | schedule | | weights, MB | padding | slowest | last |")
    print("|---|---|---|---|---|---|---|")
    for case in cases():
        for name, rules in RULES.items():
            pipe = pipeline(case.model, case.schedule, rules)
            batch = batch_of(case.model, case.seq_len, case.schedule.num_microbatches)
            allocated, padding, slowest, last = costs(pipe, batch)
            schedule = f"`{case.schedule.name}`, {case.schedule.num_devices} devices"
            print(
                f"| {case.name} | {schedule} | {name} | {allocated / 1e6:.2f} | {padding:.1%} | {slowest:.2f} | "
                f"{last:.2f} |",
                flush=True,
            )


def measure(rounds: int, steps: int) -> None:
    """Prints seconds per step of both rules, in alternation."""
    model = Transformer(vocab_size=16384, seq_len=64, dim=128, num_heads=4, num_blocks=4)
    schedule = jpipe.schedules.one_f_one_b(2, 8)
    batch = batch_of(model, 64, 16)
    runs = {}
    for name, rules in RULES.items():
        pipe = pipeline(model, schedule, rules)
        state = pipe.init(jax.random.key(0), batch)
        state, metrics = pipe.step(state, batch)
        runs[name] = [pipe, state, [], float(metrics["loss"])]
    for _ in range(rounds):
        for run in runs.values():
            pipe, state, seconds, _ = run
            start = time.perf_counter()
            for _ in range(steps):
                state, metrics = pipe.step(state, batch)
            float(metrics["loss"])
            seconds.append((time.perf_counter() - start) / steps)
            run[1] = state
    for name, (pipe, _, seconds, loss) in runs.items():
        memory = pipe.memory(batch)
        total = sum(math.ceil(a) for a in memory._replace(padding=0))
        print(
            f"{name}: {statistics.median(seconds) * 1e3:.0f} ms per step (best {min(seconds) * 1e3:.0f}), first loss "
            f"{loss:.6f}, {total / 1e6:.1f} MB per device of which padding {memory.padding / 1e6:.1f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="train on this CPU too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of measuring")
    parser.add_argument("--steps", type=int, default=3, help="steps of a round")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    table()
    if options.measure:
        measure(options.rounds, options.steps)


if __name__ == "__main__":
    main()
