"""The one executor: a lowered table, run by `shard_map`, `scan` and `ppermute`.

Every device runs the same program: a scan over the table's ticks. A tick is

    write what arrived into its inbox
    forward, backward, weight gradient, update: for each lane and program one
        cond(this device runs it now, do, leave the buffers as they are, buffers)
    one ppermute a channel, on ticks where anybody sends

in that order, because buffers stay in place if a tick writes them before it reads them. What is kept from
tick to tick lives in the donated training state: as temporaries of the step, the rings would be paged in anew
by every step. This is the only file that communicates.

Letters: T ticks, D devices, V weight versions, R columns a device, K slots of a ring, N microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.lower import Lowered, Operations, lower
from jpipe.schedule import Schedule
from jpipe.stages import Program, Stages
from jpipe.update import Updates

AXIS = "stage"
_BIN = 1  # inboxes have a last slot that takes what nobody reads


@dataclasses.dataclass(frozen=True)
class Engine:
    """Runs a table on a mesh.

    Attributes:
      schedule: the table. A forward-only table collects the outputs of the last stage instead of losses.
      stages: the model, cut.
      updates: the optimizer, or None for a forward-only table.
      mesh: has an axis "stage" of the schedule's number of devices.
      recompute: whether a stage keeps only its inputs from forward to backward.
      microbatch: the abstract microbatch.
      trained: the lowered table that trained the weights which a forward-only table reads.
    """

    schedule: Schedule
    stages: Stages
    updates: Updates | None
    mesh: Mesh
    recompute: bool = False
    microbatch: Any = None
    trained: Lowered | None = None

    @functools.cached_property
    def lowered(self) -> Lowered:
        share = self.stages.activations.arrays == self.stages.gradients.arrays
        return lower(self.schedule, self.recompute, share)

    @property
    def num_versions(self) -> int:
        """V, weight versions that every device holds."""
        return (self.trained or self.lowered).num_versions

    # -- Arrays of the training state

    def parameter_shapes(self) -> dict:
        """Local shapes of the weights, `[V, R, ...]`."""
        return _leading(
            self.stages.parameters, self.num_versions, self.lowered.num_chunks
        )

    def gradient_shapes(self) -> dict:
        """Local shapes of the gradient accumulators, `[R, ...]`."""
        return _leading(self.stages.parameters, self.lowered.num_chunks)

    def optimizer_shapes(self) -> dict:
        """Local shapes of the optimizer's state, `[R, ...]`."""
        return _leading(self.updates.state, self.lowered.num_chunks)

    def buffer_shapes(self) -> dict:
        """Local shapes of everything in flight."""
        lowered, stages = self.lowered, self.stages
        message = {"activation": stages.activations, "gradient": stages.gradients}
        slots = lowered.num_slots
        shapes: dict[str, Any] = {
            "inbox": {
                k: _leading(m, slots[k] + _BIN) for k, m in message.items() if slots[k]
            },
            "rings": {
                k: _leading(getattr(stages, k), slots[k])
                for k in ("input_stash", "weight_stash", "crossing")
                if slots[k] and not self.schedule.forward_only
            },
            "sent": [
                _leading(stages.activations)
                for _ in range(lowered.operations["forward"].num_lanes)
            ]
            + [
                _leading(stages.gradients)
                for _ in range(lowered.operations["backward"].num_lanes)
            ],
            "received": [
                _leading(message[channel.carries[0]]) for channel in lowered.channels
            ],
        }
        if lowered.num_batches > 1:
            rows = lowered.num_batches * self.schedule.num_microbatches
            shapes["batches"] = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct((rows, *a.shape), a.dtype),
                self.microbatch,
            )
        if not self.schedule.forward_only:
            # The latest squared gradient norm of each column, for norms over all stages.
            shapes["squared_norm"] = jax.ShapeDtypeStruct(
                (lowered.num_chunks,), np.float32
            )
        return shapes

    def globally(self, shapes):
        """Global abstract arrays, split over "stage" along their first axis, whose local shapes are `shapes`."""
        D, sharding = (
            self.schedule.num_devices,
            NamedSharding(self.mesh, PartitionSpec(AXIS)),
        )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (D * a.shape[0], *a.shape[1:]), a.dtype, sharding=sharding
            ),
            shapes,
        )

    # -- The step

    def run(self, parameters, gradients, optimizer_state, buffers, round_, fed, batch):
        """One pass over the table.

        Args:
          parameters, gradients, optimizer_state, buffers: global arrays shaped as the methods above say.
          round_: int32 `[D]`: passes so far.
          fed: int32 `[D]`: microbatches that have entered the pipe since round 0, this round's included. Cells of
            others, before the first or after the last, do nothing.
          batch: pytree of `[N, microbatch, ...]` arrays, held by every device; None if nothing enters.

        Returns: the first four, updated, and a dict of `[D, ...]` results: "loss" (sum), "count" and "skipped"; or
        `[D * N, microbatch, ...]` outputs if the table is forward-only.
        """
        split, whole = PartitionSpec(AXIS), PartitionSpec()
        body = jax.shard_map(
            lambda *args: _Device(self, args[4][0], args[5][0]).run(*args[:4], args[6]),
            mesh=self.mesh,
            in_specs=(split, split, split, split, split, split, whole),
            out_specs=split,
            check_vma=False,
        )
        return body(parameters, gradients, optimizer_state, buffers, round_, fed, batch)


