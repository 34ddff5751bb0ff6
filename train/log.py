"""The log of a run: lines for people, a progress bar in a terminal, JSON for programs."""

import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from train.tensorboard import EventFile

try:
    import resource
except ImportError:  # Windows
    resource = None

# Without an update for fewer steps than these, a loss scale may still find its place.
_FEWEST_SKIPPED = 20


class NonFiniteLossError(Exception):
    """The loss of a step, or of the held-out data after it, is infinite or no number."""

    def __init__(self, step: int, loss: float, what: str = "loss"):
        super().__init__(f"step {step}: the {what} is {loss}.")
        self.step, self.loss = step, loss


class NonFiniteGradientsError(Exception):
    """For a whole line of the log no step has updated the weights."""

    def __init__(self, step: int, num_steps: int):
        super().__init__(
            f"step {step}: the gradients of the last {num_steps} steps were not finite, "
            "so none of them updated the weights."
        )
        self.step, self.num_steps = step, num_steps


class Log:
    """Takes the numbers of every step and writes a line every `log_every` steps.

    A line has means since the line before and the speed over the same steps, but without
    the first step, which may compile. The file gets the same as one JSON object a line,
    and an event file for TensorBoard beside it the same again, both written at once, so
    that a run that dies leaves its log.

    Args:
      path: the JSON file; must not exist.
      num_steps: steps in the run.
      log_every: steps to a line.
      unit, units_per_step: what speed counts, such as "images", and how many a step has.
      learning_rate: step, counted from 1, to its learning rate.
      start: the `time.perf_counter()` from which "seconds" count.

    Attributes:
      last_step: the last step that was taken.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        num_steps: int,
        log_every: int,
        unit: str,
        units_per_step: int,
        learning_rate: Callable[[int], float],
        start: float,
    ):
        self._file = path.open("x", encoding="utf-8")
        self._events = EventFile(path.parent)
        self._num_steps, self._log_every = num_steps, log_every
        self._unit, self._units_per_step = unit, units_per_step
        self._learning_rate, self._start = learning_rate, start
        self._losses, self._gradient_norms, self._skipped = [], [], 0
        self._steps_without_update = 0
        self._since = time.perf_counter()
        self._timed_steps = 0
        self.last_step = self._last_line = 0
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
        self.close()

    def close(self) -> None:
        """Ends bar and files; a second time it does nothing."""
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        self._events.close()

    def step(
        self,
        step: int,
        loss: float | None,
        *,
        gradient_norm: float | None = None,
        num_skipped: int = 0,
        updated: bool = True,
    ) -> None:
        """Takes the numbers of step number `step`, counted from 1.

        Args:
          step: its number.
          loss: its loss; None if no microbatch finished in it (a pipeline that fills).
          gradient_norm: of its whole gradient. One that is not finite belongs to an
            update that was skipped, and is in no mean.
          num_skipped: stages that skipped their update.
          updated: False if that were all of them, which must not go on for ever.

        Raises:
          NonFiniteLossError: if the loss is not finite.
          NonFiniteGradientsError: if since the line before, and for 20 steps at least,
            there has been no update.
        """
        if loss is not None and not math.isfinite(loss):
            self.finish_line()
            self.last_step = step
            self.write({"step": step, "loss": None, "error": f"the loss is {loss}"})
            raise NonFiniteLossError(step, loss)
        self.last_step = step
        if loss is not None:
            self._losses.append(loss)
        if gradient_norm is not None and math.isfinite(gradient_norm):
            self._gradient_norms.append(gradient_norm)
        self._skipped += num_skipped
        self._steps_without_update = 0 if updated else self._steps_without_update + 1
        self._timed_steps += 1
        if step == 1:
            self._since, self._timed_steps = time.perf_counter(), 0
        if step % self._log_every == 0 or step == self._num_steps:
            self.finish_line()
            num_steps = self._steps_without_update
            if num_steps >= max(self._log_every, _FEWEST_SKIPPED):
                error = f"the gradients of the last {num_steps} steps were not finite"
                self.write({"step": step, "error": error})
                raise NonFiniteGradientsError(step, num_steps)
        if self._progress is not None:
            seconds = time.perf_counter() - self._since
            text = self._speed_and_time(seconds)
            if loss is not None:
                text = f"loss {loss:.4f}  {text}"
            self._progress.update(self._bar, completed=step, description=text)

    def finish_line(self) -> None:
        """Writes a line for the steps since the line before, if there are any."""
        if self.last_step == self._last_line:
            return
        now, step = time.perf_counter(), self.last_step
        record, words = {"step": step}, [self._place(step)]
        if self._losses:
            record["loss"] = sum(self._losses) / len(self._losses)
            words.append(f"loss {record['loss']:.4f}")
        if self._gradient_norms:
            norm = sum(self._gradient_norms) / len(self._gradient_norms)
            record["gradient_norm"] = norm
            words.append(f"gradient {norm:.3g}")
        record["learning_rate"] = self._learning_rate(step)
        words.append(f"rate {record['learning_rate']:.3g}")
        if self._timed_steps:
            seconds = now - self._since
            units = self._timed_steps * self._units_per_step
            record[f"{self._unit}_per_second"] = round(units / seconds, 1)
            words.append(self._speed_and_time(seconds))
        if self._skipped:
            record["skipped_updates"] = self._skipped
            words.append(f"updates skipped, gradients not finite: {self._skipped}")
        num_bytes = peak_memory_bytes()
        if num_bytes is not None:
            record["peak_memory_bytes"] = num_bytes
            words.append(f"peak {num_bytes / 2**20:,.0f} MiB")
        record["seconds"] = self.seconds()
        self.write(record)
        self.print("  ".join(words))
        self._losses, self._gradient_norms, self._skipped = [], [], 0
        self._since, self._timed_steps, self._last_line = now, 0, step

    def takes_over(self, step: int, schedule: str) -> None:
        """Writes that after step number `step` another schedule trains on."""
        self.write({"step": step, "schedule": schedule, "seconds": self.seconds()})
        self.print(f"{self._place(step)}  {schedule} takes over")

    def held_out(self, step: int, result: dict[str, float]) -> None:
        """Writes what the held-out data say after step number `step`.

        Args:
          step: its number.
          result: "test_loss", "test_accuracy" and, of a text, "bits_per_byte".

        Raises:
          NonFiniteLossError: if the loss is not finite.
        """
        loss = result["test_loss"]
        if not math.isfinite(loss):
            error = f"the held-out loss is {loss}"
            self.write({"step": step, "test_loss": None, "error": error})
            raise NonFiniteLossError(step, loss, "held-out loss")
        self.write({"step": step, **result, "seconds": self.seconds()})
        words = f"accuracy {result['test_accuracy']:.2%}, loss {loss:.4f}"
        if "bits_per_byte" in result:
            words += f", {result['bits_per_byte']:.3f} bits per byte"
        place = "" if step == self._num_steps else f"{self._place(step)}  "
        self.print(f"{place}held-out {self._unit}: {words}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not training: its time is not in the speed."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def seconds(self) -> float:
        """Time since the start."""
        return round(time.perf_counter() - self._start, 3)

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"

    def _speed_and_time(self, seconds: float) -> str:
        if not self._timed_steps:
            return ""
        speed = self._timed_steps * self._units_per_step / seconds
        left = (self._num_steps - self.last_step) * seconds / self._timed_steps
        minutes, seconds = divmod(round(left), 60)
        return f"{speed:,.0f} {self._unit}/s  {minutes}:{seconds:02d} left"

    def write(self, record: dict) -> None:
        """Appends a record, which has its step under "step", to both files."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._events.write(record)

    def print(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False)


def peak_memory_bytes() -> int | None:
    """The most memory of the host that this process has held; None if unknown."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
