"""Compiles training steps on long sequences for described TPUs and GPUs, on a machine without either.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/context.py                       # v5e: 2 stages x 4 devices of "context"
    python benchmarks/context.py --method ring --context 1 4
    benchmarks/gpu_env/bin/python benchmarks/context.py --chip h100     # `make gpu-compiler` makes the environment
    python benchmarks/context.py --redraw              # the table of the saved rows

A decoder with grouped queries and rotary positions, in bfloat16, with AdamW in float32, in two stages of 1F1B. A
microbatch is one sequence, and a stage runs its forward again before its backward. Devices that no axis needs are
replicas. Each row is a length:

- *device*: GB that the compiler reserves on a device, and of these *temporaries*, which are no part of the state.
- *message*: MB that a device sends to the next stage for a microbatch.
- *exchanged*: MB that a device sends to those of its stage for one block, in a forward of the first stage, and in its
  backward with the forward that it runs again.
- *under compute*: of these exchanges, how many have a matrix product between their start and their done, or, as TPUs
  write it, in a fusion with their steps.
- *square*: the saved rows also have `squares_mb`, MB of the largest array with two dims of an eighth of the positions
  or more, from 128 K positions on. It is 0 if no array is positions x positions.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.compile_tpu import Program, bytes_of_shape, environment, reserved_bytes  # noqa: E402

RESULTS = HERE / "context.json"
STAGES = 2
LENGTHS = tuple(2**n for n in range(12, 18))
DIM, HEADS, KEY_HEADS, BLOCKS, VOCABULARY = 2048, 16, 4, 4, 256
EXCHANGES = "all-gather|all-to-all|collective-permute"


def layers(method):
    """Factories of the layers."""
    import functools

    import jax.numpy as jnp
    from flax import linen, nnx

    import jpipe

    init = nnx.initializers.normal(0.02)

    def named(*names):
        return nnx.with_partitioning(init, names, eager_sharding=False)

    def residual(x):
        return linen.with_logical_constraint(x, ("batch", "length", "embed"))

    def inside(x, name):
        return linen.with_logical_constraint(x, ("batch", "positions", name))

    class Embedding(nnx.Module):
        def __init__(self, *, rngs):
            self.words = nnx.Embed(VOCABULARY, DIM, rngs=rngs)

        def __call__(self, tokens):
            return residual(self.words(tokens))

    def turned(a):
        """Rotary positions (Su et al., 2021, arXiv:2104.09864)."""
        half = a.shape[-1] // 2
        angle = jnp.arange(a.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)[None]
        sin, cos = (f(angle)[None, :, None].astype(a.dtype) for f in (jnp.sin, jnp.cos))
        left, right = jnp.split(a, 2, -1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
            head = DIM // HEADS
            self.norms = nnx.List([nnx.RMSNorm(DIM, rngs=rngs) for _ in range(2)])
            self.query = linear(DIM, DIM, kernel_init=named("embed", "heads"))
            self.key, self.value = (
                linear(DIM, KEY_HEADS * head, kernel_init=named("embed", "heads")) for _ in range(2)
            )
            self.out = linear(DIM, DIM, kernel_init=named("heads", "embed"))
            self.up = linear(DIM, 4 * DIM, kernel_init=named("embed", "mlp"))
            self.down = linear(4 * DIM, DIM, kernel_init=named("mlp", "embed"))

        def __call__(self, x):
            y = inside(self.norms[0](x), None)
            query, key, value = (
                linear(y).reshape(*x.shape[:2], -1, DIM // HEADS) for linear in (self.query, self.key, self.value)
            )
            y = jpipe.attention(turned(query), turned(key), value, is_causal=True, method=method)
            x = residual(x + self.out(y.reshape(x.shape)))
            hidden = inside(self.up(inside(self.norms[1](x), None)), "mlp")
            return residual(x + self.down(nnx.silu(hidden)))

    class Head(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(DIM, VOCABULARY, use_bias=False, kernel_init=init, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    return [Embedding, *[Block] * BLOCKS, Head]


def devices_of(chip: str) -> list:
    """Eight described devices."""
    from jax.experimental import topologies

    if chip == "v5e":
        return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    from benchmarks.gpu_steps import devices

    return list(devices(8))


def compile_one(args: argparse.Namespace, context: int, length: int) -> dict:
    """A row of the table."""
    import jax
    import jax.numpy as jnp
    import optax

    import jpipe

    devices = devices_of(args.chip)
    data = len(devices) // STAGES // context
    pipe = jpipe.Pipeline(
        layers(args.method),
        loss=lambda outputs, batch: jpipe.vocabulary.cross_entropy(outputs, batch["targets"]).mean(),
        optimizer=optax.adamw(3e-4),
        schedule=jpipe.schedules.one_f_one_b(STAGES, args.microbatches),
        mesh=jpipe.make_mesh(stage=STAGES, data=data, context=context, devices=devices),
        compute_dtype=jnp.bfloat16,
        recompute="full",
    )
    tokens = jax.ShapeDtypeStruct((data * args.microbatches, length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    start = time.perf_counter()
    compiled = pipe.compile(batch)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    if args.keep:
        (args.keep / f"{args.chip}-{context}-{length}.txt").write_text(text)
    analysis = compiled.memory_analysis()
    return {
        "chip": args.chip,
        "context": context,
        "method": args.method or "default",
        "length": length,
        "device_gb": reserved_bytes(analysis) / 1e9,
        "temporaries_gb": analysis.temp_size_in_bytes / 1e9,
        "compile_s": seconds,
        **read(text, length, num_blocks=1 if args.chip == "v5e" else BLOCKS // STAGES),
    }


def read(text: str, length: int, num_blocks: int) -> dict:
    """What a program sends for a block of the first stage, and its largest array of scores.

    `num_blocks` are those of a stage in the text: TPUs have a loop over them, and GPUs do not.
    """
    program = Program(text)
    messages, exchanges, hidden = [], {}, set()
    for name, lines in program.computations.items():
        for i, line in enumerate(lines):
            kind = re.search(rf" ({EXCHANGES})(-start)?\(", line)
            if kind is None:
                continue
            shapes = re.findall(r"\w+\[[\d,]*\]", line.split(" = ")[1].split(f" {kind[1]}")[0])
            scope = re.search(r'op_name="[^"]*?/(forward|backward)/stage0/(?:cond/)?[^"]*shard_map', line)
            if kind[1] == "collective-permute":
                messages.append(bytes_of_shape(shapes[0]) / 1e6)
            if scope is None or kind[1] == "collective-permute":
                continue
            # An asynchronous all-gather has its operand beside its result, an all-to-all a part for each device.
            sizes = [bytes_of_shape(shape) / 1e6 for shape in shapes]
            total = sum(sizes) if kind[1] == "all-to-all" and not kind[2] else max(sizes)
            # TPUs write the steps of an all-gather several times, with one channel. Other exchanges may share one.
            in_steps = kind[1] == "all-gather" and not kind[2]
            channel = re.search(r"channel_id=(\d+)", line)[1] if in_steps else line.split()[0]
            group = _group(line)
            exchanges[channel] = scope[1], total * (group - 1) / group
            # TPUs run the steps of an all-gather in fusions with other operations.
            if "async_collective_fusion" in name:
                hidden.update({channel} if any(computes(program, other) for other in lines) else ())
            elif kind[2] and _has_product(program, lines, i):
                hidden.add(channel)
    sent = {
        operation: sum(size for scope, size in exchanges.values() if scope == operation)
        for operation in ("forward", "backward")
    }
    return {
        "message_mb": max(messages, default=0.0),
        "forward_mb": sent["forward"] / num_blocks,
        "backward_mb": sent["backward"] / num_blocks,
        "exchanges": len(exchanges),
        "under_compute": len(hidden),
        "squares_mb": max(_squares(text, length), default=0.0),
    }


def _group(line: str) -> int:
    """The number of devices that exchange with each other."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    return int(re.search(r"replica_groups=\[\d+,(\d+)\]", line)[1])


