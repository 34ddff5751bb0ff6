"""Tied weights in an update.

The first copy gets the sum of all copies' gradients and the others get zeros, so that a norm
counts the gradient once and one stage updates the weight. The other copies take over the updated
value. A stage that itself has copies, on several devices, has a part of the gradient on each. The
sum goes to the first of them, and then all get it with the other gradients of the stage.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jpipe import packing
from jpipe.engine.arrays import TickArrays
from jpipe.engine.context import TrainingDevice
from jpipe.engine.training import TiedCopy
from jpipe.mesh import STAGE


def _is_on(device: TrainingDevice, devices: Sequence[int]) -> jax.Array:
    """Returns whether this is one of some devices."""
    return functools.reduce(operator.or_, [device.position == d for d in devices])


def _by_chunk(copy: TiedCopy) -> list[tuple[int, list[int]]]:
    """Position of the copy's stage on a device -> the devices on which it has that position."""
    chunks: dict[int, list[int]] = {}
    for d, chunk in copy.stage_copies:
        chunks.setdefault(chunk, []).append(d)
    return list(chunks.items())


def sum_tied_gradients(device: TrainingDevice, copies: Sequence[TiedCopy], arrays: TickArrays) -> TickArrays:
    gradients = arrays.gradients
    lead = functools.partial(device.lead, "gradients")
    total: Any = 0
    for copy in copies:
        for chunk, devices in _by_chunk(copy):
            value = packing.read(gradients, copy.gradient, lead(chunk), copy.row)
            total += jnp.where(_is_on(device, devices), value, 0)
    if len({d for copy in copies for d, _ in copy.stage_copies}) > 1:
        total = lax.psum(total, STAGE)
    home = copies[0].stage_copies[0][0]
    for copy in copies:
        for chunk, devices in _by_chunk(copy):
            old = packing.read(gradients, copy.gradient, lead(chunk), copy.row)
            new = jnp.zeros_like(total)
            if copy is copies[0]:
                new = jnp.where(device.position == home, total, new)
            new = jnp.where(_is_on(device, devices), new, old)
            gradients = packing.write(gradients, copy.gradient, lead(chunk), new, copy.row)
    return arrays.replace(gradients=gradients)


def copy_tied_weights(device: TrainingDevice, copies: Sequence[TiedCopy], arrays: TickArrays) -> TickArrays:
    first = copies[0]
    # Copies on the stage of the first were updated with it.
    others = [copy for copy in copies if copy.stage_copies != first.stage_copies]
    if not others:
        return arrays
    # Schedules that tie stages keep one version, so the row of a stage is its position.
    parameters = arrays.parameters
    lead = functools.partial(device.lead, "parameters")
    home, chunk = first.stage_copies[0]
    value = packing.read(parameters, first.place, lead(chunk), first.row)
    value = lax.psum(jnp.where(device.position == home, value, 0), STAGE)
    for copy in others:
        for chunk, devices in _by_chunk(copy):
            old = packing.read(parameters, copy.place, lead(chunk), copy.row)
            new = jnp.where(_is_on(device, devices), value, old)
            parameters = packing.write(parameters, copy.place, lead(chunk), new, copy.row)
    return arrays.replace(parameters=parameters)
