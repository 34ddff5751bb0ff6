"""Predicted against measured seconds of a training step, for strategies of three models on two devices of the CPU.

    python benchmarks/soap_measured.py
    python benchmarks/soap_measured.py --rounds 6 --random 6 --out benchmarks/soap_measured.json
    python benchmarks/soap_measured.py --models pooled --random 0

The two devices share two cores. Operators are measured one by one, on both devices at once (`jpipe.soap.Profile`), and
the link between the devices by sums of arrays of several sizes. A strategy's step is simulated, and run with
`jpipe.soap.apply`: the loss, its gradients and an SGD update. All operators are measured in several rounds, and all
steps of a model once after each part of a round. A round has the median; of the rounds the least counts for both,
because other work on the machine can only add to it. As steps take turns, each turn also has a ratio of the seconds of
two strategies; their median says how much faster the found strategy is. FlexFlow's paper reports errors below 30 %, and
that the order of strategies is kept (arXiv:1807.05358, section 8.3).
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe import soap
from jpipe.soap.measure import measure

NUM_DEVICES = 2
LINK_ROUNDS = 9
"""How often the link is measured; the least median counts."""
PARTS = 8
"""Of a round. The speed of a shared machine changes by the minute: all steps are timed after each part of the
operators.
"""
CACHE_BYTES = 2**26
"""More than the caches of a device."""
MOST_COPIES = 16
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""Settings of the C library: otherwise each array above 32 MiB is new memory from the system, and its first use costs
more than the operator."""
FLAGS = f"--xla_force_host_platform_device_count={NUM_DEVICES} --xla_cpu_multi_thread_eigen=false"


def mlp():
    """Three dense layers with more weights than activations."""

    def loss(w, x, y):
        for name in ("first", "second"):
            x = jax.nn.relu(x @ w[name])
        return jnp.mean((x @ w["last"] - y) ** 2)

    weights = {"first": (768, 2048), "second": (2048, 2048), "last": (2048, 256)}
    return loss, weights, [(128, 768), (128, 256)]


def convolutions():
    """LeNet-5's layers, wider, on large batches."""

    def convolve(x, kernel):
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)
        x = jax.nn.relu(x)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def loss(w, x, y):
        x = convolve(convolve(x, w["c1"]), w["c2"])
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ w["f1"])
        return -(jax.nn.log_softmax(x @ w["f2"]) * y).sum(-1).mean()

    weights = {
        "c1": (5, 5, 4, 16),
        "c2": (5, 5, 16, 32),
        "f1": (7 * 7 * 32, 512),
        "f2": (512, 16),
    }
    return loss, weights, [(64, 28, 28, 4), (64, 16)]


def attention():
    """Two blocks of a transformer."""
    dim, heads = 256, 4

    def loss(w, x, y):
        B, L, D = x.shape
        for layer in w:
            q, k, v = ((x @ layer[name]).reshape(B, L, heads, -1).transpose(0, 2, 1, 3) for name in "qkv")
            p = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", q, k) / 8, -1)
            o = jnp.einsum("bhst,bhtd->bhsd", p, v).transpose(0, 2, 1, 3)
            x = x + o.reshape(B, L, D) @ layer["o"]
            x = x + jax.nn.relu(x @ layer["in"]) @ layer["out"]
        return jnp.mean((x - y) ** 2)

    layer = {name: (dim, dim) for name in "qkvo"}
    layer |= {"in": (dim, 4 * dim), "out": (4 * dim, dim)}
    return loss, [layer, layer], [(8, 64, dim)] * 2


def pooled():
    """Dense layers on every position, and larger ones on the mean of all positions: first activations are large, then
    weights.
    """
    dim, wide = 192, 4096

    def loss(w, x, y):
        for kernel in w["positions"]:
            x = jax.nn.relu(x @ kernel)
        x = jax.nn.relu(x.mean(1) @ w["in"])
        x = jax.nn.relu(x @ w["square"])
        return jnp.mean((x @ w["out"] - y) ** 2)

    weights = {"positions": [(dim, dim)] * 6, "in": (dim, wide), "square": (wide, wide), "out": (wide, dim)}
    return loss, weights, [(32, 256, dim), (32, dim)]


