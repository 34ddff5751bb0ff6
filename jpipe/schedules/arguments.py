"""Arguments that builders share, and why a builder refuses them.

A *refusal* is a sentence: what is wrong, why, and the remedy. It is None if the builder
accepts the arguments. Builders raise it (`raise_refusal`), and `jpipe.schedules.refusal`
returns it, so that a search over schedules need not catch exceptions.
"""

from collections.abc import Mapping, Sequence

from jpipe._table.counts import wrong_counts
from jpipe._util.foreign import shown
from jpipe.schedules.copies import wrong_replicas

TICKS = {
    "paired": "a paired tick holds a forward and a whole backward",
    "unit": "a unit tick one of forward, input gradient and weight gradient",
}
OVERLAPPED = {"overlapped": "an overlapped tick is a paired one of two microbatches"}
"""Where a device of a paired tick would run both passes of one microbatch."""


def wrong_ticks(ticks: str, known: Mapping[str, str] = TICKS) -> str | None:
    """The refusal of a layout of ticks that is none of those `known`.

    Example:
      >>> wrong_ticks("unit") is None
      True
    """
    if isinstance(ticks, str) and ticks in known:
        return None
    *names, last = map(repr, known)
    return (
        f"`ticks` must be {', '.join(names)} or {last}, got {shown(ticks)}: {', '.join(known.values())}. "
        "Pass one of them."
    )


def wrong_counts_or_halves(title: str, num_stages: int, num_microbatches: int) -> str | None:
    """The refusal of the schedule called `title`, which puts two stages on each device."""
    wrong = wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    if wrong or num_stages % 2 == 0:
        return wrong
    return (
        f"`num_stages` of {title} must be even, got {shown(num_stages)}: `num_stages` counts the "
        f"stages of all devices, and every device has two. Use {num_stages + 1}."
    )


def down_and_up(num_stages: int) -> list[int]:
    """The device of each stage, if device d has the stages d and S - 1 - d.

    Example:
      >>> down_and_up(6)
      [0, 1, 2, 2, 1, 0]
    """
    half = num_stages // 2
    return [*range(half), *reversed(range(half))]


def wrong_counts_or_replicas(
    num_stages: int, num_microbatches: int, replicas: Sequence[int] | None = None
) -> str | None:
    """The refusal of a builder that takes any counts, and copies of stages."""
    counts = wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    return counts or wrong_replicas(num_stages, num_microbatches, replicas)


def wrong_counts_or_ticks(
    num_stages: int,
    num_microbatches: int,
    ticks: str,
    replicas: Sequence[int] | None = None,
    known: Mapping[str, str] = TICKS,
) -> str | None:
    """The refusal of a builder that takes any counts, `known` layouts of ticks, and copies."""
    counts = wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    return counts or wrong_ticks(ticks, known) or wrong_replicas(num_stages, num_microbatches, replicas)


def raise_refusal(refusal: str | None) -> None:
    """Raises ValueError with `refusal`, unless it is None."""
    if refusal is not None:
        raise ValueError(refusal)
