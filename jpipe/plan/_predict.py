"""Predicts the seconds and bytes of a table, for a profiled model that is cut at boundaries."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jpipe.compress import Compressor
from jpipe.costs import Memory
from jpipe.engine.layout import StatePackings, buffer_shapes
from jpipe.gradients.sums import AS_PARAMETERS, GradientSums
from jpipe.layers.avals import num_bytes
from jpipe.lowering.array_rows import ArrayRows, used_arrays
from jpipe.lowering.channels import Route
from jpipe.lowering.lower import STASHES, lower
from jpipe.options.communication import message_compression
from jpipe.options.numbers import floating_dtype
from jpipe.packing import Leaf, Packing
from jpipe.plan._profile import LayerProfile, Profile
from jpipe.schedule import Schedule
from jpipe.simulate import Costs, Timing, simulate
from jpipe.solvers import Machine
from jpipe.stages.codecs import NO_COMPRESSION, LeafCodec, MessageCompression, codecs_of
from jpipe.stages.cut import check_boundaries, devices_of_use, group, of_copies
from jpipe.stages.extra_args import STALE_PARAMS, hooked_passes
from jpipe.stages.messages import find_portals, find_routes, pack_messages
from jpipe.stages.offload import NO_OFFLOAD, Moves, Offload


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted cost of a training step.

    Attributes:
      seconds: seconds of a step, which trains on one minibatch.
      timing: seconds that each device computes, sends and is idle in the table.
      memory: bytes per device.
      delay: the largest delay of a gradient: updates between reading the weights that it was
        computed with and applying it.
      host_seconds: of these, the seconds in which a device sends to host memory and fetches from it.
    """

    seconds: float
    timing: Timing
    memory: Memory
    delay: int
    host_seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes per device, in its own memory."""
        return sum(self.memory) - self.memory.padding - self.memory.host


def predict(
    schedule: Schedule,
    profile: Profile,
    boundaries: Sequence[int],
    machine: Machine,
    num_replicas: int = 1,
    shard_optimizer: bool = False,
    compress_messages: Any = None,
    compress_gradients: Compressor | None = None,
    offload: Offload = NO_OFFLOAD,
    host_bandwidth: float = math.inf,
    accumulate_dtype: Any = None,
) -> Prediction:
    """Predicts the cost of a table in lockstep. Each of its cells is one microbatch of the profile.

    - A tick lasts as long as its busiest device, or as all its work on the cores that devices
      share. The machine's jitter makes it longer.
    - Then come the updates of the tick. Before them the replicas of a stage add up their gradients
      in a ring, and so do its copies.
    - Then messages travel, packed as in the engine: all messages of a kind are as large as the
      largest one, and skips travel after the activations.

    Args:
      schedule: a legal table that trains.
      profile: the costs of the layers. A replica's minibatch is `num_microbatches` microbatches of
        the profile.
      boundaries: the layer at which each stage after the first begins.
      machine: the machine. The devices of a replica are neighbours.
      num_replicas: the number of copies of the pipeline.
      shard_optimizer: whether the replicas of a stage share its update, as of `Pipeline`. Each takes an
        equal part of its time and of the optimizer's state, which is exact for updates that work element by
        element.
      compress_messages: as of `Pipeline`. Fewer bytes travel. The time to encode and decode is not included.
      compress_gradients: as of `Pipeline`; without replicas it does nothing.
      offload: as of `Pipeline`. What a device sends to its host and fetches comes on top of a step: nothing of it is
        taken to be hidden.
      host_bandwidth: bytes per second between a device and its host, each way at its time.
      accumulate_dtype: as of `Pipeline`.

    Returns:
      A `Prediction`. Its bytes are those of `Pipeline.memory`, except for the temporaries, which
      are those of the layer that needs most. Other mesh axes, and the time of `forward_params`,
      `backward_params` and tied weights, are not included.

    Raises:
      ValueError: if the boundaries do not fit, the machine has too few devices, or the
        profile lacks what the table runs.
    """
    needed = schedule.num_devices * num_replicas
    if needed > machine.num_devices:
        raise ValueError(
            f"`machine` must have at least {needed} devices, {num_replicas} for each of {schedule.num_devices}, got "
            f"{machine.num_devices}. Use fewer stages or replicas."
        )
    S = schedule.num_stages
    starts = check_boundaries(list(boundaries), len(profile.layers), S)
    assert starts is not None  # as it is for a list of boundaries
    compressors = message_compression(compress_messages), compress_gradients
    sums = GradientSums(dtype=floating_dtype("accumulate_dtype", accumulate_dtype))
    replicated = num_replicas, shard_optimizer, *compressors
    costs = stage_costs(schedule, profile, starts, machine, *replicated, sums=sums)
    timing = simulate(schedule, costs)
    memory, moved = predict_memory(
        schedule, profile, starts, *replicated, offload, sums=sums
    )
    return Prediction(
        seconds=timing.makespan + machine.step + moved / host_bandwidth,
        timing=timing,
        memory=memory,
        host_seconds=moved / host_bandwidth,
        delay=int(schedule.facts().forward_delay.max()),
    )


def stage_costs(
    schedule: Schedule,
    profile: Profile,
    starts: Sequence[int],
    machine: Machine,
    num_replicas: int = 1,
    shard_optimizer: bool = False,
    compress_messages: MessageCompression = NO_COMPRESSION,
    compress_gradients: Compressor | None = None,
    sums: GradientSums = AS_PARAMETERS,
) -> Costs:
    """The costs of each stage in the form of `jpipe.simulate`.

    Args:
      schedule: the table, for the devices of the stages and for split backwards.
      profile, machine, num_replicas, shard_optimizer, compress_gradients: as of `predict`.
      starts: the first layer of each stage, then the number of layers.
      compress_messages: compressors of messages.
      sums: what gradients are summed in.
    """
    split = schedule.splits_backward

    # With fewer cores than devices, each device had a share of a core while it was measured.
    cores = machine.num_cores
    share = 1.0 if cores is None else min(cores / profile.num_devices, 1.0)

    def total(operation: str) -> list[float]:
        seconds = profile.seconds(operation)
        return [share * sum(seconds[i:j]) for i, j in itertools.pairwise(starts)]

    copies = schedule.copies
    D, S = schedule.num_devices, schedule.num_stages
    # Seconds of the messages after a stage's forward, and after the backward of the next stage.
    sent = {"forward": np.zeros(S), "backward": np.zeros(S)}
    for route, packing in _routes(profile, starts, compress_messages):
        for source, target in route.target.items():
            # Of the links between copies the slowest, because it ends the tick.
            pairs = itertools.product(copies[source], copies[target])
            seconds = [
                machine.message_seconds(packing.num_bytes, pair)
                for pair in pairs
                if pair[0] != pair[1]
            ]
            if seconds:
                boundary = source - (route.operation == "backward")
                sent[route.operation][boundary] += max(seconds)
    update = total("update")
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        held = profile.layers[start:stop]
        gradients = sum(_sum_bytes(layer, sums) for layer in held)
        ring = [copies[s][0] + r * D for r in range(num_replicas)]
        if shard_optimizer:
            update[s] /= len(copies[s]) * num_replicas
            # To scatter gradients and to gather weights takes half as long each as to add up as many bytes.
            weights = sum(layer.parameter_bytes for layer in held)
            gradients = (gradients + weights) // 2
        replicas = [d + r * D for d in copies[s] for r in range(num_replicas)]
        if compress_gradients is not None and len(replicas) > 1:
            num_bytes = _exchanged_bytes(held, compress_gradients, len(replicas), sums)
            update[s] += machine.reduce_seconds(num_bytes, replicas)
            continue
        update[s] += machine.reduce_seconds(gradients, ring)
        update[s] += machine.reduce_seconds(gradients, copies[s])
    return Costs(
        forward=total("forward"),
        backward=total("input_grad") if split else 0.0,
        weight_grad=total("weight_grad") if split else 0.0,
        fused_backward=0.0 if split else total("backward"),
        transfer=sent["forward"],
        gradient_transfer=sent["backward"],
        update=update,
        tick=machine.tick,
        jitter=machine.jitter,
        num_cores=None if cores is None else cores / num_replicas,
        cores_per_device=machine.cores_per_device,
    )


def _sum_leaves(layer: LayerProfile, sums: GradientSums) -> list[Leaf]:
    """What the gradients of a layer are summed in."""
    return [sums.plain(Leaf(aval)).leaf for aval in layer.avals("parameters")]


def _sum_bytes(layer: LayerProfile, sums: GradientSums) -> int:
    return num_bytes([leaf.aval for leaf in _sum_leaves(layer, sums)])


def _exchanged_bytes(
    layers: Sequence[LayerProfile],
    compressor: Compressor,
    num_replicas: int,
    sums: GradientSums,
) -> int:
    """Bytes of an array whose sum in a ring takes as many bytes as the compressed gradients of layers do."""
    received = sum(
        compressor.exchanged_bytes(leaf.aval, num_replicas)
        for layer in layers
        for leaf in _sum_leaves(layer, sums)
    )
    return math.ceil(received * num_replicas / (2 * (num_replicas - 1)))


def _codecs(
    profile: Profile, starts: Sequence[int], compression: MessageCompression
) -> list[tuple[LeafCodec, ...]]:
    """How the message of each stage but the last is encoded."""
    return [
        codecs_of(
            [*map(Leaf, profile.layers[stop - 1].activations)],
            compression,
            f"the message from stage {s} to stage {s + 1}",
        )
        for s, stop in enumerate(starts[1:-1])
    ]


def _routes(
    profile: Profile,
    starts: Sequence[int],
    compression: MessageCompression = NO_COMPRESSION,
) -> list[tuple[Route, Packing]]:
    """Every kind of message, packed as in the engine."""
    codecs = _codecs(profile, starts, compression)
    portals = find_portals(profile.skips, starts, compression=compression)
    return find_routes(
        len(starts) - 1, *pack_messages(codecs), portals, kept=compression.is_sparse
    )


def predict_memory(
    schedule: Schedule,
    profile: Profile,
    starts: Sequence[int],
    num_replicas: int = 1,
    shard_optimizer: bool = False,
    compress_messages: MessageCompression = NO_COMPRESSION,
    compress_gradients: Compressor | None = None,
    offload: Offload = NO_OFFLOAD,
    sums: GradientSums = AS_PARAMETERS,
) -> tuple[Memory, float]:
    """Bytes per device, by use, and those that a device sends to host memory and fetches in a step.

    Args:
      schedule, profile, num_replicas, shard_optimizer, compress_gradients, offload: as of `predict`.
      starts: the first layer of each stage, then the number of layers.
      compress_messages: compressors of messages.
      sums: what gradients are summed in.

    Raises:
      ValueError: if the table needs more slots of stashes than `offload` leaves.
    """
    profile = profile.in_table(schedule)
    layers = profile.layers
    kinds = [(one.kind, one.stash, one.pop) for one in layers]
    groups = group(kinds, starts)
    layer_of_kind = dict(zip(kinds, layers))

    def packed(name: str) -> Packing:
        """The packing of the stages' leaves of one name, as in the engine."""
        loss = profile.loss.avals(name) if name == "input_stash" else ()

        def leaves(kind: Any) -> list[Leaf]:
            if name == "gradients":
                return _sum_leaves(layer_of_kind[kind], sums)
            found = [*map(Leaf, layer_of_kind[kind].avals(name))]
            if name == "statistics":
                return [of_copies(leaf, schedule.copies) for leaf in found]
            return found

        return groups.pack(
            leaves,
            [*map(Leaf, loss)],
            devices_of_use(name, schedule.copies),
            tight=name in ("parameters", "gradients", "optimizer_state"),
        )

    routes = _routes(profile, starts, compress_messages)
    recompute = profile.recompute == "full"
    lowered = lower(
        schedule,
        recompute,
        [route for route, _ in routes],
        stash_slots=offload.activations,
        reads_stale=STALE_PARAMS in profile.reads,
    )
    R, rows = lowered.num_chunks, lowered.rows
    parameters, state = packed("parameters"), packed("state")
    statistics, accumulators = packed("statistics"), packed("gradients")

    used = functools.partial(used_arrays, owner_of_stage=groups.program_of_stage)

    def in_rows(rows_of: Callable[..., ArrayRows], pack: Packing) -> int:
        """Bytes of the arrays of a packing on every device."""
        return rows_of(lowered, pack.arrays, used(pack)).num_bytes(pack)

    weights = in_rows(ArrayRows.of_versions, parameters)
    gradients = in_rows(ArrayRows.of_columns, accumulators)
    optimizer = in_rows(ArrayRows.of_columns, packed("optimizer_state"))
    of_stage = np.array(
        [
            sum(layer.optimizer_bytes for layer in layers[start:stop])
            for start, stop in itertools.pairwise(starts)
        ]
    )
    num_shares = np.ones(len(of_stage), int)
    if shard_optimizer:
        num_shares = num_replicas * np.array(schedule.replicas)
        largest = (of_stage / num_shares).max() / max(of_stage.max(), 1)
        optimizer = math.ceil(optimizer * largest)
    # The profile knows the bytes of a microbatch, and not its arrays.
    microbatch = jax.ShapeDtypeStruct((profile.microbatch_bytes,), np.uint8)
    rings = {ring: packed(ring) for ring in STASHES if lowered.num_slots[ring]}
    in_flight = buffer_shapes(
        None,
        lowered,
        StatePackings(
            parameters=parameters,
            accumulators=accumulators,
            mutable_state=state,
            statistics=statistics,
            rings=rings,
            messages=routes,
        ),
        {
            ring: ArrayRows.of_slots(lowered, ring, pack.arrays, used(pack))
            for ring, pack in rings.items()
        },
        microbatch,
    )
    copies = 1 + len(hooked_passes(schedule, profile.reads))
    stashes_on_host = num_bytes(jax.tree.leaves(in_flight.pop("host_stash")))
    activations = num_bytes(jax.tree.leaves(in_flight)) + in_rows(
        ArrayRows.of_columns, statistics
    )
    # One slot of each stash comes from the host while a tick computes.
    slots = {
        ring: num_bytes(jax.tree.leaves(arrays))
        for ring, arrays in in_flight["staged"].items()
    }
    state_on_host = offload.optimizer * optimizer
    weights_on_host = offload.weights * weights
    gradients_on_host = offload.gradients * gradients
    passes = 2 + schedule.splits_backward + recompute
    moves = Moves.of(schedule.num_microbatches, passes)
    moved = moves.optimizer * state_on_host + moves.gradients * gradients_on_host
    of_one_version = in_rows(ArrayRows.of_columns, parameters)
    moved += moves.weights * offload.weights * of_one_version
    moved += sum(
        2 * slots[ring] * int((spill.stores >= 0).sum(axis=0).max())
        for ring, spill in lowered.spills.items()
    )
    largest_layer = max(layer.parameter_bytes for layer in layers)
    # The weights of a layer come while the layer before runs.
    for name, num_layers in (("weights", 2), ("gradients", 1)):
        slots[name] = num_layers * largest_layer * (getattr(offload, name) > 0)
    used = sum(
        count
        * (
            layer.weight_bytes
            + (copies * V - 2) * layer.parameter_bytes
            + _sum_bytes(layer, sums)
        )
        for count, V, (start, stop) in zip(
            schedule.replicas,
            rows.num_versions.tolist(),
            itertools.pairwise(starts),
            strict=True,
        )
        for layer in layers[start:stop]
    )
    used -= int(np.dot(schedule.replicas, of_stage - of_stage / num_shares))
    held = copies * weights + gradients + optimizer
    memory = Memory(
        compression=_kept_bytes(accumulators, gradients, R, compress_gradients)
        * (num_replicas > 1 or schedule.has_copies),
        weights=math.ceil(copies * weights - weights_on_host),
        optimizer=math.ceil(optimizer - state_on_host),
        gradients=math.ceil(gradients - gradients_on_host),
        activations=activations,
        batch=schedule.num_microbatches * profile.microbatch_bytes,
        temporaries=max(_temporary_bytes(one) for one in (*layers, profile.loss))
        + sum(slots.values()),
        padding=max(held - used // schedule.num_devices, 0),
        host=sum(map(math.floor, (state_on_host, weights_on_host, gradients_on_host)))
        + stashes_on_host,
    )
    return memory, moved


def _kept_bytes(
    accumulators: Packing, errors: int, R: int, compressor: Compressor | None
) -> int:
    """Bytes of errors, and of the compressor's state for each gradient of R stages, as in the engine."""
    if compressor is None:
        return 0
    most: dict[tuple, int] = {}
    for places in accumulators.places:
        of_program: dict[tuple, int] = {}
        for place in places:
            key = place.array, place.shape
            of_program[key] = of_program.get(key, 0) + place.count
        most |= {k: max(n, most.get(k, 0)) for k, n in of_program.items()}
    total = errors
    for (array, shape), number in most.items():
        like = jax.ShapeDtypeStruct(shape, accumulators.arrays[array].dtype)
        state = jax.eval_shape(functools.partial(compressor.init, like))
        total += R * number * num_bytes(jax.tree.leaves(state))
    return total


def _temporary_bytes(layer: LayerProfile) -> int:
    """Bytes that a layer's operations need beside what is kept.

    An update reads weights, gradients and optimizer state. It makes the changes of the weights, the
    new weights and the new optimizer state.
    """
    update = 2 * (2 * layer.parameter_bytes + layer.optimizer_bytes)
    return max(layer.temporary_bytes, update)
