"""Refuses configurations of an operator that a mesh cannot run, with the reason."""

import math
from collections.abc import Mapping

import numpy as np

from jpipe._util.foreign import shown
from jpipe.soap.exchange_rules import Known, exchange_of
from jpipe.soap.graph import ATTRIBUTE, PARAMETER, REDUCTION, SAMPLE, Operator
from jpipe.soap.regions import Access, read_all
from jpipe.soap.specs import loop_axes
from jpipe.soap.strategy import Config, shard_boxes


def reads_tiles(operator: Operator, config: Config) -> bool:
    """Returns whether each shard reads an equal part of each operand, in order, or all the same, along every dim.

    Shards of windows, slices, pads and concatenations read other parts, some of them of their neighbours. XLA sends
    those by collective permutes.
    """
    sizes = tuple(loop.size for loop in operator.loops)
    loops = shard_boxes(sizes, config.degrees)
    # Views between the operand and the operator too: XLA moves their results.
    reads = [operand.access[:end] for operand in operator.inputs for end in range(1, len(operand.access) + 1)]
    return all(_reads_tiles(access, loops) for access in reads)


def _reads_tiles(access: Access, loops: np.ndarray) -> bool:
    boxes = read_all(access, loops)
    for dim, last in enumerate(access[-1]):
        low, high = boxes[:, dim, 0], boxes[:, dim, 1]
        if np.all(low == low[0]) and np.all(high == high[0]):
            continue
        parts = len(np.unique(low))
        part = last.size // parts
        in_order = part * parts == last.size and not np.any(low % part)
        if not in_order or np.any(high - low != part):
            return False
    return True


def is_partitioned_right(operator: Operator, config: Config, num_devices: int) -> bool:
    """Returns whether XLA computes the right numbers of a split with whole groups of channels.

    XLA double-counts a convolution's sum if a mesh axis splits neither samples nor positions and is replicated or
    splits channels (jaxlib 0.10.2, tried for all degrees on 4 and 8 CPU devices). Splits by samples and output channels
    are right, and splits by samples and positions, or by samples and terms, over all devices. With groups of channels,
    XLA also double-counts if any axis is replicated.
    """
    if operator.kind != "conv_general_dilated":
        return True
    split = {loop.kind for loop, d in zip(operator.loops, config.degrees) if d > 1}
    uses_all = math.prod(config.degrees) == num_devices
    if split <= {SAMPLE, PARAMETER}:
        return uses_all or not split or not _channel_groups(operator)
    return uses_all and (split <= {SAMPLE, ATTRIBUTE} or split <= {SAMPLE, REDUCTION})


def _channel_groups(operator: Operator) -> list[tuple[int, int]]:
    """The loop over output channels, and the channels per group, of each convolution with groups of channels."""
    result = []
    for member in operator.equations or ():
        params = member.equation.params
        if (groups := params.get("feature_group_count", 1)) > 1:
            loop = params["dimension_numbers"].out_spec[1]
            result.append((loop, operator.loops[loop].size // groups))
    return result


def _has_whole_groups(operator: Operator, config: Config) -> bool:
    """Returns whether each shard of a convolution computes whole groups of channels, or a part of one.

    XLA computes wrong numbers where a shard has parts of two groups.
    """
    sizes = (
        (operator.loops[loop].size // config.degrees[loop], group_size)
        for loop, group_size in _channel_groups(operator)
    )
    return all(not part % group or not group % part for part, group in sizes)


def refusal(
    operator: Operator,
    config: Config,
    sizes: Mapping[str, int],
    *,
    in_stages: bool = False,
) -> str | None:
    """The reason why `jpipe.soap.apply`, or a pipeline in its stages, cannot run an operator with a configuration; None
    if it can.

    Args:
      operator: the operator.
      config: its degrees and devices.
      sizes: axis of the mesh -> number of devices.
      in_stages: whether the mesh is that of the stages of a pipeline, which cannot fetch parts from each other: see
        `reads_tiles`.
    """
    axes = loop_axes(config, sizes)
    if axes is None:
        return _no_mesh(operator, config, sizes)
    if in_stages and not reads_tiles(operator, config):
        return (
            f"shards of operator {shown(operator.name)} with degrees {config.degrees} read parts of their neighbours, "
            "which XLA sends by collective permutes. A device of another stage would have to join them, and runs "
            "something else. Search with `Space(graph, num_devices, in_stages=True)` (`train/search.py --in-stages`)."
        )
    count = math.prod(sizes.values())
    wrong = (
        f"XLA computes wrong numbers of the convolution {operator.name!r} split by degrees {config.degrees} over "
        f"{count} devices"
    )
    if not _has_whole_groups(operator, config):
        return (
            f"{wrong}, because shards have parts of several groups of channels. EquationSplit it so that each shard "
            "has whole groups or a part "
            "of one; `Space(graph, num_devices, executable=True)` leaves wrong splits out."
        )
    if is_partitioned_right(operator, config, count):
        return None
    known = Known(sizes, {}, in_stages=in_stages)
    if any(exchange_of(operator, m, axes, known) for m in operator.equations or ()):
        return None
    return (
        f"{wrong}. EquationSplit it by samples, or by samples and positions, over all devices; `Space(graph, "
        "num_devices, executable=True)` leaves "
        "wrong splits out."
    )


def _no_mesh(operator: Operator, config: Config, sizes: Mapping[str, int]) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
    return (
        f"operator {shown(operator.name)} with degrees {config.degrees} on devices {config.devices} is no split over "
        f"the mesh {axes}: an operator runs on the whole mesh, its loops split over axes of it. Search with "
        "`Space(graph, num_devices, executable=True)`, for a pipeline with `in_stages=True` (`train/search.py "
        "--in-stages`), and put operators that run on other devices into other stages."
    )
