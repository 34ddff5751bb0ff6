"""The arguments that an optimizer and parameter hooks may ask for beside gradients, state and parameters.

A new extra argument is one entry of `EXTRA_ARGS`. If no field of `UpdateFacts` has its value, it
needs a field there too, which `jpipe.engine.updates` fills in. Every part of an update may read the
whole value, so the arguments are small. Arguments with one array per weight are packed like the
weights instead, as the results of parameter hooks are: `STALE_PARAMS`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.layers.residuals import AT_HAND, STASHED, UNREAD
from jpipe.schedule import Schedule


class UpdateFacts(NamedTuple):
    """The facts that are known when a stage updates.

    Attributes:
      forward_delay: float32 `[]`, updates between reading the forward's weights and applying its
        gradient.
      backward_lead: float32 `[]`, number of updates by which the backward's weights are newer than the
        forward's.
      global_norm: `[]`, norm of the gradient over all stages.
    """

    forward_delay: Any
    backward_lead: Any
    global_norm: Any


class ExtraArg(NamedTuple):
    """An extra argument that every `optimizer.update` gets.

    Attributes:
      name: keyword of the argument.
      value: function from `UpdateFacts` to the value.
      shape: shape of the value.
      dtype: dtype of the value; None: the dtype of gradient norms.
    """

    name: str
    value: Callable[[UpdateFacts], Any]
    shape: tuple[int, ...] = ()
    dtype: Any = np.float32

    def aval(self, norm_dtype: Any) -> jax.ShapeDtypeStruct:
        """The abstract value."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype or norm_dtype)


EXTRA_ARGS = (
    ExtraArg("delay", lambda facts: facts.forward_delay),
    ExtraArg("backward_delay", lambda facts: facts.forward_delay - facts.backward_lead),
    ExtraArg("global_norm", lambda facts: facts.global_norm, dtype=None),
)
"""The extra arguments of an optimizer, in order: the one place that declares them."""

STALE_PARAMS = "stale_params"
"""The extra argument with the weights that the gradient was computed at, shaped like the weights.

With tau the forward delay of the stage these are the weights of tau updates before the newest ones: those that the
oldest forward of the minibatch read. Without delay they are the weights. A stage keeps enough versions of its weights
only if the optimizer reads the argument."""

PASSES = ("forward", "backward")
"""The passes that may read other weights than the newest, from a parameter hook."""


def read_delays(schedule: Schedule) -> dict[str, np.ndarray]:
    """Pass -> age of the weights that the pass reads, float `[S]`.

    "forward": optimizer updates between reading the forward's weights and applying its gradient.
    "backward": number of updates by which the backward's weights are newer than the forward's.
    """
    facts = schedule.facts()
    lead = facts.forward_delay - facts.backward_delay
    return {"forward": facts.forward_delay, "backward": lead}


def hooked_passes(schedule: Schedule, readers: Iterable[str]) -> list[str]:
    """The passes of `PASSES` among readers of weights that read weights of their own.

    A pass without delays on any stage reads the weights as they are.
    """
    delays = read_delays(schedule)
    return [name for name in readers if name in delays and delays[name].any()]


def keeps_stash(schedule: Schedule) -> bool:
    """Returns whether a stash is kept from tick to tick.

    If forward and backward are in one tick nothing is kept, and to compute again only takes time: 3% of a transformer's
    step on one H100.
    """
    return bool((schedule.forward_ticks() != schedule.weight_grad_ticks()).any())


def weight_accesses(schedule: Schedule, readers: Iterable[str]) -> float:
    """Returns what it takes a backward to read weights in the equations that it computes again, see `Rerun`.

    Nothing, if every backward runs on the weights of its forward; else a place in the stash. If no stash is kept,
    nothing that reads weights runs again.

    Args:
      schedule: the table.
      readers: see `hooked_passes`.
    """
    if not keeps_stash(schedule):
        return UNREAD
    if hooked_passes(schedule, readers) or (schedule.forward_versions() != schedule.backward_versions()).any():
        return STASHED
    return AT_HAND
