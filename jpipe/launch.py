"""Starts a script in several processes on this machine.

    python -m jpipe.launch -n 2 script.py arguments...

Each process runs `python script.py arguments...`. The script calls `jpipe.distributed.initialize()`, which connects the
processes. On a machine with GPUs each process gets its share of them; otherwise each gets CPU devices. Every line
that a process prints begins with its number. SIGINT and SIGTERM are passed on to all. When a process ends with an
error, the others get SIGTERM, and SIGKILL 5 seconds later. The exit code is that of the first process that failed.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

from jpipe._util.foreign import shown

COORDINATOR_ADDRESS = "JPIPE_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JPIPE_NUM_PROCESSES"
PROCESS_ID = "JPIPE_PROCESS_ID"
LAUNCHER = "JPIPE_LAUNCHER_PID"
"""Environment variables that the processes are started with."""

_GRACE = 3.0
"""Seconds for the others to end by themselves, with a message of their own, before SIGTERM."""

_KILL = 5.0
"""Seconds from SIGTERM to SIGKILL."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.

    Args:
      arguments: the command line without the program; None: `sys.argv`.

    Returns:
      The exit code: 0, or that of the first process that failed; 128 + n if signal n ended it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jpipe.launch",
        description="Starts a script in several processes on this machine.",
    )
    parser.add_argument("-n", "--num-processes", type=int, required=True, help="number of processes")
    parser.add_argument(
        "--devices",
        type=int,
        help="CPU devices of all processes together, if there are no GPUs; default: one per process",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the script is the name of a module",
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    n = options.num_processes
    if n < 1:
        parser.error(f"-n must be at least 1, got {shown(n)}")
    try:
        devices = device_variables(n, options.devices, os.environ)
    except ValueError as error:
        parser.error(str(error))
    script = ["-m", options.script] if options.module else [options.script]
    command = [sys.executable, "-u", *script, *options.arguments]
    shared = {
        COORDINATOR_ADDRESS: f"127.0.0.1:{_free_port()}",
        NUM_PROCESSES: str(n),
        LAUNCHER: str(os.getpid()),
    }
    variables = [{**os.environ, **shared, PROCESS_ID: str(i), **devices[i]} for i in range(n)]
    return _run(command, variables)


def device_variables(
    num_processes: int, num_devices: int | None, environment: dict | os._Environ
) -> list[dict[str, str]]:
    """The environment variables that give each process its devices.

    Args:
      num_processes: their number.
      num_devices: CPU devices of all processes; None: one per process.
      environment: the variables of this process.

    Raises:
      ValueError: if the devices cannot be shared out evenly.

    Example:
      >>> device_variables(2, None, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
      [{'CUDA_VISIBLE_DEVICES': '4,5'}, {'CUDA_VISIBLE_DEVICES': '6,7'}]
      >>> device_variables(2, 8, {"JAX_PLATFORMS": "cpu"})
      [{'JAX_NUM_CPU_DEVICES': '4'}, {'JAX_NUM_CPU_DEVICES': '4'}]
    """
    gpus = _gpus(environment) if num_devices is None else []
    if gpus:
        share, rest = divmod(len(gpus), num_processes)
        if rest or not share:
            raise ValueError(
                f"{len(gpus)} GPUs cannot be shared by {num_processes} processes. Name as many GPUs in "
                "CUDA_VISIBLE_DEVICES as a multiple of -n, or set JAX_PLATFORMS=cpu."
            )
        shares = [gpus[i * share : (i + 1) * share] for i in range(num_processes)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(s)} for s in shares]
    if num_devices is None and "JAX_NUM_CPU_DEVICES" in environment:
        return [{} for _ in range(num_processes)]
    share, rest = divmod(num_processes if num_devices is None else num_devices, num_processes)
    if rest or not share:
        raise ValueError(
            f"--devices={num_devices} cannot be shared by {num_processes} processes. Give a multiple of -n."
        )
    return [{"JAX_NUM_CPU_DEVICES": str(share)} for _ in range(num_processes)]


def _gpus(environment: dict | os._Environ) -> list[str]:
    """The GPUs that JAX would use, as CUDA_VISIBLE_DEVICES names them."""
    if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = environment["CUDA_VISIBLE_DEVICES"].split(",")
        return [name for name in names if name and name != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(i) for i in range(count)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(command: list[str], variables: list[dict[str, str]]) -> int:
    """Runs a command once for each set of variables, until all have ended."""
    processes: list[subprocess.Popen] = []
    pending: list[int] = []

    def forward(number: int, frame: object) -> None:
        pending.append(number)

    previous = {s: signal.signal(s, forward) for s in _SIGNALS}
    write_lock = threading.Lock()
    threads = []
    try:
        for i, environment in enumerate(variables):
            # In a session of its own: Ctrl-C in a terminal reaches it once, through this process.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            processes.append(process)
            for source, target in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            ):
                thread = threading.Thread(target=_copy, args=(source, target, f"[{i}] ".encode(), write_lock))
                thread.daemon = True
                thread.start()
                threads.append(thread)
        return _wait(processes, pending)
    finally:
        for process in processes:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
        for thread in threads:  # a grandchild may keep the pipe open
            thread.join(1.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen], pending: list[int]) -> int:
    """Waits for all; the exit code of the first that failed."""
    failed: int | None = None
    failed_at = 0.0
    steps = [(_GRACE, signal.SIGTERM), (_GRACE + _KILL, signal.SIGKILL)]
    while True:
        while pending:
            number = pending.pop(0)
            for process in processes:
                _signal(process, number)
        codes = [process.poll() for process in processes]
        if failed is None:
            failed = next((i for i, code in enumerate(codes) if code), None)
            failed_at = time.monotonic()
        if None not in codes:
            break
        if failed is not None and steps and time.monotonic() - failed_at > steps[0][0]:
            _, number = steps.pop(0)
            for process in processes:
                _signal(process, number)
        time.sleep(0.05)
    if failed is None:
        return 0
    code = processes[failed].returncode
    ended = f"with exit code {code}"
    if code < 0:
        ended, code = f"by signal {signal.Signals(-code).name}", 128 - code
    print(f"jpipe.launch: process {failed} ended first, {ended}.", file=sys.stderr)
    return code


def _signal(process: subprocess.Popen, number: int) -> None:
    """Sends a signal to a process that has not ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _copy(source: BinaryIO, target: BinaryIO, prefix: bytes, lock: threading.Lock) -> None:
    """Copies lines with a prefix, until the source ends or the target takes no more."""
    with contextlib.suppress(OSError, ValueError):
        for line in source:
            with lock:
                target.write(prefix + line.rstrip(b"\n") + b"\n")
                target.flush()


if __name__ == "__main__":
    sys.exit(main())
