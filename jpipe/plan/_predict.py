"""Predicts the seconds and bytes of a table, for a profiled model that is cut at boundaries."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpipe.compress import Compressor
from jpipe.costs import Memory
from jpipe.engine.layout import StateLayout, layout_of
from jpipe.engine.shapes import StatePackings, packed_shapes
from jpipe.engine.state_arrays import BUFFERS, StateFacts
from jpipe.layers.avals import num_bytes, real_dtype
from jpipe.lowering.array_rows import ArrayRows, used_arrays
from jpipe.lowering.channels import Route
from jpipe.lowering.lower import STASHES, Lowered, lower
from jpipe.lowering.versions import num_versions_of
from jpipe.options.communication import message_compression
from jpipe.packing import Leaf, Packing
from jpipe.plan._groups import Traffic, exchange_costs, groups, traffic_of
from jpipe.plan._layouts import device_numbers
from jpipe.plan._profile import LayerProfile, Profile
from jpipe.schedule import Schedule
from jpipe.simulate import Costs, Timing, simulate
from jpipe.solvers import Machine
from jpipe.stages.boundaries import check_boundaries
from jpipe.stages.codecs import NO_COMPRESSION, LeafCodec, MessageCompression, codecs_of
from jpipe.stages.extra_args import STALE_PARAMS, hooked_passes
from jpipe.stages.groups import Signature, devices_of_use, group, pack_weights
from jpipe.stages.layer_leaves import with_device_dim
from jpipe.stages.messages import find_portals, find_routes, pack_messages
from jpipe.stages.offload import NO_OFFLOAD, HostMoves, Offload
from jpipe.stages.shared_stash import SharedStashes


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """The predicted cost of a training step.

    Attributes:
      seconds: seconds of a step, which trains on one minibatch.
      timing: seconds that each device computes, sends and is idle in the table.
      memory: bytes per device.
      delay: the largest delay of a gradient: updates between reading the weights that it was
        computed with and applying it.
      host_seconds: the part of the seconds in which a device sends to host memory and fetches from it.
      traffic: what the device that sends most sends along axes of the mesh inside of its layers, one record for each
        axis.
    """

    seconds: float
    timing: Timing
    memory: Memory
    delay: int
    host_seconds: float = 0.0
    traffic: tuple[Traffic, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes per device, in its own memory."""
        return self.memory.total


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
    dcn: Mapping[str, int] | None = None,
) -> Prediction:
    """Predicts the cost of a table in lockstep. Each of its cells is one microbatch of the profile.

    Of a profile with axes every stage is a group of devices, which share its layers and exchange along the axes.

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
      machine: the machine. The devices of a group are neighbours, and without `dcn` those of a replica too.
      num_replicas: the number of copies of the pipeline.
      shard_optimizer: whether the replicas of a stage share its update, as of `Pipeline`. Each takes an
        equal part of its time and of the optimizer's state, which is exact for updates that work element by
        element.
      compress_messages: see `Pipeline`. Fewer bytes travel. The time to encode and decode is not included.
      compress_gradients: see `Pipeline`; without replicas it does nothing.
      offload: see `Pipeline`. What a device sends to its host and fetches comes on top of a step: nothing of it is
        taken to be hidden.
      host_bandwidth: bytes per second between a device and its host, each way at its time.
      dcn: the parts into which the network between servers cuts stages and replicas, as of `jpipe.make_mesh`. None:
        devices are in order, replica by replica.

    Returns:
      A `Prediction`. Its bytes are those of `Pipeline.memory`, except for the temporaries, which
      are those of the layer that needs most. Axes of the mesh that the profile has not, and the time of
      `forward_params`, `backward_params` and tied weights, are not included.

    Raises:
      ValueError: if the boundaries do not fit, the machine has too few devices, or the
        profile lacks what the table runs.
    """
    size = profile.group_size
    needed = schedule.num_devices * num_replicas * size
    if needed > machine.num_devices:
        raise ValueError(
            f"`machine` must have at least {needed} devices, {num_replicas * size} for each of "
            f"{schedule.num_devices}, got {machine.num_devices}. Use fewer stages or replicas."
        )
    S = schedule.num_stages
    starts = check_boundaries(list(boundaries), len(profile.layers), S)
    assert starts is not None  # as it is for a list of boundaries
    options: dict[str, Any] = dict(
        num_replicas=num_replicas,
        shard_optimizer=shard_optimizer,
        compress_messages=message_compression(compress_messages),
        compress_gradients=compress_gradients,
    )
    costs = stage_costs(schedule, profile, starts, machine, dcn=dcn or {}, **options)
    timing = simulate(schedule, costs)
    memory, moved = predict_memory(schedule, profile, starts, offload=offload, **options)
    return Prediction(
        seconds=timing.makespan + machine.step + moved / host_bandwidth,
        timing=timing,
        memory=memory,
        host_seconds=moved / host_bandwidth,
        delay=int(schedule.facts().forward_delay.max()),
        traffic=traffic_of(schedule, profile, starts, machine),
    )


