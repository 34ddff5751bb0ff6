"""The text form of a table: `Schedule.to_text`, `Schedule.from_text` and error messages.

A header names the columns as `stage@device`. Each row after it is a tick, each word of a
row is a cell: `F3` (forward of microbatch 3), `B1`, `W0`, `U1` (update that writes weight
version 1), joined by commas, or `.` if the column is idle. `F3@-1` reads weight version
-1; `@0` is left out. A line `slices 4` before the header says that 4 microbatches after
one another are slices of the same sequences. A line `message_ticks 2` there says that a message between
devices is read 2 ticks after it was sent, or later; `message_ticks 1 2 1` says so of each boundary.
"""

import re

import numpy as np

from jpipe._table.cells import IDLE, idle_cells
from jpipe._table.table import Table
from jpipe._util.foreign import shortened, shown

_LETTERS = {"F": "forward", "B": "backward", "W": "weight_grad", "U": "update"}
_OPERATION = re.compile(r"([FB])(-?\d+)(?:@(-?\d+))?|([WU])(-?\d+)", re.ASCII)
_COLUMN = re.compile(r"(\d+)@(\d+)", re.ASCII)
_SLICES, _MESSAGE_TICKS = "slices", "message_ticks"
_FACTS = {_SLICES: "the number of slices, `slices 4`", _MESSAGE_TICKS: "numbers of ticks, `message_ticks 2`"}
"""First word of a line before the header -> what the line states."""


def to_text(table: Table) -> str:
    """See `Schedule.to_text`."""
    slices = f"{_SLICES} {table.num_slices}\n" if table.num_slices > 1 else ""
    ticks = "" if table.message_ticks == 1 else f"{_MESSAGE_TICKS} {message_ticks_text(table)}\n"
    return slices + ticks + "".join(line + "\n" for line in _align(cell_rows(table)))


def message_ticks_text(table: Table) -> str:
    """The ticks of messages: one number, or one for each boundary.

    Example:
      >>> from jpipe.schedules import gpipe
      >>> message_ticks_text(gpipe(3, 4, message_ticks=(1, 2)))
      '1 2'
    """
    return " ".join(map(str, np.atleast_1d(table.message_ticks)))


def cell_rows(table: Table) -> list[list[str]]:
    """The header, then one row of cell texts per tick."""

    def cell(t: int, c: int) -> str:
        operations = []
        for letter, field in _LETTERS.items():
            value = getattr(table, field)[t, c]
            if value == IDLE:
                continue
            version = 0
            if field in ("forward", "backward"):
                version = getattr(table, f"{field}_version")[t, c]
            operations.append(f"{letter}{value}" + (f"@{version}" if version else ""))
        return ",".join(operations) or "."

    header = [f"{s}@{d}" for s, d in zip(table.stage, table.device, strict=True)]
    columns = range(table.num_columns)
    rows = [[cell(t, c) for c in columns] for t in range(table.num_ticks)]
    return [header, *rows]


def parse(text: str) -> dict:
    """The arguments of `Schedule` that a text states, all but the name.

    Raises:
      ValueError: naming the line that cannot be read.
    """
    lines = [
        (number, words)
        for number, line in enumerate(text.splitlines(), start=1)
        if (words := line.split("#")[0].split())
    ]
    facts: dict[str, list[int]] = {}
    while lines and lines[0][1][0] in _FACTS:
        (number, (fact, *words)), *lines = lines
        if not words or len(words) > 1 and fact == _SLICES or not all(word.isdecimal() for word in words):
            given = shortened(" ".join([fact, *words]), 200)
            raise ValueError(f"line {number}: write {_FACTS[fact]}, got `{given}`.")
        facts[fact] = [_number(word, word, number) for word in words]
    if len(lines) < 2:
        raise ValueError(
            "a table needs a header such as `0@0 1@1` and at least one row such as "
            f"`F0 .`, got {len(lines)} lines that are neither blank nor a comment."
        )
    (number, header), *rows = lines
    columns = [_COLUMN.fullmatch(word) for word in header]
    if not all(columns):
        raise ValueError(
            f"line {number}: the header must name columns `stage@device`, such as "
            f"`0@0 1@1`, got `{shortened(' '.join(header), 200)}`."
        )
    cells = idle_cells(len(rows), len(header))
    for t, (row, words) in enumerate(rows):
        if len(words) != len(header):
            raise ValueError(
                f"line {row}: {len(words)} cells for {len(header)} columns. Write "
                "`.` in an idle cell and `,` within a cell, as in `F1,B0`."
            )
        for c, word in enumerate(words):
            _parse_cell(word, row, cells, t, c)
    stage, device = (np.array([_number(column[i], column[0], number) for column in columns if column]) for i in (1, 2))
    forwards = cells["forward"] != IDLE
    counts = [int(forwards[:, stage == s].sum()) for s in np.unique(stage)]
    num_microbatches = max(counts, key=lambda n: (counts.count(n), n))
    (num_slices,), message_ticks = facts.get(_SLICES, [1]), facts.get(_MESSAGE_TICKS, [1])
    return dict(
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        message_ticks=message_ticks if len(message_ticks) > 1 else message_ticks[0],
        stage=stage,
        device=device,
        **cells,
    )


