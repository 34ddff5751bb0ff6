"""Measured times as a Gantt chart: text, and a figure of one or several charts on one axis of time.

What other rooms need to write them to files stands here too.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jpipe._util.figures import new_figure
from jpipe.draw._export import Slice as Slice
from jpipe.draw._export import trace_events as trace_events
from jpipe.draw._figure import BACKGROUND, DIGIT, draw_bar, draw_legend, lighter
from jpipe.draw._figure import SUFFIXES as SUFFIXES
from jpipe.draw._figure import write as write
from jpipe.draw._shared import KINDS, Kind
from jpipe.draw._shared import headline as headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_KINDS = {
    **KINDS,
    "update": Kind("U", "#333333", ""),
    "message": Kind("m", "#f0b36b", ""),
    "embed": Kind("E", "#b39ddb", ""),
    "head": Kind("H", "#7e57c2", ""),
    "embed_backward": Kind("D", "#5e35b1", ""),
    "commit": Kind("C", "#bdbdbd", ""),
}
"""Operation -> the letter and the colours of its bars. Idle time has no bar."""

_NAMES = {"weight_grad": "weight gradient", "embed_backward": "backward of the embedding", "commit": "statistics"}
_WIDTH, _ROW = 9.5, 0.3  # inches


class Bar(NamedTuple):
    """A bar of a chart.

    Attributes:
      row: its row.
      start, end: in seconds.
      operation: a key of `BAR_KINDS`.
      word: what stands in it, such as the number of a microbatch.
      lightness: 0 for the colour of the operation, up to 1 for lighter ones.
    """

    row: int
    start: float
    end: float
    operation: str
    word: str = ""
    lightness: float = 0.0


class Chart(NamedTuple):
    """A Gantt chart.

    Attributes:
      title: words above it, and below them `caption`.
      rows: the labels of the rows, from the top.
      bars: in any order; work is drawn over messages and updates.
    """

    title: str
    caption: str
    rows: Sequence[str]
    bars: Sequence[Bar]

    @property
    def seconds(self) -> float:
        """The end of the last bar."""
        return max((bar.end for bar in self.bars), default=0.0)

    @property
    def in_order(self) -> list[Bar]:
        """The bars, those drawn over others last."""
        return sorted(self.bars, key=lambda bar: bar.operation in KINDS)


def chart_text(chart: Chart, width: int = 100) -> list[str]:
    """The rows of a chart, as wide as the time of its bars: `F3fff` is the forward of microbatch 3.

    Args:
      chart: the chart.
      width: characters of a row, without its label.
    """
    per_second = width / (chart.seconds or 1.0)
    rows = [["."] * width for _ in chart.rows]
    for bar in chart.in_order:
        letter = BAR_KINDS[bar.operation].letter
        first = min(int(bar.start * per_second), width - 1)
        last = min(max(first + 1, round(bar.end * per_second)), width)
        word = (letter + bar.word)[: last - first].ljust(last - first, letter.lower())
        rows[bar.row][first:last] = word
    label_width = max(map(len, chart.rows), default=0)
    return [f"{label:{label_width}} " + "".join(row) for label, row in zip(chart.rows, rows, strict=True)]


def chart_legend(charts: Sequence[Chart]) -> dict[str, str]:
    """Operation -> its name in words, for those that some chart has."""
    present = {bar.operation for chart in charts for bar in chart.bars}
    return {operation: _NAMES.get(operation, operation) for operation in BAR_KINDS if operation in present}


def charts_figure(charts: Sequence[Chart]) -> "Figure":
    """A figure of charts, one below the other, with one axis of time for all.

    Raises:
      ImportError: if Matplotlib is not installed.
    """
    from matplotlib.patches import Patch

    heights = [_ROW * len(chart.rows) for chart in charts]
    between, top, bottom, left, right = 0.58, 0.85, 0.45, 1.0, 0.15
    height = top + sum(heights) + between * (len(charts) - 1) + bottom
    figure = new_figure(_WIDTH, height, facecolor="white")
    seconds = max(chart.seconds for chart in charts)
    factor, unit = (1e3, "ms") if seconds < 10 else (1.0, "s")
    below = height - top
    for chart, inches in zip(charts, heights, strict=True):
        below -= inches
        size = ((_WIDTH - left - right) / _WIDTH, inches / height)
        axes = figure.add_axes((left / _WIDTH, below / height, *size))
        _draw(axes, chart, seconds, factor)
        axes.tick_params(bottom=chart is charts[-1], labelbottom=chart is charts[-1])
        x, y = left / _WIDTH, (below + inches) / height
        figure.text(x, y + 0.24 / height, chart.title, fontsize=9, weight="bold", va="bottom")
        figure.text(x, y + 0.07 / height, chart.caption, fontsize=8, va="bottom")
        below -= between
    axes.set_xlabel(f"time in {unit}; numbers in bars are microbatches", fontsize=8, loc="left")
    legend = chart_legend(charts)
    handles, labels = [Patch(fc=BAR_KINDS[operation].fill) for operation in legend], list(legend.values())
    if any(bar.lightness for chart in charts for bar in chart.bars):
        handles.append(Patch(fc="none", ec="none"))
        labels.append("lighter: later stages of the device")
    draw_legend(figure, handles, labels, (left / _WIDTH, 1 - 0.08 / height))
    return figure


def _draw(axes: "Axes", chart: Chart, seconds: float, factor: float) -> None:
    """The rows of a chart, with times multiplied by a factor."""
    from matplotlib.patches import Rectangle

    points = 72 * (_WIDTH - 1.15) / (seconds or 1.0)  # per second
    for bar in chart.in_order:
        fill = lighter(BAR_KINDS[bar.operation].fill, bar.lightness)
        length = bar.end - bar.start
        edge = "white" if length * points > 4 else "none"
        size = min(7.0, 0.85 * length * points / (DIGIT * max(len(bar.word), 1)))
        word = bar.word if size >= 3 else ""
        draw_bar(axes, bar.row, (bar.start * factor, length * factor), fill, word, size, ec=edge, lw=0.6)
    num_rows = len(chart.rows)
    axes.add_patch(Rectangle((0, -0.5), chart.seconds * factor, num_rows, fc=BACKGROUND, ec="none", zorder=-1))
    axes.set_xlim(0, seconds * factor)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.set_yticks(range(num_rows), chart.rows)
    axes.tick_params(labelsize=8, left=False)
    axes.set_facecolor("none")
    axes.spines[:].set_visible(False)
