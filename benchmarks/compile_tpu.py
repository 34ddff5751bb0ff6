"""Compiles training steps for TPU pods, on a machine without one, and reads what the compiler made of them.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/compile_tpu.py                                     # all schedules for 8, 32 and 256 chips
    python benchmarks/compile_tpu.py --topologies v5e:2x4 --schedules one_f_one_b pipemare

Of a decoder transformer on a mesh of data x stage, a row for each schedule and topology:

- *predicted*: MB a chip of weights, versions, optimizer, gradients, everything in flight and the batch, as the table
  says, before anything is compiled; *compiled*: what the compiler reserves, its temporaries included;
- *seconds* to compile;
- *permutes*: how many collective permutes a tick has, and the MB that a chip sends by them;
- *under compute*: for each permute, the share of a tick's estimated cycles that the scheduled program puts between its
  start and its done; of a branch's alternatives the longest counts, of a loop one turn;
- *operations*: thousands of estimated cycles of a middle stage's forward, backward and, where it is split, weight
  gradient, counted likewise, so for one of its blocks.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import sys
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
TOPOLOGIES = {"v5e:2x4": (2, 4), "v5e:4x8": (4, 8), "v5e:16x16": (32, 8)}
"""Data x stage."""
STAGES_A_DEVICE = {"interleaved": 2, "zero_bubble_v": 2}
SCHEDULES = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
    "pipemare",
    "pipedream",
    "pipedream_2bw",
)
SIZES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}


class Transfer(NamedTuple):
    """A collective permute of the tick.

    Attributes:
      megabytes: that a chip sends.
      hidden: share of the tick's estimated cycles between its start and its done.
    """

    megabytes: float
    hidden: float


class Program:
    """The scheduled program that XLA prints, as far as it is read here."""

    def __init__(self, text: str):
        self.computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                lines = self.computations.setdefault(
                    line.removeprefix("ENTRY ").split()[0], []
                )
            elif line.startswith("  "):
                lines.append(line)
        self._cycles: dict[str, int] = {}

    def cycles(self, line: str) -> int:
        """The estimated cycles of an instruction and of what it calls."""
        found = re.search(r'"estimated_cycles":"(\d+)"', line)
        own = int(found[1]) if found else 0
        if " conditional(" in line:
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = branches[1].split(", ") if branches else []
            names += re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", line)
            return own + max(map(self.of_computation, names))
        if " while(" in line:
            return own + self.of_computation(re.search(r"body=(%[\w.\-]+)", line)[1])
        return own

    def of_computation(self, name: str) -> int:
        if name not in self._cycles:
            self._cycles[name] = sum(map(self.cycles, self.computations[name]))
        return self._cycles[name]

    def transfers(self) -> list[Transfer]:
        """The collective permutes, wherever they are; hidden is 0 of one in a branch of its own."""
        found = []
        for name, lines in self.computations.items():
            for i, line in enumerate(lines):
                if " collective-permute-start(" not in line:
                    continue
                start = (
                    line.split()[0] if line.split()[0] != "ROOT" else line.split()[1]
                )
                done = next(
                    j
                    for j in range(i + 1, len(lines))
                    if f"collective-permute-done({start})" in lines[j]
                )
                between = sum(map(self.cycles, lines[i + 1 : done]))
                whole = max(self.of_computation(name), 1)
                found.append(
                    Transfer(_bytes(line.split(" = ")[1]) / 1e6, between / whole)
                )
        return found

    def operations(self, stage: int) -> dict[str, int]:
        """The estimated cycles of a stage's forward, backward and weight gradient, of those that there are."""
        found: dict[str, int] = {}
        for line in itertools.chain(*self.computations.values()):
            scope = re.search(
                r"/(forward|backward|weight_grad)/stage([\d,-]+)/cond\"", line
            )
            if scope is None or " conditional(" not in line:
                continue
            ends = [list(map(int, part.split("-"))) for part in scope[2].split(",")]
            if any(end[0] <= stage <= end[-1] for end in ends):
                found[scope[1]] = found.get(scope[1], 0) + self.cycles(line)
        return found

    def copies(self, at_least: int) -> list[str]:
        """Copies of this many bytes or more, outside of the entry computation."""
        entry = next(reversed(self.computations))
        return [
            line.strip()
            for name, lines in self.computations.items()
            if name != entry
            for line in lines
            if re.search(r" copy(-start)?\(", line)
            and _bytes(line.split(" = ")[1]) >= at_least
        ]


