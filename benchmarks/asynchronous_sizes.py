"""Asynchronous methods at two sizes of a GPT and 5,000 steps: whether their order depends on the size.

    python benchmarks/asynchronous_sizes.py --data data --out runs/sizes

trains a byte-level GPT of dim 32 and 4 blocks (69 thousand weights) and one of dim 64 and 8 blocks (437 thousand) on
the texts of `asynchronous_methods.py`, in batches of 4 sequences of 64 bytes. Methods are those of that script:
synchronous, with the delays of 8 and of 32 stages, and with the delay of one update that PipeDream-2BW has in every
stage, whatever their number.

The rate of a method is the best of at most four powers of 3 times a first guess, in runs of 1,000 steps of the first
seed; the loss of validation data chooses. Then every seed trains 5,000 steps at it. A finished run is in `runs.json` in
the output folder and is not run again. `--redraw` makes the tables and the picture again from that file.
"""

import functools
import math
import pathlib
import statistics
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from asynchronous_methods import FACTOR, METHODS, SEQ_LEN, Method, Task, Trainer, parsed, shared_parser, text
from asynchronous_scale import Runs, best_rate, mean_of, search

from models import Transformer

ONE_UPDATE = 0
"""In place of a number of stages: every layer is one update late, as all stages of PipeDream-2BW are."""
TITLES = {1: "synchronous", ONE_UPDATE: "2BW", 8: "8 stages", 32: "32 stages"}
CELLS = [
    (1, "Adam"),
    (1, "Muon, momentum 0.8"),
    (1, "Muon"),
    (ONE_UPDATE, "Adam"),
    (ONE_UPDATE, "Muon, error feedback"),
    (8, "Adam"),
    (8, "Muon, error feedback"),
    (8, "Muon +T1, momentum 0.8"),
    (8, "PipeMare T1+T2"),
    (32, "Adam"),
    (32, "Muon +T1, momentum 0.8"),
    (32, "PipeMare T1+T2"),
]
SIZES = {"32": (32, 4), "64": (64, 8)}


class Budget(NamedTuple):
    """Steps of a run, and of those that choose its rate."""

    run: int
    search: int


def task_of(size: str, num_steps: int) -> Task:
    """The GPT of a size, trained for so many steps."""
    dim, num_blocks = SIZES[size]
    return Task(
        Transformer(seq_len=SEQ_LEN, dim=dim, num_heads=4, num_blocks=num_blocks),
        text,
        batch_size=4,
        num_steps=num_steps,
        metric="bits per byte",
        better=min,
        scale=1 / math.log(2),
    )


def first_rate(method: Method, S: int) -> float:
    """Where the search of a rate begins."""
    return method.rates[0 if S == 1 else 1 if S <= 16 else 2]


def key_of(size: str, S: int, method: str, num_steps: int, rate: float, seed: int) -> str:
    """The name of a run in `runs.json`."""
    return f"{size}|{S}|{method}|{num_steps}|{rate:.3g}|{seed}"


def train(size: str, data: dict, runs: Runs, cell: tuple[int, str], budget: Budget, seeds: int, rates: int) -> None:
    """Chooses the rate of a cell in short runs, and trains every seed at it."""
    S, name = cell
    method = METHODS[name]
    delays = 1 if S == ONE_UPDATE else None

    @functools.cache
    def trainer(num_steps: int) -> Trainer:
        return Trainer(task_of(size, num_steps), data, method, S, delay=delays)

    def validation(num_steps: int, rate: float, seed: int) -> float:
        key = key_of(size, S, name, num_steps, rate, seed)
        return runs.get(key, lambda: trainer(num_steps).run(rate, seed))["validation"]

    short = functools.partial(validation, budget.search, seed=0)
    rate = search(first_rate(method, S), short, FACTOR, rates)
    for seed in range(seeds):
        validation(budget.run, rate, seed)


class Row(NamedTuple):
    """What a method did.

    Attributes:
      rate: of its whole runs; `tried` are those of its short runs.
      ends: bits per byte at the end, of each seed; NaN where a loss was not finite.
    """

    rate: float
    tried: list[float]
    ends: list[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.ends)


