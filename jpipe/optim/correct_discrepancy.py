"""T2 of PipeMare: a backward that reads newer weights than the forward did, corrected."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.optim.delays import (
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


def correct_discrepancy(
    decay: float | None = None, delay: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps the velocity of the weights, for `corrected_params`: PipeMare's T2, discrepancy correction.

        velocity <- gamma * velocity + (1 - gamma) * (w_{t+1} - w_t),    gamma = D ** (1 / tau)

    where tau is how many updates newer the weights that the backward reads are than those
    that the forward read. Updates pass unchanged; as they must be what the weights move
    by, it goes last in the chain. It costs memory of the size of the weights.

    It helps where reading newer weights in the backward makes training less stable; where
    that happens to help by itself (a negative discrepancy sensitivity in PipeMare's
    lemma 2), it can hurt: on a quadratic of curvature 1 and sensitivity -1 with delays 10
    and 0, the largest stable learning rate falls from above 0.6 to 0.18 with the theory's
    gamma and to 0.12 with D = 0.01; with D = 0.5 it stays.

    Args:
      decay: D between 0 and 1, both excluded; None for the theory's gamma
        = 1 - 2 / (tau + 1), which is about D = exp(-2) = 0.135.
      delay: tau in updates, at least 0: a number, or a tree of numbers with one for every
        weight or for a whole branch of them. None takes `delay - backward_delay` of the
        extra arguments of `update`, which a pipeline gives each stage. Where it is 0 the
        velocity stays 0.

    Returns:
      A transformation with a `CorrectDiscrepancyState`.

    Raises:
      ValueError: if `decay` is not between 0 and 1, a delay is negative, or, at the
        update, there is no delay.

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
            f"`decay` must be between 0 and 1, both excluded, got {decay}. None takes the theory's."
        )
    check_delay(delay)

    def init(params):
        return CorrectDiscrepancyState(optax.tree.zeros_like(params))

    def kept(tau):
        tau = jnp.maximum(tau, 0)
        if decay is None:
            return jnp.maximum(1 - 2 / (tau + 1), 0)
        return decay ** (1 / tau)

    def update(updates, state, params=None, **extra_args):
        del params
        tau = as_float(_discrepancy(delay, extra_args))
        gamma = jax.tree.map(lambda t: jnp.where(t > 0, kept(t), 0), tau)
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


def corrected_params(params: Any, optimizer_state: Any, delay: Any) -> Any:
    """What the weights were `delay` updates ago, by their velocity: `params - delay * velocity`.

    The weights for the backward of a pipeline that keeps one version of them
    (`Pipeline(backward_params=corrected_params)`).

    Args:
      params: the weights now.
      optimizer_state: the state now of an optimizer with `correct_discrepancy`, in a chain
        or in any of Optax's wrappers. Weights that are masked from it are not corrected.
      delay: how many updates newer `params` are than what the forward read, at least 0. A
        `correct_discrepancy` that was given its own delays needs the same here.

    Returns:
      Weights in the shapes and dtypes of `params`; equal to them where the delay is 0.

    Raises:
      ValueError: if the state holds none of `correct_discrepancy`, or the delay is negative.
    """
    check_delay(delay)
    states = find_states(
        optimizer_state, CorrectDiscrepancyState, "correct_discrepancy"
    )
    distance = jax.tree.map(jnp.negative, as_float(delay))
    return move(params, [state.velocity for state in states], distance)


def _discrepancy(delay: Any, extra_args: dict) -> Any:
    """Updates between the weights of the forward and those of the backward."""
    if delay is None:
        forward, backward = extra_args.get("delay"), extra_args.get("backward_delay")
        if forward is None or backward is None:
            raise ValueError(
                "`correct_discrepancy` needs to know how much newer the weights of the backward are, got "
                f"delay={forward}, backward_delay={backward}. Give it one, `correct_discrepancy(..., delay=4)`, or "
                "update with `optimizer.update(grads, state, params, delay=4, backward_delay=0)`, as a pipeline does "
                "on each stage."
            )
        delay = optax.tree.sub(forward, backward)
        check_delay(delay, "delay - backward_delay")
    return delay
