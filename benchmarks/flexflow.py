"""FlexFlow's six models on its two clusters, simulated: data parallelism, experts and the strategy that a search finds.

    python benchmarks/flexflow.py --budget 20
    python benchmarks/flexflow.py --models alexnet nmt --machines k80-16 --budget 60 --json flexflow.json

FlexFlow's paper (arXiv:1807.05358, section 8) has a cluster of 4 servers of 4 P100s and one of 16 servers of 4 K80s,
and reports the throughput of AlexNet, Inception-v3, ResNet-101, a text classifier of 4 LSTM layers of 1024 units
(RNNTC), a language model of 2 of 2048 units (RNNLM), and a translator of 2 + 2 of 1024 units with attention (NMT), with
40 steps each. Here every device has 64 samples, or all devices together as many as `--batch` says. About ten steps of a
recurrent layer are one operator, as in FlexFlow's program. The classifier has a vocabulary of 20,000 words, the
language model 10,000 (Penn Treebank), the translator 32,000. Costs are those of data sheets, not measured.

The budget is seconds of one search; the pass that lowers the bytes at its end may take a quarter more. The memory of a
device is not limited: the JSON says how much each strategy needs.
"""

import argparse
import datetime
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from jpipe import soap
from jpipe.layers.as_layers import as_layers
from jpipe.layers.loss import Loss
from jpipe.soap.layers import layers_graph
from models import (
    AlexNet,
    Inception,
    RecurrentClassifier,
    RecurrentLM,
    RecurrentTranslation,
    ResNet,
)

STEPS = 40
SAMPLES = 64  # per device
IMAGES = {"alexnet": 224, "resnet101": 224, "inception": 299}
MODELS = {
    "alexnet": AlexNet(dropout=0.0),
    "inception": Inception(dropout=0.0),
    "resnet101": ResNet.of_depth(101),
    "rnntc": RecurrentClassifier(vocab_size=20_000, embed_dim=1024, dim=1024, num_layers=4),
    "rnnlm": RecurrentLM(vocab_size=10_000, embed_dim=2048, dim=2048, num_layers=2),
    "nmt": RecurrentTranslation(dropout=0.0),
}
MACHINES = {
    f"{name}-{count}": (preset, count)
    for name, preset, counts in (
        ("p100", soap.p100_cluster, (4, 16)),
        ("k80", soap.k80_cluster, (4, 16, 64)),
    )
    for count in counts
}


def graph_of(name: str, batch_size: int) -> soap.OperatorGraph:
    """The operator graph of a training step of one of the six."""

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), jnp.int32)

    if name in IMAGES:
        shape = batch_size, IMAGES[name], IMAGES[name], 3
        inputs = jax.ShapeDtypeStruct(shape, jnp.float32)
        labels = integers()
    elif name == "nmt":
        inputs = {"source": integers(STEPS), "target": integers(STEPS)}
        labels = integers(STEPS)
    else:
        inputs = integers(STEPS)
        labels = integers() if name == "rnntc" else integers(STEPS)
    batch = {"inputs": inputs, "labels": labels}
    # A step of a recurrent layer is about 25 equations: four turns of ten steps each.
    # Batch norm of a device alone, as FlexFlow's, sends nothing: it is simulated as that of evaluation.
    model = MODELS[name]
    return layers_graph(
        as_layers(model.layers()),
        Loss.of(model.loss(), True),
        batch,
        evaluated=True,
        max_equations=99,
    ).graph


def row_of(name: str, machine: soap.Machine, batch_size: int, budget: float, seed: int) -> dict:
    """Seconds and traffic of the strategies of one model on one machine."""
    began = time.perf_counter()
    count = machine.num_devices
    graph = graph_of(name, batch_size)
    traced = time.perf_counter() - began
    found = soap.search(graph, machine, budget_seconds=budget, seed=seed, memory_limit=1e15)
    strategies = soap.default_starts(graph, count)
    expert = min(soap.EXPERTS, key=lambda each: found.starts[each])
    simulated = {
        "data": soap.simulate(graph, machine, strategies["data_parallel"]),
        "expert": soap.simulate(graph, machine, strategies[expert]),
        "best": found.simulated,
    }
    row = {
        "model": name,
        "devices": count,
        "batch_size": batch_size,
        "operators": len(graph.operators),
        "expert": expert,
        "proposals": found.proposals,
        "search_seconds": found.elapsed,
        "trace_seconds": traced,
        "is_local_optimum": found.is_local_optimum,
    }
    for kind, each in simulated.items():
        row[f"{kind}_samples_per_second"] = batch_size / each.seconds
        row[f"{kind}_sent_bytes"] = each.sent_bytes
        row[f"{kind}_memory_bytes"] = max(each.memory_bytes)
    return row


def line_of(machine: str, row: dict) -> str:
    """A line of the table."""
    speeds = [row[f"{kind}_samples_per_second"] for kind in ("data", "expert", "best")]
    sent = [row[f"{kind}_sent_bytes"] / 1e9 for kind in ("data", "expert", "best")]
    cells = [
        machine,
        row["model"],
        str(row["operators"]),
        *(f"{speed:,.0f}" for speed in speeds),
        f"{speeds[2] / speeds[0]:.2f}",
        f"{speeds[2] / max(speeds[:2]):.2f}",
        " / ".join(f"{each:.2f}" for each in sent),
        str(row["proposals"]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--budget", type=float, default=20.0, help="seconds")
    parser.add_argument(
        "--batch",
        type=int,
        help=f"samples of all devices; {SAMPLES} a device if left out",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the results")
    args = parser.parse_args()
    print(
        "| machine | model | operators | data, samples/s | expert | best | best / data | best / better of both "
        "| GB sent: data / expert / best | proposals |"
    )
    print("|" + "---|" * 10, flush=True)
    rows = {}
    for machine_name in args.machines:
        preset, count = MACHINES[machine_name]
        machine = preset().with_devices(count)
        for name in args.models:
            batch_size = args.batch or SAMPLES * count
            row = row_of(name, machine, batch_size, args.budget, args.seed)
            rows[f"{machine_name} {name}"] = row
            print(line_of(machine_name, row), flush=True)
            if args.json:
                content = {
                    "date": datetime.date.today().isoformat(),
                    "budget_seconds": args.budget,
                    "seed": args.seed,
                    "rows": rows,
                }
                pathlib.Path(args.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
