"""Pairs: the forward and the backward of a tick in one branch, for layers that communicate.

XLA starts a collective early and waits for it late, but it moves no operation into a branch or out of it. In one branch
the collectives of one pass travel while the products of the other one are computed. `TrainingPass.pairs` says which
programs run so. A device that has only one of both passes in a tick runs it in a branch of its own, as ever.

Neither pass reads what the other one writes. Two barriers tell the compiler so:

- Both use the rings of stashes. The slot that the backward reads is copied out of a ring before the forward writes its
  own slot. XLA does not know that the slots differ, and would copy the whole ring without an order.
- Both read weights, inboxes and the scalars of the tick. XLA joins operations that read one array into one kernel, and
  then all of one pass waits for the other. So the backward reads values that the compiler does not know to be the same.

Layers are unrolled here, because a loop does not run beside another loop.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
from jax import lax

from jpipe.engine.arrays import Packed, ReadOnly, TickArrays, Written
from jpipe.engine.context import TrainingStage
from jpipe.engine.guard import Branch, replaced
from jpipe.engine.operations import FORWARD_STASHES, OPERATIONS
from jpipe.engine.scopes import PAIR, Scope
from jpipe.packing import is_on_host, row_of

Values = TypeVar("Values")

SHARED = "parameters", "constants", "read_parameters", "cast_weights", "inbox"
"""What both passes read."""


def pair(forward: TrainingStage, backward: TrainingStage) -> Branch:
    """The branch of a forward of one stage and a backward of another one, or of another microbatch."""
    forward_writes, backward_writes = OPERATIONS["forward"].writes(forward), OPERATIONS["backward"].writes(backward)
    copied = [name for name in FORWARD_STASHES if name in forward_writes]
    names = [*dict.fromkeys([*forward_writes, *backward_writes, "op_count"])]
    forward = dataclasses.replace(forward, unrolls=True)
    backward = dataclasses.replace(backward, unrolls=True)

    def run(written: Written, read: ReadOnly) -> Written:
        arrays = TickArrays(**{name: getattr(record, name) for record in (written, read) for name in record})
        slots, arrays = _with_slots(backward, arrays, copied)
        arrays = _run("forward", forward, forward_writes, arrays)
        after = {name: getattr(arrays, name) for name in copied}
        stage, arrays = _apart(backward, arrays.replace(**slots))
        stage = dataclasses.replace(stage, copied=frozenset(copied))
        arrays = _run("backward", stage, backward_writes, arrays).replace(**after)
        arrays = arrays.replace(op_count=arrays.op_count + 2)
        return written.replace(**{name: getattr(arrays, name) for name in written})

    return Branch(PAIR, names, run)


def _run(name: str, stage: TrainingStage, writes: Sequence[str], arrays: TickArrays) -> TickArrays:
    """Runs one of both passes."""
    with jax.named_scope(Scope(name, stage.program.stages).text):
        return replaced(arrays, OPERATIONS[name].run(stage, *arrays.split(writes)))


def _with_slots(
    stage: TrainingStage, arrays: TickArrays, copied: Sequence[str]
) -> tuple[Mapping[str, Packed], TickArrays]:
    """The slot of each ring that a backward reads, `[1, ...]`, and the arrays, of which nothing is read before."""
    slots: dict[str, Packed] = {}
    for ring in copied:
        lead, specs = stage.slot(ring), stage.spec.packings.rings[ring].specs
        packed = getattr(arrays, ring)
        slots[ring] = {name: row_of(a, lead(name), specs.get(name, ())) for name, a in packed.items()}
    return _held_back(arrays, [*copied, *SHARED], slots)


def _apart(stage: TrainingStage, arrays: TickArrays) -> tuple[TrainingStage, TickArrays]:
    """A stage and its arrays, as values that no other pass reads."""
    lane, device = stage.scalars, stage.device
    scalars = lane.tick.values, device.layer_numbers
    (values, numbers), arrays = _held_back(arrays, SHARED, scalars)
    lane = dataclasses.replace(lane, tick=dataclasses.replace(lane.tick, values=values))
    return dataclasses.replace(stage, scalars=lane, device=dataclasses.replace(device, layer_numbers=numbers)), arrays


def _held_back(arrays: TickArrays, names: Sequence[str], first: Values) -> tuple[Values, TickArrays]:
    """Some of the arrays as values that come after `first`, and which the compiler does not know to be the same."""
    values, structure = jax.tree.flatten({name: getattr(arrays, name) for name in names if name in arrays})
    first, held = lax.optimization_barrier((first, [a for a in values if not is_on_host(a)]))
    on_device = iter(held)
    values = [a if is_on_host(a) else next(on_device) for a in values]
    return first, arrays.replace(**jax.tree.unflatten(structure, values))
