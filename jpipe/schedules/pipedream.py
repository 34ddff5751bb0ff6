"""PipeDream: no flush, stashed weights."""

from collections.abc import Sequence

import numpy as np

from jpipe._table.messages import MessageTicks
from jpipe._util.suggest import suggests
from jpipe.schedule import IDLE, Schedule, newest_version
from jpipe.schedules.arguments import raise_refusal, wrong_counts_or_ticks
from jpipe.schedules.steady import last_gradients, steady_ticks


def refusal(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    vertical_sync: bool,
    replicas: Sequence[int] | None,
) -> str | None:
    """The reason why `pipedream` refuses these arguments; None if it accepts them."""
    del vertical_sync
    return wrong_counts_or_ticks(num_stages, num_microbatches, ticks, replicas)


@suggests
def pipedream(
    num_stages: int,
    num_microbatches: int,
    ticks: str = "unit",
    vertical_sync: bool = False,
    replicas: Sequence[int] | None = None,
    *,
    message_ticks: MessageTicks = 1,
) -> Schedule:
    """PipeDream: a backward reads the weights that its forward read.

    Operations run at the same ticks as in `pipemare`. A stage keeps the weight versions
    that microbatches in flight have read, so forward and backward of a microbatch use the
    same weights of a stage. With vertical sync every stage reads the version that the
    microbatch read on stage 0, so the whole gradient belongs to one version of the model.

    With `replicas` and unit ticks it is the paper's 1F1B-RR. There every stage updates after as
    many minibatches as it has copies; here all stages update after N microbatches.

    Args:
      num_stages: S, at least 1.
      num_microbatches: N, microbatches per update, at least 1. The paper has 1.
      ticks: "unit" or "paired", as for `pipemare`.
      vertical_sync: whether all stages read the version of stage 0.
      replicas: the number of copies of each stage, or None, as for `pipemare`.
      message_ticks: the ticks that messages take, see `jpipe.Schedule`: a number, or one for each boundary.

    Returns:
      A `Schedule` of one round. Without copies it has T = 3 N unit or N paired ticks, and no
      bubble.

    Raises:
      ValueError: if either count is below 1, `ticks` is neither of the two, or `replicas` or
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

    References:
      Narayanan et al., SOSP 2019, arXiv:1806.03377, sections 3.2 and 3.3.
    """
    raise_refusal(refusal(num_stages, num_microbatches, ticks, vertical_sync, replicas))
    steady = steady_ticks(num_stages, num_microbatches, ticks, replicas, message_ticks)
    forward = steady["forward"]
    version = newest_version(forward, last_gradients(steady), steady["num_ticks"])
    if vertical_sync:
        # Of several columns of stage 0 one runs the microbatch.
        stage = steady.get("stage", np.arange(num_stages))
        entry = np.where(forward == IDLE, -np.inf, version)[:, stage == 0].max(axis=1)
        version = np.broadcast_to(entry[:, None].astype(int), version.shape)
    return Schedule.from_ticks("pipedream", **steady, forward_version=version, backward_version=version)
