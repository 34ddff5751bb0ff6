"""Simulates a table: in lockstep, tick by tick, or with each device as early as its inputs allow."""

from typing import Literal

from jpipe._util.foreign import shown
from jpipe.schedule import Schedule
from jpipe.simulate.costs import COLLECTIVES
from jpipe.simulate.costs import TRANSFERS as TRANSFERS
from jpipe.simulate.costs import Costs as Costs
from jpipe.simulate.costs import Timing as Timing
from jpipe.simulate.dependencies import dependencies
from jpipe.simulate.lockstep import lockstep

__all__ = ["Costs", "Timing", "simulate"]

_UNIT_COSTS = Costs()


def simulate(
    schedule: Schedule,
    costs: Costs = _UNIT_COSTS,
    mode: Literal["lockstep", "dependencies"] = "lockstep",
) -> Timing:
    """Simulates a table under given costs.

    Args:
      schedule: a legal table.
      costs: the costs of its operations.
      mode: "lockstep" or "dependencies".

        - "lockstep" is one program on all devices, as this library runs it. A tick lasts
          as long as its busiest device, and the next tick starts when all messages have
          arrived. Those that take several ticks (`Schedule.message_ticks`) travel in the next
          tick, beside its compute, and have arrived when it ends. A stage's device sends and
          receives messages of one tick one after the other. Updates wait until all devices
          have computed, because they use the norm of all gradients. Devices that share cores
          share them equally while they compute.
        - "dependencies" is one program per device. A device runs the operations of its
          columns in the table's order. Each starts when the one before has ended and its
          inputs have arrived.

    Returns:
      A `Timing`.

    Raises:
      ValueError: if the table is not legal, or `mode` or the costs do not fit.

    Example:
      GPipe with 4 stages and 8 microbatches.

      >>> from jpipe.schedules import gpipe
      >>> timing = simulate(gpipe(4, 8))
      >>> timing.makespan, round(timing.bubble, 4)
      (33.0, 0.2727)
    """
    schedule.check()
    if mode not in ("lockstep", "dependencies"):
        raise ValueError(
            f'`mode` must be "lockstep" or "dependencies", got {shown(mode)}: the first is one '
            "program on all devices, the second one program per device."
        )
    stage_costs = costs.of_stages(schedule.num_stages)
    exchanges = any(stage_costs[name].any() for name in COLLECTIVES)
    if mode == "dependencies" and any((costs.num_cores, costs.tick, costs.jitter, exchanges)):
        raise ValueError(
            "`num_cores`, `tick`, `jitter`, `exchange` and `sums` are costs of devices in lockstep, got "
            'mode="dependencies". Use mode="lockstep".'
        )
    if not schedule.splits_backward:
        stage_costs["backward"] = stage_costs["fused_backward"]
    length = {name: cost if name in TRANSFERS.values() else cost[schedule.stage] for name, cost in stage_costs.items()}
    run = lockstep if mode == "lockstep" else dependencies
    return run(schedule, length, costs)
