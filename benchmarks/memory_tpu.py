"""Compares the bytes of memory timelines with what the TPU compiler reserves, on a machine without a TPU.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/memory_tpu.py

A decoder transformer in bfloat16, on the four chips of a described v5e. The timeline counts the arrays of the state
from their shapes and the tiles of TPUs, and takes temporaries and results from the compiler, because libtpu does not
say where it puts values.
"""

import argparse
import pathlib
import sys

from compile_tpu import environment, reserved_bytes

HERE = pathlib.Path(__file__).resolve().parent

SCHEDULES = (
    ("gpipe", 4, {}),
    ("one_f_one_b", 4, {}),
    ("one_f_one_b", 4, {"recompute": "full"}),
    ("zero_bubble_h1", 4, {}),
    ("interleaved", 8, {}),
    ("pipedream", 4, {}),
    ("pipedream_2bw", 4, {}),
)


def compare(args: argparse.Namespace, name: str, stages: int, options: dict) -> str:
    """A row of the table."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.experimental import topologies

    import jpipe
    from models import Transformer

    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    model = Transformer(seq_len=args.seq, dim=args.dim, num_heads=args.dim // 128, num_blocks=stages)
    schedule = jpipe.schedules.get(name)(stages, args.microbatches)
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=lambda outputs, batch: optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"]).mean(),
        optimizer=optax.adamw(1e-3),
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=4, ring=schedule.ring, devices=devices),
        compute_dtype=jnp.bfloat16,
        **options,
    )
    tokens = jax.ShapeDtypeStruct((2 * args.microbatches, args.seq), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    timeline = pipe.memory_timeline(batch)
    compiled = reserved_bytes(pipe.compile(batch).memory_analysis())
    by_use = timeline.by_use()
    temporary = by_use["temporary"].max()
    return (
        f"| `{name}`{', recompute' if options else ''} | {timeline.peak / 1e6:.2f} | {compiled / 1e6:.2f} "
        f"| {timeline.peak / compiled - 1:+.2%} | {temporary / 1e6:.2f} | {timeline.peak_used / 1e6:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    environment()
    sys.path.insert(0, str(HERE.parent))
    print("| schedule | timeline, MB | compiler, MB | difference | temporaries, MB | in use, MB |")
    print("|---|---|---|---|---|---|")
    for name, stages, options in SCHEDULES:
        print(compare(args, name, stages, options), flush=True)


if __name__ == "__main__":
    main()
