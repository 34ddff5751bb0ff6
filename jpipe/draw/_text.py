"""A schedule as text."""

import itertools

import numpy as np

from jpipe.draw._shared import (
    KINDS,
    headline,
    operation_names,
    per_stage_facts,
    stage_labels,
    unrolled,
)
from jpipe.schedule import IDLE, Schedule

MOST_COLUMNS = 16
"""Stages of which the facts are shown one by one. Of more the least and the largest are shown."""


def text(
    schedule: Schedule,
    *,
    color: bool = False,
    width: int | None = None,
    table: bool = True,
) -> str:
    """The picture as text, and below it the facts.

    Args:
      schedule: a legal schedule.
      color: whether to colour cells by ANSI escape sequences.
      width: characters per line. A longer picture continues below. None: no limit.
      table: whether to draw the table. Without it, the sizes and the facts are shown.

    Returns:
      Lines, each ended by a newline.

    Raises:
      ValueError: if the schedule is not legal.

    Example:
      >>> from jpipe.schedules import gpipe
      >>> print(text(gpipe(2, 3)), end="")
      gpipe: 2 stages, 2 devices, 3 microbatches, 8 ticks
      <BLANKLINE>
      tick  0                   5
      s0    F0  F1  F2  .   .   B0  B1  B2*
      s1    .   F0  F1  F2  B0  B1  B2  *
      <BLANKLINE>
      F forward   B backward   * update
      bubble 25.0%, makespan 12 (F = B = W = 1)
      bubble between first and last work 14.3%
      stage              0   1
      in flight          3   3
      forward delay      0   0
      backward delay     0   0
      weight versions    1   1
    """
    lines = [headline(schedule), ""]
    if table:
        lines += _table(schedule, color, width)
    facts = schedule.facts()
    lines += [
        f"bubble {facts.bubble:.1%}, makespan {facts.makespan} (F = B = W = 1)",
        f"bubble between first and last work {facts.inner_bubble:.1%}",
    ]
    numbers = {"stage": range(schedule.num_stages), **per_stage_facts(facts)}
    for name, values in numbers.items():
        if len(values) <= MOST_COLUMNS:
            cells = "".join(f"{value:4}" for value in values)
        else:
            cells = f"   {min(values)} to {max(values)}"
        lines.append(f"{name:16}{cells}")
    return "".join(line + "\n" for line in lines)


def _table(schedule: Schedule, color: bool, width: int | None) -> list[str]:
    """The lines of the table and of its legend."""
    shown = unrolled(schedule)
    rows = _rows(shown)
    margin = 2 + max(len(label) for label in ["tick", *(label for label, _ in rows)])
    cell = 1 + max(len(word) for _, words in rows for word in words)
    ticks_per_block = shown.num_ticks
    if width is not None:
        ticks_per_block = max(1, (width - margin) // cell)

    lines = []
    for start in range(0, shown.num_ticks, ticks_per_block):
        ticks = range(start, min(start + ticks_per_block, shown.num_ticks))
        ruler = "tick".ljust(margin)
        for t in ticks:
            ruler += (str(t) if t % 5 == 0 else "").ljust(cell)
        lines.append(ruler.rstrip())
        for label, words in rows:
            line = label.ljust(margin)
            for t in ticks:
                line += _paint(words[t], color) + " " * (cell - len(words[t]))
            lines.append(line.rstrip())
        lines.append("")
    legend = [_paint(f"{KINDS[field].letter} {name}", color) for field, name in operation_names(schedule).items()]
    if not schedule.forward_only:
        legend.append("* update")
    lines.append("   ".join(legend))
    if not schedule.synchronous:
        first = shown.num_ticks - schedule.num_ticks
        lines.append(f"the round that starts at tick {first} repeats")
    return lines


def _rows(shown: Schedule) -> list[tuple[str, list[str]]]:
    """The label and the words, one per tick, of each line of the picture.

    A column has one line, or one line per kind of operation if a cell holds several. The
    first line of a stage, or of a copy, has the label.
    """
    kinds = [field for field in KINDS if (getattr(shown, field) != IDLE).any()]
    busy = sum((getattr(shown, field) != IDLE).astype(int) for field in kinds)
    lines = [[field] for field in kinds] if np.max(busy) > 1 else [kinds]
    rows = []
    labels = stage_labels(shown, "s{}", "s{}@{}")
    columns_of_copies = itertools.chain(*shown.columns_of_copies)
    for label, columns in zip(labels, columns_of_copies, strict=True):
        for fields in lines:
            for c in columns:
                words = []
                for t in range(shown.num_ticks):
                    word = ""
                    for field in fields:
                        m = getattr(shown, field)[t, c]
                        word += "" if m == IDLE else f"{KINDS[field].letter}{m}"
                    # All columns of a copy update together.
                    last = fields is lines[-1] and c == columns[-1]
                    if last and shown.update[t, c] != IDLE:
                        word += "*"
                    words.append(word or ".")
                first = fields is lines[0] and c == columns[0]
                rows.append((label if first else "", words))
    return rows


def _paint(word: str, color: bool) -> str:
    """`word` in the colours of the kind of operation that its first letter names."""
    codes = {kind.letter: kind.sgr for kind in KINDS.values()}
    if not color or word[0] not in codes:
        return word
    return f"\x1b[{codes[word[0]]}m{word}\x1b[0m"
