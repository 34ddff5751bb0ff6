"""The largest decoders that fit into eight TPU chips, with and without host memory, compiled on a machine without a
TPU.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/offload_tpu.py
    python benchmarks/offload_tpu.py --redraw benchmarks/offload_tpu.json  # the table of saved rows

Each row is a decoder of as many blocks as fit into the memory of a chip, and its part of the host's, by prediction, on
eight stages, and is compiled then. Its stages run their forward again before their backward.

- *weights*: dtype of the weights, and the optimizer: AdamW, or AdamW on a float32 copy (`jpipe.optim.master_weights`).
- *in host memory*: nothing, the optimizer's state, or all: state, weights and gradients.
- *predicted*, *compiled*: GB of a chip without and with the compiler's temporaries.
- *host*: GB of host memory for each chip, predicted and compiled.
- *transfers*: starts of transfers between host and device in the compiled program; *apart*: of these, those with
  compute between their start and their done.
"""

import argparse
import datetime
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.compile_tpu import environment  # noqa: E402

LIMIT = 16e9  # bytes of a v5e chip, https://cloud.google.com/tpu/docs/v5e
STAGES = 8
SETTINGS = [(dtype, *shares) for dtype in ("float32", "bfloat16") for shares in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))]


def pipeline(args: argparse.Namespace, dtype: str, share: float, weights: float, blocks: int):
    """A pipeline of `blocks` blocks on each stage, and a minibatch."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.experimental import topologies

    import jpipe
    from models import Transformer

    devices = topologies.get_topology_desc(args.topology, platform="tpu").devices
    model = Transformer(
        vocab_size=args.vocab,
        seq_len=args.seq,
        dim=args.dim,
        num_heads=args.dim // 128,
        num_blocks=STAGES * blocks,
    )

    def of_dtype(factory):
        def make(rngs):
            module = factory(rngs=rngs)
            cast = jax.tree.map(lambda a: a.astype(dtype), nnx.state(module, nnx.Param))
            nnx.update(module, cast)
            return module

        return make

    optimizer = optax.adamw(3e-4)
    if dtype != "float32":
        optimizer = jpipe.optim.master_weights(optimizer)
    schedule = jpipe.schedules.one_f_one_b(STAGES, args.microbatches)
    pipe = jpipe.Pipeline(
        [of_dtype(layer) for layer in model.layers()],
        loss=model.loss(),
        has_aux=True,
        optimizer=optimizer,
        schedule=schedule,
        boundaries=[1 + blocks * s for s in range(1, STAGES)],
        mesh=jpipe.make_mesh(stage=STAGES, devices=devices, ring=schedule.ring),
        compute_dtype=jnp.bfloat16,
        recompute="full",
        offload=jpipe.Offload(optimizer=share, weights=weights, gradients=weights),
    )
    tokens = jax.ShapeDtypeStruct((args.microbatches, args.seq), jnp.int32)
    return pipe, {"inputs": tokens, "labels": tokens}


def transfers(text: str) -> tuple[int, int]:
    """Starts of transfers between host and device, and how many have compute before their done."""
    lines = text.splitlines()
    started = apart = 0
    for i, line in enumerate(lines):
        name = line.split(" = ")[0].strip().removeprefix("ROOT ")
        is_start = "-slice-start(" in line or " copy-start(" in line
        if not is_start or "S(5)" not in line.split("metadata")[0]:
            continue
        started += 1
        for later in lines[i + 1 :]:
            if f"-done({name})" in later:
                break
            if " fusion(" in later or " convolution(" in later:
                apart += 1
                break
    return started, apart


def largest(args: argparse.Namespace, dtype: str, share: float, weights: float) -> int:
    """The most blocks of a stage whose arrays leave room for the temporaries."""

    def fits(blocks: int) -> bool:
        pipe, batch = pipeline(args, dtype, share, weights, blocks)
        groups = pipe._program(batch).engine.layout.groups.values()
        arrays = sum(group.num_bytes("tpu") for group in groups)
        on_host = sum(group.num_bytes("tpu", "pinned_host") for group in groups)
        fits = on_host <= args.host_gb * 1e9
        return fits and arrays + args.temporaries_gb * 1e9 <= LIMIT

    blocks = 1
    while fits(blocks + 1):
        blocks += 1
    return blocks


def compile_one(args: argparse.Namespace, dtype: str, share: float, weights: float) -> dict:
    """A row of the table."""
    blocks = args.blocks or largest(args, dtype, share, weights)
    pipe, batch = pipeline(args, dtype, share, weights, blocks)
    start = time.perf_counter()
    compiled = pipe.compile(batch)
    seconds = time.perf_counter() - start
    analysis, program = compiled.memory_analysis(), pipe._program(batch)
    groups = program.engine.layout.groups.values()
    started, apart = transfers(compiled.as_text())
    return {
        "dtype": dtype,
        "share": share,
        "weights_share": weights,
        "blocks": STAGES * blocks,
        "parameters": sum(r.num_parameters for r in pipe.partition(batch)),
        "predicted_gb": sum(g.num_bytes("tpu") for g in groups) / 1e9,
        "arguments_gb": analysis.argument_size_in_bytes / 1e9,
        "temporaries_gb": analysis.temp_size_in_bytes / 1e9,
        "host_predicted_gb": sum(g.num_bytes("tpu", "pinned_host") for g in groups) / 1e9,
        "host_gb": (analysis.host_argument_size_in_bytes) / 1e9,
        "host_temporaries_gb": analysis.host_temp_size_in_bytes / 1e9,
        "transfers": started,
        "apart": apart,
        "seconds": seconds,
    }


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| weights | in host memory | blocks | billion weights | predicted | compiled | of it temporaries | host: "
        "predicted | compiled | transfers | apart |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        compiled = r["arguments_gb"] + r["temporaries_gb"]
        where = "nothing"
        if r["share"]:
            where = "all" if r["weights_share"] else "the optimizer's state"
        lines.append(
            f"| {r['dtype']} | {where} | {r['blocks']} | {r['parameters'] / 1e9:.2f} | {r['predicted_gb']:.2f} | "
            f"{compiled:.2f} | {r['temporaries_gb']:.2f} | {r['host_predicted_gb']:.2f} | {r['host_gb']:.2f} | "
            f"{r['transfers']} | {r['apart']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--blocks", type=int, help="of a stage; else as many as fit")
    parser.add_argument("--temporaries-gb", type=float, default=2.0)
    parser.add_argument("--host-gb", type=float, default=96.0, help="of the host, for a chip")
    parser.add_argument("--save", type=pathlib.Path, default=HERE / "offload_tpu.json")
    parser.add_argument("--redraw", type=pathlib.Path)
    args = parser.parse_args()
    if args.redraw:
        print(table(json.loads(args.redraw.read_text())["rows"]))
        return
    environment()
    rows = []
    for setting in SETTINGS:
        rows.append(compile_one(args, *setting))
        print(rows[-1], flush=True)
    saved = {"date": datetime.date.today().isoformat(), "rows": rows}
    args.save.write_text(json.dumps(saved, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