def _leading(pack: packing.Packing, *lead: int) -> dict:
    return {
        k: jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype)
        for k, a in pack.arrays.items()
    }


class _Row:
    """A tick's scalars, by name, in one vector: computed for all ticks at once, sliced once a tick."""

    def __init__(self, columns: Mapping[str, jax.Array]):
        self._names = {name: i for i, name in enumerate(columns)}
        self.table = jnp.stack([c.astype(jnp.int32) for c in columns.values()], axis=1)

    def __call__(self, row: jax.Array, name: str) -> jax.Array:
        return lax.index_in_dim(row, self._names[name], keepdims=False)


class _Device:
    """What one device does: the body of the shard_map."""

    def __init__(self, engine: Engine, round_, fed):
        self.engine, self.stages, self.lowered = engine, engine.stages, engine.lowered
        self.schedule = engine.schedule
        self.round, self.fed = round_, fed
        self.last = self.stages.num_stages - 1
        self.me = lax.axis_index(AXIS)
        self.columns: dict[str, jax.Array] = {}
        for name, operations in self.lowered.operations.items():
            for lane in range(operations.num_lanes):
                self._operation_columns(f"{name}{lane}", name, operations, lane, round_)
        for i, channel in enumerate(self.lowered.channels):
            self._put(f"channel{i}.lane", channel.lane)
            for inbox in channel.carries:
                stage, position = (
                    self._mine(a)
                    for a in jnp.moveaxis(jnp.asarray(getattr(channel, inbox)), 2, 0)
                )
                slot = self._slot(inbox, stage, position, round_)
                self._put(
                    f"channel{i}.{inbox}",
                    jnp.where(stage < 0, self.lowered.num_slots[inbox], slot),
                    mine=True,
                )
        self.row = _Row(self.columns)

    # -- Scalars of a tick

    def _mine(self, table) -> jax.Array:
        return lax.dynamic_index_in_dim(
            jnp.asarray(table), self.me, axis=1, keepdims=False
        )

    def _put(self, name: str, values, mine: bool = False) -> None:
        self.columns[name] = values if mine else self._mine(values)

    def _slot(self, ring: str, stage, position, round_) -> jax.Array:
        depth = jnp.asarray(np.maximum(self.lowered.depth[ring], 1), jnp.int32)[stage]
        offset = jnp.asarray(self.lowered.offset[ring], jnp.int32)[stage]
        return offset + jnp.mod(
            round_ * self.schedule.num_microbatches + position, depth
        )

    def _operation_columns(
        self, lane_name: str, name: str, operations: Operations, lane: int, round_
    ) -> None:
        stage, chunk, microbatch, position, version = (
            self._mine(getattr(operations, f)[..., lane])
            for f in ("stage", "chunk", "microbatch", "position", "version")
        )
        programs = (
            self.engine.updates.program_of_stage
            if name == "update"
            else self.stages.program_of_stage
        )
        of_stage = {
            "program": np.array(programs),
            "first": np.arange(self.last + 1) == 0,
        }
        of_stage["last"] = np.arange(self.last + 1) == self.last
        if name == "update":
            of_stage["delay"] = self.schedule.facts().forward_delay
        else:
            most = max(len(lengths) for lengths in self.stages.lengths)
            for r in range(most):
                of_stage[f"length{r}"] = np.array(
                    [n[r] if r < len(n) else 0 for n in self.stages.lengths]
                )
        N = self.schedule.num_microbatches
        if name == "update":
            first, last = round_ + version >= 1, (round_ + version) * N <= self.fed
        else:
            absolute = round_ * N + microbatch
            first, last = absolute >= 0, absolute < self.fed
        busy = (stage >= 0) & first & last
        for field, values in of_stage.items():
            values = jnp.asarray(np.asarray(values).astype(np.int32))[stage]
            self._put(
                f"{lane_name}.{field}",
                jnp.where(busy, values, -1) if field == "program" else values,
                mine=True,
            )
        self._put(f"{lane_name}.chunk", chunk, mine=True)
        rows = self.lowered.num_batches * N
        at = microbatch if rows == N else jnp.mod(round_ * N + microbatch, rows)
        self._put(f"{lane_name}.microbatch", at, mine=True)
        if self.engine.trained is not None:
            newest = jnp.asarray(self.engine.trained.newest, jnp.int32)[stage]
            version = jnp.maximum(round_ + newest, 0) - round_
        self._put(f"{lane_name}.absolute_version", round_ + version, mine=True)
        self._put(
            f"{lane_name}.version",
            jnp.mod(round_ + version, self.engine.num_versions),
            mine=True,
        )
        for ring, slots in self.lowered.num_slots.items():
            if slots:
                self._put(
                    f"{lane_name}.{ring}",
                    self._slot(ring, stage, position, round_),
                    mine=True,
                )

    # -- The scan

    def run(self, parameters, gradients, optimizer_state, buffers, batch):
        operations, lowered = self.lowered.operations, self.lowered
        carry = dict(
            parameters=parameters,
            gradients=gradients,
            optimizer_state=optimizer_state,
            **buffers,
        )
        self._take_batch(carry, batch)
        if self.schedule.forward_only:
            N = self.schedule.num_microbatches
            outputs = self.stages.kinds[self.stages.kind_of_layer[-1]].outputs
            carry["outputs"] = [jnp.zeros((N, *y.shape), y.dtype) for y in outputs]
        else:
            carry["loss"] = jnp.zeros((1,), self.stages.loss.outputs[0].dtype)
            carry["count"] = jnp.zeros((1,), jnp.int32)
            carry["skipped"] = jnp.zeros((lowered.num_chunks,), jnp.int32)
        updating = (operations["update"].stage >= 0).any(axis=(1, 2))
        # The same on every device, so that a collective may hang on it.
        uniform = {
            "updates": updating,
            "sends": [channel.sends for channel in lowered.channels],
        }

        def tick(carry, xs):
            row, uniform = xs
            carry = self._receive(carry, row)
            for name, do in (
                ("forward", self._forward),
                ("backward", self._backward),
                ("weight_grad", self._weight_grad),
            ):
                for lane in range(operations[name].num_lanes):
                    carry = self._each_program(f"{name}{lane}", do, lane, carry, row)
            if updating.any():
                carry = lax.cond(
                    uniform["updates"],
                    functools.partial(self._update, row),
                    lambda c: c,
                    carry,
                )
            return self._send(carry, row, uniform["sends"]), None

        carry, _ = lax.scan(
            tick, carry, (self.row.table, jax.tree.map(jnp.asarray, uniform))
        )
        if self.schedule.forward_only:
            return carry["outputs"]
        buffers = {name: carry[name] for name in buffers}
        results = {name: carry[name] for name in ("loss", "count", "skipped")}
        return (
            carry["parameters"],
            carry["gradients"],
            carry["optimizer_state"],
            buffers,
            results,
        )

    def _take_batch(self, carry: dict, batch) -> None:
        """Sets what the first stage and the loss read: this minibatch, and earlier ones that are still in flight."""
        N = self.schedule.num_microbatches
        if "batches" in carry:
            if batch is not None:
                at = N * jnp.mod(self.round, self.lowered.num_batches)
                carry["batches"] = jax.tree.map(
                    lambda ring, new: lax.dynamic_update_slice_in_dim(ring, new, at, 0),
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
            carry = {
                **carry,
                **lax.cond(get("program") == p, run, lambda b: b, buffers),
            }
        return carry

    # -- Messages

    def _receive(self, carry: dict, row) -> dict:
        inbox = dict(carry["inbox"])
        for i, channel in enumerate(self.lowered.channels):
            for kind in channel.carries:
                slot = self.row(row, f"channel{i}.{kind}")
                arrays = {}
                for name, array in inbox[kind].items():
                    value = carry["received"][i][name]
                    arrays[name] = lax.dynamic_update_index_in_dim(
                        array, value, slot, 0
                    )
                inbox[kind] = arrays
        return {**carry, "inbox": inbox}

    def _send(self, carry: dict, row, sends) -> dict:
        received = []
        for i, channel in enumerate(self.lowered.channels):
            payload = carry["sent"][channel.lanes[0]]
            for lane in channel.lanes[1:]:
                chosen = self.row(row, f"channel{i}.lane") == lane
                payload = jax.tree.map(
                    functools.partial(jnp.where, chosen), carry["sent"][lane], payload
                )

            def move(message, pairs=channel.pairs):
                return (
                    message
                    if pairs is None
                    else jax.tree.map(lambda a: lax.ppermute(a, AXIS, pairs), message)
                )

            received.append(lax.cond(sends[i], move, lambda message: message, payload))
        return {**carry, "received": received}

    # -- Operations

    def _microbatch(
        self, leaves: Sequence[jax.Array], get: Callable
    ) -> list[jax.Array]:
        return [
            lax.dynamic_index_in_dim(a, get("microbatch"), keepdims=False)
            for a in leaves
        ]

    def _stage_inputs(
        self, program: Program, carry: dict, get: Callable
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
        self, program: Program, end: int, is_end, at_end: Callable, elsewhere: Callable
    ):
        """`at_end()` if the stage is stage `end`, else `elsewhere()`; decided here where the program allows."""
        if end not in program.stages:
            return elsewhere()
        if len(program.stages) == 1:
            return at_end()
        return lax.cond(is_end == 1, at_end, elsewhere)

    def _message_places(self, program: Program, step: int, messages: packing.Packing):
        """Places of the message from the stage before (step -1) or to the stage after (step 0)."""
        owners = [s + step for s in program.stages if 0 <= s + step < self.last]
        return messages.places[owners[0]]

    def _parameters(self, carry: dict, run, get: Callable, i) -> list[jax.Array]:
        return packing.read_all(
            carry["parameters"], run.parameters, [get("version"), get("chunk")], i
        )

    def _run_layers(
        self,
        program: Program,
        carry: dict,
        get: Callable,
        rings: dict,
        x: list,
        stash: bool,
    ):
        """The stage's forward; writes each layer's stash straight into the rings."""
        for r, run in enumerate(program.runs):
            kind = self.stages.kinds[run.kind]

            def layer(i, state, run=run, kind=kind):
                x, rings = state
                parameters = self._parameters(carry, run, get, i)
                if not stash:
                    return kind.forward(parameters, x), rings
                y, kept = kind.forward_and_stash(parameters, x)
                rings = self._write_stash(
                    rings,
                    "input_stash",
                    run.input_stash,
                    get,
                    [kept[j] for j in kind.input_stash],
                    i,
                )
                rings = self._write_stash(
                    rings,
                    "weight_stash",
                    run.weight_stash,
                    get,
                    [kept[j] for j in kind.weight_stash],
                    i,
                )
                return y, rings

            x, rings = self._repeat(program, r, get, layer, (x, rings))
        return x, rings

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

    def _repeat(self, program: Program, r: int, get: Callable, layer: Callable, state):
        """`layer(i, state)` for each layer of a run."""
        lengths = {self.stages.lengths[s][r] for s in program.stages}
        if lengths == {1}:
            return layer(0, state)
        return lax.fori_loop(
            0, lengths.pop() if len(lengths) == 1 else get(f"length{r}"), layer, state
        )

    def _reverse(self, program: Program, r: int, get: Callable, layer: Callable, state):
        """`layer(i, state)` for each layer of a run, the last first."""
        lengths = {self.stages.lengths[s][r] for s in program.stages}
        length = lengths.pop() if len(lengths) == 1 else get(f"length{r}")
        return self._repeat(
            program, r, get, lambda i, state: layer(length - 1 - i, state), state
        )

    def _forward(self, program: Program, get: Callable, lane: int, carry: dict):
        collect = self.schedule.forward_only
        writes = ["outputs"] if collect else ["rings", "loss", "count"]
        writes += ["sent"] if self.last else []
        stash = not (collect or self.engine.recompute)

        def run(buffers):
            x = self._stage_inputs(program, carry, get)
            y, rings = self._run_layers(
                program, carry, get, buffers.get("rings", {}), x, stash
            )
            if "rings" in buffers:
                buffers = {**buffers, "rings": rings}

            def at_end(buffers):
                if collect:
                    at = get("microbatch")
                    rows = [
                        lax.dynamic_update_index_in_dim(o, v, at, 0)
                        for o, v in zip(buffers["outputs"], y)
                    ]
                    return {**buffers, "outputs": rows}
                (value,), rings = self._loss(program, buffers["rings"], get, y, stash)
                return {
                    **buffers,
                    "rings": rings,
                    "loss": buffers["loss"] + value[None],
                    "count": buffers["count"] + 1,
                }

            def elsewhere(buffers):
                places = self._message_places(program, 0, self.stages.activations)
                message = packing.write_all(buffers["sent"][lane], places, [], y)
                return {**buffers, "sent": _replaced(buffers["sent"], lane, message)}

            return self._by_end(
                program,
                self.last,
                get("last"),
                lambda: at_end(buffers),
                lambda: elsewhere(buffers),
            )

        return writes, run

    def _loss(self, program: Program, rings: dict, get: Callable, y: list, stash: bool):
        batch = self._microbatch(self.batch, get)
        if not stash:
            return self.stages.loss.forward([], y, batch), rings
        value, kept = self.stages.loss.forward_and_stash([], y, batch)
        return value, self._write_stash(
            rings, "input_stash", program.loss_stash, get, kept
        )

    def _backward(self, program: Program, get: Callable, lane: int, carry: dict):
        split = self.schedule.splits_backward
        writes = ["gradients", "rings"] if not split else ["rings"]
        writes += ["sent"] if self.last else []

        def run(buffers):
            rings = buffers["rings"]
            if self.engine.recompute:
                x = self._stage_inputs(program, carry, get)
                y, rings = self._run_layers(program, carry, get, rings, x, True)
                rings = self._by_end(
                    program,
                    self.last,
                    get("last"),
                    lambda: self._loss(program, rings, get, y, True)[1],
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
                return self.stages.loss.backward([], stash, [one])[1]

            def from_inbox():
                places = self._message_places(program, 0, self.stages.gradients)
                return packing.read_all(
                    carry["inbox"]["gradient"], places, [get("gradient")]
                )

            gy = self._by_end(program, self.last, get("last"), from_loss, from_inbox)
            gradients = buffers.get("gradients")
            for r, layer_run in reversed(list(enumerate(program.runs))):
                kind = self.stages.kinds[layer_run.kind]

                def layer(i, state, layer_run=layer_run, kind=kind):
                    gy, rings, gradients = state
                    parameters = self._parameters(carry, layer_run, get, i)
                    stash = self._read_stash(rings, layer_run, kind, get, i)
                    if split:
                        gx, crossing = kind.input_grad(parameters, stash, gy)
                        rings = self._write_stash(
                            rings, "crossing", layer_run.crossing, get, crossing, i
                        )
                    else:
                        gp, gx = kind.backward(parameters, stash, gy)
                        gradients = _accumulate(gradients, layer_run, get, gp, i)
                    return gx, rings, gradients

                gy, rings, gradients = self._reverse(
                    program, r, get, layer, (gy, rings, gradients)
                )
            buffers = {**buffers, "rings": rings}
            if not split:
                buffers["gradients"] = gradients
            at = self.lowered.operations["forward"].num_lanes + lane

            def elsewhere():
                places = self._message_places(program, -1, self.stages.gradients)
                message = packing.write_all(buffers["sent"][at], places, [], gy)
                return {**buffers, "sent": _replaced(buffers["sent"], at, message)}

            return self._by_end(program, 0, get("first"), lambda: buffers, elsewhere)

        return writes, run

    def _weight_grad(self, program: Program, get: Callable, lane: int, carry: dict):
        def run(buffers):
            gradients = buffers["gradients"]
            for r, layer_run in enumerate(program.runs):
                kind = self.stages.kinds[layer_run.kind]

                def layer(i, gradients, layer_run=layer_run, kind=kind):
                    parameters = self._parameters(carry, layer_run, get, i)
                    stash = [None] * len(kind.stash)
                    for j, place in zip(kind.weight_stash, layer_run.weight_stash):
                        stash[j] = packing.read(
                            carry["rings"]["weight_stash"],
                            place,
                            [get("weight_stash")],
                            i,
                        )
                    crossing = (
                        packing.read_all(
                            carry["rings"]["crossing"],
                            layer_run.crossing,
                            [get("crossing")],
                            i,
                        )
                        if layer_run.crossing
                        else []
                    )
                    return _accumulate(
                        gradients,
                        layer_run,
                        get,
                        kind.weight_grad(parameters, stash, crossing),
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
        squares = [
            jnp.sum(jnp.square(a.astype(jnp.float32)), axis=tuple(range(1, a.ndim)))
            for a in carry["gradients"].values()
        ]
        squares = functools.reduce(
            jnp.add, squares, jnp.zeros(len(chunks), jnp.float32)
        )
        version = jnp.full(len(chunks), -1, jnp.int32)

        def get(lane, field):
            return self.row(row, f"update{lane}.{field}")

        for lane in lanes:
            mine = (chunks == get(lane, "chunk")) & (get(lane, "program") >= 0)
            version = jnp.where(mine, get(lane, "absolute_version"), version)
        latest = jnp.where(version >= 0, squares, carry["squared_norm"])
        all_latest, all_versions = lax.all_gather((latest, version), AXIS)
        broken = ~jnp.isfinite(all_latest) & (all_versions >= 0)
        global_norm = jnp.sqrt(jnp.sum(all_latest))
        carry = {**carry, "squared_norm": latest}
        for lane in lanes:
            skip = jnp.any(broken & (all_versions == get(lane, "absolute_version")))
            for u, update in enumerate(self.engine.updates.programs):
                run = functools.partial(
                    self._apply, update, functools.partial(get, lane), skip, global_norm
                )
                buffers = {
                    name: carry[name]
                    for name in (
                        "parameters",
                        "optimizer_state",
                        "gradients",
                        "skipped",
                    )
                }
                carry = {
                    **carry,
                    **lax.cond(get(lane, "program") == u, run, lambda b: b, buffers),
                }
        return carry

    def _apply(self, update, get: Callable, skip, global_norm, buffers: dict) -> dict:
        old = jnp.mod(get("absolute_version") - 1, self.engine.num_versions)
        chunk = get("chunk")

        def apply(parameters, state):
            values = [
                packing.read(parameters, place, [old, chunk], i)
                for place, i in update.parameters
            ]
            gradients = [
                packing.read(buffers["gradients"], place, [chunk], i)
                for place, i in update.parameters
            ]
            inner = packing.read_all(state, update.state, [chunk])
            delay = get("delay").astype(jnp.float32)
            values, inner = update.function(
                values, gradients, inner, delay, global_norm
            )
            for (place, i), value in zip(update.parameters, values, strict=True):
                parameters = packing.write(
                    parameters, place, [get("version"), chunk], value, i
                )
            return parameters, packing.write_all(state, update.state, [chunk], inner)

        def keep(parameters, state):
            for place, i in update.parameters if self.engine.num_versions > 1 else ():
                value = packing.read(parameters, place, [old, chunk], i)
                parameters = packing.write(
                    parameters, place, [get("version"), chunk], value, i
                )
            return parameters, state

        parameters, state = lax.cond(
            skip, keep, apply, buffers["parameters"], buffers["optimizer_state"]
        )
        gradients = {
            name: lax.dynamic_update_index_in_dim(
                a, jnp.zeros(a.shape[1:], a.dtype), chunk, 0
            )
            for name, a in buffers["gradients"].items()
        }
        skipped = buffers["skipped"].at[chunk].add(skip.astype(jnp.int32))
        return dict(
            parameters=parameters,
            optimizer_state=state,
            gradients=gradients,
            skipped=skipped,
        )


def _replaced(values: Sequence, at: int, value) -> list:
    return [value if i == at else v for i, v in enumerate(values)]


def _accumulate(gradients: dict, run, get: Callable, values: Sequence, i) -> dict:
    for place, value in zip(run.parameters, values, strict=True):
        gradients = packing.add(gradients, place, [get("chunk")], value, i)
    return gradients
