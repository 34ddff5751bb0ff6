"""Where the records of a log go beside its JSON file: TensorBoard, Weights & Biases, MLflow. Each needs its package."""

import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jpipe._util.suggest import did_you_mean
from train.tensorboard import EventFile, scalars


class Writer(Protocol):
    """Takes the records of a log. Any object with these two methods is one."""

    def write(self, record: dict[str, Any]) -> None:
        """Takes a record, which has its step under "step". What it raises ends this writer, not the run."""
        ...

    def close(self) -> None:
        """Ends the writer; called once, or a second time without effect."""
        ...


class WandB:
    """A run of Weights & Biases, in the project `jpipe` or that of `WANDB_PROJECT`.

    Args:
      run_dir: the folder of the run, which also keeps the number of this run there, for a run that is resumed.
      options: the options of the run, by their names.
    """

    def __init__(self, run_dir: pathlib.Path, options: Mapping[str, str]):
        import wandb

        number = _kept(run_dir, "wandb_id.txt")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jpipe"),
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(options),
            id=number,
            resume=None if number is None else "allow",
        )
        _keep(run_dir, "wandb_id.txt", self._run.id)

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(dict(scalars(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, where `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME` say.

    Args:
      run_dir: the folder of the run, which also keeps the number of this run there, for a run that is resumed.
      options: the options of the run, by their names. They become parameters of a new run.
    """

    def __init__(self, run_dir: pathlib.Path, options: Mapping[str, str]):
        import mlflow

        self._module, number = mlflow, _kept(run_dir, "mlflow_id.txt")
        run = mlflow.start_run(run_id=number, run_name=None if number else run_dir.name)
        if number is None:
            _keep(run_dir, "mlflow_id.txt", run.info.run_id)
            mlflow.log_params(dict(options))

    def write(self, record: dict[str, Any]) -> None:
        self._module.log_metrics(dict(scalars(record)), step=record["step"])

    def close(self) -> None:
        self._module.end_run()


# Name -> the package that it needs.
PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def check_names(names: Sequence[str]) -> None:
    """Refuses names that are those of no writer, and names twice.

    Raises:
      ValueError: says which.
    """
    for name in names:
        if name not in PACKAGES:
            raise ValueError(f"`log` must name {', '.join(PACKAGES)}, got {name!r}.{did_you_mean(name, PACKAGES)}")
        if names.count(name) > 1:
            raise ValueError(f"`log` names {name} twice. Name each writer once.")


def check_packages(names: Sequence[str]) -> None:
    """Refuses writers whose package is missing.

    Raises:
      ValueError: says what to install.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            others = ",".join(n for n in names if n != name)
            raise ValueError(
                f"`--config.log={','.join(names)}` needs the package `{PACKAGES[name]}`. Install it: "
                f"`pip install {PACKAGES[name]}`, or leave {name} out: `--config.log={others}`."
            )


def make(name: str, run_dir: pathlib.Path, first_step: int, options: Mapping[str, str]) -> Writer:
    """The writer of a name.

    Args:
      name: one of `PACKAGES`.
      run_dir: the folder of the run.
      first_step: the first step that it gets.
      options: the options of the run, by their names.

    Raises:
      Exception: what its package raises, if it cannot begin.
    """
    if name == "tensorboard":
        return EventFile(run_dir, first_step)
    return {"wandb": WandB, "mlflow": MLflow}[name](run_dir, options)


def _kept(run_dir: pathlib.Path, name: str) -> str | None:
    file = run_dir / name
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _keep(run_dir: pathlib.Path, name: str, number: str) -> None:
    (run_dir / name).write_text(number + "\n", encoding="utf-8")
