"""Samples a second of jpipe's schedules, in alternation with the programs of `peers/`.

    python benchmarks/throughput.py                       # workloads A to D, 5 rounds
    python benchmarks/throughput.py --workloads A --rounds 3 --only 1f1b-paired mpmd

Every program runs in a process of its own, one after the other, round after round, so that a noisy machine
disturbs all alike; the table gives medians over the rounds. All train the same model from the same weights on
the same data, and their losses are compared.
"""

import argparse
import json
import pathlib
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
}


def measure(program: str, workload: str, steps: int) -> dict:
    script, *flags = PROGRAMS[program].split()
    command = [sys.executable, str(HERE / script), *flags, *WORKLOADS[workload].split()]
    command += ["--steps", str(steps), "--warmup", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS)
    )
    parser.add_argument(
        "--only", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS)
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="timed steps a process")
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the figures as JSON"
    )
    args = parser.parse_args()
    figures: dict = {}
    for workload in args.workloads:
        runs: dict = {program: [] for program in args.only}
        for _ in range(args.rounds):
            for program in args.only:
                runs[program].append(measure(program, workload, args.steps))
        losses = {
            program: (rs[0]["first_loss"], rs[0]["last_loss"])
            for program, rs in runs.items()
        }
        reference = next(iter(losses.values()))
        agree = max(
            abs(a - b) / abs(b)
            for pair in losses.values()
            for a, b in zip(pair, reference)
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
                for o in ("mpmd", "unpipelined")
                if o in medians
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
