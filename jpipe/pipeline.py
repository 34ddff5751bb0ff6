"""The face of the library: `Pipeline(...)` and its training state."""

import dataclasses
import difflib
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.engine.engine import Engine
from jpipe.engine.loss_scale import LossScale
from jpipe.layers.as_layers import as_layers, shared_weights
from jpipe.layers.trace import Traced, shapes_text, shared_jit, trace_layers
from jpipe.mesh import DATA, STAGE, make_mesh
from jpipe.schedule import Schedule
from jpipe.schedules import forward_only
from jpipe.solvers.min_max import min_max
from jpipe.stages.cut import Stages, check_boundaries, cut
from jpipe.stages.optimizer import make_updates, stage_tree
from jpipe.stages.ties import resolve_ties
from jpipe.state import PipelineState, Program, rounds

if TYPE_CHECKING:
    from jpipe.plan.profile import Profile


class StageRecord(NamedTuple):
    """One row of `Pipeline.partition`.

    Attributes:
      stage: its number; device: the device it runs on, as a position along the axis "stage".
      layers: (first, one past the last); names: of the layers.
      num_parameters: how many numbers; parameter_bytes: their bytes.
      flops: floating-point operations, as XLA counts them, of forward and backward of
        one microbatch.
    """

    stage: int
    device: int
    layers: tuple[int, int]
    names: tuple[str, ...]
    num_parameters: int
    parameter_bytes: int
    flops: float


