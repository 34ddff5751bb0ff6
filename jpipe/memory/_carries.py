"""The bytes of what goes from slice to slice of a sequence, and of the gradient by it."""

import itertools
from collections.abc import Iterator

from jpipe.lowering.lower import CARRIES
from jpipe.memory._block import Block
from jpipe.memory._builder import Builder

CARRY, CARRY_GRADIENT = CARRIES
_WORDS = {CARRY: "carry", CARRY_GRADIENT: "gradient of the carry"}


def allocations(ring: str, builder: Builder, shapes: dict) -> Iterator[tuple[str, int, list[Block]]]:
    """`(name, bytes, blocks)` of a ring: a block for each group of rows and layer."""
    if shapes:
        yield _WORDS[ring], builder.num_bytes(shapes), list(_blocks(ring, builder))


def _blocks(ring: str, builder: Builder) -> Iterator[Block]:
    schedule, stages = builder.schedule, builder.stages
    k, pack = schedule.num_slices, getattr(stages, ring)
    ticks = {
        "forward": schedule.forward_ticks(),
        "backward": schedule.backward_ticks(),
        "weight_grad": schedule.weight_grad_ticks(),
    }
    last = "weight_grad" if schedule.splits_backward else "backward"
    uses = [("forward", "read"), ("forward", "write"), (last, "read")]
    if ring == CARRY_GRADIENT:
        uses = [("backward", "read"), ("backward", "write")]
    for c, group in itertools.product(builder.columns, range(schedule.num_row_groups)):
        s, slices = int(schedule.stage[c]), range(k * group, k * (group + 1))
        for layer, run, _ in stages.layer_runs(s):
            size = builder.layout.leaf_bytes(getattr(run, ring), pack.arrays)
            accesses = [
                (builder.in_layer(name, c, int(ticks[name][m, c]), layer), access)
                for name, access in uses
                for m in slices
            ]
            times = [time for time, _ in accesses]
            name = f"{builder.words(s, layer)}, microbatches {slices[0]} to {slices[-1]}: {_WORDS[ring]}"
            yield builder.block(
                name, "carry", size, min(times), max(times), accesses, stage=s, layers=(layer, layer + 1)
            )
