"""A model and where it is cut, as a figure. Lengths are in inches, and y runs downward."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jpipe._util.figures import new_figure
from jpipe.draw._shared import LayerRow, StageRows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#fb9a99", "#e6d690")
"""The colours of stages, in turn."""
TOGETHER = "#cccccc"
"""The colour of layers that all stages run together."""

MOST_COLUMNS = 4
_MARGIN, _TOP = 0.25, 0.75
_COLUMN, _BETWEEN = 2.8, 0.45
_HEADER, _FOOTER = 0.45, 0.65  # above the boxes of a stage, and below them
_LINE, _PADDING = 0.155, 0.05  # of a box
_ARROW = 0.24
_LARGE, _SMALL = 8, 7  # font sizes
_LETTER = {"normal": 0.6, "bold": 0.68}  # the width of a letter, in font sizes


def figure(headline: str, stages: Sequence[StageRows]) -> "Figure":
    """Draws a column of boxes per stage. See `ModelPicture.figure`."""
    bands = [stages[i : i + MOST_COLUMNS] for i in range(0, len(stages), MOST_COLUMNS)]
    heights = [max(map(_height, band)) for band in bands]
    num_columns = max(2, min(len(stages), MOST_COLUMNS))  # two leave room for the headline
    width = 2 * _MARGIN + num_columns * (_COLUMN + _BETWEEN) - _BETWEEN
    height = _TOP + sum(heights)
    drawn = new_figure(width, height, facecolor="white")
    axes = drawn.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    title, _, totals = headline.rpartition(": ")
    caption = "A bar is as long as the FLOPs of its layer. Bytes on arrows are of one microbatch."
    room = width - 2 * _MARGIN
    _write(axes, _MARGIN, 0.22, title, size=10, room=room, weight="bold")
    _write(axes, _MARGIN, 0.42, totals, size=_LARGE, room=room)
    _write(axes, _MARGIN, 0.42 + _LINE, caption, size=_SMALL, room=room)
    longest = max((row.share for stage in stages for row in stage.rows), default=0) or 1
    top = _TOP
    for band, band_height in zip(bands, heights):
        for k, stage in enumerate(band):
            left = _MARGIN + k * (_COLUMN + _BETWEEN)
            bottom = _draw_stage(axes, stage, left, top, longest)
            if stage is not stages[-1]:
                _draw_cut(axes, stage, left, top, bottom, neighbour=stage is not band[-1])
        top += band_height
    return drawn


def _box_height(row: LayerRow) -> float:
    return (2 + len(row.notes)) * _LINE + 2 * _PADDING


def _height(stage: StageRows) -> float:
    return _HEADER + sum(_box_height(row) + _ARROW for row in stage.rows) - _ARROW + _FOOTER


def _draw_stage(axes: "Axes", stage: StageRows, left: float, top: float, longest: float) -> float:
    """Draws the boxes of a stage. Returns where the last one ends."""
    from matplotlib.patches import Rectangle

    color = TOGETHER if stage.number is None else COLORS[stage.number % len(COLORS)]
    _write(axes, left, top + 0.13, stage.title, size=_LARGE, weight="bold")
    _write(axes, left, top + 0.13 + _LINE, stage.totals, size=_SMALL)
    y, before, bottom = top + _HEADER, "", top + _HEADER
    for row in stage.rows:
        height = _box_height(row)
        if row is not stage.rows[0]:
            _draw_arrow(axes, [(left + 0.3, y - _ARROW), (left + 0.3, y)], cut=False)
            _write(axes, left + 0.4, y - _ARROW / 2, before, size=_SMALL)
        axes.add_patch(Rectangle((left, y), _COLUMN * row.share / longest, height, fc=color, ec="none"))
        axes.add_patch(Rectangle((left, y), _COLUMN, height, fc="none", ec="#555555", lw=0.8))
        numbers = f"{row.num_parameters:,} parameters, {row.flops} FLOPs ({row.share:.1%})"
        _write(axes, left + 0.07, y + _PADDING + 0.5 * _LINE, f"{row.numbers}  {row.name}", size=_LARGE)
        for i, words in enumerate([numbers, *row.notes], 1):
            _write(axes, left + 0.07, y + _PADDING + (i + 0.5) * _LINE, words, size=_SMALL)
        y, before, bottom = y + height + _ARROW, row.out, y + height
    return bottom


def _draw_cut(axes: "Axes", stage: StageRows, left: float, top: float, bottom: float, neighbour: bool) -> None:
    """Draws what crosses to the next stage: an arrow to the column beside it, or to the band below."""
    x, foot = left + 0.3, bottom + 0.17
    path = [(x, bottom), (x, foot)]
    if neighbour:
        gutter, head = left + _COLUMN + _BETWEEN / 2, top + _HEADER + 0.12
        path += [(gutter, foot), (gutter, head), (left + _COLUMN + _BETWEEN, head)]
    _draw_arrow(axes, path, cut=bool(stage.cut))
    lines = [f"cut: {stage.cut[0]}", *stage.cut[1:]] if stage.cut else [stage.rows[-1].out]
    for i, words in enumerate(lines):
        _write(axes, x + 0.1, foot + 0.1 + i * _LINE, words, size=_SMALL, weight="bold" if stage.cut else "normal")


def _draw_arrow(axes: "Axes", path: Sequence[tuple[float, float]], *, cut: bool) -> None:
    width, color = (1.8, "black") if cut else (0.8, "#555555")
    axes.plot(*zip(*path[:-1], strict=True), color=color, lw=width, solid_joinstyle="miter")
    arrow = {"arrowstyle": "-|>", "color": color, "lw": width, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    axes.annotate("", path[-1], path[-2], arrowprops=arrow)


def _write(
    axes: "Axes", x: float, y: float, words: str, *, size: float, room: float = _COLUMN - 0.14, weight: str = "normal"
) -> None:
    """Writes one line, with its middle left out if it is too long."""
    fits = int(72 * room / (_LETTER[weight] * size))
    if len(words) > fits:
        kept = fits - 3
        words = f"{words[: (kept + 1) // 2]}...{words[len(words) - kept // 2 :]}"
    axes.text(x, y, words, fontsize=size, weight=weight, va="center", parse_math=False)
