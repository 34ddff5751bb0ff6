"""Error feedback: makes up for an update that a late gradient has made wrong."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.declarations import Declaration
from jpipe.optim.delays import (
    NumericTree,
    as_float,
    check_delay,
    delay_of,
    is_wrong,
    spread,
)


class ErrorFeedbackState(NamedTuple):
    """Number of updates so far, int32, and the last update, in the weights' shapes and dtypes."""

    count: chex.Array
    last: optax.Updates
    declaration = Declaration("error_feedback", ("delay",))


@suggests
def error_feedback(
    strength: chex.Numeric = 1.0, delay: NumericTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """Adds the error of the last update, whose gradient was late.

        e_t = u_t - u_{t-1},    update = u_t + c e_t,    c = strength * min(tau, 1)

    Here u_t is the update that the chain before it makes. With a delay of one, the
    gradient in u_t was computed at the weights to which u_{t-1} was applied. So u_t is the
    update that should have been applied there, and e_t is the error. It is fed back one
    update later. With strength 1, the sum of all updates is the sum of all u plus the last
    error: errors do not pile up. It works behind any optimizer. Adam and Muon give updates
    of about the same size whatever the gradient, and the error is one of updates, not of
    gradients, so this transform goes behind the learning rate. Behind it come
    `scale_by_delay`, `predict_weights` and what else reads the movement of the weights. It
    costs memory of the size of the weights.

    A longer delay gets the same correction, which then makes up for one update of tau. The
    theory covers a delay of one, as of `pipedream_2bw`. Noise of gradients is amplified:
    for independent ones the variance of an update is (1 + c)^2 + c^2 times that of u, 5
    with strength 1. A high momentum makes it less, because u changes little from update to
    update.

    Muon with error feedback, for a schedule with a delay of one:

        optax.chain(optax.contrib.muon(0.02), jpipe.optim.error_feedback())

    Args:
      strength: the factor of the error, at least 0. 0 changes nothing; 1 feeds the whole error back.
      delay: tau in updates, at least 0: a number, or a tree with a number for every weight
        or for a whole branch. None: the extra argument `delay` of `update`, which a
        pipeline passes to each stage. Where tau is 0 updates pass unchanged.

    Returns:
      A transformation with an `ErrorFeedbackState`. The first update passes unchanged.

    Raises:
      ValueError: if `strength` or a delay is negative. At the update: if there is no delay.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), error_feedback(delay=1))
      >>> state = optimizer.init(jnp.zeros(1))
      >>> for gradient in (4.0, 3.0, 1.0):
      ...     updates, state = optimizer.update(jnp.full(1, gradient), state)
      ...     print(updates)
      [-4.]
      [-2.]
      [1.]

    References:
      After Zmushko et al., One-Step Gradient Delay is Not a Barrier for Large-Scale
      Asynchronous Pipeline Parallel LLM Pretraining, 2026, arXiv:2606.30634, which names
      the method and applies it to updates. The formula is derived above.
    """
    if is_wrong(strength, lambda s: 0 <= s < jnp.inf):
        raise ValueError(
            f"`strength` must be at least 0, got {shown(strength)}: it is the part of the error that "
            "is fed back. To feed nothing back, leave `error_feedback` out."
        )
    check_delay(delay)

    def init(params):
        return ErrorFeedbackState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None, **extra_args):
        del params
        tau = as_float(delay_of(delay, extra_args, "error_feedback"))
        part = jax.tree.map(lambda t: jnp.where(state.count > 0, strength * jnp.minimum(t, 1), 0), tau)
        corrected = jax.tree.map(
            lambda u, last, c: u + c * (u - last),
            updates,
            state.last,
            spread(part, updates),
        )
        return optax.tree.cast_like(corrected, updates), ErrorFeedbackState(
            optax.safe_increment(state.count), optax.tree.cast_like(updates, state.last)
        )

    return optax.GradientTransformationExtraArgs(init, update)
