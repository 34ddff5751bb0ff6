"""A model that returns its loss: its end becomes the loss of the pipeline.

    inputs ──all that reads weights──│──the end── loss
                                  outputs

The outputs have rows. So the loss of a whole batch is computed from all its rows together, and it can be checked that
the loss is a mean over rows. Where something without rows crosses, such as a penalty that was summed over layers, the
last segment computes the loss of its microbatch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.layers.avals import abstract, shapes_key
from jpipe.layers.equations import variables
from jpipe.layers.layer import Layer
from jpipe.layers.loss import Loss
from jpipe.segments.places import DataFlow
from jpipe.segments.trace import Trace, Tracing


class ModelLoss:
    """The loss that a model returns.

    Args:
      bound: `args -> the model`, for arguments of any number of rows.
      with_arguments: makes the arguments of the model the entry "inputs" of a user's batch.
      has_aux: whether the model returns `(loss, aux)`.

    Attributes:
      loss: of a pipeline whose layers are the model without its end.
    """

    def __init__(self, bound: Callable[[tuple], Layer], with_arguments: Callable[[Any], Any], has_aux: bool):
        self._bound, self._with_arguments = bound, with_arguments
        self._tracing: Tracing | None = None
        self._traces: dict[tuple, Trace] = {}
        self._ends = True
        evaluated = Loss(functools.partial(self._value, False), has_aux)
        self.loss = _LossOfModel(functools.partial(self._value, True), has_aux, evaluated=evaluated)

    def heads(self, tracing: Tracing, args: tuple, trained: Trace, evaluated: Trace) -> tuple[Trace, Trace]:
        """The model in training and in evaluation without its end."""
        self._tracing = tracing
        traces = {True: trained, False: evaluated}
        self._traces |= {(is_training, *shapes_key(args)): trace for is_training, trace in traces.items()}
        first, second = map(_values_before_end, (trained, evaluated))
        self._ends = first is not None and second is not None
        if first is None or second is None:
            return trained, evaluated
        return trained.with_outputs(_one_or_all(first)), evaluated.with_outputs(_one_or_all(second))

    def _value(self, is_training: bool, outputs: Any, batch: Any) -> Any:
        """What the model returns, from the outputs of the last segment."""
        args = (self._with_arguments(batch)["inputs"],)
        if not self._ends:
            return _mean_of_microbatches(outputs, jax.tree.leaves(args)[0].shape[0])
        trace = self._trace(is_training, abstract(args))
        values = _values_before_end(trace)
        assert values is not None
        leaves, structure = jax.tree.flatten(trace.outputs)
        end = trace.flow.program.part([*values, *trace.flow.roles.data], leaves)
        given = [a.astype(v.aval.dtype) for a, v in zip(jax.tree.leaves(outputs), values, strict=True)]
        return structure.unflatten(end(*given, *jax.tree.leaves(args)))

    def _trace(self, is_training: bool, args: tuple) -> Trace:
        key = is_training, *shapes_key(args)
        if key not in self._traces:
            assert self._tracing is not None
            trace = self._tracing.training if is_training else self._tracing.evaluation
            self._traces[key] = trace(self._bound(args), args)
        return self._traces[key]


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


def _values_before_end(trace: Trace) -> tuple | None:
    """The variables that the end of a model begins with, beside the model's inputs.

    The end is all that follows the last equation that reads weights, state or random keys.

    Returns:
      Variables in the order of their equations; None if there are none, or one of them has no rows.
    """
    flow = trace.flow
    position = _last_read(flow)
    producer = {v: i for i, eqn in enumerate(flow.program.equations) for v in eqn.outvars}
    passed = flow.varying - flow.cheap
    values: set = set()
    visited: set = set()
    needed = list(variables(jax.tree.leaves(trace.outputs)))
    while needed:
        v = needed.pop()
        if v in visited or v not in producer:
            continue
        visited.add(v)
        if v in passed and producer[v] < position:
            values.add(v)
        else:
            needed += variables(flow.program.equations[producer[v]].invars)
    rows = flow.roles.data[0].aval.shape[:1]
    have_rows = all(v.aval.shape[:1] == rows for v in values)
    return tuple(sorted(values, key=producer.__getitem__)) if values and have_rows else None


def _last_read(flow: DataFlow) -> int:
    """The number of equations up to the last that applies weights, state or keys to what varies."""
    roles, equations = flow.roles, flow.program.equations
    sources = {*roles.parameters, *roles.state, *roles.keys}
    held = sources | (flow.program.depending_on(sources) - flow.varying)

    def applies(eqn: Any) -> bool:
        return bool(eqn.effects) or (
            not held.isdisjoint(variables(eqn.invars)) and any(v in flow.varying for v in eqn.outvars)
        )

    return max((i + 1 for i, eqn in enumerate(equations) if applies(eqn)), default=0)