class Memory(NamedTuple):
    """Bytes that every device holds, by what for. In one program for all, that is the largest stage's share.

    Attributes:
      weights: all live versions, and those that `forward_params` and `backward_params` give.
      optimizer: the optimizer's state; gradients: the accumulators.
      activations: stashes and messages in flight; batch: the minibatch, or the replica's share of it.
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


class Pipeline:
    """Trains a model cut into stages over several devices, by a schedule.

    Args:
      layers: a sequence. Each a Flax NNX module (its weights are kept), a factory called as
        `factory(rngs=...) -> module` (initialised on its own stage), a Flax Linen module, `jpipe.Linen`,
        `jpipe.InitApply`, or `jpipe.Function(f)`. `jpipe.skip` gives any of them skip connections.
      loss: `(outputs, batch) -> scalar`, the mean over one microbatch.
      optimizer: any Optax chain that treats each layer by itself. It is called with the extra arguments `delay` and
        `backward_delay`, by how many updates the weights that the stage's forward and backward read are older than
        those that the gradient is applied to (the most over its microbatches), and `global_norm`, the norm of the
        gradient over all stages.
      schedule: one of `jpipe.schedules`, or a table of your own.
      boundaries: the layer index at which each stage after the first begins, or what to balance: "flops" as XLA
        counts them, "time" measured one layer at a time, or "memory" of weights, optimizer and activations in flight.
        None is "flops".
      mesh: has an axis "stage" of as many devices as the schedule; see `jpipe.make_mesh`. None makes it. Along an axis
        "data" the pipeline is replicated and the minibatch shared out. Other axes are left to the compiler, and
        parameters that Flax's `with_partitioning` annotates with one of them are stored split over it, as are their
        gradients and optimizer state, and the stashed activations that follow from them; messages between stages are
        whole on each of its devices. Names that are not of such an axis count as None, so a model runs on any mesh.
      recompute: "none"; "full": a stage keeps only its inputs, and runs its forward again before its backward; or a
        policy of `jax.checkpoint_policies`: a layer keeps its inputs and what the policy saves, and its backward
        computes the rest again, from the weights that the backward reads.
      compute_dtype: cast weights and activations to it in every layer, for example `jnp.bfloat16`; the weights that
        are kept, gradients and the outputs that the loss sees stay in the weights' own dtype. None casts nothing.
      loss_scale: a number, or a `jpipe.LossScale`, that the loss is multiplied by for its gradient, which float16
        needs. None scales nothing.
      has_aux: `loss` returns `(scalar, aux)`, aux a pytree of numbers. `step` returns the mean of each over the
        microbatches.
      ties: parameters that are one: each a sequence of `(layer, "dotted.path")`, of one shape. Their gradients are
        summed, and the optimizer sees them once, in the first of the layers. NNX modules that hold the same variable
        are tied without being named here.
      forward_params, backward_params: functions `(params, optimizer_state, delay) -> params` that give the weights which
        a forward or a backward really reads, such as `jpipe.optim.predicted_params` and `jpipe.optim.corrected_params`.
        They get what the optimizer sees of one stage, once after every update, and what they return is kept beside the
        weights. `delay` is the stage's forward delay, or for a backward how many updates newer its weights are than
        those of the forward; where it is 0 they are not asked. Under recompute a backward runs the forward again on
        the weights that the backward reads.
      overlap: whether messages between stages travel under compute: what a forward sends under the tick's backward,
        what a backward sends under the next tick's forward. False sends all at the end of a tick, and nothing in ticks
        without messages, which is faster on CPU devices, that share cores. None is False on CPU, else True.

    Randomness: layer i draws for microbatch m, counted from the start of training, on replica r of the pipeline from
    `fold_in(fold_in(fold_in(fold_in(key, num_layers), i), m), r)` with the key of `init`, so it draws the same at any
    number of stages. The n-th stream of an NNX module is that key, folded with n.

    Mutable state, such as the running statistics of batch norm: a microbatch is normalised by its own statistics, and
    running statistics move once a minibatch, by the statistics of all its microbatches on all replicas. Other state
    moves to the mean of what its microbatches left. What is not finite moves nothing.

    Raises:
      ValueError: for any argument that cannot work, before anything is compiled.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax
      >>> from flax import nnx
      >>> layers = [lambda rngs: nnx.Linear(4, 4, rngs=rngs) for _ in range(4)]
      >>> pipe = jpipe.Pipeline(
      ...     layers,
      ...     loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
      ...     optimizer=optax.sgd(0.1),
      ...     schedule=jpipe.schedules.one_f_one_b(num_stages=2, num_microbatches=4),
      ... )
      >>> batch = {"inputs": jnp.ones((8, 4)), "targets": jnp.zeros((8, 4))}
      >>> state = pipe.init(jax.random.key(0), batch)
      >>> state, metrics = pipe.step(state, batch)
      >>> int(metrics["num_microbatches"])
      4
    """

    def __init__(
        self,
        layers: Sequence,
        *,
        loss: Callable[[Any, Any], jax.Array],
        optimizer: optax.GradientTransformation,
        schedule: Schedule,
        boundaries: Sequence[int] | str | None = None,
        mesh: Mesh | None = None,
        recompute: str | Callable[..., Any] = "none",
        compute_dtype: Any = None,
        loss_scale: LossScale | float | None = None,
        has_aux: bool = False,
        ties: Sequence[Sequence[tuple[int, str]]] = (),
        forward_params: Callable[[Any, Any, Any], Any] | None = None,
        backward_params: Callable[[Any, Any, Any], Any] | None = None,
        overlap: bool | None = None,
    ):
        if not isinstance(schedule, Schedule):
            raise ValueError(
                f"`schedule` must be a `jpipe.Schedule`, got {schedule!r}. Make one with `jpipe.schedules`, for example "
                "`jpipe.schedules.one_f_one_b(num_stages=4, num_microbatches=8)`."
            )
        schedule.check()
        if schedule.forward_only:
            raise ValueError(
                f"`schedule` {schedule.name!r} is forward-only, and a pipeline trains. `Pipeline.predict` makes its own "
                "forward-only table."
            )
        if not callable(loss):
            raise ValueError(
                f"`loss` must be a function `(outputs, batch) -> scalar`, got {type(loss).__name__}."
            )
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise ValueError(
                f"`optimizer` must be an Optax transformation, such as `optax.sgd(0.1)`, got {type(optimizer).__name__}."
            )
        _check_recompute(recompute)
        self.layers = as_layers(layers)
        self.loss, self.optimizer, self.schedule = loss, optimizer, schedule
        self.recompute, self.compute_dtype = recompute, _floating(compute_dtype)
        self.loss_scale = _check_loss_scale(loss_scale, schedule)
        self.has_aux = has_aux
        self._hooks = _check_hooks(forward=forward_params, backward=backward_params)
        self.ties = [*shared_weights(layers), *_check_ties(ties)]
        self._balance = boundaries if isinstance(boundaries, str) else "flops"
        self._starts = check_boundaries(
            boundaries, len(self.layers), schedule.num_stages
        )
        self.mesh = _check_mesh(
            make_mesh(stage=schedule.num_devices, ring=schedule.ring)
            if mesh is None
            else mesh,
            schedule,
        )
        if overlap not in (None, True, False):
            raise ValueError(
                f"`overlap` must be True, False or None, got {overlap!r}. None lets the devices decide."
            )
        if overlap is None:
            overlap = self.mesh.devices.flat[0].platform != "cpu"
        self.overlap = overlap
        self._plans: dict = {}
        specs = (
            Engine.replicated_spec,
            Engine.per_device_spec_on(self.mesh),
            PartitionSpec(),
        )
        held, own, everywhere = (NamedSharding(self.mesh, spec) for spec in specs)
        if (
            self._automatic is not None
        ):  # arrays are split in ways of their own: `_parted` says how
            held = own = None
        options = dict(donate_argnums=0, out_shardings=(held, own, everywhere))
        self._step = jax.jit(self._run_step, **options)
        self._flush = jax.jit(self._run_flush, **options)
        self._predict = jax.jit(self._run_predict)
        self._evaluate = jax.jit(self._run_evaluate)

    # -- Plans

    def _plan(self, microbatch: Any, key_impl: Any = None) -> Program:
        """The plan for an abstract microbatch, made once."""
        if key_impl is None:
            key_impl = jax.config.jax_default_prng_impl
        leaves, tree = jax.tree.flatten(microbatch)
        shapes = tuple((a.shape, np.dtype(a.dtype)) for a in leaves)
        key = tree, shapes, str(key_impl)
        if key not in self._plans:
            traced = self._trace(self.loss, microbatch, key_impl)
            if self._starts is None:
                inner = self._balanced(traced, microbatch)
                self._starts = [0, *inner, len(self.layers)]
            stages = self._cut(traced)
            self._check_stages(stages)
            engine = Engine(
                self.schedule,
                stages,
                make_updates(stages, self.optimizer, self._hooks),
                self.mesh,
                recompute=self.recompute == "full",
                microbatch=microbatch,
                loss_scale=self.loss_scale,
                key_impl=key_impl,
                overlap=self.overlap,
            )
            self._plans[key] = Program(
                microbatch, traced, stages, engine, self.optimizer
            )
        return self._plans[key]

    @property
    def _automatic(self) -> Mesh | None:
        """The mesh of the axes alone that are left to the compiler; None if there are none."""
        sizes = self.mesh.shape.items()
        names = [name for name, n in sizes if name not in (STAGE, DATA) and n > 1]
        if not names:
            return None
        at = tuple(slice(None) if name in names else 0 for name, _ in sizes)
        kinds = (AxisType.Auto,) * len(names)
        return Mesh(self.mesh.devices[at], names, axis_types=kinds)

    def _trace(self, loss: Callable | None, microbatch: Any, key_impl: Any) -> Traced:
        return trace_layers(
            self.layers,
            loss,
            microbatch,
            compute_dtype=self.compute_dtype,
            has_aux=self.has_aux,
            key_impl=key_impl,
            policy=self.recompute if callable(self.recompute) else None,
            automatic=self._automatic,
        )

    def _balanced(self, traced: Traced, microbatch: Any) -> list[int]:
        """The boundaries that balance what is to be balanced."""
        from jpipe.plan.profile import (
            balance_by_memory,
            balance_by_time,
            operations_of,
            programs_of,
        )

        num_stages, facts = self.schedule.num_stages, self.schedule.facts()
        if self._balance == "time":
            split = self.schedule.splits_backward
            of = [programs_of(o, self._recompute_name) for o in operations_of(split)]
            found = self._measure(traced, microbatch, sorted({*itertools.chain(*of)}))
            return balance_by_time(found, num_stages, split=split)
        if self._balance == "memory":
            found = self._measure(traced, microbatch, ())
            in_flight = int(facts.in_flight.max())
            return balance_by_memory(found, num_stages, in_flight=in_flight)
        return min_max(traced.flops, num_stages)

    @property
    def _recompute_name(self) -> str:
        if callable(self.recompute):
            return getattr(self.recompute, "__name__", "policy")
        return self.recompute

    def _measure(
        self,
        traced: Traced,
        microbatch: Any,
        programs: Sequence[str],
        devices: Sequence[jax.Device] | None = None,
        **options,
    ) -> "Profile":
        from jpipe.plan.profile import profile

        if devices is None:
            here = jax.process_index()
            devices = [d for d in self.mesh.devices.flat if d.process_index == here][:1]
        return profile(
            traced,
            self.optimizer,
            microbatch,
            recompute=self._recompute_name,
            compute_dtype=self.compute_dtype,
            reads=list(self._hooks),
            ties=[
                [layer for layer, _ in copies]
                for copies in resolve_ties(traced.layers, self.ties)
            ],
            programs=programs,
            devices=devices,
            **options,
        )

    def _cut(self, traced: Traced) -> Stages:
        ties = resolve_ties(traced.layers, self.ties)
        return cut(traced, self._starts, self.schedule.num_stages, ties)

    def _check_stages(self, stages: Stages) -> None:
        """What depends on how the layers are cut."""
        for copies in stages.ties:
            where = sorted({stages.stage_of(layer) for layer, _ in copies})
            if len(where) > 1 and not self.schedule.synchronous:
                raise ValueError(
                    f"layers {', '.join(str(i) for i, _ in copies)} share weights but lie on stages "
                    f"{', '.join(map(str, where))}, which the asynchronous schedule {self.schedule.name!r} updates apart. "
                    "Choose `boundaries` that keep them on one stage, or a synchronous schedule."
                )
        if self.recompute == "full":
            for i, layer in enumerate(stages.layers):
                kind = stages.kinds[stages.kind_of_layer[i]]
                if any(kind.outputs_read_extra[1:]):
                    raise ValueError(
                        f"layer {i} ({layer.name}) reads its mutable state in training, which has moved on when "
                        '`recompute="full"` runs it again. Use `recompute="none"`, or a policy of '
                        "`jax.checkpoint_policies`."
                    )

    def _predictor(self, microbatch: Any, trained: Engine) -> Engine:
        traced = self._trace(None, microbatch, trained.key_impl)
        table = forward_only(
            self.schedule.num_stages,
            self.schedule.num_microbatches,
            stage=self.schedule.stage,
            device=self.schedule.device,
        )
        return Engine(
            table, self._cut(traced), None, self.mesh, trained=trained.lowered
        )

    def _microbatch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """The abstract microbatch of `batch`, or a clear error."""
        N, size, replicas = (
            num_microbatches or self.schedule.num_microbatches,
            _batch_size(batch),
            self.num_replicas,
        )
        parts = N * replicas
        if size % parts or size == 0:
            nearest = [n for n in (size // parts * parts, (size // parts + 1) * parts)]
            on = f' on each of the {replicas} replicas of axis "data"'
            raise ValueError(
                f"a batch of {size} cannot be cut into {N} equal microbatches{on if replicas > 1 else ''}. Use a batch of "
                f"{' or '.join(str(n) for n in nearest if n)}, or a schedule whose `num_microbatches` divides "
                f"{size if replicas == 1 else 'the share of a replica'}."
            )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (a.shape[0] // parts, *a.shape[1:]),
                jax.dtypes.canonicalize_dtype(a.dtype),
            ),
            dict(batch),
        )

    @property
    def num_replicas(self) -> int:
        """Replicas of the pipeline, along the axis "data" of the mesh."""
        return self.mesh.shape.get(DATA, 1)

    def _cut_batch(self, batch: Any) -> Any:
        """`[batch, ...]` to `[replicas, N, microbatch, ...]`: a replica gets consecutive rows."""
        lead = self.num_replicas, self.schedule.num_microbatches
        return jax.tree.map(
            lambda a: jnp.reshape(
                a, (*lead, a.shape[0] // math.prod(lead), *a.shape[1:])
            ),
            batch,
        )

    def _placed(self, batch: Any) -> Any:
        """The batch, each replica's rows on its own devices."""
        if self.num_replicas == 1:
            return batch
        sharding = NamedSharding(self.mesh, PartitionSpec(DATA))
        return jax.device_put(batch, sharding)

    # -- Training

    def init(
        self,
        key: jax.Array,
        batch: Any,
        params: Sequence | None = None,
        mutable_state: Sequence | None = None,
    ) -> PipelineState:
        """Makes the training state.

        A factory's layer number i is initialised from `jax.random.fold_in(key, i)` on the device of its own stage, so
        the weights depend on the key alone, not on the stages, and no device ever holds all of them.

        Args:
          key: seeds the weights of layers given as factories, and what layers draw in training.
          batch: a minibatch, or abstract arrays shaped like one; only its shapes matter.
          params: start from these weights, one nested dict a layer, as `get_params` returns them.
          mutable_state: start from this mutable state, as `get_mutable_state` returns it.

        Returns: A `PipelineState`.

        Raises:
          ValueError: if the batch cannot be cut into microbatches, a layer cannot take its inputs, the loss is not a
            scalar, or `params` or `mutable_state` do not fit the layers.
        """
        microbatch = self._microbatch(batch)
        key = _check_key(key)
        plan = self._plan(microbatch, jax.random.key_impl(key))
        layers = plan.stages.layers
        if params is not None:
            _check_fit("params", params, layers, "parameters")
            _check_ties_agree(params, plan.stages)
        if mutable_state is not None:
            _check_fit("mutable_state", mutable_state, layers, "state")
        init_layer = shared_jit(self.mesh.devices.flat[0].platform)
        given: Any = (params, mutable_state)

        def made(i: int):
            """Weights and mutable state of a layer."""
            own = [each and jax.tree.map(np.asarray, each[i]) for each in given]
            if all(each is not None for each in given):
                return own
            layer = layers[i]
            fresh = layer.given
            if fresh is None:
                fresh = init_layer(layer.init, jax.random.fold_in(key, i))
            return [
                a if each is not None else b for each, a, b in zip(given, own, fresh)
            ]

        def of_stage(s: int):
            per_layer: list = [None] * len(layers)
            mutable: list = [None] * len(layers)
            for i in plan.stages.layers_of(s):
                per_layer[i], mutable[i] = made(i)
            for copies in plan.stages.ties:
                here = [(i, j) for i, j in copies[1:] if per_layer[i] is not None]
                if here:
                    first, k = copies[0]
                    values = per_layer[first] if per_layer[first] else made(first)[0]
                    value = jax.tree.leaves(values)[k]
                    for i, j in here:
                        leaves, tree = jax.tree.flatten(per_layer[i])
                        leaves[j] = value
                        per_layer[i] = tree.unflatten(leaves)
            seen = stage_tree(plan.stages, s, per_layer)
            return per_layer, mutable, jax.jit(self.optimizer.init)(seen)

        training_key = jax.random.fold_in(key, len(layers))
        return self._new_state(plan, of_stage, training_key, 0)

    def _new_state(
        self, plan: Program, of_stage: Callable, key: jax.Array, started: int
    ) -> PipelineState:
        """A state with nothing in flight."""
        engine, num_devices = plan.engine, self.schedule.num_devices
        zeros = {
            **engine.globally(engine.per_device_shapes(), engine.per_device_spec),
            "round": engine.globally(
                jax.ShapeDtypeStruct((1,), jnp.int32), engine.replicated_spec
            ),
        }
        empty = jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), zeros),
            out_shardings=jax.tree.map(lambda a: a.sharding, zeros),
        )
        everywhere = NamedSharding(self.mesh, engine.replicated_spec)
        started = jnp.full(num_devices, started, jnp.int32)
        return PipelineState(
            **plan.pack(of_stage),
            **empty(),
            started=jax.device_put(started, everywhere),
            key=jax.device_put(jnp.broadcast_to(key, num_devices), everywhere),
            plan=plan,
        )

    def adopt(self, state: PipelineState) -> PipelineState:
        """The state of another pipeline of the same layers and optimizer, for this one to go on from.

        Schedule, stages, boundaries, mesh and recompute may differ; the minibatch stays as it is. Weights and optimizer
        state are kept.

        Args:
          state: of the other pipeline; not donated.

        Raises:
          ValueError: if the layers or the optimizer differ, or the minibatch cannot be cut into microbatches here.
        """
        _check_state(state)
        source = state.plan
        N = source.engine.schedule.num_microbatches
        batch = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((N * a.shape[0], *a.shape[1:]), a.dtype),
            source.microbatch,
        )
        if not source.engine.schedule.synchronous and rounds(state):
            raise ValueError(
                "`state` has microbatches in flight that only its own pipeline can complete. Flush it first: "
                "`state, metrics = other_pipe.flush(state)`."
            )
        params, mutable = source.parameters(state), source.mutable_state(state)
        plan = self._plan(self._microbatch(batch), source.engine.key_impl)
        _check_fit("params", params, plan.stages.layers, "parameters")
        _check_fit("mutable_state", mutable, plan.stages.layers, "state")
        inner = source.optimizer_state(state)

        def of_stage(s: int):
            mine, leaves = plan.stages.layers_of(s), []
            for path, want in plan.optimizer_paths(s).items():
                if path not in inner or inner[path].shape != want.shape:
                    raise ValueError(
                        f"`state` comes from a pipeline with another optimizer: this one keeps {path} of shape "
                        f"{want.shape}, which the state has not. Give both pipelines the same Optax chain."
                    )
                leaves.append(inner[path])
            return [
                [each[i] if i in mine else None for i in range(len(self.layers))]
                for each in (params, mutable)
            ] + [leaves]

        started = int(state.started.addressable_data(0)[0]) + rounds(state) * N
        key = state.key.addressable_data(0)[0]
        return self._new_state(plan, of_stage, key, started)

    def step(
        self, state: PipelineState, batch: Any
    ) -> tuple[PipelineState, dict[str, jax.Array]]:
        """One minibatch into the pipe, and one pass over the schedule's table.

        In a synchronous schedule every microbatch runs forward and backward and every stage updates once. In an
        asynchronous one microbatches of earlier minibatches finish while those of this one enter; nothing drains.

        Args:
          state: the training state; donated, so use the one returned from here on.
          batch: a minibatch: dict of arrays `[batch, ...]`; "inputs" feeds layer 0, the loss sees all.

        Returns: The new state and metrics: "loss", the mean over the microbatches whose loss was computed in this step, 0
        if there were none; "num_microbatches", how many that were; "gradient_norm", of the gradient over all stages
        before the optimizer, at the last update of the step; "skipped_updates" int32 `[S]`, 1 where a gradient that
        is not finite made a stage keep its weights; with `has_aux` "aux", means like the loss; with a loss scale
        "loss_scale", after the step.
        """
        self._check_own(state)
        microbatch = self._microbatch(batch)
        if self._plan(microbatch, state.plan.engine.key_impl) is not state.plan:
            raise ValueError(
                f"`state` was made for microbatches of {shapes_text(state.plan.microbatch)}, got a batch whose microbatches are "
                f"{shapes_text(microbatch)}. Keep the shape of the batch, or make a state for it by "
                "`init(key, batch, params=pipe.get_params(state))`."
            )
        return self._joined(state, *self._step(state, self._placed(dict(batch))))

    def _run_step(self, state: PipelineState, batch):
        num_entered = (state.round + 1) * self.schedule.num_microbatches
        return self._parted(*self._pass(state, num_entered, self._cut_batch(batch)))

    def _pass(self, state: PipelineState, num_entered, batch):
        """One pass over the table: the new state and metrics."""
        plan, engine = state.plan, state.plan.engine
        held, own, results = engine.run(
            state.replicated(), state.per_device(), state.counters(), num_entered, batch
        )
        columns = [d * engine.lowered.num_chunks + chunk for d, chunk in plan.placement]
        count = results["count"].sum()
        aux = [_mean(a.sum(axis=0), count) for a in results["aux"]]
        metrics = {
            "loss": _mean(results["loss"].sum(), count),
            "num_microbatches": count // self.num_replicas,
            "gradient_norm": results["gradient_norm"][0],
            "skipped_updates": results["skipped"][np.array(columns)],
        }
        if self.has_aux:
            metrics["aux"] = engine.stages.loss.aux_tree.unflatten(aux)
        if self.loss_scale is not None:
            metrics["loss_scale"] = held["loss_scale"]["scale"][0]
        state = dataclasses.replace(state, **held, **own, round=state.round + 1)
        return state, metrics

    def _parted(self, state: PipelineState, metrics: dict):
        """What a compiled function returns: arrays apart by where they lie."""
        held, own = {**state.replicated(), **state.counters()}, state.per_device()
        if self._automatic is not None:
            held, own = jax.tree.map(
                lambda a, want: jax.lax.with_sharding_constraint(a, want.sharding),
                (held, own),
                self._abstract_state(state.plan),
            )
        return held, own, metrics

    def _joined(self, state: PipelineState, held: dict, own: dict, metrics: dict):
        """The state from what a compiled function returned."""
        return dataclasses.replace(state, **held, **own), metrics

    def flush(self, state: PipelineState) -> tuple[PipelineState, dict[str, jax.Array]]:
        """Completes what is in flight, without new microbatches; nothing, in a synchronous schedule.

        The count of rounds restarts: a flushed state is a fresh one with the weights and optimizer state it has.

        Args:
          state: the training state; donated if the schedule is asynchronous.

        Returns: The new state, and metrics as of `step` over all that was in flight.
        """
        self._check_own(state)
        if self.schedule.synchronous:
            zero = jnp.zeros(self.schedule.num_stages, jnp.int32)
            metrics = {
                "loss": jnp.zeros(()),
                "num_microbatches": zero[0],
                "gradient_norm": jnp.zeros(()),
                "skipped_updates": zero,
            }
            if self.has_aux:
                loss = state.plan.stages.loss
                zeros = [jnp.zeros(a.shape, a.dtype) for a in loss.aux]
                metrics["aux"] = loss.aux_tree.unflatten(zeros)
            if self.loss_scale is not None:
                metrics["loss_scale"] = state.loss_scale["scale"][0]
            return state, metrics
        return self._joined(state, *self._flush(state))

    def _run_flush(self, state: PipelineState):
        lowered, newest = state.plan.engine.lowered, state.round[0]
        num_entered = state.round * self.schedule.num_microbatches

        def drain(state, _):
            return self._pass(state, num_entered, None)

        state, metrics = jax.lax.scan(drain, state, length=lowered.drain_rounds)
        V, D = lowered.num_versions, self.schedule.num_devices

        def newest_everywhere(a):
            versions = a.reshape(D, V, *a.shape[1:])
            latest = jnp.take(versions, newest[None] % V, axis=1)
            return jnp.broadcast_to(latest, versions.shape).reshape(a.shape)

        counts = metrics["num_microbatches"]

        def mean(values):
            weights = counts.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)
            return _mean((values * weights).sum(axis=0), counts.sum())

        metrics |= {
            "loss": mean(metrics["loss"]),
            "num_microbatches": counts.sum(),
            "gradient_norm": metrics["gradient_norm"][-1],
            "skipped_updates": metrics["skipped_updates"].sum(axis=0),
        }
        if self.has_aux:
            metrics["aux"] = jax.tree.map(mean, metrics["aux"])
        if self.loss_scale is not None:
            metrics["loss_scale"] = metrics["loss_scale"][-1]
        empty = jax.tree.map(
            jnp.zeros_like, {**state.per_device(), "round": state.round}
        )
        started = state.started + newest * self.schedule.num_microbatches
        newest_of = {
            name: jax.tree.map(newest_everywhere, getattr(state, name))
            for name in ("parameters", "read_parameters")
        }
        state = dataclasses.replace(state, **newest_of, started=started, **empty)
        return self._parted(state, metrics)

    def predict(self, state: PipelineState, batch: Any) -> Any:
        """The last layer's outputs, forward only, through the pipeline, with every layer in evaluation mode.

        Args:
          state: the training state; not donated.
          batch: dict whose "inputs" has a leading axis of any size: a size that the number of microbatches does not
            divide is padded with copies of the last row, whose outputs are dropped.

        Returns: The outputs, `[batch, ...]`.
        """
        self._check_own(state)
        only = (
            {k: v for k, v in batch.items() if k == "inputs"}
            if isinstance(batch, Mapping)
            else batch
        )
        size, padded = self._padded(only)
        outputs = self._predict(state, padded)
        return jax.tree.map(lambda a: a[:size], outputs)

    def evaluate(self, state: PipelineState, batch: Any) -> dict[str, Any]:
        """The loss of the newest weights, with every layer in evaluation mode.

        The loss is computed once, on all outputs together, so it is the loss of the batch whatever kind of mean it
        takes, and at any size of batch.

        Args:
          state: the training state; not donated.
          batch: as for `step`, with a leading axis of any size.

        Returns: "loss", and "aux" with `has_aux`, as the loss function returns them for the whole batch.
        """
        self._check_own(state)
        _, padded = self._padded(batch, only="inputs")
        return self._evaluate(state, padded["inputs"], dict(batch))

    def _padded(self, batch: Any, only: str | None = None) -> tuple[int, Any]:
        """The size of a batch, and the batch with copies of its last row up to a size that can be cut."""
        size = _batch_size(batch)
        if size == 0:
            raise ValueError("the batch is empty: give at least one row.")
        padding = -size % (self.schedule.num_microbatches * self.num_replicas)
        if only is not None:
            batch = {only: batch[only]}
        if padding:
            batch = jax.tree.map(
                lambda a: np.concatenate([a, np.repeat(a[-1:], padding, axis=0)]),
                dict(batch),
            )
        return size, self._placed(batch)

    def _run_evaluate(self, state: PipelineState, inputs, batch):
        outputs = self._run_predict(state, {"inputs": inputs})
        size = _batch_size(batch)
        result = self.loss(jax.tree.map(lambda a: a[:size], outputs), batch)
        loss, aux = result if self.has_aux else (result, None)
        return {"loss": loss, "aux": aux} if self.has_aux else {"loss": loss}

    def _run_predict(self, state: PipelineState, batch):
        engine = self._predictor(self._microbatch(batch), state.plan.engine)
        shapes = engine.globally(engine.buffer_shapes(), engine.per_device_spec)
        buffers = jax.tree.map(
            lambda a: jax.lax.with_sharding_constraint(
                jnp.zeros(a.shape, a.dtype), a.sharding
            ),
            shapes,
        )
        N, stages = self.schedule.num_microbatches, engine.stages
        num_entered = (state.round + 1) * N
        held = {
            "parameters": state.parameters,
            "mutable_state": state.mutable_state,
        }
        outputs = engine.run(
            held,
            {"buffers": buffers},
            state.counters(),
            num_entered,
            self._cut_batch(batch),
        )
        d = int(self.schedule.device[self.schedule.stage == stages.num_stages - 1][0])
        lead = self.num_replicas, self.schedule.num_devices, N
        flat = [
            y.reshape(*lead, *y.shape[1:])[:, d].reshape(-1, *y.shape[2:])
            for y in outputs
        ]
        return stages.outputs[1].unflatten(flat)

    def get_params(self, state: PipelineState) -> list:
        """The newest weights: one nested dict a layer, by attribute names, of host arrays."""
        self._check_own(state)
        return state.plan.parameters(state)

    def get_mutable_state(self, state: PipelineState) -> list:
        """The layers' mutable state, such as running statistics: one nested dict a layer, of host arrays."""
        self._check_own(state)
        return state.plan.mutable_state(state)

    # -- What it costs

    def partition(self, batch: Any) -> list[StageRecord]:
        """How the layers are cut: one record a stage, for minibatches shaped like `batch`."""
        plan = self._plan(self._microbatch(batch))
        records = []
        for s in range(plan.stages.num_stages):
            layers = plan.stages.layers_of(s)
            leaves = [
                a
                for i in layers
                for a in jax.tree.leaves(plan.stages.layers[i].parameters)
            ]
            records.append(
                StageRecord(
                    stage=s,
                    device=plan.placement[s][0],
                    layers=(layers.start, layers.stop),
                    names=tuple(self.layers[i].name for i in layers),
                    num_parameters=sum(math.prod(a.shape) for a in leaves),
                    parameter_bytes=sum(
                        math.prod(a.shape) * a.dtype.itemsize for a in leaves
                    ),
                    flops=sum(plan.traced.flops[i] for i in layers),
                )
            )
        return records

    def profile(
        self,
        batch: Any,
        *,
        cache: str | os.PathLike | None = None,
        num_microbatches: int | None = None,
        programs: Sequence[str] | None = None,
        min_seconds: float = 0.5,
        devices: Sequence[jax.Device] | None = None,
    ) -> "Profile":
        """Measures what each layer takes for one microbatch: see `jpipe.plan.profile`.

        Args:
          batch: a minibatch; the layers run on its first rows. Of abstract arrays the shapes alone are used.
          cache: a file that keeps the profile. If it fits this pipeline it is read and nothing is measured.
          num_microbatches: how many microbatches the minibatch makes; None: those of the schedule.
          programs: what to measure, of `jpipe.plan.profile.PROGRAMS`; None: all.
          min_seconds: how long each program is measured for, at the least.
          devices: where, all at once, as they share memory and cores in training; None: the mesh's first alone.

        Returns: A `jpipe.plan.profile.Profile`.

        Raises:
          ValueError: if the batch cannot be cut into microbatches, a layer cannot take its inputs, or the file is not a
            profile.
        """
        from jpipe.plan.profile import PROGRAMS

        if num_microbatches is not None and (
            not hasattr(num_microbatches, "__index__") or num_microbatches < 1
        ):
            raise ValueError(
                f"`num_microbatches` must be a whole number, at least 1, got {num_microbatches!r}."
            )
        microbatch = self._microbatch(batch, num_microbatches)
        traced = self._trace(self.loss, microbatch, jax.config.jax_default_prng_impl)

        def first_rows(a, want):
            if isinstance(a, jax.ShapeDtypeStruct):
                return want
            return np.asarray(a[: want.shape[0]], want.dtype)

        rows = jax.tree.map(first_rows, dict(batch), microbatch)
        return self._measure(
            traced,
            rows,
            PROGRAMS if programs is None else programs,
            devices,
            min_seconds=min_seconds,
            cache=cache,
        )

    def memory(self, batch: Any) -> Memory:
        """Bytes a device for minibatches shaped like `batch`. Compiles the step if it has not been."""
        engine = self._plan(self._microbatch(batch)).engine
        platform = self.mesh.devices.flat[0].platform

        def size(shapes) -> int:
            return sum(
                packing.array_bytes(
                    a.sharding.shard_shape(a.shape) if a.sharding else a.shape,
                    a.dtype,
                    platform,
                )
                for a in jax.tree.leaves(shapes)
            )

        reads, optimizer = engine.read_shapes(), size(engine.optimizer_shapes())
        weights = size(engine.parameter_shapes()) + size(reads)
        gradients = size(engine.gradient_shapes())
        stages, updates = engine.stages, engine.updates
        used = sum(
            engine.device_bytes(run.parameters, stages.parameters.arrays)
            for s in range(stages.num_stages)
            for _, run, _ in stages.layer_runs(s)
        )
        used_state = sum(
            engine.device_bytes(updates.programs[u].state, updates.state.arrays)
            for u in updates.program_of_stage
        )
        copies = engine.lowered.num_versions * (1 + len(reads)) + 1
        return Memory(
            weights=weights,
            optimizer=optimizer,
            gradients=gradients,
            activations=size(engine.buffer_shapes()),
            batch=size(jax.tree.map(_abstract, dict(batch))) // self.num_replicas,
            temporaries=int(self.compile(batch).memory_analysis().temp_size_in_bytes),
            padding=round(
                weights
                + optimizer
                + gradients
                - (used * copies + used_state) / self.schedule.num_devices
            ),
        )

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step for minibatches shaped like `batch`, traced and lowered but not compiled."""
        plan = self._plan(self._microbatch(batch))
        engine, (held, own) = plan.engine, self._abstract_state(plan)
        state = PipelineState(**held, **own, plan=plan)
        sharding = NamedSharding(self.mesh, engine.batch_spec)

        def placed(a):
            a = _abstract(a)
            if self.num_replicas == 1:
                return a
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return self._step.lower(state, jax.tree.map(placed, dict(batch)))

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The compiled step for minibatches shaped like `batch`: its memory, its cost, its text."""
        return self.lower(batch).compile()

    def _abstract_state(self, plan: Program) -> tuple[dict, dict]:
        """Abstract arrays of a state, with where they lie: what stages hold, and what is the devices' own."""
        engine, one = plan.engine, jax.ShapeDtypeStruct((1,), jnp.int32)
        impl = engine.key_impl
        key = jax.eval_shape(lambda: jax.random.key(0, impl=impl)[None])
        held = {**engine.replicated_shapes(), "round": one, "started": one, "key": key}
        return (
            engine.globally(held, engine.replicated_spec),
            engine.globally(engine.per_device_shapes(), engine.per_device_spec),
        )

    # -- Odds and ends

    def _check_own(self, state: Any) -> None:
        _check_state(state)
        if not any(plan is state.plan for plan in self._plans.values()):
            raise ValueError(
                "`state` was made by another pipeline, whose layout is another. Take it over with "
                "`state = pipe.adopt(state)`."
            )


