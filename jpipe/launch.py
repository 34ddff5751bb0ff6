"""Starts a script in several processes on this machine, and starts it again when one of them dies.

    python -m jpipe.launch -n 2 script.py arguments...
    python -m jpipe.launch -n 4 --restarts 20 script.py arguments...
    python -m jpipe.launch -n 4 --restarts 20 --min-processes 2 --layout "2: --stages 2" script.py arguments...

Each process runs `python script.py arguments...`. The script calls `jpipe.distributed.initialize()`, which connects the
processes. On a machine with GPUs each process gets its share of them; otherwise each gets CPU devices. Every line
that a process prints begins with its number. SIGINT and SIGTERM are passed on to all. When a process ends with an
error, the others get SIGTERM, and SIGKILL 5 seconds later. The exit code is that of the first process that failed.

With `--restarts` all processes are then started again with the same arguments. The script goes on from its newest
checkpoint, as `train/train.py --resume-or-start` does. There is no other start after exit code 2 (a wrong option),
after a signal to the launcher, or when starts in a row save no newer checkpoint. A process whose devices are gone is
left out if `--min-processes` allows it: it ends with exit code 74, or twice in a row before it is connected.
"""

import argparse
import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from jpipe._processes.restarts import FOLDER, FOLLOWERS, End, Restarts, Told, folder_in_memory
from jpipe._util.foreign import shown

COORDINATOR_ADDRESS = "JPIPE_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JPIPE_NUM_PROCESSES"
PROCESS_ID = "JPIPE_PROCESS_ID"
LAUNCHER = "JPIPE_LAUNCHER_PID"
"""Environment variables that the processes are started with."""

DEVICES_LEFT = "JPIPE_DEVICES_LEFT"
"""The number of devices, if processes were left out and no `--layout` says what the others run: the script chooses."""

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
    parser = _parser()
    options = parser.parse_args(arguments)
    n = options.num_processes
    try:
        layouts = _checked(options)
        devices = device_variables(n, options.devices, os.environ)
    except ValueError as error:
        parser.error(str(error))
    script = ["-m", options.script] if options.module else [options.script]
    command = [sys.executable, "-u", *script, *options.arguments]
    numbers = [k for k in range(n, options.min_processes - 1, -1) if k == n or not layouts or k in layouts]
    restarts = Restarts(options.restarts, options.restarts_without_progress, numbers, list(range(n)))
    inherited = {name: value for name, value in os.environ.items() if name not in (FOLDER, DEVICES_LEFT)}
    pending: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_signals_in(pending))
        folder = stack.enter_context(folder_in_memory()) if options.restarts else None
        while True:
            slots = restarts.slots
            count = len(slots)
            shared = {
                COORDINATOR_ADDRESS: f"127.0.0.1:{_free_port()}",
                NUM_PROCESSES: str(count),
                LAUNCHER: str(os.getpid()),
                **({} if folder is None else {FOLDER: str(folder)}),
            }
            variables = [{**inherited, **shared, PROCESS_ID: str(i), **devices[slot]} for i, slot in enumerate(slots)]
            if count < n and not layouts:
                left = str(sum(map(_num_devices, variables)))
                variables = [{**each, DEVICES_LEFT: left} for each in variables]
            end = _run([*command, *layouts.get(count, [])], variables, pending)
            if not end.code or end.signalled or folder is None:
                return end.code
            why_not = restarts.after(end, Told.take(folder))
            _say(f"not started again: {why_not}" if why_not else restarts.words())
            if why_not:
                return end.code


