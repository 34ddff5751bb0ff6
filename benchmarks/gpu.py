"""Times one GPU: the pipeline of one device against the plain jitted step.

    pip install "jax[cuda12]" -e .          # once
    python benchmarks/gpu.py                # under 10 minutes on one H100 or H200
    python benchmarks/gpu.py --rehearse     # a small model on CPU, in two minutes

The model is a decoder-only transformer of 370 million parameters, in bfloat16 with weights in float32
and AdamW. The plain step is a jitted, donated scan over the same microbatches. It adds up gradients
and updates once.

Each row is a process of its own, because a device's peak memory is that of the whole process:

- `plain`: the plain step alone;
- `one-stage`: 1F1B with one stage, alone, and then against the plain step in alternating rounds;
- every other schedule that fits one device, alone.

Rows are saved as they come. A row that fails, for want of memory or time, says so. No row begins when
`--seconds` are over.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "gpu.json"
sys.path.insert(0, str(HERE.parent))

# Dense bfloat16 products, FLOPs per second, by the start of the device's name in JAX. Source: the
# data sheets of NVIDIA (A100, H100, H200 Tensor Core GPU), without sparsity.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the minibatch."""

    dim: int = 1024
    heads: int = 16
    blocks: int = 24
    vocab: int = 32768
    positions: int = 1024
    microbatches: int = 8
    microbatch_size: int = 4
    rounds: int = 4
    steps: int = 3
    """Timed steps per round."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.positions * self.microbatches * self.microbatch_size


REHEARSAL = Sizes(
    dim=64,
    heads=4,
    blocks=2,
    vocab=128,
    positions=32,
    microbatches=2,
    microbatch_size=2,
    rounds=2,
    steps=1,
)


def model_flops(sizes: Sizes) -> int:
    """FLOPs of the model in one step, without what is computed again.

    A token costs 6 FLOPs per weight of a matrix product and, in each block, 12 FLOPs per position and
    number of the residual stream for attention. No part of the causal mask is left out.

    References:
      Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B.
    """
    of_blocks = 12 * sizes.dim**2 * sizes.blocks
    weights = of_blocks + sizes.dim * sizes.vocab
    attention = 12 * sizes.blocks * sizes.dim * sizes.positions
    return sizes.tokens * (6 * weights + attention)


def peak_flops(device_kind: str) -> float | None:
    """FLOPs per second of dense bfloat16 products; None for an unknown device.

    Example:
      >>> peak_flops("NVIDIA H100 80GB HBM3") / 1e12, peak_flops("cpu")
      (989.0, None)
    """
    found = (n for name, n in PEAK_FLOPS.items() if device_kind.startswith(name))
    return next(found, None)


def schedules(num_microbatches: int) -> dict[str, tuple[str, int]]:
    """Row -> name and number of stages of each schedule that fits one device."""
    import jpipe

    rows = {}
    for name in jpipe.schedules.names():
        for num_stages in (1, 2):
            if jpipe.schedules.refusal(name, num_stages, num_microbatches) is None:
                schedule = jpipe.schedules.get(name)(num_stages, num_microbatches)
                if schedule.num_devices == 1:
                    rows[name] = name, num_stages
                    break
    return rows


# -- The two programs: each is `(step, state, batch)`, `step(state, batch) -> state, loss`


def batch_of(sizes: Sizes) -> dict:
    """A minibatch of random tokens, the same in every process."""
    import jax

    shape = (sizes.microbatches * sizes.microbatch_size, sizes.positions)
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        name: jax.random.randint(key, shape, 0, sizes.vocab)
        for name, key in zip(("inputs", "labels"), keys)
    }


def model_of(sizes: Sizes) -> Any:
    """The transformer."""
    from models.transformer import Transformer

    return Transformer(
        vocab_size=sizes.vocab,
        seq_len=sizes.positions,
        dim=sizes.dim,
        num_heads=sizes.heads,
        num_blocks=sizes.blocks,
    )


def optimizer_of() -> Any:
    """AdamW."""
    import optax

    return optax.adamw(1e-4)


def pipeline(sizes: Sizes, name: str, num_stages: int) -> tuple[Callable, Any, Any]:
    """The pipeline on one device."""
    import jax
    import jax.numpy as jnp

    import jpipe

    model, batch = model_of(sizes), batch_of(sizes)
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optimizer_of(),
        schedule=jpipe.schedules.get(name)(num_stages, sizes.microbatches),
        mesh=jpipe.make_mesh(stage=1, devices=jax.devices()[:1]),
        compute_dtype=jnp.bfloat16,
    )

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        state, metrics = pipe.step(state, batch)
        return state, metrics["loss"]

    return step, pipe.init(jax.random.key(0), batch), batch


def plain_loss(sizes: Sizes) -> tuple[Callable, Callable]:
    """`loss(parameters, microbatch)` of the model without a pipeline, and `init()`."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    model = model_of(sizes)
    factories, loss = model.layers(), model.loss()
    graphs = [
        nnx.split(nnx.eval_shape(lambda f=f: f(rngs=nnx.Rngs(0))))[0] for f in factories
    ]

    @jax.jit
    def init() -> list:
        return [nnx.split(f(rngs=nnx.Rngs(i)))[1] for i, f in enumerate(factories)]

    def value(parameters: list, microbatch: dict) -> jax.Array:
        x = microbatch["inputs"]
        for graph, weights in zip(graphs, parameters, strict=True):
            cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
            x = nnx.merge(graph, cast)(x)
        return loss(x.astype(jnp.float32), microbatch)[0]

    return value, init


