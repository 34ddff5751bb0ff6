"""Compiles training steps for TPU pods on a machine without a TPU, and reads the compiled programs.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/compile_tpu.py        # all schedules for 8, 32 and 256 chips
    python benchmarks/compile_tpu.py --redraw benchmarks/compile_tpu.json  # the table of saved rows
    python benchmarks/compile_tpu.py --topologies v5e:2x4 --schedules one_f_one_b pipemare

The model is a decoder transformer on a mesh of data x stage. Each schedule and topology has one
row:

- *predicted*: MB per chip of weights, weight versions, optimizer state, gradients, activations in
  flight and the batch, computed from the schedule's table before anything is compiled.
- *compiled*: MB per chip that the compiler reserves, including its temporaries.
- *seconds*: time of the compilation.
- *permutes*: number of collective permutes in a tick.
- *sent*: MB that a chip sends by the permutes of a tick.
- *under compute*: for each permute, the share of the tick's estimated cycles between the start and
  the done of the permute. These are the compiler's estimates, not measurements. Of the branches of
  a conditional the longest counts, and of a loop one iteration.
- *window / transfer*: for each permute, the estimated cycles between its start and its done, divided
  by the cycles that its bytes take on one link. From 1 on, compute hides the transfer.
- *operations*: thousands of estimated cycles of a middle stage's forward, backward and, where the
  schedule splits it, weight gradient. A loop over blocks counts as one iteration, so these are the
  cycles of one block.

With `--compress-messages` or `--compress-gradients` the saved rows also have `exchanged_mb`: MB of the result of every
all-gather and all-reduce above 1 KB. Those of compressed gradients stand in loops over the weights of one shape, and
count once for each shape.

With `--slices 2` the stages lie on two slices of the topology, and `--message-ticks 2` gives messages between these a
tick more to arrive. They are no permutes of the tick: `hidden_between_slices` has the share of the tick's estimated
cycles between the start and the done of each.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

from checkout import commit

HERE = pathlib.Path(__file__).parent
# Topology -> mesh, as (data, stage).
TOPOLOGIES = {
    "v5e:2x4": (2, 4),
    "v5p:2x2x2": (2, 4),
    "v5e:4x8": (4, 8),
    "v5e:16x16": (32, 8),
}
STAGES_PER_DEVICE = {"interleaved": 2, "dual_pipe_v": 2, "zero_bubble_v": 2}
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
# Bytes per number of XLA's types.
SIZES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}


class Chip(NamedTuple):
    """A generation of TPUs, from https://cloud.google.com/tpu/docs/v5e and v5p.

    Attributes:
      link: bytes per second that one link carries one way: the bidirectional bandwidth of a chip,
        divided by 2 and by its number of links.
      clock: cycles per second: the peak of bfloat16 products, divided by 2 * 128 * 128 for each
        matrix unit.
    """

    link: float
    clock: float


CHIPS = {
    "v5e": Chip(400e9 / 2 / 4, 197e12 / (4 * 2 * 128 * 128)),
    "v5p": Chip(1200e9 / 2 / 6, 459e12 / (8 * 2 * 128 * 128)),
}


class Transfer(NamedTuple):
    """A collective permute of the tick.

    Attributes:
      megabytes: MB that a chip sends.
      hidden: share of the tick's estimated cycles between its start and its done.
      window: estimated cycles between its start and its done.
    """

    megabytes: float
    hidden: float
    window: int

    def slack(self, chip: Chip) -> float:
        """How many times the transfer fits between its start and its done."""
        return self.window / (self.megabytes * 1e6 / chip.link * chip.clock)


class Program:
    """The text of a scheduled XLA program, as computations with their instructions."""

    def __init__(self, text: str):
        self.computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                lines = self.computations.setdefault(line.removeprefix("ENTRY ").split()[0], [])
            elif line.startswith("  "):
                lines.append(line)
        self._cycles: dict[str, int] = {}

    def cycles(self, line: str) -> int:
        """The estimated cycles of an instruction, including the computations that it calls."""
        estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
        cycles = int(estimate[1]) if estimate else 0
        if " conditional(" in line:
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = branches[1].split(", ") if branches else []
            names += re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", line)
            return cycles + max(map(self.of_computation, names))
        if " while(" in line:
            return cycles + self.of_computation(re.search(r"body=(%[\w.\-]+)", line)[1])
        return cycles

    def of_computation(self, name: str) -> int:
        """The estimated cycles of all instructions of a computation."""
        if name not in self._cycles:
            self._cycles[name] = sum(map(self.cycles, self.computations[name]))
        return self._cycles[name]

    def transfers(self) -> list[Transfer]:
        """The collective permutes of all computations.

        `hidden` is 0 for a permute that is alone in its branch.
        """
        transfers = []
        for name, lines in self.computations.items():
            for i, line in enumerate(lines):
                if " collective-permute-start(" not in line:
                    continue
                start = line.split()[0] if line.split()[0] != "ROOT" else line.split()[1]
                done = next(j for j in range(i + 1, len(lines)) if f"collective-permute-done({start})" in lines[j])
                between = sum(map(self.cycles, lines[i + 1 : done]))
                total = max(self.of_computation(name), 1)
                transfers.append(
                    Transfer(
                        bytes_of_shape(line.split(" = ")[1]) / 1e6,
                        between / total,
                        between,
                    )
                )
        return transfers

    def between_slices(self) -> list[float]:
        """Of each message above 1 KB from another slice: the share of the tick's cycles between its start and done."""
        shares = []
        for name, lines in self.computations.items():
            for i, line in enumerate(lines):
                if " recv(" not in line or bytes_of_shape(line.split(" = ")[1]) <= 1024:
                    continue
                done = next(j for j in range(i + 1, len(lines)) if f" recv-done({line.split()[0]})" in lines[j])
                shares.append(sum(map(self.cycles, lines[i + 1 : done])) / max(self.of_computation(name), 1))
        return shares

    def exchanged(self) -> list[float]:
        """MB of the results of all-gathers and all-reduces above 1 KB."""
        pattern = r" = (.*?) (?:all-gather|all-reduce)(?:-start)?\("
        lines = [line for lines in self.computations.values() for line in lines]
        found = [re.search(pattern, line) for line in lines]
        sizes = [bytes_of_shape(match[1]) for match in found if match]
        return sorted(round(size / 1e6, 4) for size in sizes if size > 1024)

    def operations(self, stage: int) -> dict[str, int]:
        """The estimated cycles of a stage's "forward", "backward" and, if split, "weight_grad"."""
        operations: dict[str, int] = {}
        for line in itertools.chain(*self.computations.values()):
            scope = re.search(r"/(forward|backward|weight_grad)/stage([\d,-]+)/cond\"", line)
            if scope is None or " conditional(" not in line:
                continue
            # The scope names the stages of the branch as ranges, such as "1-3,5".
            ranges = [list(map(int, part.split("-"))) for part in scope[2].split(",")]
            if any(stages[0] <= stage <= stages[-1] for stages in ranges):
                name = scope[1]
                operations[name] = operations.get(name, 0) + self.cycles(line)
        return operations

    def copies(self, at_least: int) -> list[str]:
        """Copies of `at_least` bytes or more, outside the entry computation."""
        entry = next(reversed(self.computations))
        return [
            line.strip()
            for name, lines in self.computations.items()
            if name != entry
            for line in lines
            if re.search(r" copy(-start)?\(", line) and bytes_of_shape(line.split(" = ")[1]) >= at_least
        ]


