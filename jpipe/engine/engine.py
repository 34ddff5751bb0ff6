"""The one executor: a lowered table, run by `shard_map`, `scan` and `ppermute`.

Every device runs the same program: a scan over the table's ticks. A tick is

    write what arrived into its inbox
    forward, backward, weight gradient, update: for each lane and program one
        cond(this device runs it now, do, leave the buffers as they are, buffers)
    one ppermute a channel, on ticks where anybody sends

in that order, because buffers stay in place if a tick writes them before it reads them. JAX's profiler shows each under
its name and stages, such as `forward/stage1-2`. Where messages can travel beside the compute, what a forward sends goes
under the tick's backwards, and what a backward sends under the next tick's forwards instead: see `Engine.overlap`. What
is kept from tick to tick lives in the donated training state: as temporaries of the step, the rings would be paged in
anew by every step. This is the only file that communicates.

Letters: T ticks, D devices, V weight versions, R columns a device, K slots of a ring, N microbatches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.engine.loss_scale import LossScale
from jpipe.layers.avals import is_inexact
from jpipe.lowering.lower import STASHES, Lowered, Route, lower
from jpipe.lowering.scalars import Columns, columns_of
from jpipe.mesh import DATA, STAGE
from jpipe.schedule import Schedule
from jpipe.stages.cut import StageProgram, Stages
from jpipe.stages.messages import find_routes
from jpipe.stages.optimizer import READERS, Slot, Updates, read_delays

_BIN = 1  # inboxes have a last slot that takes what nobody reads


@dataclasses.dataclass(frozen=True)
class Engine:
    """Runs a table on a mesh.

    Attributes:
      schedule: the table. A forward-only table collects the outputs of the last stage instead of losses.
      stages: the model, cut.
      updates: the optimizer, or None for a forward-only table.
      mesh: has an axis "stage" of the schedule's number of devices, and perhaps an axis "data" of replicas. Other
        axes are left to the compiler: weights, gradients and optimizer state are split over them as the layers say,
        stashed activations as the compiler would; messages and batches are whole on each of their devices.
      recompute: whether a stage keeps only its inputs from forward to backward.
      microbatch: the abstract microbatch.
      loss_scale: what the loss is multiplied by before its gradient is taken.
      key_impl: implementation of the random keys that layers get.
      trained: the lowered table that trained the weights which a forward-only table reads.
      overlap: whether nothing but what reads a message waits for it. Else all messages of a tick travel at its end, when
        every device has computed, which is better where devices share cores.

    Arrays are *held* by a stage, the same on all its replicas (weights, optimizer state, mutable state, loss scale),
    or a device's *own* (gradients, and all that is in flight).
    """

    schedule: Schedule
    stages: Stages
    updates: Updates | None
    mesh: Mesh
    recompute: bool = False
    microbatch: Any = None
    loss_scale: LossScale | None = None
    key_impl: Any = None
    trained: Lowered | None = None
    overlap: bool = False

    @functools.cached_property
    def routes(self) -> list[tuple[Route, packing.Packing]]:
        """Every kind of message: its way, and how it is packed."""
        stages = self.stages
        gradients = None if self.schedule.forward_only else stages.gradients
        return find_routes(
            stages.num_stages, stages.activations, gradients, stages.portals
        )

    @functools.cached_property
    def lowered(self) -> Lowered:
        routes = [route for route, _ in self.routes]
        return lower(self.schedule, self.recompute, routes, self.overlap)

    @functools.cached_property
    def columns(self) -> Columns:
        """The scalars of every tick."""
        stages, last = self.stages, self.stages.num_stages - 1
        ends = {
            "first": np.arange(last + 1) == 0,
            "last": np.arange(last + 1) == last,
        }
        layers = {"program": np.array(stages.program_of_stage), **ends}
        for r in range(max(map(len, stages.lengths))):
            layers[f"length{r}"] = np.array([sum(n[r : r + 1]) for n in stages.lengths])
            before = [sum(n[:r]) for n in stages.lengths]
            layers[f"layer{r}"] = np.add(stages.starts[:-1], before)
        of_stage = dict.fromkeys(("forward", "backward", "weight_grad"), layers)
        if self.updates is not None:
            of_stage["update"] = {
                "program": np.array(self.updates.program_of_stage),
                **{f"delay.{reader}": d for reader, d in self.delays.items()},
            }
        newest = None if self.trained is None else self.trained.newest
        return columns_of(self.lowered, of_stage, self.num_versions, newest)

    @functools.cached_property
    def tied(self) -> list[list["_Copy"]]:
        """The copies of each tied weight."""
        stages = self.stages
        at = {
            (layer, j): _Copy(*self.lowered.placement[s], place, row)
            for s in range(stages.num_stages)
            for layer, run, row in stages.layer_runs(s)
            for j, place in enumerate(run.parameters)
        }
        return [[at[copy] for copy in copies] for copies in stages.ties]

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage, along the axis "data"."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def num_versions(self) -> int:
        """V, weight versions that every device holds."""
        return (self.trained or self.lowered).num_versions

    # -- Arrays of the training state

    def parameter_shapes(self) -> dict:
        """Local shapes of the weights, `[V, R, ...]`."""
        return self._leading(
            self.stages.parameters, self.num_versions, self.lowered.num_chunks
        )

    @functools.cached_property
    def delays(self) -> dict[str, np.ndarray]:
        """Of the readers of weights, for each stage: see `update.read_delays`."""
        return read_delays(self.schedule)

    def read_shapes(self) -> dict:
        """Local shapes of the weights that the hooks give, by who reads them; none where no stage has a delay."""
        hooks = () if self.updates is None else self.updates.programs[0].reads
        return {
            name: self.parameter_shapes() for name in hooks if self.delays[name].any()
        }

    def gradient_shapes(self) -> dict:
        """Local shapes of the gradient accumulators, `[R, ...]`."""
        return self._leading(self.stages.parameters, self.lowered.num_chunks)

    def optimizer_shapes(self) -> dict:
        """Local shapes of the optimizer's state, `[R, ...]`."""
        return self._leading(self.updates.state, self.lowered.num_chunks)

    def mutable_shapes(self) -> dict:
        """Local shapes of the layers' mutable state, `[R, ...]`."""
        return _leading(self.stages.state, self.lowered.num_chunks)

    def replicated_shapes(self) -> dict:
        """Local shapes of what a stage holds."""
        scale = {} if self.loss_scale is None else self.loss_scale.shapes()
        return {
            "parameters": self.parameter_shapes(),
            "read_parameters": self.read_shapes(),
            "optimizer_state": self.optimizer_shapes(),
            "mutable_state": self.mutable_shapes(),
            "loss_scale": scale,
        }

    def per_device_shapes(self) -> dict:
        """Local shapes of what is a device's own."""
        return {"gradients": self.gradient_shapes(), "buffers": self.buffer_shapes()}

    def buffer_shapes(self) -> dict:
        """Local shapes of everything in flight."""
        lowered, stages = self.lowered, self.stages
        message = {route.inbox: pack for route, pack in self.routes}
        slots = lowered.num_slots
        shapes: dict[str, Any] = {
            "inbox": {
                k: _leading(m, slots[k] + _BIN) for k, m in message.items() if slots[k]
            },
            "rings": {
                k: self._leading(getattr(stages, k), slots[k])
                for k in STASHES
                if slots[k] and not self.schedule.forward_only
            },
            **{
                _sent(j): _leading(message[inbox])
                for j, (inbox, _) in enumerate(lowered.outgoing)
            },
            # What a backward sends under overlap arrives within a tick.
            "received": {
                i: _leading(message[next(iter(channel.arrives))])
                for i, channel in enumerate(lowered.channels)
                if channel.operation != "backward"
            },
        }
        if lowered.num_batches > 1:
            rows = lowered.num_batches * self.schedule.num_microbatches
            shapes["batches"] = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct((rows, *a.shape), a.dtype),
                self.microbatch,
            )
        if not self.schedule.forward_only:
            # Sums over the microbatches of a minibatch that have run forward.
            shapes["statistics"] = self.mutable_shapes()
            # The latest squared gradient norm of each column, for norms over all stages.
            shapes["squared_norm"] = jax.ShapeDtypeStruct(
                (lowered.num_chunks,), self.updates.norm_dtype
            )
        return shapes

    def _leading(self, pack: packing.Packing, *lead: int) -> dict:
        """Local shapes of arrays that may be split over automatic axes: then with the sharding that says how."""
        shapes = _leading(pack, *lead)
        for name, spec in pack.specs.items():
            dims = [None] * (len(lead) + 1) + list(spec)
            while dims[-1] is None:  # as XLA writes it: another would be compiled for
                dims.pop()
            sharding = NamedSharding(self.mesh, PartitionSpec(*dims))
            a = shapes[name]
            shapes[name] = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return shapes

    def device_bytes(self, places: Sequence[packing.Place], dtype_of: Mapping) -> int:
        """Bytes of the leaves at `places` on one device, one leaf a place."""
        return sum(
            math.prod(place.shape)
            * dtype_of[place.array].dtype.itemsize
            // math.prod(self.mesh.shape[axis] for axis in packing.axes(place.spec))
            for place in places
        )

    replicated_spec = PartitionSpec(STAGE)
    """How arrays that a stage holds are split along their first axis."""

    @staticmethod
    def per_device_spec_on(mesh: Mesh) -> PartitionSpec:
        """The same of arrays that are a device's own."""
        return PartitionSpec((DATA, STAGE) if DATA in mesh.shape else STAGE)

    @property
    def per_device_spec(self) -> PartitionSpec:
        return self.per_device_spec_on(self.mesh)

    @property
    def batch_spec(self) -> PartitionSpec:
        """The same of a minibatch."""
        return PartitionSpec(DATA if DATA in self.mesh.shape else None)

    def globally(self, shapes, spec: PartitionSpec):
        """Global abstract arrays, split along their first axis as `spec` says, whose local shapes are `shapes`."""
        parts = self.schedule.num_devices
        if spec == self.per_device_spec:
            parts *= self.num_replicas if DATA in self.mesh.shape else 1

        def whole(a):
            inner = () if a.sharding is None else a.sharding.spec[1:]
            sharding = NamedSharding(self.mesh, PartitionSpec(*spec, *inner))
            shape = (parts * a.shape[0], *a.shape[1:])
            return jax.ShapeDtypeStruct(shape, a.dtype, sharding=sharding)

        return jax.tree.map(whole, shapes)

    # -- The step

    def run(self, held, own, counters, num_entered, batch):
        """One pass over the table.

        Args:
          held, own: global arrays shaped as `replicated_shapes` and `per_device_shapes` say.
          counters: "round", int32 `[D]`: passes so far; "started", int32 `[D]`: microbatches before round 0; "key":
            `[D]`, the random key of training.
          num_entered: int32 `[D]`: microbatches that have entered the pipe since round 0, this round's included. Cells of
            others, before the first or after the last, do nothing.
          batch: pytree of `[replicas, N, microbatch, ...]` arrays; None if nothing enters.

        Returns: held and own, updated, and a dict of `[devices, ...]` results: "loss" and "aux" (sums), "count",
        "skipped" and "gradient_norm"; or `[devices * N, microbatch, ...]` outputs if the table is forward-only.
        """
        replicated_spec, per_device_spec = self.replicated_spec, self.per_device_spec
        results = (
            per_device_spec
            if self.schedule.forward_only
            else (replicated_spec, per_device_spec)
        )
        body = jax.shard_map(
            lambda held, own, counters, num_entered, batch: _Device(
                self, counters, num_entered[0]
            ).run(held, own, batch),
            mesh=self.mesh,
            in_specs=(
                replicated_spec,
                per_device_spec,
                replicated_spec,
                replicated_spec,
                self.batch_spec,
            ),
            out_specs=results
            if self.schedule.forward_only
            else (*results, per_device_spec),
            axis_names={STAGE, DATA} & set(self.mesh.axis_names),
            check_vma=False,
        )
        return body(held, own, counters, num_entered, batch)


