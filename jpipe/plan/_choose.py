"""Prices every plan (schedule, stages, replicas, microbatch, recomputation) and ranks them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jpipe import schedules
from jpipe._util.foreign import shown
from jpipe._util.sizes import size_text
from jpipe.compress import Compressor
from jpipe.plan._exchanges import Axis
from jpipe.plan._groups import groups
from jpipe.plan._layouts import layouts, ticks_across
from jpipe.plan._plans import Plan, is_wanted, plans, plans_with_copies
from jpipe.plan._predict import Prediction, predict
from jpipe.plan._profile import Profile, balance_by_memory, balance_by_time
from jpipe.schedule import Schedule
from jpipe.solvers import Machine
from jpipe.stages.offload import NO_OFFLOAD, Offload

# The values of `recompute` that one profile can price. A policy runs other programs.
_SAME_PROGRAMS = ("none", "full")


@dataclasses.dataclass(frozen=True)
class Candidate(Plan):
    """One way to train, with its predicted cost.

    Attributes:
      schedule: name of the table in `jpipe.schedules`.
      options: further arguments of the table's builder.
      num_stages: S.
      num_microbatches: N, microbatches per minibatch and replica.
      num_replicas: R, copies of the pipeline.
      microbatch_size: samples per microbatch, B / (N R).
      dcn: the parts into which the network between servers cuts stages and replicas, as of `jpipe.make_mesh`; empty
        if all devices are in one server.
      recompute: "none", "full", or the policy that the profile was made with.
      boundaries: the layer at which each stage after the first begins.
      prediction: seconds and bytes of a training step.
      fits: whether the predicted bytes are within the machine's limit.
      shard_optimizer: whether replicas of a stage share its update.
      offload: the arrays in host memory.
      why: the reason why the candidate is not the first of its ranking; empty for the first.
      num_tensor_devices: T, devices of each stage, which split its operators by a strategy; see `jpipe.plan.tensor`.
      axes: further axes of the mesh, along which the devices of a stage share its rows, positions and experts.
    """

    recompute: str
    boundaries: tuple[int, ...]
    prediction: Prediction
    fits: bool
    shard_optimizer: bool = False
    offload: Offload = NO_OFFLOAD
    why: str = ""
    num_tensor_devices: int = 1
    axes: tuple[Axis, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        group = self.num_tensor_devices * math.prod(axis.size for axis in self.axes)
        pipeline = len(self.prediction.timing.busy) * group
        return pipeline * self.num_replicas


@dataclasses.dataclass(frozen=True)
class Skipped(Plan):
    """A plan without a prediction: its schedule cannot be built, or cannot train the model.

    Attributes:
      schedule, options, num_stages, num_microbatches, num_replicas, microbatch_size, dcn: see
        `Candidate`.
      why: the reason, in the words of the schedule's builder if the builder refused.
      num_tensor_devices, axes: see `Candidate`.
    """

    why: str
    num_tensor_devices: int = 1
    axes: tuple[Axis, ...] = ()


class Ranking(list[Candidate]):
    """The priced candidates, best first.

    Attributes:
      skipped: the plans that could not be priced, in the order of the search.
    """

    def __init__(self, candidates: Iterable[Candidate] = (), skipped: Iterable[Skipped] = ()):
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
    host_bandwidth: float | None = None,
) -> Ranking:
    """Prices every plan that the profiles allow and ranks them.

    The search covers schedules with their options, stages, replicas, recomputation, shared updates and
    the microbatch sizes of the profiles. Each stage count is cut in two ways: the slowest stage
    takes the least time, and, where that cut does not fit the memory, the largest stage takes
    the fewest bytes. PipeDream's solver adds stages with copies, if the machine's bandwidth is
    known: schedules that take `replicas` are priced with what it finds for every number of
    devices.

    If a plan needs several servers, it is priced with stages across them, and with replicas across them. Where stages
    are, messages between servers take one tick, or two (`Schedule.message_ticks`).

    Args:
      profiles: profiles of one model at one or more microbatch sizes, and split over axes of a mesh. Plans with a
        profile that is split have groups of devices for stages.
      machine: the devices and their memory limit.
      batch_size: B, samples per minibatch.
      asynchronous: whether schedules with delayed gradients are allowed. If not, none is
        built.
      recompute: the recomputation to try: "none", "full" or both. A profile made with a
        policy is priced with its policy alone.
      schedule_names: names of `jpipe.schedules` to consider; None: all of them.
        Asynchronous schedules among them still need `asynchronous`.
      shard_optimizer: whether replicas of a stage share its update, as of `Pipeline`; both values try both.
      compress_messages: see `predict`.
      compress_gradients: see `predict`. Updates are then not shared.
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
    sharing = [shard_optimizer] if isinstance(shard_optimizer, bool) else list(shard_optimizer)
    if compress_gradients is not None:
        sharing = [False]
    if host_bandwidth is not None and not host_bandwidth > 0:
        raise ValueError(f"`host_bandwidth` must be bytes per second above 0, or None, got {shown(host_bandwidth)}.")
    names = schedules.names() if schedule_names is None else list(schedule_names)
    names = [name for name in names if is_wanted(name, asynchronous)]
    pricing = _Pricing(
        machine,
        recompute,
        sharing,
        host_bandwidth,
        functools.partial(
            predict,
            machine=machine,
            compress_messages=compress_messages,
            compress_gradients=compress_gradients,
            host_bandwidth=host_bandwidth or math.inf,
        ),
    )
    candidates: list[Candidate] = []
    skipped: list[Skipped] = []
    for profile in profiles:
        if machine.num_devices % profile.group_size:
            raise ValueError(_unfilled(profile, machine))
        given = profile, groups(machine, profile.group_size), batch_size, names
        with_cuts = [
            *((plan, None) for plan in plans(*given)),
            *plans_with_copies(*given),
        ]
        for plan, cut in with_cuts:
            for priced in pricing.price(plan, profile, cut):
                if isinstance(priced, Skipped):
                    skipped.append(priced)
                else:
                    candidates.append(priced)
    if not candidates and skipped:
        reasons = list(dict.fromkeys(plan.why for plan in skipped))
        raise ValueError(
            f"no plan: none of the {len(skipped)} that were tried can run. The first says: "
            f"{reasons[0].rstrip('.')}. Allow other schedules, microbatches or recomputation."
        )
    if not candidates:
        sizes = sorted({profile.microbatch_size for profile in profiles})
        raise ValueError(
            f"no plan: none of the profiled microbatch sizes, {sizes}, fits a minibatch of "
            f"{batch_size} and a schedule of {', '.join(names) or 'those allowed'}. Profile a "
            "divisor of the batch size, or allow asynchronous schedules."
        )
    return ranked(candidates, skipped, machine.memory_limit)