def _check_fit(what: str, values: Any, layers: Sequence, attribute: str) -> None:
    """Refuses values, one nested dict a layer, that do not fit the layers."""
    if not isinstance(values, Sequence) or len(values) != len(layers):
        got = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise ValueError(
            f"`{what}` must be a list with one entry a layer ({len(layers)}), got {got}."
        )
    for i, (given, layer) in enumerate(zip(values, layers)):
        want, got = (
            {
                jax.tree_util.keystr(
                    p
                ): f"{getattr(a, 'dtype', type(a).__name__)}{list(np.shape(a))}"
                for p, a in jax.tree.leaves_with_path(t)
            }
            for t in (getattr(layer, attribute), given)
        )
        if want != got:
            path = next(
                p for p in itertools.chain(want, got) if want.get(p) != got.get(p)
            )
            raise ValueError(
                f"`{what}` of layer {i} ({layer.name}) do not fit: {path} should be {want.get(path, 'absent')}, got "
                f"{got.get(path, 'nothing')}. Pass what `get_{what}` of the same layers returned."
            )


def _check_ties_agree(params: Sequence, stages: Stages) -> None:
    for copies in stages.ties:
        values = [np.asarray(jax.tree.leaves(params[i])[j]) for i, j in copies]
        for (i, _), value in zip(copies[1:], values[1:]):
            if not np.array_equal(values[0], value):
                raise ValueError(
                    f"`params` hold different values in layers {copies[0][0]} and {i} for a weight that they share. "
                    "Give both the same."
                )


