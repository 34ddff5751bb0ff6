"""What recomputation saves and costs: bytes per device and seconds per step.

    python benchmarks/recompute.py                        # a small transformer, 1F1B, 2 stages
    python benchmarks/recompute.py --ticks unit --stages 4 --rounds 3

All values train the same transformer from the same weights on the same data in one process. The
process runs a few steps with one value, a few steps with the next, round after round, so that other
load on the machine disturbs all values alike. The seconds are medians over all timed steps. The
bytes come from `Pipeline.memory`. The losses of the last step are compared.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--blocks", type=int, default=4)
parser.add_argument("--seq", type=int, default=64)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--ticks", default="paired", choices=["paired", "unit"])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--steps", type=int, default=4, help="timed steps per round")
parser.add_argument("--out", type=pathlib.Path, help="also write the figures as JSON")
args = parser.parse_args()
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.stages}"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jpipe  # noqa: E402
from models import Transformer  # noqa: E402

VOCABULARY = 256
policies = jax.checkpoint_policies
RECOMPUTE = {
    "none": "none",
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "full": "full",
}

rng = np.random.default_rng(0)
tokens = rng.integers(0, VOCABULARY, (args.batch, args.seq + 1), dtype=np.int32)
batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]).mean()


model = Transformer(
    vocab_size=VOCABULARY,
    seq_len=args.seq,
    dim=args.dim,
    num_heads=4,
    num_blocks=args.blocks,
)
pipes, states, memory = {}, {}, {}
for name, recompute in RECOMPUTE.items():
    pipe = pipes[name] = jpipe.Pipeline(
        model.layers(),
        loss=loss,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(args.stages, args.microbatches, ticks=args.ticks),
        recompute=recompute,
    )
    states[name] = pipe.init(jax.random.key(0), batch)
    memory[name] = pipe.memory(batch)
    states[name], _ = jax.block_until_ready(pipe.step(states[name], batch))

seconds: dict = {name: [] for name in pipes}
losses = {}
for _ in range(args.rounds):
    for name, pipe in pipes.items():
        for _ in range(args.steps):
            begin = time.perf_counter()
            states[name], metrics = jax.block_until_ready(pipe.step(states[name], batch))
            seconds[name].append(time.perf_counter() - begin)
        losses[name] = float(metrics["loss"])

difference = max(abs(value / losses["none"] - 1) for value in losses.values())
print(f"{vars(args)}\njax {jax.__version__}; losses differ by at most {difference:.1e}")
medians = {name: statistics.median(values) for name, values in seconds.items()}
print("| `recompute` | activations, MB | temporaries, MB | s per step | ratio to `none` |")
print("|---|---|---|---|---|")
for name, median in medians.items():
    activations = memory[name].activations / 1e6
    temporaries = memory[name].temporaries / 1e6
    ratio = median / medians["none"]
    print(f"| `{name}` | {activations:.2f} | {temporaries:.2f} | {median:.3f} | {ratio:.2f} |")
if args.out:
    figures = {name: dict(memory[name]._asdict(), seconds=medians[name]) for name in pipes}
    args.out.write_text(json.dumps(figures, indent=1))
