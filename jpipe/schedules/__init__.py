"""Schedules: one file per method. A new one is a file here and a line in `_BUILDERS`."""

import inspect
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jpipe._table.counts import wrong_counts
from jpipe._table.messages import takes_one_tick, wrong_message_ticks
from jpipe._util.foreign import read_text, shown
from jpipe._util.suggest import did_you_mean, missing_attribute, suggests
from jpipe._util.warn import warn
from jpipe.schedule import Schedule
from jpipe.schedules._search import SearchResult as SearchResult
from jpipe.schedules._search import search as search
from jpipe.schedules.arguments import wrong_counts_or_replicas
from jpipe.schedules.dual_pipe import dual_pipe_v as dual_pipe_v
from jpipe.schedules.dual_pipe import refusal as _refusal_of_dual_pipe_v
from jpipe.schedules.emulated import emulated as emulated
from jpipe.schedules.emulated import random_delays as random_delays
from jpipe.schedules.emulated import with_delays as with_delays
from jpipe.schedules.forward_only import forward_only as forward_only
from jpipe.schedules.forward_only import refusal as _refusal_of_forward_only
from jpipe.schedules.gpipe import gpipe as gpipe
from jpipe.schedules.interleaved import interleaved as interleaved
from jpipe.schedules.interleaved import refusal as _refusal_of_interleaved
from jpipe.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from jpipe.schedules.one_f_one_b import refusal as _refusal_of_one_f_one_b
from jpipe.schedules.pipedream import pipedream as pipedream
from jpipe.schedules.pipedream import refusal as _refusal_of_pipedream
from jpipe.schedules.pipedream_2bw import pipedream_2bw as pipedream_2bw
from jpipe.schedules.pipedream_2bw import refusal as _refusal_of_2bw
from jpipe.schedules.pipemare import pipemare as pipemare
from jpipe.schedules.pipemare import refusal as _refusal_of_pipemare
from jpipe.schedules.seq_one_f_one_b import refusal as _refusal_of_seq_one_f_one_b
from jpipe.schedules.seq_one_f_one_b import seq_one_f_one_b as seq_one_f_one_b
from jpipe.schedules.zero_bubble import zb_v_refusal as _zb_v_refusal
from jpipe.schedules.zero_bubble import zero_bubble_h1 as zero_bubble_h1
from jpipe.schedules.zero_bubble import zero_bubble_h2 as zero_bubble_h2
from jpipe.schedules.zero_bubble import zero_bubble_v as zero_bubble_v

__all__ = [
    "SearchResult",
    "check_options",
    "dual_pipe_v",
    "emulated",
    "forward_only",
    "get",
    "gpipe",
    "interleaved",
    "names",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "pipemare",
    "random_delays",
    "read",
    "refusal",
    "search",
    "seq_one_f_one_b",
    "with_delays",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]


class _Entry(NamedTuple):
    """A builder, and the function that says why the builder refuses its arguments.

    Attributes:
      build: the builder.
      refusal: takes all arguments of `build` and returns a reason, or None.
      stages_per_device: the number of stages per device, for a builder without an argument `num_chunks`.
    """

    build: Callable[..., Schedule]
    refusal: Callable[..., str | None]
    stages_per_device: int = 1


_BUILDERS = {
    "dual_pipe_v": _Entry(dual_pipe_v, _refusal_of_dual_pipe_v, stages_per_device=2),
    "gpipe": _Entry(gpipe, wrong_counts_or_replicas),
    "interleaved": _Entry(interleaved, _refusal_of_interleaved),
    "one_f_one_b": _Entry(one_f_one_b, _refusal_of_one_f_one_b),
    "pipedream": _Entry(pipedream, _refusal_of_pipedream),
    "pipedream_2bw": _Entry(pipedream_2bw, _refusal_of_2bw),
    "pipemare": _Entry(pipemare, _refusal_of_pipemare),
    "seq_one_f_one_b": _Entry(seq_one_f_one_b, _refusal_of_seq_one_f_one_b),
    "zero_bubble_h1": _Entry(zero_bubble_h1, wrong_counts),
    "zero_bubble_h2": _Entry(zero_bubble_h2, wrong_counts),
    "zero_bubble_v": _Entry(zero_bubble_v, _zb_v_refusal, stages_per_device=2),
}
_PREDICTION = {"forward_only": _Entry(forward_only, _refusal_of_forward_only)}

# Names that papers and other libraries use.
_ALIASES = {
    "1f1b": "one_f_one_b",
    "dapple": "one_f_one_b",
    "pipedream_flush": "one_f_one_b",
    "afab": "gpipe",
    "fill_drain": "gpipe",
    "interleaved_1f1b": "interleaved",
    "virtual_pipeline": "interleaved",
    "seq1f1b": "seq_one_f_one_b",
    "slimpipe": "seq_one_f_one_b",
    "terapipe": "seq_one_f_one_b",
    "zb_h1": "zero_bubble_h1",
    "zb1p": "zero_bubble_h1",
    "zero_bubble": "zero_bubble_h1",
    "zb_h2": "zero_bubble_h2",
    "zb2p": "zero_bubble_h2",
    "zb_v": "zero_bubble_v",
    "v_zb": "zero_bubble_v",
    "dualpipe_v": "dual_pipe_v",
    "dualpipev": "dual_pipe_v",
    "2bw": "pipedream_2bw",
}


