"""Trains models of other people's packages in pipelines, none of their lines changed, against plain JAX.

Each model is built as its package documents it, small, and given whole to `jpipe.Pipeline`. It is trained for three
steps in 1F1B; the losses and, after each step, all weights are compared with those of the model in plain JAX, with the
mean of the gradients of the same microbatches. A model whose package is not installed is skipped.

    python benchmarks/zoo.py                     all models, on 2 and 4 stages
    python benchmarks/zoo.py --only gpt2,unet --stages 2

Prints a table: segments, kinds of segments, seconds to trace and cut, seconds of the first step, and the largest
differences of losses and of the first update. The packages, of which some want others than they say:

    pip install "transformers==4.48.0" "diffusers==0.30.0" flaxdiff recurrentgemma flaxmodels jax-resnet mamba2-jax \\
        vitax ott-jax google-tunix
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import linen, nnx  # noqa: E402

import jpipe  # noqa: E402

ROWS, N = 8, 2
RNG = np.random.default_rng(0)
STEPS, LEARNING_RATE = 3, 0.01


@dataclasses.dataclass
class Case:
    """A model with a batch and a loss.

    Attributes:
      model: what `jpipe.Pipeline` takes.
      batch: a minibatch.
      loss: `(outputs, batch) -> scalar`.
      call: `(model, batch) -> outputs`, the plain call of an NNX module; of Linen `batch -> positional arguments`.
      keywords: of the plain call in training.
      axes: further axes of the mesh, for `jpipe.make_mesh`.
    """

    model: Any
    batch: dict
    loss: Callable
    call: Callable
    keywords: dict = dataclasses.field(default_factory=dict)
    axes: dict = dataclasses.field(default_factory=dict)


def linen_case(
    module: linen.Module,
    batch: dict,
    loss: Callable,
    names: Sequence[str],
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
) -> Case:
    """A Linen module whose arguments are entries of the batch, with other arguments given once."""
    keywords = dict(train or {})
    model = jpipe.Linen(module, train=keywords, evaluate=keywords if evaluate is None else evaluate)
    return Case(model, batch, loss, lambda b: tuple(b[name] for name in names), keywords)


def tokens(vocabulary: int, length: int = 8) -> np.ndarray:
    return RNG.integers(1, vocabulary, (ROWS, length)).astype(np.int32)


def images(size: int, channels: int = 3) -> np.ndarray:
    return RNG.normal(size=(ROWS, size, size, channels)).astype(np.float32)


def cross_entropy(pick: Callable = lambda outputs: outputs) -> Callable:
    def loss(outputs: Any, batch: dict) -> jax.Array:
        logits = pick(outputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return loss


def square(pick: Callable = lambda outputs: outputs) -> Callable:
    return lambda outputs, batch: jnp.mean((pick(outputs) - batch["targets"]) ** 2)


def positions(length: int = 8) -> np.ndarray:
    return np.tile(np.arange(length, dtype=np.int32), (ROWS, 1))


# -- Models, by package


def _decoder(module: linen.Module) -> Case:
    """A language model of transformers."""
    batch = {
        "input_ids": tokens(50),
        "attention_mask": np.ones((ROWS, 8), np.int32),
        "position_ids": positions(),
        "targets": tokens(50),
    }
    names = "input_ids", "attention_mask", "position_ids"
    once = {"deterministic": True, "return_dict": False}
    return linen_case(module, batch, cross_entropy(lambda outputs: outputs[0]), names, once)


def gpt2_of_transformers() -> Case:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=4, n_head=2)
    return _decoder(FlaxGPT2LMHeadModule(config))


def llama_of_transformers() -> Case:
    """Rotary positions and grouped queries."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLMModule

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    return _decoder(FlaxLlamaForCausalLMModule(config))


def bart_of_transformers() -> Case:
    """An encoder that every layer of the decoder reads."""
    from transformers import BartConfig
    from transformers.models.bart.modeling_flax_bart import FlaxBartForConditionalGenerationModule

    config = BartConfig(
        vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=8,
    )  # fmt: skip
    module = FlaxBartForConditionalGenerationModule(config)
    once = {"deterministic": True, "return_dict": False}
    names = "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "position_ids"
    batch = {"input_ids": tokens(50), "decoder_input_ids": tokens(50, 6), "targets": tokens(50, 6)}
    for name, length in (("attention_mask", 8), ("decoder_attention_mask", 6)):
        batch[name] = np.ones((ROWS, length), np.int32)
    batch |= {"position_ids": positions(), "decoder_position_ids": positions(6)}
    return linen_case(module, batch, cross_entropy(lambda outputs: outputs[0]), (*names, "decoder_position_ids"), once)