def _parser() -> argparse.ArgumentParser:
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
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all processes again when one dies, at most N times; the script goes on from its newest checkpoint",
    )
    parser.add_argument(
        "--restarts-without-progress",
        type=int,
        default=3,
        metavar="N",
        help="end when N starts in a row have saved no newer checkpoint; default: 3",
    )
    parser.add_argument(
        "--min-processes",
        type=int,
        metavar="M",
        help="go on with at least M processes if the devices of the others are gone; default: all",
    )
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar='"M: ARGUMENTS"',
        help="further arguments of the script when M processes are left; may be given for several M",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the script is the name of a module",
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _checked(options: argparse.Namespace) -> dict[int, list[str]]:
    """Checks the numbers of a command line, and returns number of processes -> arguments of its `--layout`.

    Raises:
      ValueError: naming the option.
    """
    n, restarts, least = options.num_processes, options.restarts, options.min_processes
    if n < 1:
        raise ValueError(f"-n must be at least 1, got {shown(n)}")
    if restarts < 0:
        raise ValueError(f"--restarts must be at least 0, got {shown(restarts)}. 0 starts the script once.")
    if options.restarts_without_progress < 1:
        raise ValueError(
            f"--restarts-without-progress must be at least 1, got {shown(options.restarts_without_progress)}"
        )
    if least is None:
        least = options.min_processes = n
    elif not 1 <= least <= n:
        raise ValueError(f"--min-processes must be from 1 to -n, {n}, got {shown(least)}")
    elif not restarts:
        raise ValueError("--min-processes is for a script that is started again: add --restarts=20")
    layouts: dict[int, list[str]] = {}
    for text in options.layout:
        number, colon, words = text.partition(":")
        if not colon or not number.strip().isdecimal():
            raise ValueError(f'--layout must be "M: ARGUMENTS", such as "2: --stages=2", got {shown(text)}')
        count = int(number)
        if not least <= count < n:
            raise ValueError(
                f"--layout is for fewer than {n} processes and at least --min-processes={least}, got {shown(text)}. "
                "--min-processes is the smallest number that goes on."
            )
        if count in layouts:
            raise ValueError(f"--layout must be given once for {count} processes, got {shown(text)} too")
        layouts[count] = shlex.split(words)
    script = pathlib.Path(options.script)
    if not options.module and not (script.is_file() or (script / "__main__.py").is_file()):
        raise ValueError(f"there is no script `{script}`. Relative paths start at `{pathlib.Path.cwd()}`.")
    return layouts


# -- Devices


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


def _num_devices(variables: dict[str, str]) -> int:
    """The number of devices of a process, by the variables that it is started with."""
    gpus = [] if "JAX_NUM_CPU_DEVICES" in variables else _gpus(variables)
    return len(gpus) or int(variables["JAX_NUM_CPU_DEVICES"])


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


# -- Processes


@contextlib.contextmanager
def _signals_in(pending: list[int]) -> Iterator[None]:
    """A context in which SIGINT and SIGTERM are put into a list."""

    def note(number: int, frame: object) -> None:
        pending.append(number)

    previous = {s: signal.signal(s, note) for s in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run(command: list[str], variables: list[dict[str, str]], pending: list[int]) -> End:
    """Runs a command once for each set of variables, until all have ended.

    Args:
      command: the command.
      variables: the environment of each process.
      pending: signals that came to this process, to be passed on.
    """
    processes: list[subprocess.Popen] = []
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


def _wait(processes: list[subprocess.Popen], pending: list[int]) -> End:
    """Waits for all; the end of the first that failed."""
    failed: int | None = None
    failed_at, signalled = 0.0, False
    steps = [(_GRACE, signal.SIGTERM), (_GRACE + _KILL, signal.SIGKILL)]
    while True:
        while pending:
            number, signalled = pending.pop(0), True
            for process in processes:
                _signal(process, number)
        codes = [process.poll() for process in processes]
        if failed is None:
            # Of those that have ended since the look before, one that ended because of another one is not the first.
            failed = min((i for i, code in enumerate(codes) if code), key=lambda i: codes[i] in FOLLOWERS, default=None)
            failed_at = time.monotonic()
        if None not in codes:
            break
        if failed is not None and steps and time.monotonic() - failed_at > steps[0][0]:
            _, number = steps.pop(0)
            for process in processes:
                _signal(process, number)
        time.sleep(0.05)
    if failed is None:
        return End(0, 0, signalled)
    code = processes[failed].returncode
    ended = f"with exit code {code}"
    if code < 0:
        ended, code = f"by signal {signal.Signals(-code).name}", 128 - code
    _say(f"process {failed} ended first, {ended}.")
    return End(code, failed, signalled)


def _say(words: str) -> None:
    print(f"jpipe.launch: {words}", file=sys.stderr, flush=True)


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
