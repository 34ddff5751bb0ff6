"""Races jpipe against every other way to train a pipeline: one table, one plot.

    python benchmarks/race.py --setup      # once: an environment for each family of peers, in benchmarks/peers/env
    python benchmarks/race.py              # all workloads, 3 rounds: about an hour on two cores
    python benchmarks/race.py --workloads A --rounds 5 --only 1f1b-paired mpmd torch-1F1B

Every program trains the same model from the same weights on the same data, in a process of its own, one after the other,
round after round; figures are medians over the rounds. Results are saved in `--out` after every workload (`race.json`,
`race.md`, `race.png`), and a later run replaces only the workloads it ran, or with `--append` adds rounds to them. A
program that cannot run, because its environment is missing or the workload is nothing it can do, is a row that says so.
"""

import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

import throughput

HERE = pathlib.Path(__file__).parent
ENVIRONMENTS = HERE / "peers" / "env"
WORKLOADS = throughput.WORKLOADS | {
    "E": "--model transformer --dim 512 --layers 4 --seq 64 --batch 16 --microbatches 8 --stages 2",
    "F": "--model mlp --dim 128 --layers 32 --batch 1024 --microbatches 64 --stages 16 "
    "--lr 0.01",
}


class Program(NamedTuple):
    """A program of the race.

    Attributes:
      command: script and flags.
      kind: "jpipe", "asynchronous", "peer" that pipelines, "unpipelined", or "limit".
      environment: whose Python runs it; "" for this one.
    """

    command: str
    kind: str
    environment: str = ""


def _ours(schedule: str) -> Program:
    return Program(f"bench_jpipe.py --schedule {schedule}", "jpipe")


def _also(name: str, kind: str) -> Program:
    """A program of `throughput.py`."""
    return Program(throughput.PROGRAMS[name], kind)


PROGRAMS = {
    "gpipe": _also("gpipe", "jpipe"),
    "1f1b-paired": _also("1f1b-paired", "jpipe"),
    "1f1b-unit": _also("1f1b-unit", "jpipe"),
    "interleaved": _ours("interleaved --ticks paired"),
    "interleaved-unit": _ours("interleaved --ticks unit"),
    "zb-h1": _ours("zero_bubble_h1"),
    "zb-h2": _ours("zero_bubble_h2"),
    "zb-v": _ours("zero_bubble_v"),
    "pipemare": _also("pipemare", "asynchronous"),
    "2bw": _also("2bw", "asynchronous"),
    "mpmd": _also("mpmd", "peer"),
    "vmap-shift": Program("peers/bench_jax_vmap_shift.py", "peer"),
    "maxtext": Program("peers/bench_maxtext.py --no-remat", "peer", "maxtext"),
    "maxtext-circular": Program(
        "peers/bench_maxtext.py --no-remat --repeats 2", "peer", "maxtext"
    ),
    "torchgpipe": Program(
        "peers/bench_torchgpipe.py --checkpoint never", "peer", "torch"
    ),
    **{
        f"torch-{name}": Program(
            f"peers/bench_torch_pipelining.py --schedule {name}", "peer", "torch"
        )
        for name in (
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        )
    },
    "deepspeed": Program("peers/bench_deepspeed.py", "peer", "deepspeed"),
    "unpipelined": _also("unpipelined", "unpipelined"),
    "whole-batch": _also("whole-batch", "unpipelined"),
    "torch-unpipelined": Program("peers/bench_torch_ref.py", "unpipelined", "torch"),
    "limit": _also("limit", "limit"),
}

# pip's arguments, one call after the other; and the Python that is needed, if not this one.
PACKAGES = {
    "torch": [["torch==2.13.0", "torchgpipe==0.0.7", "numpy"]],
    "deepspeed": [
        ["torch==2.13.0", "numpy", "setuptools", "wheel", "ninja"],
        ["--no-build-isolation", "deepspeed"],
    ],
    "maxtext": [
        ["jax==0.11.0", "flax", "aqtp", "qwix", "omegaconf", "pydantic"]
        + ["pathwaysutils", "jinja2"],
        ["--no-deps", "maxtext==0.2.5"],
    ],
}
PYTHON = {"maxtext": "python3.12"}
BUILD = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def set_up(name: str) -> str:
    """Makes a family's environment; returns what became of it."""
    folder = ENVIRONMENTS / name
    python = shutil.which(PYTHON.get(name, sys.executable))
    if python is None:
        return f"{name}: needs {PYTHON[name]} on the PATH"
    try:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        for arguments in PACKAGES[name]:
            pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", *arguments]
            subprocess.run(pip, check=True, env=os.environ | BUILD)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"{name}: {error}"
    return f"{name}: ready"


