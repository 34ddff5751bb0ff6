"""The rows of `compile_gpu.py`: which there are, where they are saved, and their table."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

# Name of a row -> schedule and its options.
SCHEDULES: dict[str, tuple[str, dict]] = {
    "plain": ("", {"is_rolled": True}),
    "plain-unrolled": ("", {"is_rolled": False}),
    "one-stage": ("one_f_one_b", {"ticks": "paired"}),
    "gpipe": ("gpipe", {}),
    "1f1b": ("one_f_one_b", {"ticks": "paired"}),
    "1f1b-unit": ("one_f_one_b", {"ticks": "unit"}),
    "interleaved": ("interleaved", {}),
    "zb-h1": ("zero_bubble_h1", {}),
    "zb-h2": ("zero_bubble_h2", {}),
    "zb-v": ("zero_bubble_v", {}),
    "pipemare": ("pipemare", {}),
    "pipemare-paired": ("pipemare", {"ticks": "paired"}),
    "pipedream": ("pipedream", {}),
    "2bw": ("pipedream_2bw", {}),
}
MODELS = ("equal", "ends", "resnet50", "unet")
# Models that have more layers for more devices.
GROWING = ("equal", "ends")
# Fields of `gpu_steps.Sizes`, and their values for small programs.
SIZES = ("dim", "seq", "layers", "image", "width", "microbatches", "microbatch_size")
SMALL = {"dim": 256, "seq": 256, "layers": 2, "image": 64, "width": 16}
SMALL |= {"microbatches": 4}


def wanted_rows(
    models: Sequence[str],
    schedules: Sequence[str],
    numbers: Sequence[int],
    sizes: Mapping[str, int],
    flags: str,
) -> Iterator[dict]:
    """What each row is of.

    Args:
      models: of `MODELS`.
      schedules: of `SCHEDULES`.
      numbers: numbers of devices. On 1, there are only the rows without a real pipeline.
      sizes: fields of `gpu_steps.Sizes` that differ from its defaults.
      flags: of XLA.
    """
    for model in models:
        for stages in numbers:
            for schedule in schedules:
                row = {"model": model, "schedule": schedule, "stages": stages}
                is_plain = not SCHEDULES[schedule][0]
                if is_plain and model not in GROWING:
                    row["stages"] = 1
                    wanted = stages == min(numbers)
                else:
                    wanted = is_plain or (schedule == "one-stage") == (stages == 1)
                if wanted:
                    yield row | {"sizes": dict(sizes), "flags": flags}


def key(row: dict) -> tuple:
    """What program a row is of."""
    sizes = tuple(sorted(row["sizes"].items()))
    return row["model"], row["stages"], row["schedule"], row["flags"], sizes


def saved(path: pathlib.Path | None) -> list[dict]:
    """The rows of a file; none if there is no file."""
    return json.loads(path.read_text()) if path and path.exists() else []


def merged(rows: list[dict], new: dict) -> list[dict]:
    """The rows, with the one of the same program replaced; sorted as the table is."""
    others = [row for row in rows if key(row) != key(new)]

    def place(row: dict) -> tuple:
        order = MODELS.index(row["model"]), row["stages"]
        return *order, list(SCHEDULES).index(row["schedule"]), row["flags"]

    return sorted([*others, new], key=place)


# -- The table

COLUMNS = (
    "program",
    "kernels",
    "products",
    "against plain",
    "copied, MB",
    "largest, MB",
    "onto itself, MB",
    "transposed, MB",
    "written, MB",
    "traffic, MB",
    "moved, MB",
    "cast, MB",
    "temporaries, GB",
    "state, GB",
    "host waits per tick",
    "per step",
    "loops",
    "under permutes",
    "one command buffer",
)


def table(rows: list[dict]) -> str:
    """The rows as Markdown: one table per model, number of devices, flags and sizes."""
    lines: list[str] = []
    title = None
    for row in rows:
        sizes = ", ".join(f"{name} {value}" for name, value in row["sizes"].items())
        stages = row["stages"]
        new_title = f"`{row['model']}`, {stages} device{'s' if stages > 1 else ''}"
        new_title += f", {sizes}" if sizes else ""
        new_title += f", `{row['flags']}`" if row["flags"] else ""
        if new_title != title:
            title = new_title
            lines += ["", title, "", "| " + " | ".join(COLUMNS) + " |"]
            lines.append("|---" * len(COLUMNS) + "|")
        if "failed" in row:
            lines.append(f"| {row['schedule']} | {row['failed']} |")
        else:
            lines.append("| " + " | ".join(_cells(row, _plain_of(row, rows))) + " |")
    return "\n".join(lines).strip() + "\n"


def _plain_of(row: dict, rows: list[dict]) -> dict | None:
    """The plain scan of the same model: the unrolled one, if it is there."""
    stages = row["stages"] if row["model"] in GROWING else 1
    plains = {
        r["schedule"]: r
        for r in rows
        if "failed" not in r and key(r) == key(row | {"schedule": r["schedule"], "stages": stages})
    }
    return plains.get("plain-unrolled", plains.get("plain"))


def _cells(row: dict, plain: dict | None) -> list[str]:
    ticks = dict(row["ticks"])
    idle = ticks.pop("idle", None)
    busy = list(ticks.values())

    def each(name: str) -> str:
        if "microbatch" in ticks:
            return f"{busy[0][name]:,}"
        return ", ".join(f"{label} {work[name]:,}" for label, work in ticks.items())

    def most(name: str) -> str:
        if name not in busy[0]:  # an older row
            return "-"
        most_busy = _number(max(work[name] for work in busy))
        return most_busy if idle is None else f"{most_busy}; {_number(idle[name])}"

    against = ""
    if plain is not None:
        ratios = [row["microbatch"][name] / plain["microbatch"][name] for name in ("kernels", "products")]
        against = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    waits = [max(work["host_waits"] for work in busy)]
    waits += [idle["host_waits"]] if idle else []
    return [
        row["schedule"],
        each("kernels"),
        each("products"),
        against,
        most("copied"),
        most("largest_copy"),
        most("self_copied"),
        most("transposed"),
        most("written"),
        most("traffic"),
        most("moved"),
        most("cast"),
        f"{row['temporaries_gb']:.2f}",
        f"{row['state_gb']:.2f}",
        "; ".join(map(str, waits)),
        f"{row['host_waits_step']:,}",
        str(row["unknown_loops"]),
        _under_permutes(row["permutes"]),
        "yes" if row["one_command_buffer"] else "no",
    ]


def _number(value: float) -> str:
    """MB, with a digit after the point if they are few."""
    return f"{value:,.0f}" if value == 0 or value >= 100 else f"{value:,.1f}"


def _under_permutes(permutes: dict[str, list[dict]]) -> str:
    """For each permute its MB, and the kernels and products under it in the tick that has most."""
    cells = []
    for same in zip(*permutes.values(), strict=True):
        most = max(same, key=lambda p: (p["products"], p["kernels"]))
        work = f"{most['kernels']} + {most['products']}"
        under = work if most["asynchronous"] else "synchronous"
        cells.append(f"{most['megabytes']:.1f} MB: {under}")
    return "; ".join(cells)
