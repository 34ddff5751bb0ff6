"""The block partition of a chain, torchgpipe's algorithm, for comparison."""

import itertools
from collections.abc import Sequence

from jpipe.stages.min_max import checked_costs


def block_partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Balances a chain of layers as torchgpipe does; `min_max` is never worse.

    Costs are counted from the cost of the cheapest layer. The chain begins in stages of equal
    numbers of layers. Then, again and again, the most expensive stage hands a layer towards the
    cheapest, and the stages between pass one on, until no stage exceeds another by more than the
    most expensive layer. That bounds the difference of two stages, not the most expensive stage.

    Args:
      costs: one non-negative cost per layer.
      num_stages: S, at most the number of layers.

    Returns:
      The S - 1 boundaries: the layer at which each stage after the first begins.

    Raises:
      ValueError: if S is below 1 or above the number of layers, or a cost is negative or not
        finite.

    Example:
      >>> block_partition([1, 2, 3, 4, 5, 6], 2)
      [4]
      >>> block_partition([6, 1, 1, 1, 1, 6], 3)  # 7, 2, 7; the best is 6, 4, 6
      [2, 4]

    References:
      Barany and Grinberg, "Block Partitions of Sequences", arXiv:1308.2452, section 2;
      https://github.com/kakaobrain/torchgpipe, balance/blockpartition.py.
    """
    values = checked_costs(costs, num_stages)
    num_layers = len(values)
    # With rounding, two stages could hand a layer to each other for ever. Integers are exact.
    ratios = [cost.as_integer_ratio() for cost in values.tolist()]
    unit = max(denominator for _, denominator in ratios)  # all denominators are powers of 2
    whole = [numerator * (unit // denominator) for numerator, denominator in ratios]
    least = min(whole)
    dearest_layer = max(whole) - least
    before = [0, *itertools.accumulate(cost - least for cost in whole)]

    ends = [num_layers // num_stages * s for s in range(num_stages)] + [num_layers]
    while True:
        stages = _costs(before, ends)
        dearest = max((cost, s) for s, cost in enumerate(stages))[-1]
        giver = None
        while giver != dearest:
            stages = _costs(before, ends)
            if stages[dearest] <= min(stages) + dearest_layer:
                return ends[1:-1]
            # The nearest of the cheapest stages, as in the paper, so that no giver is empty.
            # torchgpipe takes the first, and never returns for [0, 0, 0, 0, 1, 1] in 5 stages.
            cheapest = min((cost, abs(s - dearest), s) for s, cost in enumerate(stages))[-1]
            if dearest < cheapest:
                giver = cheapest - 1
                ends[cheapest] -= 1
            else:
                giver = cheapest + 1
                ends[giver] += 1


def _costs(before: list[int], ends: list[int]) -> list[int]:
    return [before[j] - before[i] for i, j in itertools.pairwise(ends)]
