"""Samples a second of jpipe's schedules, in alternation with the programs of `peers/`.

    python benchmarks/throughput.py                       # workloads A to D, 5 rounds
    python benchmarks/throughput.py --workloads A --rounds 3 --only 1f1b-paired mpmd

Every program runs in a process of its own, one after the other, round after round, so that a noisy machine
disturbs all alike; the table gives medians over the rounds. All train the same model from the same weights on
the same data, and the losses of the synchronous ones are compared.

`limit` is what asynchronous schedules are held against: the same engine with one stage and so without a pipeline, in
one process a core, each pinned to its core, all at the same time, their samples a second summed. `replicas` says how
much of the way there one process can go: the same one stage on two devices of a process, each with a batch of its own,
which meet once a step, at the update.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
WORKLOADS = {
    "A": "--model mlp --dim 256 --layers 8 --batch 256 --microbatches 8 --stages 2",
    "B": "--model mlp --dim 256 --layers 8 --batch 256 --microbatches 8 --stages 4",
    "C": "--model mlp --dim 64 --layers 8 --batch 128 --microbatches 16 --stages 4",
    "D": "--model transformer --dim 128 --layers 8 --seq 64 --batch 32 --microbatches 8 --stages 2",
}
PROGRAMS = {
    "gpipe": "bench_jpipe.py --schedule gpipe",
    "1f1b-paired": "bench_jpipe.py --schedule one_f_one_b --ticks paired",
    "1f1b-unit": "bench_jpipe.py --schedule one_f_one_b --ticks unit",
    "mpmd": "peers/bench_jax_mpmd.py --order 1f1b",
    "unpipelined": "peers/bench_jax_ref.py",
    "whole-batch": "peers/bench_jax_ref.py --microbatches 1",
    "pipemare": "bench_jpipe.py --schedule pipemare --ticks paired",
    "pipemare-unit": "bench_jpipe.py --schedule pipemare --ticks unit",
    "pipedream": "bench_jpipe.py --schedule pipedream --ticks paired",
    "2bw": "bench_jpipe.py --schedule pipedream_2bw --ticks paired",
    "replicas": "bench_jpipe.py --schedule pipemare --ticks paired --stages 1 --data 2",
    "limit": "bench_jpipe.py --schedule pipemare --ticks paired --stages 1",
}
SYNCHRONOUS = (
    "gpipe",
    "1f1b-paired",
    "1f1b-unit",
    "mpmd",
    "unpipelined",
    "whole-batch",
)
COMPARED = ("mpmd", "unpipelined", "whole-batch", "replicas", "limit")


class Failed(Exception):
    """A program ended with an error; the message is its last line."""


def measure(
    program: str,
    workload: str,
    steps: int,
    python: str | os.PathLike = sys.executable,
    pinned: bool = False,
) -> dict:
    """What a program reports.

    Args:
      program: script, from this folder, and flags.
      workload: flags, which those of the program override.
      steps: timed steps.
      python: whose packages it runs with.
      pinned: runs one copy a core, each pinned to its core, at the same time, and sums their speeds.

    Raises:
      Failed: if it ends with an error, its loss is not finite, or it takes more than ten minutes.
    """
    script, *flags = program.split()
    command = [str(python), str(HERE / script), *workload.split(), *flags]
    command += ["--steps", str(steps), "--warmup", "3", "--json"]
    start = functools.partial(
        subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if pinned:
        cores = sorted(os.sched_getaffinity(0))
        copies = [
            start(["taskset", "-c", str(core), *command], start_new_session=True)
            for core in cores
        ]
    else:
        copies = [start(command, start_new_session=True)]
    reports = []
    for copy in copies:
        try:
            output, errors = copy.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(copy.pid, signal.SIGKILL)
            raise Failed("did not end within ten minutes") from None
        found = [line for line in output.splitlines() if line.startswith("{")]
        if copy.returncode or not found:
            lines = [line for line in errors.splitlines() if line.strip()]
            raise Failed(lines[-1][:200] if lines else f"exit {copy.returncode}")
        reports.append(json.loads(found[-1]))
        if not math.isfinite(reports[-1]["last_loss"]):
            raise Failed("the loss stopped being finite")
    speed = sum(report["samples_per_s"] for report in reports)
    return reports[0] | {"samples_per_s": speed}


def flags(
    doc: str, workloads: dict, programs: dict, rounds: int, steps: int
) -> argparse.ArgumentParser:
    """The flags that say what is run; numbers are defaults."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", default=list(workloads), choices=list(workloads)
    )
    parser.add_argument(
        "--only", nargs="+", default=list(programs), choices=list(programs)
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--steps", type=int, default=steps, help="timed steps a process"
    )
    return parser


def main() -> None:
    parser = flags(__doc__, WORKLOADS, PROGRAMS, rounds=5, steps=20)
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the figures as JSON"
    )
    args = parser.parse_args()
    figures: dict = {}
    for workload in args.workloads:
        runs: dict = {program: [] for program in args.only}
        for _ in range(args.rounds):
            for program in args.only:
                runs[program].append(
                    measure(
                        PROGRAMS[program],
                        WORKLOADS[workload],
                        args.steps,
                        pinned=program == "limit",
                    )
                )
        losses = {
            program: (rs[0]["first_loss"], rs[0]["last_loss"])
            for program, rs in runs.items()
            if program in SYNCHRONOUS
        }
        agree = max(
            (
                abs(a - b) / abs(b)
                for pair in losses.values()
                for a, b in zip(pair, next(iter(losses.values())))
            ),
            default=0.0,
        )
        medians = {
            program: statistics.median(r["samples_per_s"] for r in rs)
            for program, rs in runs.items()
        }
        figures[workload] = medians
        print(f"{workload}: {WORKLOADS[workload]}   (losses agree to {agree:.1e})")
        for program, median in medians.items():
            ratios = {
                o: medians[program] / medians[o]
                for o in COMPARED
                if o in medians and o != program
            }
            spread = [r["samples_per_s"] for r in runs[program]]
            print(
                f"  {program:14s} {median:9.1f} samples/s  [{min(spread):.0f} .. {max(spread):.0f}]  "
                + "  ".join(f"x{ratio:.2f} {other}" for other, ratio in ratios.items())
                + f"  compile {statistics.median(r['compile_s'] for r in runs[program]):.1f} s"
                + f"  rss {runs[program][0]['peak_rss_mb_max']:.0f} MB",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