def ranked(candidates: Iterable[Candidate], skipped: Iterable[Skipped], memory_limit: float) -> Ranking:
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


# -- Their price


@dataclasses.dataclass(frozen=True)
class _Pricing:
    """Prices plans.

    Attributes:
      machine: the devices.
      recompute: the kinds of recomputation to try.
      sharing: the values of `shard_optimizer` to try.
      host_bandwidth: see `choose`.
      predict: `predict` with the machine, the compressors and the bandwidth to the host.
    """

    machine: Machine
    recompute: Sequence[str]
    sharing: Sequence[bool]
    host_bandwidth: float | None
    predict: Callable[..., Prediction]

    def price(self, plan: Plan, profile: Profile, cut: list[int] | None) -> Iterator[Candidate | Skipped]:
        """A plan's candidates, or the reason to skip it.

        There is one per kind of recomputation and, with replicas, per value of `shard_optimizer`.

        Args:
          plan: the plan.
          profile: its costs.
          cut: the boundaries; None: they are chosen.
        """
        refusal = schedules.refusal(plan.schedule, plan.num_stages, plan.num_microbatches, **plan.options)
        if refusal is not None:
            yield Skipped(**vars(plan), why=refusal, axes=profile.axes)
            return
        schedule, machine = plan.table(), groups(self.machine, profile.group_size)
        for dcn in layouts(machine, schedule.num_devices, plan.num_replicas):
            placed = dataclasses.replace(plan, dcn=dcn)
            yield from self._priced(placed, schedule, profile, cut)
            ticks = ticks_across(machine, dcn, schedule.num_devices, plan.num_replicas)
            options = {**plan.options, "message_ticks": ticks}
            if max(ticks, default=1) > 1 and not self._refuses(plan, options):
                slow = dataclasses.replace(placed, options=options)
                yield from self._priced(slow, slow.table(), profile, cut)

    def _refuses(self, plan: Plan, options: dict[str, Any]) -> bool:
        """Whether a builder refuses other options for a plan."""
        return schedules.refusal(plan.schedule, plan.num_stages, plan.num_microbatches, **options) is not None

    def _priced(
        self, plan: Plan, schedule: Schedule, profile: Profile, cut: list[int] | None
    ) -> Iterator[Candidate | Skipped]:
        """`price` of a plan with a place for every device; `schedule` is its table."""
        recompute, sharing = self.recompute, self.sharing
        if profile.recompute not in _SAME_PROGRAMS:
            recompute = [profile.recompute]
        reader = next((layer.name for layer in profile.layers if layer.reads_moved_state), None)
        if reader is not None:
            recompute = [value for value in recompute if value != "full"]
        if not recompute:
            why = f"layer {reader} reads mutable state that has moved on when its forward runs again"
            yield Skipped(**vars(plan), why=why, axes=profile.axes)
            return
        if plan.num_replicas == 1 and not schedule.has_copies:
            sharing = [False]
        for value, shard in itertools.product(recompute, dict.fromkeys(sharing)):
            profiled = dataclasses.replace(profile, recompute=value)
            candidate = self._best_cut(schedule, plan, profiled, cut, shard)
            if candidate is None:
                yield Skipped(**vars(plan), why=_tied(profile), axes=profile.axes)
                return
            yield candidate

    def _best_cut(
        self,
        schedule: Schedule,
        plan: Plan,
        profile: Profile,
        cut: list[int] | None,
        shard: bool,
    ) -> Candidate | None:
        """The cut with balanced times; or the one with balanced bytes, if only that fits or is smaller.

        None if the schedule can train neither: weights are tied across stages that update at
        different times.
        """

        def trains(boundaries: list[int]) -> bool:
            stages = [np.searchsorted(boundaries, tie, "right") for tie in profile.ties]
            return schedule.synchronous or all(np.ptp(tied) == 0 for tied in stages)

        def priced(boundaries: list[int], offload: Offload) -> Candidate:
            prediction = self.predict(
                schedule,
                profile,
                boundaries,
                num_replicas=plan.num_replicas,
                shard_optimizer=shard,
                offload=offload,
                dcn=plan.dcn,
            )
            return Candidate(
                **vars(plan),
                recompute=profile.recompute,
                boundaries=tuple(boundaries),
                prediction=prediction,
                fits=prediction.num_bytes <= self.machine.memory_limit,
                shard_optimizer=shard,
                offload=offload,
                axes=profile.axes,
            )

        candidates: list[Candidate] = []
        cuts = _cuts(schedule, profile, self.machine) if cut is None else [cut]
        for boundaries in filter(trains, cuts):
            candidates.append(priced(boundaries, NO_OFFLOAD))
            if candidates[-1].fits:
                break
        if self.host_bandwidth is not None and not any(c.fits for c in candidates):
            for c in list(candidates):
                price = functools.partial(priced, list(c.boundaries))
                candidates += _offloaded(schedule, c, price, self.machine.memory_limit)
        return min(candidates, key=_rank, default=None)