def _check_ties(ties: Any) -> list:
    """`ties` as a list, if it has the form it must have; `resolve_ties` checks what it names."""

    def is_place(place) -> bool:
        return (
            isinstance(place, Sequence)
            and len(place) == 2
            and hasattr(place[0], "__index__")
            and isinstance(place[1], str)
        )

    for tie in ties:
        if not (isinstance(tie, Sequence) and all(map(is_place, tie))):
            raise ValueError(
                f'each of `ties` must be a sequence of `(layer, "dotted.path")` pairs, such as '
                f'`[(0, "token.embedding"), (-1, "embedding")]`, got {tie!r}.'
            )
    return list(ties)


def _check_hooks(**hooks) -> dict[str, Callable]:
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise ValueError(
                f"`{name}_params` must be a function `(params, optimizer_state, delay) -> params`, such as "
                f"`jpipe.optim.{'predicted' if name == 'forward' else 'corrected'}_params`, got {type(hook).__name__}."
            )
    return {name: hook for name, hook in hooks.items() if hook is not None}


def _check_loss_scale(scale: Any, schedule: Schedule) -> LossScale | None:
    if scale is None:
        return None
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        scale = LossScale(float(scale), None, largest=np.inf)
    if not isinstance(scale, LossScale):
        raise ValueError(
            f"`loss_scale` must be a number, a `jpipe.LossScale` or None, got {scale!r}."
        )
    if scale.growth_interval is not None and not schedule.synchronous:
        raise ValueError(
            f"a loss scale that moves needs a synchronous schedule: in {schedule.name!r} gradients of several scales "
            f"would meet. Use a constant one, such as `loss_scale={scale.initial:g}`."
        )
    return scale


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / jnp.maximum(count, 1).astype(total.dtype)


