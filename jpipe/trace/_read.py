"""Reads what JAX's profiler has recorded: the runs of the instructions of one program on every device.

The profiler gives planes, lines of a plane, and events of a line; which plane and which line holds what differs between
platforms. Each platform has a function here. What they return is alike.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Interval = tuple[float, float]
"""Start and end, in nanoseconds of the profiler's clock."""

_INSTRUCTION = re.compile(r"%?([\w.\-]+)(?: = .*)?", re.DOTALL)
_PLANE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_EXECUTE, _WAIT = "ThunkExecutor::Execute", "ThunkExecutor::Execute (wait for completion)"


class Run(NamedTuple):
    """One run of an instruction: its name, and start and end in nanoseconds of the profiler's clock."""

    name: str
    start: float
    end: float


class Runs(NamedTuple):
    """What a device has run of a program.

    Attributes:
      instructions: the runs of instructions, by start.
      executions: the runs of the whole program as the runtime reports them, by start; empty if it does not.
    """

    instructions: list[Run]
    executions: list[Interval]


def runs_of(profile: Any, platform: str, module: str) -> dict[int, Runs]:
    """Number of a device -> what it has run of a program. The number of a CPU device is its id, that of others local.

    Args:
      profile: a `jax.profiler.ProfileData`.
      platform: "cpu" or "tpu"; others are GPUs.
      module: the name of the program, such as "jit__run_step".
    """
    reader = READERS.get(platform, gpu_runs)
    with warnings.catch_warnings():
        # Python 3.12 warns about the types of a profile when they are first used. Where warnings are errors, jaxlib
        # would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        by_device = reader(profile.planes, module)
    return {
        ordinal: Runs(sorted(runs.instructions, key=lambda run: run.start), sorted(runs.executions))
        for ordinal, runs in by_device.items()
    }


def cpu_runs(planes: Iterable[Any], module: str) -> dict[int, Runs]:
    """Of CPU devices: all are in the plane of the host, whose lines are threads that may work for any device.

    An event of an instruction has the statistics "hlo_op", "hlo_module", "device_ordinal" and "run_id". The whole
    program is "ThunkExecutor::Execute" around such events. If it ends while collectives wait, other threads go on in
    events of the same name, and "(wait for completion)" ends with the last of them.
    """
    by_device: dict[int, Runs] = {}
    executions: dict[tuple[int, Any], Interval] = {}
    waits: list[tuple[int, Any, float, float]] = []

    def extend(ordinal: int, run_id: Any, start: float, end: float) -> None:
        first, last = executions.get((ordinal, run_id), (start, end))
        executions[ordinal, run_id] = min(first, start), max(last, end)

    for line in _lines(planes, "/host:CPU"):
        around = (0.0, 0.0)
        for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
            start, end = event.start_ns, event.start_ns + event.duration_ns
            if event.name == _EXECUTE:
                around = (start, end) if start >= around[1] else around
                continue
            statistics = dict(event.stats)
            if "device_ordinal" not in statistics:
                continue
            ordinal, run_id = int(statistics["device_ordinal"]), statistics.get("run_id")
            if event.name == _WAIT:
                waits.append((ordinal, run_id, start, end))
            elif statistics.get("hlo_module") == module:
                runs = by_device.setdefault(ordinal, Runs([], []))
                runs.instructions.append(Run(str(statistics.get("hlo_op", event.name)), start, end))
                extend(ordinal, run_id, *(around if start < around[1] else (start, end)))
    for ordinal, run_id, start, end in waits:
        if (ordinal, run_id) in executions:
            extend(ordinal, run_id, start, end)
    for (ordinal, _), interval in executions.items():
        by_device[ordinal].executions.append(interval)
    return by_device


def gpu_runs(planes: Iterable[Any], module: str) -> dict[int, Runs]:
    """Of GPUs: a plane for each, whose lines "Stream #..." hold kernels and copies.

    A kernel has the statistics "hlo_op" and "hlo_module", the instruction that has started it. Conditionals and loops
    have no events. Lines of other names repeat what the streams hold.
    """
    by_device: dict[int, Runs] = {}
    for ordinal, plane in _devices(planes, "GPU"):
        runs = Runs([], [])
        for line in plane.lines:
            if line.name == "XLA Modules":
                runs.executions.extend(_modules(line, module))
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                statistics = dict(event.stats)
                if statistics.get("hlo_module") == module and "hlo_op" in statistics:
                    name = str(statistics["hlo_op"])
                    runs.instructions.append(Run(name, event.start_ns, event.start_ns + event.duration_ns))
        by_device[ordinal] = runs
    return by_device


def tpu_runs(planes: Iterable[Any], module: str) -> dict[int, Runs]:
    """Of TPUs: a plane for each core. The line "XLA Modules" has a run of a program, "XLA Ops" its instructions, loops
    and conditionals included, and "Async XLA Ops" the transfers that run beside them.

    An event of an instruction is named by its whole text, `%fusion.3 = f32[8] fusion(...)`.
    """
    by_device: dict[int, Runs] = {}
    for ordinal, plane in _devices(planes, "TPU"):
        lines = list(plane.lines)
        runs = Runs([], [])
        for line in lines:
            if line.name == "XLA Modules":
                runs.executions.extend(_modules(line, module))
        for line in lines:
            if line.name not in ("XLA Ops", "Async XLA Ops"):
                continue
            for event in line.events:
                start, end = event.start_ns, event.start_ns + event.duration_ns
                name = _INSTRUCTION.fullmatch(event.name)
                if name and any(first <= start < last for first, last in runs.executions):
                    runs.instructions.append(Run(name[1], start, end))
        by_device[ordinal] = runs
    return by_device


READERS: dict[str, Callable[[Iterable[Any], str], dict[int, Runs]]] = {"cpu": cpu_runs, "tpu": tpu_runs}
"""Platform -> its reader. Platforms other than CPUs and TPUs, such as "cuda" and "rocm", have that of GPUs."""


def _lines(planes: Iterable[Any], name: str) -> Iterator[Any]:
    for plane in planes:
        if plane.name == name:
            yield from plane.lines


def _devices(planes: Iterable[Any], kind: str) -> Iterator[tuple[int, Any]]:
    """The number of each device of a kind, and its plane."""
    for plane in planes:
        match = _PLANE.fullmatch(plane.name)
        if match and f":{kind}:" in plane.name:
            yield int(match[1]), plane


def _modules(line: Any, module: str) -> list[Interval]:
    """The runs of a program in a line of programs; their names are the program's and a number in parentheses."""
    return [
        (event.start_ns, event.start_ns + event.duration_ns)
        for event in line.events
        if event.name.partition("(")[0] == module
    ]
