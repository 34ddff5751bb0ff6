"""What a schedule with slices of sequences excludes: each is refused before anything is compiled."""

from collections.abc import Callable
from typing import Any

from jpipe._util.foreign import shown
from jpipe.layers.loss import WholeBatchLoss
from jpipe.mesh import STAGE
from jpipe.options.communication import Communication
from jpipe.options.splits import Splits
from jpipe.packing import axes
from jpipe.schedule import Schedule
from jpipe.stages.cut import Stages

MEASURED = "layers are measured on whole sequences, which a pipeline without slices can do"


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
