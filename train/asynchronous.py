"""Asynchronous training by one switch: `--config.asynchronous=2bw-muon`.

A `Method` turns a configuration into that of an asynchronous run: it sets the schedule, the optimizer with its
momentum and its rate, and the remedies for late gradients that fit the delays of the run.
`docs/asynchronous_winners.md` has the runs that its numbers come from.

    python train/train.py --config configs/gpt_1f1b.py --config.asynchronous=2bw-muon

What stands beside the switch on the command line wins, because it is a choice of the user, and the settings of the
configuration file give way, because they are of another schedule and optimizer. The options that a run prints first
show the result. Schedule and optimizer are what the name of a method says, so others beside it are refused.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

import jpipe
from jpipe._util.suggest import did_you_mean
from jpipe.optim.scale_by_delay import factor

# The configuration and its sections. `train/config.py` imports this module, so their types have no names here.
TrainConfig: TypeAlias = Any
PipelineConfig: TypeAlias = Any
OptimizerConfig: TypeAlias = Any

Name = Literal["2bw-muon", "pipedream-muon", "pipedream-basis-rotation", "pipemare-adamw"]

MOST_ANNEALED_DELAY = 26
"""The longest delay, in updates, at which the rates of late stages rise to the full rate during the run.

Rates that rose were best at a longest delay of 7, and rates that stayed divided by the delay at one of 99, on two
tasks of three. Nothing between was run: this is the geometric mean of both.
"""

_RATES_OF_ADAM = {"adamw": 1.0, "basis_rotation": 1.0, "muon": 3.0}
"""Optimizer -> its best learning rate in multiples of that of Adam.

