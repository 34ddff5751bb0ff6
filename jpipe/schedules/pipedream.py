"""PipeDream: no flush, stashed weights."""

from collections.abc import Sequence

import numpy as np

from jpipe._table.messages import MessageTicks
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.schedule import IDLE, Schedule, newest_version
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.copies import has_copies, wrong_update_every
from jpipe.schedules.steady import last_gradients, steady_ticks


def refusal(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    vertical_sync: bool,
    replicas: Sequence[int] | None,
    update_every: Sequence[int] | None,
) -> str | None:
    """The reason why `pipedream` refuses these arguments; None if it accepts them."""
    wrong = wrong_counts_or_ticks(num_stages, num_microbatches, ticks, replicas)
    wrong = wrong or wrong_update_every(num_stages, num_microbatches, update_every)
    if wrong or update_every is None:
        return wrong
    if vertical_sync and len({*update_every}) > 1:
        return (
            "`vertical_sync` needs stages that update after the same microbatches, got `update_every` "
            f"{shown(tuple(update_every))}: version v of one stage is then not of the microbatches of version v of "
            "another. Leave out one of the two."
        )
    if replicas is None or not has_copies(replicas):
        return None
    if ticks == "paired":
        return (
            "`update_every` of stages with copies needs unit ticks, got `ticks` 'paired': a paired tick runs as many "
            f"microbatches at once as a stage has copies ({max(replicas)}), and a stage updates once in it. Pass "
            '`ticks="unit"`.'
        )
    for s, (period, copies) in enumerate(zip(update_every, replicas, strict=True)):
        if period % copies:
            return (
                f"`update_every` must hold multiples of the copies of a stage, got {period} for stage {s} with "
                f"{copies}: copies take microbatches in turn and update together, each with as many gradients. Pass "
                f"{copies}, as PipeDream does, or a multiple."
            )
    return None


@suggests
def pipedream(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    vertical_sync: bool = False,
    replicas: Sequence[int] | None = None,
    *,
    update_every: Sequence[int] | None = None,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """PipeDream: a backward reads the weights that its forward read.

    Operations run at the same ticks as in `pipemare`. A stage keeps the weight versions
    that microbatches in flight have read, so forward and backward of a microbatch use the
    same weights of a stage. With vertical sync every stage reads the version that the
    microbatch read on stage 0, so the whole gradient belongs to one version of the model.

    With `replicas` and unit ticks it is the paper's 1F1B-RR. There every stage updates after as
    many minibatches as it has copies: `update_every=replicas`. By default all stages update after N microbatches.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per step and, without `update_every`, per update; at least 1. The paper has 1.
      ticks: "unit" or "paired", as for `pipemare`.
      vertical_sync: whether all stages read the version of stage 0.
      replicas: the number of copies of each stage, or None, as for `pipemare`.
      update_every: for each stage the microbatches of one update, a divisor of N and a multiple of its copies; None:
        N for all. An update applies the mean of the gradients of its microbatches, while other stages go on.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of one round. Without copies it has T = 3 N unit or N paired ticks, and no
      bubble.

    Raises:
      ValueError: if either count is below 1, `ticks` is neither of the two, or `replicas`, `update_every` or
        `message_ticks` do not fit.

    Example:
      >>> pipedream(4, 1).facts().weight_versions.tolist()
      [4, 3, 2, 1]
      >>> pipedream(4, 1, vertical_sync=True).facts().forward_delay.tolist()
      [3, 3, 3, 3]
      >>> print(pipedream(2, 3, replicas=(3, 1)).to_text(), end="")
      0@0     0@1     0@2     1@3
      F0@-1   F1@-1   F2@-1   W-1,U0
      B-3@-2  B-2@-2  B-1@-2  F0
      W-3,U0  W-2,U0  W-1,U0  B0
      .       .       .       W0
      .       .       .       F1
      .       .       .       B1
      .       .       .       W1
      .       .       .       F2
      .       .       .       B2

      The stage with three copies updates after three microbatches, and the other one after each:

      >>> print(pipedream(2, 3, replicas=(3, 1), update_every=(3, 1)).to_text(), end="")
      0@0     0@1     0@2     1@3
      F0@-1   F1@-1   F2@-1   W-1,U0
      B-3@-2  B-2@-2  B-1@-2  F0
      W-3,U0  W-2,U0  W-1,U0  B0
      .       .       .       W0,U1
      .       .       .       F1@1
      .       .       .       B1@1
      .       .       .       W1,U2
      .       .       .       F2@2
      .       .       .       B2@2

    References:
      Narayanan et al., SOSP 2019, arXiv:1806.03377, sections 3.2 and 3.3.
    """
    raise_refusal(refusal(num_stages, num_microbatches, ticks, vertical_sync, replicas, update_every))
    steady = steady_ticks(num_stages, num_microbatches, ticks, replicas, message_ticks, update_every)
    forward, update = steady["forward"], last_gradients(steady, update_every)
    stage = np.asarray(steady.get("stage", np.arange(num_stages)))
    period = np.asarray(update_every or [num_microbatches] * num_stages)[stage]
    part = np.arange(num_microbatches)[:, None] // period
    version = newest_version(forward, update, steady["num_ticks"]) - part
    if vertical_sync:
        # Of several columns of stage 0 one runs the microbatch.
        entry = np.where(forward == IDLE, -np.inf, version)[:, stage == 0].max(axis=1)
        version = np.broadcast_to(entry[:, None].astype(int), version.shape)
    return Schedule.from_ticks("pipedream", **steady, update=update, forward_version=version, backward_version=version)
