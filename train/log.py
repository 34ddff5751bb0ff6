"""The log of a run: lines for people, a progress bar in a terminal, JSON for programs."""

import json
import math
import pathlib
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class NonFiniteLossError(Exception):
    """The loss of a step is not a number, or infinite."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"step {step}: the loss is {loss}.")
        self.step, self.loss = step, loss


class Log:
    """Takes the loss of every step and writes a line every `log_every` steps.

    A line has the mean loss since the line before and the speed over the same steps, but
    without the first step, which may compile. The file gets the same as one JSON object a line,
    written at once, so that a run that dies leaves its log.

    Args:
      path: the JSON file; must not exist.
      num_steps: steps in the run.
      log_every: steps to a line.
      unit, units_per_step: what speed counts, such as "images", and how many a step has.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        num_steps: int,
        log_every: int,
        unit: str,
        units_per_step: int,
    ):
        self._file = path.open("x", encoding="utf-8")
        self._num_steps, self._log_every = num_steps, log_every
        self._unit, self._units_per_step = unit, units_per_step
        self._losses, self._skipped = [], 0
        self._start = self._since = time.perf_counter()
        self._timed_steps = 0
        self.last_step = 0
        self._progress = None
        if sys.stdout.isatty():
            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=Console(highlight=False),
                transient=True,
            )
            self._bar = self._progress.add_task("", total=num_steps)
            self._progress.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._progress is not None:
            self._progress.stop()
        self._file.close()

    def step(self, step: int, loss: float | None, num_skipped: int = 0) -> None:
        """Takes the loss of step number `step`, counted from 1.

        Args:
          step: its number.
          loss: its loss; None if no microbatch finished in it (a pipeline that fills).
          num_skipped: stages that skipped their update.

        Raises:
          NonFiniteLossError: if the loss is not finite.
        """
        self.last_step = step
        if loss is not None and not math.isfinite(loss):
            self.write({"step": step, "loss": None, "error": f"the loss is {loss}"})
            raise NonFiniteLossError(step, loss)
        if loss is not None:
            self._losses.append(loss)
        self._skipped += num_skipped
        self._timed_steps += 1
        if step == 1:
            self._since, self._timed_steps = time.perf_counter(), 0
        if step % self._log_every == 0 or step == self._num_steps:
            self._line(step)
        if self._progress is not None:
            seconds = time.perf_counter() - self._since
            text = self._speed_and_time(step, seconds)
            if loss is not None:
                text = f"loss {loss:.4f}  {text}"
            self._progress.update(self._bar, completed=step, description=text)

    def _line(self, step: int) -> None:
        now = time.perf_counter()
        record = {"step": step}
        words = [f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"]
        if self._losses:
            record["loss"] = sum(self._losses) / len(self._losses)
            words.append(f"loss {record['loss']:.4f}")
        if self._timed_steps:
            seconds = now - self._since
            units = self._timed_steps * self._units_per_step
            record[f"{self._unit}_per_second"] = round(units / seconds, 1)
            words.append(self._speed_and_time(step, seconds))
        if self._skipped:
            record["skipped_updates"] = self._skipped
            words.append(f"updates skipped, gradients not finite: {self._skipped}")
        record["seconds"] = round(now - self._start, 3)
        self.write(record)
        self.print("  ".join(words))
        self._losses, self._skipped = [], 0
        self._since, self._timed_steps = now, 0

    def _speed_and_time(self, step: int, seconds: float) -> str:
        if not self._timed_steps:
            return ""
        speed = self._timed_steps * self._units_per_step / seconds
        left = (self._num_steps - step) * seconds / self._timed_steps
        minutes, seconds = divmod(round(left), 60)
        return f"{speed:,.0f} {self._unit}/s  {minutes}:{seconds:02d} left"

    def write(self, record: dict) -> None:
        """Appends a line to the JSON file."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def print(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False)
