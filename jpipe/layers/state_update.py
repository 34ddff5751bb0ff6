"""The changes of a layer's mutable state by its calls.

A layer is traced once with its state, and its equations say what becomes of each leaf:

- *constant*: no call writes the leaf. It keeps its bits, and a backward reads it where it lies.
- *in sequence*: every microbatch gets what the microbatch before it left, as in a plain loop over microbatches.
- *deferred*: running statistics of batch norms. They move once per minibatch, by the statistics of all its rows.

Statistics of microbatches are combined by counts, means and centred second moments, so large means keep their variance.

References:
  Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jpipe.layers.avals import abstract, is_inexact, real_dtype, squares
from jpipe.layers.batch_norm import recorded, recording, with_statistics
from jpipe.layers.equations import Equations
from jpipe.layers.flow import Flow

Total = Callable[[jax.Array], jax.Array]
"""The sum of a value over groups of rows."""


@dataclasses.dataclass(frozen=True)
class StateUpdate:
    """The mutable state of one kind of layer, and how it moves.

    Attributes:
      leaves: abstract values of the state.
      sequence: positions of the leaves that every microbatch moves.
      varying: the leaves of `sequence` whose new values depend on the rows of the batch, or on random draws.
      deferred: positions of the leaves that a minibatch moves.
      calls: per call of a batch norm that moves the state the abstract values of its record, see
        `jpipe.layers.batch_norm.Record`.
      numbers: the number of each of these calls among all that record.
      move: `[*state, *records] -> ` the new values of the deferred leaves; None without them.
    """

    leaves: tuple = ()
    sequence: tuple[int, ...] = ()
    varying: tuple[int, ...] = ()
    deferred: tuple[int, ...] = ()
    calls: tuple[tuple, ...] = ()
    numbers: tuple[int, ...] = ()
    move: Equations | None = None

    @property
    def constants(self) -> tuple[int, ...]:
        """Positions of the leaves that no call writes."""
        written = {*self.sequence, *self.deferred}
        return tuple(i for i, _ in enumerate(self.leaves) if i not in written)

    @property
    def moves(self) -> bool:
        """True if training moves any of the state."""
        return bool(self.sequence or self.deferred)

    def is_read_by(self, program: Any) -> bool:
        """Returns whether the outputs or gradients of a `LayerProgram` depend on state that training moves."""
        moved = {*self.sequence, *self.deferred}
        return any(program.outputs_read_extra[1 + j] for j in moved)  # after the key

    @property
    def text(self) -> str:
        """Layers with equal texts, and equal programs, move their state alike."""
        move = "" if self.move is None else self.move.text()
        return f"{self.sequence} {self.varying} {self.deferred}\n{move}"

    # -- Microbatches

    def results(self, run: Callable[..., tuple], *args: Any) -> tuple[tuple, tuple]:
        """Runs a layer: its results without the state, and the movers of the state: records, and leaves in sequence.

        Args:
          run: `(parameters, state, key, args) -> (outputs, new state, ...)`.
          *args: the arguments of `run`.
        """
        if not self.calls:
            outputs, state, *rest = run(*args)
            records: list = []
        else:
            traced = _TracedCall.of(run, *args)
            leaves, records = recorded(traced.closed, jax.tree.leaves(args))
            outputs, state, *rest = traced.tree.unflatten(leaves)
            records = [records[i] for i in self.numbers]
        values = jax.tree.leaves(state)
        new = [jnp.asarray(values[i], self.leaves[i].dtype) for i in self.sequence]
        return (outputs, *rest), (records, new)

    @property
    def num_recorded(self) -> int:
        """The number of leaves of all records."""
        return sum(map(len, self.calls))

    def sequence_values(self, old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves in sequence after a microbatch. A finite leaf stays if it would not be finite."""
        return [_if_finite(old[i], value) for i, value in zip(self.sequence, new)]

    # -- Statistics of a minibatch

    @property
    def statistics(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Statistics of the microbatches so far.

        Their number; for each call the mean, the sum of squares around it, and with a mask the number of rows.
        """
        if not self.calls:
            return ()
        values = [a for record in self.calls for a in record]
        dtype = real_dtype(values)
        kept = [jax.ShapeDtypeStruct(a.shape, np.result_type(a.dtype, dtype)) for a in values]
        return (jax.ShapeDtypeStruct((), dtype), *kept)

    def added(self, statistics: Sequence[jax.Array], recorded: Sequence[jax.Array]) -> list[jax.Array]:
        """Adds one more microbatch to the statistics. Its records are a flat list."""
        number, *kept = statistics
        result = [number + 1]
        for group, (mean, variance, *rows) in zip(self._by_call(kept), self._by_call(recorded), strict=True):
            weight = group[2] if rows else number
            added = rows[0].astype(weight.dtype) if rows else jnp.ones_like(number)
            mean, variance = (
                mean.astype(group[0].dtype),
                variance.astype(group[1].dtype),
            )
            if rows:  # a call without rows has no mean
                mean = jnp.where(added > 0, mean, 0)
                variance = jnp.where(added > 0, variance, 0)
            total = weight + added
            share = added / jnp.maximum(total, 1)
            distance = mean - group[0]
            result += [
                group[0] + distance * share,
                group[1] + added * variance + squares(distance, group[1].dtype) * weight * share,
            ]
            result += [total] if rows else []
        return result

    def pooled(self, statistics: Sequence[jax.Array], total: Total) -> list[jax.Array]:
        """The statistics of all groups of rows, such as replicas, from those of each."""
        number, *kept = statistics
        result = [total(number)]
        for mean, around, *rows in self._by_call(kept):
            weight = rows[0] if rows else _along(number, mean)
            whole = total(weight)
            pooled = total(weight * mean) / jnp.maximum(whole, 1)
            result += [
                pooled,
                total(around + weight * squares(mean - pooled, around.dtype)),
            ]
            result += [whole] if rows else []
        return result

    def moved(self, state: Sequence[jax.Array], statistics: Sequence[jax.Array]) -> list[jax.Array]:
        """The deferred leaves after a minibatch with these statistics. They stay if any would not be finite."""
        assert self.move is not None
        number, *kept = statistics
        records: list[jax.Array] = []
        for group, record in zip(self._by_call(kept), self.calls, strict=True):
            weight = group[2] if len(group) == 3 else number
            # Without any row there is no mean, as in Flax.
            values = [
                jnp.where(weight > 0, group[0], jnp.nan),
                group[1] / weight,
                *group[2:],
            ]
            records += [v.astype(a.dtype) for v, a in zip(values, record)]
        new = self.move(*state, *records)
        old = [state[i] for i in self.deferred]
        broken = jnp.stack([_breaks(a, b) for a, b in zip(old, new)]).any()
        return [jnp.where(broken, a, b) for a, b in zip(old, new)]

    def _by_call(self, values: Sequence) -> list[Sequence]:
        """Splits a flat list of the calls' arrays into one list per call."""
        result, start = [], 0
        for record in self.calls:
            result.append(values[start : start + len(record)])
            start += len(record)
        return result


def _along(number: jax.Array, value: jax.Array) -> jax.Array:
    """One number for each group, `[groups...]`, against values `[groups..., ...]`."""
    return number.reshape(number.shape + (1,) * (value.ndim - number.ndim))


def _breaks(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns whether a finite number of a leaf would become infinite or NaN."""
    if not is_inexact(new):
        return jnp.zeros((), bool)
    return (jnp.isfinite(old) & ~jnp.isfinite(new)).any()


def _if_finite(old: jax.Array, new: jax.Array) -> jax.Array:
    return jnp.where(_breaks(old, new), old, new) if is_inexact(new) else new


# -- Tracing


@dataclasses.dataclass(frozen=True)
class _TracedCall:
    """A traced function.

    Attributes:
      closed: the jaxpr, from and to flat lists.
      tree: the tree of the results.
    """

    closed: jex.ClosedJaxpr
    tree: Any

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any) -> "_TracedCall":
        """Traces a function of pytrees; batch norms in it record."""
        with recording():
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        return cls(closed, jax.tree.structure(shapes))


def trace_state(run: Callable[..., tuple], parameters: Any, state: Any, key: Any, args: Any) -> StateUpdate:
    """Traces the change of a layer's state.

    Args:
      run: `(parameters, state, key, args) -> (outputs, new state, ...)`.
      parameters, state, key, args: abstract arguments.

    Raises:
      BatchNormError: see `recorded`.
      ValueError: if a call changes the structure or the shapes of the state.
    """
    leaves, tree = jax.tree.flatten(state)
    if not leaves:
        return StateUpdate()
    given = (parameters, state, key, args)
    traced = _TracedCall.of(run, *given)
    flat = jax.tree.leaves(given)
    results = traced.tree.unflatten(range(len(traced.closed.jaxpr.outvars)))
    _check_structure(state, results[1], traced.closed.out_avals)
    positions = jax.tree.leaves(results[1])
    records = jax.eval_shape(lambda *a: recorded(traced.closed, a)[1], *flat)
    recorded_leaves, record_tree = jax.tree.flatten(records)

    def new_state(*values: jax.Array) -> list:
        given = record_tree.unflatten(values[len(flat) :])
        results = with_statistics(traced.closed, values[: len(flat)], given)
        return [jnp.asarray(results[i], leaf.dtype) for i, leaf in zip(positions, leaves)]

    flow = Flow.of(new_state, *flat, *recorded_leaves)
    first = len(jax.tree.leaves(parameters))
    state_inputs = range(first, first + len(leaves))
    record_inputs = range(len(flat), len(flat) + len(recorded_leaves))
    inputs = {*range(first + len(leaves), len(flat)), *record_inputs}
    sequence, varying, deferred = [], [], []
    for i, position in enumerate(state_inputs):
        if flow.source(i) == position:
            continue
        read = flow.read(i)
        if not read.isdisjoint(record_inputs) and read <= {
            *state_inputs,
            *record_inputs,
        }:
            deferred.append(i)
            continue
        sequence.append(i)
        if not read.isdisjoint(inputs):
            varying.append(i)
    read = flow.read(*deferred)
    calls = jax.tree.unflatten(record_tree, record_inputs)
    numbers = [n for n, call in enumerate(calls) if not read.isdisjoint(call)]
    kept = [i for n in numbers for i in calls[n]]
    return StateUpdate(
        leaves=tuple(abstract(leaves)),
        sequence=tuple(sequence),
        varying=tuple(varying),
        deferred=tuple(deferred),
        calls=tuple(tuple(abstract(records[n])) for n in numbers),
        numbers=tuple(numbers),
        move=flow.slice([*state_inputs, *kept], deferred) if deferred else None,
    )


def _check_structure(state: Any, results: Any, avals: Sequence) -> None:
    """Refuses a layer whose calls change the structure, or the shapes, of its state."""
    after = jax.tree.map(lambda i: avals[i], results)
    before, after = (
        {jax.tree_util.keystr(path): a.shape for path, a in jax.tree.leaves_with_path(tree)} for tree in (state, after)
    )
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if changed:
        shapes = (before.get(changed[0]), after.get(changed[0]))
        was, is_now = ("absent" if s is None else str(list(s)) for s in shapes)
        raise ValueError(
            f"a call changes the form of its mutable state: {changed[0]} is {was} before and {is_now} after. State "
            "must keep its structure and shapes from call to call. What a layer tells the loss goes to `jpipe.report`."
        )
