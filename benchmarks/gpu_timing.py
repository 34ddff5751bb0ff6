"""Times one row of `gpu.py` in this process: the programs, and how they are timed."""

import collections
import functools
import math
import os
import pathlib
import platform
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import jaxlib
import optax
from flax import nnx
from gpu_sizes import Sizes
from jax.extend.backend import get_backend

import jpipe
from jpipe.layers.avals import cast
from models.transformer import Transformer

_EVENTS: collections.Counter[str] = collections.Counter()
"""How often JAX has reported each event in this process."""
jax.monitoring.register_event_listener(lambda event, **_: _EVENTS.update([event]))


def schedules(num_microbatches: int) -> tuple[dict[str, int], dict[str, str]]:
    """The schedules on one device.

    Args:
      num_microbatches: microbatches per step.

    Returns:
      Name of each schedule that fits -> its number of stages, and name of each other schedule ->
      why it does not fit.
    """
    fitting: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name in jpipe.schedules.names():
        reasons = []
        for num_stages in (1, 2):
            reason = jpipe.schedules.refusal(name, num_stages, num_microbatches)
            if reason is None:
                table = jpipe.schedules.get(name)(num_stages, num_microbatches)
                if table.num_devices == 1:
                    fitting[name] = num_stages
                    break
                reason = f"{num_stages} stages take {table.num_devices} devices."
            reasons.append(reason)
        else:
            refused[name] = " ".join(reasons)
    return fitting, refused


# -- The two programs


class Program(NamedTuple):
    """A training step and its arguments.

    Attributes:
      compile: compiles the step. A later call of `step` does not compile again.
      step: `(state, batch) -> (state, loss)`. It consumes the state.
      state: the first state.
      batch: the minibatch of every step.
    """

    compile: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: dict


def make_model(sizes: Sizes) -> Any:
    """The transformer."""
    return Transformer(
        vocab_size=sizes.vocab,
        seq_len=sizes.positions,
        dim=sizes.dim,
        num_heads=sizes.heads,
        num_blocks=sizes.blocks,
    )


def make_batch(sizes: Sizes) -> dict:
    """A minibatch of random tokens, the same in every process."""
    shape = (sizes.microbatches * sizes.microbatch_size, sizes.positions)
    keys = jax.random.split(jax.random.key(0), 2)
    return {name: jax.random.randint(key, shape, 0, sizes.vocab) for name, key in zip(("inputs", "labels"), keys)}


def make_optimizer() -> Any:
    """AdamW."""
    return optax.adamw(1e-4)


def pipeline(sizes: Sizes, name: str, num_stages: int) -> Program:
    """The pipeline on one device.

    Args:
      sizes: of the model and of the minibatch.
      name: of the schedule.
      num_stages: stages of the schedule, all on one device.
    """
    model, batch = make_model(sizes), make_batch(sizes)
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=lambda outputs, batch: model.loss()(outputs, batch)[0],
        optimizer=make_optimizer(),
        schedule=jpipe.schedules.get(name)(num_stages, sizes.microbatches),
        mesh=jpipe.make_mesh(stage=1, devices=jax.devices()[:1]),
        compute_dtype=jnp.bfloat16,
    )

    def step(state: Any, batch: dict) -> tuple[Any, Any]:
        state, metrics = pipe.step(state, batch)
        return state, metrics["loss"]

    state = pipe.init(jax.random.key(0), batch)
    return Program(lambda: pipe.compile(batch), step, state, batch)


def plain_loss(sizes: Sizes) -> tuple[Callable, Callable]:
    """The model without a pipeline.

    Args:
      sizes: of the model and of the minibatch.

    Returns:
      `loss(parameters, microbatch)` and `init(key) -> parameters`. The parameters are those of a
      pipeline with the same key, one `nnx.State` per layer.
    """
    model = make_model(sizes)
    factories, model_loss = model.layers(), model.loss()
    graphs = [nnx.split(nnx.eval_shape(lambda f=f: f(rngs=nnx.Rngs(0))))[0] for f in factories]

    @functools.cache  # The blocks share one factory, so one program initialises them all.
    def initialiser(factory: Callable) -> Callable:
        return jax.jit(lambda key: nnx.split(factory(rngs=nnx.Rngs(key)))[1])

    def init(key: jax.Array) -> list:
        keys = [jax.random.fold_in(key, i) for i in range(len(factories))]
        return [initialiser(f)(key) for f, key in zip(factories, keys, strict=True)]

    def loss(parameters: list, microbatch: dict) -> jax.Array:
        x = microbatch["inputs"]
        for graph, weights in zip(graphs, parameters, strict=True):
            # As in the pipeline, weights and activations: the embedding returns float32.
            weights, x = cast((weights, x), jnp.bfloat16)
            x = nnx.merge(graph, weights)(x)
        return model_loss(x.astype(jnp.float32), microbatch)[0]

    return loss, init


