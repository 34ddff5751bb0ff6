"""Which schedule, how many stages and replicas, which microbatch: every plan, priced and ranked."""

import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jpipe import schedules
from jpipe.plan.machine import Machine
from jpipe.plan.predict import Prediction, predict
from jpipe.plan.profile import Profile, balance_by_memory, balance_by_time
from jpipe.schedule import Schedule

# Of `recompute`, what one profile can price; a policy runs other programs.
_SAME_PROGRAMS = ("none", "full")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
      schedule: the table's name in `jpipe.schedules`; options: what else it was built with.
      num_stages: S; num_microbatches: N; num_replicas: R, of the pipeline.
      microbatch_size: samples of a microbatch, B / (N R).
      recompute: "none", "full", or the policy that the profile was made with.
      boundaries: the layer at which each stage after the first begins.
      prediction: what a step takes.
      fits: whether its bytes are within the limit.
      why: in the ranked list, why it is not the first; of the first, empty.
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
    why: str = ""

    def table(self) -> Schedule:
        """The schedule itself."""
        return _build(
            self.schedule, self.num_stages, self.num_microbatches, self.options
        )

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return len(self.prediction.timing.busy) * self.num_replicas

    @property
    def label(self) -> str:
        """The schedule with its options, as a person would say it."""
        options = [f"{v}" for v in self.options.values()]
        return " ".join([self.schedule, *options])


def choose(
    profiles: Profile | Sequence[Profile],
    machine: Machine,
    batch_size: int,
    *,
    asynchronous: bool = False,
    recompute: str | Sequence[str] = _SAME_PROGRAMS,
    schedule_names: Sequence[str] | None = None,
) -> list[Candidate]:
    """Every plan that the profiles can price, best first.

    Searches schedules with their options, stages, devices, replicas, recomputation and the
    sizes of microbatch that there are profiles of. Stages are cut so that the slowest takes
    the least time, and also so that the one with most bytes has the fewest, if the former do
    not fit.

    Args:
      profiles: of one model at one or more sizes of microbatch.
      machine: the devices at hand, and the limit on their bytes.
      batch_size: B, samples of a minibatch.
      asynchronous: whether schedules with delayed gradients are allowed.
      recompute: what to try: "none", "full" or both. A profile made with a policy is priced with that policy alone.
      schedule_names: of `jpipe.schedules`, to consider only these; asynchronous ones among
        them still need `asynchronous`.

    Returns:
      Those that fit, the fastest first, then the others, the smallest first. Each but the
      first says why it lost. Of plans that take the same time, the one with fewer bytes is
      first.

    Raises:
      ValueError: if no size of microbatch divides the minibatch, or a name is unknown.
    """
    profiles = [profiles] if isinstance(profiles, Profile) else list(profiles)
    recompute = [recompute] if isinstance(recompute, str) else list(recompute)
    for one in recompute:
        if one not in _SAME_PROGRAMS:
            raise ValueError(
                f'`recompute` must be of "none" and "full", got {one!r}. A policy is priced if the profile was made with it.'
            )
    names = schedules.names() if schedule_names is None else list(schedule_names)
    names = [name for name in names if not _build(name, 2, 2, {}).forward_only]
    found = []
    for profile in profiles:
        found += _of_profile(
            profile, machine, batch_size, asynchronous, recompute, names
        )
    if not found:
        sizes = sorted({profile.microbatch_size for profile in profiles})
        raise ValueError(
            f"no plan: of the microbatch sizes profiled, {sizes}, none fits a minibatch of {batch_size} and a schedule "
            f"of {', '.join(names)}. Profile a divisor of the batch size, or allow asynchronous schedules."
        )
    ranked = sorted(found, key=_rank)
    best = ranked[0]
    reasons = ["" if c is best else _why(c, best, machine.memory_limit) for c in ranked]
    return [dataclasses.replace(c, why=why) for c, why in zip(ranked, reasons)]


def _rank(c: Candidate) -> tuple:
    if not c.fits:
        return (1, c.prediction.num_bytes, c.prediction.seconds)
    return (0, c.prediction.seconds, c.prediction.num_bytes)