The best rates with delays of 8 stages against those of synchronous Adam, as geometric means over the three tasks:
0.027 to 0.009, 0.081 to 0.081 and 0.081 to 0.009 for Muon; 0.009 to 0.009, 0.027 to 0.081 and 0.027 to 0.009 for basis
rotation.
"""


@dataclasses.dataclass(frozen=True)
class Method:
    """An asynchronous schedule with an optimizer for its late gradients.

    Attributes:
      name: the value of `--config.asynchronous`.
      schedule: the schedule, a name of `jpipe.schedules`.
      optimizer: the optimizer, `OptimizerConfig.name`.
      settings: further fields of `OptimizerConfig`.
      feeds_back: whether error feedback helps the optimizer at a delay of one update.
      synchronous_part: the part of the steps that GPipe trains first.
    """

    name: str
    schedule: str
    optimizer: str
    settings: Mapping[str, Any]
    feeds_back: bool = False
    synchronous_part: float = 0.0

    def applied(self, config: TrainConfig, given: Mapping[str, Any] | None = None) -> TrainConfig:
        """The configuration of a run by this method.

        Args:
          config: the configuration, with what is given already in it.
          given: section -> field -> anything, for the fields that keep their value. None: none does.

        Raises:
          ValueError: if the configuration or a given field contradicts the method.
        """
        given = {} if given is None else given
        pipeline, optimizer = (
            {} if not isinstance(given.get(section), Mapping) else given[section]
            for section in ("pipeline", "optimizer")
        )
        stages = {
            "schedule": self.schedule,
            "options": {k: v for k, v in config.pipeline.options.items() if k in pipeline.get("options", {})},
            "synchronous_steps": int(self.synchronous_part * config.num_steps),
        }
        pipelined = dataclasses.replace(config.pipeline, **_without(stages, pipeline, "options"))
        self._check(pipelined.schedule, config.optimizer.name if "name" in optimizer else self.optimizer, pipelined)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the pipeline, which warns again
            longest = self._longest_delay(pipelined)
        settings = {
            **self._of_optimizer(config.optimizer, "learning_rate" in optimizer),
            "annealing_steps": annealing_steps(longest, config.num_steps),
            "error_feedback": 1.0 if self.feeds_back and longest == 1 else None,
        }
        optimized = dataclasses.replace(config.optimizer, **_without(settings, optimizer))
        return dataclasses.replace(config, asynchronous=self.name, pipeline=pipelined, optimizer=optimized)

    def _longest_delay(self, pipeline: PipelineConfig) -> int:
        """The longest delay of a stage, in updates."""
        try:
            return int(np.max(pipeline.table().facts().forward_delay))
        except ValueError as error:
            others = [m.name for m in METHODS.values() if m.optimizer == self.optimizer and m is not self]
            other = f" Or choose {' or '.join(others)}, with the same optimizer." if others else ""
            raise ValueError(f"`asynchronous={self.name}`: {error}{other}") from error

    def check(self, config: TrainConfig) -> None:
        """Raises ValueError if a configuration contradicts the method."""
        self._check(config.pipeline.schedule, config.optimizer.name, config.pipeline)

    def _check(self, schedule: str, optimizer: str, pipeline: PipelineConfig) -> None:
        both = f"`asynchronous={self.name}` is the schedule {self.schedule} with the optimizer {self.optimizer}"
        for field in ("schedule_file", "delays"):
            value = getattr(pipeline, field)
            if value is not None:
                raise ValueError(
                    f"{both}, and `pipeline.{field}` takes the place of a schedule, got {value}. Leave one out: "
                    f"`--config.pipeline.{field}=none`, or `--config.asynchronous=none`."
                )
        for field, value, wanted in (
            ("pipeline.schedule", schedule, self.schedule),
            ("optimizer.name", optimizer, self.optimizer),
        ):
            if value != wanted:
                others = [m.name for m in METHODS.values() if value in (m.schedule, m.optimizer)]
                instead = f" Methods with {value}: {', '.join(others)}." if others else ""
                raise ValueError(
                    f"{both}, got `{field}={value}`.{instead} Leave it out, or write `--config.asynchronous=none`. "
                    f"A file in configs/ has the settings by `asynchronous.applied(config, {self.name!r})` of "
                    "train/asynchronous.py."
                )

    def _of_optimizer(self, before: OptimizerConfig, has_rate: bool) -> dict[str, Any]:
        """The fields of the optimizer that do not depend on the delays.

        Args:
          before: the optimizer of the configuration.
          has_rate: whether its learning rate is meant for this method.
        """
        fields = {
            "name": self.optimizer,
            "discrepancy_decay": None,
            "predict_weights": False,
            "prediction_decay": None,
            "delay_compensation": None,
            **self.settings,
        }
        if has_rate:
            return fields
        if before.name not in _RATES_OF_ADAM:
            raise ValueError(
                f"`asynchronous={self.name}` takes the learning rate of {self.optimizer} from that of AdamW, and the "
                f"configuration has {before.name}, whose rate of {before.learning_rate:g} says nothing about it. Give "
                "the rate too: `--config.optimizer.learning_rate=RATE`."
            )
        factor = _RATES_OF_ADAM[self.optimizer] / _RATES_OF_ADAM[before.name]
        # A step shrinks the weights by the rate times the weight decay, which stays as it was.
        rates = {"learning_rate": before.learning_rate * factor, "weight_decay": before.weight_decay / factor}
        return {**fields, **rates}


def _without(fields: Mapping[str, Any], given: Mapping[str, Any], *kept: str) -> dict[str, Any]:
    """The fields that are not given, and those that are kept although they are."""
    return {name: value for name, value in fields.items() if name not in given or name in kept}


def annealing_steps(longest_delay: int, num_steps: int) -> Literal["lasting"] | int | None:
    """`optimizer.annealing_steps` (T1) for a run.

    T1 divides by the delay, or by 1, so it does nothing at delays of at most one update. Up to
    `MOST_ANNEALED_DELAY` it anneals over the whole run; at longer delays the rates stay divided by the delay.

    Args:
      longest_delay: the longest delay of a stage, in updates.
      num_steps: the steps of the run.

    Example:
      >>> [annealing_steps(delay, num_steps=500) for delay in (1, 7, 99)]
      [None, 500, 'lasting']
    """
    if longest_delay <= 1:
        return None
    return num_steps if longest_delay <= MOST_ANNEALED_DELAY else "lasting"


# A momentum of 0.8, and a rate of 0.3 for the weights that Muon leaves to AdamW, are those of the winners.
_MUON = {"momentum": 0.8, "adam_rate": 0.3}
_ADAM = {"momentum": 0.9}

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("2bw-muon", "pipedream_2bw", "muon", _MUON, feeds_back=True),
        Method("pipedream-muon", "pipedream", "muon", _MUON, feeds_back=True),
        Method("pipedream-basis-rotation", "pipedream", "basis_rotation", _ADAM),
        Method("pipemare-adamw", "pipemare", "adamw", {**_ADAM, "discrepancy_decay": 0.1}, synchronous_part=1 / 8),
    )
}
"""Name -> method."""

assert tuple(METHODS) == get_args(Name), "`Name` lists the methods."


def applied(config: TrainConfig, name: str, given: Mapping[str, Any] | None = None) -> TrainConfig:
    """The configuration of a run by an asynchronous method, for files in configs/ and the command line.

    Args:
      config: the configuration: the model, the data, the numbers of stages, microbatches and steps, and the learning
        rate of AdamW, or of the method's optimizer.
      name: the method, one of `METHODS`.
      given: see `Method.applied`.

    Returns:
      A configuration with `asynchronous=name`. To change more, replace fields of it.

    Raises:
      ValueError: if there is no such method, or the configuration contradicts it.
    """
    if name not in METHODS:
        raise ValueError(
            f"there is no asynchronous method {name!r}, but {', '.join(METHODS)}.{did_you_mean(name, list(METHODS))}"
        )
    return METHODS[name].applied(config, given)


def late_gradients(
    optimizer: OptimizerConfig, pipe: jpipe.Pipeline, state: jpipe.PipelineState
) -> dict[str, dict[str, float]]:
    """The numbers of `--config.diagnostics`: name -> stage -> number, where it is known. Waits until the step has run.

    Late gradients are stable up to a rate of about 1 / delay (lemma 1 of PipeMare). T1 divides the rate by a power of
    the delay. The effective delay is the one at which the whole rate would be as near to that bound: delay times
    factor.
    """
    values = pipe.get_diagnostics(state)
    num_updates, delays, rise = values.pop("num_updates"), values["delay"], optimizer.steps_of_rise
    scale = np.asarray(factor(delays, rise, np.maximum(num_updates - 1, 0))) if rise else 1.0
    values["effective_delay"] = delays * scale
    return {
        name: {str(s): float(numbers[s]) for s in np.flatnonzero((num_updates > 0) & np.isfinite(numbers))}
        for name, numbers in values.items()
    }
