"""The timeline of a pipeline's step on one device: the result of `Pipeline.memory_timeline`.

What lives from tick to tick follows from the table and the layout of the state, what lives inside of a tick from the
compiled program.
"""

from collections.abc import Callable
from typing import Any

from jpipe._util.foreign import shown
from jpipe.costs import batch_bytes
from jpipe.engine.shapes import local_bytes
from jpipe.memory._block import Block
from jpipe.memory._builder import TABLE, Builder
from jpipe.memory._layers import (
    batch_reads,
    gradients,
    optimizer,
    read_weights,
    weights,
)
from jpipe.memory._rings import RINGS
from jpipe.memory._temporaries import temporaries
from jpipe.memory._timeline import Timeline
from jpipe.mesh import DEVICE_MEMORY, HOST_MEMORY
from jpipe.program import Program

IN_PARTS: dict[str, Callable[[Builder, int], list[Block]]] = {
    "parameters": weights,
    "read_parameters": read_weights,
    "optimizer_state": optimizer,
    "gradients": gradients,
}
"""Name of an array of the state -> the blocks of its parts, of the bytes of the whole."""


def pipeline_timeline(program: Program, device: int = 0, profile: Any = None) -> Timeline:
    """The timeline of a step. See `Pipeline.memory_timeline`."""
    num_devices = program.settings.schedule.num_devices
    if not hasattr(device, "__index__") or not 0 <= device < num_devices:
        raise ValueError(
            f'`device` must be a position along the axis "stage", 0 to {num_devices - 1}, got {shown(device)}.'
        )
    return timeline_of(program, program.lower().compile(), int(device), profile)


def timeline_of(program: Program, compiled: Any, device: int, profile: Any = None) -> Timeline:
    """The timeline of a step that is compiled, on a device that exists."""
    builder = Builder(program, device, profile)
    add_state(builder)
    add_batch(builder)
    add_program(builder, compiled)
    schedule = program.settings.schedule
    title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, device {device}"
    clock = builder.clock
    return Timeline(tuple(builder.blocks), clock.period, clock.unit, title, clock.tick_starts)


def add_state(builder: Builder) -> None:
    """Every array of the state: those of layers and of microbatches in parts, all others whole."""
    layout, platform = builder.layout, builder.platform
    factors = bool(builder.stages.factors.arrays)
    kept = "gradient_compression"
    for array, group in layout.arrays():
        num_bytes = group.num_bytes(platform)
        if factors and array.name == "gradients":  # of which these are a part
            num_bytes += layout[kept].num_bytes(platform)
        if array.name in IN_PARTS:
            blocks = IN_PARTS[array.name](builder, num_bytes)
            builder.add(array.text, num_bytes, blocks)
        elif array.name in RINGS:
            for name, size, blocks in RINGS[array.name](builder, group.shapes):
                builder.add(name, size, blocks)
        elif num_bytes and not (factors and array.name == kept):
            reads = batch_reads(builder) if array.name == "batches" else ()
            builder.add_whole(array.text, array.use, num_bytes, reads)
    size = local_bytes([builder.engine.local_rows], platform)
    builder.add_whole(TABLE, "state", size)


def add_batch(builder: Builder) -> None:
    """The minibatch that enters."""
    is_copied = builder.lowered.num_batches > 1
    reads = [(0.0, "read")] if is_copied else batch_reads(builder)
    builder.add_whole("minibatch", "batch", batch_bytes(builder.program), reads)


def add_program(builder: Builder, compiled: Any) -> None:
    """Temporaries, and results that lie in no argument."""
    analysis = compiled.memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if not builder.program.settings.donate:
        # On CPUs host memory is device memory to the compiler.
        kinds = (DEVICE_MEMORY, HOST_MEMORY)[: 1 + (builder.platform == "cpu")]
        results -= sum(g.num_bytes(builder.platform, kind) for g in builder.layout.groups.values() for kind in kinds)
    results = max(int(results), 0)
    if results:
        builder.blocks.append(builder.always("results of the step", "result", results))
    temp = int(analysis.temp_size_in_bytes)
    builder.add("temporaries", temp, temporaries(compiled, builder, temp))
