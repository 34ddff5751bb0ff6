"""What a step keeps and takes if products of activations run again in the backward, and if their results are kept.

    python benchmarks/stash.py
    python benchmarks/stash.py --only gpt2,vit --positions 512 --steps 15

Two pipelines of one model, in 1F1B on two stages with four microbatches, run step by step in turns. One decides by the
FLOPs per byte of the platform (`jpipe/lowering/target.py`), the other one computes only elementwise operations again.
Prints the bytes of the activations, the median seconds of a step and the median of the ratios of two steps in turn.
Models of packages that are not installed are left out; `benchmarks/zoo.py` says how to install them.
"""

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)

import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402
from jpipe.lowering import target  # noqa: E402

ROWS, N, BLOCKS, DIM, HEADS, VOCABULARY = 8, 4, 4, 256, 4, 512
RNG = np.random.default_rng(0)


def _tokens(length: int) -> np.ndarray:
    return RNG.integers(1, VOCABULARY, (ROWS, length)).astype(np.int32)


def _text(length: int) -> dict:
    return {
        "input_ids": _tokens(length),
        "attention_mask": np.ones((ROWS, length), np.int32),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (ROWS, 1)),
        "targets": _tokens(length),
    }


def _cross_entropy(outputs: Any, batch: dict) -> jax.Array:
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def _linen(module: Any) -> Any:
    once = {"deterministic": True, "return_dict": False}
    return jpipe.Linen(module, train=once, evaluate=once)


class _Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.norm_mlp = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


def flax_attention(length: int) -> tuple:
    """`nnx.MultiHeadAttention` in blocks by hand."""
    batch = {"inputs": _tokens(length), "targets": _tokens(length)}
    rngs = nnx.Rngs(0)
    return [nnx.Embed(VOCABULARY, DIM, rngs=rngs), *(_Block(rngs) for _ in range(BLOCKS))], batch


def gpt2(length: int) -> tuple:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=length, n_embd=DIM, n_layer=BLOCKS, n_head=HEADS)
    return _linen(FlaxGPT2LMHeadModule(config)), _text(length)


def llama(length: int) -> tuple:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLMModule

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=3 * DIM, num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=length,
    )  # fmt: skip
    return _linen(FlaxLlamaForCausalLMModule(config)), _text(length)


def vit(length: int) -> tuple:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassificationModule

    patches = int(length**0.5)
    config = ViTConfig(
        hidden_size=DIM, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, intermediate_size=4 * DIM,
        image_size=8 * patches, patch_size=8,
    )  # fmt: skip
    images = RNG.normal(size=(ROWS, 8 * patches, 8 * patches, 3)).astype(np.float32)
    module = FlaxViTForImageClassificationModule(config)
    return _linen(module), {"pixel_values": images, "targets": RNG.integers(0, 2, ROWS)}


def gpt_of_jpipe(length: int) -> tuple:
    """Its attention is a `jax.checkpoint`."""
    from models.transformer import Transformer

    model = Transformer(vocab_size=VOCABULARY, seq_len=length, dim=DIM, num_heads=HEADS, num_blocks=BLOCKS)
    return model.layers(), {"inputs": _tokens(length), "targets": _tokens(length)}


MODELS: dict[str, Callable[[int], tuple]] = {
    "gpt": gpt_of_jpipe,
    "flax": flax_attention,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
}


@contextlib.contextmanager
def elementwise_only() -> Iterator[None]:
    """Pipelines that are traced inside compute only elementwise operations again."""
    facts = {name: dataclasses.replace(t, flops_per_byte=0) for name, t in target.TARGETS.items()}
    with mock.patch.dict(target.TARGETS, facts):
        yield


class _Run:
    """A pipeline, its state and the seconds of its steps."""

    def __init__(self, build: Callable[[int], tuple], length: int):
        model, self.batch = build(length)
        self.pipe = jpipe.Pipeline(
            model,
            loss=_cross_entropy,
            optimizer=optax.sgd(1e-3),
            schedule=jpipe.schedules.one_f_one_b(2, N),
        )
        self.state = self.pipe.init(jax.random.key(0), self.batch)
        self.activations = self.pipe.memory(self.batch).activations
        self.seconds: list[float] = []
        self.step()

    def step(self) -> None:
        start = time.perf_counter()
        self.state, _ = self.pipe.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        self.seconds.append(time.perf_counter() - start)


def row(name: str, length: int, steps: int) -> str:
    """A row of the table."""
    with elementwise_only():
        before = _Run(MODELS[name], length)
    after = _Run(MODELS[name], length)
    for _ in range(steps):
        before.step()
        after.step()
    first, second = (np.array(run.seconds[1:]) for run in (before, after))
    return (
        f"| {name} | {length} | {before.activations / 1e6:.1f} -> {after.activations / 1e6:.1f} "
        f"| {np.median(first):.3f} -> {np.median(second):.3f} | {np.median(second / first):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MODELS), help="names of models, with commas between them")
    parser.add_argument("--positions", type=int, default=256, help="positions of a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=11, help="steps of each pipeline (default: %(default)s)")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"--only {','.join(unknown)}: no such model. There are {', '.join(MODELS)}.")
    print("| model | positions | activations, MB | step, s | ratio |\n|---|---|---|---|---|")
    for name in names:
        try:
            print(row(name, args.positions, args.steps), flush=True)
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