def _of_profile(
    profile: Profile,
    machine: Machine,
    batch_size: int,
    asynchronous: bool,
    recompute: Sequence[str],
    names: Sequence[str],
) -> Iterator[Candidate]:
    """The candidates of one size of microbatch."""
    size, num_layers = profile.microbatch_size, len(profile.layers)
    most = machine.num_devices
    if profile.recompute not in _SAME_PROGRAMS:
        recompute = [profile.recompute]
    for replicas in range(1, most + 1):
        if batch_size % (size * replicas):
            continue
        N = batch_size // (size * replicas)
        for name, devices in itertools.product(names, range(1, most // replicas + 1)):
            if devices == 1 and name != names[0]:
                continue  # on one device there is one order
            for S, options in _options(name, devices, N, num_layers):
                schedule = _build(name, S, N, options)
                if not (schedule.synchronous or asynchronous):
                    continue
                for again in recompute:
                    mine = dataclasses.replace(profile, recompute=again)
                    yield from _best_cut(schedule, options, mine, machine, replicas)


def _options(
    name: str, devices: int, N: int, num_layers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stages, and options, with which a schedule fits the devices, microbatches and layers."""
    parameters = inspect.signature(schedules.get(name)).parameters
    ticks = ("paired", "unit") if "ticks" in parameters else (None,)
    chunks: Sequence[int] = (1,)
    if name == "zero_bubble_v":
        chunks = (2,)
    elif "num_chunks" in parameters:
        chunks = range(2, num_layers // devices + 1)
        if N % devices:
            return
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
        warnings.simplefilter("ignore", UserWarning)  # few microbatches: it is priced
        return schedules.get(name)(S, N, **options)


def _best_cut(
    schedule: Schedule,
    options: dict[str, Any],
    profile: Profile,
    machine: Machine,
    replicas: int,
) -> list[Candidate]:
    """The cut that balances time, or if it doesn't fit and the one that balances bytes is better, that.

    Empty if the schedule can train neither: tied weights on stages that update at different times.
    """
    S = schedule.num_stages

    def cuts() -> Iterator[list[int]]:
        by_time = balance_by_time(profile, S)
        yield by_time
        in_flight = int(schedule.facts().in_flight.max())
        by_bytes = balance_by_memory(profile, S, in_flight=in_flight)
        if by_bytes != by_time:
            yield by_bytes

    def trains(boundaries: list[int]) -> bool:
        stages = (np.searchsorted(boundaries, tie, "right") for tie in profile.ties)
        return schedule.synchronous or all(np.ptp(of) == 0 for of in stages)

    found: list[Candidate] = []
    for boundaries in filter(trains, cuts()):
        prediction = predict(schedule, profile, boundaries, machine, replicas)
        one = Candidate(
            schedule=schedule.name,
            options=options,
            num_stages=S,
            num_replicas=replicas,
            num_microbatches=schedule.num_microbatches,
            microbatch_size=profile.microbatch_size,
            recompute=profile.recompute,
            boundaries=tuple(boundaries),
            prediction=prediction,
            fits=prediction.num_bytes <= machine.memory_limit,
        )
        found.append(one)
        if one.fits:
            break
    return sorted(found, key=_rank)[:1]


def _why(c: Candidate, best: Candidate, memory_limit: float) -> str:
    """What keeps a candidate from the first place."""
    mine, its = c.prediction, best.prediction
    if not c.fits:
        parts = mine.memory._asdict()
        del parts["padding"]
        largest = max(parts, key=parts.__getitem__)
        return (
            f"needs {size_text(mine.num_bytes)} a device, the limit is {size_text(memory_limit)}: {largest} take "
            f"{size_text(parts[largest])}"
        )
    ratio = mine.seconds / its.seconds
    if ratio < 1 + 1e-9:
        return "as fast, with more bytes"

    def parts_of(c: Candidate) -> dict[str, float]:
        """Seconds of a step, by what for; together all of it."""
        timing, machine_time = c.prediction.timing, c.prediction.seconds
        work = timing.busy.sum() / timing.num_processors
        idle = timing.makespan - work - timing.communicating
        return {
            "its devices compute for": work,
            "its messages and ticks take": timing.communicating,
            "its devices wait for": idle,
            "beside its ticks it takes": machine_time - timing.makespan,
        }

    ours, theirs = parts_of(c), parts_of(best)
    more = {name: ours[name] - theirs[name] for name in ours}
    largest = max(more, key=more.__getitem__)
    words = f"{ratio:.2f} x the time: {largest} {ours[largest] * 1e3:.3g} ms, not {theirs[largest] * 1e3:.3g}"
    if largest == "its devices wait for":
        words += f" (bubble {mine.timing.bubble:.0%}, not {its.timing.bubble:.0%})"
    if largest == "its devices compute for":
        if c.recompute == "full" and best.recompute != "full":
            words += " (it runs forwards again)"
        elif c.num_devices < best.num_devices:
            words += f" ({c.num_devices} devices, not {best.num_devices})"
    return words


def size_text(num_bytes: float) -> str:
    """Bytes for people.

    Example:
      >>> size_text(3 * 2**20)
      '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
