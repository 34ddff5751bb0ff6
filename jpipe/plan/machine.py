"""Where a plan runs: devices, their memory, what moving bytes between them takes, and the cores they share."""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.layers.as_layers import InitApply
from jpipe.mesh import make_mesh
from jpipe.pipeline import Pipeline
from jpipe.schedules import gpipe


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal servers of equal devices.

    Attributes:
      num_devices: of all servers, counted from the first server on.
      memory_limit: bytes of one device.
      bandwidth: bytes a second between two devices, in one server and in two.
      latency: seconds of a message of no size.
      devices_per_server: how many share the fast links; None: all.
      tick: seconds of a tick beside its operations and the bytes of its messages.
      jitter: the part by which a tick takes longer in which several devices compute; see `jpipe.simulate.Costs`.
      step: seconds of a step beside its ticks.
      num_cores: that all devices share, as devices faked on CPU do; None: each is its own.
      cores_per_device: how many of them one device can use at once.

    Raises:
      ValueError: if a number is not above 0, or a time is below it.
    """

    num_devices: int
    memory_limit: float = math.inf
    bandwidth: tuple[float, float] = (math.inf, math.inf)
    latency: float = 0.0
    devices_per_server: int | None = None
    tick: float = 0.0
    jitter: float = 0.0
    step: float = 0.0
    num_cores: float | None = None
    cores_per_device: float = 1.0

    def __post_init__(self):
        positive = {
            "num_devices": self.num_devices,
            "memory_limit": self.memory_limit,
            "bandwidth": min(self.bandwidth),
            "devices_per_server": self.server_size,
            "num_cores": self.num_cores or 1.0,
            "cores_per_device": self.cores_per_device,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(
                    f"`{name}` must be above 0, got {getattr(self, name)}: nothing would run."
                )
        for name in ("latency", "tick", "jitter", "step"):
            if not 0 <= getattr(self, name) < math.inf:
                what = "part of a tick" if name == "jitter" else "number of seconds"
                raise ValueError(
                    f"`{name}` must be a {what}, at least 0, got {getattr(self, name)}."
                )

    @property
    def server_size(self) -> int:
        """How many devices share fast links."""
        if self.devices_per_server is None:
            return self.num_devices
        return self.devices_per_server

    def message_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """What a message takes between two devices; or a ring of several, for one of its turns.

        Args:
          num_bytes: that each sends.
          devices: their numbers; the slowest link between neighbours counts.
        """
        servers = {d // self.server_size for d in devices}
        return self.latency + num_bytes / self.bandwidth[len(servers) > 1]

    def reduce_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """What it takes to add up `num_bytes` over devices, in a ring: 2 (n - 1) turns of 1 / n of the bytes."""
        n = len(devices)
        if n == 1:
            return 0.0
        return 2 * (n - 1) * self.message_seconds(num_bytes / n, devices)


def measure_machine(
    num_devices: int,
    *,
    memory_limit: float = math.inf,
    num_cores: float | None = None,
    message_bytes: int = 2**20,
) -> Machine:
    """The machine that JAX runs on.

    Pipelines that hardly compute are timed, with small messages and with large ones; then loops that multiply matrices,
    on all devices, without and with a message after each turn, in short turns and in long ones. That tells what devices
    lose which wait for each other, as they do after a tick: where they share cores, more than an empty tick takes, and
    the more the longer it is.

    Args:
      num_devices: the first of `jax.devices()`, at least 1.
      memory_limit, num_cores: of the result. With cores, `cores_per_device` is measured too.
      message_bytes: of the larger of the two messages timed.

    Raises:
      ValueError: if there are fewer devices.
    """
    few, many = 4, 36  # microbatches
    small = [_step_seconds(num_devices, n, 1) for n in (few, many)]
    tick = max(small[1] - small[0], 0.0) / (2 * (many - few))
    step = max(small[0] - 2 * (few + num_devices - 1) * tick, 0.0)
    bandwidth, cores_per_device, jitter = math.inf, 1.0, 0.0
    if num_devices > 1:
        size = message_bytes // 4
        large = [_step_seconds(num_devices, n, size) for n in (few, many)]
        message = (large[1] - large[0]) / (2 * (many - few)) - tick
        bandwidth = message_bytes / message if message > 0 else math.inf
        waiting, jitter, faster_alone = _waiting(num_devices)
        tick = max(tick, waiting)
        if num_cores is not None:
            share = min(num_cores / num_devices, 1.0)
            cores_per_device = min(max(share * faster_alone, 1.0), num_cores)
    return Machine(
        num_devices,
        memory_limit,
        (bandwidth, bandwidth),
        tick=tick,
        jitter=jitter,
        step=step,
        num_cores=num_cores,
        cores_per_device=cores_per_device,
    )


def _step_seconds(num_stages: int, num_microbatches: int, size: int) -> float:
    """The median of GPipe steps whose stages multiply `[1, size]` by a number."""
    layer = InitApply(
        lambda key, x: {"scale": jnp.ones(())}, lambda own, x: x * own["scale"]
    )
    pipe = Pipeline(
        [layer] * num_stages,
        loss=lambda outputs, batch: outputs.mean(),
        optimizer=optax.sgd(0.0),
        schedule=gpipe(num_stages, num_microbatches),
        mesh=make_mesh(stage=num_stages),
    )
    batch = {"inputs": jnp.ones((num_microbatches, size))}
    state = pipe.init(jax.random.key(0), batch)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        state, metrics = pipe.step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _waiting(num_devices: int) -> tuple[float, float, float]:
    """What a turn of a loop takes longer if a message to the next device ends it: seconds, and a part of the turn; and how
    many times as long as on one device alone it takes on all of them."""
    from scipy import optimize  # as late as in `placement`

    width, num_matrices = 512, 4
    rows_and_turns = (16, 20), (64, 10), (256, 4)  # 0.6, 2 and 6 ms a turn on a core
    ring = [(d, (d + 1) % num_devices) for d in range(num_devices)]
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=(num_matrices, width, width)) / math.sqrt(width)
    matrices = matrices.astype(np.float32)

    def loop(rows: int, turns: int, count: int, sends: bool):
        """Runs it; returns the seconds of a turn."""

        def run(x, matrices):
            def turn(_, x):
                for matrix in matrices:
                    x = jnp.tanh(x @ matrix)
                return lax.ppermute(x, "stage", ring) if sends else x

            return lax.fori_loop(0, turns, turn, x)

        mesh, everywhere = make_mesh(stage=count), PartitionSpec()
        mapped = jax.jit(
            jax.shard_map(
                run,
                mesh=mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                check_vma=False,
            )
        )
        given = np.ones((rows, width), np.float32), matrices
        placed = jax.device_put(given, NamedSharding(mesh, everywhere))

        def seconds() -> float:
            start = time.perf_counter()
            jax.block_until_ready(mapped(*placed))
            return (time.perf_counter() - start) / turns

        return seconds

    loops = [
        loop(*one, num_devices, sends)
        for sends in (False, True)
        for one in rows_and_turns
    ]
    loops.append(loop(*rows_and_turns[1], 1, False))
    # One right after the other, as other work on the machine comes and goes.
    found = np.array([[seconds() for seconds in loops] for _ in range(26)])[1:]
    together, waiting, alone = found[:, :3], found[:, 3:6], found[:, 6]
    turn = np.median(together, axis=0)
    longer = np.median(waiting - together, axis=0) / turn
    (tick, jitter), _ = optimize.nnls(
        np.stack([1 / turn, np.ones_like(turn)], axis=1), np.maximum(longer, 0)
    )
    return float(tick), float(jitter), float(np.median(together[:, 1] / alone))