def stage_costs(
    schedule: Schedule,
    profile: Profile,
    starts: Sequence[int],
    machine: Machine,
    *,
    num_replicas: int = 1,
    shard_optimizer: bool = False,
    compress_messages: MessageCompression = NO_COMPRESSION,
    compress_gradients: Compressor | None = None,
    dcn: Mapping[str, int],
) -> Costs:
    """The costs of each stage in the form of `jpipe.simulate`.

    Args:
      schedule: the table, for the devices of the stages and for split backwards.
      profile, machine, num_replicas, shard_optimizer, compress_gradients, dcn: see `predict`.
      starts: the first layer of each stage, then the number of layers.
      compress_messages: compressors of messages.
    """
    split, exchange = schedule.splits_backward, exchange_costs(schedule, profile, starts, machine)

    # With fewer cores than devices, each device had a share of a core while it was measured.
    cores = machine.num_cores
    share = 1.0 if cores is None else min(cores / profile.num_devices, 1.0)

    def total(operation: str) -> list[float]:
        seconds = profile.seconds(operation)
        return [share * sum(seconds[i:j]) for i, j in itertools.pairwise(starts)]

    if profile.group_size > 1:
        machine = groups(machine, profile.group_size)
    copies = schedule.copies
    D, S = schedule.num_devices, schedule.num_stages
    number = device_numbers(machine, dcn, D, num_replicas)
    # Seconds of the messages after a stage's forward, and after the backward of the next stage.
    sent = {"forward": np.zeros(S), "backward": np.zeros(S)}
    routes = _routes(profile, starts, compress_messages)
    for route, packing in [(route, packing) for route, packing in routes if not route.stays]:
        for source, target in route.target.items():
            # Of the links between copies, in all replicas, the slowest, because it ends the tick.
            pairs = [pair for pair in itertools.product(copies[source], copies[target]) if pair[0] != pair[1]]
            links = {tuple(number[list(pair), r].tolist()) for pair in pairs for r in range(num_replicas)}
            seconds = [machine.message_seconds(packing.num_bytes, link) for link in links]
            if seconds:
                boundary = source - (route.operation == "backward")
                sent[route.operation][boundary] += max(seconds)
    update = total("update")
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        held = profile.layers[start:stop]
        gradients = sum(layer.gradient_bytes for layer in held)
        ring = number[copies[s][0]].tolist()
        if shard_optimizer:
            update[s] /= len(copies[s]) * num_replicas
            # To scatter gradients and to gather weights takes half as long each as to add up as many bytes.
            weights = sum(layer.parameter_bytes for layer in held)
            gradients = (gradients + weights) // 2
        replicas = number[list(copies[s])].ravel().tolist()
        if compress_gradients is not None and len(replicas) > 1:
            num_bytes = _exchanged_bytes(held, compress_gradients, len(replicas))
            update[s] += machine.reduce_seconds(num_bytes, replicas)
            continue
        update[s] += machine.reduce_seconds(gradients, ring)
        update[s] += machine.reduce_seconds(gradients, number[list(copies[s]), 0].tolist())
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
        num_cores=None if machine.num_cores is None else machine.num_cores / num_replicas,
        cores_per_device=machine.cores_per_device,
        overlaps=machine.overlaps,
        **exchange,
    )


def _exchanged_bytes(
    layers: Sequence[LayerProfile],
    compressor: Compressor,
    num_replicas: int,
) -> int:
    """Bytes of an array whose sum in a ring takes as many bytes as the compressed gradients of layers."""
    gradients = [a for layer in layers for a in layer.gradients]
    received = sum(compressor.for_gradient(a).exchanged_bytes(a, num_replicas) for a in gradients)
    return math.ceil(received * num_replicas / (2 * (num_replicas - 1)))


def _codecs(profile: Profile, starts: Sequence[int], compression: MessageCompression) -> list[tuple[LeafCodec, ...]]:
    """The codecs of the message of each stage but the last."""
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
    return find_routes(len(starts) - 1, pack_messages(codecs), portals, kept=compression.is_sparse)


