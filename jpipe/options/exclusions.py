"""Exclusions among the options of a pipeline, each stated once.

A function returns why an option cannot be, as a part of a sentence; empty: it can. `Pipeline`, the choice of what goes
to host memory and the training script ask it, and add the remedy that fits where the option was given.
"""

from collections.abc import Mapping
from typing import Any

from jpipe.mesh import split_axes
from jpipe.schedule import Schedule

_SHARED_BY_REPLICAS = {
    "shard_optimizer": "shares the optimizer's state between the replicas of a stage",
    "compress_gradients": "compresses what the replicas of a stage exchange",
    "local_steps": "is for replicas of a stage that train apart",
}


def without_replicas(argument: str) -> str:
    """The reason why an argument for the replicas of a stage cannot be where each stage has one.

    Args:
      argument: "shard_optimizer", "compress_gradients" or "local_steps".
    """
    return f"{_SHARED_BY_REPLICAS[argument]}, and there is one"


def on_split_arrays(sizes: Mapping[str, int]) -> str:
    """The reason why nothing can be compressed on a mesh that splits arrays inside of a stage.

    Args:
      sizes: axis of the mesh -> number of devices.
    """
    split = split_axes(sizes)
    if not split:
        return ""
    return f"compresses arrays that are whole on a device, and the mesh splits them over the axes {split}"


def chosen_and_given(*names: str) -> str:
    """The reason why `device_memory` cannot be beside the arguments that say what goes to host memory."""
    *others, last = (f"`{name}`" for name in names)
    given = f"{', '.join(others)} and {last} say" if others else f"{last} says"
    return f"`device_memory` chooses what goes to host memory, and {given} it"


def stay_on_devices(hooks: Mapping[str, Any], schedule: Schedule, compressors: Mapping[str, Any]) -> dict[str, str]:
    """The reasons why weights, and gradients, cannot be in host memory.

    Args:
      hooks: "forward" and "backward" with the functions that compute the weights which these passes read.
      schedule: the table.
      compressors: argument -> the compressor that is given for it.

    Returns:
      Field of `Offload` -> the reason; empty: it can be there.
    """
    return {"weights": _weights_stay(hooks), "gradients": _gradients_stay(schedule, compressors)}


def _weights_stay(hooks: Mapping[str, Any]) -> str:
    if not hooks:
        return ""
    names = " and ".join(f"`{name}_params`" for name in hooks)
    return f"passes read the weights themselves, and {names} computes others for them"


def _gradients_stay(schedule: Schedule, compressors: Mapping[str, Any]) -> str:
    if schedule.has_copies:
        return "a stage is on one device, and this schedule has copies of stages, which add up their gradients"
    for name in ("compress_gradients", "accumulate_gradients"):
        if name in compressors:
            return f"gradients are accumulated and exchanged as they are, and `{name}` changes that"
    return ""
