"""Which tables can run vocabulary layers."""

from collections.abc import Mapping

import numpy as np

from jpipe import vocabulary
from jpipe.lowering.everywhere import ticks_before_update
from jpipe.mesh import STAGE
from jpipe.schedule import Schedule
from jpipe.stages.vocabulary import Vocabulary


def check_table(layers: Vocabulary, schedule: Schedule, delays: Mapping[str, np.ndarray]) -> None:
    """Raises `ValueError` if a table cannot run the vocabulary layers.

    Args:
      layers: the vocabulary layers.
      schedule: the table.
      delays: pass with a parameter hook -> `[S]`, its delays.
    """
    if not layers.layers:
        return
    remedy = f'leave "{STAGE}" out of the parameter\'s partition'
    if schedule.has_copies:
        raise vocabulary.VocabularyError(
            f"layer {layers.layers[0].index} is split over all stages, and `schedule` runs stages with copies, got "
            f"{schedule.name!r}. Choose a schedule without copies, or {remedy}."
        )
    if schedule.updates_by_stage:
        raise vocabulary.VocabularyError(
            f"layer {layers.layers[0].index} is split over all stages, and stages of {schedule.name!r} update several "
            f"times in a minibatch, each by its own rhythm. Choose a schedule without `update_every`, or {remedy}."
        )
    for layer, cells, stage, words in (
        (layers.embedding, schedule.backward_ticks(), 0, "backward of the first"),
        (layers.head, schedule.forward_ticks(), -1, "forward of the last"),
    ):
        if layer is None or schedule.drains:
            continue
        # A gradient that is added before the update of the minibatch before would be a part of that update.
        too_early = ticks_before_update(schedule, cells, stage)
        if too_early == 0 and layer is layers.head and _is_read_later(schedule):
            continue  # see `head_after_update`
        if too_early >= 0:
            raise vocabulary.VocabularyError(
                f"layer {layer.index} is split over all stages, which add up its gradient in the {words} stage, and in "
                f"{schedule.name!r} this stage begins the next minibatch {too_early} ticks before it has updated with "
                f'the last one. Choose another schedule, for asynchronous ones with `ticks="unit"`, or {remedy}.'
            )
    if layers.head is None:
        return
    last = schedule.by_stage(schedule.forward_versions())[:, -1]
    if (last != schedule.by_stage(schedule.backward_versions())[:, -1]).any():
        raise vocabulary.VocabularyError(
            f"the head (layer {layers.head.index}) is split over all stages, which takes its gradient in its forward, "
            f"and the last stage of {schedule.name!r} reads newer weights in its backward. Choose another schedule, or "
            f"{remedy}."
        )
    for name, delay in delays.items():
        if delay[-1]:
            raise vocabulary.VocabularyError(
                f"the head (layer {layers.head.index}) is split over all stages, which takes its gradient in its "
                f"forward, and `{name}_params` changes the weights of the last stage in {schedule.name!r}. Leave out "
                f"`{name}_params`, or {remedy}."
            )


def _is_read_later(schedule: Schedule) -> bool:
    """Returns whether each backward of the last stage is in a later tick than its forward."""
    ticks = schedule.forward_ticks(), schedule.backward_ticks()
    forward, backward = (schedule.by_stage(cells)[:, -1] for cells in ticks)
    return bool((forward < backward).all())
