"""A plan as a configuration, and the configuration as a Python file."""

import dataclasses
import itertools
import math
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np

import jpipe
from jpipe import soap
from jpipe.plan import Candidate, Machine, Profile, tensor
from train import report
from train.config import TrainConfig
from train.data import shuffled
from train.search import traced_layers


def check_tensor(config: TrainConfig) -> None:
    """Raises `ValueError` if rules of a configuration already split layers over the stages."""
    over_stages = [name for name, axes in config.mesh.axis_rules() if "stage" in (axes or ())]
    if over_stages:
        raise ValueError(
            f"`--config.mesh.rules.{over_stages[0]}` splits layers over all stages, and `--tensor` splits the "
            "operators inside of each "
            f"stage. Leave `--tensor` out, or add `--config.mesh.rules.{over_stages[0]}=none`."
        )


def splits_of(profiles: Sequence[Profile], machine: Machine, config: TrainConfig) -> list[tensor.Split]:
    """A strategy for every number of devices that a stage may have, and every size of microbatches."""
    dtype = config.pipeline.options_of_pipeline()["compute_dtype"]
    D = machine.num_devices
    numbers = [T for T in range(2, D + 1) if D % T == 0]
    splits = []
    for profile in profiles:
        parts = config.batch_size // profile.microbatch_size
        traced = traced_layers(config, parts, dtype)
        splits += [tensor.search(profile, traced, machine, T) for T in numbers]
    return splits


def save_plan(
    path: pathlib.Path,
    config: TrainConfig,
    best: Candidate,
    splits: Sequence[tensor.Split],
    argv: list[str],
) -> TrainConfig:
    """Writes a plan as a configuration, and the strategy inside of its stages, if it has one, beside it.

    Args:
      path: the Python file.
      config: the configuration of the model.
      best: the plan.
      splits: the strategies from which `best` was chosen.
      argv: the words of the command.

    Returns:
      The configuration.
    """
    strategy = None
    if best.num_tensor_devices > 1:
        strategy = str(path.with_suffix(".strategy.json"))
        wanted = best.num_tensor_devices, best.microbatch_size
        by_size = {(split.num_devices, split.microbatch_size): split for split in splits}
        split = by_size[wanted]
        soap.save_strategy(strategy, split.graph, split.strategy, split.num_devices)
    planned = planned_config(config, best, strategy)
    path.write_text(file_of(planned, best, argv), encoding="utf-8")
    return planned


def with_links(machine: Machine, path: str) -> Machine:
    """The machine with the links of a file: the slowest inside of a group of the last level, and those of that level.

    Args:
      machine: the machine, as measured.
      path: see `jpipe.soap.read_machine`.

    Raises:
      ValueError: if the file cannot be read, or has fewer devices.
    """
    levels = soap.read_machine(path).levels
    sizes = [level.size for level in levels]
    if math.prod(sizes) < machine.num_devices:
        raise ValueError(
            f"`--machine` must have as many devices as `--devices`, {machine.num_devices}, and `{path}` has "
            f"{math.prod(sizes)}. Plan for fewer, or give another machine."
        )
    inside = levels[:-1] or levels
    return dataclasses.replace(
        machine,
        bandwidth=(min(level.bandwidth for level in inside), levels[-1].bandwidth),
        latency=(max(level.latency for level in inside), levels[-1].latency),
        devices_per_server=math.prod(sizes[:-1]) if len(levels) > 1 else None,
    )


def planned_config(config: TrainConfig, best: Candidate, strategy: str | None = None) -> TrainConfig:
    """The configuration that trains by a plan.

    Args:
      config: the configuration of the model.
      best: the plan.
      strategy: the file of the strategy inside of its stages, if there is one.
    """
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
        **({"compress_messages": None, "compress_message_gradients": None} if best.num_stages == 1 else {}),
        synchronous_steps=0 if best.table().synchronous else config.pipeline.synchronous_steps,
    )
    has_replicas = best.num_replicas > 1 or best.table().has_copies
    mesh = dataclasses.replace(
        config.mesh,
        data=best.num_replicas,
        dcn=dict(best.dcn),
        model=best.num_tensor_devices,
        **{axis.name: axis.size for axis in best.axes},
        shard_optimizer=best.shard_optimizer,
        device_memory=None,
        offload_optimizer=best.offload.optimizer,
        offload_weights=best.offload.weights,
        offload_gradients=best.offload.gradients,
        offload_activations=best.offload.activations,
        compress_gradients=config.mesh.compress_gradients if has_replicas else None,
    )
    return dataclasses.replace(config, pipeline=pipeline, mesh=mesh, strategy=strategy)


def shared_profiles(
    whole: Sequence[Profile], config: TrainConfig, axes: Sequence[str], num_devices: int
) -> list[Profile]:
    """The profiles split over axes, for every size of these that the devices and the layers allow.

    Args:
      whole: the profiles of whole layers.
      config: the configuration of the model.
      axes: the axes to try.
      num_devices: the devices of a plan.
    """
    devices = jax.local_devices()[:num_devices]
    profiles, batch = [], batch_of(config) if axes else None
    sizes = [n for n in range(1, len(devices) + 1) if num_devices % n == 0]
    for of_axes in itertools.product(sizes, repeat=len(axes)):
        if not 1 < math.prod(of_axes) <= len(devices) or num_devices % math.prod(of_axes):
            continue
        shared = dict(zip(axes, of_axes))
        pipe = one_stage(config, jpipe.make_mesh(stage=1, devices=devices, **shared))
        for profile in whole:
            number = config.batch_size // profile.microbatch_size
            try:
                profiles.append(pipe.profile(batch, num_microbatches=number, whole=profile))
            except ValueError as error:  # a dim that these devices do not divide
                words = ", ".join(f"{axis}={size}" for axis, size in shared.items())
                print(f"plan.py: {words} with {number} microbatches is left out: {error}", file=sys.stderr)
    return profiles


def batch_of(config: TrainConfig) -> Mapping[str, np.ndarray]:
    """The first minibatch of a configuration."""
    return next(shuffled(config.load_data().train, config.batch_size, config.seed))


def one_stage(config: TrainConfig, mesh: jax.sharding.Mesh) -> jpipe.Pipeline:
    """The model as a pipeline of one stage, without what a plan chooses."""
    alone = {
        "boundaries": None,
        "shard_optimizer": False,
        "compress_messages": None,
        "compress_gradients": None,
        "offload": None,
        "device_memory": None,
    }
    options = config.options_of_pipeline(mesh) | alone
    return jpipe.Pipeline(config.weights.layers(), schedule=jpipe.schedules.gpipe(1, 1), **options)


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
        fields = [f"{field.name}={code(getattr(value, field.name), inner)}" for field in dataclasses.fields(value)]
        one_line = f"{kind.__name__}({', '.join(fields)})"
        if len(indent + one_line) < 80 and "\n" not in one_line:
            return one_line
        lines = "".join(f"{inner}{field},\n" for field in fields)
        return f"{kind.__name__}(\n{lines}{indent})"

    body = code(config)
    imports = "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(classes.items()))
    stages = report.count(best.num_stages, "stage")
    if best.num_tensor_devices > 1:
        stages += f" of {best.num_tensor_devices} devices"
    for axis in best.axes:
        stages += f", {axis.name} {axis.size}"
    milliseconds = best.prediction.seconds * 1e3
    return (
        f'"""{best.label}, {stages}: {milliseconds:.3g} ms per step, as predicted.\n\n'
        f'    {command}\n"""\n\n{imports}\n\n\ndef get_config() -> TrainConfig:\n    return {body}\n'
    )