def predict_memory(
    schedule: Schedule,
    profile: Profile,
    starts: Sequence[int],
    *,
    num_replicas: int = 1,
    shard_optimizer: bool = False,
    compress_messages: MessageCompression = NO_COMPRESSION,
    compress_gradients: Compressor | None = None,
    offload: Offload = NO_OFFLOAD,
) -> tuple[Memory, float]:
    """Bytes per device, by use, and those that a device sends to host memory and fetches in a step.

    Args:
      schedule, profile, num_replicas, shard_optimizer, compress_gradients, offload: see `predict`.
      starts: the first layer of each stage, then the number of layers.
      compress_messages: compressors of messages.

    Raises:
      ValueError: if the table needs more slots of stashes than `offload` leaves.
    """
    profile = profile.in_table(schedule)
    layers, exchanges = profile.layers, num_replicas > 1 or schedule.has_copies
    lowered, layout, one_version = _state_layout(
        schedule,
        profile,
        starts,
        compress_messages=compress_messages,
        compressor=compress_gradients if exchanges else None,
        stash_slots=offload.activations,
    )
    sizes = layout.bytes_by_field(_UNPADDED)
    copies = 1 + len(layout["read_parameters"].shapes)
    state = np.add.reduceat([a.optimizer_bytes for a in layers], starts[:-1])
    num_shares = np.ones(len(state), int)
    if shard_optimizer:
        num_shares = num_replicas * np.array(schedule.replicas)
        largest = (state / num_shares).max() / max(state.max(), 1)
        sizes["optimizer"] = math.ceil(sizes["optimizer"] * largest)
    on_host = {
        "weights": offload.weights * sizes["weights"] / copies,
        "optimizer": offload.optimizer * sizes["optimizer"],
        "gradients": offload.gradients * sizes["gradients"],
    }
    # One slot of each stash comes from the host while a tick computes.
    slots = {ring: num_bytes(jax.tree.leaves(arrays)) for ring, arrays in layout[BUFFERS].shapes["staged"].items()}
    passes = 2 + schedule.splits_backward + (profile.recompute == "full")
    moves = HostMoves.of(schedule.num_microbatches, passes)
    moved = moves.optimizer * on_host["optimizer"]
    moved += moves.gradients * on_host["gradients"]
    moved += moves.weights * offload.weights * one_version
    moved += sum(2 * slots[ring] * int((spill.stores >= 0).sum(axis=0).max()) for ring, spill in lowered.spills.items())
    largest_layer = max(layer.parameter_bytes + layer.frozen_bytes for layer in layers)
    # The weights of a layer come while the layer before runs.
    for name, num_layers in (("weights", 2), ("gradients", 1)):
        slots[name] = num_layers * largest_layer * (getattr(offload, name) > 0)
    held = sizes["weights"] + sizes["gradients"] + sizes["optimizer"]
    versions = lowered.rows.num_versions.tolist()
    used = sum(
        number * _held_bytes(layers[starts[s] : starts[s + 1]], copies * V)
        for s, (number, V) in enumerate(zip(schedule.replicas, versions, strict=True))
    )
    used -= int(np.dot(schedule.replicas, state - state / num_shares))
    for name, num in on_host.items():
        sizes[name] = math.ceil(sizes[name] - num)
    memory = Memory(
        **sizes,
        batch=schedule.num_microbatches * profile.microbatch_bytes,
        temporaries=max(_temporary_bytes(layer) for layer in (*layers, profile.loss)) + sum(slots.values()),
        padding=max(held - used // schedule.num_devices, 0),
        host=sum(map(math.floor, on_host.values())) + sum(layout.host_bytes(_UNPADDED).values()),
    )
    return memory, moved


def _held_bytes(layers: Sequence[LayerProfile], num_weights: int) -> int:
    """Bytes of the layers of a stage, with all versions of its weights, also those that hooks give."""
    return sum(layer.weight_bytes + (num_weights - 1) * layer.parameter_bytes for layer in layers)


def _state_layout(
    schedule: Schedule,
    profile: Profile,
    starts: Sequence[int],
    *,
    compress_messages: MessageCompression,
    compressor: Compressor | None,
    stash_slots: int | None,
) -> tuple[Lowered, StateLayout, int]:
    """The lowered table, the arrays of its state on a device, as in the engine, and bytes of one version of its
    weights.

    Args:
      schedule: the table.
      profile: the profile of the layers in this table.
      starts: the first layer of each stage, then the number of layers.
      compress_messages: compressors of messages.
      compressor: the compressor of gradients; None: they are sent as they are.
      stash_slots: the most microbatches of which a device keeps a stash; None: all.
    """
    layers = profile.layers
    kinds = [Signature(layer.kind, layer.stash, layer.pop) for layer in layers]
    groups, layer_of_kind = group(kinds, starts), dict(zip(kinds, layers))

    num_leaves = {name: len(skip) for layer in layers for name, skip in zip(layer.stash, layer.skips, strict=True)}
    shared = SharedStashes(groups, lambda kind: layer_of_kind[kind].values, num_leaves)

    def leaves(name: str, kind: Any) -> list[Leaf]:
        leaves_of_kind = [*map(Leaf, layer_of_kind[kind].avals(name))]
        if name == "statistics":
            return [with_device_dim(leaf, schedule.copies) for leaf in leaves_of_kind]
        return leaves_of_kind

    def packed(name: str) -> Packing:
        """The packing of the stages' leaves of one name."""
        loss = profile.loss.avals(name) if name == "input_stash" else ()
        return groups.pack(
            functools.partial(leaves, name),
            last=[*map(Leaf, loss)],
            devices=devices_of_use(name, schedule.copies),
            arranged=functools.partial(shared.written, name),
            tight=name in ("gradients", "optimizer_state"),
        )

    routes = _routes(profile, starts, compress_messages)
    lowered = lower(
        schedule,
        profile.recompute == "full",
        [route for route, _ in routes],
        stash_slots=stash_slots,
        reads_stale=STALE_PARAMS in profile.reads,
    )
    used = functools.partial(used_arrays, owner_of_stage=groups.program_of_stage)
    hooked = hooked_passes(schedule, profile.reads)
    parameters = pack_weights(
        groups,
        functools.partial(leaves, "parameters"),
        functools.partial(leaves, "frozen"),
        schedule.copies,
        num_versions_of(schedule).tolist(),
        hooked=bool(hooked),
        tight=True,
    )
    accumulators = packed("gradients")
    packings = StatePackings(
        parameters=parameters,
        accumulators=accumulators,
        mutable_state=packed("state"),
        statistics=packed("statistics"),
        rings={ring: packed(ring) for ring in STASHES if lowered.num_slots[ring]},
        messages=routes,
        optimizer_state=packed("optimizer_state"),
    )
    rows = _array_rows(lowered, packings, used)
    facts = StateFacts(
        mesh=None,
        lowered=lowered,
        packings=packings,
        array_rows=rows,
        # The profile knows the bytes of a microbatch, and not its arrays.
        microbatch=jax.ShapeDtypeStruct((profile.microbatch_bytes,), np.uint8),
        hooked_passes=hooked,
        norm_dtype=real_dtype([layer.avals("parameters") for layer in layers]),
        gradient_compression=_gradient_compression(accumulators, rows["gradients"], compressor),
    )
    rows_of_stages = ArrayRows.per_stage(lowered, parameters.arrays, used(parameters))
    return lowered, layout_of(facts), rows_of_stages.num_bytes(parameters)


def _array_rows(
    lowered: Lowered, packings: StatePackings, used: Callable[[Packing], list[set[str]]]
) -> dict[str, ArrayRows]:
    """The rows of packed arrays, as in the engine. `used` gives the arrays of each stage in a packing."""
    per_stage = {
        "gradients": packings.accumulators,
        "optimizer_state": packings.optimizer_state,
        "mutable_state": packings.mutable_state,
        "statistics": packings.statistics,
    }
    rows = {
        n: ArrayRows.per_stage(lowered, pack.arrays, used(pack)) for n, pack in per_stage.items() if pack is not None
    }
    weights = packings.parameters
    rows["parameters"] = ArrayRows.per_version(lowered, weights.arrays, used(weights), weights.constant)
    for ring, pack in packings.rings.items():
        rows[ring] = ArrayRows.per_slot(lowered, ring, pack.arrays, used(pack))
    return rows


_UNPADDED = "cpu"
"""The platform whose arrays take the bytes of their numbers."""


def _gradient_compression(accumulators: Packing, rows: ArrayRows, compressor: Compressor | None) -> dict[str, Any]:
    """Errors, and the compressor's state for each gradient of a device's stages, as in the engine."""
    if compressor is None:
        return {}
    most: dict[tuple, int] = {}
    for places in accumulators.places:
        counts: dict[tuple, int] = {}
        for place in places:
            key = place.array, place.shape
            counts[key] = counts.get(key, 0) + place.count
        most |= {k: max(n, most.get(k, 0)) for k, n in counts.items()}
    states = []
    for (array, shape), number in most.items():
        like = jax.ShapeDtypeStruct(shape, accumulators.arrays[array].dtype)
        state = jax.eval_shape(functools.partial(compressor.init, like))
        states += [jax.ShapeDtypeStruct((rows.num_rows * number, *a.shape), a.dtype) for a in jax.tree.leaves(state)]
    return {"error": packed_shapes(None, accumulators, rows), "states": states}


def _temporary_bytes(layer: LayerProfile) -> int:
    """Bytes that a layer's operations need beside the arrays that are kept.

    An update reads weights, gradients and optimizer state. It makes the changes of the weights, the
    new weights and the new optimizer state.
    """
    update = 2 * (layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes)
    return max(layer.temporary_bytes, update)