def plain(sizes: Sizes) -> Program:
    """The plain step."""
    loss_of, init = plain_loss(sizes)
    optimizer = make_optimizer()

    def plain_step(state: tuple, batch: dict) -> tuple[tuple, jax.Array]:
        parameters, optimizer_state = state

        def add(sums: tuple, microbatch: dict) -> tuple[tuple, None]:
            result = jax.value_and_grad(loss_of)(parameters, microbatch)
            return jax.tree.map(jnp.add, sums, result), None

        microbatches = jax.tree.map(lambda a: a.reshape(sizes.microbatches, -1, *a.shape[1:]), batch)
        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters)
        sums, _ = jax.lax.scan(add, zeros, microbatches)
        loss, grads = jax.tree.map(lambda a: a / sizes.microbatches, sums)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), loss

    step = jax.jit(plain_step, donate_argnums=0)
    parameters, batch = init(jax.random.key(0)), make_batch(sizes)
    state = parameters, jax.jit(optimizer.init)(parameters)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
    return Program(lambda: step.lower(shapes, batch).compile(), step, state, batch)


# -- One row


class Timed:
    """A program that is compiled, warmed up, and timed in rounds.

    Args:
      program: the program.
      steps: steps per round.

    Attributes:
      seconds: per step, one entry per timed round.
      compile_seconds: of tracing and compiling the step.
      cached: whether another process had compiled the step before, so that this one read it from
        the compilation cache.
      memory: XLA's figures for the compiled step; None if XLA does not say.
      losses: of the first step, and of the last step so far.
    """

    def __init__(self, program: Program, steps: int):
        events, start = _EVENTS.copy(), time.perf_counter()
        compiled = program.compile()
        self.compile_seconds = time.perf_counter() - start
        hits, misses = (
            _EVENTS[event] - events[event]
            for event in (
                "/jax/compilation_cache/cache_hits",
                "/jax/compilation_cache/cache_misses",
            )
        )
        self.cached = hits > 0 and misses == 0
        self.memory = compiled.memory_analysis()
        self._step, self._state, self._batch = program[1:]
        self._steps = steps
        self.seconds: list[float] = []
        self.losses = [self._run(1)]
        self.losses.append(self._run(steps))

    def _run(self, steps: int) -> float:
        """The loss of the last of some steps, when the device has finished all of them."""
        for _ in range(steps):
            self._state, loss = self._step(self._state, self._batch)
        return float(jax.block_until_ready((self._state, loss))[1])

    def kernels(self, num_steps: int = 2) -> list[tuple[str, float, float]]:
        """`kernel_kinds` of some steps."""
        return kernel_kinds(trace_kernels(lambda: self._run(num_steps)), num_steps)

    def round(self) -> float:
        """Runs a round. Returns its seconds per step.

        The host waits for the device at the end of the round alone, as in training.
        """
        start = time.perf_counter()
        self.losses[1] = self._run(self._steps)
        self.seconds.append((time.perf_counter() - start) / self._steps)
        return self.seconds[-1]


def alternate(ours: Timed, plain: Timed, rounds: int) -> dict:
    """Runs two programs in alternating rounds.

    Args:
      ours: the pipeline.
      plain: the plain step.
      rounds: rounds of each program. The program that begins alternates too.

    Returns:
      "pipeline_seconds" and "plain_seconds", the medians per step; "overhead", their ratio minus 1;
      and "overhead_of_rounds", the least and the largest overhead of a round.
    """
    for r in range(rounds):
        for program in (ours, plain) if r % 2 else (plain, ours):
            program.round()
    seconds = ours.seconds[-rounds:], plain.seconds[-rounds:]
    medians = [statistics.median(values) for values in seconds]
    overheads = [a / b - 1 for a, b in zip(*seconds, strict=True)]
    return {
        "pipeline_seconds": medians[0],
        "plain_seconds": medians[1],
        "overhead": medians[0] / medians[1] - 1,
        "overhead_of_rounds": [min(overheads), max(overheads)],
    }


