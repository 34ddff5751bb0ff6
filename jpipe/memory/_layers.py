"""Blocks of layers and stages: weights, the optimizer's state, gradients, and the arrays that are read of batches."""

import itertools
from collections.abc import Iterable
from typing import Any

from jpipe.memory._block import Block
from jpipe.memory._builder import Builder


def _versions(
    builder: Builder,
    name: str,
    num_bytes: int,
    stage: int,
    layer: int | None,
    reads: Iterable[tuple[float, str]],
    number: int = 0,
    **of: Any,
) -> list[Block]:
    """The blocks of version 1 + number of weights: as the newest one, and later."""
    written, replaced = (builder.update_time(stage, 1.0, number + k) for k in (0, 1))
    accesses = [
        (written, "write"),
        *reads,
        (builder.update_time(stage, 0.5, number + 1), "read"),
    ]
    last = max(time for time, _ in accesses)
    early = [a for a in accesses if a[0] <= replaced]
    blocks = [builder.block(name, "weights", num_bytes, written, replaced, early, stage=stage, **of)]
    if last > replaced:
        late = [a for a in accesses if a[0] > replaced]
        blocks.append(builder.block(name, "version", num_bytes, replaced, last, late, stage=stage, **of))
    return blocks


def _version_reads(builder: Builder, stage: int, layer: int, number: int) -> list[tuple[float, str]]:
    """Reads of version 1 + number of a layer's weights, without those that a hook computes."""
    T, hooks = builder.schedule.num_ticks, builder.program.settings.hooks
    updates = int(builder.schedule.updates_in_round[stage])
    return [
        (builder.in_layer(name, c, tick - (version - 1) // updates * T, layer), "read")
        for c in builder.columns_of(stage)
        for name, tick, version in builder.reads(c)
        if (version - 1) % updates == number and {"weight_grad": "backward"}.get(name, name) not in hooks
    ]


def weights(builder: Builder, _: int) -> list[Block]:
    """The versions of each layer's weights."""
    blocks = []
    shapes = builder.layout["parameters"].shapes
    for s in builder.held:
        for layer, run, _ in builder.stages.layer_runs(s):
            kind = builder.stages.layer_kinds[run.kind]
            name = f"{builder.words(s, layer)}: weights"
            reads = [_version_reads(builder, s, layer, n) for n in range(builder.schedule.updates_in_round[s])]
            of: dict[str, Any] = dict(layers=(layer, layer + 1))
            # Those in host memory are on the device while their layer runs, as temporaries.
            trained, frozen = (
                builder.layout.leaf_bytes(
                    [run.parameters[j] for j in numbers if not run.parameters[j].on_host],
                    builder.stages.parameters.arrays,
                )
                for numbers in (kind.trained, kind.frozen)
            )
            for n, reads_of_version in enumerate(reads):
                version = name if len(reads) == 1 else f"{name} after update {n + 1} of {len(reads)}"
                blocks += _versions(builder, version, trained, s, layer, reads_of_version, n, **of)
            if frozen:
                every_read = itertools.chain(*reads)
                blocks.append(builder.always(f"{name}, frozen", "weights", frozen, every_read, stage=s, **of))
    for unit in builder.stages.vocabulary.units:
        size = builder.unit_bytes(shapes, unit)
        V = int(builder.lowered.rows.num_versions[unit.home])
        blocks += [
            builder.always(f"{unit.name}: weights", "weights", size // V),
            builder.always(f"{unit.name}: older weights", "version", size - size // V),
        ]
    return blocks


def read_weights(builder: Builder, _: int) -> list[Block]:
    """The weights of each layer that a parameter hook computes."""
    blocks = []
    for hooked in builder.layout["read_parameters"].shapes:
        for s in builder.held:
            for layer, run, _ in builder.stages.layer_runs(s):
                trained = [run.parameters[j] for j in builder.stages.layer_kinds[run.kind].trained]
                size = builder.layout.leaf_bytes(trained, builder.stages.parameters.arrays)
                reads = [
                    (builder.in_layer(name, c, tick, layer), "read")
                    for c in builder.columns_of(s)
                    for name, tick, _ in builder.reads(c)
                    if {"weight_grad": "backward"}.get(name, name) == hooked
                ]
                reads += builder.update_accesses(s, [(0.9, "write")])
                name = f"{builder.words(s, layer)}: weights for {hooked}"
                size *= int(builder.lowered.rows.num_versions[s])
                blocks.append(
                    builder.always(
                        name,
                        "version",
                        size,
                        reads,
                        stage=s,
                        layers=(layer, layer + 1),
                    )
                )
    return blocks


def optimizer(builder: Builder, _: int) -> list[Block]:
    """The optimizer's state of each stage."""
    updates, blocks = builder.engine.updates, []
    for s in builder.held:
        pieces = updates.programs[updates.program_of_stage[s]].state
        size: int = sum(
            builder.layout.leaf_bytes([piece.place], updates.state.arrays)
            for leaf_pieces in pieces
            for piece in leaf_pieces
            if piece.share in (None, 0) and not piece.place.on_host
        )
        times = builder.update_accesses(s, [(0.4, "read"), (0.8, "write")])
        layers = builder.stages.layers_of(s)
        blocks.append(
            builder.always(
                f"stage {s}: optimizer",
                "optimizer",
                size,
                times,
                stage=s,
                layers=(layers.start, layers.stop),
            )
        )
    return blocks + _unit_blocks(builder, "optimizer_state", "optimizer")


def gradients(builder: Builder, num_bytes: int) -> list[Block]:
    """Accumulators of each layer, read and written by every microbatch and by the update."""
    if builder.stages.factors.arrays:  # factors and their compressors, of all stages
        return [builder.always("gradients", "gradient", num_bytes)]
    accumulating = "weight_grad" if builder.schedule.splits_backward else "backward"
    arrays = {**builder.stages.accumulators.arrays, **builder.stages.factors.arrays}
    blocks = []
    for s in builder.held:
        for layer, run, _ in builder.stages.layer_runs(s):
            places = run.gradient_places
            size = builder.layout.leaf_bytes([place for place in places if not place.on_host], arrays)
            times = builder.update_accesses(s, [(0.2, "read"), (0.8, "write")])
            for c in builder.columns_of(s):
                for name, tick, _ in builder.reads(c):
                    if name == accumulating:
                        time = builder.in_layer(name, c, tick, layer)
                        times += [(time, "read"), (time, "write")]
            name = f"{builder.words(s, layer)}: gradient"
            blocks.append(
                builder.always(
                    name,
                    "gradient",
                    size,
                    times,
                    stage=s,
                    layers=(layer, layer + 1),
                )
            )
    return blocks + _unit_blocks(builder, "gradients", "gradient")


def _unit_blocks(builder: Builder, name: str, use: str) -> list[Block]:
    """The blocks of the vocabulary layers in the arrays of a field."""
    shapes, units = builder.layout[name].shapes, builder.stages.vocabulary.units
    return [builder.always(f"{unit.name}: {use}", use, builder.unit_bytes(shapes, unit)) for unit in units]


# -- In flight


def batch_reads(builder: Builder) -> list[tuple[float, str]]:
    """The times at which the first and the last stage read the minibatch."""
    ends = {0, builder.schedule.num_stages - 1}
    return [
        (
            builder.at(name, c, tick, 0.0 if builder.schedule.stage[c] == 0 else 1.0),
            "read",
        )
        for c in builder.columns
        if int(builder.schedule.stage[c]) in ends
        for name, tick, _ in builder.reads(c)
        if name == "forward"
    ]
