"""Times one GPU: a pipeline of one device against the plain jitted step.

    pip install "jax[cuda13]" -e .          # once
    python benchmarks/gpu.py                # under 10 minutes on one H100 or H200
    python benchmarks/gpu.py --rehearse     # a small model on CPU, in two minutes
    python benchmarks/gpu.py --redraw       # the table of the saved rows

The model is a decoder-only transformer of 370 million parameters. It computes in bfloat16, keeps
its weights in float32 and trains with AdamW. The plain step is a jitted, donated scan over the same
microbatches. The scan sums the gradients, and the optimizer updates once.

Rows:

- `plain`: the plain step alone;
- `one-stage`: 1F1B with one stage, first alone, then against the plain step in alternating rounds;
- every other schedule that fits one device, alone.

Each row is a process of its own, because JAX reports the peak memory of a whole process. The
processes share a compilation cache. A row is saved as soon as it is done. A row that fails says
why. No row begins after `--seconds`, and a row that is not done `GRACE` seconds later is ended.

`gpu_timing.py` has the programs and times one row. `gpu_sizes.py` has the sizes and the FLOPs.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from checkout import commit
from gpu_sizes import REHEARSAL, Sizes, model_flops, peak_flops

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "gpu.json"
sys.path.insert(0, str(HERE.parent))

GOAL = 0.02
"""The largest overhead of one stage that the project allows."""
GRACE = 45
"""Seconds that a row may take after the time for all rows is over."""

KERNELS_OF = ("plain", "one-stage", "zero_bubble_h1")
"""The rows of the table of kernels: without a pipeline, without stashes in the state, and with them."""

MACHINE = "machine"
"""The row that only describes the machine."""
INSTALL = 'Install JAX for GPUs and the project: `pip install "jax[cuda13]" -e .` in its root.'

# The compiler's optimisations of CPU code would take most of a rehearsal.
REHEARSAL_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}


def run_and_print(row: str, sizes: Sizes) -> None:
    """Prints the result of a row as one line of JSON; if the row fails, the reason."""
    # Without JAX this import fails. The process that started this one reports the error.
    from gpu_timing import describe_machine, failure, run_row

    try:
        result = describe_machine() if row == MACHINE else run_row(row, sizes)
    except Exception as error:
        result = failure(error)
    print(json.dumps(result), flush=True)


# -- All rows


def run_apart(row: str, rehearse: bool, seconds: float, cache: str) -> dict:
    """The result of one row, run in a process of its own.

    Args:
      row: its name.
      rehearse: whether the row is a rehearsal on CPU.
      seconds: after which the process is ended.
      cache: folder of the compilation cache.

    Returns:
      What `run_row` returns, or the reason under "failed".
    """
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--row", row]
    if rehearse:
        command.append("--rehearse")
        environment |= REHEARSAL_ENVIRONMENT
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    lines = process.stdout.splitlines()
    if process.returncode == 0 and lines:
        result = json.loads(lines[-1])
    else:
        ending = f"exit status {process.returncode}"
        if process.returncode < 0:
            ending = f"ended by {signal.Signals(-process.returncode).name}"
        last = process.stderr.strip().splitlines()[-1:] or ["no message"]
        result = {"failed": f"{ending}: {last[0]}"[:300]}
    if "failed" in result and row != MACHINE:
        print(process.stderr[-4000:], file=sys.stderr)
    return result


def save(results: Mapping[str, Any], out: pathlib.Path) -> None:
    """Writes the results. The file is whole at any time."""
    partial = out.with_name(out.name + ".part")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(out)


def rows_of_same_program(results: Mapping[str, Any], out: pathlib.Path) -> dict:
    """The saved rows, if they are of the same device, versions, commit and sizes; else none.

    Args:
      results: of this run.
      out: the file of an earlier run, which may be missing.
    """
    if not out.exists():
        return {}
    saved = json.loads(out.read_text())
    same = set(results) - {"date", "rows"}
    return saved["rows"] if all(saved.get(n) == results[n] for n in same) else {}


def run_rows(args: argparse.Namespace, out: pathlib.Path) -> dict:
    """Runs rows and saves each one.

    Args:
      args: of the command line.
      out: the file of the results.

    Returns:
      The results, as they are saved.

    Raises:
      SystemExit: if JAX does not start, if there is no GPU and this is no rehearsal, or if there is
        no row of a name.
    """
    start = time.monotonic()
    sizes = REHEARSAL if args.rehearse else Sizes()
    with tempfile.TemporaryDirectory() as cache:

        def run(row: str) -> dict:
            left = args.seconds - (time.monotonic() - start)
            if left <= 0:
                return {"failed": f"not begun: {args.seconds:.0f} s are over"}
            return run_apart(row, args.rehearse, left + GRACE, cache)

        # This process never starts JAX's backend, which would take most of the device's memory.
        machine = run_apart(MACHINE, args.rehearse, GRACE, cache)
        if "failed" in machine:
            raise SystemExit(f"gpu.py: JAX or Flax does not start: {machine['failed']}. {INSTALL}")
        if machine["platform"] not in ("gpu", "cuda") and not args.rehearse:
            raise SystemExit(
                f"gpu.py: JAX finds no NVIDIA GPU, only {machine['device']!r}. {INSTALL} "
                "Without a GPU, `--rehearse` runs a small model."
            )
        rows: dict[str, dict] = {}
        results = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(HERE),
            **machine,
            "sizes": dataclasses.asdict(sizes),
            "rows": rows,
        }
        from gpu_timing import schedules  # JAX is there.

        fitting, refused = schedules(sizes.microbatches)
        del fitting["one_f_one_b"]  # the row "one-stage"
        names = ["plain", "one-stage", *fitting]
        wanted = names if args.only is None else args.only
        if not set(wanted) <= set(names):
            raise SystemExit(f"gpu.py: `--only` takes rows of {names}, got {wanted}.")
        if args.only is not None:
            rows |= rows_of_same_program(results, out)
        rows |= {name: {"skipped": reason} for name, reason in refused.items()}
        for row in wanted:
            rows[row] = run(row)
            print(row, json.dumps(rows[row]), flush=True)
            save(results, out)
    return results


# -- The table

COLUMNS = (
    "program",
    "s per step",
    "against plain",
    "tokens/s",
    "MFU",
    "arguments, GB",
    "temporaries, GB",
    "peak, GB",
    "compiled in, s",
)
MEMORY = ("arguments_gb", "temporaries_gb", "peak_gb")


def table(results: Mapping[str, Any]) -> str:
    """The rows as Markdown, and the overhead of one stage.

    Args:
      results: as they are saved.
    """
    sizes = Sizes(**results["sizes"])
    peak = peak_flops(results["device"])
    plain_seconds = results["rows"].get("plain", {}).get("seconds")
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for name, row in results["rows"].items():
        if "seconds" not in row:
            (state, reason), *_ = row.items()
            cells = [f"{state}: {reason}".replace("|", "\\|")]
            cells += [""] * (len(COLUMNS) - 2)
        else:
            seconds = row["seconds"]
            cells = [
                f"{seconds:.4f}",
                f"{seconds / plain_seconds:.3f}" if plain_seconds else "",
                f"{sizes.tokens / seconds:,.0f}",
                f"{model_flops(sizes) / seconds / peak:.1%}" if peak else "",
                *("" if row[name] is None else f"{row[name]:.2f}" for name in MEMORY),
                f"{row['compile_seconds']:.1f}" + " (cache)" * row["cached"],
            ]
        lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    alternating = results["rows"].get("one-stage", {}).get("alternating", {})
    if "failed" in alternating:
        lines += ["", f"Alternating rounds failed: {alternating['failed']}"]
    elif alternating:
        least, largest = alternating["overhead_of_rounds"]
        lines += [
            "",
            f"Overhead of one stage, in alternating rounds with `plain`: "
            f"{alternating['overhead']:+.1%} (rounds: {least:+.1%} to {largest:+.1%}; "
            f"goal: at most {GOAL:+.0%}).",
        ]
    return "\n".join(lines)


def kernel_table(results: Mapping[str, Any], most: int = 12) -> str:
    """Where the time of the rows in `KERNELS_OF` goes, as Markdown; "" if they have no kernels.

    Args:
      results: as they are saved.
      most: kinds of kernels of the table, those that take most time.
    """
    rows = {
        name: {kind: (n, ms) for kind, n, ms in row["kernels"]}
        for name, row in results["rows"].items()
        if name in KERNELS_OF and row.get("kernels")
    }
    kinds = {kind for row in rows.values() for kind in row}
    if not kinds:
        return ""

    def longest(kind: str) -> float:
        return max(row.get(kind, (0, 0))[1] for row in rows.values())

    lines = [
        "| kernels per step | " + " | ".join(f"`{name}`" for name in rows) + " |",
        "|---" * (1 + len(rows)) + "|",
    ]
    for row in rows.values():
        row["all"] = tuple(map(sum, zip(*row.values())))
    for kind in ["all", *sorted(kinds, key=longest, reverse=True)[:most]]:
        of_rows = (row.get(kind) for row in rows.values())
        cells = ["" if c is None else f"{c[1]:.1f} ms ({c[0]:,.0f})" for c in of_rows]
        lines.append("| " + " | ".join([kind, *cells]) + " |")
    return "\n".join(lines)


def report(results: Mapping[str, Any]) -> str:
    """The tables under a line that says what was measured."""
    versions = ", ".join(f"{name} {results[name]}" for name in ("jax", "flax", "optax"))
    title = f"{results['device']}, {results['date']}, commit {results['commit']}"
    if results["sizes"] != dataclasses.asdict(Sizes()):
        title = f"A rehearsal, whose figures mean nothing. {title}"
    parts = f"{title}, {versions}", table(results), kernel_table(results)
    return "\n\n".join(filter(None, parts))


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, or one row of it.

    Args:
      arguments: of the command line; None: those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on CPU")
    parser.add_argument("--redraw", action="store_true", help="print the saved rows")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ROW",
        help="run these rows; saved rows of the same device, versions, commit and sizes stay",
    )
    parser.add_argument("--seconds", type=float, default=540, help="after which no row begins")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help=f"where rows are saved; default: {RESULTS.name} beside this script, or a temporary file of a rehearsal",
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    out = args.out or RESULTS
    if args.row:
        run_and_print(args.row, REHEARSAL if args.rehearse else Sizes())
        return
    if args.redraw:
        print(report(json.loads(out.read_text())))
        return
    if args.rehearse and args.out is None:
        out = pathlib.Path(tempfile.mkdtemp()) / RESULTS.name
    if args.rehearse and out.resolve() == RESULTS:
        parser.error(f"`--out` of a rehearsal must not be {RESULTS.name}, got {out}.")
    results = run_rows(args, out)
    print(f"\n{report(results)}\n\nSaved in {out}")


if __name__ == "__main__":
    main()
