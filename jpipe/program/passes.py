"""What the compiled functions of a program compute: passes over the table."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jpipe.engine import outer
from jpipe.engine.device import PassInputs
from jpipe.engine.engine import in_all_versions, run_training
from jpipe.engine.state import PipelineState, arrays_with_versions
from jpipe.engine.training import TrainingPass
from jpipe.options.settings import Settings
from jpipe.program.batches import Batches
from jpipe.program.metrics import StepMetrics

Arrays = Mapping[str, Any]
"""The arrays of a state by field."""

Outputs = tuple[collections.OrderedDict, collections.OrderedDict, dict]
"""The arrays of a state that it keeps, those in flight, and metrics."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """Passes over the table, as functions of the arrays of a state.

    Attributes:
      settings: the settings of the pipeline.
      engine: the training pass.
      batches: cuts minibatches.
      metrics: of what a pass reports.
    """

    settings: Settings
    engine: TrainingPass
    batches: Batches
    metrics: StepMetrics

    def step(self, arrays: Arrays, batch: Any, rows: jax.Array) -> Outputs:
        """One pass, with a minibatch that enters.

        Args:
          arrays: the arrays of the state.
          batch: the minibatch.
          rows: the table, see `TrainingPass.place_rows`.
        """
        state = _state(arrays)
        num_entered = (state.round + 1) * self.settings.schedule.num_microbatches
        state, totals = self._over_table(state, num_entered, self.batches.microbatches(batch), rows)
        return self._outputs(state, self.metrics.means(totals))

    def flush(self, arrays: Arrays, rows: jax.Array) -> Outputs:
        """Passes until nothing is in flight; see `step`."""
        state = _state(arrays)
        newest, N = state.round[0], self.settings.schedule.num_microbatches
        state, metrics = self._drained(state, rows)
        empty = jax.tree.map(jnp.zeros_like, {**state.in_flight(), "round": state.round})
        newest_of = {
            name: in_all_versions(self.engine, name, getattr(state, name), newest) for name in arrays_with_versions()
        }
        started = state.started + newest * N
        state = dataclasses.replace(state, **newest_of, started=started, **empty)
        return self._outputs(state, metrics)

    def shardings(self) -> tuple[Any, Any]:
        """The shardings of the arrays of `Outputs`; None where it states them itself."""
        if self.settings.automatic_mesh is not None:
            return None, None  # each array is split in its own way
        mesh, layout = self.settings.mesh, self.engine.layout
        shardings: dict[str, Any] = {
            name: jax.tree.map(lambda a: a.sharding, layout.global_shapes([name])[name])
            if group.on_host
            else NamedSharding(mesh, group.spec)
            for name, group in layout.groups.items()
        }
        in_flight = {name: shardings.pop(name) for name in self._abstract.in_flight()}
        return _in_order(shardings), _in_order(in_flight)

    @property
    def _abstract(self) -> PipelineState:
        layout = self.engine.layout
        return _state(layout.global_shapes(layout.groups))

    def _over_table(
        self, state: PipelineState, num_entered: jax.Array, batch: Any, rows: jax.Array
    ) -> tuple[PipelineState, dict]:
        """One pass over the table: the new state, and the totals that `StepMetrics.means` takes."""
        engine = self.engine
        kept, in_flight, results = run_training(
            engine,
            PassInputs(
                kept={name: a for name, a in state.kept().items() if name not in outer.OUTER},
                in_flight=state.in_flight(),
                counters=engine.counters(state.counters()),
                num_entered=num_entered,
                batch=batch,
                rows=rows,
            ),
        )
        totals = self.metrics.totals(results, kept)
        return dataclasses.replace(state, **kept, **in_flight, round=state.round + 1), totals

    def _drained(self, state: PipelineState, rows: jax.Array) -> tuple[PipelineState, dict]:
        """Passes over the table without new microbatches; the state, and metrics of all passes together."""
        num_rounds = self.engine.lowered.drain_rounds
        if num_rounds == 0:
            return state, self.metrics.nothing(state)
        num_entered = state.round * self.settings.schedule.num_microbatches

        def drain(arrays: collections.OrderedDict, _: None) -> tuple[collections.OrderedDict, dict]:
            state, totals = self._over_table(_state(arrays), num_entered, None, rows)
            return state.arrays(), totals

        arrays, totals = jax.lax.scan(drain, state.arrays(), length=num_rounds)
        return _state(arrays), self.metrics.means(self.metrics.over_passes(totals))

    def _outputs(self, state: PipelineState, metrics: dict) -> Outputs:
        def parts(state: PipelineState) -> tuple[collections.OrderedDict, collections.OrderedDict]:
            return _in_order({**state.kept(), **state.counters()}), _in_order(state.in_flight())

        kept, in_flight = parts(state)
        if self.settings.automatic_mesh is not None:
            kept, in_flight = jax.tree.map(
                lambda a, want: jax.lax.with_sharding_constraint(a, want.sharding),
                (kept, in_flight),
                parts(self._abstract),
            )
        return kept, in_flight, metrics


def _state(arrays: Arrays) -> PipelineState:
    """The state with these arrays, inside of a function that has no need of its program."""
    return PipelineState(**arrays, program=None)


def _in_order(groups: Mapping[str, Any]) -> collections.OrderedDict:
    """Groups of arrays in the order of the fields of a state.

    JAX gives a donated array to the first output of its shape. In another order it would give the weights to the
    optimizer's state, and XLA would copy both.
    """
    names = [field.name for field in dataclasses.fields(PipelineState)]
    return collections.OrderedDict((name, groups[name]) for name in names if name in groups)