class _Copy(NamedTuple):
    """One copy of a tied weight: the device and its column that hold it, and where."""

    device: int
    chunk: int
    place: packing.Place
    row: int


def _leading(pack: packing.Packing, *lead: int) -> dict:
    return {
        k: jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype)
        for k, a in pack.arrays.items()
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, in few words.

    Example:
      >>> _ranges([1, 2, 3, 5])
      '1-3,5'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _sent(j: int) -> str:
    """The name of the buffer with number j of `Lowered.outgoing`."""
    return f"sent{j}"


class _Device:
    """What one device does: the body of the shard_map."""

    def __init__(self, engine: Engine, counters, num_entered):
        self.engine, self.stages, self.lowered = engine, engine.stages, engine.lowered
        self.schedule = engine.schedule
        round_ = counters["round"][0]
        self.round, self.num_entered = round_, num_entered
        self.started, self.key = counters["started"][0], counters["key"][0]
        self.shard = lax.axis_index(DATA) if DATA in engine.mesh.shape else 0
        self.last = self.stages.num_stages - 1
        self.me = lax.axis_index(STAGE)
        self.tied = engine.tied
        self.columns = engine.columns

    def row(self, row: jax.Array, name: str) -> jax.Array:
        """A scalar of a tick."""
        return lax.index_in_dim(row, self.columns.index[name], keepdims=False)

    # -- The scan

    def run(self, held, own, batch):
        operations, lowered = self.lowered.operations, self.lowered
        buffers = own["buffers"]
        carry = dict(**held, gradients=own.get("gradients"), **buffers)
        # How many operations have run: whatever reads it waits for all of a tick.
        carry["ran"] = jnp.zeros((), jnp.int32)
        self._take_batch(carry, batch)
        if self.schedule.forward_only:
            N = self.schedule.num_microbatches
            leaves, _ = self.stages.outputs
            carry["outputs"] = [jnp.zeros((N, *y.shape), y.dtype) for y in leaves]
        else:
            loss = self.stages.loss
            results = {
                "loss": jnp.zeros((1,), loss.outputs[0].dtype),
                "aux": [jnp.zeros((1, *a.shape), a.dtype) for a in loss.aux],
                "count": jnp.zeros((1,), jnp.int32),
                "skipped": jnp.zeros((lowered.num_chunks,), jnp.int32),
                "gradient_norm": jnp.zeros((1,), self.engine.updates.norm_dtype),
            }
            carry |= results
        updating = (operations["update"].stage >= 0).any(axis=(1, 2))
        # The same on every device, so that a collective may hang on it.
        uniform = {
            "updates": updating,
            "sends": [channel.sends for channel in lowered.channels],
        }

        def run(name, do, carry, row):
            for lane in range(operations[name].num_lanes):
                with jax.named_scope(name):
                    carry = self._each_program(f"{name}{lane}", do, lane, carry, row)
            return carry

        def tick(carry, xs):
            row, uniform = xs
            move = functools.partial(self._move, row=row, sends=uniform["sends"])
            carry = self._receive(carry, row, carry["received"])
            gradients = move(carry, after="backward")
            carry = run("forward", self._forward, carry, row)
            carry = self._receive(carry, row, gradients)
            activations = move(carry, after="forward")
            carry = run("backward", self._backward, carry, row)
            carry = run("weight_grad", self._weight_grad, carry, row)
            if updating.any():
                with jax.named_scope("update"):
                    carry = lax.cond(
                        uniform["updates"],
                        functools.partial(self._update, row),
                        lambda c: c,
                        carry,
                    )
            return {**carry, "received": activations | move(carry, after=None)}, None

        N = self.schedule.num_microbatches
        rows = self.columns.of_device(
            self.me, self.round, self.started, self.num_entered, N
        )
        carry, _ = lax.scan(tick, carry, (rows, jax.tree.map(jnp.asarray, uniform)))
        if self.schedule.forward_only:
            return carry["outputs"]
        own = {
            "gradients": carry["gradients"],
            "buffers": {name: carry[name] for name in buffers},
        }
        results = {name: carry[name] for name in results}
        return {name: carry[name] for name in held}, own, results

    def _take_batch(self, carry: dict, batch) -> None:
        """Sets what the first stage and the loss read: this minibatch, and earlier ones that are still in flight."""
        N = self.schedule.num_microbatches
        batch = jax.tree.map(lambda a: a[0], batch)
        if "batches" in carry:
            if batch is not None:
                at = N * jnp.mod(self.round, self.lowered.num_batches)
                carry["batches"] = jax.tree.map(
                    lambda ring, new: lax.dynamic_update_slice_in_dim(
                        ring, new, at, 0, allow_negative_indices=False
                    ),
                    carry["batches"],
                    batch,
                )
            batch = carry["batches"]
        elif batch is None:  # nothing enters and nothing is in flight: read by nobody
            batch = jax.tree.map(
                lambda a: jnp.zeros((N, *a.shape), a.dtype), self.engine.microbatch
            )
        self.batch, self.inputs = (
            jax.tree.leaves(batch),
            jax.tree.leaves(batch["inputs"]),
        )

    def _each_program(
        self, lane_name: str, do: Callable, lane: int, carry: dict, row
    ) -> dict:
        """One cond a program: a switch over all of them would copy the buffers."""

        def get(field):
            return self.row(row, f"{lane_name}.{field}")

        for p, program in enumerate(self.stages.programs):
            writes, run = do(program, get, lane, carry)
            buffers = {name: carry[name] for name in writes}
            with jax.named_scope(f"stage{_ranges(program.stages)}"):
                done, ran = lax.cond(
                    get("program") == p,
                    lambda buffers, ran, run=run: (run(buffers), ran + 1),
                    lambda buffers, ran: (buffers, ran),
                    buffers,
                    carry["ran"],
                )
            carry = {**carry, **done, "ran": ran}
        return carry

    # -- Messages

    def _receive(self, carry: dict, row, received: Mapping[int, dict]) -> dict:
        """Writes messages, by channel, into their inboxes."""
        inbox = dict(carry["inbox"])
        for i, message in received.items():
            for box in self.lowered.channels[i].arrives:
                slot = self.row(row, f"channel{i}.{box}")
                inbox[box] = {
                    name: _put(array, message[name], slot)
                    for name, array in inbox[box].items()
                }
        return {**carry, "inbox": inbox}

    def _move(self, carry: dict, after: str | None, row, sends) -> dict[int, dict]:
        """The messages of the channels that carry what `after` sent, where they arrive."""
        received = {}
        for i, channel in enumerate(self.lowered.channels):
            if channel.operation != after:
                continue
            first, *others = channel.lanes
            payload = carry[_sent(first)]
            for j in others:
                chosen = self.row(row, f"channel{i}.lane") == j
                payload = jax.tree.map(
                    functools.partial(jnp.where, chosen), carry[_sent(j)], payload
                )

            def move(message, pairs=channel.pairs):
                if pairs is None:
                    return message
                return jax.tree.map(lambda a: lax.ppermute(a, STAGE, pairs), message)

            if after is None:
                # Sent in the middle of a tick, all devices would wait for each other twice.
                now = sends[i] & (carry["ran"] >= 0)
                payload = lax.cond(now, move, lambda message: message, payload)
            else:  # in a branch it would start and finish there
                payload = move(payload)
            received[i] = payload
        return received

    def _writes_sent(self, operation: str) -> list[str]:
        """The names of the messages that an operation sends."""
        own = {r.inbox for r, _ in self.engine.routes if r.operation == operation}
        return [
            _sent(j)
            for j, (inbox, _) in enumerate(self.lowered.outgoing)
            if inbox in own
        ]

    # -- Operations

    def _microbatch(
        self, leaves: Sequence[jax.Array], get: Callable
    ) -> list[jax.Array]:
        return [
            lax.dynamic_index_in_dim(
                a, get("microbatch"), keepdims=False, allow_negative_indices=False
            )
            for a in leaves
        ]

    def _stage_inputs(
        self, program: StageProgram, carry: dict, get: Callable
    ) -> list[jax.Array]:
        """The stage's inputs: from the batch on the first stage, from the inbox on others."""

        def from_inbox():
            places = self._message_places(program, -1, self.stages.activations)
            return packing.read_all(
                carry["inbox"]["activation"], places, [get("activation")]
            )

        return self._by_end(
            program,
            0,
            get("first"),
            lambda: self._microbatch(self.inputs, get),
            from_inbox,
        )

    def _by_end(
        self,
        program: StageProgram,
        end: int,
        is_end,
        at_end: Callable,
        elsewhere: Callable,
    ):
        """`at_end()` if the stage is stage `end`, else `elsewhere()`; decided here where the program allows."""
        if end not in program.stages:
            return elsewhere()
        if len(program.stages) == 1:
            return at_end()
        return lax.cond(is_end == 1, at_end, elsewhere)

    def _message_places(
        self, program: StageProgram, step: int, messages: packing.Packing
    ):
        """Places of the message from the stage before (step -1) or to the stage after (step 0)."""
        owners = [s + step for s in program.stages if 0 <= s + step < self.last]
        return messages.places[owners[0]]

    def _parameters(
        self, carry: dict, reader: str, run, get: Callable, i
    ) -> list[jax.Array]:
        """The weights of a layer that a "forward" or a "backward" reads."""
        arrays = carry.get("read_parameters", {}).get(reader, carry["parameters"])
        lead = [get("version"), get("chunk")]
        return packing.read_all(arrays, run.parameters, lead, i)

    def _extra(self, held: dict, run, kind, get: Callable, r: int, i) -> list:
        """What a layer gets beside parameters and inputs: its key and its mutable state."""
        key = jax.random.key_data(self.key)
        if kind.reads_extra[0]:
            key = jax.random.fold_in(self.key, get(f"layer{r}") + i)
            key = jax.random.fold_in(key, get("number"))
            key = jax.random.key_data(jax.random.fold_in(key, self.shard))
        if not run.state:
            return [key]
        state = packing.read_all(held["mutable_state"], run.state, [get("chunk")], i)
        return [key, *state]

    def _run_layers(
        self,
        program: StageProgram,
        carry: dict,
        get: Callable,
        x: list,
        *,
        reader: str = "forward",
        rings: dict | None = None,
        statistics: dict | None = None,
    ):
        """The stage's forward.

        Each layer's stash goes straight into `rings`, and what it tells of its mutable state is added to
        `statistics`; None keeps nothing. Returns outputs, skips that leave the stage, rings and statistics.
        """
        live = self._arrived_skips(program, carry, get)
        for r, run in enumerate(program.runs):
            kind = self.stages.layer_kinds[run.kind]
            popped = [leaf for name, _ in run.pop for leaf in live.pop(name)]

            def layer(i, state, r=r, run=run, kind=kind, popped=popped):
                x, rings, statistics = state
                parameters = self._parameters(carry, reader, run, get, i)
                extra = self._extra(carry, run, kind, get, r, i)
                if rings is None:
                    y, changes = kind.forward(parameters, [*x, *popped], extra)
                else:
                    y, kept, changes = kind.forward_and_stash(
                        parameters, [*x, *popped], extra
                    )
                    for ring, places, which in (
                        ("input_stash", run.input_stash, kind.input_stash),
                        ("weight_stash", run.weight_stash, kind.weight_stash),
                    ):
                        values = [kept[j] for j in which]
                        rings = self._write_stash(rings, ring, places, get, values, i)
                if statistics is not None and run.state:
                    for place, value in zip(run.state, changes, strict=True):
                        at = [get("chunk")]
                        statistics = packing.add(statistics, place, at, value, i)
                return y, rings, statistics

            y, rings, statistics = self._repeat(
                program, r, get, layer, (x, rings, statistics)
            )
            x, *kept = _split(y, [leaves for _, leaves in run.stash])
            live |= {name: values for (name, _), values in zip(run.stash, kept)}
        return x, live, rings, statistics

    def _commit(self, program: StageProgram, get: Callable, buffers: dict) -> dict:
        """Moves mutable state by the statistics of the minibatch that has just run forward whole."""

        def commit(buffers):
            state, sums = buffers["mutable_state"], buffers["statistics"]
            at = [get("chunk")]
            for r, run in enumerate(program.runs):
                held = self.stages.mutable[run.kind]

                def layer(i, arrays, run=run, held=held):
                    state, sums = arrays
                    old = packing.read_all(state, run.state, at, i)
                    mean = [
                        a / np.asarray(self.schedule.num_microbatches, a.dtype)
                        for a in packing.read_all(sums, run.state, at, i)
                    ]
                    new = held.commit(old, self._over_replicas(mean))
                    finite = jnp.stack([jnp.isfinite(a).all() for a in new]).all()
                    new = [jnp.where(finite, b, a) for a, b in zip(old, new)]
                    zeros = [jnp.zeros_like(a) for a in old]
                    state = packing.write_all(state, run.state, at, new, i)
                    return state, packing.write_all(sums, run.state, at, zeros, i)

                if run.state:
                    state, sums = self._repeat(program, r, get, layer, (state, sums))
            return {"mutable_state": state, "statistics": sums}

        moved = {name: buffers[name] for name in ("mutable_state", "statistics")}
        moved = lax.cond(get("completes") == 1, commit, lambda b: b, moved)
        return {**buffers, **moved}

    def _over_replicas(self, tree):
        """The mean over the replicas of a stage."""
        return lax.pmean(tree, DATA) if self.engine.num_replicas > 1 else tree

    # -- Skips

    def _portals(self, program: StageProgram, end: str):
        """Number and record of the portals that start ("source") or end ("target") in the program's one stage."""
        for i, portal in enumerate(self.stages.portals):
            if getattr(portal, end) in program.stages:
                yield i, portal

    def _arrived_skips(self, program: StageProgram, carry: dict, get: Callable) -> dict:
        """Name -> leaves of the skips that reach the stage from earlier ones."""
        found = {}
        for i, portal in self._portals(program, "target"):
            inbox, slot = carry["inbox"][f"skip{i}"], [get(f"skip{i}")]
            for name in portal.names:
                found[name] = packing.read_all(inbox, portal.places[name], slot)
        return found

    def _send_skips(
        self,
        program: StageProgram,
        buffers: dict,
        lane: int,
        live: dict,
        gradients: bool,
    ) -> dict:
        """The buffers with the stage's skips, or with the gradients of those it popped, among what is sent."""
        for i, portal in self._portals(program, "target" if gradients else "source"):
            inbox = f"skip{i}.gradient" if gradients else f"skip{i}"
            places = portal.gradient_places if gradients else portal.places
            if (inbox, lane) in self.lowered.outgoing:
                for name in portal.names:
                    buffers = self._sends(
                        buffers, inbox, lane, places[name], live[name]
                    )
        return buffers

    def _sends(self, buffers: dict, inbox: str, lane: int, places, values) -> dict:
        """The buffers with values among what is sent."""
        name = _sent(self.lowered.outgoing.index((inbox, lane)))
        return {**buffers, name: packing.write_all(buffers[name], places, [], values)}

    def _write_stash(
        self, rings: dict, ring: str, places, get: Callable, values, i=0
    ) -> dict:
        if not places:
            return rings
        return {
            **rings,
            ring: packing.write_all(rings[ring], places, [get(ring)], values, i),
        }

    def _read_stash(self, rings: dict, run, kind, get: Callable, i) -> list:
        stash = [None] * len(kind.stash)
        for ring, places, which in (
            ("input_stash", run.input_stash, kind.input_stash),
            ("weight_stash", run.weight_stash, kind.weight_stash),
        ):
            for j, place in zip(which, places):
                stash[j] = packing.read(rings[ring], place, [get(ring)], i)
        return stash

    def _repeat(
        self, program: StageProgram, r: int, get: Callable, layer: Callable, state
    ):
        """`layer(i, state)` for each layer of a run."""
        lengths = {self.stages.lengths[s][r] for s in program.stages}
        if lengths == {1}:
            return layer(0, state)
        return lax.fori_loop(
            0, lengths.pop() if len(lengths) == 1 else get(f"length{r}"), layer, state
        )

    def _reverse(
        self, program: StageProgram, r: int, get: Callable, layer: Callable, state
    ):
        """`layer(i, state)` for each layer of a run, the last first."""
        lengths = {self.stages.lengths[s][r] for s in program.stages}
        length = lengths.pop() if len(lengths) == 1 else get(f"length{r}")
        return self._repeat(
            program, r, get, lambda i, state: layer(length - 1 - i, state), state
        )

    def _forward(self, program: StageProgram, get: Callable, lane: int, carry: dict):
        collect = self.schedule.forward_only
        has_state = any(run.state for run in program.runs) and not collect
        writes = ["outputs"] if collect else ["rings", "loss", "aux", "count"]
        writes += self._writes_sent("forward")
        writes += ["mutable_state", "statistics"] if has_state else []
        stash = not (collect or self.engine.recompute)

        def run(buffers):
            x = self._stage_inputs(program, carry, get)
            y, skips, rings, statistics = self._run_layers(
                program,
                carry,
                get,
                x,
                rings=buffers["rings"] if stash else None,
                statistics=buffers["statistics"] if has_state else None,
            )
            if stash:
                buffers = {**buffers, "rings": rings}
            if has_state:
                buffers = {**buffers, "statistics": statistics}
                buffers = self._commit(program, get, buffers)
            buffers = self._send_skips(program, buffers, lane, skips, False)

            def at_end(buffers):
                if collect:
                    at = get("microbatch")
                    rows = [_put(o, v, at) for o, v in zip(buffers["outputs"], y)]
                    return {**buffers, "outputs": rows}
                (value,), aux, rings = self._loss(
                    program, buffers["rings"], get, y, stash
                )
                return {
                    **buffers,
                    "rings": rings,
                    "loss": buffers["loss"] + value[None],
                    "aux": [a + b[None] for a, b in zip(buffers["aux"], aux)],
                    "count": buffers["count"] + 1,
                }

            def elsewhere(buffers):
                places = self._message_places(program, 0, self.stages.activations)
                return self._sends(buffers, "activation", lane, places, y)

            return self._by_end(
                program,
                self.last,
                get("last"),
                lambda: at_end(buffers),
                lambda: elsewhere(buffers),
            )

        return writes, run

    def _loss(
        self, program: StageProgram, rings: dict, get: Callable, y: list, stash: bool
    ):
        """Value, aux, and the rings with the loss's stash."""
        batch = self._microbatch(self.batch, get)
        if not stash:
            return *self.stages.loss.forward([], y, batch), rings
        value, kept, aux = self.stages.loss.forward_and_stash([], y, batch)
        rings = self._write_stash(rings, "input_stash", program.loss_stash, get, kept)
        return value, aux, rings

    def _backward(self, program: StageProgram, get: Callable, lane: int, carry: dict):
        split = self.schedule.splits_backward
        writes = ["gradients", "rings"] if not split else ["rings"]
        writes += self._writes_sent("backward")

        def run(buffers):
            rings = buffers["rings"]
            if self.engine.recompute:
                x = self._stage_inputs(program, carry, get)
                y, _, rings, _ = self._run_layers(
                    program, carry, get, x, reader="backward", rings=rings
                )
                rings = self._by_end(
                    program,
                    self.last,
                    get("last"),
                    lambda: self._loss(program, rings, get, y, True)[-1],
                    lambda: rings,
                )

            def from_loss():
                stash = packing.read_all(
                    rings["input_stash"], program.loss_stash, [get("input_stash")]
                )
                one = (
                    jnp.ones((), self.stages.loss.outputs[0].dtype)
                    / self.schedule.num_microbatches
                )
                scale = self._scale(carry)
                if scale is not None:
                    one *= scale.astype(one.dtype)
                return self.stages.loss.backward([], stash, [one])[1]

            def from_inbox():
                places = self._message_places(program, 0, self.stages.gradients)
                return packing.read_all(
                    carry["inbox"]["gradient"], places, [get("gradient")]
                )

            gy = self._by_end(program, self.last, get("last"), from_loss, from_inbox)
            gradients = buffers.get("gradients")
            # Gradients of skips that the stage stashed; those it popped join them on the way.
            live = {}
            for i, portal in self._portals(program, "source"):
                inbox = f"skip{i}.gradient"
                for name in portal.names:
                    places = portal.gradient_places[name]
                    live[name] = (
                        packing.read_all(carry["inbox"][inbox], places, [get(inbox)])
                        if places
                        else []
                    )
            for r, layer_run in reversed(list(enumerate(program.runs))):
                kind = self.stages.layer_kinds[layer_run.kind]
                gy = [*gy, *(g for name, _ in layer_run.stash for g in live.pop(name))]

                def layer(i, state, layer_run=layer_run, kind=kind):
                    gy, rings, gradients = state
                    parameters = self._parameters(carry, "backward", layer_run, get, i)
                    stash = self._read_stash(rings, layer_run, kind, get, i)
                    if split:
                        gx, split_residuals = kind.input_grad(parameters, stash, gy)
                        rings = self._write_stash(
                            rings,
                            "split_residuals",
                            layer_run.split_residuals,
                            get,
                            split_residuals,
                            i,
                        )
                    else:
                        gp, gx = kind.backward(parameters, stash, gy)
                        gradients = _accumulate(gradients, layer_run, get, gp, i)
                    return gx, rings, gradients

                gy, rings, gradients = self._reverse(
                    program, r, get, layer, (gy, rings, gradients)
                )
                leaves = [
                    [a for a in leaves if is_inexact(a)] for _, leaves in layer_run.pop
                ]
                gy, *popped = _split(gy, leaves)
                live |= {name: g for (name, _), g in zip(layer_run.pop, popped)}
            buffers = {**buffers, "rings": rings}
            if not split:
                buffers["gradients"] = gradients
            buffers = self._send_skips(program, buffers, lane, live, True)

            def elsewhere():
                places = self._message_places(program, -1, self.stages.gradients)
                return self._sends(buffers, "gradient", lane, places, gy)

            return self._by_end(program, 0, get("first"), lambda: buffers, elsewhere)

        return writes, run

    def _weight_grad(
        self, program: StageProgram, get: Callable, lane: int, carry: dict
    ):
        def run(buffers):
            gradients = buffers["gradients"]
            for r, layer_run in enumerate(program.runs):
                kind = self.stages.layer_kinds[layer_run.kind]

                def layer(i, gradients, layer_run=layer_run, kind=kind):
                    parameters = self._parameters(carry, "backward", layer_run, get, i)
                    stash = [None] * len(kind.stash)
                    for j, place in zip(kind.weight_stash, layer_run.weight_stash):
                        stash[j] = packing.read(
                            carry["rings"]["weight_stash"],
                            place,
                            [get("weight_stash")],
                            i,
                        )
                    split_residuals = (
                        packing.read_all(
                            carry["rings"]["split_residuals"],
                            layer_run.split_residuals,
                            [get("split_residuals")],
                            i,
                        )
                        if layer_run.split_residuals
                        else []
                    )
                    return _accumulate(
                        gradients,
                        layer_run,
                        get,
                        kind.weight_grad(parameters, stash, split_residuals),
                        i,
                    )

                gradients = self._repeat(program, r, get, layer, gradients)
            return {"gradients": gradients}

        return ["gradients"], run

    # -- The update

    def _update(self, row, carry: dict) -> dict:
        """Runs where any device updates, on all: norms are gathered first, then each updates its own columns.

        A column skips its update if its gradient, or that of a column which applies the same minibatch at the same
        tick, is not finite.
        """
        lanes = range(self.lowered.operations["update"].num_lanes)
        chunks = jnp.arange(self.lowered.num_chunks, dtype=jnp.int32)

        def get(lane, field):
            return self.row(row, f"update{lane}.{field}")

        if self.engine.num_replicas > 1:
            for lane in lanes:
                gradients = lax.cond(
                    get(lane, "program") >= 0,
                    functools.partial(self._reduce_replicas, get(lane, "chunk")),
                    lambda gradients: gradients,
                    carry["gradients"],
                )
                carry = {**carry, "gradients": gradients}
        for copies in self.tied:
            carry = self._sum_tied(copies, carry)
        dtype = self.engine.updates.norm_dtype
        squares = [
            jnp.sum(jnp.square(a.astype(dtype)), axis=tuple(range(1, a.ndim)))
            for a in carry["gradients"].values()
        ]
        squares = functools.reduce(jnp.add, squares, jnp.zeros(len(chunks), dtype))
        version = jnp.full(len(chunks), -1, jnp.int32)
        for lane in lanes:
            mine = (chunks == get(lane, "chunk")) & (get(lane, "program") >= 0)
            version = jnp.where(mine, get(lane, "absolute_version"), version)
        latest = jnp.where(version >= 0, squares, carry["squared_norm"])
        all_latest, all_versions = lax.all_gather((latest, version), STAGE)
        broken = ~jnp.isfinite(all_latest) & (all_versions >= 0)
        global_norm = jnp.sqrt(jnp.sum(all_latest))
        scale = self._scale(carry)
        if scale is not None:
            global_norm /= scale.astype(dtype)
            arrays = self.engine.loss_scale.after_update(
                carry["loss_scale"], ~broken.any()
            )
            carry = {**carry, "loss_scale": arrays}
        carry = {**carry, "squared_norm": latest, "gradient_norm": global_norm[None]}
        for lane in lanes:
            skip = jnp.any(broken & (all_versions == get(lane, "absolute_version")))
            mine = functools.partial(get, lane)
            for u, update in enumerate(self.engine.updates.programs):
                now = mine("program") == u
                carry = self._apply(update, mine, now, skip, global_norm, scale, carry)
        for copies in self.tied:
            carry = self._spread_tied(copies, carry)
        return {**carry, "ran": carry["ran"] + 1}

    def _scale(self, carry: dict):
        """What the gradients are multiplied by, or None."""
        if self.engine.loss_scale is None:
            return None
        return carry["loss_scale"]["scale"][0]

    def _reduce_replicas(self, chunk, gradients: dict) -> dict:
        """The mean of a column's gradients over its replicas."""
        mine = {
            name: lax.dynamic_index_in_dim(a, chunk) for name, a in gradients.items()
        }
        return {
            name: _put(gradients[name], a, chunk)
            for name, a in self._over_replicas(mine).items()
        }

    # -- Tied weights: the first copy gets the gradients of all, so norms count them once and one stage updates them;
    # the others take over its value.

    def _sum_tied(self, copies: Sequence[_Copy], carry: dict) -> dict:
        gradients, total = carry["gradients"], 0
        for copy in copies:
            at = gradients, copy.place, [copy.chunk]
            mine = packing.read(*at, copy.row)
            total += jnp.where(self.me == copy.device, mine, 0)
        if len({copy.device for copy in copies}) > 1:
            total = lax.psum(total, STAGE)
        for copy in copies:
            at = copy.place, [copy.chunk]
            value = total if copy is copies[0] else jnp.zeros_like(total)
            old = packing.read(gradients, *at, copy.row)
            value = jnp.where(self.me == copy.device, value, old)
            gradients = packing.write(gradients, *at, value, copy.row)
        return {**carry, "gradients": gradients}

    def _spread_tied(self, copies: Sequence[_Copy], carry: dict) -> dict:
        """Gives the copies of other columns the value of the first."""
        others = [copy for copy in copies if copy[:2] != copies[0][:2]]
        if not others:
            return carry
        parameters, first = carry["parameters"], copies[0]
        at = [0, first.chunk]  # schedules that tie stages have one version
        value = packing.read(parameters, first.place, at, first.row)
        value = lax.psum(jnp.where(self.me == first.device, value, 0), STAGE)
        for copy in others:
            at = copy.place, [0, copy.chunk]
            old = packing.read(parameters, *at, copy.row)
            new = jnp.where(self.me == copy.device, value, old)
            parameters = packing.write(parameters, *at, new, copy.row)
        return {**carry, "parameters": parameters}

    def _apply(
        self, update, get: Callable, now, skip, global_norm, scale, carry: dict
    ) -> dict:
        """Updates a column by the program `update`, if `now`, part by part; leaves its gradients empty.

        All arrays stay in place: a group of parts is a loop whose length the compiler does not know, so it does not
        unroll it and copy; a part computes in a branch of its own, or what it reads would be read again, from copies,
        behind its writes.
        """
        delays = [get(f"delay.{reader}").astype(jnp.float32) for reader in READERS]
        forward, ahead = delays
        given = [forward, forward - ahead, global_norm, *delays][: update.num_given]
        old = jnp.mod(get("absolute_version") - 1, self.engine.num_versions)

        def at(slot: Slot, i, version) -> list[tuple[packing.Place, list]]:
            """The places of part i's leaf, and the leading indices there."""
            versioned = slot.arrays not in ("gradients", "optimizer_state")
            lead = [version, get("chunk")] if versioned else [get("chunk")]
            return [
                (dataclasses.replace(place, base=jnp.asarray(starts)[i]), lead)
                for place, starts in slot.copies
            ]

        def load(slots: Sequence[Slot], i, arrays: dict) -> list[jax.Array]:
            """Leaves as they were before the update."""
            source = {"gradients": carry["gradients"], **arrays}
            return [packing.read(source[s.arrays], *at(s, i, old)[0]) for s in slots]

        def scaled_down(slots: Sequence[Slot], values: Sequence) -> list[jax.Array]:
            return [
                v / scale.astype(v.dtype)
                if slot.arrays == "gradients" and scale is not None
                else v
                for slot, v in zip(slots, values, strict=True)
            ]

        names = ("parameters", "optimizer_state")
        arrays = {**{n: carry[n] for n in names}, **carry["read_parameters"]}
        done = jnp.int32(0)
        shared = scaled_down(update.shared, load(update.shared, 0, arrays))
        for group in update.groups:
            kept = [j for j, slot in enumerate(group.outputs) if slot.arrays in arrays]
            written = [group.outputs[j] for j in kept]

            def part(i, state, group=group, kept=kept, written=written):
                arrays, done = state
                inputs, before = (load(s, i, arrays) for s in (group.inputs, written))

                def compute():
                    mine = scaled_down(group.inputs, inputs)
                    values = group.run(*mine, *shared, *given)
                    return [values[j] for j in kept]

                values = lax.cond(skip, lambda: before, compute)
                for slot, value in zip(written, values, strict=True):
                    for place, lead in at(slot, i, get("version")):
                        new = packing.write(arrays[slot.arrays], place, lead, value)
                        arrays = {**arrays, slot.arrays: new}
                return arrays, done + 1

            times = now.astype(jnp.int32) * group.num_parts
            arrays, done = lax.fori_loop(0, times, part, (arrays, done))
        reads = {reader: arrays[reader] for reader in carry["read_parameters"]}
        chunk = get("chunk")
        return {
            **carry,
            **{n: arrays[n] for n in names},
            "read_parameters": reads,
            # Once all parts are done, or gradients would be copied for those.
            "gradients": _emptied(carry["gradients"], chunk, done > 0),
            "skipped": carry["skipped"].at[chunk].add((now & skip).astype(jnp.int32)),
        }


