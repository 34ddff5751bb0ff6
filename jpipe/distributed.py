"""Several processes: how they find each other, how they end together, and how they agree to stop.

A script calls `initialize()` first. It reads what `python -m jpipe.launch`, Slurm, Kubernetes or a TPU pod says of
the processes, connects them, and starts a watchdog. From then on no process waits for ever: when one is killed,
raises an exception, stops or gets stuck, all others print which one, in what step and phase, and end with
an error within 30 seconds.

    jpipe.distributed.initialize()
    pipe = jpipe.Pipeline(...)
    state = pipe.init(key, batch)

Exit codes of processes that end because of another one: 71 if it was killed or failed, 72 if it was not heard of,
73 if there was no progress, or if the processes make different calls.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jpipe import launch
from jpipe._processes import restarts as _restarts
from jpipe._processes import watchdog as _watchdog
from jpipe._processes.sharing import BatchRows, check_agreement, from_first
from jpipe._util.warn import warn

__all__ = [
    "broadcast",
    "check_same",
    "fail",
    "initialize",
    "phase",
    "process_rows",
    "shutdown",
    "stop_requested",
]

_SHUTDOWN_SECONDS = 25
_CONNECT_SECONDS = 30.0
_MORE_SECONDS = 30.0
"""Time until JAX ends a process that waits for others, after jpipe should have ended it."""

_is_alone = False
"""True if `initialize` has found a single process. It can find that out only before a device is used."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    silence_seconds: float = _watchdog.SILENCE,
    progress_seconds: float = _watchdog.PROGRESS,
    connect_seconds: float = 300.0,
    watchdog: bool = True,
) -> None:
    """Connects the processes of a training, and starts the watchdog.

    Call it before anything that uses a device; options that choose devices come before it. With one process it
    does nothing, and a second call does nothing.

    The watchdog measures the steps of `Pipeline`. A process is stuck if there is no progress for
    `progress_seconds`, or for ten times the median step if that is longer. Calls that may compile have 10
    minutes, and so has everything before the second step. Put other work that takes longer into a `phase`.

    Args:
      coordinator_address: "host:port" of process 0. None, and so for the next two: what the launcher
        says, or else what `jax.distributed.initialize` finds out from Slurm, Open MPI, Kubernetes or a TPU pod.
      num_processes: number of processes.
      process_id: number of this process, from 0.
      silence_seconds: a process that is not heard of for so long counts as stopped.
      progress_seconds: see above.
      connect_seconds: a process ends if the others have not connected by then. Jobs on clusters may start their
        processes minutes apart.
      watchdog: whether to start the watchdog. Without it a process waits for a stuck one for ever.

    Raises:
      ValueError: if only some of the first three arguments are known.
      RuntimeError: if the processes do not find each other, or JAX has already used a device.
    """
    global _is_alone
    given = coordinator_address, num_processes, process_id
    if _is_alone and given == (None, None, None):
        return
    if given == (None, None, None) and launch.PROCESS_ID in os.environ:
        coordinator_address = os.environ[launch.COORDINATOR_ADDRESS]
        num_processes = int(os.environ[launch.NUM_PROCESSES])
        process_id = int(os.environ[launch.PROCESS_ID])
    if num_processes == 1:
        _tell_connected(0)
        return
    with _limited(connect_seconds):
        if not jax.distributed.is_initialized():
            address = coordinator_address, num_processes, process_id
            _connect(*address, connect_seconds + _MORE_SECONDS)
        if not jax.distributed.is_initialized():
            _is_alone = True
            return
        if jax.process_count() == 1:
            return
        if watchdog and _watchdog.running is None:
            # Until the watchdog sets the timer anew.
            limit = connect_seconds + _MORE_SECONDS
            faulthandler.dump_traceback_later(limit, exit=True)
            _watch(_coordinator_address(), silence_seconds, progress_seconds)
    _tell_connected(jax.process_index())


