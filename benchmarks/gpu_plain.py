"""The training step without a pipeline that `compile_gpu.py` compiles: a scan over microbatches."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import gpu_steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from gpu_rows import Variant
from gpu_steps import Case, Sizes
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jpipe
from jpipe.layers.avals import cast
from jpipe.layers.axis_rules import axes_of_dims, rules_for


class _Run(NamedTuple):
    """Consecutive equal layers.

    Attributes:
      graph: of the layer.
      skips: names of its skips.
      parameters: abstract weights; of more than one layer `[layers, ...]`.
      state: abstract mutable state, likewise.
      length: number of layers.
      dtype: what the layers compute in.
    """

    graph: Any
    skips: dict[str, str]
    parameters: Any
    state: Any
    length: int
    dtype: Any

    def apply(self, parameters: Any, state: Any, x: Any, popped: Sequence) -> tuple[Any, Any]:
        """Outputs and new state of one layer."""
        parameters = cast(parameters, self.dtype)
        layer = nnx.merge(self.graph, parameters, state, copy=True)
        outputs = layer(x, *popped)
        return outputs, nnx.split(layer, nnx.Param, ...)[2]


def _runs(case: Case, is_rolled: bool) -> list[_Run]:
    """The layers; if they are rolled, those of one factory that follow one another are one run."""
    factories: list[tuple[Any, dict, int]] = []
    for factory, skips in case.parts:
        if is_rolled and factories and factories[-1][0] is factory and not skips:
            factories[-1] = (factory, skips, factories[-1][2] + 1)
        else:
            factories.append((factory, skips, 1))
    runs = []
    for factory, skips, length in factories:
        layer = nnx.eval_shape(lambda factory=factory: factory(rngs=nnx.Rngs(0)))
        graph, *states = nnx.split(layer, nnx.Param, ...)
        if length > 1:
            states = jax.tree.map(lambda a, n=length: jax.ShapeDtypeStruct((n, *a.shape), a.dtype), states)
        runs.append(_Run(graph, skips, *states, length, case.dtype))
    return runs


class _Split(NamedTuple):
    """How the step is split over devices.

    Attributes:
      mesh: of the axes of a variant; None on one device.
      device: the first of the devices.
    """

    mesh: Mesh | None
    device: Any

    @classmethod
    def of(cls, variant: Variant) -> "_Split":
        """The split of a variant."""
        devices = gpu_steps.devices(variant.num_parts)
        if not variant.mesh:
            return cls(None, devices[0])
        grid = np.array(devices).reshape(tuple(variant.mesh.values()))
        return cls(Mesh(grid, tuple(variant.mesh), axis_types=(AxisType.Auto,) * grid.ndim), devices[0])

    def _on(self, *dims: tuple[str, ...]) -> Any:
        """The sharding of an array whose dims are split over these axes."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in dims)))

    def everywhere(self, a: Any) -> jax.ShapeDtypeStruct:
        """An array that each device has."""
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._on())

    def weight(self, weight: nnx.Variable) -> nnx.Variable:
        """A weight, split as the names of its dims say."""
        like, names = weight.get_raw_value(), nnx.get_partition_spec(weight).get_raw_value()
        dims: list = []
        if self.mesh is not None:
            # Weights of layers that run in a loop have a dim more.
            names = (*[None] * (len(like.shape) - len(names)), *names) if names else (None,) * len(like.shape)
            dims = axes_of_dims(names, like.shape, self.mesh.shape, jpipe.AXIS_RULES)
        return weight.replace(jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=self._on(*dims)))

    def minibatch(self, a: Any, num_microbatches: int) -> jax.ShapeDtypeStruct:
        """An array of a minibatch, `[microbatches, rows, ...]`, whose rows are split."""
        rows = tuple(name for name in self.mesh.axis_names if name in ("data", "fsdp")) if self.mesh else ()
        shape = (num_microbatches, a.shape[0] // num_microbatches, *a.shape[1:])
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=self._on((), rows))

    def context(self) -> contextlib.ExitStack:
        """A context in which the constraints of the models count."""
        stack = contextlib.ExitStack()
        if self.mesh is not None:
            stack.enter_context(jax.set_mesh(self.mesh))
            stack.enter_context(linen.logical_axis_rules(rules_for(self.mesh.shape, jpipe.AXIS_RULES)))
        return stack


def plain(case: Case, sizes: Sizes, variant: Variant, *, is_rolled: bool) -> jax.stages.Lowered:
    """The step on one device, or split over those of a variant: a scan over microbatches adds up gradients.

    Args:
      case: the model.
      sizes: of the minibatch.
      variant: what differs from the model's usual program.
      is_rolled: whether equal layers run in a scan over stacked weights, and not one after another.
    """
    runs, optimizer = _runs(case, is_rolled), optax.adamw(1e-3)
    if variant.clips:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)

    def forward(parameters: list, states: list, batch: Any) -> tuple[jax.Array, list]:
        x, kept, new_states = batch["inputs"], {}, []
        for run, p, s in zip(runs, parameters, states, strict=True):
            popped = [kept.pop(run.skips["pop"])] if "pop" in run.skips else []
            # As a pipeline does: an embedding returns float32, whatever its weights are cast to.
            x, popped = cast((x, popped), run.dtype)
            apply = jax.checkpoint(run.apply) if variant.recomputes else run.apply
            if run.length > 1:
                x, s = lax.scan(lambda x, ps, apply=apply: apply(*ps, x, []), x, (p, s))
            else:
                x, s = apply(p, s, x, popped)
            if "stash" in run.skips:
                x, kept[run.skips["stash"]] = x
            new_states.append(s)
        return case.loss(x, batch), new_states

    def plain_step(state: tuple, microbatches: Any) -> tuple:
        parameters, states, optimizer_state = state

        def add(sums: tuple, microbatch: Any) -> tuple[tuple, None]:
            gradients, states, loss = sums
            (value, states), grads = jax.value_and_grad(forward, has_aux=True)(parameters, states, microbatch)
            gradients = jax.tree.map(jnp.add, gradients, grads)
            return (gradients, states, loss + value), None

        zeros = jax.tree.map(jnp.zeros_like, parameters)
        start = (zeros, states, jnp.float32(0))
        (gradients, states, loss), _ = lax.scan(add, start, microbatches)
        gradients = jax.tree.map(lambda g: g / sizes.microbatches, gradients)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        return (parameters, states, optimizer_state), loss

    split = _Split.of(variant)
    parameters = [
        jax.tree.map(split.weight, run.parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)) for run in runs
    ]
    optimizer_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda a, weight: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=weight.sharding),
        jax.eval_shape(optimizer.init, parameters),
        parameters,
        transform_non_params=split.everywhere,
    )
    states = jax.tree.map(split.everywhere, [run.state for run in runs])
    microbatches = jax.tree.map(lambda a: split.minibatch(a, sizes.microbatches), case.batch)
    with split.context():
        return jax.jit(plain_step, donate_argnums=0).lower((parameters, states, optimizer_state), microbatches)
