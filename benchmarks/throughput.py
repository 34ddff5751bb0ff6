"""Samples per second of jpipe's schedules, in alternation with the programs of `peers/`.

    python benchmarks/throughput.py                       # workloads A to D, 5 rounds
    python benchmarks/throughput.py --workloads A --rounds 3 --only 1f1b-paired mpmd

Each run is a separate process. The programs run one after the other, round after round, so that
other load on the machine disturbs all programs alike. The table gives medians over the rounds. All
programs train the same model from the same weights on the same data, and the losses of the
synchronous programs are compared.

Two programs are upper bounds for asynchronous schedules. Both run the engine with one stage, so
without a pipeline.

- `limit` runs one process per core at the same time, each pinned to its core, and sums their
  samples per second.
- `replicas` runs one process with two devices. Each device has its own batch, and the devices wait
  for each other once per step, at the update. It shows how much of `limit` one process can reach.
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
    """Runs a program. Returns its report: samples per second, losses, bytes, compile seconds.

    Args:
      program: script, relative to this folder, and flags.
      workload: flags. The flags of the program override them.
      steps: number of timed steps.
      python: the Python interpreter that runs the program.
      pinned: run one copy per core at the same time, each pinned to its core, and sum their speeds.

    Returns:
      The JSON object that the program printed (of the first copy, with the summed speed).

    Raises:
      Failed: the program ended with an error, its loss is not finite, or it took more than ten
        minutes.
    """
    script, *flags = program.split()
    command = [str(python), str(HERE / script), *workload.split(), *flags]
    command += ["--steps", str(steps), "--warmup", "3", "--json"]
    start = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if pinned:
        cores = sorted(os.sched_getaffinity(0))
        copies = [start(["taskset", "-c", str(core), *command], start_new_session=True) for core in cores]
    else:
        copies = [start(command, start_new_session=True)]
    reports = []
    for copy in copies:
        try:
            output, errors = copy.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(copy.pid, signal.SIGKILL)
            raise Failed("did not end within ten minutes") from None
        printed = [line for line in output.splitlines() if line.startswith("{")]
        if copy.returncode or not printed:
            lines = [line for line in errors.splitlines() if line.strip()]
            raise Failed(lines[-1][:200] if lines else f"exit {copy.returncode}")
        reports.append(json.loads(printed[-1]))
        if not math.isfinite(reports[-1]["last_loss"]):
            raise Failed("the loss is not finite")
    speed = sum(report["samples_per_s"] for report in reports)
    return reports[0] | {"samples_per_s": speed}


def flags(doc: str, workloads: dict, programs: dict, rounds: int, steps: int) -> argparse.ArgumentParser:
    """The flags that select programs and workloads. `rounds` and `steps` are defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(workloads), choices=list(workloads))
    parser.add_argument("--only", nargs="+", default=list(programs), choices=list(programs))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps, help="timed steps per process")
    return parser


def main() -> None:
    parser = flags(__doc__, WORKLOADS, PROGRAMS, rounds=5, steps=20)
    parser.add_argument("--out", type=pathlib.Path, help="also write the medians as JSON")
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
            program: (rs[0]["first_loss"], rs[0]["last_loss"]) for program, rs in runs.items() if program in SYNCHRONOUS
        }
        difference = max(
            (abs(a - b) / abs(b) for pair in losses.values() for a, b in zip(pair, next(iter(losses.values())))),
            default=0.0,
        )
        medians = {program: statistics.median(r["samples_per_s"] for r in rs) for program, rs in runs.items()}
        figures[workload] = medians
        print(f"{workload}: {WORKLOADS[workload]}   (losses differ by at most {difference:.1e})")
        for program, median in medians.items():
            ratios = {other: median / medians[other] for other in COMPARED if other in medians and other != program}
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
