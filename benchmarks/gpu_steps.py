"""The pipelines that `compile_gpu.py` compiles, and their models."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gpu_llama
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from gpu_rows import Variant
from jax.experimental import topologies

import jpipe
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
    vocabulary: int = 131072
    """Words of the models that have a large vocabulary."""
    microbatches: int = 16
    microbatch_size: int = 2


class Case(NamedTuple):
    """A model with a loss and a minibatch.

    Attributes:
      parts: factory of each layer, with the names of its skips, `{"stash": ...}` or `{"pop": ...}`.
      loss: `(outputs, microbatch) -> loss`.
      batch: the abstract minibatch.
      dtype: what the layers are made to compute in; None: they know by themselves.
      ties: parameters that share one value, as for a pipeline.
      is_whole: whether the one part is a whole model, which the pipeline cuts.
    """

    parts: Sequence[tuple[Callable[..., nnx.Module], dict[str, str]]]
    loss: Callable[[jax.Array, Any], jax.Array]
    batch: dict[str, jax.ShapeDtypeStruct]
    dtype: Any
    ties: Sequence[tuple[tuple[int, str], ...]] = ()
    is_whole: bool = False

    @property
    def layers(self) -> Any:
        """The layers of a pipeline, or the whole model."""
        if self.is_whole:
            return self.parts[0][0]
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


def _ends(num_devices: int, sizes: Sizes, vocabulary: int = 256, *, tied: bool = False) -> Case:
    model = Transformer(
        vocab_size=vocabulary,
        tie_embeddings=tied,
        seq_len=sizes.seq,
        dim=sizes.dim,
        num_heads=sizes.dim // 128,
        # On one device, the blocks of a middle stage of a pipeline.
        num_blocks=max(sizes.layers * num_devices - 2, sizes.layers),
    )
    tokens = _rows(sizes, sizes.seq, dtype=jnp.int32)
    return _classifier(model, tokens, tokens)._replace(ties=model.ties())


def _llama(num_devices: int, sizes: Sizes) -> Case:
    tokens = _rows(sizes, sizes.seq, dtype=jnp.int32)
    model = functools.partial(
        gpu_llama.Llama,
        sizes.vocabulary,
        sizes.dim,
        sizes.dim // 128,
        max(sizes.layers * num_devices - 2, sizes.layers),
    )
    return Case([(model, {})], gpu_llama.loss, {"inputs": tokens, "labels": tokens}, None, is_whole=True)


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


MODELS = {
    "equal": _equal,
    "ends": _ends,
    "tied": functools.partial(_ends, tied=True),
    "words": lambda num_devices, sizes: _ends(num_devices, sizes, sizes.vocabulary),
    "llama": _llama,
    "resnet50": _resnet50,
    "unet": _unet,
}


def devices(number: int) -> Sequence:
    """Described H100s of one node."""
    return topologies.get_topology_desc(
        topology_name="h100",
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x1x{number}",
    ).devices


def let_attention_have_its_kernel() -> None:
    """Attention takes the kernel of cuDNN, although there is no cuDNN and no GPU to ask about it."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from jpipe._attention import whole

    cudnn.check_cudnn_version = lambda: 91300
    cudnn.check_compute_capability = lambda capability: True
    cudnn.is_cuda_compute_capability_equal = lambda capability: capability == "9.0"
    whole.platform = lambda: "gpu"


def pipeline(
    case: Case,
    sizes: Sizes,
    name: str,
    options: dict,
    num_devices: int,
    *,
    variant: Variant,
    without_graphs: bool = False,
) -> jpipe.Pipeline:
    """A pipeline of the case on described devices.

    Args:
      case: the model.
      sizes: of the minibatch.
      name: of the schedule.
      options: of the schedule.
      num_devices: devices along "stage"; `STAGES_PER_DEVICE` says how many stages each has.
      variant: what differs from the model's usual program.
      without_graphs: whether the host starts each kernel.
    """
    num_stages = num_devices * STAGES_PER_DEVICE.get(name, 1)
    schedule = jpipe.schedules.get(name)(num_stages, sizes.microbatches, **options)
    optimizer = optax.adamw(1e-3)
    if variant.clips:
        optimizer = optax.chain(jpipe.optim.clip_by_global_norm(1.0), optimizer)
    mesh = jpipe.make_mesh(
        stage=num_devices, ring=schedule.ring, devices=devices(num_devices * variant.num_parts), **variant.mesh
    )
    return jpipe.Pipeline(
        case.layers,
        loss=case.loss,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        ties=case.ties,
        compute_dtype=case.dtype,
        compiler_options={"xla_gpu_enable_command_buffer": ""} if without_graphs else None,
        **variant.options,
    )
