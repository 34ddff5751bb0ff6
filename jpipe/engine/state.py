"""The training state: the list of its arrays, and `PipelineState`, which holds them.

`STATE_ARRAYS` is the one place that names all arrays of a state. The layout, bytes by use, the memory timeline, the
planner's prediction, `adopt` and checkpoints walk it.

Letters: D devices of the pipeline, R columns per device, K slots of a ring, N microbatches.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpipe._util.suggest import suggests
from jpipe.engine.shapes import (
    StatePackings,
    microbatch_shapes,
    packed_shapes,
    stored_on_host,
    stored_shape,
    stored_shapes,
)
from jpipe.engine.state_arrays import (
    Adopted,
    LayerLeaves,
    Lives,
    OnReplicas,
    StateArray,
    StateFacts,
    apart_on_replicas,
    as_learners_hold,
    buffer,
)
from jpipe.layers.avals import is_inexact
from jpipe.lowering.lower import HEAD_GRADIENT, RINGS
from jpipe.packing import Leaf, Packing
from jpipe.stages.cut import Stages

NUM_DISCARD_SLOTS = 1
"""An inbox ends with a discard slot, for the messages of ticks in which nothing arrives for it."""


# -- Shapes


def _parameters(facts: StateFacts) -> dict[str, Any]:
    return packed_shapes(facts.mesh, facts.packings.parameters, facts.array_rows["parameters"])


def _read_parameters(facts: StateFacts) -> dict[str, Any]:
    constant = facts.packings.parameters.constant
    shapes = {name: a for name, a in _parameters(facts).items() if name not in constant}
    return dict.fromkeys(facts.hooked_passes, shapes)


def _state_packing(facts: StateFacts) -> Packing:
    assert facts.packings.optimizer_state is not None
    return facts.packings.optimizer_state


def _optimizer_state(facts: StateFacts) -> dict[str, Any]:
    return packed_shapes(facts.mesh, _state_packing(facts), facts.array_rows["optimizer_state"])


def gradient_shapes(facts: StateFacts) -> dict[str, Any]:
    """Local shapes of the accumulators of gradients."""
    shapes = packed_shapes(facts.mesh, facts.packings.accumulators, facts.array_rows["gradients"])
    return facts.sums.shapes(shapes)


def _counter(facts: StateFacts) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1,), np.int32)


@functools.cache
def _key_data(impl: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))[None])


def _stash(ring: str, facts: StateFacts) -> dict[str, Any]:
    lowered = facts.lowered
    if not lowered.num_slots[ring] or lowered.schedule.forward_only or ring in facts.tick_stashes:
        return {}
    return packed_shapes(facts.mesh, facts.packings.rings[ring], facts.array_rows[ring])


def _inbox(facts: StateFacts) -> dict[str, Any]:
    slots = facts.lowered.num_slots
    return {
        route.inbox: packed_shapes(facts.mesh, pack, slots[route.inbox] + NUM_DISCARD_SLOTS)
        for route, pack in facts.packings.messages
        if slots[route.inbox]
    }


def _sent(operation: str, facts: StateFacts) -> dict[int, Any]:
    message = {route.inbox: (route, p) for route, p in facts.packings.messages}
    return {
        number: packed_shapes(facts.mesh, message[inbox][1])
        for number, (inbox, _) in enumerate(facts.lowered.outgoing)
        if message[inbox][0].operation == operation
    }


def _received(facts: StateFacts) -> dict[int, Any]:
    message = {route.inbox: pack for route, pack in facts.packings.messages}
    return {
        number: packed_shapes(facts.mesh, message[next(iter(channel.arrives))])
        for number, channel in enumerate(facts.lowered.channels)
        if channel.waits
    }


def _host_stash(facts: StateFacts) -> dict[str, Any]:
    return {
        ring: {
            name: jax.ShapeDtypeStruct(stored_on_host(a.shape), a.dtype)
            for name, a in packed_shapes(None, facts.packings.rings[ring], spill.num_slots + NUM_DISCARD_SLOTS).items()
        }
        for ring, spill in facts.lowered.spills.items()
    }


def _staged(facts: StateFacts) -> dict[str, Any]:
    rings = facts.packings.rings
    return {ring: packed_shapes(facts.mesh, rings[ring], 1) for ring in facts.lowered.spills}


def _with_gradients(leaves: Sequence[Leaf]) -> list[Leaf]:
    return [leaf for leaf in leaves if is_inexact(leaf.aval)]


def _head_gradient(facts: StateFacts) -> list[jax.ShapeDtypeStruct]:
    return [
        stored_shape(facts.mesh, leaf, facts.lowered.num_slots[HEAD_GRADIENT])
        for leaf in _with_gradients(facts.packings.head_input)
    ]


def _squared_norm(facts: StateFacts) -> jax.ShapeDtypeStruct:
    # Of the latest versions of each column, and of the device's part of each unit, for norms over all stages.
    lowered, norms = facts.lowered, facts.lowered.norms
    assert norms is not None
    shape = norms.depth, lowered.num_chunks + len(lowered.homes)
    return jax.ShapeDtypeStruct(shape, facts.norm_dtype)


def _minibatch_weights(facts: StateFacts) -> jax.ShapeDtypeStruct | None:
    number = facts.lowered.num_weights
    return jax.ShapeDtypeStruct((number,), facts.weight_dtype) if number > 1 else None


def _batches(facts: StateFacts) -> Any:
    lowered = facts.lowered
    if lowered.num_batches == 1:
        return None
    num_rows = lowered.num_batches * lowered.schedule.num_microbatches
    return microbatch_shapes(facts.mesh, facts.microbatch, num_rows)


# -- The list


def _run_leaves(name: str, stages: Stages, stage: int) -> Iterator[tuple[int, Sequence, int]]:
    """The leaves of each layer at the places that its run has under a name."""
    for layer, run, row in stages.layer_runs(stage):
        yield layer, getattr(run, name), row


def _first_scale(engine: Any) -> dict[str, np.ndarray]:
    scale = engine.numbers.loss_scale
    return {} if scale is None else scale.start()


def _state_held(facts: StateFacts) -> OnReplicas:
    return OnReplicas.PART if facts.shares_updates else as_learners_hold(facts)


def moving_weights(packings: StatePackings, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arrays of weights that updates change."""
    return {name: a for name, a in shapes.items() if name not in packings.parameters.constant}


