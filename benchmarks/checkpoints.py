"""What checkpoints cost: how long a save blocks training, memory on the host, bytes, and restoring.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --dim 512 --layers 16

The model is a stack of linear layers with Adam, 1F1B on four devices, which are stand-ins on a CPU. A row
is measured in a process of its own, so that no row finds memory that another one has left. Columns:

- *blocks*: seconds until `save` returns, the median of the saves after the first.
- *whole after*: seconds from the call until the step is whole and checked.
- *steps meanwhile*: training steps in that time, and without a save.
- *memory*: how much more memory the process used at the most with saves than without, while it trained,
  divided by the bytes of the state. Measured on Linux.
- *on disk*: bytes of a step, divided by the bytes of the state.
- *restore*: seconds of `Checkpoints.restore`, in the same layout and on half as many stages.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def peak_bytes() -> int:
    """The most memory that this process has used since `forget_peak`."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure(dim: int, num_layers: int, folder: pathlib.Path) -> dict:
    """One row."""
    sys.path.insert(0, str(ROOT))
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jpipe

    jax.config.update("jax_num_cpu_devices", 4)

    def pipeline(num_stages: int) -> jpipe.Pipeline:
        return jpipe.Pipeline(
            [lambda rngs: nnx.Linear(dim, dim, rngs=rngs)] * num_layers,
            loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
            optimizer=optax.adam(1e-3),
            schedule=jpipe.schedules.one_f_one_b(num_stages, 8),
        )

    def steps_until(ends, state):
        """Trains until `ends(seconds)`; also the number of steps and the seconds."""
        start, count = time.perf_counter(), 0
        while not ends(time.perf_counter() - start):
            state, metrics = pipe.step(state, batch)
            metrics["loss"].block_until_ready()
            count += 1
        return state, count, time.perf_counter() - start

    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(64, dim)).astype(np.float32) for name in ("inputs", "targets")}
    pipe = pipeline(4)
    state = pipe.init(jax.random.key(0), batch)
    for _ in range(3):
        state, _ = pipe.step(state, batch)
    jax.block_until_ready(state.parameters)
    forget_peak()
    state, alone, seconds_alone = steps_until(lambda seconds: seconds > 5, state)
    peak_alone = peak_bytes()
    num_bytes = sum(a.nbytes for a in jax.tree.leaves(state.kept()))
    checkpoints = jpipe.Checkpoints(folder)
    forget_peak()
    rows = []
    for step in range(4):
        start = time.perf_counter()
        checkpoints.save(step, state)
        blocked = time.perf_counter() - start
        newest = folder / f"{step:08d}"
        state, count, seconds = steps_until(lambda _, at=newest: at.exists(), state)
        whole = time.perf_counter() - start
        checkpoints.wait()
        rows.append((blocked, whole, count / seconds))
    peak = peak_bytes() - peak_alone
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    del state
    restores = []
    for num_stages in (4, 2):
        other = pipeline(num_stages)
        start = time.perf_counter()
        restored = checkpoints.restore(other, batch)
        jax.block_until_ready(restored.state.parameters)
        restores.append(time.perf_counter() - start)
        del restored
    blocked, whole, speed = (statistics.median(column) for column in zip(*rows[1:]))
    return {
        "state_mb": num_bytes / 1e6,
        "blocks_s": blocked,
        "first_blocks_s": rows[0][0],
        "whole_after_s": whole,
        "steps_per_s_meanwhile": speed,
        "steps_per_s_alone": alone / seconds_alone,
        "memory": peak / num_bytes,
        "on_disk": size / len(checkpoints.steps()) / num_bytes,
        "restore_s": restores[0],
        "restore_other_s": restores[1],
    }


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        "| state, MB | blocks, s | whole after, s | steps per s meanwhile, alone | memory | on disk "
        "| restore, s: same layout, half the stages |",
        "|---" * 7 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['state_mb']:,.0f} | {r['blocks_s']:.2f} | {r['whole_after_s']:.1f} "
            f"| {r['steps_per_s_meanwhile']:.1f}, {r['steps_per_s_alone']:.1f} | {r['memory']:.2f} "
            f"| {r['on_disk']:.2f} | {r['restore_s']:.1f}, {r['restore_other_s']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, nargs="+", default=[512, 1536, 2560])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        row = measure(args.dim[0], args.layers, pathlib.Path(args.measure))
        print(json.dumps(row))
        return
    rows = []
    for dim in args.dim:
        folder = tempfile.mkdtemp()
        words = ["--dim", str(dim), "--layers", str(args.layers), "--measure", folder]
        ended = subprocess.run(
            [sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            # With an arena for each thread, glibc keeps freed memory that nobody uses.
            env=os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "1"},
        )
        shutil.rmtree(folder)
        rows.append(json.loads(ended.stdout.splitlines()[-1]))
    print(table(rows))


if __name__ == "__main__":
    main()
