"""The slices of sequences of a schedule: their shapes, and what they exclude, before anything is compiled."""

from collections.abc import Callable
from typing import Any

import jax

from jpipe._util.foreign import shown
from jpipe.layers.loss import WholeBatchLoss
from jpipe.mesh import STAGE
from jpipe.options.communication import Communication
from jpipe.options.splits import Splits
from jpipe.packing import axes
from jpipe.schedule import Schedule
from jpipe.stages.cut import Stages

MEASURED = "layers are measured on whole sequences, which a pipeline without slices can do"


def microbatch(schedule: Schedule, row_group: Any) -> Any:
    """The abstract microbatch of a group of rows: the group, or one of its slices.

    Args:
      schedule: the table.
      row_group: abstract arrays `[rows, positions, ...]`, of any shape without slices.

    Raises:
      ValueError: if the positions cannot be cut into equal slices.
    """
    k = schedule.num_slices

    def part(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if len(a.shape) < 2 or a.shape[1] % k:
            raise ValueError(
                f"schedule {shown(schedule.name)} cuts the positions of a sequence, dim 1 of each entry of the "
                f"batch, in {k} equal slices, and an entry of a microbatch has shape {list(a.shape)}. Use sequences of "
                f"a multiple of {k} positions, or another `num_slices`; what belongs to a whole row must be given for "
                "each position."
            )
        return jax.ShapeDtypeStruct((a.shape[0], a.shape[1] // k, *a.shape[2:]), a.dtype)

    return row_group if k == 1 else jax.tree.map(part, row_group)


def check_slices(
    schedule: Schedule,
    *,
    is_whole_model: bool,
    loss: Callable | None,
    boundaries: Any,
    splits: Splits,
    communication: Communication,
) -> None:
    """Raises `ValueError` if the arguments of a pipeline do not go with the slices of its schedule.

    Args:
      schedule: the table.
      is_whole_model: whether the layers are a whole model.
      loss, boundaries, splits, communication: the loss, the boundaries and the options of the pipeline.
    """
    if schedule.num_slices == 1:
        return
    runs_together = any(STAGE in axes((target,)) for _, target in splits.axis_rules)
    reasons = (
        (
            is_whole_model,
            "the layers are a whole model, which is cut by a trace of whole sequences. Give a list of layers",
        ),
        (isinstance(loss, WholeBatchLoss), "`WholeBatchLoss` takes the rows of a minibatch as they are"),
        (
            isinstance(boundaries, str) and boundaries != "flops",
            f"for `boundaries={shown(boundaries)}` {MEASURED}: take `pipe.partition` of one, or balance by FLOPs",
        ),
        (splits.strategy is not None, "`strategy` splits layers as it has seen them on whole sequences"),
        (
            runs_together,
            "`axis_rules` let all stages run the first and the last layer together, and these would need the place of "
            'their slice. Leave the axis "stage" out of the rules',
        ),
        (
            communication.accumulate_gradients is not None,
            "`accumulate_gradients` begins a minibatch with its first microbatch, whose backward is not the first here",
        ),
    )
    for holds, reason in reasons:
        if holds:
            start = f"schedule {shown(schedule.name)} has {schedule.num_slices} slices of a sequence"
            raise ValueError(f"{start}, and {reason}.")


def check_states(stages: Stages, recompute: Any) -> None:
    """Refuses a state that goes from slice to slice where forwards run again: it has moved on then.

    Args:
      stages: the model, cut.
      recompute: the argument of `Pipeline`.
    """
    if recompute != "full":
        return
    for i, layer in enumerate(stages.layers):
        kind = stages.layer_kinds[stages.kind_of_layer[i]]
        if kind.num_carried > len(kind.kept):
            raise ValueError(
                f"layer {i} ({layer.name}) begins a slice with the state that the slice before has left "
                '(`jpipe.carry`), and with `recompute="full"` its forward would run again when the state has moved on. '
                'Use `recompute="none"`, or a policy of `jax.checkpoint_policies`.'
            )
