"""Traffic of devices: bytes of messages between stages and of gradients between replicas, plain and compressed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.engine.training import TrainingPass
from jpipe.gradients.sums import FACTORS, SUMS, places_of
from jpipe.layers.avals import num_bytes as bytes_of
from jpipe.packing import Packing, Place
from jpipe.stages.codecs import (
    NO_COMPRESSION,
    LeafCodec,
    MessageCompression,
    inbox_of,
    is_gradient,
)
from jpipe.stages.messages import find_routes, pack_messages


class MessageRecord(NamedTuple):
    """One row of `Pipeline.messages`.

    Attributes:
      what: "activation", "gradient", "skip0", "skip0.gradient", ... between stages; "weights" between replicas of
        a stage: their gradients; "outputs" between those of the last stage, with the batch, for a
        `jpipe.WholeBatchLoss`.
      source: the stage that sends.
      target: the stage that receives; the same for replicas.
      num_bytes: bytes of one message (one microbatch). Between replicas: bytes that each receives in an update.
      plain_bytes: bytes of the message without compression.
    """

    what: str
    source: int
    target: int
    num_bytes: int
    plain_bytes: int

    @property
    def ratio(self) -> float:
        """The factor by which compression reduces the bytes."""
        return self.plain_bytes / max(self.num_bytes, 1)


def messages(engine: TrainingPass) -> list[MessageRecord]:
    """The messages between stages, then what replicas of each stage exchange."""
    stages = engine.stages
    plain = find_routes(
        stages.num_stages,
        pack_messages([_uncompressed(codecs) for codecs in stages.codecs]),
        [_plain_portal(portal) for portal in stages.portals],
    )
    packings: dict[str, Packing] = {route.inbox: pack for route, pack in plain}
    records = [
        MessageRecord(
            route.inbox,
            source,
            target,
            pack.num_bytes,
            packings[route.inbox].num_bytes,
        )
        for route, pack in engine.routes
        if not route.stays
        for source, target in route.target.items()
    ]
    for s in range(stages.num_stages):
        number = len(engine.lowered.copies[s]) * engine.num_replicas
        if number > 1:
            records.append(_between_replicas(engine, s, number))
    if engine.has_whole_batch_loss and engine.num_replicas > 1:
        last, others = stages.num_stages - 1, (engine.num_replicas - 1) * engine.schedule.num_microbatches
        num_bytes = others * bytes_of([*stages.outputs[0], *jax.tree.leaves(engine.microbatch)])
        records.append(MessageRecord("outputs", last, last, num_bytes, num_bytes))
    return records


def _between_replicas(engine: TrainingPass, s: int, number: int) -> MessageRecord:
    """The bytes that a replica of a stage receives in an update. A plain mean sends sums in a ring."""
    u, stages = engine.updates.program_of_stage[s], engine.stages
    update, sends_per_number = engine.updates.programs[u], 2 * (number - 1) / number

    def total(places: Sequence[Place], packing: Packing) -> int:
        sizes = (math.prod(p.shape) * packing.arrays[p.array].dtype.itemsize for p in places)
        return sum(sizes)

    whole_sums = stages.gradient_sums.packing_of(stages.parameters)
    plain = round(sends_per_number * total([place for (place, _), *_ in update.parameters], whole_sums))
    formed, factors = (
        places_of(placed for placed, _ in update.gradients if placed.sum.group == group) for group in (SUMS, FACTORS)
    )
    # Of factors, which every microbatch updates, and of all other gradients.
    exchanged = total(formed, stages.accumulators)
    exchanged += engine.schedule.num_microbatches * total(factors, stages.factors)
    compressor, num_bytes = (
        engine.communication.compress_gradients,
        round(sends_per_number * exchanged),
    )
    if compressor is not None:
        num_bytes = sum(
            len(group.starts[u]) * compressor.for_gradient(group.like).exchanged_bytes(group.like, number)
            for group in engine.gradient_groups
        )
    return MessageRecord("weights", s, s, num_bytes, plain)


def _uncompressed(codecs: Any) -> tuple[LeafCodec, ...]:
    return tuple(codec._replace(compression=NO_COMPRESSION) for codec in codecs)


def _plain_portal(portal: Any) -> Any:
    """A portal whose packings hold its leaves without compression."""
    codecs = [c for cs in portal.codecs.values() for c in _uncompressed(cs)]
    return dataclasses.replace(portal, packings=pack_messages([codecs]))


# -- In a step


def counts(engine: TrainingPass, compression: MessageCompression, kept: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The reports of the compressors after a step, over all devices.

    Args:
      engine: the pass of the step.
      compression: the compression of messages.
      kept: global arrays of the state.

    Returns:
      "message_ratio" and "gradient_ratio", the factors by which bytes are fewer, over all messages of a microbatch and
      over the gradients of all stages; "error_norm", of all that replicas have not sent of their gradients. And of
      compressors that report them "gradient_density" and "message_density", the mean part of the entries that passed
      the latest thresholds, and "gradient_overflow" and "message_overflow", the entries so far that passed without
      room.
    """
    counters = _ratios(messages(engine))
    gradient_state, message_states = (
        kept["gradient_compression"],
        kept["message_compression"],
    )
    if "error" in gradient_state:
        errors = jax.tree.leaves(gradient_state["error"])
        squares = [jnp.sum(jnp.square(a.astype(jnp.float32))) for a in errors]
        counters["error_norm"] = jnp.sqrt(sum(squares, jnp.float32(0)))
        compressor: Any = engine.communication.compress_gradients
        states = [
            jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), gradient_state["states"][group.name])
            for group in engine.gradient_groups
            if compressor.for_gradient(group.like) == compressor  # others are sent whole
        ]
        counters |= _counts("gradient", compressor, states)
    activations, gradients = compression
    compressors = {"message": activations, "message_gradient": gradients}
    for name, compressor in compressors.items():
        states = [
            state for key, state in message_states.items() if is_gradient(inbox_of(key)) == (name == "message_gradient")
        ]
        counters |= _counts(name, compressor, states)
    return counters


def _ratios(records: Sequence[MessageRecord]) -> dict[str, jax.Array]:
    """The ratios of the messages between stages, and of the gradients between replicas."""
    ratios = {}
    for name, is_gradient_exchange in ("message", False), ("gradient", True):
        records_of_kind = [r for r in records if (r.source == r.target) == is_gradient_exchange]
        plain, sent = (sum(getattr(r, n) for r in records_of_kind) for n in ("plain_bytes", "num_bytes"))
        if plain != sent:
            ratios[f"{name}_ratio"] = jnp.float32(plain / max(sent, 1))
    return ratios


def _counts(name: str, compressor: Any, states: list) -> dict[str, jax.Array]:
    """Counts of one compressor, from its states `[n, ...]`."""
    states = [state for state in states if jax.tree.leaves(state)]
    if compressor is None or not states:
        return {}
    counts_by_state = [jax.vmap(compressor.counts)(state) for state in states]
    counters = {}
    for key in counts_by_state[0]:
        # In float32: the sum of many counts may be beyond int32.
        values = jnp.concatenate([counts[key].reshape(-1).astype(jnp.float32) for counts in counts_by_state])
        total = jnp.sum(values)
        if key == "density":  # some states are of no array, and sent nothing
            total = total / jnp.maximum(jnp.sum(values > 0), 1)
        counters[f"{name}_{key}"] = total
    return counters
