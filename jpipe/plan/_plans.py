"""The plans that a profile and a machine allow, before they are priced."""

import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jpipe import schedules
from jpipe.plan._profile import Profile
from jpipe.schedule import Schedule
from jpipe.solvers import Graph, Machine, pipedream


@dataclasses.dataclass(frozen=True)
class Plan:
    """A table, and how a minibatch is divided for it. `Candidate` and `Skipped` describe the fields."""

    schedule: str
    options: dict[str, Any]
    num_stages: int
    num_microbatches: int
    num_replicas: int
    microbatch_size: int
    dcn: Mapping[str, int] = dataclasses.field(default_factory=dict, kw_only=True)

    def table(self) -> Schedule:
        """Builds the schedule."""
        return build(self.schedule, self.num_stages, self.num_microbatches, self.options)

    @property
    def label(self) -> str:
        """The schedule's name and the values of its options; numbers of copies as PipeDream writes them, `3-1`."""
        values = [
            "-".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in self.options.values()
        ]
        return " ".join([self.schedule, *values])


@functools.cache
def is_wanted(name: str, asynchronous: bool) -> bool:
    """Returns whether a schedule trains, and is synchronous if it must be.

    A small table tells. Every builder takes its size, and larger ones are of the same kind. Slices of
    sequences are left out: layers are measured on whole ones.
    """
    table = build(name, 2, 8, {})
    return not table.forward_only and table.num_slices == 1 and (asynchronous or table.synchronous)


def hides_exchanges(profile: Profile, machine: Machine) -> bool:
    """Returns whether layers send something, and devices can compute meanwhile."""
    return machine.overlaps and any(layer.exchanges for layer in profile.layers)


def plans(profile: Profile, machine: Machine, batch_size: int, names: Sequence[str]) -> Iterator[Plan]:
    """The plans of one microbatch size."""
    size, num_layers = profile.microbatch_size, len(profile.layers)
    overlaps = hides_exchanges(profile, machine)
    for replicas in range(1, machine.num_devices + 1):
        if batch_size % (size * replicas):
            continue
        N = batch_size // (size * replicas)
        most = machine.num_devices // replicas
        # On one device all schedules run in one order, so one of them that has one stage there stands for all.
        alone = next((name for name in names if 1 in schedules.stages_per_device(name, 1)), names[0] if names else "")
        for name, devices in itertools.product(names, range(1, most + 1)):
            if devices == 1 and name != alone:
                continue
            for S, options in _options(name, devices, num_layers, overlaps):
                yield Plan(
                    name,
                    options,
                    num_stages=S,
                    num_microbatches=N,
                    num_replicas=replicas,
                    microbatch_size=size,
                )


def plans_with_copies(
    profile: Profile, machine: Machine, batch_size: int, names: Sequence[str]
) -> Iterator[tuple[Plan, list[int]]]:
    """The plans of one microbatch size whose stages have copies, each with its boundaries."""
    size, overlaps = profile.microbatch_size, hides_exchanges(profile, machine)
    names = [n for n in names if "replicas" in _parameters(n)]
    if not names or math.isinf(min(machine.bandwidth)):
        return
    for pipelines in range(1, machine.num_devices + 1):
        if batch_size % (size * pipelines):
            continue
        N = batch_size // (size * pipelines)
        for devices in range(2, machine.num_devices // pipelines + 1):
            for replicas, cut in _copies(profile, machine, devices, N):
                for name in names:
                    for tick in _ticks_of(name, overlaps):
                        options = {**tick, "replicas": replicas}
                        plan = Plan(
                            name,
                            options,
                            num_stages=len(replicas),
                            num_microbatches=N,
                            num_replicas=pipelines,
                            microbatch_size=size,
                        )
                        yield plan, cut


def _copies(
    profile: Profile, machine: Machine, num_devices: int, num_microbatches: int
) -> list[tuple[tuple[int, ...], list[int]]]:
    """The copies and the boundaries of the stages that PipeDream's solver finds.

    By both of its cost models, and by that of the paper for gradients that are added up once per
    minibatch, as they are here, and not once per microbatch. Plans without copies, and those of
    one stage, which are data parallelism, are left out.
    """
    graph = profile.graph()
    amortised = dataclasses.replace(
        graph,
        nodes=tuple(
            dataclasses.replace(node, parameter_bytes=node.parameter_bytes / num_microbatches) for node in graph.nodes
        ),
    )
    bandwidth = machine.bandwidth[num_devices > machine.server_size]
    ways: dict[tuple, None] = {}
    models: list[tuple[Graph, Literal["pipedream-repo", "sosp19"]]] = [
        (graph, "sosp19"),
        (graph, "pipedream-repo"),
        (amortised, "sosp19"),
    ]
    for chain, cost_model in models:
        try:
            stages = pipedream(
                chain,
                num_devices,
                bandwidth,
                memory_limit=math.inf,
                cost_model=cost_model,
            ).stages
        except ValueError:  # too many ways to cut the graph
            continue
        layers = [sorted(map(int, stage.nodes)) for stage in stages]
        in_order = list(itertools.chain(*layers)) == list(range(len(profile.layers)))
        replicas = tuple(stage.replicas for stage in stages)
        if in_order and len(replicas) > 1 and max(replicas) > 1:
            ways[replicas, tuple(stage[0] for stage in layers[1:])] = None
    return [(replicas, list(cut)) for replicas, cut in ways]


def _parameters(name: str) -> Mapping[str, Any]:
    return inspect.signature(schedules.get(name)).parameters


def _ticks_of(name: str, overlaps: bool) -> list[dict[str, Any]]:
    """The options for the kinds of ticks of a schedule.

    Args:
      name: the schedule.
      overlaps: whether layers send what can pass while another microbatch is computed.
    """
    if "ticks" not in _parameters(name):
        return [{}]
    kinds = ["paired", "unit"]
    if overlaps and schedules.refusal(name, 8, 8, ticks="overlapped") is None:
        kinds.append("overlapped")
    return [{"ticks": kind} for kind in kinds]


def _options(name: str, devices: int, num_layers: int, overlaps: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbers of stages, and the options, with which a schedule uses the devices."""
    parameters, ticks = _parameters(name), _ticks_of(name, overlaps)
    chunks = schedules.stages_per_device(name, num_layers // devices)
    for v, tick in itertools.product(chunks, ticks):
        S = devices * v
        if S > num_layers:
            continue
        yield S, {**tick, **({"num_chunks": v} if "num_chunks" in parameters else {})}


def build(name: str, S: int, N: int, options: dict[str, Any]) -> Schedule:
    with warnings.catch_warnings():
        # A warning of few microbatches says nothing new: the bubble is priced.
        warnings.simplefilter("ignore", UserWarning)
        return schedules.get(name)(S, N, **options)