def _squares(text: str, length: int) -> list[float]:
    """MB of the arrays that have as many numbers as the queries of a device times all keys, or more."""
    positions = length // 8
    found = []
    for shape in set(re.findall(r"\w+\[[\d,]+\]", text)):
        dims = sorted(map(int, shape.partition("[")[2].rstrip("]").split(",")))
        if len(dims) > 1 and dims[-2] >= positions > 4 * DIM:
            found.append(bytes_of_shape(shape) / 1e6)
    return found


def _has_product(program: Program, lines: list[str], start: int) -> bool:
    """Whether a product stands between the start of an exchange and its done."""
    name = lines[start].replace("ROOT ", "").split()[0]
    for line in lines[start + 1 :]:
        if re.search(rf"-done\({re.escape(name)}[,)]", line):
            return False
        if computes(program, line):
            return True
    return False


def computes(program: Program, line: str) -> bool:
    """Whether an instruction is a matrix product, or calls a computation that has one."""
    if re.search(r" (dot|convolution)\(|__cublas|__triton_gemm", line):
        return True
    called = re.findall(r"(?:calls|body|to_apply)=(%[\w.\-]+)", line)
    return any(computes(program, inner) for name in called for inner in program.computations.get(name, ()))


def table(rows: list[dict]) -> str:
    """Rows as Markdown."""
    head = (
        "| chip | context | method | positions | device, GB | temporaries, GB | message, MB | exchanged F / B, MB "
        "| under compute |"
    )
    lines = [head, "|" + "---|" * 9]
    for row in rows:
        if "failed" in row:
            lines.append(
                f"| {row['chip']} | {row['context']} | {row['method']} | {row['length']:,} | {row['failed']} |"
                + " |" * 4
            )
            continue
        lines.append(
            f"| {row['chip']} | {row['context']} | {row['method']} | {row['length']:,} | {row['device_gb']:.2f} "
            f"| {row['temporaries_gb']:.2f} | {row['message_mb']:.1f} "
            f"| {row['forward_mb']:.0f} / {row['backward_mb']:.0f} | {row['under_compute']} of {row['exchanges']} |"
        )
    return "\n".join(lines)


def _key(row: dict) -> list:
    return [row[name] for name in ("chip", "context", "method", "length")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=["v5e", "h100"], default="v5e")
    parser.add_argument("--context", nargs="+", type=int, default=[4])
    parser.add_argument("--method", choices=["ring", "all_to_all"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--redraw", action="store_true", help="print the saved rows")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="where rows are saved")
    parser.add_argument("--keep", type=pathlib.Path, help="keep the programs here")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    if args.redraw:
        print(table(rows))
        return
    environment()
    if args.chip == "h100":
        from benchmarks.compile_gpu import BASE_FLAGS

        os.environ["XLA_FLAGS"] = f"{BASE_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
    for context in args.context:
        for length in args.lengths:
            row = compile_one(args, context, length)
            print(json.dumps(row), flush=True)
            rows = sorted([other for other in rows if _key(other) != _key(row)] + [row], key=_key)
            args.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(table(rows))


if __name__ == "__main__":
    main()
