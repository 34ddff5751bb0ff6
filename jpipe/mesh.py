"""Meshes: the device of each stage, replica and part of a layer."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean, suggests

STAGE, DATA, FSDP, EXPERT, CONTEXT, MODEL = "stage", "data", "fsdp", "expert", "context", "model"
"""Names of the axes of a mesh."""

AXES = (DATA, STAGE, FSDP, EXPERT, CONTEXT, MODEL)
"""The axes of `make_mesh`, from those whose devices send each other the least to those that send the most."""

ROW_AXES = (FSDP, EXPERT)
"""The axes that are left to the compiler and split the rows of a microbatch."""

DEVICE_MEMORY = "device"
"""The kind of memory that arrays of the state are in: the device's own."""

HOST_MEMORY = "pinned_host"
"""The kind of memory that offloaded arrays are in: the host's, from which a device can read at any time."""


def memory_kinds(device: jax.Device) -> list[str]:
    """The kinds of memory of a device; those of a device that is only described are not known, and are guessed."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (AttributeError, jax.errors.JaxRuntimeError):
        return [DEVICE_MEMORY, HOST_MEMORY]


def platform() -> str:
    """The platform of JAX's default device, for example "gpu"."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def on_platform(platform: str) -> contextlib.AbstractContextManager:
    """A context in which JAX's default device has a platform, such as "cpu"; a layer can ask for it.

    A platform of devices that are only described leaves the default device as it is: JAX cannot use it.
    """
    if platform == jax.default_backend():
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend=platform)[0])
    except RuntimeError:
        return contextlib.nullcontext()


def row_axes(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes that are `ROW_AXES`.

    Example:
      >>> row_axes(("stage", "fsdp", "model"))
      ('fsdp',)
    """
    present = set(names)
    return tuple(name for name in ROW_AXES if name in present)


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with axes of the type that the engine needs. `jax.make_mesh` makes them explicit."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def split_axes(sizes: Mapping[str, int]) -> list[str]:
    """The axes over which a mesh splits the arrays of a stage, of its axes and their numbers of devices."""
    return [name for name, n in sizes.items() if name not in (STAGE, DATA) and n > 1]


def compilers_part(mesh: Mesh | None) -> Mesh | None:
    """The mesh of the axes that are left to the compiler and have several devices; None if there are none."""
    sizes = {} if mesh is None else mesh.shape
    names = split_axes(sizes)
    if mesh is None or not names:
        return None
    index = tuple(slice(None) if name in names else 0 for name in sizes)
    return Mesh(mesh.devices[index], names, axis_types=(AxisType.Auto,) * len(names))


def with_automatic_axes(a: jax.Array) -> jax.Array:
    """The array where it lies, without explicit axes. With explicit axes JAX wants the split of every result."""
    on = a.sharding
    if not isinstance(on, NamedSharding):
        return a
    assert isinstance(on.mesh, Mesh)
    mesh = automatic(on.mesh)
    return jax.device_put(a, NamedSharding(mesh, on.spec, memory_kind=on.memory_kind))


@suggests
def make_mesh(
    *,
    stage: int,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    model: int = 1,
    ring: bool = False,
    dcn: Mapping[str, int] | None = None,
    devices: Sequence | None = None,
) -> Mesh:
    """A mesh for pipelines, with an axis "stage".

    On machines with a topology, such as TPU pods, neighbours along an axis are neighbours in the
    machine. Where devices are in several slices of TPUs, or nodes of GPUs, the stages go across the slow
    network between these, and all other axes stay inside.

    Args:
      stage: number of devices of the pipeline.
      data: replicas of the pipeline. Each trains on its share of every minibatch. Above 1, the mesh
        has an axis "data".
      fsdp: devices that share the weights and the microbatches of a stage (fully sharded data
        parallelism). Above 1, the mesh has an axis "fsdp", which is left to the compiler. The rows of a
        microbatch, its activations and its messages are split over it, and so is every weight that has
        two dims or more, with its gradient and its optimizer state, as the names of its dims say
        (`axis_rules` of `Pipeline`), or along its largest dim that can be split.
      expert: devices that share the experts of a stage (expert parallelism). Above 1, the mesh has an axis
        "expert", which is left to the compiler. The rows of a microbatch, its activations and its messages are
        split over it, beside "fsdp". Weights whose dims are named "expert" are split over it, with their
        gradients and their optimizer state; all others are whole.
      context: devices that share the positions of each sequence (context parallelism). Above 1, the mesh
        has an axis "context", which is left to the compiler. Activations and messages are split over it
        where their dims name positions, and `jpipe.attention` exchanges keys and values along it.
      model: devices that share the work of a stage (tensor parallelism). Above 1, the mesh has an
        axis "model", which is left to the compiler. Weights and activations are split over it as the
        names of their dims say.
      ring: whether the first stage and the last stage must be neighbours too, see `Schedule.ring`.
        On TPUs only messages between neighbours can overlap with compute. If the chips form a flat
        grid and `stage` is even, each pipeline gets two rows of the grid; gradients between
        replicas then travel further.
      dcn: axis -> the number of parts into which the network between slices or nodes cuts it, such as
        `{"stage": 2}` or `{"data": 2}`. Their product is the number of slices. None: the fewest slices that
        have the devices, as these name them (`slice_index`; of GPUs without it, the processes with several
        devices each). They cut "stage" into as many parts as divide it, and "data" into the rest. Where
        devices name no slices, as on CPUs, `dcn` cuts them in order. Messages between stages in different parts
        are slow: `message_ticks` of a schedule gives them a tick to travel.
      devices: the devices to choose from; the first ones are taken. None: `jax.devices()`.

    Returns:
      The mesh. It has the axis "stage", and each of the other axes if its size is above 1.

    Raises:
      ValueError: if a size is not a whole number of at least 1, there are too few devices, or the axes cannot be cut
        as the slices are.

    References:
      JAX, `jax.experimental.mesh_utils.create_hybrid_device_mesh`.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(AXES, (data, stage, fsdp, expert, context, model), strict=True))
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or size < 1:
            raise ValueError(f"`{name}` must be a whole number of devices, at least 1, got {shown(size)}.")
    axes = {name: size for name, size in sizes.items() if size > 1 or name == STAGE}
    needed = math.prod(axes.values())
    if len(devices) < needed:
        platform = devices[0].platform if devices else "none"
        remedy = "Use fewer stages." if needed == stage else "Use fewer of them."
        if platform == "cpu":
            remedy = (
                f'Call `jax.config.update("jax_num_cpu_devices", {shown(needed)})` before JAX is first used, which '
                "makes that many devices out of the CPU, or use fewer."
            )
        asked = ", ".join(f"{name}={shown(size)}" for name, size in axes.items())
        raise ValueError(f"`{asked}` needs {shown(needed)} devices, got {len(devices)} ({platform}). {remedy}")
    shape, kinds = tuple(axes.values()), (AxisType.Auto,) * len(axes)
    across = _across_slices(devices, axes, dcn)
    if across is not None:
        return Mesh(across, tuple(axes), axis_types=kinds)
    if ring and needed == data * stage:
        rows = _rings(devices[:needed], data, stage)
        if rows is not None:
            return Mesh(rows.reshape(shape), tuple(axes), axis_types=kinds)
    return Mesh(_arranged(shape, devices[:needed]), tuple(axes), axis_types=kinds)


