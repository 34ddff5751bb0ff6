"""A plan as a configuration, and the configuration as a Python file."""

import dataclasses
import shlex

from jpipe.plan import Candidate
from train import report
from train.config import TrainConfig


def planned_config(config: TrainConfig, best: Candidate) -> TrainConfig:
    """The configuration that trains by a plan."""
    pipeline = dataclasses.replace(
        config.pipeline,
        schedule=best.schedule,
        schedule_file=None,
        num_stages=best.num_stages,
        num_microbatches=best.num_microbatches,
        options={k: v for k, v in best.options.items() if k != "replicas"},
        replicas=best.options.get("replicas"),
        boundaries=best.boundaries or None,
        recompute=best.recompute,
        synchronous_steps=0
        if best.table().synchronous
        else config.pipeline.synchronous_steps,
    )
    mesh = dataclasses.replace(
        config.mesh, data=best.num_replicas, shard_optimizer=best.shard_optimizer
    )
    return dataclasses.replace(config, pipeline=pipeline, mesh=mesh)


def file_of(config: TrainConfig, best: Candidate, argv: list[str]) -> str:
    """A configuration as a Python file, whose docstring has the command that made it.

    The file names every option, so that the plan stays the same when a default changes.
    """
    command = f"python train/plan.py {shlex.join(argv)}"
    classes: dict[str, set[str]] = {}

    def code(value, indent: str = "    ") -> str:
        if not dataclasses.is_dataclass(value):
            return repr(value)
        kind, inner = type(value), indent + "    "
        classes.setdefault(kind.__module__, set()).add(kind.__name__)
        fields = [
            f"{field.name}={code(getattr(value, field.name), inner)}"
            for field in dataclasses.fields(value)
        ]
        one_line = f"{kind.__name__}({', '.join(fields)})"
        if len(indent + one_line) < 80 and "\n" not in one_line:
            return one_line
        lines = "".join(f"{inner}{field},\n" for field in fields)
        return f"{kind.__name__}(\n{lines}{indent})"

    body = code(config)
    imports = "\n".join(
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(classes.items())
    )
    stages = report.count(best.num_stages, "stage")
    milliseconds = best.prediction.seconds * 1e3
    return (
        f'"""{best.label}, {stages}: {milliseconds:.3g} ms per step, as predicted.\n\n'
        f'    {command}\n"""\n\n{imports}\n\n\ndef get_config() -> TrainConfig:\n    return {body}\n'
    )
