"""Prediction and evaluation: the stages of a training, run forward only."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe._processes.sharing import is_global, own_rows
from jpipe.engine.calls import call_bounded
from jpipe.engine.device import PassInputs
from jpipe.engine.engine import run_forward
from jpipe.engine.layout import batch_spec
from jpipe.engine.spec import ForwardPass
from jpipe.engine.state import STATE_ARRAYS, PipelineState
from jpipe.engine.state_arrays import BUFFERS, Lives
from jpipe.engine.training import TrainingPass
from jpipe.layers.avals import shapes_key, shapes_text
from jpipe.layers.call_arguments import batch_text
from jpipe.layers.equations import off_mesh
from jpipe.layers.numbers import from_numbers
from jpipe.layers.trace import TrainingTrace
from jpipe.options.checks import batch_size
from jpipe.options.settings import Settings
from jpipe.program.batches import Batches
from jpipe.schedules import forward_only

_READ = tuple(
    array.name
    for array in STATE_ARRAYS
    if array.lives is Lives.COUNTER or (array.in_forward_only and not array.in_buffers)
)
"""The fields of a state that prediction reads. They have the same shapes for batches of all shapes."""


class Predictor:
    """Computes predictions and evaluations from the newest weights of a training, for batches of any size.

    Args:
      settings: the settings of the pipeline.
      training: the pass that trains the weights.
      traced: the layers, traced for training.
      compiler_options: options of XLA.
    """

    def __init__(
        self,
        settings: Settings,
        training: TrainingPass,
        traced: TrainingTrace,
        compiler_options: Mapping[str, Any],
    ):
        self.settings, self._training, self._traced = settings, training, traced
        self._batches = Batches(settings)
        self._latest_forward_engine: tuple[tuple, ForwardPass] | None = None
        # shapes of a microbatch -> the table as an argument
        self._forward_rows: dict[tuple, jax.Array] = {}
        predict: dict[str, Any] = dict(compiler_options=compiler_options)
        evaluate, rows = predict, settings.rows
        if rows is not None:
            # Every process can read what it gets: its own rows of the outputs, or all of them.
            everywhere = PartitionSpec()
            spec = batch_spec(settings.mesh) if rows.apart else everywhere
            predict, evaluate = (
                dict(predict, out_shardings=(NamedSharding(settings.mesh, s), None)) for s in (spec, everywhere)
            )
        self.compiled_predict = jax.jit(self._run_predict, **predict)
        self.compiled_evaluate = jax.jit(self._run_evaluate, **evaluate)

    def predict(self, state: PipelineState, batch: Any) -> Any:
        """The last layer's outputs for `batch["inputs"]`, `[batch, ...]`."""
        batch = self.settings.model.batch(batch)
        if isinstance(batch, Mapping):
            batch = {name: a for name, a in batch.items() if name == "inputs"}
        rows, mesh = self.settings.rows, self.settings.mesh
        given_whole = any(map(is_global, jax.tree.leaves(batch)))
        size, padded, _ = self._batches.padded(batch)
        rows_of_table = self.rows_of(padded)
        outputs, _ = call_bounded(self.compiled_predict, mesh, _read(state), padded, rows_of_table)
        if rows is not None and rows.apart and not given_whole:
            outputs = jax.tree.map(lambda a: own_rows(a, mesh), outputs)
        return jax.tree.map(lambda a: a[:size], from_numbers(outputs))

    def evaluate(self, state: PipelineState, batch: Any) -> dict[str, Any]:
        """The loss of the newest weights on all rows of the batch together."""
        rows, batch = self.settings.rows, self.settings.model.batch(batch)
        given_whole = any(map(is_global, jax.tree.leaves(batch)))
        if rows is not None and (rows.apart or given_whole):
            _, batch, positions = self._batches.padded(batch)
            inputs = batch["inputs"]
            if positions is not None and len(positions) == batch_size(batch):
                positions = None  # no padding
        else:
            _, padded, positions = self._batches.padded(batch, only="inputs")
            inputs, batch = padded["inputs"], self._batches.on_mesh(dict(batch))
        rows_of_table = self.rows_of({"inputs": inputs})
        result, _ = call_bounded(
            self.compiled_evaluate,
            self.settings.mesh,
            _read(state),
            inputs,
            batch,
            positions,
            rows_of_table,
        )
        return result

    def _run_evaluate(
        self,
        arrays: Mapping[str, Any],
        inputs: Any,
        batch: Any,
        positions: Any,
        rows: jax.Array,
    ) -> tuple:
        outputs, call = self._run_predict(arrays, {"inputs": inputs}, rows)
        if self.settings.rows is not None:
            everywhere = NamedSharding(self.settings.mesh, PartitionSpec())
            batch = jax.lax.with_sharding_constraint(batch, everywhere)
        if positions is None:
            size = batch_size(batch)
            outputs = jax.tree.map(lambda a: a[:size], outputs)
        else:
            outputs = jax.lax.with_sharding_constraint(outputs, everywhere)
            outputs, batch = jax.tree.map(lambda a: jnp.take(a, positions, axis=0), (outputs, batch))
        # Layers report in training only.
        reported = {n: jnp.zeros((), a.dtype) for n, a in self._traced.reported.items()}
        key = self._training.counters(arrays)["key"][0]
        try:
            mean = off_mesh(lambda *args: self.settings.loss.in_evaluation.terms(*args).mean())
            loss, aux = mean(outputs, batch, reported, key)
        except Exception as error:
            raise ValueError(
                f"`loss` cannot take outputs of {shapes_text(outputs)} and a batch of "
                f"{batch_text(batch)}: {type(error).__name__}: {error}"
            ) from error
        result = {"loss": loss, "aux": aux} if self.settings.has_aux else {"loss": loss}
        return result, call

    def _run_predict(self, arrays: Mapping[str, Any], batch: Any, rows: jax.Array) -> tuple:
        """The outputs, and a small array for `call_bounded`."""
        engine = self._forward_engine(self.settings.row_group(batch, whole=True))
        schedule, stages = self.settings.schedule, engine.stages
        buffers = jax.tree.map(
            lambda a: jax.lax.with_sharding_constraint(jnp.zeros(a.shape, a.dtype), a.sharding),
            engine.layout.global_shapes([BUFFERS]),
        )
        N = schedule.num_row_groups
        num_entered = (arrays["round"] + 1) * N
        kept = {
            name: {key: a for key, a in arrays[name].items() if key in group.shapes}
            for name, group in engine.layout.groups.items()
            if name != BUFFERS
        }
        outputs = run_forward(
            engine,
            PassInputs(
                kept=kept,
                in_flight=buffers,
                counters=self._training.counters(arrays),
                num_entered=num_entered,
                batch=self._batches.cut(batch),
                rows=rows,
            ),
        )
        table = engine.schedule
        last_devices = table.device[table.column_of_microbatch[:, -1]]
        which: Any = int(last_devices[0])
        if table.has_copies:  # each copy of the last stage has the rows of its microbatches
            which = last_devices, np.arange(N)
        lead = self.settings.num_replicas, schedule.num_devices, N
        flat = []
        for y in outputs:
            parts = y.reshape(*lead, *y.shape[1:])
            parts = parts[:, *which] if table.has_copies else parts[:, which]
            flat.append(parts.reshape(-1, *y.shape[2:]))
        return stages.outputs[1].unflatten(flat), {"num_microbatches": num_entered}

    def rows_of(self, batch: Any) -> jax.Array:
        """The argument of prediction that holds the forward-only table for a padded batch."""
        microbatch = self.settings.row_group(batch, whole=True)
        key = shapes_key(microbatch)
        if key not in self._forward_rows:
            self._forward_rows[key] = self._forward_engine(microbatch).place_rows()
        return self._forward_rows[key]

    def _forward_engine(self, microbatch: Any) -> ForwardPass:
        """The engine that runs the same stages forward only, in evaluation; the latest is kept."""
        key, latest = shapes_key(microbatch), self._latest_forward_engine
        if latest is None or latest[0] != key:
            latest = key, self._make_forward_engine(microbatch)
            self._latest_forward_engine = latest
        return latest[1]

    def _make_forward_engine(self, microbatch: Any) -> ForwardPass:
        settings, schedule = self.settings, self.settings.schedule
        key_impl, trained = self._training.key_impl, self._training.stages
        traced = settings.trace_evaluation(microbatch, key_impl, self._traced)
        table = forward_only(
            schedule.num_stages,
            schedule.num_row_groups,
            stage=schedule.stage,
            device=schedule.device,
            message_ticks=schedule.message_ticks,
        )
        return ForwardPass(
            schedule=table,
            stages=settings.cut(traced, trained.starts, microbatch, key_impl, trained),
            mesh=settings.mesh,
            microbatch=microbatch,
            key_impl=key_impl,
            trained=self._training.lowered,
            numbers=settings.numbers,
        )


def _read(state: PipelineState) -> dict[str, Any]:
    arrays = {name: getattr(state, name) for name in _READ}
    if not state.anchor:
        return arrays
    # Of learners: the weights that they began with together, and the first one's other state.
    learners = state.program.settings.num_replicas
    first = jax.tree.map(lambda a: a[: len(a) // learners], state.mutable_state)
    return arrays | {"parameters": state.anchor, "mutable_state": first}
