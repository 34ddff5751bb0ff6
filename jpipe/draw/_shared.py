"""What text and figures share: kinds of operations, words, the unrolled table, and the lines of a model."""

from typing import NamedTuple

import numpy as np

from jpipe._table.text import message_ticks_text
from jpipe.schedule import IDLE, Facts, Schedule


class Kind(NamedTuple):
    """The letter and the colours of one kind of operation."""

    letter: str
    fill: str  # of a cell of a figure
    sgr: str  # terminal codes: the same fill, and a colour of text that contrasts with it


KINDS = {
    "forward": Kind("F", "#a6cee3", "38;5;16;48;5;153"),
    "backward": Kind("B", "#8c2d04", "38;5;231;48;5;94"),
    "weight_grad": Kind("W", "#5aae61", "38;5;16;48;5;71"),
}


def unrolled(schedule: Schedule) -> Schedule:
    """The table to draw: all ticks from an empty pipeline to the end of a full round.

    A synchronous table is drawn as it is. An asynchronous table is repeated, with
    microbatches and versions counted from the start of training and without those before
    it. The result would not pass `Schedule.check`, because it ends in the middle of work.
    """
    if schedule.synchronous:
        return schedule
    num_microbatches = schedule.num_microbatches
    work = [getattr(schedule, field) for field in KINDS]
    oldest = min(int(cells[cells != IDLE].min()) for cells in work if (cells > IDLE).any())
    num_rounds = 1 - oldest // num_microbatches

    def unroll(cells: np.ndarray, per_round: int | np.ndarray, least: int) -> np.ndarray:
        cells = cells.astype(np.int64)
        rounds = [cells + per_round * r for r in range(num_rounds)]
        return np.concatenate([np.where((cells == IDLE) | (numbers < least), IDLE, numbers) for numbers in rounds])

    forward, backward, weight_grad = (unroll(w, num_microbatches, 0) for w in work)
    return Schedule(
        name=schedule.name,
        num_microbatches=num_microbatches * num_rounds,
        stage=schedule.stage,
        device=schedule.device,
        message_ticks=schedule.message_ticks,
        forward=forward,
        backward=backward,
        weight_grad=weight_grad,
        forward_version=np.where(forward == IDLE, IDLE, 0),
        backward_version=np.where(backward == IDLE, IDLE, 0),
        update=unroll(schedule.update, schedule.updates_in_round[schedule.stage], 1),
    )


def operation_names(schedule: Schedule) -> dict[str, str]:
    """Field -> words for its operation, for all kinds in the table, in order of a tick."""
    if schedule.forward_only:
        return {"forward": "forward"}
    if not schedule.splits_backward:
        return {"forward": "forward", "backward": "backward"}
    return {
        "forward": "forward",
        "backward": "input gradient",
        "weight_grad": "weight gradient",
    }


def stage_labels(schedule: Schedule, plain: str, placed: str) -> list[str]:
    """One label per copy of a stage: `plain`, or `placed` if a stage is not where one expects.

    Copies are in order of stage. One expects them on the devices 0, 1, 2, and so on. A stage
    with copies has the number of the copy behind its own: `s0.0`, `s0.1`, `s1`.
    """
    names, devices = [], []
    for s, stage_devices in enumerate(schedule.copies):
        for k, d in enumerate(stage_devices):
            names.append(f"{s}.{k}" if len(stage_devices) > 1 else f"{s}")
            devices.append(d)
    form = plain if devices == list(range(len(devices))) else placed
    return [form.format(name, d) for name, d in zip(names, devices, strict=True)]


def headline(schedule: Schedule) -> str:
    """The schedule's name and sizes in words."""
    counts = {
        "stage": schedule.num_stages,
        "device": schedule.num_devices,
        "microbatch": schedule.num_microbatches,
        "tick": schedule.num_ticks,
    }
    plural = {"microbatch": "microbatches"}
    words = [f"{count} {word if count == 1 else plural.get(word, word + 's')}" for word, count in counts.items()]
    if schedule.num_slices > 1:
        words.append(f"{schedule.num_slices} slices of a sequence")
    if schedule.message_ticks != 1:
        words.append(f"messages of {message_ticks_text(schedule)} ticks")
    name = schedule.name if schedule.emulates is None else f"{schedule.name}, emulated"
    return f"{name}: {', '.join(words)}"


def per_stage_facts(facts: Facts) -> dict[str, list[int]]:
    """Words -> one number per stage."""
    return {
        "in flight": facts.in_flight.tolist(),
        "forward delay": facts.forward_delay.tolist(),
        "backward delay": facts.backward_delay.tolist(),
        "weight versions": facts.weight_versions.tolist(),
    }


class LayerRow(NamedTuple):
    """A line or a box of a model: one layer, or neighbours that are alike.

    Attributes:
      numbers: the number of the layer, or the first and the last.
      name: its name.
      num_parameters: the number of weights.
      flops: the FLOPs, as text.
      share: their share of those of the model.
      out: bytes of the outputs, as text.
      notes: words on the number of layers, tied weights and skips.
    """

    numbers: str
    name: str
    num_parameters: int
    flops: str
    share: float
    out: str
    notes: list[str]


class StageRows(NamedTuple):
    """The lines or boxes of a stage, or of layers that all stages run together.

    Attributes:
      number: the stage; None: all stages.
      title: words for the stage and its device.
      totals: the sums of its layers, in words.
      rows: the lines.
      cut: words on what crosses to the next stage, and on the skips beside it; empty where no stage follows.
    """

    number: int | None
    title: str
    totals: str
    rows: list[LayerRow]
    cut: list[str]