def _check_state(state: Any) -> None:
    if not isinstance(state, PipelineState):
        raise ValueError(
            f"`state` must be the state that `init` or `step` returned, got {type(state).__name__}."
        )
    if any(isinstance(a, jax.Array) and a.is_deleted() for a in jax.tree.leaves(state)):
        raise ValueError(
            "`state` was donated to an earlier `step` and its arrays are gone. Keep the state that step returned: "
            "`state, metrics = pipe.step(state, batch)`."
        )


def _abstract(a) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))


def _batch_size(batch: Any) -> int:
    """The size of a minibatch, or a clear error."""
    if not isinstance(batch, Mapping) or "inputs" not in batch:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            '`batch` must be a dict of arrays with an entry "inputs", which feeds layer '
            f"0, got {got}."
        )
    sizes = {}
    for path, leaf in jax.tree.leaves_with_path(dict(batch)):
        name = f"batch{jax.tree_util.keystr(path)}"
        if len(getattr(leaf, "shape", ())) == 0:
            raise ValueError(
                f"`{name}` must be an array with a leading minibatch axis, got {leaf!r}."
            )
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"`{name}` must hold numbers or truths, got dtype {leaf.dtype}. Leave out "
                "what neither the model nor the loss reads."
            )
        sizes[name] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "every entry of `batch` must have the same leading axis, the minibatch, got "
            f"{sizes}."
        )
    return next(iter(sizes.values()))


