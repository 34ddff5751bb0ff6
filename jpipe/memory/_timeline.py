"""Blocks of memory over the time of a step: their lives, their reads, and the blocks that could leave meanwhile.

After "Pinpointing the memory behaviors of DNN training" (arXiv:2104.00258), which records every block of an allocator
at run time. Here the blocks come from a table and a compiled program, so nothing has to run.
"""

import csv
import dataclasses
import io
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpipe._util.foreign import shown
from jpipe.memory._block import UNITS, USES, Access, Block, Interval, size_text, spans


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Every block of a step. The step repeats: a block that lives at its end goes on at its beginning.

    Attributes:
      blocks: the blocks, "idle" ones included.
      period: the length of a step on the axis.
      unit: the unit of the axis: "ticks", "seconds" or "instructions".
      title: the title of a picture.
      marks: times at which ticks begin.
    """

    blocks: tuple[Block, ...]
    period: float
    unit: str
    title: str = ""
    marks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.period > 0:
            raise ValueError(f"`period` must be above 0, got {shown(self.period)}.")
        if self.unit not in UNITS:
            raise ValueError(f"`unit` must be one of {', '.join(map(repr, UNITS))}, got {self.unit!r}.")
        for block in self.blocks:
            if block.allocated >= self.period and block.num_bytes:
                raise ValueError(
                    f"{block.name}: a block is allocated within the step, before {self.period}, got "
                    f"{shown(block.allocated)}."
                )

    # -- Bytes over time

    @property
    def moments(self) -> np.ndarray:
        """Times at which the number of bytes of some use changes, ascending, the first is 0."""
        return np.unique(
            [
                0.0,
                *(t for block in self.blocks for t in spans(block, self.period)[:, 0]),
            ]
            + [t for b in self.blocks for t in spans(b, self.period)[:, 1] if t < self.period]
        )

    def by_use(self) -> dict[str, np.ndarray]:
        """Use -> bytes from each of `moments` to the next one. Uses that never occur are left out."""
        moments = self.moments
        change: dict[str, np.ndarray] = {}
        for block in self.blocks:
            use_change = change.setdefault(block.use, np.zeros(len(moments) + 1, np.int64))
            for start, stop in spans(block, self.period):
                use_change[np.searchsorted(moments, start)] += block.num_bytes
                use_change[np.searchsorted(moments, stop)] -= block.num_bytes
        return {use: np.cumsum(change[use])[:-1] for use in USES if use in change}

    @property
    def total(self) -> np.ndarray:
        """Allocated bytes from each of `moments` to the next one."""
        return np.sum([*self.by_use().values(), np.zeros(len(self.moments), int)], axis=0)

    @property
    def used(self) -> np.ndarray:
        """Bytes that hold something, from each of `moments` to the next one."""
        return self.total - self.by_use().get("idle", 0)

    @property
    def peak(self) -> int:
        """The most bytes that are allocated at once."""
        return int(self.total.max())

    @property
    def peak_used(self) -> int:
        """The most bytes that hold something at once."""
        return int(self.used.max())

    @property
    def peak_time(self) -> float:
        """The first time at which the most bytes hold something."""
        return float(self.moments[self.used.argmax()])

    def at(self, time: float) -> list[Block]:
        """The blocks that live at a time, the largest first."""
        time = time % self.period
        blocks = [block for block in self.blocks for start, stop in spans(block, self.period) if start <= time < stop]
        return sorted(blocks, key=lambda block: -block.num_bytes)

    # -- Accesses

    def intervals(self) -> list[Interval]:
        """Access-time intervals: between each access of an array and the next one.

        An array that lives all the time also has the interval from its last access in a step to the first one in
        the next.
        """
        arrays: dict[str, list[Block]] = {}
        for block in self.blocks:
            if block.accesses:
                arrays.setdefault(block.name, []).append(block)
        intervals = []
        for name, blocks in arrays.items():
            times = sorted({a.time for block in blocks for a in block.accesses})
            size = max(block.num_bytes for block in blocks)
            lives = sum(block.freed - block.allocated for block in blocks)
            if lives >= self.period:
                times.append(max(times[0] + self.period, times[-1]))
            intervals += [Interval(name, blocks[0].use, size, a, b - a) for a, b in itertools.pairwise(times) if b > a]
        return intervals

    def swap_candidates(self, to_host: float, to_device: float | None = None) -> list[Interval]:
        """The intervals in which an array can go to the host and come back: length >= bytes / to_host + bytes /
        to_device.

        Args:
          to_host: bytes per second to the host.
          to_device: bytes per second back; None: the same.

        Returns:
          The intervals, those with the most bytes x seconds first.

        Raises:
          ValueError: if the axis has no seconds, or a rate is not above 0.
        """
        if self.unit != "seconds":
            raise ValueError(
                f"swap candidates need seconds, and the axis has {self.unit}. Give `memory_timeline` a profile: "
                "`pipe.memory_timeline(batch, profile=pipe.profile(batch))`."
            )
        to_device = to_host if to_device is None else to_device
        for name, rate in (("to_host", to_host), ("to_device", to_device)):
            if not rate > 0:
                raise ValueError(f"`{name}` must be above 0 bytes per second, got {shown(rate)}.")
        candidates = [
            interval
            for interval in self.intervals()
            if interval.length >= interval.num_bytes / to_host + interval.num_bytes / to_device
        ]
        return sorted(candidates, key=lambda i: -i.num_bytes * i.length)

    # -- Output

    def __str__(self) -> str:
        return self.text()

    def text(self, num_blocks: int = 12) -> str:
        """A table of the bytes by use, and of the largest blocks.

        Args:
          num_blocks: the number of blocks, at the moment at which most bytes hold something.
        """
        by_use, now = self.by_use(), int(self.used.argmax())
        lines = [self.title] if self.title else []
        lines += [
            f"{size_text(self.peak)} allocated, at most {size_text(self.peak_used)} of it in use, at "
            f"{_time(self.peak_time)} of "
            f"{_time(self.period)} {self.unit}",
            "",
            f"{'use':16}{'then':>12}{'least':>12}{'most':>12}",
        ]
        for use, use_bytes in by_use.items():
            sizes = use_bytes[now], use_bytes.min(), use_bytes.max()
            lines.append(f"{use:16}" + "".join(f"{size_text(n):>12}" for n in sizes))
        blocks = [b for b in self.at(self.peak_time) if b.use != "idle"]
        shown = blocks[:num_blocks]
        width = max([len(block.name) for block in shown], default=0)
        head = f"{'block':{width}}  {'use':16}{'bytes':>12}{'from':>12}{'to':>12}{'accesses':>10}"
        lines += ["", head] if shown else []
        for b in shown:
            lines.append(
                f"{b.name:{width}}  {b.use:16}{size_text(b.num_bytes):>12}{_time(b.allocated):>12}{_time(b.freed):>12}"
                f"{len(b.accesses):>10}"
            )
        if len(blocks) > len(shown):
            lines.append(f"and {len(blocks) - len(shown)} smaller ones")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All fields, as numbers, lists and text for JSON; `from_json` reads it."""
        return {
            "title": self.title,
            "unit": self.unit,
            "period": self.period,
            "marks": list(self.marks),
            "peak_bytes": self.peak,
            "peak_used_bytes": self.peak_used,
            "peak_time": self.peak_time,
            "moments": self.moments.tolist(),
            "bytes_by_use": {use: a.tolist() for use, a in self.by_use().items()},
            "blocks": [dataclasses.asdict(block) for block in self.blocks],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Timeline":
        """The timeline of `to_json`.

        Raises:
          ValueError: if something is missing.
        """
        try:
            blocks = [
                Block(
                    **{
                        **record,
                        "accesses": tuple(Access(**a) for a in record["accesses"]),
                        "layers": record["layers"] and tuple(record["layers"]),
                    }
                )
                for record in content["blocks"]
            ]
            return cls(
                tuple(blocks),
                content["period"],
                content["unit"],
                content["title"],
                tuple(content["marks"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"this is no timeline that `to_json` has written: {type(error).__name__}: {error}."
            ) from None

    def to_csv(self) -> str:
        """A line per block; `blocks_of_csv` reads them."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([f.name for f in dataclasses.fields(Block)])
        for block in self.blocks:
            accesses = " ".join(f"{a.kind}@{a.time!r}" for a in block.accesses)
            layers = "" if block.layers is None else "{}:{}".format(*block.layers)
            writer.writerow(
                [
                    block.name,
                    block.use,
                    block.num_bytes,
                    repr(block.allocated),
                    repr(block.freed),
                    accesses,
                    "" if block.stage is None else block.stage,
                    layers,
                    "" if block.device is None else block.device,
                ]
            )
        return text.getvalue()

    def draw(self, path: str | os.PathLike[str], panels: Sequence[str] = ()) -> None:
        """Draws the timeline.

        Args:
          path: a file whose suffix Matplotlib knows, such as .svg or .png.
          panels: some of "bytes" (by use, over time), "blocks" (a Gantt chart) and "intervals" (between accesses);
            `()`: all.

        Raises:
          ValueError: if a panel is unknown.
          ImportError: if Matplotlib is not installed.
        """
        from jpipe.memory._draw import draw

        draw(self, path, panels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: .json, .csv, or a picture."""
        suffix = os.path.splitext(path)[1]
        if suffix not in (".json", ".csv"):
            self.draw(path)
            return
        text = self.to_csv() if suffix == ".csv" else json.dumps(self.to_json())
        with open(path, "w") as file:
            file.write(text)


def idle_blocks(
    name: str,
    num_bytes: int,
    blocks: Iterable[Block],
    period: float,
    device: int | None = None,
) -> list[Block]:
    """The room of an allocation that its blocks do not take, as blocks of the use "idle".

    Args:
      name: the name of the allocation.
      num_bytes: bytes of the allocation.
      blocks: the blocks that lie in it.
      period: the length of a step.
      device: the device of the blocks.
    """
    timeline = Timeline(tuple(blocks), period, "ticks")
    moments, used = timeline.moments, timeline.total
    assert used.max() <= num_bytes, (
        f"{name}: {used.max()} bytes in use at {moments[used.argmax()]}, and {num_bytes} are allocated"
    )
    idle = []
    open_: list[tuple[int, int, float]] = []  # (bottom, top, start) of rectangles
    for time, free in zip([*moments, period], [*(num_bytes - used), 0]):
        height = open_[-1][1] if open_ else 0
        while open_ and open_[-1][1] > free:
            bottom, top, start = open_.pop()
            cut = max(bottom, int(free))
            words = f"{name}: free"
            idle.append(Block(words, "idle", top - cut, start, float(time), (), device=device))
            if cut > bottom:
                open_.append((bottom, cut, start))
            height = cut
        if free > height:
            open_.append((height, int(free), float(time)))
    return idle


def _time(time: float) -> str:
    return f"{time:.4g}"
