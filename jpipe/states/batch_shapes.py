"""A training that goes on with batches of another number of rows, another length or another dtype.

Each shape has a program of its own. What a state keeps between minibatches does not depend on the batch, so the next
program takes it as it is. What is in flight does, so there must be nothing in flight.
"""

from typing import Any

import jax
import numpy as np

from jpipe._util.warn import warn
from jpipe.engine.state import PipelineState, fields_that
from jpipe.engine.state_arrays import Lives
from jpipe.layers.call_arguments import batch_text
from jpipe.program import Program
from jpipe.states import agreement, portable
from jpipe.states.locations import owners

_MANY_SHAPES = 16


def check_can_change(state: PipelineState, microbatch: Any) -> None:
    """Refuses a batch that a state cannot go on with, before its program is made.

    Args:
      state: the state.
      microbatch: the abstract microbatch of the batch.

    Raises:
      ValueError: if the batch has other entries than those before, or microbatches are in flight.
    """
    before = state.program.microbatch
    shapes = f"`state` was made for microbatches of {batch_text(before)}, got microbatches of {batch_text(microbatch)}"
    if jax.tree.structure(before) != jax.tree.structure(microbatch):
        raise ValueError(
            f"{shapes}: the entries differ. Shapes and dtypes may change from step to step, and entries not. Give the "
            "same entries, or take the state over: `state = pipe.adopt(state, batch)`."
        )
    if portable.is_in_flight(state):
        raise ValueError(
            f"{shapes}, and in the asynchronous schedule {state.program.settings.schedule.name!r} microbatches of the "
            "first shape are in flight. Complete them first, `state, metrics = pipe.flush(state)`, or keep the shape."
        )


def taken_over(state: PipelineState, program: Program) -> PipelineState:
    """A state that a step of a program takes, with nothing in flight, of a program for another shape of batches.

    It is the state itself if both programs have all that it keeps at the same places. Nothing is donated.

    Raises:
      ValueError: if weights or mutable state have other shapes for the batches of the program, or several processes
        differ in the program.
    """
    before = state.program
    if program.prediction is before.prediction:
        return state
    _check_same_leaves(program, before)
    agreement.check_program(program)
    if _places(program) == _places(before):
        program.prediction = before.prediction
        return state
    source = portable.to_portable(state, portable.layers_here(program))
    return portable.with_compression_of(portable.from_portable(program, source), state)


def warn_of_many(num_shapes: int) -> None:
    """Warns once if a pipeline has compiled so many programs that batches seem to have any shape."""
    if num_shapes == _MANY_SHAPES:
        warn(
            f"`step` has compiled programs for {num_shapes} shapes of batches, and this batch has another one. Every "
            "new shape is traced and compiled, and its program stays in memory. Pad batches to a few lengths and sizes."
        )


def _check_same_leaves(program: Program, before: Program) -> None:
    layers = zip(program.stages.layers, before.stages.layers, strict=True)
    for i, (layer, layer_before) in enumerate(layers):
        for name, words in (("parameters", "the weight"), ("state", "the mutable state")):
            now, then = _forms(getattr(layer, name)), _forms(getattr(layer_before, name))
            path = next((p for p in (*then, *now) if then.get(p) != now.get(p)), None)
            if path is not None:
                raise ValueError(
                    f"layer {i} ({layer.name}) has {words} {path} as {then.get(path, 'nothing')} for microbatches of "
                    f"{batch_text(before.microbatch)}, which `state` was made for, and as {now.get(path, 'nothing')} "
                    f"for those of this batch, {batch_text(program.microbatch)}: its form follows from the batch. "
                    "Give all batches one shape, or use a layer whose weights and state do not depend on it."
                )


def _forms(tree: Any) -> dict[str, str]:
    """Path of a leaf -> its dtype and shape."""
    return {jax.tree_util.keystr(path): f"{a.dtype}{list(np.shape(a))}" for path, a in jax.tree.leaves_with_path(tree)}


def _places(program: Program) -> tuple:
    """The place of each number that the states of a program keep between minibatches.

    Compressors of messages keep arrays by names, which the program compares.
    """
    kept = [name for name in fields_that(Lives.KEPT) if name != "message_compression"]
    leaves = [
        (
            owner.layer_leaves,
            owner.weights,
            owner.optimizer_state,
            [(p.array, int(p.start(row)), p.shape) for placed, row in owner.update.gradients for p in placed.places],
        )
        for owner in owners(program)
    ]
    return program.engine.layout.global_shapes(kept), leaves