def _floating(dtype: Any) -> np.dtype | None:
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found is not None and not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            "`compute_dtype` must be a floating-point dtype, such as `jnp.bfloat16`, or "
            f"None, got {dtype!r}."
        )
    return found


def _check_recompute(recompute: Any) -> None:
    policies = vars(jax.checkpoint_policies)
    makes_one = [
        name
        for name, policy in policies.items()
        if policy is recompute and name.startswith(("save_", "offload_"))
    ]
    if recompute in ("none", "full") or (callable(recompute) and not makes_one):
        return
    remedy = ""
    if makes_one:
        remedy = f" It makes one: `jax.checkpoint_policies.{makes_one[0]}(...)`."
    elif isinstance(recompute, str):
        name = recompute.rpartition(".")[2]
        for close in difflib.get_close_matches(name, ["none", "full", *policies], n=1):
            known = f"jax.checkpoint_policies.{close}" if close in policies else close
            remedy = f" Did you mean `{known}`?"
    raise ValueError(
        '`recompute` must be "none", "full" or a policy of `jax.checkpoint_policies`, got '
        f"{recompute!r}.{remedy}"
    )


def _check_key(key: Any) -> jax.Array:
    """The key, typed."""
    typed = isinstance(key, jax.Array) and (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape == (2,)
    )
    if not typed:
        raise ValueError(
            "`key` must be a key as `jax.random.key(seed)` makes it, got "
            f"{key if isinstance(key, int) else type(key).__name__}."
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return key


def _check_mesh(mesh: Mesh, schedule: Schedule) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {type(mesh).__name__}. Make it "
            f"with `jpipe.make_mesh(stage={schedule.num_devices})`."
        )
    sizes = dict(mesh.shape)
    if STAGE not in sizes:
        raise ValueError(
            f'`mesh` must have an axis "stage", got axes {sizes}. Make it with `jpipe.make_mesh`.'
        )
    if sizes[STAGE] != schedule.num_devices:
        raise ValueError(
            f'the axis "stage" of `mesh` must have the {schedule.num_devices} devices of schedule {schedule.name!r}, got '
            f"{sizes[STAGE]}. Use `jpipe.make_mesh(stage={schedule.num_devices})`, or a schedule for {sizes[STAGE]} devices."
        )
    return mesh
