"""Meshes: which device runs which stage, replica and part of a layer."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

STAGE, DATA, MODEL = "stage", "data", "model"
"""Names of the axes of a mesh."""

DEVICE_MEMORY = "device"
"""The kind of memory that arrays of the state are in: the device's own."""


def make_mesh(
    *,
    stage: int,
    data: int = 1,
    model: int = 1,
    ring: bool = False,
    devices: Sequence | None = None,
) -> Mesh:
    """A mesh for pipelines, with an axis "stage", whose neighbours are neighbours in the machine where that has a shape.

    Args:
      stage: number of devices of the pipeline.
      data: replicas of the pipeline, each of which trains on its share of every minibatch; above 1 adds an axis
        "data".
      model: devices that share the work of a stage (tensor parallelism); above 1 adds an axis "model", which is left
        to the compiler. Parameters are split over it as Flax's `with_partitioning` says.
      ring: whether the first stage and the last must be neighbours too, as `Schedule.ring` says; on TPUs messages between
        others do not travel beside the compute. Where chips form a flat grid and `stage` is even, each pipeline gets two
        rows of it; gradients then have a longer way between replicas.
      devices: the devices to take the first from; by default `jax.devices()`.

    Raises:
      ValueError: if there are too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {DATA: data, STAGE: stage, MODEL: model}
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or size < 1:
            raise ValueError(
                f"`{name}` must be a whole number of devices, at least 1, got {size!r}."
            )
    axes = {name: size for name, size in sizes.items() if size > 1 or name == STAGE}
    needed = math.prod(axes.values())
    if len(devices) < needed:
        platform = devices[0].platform if devices else "none"
        remedy = "Use fewer stages." if needed == stage else "Use fewer of them."
        if platform == "cpu":
            remedy = (
                f'Call `jax.config.update("jax_num_cpu_devices", {needed})` before JAX is first used, which makes '
                "that many devices out of the CPU, or use fewer."
            )
        asked = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"`{asked}` needs {needed} devices, got {len(devices)} ({platform}). {remedy}"
        )
    shape, kinds = tuple(axes.values()), (AxisType.Auto,) * len(axes)
    if ring and model == 1:
        rows = _rings(devices[:needed], data, stage)
        if rows is not None:
            return Mesh(rows.reshape(shape), tuple(axes), axis_types=kinds)
    return jax.make_mesh(shape, tuple(axes), kinds, devices=devices[:needed])


def _rings(devices: Sequence, number: int, size: int) -> np.ndarray | None:
    """`[number, size]`, the chips of a flat grid, each row a ring of neighbours; None if they are no such grid."""
    coords: list[Any] = [getattr(device, "coords", None) for device in devices]
    if size % 2 or size < 4 or None in coords:
        return None
    at = np.array(coords) - np.min(coords, axis=0)
    spans = at.max(axis=0) + 1
    sides = np.flatnonzero(spans > 1)
    if len(sides) != 2 or math.prod(spans) != len(devices):
        return None
    grid = np.empty(spans[sides], object)
    grid[tuple(at[:, sides].T)] = devices
    for turned in (grid, grid.T):  # blocks of two rows, or of two columns
        height, width = turned.shape
        if height % 2 == 0 and width % (size // 2) == 0:
            blocks = turned.reshape(height // 2, 2, -1, size // 2).swapaxes(1, 2)
            there, back = blocks[:, :, 0], blocks[:, :, 1, ::-1]
            return np.concatenate([there, back], axis=-1).reshape(number, size)
    return None
