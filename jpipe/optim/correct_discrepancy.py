"""T2 of PipeMare: corrects a backward that reads newer weights than its forward did."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.declarations import Declaration, reads_state
from jpipe.optim.delays import (
    NumericTree,
    as_float,
    check_delay,
    find_states,
    is_wrong,
    move,
    spread,
)


class CorrectDiscrepancyState(NamedTuple):
    """Decayed mean of the weights' movement per update, in their shapes and dtypes."""

    velocity: optax.Updates
    declaration = Declaration(
        "correct_discrepancy",
        ("delay", "backward_delay"),
        hook="backward",
        hook_function="jpipe.optim.corrected_params",
    )


@suggests
def correct_discrepancy(
    decay: chex.Numeric | None = None, delay: NumericTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """PipeMare's T2, discrepancy correction: keeps the velocity of the weights.

        velocity <- gamma * velocity + (1 - gamma) * (w_{t+1} - w_t),    gamma = D ** (1 / tau)

    Here tau is the number of updates by which the weights of the backward are newer than
    those of the forward. `corrected_params` reads the velocity and must be the pipeline's
    hook `backward_params`; without it this transform changes nothing. Updates pass
    unchanged. They must be the movement of the weights, so this transform goes last in the
    chain. It costs memory of the size of the weights.

    T2 helps where newer weights in the backward make training less stable. Where newer
    weights make training more stable (a negative discrepancy sensitivity in PipeMare's
    lemma 2), T2 can hurt: on a quadratic of curvature 1 and sensitivity -1 with delays 10
    and 0, the largest stable learning rate falls from above 0.6 to 0.18 with the theory's
    gamma and to 0.12 with D = 0.01; with D = 0.5 it stays.

    Args:
      decay: D between 0 and 1, both excluded. None: the theory's gamma
        = 1 - 2 / (tau + 1), which is about D = exp(-2) = 0.135.
      delay: tau in updates, at least 0: a number, or a tree with a number for every weight
        or for a whole branch. None: `delay - backward_delay` of the extra arguments of
        `update`, which a pipeline passes to each stage. Where tau is 0 the velocity
        stays 0.

    Returns:
      A transformation with a `CorrectDiscrepancyState`.

    Raises:
      ValueError: if `decay` is not between 0 and 1, or a delay is negative. At the update:
        if there is no delay.

    Example:
      >>> optimizer = optax.chain(optax.sgd(0.1), correct_discrepancy(0.25))
      >>> params, delays = jnp.zeros(2), dict(delay=2, backward_delay=0)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.ones(2), state, params, **delays)
      >>> params = optax.apply_updates(params, updates)
      >>> corrected_params(params, state, delay=2)  # -0.1 + 2 * (1 - 0.25 ** (1 / 2)) * 0.1
      Array([0., 0.], dtype=float32)

    References:
      Yang et al., PipeMare, MLSys 2021, arXiv:1910.05124, T2.
    """
    if decay is not None and is_wrong(decay, lambda d: 0 < d < 1):
        raise ValueError(
            f"`decay` must be between 0 and 1, both excluded, got {shown(decay)}. Pass None for the theory's."
        )
    check_delay(delay)

    def init(params):
        return CorrectDiscrepancyState(optax.tree.zeros_like(params))

    def decay_per_update(tau):
        tau = jnp.maximum(tau, 0)
        if decay is None:
            return jnp.maximum(1 - 2 / (tau + 1), 0)
        return decay ** (1 / tau)

    def update(updates, state, params=None, **extra_args):
        del params
        tau = as_float(_discrepancy(delay, extra_args))
        gamma = jax.tree.map(lambda t: jnp.where(t > 0, decay_per_update(t), 0), tau)
        new = jax.tree.map(lambda t, g: jnp.where(t > 0, 1 - g, 0), tau, gamma)
        velocity = jax.tree.map(
            lambda v, u, gamma, new: gamma * v + new * u,
            state.velocity,
            updates,
            spread(gamma, updates),
            spread(new, updates),
        )
        velocity = optax.tree.cast_like(velocity, state.velocity)
        return updates, CorrectDiscrepancyState(velocity)

    return optax.GradientTransformationExtraArgs(init, update)


@suggests
@reads_state(CorrectDiscrepancyState)
def corrected_params(params: chex.ArrayTree, optimizer_state: chex.ArrayTree, delay: NumericTree) -> chex.ArrayTree:
    """Estimates the weights of `delay` updates ago: `params - delay * velocity`.

    It is the hook for the backward of a pipeline that keeps one weight version:
    `Pipeline(backward_params=corrected_params)`.

    Args:
      params: the current weights.
      optimizer_state: the current state of an optimizer with `correct_discrepancy`, in a
        chain or in any of Optax's wrappers. Masked weights are not corrected.
      delay: the number of updates by which `params` are newer than the weights that the
        forward read, at least 0. A `correct_discrepancy` with its own delays needs the
        same delays here.

    Returns:
      Weights in the shapes and dtypes of `params`, equal to them where the delay is 0.

    Raises:
      ValueError: if `optimizer_state` has no state of `correct_discrepancy`, or the delay
        is negative.
    """
    check_delay(delay)
    states = find_states(optimizer_state, CorrectDiscrepancyState, "correct_discrepancy")
    distance = jax.tree.map(jnp.negative, as_float(delay))
    return move(params, [state.velocity for state in states], distance)


def _discrepancy(delay: NumericTree | None, extra_args: dict) -> NumericTree:
    """Updates between the weights of the forward and those of the backward."""
    if delay is None:
        forward, backward = extra_args.get("delay"), extra_args.get("backward_delay")
        if forward is None or backward is None:
            raise ValueError(
                "`correct_discrepancy` needs the number of updates by which the weights of the "
                f"backward are newer, got delay={forward}, backward_delay={backward}. Pass "
                "`correct_discrepancy(..., delay=4)`, or `optimizer.update(grads, state, "
                "params, delay=4, backward_delay=0)`, as a pipeline does on each stage."
            )
        delay = optax.tree.sub(forward, backward)
        check_delay(delay, "delay - backward_delay")
    return delay
