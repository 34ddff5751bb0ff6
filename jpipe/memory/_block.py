"""Blocks of memory: the time in which each lives, and its reads."""

import csv
import dataclasses
import io
from typing import NamedTuple

import numpy as np

from jpipe._util.foreign import shown

USES = {
    "weights": "the newest version of the weights",
    "version": "older weight versions that an operation still reads, and weights that a parameter hook computes",
    "optimizer": "the optimizer's state",
    "gradient": "accumulators of gradients, or of their factors",
    "input stash": "what the backward, or the input gradient, reads of its forward",
    "weight stash": "what the weight gradient reads of its forward",
    "split residual": "what the weight gradient reads of the input gradient",
    "carry": "what goes from slice to slice of a sequence, such as keys and values, and the gradient by it",
    "message": "activations and gradients on their way between stages",
    "batch": "the minibatch, and earlier ones that are still read",
    "state": "mutable state of layers, its statistics, counters, the loss scale",
    "compression": "what compressors of gradients and messages keep",
    "argument": "arguments of a function",
    "result": "results that lie in no argument",
    "temporary": "what the compiled program keeps inside of a step",
    "idle": "allocated, and holds nothing at that moment: free slots, padding, gaps between temporaries",
}
"""Use of a block -> what it means, in the order of pictures and tables."""

KINDS = ("write", "read")
UNITS = ("ticks", "seconds", "instructions")

_GRID = 2.0**36


def on_grid(time: float) -> float:
    """The time, rounded to a multiple of 2**-36.

    Sums and differences of such times are exact, so one block ends exactly when the next one begins.
    """
    return round(time * _GRID) / _GRID


@dataclasses.dataclass(frozen=True)
class Access:
    """One access to a block.

    Attributes:
      time: the time on the axis of the timeline.
      kind: "write" or "read".
    """

    time: float
    kind: str


@dataclasses.dataclass(frozen=True)
class Block:
    """Bytes that hold one thing for a time.

    Attributes:
      name: in words, such as "stage 1, layer 3, microbatch 2: input stash". Blocks of one name are one array, whose
        use has changed.
      use: one of `USES`.
      num_bytes: bytes on the device.
      allocated: the time from which it lives, at least 0 and below the length of a step.
      freed: the time until which it lives. Later than the end of the step: it lives on in the next steps.
      accesses: writes and reads, in order of time.
      stage: the stage that it belongs to; None: none, or all.
      layers: the first layer, and one past the last; None: not of layers.
      device: the device, as a position along the axis "stage" of the mesh; None: not of a pipeline.
    """

    name: str
    use: str
    num_bytes: int
    allocated: float
    freed: float
    accesses: tuple[Access, ...] = ()
    stage: int | None = None
    layers: tuple[int, int] | None = None
    device: int | None = None

    def __post_init__(self) -> None:
        if self.use not in USES:
            raise ValueError(f"`use` must be one of {', '.join(map(repr, USES))}, got {shown(self.use)}.")
        if self.num_bytes < 0:
            raise ValueError(f"`num_bytes` must be at least 0, got {shown(self.num_bytes)}.")
        if not 0 <= self.allocated <= self.freed:
            raise ValueError(
                f"{self.name}: a block is freed after it is allocated, and both come after the beginning of the step, "
                f"got `allocated` {self.allocated} and `freed` {self.freed}."
            )
        for access in self.accesses:
            if access.kind not in KINDS:
                raise ValueError(f'`kind` of an access must be "write" or "read", got {shown(access.kind)}.')


class Interval(NamedTuple):
    """The time between two accesses of an array with none between them.

    Attributes:
      name, use, num_bytes: the fields of the block.
      start: time of the first access.
      length: time until the second one. It may lie in the next step.
    """

    name: str
    use: str
    num_bytes: int
    start: float
    length: float


def spans(block: Block, period: float) -> np.ndarray:
    """`[n, 2]`: when a block and its like of earlier steps live between 0 and `period`."""
    last = int(block.freed // period) + 1
    shifts = np.arange(last + 1) * period
    both = np.clip([block.allocated - shifts, block.freed - shifts], 0, period).T
    return both[both[:, 0] < both[:, 1]]


def blocks_of_csv(text: str) -> list[Block]:
    """The blocks of `Timeline.to_csv`.

    Raises:
      ValueError: if the text is no such table.
    """
    reader = csv.DictReader(io.StringIO(text))
    fields = [f.name for f in dataclasses.fields(Block)]
    if reader.fieldnames != fields:
        raise ValueError(f"the first line must be {','.join(fields)}, got {shown(','.join(reader.fieldnames or ()))}.")
    blocks = []
    for row in reader:
        pairs = [word.split("@") for word in row["accesses"].split()]
        first, _, last = row["layers"].partition(":")
        blocks.append(
            Block(
                row["name"],
                row["use"],
                int(row["num_bytes"]),
                float(row["allocated"]),
                float(row["freed"]),
                tuple(Access(float(time), kind) for kind, time in pairs),
                int(row["stage"]) if row["stage"] else None,
                (int(first), int(last)) if last else None,
                int(row["device"]) if row["device"] else None,
            )
        )
    return blocks


def size_text(num_bytes: float) -> str:
    """Bytes with a unit.

    Example:
      >>> size_text(12), size_text(2048), size_text(3 * 2**30)
      ('12 B', '2.0 KiB', '3.0 GiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 1024 or unit == "TiB":
            break
    return f"{num_bytes:.1f} {unit}"
