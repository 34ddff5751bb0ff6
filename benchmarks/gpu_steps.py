"""The training steps that `compile_gpu.py` compiles: models, pipelines and the plain scan."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.experimental import topologies

import jpipe
from jpipe.layers.avals import cast
from models import ResNet, Transformer, UNet
from models.transformer import Block

TARGET = pathlib.Path(__file__).parent / "gpu_h100.txtpb"
STAGES_PER_DEVICE = {"interleaved": 2, "dual_pipe_v": 2, "zero_bubble_v": 2}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the models, and of the minibatch."""

    dim: int = 1024
    """Dim of the transformers; a head has 128."""
    seq: int = 1024
    """Positions of the transformers."""
    layers: int = 4
    """Layers of the transformers per device."""
    image: int = 224
    """Height and width of the images of ResNet-50. The U-Net's are rounded down to a multiple of 16."""
    width: int = 64
    """Channels of the first level of the U-Net."""
    microbatches: int = 16
    microbatch_size: int = 2


class Case(NamedTuple):
    """A model with a loss and a minibatch.

    Attributes:
      parts: factory of each layer, with the names of its skips, `{"stash": ...}` or `{"pop": ...}`.
      loss: `(outputs, microbatch) -> loss`.
      batch: the abstract minibatch.
      dtype: what the layers compute in.
    """

    parts: Sequence[tuple[Callable[..., nnx.Module], dict[str, str]]]
    loss: Callable[[jax.Array, Any], jax.Array]
    batch: dict[str, jax.ShapeDtypeStruct]
    dtype: Any

    @property
    def layers(self) -> list:
        """The layers of a pipeline."""
        return [jpipe.skip(f, **names) if names else f for f, names in self.parts]


