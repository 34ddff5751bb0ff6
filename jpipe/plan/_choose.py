"""Prices every plan (schedule, stages, replicas, microbatch, recomputation) and ranks them."""

import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jpipe import schedules
from jpipe._util.foreign import shown
from jpipe._util.sizes import size_text
from jpipe.compress import Compressor
from jpipe.plan._predict import Prediction, predict
from jpipe.plan._profile import Profile, balance_by_memory, balance_by_time
from jpipe.schedule import Schedule
from jpipe.solvers import Graph, Machine, pipedream
from jpipe.stages.offload import NO_OFFLOAD, Offload

# The values of `recompute` that one profile can price. A policy runs other programs.
_SAME_PROGRAMS = ("none", "full")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train, with its predicted cost.

    Attributes:
      schedule: name of the table in `jpipe.schedules`.
      options: further arguments of the table's builder.
      num_stages: S.
      num_microbatches: N, microbatches per minibatch and replica.
      num_replicas: R, copies of the pipeline.
      microbatch_size: samples per microbatch, B / (N R).
      recompute: "none", "full", or the policy that the profile was made with.
      boundaries: the layer at which each stage after the first begins.
      prediction: seconds and bytes of a training step.
      fits: whether the predicted bytes are within the machine's limit.
      shard_optimizer: whether replicas of a stage share its update.
      offload: what is in host memory.
      why: why the candidate is not the first of its ranking; empty for the first.
      num_tensor_devices: T, devices of each stage, which split its operators by a strategy; see `jpipe.plan.tensor`.
    """

    schedule: str
    options: dict[str, Any]
    num_stages: int
    num_microbatches: int
    num_replicas: int
    microbatch_size: int
    recompute: str
    boundaries: tuple[int, ...]
    prediction: Prediction
    fits: bool
    shard_optimizer: bool = False
    offload: Offload = NO_OFFLOAD
    why: str = ""
    num_tensor_devices: int = 1

    def table(self) -> Schedule:
        """Builds the schedule."""
        return _build(
            self.schedule, self.num_stages, self.num_microbatches, self.options
        )

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        pipeline = len(self.prediction.timing.busy) * self.num_tensor_devices
        return pipeline * self.num_replicas

    @property
    def label(self) -> str:
        """The schedule's name and the values of its options."""
        return _label(self.schedule, self.options)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A plan without a prediction: its schedule cannot be built, or cannot train the model.

    Attributes:
      schedule, options, num_stages, num_microbatches, num_replicas, microbatch_size: as of
        `Candidate`.
      why: the reason, in the words of the schedule's builder if the builder refused.
      num_tensor_devices: as of `Candidate`.
    """

    schedule: str
    options: dict[str, Any]
    num_stages: int
    num_microbatches: int
    num_replicas: int
    microbatch_size: int
    why: str
    num_tensor_devices: int = 1

    @property
    def label(self) -> str:
        """The schedule's name and the values of its options."""
        return _label(self.schedule, self.options)


class Ranking(list[Candidate]):
    """The priced candidates, best first.

    Attributes:
      skipped: the plans that could not be priced, in the order of the search.
    """

    def __init__(
        self, candidates: Iterable[Candidate] = (), skipped: Iterable[Skipped] = ()
    ):
        super().__init__(candidates)
        self.skipped = list(skipped)