def run(name: str, workload: str, steps: int) -> dict:
    """What a program reports, or `{"failed": why}`."""
    program = PROGRAMS[name]
    python = sys.executable
    if program.environment:
        python = ENVIRONMENTS / program.environment / "bin" / "python"
        if not python.exists():
            return {"failed": f"no environment `{program.environment}`: run --setup"}
    when = {"commit": _commit(), "started": time.strftime("%Y-%m-%d %H:%M")}
    try:
        report = throughput.measure(
            program.command,
            WORKLOADS[workload],
            steps,
            python=python,
            pinned=program.kind == "limit",
        )
    except throughput.Failed as error:
        return {"failed": str(error)}
    return report | when


@functools.cache
def _commit() -> str:
    """The commit that is raced."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def sittings(results: dict) -> str:
    """Markdown: the commits and dates of each workload's rounds, because rounds can be added later."""
    lines = []
    for workload, of_workload in results.items():
        runs = [run for runs in of_workload.values() for run in runs]
        commits = sorted(
            {run.get("commit", "unknown") for run in runs if "failed" not in run}
        )
        dates = sorted(run["started"] for run in runs if "started" in run)
        when = f"{dates[0]} to {dates[-1]}" if dates else "unknown"
        lines.append(f"- {workload}: commit {', '.join(commits)}; {when}")
    return "\n".join(lines)


def table(results: dict) -> str:
    """Markdown: samples a second of every program and workload, then what is compared, then memory and compile time."""
    medians = {
        workload: {name: _median(runs) for name, runs in of_workload.items()}
        for workload, of_workload in results.items()
    }
    head = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    lines = [*head]
    for name in PROGRAMS:
        cells = [_cell(medians[w], results[w], name) for w in medians]
        if any(cells):
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *head]
    for title, of in (
        ("best synchronous schedule", lambda m: _best(m, "jpipe")[0]),
        ("best pipelined peer", lambda m: _best(m, "peer")[0]),
        ("ours / that peer", lambda m: _ratio(m, "jpipe", "peer")),
        ("ours / best unpipelined", lambda m: _ratio(m, "jpipe", "unpipelined")),
        ("ours / limit", lambda m: _ratio(m, "jpipe", "limit")),
    ):
        lines.append(f"| {title} | " + " | ".join(map(of, medians.values())) + " |")
    for title, key in (
        ("Peak memory of all processes, MB", "peak_rss_mb_sum"),
        ("Compile seconds", "compile_s"),
    ):
        lines += ["", f"{title}:", "", *head]
        for name in PROGRAMS:
            cells = [_figure(results[w].get(name, []), key) for w in results]
            if any(cells):
                lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    failures = {
        f"`{name}` on {workload}: {runs[0]['failed']}": None
        for workload, of_workload in results.items()
        for name, runs in of_workload.items()
        if "failed" in runs[0]
    }
    lines += ["", "Measured:", "", sittings(results)]
    return "\n".join([*lines, "", *(f"- {failure}" for failure in failures)]) + "\n"


def _speeds(runs: list) -> list[float]:
    return [r["samples_per_s"] for r in runs if "failed" not in r]


def _median(runs: list) -> float | None:
    speeds = _speeds(runs)
    return statistics.median(speeds) if speeds else None


def _cell(medians: dict, results: dict, name: str) -> str:
    if name not in results:
        return ""
    if medians[name] is None:
        return "failed"
    base = medians.get("unpipelined")
    ratio = f" ({medians[name] / base:.2f})" if base else ""
    return f"{medians[name]:,.0f}{ratio}"


def _figure(runs: list, key: str) -> str:
    found = [r[key] for r in runs if key in r]
    return f"{statistics.median(found):,.1f}" if found else ""


def _best(medians: dict, kind: str) -> tuple[str, float]:
    found = [(v, n) for n, v in medians.items() if v and PROGRAMS[n].kind == kind]
    return (f"`{max(found)[1]}`", max(found)[0]) if found else ("", float("nan"))


