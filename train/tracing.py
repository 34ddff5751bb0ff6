"""The trace of some steps of a run: `--config.profile=10:13`."""

import contextlib
import pathlib
import re
import warnings
from types import TracebackType

import jpipe
from jpipe._util.foreign import shown
from train.log import Log

ENDINGS = (".svg", ".json", jpipe.trace.PERFETTO)
"""The files of a trace, `trace` and each of these."""


def parse_steps(text: str) -> range:
    """The steps that `profile` names, counted from 1: "10:13" is the steps 10, 11 and 12.

    Raises:
      ValueError: if the text names none.
    """
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    steps = range(0) if match is None else range(int(match[1]), int(match[2]))
    if not steps or steps.start < 1:
        raise ValueError(
            "`profile` must be FIRST:END, the first step that is profiled and the one after the last, with steps "
            f"counted from 1 and FIRST below END, such as 10:13 for the steps 10, 11 and 12, got {shown(text)}."
        )
    return steps


class Tracer:
    """Records the steps of `profile` and writes their trace, as a context around the steps of a run.

    Args:
      steps: the steps; an empty range records nothing.
      folder: the folder of the files; None: this process writes none.
      log: the log, which shows the bubble.
    """

    def __init__(self, steps: range, folder: pathlib.Path | None, log: Log):
        self._steps, self._folder, self._log = steps, folder, log
        self._open = contextlib.ExitStack()
        self._recording: jpipe.trace.Recording | None = None

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def before(self, step: int, state: jpipe.PipelineState) -> None:
        """Begins to record if a step is the first of them that the run makes."""
        if step in self._steps and self._recording is None:
            try:
                self._recording = self._open.enter_context(jpipe.trace.record(state))
            except ValueError as error:
                self._fail(error)

    def after(self, step: int) -> None:
        """Writes the trace if a step was the last of them."""
        if step == self._steps.stop - 1:
            self.close()

    def close(self) -> None:
        """Writes the trace of the steps so far. What cannot be written is a warning: training goes on."""
        if self._recording is None:
            return
        recording, self._recording, self._steps = self._recording, None, range(0)
        with self._log.paused("saving"):
            try:
                self._open.close()
                trace = recording.trace
                for ending in ENDINGS if self._folder is not None else ():
                    trace.save(self._folder / f"trace{ending}")
            except (ValueError, OSError, ImportError) as error:
                self._fail(error)
                return
        words = f"bubble {trace.bubble:.1%} measured in {trace.num_steps} steps, {trace.table_bubble:.1%} in the table"
        self._log.print(f"trace: {words}")

    def _fail(self, error: Exception) -> None:
        """Says that there is no trace."""
        self._steps = range(0)
        warnings.warn(f"no trace of the steps of `profile`: {error}", stacklevel=3)