def choose(
    profiles: Profile | Sequence[Profile],
    machine: Machine,
    batch_size: int,
    *,
    asynchronous: bool = False,
    recompute: str | Sequence[str] = _SAME_PROGRAMS,
    schedule_names: Sequence[str] | None = None,
    shard_optimizer: bool | Sequence[bool] = False,
    compress_messages: Any = None,
    compress_gradients: Compressor | None = None,
    accumulate_dtype: Any = None,
    host_bandwidth: float | None = None,
) -> Ranking:
    """Prices every plan that the profiles allow and ranks them.

    The search covers schedules with their options, stages, replicas, recomputation, shared updates and
    the microbatch sizes of the profiles. Each stage count is cut in two ways: the slowest stage
    takes the least time, and, where that cut does not fit the memory, the largest stage takes
    the fewest bytes. PipeDream's solver adds stages with copies, if the machine's bandwidth is
    known: schedules that take `replicas` are priced with what it finds for every number of
    devices.

    Args:
      profiles: profiles of one model at one or more microbatch sizes.
      machine: the devices and their memory limit.
      batch_size: B, samples per minibatch.
      asynchronous: whether schedules with delayed gradients are allowed. If not, none is
        built.
      recompute: which recomputation to try: "none", "full" or both. A profile made with a
        policy is priced with its policy alone.
      schedule_names: names of `jpipe.schedules` to consider; None: all of them.
        Asynchronous schedules among them still need `asynchronous`.
      shard_optimizer: whether replicas of a stage share its update, as of `Pipeline`; both values try both.
      compress_messages: as of `predict`.
      compress_gradients: as of `predict`. Updates are then not shared.
      accumulate_dtype: as of `predict`.
      host_bandwidth: bytes per second between a device and its host. Plans that do not fit are then also priced with
        as much in host memory as they need, so that the fewest bytes move. None: nothing is in host memory.

    Returns:
      A `Ranking`: first the candidates that fit, the fastest first, then the others, the
      smallest first. Of equally fast candidates the one with fewer bytes comes first. Each
      candidate but the first says why it lost. `Ranking.skipped` lists the plans that a
      schedule's builder refused, and the asynchronous ones that cannot train tied weights.

    Raises:
      ValueError: if no microbatch size divides the minibatch, no schedule can be built, or a
        name is unknown.
    """
    profiles = [profiles] if isinstance(profiles, Profile) else list(profiles)
    recompute = [recompute] if isinstance(recompute, str) else list(recompute)
    for value in recompute:
        if value not in _SAME_PROGRAMS:
            raise ValueError(
                f'`recompute` must be "none" or "full", got {shown(value)}. To price a policy, make '
                "the profile with it."
            )
    sharing = (
        [shard_optimizer]
        if isinstance(shard_optimizer, bool)
        else list(shard_optimizer)
    )
    if compress_gradients is not None:
        sharing = [False]
    if host_bandwidth is not None and not host_bandwidth > 0:
        raise ValueError(
            f"`host_bandwidth` must be bytes per second above 0, or None, got {shown(host_bandwidth)}."
        )
    compressed = dict(
        compress_messages=compress_messages,
        compress_gradients=compress_gradients,
        accumulate_dtype=accumulate_dtype,
        host_bandwidth=host_bandwidth,
    )
    names = schedules.names() if schedule_names is None else list(schedule_names)
    names = [name for name in names if _is_wanted(name, asynchronous)]
    candidates: list[Candidate] = []
    skipped: list[Skipped] = []
    for profile in profiles:
        given = profile, machine, batch_size, names
        with_their_cuts = _plans_with_copies(*given)
        for plan, cut in [*((p, None) for p in _plans(*given)), *with_their_cuts]:
            _price(
                plan,
                profile,
                machine,
                recompute,
                sharing,
                candidates,
                skipped,
                compressed,
                cut,
            )
    if not candidates:
        sizes = sorted({profile.microbatch_size for profile in profiles})
        raise ValueError(
            f"no plan: none of the profiled microbatch sizes, {sizes}, fits a minibatch of "
            f"{batch_size} and a schedule of {', '.join(names) or 'those allowed'}. Profile a "
            "divisor of the batch size, or allow asynchronous schedules."
        )
    return ranked(candidates, skipped, machine.memory_limit)


