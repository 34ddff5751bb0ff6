"""Arguments that builders share, and why a builder refuses them.

A *refusal* is a sentence: what is wrong, why, and the remedy. It is None if the builder
accepts the arguments. Builders raise it (`raise_refusal`), and `jpipe.schedules.refusal`
returns it, so that a search over schedules need not catch exceptions.
"""

from collections.abc import Sequence

from jpipe._table.counts import wrong_counts
from jpipe._util.foreign import shown
from jpipe.schedules.copies import wrong_replicas

TICKS = ("paired", "unit")


def wrong_ticks(ticks: str) -> str | None:
    """The refusal of a layout of ticks that is neither "paired" nor "unit".

    Example:
      >>> wrong_ticks("unit") is None
      True
    """
    if ticks in TICKS:
        return None
    return (
        f"`ticks` must be 'paired' or 'unit', got {shown(ticks)}: a paired tick holds a forward "
        "and a whole backward, a unit tick one of forward, input gradient and weight "
        "gradient. Pass one of the two."
    )


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
) -> str | None:
    """The refusal of a builder that takes any counts, paired or unit ticks, and copies."""
    counts = wrong_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    return counts or wrong_ticks(ticks) or wrong_replicas(num_stages, num_microbatches, replicas)


def raise_refusal(refusal: str | None) -> None:
    """Raises ValueError with `refusal`, unless it is None."""
    if refusal is not None:
        raise ValueError(refusal)
