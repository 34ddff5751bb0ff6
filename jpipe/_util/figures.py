"""Figures of Matplotlib, which is an optional package."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, **options: Any) -> "Figure":
    """A figure of a size in inches, which belongs to no window.

    Args:
      width, height: its size.
      **options: of `matplotlib.figure.Figure`.

    Raises:
      ImportError: if Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"pictures need Matplotlib, which cannot be imported ({error}). Install it: "
            '`pip install "matplotlib>=3.9"`, or install this package with its extra `[plot]`.'
        ) from error
    return Figure(figsize=(width, height), **options)
