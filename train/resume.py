"""Checkpoints of a run, and the run that goes on from one."""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jpipe
from train import flags
from train.config import TrainConfig
from train.log import Log

# With another value of these, the run would be another training.
_FIXED = ("model", "data", "batch_size", "seed")


def resumed_config(
    arguments: Sequence[str],
) -> tuple[pathlib.Path | None, str, TrainConfig]:
    """Reads a command line.

    Args:
      arguments: the words after the script's name: `--config FILE` or `--resume FOLDER`, and
        options of the configuration.

    Returns:
      The folder of the run that is resumed, or None; the name of the configuration; the
      configuration.

    Raises:
      ValueError: if the command line or the file is wrong, or an option cannot change.
      OSError: if a file cannot be read, or there is no such run.
    """
    folder, rest = _resumed_folder(arguments)
    if folder is None:
        return None, *flags.parse(rest, TrainConfig, ["--resume"])
    for word in rest:
        if word.partition("=")[0] in ("--config", "--config.run_dir"):
            raise ValueError(
                f"`--resume {folder}` reads the options of that run and goes on in its folder, "
                f"got `{word}` too. Leave it out, or start a new run without `--resume`."
            )
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no run `{folder}`: it has no `config.json`. Name the folder of a run; "
            "training prints it as `run folder`."
        )
    name, config = flags.parse(
        ["--config", str(file), *rest], TrainConfig, ["--resume"]
    )
    before = flags.load(str(file), TrainConfig)
    for field in _FIXED:
        now, then = getattr(config, field), getattr(before, field)
        if now != then:
            raise ValueError(
                f"`{field}` cannot change when a run is resumed, got {now} instead of {then}. "
                "Start a new run for another training."
            )
    return folder, name, config


def _resumed_folder(arguments: Sequence[str]) -> tuple[pathlib.Path | None, list[str]]:
    """The folder after `--resume`, and the other words."""
    folder, rest, words = None, [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option != "--resume":
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise ValueError(
                "`--resume` needs the folder of a run: `--resume runs/NAME`."
            )
        folder = pathlib.Path(value)
    return folder, rest


class Resumed(NamedTuple):
    """Where training starts.

    Attributes:
      pipe: the pipeline that trains first.
      state: its state.
      step: the steps before.
      log: the position of the log there, see `Log.position`; None at the start of a run.
    """

    pipe: jpipe.Pipeline
    state: jpipe.PipelineState
    step: int
    log: Mapping[str, Any] | None

    @classmethod
    def restored(
        cls,
        checkpoints: jpipe.Checkpoints,
        batch: Any,
        pipe: jpipe.Pipeline,
        warm_up: jpipe.Pipeline | None,
        synchronous_steps: int,
    ) -> "Resumed":
        """Restores the newest checkpoint of a run.

        Args:
          checkpoints: of the run.
          batch: a minibatch.
          pipe: the pipeline of the configured schedule.
          warm_up: the pipeline of the first `synchronous_steps`, or None.
          synchronous_steps: steps of the warm-up.

        Raises:
          FileNotFoundError: if the run has no checkpoint.
          ValueError: if the checkpoint does not fit the pipeline.
        """
        steps = checkpoints.steps()
        if not steps:
            raise FileNotFoundError(
                f"`{checkpoints.directory}` has no checkpoint to resume from. Train with "
                "`--config.checkpoint.every=STEPS`."
            )

        def trains(step: int) -> jpipe.Pipeline:
            """The pipeline that has made a step."""
            return pipe if warm_up is None or step > synchronous_steps else warm_up

        restored = checkpoints.restore(trains(steps[-1]), batch)
        first = trains(restored.step)
        if first is not trains(steps[-1]):  # the newest one is damaged
            restored = checkpoints.restore(first, batch, restored.step)
        return cls(first, restored.state, restored.step, restored.run["log"])


class Saver:
    """Saves the checkpoints of a run.

    If one cannot be saved, a warning says so, once, and training goes on.

    Args:
      run_dir: the folder of the run, for a message.
      checkpoints: of the run.
      every: steps between checkpoints; None: there are none.
      first: the step whose checkpoint the run goes on from; 0: it begins.

    Attributes:
      problem: why the newest checkpoint could not be saved; empty if it was.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        checkpoints: jpipe.Checkpoints,
        every: int | None,
        first: int = 0,
    ):
        self._run_dir, self._checkpoints, self._every = run_dir, checkpoints, every
        self._saving: int | None = None
        self._newest: int | None = first or None
        self._has_warned = False
        self.problem = ""

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: object) -> None:
        self._finish()

    def saves(self, step: int, ends: bool) -> bool:
        """Whether there is a checkpoint after a step."""
        return self._every is not None and (ends or step % self._every == 0)

    def save(self, step: int, state: jpipe.PipelineState, log: Log) -> None:
        """Saves a checkpoint while training goes on."""
        self._finish()
        try:
            self._checkpoints.save(step, state, run={"log": log.position()})
            self._saving = step
        except OSError as error:
            self._warn(error)

    def how_to_resume(self) -> str:
        """A sentence for a run that was stopped; empty without a checkpoint."""
        self._finish()
        words = f" {self.problem}" if self.problem else ""
        if self._newest is not None:
            words += f" Go on after step {self._newest}: python train/train.py --resume {self._run_dir}."
        return words

    def _finish(self) -> None:
        """Waits for the save that goes on."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        try:
            self._checkpoints.wait()
        except OSError as error:
            self._warn(error)
        else:
            self._newest, self.problem = step, ""

    def _warn(self, error: OSError) -> None:
        self.problem = f"{error}."
        if not self._has_warned:
            print(
                f"train.py: warning: {error}. Training goes on, and the next checkpoint is "
                "tried again.",
                file=sys.stderr,
                flush=True,
            )
        self._has_warned = True
