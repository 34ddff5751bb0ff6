"""Checkpoints of a run, and the run that goes on from one."""

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jpipe
from jpipe._processes.restarts import FOLDER
from jpipe._util.paths import local_path
from train import flags
from train.config import TrainConfig
from train.log import Log
from train.processes import is_first

# With another value of these, the run would be another training.
_FIXED = ("model", "data", "init", "lora", "batch_size", "seed")


class Command(NamedTuple):
    """The request of a command line.

    Attributes:
      name: the name of the configuration.
      config: the configuration.
      folder: the folder of the run that is to go on; None: the run is new.
      may_start: whether that run starts if it has no checkpoint.
    """

    name: str
    config: TrainConfig
    folder: pathlib.Path | None
    may_start: bool


def read_command(arguments: Sequence[str]) -> Command:
    """Reads a command line.

    Args:
      arguments: the words after the script's name: `--config FILE`, `--resume FOLDER` or both `--config FILE` and
        `--resume-or-start FOLDER`, and options of the configuration.

    Raises:
      ValueError: if the command line or the file is wrong, or an option cannot change.
      OSError: if a file cannot be read, or there is no such run.
    """
    option, folder, rest = _folder_to_resume(arguments)
    options = {word.partition("=")[0]: word for word in rest}
    if folder is None:
        if FOLDER in os.environ:
            raise ValueError(
                "`python -m jpipe.launch --restarts` starts this run again and again, and without a folder each start "
                f"would begin at step 0. Add `{_OR_START} FOLDER` and `--config.checkpoint.every=STEPS`."
            )
        return Command(*flags.parse(rest, TrainConfig, _OPTIONS), None, False)
    not_beside, does = ["--config.run_dir"], "runs"
    if option == _RESUME:
        not_beside, does = (
            ["--config", *not_beside],
            "reads the options of that run and goes on",
        )
    for word in not_beside:
        if word in options:
            raise ValueError(
                f"`{option} {folder}` {does} in its folder, got `{options[word]}` too. Leave it out, or start a new "
                f"run without `{option}`."
            )
    if option == _OR_START:
        name, config = flags.parse(rest, TrainConfig, _OPTIONS)
        if config.checkpoint.every is None:
            raise ValueError(
                f"`{option}` goes on from a checkpoint, and this run would have none. Add "
                "`--config.checkpoint.every=STEPS`."
            )
        return Command(name, config, folder, True)
    file = folder / CONFIG
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no run `{folder}`: it has no `{CONFIG}`. Name the folder of a run; "
            "training prints it as `run folder`."
        )
    name, config = flags.parse(["--config", str(file), *rest], TrainConfig, _OPTIONS)
    check_same_training(config, file)
    if FOLDER in os.environ and config.checkpoint.every is None:
        raise ValueError(
            f"`python -m jpipe.launch --restarts` starts `{option} {folder}` again and again, and without more "
            "checkpoints each start would go on from the same step. Add `--config.checkpoint.every=STEPS`."
        )
    return Command(name, config, folder, False)


CONFIG = "config.json"
"""The file with the options of a run, in its folder."""

_RESUME, _OR_START = _OPTIONS = ("--resume", "--resume-or-start")


def check_same_training(config: TrainConfig, file: pathlib.Path) -> None:
    """Raises ValueError if a run with the options of a file cannot go on with other ones."""
    before = flags.load(str(file), TrainConfig)
    for field in _FIXED:
        now, then = getattr(config, field), getattr(before, field)
        if now != then:
            raise ValueError(
                f"`{field}` cannot change when a run is resumed, got {now} instead of {then}. "
                "Start a new run for another training."
            )