def _anchor(facts: StateFacts) -> dict[str, Any]:
    if facts.local_steps is None:
        return {}
    return packed_shapes(facts.mesh, facts.packings.parameters, facts.array_rows["anchor"])


def _outer_state(facts: StateFacts) -> dict[str, Any]:
    if facts.local_steps is None:
        return {}
    moving = moving_weights(facts.packings, _anchor(facts))
    return {i: leaf.shape for i, leaf in facts.local_steps.state_leaves(moving).items()}


def _outer_held(facts: StateFacts) -> OnReplicas:
    """Learners with late averages keep what they have sent and moved."""
    return OnReplicas.PART if facts.local_steps and facts.local_steps.sparse else OnReplicas.EQUAL


def _first_outer_state(engine: Any) -> dict[str, Any]:
    local_steps = engine.communication.local_steps
    if local_steps is None:
        return {}
    return local_steps.first_state(moving_weights(engine.packings, engine.layout["anchor"].shapes))


STATE_ARRAYS = (
    StateArray(
        "parameters",
        "weights",
        _parameters,
        held=as_learners_hold,
        adopted=Adopted.LEAVES,
        memory="weights",
        words="weights",
        on_host=lambda facts: facts.packings.parameters.on_host,
        leaves=LayerLeaves(
            "params",
            functools.partial(_run_leaves, "parameters"),
            lambda layer: layer.parameters,
        ),
        has_versions=True,
        in_forward_only=True,
    ),
    StateArray(
        "read_parameters",
        "weights",
        _read_parameters,
        held=as_learners_hold,
        adopted=Adopted.COMPUTED,
        memory="weights",
        words="read weights",
        has_versions=True,
    ),
    StateArray(
        "optimizer_state",
        "optimizer",
        _optimizer_state,
        held=_state_held,
        adopted=Adopted.LEAVES,
        memory="optimizer",
        words="optimizer",
        on_host=lambda facts: _state_packing(facts).on_host,
    ),
    StateArray(
        "mutable_state",
        "state",
        lambda facts: packed_shapes(None, facts.packings.mutable_state, facts.array_rows["mutable_state"]),
        held=as_learners_hold,
        adopted=Adopted.LEAVES,
        leaves=LayerLeaves(
            "mutable_state",
            functools.partial(_run_leaves, "state"),
            lambda layer: layer.state,
        ),
        in_forward_only=True,
    ),
    StateArray(
        "anchor",
        "weights",
        _anchor,
        adopted=Adopted.LEAVES,
        memory="weights",
        words="weights of the last outer step",
        leaves=LayerLeaves(
            "params",
            functools.partial(_run_leaves, "parameters"),
            lambda layer: layer.parameters,
        ),
    ),
    StateArray(
        "outer_state",
        "optimizer",
        _outer_state,
        held=_outer_held,
        adopted=Adopted.ANEW,
        memory="optimizer",
        words="outer optimizer",
        first=_first_outer_state,
    ),
    StateArray(
        "loss_scale",
        "state",
        lambda facts: facts.loss_scale.shapes() if facts.loss_scale else {},
        adopted=Adopted.WHOLE,
        first=_first_scale,
    ),
    StateArray(
        "gradient_compression",
        "compression",
        lambda facts: dict(facts.gradient_compression),
        held=apart_on_replicas,
        adopted=Adopted.ALIKE,
        memory="compression",
        words="compression of gradients",
        first=lambda engine: engine.first_gradient_compression(),
    ),
    StateArray(
        "message_compression",
        "compression",
        lambda facts: dict(facts.message_compression),
        held=apart_on_replicas,
        adopted=Adopted.ALIKE,
        words="compression of messages",
        first=lambda engine: engine.first_message_compression(),
        in_forward_only=True,
    ),
    StateArray(
        "gradients",
        "gradients",
        gradient_shapes,
        lives=Lives.IN_FLIGHT,
        held=lambda facts: OnReplicas.TERM,
        memory="gradients",
        on_host=lambda facts: facts.packings.accumulators.on_host,
    ),
    *(buffer(ring, "activations", functools.partial(_stash, ring), in_forward_only=True) for ring in RINGS),
    buffer("staged", "host stashes", _staged, in_forward_only=True),
    buffer(
        "host_stash",
        "host stashes",
        _host_stash,
        on_host=lambda facts: frozenset(facts.lowered.spills),
        in_forward_only=True,
    ),
    buffer("inbox", "messages", _inbox, in_forward_only=True),
    buffer(
        "sent_activations",
        "messages",
        functools.partial(_sent, "forward"),
        in_forward_only=True,
    ),
    buffer(
        "sent_gradients",
        "messages",
        functools.partial(_sent, "backward"),
        in_forward_only=True,
    ),
    buffer("received", "messages", _received, in_forward_only=True),
    buffer(
        "embedded",
        "vocabulary",
        lambda facts: stored_shapes(facts.mesh, facts.packings.embedded),
        in_forward_only=True,
    ),
    buffer(
        "head_input",
        "vocabulary",
        lambda facts: stored_shapes(facts.mesh, facts.packings.head_input),
        in_forward_only=True,
    ),
    buffer(
        "embedded_gradient",
        "vocabulary",
        lambda facts: stored_shapes(facts.mesh, _with_gradients(facts.packings.embedded)),
    ),
    buffer(HEAD_GRADIENT, "vocabulary", _head_gradient),
    # Of the microbatches of a minibatch that have run forward.
    buffer(
        "statistics",
        "state",
        lambda facts: packed_shapes(None, facts.packings.statistics, facts.array_rows["statistics"]),
    ),
    buffer("squared_norm", "state", _squared_norm),
    buffer("minibatch_weights", "batch", _minibatch_weights, words="weights of minibatches"),
    buffer("batches", "batch", _batches, words="kept minibatches", in_forward_only=True),
    StateArray("round", "state", _counter, lives=Lives.COUNTER, words="number of steps"),
    StateArray(
        "started",
        "state",
        _counter,
        lives=Lives.COUNTER,
        words="number of earlier microbatches",
    ),
    StateArray(
        "key",
        "state",
        lambda facts: _key_data(facts.key_impl),
        lives=Lives.COUNTER,
        words="random key",
    ),
)
"""Every array of a training state, in the order of the fields of `PipelineState`."""