def bert_of_transformers() -> Case:
    from transformers import BertConfig
    from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLMModule

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8,
    )  # fmt: skip
    module, once = FlaxBertForMaskedLMModule(config), {"deterministic": True, "return_dict": False, "head_mask": None}
    batch = {"input_ids": tokens(50), "targets": tokens(50), "position_ids": positions()}
    batch |= {
        "attention_mask": np.ones((ROWS, 8), np.int32),
        "token_type_ids": np.zeros((ROWS, 8), np.int32),
    }
    names = "input_ids", "attention_mask", "token_type_ids", "position_ids"
    return linen_case(module, batch, cross_entropy(lambda outputs: outputs[0]), names, once)


def vit_of_transformers() -> Case:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassificationModule

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    config.num_labels = 5
    module, once = FlaxViTForImageClassificationModule(config), {"deterministic": True, "return_dict": False}
    batch = {"pixel_values": images(8), "targets": RNG.integers(0, 5, ROWS)}
    return linen_case(module, batch, cross_entropy(lambda outputs: outputs[0]), ("pixel_values",), once)


def unet_of_diffusers() -> Case:
    """A text-conditioned diffusion U-Net."""
    from diffusers.models.unets.unet_2d_condition_flax import FlaxUNet2DConditionModel

    module = FlaxUNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    once = {"return_dict": False}
    batch = {
        "sample": np.moveaxis(images(8, 4), -1, 1),
        "timesteps": RNG.integers(0, 1000, ROWS).astype(np.int32),
        "encoder_hidden_states": RNG.normal(size=(ROWS, 3, 16)).astype(np.float32),
        "targets": np.moveaxis(images(8, 4), -1, 1),
    }
    return linen_case(
        module, batch, square(lambda outputs: outputs[0]), ("sample", "timesteps", "encoder_hidden_states"), once
    )


def _denoiser(module: linen.Module) -> Case:
    """A model of flaxdiff, which denoises images by the time and a text."""
    batch = {
        "x": images(8),
        "temb": RNG.random(ROWS).astype(np.float32),
        "textcontext": RNG.normal(size=(ROWS, 3, 16)).astype(np.float32),
        "targets": images(8),
    }
    return linen_case(module, batch, square(), ("x", "temb", "textcontext"))


def unet_of_flaxdiff() -> Case:
    from flaxdiff.models.simple_unet import Unet

    heads = {"heads": 2, "use_self_and_cross": False, "use_projection": False}
    module = Unet(
        emb_features=16, feature_depths=(8, 16), attention_configs=(heads, heads), num_res_blocks=1, norm_groups=4
    )
    return _denoiser(module)


def dit_of_flaxdiff() -> Case:
    """A diffusion transformer, whose blocks all read the embedding of time and text."""
    from flaxdiff.models.simple_dit import SimpleDiT

    module = SimpleDiT(patch_size=4, emb_features=16, num_layers=4, num_heads=2)
    return _denoiser(module)


def griffin_of_recurrentgemma() -> Case:
    """Linear recurrences, local attention, checkpoints."""
    import recurrentgemma.jax as recurrentgemma
    from recurrentgemma import common

    blocks = common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION
    config = common.GriffinConfig(
        vocab_size=50, width=16, mlp_expanded_width=32, num_heads=2, block_types=blocks * 2, attention_window_size=4,
        embeddings_scale_by_sqrt_dim=True, logits_soft_cap=30.0, scan_type=common.ScanType.LINEAR_NATIVE,
    )  # fmt: skip
    module, once = recurrentgemma.Griffin(config), {"return_cache": False}
    batch = {"tokens": tokens(50), "segment_pos": positions(), "targets": tokens(50)}
    return linen_case(module, batch, cross_entropy(lambda outputs: outputs[0]), ("tokens", "segment_pos"), once)


