"""Seconds a step with and without compression, by two processes on a link of a given speed.

    python benchmarks/compression_link.py --rates 100mbit 1gbit none

Needs Linux and root. Each rate has a network namespace of its own, whose loopback device sends no faster (a token
bucket, `tc ... tbf`); the machine's other traffic does not notice. The two processes of `jpipe.launch`, one CPU device
each, exchange over it by Gloo. Both directions share the rate. *Stages*: a pipeline of two stages, which send
activations and gradients. *Replicas*: one stage with two replicas, which exchange gradients. The model is a stack of
dense layers. Rounds of all settings take turns; the table has the median and the range of the steps.
"""

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETTINGS = {
    "stages": {
        "plain": {},
        "8 bits": {"compress_messages": "quantize:bits=8"},
        "4 bits": {"compress_messages": "quantize:bits=4,block=64"},
        "DCT 10 %": {"compress_messages": "threshold:density=0.1,room=1"},
        "DCT 2.5 %": {"compress_messages": "threshold:density=0.025,room=1"},
    },
    "replicas": {
        "plain": {},
        "8 bits": {"compress_gradients": "quantize:bits=8"},
        "DCT 2.5 %": {"compress_gradients": "threshold:density=0.025,room=1"},
        "DCT 0.5 %": {"compress_gradients": "threshold:density=0.005,room=1"},
        "PowerSGD 4": {"compress_gradients": "powersgd:rank=4"},
    },
}
NUM_LAYERS, MICROBATCHES = 4, 4


def pipeline(between: str, options: dict, dim: int):
    """The pipeline of a setting."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jpipe

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(dim, dim, rngs=rngs)

        def __call__(self, x):
            return x + jax.nn.gelu(self.dense(x))

    stages, replicas = (2, 1) if between == "stages" else (1, 2)
    return jpipe.Pipeline(
        [functools.partial(Block)] * NUM_LAYERS,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(1e-3, momentum=0.9),
        schedule=jpipe.schedules.one_f_one_b(stages, MICROBATCHES),
        mesh=jpipe.make_mesh(stage=stages, data=replicas),
        **{name: jpipe.compress.parse(text) for name, text in options.items()},
    )


def measure(between: str, dim: int, rows: int, rounds: int) -> None:
    """In each of the two processes: prints the seconds of the steps of all settings, from process 0."""
    import jax
    import numpy as np

    import jpipe

    jpipe.distributed.initialize()
    rng = np.random.default_rng(0)
    whole = {name: rng.normal(size=(rows, dim)).astype("f") for name in ("inputs", "targets")}
    runs, seconds, ratios = {}, {}, {}
    for setting, options in SETTINGS[between].items():
        pipe = pipeline(between, options, dim)
        mine = jpipe.distributed.process_rows(pipe.mesh, num_rows=rows)
        batch = {name: a[mine] for name, a in whole.items()}
        state = pipe.init(jax.random.key(0), batch)
        records = pipe.messages(batch)
        ratios[setting] = sum(r.plain_bytes for r in records) / sum(r.num_bytes for r in records)
        for _ in range(3):  # compiles; thresholds begin with the first arrays
            state, metrics = pipe.step(state, batch)
        runs[setting], seconds[setting] = [pipe, state, batch], []
    for _ in range(rounds):
        for setting, run in runs.items():
            pipe, state, batch = run
            jax.block_until_ready(state.arrays())
            start = time.perf_counter()
            state, metrics = pipe.step(state, batch)
            jax.block_until_ready((state.arrays(), metrics))
            seconds[setting].append(time.perf_counter() - start)
            run[1] = state
    if jax.process_index() == 0:
        print("RESULT " + json.dumps({"ratios": ratios, "seconds": seconds}), flush=True)


def limited(rate: str, command: list[str]) -> list[str]:
    """The command in a network of its own, whose loopback device has a rate."""
    limit = "" if rate == "none" else f"tc qdisc add dev lo root tbf rate {rate} burst 128kb latency 2s && "
    script = f'ip link set lo mtu 1500 && ip link set lo up && {limit}exec "$@"'
    return ["unshare", "-n", "sh", "-c", script, "sh", *command]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "none"], help="as `tc` takes them, or none")
    parser.add_argument("--between", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in-process", choices=list(SETTINGS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        measure(args.in_process, args.dim, args.rows, args.rounds)
        return
    print(
        "| between | rate | setting | bytes / | seconds a step | range | times faster |\n|---|---|---|---|---|---|---|"
    )
    for between in args.between:
        for rate in args.rates:
            command = [sys.executable, "-m", "jpipe.launch", "-n", "2", "--devices", "2", __file__]
            command += ["--in-process", between, "--dim", args.dim, "--rows", args.rows, "--rounds", args.rounds]
            done = subprocess.run(limited(rate, list(map(str, command))), cwd=ROOT, capture_output=True, text=True)
            results = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
            if not results:
                sys.exit(f"{between} at {rate}: no result.\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            found = json.loads(results[0])
            medians = {name: statistics.median(times) for name, times in found["seconds"].items()}
            for name, times in found["seconds"].items():
                print(
                    f"| {between} | {rate} | {name} | {found['ratios'][name]:.1f} | {medians[name]:.3f} "
                    f"| {min(times):.3f} to {max(times):.3f} | {medians['plain'] / medians[name]:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