def _tell_connected(process: int) -> None:
    """Tells the launcher that the devices of this process are there."""
    _restarts.tell(f"{_restarts.CONNECTED}.{process}")


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Ends this process if the block takes longer. JAX would abort it, with a stack of C++ functions."""

    def end() -> None:
        message = (
            f"jpipe: this process ends: not all processes have connected within {seconds:g} s. See why others "
            "ended, start all of them within this time, and let the coordinator's address be one that they reach, or "
            "wait longer: `jpipe.distributed.initialize(connect_seconds=...)`."
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(_watchdog.LOST)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connect(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    seconds: float,
) -> None:
    """Calls `jax.distributed.initialize`, and leaves SIGTERM as it was."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            initialization_timeout=int(seconds),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        nothing_known = (coordinator_address, num_processes, process_id) == (None,) * 3
        if not (nothing_known and "coordinator_address" in str(error)):
            raise
    # JAX takes SIGTERM for its own notice of preemption, which a process that does not ask for it never sees.
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _coordinator_address() -> str | None:
    """ "host:port" that JAX has connected to, whoever has told it; None if it does not say."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "coordinator_address", None)


def _watch(coordinator: str | None, silence: float, progress: float) -> None:
    """Connects the watchdogs and starts them.

    Args:
      coordinator: "host:port" that all processes have reached, if it is known: process 0 listens there. Otherwise it
        listens on all interfaces, and finds out its names.
      silence, progress: see `initialize`.
    """
    process, count = jax.process_index(), jax.process_count()
    if process == 0:
        host = coordinator and coordinator.rpartition(":")[0].strip("[]")
        server, address = _watchdog.listen(host)
        from_first(address)
        connections = _watchdog.accept(server, address, count - 1, _CONNECT_SECONDS)
    else:
        connection = _watchdog.connect(from_first(None), process)
        connections = {} if connection is None else {0: connection}
    missing = sorted({*range(1, count)} - {*connections}) if process == 0 else []
    missing = from_first(missing)
    if missing:
        warn(
            f"processes {missing} cannot connect to process 0 by TCP, so nothing watches the processes: if one gets "
            "stuck, the others wait for ever. Allow connections between all ports of the machines."
        )
        for connection in connections.values():
            connection.close()
        faulthandler.cancel_dump_traceback_later()
        return
    launcher = os.environ.get(launch.LAUNCHER)
    watchdog = _watchdog.Watchdog(
        process,
        connections,
        silence=silence,
        progress=progress,
        parent=None if launcher is None else int(launcher),
    )
    _watchdog.start(watchdog)


def shutdown() -> None:
    """Waits until every process has come here, then stops the watchdog and disconnects the processes.

    A program that ends well does so by itself, when Python ends. Call it before `os._exit`, or before long work of
    some processes alone.
    """
    _watchdog.stop()
    jax.distributed.shutdown()


def fail(reason: str, code: int = 1) -> NoReturn:
    """Ends this process and all others, at once, for a program that has printed what is wrong.

    An exception that nobody catches does so by itself.

    Args:
      reason: the reason, for the message that the others print.
      code: the exit code of this process.
    """
    _watchdog.fail(reason, code)
    sys.stdout.flush()
    os._exit(code)


def phase(name: str, limit_seconds: float) -> contextlib.AbstractContextManager[None]:
    """A context for work of this process that takes longer than a step, such as saving or plotting.

    While one process is in such a phase the others may wait for it. A process that takes longer than the limit counts
    as stuck. Without a watchdog it does nothing.

    Args:
      name: the name of the phase, for messages.
      limit_seconds: the most seconds that it takes.

    Example:
      >>> with phase("saving", limit_seconds=300):
      ...     pass
    """
    return _watchdog.Phase(name, limit_seconds)


def process_rows(mesh: Mesh, num_rows: int) -> np.ndarray:
    """The numbers of this process's rows in every batch, for loaders that read a batch in one piece.

    They are consecutive rows, the share of its replicas, if the axis "data" of the mesh crosses processes, and all rows
    if it does not.

    Args:
      mesh: the mesh of the pipeline.
      num_rows: the number of rows in the batch of all processes together.

    Returns:
      int `[rows]`, in order.

    Example:
      >>> import jpipe
      >>> process_rows(jpipe.make_mesh(stage=2, data=2), num_rows=4)
      array([0, 1, 2, 3])
    """
    return BatchRows.of(mesh).given(num_rows)


def check_same(facts: Mapping[str, str]) -> None:
    """Compares facts that all processes must share, such as a configuration. Every process must call it.

    `Pipeline.init` compares what it is given; this is for the rest of a program, once, at its start.

    Args:
      facts: name of the fact, as a message has it -> its text in this process.

    Raises:
      ValueError: on every process, naming the first fact that differs and the texts of two processes.

    Example:
      >>> check_same({"the number of steps": str(100)})
    """
    if jax.process_count() > 1:
        remedy = "Start every process with the same arguments."
        check_agreement(facts, remedy)


def broadcast(value: Any) -> Any:
    """Returns the value of process 0 on every process: the name of a folder, a decision, a number.

    Args:
      value: the value of process 0, such as JSON can hold; that of the others is ignored.

    Example:
      >>> broadcast({"folder": "runs/1"})
      {'folder': 'runs/1'}
    """
    return from_first(value)


def stop_requested(step: int, requested: bool = False) -> bool:
    """Returns whether all processes stop now. They agree on one step, without waiting for each other.

    If one process passes `requested=True`, for example after SIGTERM, then a step or two later the function returns
    True, on every process at the same step.

        for step in range(num_steps):
            if jpipe.distributed.stop_requested(step, interrupt.requested):
                break  # and save a checkpoint: every process is here
            state, metrics = pipe.step(state, next(batches))

    Args:
      step: a number that grows; every process asks for the same ones, in order.
      requested: whether this process wants all to stop. It may be True again and again.

    Returns:
      With one process `requested`.

    Raises:
      RuntimeError: if there are several processes without a watchdog.
    """
    if _watchdog.running is not None:
        return _watchdog.running.stop_reached(step, requested)
    if jax.process_count() > 1:
        raise RuntimeError(
            "`stop_requested` needs the connections that `jpipe.distributed.initialize()` makes with "
            "`watchdog=True`. Call it at the start of the program."
        )
    return requested
