"""The choice of the arrays that go to host memory, so that a pipeline fits into its devices.

The table says when every array is read, so the choice is made before the first step, with nothing measured
but the compiler's temporaries:

- The optimizer's state is read once in a step, so a byte of it in host memory moves twice in a step.
- A stash in host memory moves twice for every microbatch that goes there. `jpipe.lowering.spills` says which
  go, by Belady's rule, for each number of slots on a device.
- A weight in host memory moves in every forward and every backward of its stage, and twice in the update; a gradient
  twice in every backward, and three times in the update.
- An update needs room for a few chunks of state. Large chunks move faster, so the largest that fits is taken.

Of all combinations the one that moves the fewest bytes is taken. Weights and gradients move most often, so they go
after all of the optimizer's state, equal parts of both.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jpipe import costs, packing
from jpipe._util.sizes import size_text
from jpipe.layers.call_arguments import batch_text
from jpipe.lowering.lower import STASHES
from jpipe.mesh import HOST_MEMORY
from jpipe.options import exclusions
from jpipe.packing import CHUNK
from jpipe.program import Program
from jpipe.stages.offload import LEAST_SLOTS, NO_OFFLOAD, HostMoves, Offload

_CHUNKS = (CHUNK, CHUNK // 4, CHUNK // 16, CHUNK // 64)
"""The chunks that are tried, in numbers."""

_SMALL_STEP, _LARGE_STEP = 1 / 64, 1 / 4
"""By how much the part of the optimizer's state, or of weights and gradients, in host memory grows, if the arrays are
too large, because no weight is divided; and if the temporaries are, which only the compiler knows."""


class _Stashes(NamedTuple):
    """Stashes of at most some microbatches on a device.

    Attributes:
      slots: the most microbatches; None: all.
      num_bytes: bytes of everything in flight on a device.
      moved: bytes that a device sends to the host and fetches in a step.
    """

    slots: int | None
    num_bytes: int
    moved: float


def fit(make: Callable[[Offload], Program], limit: float) -> Program:
    """Returns the program that moves the fewest bytes, of those tried that need at most `limit` bytes of a device.

    Compiles the step once if all fits on the device, else three to ten times.

    Args:
      make: `(offload) -> program`.
      limit: bytes of a device.

    Raises:
      ValueError: if no program fits; says the least that would do.
    """
    plain = make(NO_OFFLOAD)
    plain_arrays = _array_bytes(plain)
    if plain_arrays <= limit and plain_arrays + _temporary_bytes(plain) <= limit:
        return plain
    options = list(_stash_options(plain))
    settings = plain.settings
    compressors = settings.communication.compressors
    stay = exclusions.stay_on_devices(settings.hooks, settings.schedule, compressors)
    movable = [name for name, why in stay.items() if not why]

    def offload(state: float, slots: int | None, chunk: int, others: float) -> Offload:
        """Makes the `Offload`. `others` is the part of weights and of gradients, as far as they can move."""
        weights, gradients = (others * (name in movable) for name in ("weights", "gradients"))
        return Offload(state, slots, chunk, weights=weights, gradients=gradients)

    for others, chunk in itertools.product((0.0, 1.0), _CHUNKS):
        smallest = make(offload(1.0, options[-1].slots, chunk, others))
        temporaries = _temporary_bytes(smallest)
        least = _array_bytes(smallest) + temporaries
        if least <= limit:
            break
    else:
        raise ValueError(_too_little(smallest, temporaries, limit, least))
    layout = make(offload(1.0, None, chunk, others)).engine.layout
    state, weights, gradients = (
        layout[name].num_bytes(settings.platform, HOST_MEMORY)
        for name in ("optimizer_state", "parameters", "gradients")
    )
    left = plain_arrays - options[0].num_bytes
    schedule = settings.schedule
    passes = 2 + schedule.splits_backward + settings.numbers.runs_forward_again
    moves = HostMoves.of(schedule.num_microbatches, passes)
    moved_of_others = moves.weights * weights + moves.gradients * gradients
    moves_of_others = moved_of_others / max(weights + gradients, 1)

    def to_move(option: _Stashes) -> tuple[float, float]:
        """Bytes of the optimizer's state, and of weights and gradients, that must go to the host beside an option."""
        over = max(left + option.num_bytes + temporaries - limit, 0)
        return min(over, state), max(over - state, 0)

    def moved(option: _Stashes) -> float:
        optimizer_share, others_share = to_move(option)
        return option.moved + moves.optimizer * optimizer_share + moves_of_others * others_share

    fitting = [o for o in options if to_move(o)[1] <= weights + gradients]
    best = min(fitting or options[-1:], key=moved)
    shares = [over / max(most, 1) for over, most in zip(to_move(best), (state, weights + gradients))]
    last = 1 if others else 0  # the share that grows
    while shares[last] < 1:
        program = make(offload(shares[0], best.slots, chunk, shares[1]))
        if _array_bytes(program) + temporaries > limit:
            shares[last] += _SMALL_STEP
        elif _array_bytes(program) + _temporary_bytes(program) > limit:
            shares[last] += _LARGE_STEP
        else:
            return program
    program = make(offload(1.0, best.slots, chunk, others))
    if _array_bytes(program) + _temporary_bytes(program) <= limit:
        return program
    return smallest


