"""What a cut model costs: parameters and operations per stage, bytes per device."""

import math
from typing import Any, NamedTuple

import jax

from jpipe import packing
from jpipe.layers.avals import num_bytes
from jpipe.layers.trace import Traced
from jpipe.program import Program
from jpipe.settings import Settings, abstract
from jpipe.solvers import min_max


class StageRecord(NamedTuple):
    """One row of `Pipeline.partition`.

    Attributes:
      stage: its number.
      device: the device that runs it, as a position along the axis "stage".
      layers: first layer, and one past the last.
      names: of the layers.
      num_parameters: the number of weights.
      parameter_bytes: their bytes.
      flops: floating-point operations of forward and backward of one microbatch, as XLA counts
        them.
    """

    stage: int
    device: int
    layers: tuple[int, int]
    names: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    flops: float


class Memory(NamedTuple):
    """Bytes per device by use. Every device allocates as much as the largest stage needs.

    Attributes:
      weights: all live versions, and the weights that `forward_params` and `backward_params`
        compute.
      optimizer: the optimizer's state.
      gradients: the accumulators.
      activations: stashes and messages in flight.
      batch: the minibatch, or the replica's share of it.
      temporaries: what the compiled step needs beside its arguments.
      padding: bytes of weights, optimizer and gradients that the mean stage does not use.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    batch: int
    temporaries: int
    padding: int


def partition(program: Program) -> list[StageRecord]:
    """One record per stage."""
    stages, records = program.stages, []
    for s in range(stages.num_stages):
        layers = stages.layers_of(s)
        leaves = [
            a for i in layers for a in jax.tree.leaves(stages.layers[i].parameters)
        ]
        records.append(
            StageRecord(
                stage=s,
                device=program.placement[s][0],
                layers=(layers.start, layers.stop),
                names=tuple(stages.layers[i].name for i in layers),
                num_parameters=sum(math.prod(a.shape) for a in leaves),
                parameter_bytes=num_bytes(leaves),
                flops=sum(program.traced.flops[i] for i in layers),
            )
        )
    return records


def memory(program: Program, batch: Any) -> Memory:
    """Bytes per device for a minibatch. Compiles the step if it has not been."""
    engine, settings = program.engine, program.settings
    stages, updates = engine.stages, engine.updates
    layout, platform = engine.layout, settings.mesh.devices.flat[0].platform
    num_bytes = {n: group.num_bytes(platform) for n, group in layout.groups.items()}
    weights = num_bytes["parameters"] + num_bytes["read_parameters"]
    optimizer, gradients = num_bytes["optimizer_state"], num_bytes["gradients"]
    used = sum(
        len(of_stage) * layout.leaf_bytes(run.parameters, stages.parameters.arrays)
        for s, of_stage in enumerate(engine.lowered.copies)
        for _, run, _ in stages.layer_runs(s)
    )
    assert updates is not None
    used_state = sum(
        len(of_stage)
        * layout.leaf_bytes(updates.programs[u].state, updates.state.arrays)
        for u, of_stage in zip(updates.program_of_stage, engine.lowered.copies)
    )
    copies = (
        engine.lowered.num_versions * (1 + len(layout["read_parameters"].shapes)) + 1
    )
    analysis: Any = program.lower(batch).compile().memory_analysis()
    return Memory(
        weights=weights,
        optimizer=optimizer,
        gradients=gradients,
        activations=num_bytes["buffers"],
        batch=sum(
            packing.array_bytes(a.shape, abstract(a).dtype, platform)
            for a in jax.tree.leaves(settings.whole(dict(batch)))
        )
        // settings.num_replicas,
        temporaries=int(analysis.temp_size_in_bytes),
        padding=round(
            weights
            + optimizer
            + gradients
            - (used * copies + used_state) / settings.schedule.num_devices
        ),
    )


def boundaries_by_flops(
    settings: Settings, traced: Traced, microbatch: Any
) -> list[int]:
    """The boundaries that balance the floating-point operations of the stages."""
    return min_max(traced.flops, settings.schedule.num_stages)