def names() -> list[str]:
    """The names of the schedules that train, in alphabetical order.

    `forward_only`, the table of prediction, is not among them.

    Example:
      >>> names()[:3]
      ['dual_pipe_v', 'gpipe', 'interleaved']
    """
    return sorted(_BUILDERS)


@suggests
def get(name: str) -> Callable[..., Schedule]:
    """The builder called `name`.

    Args:
      name: one of `names()`, or "forward_only".

    Returns:
      A function `(num_stages, num_microbatches, ...) -> Schedule`.

    Raises:
      ValueError: if there is none of that name. The message suggests the nearest.

    Example:
      >>> get("gpipe")(4, 8).num_ticks
      22
    """
    return _entry(name).build


def refusal(name: str, num_stages: int, num_microbatches: int, **options: Any) -> str | None:
    """Returns the reason why a builder refuses some counts and options.

    Returns the message of the ValueError that the builder would raise, without building a
    table. A search over schedules skips combinations for which it is not None.

    Args:
      name: one of `names()`, or "forward_only".
      num_stages: S.
      num_microbatches: N.
      **options: the builder's other arguments, such as `ticks="unit"`.

    Returns:
      The reason, or None if the builder accepts the arguments.

    Raises:
      ValueError: if there is no schedule of that name, or it has no such option.

    Example:
      >>> refusal("gpipe", 4, 8) is None
      True
      >>> print(refusal("zero_bubble_v", 5, 8)[:46])
      `num_stages` of ZB-V must be even, got 5: `num
    """
    check_options(name, options)
    entry = _entry(name)
    signature = inspect.signature(entry.build)
    arguments = signature.bind(num_stages, num_microbatches, **options)
    arguments.apply_defaults()
    given = arguments.arguments
    if "message_ticks" in inspect.signature(entry.refusal).parameters:
        return entry.refusal(**given)
    message_ticks = given.pop("message_ticks", 1)
    reason = entry.refusal(**given)
    if reason or takes_one_tick(message_ticks):
        return reason
    return wrong_message_ticks(message_ticks, _num_devices(entry, given))


@suggests
def check_options(name: str, options: Any) -> None:
    """Checks that a builder has some options, by name.

    Args:
      name: one of `names()`, or "forward_only".
      options: the names of options.

    Raises:
      ValueError: if there is no schedule of that name, or it has no such option.

    Example:
      >>> check_options("one_f_one_b", ["tick"])
      Traceback (most recent call last):
      ValueError: one_f_one_b has no option 'tick'. Did you mean 'ticks'? It takes: ticks, replicas, message_ticks.
    """
    known = list(inspect.signature(get(name)).parameters)[2:]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{name} has no option {shown(option)}.{did_you_mean(option, known)} "
                f"It takes: {', '.join(known) or 'none'}."
            )


def _num_devices(entry: _Entry, arguments: Mapping[str, Any]) -> int:
    """The devices of the table that a builder makes of arguments that it accepts."""
    num_stages = arguments["num_stages"]
    if arguments.get("replicas") is not None:
        return sum(arguments["replicas"])
    for devices in (arguments.get("device"), arguments.get("stage")):
        if devices is not None:
            return max(devices) + 1
    return num_stages // arguments.get("num_chunks", entry.stages_per_device)


def stages_per_device(name: str, most: int) -> range:
    """The numbers of stages per device, up to about `most`, that a search tries for a builder."""
    entry = _entry(name)
    if "num_chunks" in inspect.signature(entry.build).parameters:
        return range(2, most + 1)
    return range(entry.stages_per_device, entry.stages_per_device + 1)


@suggests
def read(path: str | os.PathLike[str]) -> Schedule:
    """Reads a table from a file in the form of `Schedule.to_text`, and checks it.

    Args:
      path: a text file. Its name without suffix becomes the name of the schedule.

    Returns:
      The schedule, checked.

    Raises:
      ValueError: if the text cannot be read or the table is not legal.
      OSError: if the file cannot be read.
    """
    path = pathlib.Path(path)
    text = read_text(path)
    try:
        return Schedule.from_text(text, name=path.stem).check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _entry(name: str) -> _Entry:
    entry = (_BUILDERS | _PREDICTION).get(name)
    if entry is not None:
        return entry
    hint = did_you_mean(name, _BUILDERS, _ALIASES)
    raise ValueError(f"unknown schedule {shown(name)}.{hint} Known: {', '.join(names())}.")


def __getattr__(name: str) -> Any:
    if name == "Found":
        warn(
            "`jpipe.schedules.Found` is now `jpipe.schedules.SearchResult`.",
            DeprecationWarning,
        )
        return SearchResult
    raise missing_attribute(f"module {__name__!r}", name, __all__, _ALIASES)