def _unfilled(profile: Profile, machine: Machine) -> str:
    axes = " and ".join(f"{axis.name!r} of {axis.size}" for axis in profile.axes)
    return (
        f"a profile has groups of {profile.group_size} devices, {axes}, which do not fill {machine.num_devices} "
        "devices. Choose axes whose sizes divide the number of devices."
    )


def _tied(profile: Profile) -> str:
    layers = "; ".join(", ".join(map(str, tie)) for tie in profile.ties)
    return (
        f"layers {layers} share weights and lie on several stages, which an asynchronous schedule "
        "updates at different times. Use a synchronous schedule or fewer stages."
    )


def _cuts(schedule: Schedule, profile: Profile, machine: Machine) -> Iterator[list[int]]:
    """The boundaries that balance times; then those that balance bytes, if they differ."""
    by_time = balance_by_time(profile, schedule.num_stages, machine=machine)
    yield by_time
    in_flight = int(schedule.facts().in_flight.max())
    by_bytes = balance_by_memory(profile, schedule.num_stages, in_flight=in_flight)
    if by_bytes != by_time:
        yield by_bytes


def _offloaded(
    schedule: Schedule,
    plain: Candidate,
    price: Callable[[Offload], Candidate],
    limit: float,
) -> Iterator[Candidate]:
    """A plan that does not fit, with the arrays that it must have in host memory.

    Args:
      schedule: the schedule of the plan.
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
    """The reason why a candidate is not the first."""
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
    words = f"{ratio:.2f} x the time: {largest} {parts[largest] * 1e3:.4g} ms, not {best_parts[largest] * 1e3:.4g}"
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
        "the rest of the step takes": c.prediction.seconds - timing.makespan - c.prediction.host_seconds,
    }
