"""What a layer hands on from slice to slice of a sequence, and the gradient by it, which goes back.

Both lie in rings of the stage, and no message has them. Slices of one sequence share a slot: a forward reads there what
the slice before has written, and writes it anew. The layer itself begins anew with the first slice, see
`jpipe._slices`. A backward of the last slice begins with gradients of zeros.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jpipe import packing
from jpipe.engine.arrays import Packed
from jpipe.engine.context import StageContext
from jpipe.layers.backward import LayerProgram
from jpipe.lowering.lower import CARRIES
from jpipe.packing import Place
from jpipe.stages.cut import LayerRun

CARRY, CARRY_GRADIENT = CARRIES


def handed_before(stage: StageContext, carry: Packed, run: LayerRun, i: jax.Array | int) -> list[jax.Array]:
    """What layer i of a run has handed on."""
    return _read(stage, CARRY, carry, run.carry, i)


def with_handed(
    stage: StageContext, carry: Packed, run: LayerRun, i: jax.Array | int, values: Sequence[jax.Array]
) -> Packed:
    """The packed values, with those that layer i of a run hands on."""
    return _with(stage, CARRY, carry, run.carry, i, values)


def kept(stage: StageContext, carry: Packed, run: LayerRun, kind: LayerProgram, i: jax.Array | int) -> list[jax.Array]:
    """The values of `LayerProgram.kept` of layer i of a run."""
    first = len(kind.inputs) - kind.num_carried
    return _read(stage, CARRY, carry, [run.carry[j - first] for j in kind.kept], i)


def gradient_after(stage: StageContext, gradient: Packed, run: LayerRun, i: jax.Array | int) -> list[jax.Array]:
    """The gradient by what layer i of a run hands on, from the slice after."""
    if not run.carry_gradient:
        return []
    values = _read(stage, CARRY_GRADIENT, gradient, run.carry_gradient, i)
    is_last = stage.slice_number == stage.spec.schedule.num_slices - 1
    return [jnp.where(is_last, 0, a) for a in values]


def with_gradient(
    stage: StageContext, gradient: Packed, run: LayerRun, i: jax.Array | int, values: Sequence[jax.Array]
) -> Packed:
    """The packed gradients, with that for the slice before of layer i of a run."""
    return _with(stage, CARRY_GRADIENT, gradient, run.carry_gradient, i, values)


def _read(
    stage: StageContext, ring: str, packed: Packed, places: Sequence[Place], i: jax.Array | int
) -> list[jax.Array]:
    """The values of layer i in a slot of a ring, which tables without slices lack."""
    return packing.read_all(packed, places, stage.slot(ring), i) if places else []


def _with(
    stage: StageContext,
    ring: str,
    packed: Packed,
    places: Sequence[Place],
    i: jax.Array | int,
    values: Sequence[jax.Array],
) -> Packed:
    """The ring, with values of layer i in a slot."""
    return packing.write_all(packed, places, stage.slot(ring), values, i, joined=stage.joins) if places else packed
