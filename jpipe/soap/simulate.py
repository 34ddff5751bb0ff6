"""Full simulation of a task graph (FlexFlow, algorithm 1), and the timeline that it gives.

Every device, and every link, runs its tasks one after the other in the order in which they are ready; ties go to the
lower key. A task is ready when the last task before it has ended.
"""

import dataclasses
import functools
import gc
import heapq
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from jpipe.soap.costs import Analytic, Costs
from jpipe.soap.graph import OperatorGraph
from jpipe.soap.machine import Machine
from jpipe.soap.strategy import Config, check_strategy
from jpipe.soap.tasks import Tasks

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass
class TaskTimes:
    """The times of all tasks, by number.

    Attributes:
      ready, start, end: seconds of each task. Numbers that are in no block of the graph have no meaning.
      order: the tasks in the order of `(ready, key)`.
      seconds: the end of the last task.
    """

    ready: list[float]
    start: list[float]
    end: list[float]
    order: list[int]
    seconds: float


def without_collection(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function runs without Python's search for cycles of objects. There are none, and the search takes
    half of the time.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **options)
        finally:
            if was_on:
                gc.enable()

    return wrapped


@without_collection
def full_simulation(tasks: Tasks) -> TaskTimes:
    """Simulates a task graph from its beginning."""
    before, after, key = tasks.before, tasks.after, tasks.key
    device, seconds = tasks.device, tasks.seconds
    count = len(seconds)
    ready, start, end = [0.0] * count, [0.0] * count, [0.0] * count
    missing = [len(tasks_before) for tasks_before in before]
    free = [0.0] * (tasks.routes.num_resources + 1)  # the last is `NOWHERE`
    order: list[int] = []
    queue = [(0.0, key[t], t) for t in tasks.all_tasks() if not before[t]]
    heapq.heapify(queue)
    pop, push = heapq.heappop, heapq.heappush
    while queue:
        time, _, task = pop(queue)
        order.append(task)
        resource = device[task]
        begin = free[resource]
        if time > begin:
            begin = time
        start[task] = begin
        stop = begin + seconds[task]
        end[task] = stop
        if resource >= 0:
            free[resource] = stop
        for following in after[task]:
            if stop > ready[following]:
                ready[following] = stop
            missing[following] -= 1
            if not missing[following]:
                push(queue, (ready[following], key[following], following))
    return TaskTimes(ready, start, end, order, max(free))


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The result of simulating a strategy.

    Attributes:
      seconds: seconds of a step: forward, and for training backward and updates.
      memory_bytes: per device, the most bytes that it holds at a time: see `jpipe.soap.lifetimes`.
      busy_seconds: per device, seconds in which it computes.
      sent_bytes: bytes that messages carry, all together.
    """

    seconds: float
    memory_bytes: tuple[int, ...]
    busy_seconds: tuple[float, ...]
    sent_bytes: int


def simulate(
    graph: OperatorGraph,
    machine: Machine,
    strategy: Sequence[Config],
    costs: Costs | None = None,
    *,
    sync: str = "ring",
    optimizer_arrays: int = 2,
) -> Simulated:
    """Simulates one step of a strategy.

    Args:
      graph: the operators.
      machine: the devices and links.
      strategy: a configuration per operator.
      costs: seconds of operators; None computes them from FLOPs and bytes.
      sync: "ring" or "server"; see `Tasks`.
      optimizer_arrays: arrays of the size of the weights that the optimizer keeps.

    Raises:
      ValueError: if the strategy cannot be.
    """
    check_strategy(graph, strategy, machine.num_devices)
    costs = Analytic(machine) if costs is None else costs
    tasks = Tasks(graph, machine, costs, strategy, sync=sync, optimizer_arrays=optimizer_arrays)
    timeline = full_simulation(tasks)
    return describe(tasks, timeline)


def describe(tasks: Tasks, timeline: TaskTimes) -> Simulated:
    """The sums over a timeline."""
    num_devices = tasks.machine.num_devices
    busy = [0.0] * num_devices
    messages = {task for block in tasks.blocks for task in block.messages}
    for task in timeline.order:
        if 0 <= tasks.device[task] < num_devices and task not in messages:
            busy[tasks.device[task]] += tasks.seconds[task]
    return Simulated(timeline.seconds, tuple(tasks.memory), tuple(busy), tasks.sent_bytes)