MODELS = {"mlp": mlp, "convolutions": convolutions, "attention": attention, "pooled": pooled}
KNOWN = ("data parallel", "one weird trick", "megatron")


def seconds_of(function, *sets, count: int = 5) -> float:
    """Median seconds of a call with each of several sets of arguments in turns, all of them `count` times."""
    for arguments in sets:
        jax.block_until_ready(function(*arguments))
    found = []
    for arguments in sets * count:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        found.append(time.perf_counter() - start)
    return statistics.median(found)


class Measured:
    """Seconds of operators, the least of several rounds."""

    def __init__(self):
        self._seconds = {}
        self.asked = set()

    def __call__(self, graph, operator, shape):
        key = operator, shape
        self.asked.add(key)
        if key not in self._seconds:
            self._seconds[key] = measure(graph, operator, shape)
        return self._seconds[key]

    def again(self, graph, number):
        """One more measurement of a part of the operators and shapes in `asked`: `number` counts the `PARTS` of a
        round.
        """
        for key in sorted(self.asked)[number % PARTS :: PARTS]:
            now = measure(graph, *key)
            self._seconds[key] = tuple(map(min, self._seconds[key], now))


def measured_machine() -> soap.Machine:
    """Two devices: their memory from an addition, their link from sums over both of them."""
    mesh = soap.device_mesh(NUM_DEVICES)
    axis = mesh.axis_names[0]
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, axis),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    sizes = [2**k for k in range(12, 25)]
    whole = NamedSharding(mesh, PartitionSpec())
    # A step adds up a gradient that no cache has: copies of an array take turns.
    sets = [
        [(jax.device_put(np.ones(n // 4, np.float32), whole),) for _ in range(min(CACHE_BYTES // n, MOST_COPIES))]
        for n in sizes
    ]
    rounds = [[seconds_of(total, *each) for each in sets] for _ in range(LINK_ROUNDS)]
    seconds = np.min(rounds, 0)
    # A ring of two devices sends one half there and back: 2 latencies, and all bytes once. Relative errors count.
    rows = np.stack([np.full(len(sizes), 2.0), np.array(sizes, float)], 1)
    scale = 1 / seconds
    latency, per_byte = np.linalg.lstsq(rows * scale[:, None], np.ones(len(sizes)))[0]
    x = jax.device_put(
        np.ones((NUM_DEVICES, 2**22), np.float32),
        NamedSharding(mesh, PartitionSpec(axis)),
    )
    add = jax.jit(lambda x, y: x + y)
    elapsed = min(seconds_of(add, (x, x)) for _ in range(LINK_ROUNDS))
    return soap.Machine(
        "two cores",
        (soap.Level(NUM_DEVICES, 1 / max(per_byte, 1e-15), max(latency, 1e-7)),),
        flops=1e11,  # operators are measured
        memory_bandwidth=3 * x.nbytes / NUM_DEVICES / elapsed,  # of each device
        memory_bytes=2**33,
        overhead=1e-5,
        device_kind="cpu core",
        overlap=False,  # XLA's CPU devices compute nothing in a collective
    )


def step_of(loss, graph, strategy, arrays):
    """A compiled step of a strategy, and what it takes."""
    mesh = soap.device_mesh(NUM_DEVICES)
    split = soap.apply(loss, graph, strategy, mesh)
    shardings = soap.argument_shardings(graph, strategy, mesh)
    leaves, tree = jax.tree.flatten(arrays)
    weights, *inputs = tree.unflatten([jax.device_put(a, s) for a, s in zip(leaves, shardings)])
    placed = tree.unflatten(shardings)[0]

    def step(weights, *inputs):
        value, gradients = jax.value_and_grad(split)(weights, *inputs)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    return jax.jit(step, out_shardings=(placed, None)), (weights, *inputs)


def rows_of(name: str, machine: soap.Machine, args) -> list[dict]:
    """One row per strategy of a model."""
    loss, shapes, inputs = MODELS[name]()
    rng = np.random.default_rng(0)

    def array(shape):
        return (rng.normal(size=shape) * 0.05).astype(np.float32)

    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    weights = jax.tree.map(array, shapes, is_leaf=is_shape)
    arrays = (weights, *map(array, inputs))
    graph = soap.trace(loss, *arrays)
    seconds_of_operators = Measured()
    space = soap.Space(graph, NUM_DEVICES, executable=True)

    def costs():
        return soap.Profile(machine, None, seconds_of_operators, optimizer_arrays=0)

    def predicted(strategy):
        return soap.simulate(graph, machine, strategy, costs(), optimizer_arrays=0)

    strategies = {
        "data parallel": soap.data_parallel(graph, NUM_DEVICES),
        "one weird trick": soap.one_weird_trick(graph, NUM_DEVICES),
        "megatron": soap.megatron(graph, NUM_DEVICES),
    }
    # Random strategies spread evenly over the range of predictions: the order of equal ones says nothing.
    rng = np.random.default_rng(0)
    drawn = [soap.random_strategy(space, rng) for _ in range(200)]
    drawn.sort(key=lambda s: predicted(s).seconds)
    times = [predicted(s).seconds for s in drawn]
    for i, time_wanted in enumerate(np.linspace(times[0], times[-1], args.random)):
        nearest = int(np.argmin(np.abs(np.array(times) - time_wanted)))
        strategies[f"random {i}"] = drawn[nearest]
    found = soap.search(graph, machine, costs=costs(), space=space, max_proposals=300, seed=0)
    strategies["found"] = found.strategy
    seconds_of_operators.asked.clear()
    steps = []
    for strategy in strategies.values():
        predicted(strategy)
        step, arguments = step_of(loss, graph, strategy, arrays)
        steps.append((step, arguments, []))
    for number in range(PARTS * args.rounds):
        seconds_of_operators.again(graph, number)
        for step, arguments, timings in steps:
            timings.append(seconds_of(step, arguments, count=1))
    rows = []
    for (label, strategy), (_, _, timings) in zip(strategies.items(), steps):
        row = {"model": name, "strategy": label}
        row["predicted"] = predicted(strategy).seconds
        row["measured"] = np.median(np.reshape(timings, (-1, PARTS)), axis=1).min()
        row["error"] = row["predicted"] / row["measured"] - 1
        row["turns"] = timings
        rows.append(row)
    return rows


def gains(rows: list[dict]) -> str:
    """How many times faster the found strategy is than the known ones: quartiles of the ratios of all turns."""
    turns = {row["strategy"]: np.array(row["turns"]) for row in rows}
    words = []
    for name in KNOWN:
        low, middle, high = np.percentile(turns[name] / turns["found"], (25, 50, 75))
        words.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) than {name}")
    return f"found is faster by a factor of {', '.join(words)}, in {len(turns['found'])} turns"


def tau(rows: list[dict], least: float) -> float:
    """Kendall's tau of pairs whose measured seconds differ by more than a fraction `least` of the smaller."""
    agreements = []
    for a, b in itertools.combinations(rows, 2):
        low, high = sorted((a, b), key=lambda row: row["measured"])
        if high["measured"] > (1 + least) * low["measured"]:
            agreements.append(np.sign(high["predicted"] - low["predicted"]))
    return float(np.mean(agreements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--random", type=int, default=4, help="random strategies")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    args = parser.parse_args()
    if not KEEP_MEMORY.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    with tempfile.TemporaryDirectory() as cache:
        # Operators are measured again in each round, and compiled once.
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        machine = measured_machine()
        rows = [row for name in args.models for row in rows_of(name, machine, args)]
    level = machine.levels[0]
    print(
        f"link: {level.bandwidth / 1e9:.2f} GB/s after {level.latency * 1e6:.0f} microseconds; "
        f"memory: {machine.memory_bandwidth / 1e9:.1f} GB/s; load of the machine: {os.getloadavg()[1]:.1f}\n"
    )
    print("| model | strategy | predicted, ms | measured, ms | error |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['strategy']} | {row['predicted'] * 1e3:.2f} | {row['measured'] * 1e3:.2f} | "
            f"{row['error']:+.0%} |"
        )
    print()
    for name in args.models:
        print(f"{name}: {gains([row for row in rows if row['model'] == name])}")
    print("\nKendall's tau, of all pairs and of pairs that differ by more than 5 and 10 %:")
    groups = {name: [r for r in rows if r["model"] == name] for name in args.models}
    for name, group in (groups | {"all strategies": rows}).items():
        print(f"  {name}:", *(f"{tau(group, least):.2f}" for least in (0, 0.05, 0.1)))
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