def _arranged(shape: Sequence[int], devices: Sequence) -> np.ndarray:
    """The devices of one slice, with neighbours along an axis side by side; in order if they form no whole block."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError):
        return np.array(devices, object).reshape(shape)


# -- Slices and nodes


def grouped_by_slice(devices: Sequence) -> list[list]:
    """The devices of each slice of TPUs, or node of GPUs, in the order of their numbers; one list if they name none."""
    named: list[Any] = [getattr(device, "slice_index", None) for device in devices]
    if None in named or len(set(named)) == 1:
        named = [device.process_index for device in devices] if _are_gpus(devices) else [0] * len(devices)
        if len(set(named)) == len(named):  # a process for each GPU says nothing about nodes
            named = [0] * len(devices)
    slices: dict[int, list] = {}
    for number, device in zip(named, devices, strict=True):
        slices.setdefault(number, []).append(device)
    return [slices[number] for number in sorted(slices)]


def stays_in_slices(mesh: Mesh, axes: Iterable[str]) -> bool:
    """Returns whether devices along these axes are always in one slice of TPUs, or one node of GPUs."""
    slices = grouped_by_slice(list(mesh.devices.flat))
    number_of = {id(device): number for number, devices in enumerate(slices) for device in devices}
    numbers = np.array([number_of[id(device)] for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    dims = tuple(mesh.axis_names.index(name) for name in axes)
    return bool((numbers.max(axis=dims) == numbers.min(axis=dims)).all())


def _are_gpus(devices: Sequence) -> bool:
    return all(getattr(device, "platform", None) == "gpu" for device in devices)


def _across_slices(devices: Sequence, axes: Mapping[str, int], dcn: Mapping[str, int] | None) -> np.ndarray | None:
    """The devices of a mesh whose axes go across slices; None if one slice is enough.

    Args:
      devices: the devices to choose from.
      axes: axis -> number of devices.
      dcn: see `make_mesh`.

    Raises:
      ValueError: see `make_mesh`.
    """
    needed, slices = math.prod(axes.values()), grouped_by_slice(devices)
    if dcn is None and needed <= len(slices[0]):
        return None
    parts = _default_parts(axes, slices) if dcn is None else _checked_parts(axes, dcn)
    number = math.prod(parts.values())
    if number == 1:
        return None
    size = needed // number
    if len(slices) == 1:
        slices = [list(devices[i * size : (i + 1) * size]) for i in range(number)]
    chosen = [part[:size] for part in slices if len(part) >= size][:number]
    if len(chosen) < number:
        raise ValueError(
            f"`dcn` asks for {number} slices of {size} devices, and the devices are in {_sizes_text(slices)}."
        )
    inside = [size // parts.get(name, 1) for name, size in axes.items()]
    blocks = np.empty(number, object)
    for i, part in enumerate(chosen):
        blocks[i] = _arranged(inside, part)
    return np.block(blocks.reshape([parts.get(name, 1) for name in axes]).tolist())


def _default_parts(axes: Mapping[str, int], slices: Sequence[Sequence]) -> dict[str, int]:
    """The parts into which slices cut the axes: the fewest slices with equal numbers of devices, and stages first."""
    needed, stage, data = math.prod(axes.values()), axes[STAGE], axes.get(DATA, 1)
    for number in range(2, len(slices) + 1):
        if needed % number == 0 and sum(len(part) >= needed // number for part in slices) >= number:
            stage_parts = math.gcd(stage, number)
            if data % (number // stage_parts) == 0:
                return {STAGE: stage_parts, DATA: number // stage_parts}
    asked = ", ".join(f"{name}={shown(size)}" for name, size in axes.items())
    raise ValueError(
        f"`{asked}` needs {needed} devices, and the devices are in {_sizes_text(slices)}. Between slices are stages, "
        "and replicas along `data`, and these cannot be cut into equal parts. Choose `stage` or `data` as a multiple "
        'of the number of slices, or say which axis goes across, such as `dcn={"fsdp": 2}`.'
    )


def _checked_parts(axes: Mapping[str, int], dcn: Any) -> Mapping[str, int]:
    """`dcn` of `make_mesh`, after checks."""
    if not isinstance(dcn, Mapping):
        raise ValueError(
            f'`dcn` must be a dict of axes and numbers of slices, such as {{"stage": 2}}, got {shown(dcn)}.'
        )
    for name, number in dcn.items():
        if name not in AXES:
            raise ValueError(
                f"`dcn` has the axis {shown(name)}, and the axes are {', '.join(AXES)}.{did_you_mean(name, AXES)}"
            )
        size = axes.get(name, 1)
        if not hasattr(number, "__index__") or number < 1 or size % number:
            raise ValueError(
                f"`dcn` cuts {name!r} into {shown(number)} parts, and `{name}={shown(size)}`: the parts must be whole "
                "numbers of devices."
            )
    return dcn


def _sizes_text(slices: Sequence[Sequence]) -> str:
    return f"{len(slices)} slices of {', '.join(str(len(part)) for part in slices)} devices"


def _rings(devices: Sequence, number: int, size: int) -> np.ndarray | None:
    """The chips of a flat grid in rings of neighbours.

    Args:
      devices: the chips.
      number: number of rings.
      size: chips per ring.

    Returns:
      `[number, size]` devices, one ring per row; None if the devices form no flat grid that rings
      of this size fill.
    """
    coords: list[Any] = [getattr(device, "coords", None) for device in devices]
    if size % 2 or size < 4 or None in coords:
        return None
    position = np.array(coords) - np.min(coords, axis=0)
    spans = position.max(axis=0) + 1
    sides = np.flatnonzero(spans > 1)
    if len(sides) != 2 or math.prod(spans) != len(devices):
        return None
    grid = np.empty(spans[sides], object)
    grid[tuple(position[:, sides].T)] = devices
    # A ring is a block of two rows of the grid, or of two columns.
    for oriented in (grid, grid.T):
        height, width = oriented.shape
        if height % 2 == 0 and width % (size // 2) == 0:
            blocks = oriented.reshape(height // 2, 2, -1, size // 2).swapaxes(1, 2)
            there, back = blocks[:, :, 0], blocks[:, :, 1, ::-1]
            return np.concatenate([there, back], axis=-1).reshape(number, size)
    return None
