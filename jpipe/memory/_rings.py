"""The bytes in flight on a device: the slots of rings, and messages.

Letters: K slots of a ring, N microbatches, m a microbatch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jpipe.lowering.channels import ticks_to_arrive
from jpipe.lowering.lower import CARRIES, HEAD_GRADIENT, STASHES
from jpipe.memory import _carries
from jpipe.memory._block import Block
from jpipe.memory._builder import Builder
from jpipe.packing import Place
from jpipe.schedule import IDLE
from jpipe.stages.cut import LayerRun

STASH_WORDS = {
    "input_stash": "input stash",
    "weight_stash": "weight stash",
    "split_residuals": "split residual",
}

_AGAIN = 0.4
"""The part of a backward after which a recomputed forward is over, on both axes."""


Allocations = Iterator[tuple[str, int, list[Block]]]
"""`(name, bytes, blocks)` of allocations."""


def _stash(ring: str, builder: Builder, shapes: dict) -> Allocations:
    if shapes:
        words = STASH_WORDS[ring]
        yield words, builder.num_bytes(shapes), _stashes(builder, ring)


def _all_staged(builder: Builder, shapes: dict) -> Allocations:
    for ring, arrays in shapes.items():
        num_bytes = builder.num_bytes(arrays)
        words = f"staged {STASH_WORDS[ring]}"
        yield words, num_bytes, _staged(builder, ring, num_bytes)


def _inbox(builder: Builder, shapes: dict) -> Allocations:
    inboxes = _inboxes(builder)
    for inbox, arrays in shapes.items():
        yield f"inbox of {inbox}", builder.num_bytes(arrays), inboxes.get(inbox, [])


def _sent(name: str, builder: Builder, shapes: dict) -> Allocations:
    sent, _ = _on_their_way(builder)
    for number, arrays in shapes.items():
        yield f"{name} {number}", builder.num_bytes(arrays), sent.get(number, [])


def _received(builder: Builder, shapes: dict) -> Allocations:
    _, received = _on_their_way(builder)
    for number, arrays in shapes.items():
        yield f"received {number}", builder.num_bytes(arrays), received.get(number, [])


def _stashes(builder: Builder, ring: str) -> list[Block]:
    """The contents of a ring of stashes, for each microbatch and layer."""
    schedule, stages = builder.schedule, builder.stages
    forward, backward = schedule.forward_ticks(), schedule.backward_ticks()
    last = schedule.weight_grad_ticks()
    recompute, split = (
        builder.engine.numbers.runs_forward_again,
        schedule.splits_backward,
    )
    pack = getattr(stages, ring)
    blocks = []
    for c in builder.columns:
        s = int(schedule.stage[c])
        program = stages.programs[stages.program_of_stage[s]]
        parts = _parts(ring, stages.layer_runs(s))
        if ring == "input_stash" and s == stages.num_stages - 1:
            parts.append((None, None, list(program.loss_stash)))
        for m, (layer, last_layer, places) in itertools.product(range(schedule.num_microbatches), parts):
            if forward[m, c] == IDLE:
                continue
            size = builder.layout.leaf_bytes(places, pack.arrays)
            name = f"{builder.words(s, layer)}, microbatch {m}: {STASH_WORDS[ring]}"
            if layer is None:
                name = f"loss, microbatch {m}: {STASH_WORDS[ring]}"
            read = builder.in_layer("backward", c, backward[m, c], layer)
            written = builder.in_layer("forward", c, forward[m, c], layer)
            if ring == "split_residuals":
                written = read
            elif recompute:
                begin, end = (builder.at("backward", c, backward[m, c], f) for f in (0.0, 1.0))
                written = begin + _AGAIN * _fraction(builder, c, forward[m, c], layer) * (end - begin)
                read = begin + _AGAIN * (end - begin) + (1 - _AGAIN) * (read - begin)
                written, read = (
                    builder.clock.rounded(written),
                    builder.clock.rounded(read),
                )
            reads = [read]
            if ring != "input_stash" and split:
                reads = [builder.in_layer("weight_grad", c, last[m, c], last_layer)]
                if ring == "weight_stash":
                    reads.append(read)
            lives = [(written, max(reads))]
            accesses = [(written, "write"), *((time, "read") for time in reads)]
            spill = builder.lowered.spills.get(ring)
            if spill is not None and spill.spilled[m, c]:
                # In host memory in the meantime; copied at the end of the tick, after all operations.
                left = builder.clock.at(int(forward[m, c]), "move")
                back = builder.clock.at(int(backward[m, c]) - 1, "move")
                lives = [(written, left), (back, max(reads))]
                accesses += [(left, "read"), (back, "write")]
            for first, freed in lives:
                blocks.append(
                    builder.block(
                        name,
                        STASH_WORDS[ring],
                        size,
                        first,
                        freed,
                        [a for a in accesses if first <= a[0] <= freed],
                        stage=s,
                        layers=None if layer is None or last_layer is None else (layer, last_layer + 1),
                    )
                )
    return blocks


def _parts(ring: str, layer_runs: Sequence[tuple[int, LayerRun, int]]) -> list[tuple[int | None, int | None, list]]:
    """The first and the last layer of values of a ring, and the places of the values."""
    shared = {getattr(run, ring)[v.position] for _, run, _ in layer_runs for v in run.shared if v.ring == ring}
    parts: list[tuple[int | None, int | None, list]] = []
    readers: dict[Place, list[int]] = {}
    for layer, run, _ in layer_runs:
        places = getattr(run, ring)
        parts.append((layer, layer, [place for place in places if place not in shared]))
        for place in shared.intersection(places):
            readers.setdefault(place, []).append(layer)
    return parts + [(layers[0], layers[-1], [place]) for place, layers in readers.items()]


def _staged(builder: Builder, ring: str, num_bytes: int) -> list[Block]:
    """A stash that goes to host memory, from the end of the tick of its forward until the end of the next."""
    blocks, ticks = (
        [],
        np.flatnonzero(builder.lowered.spills[ring].leaves[:, builder.device] >= 0),
    )
    for tick in ticks.tolist():
        first, last = (builder.clock.at(t, "move") for t in (tick, tick + 1))
        name = f"{STASH_WORDS[ring]} of tick {tick}, on its way to the host"
        accesses = [(first, "write"), (last, "read")]
        blocks.append(builder.block(name, STASH_WORDS[ring], num_bytes, first, last, accesses))
    return blocks


def _fraction(builder: Builder, column: int, tick: int, layer: int | None) -> float:
    if layer is None:
        return 1.0
    s = int(builder.schedule.stage[column])
    return builder.clock.layer("forward", s, builder.stages.layers_of(s), layer)


def _message_bytes(builder: Builder, inbox: str, source: int) -> int:
    """Bytes of a message from a stage."""
    stages = builder.stages
    name, _, part = ("activation", "", "gradient") if inbox == "gradient" else inbox.partition(".")
    if name == "activation":
        packings, owner = stages.messages, source - (part == "gradient")
    else:
        packings, owner = stages.portals[int(name.removeprefix("skip"))].packings, 0
    pack = {"": packings.activations, "gradient": packings.gradients, "support": packings.supports}[part]
    return builder.layout.leaf_bytes(pack.places[owner], pack.arrays)


def _messages(builder: Builder) -> Iterator[tuple[Any, int, int, int, int, int]]:
    """`(route, source stage, column of the source, target stage, column of the target, m)` of every message."""
    schedule = builder.schedule
    columns = schedule.column_of_microbatch
    for route, _ in builder.engine.routes:
        for (source, target), m in itertools.product(route.target.items(), range(schedule.num_microbatches)):
            yield (
                route,
                source,
                int(columns[m, source]),
                target,
                int(columns[m, target]),
                m,
            )


def _sent_tick(builder: Builder, route: Any, m: int, column: int) -> int:
    schedule = builder.schedule
    ticks = schedule.forward_ticks() if route.operation == "forward" else schedule.backward_ticks()
    return int(ticks[m, column])


def _ticks_to_arrive(builder: Builder, sender: int, column: int) -> int:
    """The ticks of a message from a column to another."""
    source, target = builder.schedule.device[[sender, column]]
    return int(ticks_to_arrive(builder.schedule, source, target))


def _arrival(builder: Builder, route: Any, tick: int, ticks: int) -> float:
    """The time at which a message, sent in a tick, lies in its inbox; see `_ticks_to_arrive`."""
    if ticks > 1:
        return builder.clock.at(tick + ticks, "receive", 0.5)
    if builder.engine.communication.overlap and route.operation == "backward":
        # It travels during the forwards of the next tick.
        return builder.clock.at(tick + 1, "backward", 0.0)
    return builder.clock.at(tick + 1, "receive", 0.5)


def _inboxes(builder: Builder) -> dict[str, list[Block]]:
    """Inbox -> the messages in it."""
    schedule = builder.schedule
    inboxes: dict[str, list[Block]] = {}
    for route, source, sender, target, column, m in _messages(builder):
        if column not in builder.columns:
            continue
        ticks = _ticks_to_arrive(builder, sender, column)
        arrived = _arrival(builder, route, _sent_tick(builder, route, m, sender), ticks)
        forward = int(schedule.forward_ticks()[m, column])
        backward = int(schedule.backward_ticks()[m, column])
        size = _message_bytes(builder, route.inbox, source)
        words = f"from stage {source} to {target}, microbatch {m}: {route.inbox}"
        listed = inboxes.setdefault(route.inbox, [])
        if route.operation == "backward" or route.stays:
            read = builder.at("backward", column, backward, 1.0)
            accesses = [(arrived, "write"), (read, "read")]
            listed.append(builder.block(words, "message", size, arrived, read, accesses, stage=target))
            continue
        read = builder.at("forward", column, forward, 1.0)
        accesses = [
            (arrived, "write"),
            (builder.at("forward", column, forward, 0.5), "read"),
        ]
        listed.append(builder.block(words, "message", size, arrived, read, accesses, stage=target))
        if builder.engine.numbers.runs_forward_again or route.kept:
            # The backward begins with the same input.
            again = builder.at("backward", column, backward, _AGAIN)
            listed.append(
                builder.block(
                    words,
                    "input stash",
                    size,
                    read,
                    again,
                    [(again, "read")],
                    stage=target,
                )
            )
    return inboxes


def _on_their_way(
    builder: Builder,
) -> tuple[dict[int, list[Block]], dict[int, list[Block]]]:
    """Number of an output -> the blocks sent from it; channel -> the blocks that it has brought to the device."""
    lowered, clock, T = builder.lowered, builder.clock, builder.schedule.num_ticks
    sent: dict[int, list[Block]] = {}
    received: dict[int, list[Block]] = {}
    for route, source, sender, target, column, m in _messages(builder):
        tick = _sent_tick(builder, route, m, sender)
        size = _message_bytes(builder, route.inbox, source)
        words = f"from stage {source} to {target}, microbatch {m}: {route.inbox}"
        channel = _channel(builder, route, tick, sender, column)
        late, waits = lowered.channels[channel].late, lowered.channels[channel].waits
        if sender in builder.columns:
            lane = builder.lanes[route.operation, sender, tick % T]
            number = lowered.outgoing.index((route.inbox, lane))
            written = builder.at(route.operation, sender, tick, 0.9)
            moved = clock.at(tick + 1, "receive", 0.5) if late else clock.at(tick, "move", 0.5)
            accesses = [(written, "write"), (moved, "read")]
            name = f"{words}, sent"
            sent.setdefault(number, []).append(
                builder.block(name, "message", size, written, moved, accesses, stage=source)
            )
        if column in builder.columns and waits:
            moved = clock.at(tick + 1, "receive", 0.5) if late else clock.at(tick, "move", 0.5)
            read = _arrival(builder, route, tick, _ticks_to_arrive(builder, sender, column))
            accesses = [(moved, "write"), (read, "read")]
            name = f"{words}, received"
            received.setdefault(channel, []).append(
                builder.block(name, "message", size, moved, read, accesses, stage=target)
            )
    return sent, received


def _channel(builder: Builder, route: Any, tick: int, sender: int, column: int) -> int:
    """The number of the channel that brings a message from one column to another."""
    t = (tick + _ticks_to_arrive(builder, sender, column)) % builder.schedule.num_ticks
    source, target = builder.schedule.device[[sender, column]].tolist()
    for number, channel in enumerate(builder.lowered.channels):
        arrives = channel.arrives.get(route.inbox)
        # Copies of a stage may send to one column in one tick, each on a channel of its own.
        connects = source == target if channel.pairs is None else (source, target) in channel.pairs
        if connects and arrives is not None and arrives[t, target, 0] == column:
            return number
    raise AssertionError(f"no channel brings {route.inbox} from column {sender} to {column} in tick {tick}")


def _ticks(builder: Builder, name: str) -> list[int]:
    """The ticks in which the device runs an operation of all devices."""
    operations = builder.lowered.operations.get(name)
    if operations is None:
        return []
    T = builder.schedule.num_ticks
    return [t for t in range(T) if operations.stage[t, builder.device, 0] >= 0]


def _handed(
    name: str,
    builder: Builder,
    shapes: list,
    ticks: list[int],
    first: tuple[str, float],
    last: tuple[str, float],
) -> Allocations:
    """Arrays that operations of all devices hand to a stage, or get from it, in some ticks: between two fractions of
    operations.
    """
    clock, words = builder.clock, name.replace("_", " ")
    size, blocks = builder.num_bytes(shapes), []
    for t in ticks:
        start, stop = clock.at(t, *first), clock.at(t, *last)
        accesses = [(start, "write"), (stop, "read")]
        blocks.append(builder.block(f"{words}, tick {t}", "message", size, start, stop, accesses))
    yield words, size, blocks


def _embedded(builder: Builder, shapes: list) -> Allocations:
    ticks, last = set(_ticks(builder, "embed")), ("forward", 0.0)
    if "embed_backward" in builder.lowered.operations:
        last = "embed_backward", 0.0
    if builder.engine.numbers.runs_forward_again:
        ticks |= set(_ticks(builder, "embed_backward"))
    return _handed("embedded", builder, shapes, sorted(ticks), ("embed", 0.9), last)


def _embedded_gradient(builder: Builder, shapes: list) -> Allocations:
    ticks = _ticks(builder, "embed_backward")
    ends = ("backward", 0.9), ("embed_backward", 0.9)
    return _handed("embedded_gradient", builder, shapes, ticks, *ends)


def _head_input(builder: Builder, shapes: list) -> Allocations:
    ticks = _ticks(builder, "head")
    return _handed("head_input", builder, shapes, ticks, ("forward", 0.9), ("head", 0.9))


def _head_gradients(builder: Builder, shapes: list) -> Allocations:
    """The gradients by the inputs of the head, on the device of the last stage."""
    if not shapes:
        return
    schedule, num_bytes = builder.schedule, builder.num_bytes(shapes)
    slots = builder.lowered.num_slots[HEAD_GRADIENT]
    forward, backward = schedule.forward_ticks(), schedule.backward_ticks()
    blocks = []
    for c, m in itertools.product(builder.columns, range(schedule.num_microbatches)):
        if schedule.stage[c] == schedule.num_stages - 1 and forward[m, c] != IDLE:
            start = builder.clock.at(int(forward[m, c]), "head", 0.9)
            stop = builder.at("backward", c, int(backward[m, c]), 0.5)
            accesses = [(start, "write"), (stop, "read")]
            words = f"gradient of the head, microbatch {m}"
            blocks.append(builder.block(words, "message", num_bytes // slots, start, stop, accesses))
    yield "gradients of the head", num_bytes, blocks


RINGS: dict[str, Callable[[Builder, Any], Allocations]] = {
    **{ring: functools.partial(_stash, ring) for ring in STASHES},
    **{ring: functools.partial(_carries.allocations, ring) for ring in CARRIES},
    "staged": _all_staged,
    "inbox": _inbox,
    "sent_activations": functools.partial(_sent, "sent activations"),
    "sent_gradients": functools.partial(_sent, "sent gradients"),
    "received": _received,
    "embedded": _embedded,
    "head_input": _head_input,
    "embedded_gradient": _embedded_gradient,
    HEAD_GRADIENT: _head_gradients,
}
"""Name of an array of the state that holds what is in flight -> its allocations, of its local shapes."""
