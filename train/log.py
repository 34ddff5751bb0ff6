"""The log of a run: lines for people, a progress bar in a terminal, JSON for programs."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from train.goodput import Goodput
from train.plot import evaluation_text
from train.writers import Writer

try:
    import resource
except ImportError:  # Windows
    resource = None

# A dynamic loss scale may skip this many updates before it has found its value.
_FEWEST_SKIPPED = 20


class NonFiniteLossError(Exception):
    """The loss of a step, or of the held-out data after it, is infinite or NaN."""

    def __init__(self, step: int, loss: float, what: str = "loss"):
        super().__init__(f"step {step}: the {what} is {loss}.")
        self.step, self.loss = step, loss


class NonFiniteGradientsError(Exception):
    """No step since the line of the log before has updated the weights."""

    def __init__(self, step: int, num_steps: int):
        super().__init__(
            f"step {step}: the gradients of the last {num_steps} steps were not finite, "
            "so none of them updated the weights."
        )
        self.step, self.num_steps = step, num_steps


class Log:
    """Takes the numbers of every step and writes a line every `log_every` steps.

    A line holds the means over the steps since the line before, and their speed. The
    speed leaves out the first step of a process, which may include compilation. The same goes to a
    JSON file with one record per line, which also holds the numbers of every step, and to other
    writers. The file is flushed after each record, so a run that dies leaves its log.

    If a record cannot be written, one warning says so and training goes on. The record is
    kept and written later, once there is space. A writer that fails gets no more records.

    Args:
      path: the JSON file; must not exist, unless a run is resumed. None, for processes
        beside the first: nothing is written or printed.
      num_steps: number of steps in the run.
      log_every: number of steps per line.
      unit: the things that the speed counts, such as "images".
      batch_size: the samples of a step, for their speed where a sample is not one unit; None: it is.
      steps_per_epoch: the steps in which every example is read once; None: no epochs are counted.
      learning_rate: function from a step, counted from 1, to its learning rate.
      start: the `time.perf_counter()` at which "seconds" are 0.
      resumed: the result of `position` in the run that goes on here. Records that came
        later are removed, because the run writes them again.
      writers: get every record too, such as those of `train/writers.py`. They are closed with the log.

    Attributes:
      last_step: the last step that was recorded.
      last_held_out: the last step whose weights were evaluated on the held-out data.

    Raises:
      OSError: if the files cannot be made.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        *,
        num_steps: int,
        log_every: int,
        unit: str,
        learning_rate: Callable[[int], float],
        start: float,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        resumed: Mapping[str, Any] | None = None,
        writers: Sequence[Writer] = (),
    ):
        self._first_step = 1 if resumed is None else resumed["last_step"] + 1
        self._unwritten: list[dict] = []
        self._warned: set[str] = set()
        self._path, self._writers = path, list(writers)
        self._goodput = Goodput(time.perf_counter, start, (resumed or {}).get("goodput_seconds"))
        if path is not None:
            self._open(path, resumed)
        self._num_steps, self._log_every = num_steps, log_every
        self._batch_size, self._steps_per_epoch = batch_size, steps_per_epoch
        self._unit, self._learning_rate, self._start = unit, learning_rate, start
        self._losses: list[float | None] = []
        self._gradient_norms: list[float | None] = []
        self._skipped = self._steps_without_update = 0
        self._reports: dict[str, dict[str, Any]] = {}
        self._since = time.perf_counter()
        self._timed_steps = self._timed_units = 0
        self.last_step = self._last_line = self.last_held_out = 0
        if resumed is not None:
            self._losses, self._gradient_norms = (list(resumed[name]) for name in ("losses", "gradient_norms"))
            self._skipped = resumed["skipped"]
            self._steps_without_update = resumed["steps_without_update"]
            self.last_step, self._last_line = resumed["last_step"], resumed["last_line"]
            # Older runs evaluated before they saved.
            self.last_held_out = resumed.get("last_held_out", self.last_step)
            self._unwritten = list(resumed["unwritten"])
            self._start -= resumed["seconds"]
        self._progress = None
        if path is not None and sys.stdout.isatty():
            self._progress = Progress(
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                console=Console(highlight=False),
                transient=True,
            )
            self._bar = self._progress.add_task("", total=num_steps)
            self._progress.start()

    def _open(self, path: pathlib.Path, resumed: Mapping[str, Any] | None) -> None:
        # Without a buffer: after a failed write there is nothing left to write again.
        if resumed is not None and path.exists():
            self._file = path.open("r+b", buffering=0)
            later = self._file.read()[resumed["bytes"] :]
            self._goodput.lose(max(0.0, _last_seconds(later) - resumed["seconds"]))
            self._file.truncate(min(resumed["bytes"], path.stat().st_size))
            self._file.seek(0, os.SEEK_END)
        else:
            # There may be the log of a run that ended before its first checkpoint.
            self._file = path.open("wb", buffering=0)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the progress bar, and closes the file and the writers; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._write_unwritten()
        self._file.close()
        while self._writers:
            with contextlib.suppress(Exception):  # of any package
                self._writers.pop().close()

    @property
    def num_unwritten(self) -> int:
        """The number of records that could not be written."""
        return len(self._unwritten)

    def position(self) -> dict[str, Any]:
        """The position of the log in values for JSON. A run goes on from it."""
        return {
            "bytes": 0 if self._path is None else os.fstat(self._file.fileno()).st_size,
            "unwritten": self._unwritten,
            "seconds": self.seconds(),
            "last_step": self.last_step,
            "last_line": self._last_line,
            "last_held_out": self.last_held_out,
            "losses": self._losses,
            "gradient_norms": self._gradient_norms,
            "skipped": self._skipped,
            "steps_without_update": self._steps_without_update,
            "goodput_seconds": self._goodput.seconds(),
        }

    def step(
        self,
        step: int,
        loss: float | None,
        *,
        num_units: int,
        gradient_norm: float | None = None,
        num_skipped: int = 0,
        updated: bool = True,
        reports: Mapping[str, Mapping[str, float | Mapping[str, float]]] | None = None,
    ) -> None:
        """Records one step.

        Args:
          step: the number of the step, counted from 1.
          loss: the loss; None if no microbatch finished in this step, because an
            asynchronous pipeline still fills.
          num_units: number of units in the minibatch, such as images, for the speed.
          gradient_norm: the norm of the gradient over all stages; None if there was no
            update. A norm that is not finite belongs to a skipped update and is left out
            of means.
          num_skipped: number of stages that skipped their update.
          updated: whether any stage was updated.
          reports: further numbers of the step, by what they are about: "compression", the report of the compressors
            (see `jpipe.Pipeline.step`), "layers", what layers report (`models.losses.Loss.statistics`), and
            "diagnostics", those of late gradients. A dict of numbers has one for each stage.

        Raises:
          NonFiniteLossError: if the loss is not finite.
          NonFiniteGradientsError: if no stage was updated since the line before, and for
            at least 20 steps.
        """
        if loss is not None and not math.isfinite(loss):
            self.finish_line()
            self.last_step = step
            self.write({"step": step, "loss": None, "error": f"the loss is {loss}"})
            raise NonFiniteLossError(step, loss)
        self.last_step = step
        self._reports = {name: dict(values) for name, values in (reports or {}).items() if values}
        if gradient_norm is not None and not math.isfinite(gradient_norm):
            gradient_norm = None
        self._losses.append(loss)
        self._gradient_norms.append(gradient_norm)
        self._skipped += num_skipped
        self._steps_without_update = 0 if updated else self._steps_without_update + 1
        if step == self._first_step:
            self._since = time.perf_counter()
            self._goodput.begin("training")
        else:
            self._timed_steps += 1
            self._timed_units += num_units
        if step % self._log_every == 0 or step == self._num_steps:
            self.finish_line()
            num_steps = self._steps_without_update
            if num_steps >= max(self._log_every, _FEWEST_SKIPPED):
                error = f"the gradients of the last {num_steps} steps were not finite"
                self.write({"step": step, "error": error})
                raise NonFiniteGradientsError(step, num_steps)
        if self._progress is not None:
            seconds = time.perf_counter() - self._since
            words = self._epochs(step) + self._speed_and_time(seconds)
            if loss is not None:
                words.insert(0, f"loss {loss:.4f}")
            self._progress.update(self._bar, completed=step, description="  ".join(words))

    def finish_line(self) -> None:
        """Writes a line for the steps since the line before, if there are any."""
        if self.last_step == self._last_line:
            return
        now, step = time.perf_counter(), self.last_step
        rates = [self._learning_rate(k) for k in range(self._last_line + 1, step + 1)]
        record: dict[str, Any] = {"step": step}
        words = [self._place(step), f"{step / self._num_steps:4.0%}", *self._epochs(step)]
        if self._steps_per_epoch is not None:
            record["epoch"] = round(step / self._steps_per_epoch, 4)
        loss, norm = _mean(self._losses), _mean(self._gradient_norms)
        if loss is not None:
            record["loss"] = loss
            words.append(f"loss {loss:.4f}")
        if norm is not None:
            record["gradient_norm"] = norm
            words.append(f"gradient {norm:.3g}")
        record["learning_rate"] = rates[-1]
        words.append(f"rate {rates[-1]:.3g}")
        if self._timed_steps:
            seconds = now - self._since
            record[f"{self._unit}_per_second"] = round(self._timed_units / seconds, 1)
            if self._timed_samples:
                record["samples_per_second"] = round(self._timed_samples / seconds, 1)
            words += self._speed_and_time(seconds)
        if self._skipped:
            record["skipped_updates"] = self._skipped
            words.append(f"updates skipped, gradients not finite: {self._skipped}")
        for about, values in self._reports.items():
            record[about] = values
            words += [f"{name.replace('_', ' ')} {_range(value)}" for name, value in values.items() if value != {}]
        num_bytes = peak_memory_bytes()
        if num_bytes is not None:
            record["peak_memory_bytes"] = num_bytes
            words.append(f"peak {num_bytes / 2**20:,.0f} MiB")
        record["seconds"] = self.seconds()
        record["goodput_seconds"] = self._goodput.seconds()
        record["each_step"] = {
            "loss": _rounded(self._losses),
            "gradient_norm": _rounded(self._gradient_norms),
            "learning_rate": _rounded(rates),
        }
        self._losses, self._gradient_norms, self._skipped = [], [], 0
        self._timed_steps = self._timed_units = 0
        self._since, self._last_line = now, step
        self.write(record)
        self.print("  ".join(words))

    def takes_over(self, step: int, schedule: str) -> None:
        """Records that another schedule takes over after a step.

        Args:
          step: the last step of the schedule before.
          schedule: the name of the schedule that takes over.
        """
        self.write({"step": step, "schedule": schedule, "seconds": self.seconds()})
        self.print(f"{self._place(step)}  {schedule} takes over")

    def held_out(self, step: int, result: dict[str, float]) -> None:
        """Records an evaluation on the held-out data.

        Args:
          step: the last step before the evaluation.
          result: "test_loss" in nats; "test_" plus the name of each metric of the model's
            loss, such as "test_accuracy"; and "bits_per_byte" of a text.

        Raises:
          NonFiniteLossError: if the loss is not finite.
        """
        loss = result["test_loss"]
        if not math.isfinite(loss):
            error = f"the held-out loss is {loss}"
            self.write({"step": step, "test_loss": None, "error": error})
            raise NonFiniteLossError(step, loss, "held-out loss")
        self.last_held_out = step
        self.write({"step": step, **result, "seconds": self.seconds()})
        place = "" if step == self._num_steps else f"{self._place(step)}  "
        self.print(f"{place}held-out {self._unit}: {evaluation_text(result)}")

    @contextlib.contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """Leaves the time inside the `with` block out of the speed, and counts it as that of a kind of `Goodput`."""
        start = time.perf_counter()
        try:
            with self._goodput.spent(kind):
                yield
        finally:
            self._since += time.perf_counter() - start

    def waited(self, seconds: float) -> None:
        """Counts seconds of training in which the devices waited for a minibatch."""
        self._goodput.move(seconds, "waiting")

    def print_goodput(self) -> None:
        """Prints what the seconds of the run went to."""
        self.print(self._goodput.text())

    def seconds(self) -> float:
        """Seconds since `start`."""
        return round(time.perf_counter() - self._start, 3)

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"

    def _epochs(self, step: int) -> list[str]:
        """How often every example has been read, and will have been at the end."""
        if self._steps_per_epoch is None:
            return []
        now, end = (k / self._steps_per_epoch for k in (step, self._num_steps))
        digits = 1 if end >= 10 else 2
        return [f"epoch {now:.{digits}f}/{end:.{digits}f}"]

    def _speed_and_time(self, seconds: float) -> list[str]:
        if not self._timed_steps:
            return []
        words = [f"{self._timed_units / seconds:,.0f} {self._unit}/s"]
        if self._timed_samples:
            words.insert(0, f"{self._timed_samples / seconds:,.1f} samples/s")
        left = (self._num_steps - self.last_step) * seconds / self._timed_steps
        minutes, left = divmod(round(left), 60)
        return [*words, f"{minutes}:{left:02d} left"]

    @property
    def _timed_samples(self) -> int:
        """The samples of the timed steps, such as sentences of tokens; 0 if a sample is one unit."""
        samples = self._timed_steps * (self._batch_size or 0)
        return 0 if samples == self._timed_units else samples

    def write(self, record: dict) -> None:
        """Appends a record to the file, the whole record or nothing, and gives it to the writers.

        Args:
          record: values by name; the step is under "step".
        """
        if self._path is None:
            return
        self._unwritten.append(record)
        try:
            self._write_unwritten()
        except OSError as error:
            self._warn(
                f"step {record['step']}: cannot write the log `{self._path}`: "
                f"{error.strerror or error}. Training goes on, and the log is written as "
                "soon as it can be."
            )
        for writer in tuple(self._writers):
            try:
                writer.write(record)
            except Exception as error:  # of any package
                self._writers.remove(writer)
                with contextlib.suppress(Exception):
                    writer.close()
                if not (isinstance(error, OSError) and self._unwritten):  # which is the same full disk
                    name = type(writer).__name__
                    self._warn(f"step {record['step']}: {name} gets no more records: {error}. Training goes on.", name)

    def _write_unwritten(self) -> None:
        # A file that was removed can still be written, and would be lost.
        if self._unwritten and not self._path.exists():
            anew = self._path.open("xb", buffering=0)
            self._file.close()
            self._file = anew
            self._warn(
                f"step {self.last_step}: the log `{self._path}` was removed, and its records up to here are lost. "
                "Training goes on with a new log."
            )
        while self._unwritten:
            self._append(json.dumps(self._unwritten[0]).encode() + b"\n")
            del self._unwritten[0]

    def _warn(self, message: str, about: str = "files") -> None:
        """Prints a warning on standard error, once about each thing."""
        if about not in self._warned:
            with contextlib.suppress(OSError):
                print(f"train.py: warning: {message}", file=sys.stderr, flush=True)
        self._warned.add(about)

    def _append(self, content: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
                self._file.seek(size)
            raise

    def print(self, line: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if self._path is None:
            return
        try:
            if self._progress is None:
                print(line, flush=True)
            else:
                self._progress.console.print(line, markup=False, highlight=False)
        except OSError as error:
            # What is still in the buffer would raise again when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._warn(
                f"step {self.last_step}: cannot write to standard output: {error.strerror or error}. Training goes on."
            )


def peak_memory_bytes() -> int | None:
    """The largest memory on the host that this process has used; None if unknown."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _last_seconds(lines: bytes) -> float:
    """The last "seconds" of some records; 0 if they have none. The last line may be cut."""
    last = 0.0
    for line in lines.splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            last = json.loads(line).get("seconds", last)
    return last


def _range(value: float | Mapping[str, float]) -> str:
    """A number, or the least and the largest of those of stages.

    Example:
      >>> _range(0.5), _range({"0": 2.0, "1": 0.25}), _range({"0": 1.0, "1": 1.0})
      ('0.5', '0.25 to 2', '1')
    """
    numbers = list(value.values()) if isinstance(value, Mapping) else [value]
    least, largest = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return least if least == largest else f"{least} to {largest}"


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the numbers; None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """The values with six significant digits, which make the file smaller."""
    return [None if value is None else float(f"{value:.6g}") for value in values]