def bytes_of_shape(shape: str) -> int:
    """The bytes of the first array in a printed shape.

    Example:
      >>> bytes_of_shape("(bf16[4,1000]{1,0}, u32[]) collective-permute-start(%a)")
      8000
    """
    dtype, dims = re.search(r"(\w+)\[([\d,]*)\]", shape).groups()
    size = SIZES.get(dtype, 4)
    for n in dims.split(","):
        size *= int(n) if n else 1
    return size


def reserved_bytes(analysis) -> int:
    """What a compiled program reserves on a chip, from its `memory_analysis()`: a donated argument and its result count
    once.
    """
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def environment() -> None:
    """Lets libtpu load on a machine without a TPU. Call it before JAX is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def compile_one(args: argparse.Namespace, topology: str, name: str) -> dict:
    """Compiles one schedule for one topology. Returns a row of the table."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    import jpipe
    from models import Transformer

    data, stage = TOPOLOGIES[topology]
    slices = {"num_slices": args.slices} if args.slices > 1 else {}
    devices = topologies.get_topology_desc(topology, platform="tpu", **slices).devices
    stage *= args.slices
    model = Transformer(
        seq_len=args.seq,
        dim=args.dim,
        num_heads=args.dim // 128,
        num_blocks=args.blocks_per_chip * stage - 2,
    )
    boundary = tuple(args.message_ticks if d % (stage // args.slices) == 0 else 1 for d in range(1, stage))
    ticks = args.message_ticks if args.slices == 1 else boundary
    num_stages = stage * STAGES_PER_DEVICE.get(name, 1)
    schedule = jpipe.schedules.get(name)(num_stages, args.microbatches, message_ticks=ticks)
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=lambda outputs, batch: optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"]).mean(),
        optimizer=optax.adamw(1e-3),
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=stage, data=data, ring=schedule.ring, devices=devices),
        compute_dtype=jnp.bfloat16,
        recompute=args.recompute,
        compress_messages=_compressor(args.compress_messages),
        compress_gradients=_compressor(args.compress_gradients),
    )
    rows = data * args.microbatches * args.microbatch_size
    tokens = jax.ShapeDtypeStruct((rows, args.seq), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    start = time.perf_counter()
    compiled = pipe.compile(batch)
    seconds = time.perf_counter() - start
    memory, analysis = pipe.memory(batch), compiled.memory_analysis()
    predicted = sum(getattr(memory, part) for part in ("weights", "optimizer", "gradients", "activations", "batch"))
    program = Program(compiled.as_text())
    transfers = program.transfers()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(HERE.parent),
        "jax": jax.__version__,
        "topology": topology,
        "chips": data * stage,
        "mesh": f"{data} x {stage}",
        "schedule": name,
        "parameters": sum(r.num_parameters for r in pipe.partition(batch)),
        "predicted_mb": predicted / 1e6,
        "compiled_mb": reserved_bytes(analysis) / 1e6,
        "temporaries_mb": analysis.temp_size_in_bytes / 1e6,
        "compile_s": seconds,
        "permutes": len(transfers),
        "sent_mb": sum(t.megabytes for t in transfers),
        "hidden": [round(t.hidden, 3) for t in transfers],
        "hidden_between_slices": [round(share, 3) for share in program.between_slices()],
        "slack": [round(t.slack(CHIPS[topology[:3]]), 1) for t in transfers],
        "cycles": program.operations(schedule.num_stages // 2),
        "exchanged_mb": program.exchanged(),
    }


def _compressor(text: str | None) -> Any:
    from jpipe.compress import parse

    return None if text is None else parse(text)


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| chips | data x stage | schedule | predicted, MB | compiled, MB | ratio | seconds | permutes | sent per "
        "tick, MB | under compute | window / transfer | operations |",
        "|---" * 12 + "|",
    ]
    for r in rows:
        hidden = ", ".join(f"{h:.0%}" for h in r["hidden"])
        slack = ", ".join(f"{x:.0f}" for x in r["slack"])
        cycles = ", ".join(f"{n / 1e3:,.0f}" for n in r["cycles"].values())
        lines.append(
            f"| {r['topology'][:3]} | {r['mesh']} | `{r['schedule']}` | {r['predicted_mb']:,.0f} | "
            f"{r['compiled_mb']:,.0f} "
            f"| {r['compiled_mb'] / r['predicted_mb']:.3f} | {r['compile_s']:.0f} | {r['permutes']} "
            f"| {r['sent_mb']:.1f} | {hidden} | {slack} | {cycles} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES))
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--dim", type=int, default=512, help="model dimension; a head has 128")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--blocks-per-chip", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--message-ticks", type=int, default=1, help="ticks of messages; with slices, of those between")
    parser.add_argument("--slices", type=int, default=1, help="slices of the topology, each with a part of the stages")
    for what in ("messages", "gradients"):
        parser.add_argument(f"--compress-{what}", help="a compressor, such as quantize:bits=8")
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    parser.add_argument("--redraw", type=pathlib.Path, help="only print the table of such a file")
    args = parser.parse_args()
    if args.redraw:
        print(table(json.loads(args.redraw.read_text())))
        return
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
