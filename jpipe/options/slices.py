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


def check_slices(
    schedule: Schedule, *, is_whole_model: bool, loss: Callable | None, splits: Splits, communication: Communication
) -> None:
    """Raises `ValueError` if the arguments of a pipeline do not go with the slices of its schedule.

    Args:
      schedule: the table.
      is_whole_model: whether the layers are a whole model.
      loss, splits, communication: the loss, and the options, of the pipeline.
    """
    if schedule.num_slices == 1:
        return
    reasons = {
        "the layers are a whole model, which is cut at the places of one trace of whole sequences. Give a list of "
        "layers": is_whole_model,
        "`WholeBatchLoss` takes the rows of a minibatch as they are": isinstance(loss, WholeBatchLoss),
        "`strategy` splits layers as it has seen them on whole sequences": splits.strategy is not None,
        "`axis_rules` let all stages run the first and the last layer together, and these would need the place of "
        'their slice. Leave the axis "stage" out of the rules': any(
            STAGE in axes((target,)) for _, target in splits.axis_rules
        ),
        "`accumulate_gradients` begins a minibatch with its first microbatch, whose backward is not the first here": (
            communication.accumulate_gradients is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"schedule {shown(schedule.name)} has {schedule.num_slices} slices of a sequence, and {reason}."
            )


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
