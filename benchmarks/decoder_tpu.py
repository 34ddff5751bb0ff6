"""Compiles a training step of a decoder of 7 billion weights for TPU pods, on a machine without a TPU.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/decoder_tpu.py
    python benchmarks/decoder_tpu.py --redraw benchmarks/decoder_tpu.json  # the table of saved rows

Each row is a mesh of data x stage x fsdp x model. The model computes in bfloat16; weights, gradients and
the two moments of AdamW are float32, and the replicas along "data" share the moments (`shard_optimizer`).
A stage runs its forward again before its backward.

- *predicted*, *compiled*: GB of a chip, by the schedule's table before anything is compiled, and by the
  compiler, which reserves temporaries too. *limit*: what the chip has.
- *sent*: MB that a chip sends, by what they are: messages between stages (a tick), and by the axis along
  which collectives go: the weights that are gathered and gradients that are summed along "fsdp" and the
  activations along "model" (in one pass of each layer loop), and gradients and weights along "data" (an update).
- *window / transfer*: for each message, the estimated cycles between its start and its done, divided by the
  cycles that it takes on one link. From 1 on, compute hides it.
"""

import argparse
import collections
import json
import math
import pathlib
import re
import sys
import time
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.compile_tpu import CHIPS, Program, bytes_of_shape, environment  # noqa: E402


class Row(NamedTuple):
    """A mesh to compile for."""

    topology: str
    data: int
    stage: int
    fsdp: int
    model: int
    microbatches: int = 16


ROWS = (
    Row("v5e:8x8", data=2, stage=4, fsdp=4, model=2),
    Row("v5p:4x4x4", data=4, stage=4, fsdp=1, model=4),
    Row("v5e:16x16", data=8, stage=4, fsdp=4, model=2),
)
LIMIT_GB = {"v5e": 16.0, "v5p": 95.0}  # https://cloud.google.com/tpu/docs/v5e and v5p


