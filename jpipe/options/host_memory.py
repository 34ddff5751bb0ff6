"""Options of the arrays in the memory of the host."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from jax.sharding import Mesh

from jpipe._util.foreign import shown
from jpipe._util.sizes import parse_size
from jpipe._util.warn import warn
from jpipe.mesh import HOST_MEMORY, memory_kinds
from jpipe.options import exclusions
from jpipe.options.communication import Communication
from jpipe.options.numbers import Numbers
from jpipe.schedule import Schedule
from jpipe.stages.offload import NO_OFFLOAD, Offload


def check_offload(
    offload: Any,
    mesh: Mesh,
    schedule: Schedule,
    numbers: Numbers,
    communication: Communication,
    hooks: Mapping[str, Callable],
) -> Offload:
    """`offload` of a pipeline, an `Offload` or None.

    Args:
      offload: the argument.
      mesh, schedule, numbers, communication: the mesh and the options of the pipeline.
      hooks: "forward" and "backward" with the functions that compute the weights which these passes read.

    Raises:
      ValueError: if it is something else, devices have no memory of the host, or a part of the state cannot go there.
    """
    if offload is None:
        return NO_OFFLOAD
    if not isinstance(offload, Offload):
        raise ValueError(
            "`offload` must be a `jpipe.Offload`, such as `jpipe.Offload(optimizer=1.0)`, or None, got "
            f"{shown(offload)}."
        )
    if not offload:
        return offload
    kinds = memory_kinds(mesh.devices.flat[0])
    if HOST_MEMORY not in kinds:
        problem = (
            f"`offload` keeps arrays in memory of the kind {HOST_MEMORY!r}, and {mesh.devices.flat[0].platform} "
            f"devices have only {', '.join(map(repr, kinds))}."
        )
        if offload.required:
            raise ValueError(
                f"{problem} Leave `offload` out, or say `jpipe.Offload(..., required=False)` to train without it here."
            )
        warn(f"{problem} The pipeline trains without offloading.")
        return NO_OFFLOAD
    if offload.activations is not None and numbers.runs_forward_again:
        raise ValueError(
            '`activations` of `Offload` is about what a forward keeps for its backward, and with `recompute="full"` a '
            "stage keeps only its inputs. Leave one of them out."
        )
    stay = exclusions.stay_on_devices(hooks, schedule, communication.compressors)
    for name, why in stay.items():
        if getattr(offload, name) and why:
            raise ValueError(
                f"`{name}` of `Offload` go to host memory where {why}. Leave one of them out, or offload the "
                "optimizer's state alone."
            )
    return offload


def check_device_memory(device_memory: Any, offload: Any, mesh: Mesh) -> float | None:
    """`device_memory` of a pipeline in bytes, or None.

    Raises:
      ValueError: if it is no number of bytes, or `offload` is given too, or devices cannot use host memory.
    """
    if device_memory is None:
        return None
    if offload is not None:
        raise ValueError(f"{exclusions.chosen_and_given('offload')}. Leave one of them out.")
    limit = device_memory
    if isinstance(limit, str):
        try:
            limit = parse_size(limit)
        except ValueError as error:
            raise ValueError(f"`device_memory` {error}") from None
    is_number = isinstance(limit, Real) and not isinstance(limit, bool)
    if not is_number or not 0 < limit < 2**64:
        raise ValueError(
            '`device_memory` must be a number of bytes above 0, such as 2e9 or "2GiB", or None, got '
            f"{shown(device_memory)}."
        )
    kinds = memory_kinds(mesh.devices.flat[0])
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"`device_memory` keeps what does not fit in memory of the kind {HOST_MEMORY!r}, and "
            f"{mesh.devices.flat[0].platform} devices have only {', '.join(map(repr, kinds))}. Leave it out, and use "
            "more stages or recompute."
        )
    return float(limit)
