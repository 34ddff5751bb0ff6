"""A whole model as a traced program."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jpipe.layers.avals import cast
from jpipe.layers.axis_rules import AxisRules, constraints_on
from jpipe.layers.batch_norm import recording
from jpipe.layers.layer import Layer
from jpipe.layers.report import collect
from jpipe.segments.places import DataFlow, Roles
from jpipe.segments.program import ModelProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A traced model.

    Attributes:
      flow: of its equations.
      results: the structure of `(outputs, what it reports to the loss)`.
    """

    flow: DataFlow
    results: Any

    @classmethod
    def of(cls, run: Callable[..., tuple], model: Layer, keys: tuple, args: tuple) -> "Trace":
        """The trace of `(parameters, state, *keys, args) -> (outputs, new state, what it reports)`."""
        with recording():
            closed, shapes = jax.make_jaxpr(run, return_shape=True)(model.parameters, model.state, *keys, args)
        program = ModelProgram.of(closed, len(jax.tree.leaves(model.parameters)))
        outputs, state, reported = jax.tree.structure(shapes).unflatten(program.outputs)
        results, structure = jax.tree.flatten((outputs, reported))
        lengths = [len(jax.tree.leaves(tree)) for tree in (model.parameters, model.state, keys)]
        inputs = iter(program.inputs)
        groups = [tuple(itertools.islice(inputs, n)) for n in lengths]
        parameters, state_before, keys_read = groups
        roles = Roles(parameters, state_before, keys_read, tuple(inputs), tuple(results), tuple(jax.tree.leaves(state)))
        return cls(DataFlow(program, roles), structure)

    @property
    def outputs(self) -> Any:
        """The variables that the model returns."""
        outputs, _ = self.results.unflatten(self.flow.roles.results)
        return outputs

    def with_outputs(self, outputs: Any) -> "Trace":
        """The model, but it returns other variables."""
        program, roles = self.flow.program, self.flow.roles
        _, reported = self.results.unflatten(roles.results)
        results, structure = jax.tree.flatten((outputs, reported))
        effects = [eqn for eqn in program.equations if eqn.effects]
        program = program.part(program.inputs, [*results, *roles.new_state], effects)
        return Trace(DataFlow(program, dataclasses.replace(roles, results=tuple(results))), structure)


class Tracing(NamedTuple):
    """The options of a trace.

    Attributes:
      compute_dtype: as of `Pipeline`.
      key_impl: implementation of random keys.
      mesh: the mesh that layers are traced on; None without axes that are left to the compiler.
      axis_rules: from logical names to its axes.
    """

    compute_dtype: Any
    key_impl: Any
    mesh: Mesh | None
    axis_rules: AxisRules

    def training(self, model: Layer, args: tuple) -> Trace:
        """The model in training."""

        def run(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple:
            with collect() as reported:
                outputs, state = model.train(*self._cast((parameters,)), state, key, self._cast(args))
            return outputs, state, dict(reported)

        key = jax.eval_shape(lambda: jax.random.key(0, impl=self.key_impl))
        with constraints_on(self.mesh, self.axis_rules):
            return Trace.of(run, model, (key,), args)

    def evaluation(self, model: Layer, args: tuple) -> Trace:
        """The model in evaluation."""

        def run(parameters: Any, state: Any, args: tuple) -> tuple:
            return model.evaluate(*self._cast((parameters,)), state, self._cast(args)), {}, {}

        with constraints_on(self.mesh, self.axis_rules):
            return Trace.of(run, model, (), args)

    def _cast(self, tree: Any) -> Any:
        return cast(tree, self.compute_dtype)
