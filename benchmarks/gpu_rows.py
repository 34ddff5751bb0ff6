"""The rows of `compile_gpu.py`: which there are, where they are saved, and their table."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
MODELS = ("equal", "ends", "tied", "words", "llama", "resnet50", "unet")
# Models that have more layers for more devices.
GROWING = ("equal", "ends", "tied", "words", "llama")
# The models of rows that are not asked for by name.
USUAL = ("equal", "ends", "resnet50", "unet")
# Fields of `gpu_steps.Sizes`, and their values for small programs.
SIZES = ("dim", "seq", "layers", "vocabulary", "image", "width", "microbatches", "microbatch_size")
SMALL = {"dim": 256, "seq": 256, "layers": 2, "vocabulary": 4096, "image": 64, "width": 16}
SMALL |= {"microbatches": 4}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs from the usual program of a model and a schedule.

    Attributes:
      mesh: axis -> number of devices, beside "stage".
      options: of `jpipe.Pipeline`.
      clips: whether gradients are clipped by their global norm.
      kernel: whether attention is a kernel of cuDNN.
    """

    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clips: bool = False
    kernel: bool = False

    @property
    def num_parts(self) -> int:
        """Devices for each device of the pipeline."""
        return math.prod(self.mesh.values())

    @property
    def recomputes(self) -> bool:
        """Whether a backward runs its forward again."""
        return self.options.get("recompute") == "full"


USUALLY = "-"
# Name -> variant.
VARIANTS = {
    USUALLY: Variant(),
    "data 2": Variant(mesh={"data": 2}),
    "data 2, shared update": Variant(mesh={"data": 2}, options={"shard_optimizer": True}),
    "fsdp 2": Variant(mesh={"fsdp": 2}),
    "model 2": Variant(mesh={"model": 2}),
    "clipped": Variant(clips=True),
    "recomputed": Variant(options={"recompute": "full"}),
    "kernel of attention": Variant(kernel=True),
    "vocabulary layers": Variant(options={"axis_rules": (("vocab", "stage"),)}),
}
_AXES = ("data 2", "fsdp 2", "model 2")
# Model, variant and whether there is a plain step beside 1F1B: the rows of `--further`, on 4 stages.
FURTHER = (
    *((model, variant, True) for model in ("equal", "ends") for variant in _AXES),
    ("equal", "data 2, shared update", False),
    ("equal", "clipped", False),
    ("equal", "recomputed", True),
    ("equal", "kernel of attention", True),
    ("tied", USUALLY, False),
    ("words", USUALLY, True),
    ("words", "vocabulary layers", False),
    ("llama", USUALLY, True),
)


def further_rows(sizes: Mapping[str, int], flags: str, stages: int) -> Iterator[dict]:
    """The rows of `FURTHER`: see `wanted_rows`."""
    for model, variant, has_plain in FURTHER:
        schedules = ["plain-unrolled"] * has_plain + ["1f1b"]
        yield from wanted_rows([model], schedules, [stages], sizes, flags, [variant])


def wanted_rows(
    models: Sequence[str],
    schedules: Sequence[str],
    numbers: Sequence[int],
    sizes: Mapping[str, int],
    flags: str,
    variants: Sequence[str] = (USUALLY,),
) -> Iterator[dict]:
    """What each row is of.

    Args:
      models: of `MODELS`.
      schedules: of `SCHEDULES`.
      numbers: numbers of devices. On 1, there are only the rows without a real pipeline.
      sizes: fields of `gpu_steps.Sizes` that differ from its defaults.
      flags: of XLA.
      variants: of `VARIANTS`.
    """
    for model, stages, variant, schedule in itertools.product(models, numbers, variants, schedules):
        row = {"model": model, "schedule": schedule, "stages": stages, "variant": variant}
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
    return row["model"], row["stages"], row["schedule"], row.get("variant", USUALLY), row["flags"], sizes


def request_of(row: dict) -> dict:
    """What a saved row is of: see `wanted_rows`."""
    return {name: row[name] for name in ("model", "schedule", "stages", "variant", "sizes", "flags")}


def saved(path: pathlib.Path | None) -> list[dict]:
    """The rows of a file; none if there is no file."""
    return json.loads(path.read_text()) if path and path.exists() else []


def merged(rows: list[dict], new: dict) -> list[dict]:
    """The rows, with the one of the same program replaced; sorted as the table is."""
    others = [row for row in rows if key(row) != key(new)]

    def place(row: dict) -> tuple:
        order = MODELS.index(row["model"]), row["stages"]
        variant = list(VARIANTS).index(row.get("variant", USUALLY))
        return *order, row["flags"], variant, list(SCHEDULES).index(row["schedule"])

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
    "collectives",
    "first and last stage",
    "one command buffer",
)


def table(rows: list[dict]) -> str:
    """The rows as Markdown: one table per model, number of devices along "stage", flags and sizes."""
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
            lines.append(f"| {_program(row)} | {row['failed']} |")
        else:
            lines.append("| " + " | ".join(_cells(row, _plain_of(row, rows))) + " |")
    return "\n".join(lines).strip() + "\n"


def _program(row: dict) -> str:
    """The name of a program."""
    variant = row.get("variant", USUALLY)
    return row["schedule"] + f", {variant}" * (variant != USUALLY)


def _plain_of(row: dict, rows: list[dict]) -> dict | None:
    """The plain scan of the same model and variant: the unrolled one, if it is there."""
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
        stages = row.get("stages_of_microbatch")
        if stages and "traffic" in plain["ticks"]["microbatch"]:
            traffic = sum(work["traffic"] for work in stages.values())
            ratios.append(traffic / plain["ticks"]["microbatch"]["traffic"])
        against = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    waits = [max(work["host_waits"] for work in busy)]
    waits += [idle["host_waits"]] if idle else []
    return [
        _program(row),
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
        _collectives(busy),
        _ends_of(row),
        "yes" if row["one_command_buffer"] else "no",
    ]


def _number(value: float) -> str:
    """MB, with a digit after the point if they are few."""
    return f"{value:,.0f}" if value == 0 or value >= 100 else f"{value:,.1f}"


def _collectives(busy: Sequence[Mapping]) -> str:
    """The collectives of the tick that exchanges most, and how many of them lie under no product."""
    most = max(busy, key=lambda work: work.get("exchanged", -1))
    if "exchanged" not in most:  # an older row
        return "-"
    if not most["collectives"]:
        return "0"
    return f"{most['collectives']}: {_number(most['exchanged'])} MB, {most['bare']} bare"


def _ends_of(row: dict) -> str:
    """Kernels, products and MB of traffic of the first and of the last stage, for a microbatch."""
    stages = list(row.get("stages_of_microbatch", {}).values())
    if not stages:
        return "-" if SCHEDULES[row["schedule"]][0] else ""
    ends = (stages[0], stages[-1])
    return "; ".join(f"{work['kernels']}, {work['products']}, {_number(work['traffic'])} MB" for work in ends)


def _under_permutes(permutes: dict[str, list[dict]]) -> str:
    """For each permute its MB, and the kernels and products under it in the tick that has most."""
    cells = []
    for same in zip(*permutes.values(), strict=True):
        most = max(same, key=lambda p: (p["products"], p["kernels"]))
        work = f"{most['kernels']} + {most['products']}"
        under = work if most["asynchronous"] else "synchronous"
        cells.append(f"{most['megabytes']:.1f} MB: {under}")
    return "; ".join(cells)