def plain(sizes: Sizes) -> tuple[Callable, Any, Any]:
    """The plain step."""
    import jax
    import jax.numpy as jnp
    import optax

    value, init = plain_loss(sizes)
    optimizer = optimizer_of()

    def plain_step(state: tuple, batch: dict) -> tuple[tuple, jax.Array]:
        parameters, optimizer_state = state

        def add(sums: tuple, microbatch: dict) -> tuple[tuple, None]:
            loss, grads = jax.value_and_grad(value)(parameters, microbatch)
            return jax.tree.map(jnp.add, sums, (loss, grads)), None

        microbatches = jax.tree.map(
            lambda a: a.reshape(sizes.microbatches, -1, *a.shape[1:]), batch
        )
        start = jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters)
        sums, _ = jax.lax.scan(add, start, microbatches)
        loss, grads = jax.tree.map(lambda a: a / sizes.microbatches, sums)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    parameters = init()
    state = parameters, jax.jit(optimizer.init)(parameters)
    return jax.jit(plain_step, donate_argnums=0), state, batch_of(sizes)


# -- One row


class Timed:
    """A program that is run step by step.

    Attributes:
      seconds: of each timed step.
      first: seconds of the first step, which compiles.
      loss: of the first step.
    """

    def __init__(self, program: tuple[Callable, Any, Any]):
        self._step, self._state, self._batch = program
        self.seconds: list[float] = []
        start = time.perf_counter()
        self.loss = self._run()
        self.first = time.perf_counter() - start
        self._run()  # the second step may still set something up

    def _run(self) -> float:
        self._state, loss = self._step(self._state, self._batch)
        return float(loss)

    def round(self, steps: int) -> None:
        """Times some steps. Each ends when its loss is on the host."""
        for _ in range(steps):
            start = time.perf_counter()
            self._run()
            self.seconds.append(time.perf_counter() - start)

    def report(self) -> dict:
        """Median and extremes of the timed steps, and the first step."""
        return {
            "seconds": statistics.median(self.seconds),
            "fastest": min(self.seconds),
            "slowest": max(self.seconds),
            "first_step": self.first,
            "first_loss": self.loss,
        }