def fields_that(live: Lives) -> list[str]:
    """The fields of `PipelineState` whose arrays live in one of these ways, in order."""
    return list(dict.fromkeys(a.field for a in STATE_ARRAYS if a.lives is live))


def arrays_with_versions() -> list[str]:
    """The names of the arrays with a row for every version of the weights."""
    return [array.name for array in STATE_ARRAYS if array.has_versions]


@suggests
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PipelineState:
    """The training state. A pytree; every array is split over the devices along its first axis.

    An array that a layer splits over another axis of the mesh ("model") is also split along its
    own dims; so are its gradient and its optimizer state.

    D is the number of devices of the pipeline, V the number of weight versions, R the most stages
    on one device.

    Attributes:
      parameters: packed weights, `[D * W, ...]`, W rows for the versions of a device's stages; `Pipeline.get_params`
        unpacks them.
      read_parameters: the weights that the hooks compute for a "forward" or a "backward", packed
        like `parameters`; empty without hooks or delays.
      optimizer_state: packed state of the Optax chain, `[D * R, ...]`; `[devices * R, ...]` if replicas
        share it.
      mutable_state: packed mutable state of the layers, `[D * R, ...]`;
        `Pipeline.get_mutable_state` unpacks it.
      anchor: the weights of the last outer step, packed like `parameters`; empty without `local_steps`.
      outer_state: the state of the outer optimizer, `[D * R, ...]` and `[D * fragments, ...]`, and of means in flight
        on each device; empty without.
      loss_scale: the loss scale and its counter, `[D]` each; empty without a loss scale.
      gradient_compression: the state of the compression of gradients on each device: "error", packed like
        `gradients`, and "states" of the compressor, `[devices * R, ...]`; empty without compression.
      message_compression: states of the compressors of messages on each device, `[devices * R, ...]`; empty without.
      gradients: packed gradient accumulators, `[devices * R, ...]`; zero between minibatches.
      buffers: activations and gradients in flight.
      round: int32 `[D]`, steps since `init` or `flush`.
      started: int32 `[D]`, microbatches of training before those steps.
      key: uint32 `[D, ...]`, the data of the random key of training.
      program: the `jpipe.program.Program` that knows the layout of the arrays; static.
    """

    parameters: Mapping[str, jax.Array]
    read_parameters: Mapping[str, Mapping[str, jax.Array]]
    optimizer_state: Mapping[str, jax.Array]
    mutable_state: Mapping[str, jax.Array]
    anchor: Mapping[str, jax.Array]
    outer_state: Mapping[str, jax.Array]
    loss_scale: Mapping[str, jax.Array]
    gradient_compression: Mapping[str, Any]
    message_compression: Mapping[str, Any]
    gradients: Mapping[str, jax.Array]
    buffers: Any
    round: jax.Array
    started: jax.Array
    key: jax.Array
    program: Any = dataclasses.field(metadata=dict(static=True))

    def __repr__(self) -> str:
        """Shapes and bytes. The numbers themselves would fill the screen."""

        def size(a: Any) -> int:
            return getattr(a, "size", 0) * getattr(a, "dtype", np.dtype(bool)).itemsize

        def line(name: str) -> str:
            leaves = jax.tree.leaves_with_path(getattr(self, name))
            texts = [
                f"{jax.tree_util.keystr(path)} {getattr(a, 'dtype', type(a).__name__)}{list(np.shape(a))}".strip()
                for path, a in leaves
            ]
            num_bytes = sum(size(a) for _, a in leaves)
            return f"  {name}: {num_bytes:,} bytes: {', '.join(texts) or 'nothing'}"

        names = [f.name for f in dataclasses.fields(self) if f.name != "program"]
        return "\n".join(["PipelineState(", *map(line, names), ")"])

    def arrays(self) -> collections.OrderedDict[str, Any]:
        """The arrays by field, in the order of the fields, without the program.

        Compiled functions take these. JAX keeps the structure of arguments after the function is gone, and the
        structure of a state holds the program.
        """
        names = (f.name for f in dataclasses.fields(self) if f.name != "program")
        return collections.OrderedDict((name, getattr(self, name)) for name in names)

    def kept(self) -> dict[str, Any]:
        """The arrays that hold the training between two minibatches, by the engine's names."""
        return self._that(Lives.KEPT)

    def in_flight(self) -> dict[str, Any]:
        """The arrays of minibatches that are not complete, by the engine's names."""
        return self._that(Lives.IN_FLIGHT)

    def counters(self) -> dict[str, jax.Array]:
        """The position in training: rounds, microbatches before them, and the random key."""
        return self._that(Lives.COUNTER)

    def _that(self, live: Lives) -> dict[str, Any]:
        return {name: getattr(self, name) for name in fields_that(live)}


def num_rounds(state: PipelineState) -> int:
    """Rounds since `init` or `flush`."""
    return int(state.round.addressable_data(0)[0])