def _rows(sizes: Sizes, *shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """An array with a row for each example of a minibatch."""
    num_rows = sizes.microbatches * sizes.microbatch_size
    return jax.ShapeDtypeStruct((num_rows, *shape), dtype)


def _equal(num_devices: int, sizes: Sizes) -> Case:
    num_layers = sizes.layers * num_devices
    block = functools.partial(Block, sizes.dim, sizes.dim // 128, num_layers)
    inputs = _rows(sizes, sizes.seq, sizes.dim, dtype=jnp.bfloat16)
    return Case(
        [(block, {})] * num_layers,
        lambda outputs, batch: jnp.mean(jnp.square(outputs.astype(jnp.float32))),
        {"inputs": inputs},
        jnp.bfloat16,
    )


def _ends(num_devices: int, sizes: Sizes) -> Case:
    model = Transformer(
        seq_len=sizes.seq,
        dim=sizes.dim,
        num_heads=sizes.dim // 128,
        # On one device, the blocks of a middle stage of a pipeline.
        num_blocks=max(sizes.layers * num_devices - 2, sizes.layers),
    )
    tokens = _rows(sizes, sizes.seq, dtype=jnp.int32)
    return _classifier(model, tokens, tokens)


def _resnet50(num_devices: int, sizes: Sizes) -> Case:
    # The statistics of batch norm are in float32, so its outputs are too.
    images = _rows(sizes, sizes.image, sizes.image, 3, dtype=jnp.float32)
    labels = _rows(sizes, dtype=jnp.int32)
    return _classifier(ResNet.of_depth(50), images, labels, jnp.float32)


def _unet(num_devices: int, sizes: Sizes) -> Case:
    model = UNet(width=sizes.width, num_levels=4)
    side = sizes.image // 16 * 16
    images = _rows(sizes, side, side, 1, dtype=jnp.bfloat16)
    return _classifier(model, images, _rows(sizes, side, side, dtype=jnp.int32))


def _classifier(
    model: Any,
    inputs: jax.ShapeDtypeStruct,
    labels: jax.ShapeDtypeStruct,
    dtype: Any = jnp.bfloat16,
) -> Case:
    """A model of `models/`, with its own loss."""
    loss = model.loss()
    no_skips: list = [(factory, {}) for factory in model.layers()]
    return Case(
        model.parts() if isinstance(model, UNet) else no_skips,
        lambda outputs, batch: loss(outputs, batch)[0],
        {"inputs": inputs, "labels": labels},
        dtype,
    )


MODELS = {"equal": _equal, "ends": _ends, "resnet50": _resnet50, "unet": _unet}


def devices(number: int) -> Sequence:
    """Described H100s of one node."""
    return topologies.get_topology_desc(
        topology_name="h100",
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x1x{number}",
    ).devices


def pipeline(
    case: Case, sizes: Sizes, name: str, options: dict, num_devices: int, without_graphs: bool = False
) -> jpipe.Pipeline:
    """A pipeline of the case on described devices.

    Args:
      name: of the schedule.
      options: of the schedule.
      num_devices: devices of the pipeline; `STAGES_PER_DEVICE` says how many stages each has.
      without_graphs: whether the host starts each kernel.
    """
    num_stages = num_devices * STAGES_PER_DEVICE.get(name, 1)
    schedule = jpipe.schedules.get(name)(num_stages, sizes.microbatches, **options)
    return jpipe.Pipeline(
        case.layers,
        loss=case.loss,
        optimizer=optax.adamw(1e-3),
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=num_devices, ring=schedule.ring, devices=devices(num_devices)),
        compute_dtype=case.dtype,
        compiler_options={"xla_gpu_enable_command_buffer": ""} if without_graphs else None,
    )


# -- The plain scan


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


def plain(case: Case, sizes: Sizes, is_rolled: bool) -> jax.stages.Lowered:
    """The step without a pipeline, on one device: a scan over microbatches adds up gradients.

    Args:
      case: the model.
      sizes: of the minibatch.
      is_rolled: whether equal layers run in a scan over stacked weights, and not one after another.
    """
    runs, optimizer = _runs(case, is_rolled), optax.adamw(1e-3)

    def forward(parameters: list, states: list, batch: Any) -> tuple[jax.Array, list]:
        x, kept, new_states = batch["inputs"], {}, []
        for run, p, s in zip(runs, parameters, states, strict=True):
            popped = [kept.pop(run.skips["pop"])] if "pop" in run.skips else []
            # As a pipeline does: an embedding returns float32, whatever its weights are cast to.
            x, popped = cast((x, popped), run.dtype)
            if run.length > 1:
                x, s = lax.scan(lambda x, ps, run=run: run.apply(*ps, x, []), x, (p, s))
            else:
                x, s = run.apply(p, s, x, popped)
            if "stash" in run.skips:
                x, kept[run.skips["stash"]] = x
            new_states.append(s)
        return case.loss(x, batch), new_states

    def plain_step(state: tuple, batch: Any) -> tuple:
        parameters, states, optimizer_state = state

        def add(sums: tuple, microbatch: Any) -> tuple[tuple, None]:
            gradients, states, loss = sums
            (value, states), grads = jax.value_and_grad(forward, has_aux=True)(parameters, states, microbatch)
            gradients = jax.tree.map(jnp.add, gradients, grads)
            return (gradients, states, loss + value), None

        microbatches = jax.tree.map(lambda a: a.reshape(sizes.microbatches, -1, *a.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        start = (zeros, states, jnp.float32(0))
        (gradients, states, loss), _ = lax.scan(add, start, microbatches)
        gradients = jax.tree.map(lambda g: g / sizes.microbatches, gradients)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        return (parameters, states, optimizer_state), loss

    parameters = [run.parameters for run in runs]
    state = (
        parameters,
        [run.state for run in runs],
        jax.eval_shape(optimizer.init, parameters),
    )
    sharding = jax.sharding.SingleDeviceSharding(devices(1)[0])
    state, batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        (state, case.batch),
    )
    return jax.jit(plain_step, donate_argnums=0).lower(state, batch)