def _ratio(medians: dict, one: str, other: str) -> str:
    return f"{_best(medians, one)[1] / _best(medians, other)[1]:.2f}"


def plot(results: dict, path: pathlib.Path) -> None:
    """Samples per second, one panel per workload, the fastest program on top; a line marks the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {
        "jpipe": "#1f6fb4",
        "asynchronous": "#2a9d6f",
        "peer": "#c0743a",
        "unpipelined": "#8a8a8a",
    }
    labels = {
        "jpipe": "jpipe, synchronous",
        "asynchronous": "jpipe, asynchronous",
        "peer": "another pipeline",
        "unpipelined": "no pipeline",
    }
    columns = min(len(results), 3)
    rows = -(-len(results) // columns)
    most = max(len(of_workload) for of_workload in results.values())
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(4.6 * columns, rows * (0.19 * most + 1.0)),
        squeeze=False,
    )
    for axis in grid.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (workload, of_workload) in zip(grid.flat, results.items()):
        medians = {name: _median(runs) for name, runs in of_workload.items()}
        limit = medians.pop("limit", None)
        order = sorted((n for n in medians if medians[n]), key=lambda n: medians[n])
        top = max([medians[n] for n in order] + [limit or 0])
        for y, name in enumerate(order):
            speeds = _speeds(of_workload[name])
            axis.barh(y, medians[name], color=colours[PROGRAMS[name].kind], height=0.72)
            axis.plot(
                [min(speeds), max(speeds)], [y - 0.42] * 2, color="#555555", lw=1.2
            )
            text = f" {medians[name]:,.0f}"
            axis.text(max(medians[name], max(speeds)), y, text, va="center", size=6.5)
        if limit:
            axis.axvline(limit, color="#444444", ls=":", lw=1)
            axis.text(limit, len(order) - 0.3, "limit", ha="center", size=6.5)
        axis.set_yticks(range(len(order)), order, size=7)
        axis.set_ylim(-0.7, len(order))
        axis.set_xlim(0, top * 1.15)
        axis.set_title(f"{workload}: {_in_words(WORKLOADS[workload])}", size=8)
        axis.set_xlabel("samples per second", size=7)
        axis.tick_params(axis="x", labelsize=6.5)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours.values()]
    names = [labels[kind] for kind in colours]
    figure.legend(
        handles,
        names,
        loc="lower center",
        ncols=len(colours),
        frameon=False,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _in_words(workload: str) -> str:
    """A workload's flags as a title.

    Example:
      >>> _in_words("--model mlp --dim 256 --layers 8 --batch 256 --microbatches 8 --stages 2")
      'mlp, dim 256, batch 256 in 8, 2 stages'
    """
    words = workload.split()
    flags = dict(zip(words[::2], words[1::2]))
    return (
        f"{flags['--model']}, dim {flags['--dim']}, batch {flags['--batch']} in {flags['--microbatches']}, "
        f"{flags['--stages']} stages"
    )


def main() -> None:
    parser = throughput.flags(__doc__, WORKLOADS, PROGRAMS, rounds=3, steps=10)
    parser.add_argument(
        "--setup",
        nargs="*",
        choices=list(PACKAGES),
        metavar="FAMILY",
        help="make these environments, or all",
    )
    parser.add_argument(
        "--append", action="store_true", help="keep the rounds that are saved"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "race")
    args = parser.parse_args()
    if args.setup is not None:
        for name in args.setup or PACKAGES:
            print(set_up(name), flush=True)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / "race.json"
    results = json.loads(saved.read_text()) if saved.exists() else {}
    for workload in args.workloads:
        before = results.get(workload, {}) if args.append else {}
        runs: dict = {name: [*before.get(name, [])] for name in args.only}
        for _ in range(args.rounds):
            for name in args.only:
                if not (runs[name] and "failed" in runs[name][0]):
                    runs[name].append(run(name, workload, args.steps))
        results[workload] = results.get(workload, {}) | runs
        results = {w: results[w] for w in WORKLOADS if w in results}
        saved.write_text(json.dumps(results, indent=1))
        (args.out / "race.md").write_text(table(results))
        plot(results, args.out / "race.png")
        print(
            f"{workload}: {WORKLOADS[workload]}\n{table({workload: results[workload]})}",
            flush=True,
        )


if __name__ == "__main__":
    main()
