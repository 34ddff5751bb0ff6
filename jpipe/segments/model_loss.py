"""A model that returns its loss: its end becomes the loss of the pipeline.

    inputs ──all that reads weights──│──the end── loss
                                  outputs

The outputs have rows. So the loss of a whole batch is computed from all its rows together, and it can be checked that
the loss is a mean over rows. Where something without rows crosses, such as a penalty that was summed over layers, the
last segment computes the loss of its microbatch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.layers.avals import abstract, shapes_key
from jpipe.layers.equations import variables
from jpipe.layers.layer import Layer
from jpipe.layers.loss import Loss
from jpipe.segments.places import DataFlow
from jpipe.segments.program import ModelProgram
from jpipe.segments.trace import Trace, Tracing


class ModelLoss:
    """The loss that a model returns.

    Args:
      bound: `(args, tracing) -> the model`, for arguments of any number of rows.
      with_arguments: makes the arguments of the model the entry "inputs" of a user's batch.
      has_aux: whether the model returns `(loss, aux)`.

    Attributes:
      loss: of a pipeline whose layers are the model without its end.
    """

    def __init__(self, bound: Callable[[tuple, Tracing], Layer], with_arguments: Callable[[Any], Any], has_aux: bool):
        self._bound, self._with_arguments = bound, with_arguments
        self._tracing: Tracing | None = None
        self._ends: dict[tuple, _End] = {}
        self._has_end = True
        evaluated = Loss(functools.partial(self._value, False), has_aux)
        self.loss = _LossOfModel(functools.partial(self._value, True), has_aux, evaluated=evaluated)

    def heads(self, tracing: Tracing, args: tuple, trained: Trace, evaluated: Trace) -> tuple[Trace, Trace]:
        """The model in training and in evaluation without its end."""
        self._tracing = tracing
        ends = _End.of(trained), _End.of(evaluated)
        self._ends |= {(is_training, *shapes_key(args)): end for is_training, end in zip((True, False), ends)}
        self._has_end = all(end.begins_with for end in ends)
        if not self._has_end:
            return trained, evaluated
        first, second = (end.trace.with_outputs(_one_or_all(end.begins_with)) for end in ends)
        return first, second

    def _value(self, is_training: bool, outputs: Any, batch: Any) -> Any:
        """What the model returns, from the outputs of the last segment."""
        args = (self._with_arguments(batch)["inputs"],)
        if not self._has_end:
            return _mean_of_microbatches(outputs, jax.tree.leaves(args)[0].shape[0])
        return self._end(is_training, abstract(args))(jax.tree.leaves(outputs), jax.tree.leaves(args))

    def _end(self, is_training: bool, args: tuple) -> "_End":
        key = is_training, *shapes_key(args)
        if key not in self._ends:
            assert self._tracing is not None
            trace = self._tracing.training if is_training else self._tracing.evaluation
            self._ends[key] = _End.of(trace(self._bound(args, self._tracing), args))
        return self._ends[key]


class _End(NamedTuple):
    """The end of a traced model: all that follows the last equation that reads weights, state or random keys.

    Attributes:
      trace: of the model.
      begins_with: the variables that it begins with, beside the inputs of the model, in the order of their equations;
        `()` if there are none, or one of them has no rows.
      program: from these variables and the inputs to what the model returns.
    """

    trace: Trace
    begins_with: tuple
    program: ModelProgram

    @classmethod
    def of(cls, trace: Trace) -> "_End":
        """The end of a trace."""
        flow, leaves = trace.flow, jax.tree.leaves(trace.outputs)
        values = _values_at(flow, _last_read(flow), leaves)
        rows = flow.roles.data[0].aval.shape[:1]
        values = values if all(v.aval.shape[:1] == rows for v in values) else ()
        if not values:
            return cls(trace, (), flow.program)
        return cls(trace, values, flow.program.part([*values, *flow.roles.data], leaves))

    def __call__(self, values: Sequence, data: Sequence) -> Any:
        """What the model returns."""
        given = [a.astype(v.aval.dtype) for a, v in zip(values, self.begins_with, strict=True)]
        return jax.tree.structure(self.trace.outputs).unflatten(self.program(*given, *data))


@dataclasses.dataclass(frozen=True)
class _LossOfModel(Loss):
    """The loss that a model returns.

    Attributes:
      evaluated: what it returns in evaluation.
    """

    evaluated: Loss | None = None

    @property
    def in_evaluation(self) -> Loss:
        """See `Loss`."""
        return self.evaluated or self


def _one_or_all(values: tuple) -> Any:
    return values[0] if len(values) == 1 else values


def _mean_of_microbatches(outputs: Any, num_rows: int) -> Any:
    """The outputs of one microbatch as they are; of several ones, along a leading axis, their means."""
    number = jax.tree.leaves(outputs)[0].shape[:1]
    if not number:
        return outputs
    if num_rows % number[0]:
        raise ValueError(
            "the model returns its loss, and a value without rows enters it, such as a sum over layers. So the loss of "
            f"a batch is the mean of those of its microbatches, and {num_rows} rows are no multiple of {number[0]}. "
            "Give a batch that can be cut into microbatches, or return outputs and give `loss=`."
        )
    return jax.tree.map(lambda a: jnp.mean(a, axis=0), outputs)


def _values_at(flow: DataFlow, position: int, leaves: Sequence) -> tuple:
    """The variables computed before a position from which `leaves` follow, with the inputs of the model."""
    producer = {v: i for i, eqn in enumerate(flow.program.equations) for v in eqn.outvars}
    values: set = set()
    visited: set = set()
    needed = list(variables(leaves))
    while needed:
        v = needed.pop()
        if v in visited or v not in producer:
            continue
        visited.add(v)
        if v in flow.passed and producer[v] < position:
            values.add(v)
        else:
            needed += variables(flow.program.equations[producer[v]].invars)
    return tuple(sorted(values, key=producer.__getitem__))


def _last_read(flow: DataFlow) -> int:
    """The number of equations up to the last that applies weights, state or keys to what varies."""
    roles, equations = flow.roles, flow.program.equations
    sources = set(roles.held)
    held = sources | (flow.program.depending_on(sources) - flow.varying)

    def applies(eqn: Any) -> bool:
        return bool(eqn.effects) or (
            not held.isdisjoint(variables(eqn.invars)) and any(v in flow.varying for v in eqn.outvars)
        )

    return max((i + 1 for i, eqn in enumerate(equations) if applies(eqn)), default=0)