def ranked(
    candidates: Iterable[Candidate], skipped: Iterable[Skipped], memory_limit: float
) -> Ranking:
    """The ranking of at least one candidate, each with the reason why it lost."""
    best, *others = sorted(candidates, key=_rank)
    return Ranking(
        (
            dataclasses.replace(best, why=""),
            *(dataclasses.replace(c, why=_why(c, best, memory_limit)) for c in others),
        ),
        skipped,
    )


def _rank(c: Candidate) -> tuple:
    # Rounded, because equal times that are summed in another order differ in the last digits.
    seconds = float(f"{c.prediction.seconds:.9g}")
    if not c.fits:
        return (1, c.prediction.num_bytes, seconds)
    return (0, seconds, c.prediction.num_bytes)


# -- The plans


class _Plan(NamedTuple):
    """What `Candidate` and `Skipped` have in common."""

    schedule: str
    options: dict[str, Any]
    num_stages: int
    num_microbatches: int
    num_replicas: int
    microbatch_size: int


@functools.cache
def _is_wanted(name: str, asynchronous: bool) -> bool:
    """Whether a schedule trains, and is synchronous if it must be.

    A small table tells. Every builder takes its size, and larger ones are of the same kind.
    """
    table = _build(name, 2, 8, {})
    return not table.forward_only and (asynchronous or table.synchronous)


def _plans(
    profile: Profile, machine: Machine, batch_size: int, names: Sequence[str]
) -> Iterator[_Plan]:
    """The plans of one microbatch size."""
    size, num_layers = profile.microbatch_size, len(profile.layers)
    for replicas in range(1, machine.num_devices + 1):
        if batch_size % (size * replicas):
            continue
        N = batch_size // (size * replicas)
        most = machine.num_devices // replicas
        for name, devices in itertools.product(names, range(1, most + 1)):
            if devices == 1 and name != names[0]:
                continue  # on one device all schedules run in one order
            for S, options in _options(name, devices, num_layers):
                yield _Plan(name, options, S, N, replicas, size)


def _plans_with_copies(
    profile: Profile, machine: Machine, batch_size: int, names: Sequence[str]
) -> Iterator[tuple[_Plan, list[int]]]:
    """The plans of one microbatch size whose stages have copies, each with its boundaries."""
    size = profile.microbatch_size
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
                    for tick in _ticks_of(name):
                        options: dict[str, Any] = {}
                        options |= {} if tick is None else {"ticks": tick}
                        options["replicas"] = replicas
                        S = len(replicas)
                        yield _Plan(name, options, S, N, pipelines, size), cut


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
            dataclasses.replace(
                node, parameter_bytes=node.parameter_bytes / num_microbatches
            )
            for node in graph.nodes
        ),
    )
    bandwidth = machine.bandwidth[num_devices > machine.server_size]
    found: dict[tuple, None] = {}
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
            found[replicas, tuple(of_stage[0] for of_stage in layers[1:])] = None
    return [(replicas, list(cut)) for replicas, cut in found]


def _parameters(name: str) -> Mapping[str, Any]:
    return inspect.signature(schedules.get(name)).parameters


def _ticks_of(name: str) -> Sequence[str | None]:
    return ("paired", "unit") if "ticks" in _parameters(name) else (None,)