def resnet_of_flaxmodels() -> Case:
    from flaxmodels.resnet import ResNet18

    module = ResNet18(output="logits", pretrained=None, normalize=False, num_classes=5)
    train, evaluate = {"train": True}, {"train": False}
    batch = {"x": images(64), "targets": RNG.integers(0, 5, ROWS)}
    return linen_case(module, batch, cross_entropy(), ("x",), train, evaluate)


def resnet_of_jax_resnet() -> Case:
    from jax_resnet import ResNet18

    module = ResNet18(n_classes=5, norm_cls=functools.partial(linen.BatchNorm, momentum=0.9, use_running_average=False))
    batch = {"inputs": images(64), "targets": RNG.integers(0, 5, ROWS)}
    return linen_case(module, batch, cross_entropy(), ("inputs",))


def mamba_of_mamba2_jax() -> Case:
    """A state-space model."""
    from mamba2_jax.modeling import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(vocab_size=50, hidden_size=16, state_size=8, head_dim=8, chunk_size=4, num_hidden_layers=4)
    return Case(
        Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)),
        {"input_ids": tokens(50), "targets": tokens(50)},
        cross_entropy(lambda outputs: outputs["logits"]),
        lambda model, b: model(b["input_ids"]),
    )


def vit_of_vitax() -> Case:
    """Its parameters name an axis of a mesh, which this mesh has not."""
    from vitax.models.vit import VisionTransformer

    with nnx.use_eager_sharding(False):  # without a mesh in the context it could not be built
        model = VisionTransformer(
            num_classes=5, img_size=8, patch_size=4, num_layers=4, num_heads=2, mlp_dim=32, hidden_size=16,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
    model.eval()  # without dropout
    batch = {"x": images(8), "targets": RNG.integers(0, 5, ROWS)}
    return Case(model, batch, cross_entropy(), lambda model, b: model(b["x"]))


def unet_of_ott() -> Case:
    """A velocity field: a U-Net of NNX modules with attention and the embedding of time."""
    from ott.neural.networks.velocity_field.unet import UNet

    model = UNet(
        shape=(8, 8, 3), model_channels=32, num_res_blocks=1, attention_resolutions=(4,), channel_mult=(1, 2),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    batch = {"t": RNG.random(ROWS).astype(np.float32), "x": images(8), "targets": images(8)}
    return Case(model, batch, square(), lambda model, b: model(b["t"], b["x"]))


def _without_metrics() -> None:
    """Tunix imports a package of metrics, which its models do not use."""
    with contextlib.suppress(ImportError):
        importlib.import_module("metrax")
        return
    sys.modules["metrax"] = mock.MagicMock()
    sys.modules["metrax.logging"] = mock.MagicMock()


def _qwen(**options: Any) -> Case:
    """Qwen3 of tunix: grouped queries, rotary positions, a padding mask."""
    _without_metrics()
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(
        num_layers=4, vocab_size=50, embed_dim=16, hidden_dim=32, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-6, **options,
    )  # fmt: skip
    once = {"cache": None}
    mask = np.tile(np.tril(np.ones((8, 8), bool)), (ROWS, 1, 1))
    return Case(
        jpipe.NNX(Qwen3(config, rngs=nnx.Rngs(0)), train=once, evaluate=once),
        {"input_tokens": tokens(50), "positions": positions(), "attention_mask": mask, "targets": tokens(50)},
        cross_entropy(lambda outputs: outputs[0]),
        lambda model, b: model(b["input_tokens"], b["positions"], None, b["attention_mask"]),
    )


def qwen_of_tunix() -> Case:
    """Tied embeddings."""
    return _qwen(use_tied_embedding=True)


def experts_of_tunix() -> Case:
    """A mixture of experts in every block."""
    return _qwen(num_experts=4, num_experts_per_tok=2)


def experts_on_devices_of_tunix() -> Case:
    """The same, with rows split over an axis for experts."""
    return dataclasses.replace(experts_of_tunix(), axes={"expert": 2})


MODELS = {
    name: value
    for name, value in list(globals().items())
    if "_of_" in name and callable(value) and inspect.getmodule(value) is sys.modules[__name__]
}


# -- Plain JAX


def plain_step(case: Case) -> Callable:
    """`(params, state) -> ((loss, state), gradients)` over the microbatches of the batch, one after the other."""
    pieces = [
        jax.tree.map(lambda a, i=i: jnp.asarray(a)[i * ROWS // N : (i + 1) * ROWS // N], case.batch) for i in range(N)
    ]
    module = getattr(case.model, "module", getattr(case.model, "layer", case.model))
    if isinstance(module, nnx.Module):
        graph, _, rest = nnx.split(module, nnx.Param, ...)

    def outputs(params: Any, state: Any, batch: dict) -> tuple[Any, Any]:
        if isinstance(module, nnx.Module):
            return case.call(nnx.merge(graph, nnx.State(params), rest), batch), state
        variables = {"params": params, **state}
        results = module.apply(variables, *case.call(batch), **case.keywords, mutable=list(state) or False)
        return results if state else (results, state)

    def loss(params: Any, state: Any) -> tuple[jax.Array, Any]:
        total = 0.0
        for piece in pieces:
            result, state = outputs(params, state, piece)
            total += case.loss(result, piece) / N
        return total, state

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def difference(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest number of each leaf.

    Leaves whose numbers are rounding errors of zero, such as biases of keys, are compared with the largest leaf.
    """
    largest = max(float(np.max(np.abs(a))) for a in jax.tree.leaves(wanted))

    def compare(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-4 * largest))

    return max(jax.tree.leaves(jax.tree.map(compare, found, wanted)))


class Result(NamedTuple):
    """A model, trained.

    Attributes:
      segments, kinds: numbers of segments, and of kinds of segments.
      traced: seconds to trace and cut.
      first: seconds of the first step, with its compile.
      losses: the largest difference of a loss, relative.
      updates: the largest difference of the update of a weight in the first step, see `difference`.
    """

    segments: int
    kinds: int
    traced: float
    first: float
    losses: float
    updates: float


def trained(case: Case, num_stages: int) -> Result:
    """Trains a model in a pipeline and in plain JAX."""
    pipe = jpipe.Pipeline(
        case.model,
        loss=case.loss,
        optimizer=optax.sgd(LEARNING_RATE),
        schedule=jpipe.schedules.one_f_one_b(num_stages, N),
        mesh=jpipe.make_mesh(stage=num_stages, **case.axes),
    )
    start = time.perf_counter()
    cut = pipe.partition(case.batch)
    traced = time.perf_counter() - start
    state = pipe.init(jax.random.key(0), case.batch)
    params, moved = pipe.get_params(state), pipe.get_mutable_state(state)
    step = plain_step(case)
    losses, updates, first = 0.0, 0.0, 0.0
    for i in range(STEPS):
        (want, moved), grads = step(params, moved)
        start = time.perf_counter()
        state, metrics = pipe.step(state, case.batch)
        loss = float(metrics["loss"])
        first = first or time.perf_counter() - start
        losses = max(losses, abs(loss / float(want) - 1))
        new = jax.tree.map(lambda a, g: a - LEARNING_RATE * g, params, grads)
        if i == 0:
            # Of the updates, so that a wrong gradient is not hidden by a large weight.
            changes = (jax.tree.map(np.subtract, weights, params) for weights in (pipe.get_params(state), new))
            updates = difference(*changes)
        params = new
    kinds = len({*pipe._program(case.batch).traced.kind_of_layer})
    return Result(cut[-1].layers[1], kinds, traced, first, losses, updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of models, with commas")
    parser.add_argument("--stages", default="2,4", help="numbers of stages, with commas")
    args = parser.parse_args()
    names = [name for name in MODELS if not args.only or any(part in name for part in args.only.split(","))]
    print("| model | stages | segments | kinds | trace, s | first step, s | losses | updates |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        for num_stages in map(int, args.stages.split(",")):
            try:
                result = trained(MODELS[name](), num_stages)
                row = (
                    f"{result.segments} | {result.kinds} | {result.traced:.1f} | {result.first:.1f} | "
                    f"{result.losses:.0e} | {result.updates:.0e}"
                )
            except ImportError as error:
                row = f"skipped: {error}"
            except Exception as error:
                row = f"FAILED {type(error).__name__}: {str(error)[:600]}"
            print(f"| {name.replace('_of_', ' of ')} | {num_stages} | {row} |", flush=True)


if __name__ == "__main__":
    main()
