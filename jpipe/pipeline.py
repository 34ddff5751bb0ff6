"""The face of the library: `Pipeline(...)`, its training state, and `make_mesh`."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.backward import jaxpr_text
from jpipe.engine import AXIS, Engine
from jpipe.lower import Lowered
from jpipe.schedule import Schedule
from jpipe.schedules import forward_only
from jpipe.stages import (
    as_layers,
    check_boundaries,
    cut,
    shapes_text,
    trace_layers,
)
from jpipe.state import PipelineState, Plan, rounds
from jpipe.update import make_updates


def make_mesh(*, stage: int, devices: Sequence | None = None) -> Mesh:
    """A mesh of `stage` devices along the axis "stage".

    Args:
      stage: number of devices of the pipeline.
      devices: the devices to take the first from; by default `jax.devices()`.

    Raises:
      ValueError: if there are too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    if not hasattr(stage, "__index__") or stage < 1:
        raise ValueError(
            f"`stage` must be a whole number of devices, at least 1, got {stage!r}."
        )
    if len(devices) < stage:
        platform = devices[0].platform if devices else "none"
        remedy = "Use fewer stages."
        if platform == "cpu":
            remedy = (
                f"Set XLA_FLAGS=--xla_force_host_platform_device_count={stage} before JAX starts to fake them on CPU, "
                "or use fewer stages."
            )
        raise ValueError(
            f"`stage={stage}` needs {stage} devices, got {len(devices)} ({platform}). {remedy}"
        )
    return Mesh(np.array(devices[:stage]), (AXIS,), axis_types=(AxisType.Auto,))


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
      weights: all live versions; optimizer: the optimizer's state; gradients: the accumulators.
      activations: stashes and messages in flight; batch: the minibatch, whole on every device.
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
        `factory(rngs=...) -> module` (initialised on its own stage), or `jpipe.Function(f)`.
      loss: `(outputs, batch) -> scalar`, the mean over one microbatch.
      optimizer: any Optax chain that treats each layer by itself. It is called with the extra arguments `delay`, the
        stage's forward delay in optimizer steps, and `global_norm`, the norm of the gradient over all stages.
      schedule: one of `jpipe.schedules`, or a table of your own.
      boundaries: the layer index at which each stage after the first begins; None balances by FLOPs.
      mesh: has an axis "stage" of as many devices as the schedule; see `jpipe.make_mesh`. None makes it.
      recompute: "none", or "full": a stage keeps only its inputs, and runs its forward again before its backward.
      compute_dtype: cast weights and activations to it in every layer, for example `jnp.bfloat16`; the weights that
        are kept, gradients and the outputs that the loss sees stay in the weights' own dtype. None casts nothing.

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
        boundaries: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        recompute: str = "none",
        compute_dtype: Any = None,
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
        if recompute not in ("none", "full"):
            raise ValueError(
                f'`recompute` must be "none" or "full", got {recompute!r}.'
            )
        self.layers = as_layers(layers)
        self.loss, self.optimizer, self.schedule = loss, optimizer, schedule
        self.recompute, self.compute_dtype = recompute, _floating(compute_dtype)
        self._starts = check_boundaries(
            boundaries, len(self.layers), schedule.num_stages
        )
        self.mesh = _check_mesh(
            make_mesh(stage=schedule.num_devices) if mesh is None else mesh, schedule
        )
        self._plans: dict = {}
        split, whole = (
            NamedSharding(self.mesh, PartitionSpec(*axis)) for axis in ([AXIS], [])
        )
        self._step = jax.jit(
            self._run_step, donate_argnums=0, out_shardings=(split, whole)
        )
        self._flush = jax.jit(
            self._run_flush, donate_argnums=0, out_shardings=(split, whole)
        )
        self._predict = jax.jit(self._run_predict)

    # -- Plans

    def _plan(self, microbatch: Any) -> Plan:
        """The plan for an abstract microbatch, made once."""
        leaves, tree = jax.tree.flatten(microbatch)
        key = (tree, tuple((a.shape, np.dtype(a.dtype)) for a in leaves))
        if key not in self._plans:
            traced = trace_layers(
                self.layers, self.loss, microbatch, self.compute_dtype
            )
            stages = cut(self.layers, traced, self._starts, self.schedule.num_stages)
            self._starts = list(stages.starts)
            updates = make_updates(stages, self.optimizer)
            engine = Engine(
                self.schedule,
                stages,
                updates,
                self.mesh,
                recompute=self.recompute == "full",
                microbatch=microbatch,
            )
            self._plans[key] = Plan(microbatch, traced, stages, engine, self.optimizer)
        return self._plans[key]

    def _predictor(self, microbatch: Any, trained: Lowered) -> Engine:
        traced = trace_layers(self.layers, None, microbatch, self.compute_dtype)
        stages = cut(self.layers, traced, self._starts, self.schedule.num_stages)
        table = forward_only(
            self.schedule.num_stages,
            self.schedule.num_microbatches,
            stage=self.schedule.stage,
            device=self.schedule.device,
        )
        return Engine(table, stages, None, self.mesh, trained=trained)

    def _microbatch(self, batch: Any) -> Any:
        """The abstract microbatch of `batch`, or a clear error."""
        N, size = self.schedule.num_microbatches, _batch_size(batch)
        if size % N or size == 0:
            nearest = [n for n in (size // N * N, (size // N + 1) * N) if n]
            raise ValueError(
                f"a batch of {size} cannot be cut into {N} equal microbatches. Use a batch of "
                f"{' or '.join(map(str, nearest))}, or a schedule whose `num_microbatches` divides {size}."
            )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (a.shape[0] // N, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)
            ),
            dict(batch),
        )

    def _cut_batch(self, batch: Any) -> Any:
        N = self.schedule.num_microbatches
        return jax.tree.map(
            lambda a: jnp.reshape(a, (N, a.shape[0] // N, *a.shape[1:])), batch
        )

    # -- Training

    def init(
        self, key: jax.Array, batch: Any, params: Sequence | None = None
    ) -> PipelineState:
        """Makes the training state.

        A factory's layer number i is initialised from `jax.random.fold_in(key, i)` on the device of its own stage, so
        the weights depend on the key alone, not on the stages, and no device ever holds all of them.

        Args:
          key: seeds the weights of layers given as factories.
          batch: a minibatch, or abstract arrays shaped like one; only its shapes matter.
          params: start from these weights, one nested dict a layer, as `get_params` returns them.

        Returns: A `PipelineState`.

        Raises:
          ValueError: if the batch cannot be cut into microbatches, a layer cannot take its inputs, the loss is not a
            scalar, or `params` do not fit the layers.
        """
        plan = self._plan(self._microbatch(batch))
        _check_key(key)
        if params is not None:
            self._check_params(params)
        init_layer = _shared_jit(self.mesh.devices.flat[0].platform)

        def weights(i: int):
            if params is not None:
                return jax.tree.map(np.asarray, params[i])
            if self.layers[i].given is not None:
                return self.layers[i].given
            return init_layer(self.layers[i].init, jax.random.fold_in(key, i))

        def of_stage(s: int):
            mine = plan.stages.layers_of(s)
            per_layer = [
                weights(i) if i in mine else None for i in range(len(self.layers))
            ]
            return per_layer, jax.jit(self.optimizer.init)(per_layer)

        return self._new_state(plan, of_stage)

    def _new_state(self, plan: Plan, of_stage: Callable) -> PipelineState:
        """A state with nothing in flight."""
        engine = plan.engine
        zeros = engine.globally(
            {
                "gradients": engine.gradient_shapes(),
                "buffers": engine.buffer_shapes(),
                "round": jax.ShapeDtypeStruct((1,), jnp.int32),
            }
        )
        empty = jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), zeros),
            out_shardings=jax.tree.map(lambda a: a.sharding, zeros),
        )
        return PipelineState(**plan.pack(of_stage), **empty(), plan=plan)

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
        params = source.parameters(state)
        self._check_params(params)
        plan, inner = self._plan(self._microbatch(batch)), source.optimizer_state(state)

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
                params[i] if i in mine else None for i in range(len(self.layers))
            ], leaves

        return self._new_state(plan, of_stage)

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
        if there were none; "num_microbatches", how many that were; "skipped_updates" int32 `[S]`, 1 where a gradient
        that is not finite made a stage keep its weights.
        """
        self._check_own(state)
        microbatch = self._microbatch(batch)
        if self._plan(microbatch) is not state.plan:
            raise ValueError(
                f"`state` was made for microbatches of {shapes_text(state.plan.microbatch)}, got a batch whose microbatches are "
                f"{shapes_text(microbatch)}. Keep the shape of the batch, or make a state for it by "
                "`init(key, batch, params=pipe.get_params(state))`."
            )
        return self._step(state, dict(batch))

    def _run_step(self, state: PipelineState, batch):
        fed = (state.round + 1) * self.schedule.num_microbatches
        return self._pass(state, fed, self._cut_batch(batch))

    def _pass(self, state: PipelineState, fed, batch):
        """One pass over the table: the new state and metrics."""
        plan, engine = state.plan, state.plan.engine
        parameters, gradients, optimizer_state, buffers, results = engine.run(
            state.parameters,
            state.gradients,
            state.optimizer_state,
            state.buffers,
            state.round,
            fed,
            batch,
        )
        homes = np.array([plan.home(s) for s in range(self.schedule.num_stages)])
        columns = homes[:, 0] * engine.lowered.num_chunks + homes[:, 1]
        count = results["count"].sum()
        metrics = {
            "loss": _mean(results["loss"].sum(), count),
            "num_microbatches": count,
            "skipped_updates": results["skipped"][columns],
        }
        arrays = (parameters, optimizer_state, gradients, buffers, state.round + 1)
        return PipelineState(*arrays, plan), metrics

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
            return state, {
                "loss": jnp.zeros(()),
                "num_microbatches": zero[0],
                "skipped_updates": zero,
            }
        return self._flush(state)

    def _run_flush(self, state: PipelineState):
        lowered, newest = state.plan.engine.lowered, state.round[0]
        fed = state.round * self.schedule.num_microbatches

        def drain(state, _):
            return self._pass(state, fed, None)

        state, metrics = jax.lax.scan(drain, state, length=lowered.drain_rounds)
        V, D = lowered.num_versions, self.schedule.num_devices

        def newest_everywhere(a):
            versions = a.reshape(D, V, *a.shape[1:])
            latest = jnp.take(versions, newest[None] % V, axis=1)
            return jnp.broadcast_to(latest, versions.shape).reshape(a.shape)

        counts = metrics["num_microbatches"]
        losses = metrics["loss"] * counts.astype(metrics["loss"].dtype)
        metrics = {
            "loss": _mean(losses.sum(), counts.sum()),
            "num_microbatches": counts.sum(),
            "skipped_updates": metrics["skipped_updates"].sum(axis=0),
        }
        parameters = jax.tree.map(newest_everywhere, state.parameters)
        empty = jax.tree.map(
            jnp.zeros_like, (state.gradients, state.buffers, state.round)
        )
        return PipelineState(
            parameters, state.optimizer_state, *empty, state.plan
        ), metrics

    def predict(self, state: PipelineState, batch: Any) -> Any:
        """The last layer's outputs, forward only, through the pipeline.

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
        size, inputs = _batch_size(only), batch["inputs"]
        padding = -size % self.schedule.num_microbatches
        if padding:
            inputs = jax.tree.map(
                lambda a: np.concatenate([a, np.repeat(a[-1:], padding, axis=0)]),
                inputs,
            )
        outputs = self._predict(state, {"inputs": inputs})
        return jax.tree.map(lambda a: a[:size], outputs) if padding else outputs

    def _run_predict(self, state: PipelineState, batch):
        trained = state.plan.engine.lowered
        engine = self._predictor(self._microbatch(batch), trained)
        shapes = engine.globally(engine.buffer_shapes())
        buffers = jax.tree.map(
            lambda a: jax.lax.with_sharding_constraint(
                jnp.zeros(a.shape, a.dtype), a.sharding
            ),
            shapes,
        )
        N, stages = self.schedule.num_microbatches, engine.stages
        fed = (state.round + 1) * N
        outputs = engine.run(
            state.parameters, {}, {}, buffers, state.round, fed, self._cut_batch(batch)
        )
        d = int(self.schedule.device[self.schedule.stage == stages.num_stages - 1][0])
        flat = [y[d * N : (d + 1) * N].reshape(-1, *y.shape[2:]) for y in outputs]
        return stages.kinds[stages.kind_of_layer[-1]].output_tree.unflatten(flat)

    def get_params(self, state: PipelineState) -> list:
        """The newest weights: one nested dict a layer, by attribute names, of host arrays."""
        self._check_own(state)
        return state.plan.parameters(state)

    # -- What it costs

    def partition(self, batch: Any) -> list[StageRecord]:
        """How the layers are cut: one record a stage, for minibatches shaped like `batch`."""
        plan = self._plan(self._microbatch(batch))
        records = []
        for s in range(plan.stages.num_stages):
            layers = plan.stages.layers_of(s)
            leaves = [
                a for i in layers for a in jax.tree.leaves(self.layers[i].parameters)
            ]
            records.append(
                StageRecord(
                    stage=s,
                    device=plan.home(s)[0],
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

    def memory(self, batch: Any) -> Memory:
        """Bytes a device for minibatches shaped like `batch`. Compiles the step if it has not been."""
        engine = self._plan(self._microbatch(batch)).engine

        def size(shapes) -> int:
            return sum(
                math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(shapes)
            )

        weights, optimizer = (
            size(engine.parameter_shapes()),
            size(engine.optimizer_shapes()),
        )
        gradients = size(engine.gradient_shapes())
        updates = engine.updates
        used = size([layer.parameters for layer in self.layers])
        used_state = sum(updates.state.used_bytes[u] for u in updates.program_of_stage)
        V = engine.lowered.num_versions
        return Memory(
            weights=weights,
            optimizer=optimizer,
            gradients=gradients,
            activations=size(engine.buffer_shapes()),
            batch=size(jax.tree.map(_abstract, dict(batch))),
            temporaries=int(self.compile(batch).memory_analysis().temp_size_in_bytes),
            padding=round(
                weights
                + optimizer
                + gradients
                - (used * (V + 1) + used_state) / self.schedule.num_devices
            ),
        )

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The compiled step for minibatches shaped like `batch`: its memory, its cost, its text."""
        plan = self._plan(self._microbatch(batch))
        engine = plan.engine
        shapes = engine.globally(
            {
                "parameters": engine.parameter_shapes(),
                "optimizer_state": engine.optimizer_shapes(),
                "gradients": engine.gradient_shapes(),
                "buffers": engine.buffer_shapes(),
                "round": jax.ShapeDtypeStruct((1,), jnp.int32),
            }
        )
        state = PipelineState(**shapes, plan=plan)
        return self._step.lower(state, jax.tree.map(_abstract, dict(batch))).compile()

    # -- Odds and ends

    def _check_own(self, state: Any) -> None:
        _check_state(state)
        if not any(plan is state.plan for plan in self._plans.values()):
            raise ValueError(
                "`state` was made by another pipeline, whose layout is another. Take it over with "
                "`state = pipe.adopt(state)`."
            )

    def _check_params(self, params: Sequence) -> None:
        if not isinstance(params, Sequence) or len(params) != len(self.layers):
            got = len(params) if isinstance(params, Sequence) else type(params).__name__
            raise ValueError(
                f"`params` must be a list with one entry a layer ({len(self.layers)}), got {got}."
            )
        for i, (given, layer) in enumerate(zip(params, self.layers)):
            want, got = (
                {
                    jax.tree_util.keystr(
                        p
                    ): f"{getattr(a, 'dtype', type(a).__name__)}{list(np.shape(a))}"
                    for p, a in jax.tree.leaves_with_path(t)
                }
                for t in (layer.parameters, given)
            )
            if want != got:
                path = next(
                    p for p in itertools.chain(want, got) if want.get(p) != got.get(p)
                )
                raise ValueError(
                    f"`params` of layer {i} ({layer.name}) do not fit: {path} should be {want.get(path, 'absent')}, got "
                    f"{got.get(path, 'nothing')}. Pass what `get_params` of the same layers returned."
                )


def _shared_jit(platform: str) -> Callable:
    """Calls `function(key)` compiled, once for all functions that trace to the same program."""
    compiled: dict[str, Callable] = {}
    # Random initialisers take XLA:CPU up to ten times longer to optimise than to run unoptimised.
    options = {"xla_backend_optimization_level": 0} if platform == "cpu" else None

    def call(function: Callable, key: jax.Array):
        shape = jax.eval_shape(function, key)
        text = f"{shape}{jaxpr_text(lambda k: jax.tree.leaves(function(k)), key)}"
        return compiled.setdefault(text, jax.jit(function, compiler_options=options))(
            key
        )

    return call


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


def _check_key(key: Any) -> None:
    typed = isinstance(key, jax.Array) and (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape == (2,)
    )
    if not typed:
        raise ValueError(
            "`key` must be a key as `jax.random.key(seed)` makes it, got "
            f"{key if isinstance(key, int) else type(key).__name__}."
        )


def _check_mesh(mesh: Mesh, schedule: Schedule) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {type(mesh).__name__}. Make it "
            f"with `jpipe.make_mesh(stage={schedule.num_devices})`."
        )
    sizes = dict(mesh.shape)
    if AXIS not in sizes:
        raise ValueError(
            f'`mesh` must have an axis "stage", got axes {sizes}. Make it with `jpipe.make_mesh`.'
        )
    if sizes[AXIS] != schedule.num_devices:
        raise ValueError(
            f'the axis "stage" of `mesh` must have the {schedule.num_devices} devices of schedule {schedule.name!r}, got '
            f"{sizes[AXIS]}. Use `jpipe.make_mesh(stage={schedule.num_devices})`, or a schedule for {sizes[AXIS]} devices."
        )
    if math.prod(sizes.values()) != sizes[AXIS]:
        raise ValueError(
            f'`mesh` may have no axis beside "stage" for now, got {sizes}.'
        )
    return mesh