def gigabytes(timed: Timed) -> dict:
    """What a program needs on the device.

    Args:
      timed: the only program that this process has run so far.

    Returns:
      "arguments_gb" (the state and the minibatch) and "temporaries_gb" of the compiled step; and
      "peak_gb", the most memory that the process has used. None where the platform does not say.
    """
    memory = timed.memory
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    num_bytes = {
        "arguments_gb": None if memory is None else memory.argument_size_in_bytes,
        "temporaries_gb": None if memory is None else memory.temp_size_in_bytes,
        "peak_gb": peak,
    }
    return {name: n and n / 1e9 for name, n in num_bytes.items()}


# -- Kernels

_KINDS = {
    "attention": ("sdpa", "cudnn"),
    "products": ("gemm", "nvjet", "cutlass", "xmma"),
}
"""Parts of the names of kernels of a kind. Other kernels are of the kind of their name without its number."""


def kernel_kinds(kernels: Iterable[tuple[str, float]], num_steps: int) -> list[tuple[str, float, float]]:
    """Kernels by kind.

    Args:
      kernels: name and nanoseconds of each kernel of some steps.
      num_steps: the number of steps.

    Returns:
      For each kind its name, the kernels per step, and their milliseconds per step; most time first.
    """
    number: collections.Counter[str] = collections.Counter()
    milliseconds: collections.Counter[str] = collections.Counter()
    for name, nanoseconds in kernels:
        kind = re.sub(r"[_.]?\d+$", "", name)
        for of_kind, parts in _KINDS.items():
            if any(part in name for part in parts):
                kind = of_kind
                break
        number[kind] += 1
        milliseconds[kind] += nanoseconds / 1e6
    return [(kind, number[kind] / num_steps, ms / num_steps) for kind, ms in milliseconds.most_common()]


def trace_kernels(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and nanoseconds of each kernel that a GPU runs in `run`; of another device none."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        return [
            (event.name, event.duration_ns)
            for file in files
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            if "GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]


def failure(error: Exception) -> dict:
    """The reason of an error under "failed", in one line, and its traceback on stderr."""
    traceback.print_exception(error)
    message = str(error).strip().splitlines() or ["no message"]
    return {"failed": f"{type(error).__name__}: {message[0]}"[:300]}


def run_row(row: str, sizes: Sizes) -> dict:
    """Times one row in this process.

    Args:
      row: "plain", "one-stage", or the name of a schedule.
      sizes: of the model, of the minibatch and of the measurement.

    Returns:
      The figures by name. "seconds", "fastest" and "slowest" are per step: the median and the
      extremes of all rounds. "losses" are those of the first step and of the last one. "kernels" are
      the `kernel_kinds` of two traced steps. The row "one-stage" has the result of `alternate` under "alternating".

    Raises:
      ValueError: if a loss is not finite.
    """
    if row == "plain":
        program = plain(sizes)
    elif row == "one-stage":
        program = pipeline(sizes, "one_f_one_b", 1)
    else:
        fitting, _ = schedules(sizes.microbatches)
        program = pipeline(sizes, row, fitting[row])
    timed = Timed(program, sizes.steps)
    for _ in range(sizes.rounds):
        timed.round()
    if not all(map(math.isfinite, timed.losses)):
        raise ValueError(f"the loss is not finite: {timed.losses}")
    result = {
        "seconds": statistics.median(timed.seconds),
        "fastest": min(timed.seconds),
        "slowest": max(timed.seconds),
        "compile_seconds": timed.compile_seconds,
        "cached": timed.cached,
        "losses": list(timed.losses),
        **gigabytes(timed),
    }
    try:
        result["kernels"] = timed.kernels()
    except Exception as error:  # The figures of the row stay.
        failure(error)
    if row == "one-stage":
        try:
            beside = Timed(plain(sizes), sizes.steps)
            result["alternating"] = alternate(timed, beside, sizes.rounds)
        except Exception as error:  # The figures of the row alone stay.
            result["alternating"] = failure(error)
    return result


def describe_machine() -> dict:
    """The device, its memory in GB as far as JAX may use it, and the versions."""
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "memory_gb": limit and limit / 1e9,
        "platform_version": get_backend().platform_version,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