def _parse_cell(word: str, number: int, cells: dict, t: int, c: int) -> None:
    """Writes the operations of one cell text, found on line `number`, into `cells`."""
    for operation in word.split(",") if word != "." else []:
        match = _OPERATION.fullmatch(operation)
        if match is None:
            raise ValueError(
                f"line {number}: cannot read `{shortened(operation, 200)}`; a cell is `.` or any of "
                "`F3`, `B1@-1`, `W0`, `U1` joined by commas."
            )
        field = _LETTERS[match[1] or match[4]]
        if cells[field][t, c] != IDLE:
            raise ValueError(
                f"line {number}: `{shortened(word, 200)}` has two of `{operation[0]}`; a column runs "
                "each kind of operation at most once per tick."
            )
        cells[field][t, c] = _number(match[2] or match[5], operation, number)
        if match[1]:
            version = _number(match[3] or "0", operation, number)
            cells[f"{field}_version"][t, c] = version


def _number(digits: str, word: str, number: int) -> int:
    """A number of a word on line `number`, if a table can hold it."""
    most = np.iinfo(np.int32).max
    size = digits.lstrip("-").lstrip("0") or "0"
    if len(size) > len(str(most)) or int(size) > most:
        raise ValueError(
            f"line {number}: `{shortened(word, 200)}` has a number outside of -{most} .. {most}, which a table cannot "
            "hold. Number stages, devices, microbatches and versions from 0, or from the round as in `B-1`."
        )
    return -int(size) if digits.startswith("-") else int(size)


def with_mark(table: Table, message: str, tick: int | None, column: int) -> str:
    """An error message: `message`, its tick and stage, and the table with that cell marked.

    Args:
      table: the table to show.
      message: the fault.
      tick: the row of the cell. None blames the whole column and marks its header.
      column: the column of the cell.
    """
    where = f"stage {table.stage[column]}"
    if table.has_copies:
        where += f", device {table.device[column]}"
    if tick is not None:
        where = f"tick {tick}, {where}"
    marked_row = 0 if tick is None else tick + 1
    rows = cell_rows(table)
    for r, row in enumerate(rows):
        row[:] = [f"[{cell}]" if (r, c) == (marked_row, column) else f" {cell} " for c, cell in enumerate(row)]
    labels = ["", *(f"tick {t}" for t in range(table.num_ticks))]
    cells = [[label, *row] for label, row in zip(labels, rows, strict=True)]
    shown_rows = _around(marked_row, len(cells))
    shown_columns = _around(column + 1, len(cells[0]))
    lines = _align([[cells[r][c] for c in shown_columns] for r in shown_rows])
    lines[shown_rows.index(marked_row)] += "  <-- here"
    return "\n".join([f"schedule {shown(table.name)}, {where}: {message}", *lines])


_MOST_SHOWN = 40
"""Rows, and columns, of a table that an error message shows."""


def _around(index: int, size: int) -> list[int]:
    """The head of a table, and the indices around one that a message shows."""
    start = max(1, min(index - _MOST_SHOWN // 2, size - _MOST_SHOWN))
    return [0, *range(start, min(start + _MOST_SHOWN, size))]


def _align(rows: list[list[str]]) -> list[str]:
    """Pads the cells so that columns stand two spaces apart. Returns one line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
