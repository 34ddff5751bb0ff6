"""Races jpipe against other pipelines and against programs without a pipeline: one table, one plot.

    python benchmarks/race.py --setup      # once: environments of the peers, in peers/env
    python benchmarks/race.py              # all workloads, 3 rounds: about an hour on two cores
    python benchmarks/race.py --workloads A --rounds 5 --only 1f1b-paired mpmd torch-1F1B
    python benchmarks/race.py --redraw     # table and plot of the saved results, no measurement

Every program trains the same model from the same weights on the same data. Each run is a separate
process. The programs run one after the other, round after round, and figures are medians over the
rounds.

The results are saved in `--out` after every workload (`race.json`, `race.md`, `race.png`). A later
run replaces only the programs and workloads that it ran. With `--append` it adds rounds to them. If
a program cannot run, because its environment is missing or because it does not support the
workload, its row says "failed" and the reason is in the table.
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
from checkout import commit

HERE = pathlib.Path(__file__).parent
ENVIRONMENTS = HERE / "peers" / "env"
WORKLOADS = throughput.WORKLOADS | {
    "E": "--model transformer --dim 512 --layers 4 --seq 64 --batch 16 --microbatches 8 --stages 2",
    "F": "--model mlp --dim 128 --layers 32 --batch 1024 --microbatches 64 --stages 16 --lr 0.01",
}


class Program(NamedTuple):
    """A program of the race.

    Attributes:
      command: script and flags.
      kind: "jpipe" (synchronous), "asynchronous" (jpipe too), "peer" (another pipeline),
        "unpipelined", or "limit".
      environment: the environment in `peers/env` whose Python runs it, or "" for the Python of this
        script.
    """

    command: str
    kind: str
    environment: str = ""


def _jpipe(schedule: str) -> Program:
    """jpipe with a schedule that `throughput.py` does not have."""
    return Program(f"bench_jpipe.py --schedule {schedule}", "jpipe")


def _shared(name: str, kind: str) -> Program:
    """A program of `throughput.py`, under the same name."""
    return Program(throughput.PROGRAMS[name], kind)


PROGRAMS = {
    "gpipe": _shared("gpipe", "jpipe"),
    "1f1b-paired": _shared("1f1b-paired", "jpipe"),
    "1f1b-unit": _shared("1f1b-unit", "jpipe"),
    "interleaved": _jpipe("interleaved --ticks paired"),
    "interleaved-unit": _jpipe("interleaved --ticks unit"),
    "zb-h1": _jpipe("zero_bubble_h1"),
    "zb-h2": _jpipe("zero_bubble_h2"),
    "zb-v": _jpipe("zero_bubble_v"),
    "pipemare": _shared("pipemare", "asynchronous"),
    "2bw": _shared("2bw", "asynchronous"),
    "mpmd": _shared("mpmd", "peer"),
    "vmap-shift": Program("peers/bench_jax_vmap_shift.py", "peer"),
    "maxtext": Program("peers/bench_maxtext.py --no-remat", "peer", "maxtext"),
    "maxtext-circular": Program("peers/bench_maxtext.py --no-remat --repeats 2", "peer", "maxtext"),
    "torchgpipe": Program("peers/bench_torchgpipe.py --checkpoint never", "peer", "torch"),
    **{
        f"torch-{name}": Program(f"peers/bench_torch_pipelining.py --schedule {name}", "peer", "torch")
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
    "unpipelined": _shared("unpipelined", "unpipelined"),
    "whole-batch": _shared("whole-batch", "unpipelined"),
    "torch-unpipelined": Program("peers/bench_torch_ref.py", "unpipelined", "torch"),
    "limit": _shared("limit", "limit"),
}

# The arguments of each call of pip, in order.
PACKAGES = {
    "torch": [["torch==2.13.0", "torchgpipe==0.0.7", "numpy"]],
    "deepspeed": [
        ["torch==2.13.0", "numpy", "setuptools", "wheel", "ninja"],
        ["--no-build-isolation", "deepspeed"],
    ],
    "maxtext": [
        ["jax==0.11.0", "flax", "aqtp", "qwix", "omegaconf", "pydantic"] + ["pathwaysutils", "jinja2"],
        ["--no-deps", "maxtext==0.2.5"],
    ],
}
# The Python of an environment, where the Python of this script is too old.
PYTHON = {"maxtext": "python3.12"}
# Environment variables of pip: DeepSpeed builds no extension.
BUILD = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def set_up(name: str) -> str:
    """Makes the environment of a family of peers. Returns one line: ready, or the error."""
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
    """Runs a program. Returns its report with commit and date, or `{"failed": reason}`."""
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
    """The commit of the working tree, with `-dirty` if files differ from it."""
    return commit(HERE)


def sittings(results: dict) -> str:
    """Markdown: commits and dates per workload, because rounds can be added later."""
    lines = []
    for workload, of_workload in results.items():
        runs = [run for runs in of_workload.values() for run in runs]
        commits = sorted({run.get("commit", "unknown") for run in runs if "failed" not in run})
        dates = sorted(run["started"] for run in runs if "started" in run)
        when = f"{dates[0]} to {dates[-1]}" if dates else "unknown"
        lines.append(f"- {workload}: commit {', '.join(commits)}; {when}")
    return "\n".join(lines)


def table(results: dict) -> str:
    """Markdown: samples per second per program and workload, ratios, memory, compile time."""
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
    lines += [
        "",
        'The ratios are of medians. "Overlap": the ranges of the rounds of the two programs overlap.',
        "",
        *head,
    ]
    for title, cell in (
        ("best synchronous schedule", lambda w: _code(_best(results[w], "jpipe"))),
        ("best pipelined peer", lambda w: _code(_best(results[w], "peer"))),
        ("ours / that peer", lambda w: _ratio(results[w], "jpipe", "peer")),
        (
            "ours / best unpipelined",
            lambda w: _ratio(results[w], "jpipe", "unpipelined"),
        ),
        ("ours / limit", lambda w: _ratio(results[w], "jpipe", "limit")),
    ):
        lines.append(f"| {title} | " + " | ".join(cell(w) for w in results) + " |")
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


def _speed(value: float) -> str:
    """Samples per second as text, with a decimal where it has few digits.

    Example:
      >>> _speed(20.42), _speed(8593.4)
      ('20.4', '8,593')
    """
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _code(name: str) -> str:
    return f"`{name}`" if name else ""


def _cell(medians: dict, results: dict, name: str) -> str:
    """The speed of a program, and in brackets its ratio to `unpipelined`."""
    if name not in results:
        return ""
    if medians[name] is None:
        return "failed"
    base = medians.get("unpipelined")
    ratio = f" ({medians[name] / base:.2f})" if base else ""
    return _speed(medians[name]) + ratio


def _figure(runs: list, key: str) -> str:
    values = [r[key] for r in runs if key in r]
    return f"{statistics.median(values):,.1f}" if values else ""


def _best(results: dict, kind: str) -> str:
    """The program of a kind with the highest median speed, or "" if no program of the kind ran."""
    medians = {name: _median(runs) for name, runs in results.items() if PROGRAMS[name].kind == kind}
    ran = [name for name, median in medians.items() if median]
    return max(ran, key=lambda name: medians[name], default="")


def _ratio(results: dict, kind: str, other_kind: str) -> str:
    """The speed of the best program of a kind, divided by the speed of the best of another kind.

    Example:
      >>> runs = {"gpipe": [2.0, 4.0], "mpmd": [1.0, 1.0], "unpipelined": [3.5, 2.5]}
      >>> runs = {name: [{"samples_per_s": s} for s in speeds] for name, speeds in runs.items()}
      >>> _ratio(runs, "jpipe", "peer"), _ratio(runs, "jpipe", "unpipelined")
      ('3.00', '1.00 (overlap)')
      >>> _ratio(runs, "jpipe", "limit")
      ''
    """
    best, other = _best(results, kind), _best(results, other_kind)
    if not (best and other):
        return ""
    speeds, other_speeds = _speeds(results[best]), _speeds(results[other])
    text = f"{statistics.median(speeds) / statistics.median(other_speeds):.2f}"
    overlap = max(min(speeds), min(other_speeds)) <= min(max(speeds), max(other_speeds))
    return f"{text} (overlap)" if overlap else text


def plot(results: dict, path: pathlib.Path) -> None:
    """Samples per second, one panel per workload, the fastest program on top.

    The dotted line marks the limit. The thin line below a bar is the range of its rounds.
    """
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
            axis.plot([min(speeds), max(speeds)], [y - 0.42] * 2, color="#555555", lw=1.2)
            axis.text(
                max(medians[name], max(speeds)) + 0.01 * top,
                y,
                _speed(medians[name]),
                va="center",
                size=6.5,
                # The number hides the line of the limit, which would cross it.
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
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
    handles += [
        plt.Line2D([], [], color="#555555", lw=1.2),
        plt.Line2D([], [], color="#444444", lw=1, ls=":"),
    ]
    names = [labels[kind] for kind in colours]
    names += ["range of the rounds", "limit: one stage per core, no pipeline"]
    figure.legend(
        handles,
        names,
        loc="lower center",
        ncols=3 if columns < 3 else len(handles),
        frameon=False,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.3 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def save(results: dict, folder: pathlib.Path) -> None:
    """Writes the table and the plot."""
    (folder / "race.md").write_text(table(results))
    plot(results, folder / "race.png")


def _in_words(workload: str) -> str:
    """The flags of a workload as two lines of a title.

    Example:
      >>> print(_in_words("--model mlp --dim 256 --batch 256 --microbatches 8 --stages 2"))
      mlp, dim 256, 2 stages
      256 rows in 8 microbatches
    """
    words = workload.split()
    flags = dict(zip(words[::2], words[1::2]))
    return (
        f"{flags['--model']}, dim {flags['--dim']}, {flags['--stages']} stages\n"
        f"{flags['--batch']} rows in {flags['--microbatches']} microbatches"
    )


def main() -> None:
    parser = throughput.flags(__doc__, WORKLOADS, PROGRAMS, rounds=3, steps=10)
    parser.add_argument(
        "--setup",
        nargs="*",
        choices=list(PACKAGES),
        metavar="FAMILY",
        help="make the environments of these families, or of all",
    )
    parser.add_argument("--append", action="store_true", help="keep the saved rounds, and add new ones")
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="write the table and the plot of the saved results, without measuring",
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
    if args.redraw:
        if not results:
            parser.error(f"--redraw needs the results of an earlier run in {saved}")
        save(results, args.out)
        return
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
        save(results, args.out)
        print(
            f"{workload}: {WORKLOADS[workload]}\n{table({workload: results[workload]})}",
            flush=True,
        )


if __name__ == "__main__":
    main()