def _options(
    name: str, devices: int, num_layers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbers of stages, and the options, with which a schedule uses the devices."""
    parameters, ticks = _parameters(name), _ticks_of(name)
    chunks: Sequence[int] = (1,)
    if name == "zero_bubble_v":
        chunks = (2,)
    elif "num_chunks" in parameters:
        chunks = range(2, num_layers // devices + 1)
    for v, tick in itertools.product(chunks, ticks):
        S = devices * v
        if S > num_layers:
            continue
        options: dict[str, Any] = {} if tick is None else {"ticks": tick}
        if "num_chunks" in parameters:
            options["num_chunks"] = v
        yield S, options


def _build(name: str, S: int, N: int, options: dict[str, Any]) -> Schedule:
    with warnings.catch_warnings():
        # A warning of few microbatches says nothing new: the bubble is priced.
        warnings.simplefilter("ignore", UserWarning)
        return schedules.get(name)(S, N, **options)


def _label(schedule: str, options: dict[str, Any]) -> str:
    """The schedule and its options; numbers of copies as PipeDream writes them, `3-1`."""
    values = [
        "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for value in options.values()
    ]
    return " ".join([schedule, *values])


# -- Their price


def _price(
    plan: _Plan,
    profile: Profile,
    machine: Machine,
    recompute: Sequence[str],
    sharing: Sequence[bool],
    candidates: list[Candidate],
    skipped: list[Skipped],
    compressed: Mapping[str, Any],
    cut: list[int] | None,
) -> None:
    """Appends a plan's candidates, or the reason to skip it.

    There is one per kind of recomputation and, with replicas, per value of `shard_optimizer` in `sharing`.
    `compressed` are the compressors and the bandwidth to the host, as of `choose`. `cut` are the boundaries; None: they are chosen.
    """
    counts = plan.num_stages, plan.num_microbatches
    refusal = schedules.refusal(plan.schedule, *counts, **plan.options)
    if refusal is not None:
        skipped.append(Skipped(*plan, why=refusal))
        return
    schedule = _build(plan.schedule, *counts, plan.options)
    if profile.recompute not in _SAME_PROGRAMS:
        recompute = [profile.recompute]
    if plan.num_replicas == 1 and not schedule.has_copies:
        sharing = [False]
    for value, shard in itertools.product(recompute, dict.fromkeys(sharing)):
        profiled = dataclasses.replace(profile, recompute=value)
        candidate = _best_cut(schedule, plan, profiled, machine, cut, shard, compressed)
        if candidate is None:
            skipped.append(Skipped(*plan, why=_tied(profile)))
            return
        candidates.append(candidate)


def _tied(profile: Profile) -> str:
    layers = "; ".join(", ".join(map(str, tie)) for tie in profile.ties)
    return (
        f"layers {layers} share weights and lie on several stages, which an asynchronous schedule "
        "updates at different times. Use a synchronous schedule or fewer stages."
    )


def _best_cut(
    schedule: Schedule,
    plan: _Plan,
    profile: Profile,
    machine: Machine,
    cut: list[int] | None,
    shard: bool,
    compressed: Mapping[str, Any],
) -> Candidate | None:
    """The cut with balanced times; or the one with balanced bytes, if only that fits or is smaller.

    None if the schedule can train neither: weights are tied across stages that update at
    different times.
    """
    S = schedule.num_stages

    def cuts() -> Iterator[list[int]]:
        if cut is not None:
            yield cut
            return
        by_time = balance_by_time(profile, S)
        yield by_time
        in_flight = int(schedule.facts().in_flight.max())
        by_bytes = balance_by_memory(profile, S, in_flight=in_flight)
        if by_bytes != by_time:
            yield by_bytes

    def trains(boundaries: list[int]) -> bool:
        stages = (np.searchsorted(boundaries, tie, "right") for tie in profile.ties)
        return schedule.synchronous or all(np.ptp(of) == 0 for of in stages)

    host_bandwidth = compressed["host_bandwidth"]

    def priced(boundaries: list[int], offload: Offload) -> Candidate:
        prediction = predict(
            schedule,
            profile,
            boundaries,
            machine,
            plan.num_replicas,
            shard,
            **{**compressed, "host_bandwidth": host_bandwidth or math.inf},
            offload=offload,
        )
        return Candidate(
            **plan._asdict(),
            recompute=profile.recompute,
            boundaries=tuple(boundaries),
            prediction=prediction,
            fits=prediction.num_bytes <= machine.memory_limit,
            shard_optimizer=shard,
            offload=offload,
        )

    candidates: list[Candidate] = []
    for boundaries in filter(trains, cuts()):
        candidates.append(priced(boundaries, NO_OFFLOAD))
        if candidates[-1].fits:
            break
    if host_bandwidth is not None and not any(c.fits for c in candidates):
        for c in list(candidates):
            price = functools.partial(priced, list(c.boundaries))
            candidates += _offloaded(schedule, c, price, machine.memory_limit)
    return min(candidates, key=_rank, default=None)


def _offloaded(
    schedule: Schedule,
    plain: Candidate,
    price: Callable[[Offload], Candidate],
    limit: float,
) -> Iterator[Candidate]:
    """A plan that does not fit, with what it must have in host memory.

    Args:
      schedule: of the plan.
      plain: the plan, with all on the device.
      price: `offload -> candidate`.
      limit: bytes of a device.
    """
    optimizer = plain.prediction.memory.optimizer
    others = plain.prediction.memory.weights + plain.prediction.memory.gradients
    kept: list[int | None] = [None]
    if plain.recompute != "full":
        most = int(schedule.facts().in_flight.max())
        kept += [most // 2**k for k in range(1, most.bit_length() - 1)]
    for slots in kept:
        try:
            whole = price(Offload(0.0, slots))
        except ValueError:  # too few slots, or microbatches, for this table
            return
        over = max(whole.prediction.num_bytes - limit, 0)
        if not over:
            yield whole
        elif over < optimizer:
            yield price(Offload((over + 1) / optimizer, slots))
        else:
            # What a layer brings to the device has to fit, too.
            least = price(Offload(1.0, slots, weights=1.0, gradients=1.0))
            room = limit - least.prediction.num_bytes - 2  # both are rounded up
            if room >= 0:
                share = max(1 - room / others, 0.0)
                yield price(Offload(1.0, slots, weights=share, gradients=share))


# -- Why a candidate lost


def _why(c: Candidate, best: Candidate, memory_limit: float) -> str:
    """What keeps a candidate from the first place."""
    prediction = c.prediction
    if not c.fits:
        parts = prediction.memory._asdict()
        del parts["padding"], parts["host"]
        largest = max(parts, key=parts.__getitem__)
        return (
            f"needs {size_text(prediction.num_bytes)} per device, the limit is "
            f"{size_text(memory_limit)}: {largest} take {size_text(parts[largest])}"
        )
    if _rank(c)[1] == _rank(best)[1]:
        return "as fast, with more bytes"
    ratio = prediction.seconds / best.prediction.seconds
    parts, best_parts = _time_by_use(c), _time_by_use(best)
    more = {name: parts[name] - best_parts[name] for name in parts}
    largest = max(more, key=more.__getitem__)
    words = (
        f"{ratio:.2f} x the time: {largest} {parts[largest] * 1e3:.4g} ms, not "
        f"{best_parts[largest] * 1e3:.4g}"
    )
    if largest == _WAITING:
        bubbles = prediction.timing.bubble, best.prediction.timing.bubble
        words += f" (bubble {bubbles[0]:.0%}, not {bubbles[1]:.0%})"
    if largest == _COMPUTING:
        if c.recompute == "full" and best.recompute != "full":
            words += " (forwards run twice)"
        elif c.num_devices < best.num_devices:
            words += f" ({c.num_devices} devices, not {best.num_devices})"
    return words


_COMPUTING, _WAITING = "compute takes", "devices wait for"


def _time_by_use(c: Candidate) -> dict[str, float]:
    """The seconds of a step by their use; their sum is the whole step."""
    timing = c.prediction.timing
    work = timing.busy.sum() / timing.num_processors
    return {
        _COMPUTING: work,
        "messages and ticks take": timing.communicating,
        _WAITING: timing.makespan - work - timing.communicating,
        "transfers to and from host memory take": c.prediction.host_seconds,
        "the rest of the step takes": c.prediction.seconds
        - timing.makespan
        - c.prediction.host_seconds,
    }
