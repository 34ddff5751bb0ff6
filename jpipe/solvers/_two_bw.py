"""PipeDream-2BW's planner: width, depth, microbatch and recomputation of equal blocks."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jpipe._table.counts import check_counts
from jpipe._util.foreign import shown
from jpipe.solvers.machine import Machine


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A model of equal blocks.

    Attributes:
      num_blocks: number of blocks.
      seconds: microbatch size -> seconds of one block's forward and backward. The planner tries
        these sizes.
      parameter_bytes: bytes of the weights of one block.
      activation_bytes: bytes that one block keeps of one sample until its backward.
      boundary_bytes: bytes of one sample's activation between two blocks.
    """

    num_blocks: int
    seconds: Mapping[int, float]
    parameter_bytes: float
    activation_bytes: float
    boundary_bytes: float


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to train.

    Attributes:
      width: number of replicas of the pipeline.
      depth: number of stages.
      microbatch_size: samples per microbatch.
      num_microbatches: microbatches per minibatch and replica.
      recompute: whether backwards run their forwards again.
      seconds: time per microbatch of the slowest stage.
      samples_per_second: samples per second of all replicas together.
      memory_bytes: bytes per device.
    """

    width: int
    depth: int
    microbatch_size: int
    num_microbatches: int
    recompute: bool
    seconds: float
    samples_per_second: float
    memory_bytes: float


def two_bw(
    blocks: Blocks,
    machine: Machine,
    batch_size: int,
    *,
    schedule: Literal["2bw", "flush", "gpipe"] = "2bw",
    recompute_factor: float = 4 / 3,
) -> list[Configuration]:
    """Lists all configurations that fit the memory, the fastest first.

    With width w, depth d, microbatch size b and m(b) = B / (w b), a device holds

        2BW:   2 |W| / d + d A / d + d a        with recompute   2 |W| / d + A / d + d a
        Flush:   |W| / d + d A / d + d a                           |W| / d + A / d + d a
        GPipe:   |W| / d + m A / d + m a                           |W| / d + A / d + m a

    with |W| all weights, A all activations of a microbatch, and a the input of one stage. A
    microbatch takes max(c T(b) + 2 (a + a) / bandwidth(d), all-reduce(w) / m), where c is 1 or
    `recompute_factor`. The weights of a stage are reduced in a ring, with 2 (w - 1) / w |W| / d
    bytes per device. A dimension smaller than a server has the fast links.

    Args:
      blocks: the model.
      machine: the devices, their memory and links.
      batch_size: B, samples per minibatch.
      schedule: the memory of a device. "2bw": two versions of the weights and one microbatch per
        stage; "flush": one version and as many microbatches; "gpipe": one version and all
        microbatches.
      recompute_factor: time of a recomputed block divided by the time of another one.

    Returns:
      Configurations of at most `num_devices`, the highest `samples_per_second` first; of equally
      fast ones that with fewer devices, then that with less memory. 2BW needs m >= d.

    Raises:
      ValueError: if no configuration fits. The message says how much memory suffices.

    Example:
      Eight blocks on four devices with little memory are cut.

      >>> blocks = Blocks(8, {1: 0.01, 2: 0.018}, 10e6, 2e6, 1e5)
      >>> machine = Machine(4, memory_limit=100e6, bandwidth=(1e10, 1e9))
      >>> best = two_bw(blocks, machine, batch_size=16)[0]
      >>> best.width, best.depth, best.microbatch_size
      (1, 4, 2)

    References:
      Narayanan et al., ICML 2021, arXiv:2006.09503, section 3.3 and appendix A.
    """
    check_counts(
        num_blocks=blocks.num_blocks,
        num_devices=machine.num_devices,
        devices_per_server=machine.server_size,
        batch_size=batch_size,
    )
    if schedule not in _VERSIONS:
        raise ValueError(f"`schedule` must be one of {', '.join(_VERSIONS)}, got {shown(schedule)}.")
    fitting, least = [], math.inf
    for width in range(1, machine.num_devices + 1):
        for depth in range(1, machine.num_devices // width + 1):
            if blocks.num_blocks % depth:
                continue  # stages would not be equal
            for size in blocks.seconds:
                if batch_size % (width * size):
                    continue
                if schedule == "2bw" and batch_size // (width * size) < depth:
                    continue
                for factor in (None, recompute_factor):
                    configuration = _configuration(
                        blocks,
                        machine,
                        schedule,
                        factor,
                        num_microbatches=batch_size // (width * size),
                        width=width,
                        depth=depth,
                        size=size,
                    )
                    least = min(least, configuration.memory_bytes)
                    if configuration.memory_bytes <= machine.memory_limit:
                        fitting.append(configuration)
    if not fitting:
        what = (
            f"the least memory that suffices is {least:.4g} bytes per device, the limit is {machine.memory_limit:.4g}. "
            "Use more devices or smaller microbatches."
            if least < math.inf
            else f"no microbatch size of {sorted(blocks.seconds)} divides the batch of {batch_size}, with replicas, "
            "into as many microbatches as there are stages."
        )
        raise ValueError(f"no configuration fits: {what}")
    return sorted(
        fitting,
        key=lambda c: (-c.samples_per_second, c.width * c.depth, c.memory_bytes),
    )


_VERSIONS = {"2bw": 2, "flush": 1, "gpipe": 1}


def _configuration(
    blocks: Blocks,
    machine: Machine,
    schedule: str,
    recompute_factor: float | None,
    *,
    num_microbatches: int,
    width: int,
    depth: int,
    size: int,
) -> Configuration:
    """The cost of a configuration. `recompute_factor=None` means no recomputation."""

    def bandwidth(dimension: int) -> float:
        return machine.bandwidth[dimension >= machine.server_size]

    per_stage = blocks.num_blocks // depth
    weights = per_stage * blocks.parameter_bytes
    boundary = size * blocks.boundary_bytes
    in_flight = num_microbatches if schedule == "gpipe" else depth
    stashed = in_flight if recompute_factor is None else 1
    memory = _VERSIONS[schedule] * weights + stashed * per_stage * size * blocks.activation_bytes + in_flight * boundary
    compute = per_stage * blocks.seconds[size] * (recompute_factor or 1.0)
    transfer = 2 * (2 * boundary) / bandwidth(depth) if depth > 1 else 0.0
    reduce = 2 * (width - 1) / width * weights / bandwidth(width)
    seconds = max(compute + transfer, reduce / num_microbatches)
    return Configuration(
        width=width,
        depth=depth,
        microbatch_size=size,
        num_microbatches=num_microbatches,
        recompute=recompute_factor is not None,
        seconds=seconds,
        samples_per_second=width * size / seconds,
        memory_bytes=memory,
    )