def _put(array: jax.Array, row: jax.Array, at) -> jax.Array:
    """`array` with one of its rows replaced."""
    return lax.dynamic_update_index_in_dim(
        array, row, at, 0, allow_negative_indices=False
    )


def _emptied(gradients: dict, chunk, now) -> dict:
    """A column's gradients set to 0 if `now`, row by row, in place."""

    def emptied(array: jax.Array) -> jax.Array:
        rows = array.shape[1] if array.ndim > 2 else 1  # of a pool, or a vector
        zeros = jnp.zeros((1, array.shape[1] // rows, *array.shape[2:]), array.dtype)

        def row(i, array):
            start = [chunk, i, *[jnp.int32(0)] * (array.ndim - 2)]
            return lax.dynamic_update_slice(
                array, zeros, start, allow_negative_indices=False
            )

        return lax.fori_loop(0, now.astype(jnp.int32) * rows, row, array)

    return {name: emptied(array) for name, array in gradients.items()}


def _split(leaves: Sequence, tails: Sequence[Sequence]) -> list[list]:
    """`leaves` cut into what comes first and one list as long as each of `tails`."""
    parts, end = [], len(leaves)
    for tail in reversed(tails):
        parts.append(list(leaves[end - len(tail) : end]))
        end -= len(tail)
    return [list(leaves[:end]), *reversed(parts)]


def _accumulate(gradients: dict, run, get: Callable, values: Sequence, i) -> dict:
    for place, value in zip(run.parameters, values, strict=True):
        gradients = packing.add(gradients, place, [get("chunk")], value, i)
    return gradients