def _bytes(shape: str) -> int:
    """Of the first array in a printed shape."""
    dtype, dims = re.search(r"(\w+)\[([\d,]*)\]", shape).groups()
    size = SIZES.get(dtype, 4)
    for n in dims.split(","):
        size *= int(n) if n else 1
    return size


def environment() -> None:
    """Lets libtpu load where there is no TPU. To be called before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def compile_one(args: argparse.Namespace, topology: str, name: str) -> dict:
    """A row of the table."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    import jpipe
    from models import Transformer

    data, stage = TOPOLOGIES[topology]
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    model = Transformer(
        seq_len=args.seq,
        dim=args.dim,
        num_heads=args.dim // 128,
        num_blocks=args.blocks_per_chip * stage - 2,
    )
    schedule = jpipe.schedules.get(name)(
        stage * STAGES_A_DEVICE.get(name, 1), args.microbatches
    )
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=lambda outputs, batch: optax.softmax_cross_entropy_with_integer_labels(
            outputs, batch["targets"]
        ).mean(),
        optimizer=optax.adamw(1e-3),
        schedule=schedule,
        mesh=jpipe.make_mesh(
            stage=stage, data=data, ring=schedule.ring, devices=devices
        ),
        compute_dtype=jnp.bfloat16,
        recompute=args.recompute,
    )
    rows = data * args.microbatches * args.microbatch_size
    tokens = jax.ShapeDtypeStruct((rows, args.seq), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    start = time.perf_counter()
    compiled = pipe.compile(batch)
    seconds = time.perf_counter() - start
    memory, analysis = pipe.memory(batch), compiled.memory_analysis()
    predicted = sum(
        getattr(memory, part)
        for part in ("weights", "optimizer", "gradients", "activations", "batch")
    )
    program = Program(compiled.as_text())
    transfers = program.transfers()
    return {
        "topology": topology,
        "chips": data * stage,
        "mesh": f"{data} x {stage}",
        "schedule": name,
        "parameters": sum(r.num_parameters for r in pipe.partition(batch)),
        "predicted_mb": predicted / 1e6,
        "compiled_mb": (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        )
        / 1e6,
        "temporaries_mb": analysis.temp_size_in_bytes / 1e6,
        "compile_s": seconds,
        "permutes": len(transfers),
        "sent_mb": sum(t.megabytes for t in transfers),
        "hidden": [round(t.hidden, 3) for t in transfers],
        "cycles": program.operations(schedule.num_stages // 2),
    }


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| chips (data x stage) | schedule | predicted, MB | compiled, MB | ratio | seconds | permutes | sent a tick, MB "
        "| under compute | operations |",
        "|---" * 10 + "|",
    ]
    for r in rows:
        hidden = ", ".join(f"{h:.0%}" for h in r["hidden"])
        cycles = ", ".join(f"{n / 1e3:,.0f}" for n in r["cycles"].values())
        lines.append(
            f"| {r['chips']} ({r['mesh']}) | `{r['schedule']}` | {r['predicted_mb']:,.0f} | {r['compiled_mb']:,.0f} "
            f"| {r['compiled_mb'] / r['predicted_mb']:.3f} | {r['compile_s']:.0f} | {r['permutes']} "
            f"| {r['sent_mb']:.1f} | {hidden} | {cycles} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--topologies", nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES)
    )
    parser.add_argument(
        "--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES)
    )
    parser.add_argument("--dim", type=int, default=512, help="heads are of 128")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--blocks-per-chip", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    args = parser.parse_args()
    environment()
    sys.path.insert(0, str(HERE.parent))
    rows = []
    for topology in args.topologies:
        for name in args.schedules:
            rows.append(compile_one(args, topology, name))
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
