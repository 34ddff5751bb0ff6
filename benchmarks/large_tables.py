"""Seconds and memory that large tables take on the host, before anything is compiled.

    python benchmarks/large_tables.py                                # 64 stages, 2,048 microbatches
    python benchmarks/large_tables.py --stages 16 --microbatches 256
    python benchmarks/large_tables.py --only pipedream

For each schedule a process of its own builds the table, which checks it, counts its facts, lowers it, and makes the
rows of scalars that the compiled step takes. Seconds are CPU seconds. Memory is the most that the process holds beyond
what it holds after its imports.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import subprocess
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

TABLES = {
    "gpipe": ("gpipe", {}),
    "1f1b, paired": ("one_f_one_b", {"ticks": "paired"}),
    "1f1b, unit": ("one_f_one_b", {"ticks": "unit"}),
    "interleaved, paired": ("interleaved", {"ticks": "paired"}),
    "interleaved, unit": ("interleaved", {"ticks": "unit"}),
    "zero_bubble_h1": ("zero_bubble_h1", {}),
    "zero_bubble_h2": ("zero_bubble_h2", {}),
    "zero_bubble_v": ("zero_bubble_v", {}),
    "pipedream, paired": ("pipedream", {"ticks": "paired"}),
    "pipedream, unit": ("pipedream", {"ticks": "unit"}),
    "pipedream, vertical sync": ("pipedream", {"vertical_sync": True}),
    "pipedream_2bw": ("pipedream_2bw", {}),
    "pipemare": ("pipemare", {}),
    "forward_only": ("forward_only", {}),
    "gpipe, copies": ("gpipe", {"replicas": 2}),
    "pipemare, copies, paired": ("pipemare", {"replicas": 2, "ticks": "paired"}),
    "1f1b, copies, unit": ("one_f_one_b", {"replicas": 2, "ticks": "unit"}),
    "pipemare, copies, unit": ("pipemare", {"replicas": 2, "ticks": "unit"}),
}


def measure(name: str, num_stages: int, num_microbatches: int) -> dict:
    """Seconds of each part, and the peak of memory, of one table in this process."""
    import numpy as np

    from jpipe import schedules
    from jpipe.lowering.lower import lower
    from jpipe.lowering.scalars import scalar_table

    warnings.simplefilter("ignore")
    builder, options = TABLES[name]
    if "replicas" in options:  # half of the stages have two copies each
        two = options["replicas"]
        options = {**options, "replicas": (two, 1) * (num_stages // 2)}
    seconds = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def timed(part, function):
        begin = time.process_time()
        result = function()
        seconds[part] = time.process_time() - begin
        return result

    def scalars(lowered):
        constants = {("program",): np.zeros(num_stages, int)}
        of_operation = dict.fromkeys(lowered.operations, constants)
        return scalar_table(lowered, of_operation, lowered.rows, newest=False)

    build = schedules.get(builder)
    table = timed("build", lambda: build(num_stages, num_microbatches, **options))
    timed("check", lambda: dataclasses.replace(table).check())
    timed("facts", table.facts)
    lowered = timed("lower", lambda: lower(table))
    timed("scalars", lambda: scalars(lowered))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ticks": table.num_ticks, **seconds, "megabytes": (after - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2048)
    parser.add_argument("--only", nargs="+", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--measure", choices=TABLES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = args.stages, args.microbatches
    if args.measure:
        print(json.dumps(measure(args.measure, *sizes)))
        return
    parts = ["build", "check", "facts", "lower", "scalars"]
    print(f"{args.stages} stages, {args.microbatches} microbatches; CPU seconds")
    print(f"| table | ticks | {' | '.join(parts)} | all | MB |")
    print("|---|---|" + "---|" * (len(parts) + 2))
    for name in TABLES:
        if args.only and not any(name.startswith(prefix) for prefix in args.only):
            continue
        counts = ["--stages", f"{sizes[0]}", "--microbatches", f"{sizes[1]}"]
        command = [sys.executable, __file__, "--measure", name, *counts]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(run.stdout)
        seconds = [row[part] for part in parts]
        cells = [f"{row['ticks']:,}", *(f"{s:.2f}" for s in [*seconds, sum(seconds)])]
        print(f"| {name} | {' | '.join(cells)} | {row['megabytes']:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
