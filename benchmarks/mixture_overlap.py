"""Compiles steps of a mixture of experts for described TPUs and GPUs, and counts the all-to-alls under compute.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/mixture_overlap.py               # v5e: 2 devices of "stage" x 4 of "expert"
    benchmarks/gpu_env/bin/python benchmarks/mixture_overlap.py --chip h100  # `make gpu-compiler` makes the environment
    python benchmarks/mixture_overlap.py --redraw      # the table of the saved rows

A transformer in bfloat16, with AdamW in float32; 8 experts of capacity 1. Each row is a table, with both passes of a
tick in one branch (`jpipe.engine.pairs`), or as *apart* in two. Of the all-to-alls in the branches that a device takes
in a tick with both passes:

- *asynchronous*: how many have a start and a done;
- *under compute*: how many of them have a matrix product between the two;
- *of the other pass*: how many have a product of the other pass there.

*Temporaries* are MB that the compiler reserves on a device beside the state. Nothing is run.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.compile_tpu import Program, environment  # noqa: E402
from benchmarks.context import computes, devices_of  # noqa: E402

RESULTS = HERE / "mixture_overlap.json"
STAGES = 2  # devices along "stage"
_PASS = re.compile(r"/(forward|backward)/stage")


def schedules(num_microbatches: int) -> dict[str, Any]:
    """The tables whose ticks have two passes that do not depend on each other."""
    import jpipe

    tables, N = jpipe.schedules, num_microbatches
    return {
        "one_f_one_b": tables.one_f_one_b(STAGES, N, ticks="overlapped"),
        "interleaved": tables.interleaved(2 * STAGES, N, ticks="overlapped"),
        "dual_pipe_v": tables.dual_pipe_v(2 * STAGES, N),
    }


def compile_one(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A row of the table."""
    import jax
    import jax.numpy as jnp
    import optax

    import jpipe
    from jpipe.lowering import target
    from models import MixtureTransformer

    if args.apart:
        for platform, facts in target.TARGETS.items():
            target.TARGETS[platform] = dataclasses.replace(facts, pairs_passes=False)
    model = MixtureTransformer(
        vocab_size=1024,
        seq_len=args.seq,
        dim=args.dim,
        num_heads=args.dim // 128,
        num_blocks=args.blocks,
        num_experts=8,
        num_chosen=2,
        expert_dim=4 * args.dim,
        capacity=1.0,
    )
    devices = devices_of(args.chip)
    experts = len(devices) // STAGES
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optax.adamw(3e-4),
        schedule=schedules(args.microbatches)[name],
        mesh=jpipe.make_mesh(stage=STAGES, expert=experts, devices=devices),
        compute_dtype=jnp.bfloat16,
        recompute=args.recompute,
    )
    tokens = jax.ShapeDtypeStruct((2 * experts * args.microbatches, args.seq), jnp.int32)
    start = time.perf_counter()
    compiled = pipe.compile({"inputs": tokens, "labels": tokens})
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    if args.keep:
        (args.keep / f"{args.chip}-{name}{'-apart' * args.apart}.txt").write_text(text)
    return {
        "chip": args.chip,
        "schedule": name,
        "blocks": args.blocks,
        "recompute": args.recompute,
        "passes": "apart" if args.apart else "one branch",
        **counts(text),
        "temporaries_mb": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        "compile_s": seconds,
    }


def counts(text: str) -> dict[str, int]:
    """The all-to-alls in the branches of both passes; if there are none, in all branches."""
    program = Program(text)
    found = []
    for lines in program.computations.values():
        for i, line in enumerate(lines):
            kind = re.search(r" all-to-all(-start)?\(", line)
            if kind:
                found.append(("/pair/" in line, kind[1] is not None, *_under_compute(program, lines, i)))
    in_pairs = [row for row in found if row[0]] or found
    _, asynchronous, under_compute, of_other = (sum(column) for column in zip(*in_pairs))
    return {
        "all_to_alls": len(in_pairs),
        "asynchronous": asynchronous,
        "under_compute": under_compute,
        "of_the_other_pass": of_other,
    }


def _under_compute(program: Program, lines: list[str], start: int) -> tuple[bool, bool]:
    """Whether a product stands between the start of an exchange and its done, and whether one of the other pass."""
    name = lines[start].replace("ROOT ", "").split()[0]
    scope, found = _PASS.search(lines[start]), []
    for line in lines[start + 1 :]:
        if re.search(rf"-done\({re.escape(name)}[,)]", line):
            passes = [_PASS.search(other) for other in found]
            return bool(found), any(scope and other and scope[1] != other[1] for other in passes)
        if computes(program, line):
            found.append(line)
    return False, False


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = [
        "| chip | schedule | blocks | recompute | passes | all-to-alls | asynchronous | under compute "
        "| of the other pass | temporaries, MB | compiled in, s |",
        "|---" * 11 + "|",
    ]
    lines += [
        f"| {r['chip']} | `{r['schedule']}` | {r['blocks']} | {r['recompute']} | {r['passes']} | {r['all_to_alls']} "
        f"| {r['asynchronous']} | {r['under_compute']} | {r['of_the_other_pass']} "
        f"| {r['temporaries_mb']:.0f} | {r['compile_s']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def _key(row: dict[str, Any]) -> list[Any]:
    return [row[name] for name in ("chip", "schedule", "blocks", "recompute", "passes")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=["v5e", "h100"], default="v5e")
    parser.add_argument("--schedules", nargs="+", default=["one_f_one_b", "interleaved", "dual_pipe_v"])
    parser.add_argument("--apart", action="store_true", help="both passes in branches of their own")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--redraw", action="store_true", help="print the saved rows")
    parser.add_argument("--out", type=pathlib.Path, help="also save the rows here")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the programs here")
    args = parser.parse_args()
    if args.redraw:
        print(table(json.loads(RESULTS.read_text())))
        return
    environment()
    if args.chip == "h100":
        from benchmarks.compile_gpu import BASE_FLAGS

        os.environ["XLA_FLAGS"] = f"{BASE_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    new = []
    for name in args.schedules:
        new.append(compile_one(args, name))
        print(json.dumps(new[-1]), flush=True)
        if args.out:
            rows = json.loads(args.out.read_text()) if args.out.exists() else []
            rows = sorted([row for row in rows if _key(row) != _key(new[-1])] + [new[-1]], key=_key)
            args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(table(new))


if __name__ == "__main__":
    main()
