"""Measures the machine: messages, ticks, steps, and cores that devices share."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe._processes.sharing import from_first, gather
from jpipe.engine.calls import public
from jpipe.layers.layer import InitApply
from jpipe.lowering.target import target_of
from jpipe.mesh import grouped_by_slice, make_mesh
from jpipe.pipeline import Pipeline
from jpipe.schedules import gpipe
from jpipe.solvers import Machine


@public("measure the machine")
def measure_machine(
    num_devices: int,
    *,
    memory_limit: float = math.inf,
    num_cores: float | None = None,
    message_bytes: int = 2**20,
) -> Machine:
    """Measures the machine that JAX runs on.

    Pipelines of almost empty stages are timed, with small and large messages: that gives the cost
    of a step, of a tick and of a byte. Then loops of matrix products run on all devices, with and
    without a message after each turn, in short and long turns: that gives the cost of waiting at
    the end of a tick. If devices share cores, waiting costs more than an empty tick, and the longer
    the tick the more. If devices are in several slices of TPUs, nodes of GPUs or processes, as many in
    each, messages between two of these are timed too, beside messages in one: that gives the slow links.
    Whether collectives of layers pass under compute (`Machine.overlaps`, `Machine.hides_sums`) is known of the
    platform.

    Of several processes every one must call it with the number of all devices. They get what process 0 measured.

    Args:
      num_devices: the number of devices, at least 1; the first of `jax.devices()` are used.
      memory_limit: bytes per device, for the result.
      num_cores: cores that all devices share, for the result. If given, `cores_per_device` is
        measured too.
      message_bytes: bytes of the large message.

    Returns:
      The `Machine`.

    Raises:
      ValueError: if JAX has fewer devices.
    """
    few, many = 4, 36  # microbatches
    small = [_step_seconds(num_devices, n, 1) for n in (few, many)]
    tick = max(small[1] - small[0], 0.0) / (2 * (many - few))
    step = max(small[0] - 2 * (few + num_devices - 1) * tick, 0.0)
    bandwidth, cores_per_device, jitter = math.inf, 1.0, 0.0
    far, later, servers = math.inf, 0.0, _servers(num_devices)
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
        far = bandwidth
        if len(servers) > 1:
            bandwidth, far, later = _links(servers, message_bytes)
            tick = max(tick - later, 0.0)  # the stages that were timed are on all servers
    if jax.process_count() > 1:
        measured = bandwidth, far, later, cores_per_device, jitter, tick, step
        bandwidth, far, later, cores_per_device, jitter, tick, step = from_first(measured)
    target = target_of(jax.default_backend())
    return Machine(
        num_devices,
        memory_limit,
        (bandwidth, far),
        latency=(0.0, later) if later else 0.0,  # that of a fast link is part of a tick
        devices_per_server=num_devices // len(servers) if len(servers) > 1 else None,
        tick=tick,
        jitter=jitter,
        step=step,
        num_cores=num_cores,
        cores_per_device=cores_per_device,
        overlaps=target.pairs_passes,
        hides_sums=target.hides_sums,
    )


def _step_seconds(num_stages: int, num_microbatches: int, size: int) -> float:
    """Median seconds of GPipe steps whose stages multiply `[1, size]` by a number."""
    layer = InitApply(lambda key, x: {"scale": jnp.ones(())}, lambda params, x: x * params["scale"])
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


def _servers(num_devices: int) -> list[list]:
    """The devices in groups that share fast links; one group if these are of unequal sizes, or of one device."""
    devices = jax.devices()[:num_devices]
    servers = grouped_by_slice(devices)
    if len(servers) == 1:
        numbers = sorted({device.process_index for device in devices})
        servers = [[device for device in devices if device.process_index == number] for number in numbers]
    sizes = {len(server) for server in servers}
    return servers if len(sizes) == 1 and min(sizes) > 1 else [devices]


def _links(servers: Sequence[Sequence], message_bytes: int) -> tuple[float, float, float]:
    """Bytes per second in a server and between two, and the seconds that an empty message takes longer between two."""
    devices = [*itertools.chain(*servers)]
    mesh, everywhere = Mesh(np.array(devices), ("stage",)), PartitionSpec()
    turns, size = 20, len(servers[0])

    def loop(target: int, num_bytes: int) -> Callable[[], float]:
        """A function that sends between device 0 and another, there and back, and returns the seconds of a message."""

        def run(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, turns, lambda _, x: lax.ppermute(x, "stage", [(0, target), (target, 0)]), x)

        mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
        placed = jax.device_put(np.ones(max(num_bytes // 4, 1), np.float32), NamedSharding(mesh, everywhere))

        def seconds() -> float:
            start = time.perf_counter()
            jax.block_until_ready(mapped(placed))
            return (time.perf_counter() - start) / turns

        return seconds

    loops = [loop(target, num_bytes) for target in (1, size) for num_bytes in (4, message_bytes)]
    measured = np.median([[seconds() for seconds in loops] for _ in range(12)][2:], axis=0).reshape(2, 2)
    inside, between = (message_bytes / (full - empty) if full > empty else math.inf for empty, full in measured)
    return float(inside), float(between), float(max(measured[1, 0] - measured[0, 0], 0.0))


def _waiting(num_devices: int) -> tuple[float, float, float]:
    """The cost of a message at the end of a loop's turn, and of sharing cores.

    Returns:
      The seconds that the message adds to a turn, the fraction of the turn that it adds, and the
      time of a turn on all devices divided by its time on one device alone.
    """
    width, num_matrices = 512, 4
    # Turns of 0.6, 2 and 6 ms on one core.
    rows_and_turns = (16, 20), (64, 10), (256, 4)
    ring = [(d, (d + 1) % num_devices) for d in range(num_devices)]
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=(num_matrices, width, width)) / math.sqrt(width)
    matrices = matrices.astype(np.float32)

    def loop(rows: int, turns: int, count: int, sends: bool):
        """A function that runs the loop and returns the seconds of a turn."""

        def run(x, matrices):
            def turn(_, x):
                for matrix in matrices:
                    x = jnp.tanh(x @ matrix)
                return lax.ppermute(x, "stage", ring) if sends else x

            return lax.fori_loop(0, turns, turn, x)

        devices = jax.local_devices() if count == 1 else jax.devices()
        mesh, everywhere = make_mesh(stage=count, devices=devices), PartitionSpec()
        mapped = jax.jit(
            jax.shard_map(
                run,
                mesh=mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                check_vma=False,
            )
        )
        arguments = np.ones((rows, width), np.float32), matrices
        placed = jax.device_put(arguments, NamedSharding(mesh, everywhere))

        def seconds() -> float:
            if jax.process_count() > 1:  # loops without messages do not wait
                gather(np.zeros(1))
            start = time.perf_counter()
            if count > 1 or jax.process_index() == 0:
                jax.block_until_ready(mapped(*placed))
            return (time.perf_counter() - start) / turns

        return seconds

    loops = [loop(rows, turns, num_devices, sends) for sends in (False, True) for rows, turns in rows_and_turns]
    loops.append(loop(*rows_and_turns[1], 1, False))
    # The loops alternate, because other work on the machine comes and goes.
    measured = np.array([[seconds() for seconds in loops] for _ in range(26)])[1:]
    together, waiting, alone = measured[:, :3], measured[:, 3:6], measured[:, 6]
    turn = np.median(together, axis=0)
    longer = np.median(waiting - together, axis=0) / turn
    tick, jitter = fit_positive(np.stack([1 / turn, np.ones_like(turn)], axis=1), np.maximum(longer, 0))
    return float(tick), float(jitter), float(np.median(together[:, 1] / alone))


def fit_positive(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares of two unknowns that must not be negative.

    The best pair is either the unconstrained one or has one unknown at 0.

    Example:
      >>> rows = np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
      >>> fit_positive(rows, np.array([3.0, 5.0, 9.0])).round(6).tolist()
      [2.0, 1.0]
      >>> fit_positive(rows, np.array([0.0, 1.0, 3.0])).round(6).tolist()  # not -1
      [0.666667, 0.0]
    """
    pairs = [np.linalg.lstsq(rows, values)[0]]
    for n in range(2):
        pairs.append(np.zeros(2))
        pairs[-1][n] = max(rows[:, n] @ values / (rows[:, n] @ rows[:, n]), 0.0)
    feasible = [pair for pair in pairs if (pair >= 0).all()]
    return min(feasible, key=lambda pair: np.sum((rows @ pair - values) ** 2))
