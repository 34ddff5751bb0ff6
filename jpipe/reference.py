"""A table walked in plain Python on one device: the executable meaning of a table.

Slow and simple: every activation, stash, gradient and weight version is an entry of a dictionary, keyed by copy of a
stage, microbatch or version. A copy is `(stage, device)`. If the table asks for an entry that is not there, the
operation fails with a KeyError.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jpipe.layers.as_layers import as_layers
from jpipe.layers.avals import is_inexact
from jpipe.layers.loss import Loss, WholeBatchLoss, mean_of_sums
from jpipe.layers.trace import trace_layers
from jpipe.schedule import IDLE, Schedule
from jpipe.stages.boundaries import check_boundaries
from jpipe.stages.cut import cut
from jpipe.stages.optimizer_tree import stage_tree

__all__ = ["Reference"]


class Reference:
    """Trains by walking a table, one cell after the other.

    Args:
      layers: see `jpipe.Pipeline`.
      loss: see `jpipe.Pipeline`.
      optimizer: see `jpipe.Pipeline`.
      schedule: see `jpipe.Pipeline`.
      params: the weights to start from: one nested dict per layer.
      boundaries: see `jpipe.Pipeline`.

    Example:
      >>> import jax.numpy as jnp, jpipe
      >>> layer = jpipe.Function(jnp.tanh)
      >>> reference = Reference(
      ...     [layer], lambda y, batch: y.mean(), optax.sgd(0.1), jpipe.schedules.gpipe(1, 2), params=[{}]
      ... )
      >>> float(reference.step({"inputs": jnp.zeros((4, 3))}))
      0.0
    """

    def __init__(
        self,
        layers: Sequence,
        loss: Callable,
        optimizer: optax.GradientTransformation,
        schedule: Schedule,
        *,
        params: Sequence,
        boundaries: Sequence[int] | str | None = None,
    ):
        self.layers, self.loss, self.schedule = (
            as_layers(layers),
            loss,
            schedule.check(),
        )
        if isinstance(loss, WholeBatchLoss):
            raise ValueError("`Reference` takes the loss of one microbatch at a time, got a `WholeBatchLoss`.")
        if schedule.num_slices > 1:
            raise ValueError(
                f"`Reference` runs whole sequences, and schedule {schedule.name!r} has {schedule.num_slices} slices of "
                "each. Compare with `Pipeline.plain_loss`, or with a schedule without slices."
            )
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.starts = check_boundaries(boundaries, len(self.layers), schedule.num_stages)
        self.round = 0
        # (copy, version) -> one tree per layer, None for the layers of other stages
        self.weights: dict[tuple[tuple[int, int], int], Any] = {}
        self.params = list(params)
        self.stages: Any = None  # `Stages`, once the shapes of a batch are known
        self.traced: Any = None  # `TrainingTrace`, from then on too
        self.batches: dict[int, Any] = {}
        self.stash: dict = {}
        self.inbox: dict = {}
        self.under_way: dict[int, dict] = {}  # by the first tick that can read a message, over all rounds
        self.split_residuals: dict = {}
        self.gradients: dict[tuple[int, int], Any] = {}  # by copy
        self.optimizer_state: dict[tuple[int, int], Any] = {}  # by copy

    def _start(self, microbatch: Any) -> None:
        """Cuts the model and makes the first weights, once the shapes are known."""
        self.traced = trace_layers(self.layers, Loss.of(self.loss, False), microbatch)
        self.stages = cut(self.traced, self.starts, self.schedule.num_stages)
        for s, devices in enumerate(self.schedule.copies):
            tree = stage_tree(self.stages, s, self.params)
            for copy in ((s, d) for d in devices):
                self.weights[copy, 0] = tree
                self.optimizer_state[copy] = self.optimizer.init(tree)
                self.gradients[copy] = jax.tree.map(np.zeros_like, tree)

    def step(self, batch: Any) -> float | None:
        """Runs one pass over the table.

        Args:
          batch: a minibatch: dict of arrays `[batch, ...]`.

        Returns:
          The mean loss of the microbatches that finished; None if none did.
        """
        N = self.schedule.num_microbatches
        cut_batch = jax.tree.map(lambda a: np.asarray(a).reshape(N, len(a) // N, *a.shape[1:]), batch)
        for m in range(N):
            self.batches[self.round * N + m] = jax.tree.map(lambda a, m=m: a[m], cut_batch)
        if self.stages is None:
            first = self.batches[0]
            self._start(
                jax.tree.map(
                    lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)),
                    first,
                )
            )
        losses: list[tuple] = []
        for t in range(self.schedule.num_ticks):
            arriving: dict = {}
            for c in range(self.schedule.num_columns):
                self._cell(t, c, arriving, losses)
            self._updates(t)
            now = self.round * self.schedule.num_ticks + t
            for message, value in arriving.items():
                self.under_way.setdefault(now + self._way(*message), {})[message] = value
            self.inbox |= self.under_way.pop(now + 1, {})
        self.round += 1
        if not losses:
            return None
        total, sums = jax.tree.map(lambda *values: sum(values), *losses)
        return float(mean_of_sums(total, sums, np.int32(len(losses)))[0])

    def get_params(self) -> list:
        """The newest weights: one nested dict per layer."""
        firsts = [(s, devices[0]) for s, devices in enumerate(self.schedule.copies)]
        newest = [max(v for copy, v in self.weights if copy == c) for c in firsts]
        stage_of = [s for s in range(self.schedule.num_stages) for _ in self.stages.layers_of(s)]
        return [self.weights[firsts[s], newest[s]][i] for i, s in enumerate(stage_of)]

    def _cell(self, t: int, c: int, arriving: dict, losses: list) -> None:
        """Runs the operations of one cell, but its update. A later tick reads `arriving`, the messages."""
        copy = int(self.schedule.stage[c]), int(self.schedule.device[c])

        def cell(field: str) -> Any:
            return self._number(field, t, c)

        m = cell("forward")
        if m is not None and m >= 0:
            self._forward(copy, m, cell("forward_version"), arriving, losses)
        m = cell("backward")
        if m is not None and m >= 0:
            self._backward(copy, m, cell("backward_version"), arriving)
        m = cell("weight_grad")
        if m is not None and m >= 0:
            for i, weights, values in self.split_residuals.pop((copy[0], m)):
                stash = self.stash[i, m]
                self._accumulate(copy, i, self._kind(i).weight_grad(weights, stash, values))

    def _way(self, stage: int, m: int, what: str) -> int:
        """The ticks of a message to a stage."""
        source = stage - 1 if what == "activation" else stage + 1
        columns = self.schedule.column_of_microbatch[m % self.schedule.num_microbatches]
        return int(self.schedule.ticks_between(*self.schedule.device[columns[[source, stage]]]))

    def _number(self, field: str, t: int, c: int) -> int | None:
        """The microbatch or version of a cell, counted from the start of training; None if idle."""
        value = int(getattr(self.schedule, field)[t, c])
        if value == IDLE:
            return None
        updates = int(self.schedule.updates_in_round[self.schedule.stage[c]])
        if field.endswith("version"):  # before the first update there is version 0
            return max(value + self.round * updates, 0)
        return value + self.round * (updates if field == "update" else self.schedule.num_microbatches)

    def _updates(self, t: int) -> None:
        """Runs the updates of a tick. Every copy of a stage applies the sum of all copies' gradients."""
        for s, devices in enumerate(self.schedule.copies):
            c = int(self.schedule.column_of_stage[s])  # all columns of a stage agree
            version = self._number("update", t, c)
            if version is None or version < 1:
                continue
            copies = [(s, d) for d in devices]
            gradients = [self.gradients[copy] for copy in copies]
            # The loss is divided by all microbatches of a minibatch. An update takes the mean over its own.
            updates = int(self.schedule.updates_in_round[s])
            total = jax.tree.map(lambda *values, times=updates: sum(values) * times, *gradients)
            for copy in copies:
                tree = self.weights[copy, version - 1]
                moves, self.optimizer_state[copy] = self.optimizer.update(total, self.optimizer_state[copy], tree)
                self.weights[copy, version] = optax.apply_updates(tree, moves)
                self.gradients[copy] = jax.tree.map(np.zeros_like, tree)

    def _weight(self, m: int) -> float:
        """The weight of a microbatch in the loss of its minibatch."""
        weight = self.traced.loss_weight
        if weight is None:
            return 1.0
        return float(weight(*jax.tree.leaves(self.batches[m]))[0])

    def _kind(self, layer: int):
        return self.stages.layer_kinds[self.stages.kind_of_layer[layer]]

    def _forward(
        self,
        copy: tuple[int, int],
        m: int,
        version: int,
        arriving: dict,
        losses: list,
    ) -> None:
        """Microbatch m forward; the last stage also takes the loss and its gradient."""
        s, _ = copy
        x = jax.tree.leaves(self.batches[m]["inputs"]) if s == 0 else self.inbox.pop((s, m, "activation"))
        for i in self.stages.layers_of(s):
            weights = jax.tree.leaves(self.weights[copy, version][i])
            x, self.stash[i, m], _ = self._kind(i).forward_and_stash(
                weights, x, [jax.random.key_data(jax.random.key(0))]
            )
        if s < self.schedule.num_stages - 1:
            arriving[s + 1, m, "activation"] = x
        else:
            loss, N = self.traced.loss, self.schedule.num_microbatches
            values, stash, aux = loss.forward_and_stash([], x, jax.tree.leaves(self.batches[m]))
            losses.append((values[0], loss.aux_tree.unflatten(aux)))
            minibatch = range(m // N * N, (m // N + 1) * N)
            divisors = [sum(self._weight(k) for k in minibatch), N]
            gradients = [
                np.ones((), value.dtype) / np.asarray(divisor, value.dtype) for value, divisor in zip(values, divisors)
            ]
            self.inbox[s, m, "gradient"] = loss.backward([], stash, gradients)[1]

    def _backward(self, copy: tuple[int, int], m: int, version: int, arriving: dict) -> None:
        """Microbatch m backward; in a table that splits it, the input gradient alone."""
        s, _ = copy
        gy, later = self.inbox.pop((s, m, "gradient")), []
        for i in reversed(self.stages.layers_of(s)):
            weights = jax.tree.leaves(self.weights[copy, version][i])
            if self.schedule.splits_backward:
                gx, split_residuals = self._kind(i).input_grad(weights, self.stash[i, m], gy)
                later.append((i, weights, split_residuals))
            else:
                gp, gx = self._kind(i).backward(weights, self.stash.pop((i, m)), gy)
                self._accumulate(copy, i, gp)
            gy = gx
        if later:
            self.split_residuals[s, m] = later
        if s > 0:
            assert len(gy) == sum(is_inexact(a) for a in self._kind(self.stages.starts[s]).inputs)
            arriving[s - 1, m, "gradient"] = gy

    def _accumulate(self, copy: tuple[int, int], layer: int, values: Sequence) -> None:
        """Adds to the gradients of a layer."""
        leaves, tree = jax.tree.flatten(self.gradients[copy][layer])
        self.gradients[copy][layer] = tree.unflatten([a + np.asarray(v) for a, v in zip(leaves, values, strict=True)])