def _folder_to_resume(
    arguments: Sequence[str],
) -> tuple[str, pathlib.Path | None, list[str]]:
    """The option that names a folder to go on in, the folder, and the other words."""
    given, folder, rest, words = "", None, [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        if not value:
            raise ValueError(f"`{option}` needs the folder of a run: `{option} runs/NAME`.")
        if given:
            raise ValueError(f"`{given} {folder}` names the folder, got `{word}` too. Leave one of them out.")
        given, folder = option, local_path(value, option)
    return given, folder, rest


class Resumed(NamedTuple):
    """The start of training.

    Attributes:
      pipe: the pipeline that trains first.
      state: its state.
      step: the steps before.
      log: the position of the log there, see `Log.position`; None at the start of a run.
      data: the position of the data there, see `train.data.position_of`; None if the step says it.
    """

    pipe: jpipe.Pipeline
    state: jpipe.PipelineState
    step: int
    log: Mapping[str, Any] | None
    data: Any

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
          checkpoints: the checkpoints of the run.
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
                "`--config.checkpoint.every=STEPS`; a run that ended before its first checkpoint starts again with "
                "`--resume-or-start FOLDER --config FILE`."
            )

        def trains(step: int) -> jpipe.Pipeline:
            """The pipeline that has made a step."""
            return pipe if warm_up is None or step > synchronous_steps else warm_up

        restored = checkpoints.restore(trains(steps[-1]), batch)
        first = trains(restored.step)
        if first is not trains(steps[-1]):  # the newest one is damaged
            restored = checkpoints.restore(first, batch, restored.step)
        return cls(first, restored.state, restored.step, restored.run["log"], restored.run.get("data"))


class Saver:
    """Saves the checkpoints of a run.

    If one cannot be saved, a warning says so, once, and training goes on.

    Args:
      run_dir: the folder of the run.
      config_text: the content of its `config.json`, which is written again if somebody removes it.
      checkpoints: the checkpoints of the run.
      every: steps between checkpoints; None: there are none.
      first: the step whose checkpoint the run goes on from; 0: it begins.

    Attributes:
      problem: the reason why the newest checkpoint could not be saved; empty if it was.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        config_text: str,
        checkpoints: jpipe.Checkpoints,
        every: int | None,
        first: int = 0,
    ):
        self._run_dir, self._config_text = run_dir, config_text
        self._checkpoints, self._every = checkpoints, every
        self._saving: int | None = None
        self._newest: int | None = first or None
        self._has_warned = False
        self.problem = ""

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *exception: object) -> None:
        self._finish()
        self._look_after()

    def saves(self, step: int, ends: bool) -> bool:
        """Returns whether there is a checkpoint after a step."""
        return self._every is not None and (ends or step % self._every == 0)

    def save(self, step: int, state: jpipe.PipelineState, log: Log, data: Any = None) -> None:
        """Saves a checkpoint while training goes on; `data` is the position of the data."""
        self._finish()
        try:
            self._keep_config()
            self._checkpoints.save(step, state, run={"log": log.position(), "data": data})
            self._saving = step
        except OSError as error:
            self._warn(error)

    def how_to_resume(self) -> str:
        """A sentence for a run that was stopped; empty without a checkpoint."""
        self._finish()
        self._look_after()
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

    def _look_after(self) -> None:
        """Notes if somebody has removed the newest checkpoint."""
        if self._newest is None or not is_first():
            return
        if self._newest not in self._checkpoints.steps():
            self.problem = (
                f"the checkpoint of step {self._newest} was removed from `{self._run_dir}`, so the run cannot go on "
                "from it."
            )
            self._newest = None

    def _keep_config(self) -> None:
        """Writes the options again if somebody has removed them: without them a checkpoint is of no use."""
        file = self._run_dir / CONFIG
        if is_first() and not file.exists():
            self._run_dir.mkdir(parents=True, exist_ok=True)
            file.write_text(self._config_text, encoding="utf-8")

    def _warn(self, error: OSError) -> None:
        self.problem = f"{error}."
        if not self._has_warned:
            print(
                f"train.py: warning: {error}. Training goes on, and the next checkpoint is tried again.",
                file=sys.stderr,
                flush=True,
            )
        self._has_warned = True