def compile_one(args: argparse.Namespace, row: Row) -> dict:
    """Compiles one mesh. Returns a row of the table."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    import jpipe
    from models import Transformer

    def cross_entropy(outputs, batch):
        # XLA for TPUs cannot look labels up in a vocabulary that is split over "model", if rows are split too.
        labels = jax.nn.one_hot(batch["targets"], args.vocab)
        return optax.softmax_cross_entropy(outputs, labels).mean()

    devices = topologies.get_topology_desc(row.topology, platform="tpu").devices
    model = Transformer(
        vocab_size=args.vocab,
        seq_len=args.seq,
        dim=args.dim,
        num_heads=args.dim // 128,
        num_blocks=args.blocks,
    )
    schedule = jpipe.schedules.one_f_one_b(row.stage, row.microbatches)
    mesh = jpipe.make_mesh(
        stage=row.stage,
        data=row.data,
        fsdp=row.fsdp,
        model=row.model,
        devices=devices,
        ring=schedule.ring,
    )
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=cross_entropy,
        optimizer=optax.adamw(3e-4),
        schedule=schedule,
        mesh=mesh,
        compute_dtype=jnp.bfloat16,
        recompute=args.recompute,
        shard_optimizer=True,
    )
    rows = row.data * row.microbatches * row.fsdp * args.microbatch_rows
    tokens = jax.ShapeDtypeStruct((rows, args.seq), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    start = time.perf_counter()
    compiled = pipe.compile(batch)
    seconds = time.perf_counter() - start
    memory, analysis = pipe.memory(batch), compiled.memory_analysis()
    program = Program(compiled.as_text())
    transfers = program.transfers()
    predicted = sum(memory) - memory.padding - memory.temporaries - memory.host
    return {
        **row._asdict(),
        "chips": math.prod(row[1:5]),
        "parameters": sum(r.num_parameters for r in pipe.partition(batch)),
        "tokens": rows * args.seq,
        "memory": memory._asdict(),
        "predicted_gb": predicted / 1e9,
        "state_gb": analysis.argument_size_in_bytes / 1e9,
        "temporaries_gb": analysis.temp_size_in_bytes / 1e9,
        "compile_s": seconds,
        "sent_mb": {
            "messages": sum(t.megabytes for t in transfers),
            **Sent(compiled.as_text(), mesh).in_a_tick(),
        },
        # Gradients to their shares and weights from theirs: see `jpipe.stages.shares`.
        "update_mb": 2 * memory.gradients * (row.data - 1) / row.data / 1e6,
        "slack": [round(t.slack(CHIPS[row.topology[:3]]), 1) for t in transfers],
    }


class Sent:
    """MB that a chip sends in a tick by collectives, by the axes of the mesh that they go along.

    A loop of known length counts that often, another loop once. Of the branches of a conditional the one
    that sends most counts. What an update sends between replicas is not here: the length of its loops is not known.
    """

    def __init__(self, text: str, mesh):
        self._computations = Program(text).computations
        self._shape = tuple(mesh.shape.values())
        self._axes = tuple(mesh.shape)

    def in_a_tick(self) -> dict[str, float]:
        """Axes -> MB, of the loop over ticks, which is the loop that holds the most."""
        bodies = {
            re.search(r"body=(%[\w.\-]+)", line)[1]
            for lines in self._computations.values()
            for line in lines
            if " while(" in line
        }
        by_axes: collections.Counter = collections.Counter()
        for axes, megabytes in max(map(self._of, bodies), key=_total).values():
            by_axes[axes] += megabytes
        return dict(by_axes)

    def _of(self, name: str) -> dict[str, tuple[str, float]]:
        """Channel -> axes and MB, of the collectives of a computation and of all that it calls.

        The compiler writes one collective several times, as steps between those of the compute under it.
        """
        found: dict[str, tuple[str, float]] = {}
        scatters = "all-reduce-scatter" in name  # how TPUs write a reduce-scatter
        for line in self._computations[name]:
            called = re.findall(r"(?:calls|body)=(%[\w.\-]+)", line)
            if " conditional(" in line:
                branches = re.search(r"branch_computations=\{([^}]*)\}", line)
                names = branches[1].split(", ") if branches else []
                names += re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", line)
                found |= max(map(self._of, names), key=_total)
            for inner in called:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                times = int(trips[1]) if trips and " while(" in line else 1
                for channel, (axes, megabytes) in self._of(inner).items():
                    found[channel] = axes, times * megabytes
            kind = re.search(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\(", line)
            channel = re.search(r"channel_id=(\d+)", line)
            if kind and channel and "replica_groups=" in line:
                group = self._group(line)
                factor = 2 if kind[1] == "all-reduce" and not scatters else 1
                results = re.findall(r"\w+\[[\d,]*\]", line.split("(%")[0])
                num_bytes = max(map(bytes_of_shape, results))
                share = (len(group) - 1) / len(group)
                megabytes = factor * share * num_bytes / 1e6
                found[channel[1]] = self._along(group), megabytes
        return found

    def _group(self, line: str) -> list[int]:
        """The first group of devices of a collective."""
        explicit = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
        if explicit:
            return [int(n) for n in explicit[1].split(",")]
        iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
        if iota is None:
            return list(range(math.prod(self._shape)))
        dims = [int(n) for n in iota[3].split(",")]
        devices = np.arange(math.prod(dims)).reshape(dims)
        if iota[4]:
            devices = devices.transpose([int(n) for n in iota[4].split(",")])
        return devices.reshape(int(iota[1]), int(iota[2]))[0].tolist()

    def _along(self, group: list[int]) -> str:
        """The axes along which the devices of a group differ."""
        places = np.array([np.unravel_index(d, self._shape) for d in group])
        moved = (places != places[0]).any(axis=0)
        return " x ".join(np.array(self._axes)[moved]) or "none"


def _total(found: dict[str, tuple[str, float]]) -> float:
    return sum(megabytes for _, megabytes in found.values())


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| chips | data x stage x fsdp x model | state predicted, GB | state compiled, GB | ratio | temporaries, GB | "
        "limit, GB | sent in a tick, MB: messages | along fsdp | along model | sent in an update along data, MB | "
        "window / transfer | compiled in, s |",
        "|---" * 13 + "|",
    ]
    for r in rows:
        sent, kind = r["sent_mb"], r["topology"][:3]
        lines.append(
            f"| {r['chips']} {kind} | {r['data']} x {r['stage']} x {r['fsdp']} x {r['model']} | "
            f"{r['predicted_gb']:.2f} | {r['state_gb']:.2f} | {r['state_gb'] / r['predicted_gb']:.3f} | "
            f"{r['temporaries_gb']:.2f} | {LIMIT_GB[kind]:.0f} | {sent['messages']:.1f} | {sent.get('fsdp', 0):,.0f} | "
            f"{sent.get('model', 0):,.0f} | {r['update_mb']:,.0f} | {min(r['slack']):.0f} | {r['compile_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=4096, help="a head has 128")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--microbatch-rows", type=int, default=1, help="of a device")
    parser.add_argument("--rows", type=int, nargs="+", help="only these rows, from 0")
    parser.add_argument("--recompute", default="full", choices=["none", "full"])
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    parser.add_argument("--redraw", type=pathlib.Path, help="only print the table of such a file")
    args = parser.parse_args()
    if args.redraw:
        print(table(json.loads(args.redraw.read_text())))
        return
    environment()
    chosen = range(len(ROWS)) if args.rows is None else args.rows
    rows = []
    for i in chosen:
        rows.append(compile_one(args, ROWS[i]))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
