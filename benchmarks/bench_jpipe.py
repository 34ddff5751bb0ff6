"""Trains the workload of `peers/bench_common.py` with jpipe: same flags, weights, data, report.

python benchmarks/bench_jpipe.py --schedule one_f_one_b --ticks paired --stages 4 --microbatches 8
"""

import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent)]
import bench_common as bc  # noqa: E402

parser = bc.parser(
    schedule=dict(default="one_f_one_b"),
    ticks=dict(default=None),
    recompute=dict(default="none"),
    data=dict(type=int, default=1, help="number of replicas; each has its own batch"),
)
args = parser.parse_args()
args.batch *= args.data
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={args.stages * args.data}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402

STAGES_PER_DEVICE = {"interleaved": 2, "zero_bubble_v": 2}
apply = bc.jax_layer_fn(args)


class Layer(nnx.Module):
    """One layer of the workload, with its numpy-seeded weights."""

    def __init__(self, index):
        for name, value in bc.layer_params(args, index).items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))

    def __call__(self, x):
        return apply(
            {name: getattr(self, name)[...] for name in bc.SHAPES[args.model](args.dim)},
            x,
        )


options = {"ticks": args.ticks} if args.ticks else {}
num_stages = args.stages * STAGES_PER_DEVICE.get(args.schedule, 1)
schedule = jpipe.schedules.get(args.schedule)(num_stages, args.microbatches, **options)
pipe = jpipe.Pipeline(
    [Layer(i) for i in range(args.layers)],
    loss=lambda outputs, batch: ((outputs - batch["targets"]) ** 2).mean(),
    optimizer=optax.sgd(args.lr),
    schedule=schedule,
    mesh=jpipe.make_mesh(stage=args.stages, data=args.data),
    recompute=args.recompute,
)
x, y = bc.data(args)
batch = {"inputs": x, "targets": y}
state = pipe.init(jax.random.key(0), batch)
batch = jax.device_put(batch, jax.sharding.NamedSharding(pipe.mesh, jax.sharding.PartitionSpec()))
start = time.perf_counter()
times, losses, compile_seconds = [], [], None
for step in range(args.warmup + args.steps):
    begin = time.perf_counter()
    state, metrics = pipe.step(state, batch)
    # While an asynchronous pipeline fills, no microbatch has finished and there is no loss.
    if int(metrics["num_microbatches"]):
        losses.append(float(metrics["loss"]))
    jax.block_until_ready(state)
    if compile_seconds is None:
        compile_seconds = time.perf_counter() - start
    if step >= args.warmup:
        times.append(time.perf_counter() - begin)
name = "-".join(
    filter(
        None,
        [
            "jpipe",
            args.schedule,
            args.ticks,
            args.recompute if args.recompute != "none" else None,
        ],
    )
)
bc.report(
    args,
    name,
    times,
    losses,
    [bc.rss_mb()],
    compile_s=round(compile_seconds, 2),
    jax=jax.__version__,
)
