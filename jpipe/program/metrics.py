"""The metrics of a step and of a flush, from what devices report after a pass over the table."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.engine import traffic
from jpipe.engine.state import PipelineState
from jpipe.engine.training import TrainingPass
from jpipe.layers.backward import LayerProgram
from jpipe.layers.loss import mean_of_sums
from jpipe.mesh import DATA, STAGE
from jpipe.options.settings import Settings

_LATEST = ("gradient_norm", "loss_scale", "compression")
"""The totals of which several passes have those of the last one. The others are summed."""


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one pass over the table, or several, report.

    Attributes:
      settings: the settings of the pipeline.
      engine: the pass.
      loss: the traced loss.
    """

    settings: Settings
    engine: TrainingPass
    loss: LayerProgram

    def totals(self, results: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
        """Sums of what devices report after a pass; with an axis of learners before them if these train apart.

        Args:
          results: the results of devices.
          kept: the arrays of the state after the pass.
        """
        totals = self._for_each_learner(self._sums, results)
        if self.settings.numbers.loss_scale is not None:
            totals["loss_scale"] = kept["loss_scale"]["scale"][0]
        if self.settings.communication.compresses:
            totals["compression"] = self._compression_counts(kept)
        return totals

    def _sums(self, results: Mapping[str, Any]) -> dict[str, Any]:
        columns = [d * self.engine.lowered.num_chunks + chunk for d, chunk in self.engine.lowered.placement]
        return {
            "loss": results["loss"].sum(),
            "aux": [a.sum(axis=0) for a in results["aux"]],
            "count": results["count"].sum(),
            "gradient_norm": results["gradient_norm"][0],
            "skipped_updates": results["skipped"][np.array(columns)],
        }

    def _for_each_learner(self, function: Callable[[Any], Any], arrays: Any) -> Any:
        """A function of arrays of devices; with an axis of learners before its results, each of the arrays of one."""
        if self.engine.local_steps is None:
            return function(arrays)
        R = self.settings.num_replicas
        on_its_devices = NamedSharding(self.settings.mesh, PartitionSpec(DATA, STAGE))

        def parted(a: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(a.reshape(R, len(a) // R, *a.shape[1:]), on_its_devices)

        return jax.vmap(function, axis_size=R)(jax.tree.map(parted, arrays))

    def _compression_counts(self, kept: Mapping[str, Any]) -> dict[str, jax.Array]:
        states = {name: kept[name] for name in ("gradient_compression", "message_compression")}
        counts = functools.partial(traffic.counts, self.engine, self.settings.communication.compress_messages)
        return self._for_each_learner(counts, states)

    def over_passes(self, totals: dict[str, Any]) -> dict[str, Any]:
        """The totals of several passes together, from an axis of passes before each."""
        latest = {name: jax.tree.map(lambda a: a[-1], totals[name]) for name in _LATEST if name in totals}
        summed = {name: a for name, a in totals.items() if name not in latest}
        return jax.tree.map(lambda a: a.sum(axis=0), summed) | latest

    def means(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, from totals. Without a microbatch that finished a mean is 0 / 0, which is NaN."""
        return self._means(totals) if self.engine.local_steps is None else jax.vmap(self._means)(totals)

    def _means(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        count = totals["count"]
        loss, aux = mean_of_sums(totals["loss"], self.loss.aux_tree.unflatten(totals["aux"]), count)
        metrics = {
            "loss": loss,
            "num_microbatches": count // self.engine.num_replicas,
            "gradient_norm": totals["gradient_norm"],
            "skipped_updates": totals["skipped_updates"],
        }
        if self.settings.has_aux:
            metrics["aux"] = aux
        return metrics | {name: totals[name] for name in ("loss_scale", "compression") if name in totals}

    def nothing(self, state: PipelineState) -> dict[str, Any]:
        """The metrics of a flush where nothing was in flight."""

        def unknown(a: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.asarray(np.full(a.shape, np.nan, a.dtype))

        metrics: dict[str, Any] = {
            "loss": unknown(self.loss.outputs[0]),
            "num_microbatches": jnp.zeros((), jnp.int32),
            "gradient_norm": jnp.zeros((), self.engine.updates.norm_dtype),
            "skipped_updates": jnp.zeros(self.engine.stages.num_stages, jnp.int32),
        }
        if self.settings.has_aux:
            metrics["aux"], *_ = self.loss.aux_tree.unflatten(map(unknown, self.loss.aux))
        metrics = self._for_each_learner(lambda _: metrics, {})
        if self.settings.numbers.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale["scale"][0]
        if self.settings.communication.compresses:
            metrics["compression"] = self._compression_counts(state.kept())
        return metrics