def check_fits(program: Program, limit: float) -> None:
    """Refuses a program for another shape of batches that needs more than `limit` bytes of a device.

    Compiles the step. What is in host memory cannot change any more.

    Raises:
      ValueError: says how much the program needs.
    """
    needed = _array_bytes(program) + _temporary_bytes(program)
    if needed > limit:
        shapes = batch_text(program.microbatch)
        raise ValueError(
            f"`device_memory` of {size_text(limit)} is too little for microbatches of {shapes}: a device needs "
            f"{size_text(needed)} ({int(needed)} bytes). What is in host memory was chosen for the first state. Make "
            "it with the largest batch, `state = pipe.init(key, largest)`, or give more memory."
        )


def _array_bytes(program: Program) -> int:
    """Bytes of the arguments of a step on a device: of the state, the minibatch and the scalars of the table."""
    groups, platform = program.engine.layout.groups, program.settings.platform
    state_bytes = sum(group.num_bytes(platform) for group in groups.values())
    rows = program.engine.local_rows
    table_bytes = packing.array_bytes(rows.shape, rows.dtype, platform)
    return state_bytes + costs.batch_bytes(program) + table_bytes


def _temporary_bytes(program: Program) -> int:
    """Bytes that the compiled step needs beside its arguments."""
    analysis: Any = program.lower().compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _stash_options(plain: Program) -> Iterator[_Stashes]:
    """Stashes of all microbatches on a device, and of fewer and fewer."""
    engine, platform = plain.engine, plain.settings.platform
    yield _Stashes(None, engine.layout["buffers"].num_bytes(platform), 0)
    if engine.numbers.runs_forward_again:
        return
    most = max(engine.lowered.num_slots[ring] for ring in STASHES)
    for slots in range(most - 1, LEAST_SLOTS - 1, -1):
        offload = dataclasses.replace(engine.offload, activations=slots)
        spilled = dataclasses.replace(engine, offload=offload)
        try:
            lowered = spilled.lowered
        except ValueError:  # too few slots, or microbatches, for this table
            return
        group, moved = spilled.layout["buffers"], 0.0
        for ring, spill in lowered.spills.items():
            staged = dataclasses.replace(group, shapes=group.shapes["staged"][ring], on_host=frozenset())
            num_moved = int((spill.stores >= 0).sum(axis=0).max())
            moved += 2 * num_moved * staged.num_bytes(platform)
        yield _Stashes(slots, group.num_bytes(platform), moved)


def _too_little(smallest: Program, temporaries: int, limit: float, least: float) -> str:
    groups, platform = smallest.engine.layout.groups, smallest.settings.platform
    sizes = {name: group.num_bytes(platform) for name, group in groups.items()}
    sizes["in flight"] = sizes.pop("buffers")
    sizes |= {"temporaries": temporaries, "minibatch": costs.batch_bytes(smallest)}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    parts = ", ".join(f"{n.replace('_', ' ')} {size_text(sizes[n])}" for n in largest)
    return (
        f"`device_memory` of {size_text(limit)} is too little: with all that can be in host memory there, a device "
        f"needs {size_text(least)} ({int(least)} bytes; {parts}). Give that much, or use more stages, smaller "
        "microbatches or `recompute`."
    )