def rows_of(size: str, runs: dict, budget: Budget) -> dict[tuple[int, str], Row]:
    """The rows of a size that have a whole run."""
    by_cell: dict[tuple[int, str], dict[int, dict[float, list]]] = {}
    for key, run in runs.items():
        of_size, S, method, num_steps, rate, _ = key.split("|")
        if of_size == size:
            by_steps = by_cell.setdefault((int(S), method), {})
            by_steps.setdefault(int(num_steps), {}).setdefault(float(rate), []).append(run)
    rows = {}
    for cell, by_steps in by_cell.items():
        whole = by_steps.get(budget.run)
        if whole:
            rate = best_rate(whole)
            ends = [
                run["curve"][-1][2] / math.log(2) if math.isfinite(run["validation"]) else math.nan
                for run in whole[rate]
            ]
            rows[cell] = Row(rate, sorted(by_steps.get(budget.search, whole)), ends)
    return rows


def markdown(tables: dict[str, dict[tuple[int, str], Row]]) -> str:
    """A line for each method, in the order of the largest size; per size the rate, the result and how far it is behind
    the best synchronous one.
    """
    sizes = list(tables)
    heads = [f"dim {size}: rate (tried) | bits per byte | behind" for size in sizes]
    lines = [f"| delays | method | {' | '.join(heads)} |", "|---" * (2 + 3 * len(sizes)) + "|"]
    best = {size: min(row.mean for (S, _), row in rows.items() if S == 1) for size, rows in tables.items()}
    last = tables[sizes[-1]]

    def order(cell: tuple[int, str]) -> tuple:
        mean = last[cell].mean if cell in last else math.nan
        return list(TITLES).index(cell[0]), math.inf if math.isnan(mean) else mean

    for cell in sorted({cell for rows in tables.values() for cell in rows}, key=order):
        words = [TITLES[cell[0]], cell[1]]
        for size in sizes:
            row = tables[size].get(cell)
            if row is None:
                words += ["-"] * 3
                continue
            tried = ", ".join(f"{rate:g}" for rate in row.tried)
            behind = f"{row.mean - best[size]:.3f}" if math.isfinite(row.mean) else "-"
            words += [f"{row.rate:g} ({tried})", mean_of(row.ends, 3), behind]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def ranking(rows: dict[tuple[int, str], Row]) -> list[str]:
    """Asynchronous methods with finite ends, the best first."""
    finite = {cell: row.mean for cell, row in rows.items() if cell[0] != 1 and math.isfinite(row.mean)}
    return [f"{TITLES[S]} {method}" for S, method in sorted(finite, key=finite.__getitem__)]


def draw(tables: dict[str, dict[tuple[int, str], Row]], path: pathlib.Path) -> None:
    """How far each method is behind the best synchronous one, a panel for each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for cell in CELLS if any(cell in rows for rows in tables.values())]
    names = [f"{method}, {TITLES[S]}" for S, method in cells]
    figure, panels = pyplot.subplots(
        1, len(tables), figsize=(4.2 * len(tables) + 2, 0.34 * len(names) + 1.4), sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for ax, (size, rows) in zip(panels[0], tables.items(), strict=True):
        best = min(row.mean for (S, _), row in rows.items() if S == 1)
        for y, cell in enumerate(cells):
            row = rows.get(cell)
            if row is not None and math.isfinite(row.mean):
                color = f"C{list(TITLES).index(cell[0])}"
                ax.plot(row.ends, [y] * len(row.ends), color=color, alpha=0.5)
                ax.plot(row.mean, y, "o", color=color, ms=5)
        ax.axvline(best, color="black", linewidth=1, linestyle=":")
        ax.set_title(f"dim {size}, {SIZES[size][1]} blocks", fontsize=11)
        ax.set_xlabel("bits per byte (lower is better)")
        ax.grid(alpha=0.3)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(runs: dict, budget: Budget, out: pathlib.Path, sizes: list[str]) -> None:
    """Writes and prints the table of the runs so far, and draws them."""
    tables = {size: rows_of(size, runs, budget) for size in sizes}
    tables = {size: rows for size, rows in tables.items() if any(S == 1 for S, _ in rows)}
    if not tables:
        return
    lines = [markdown(tables), *(f"dim {size}: {', '.join(ranking(rows))}" for size, rows in tables.items())]
    print("\n\n".join(lines))
    (out / "table.md").write_text("\n\n".join(lines) + "\n")
    draw(tables, out / "sizes.png")


def main() -> None:
    parser = shared_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parsed(parser)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(args.out / "runs.json")
    budget = Budget(4, 2) if args.quick else Budget(5000, 1000)
    if not args.redraw:
        data = text(None if args.quick else args.data)
        # Every method at all sizes before the next one, so that a run that is ended compares what it has.
        for cell in CELLS[:3] if args.quick else CELLS:
            for size in args.sizes:
                train(size, data, runs, cell, budget, args.seeds, 1 if args.quick else args.rates)
    report(runs.found, budget, args.out, args.sizes)


if __name__ == "__main__":
    main()
