"""Bytes and transfers of an update whose state is in host memory: in PatrickStar's chunks, and as `jpipe.Offload` moves
it.

    python benchmarks/host_chunks.py

PatrickStar (arXiv:2108.05818, section 6) lays the tensors of a model, in order of creation, into chunks of one size:
four lists of them, of parameters in 16 bits, and of parameters, momentum and variance in 32 bits. A chunk moves as a
whole. `jpipe.memory.best_chunk_size` looks for the size that leaves the least room unused. The smallest size is that of
the largest tensor, because none lies in two chunks; the default of PatrickStar's program is 64 Mi numbers. `Offload`
keeps a row of a pool in host memory for each piece of each array of the state, at most a million numbers, and moves a
row at a time. The rows here are those of the layout of the pipeline's program.

Both update on the device: all state comes and goes back, which is 24 bytes a weight. (PatrickStar can run Adam on the
host too; then gradients and weights alone move, 4 bytes a weight.) Columns of a scheme:

- *transfers*: of an update, in both directions.
- *GB*: bytes that they carry. Of chunks this has the room that no tensor fills.
- *MB on the device*: the three arrays of the state of a chunk or piece, which are on the device together.
- *seconds*: transfers * latency + bytes / bandwidth, of a link that the options describe.
"""

import argparse
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from jpipe.memory import best_chunk_size, pack_chunks
from models import Transformer

DEFAULT_CHUNK = 2**26
STATE_ARRAYS = 3  # parameters in 32 bits, momentum, variance
STATE_BYTES = 4
MODELS = {
    "gpt, dim 1024": Transformer(vocab_size=32_000, seq_len=1024, dim=1024, num_heads=16, num_blocks=24),
    "gpt, dim 4096": Transformer(vocab_size=32_000, seq_len=1024, dim=4096, num_heads=32, num_blocks=8),
}


def in_bfloat16(factory):
    """A factory of a layer whose weights are in bfloat16."""

    def make(rngs):
        module = factory(rngs=rngs)
        nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(module, nnx.Param)))
        return module

    return make


def pipeline(model, chunk: int) -> tuple[jpipe.Pipeline, dict]:
    """A pipeline of one stage with all state in host memory, and a batch of it."""
    tokens = jax.ShapeDtypeStruct((2, model.seq_len), jnp.int32)
    pipe = jpipe.Pipeline(
        [in_bfloat16(layer) for layer in model.layers()],
        loss=model.loss(),
        has_aux=True,
        optimizer=jpipe.optim.master_weights(optax.adamw(1e-3)),
        schedule=jpipe.schedules.gpipe(1, 2),
        compute_dtype=jnp.bfloat16,
        offload=jpipe.Offload(optimizer=1.0, chunk=chunk),
    )
    return pipe, {"inputs": tokens, "labels": tokens}


def weight_sizes(model) -> list[int]:
    """Numbers of each weight, in order of creation."""
    sizes = []
    for layer in model.layers():
        weights = nnx.state(nnx.eval_shape(lambda layer=layer: layer(rngs=nnx.Rngs(0))), nnx.Param)
        sizes += [int(leaf.size) for leaf in jax.tree.leaves(weights)]
    return sizes


def chunk_row(sizes: list[int], chunk_size: int) -> dict:
    """An update in chunks of a size."""
    layout = pack_chunks(sizes, chunk_size)
    return {
        "transfers": 2 * STATE_ARRAYS * layout.num_chunks,
        "bytes": 2 * layout.num_bytes([STATE_BYTES] * STATE_ARRAYS),
        "on_device": STATE_ARRAYS * STATE_BYTES * chunk_size,
        "used": layout.utilisation,
    }


def offload_row(model, chunk: int) -> dict:
    """An update by `Offload`, from the arrays in host memory of the pipeline's program."""
    pipe, batch = pipeline(model, chunk)
    group = pipe._program(batch).engine.layout["optimizer_state"]
    shapes = [group.shapes[name] for name in group.on_host]  # [stages of the device, rows, *row]
    rows = sum(math.prod(a.shape[:2]) for a in shapes)
    largest = max(math.prod(a.shape[2:]) for a in shapes)
    num_bytes = sum(a.size * a.dtype.itemsize for a in shapes)
    return {
        "transfers": 2 * rows,
        "bytes": 2 * num_bytes,
        "on_device": STATE_ARRAYS * STATE_BYTES * largest,
        "used": 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--latency", type=float, default=10e-6, help="seconds of a transfer")
    parser.add_argument("--bandwidth", type=float, default=16e9, help="bytes per second of the link")
    args = parser.parse_args()
    print("| model | weights, millions | scheme | unused | transfers | GB | MB on the device | seconds |")
    print("|" + "---|" * 8, flush=True)
    for name in args.models:
        model = MODELS[name]
        sizes = weight_sizes(model)
        best = best_chunk_size(sizes)
        rows = {f"chunks of {best / 2**20:.1f} Mi (best)": chunk_row(sizes, best)}
        for words, size in (("smallest", max(sizes)), ("default", DEFAULT_CHUNK)):
            if size >= max(sizes):
                rows[f"chunks of {size / 2**20:.1f} Mi ({words})"] = chunk_row(sizes, size)
        rows["`Offload`"] = offload_row(model, 2**20)
        rows["`Offload(chunk=2**24)`"] = offload_row(model, 2**24)
        for scheme, row in rows.items():
            seconds = row["transfers"] * args.latency + row["bytes"] / args.bandwidth
            print(
                f"| {name} | {np.sum(sizes) / 1e6:,.0f} | {scheme} | {1 - row['used']:.1%} | {row['transfers']:,} | "
                f"{row['bytes'] / 1e9:.2f} | {row['on_device'] / 1e6:,.1f} | {seconds:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