def peak_gb() -> float | None:
    """The peak memory of this process on the device, in GB; None if the platform does not say."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 1e9


def run_row(row: str, sizes: Sizes) -> dict:
    """Times one row, in this process."""
    if row == "plain":
        program = plain(sizes)
    elif row == "one-stage":
        program = pipeline(sizes, "one_f_one_b", 1)
    else:
        program = pipeline(sizes, *schedules(sizes.microbatches)[row])
    timed = Timed(program)
    for _ in range(sizes.rounds):
        timed.round(sizes.steps)
    result = timed.report() | {"peak_gb": peak_gb()}
    if row == "one-stage":
        timed.seconds = []
        beside = Timed(plain(sizes))
        for r in range(sizes.rounds):
            for program in (timed, beside) if r % 2 else (beside, timed):
                program.round(sizes.steps)
        ours, theirs = map(statistics.median, (timed.seconds, beside.seconds))
        result["alternating"] = {"pipeline": ours, "plain": theirs}
        result["overhead"] = ours / theirs - 1
    return result


# -- All rows


def machine() -> dict:
    """What the rows are measured on, asked in a process of its own, which frees the device."""
    ask = (
        "import jax, json; d = jax.devices()[0]; print(json.dumps({'device': "
        "d.device_kind, 'platform': d.platform, 'jax': jax.__version__}))"
    )
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"gpu.py: JAX does not start: {answer.stderr.strip()[-500:]}")
    git = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
    )
    today = datetime.date.today().isoformat()
    commit = git.stdout.strip() or "unknown"
    return {**json.loads(answer.stdout), "date": today, "commit": commit}


def rows(num_microbatches: int) -> Iterator[str]:
    """The rows, the most important first."""
    yield from ("plain", "one-stage")
    yield from (name for name in schedules(num_microbatches) if name != "one_f_one_b")


def run_apart(row: str, rehearse: bool, seconds: float) -> dict:
    """Times one row in a process of its own."""
    command = [sys.executable, __file__, "--row", row]
    command += ["--rehearse"] if rehearse else []
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {seconds:.0f} s"}
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        return {"failed": lines[-1][:300]}
    return json.loads(process.stdout.splitlines()[-1])


def table(results: dict) -> str:
    """Markdown of all rows."""
    sizes = Sizes(**results["sizes"])
    peak = peak_flops(results["device"])
    plain_seconds = results["rows"].get("plain", {}).get("seconds")
    lines = [
        "| program | s per step | against plain | tokens/s | MFU | peak, GB | first step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        if "failed" in row:
            lines.append(f"| {name} | {row['failed']} | | | | | |")
            continue
        seconds = row["seconds"]
        ratio = f"{seconds / plain_seconds:.3f}" if plain_seconds else ""
        mfu = f"{model_flops(sizes) / seconds / peak:.1%}" if peak else ""
        memory = "" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
        lines.append(
            f"| {name} | {seconds:.4f} | {ratio} | {sizes.tokens / seconds:,.0f} | {mfu} | "
            f"{memory} | {row['first_step']:.1f} |"
        )
    overhead = results["rows"].get("one-stage", {}).get("overhead")
    if overhead is not None:
        lines += ["", f"Overhead of one stage, alternating with plain: {overhead:+.1%}"]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark, or one row of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="small, on CPU")
    parser.add_argument("--seconds", type=float, default=540, help="time for all rows")
    parser.add_argument("--out", type=pathlib.Path, help=f"default {RESULTS.name}")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    sizes = REHEARSAL if args.rehearse else Sizes()
    if args.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if args.row:
        print(json.dumps(run_row(args.row, sizes)))
        return
    start = time.monotonic()
    results = machine() | {"sizes": dataclasses.asdict(sizes), "rows": {}}
    if results["platform"] not in ("gpu", "cuda", "rocm") and not args.rehearse:
        raise SystemExit(
            f"gpu.py: JAX finds no GPU, only {results['device']!r}. Install JAX for the GPU's driver, for "
            'example `pip install "jax[cuda12]"`, or try the program with --rehearse.'
        )
    out = args.out or (None if args.rehearse else RESULTS)
    for row in rows(sizes.microbatches):
        left = args.seconds - (time.monotonic() - start)
        if left <= 0:
            results["rows"][row] = {"failed": "not begun: the time was over"}
        else:
            results["rows"][row] = run_apart(row, args.rehearse, left)
        print(row, json.dumps(results["rows"][row]), flush=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{results['device']}, {results['date']}, jax {results['jax']}\n")
    print(table(results))


if __name__ == "__main__":
    main()
