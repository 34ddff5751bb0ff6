"""Everything that is derived from the shapes of one minibatch: the engine and the compiled functions.

Settings (the arguments of `Pipeline`)
   └── + microbatch shapes + cut ──> Program: stages, engine, step, flush, predict, evaluate
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpipe.checks import batch_size, check_stages
from jpipe.engine.engine import Engine
from jpipe.engine.loss_scale import LossScale
from jpipe.layers.avals import check_nans
from jpipe.layers.layer import Layer
from jpipe.layers.trace import Traced, trace_layers
from jpipe.mesh import DATA, STAGE
from jpipe.schedule import Schedule
from jpipe.schedules import forward_only
from jpipe.stages.cut import Stages, cut
from jpipe.stages.optimizer import make_updates
from jpipe.stages.ties import resolve_ties
from jpipe.state import PipelineState


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of `Pipeline`, checked. See there for their meaning.

    Attributes:
      layers: what `as_layers` returned.
      hooks: "forward" and "backward" with the functions of `forward_params` and `backward_params`.
      ties: `(layer, "dotted.path")` pairs of each tied parameter, those of shared NNX variables
        included.
    """

    layers: Sequence[Layer]
    loss: Callable
    optimizer: optax.GradientTransformation
    schedule: Schedule
    mesh: Mesh
    recompute: str | Callable[..., Any]
    compute_dtype: np.dtype | None
    loss_scale: LossScale | None
    has_aux: bool
    ties: Sequence[Sequence[tuple[int, str]]]
    hooks: Mapping[str, Callable]
    overlap: bool

    @property
    def num_replicas(self) -> int:
        """Replicas of the pipeline, along the axis "data" of the mesh."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def recompute_name(self) -> str:
        """`recompute` as text: "none", "full" or the name of the policy."""
        if callable(self.recompute):
            return getattr(self.recompute, "__name__", "policy")
        return self.recompute

    @functools.cached_property
    def automatic_mesh(self) -> Mesh | None:
        """The mesh of the axes that are left to the compiler; None if there are none."""
        sizes = self.mesh.shape.items()
        names = [name for name, n in sizes if name not in (STAGE, DATA) and n > 1]
        if not names:
            return None
        index = tuple(slice(None) if name in names else 0 for name, _ in sizes)
        axis_types = (AxisType.Auto,) * len(names)
        return Mesh(self.mesh.devices[index], names, axis_types=axis_types)

    def microbatch(self, batch: Any, num_microbatches: int | None = None) -> Any:
        """The abstract microbatch of a minibatch.

        Args:
          batch: arrays or abstract arrays `[batch, ...]`.
          num_microbatches: per minibatch and replica; None: that of the schedule.

        Raises:
          ValueError: if the minibatch cannot be cut into equal microbatches.
        """
        N = num_microbatches or self.schedule.num_microbatches
        size, replicas = batch_size(batch), self.num_replicas
        parts = N * replicas
        if size % parts or size == 0:
            nearest = [size // parts * parts, (size // parts + 1) * parts]
            per_replica = f' on each of the {replicas} replicas of axis "data"'
            raise ValueError(
                f"a batch of {size} cannot be cut into {N} equal microbatches"
                f"{per_replica if replicas > 1 else ''}. Use a batch of "
                f"{' or '.join(str(n) for n in nearest if n)}, or a schedule whose "
                "`num_microbatches` divides "
                f"{size if replicas == 1 else 'the share of a replica'}."
            )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (a.shape[0] // parts, *a.shape[1:]), abstract(a).dtype
            ),
            dict(batch),
        )

    def trace(self, microbatch: Any, key_impl: Any, *, train: bool = True) -> Traced:
        """The layers and the loss traced for a microbatch; in evaluation, the layers alone."""
        return trace_layers(
            self.layers,
            self.loss if train else None,
            microbatch,
            compute_dtype=self.compute_dtype,
            has_aux=self.has_aux,
            key_impl=key_impl,
            policy=self.recompute if callable(self.recompute) else None,
            automatic=self.automatic_mesh,
        )

    def cut(self, traced: Traced, starts: Sequence[int]) -> Stages:
        """The traced layers cut into stages that begin at `starts`."""
        ties = resolve_ties(traced.layers, self.ties)
        return cut(traced, list(starts), self.schedule.num_stages, ties)


class Program:
    """What a pipeline does with minibatches of one shape.

    Args:
      settings: of the pipeline.
      microbatch: the abstract microbatch.
      key_impl: implementation of the random keys that layers get.
      traced: the layers, traced for this microbatch.
      starts: the first layer of each stage, and the number of layers at the end.

    Attributes:
      stages: the model, cut.
      engine: runs the stages.
    """

    def __init__(
        self,
        settings: Settings,
        microbatch: Any,
        key_impl: Any,
        traced: Traced,
        starts: Sequence[int],
    ):
        self.settings, self.microbatch, self.traced = settings, microbatch, traced
        self.stages = settings.cut(traced, starts)
        check_stages(self.stages, settings.schedule, settings.recompute)
        self.engine = Engine(
            settings.schedule,
            self.stages,
            make_updates(self.stages, settings.optimizer, settings.hooks),
            settings.mesh,
            recompute=settings.recompute == "full",
            microbatch=microbatch,
            loss_scale=settings.loss_scale,
            key_impl=key_impl,
            overlap=settings.overlap,
        )
        specs = (
            self.engine.replicated_spec,
            self.engine.per_device_spec,
            PartitionSpec(),
        )
        replicated, per_device, everywhere = (
            NamedSharding(settings.mesh, spec) for spec in specs
        )
        if settings.automatic_mesh is not None:
            # Each array is split in its own way, which `_pack_outputs` states.
            replicated = per_device = None
        options = dict(
            donate_argnums=0, out_shardings=(replicated, per_device, everywhere)
        )
        self._step = jax.jit(self._run_step, **options)
        self._flush = jax.jit(self._run_flush, **options)
        self._predict = jax.jit(self._run_predict)
        self._evaluate = jax.jit(self._run_evaluate)

    @property
    def placement(self) -> Sequence[tuple[int, int]]:
        """Device of each stage, and which of that device's stages it is."""
        return self.engine.lowered.placement

    def abstract_state(self) -> PipelineState:
        """The training state as abstract arrays, each with its sharding."""
        engine, scalar = self.engine, jax.ShapeDtypeStruct((1,), jnp.int32)
        impl = engine.key_impl
        key = jax.eval_shape(lambda: jax.random.key(0, impl=impl)[None])
        replicated = {
            **engine.replicated_shapes(),
            "round": scalar,
            "started": scalar,
            "key": key,
        }
        return PipelineState(
            **engine.globally(replicated, engine.replicated_spec),
            **engine.globally(engine.per_device_shapes(), engine.per_device_spec),
            program=self,
        )

    # -- Calls

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, dict]:
        """One pass over the table, with a minibatch that enters."""
        check_nans(state.parameters, "the state's parameters")
        return self._restore(state, *self._step(state, self._place(dict(batch))))

    def flush(self, state: PipelineState) -> tuple[PipelineState, dict]:
        """Passes over the table until nothing is in flight."""
        if not self.settings.schedule.synchronous:
            return self._restore(state, *self._flush(state))
        zero = jnp.zeros(self.settings.schedule.num_stages, jnp.int32)
        metrics = {
            "loss": jnp.zeros(()),
            "num_microbatches": zero[0],
            "gradient_norm": jnp.zeros(()),
            "skipped_updates": zero,
        }
        if self.settings.has_aux:
            loss = self.stages.loss
            zeros = [jnp.zeros(a.shape, a.dtype) for a in loss.aux]
            metrics["aux"] = loss.aux_tree.unflatten(zeros)
        if self.settings.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale["scale"][0]
        return state, metrics

    def predict(self, state: PipelineState, batch: Any) -> Any:
        """The last layer's outputs for `batch["inputs"]`, `[batch, ...]`."""
        if isinstance(batch, Mapping):
            batch = {name: a for name, a in batch.items() if name == "inputs"}
        size, padded = self._pad(batch)
        outputs = self._predict(state, padded)
        return jax.tree.map(lambda a: a[:size], outputs)

    def evaluate(self, state: PipelineState, batch: Any) -> dict[str, Any]:
        """The loss of the newest weights on all rows of the batch together."""
        _, padded = self._pad(batch, only="inputs")
        return self._evaluate(state, padded["inputs"], dict(batch))

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step, traced and lowered but not compiled."""
        sharding = NamedSharding(self.settings.mesh, self.engine.batch_spec)

        def placed(a):
            a = abstract(a)
            if self.settings.num_replicas == 1:
                return a
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return self._step.lower(
            self.abstract_state(), jax.tree.map(placed, dict(batch))
        )

    # -- Batches

    def _cut_batch(self, batch: Any) -> Any:
        """`[batch, ...]` to `[replicas, N, microbatch, ...]`: a replica gets consecutive rows."""
        lead = self.settings.num_replicas, self.settings.schedule.num_microbatches
        return jax.tree.map(
            lambda a: jnp.reshape(
                a, (*lead, a.shape[0] // math.prod(lead), *a.shape[1:])
            ),
            batch,
        )

    def _place(self, batch: Any) -> Any:
        """The batch, each replica's rows on the replica's devices."""
        check_nans(batch, "batch")
        if self.settings.num_replicas == 1:
            return batch
        sharding = NamedSharding(self.settings.mesh, PartitionSpec(DATA))
        return jax.device_put(batch, sharding)

    def _pad(self, batch: Any, only: str | None = None) -> tuple[int, Any]:
        """The size of a batch, and the batch with copies of its last row up to a size that can be cut."""
        size = batch_size(batch)
        if size == 0:
            raise ValueError("the batch is empty: give at least one row.")
        settings = self.settings
        padding = -size % (settings.schedule.num_microbatches * settings.num_replicas)
        if only is not None:
            batch = {only: batch[only]}
        if padding:
            batch = jax.tree.map(
                lambda a: np.concatenate([a, np.repeat(a[-1:], padding, axis=0)]),
                dict(batch),
            )
        return size, self._place(batch)

    # -- Compiled functions

    def _run_step(self, state: PipelineState, batch: Any):
        num_entered = (state.round + 1) * self.settings.schedule.num_microbatches
        state, metrics = self._run_table(state, num_entered, self._cut_batch(batch))
        return self._pack_outputs(state, metrics)

    def _run_table(self, state: PipelineState, num_entered: jax.Array, batch: Any):
        """One pass over the table: the new state and metrics."""
        engine = self.engine
        replicated, per_device, results = engine.run(
            state.replicated(), state.per_device(), state.counters(), num_entered, batch
        )
        columns = [d * engine.lowered.num_chunks + chunk for d, chunk in self.placement]
        count = results["count"].sum()
        aux = [_mean(a.sum(axis=0), count) for a in results["aux"]]
        metrics = {
            "loss": _mean(results["loss"].sum(), count),
            "num_microbatches": count // self.settings.num_replicas,
            "gradient_norm": results["gradient_norm"][0],
            "skipped_updates": results["skipped"][np.array(columns)],
        }
        if self.settings.has_aux:
            metrics["aux"] = engine.stages.loss.aux_tree.unflatten(aux)
        if self.settings.loss_scale is not None:
            metrics["loss_scale"] = replicated["loss_scale"]["scale"][0]
        state = dataclasses.replace(
            state, **replicated, **per_device, round=state.round + 1
        )
        return state, metrics

    def _pack_outputs(self, state: PipelineState, metrics: dict):
        """The outputs of a compiled function: the arrays of the state by sharding, and metrics."""
        replicated = {**state.replicated(), **state.counters()}
        per_device = state.per_device()
        if self.settings.automatic_mesh is not None:
            wanted = self.abstract_state()
            wanted = (
                {**wanted.replicated(), **wanted.counters()},
                wanted.per_device(),
            )
            replicated, per_device = jax.tree.map(
                lambda a, want: jax.lax.with_sharding_constraint(a, want.sharding),
                (replicated, per_device),
                wanted,
            )
        return replicated, per_device, metrics

    def _restore(
        self, state: PipelineState, replicated: dict, per_device: dict, metrics: dict
    ) -> tuple[PipelineState, dict]:
        """The new state and metrics out of the outputs of a compiled function."""
        return dataclasses.replace(state, **replicated, **per_device), metrics

    def _run_flush(self, state: PipelineState):
        lowered, newest = self.engine.lowered, state.round[0]
        N = self.settings.schedule.num_microbatches
        num_entered = state.round * N

        def drain(state, _):
            return self._run_table(state, num_entered, None)

        state, metrics = jax.lax.scan(drain, state, length=lowered.drain_rounds)
        V, D = lowered.num_versions, self.settings.schedule.num_devices

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
        if self.settings.has_aux:
            metrics["aux"] = jax.tree.map(mean, metrics["aux"])
        if self.settings.loss_scale is not None:
            metrics["loss_scale"] = metrics["loss_scale"][-1]
        empty = jax.tree.map(
            jnp.zeros_like, {**state.per_device(), "round": state.round}
        )
        newest_of = {
            name: jax.tree.map(newest_everywhere, getattr(state, name))
            for name in ("parameters", "read_parameters")
        }
        started = state.started + newest * N
        state = dataclasses.replace(state, **newest_of, started=started, **empty)
        return self._pack_outputs(state, metrics)

    def _run_evaluate(self, state: PipelineState, inputs: Any, batch: Any) -> dict:
        outputs = self._run_predict(state, {"inputs": inputs})
        size = batch_size(batch)
        outputs = jax.tree.map(lambda a: a[:size], outputs)
        result = self.settings.loss(outputs, batch)
        if not self.settings.has_aux:
            return {"loss": result}
        loss, aux = result
        return {"loss": loss, "aux": aux}

    def _run_predict(self, state: PipelineState, batch: Any) -> Any:
        engine = self._forward_engine(self.settings.microbatch(batch))
        schedule, stages = self.settings.schedule, engine.stages
        shapes = engine.globally(engine.buffer_shapes(), engine.per_device_spec)
        buffers = jax.tree.map(
            lambda a: jax.lax.with_sharding_constraint(
                jnp.zeros(a.shape, a.dtype), a.sharding
            ),
            shapes,
        )
        N = schedule.num_microbatches
        outputs = engine.run(
            {"parameters": state.parameters, "mutable_state": state.mutable_state},
            {"buffers": buffers},
            state.counters(),
            (state.round + 1) * N,
            self._cut_batch(batch),
        )
        last_device = int(schedule.device[schedule.stage == stages.num_stages - 1][0])
        lead = self.settings.num_replicas, schedule.num_devices, N
        flat = [
            y.reshape(*lead, *y.shape[1:])[:, last_device].reshape(-1, *y.shape[2:])
            for y in outputs
        ]
        return stages.outputs[1].unflatten(flat)

    def _forward_engine(self, microbatch: Any) -> Engine:
        """The engine that runs the same stages forward only, in evaluation."""
        settings, schedule = self.settings, self.settings.schedule
        traced = settings.trace(microbatch, self.engine.key_impl, train=False)
        table = forward_only(
            schedule.num_stages,
            schedule.num_microbatches,
            stage=schedule.stage,
            device=schedule.device,
        )
        return Engine(
            table,
            settings.cut(traced, self.stages.starts),
            None,
            settings.mesh,
            trained=self.engine.lowered,
        )


def abstract(a: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, and the dtype that JAX gives it."""
    return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / jnp.maximum(count, 1).astype(total.dtype)
