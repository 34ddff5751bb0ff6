"""Spike compensation: momentum that gives a late gradient at once what it has missed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.optim.delays import (
    as_float,
    check_delay,
    find_states,
    given_delay,
    is_wrong,
    move,
    spread,
)
from jpipe.optim.predict_weights import horizon_of


class SpikeCompensationState(NamedTuple):
    """Number of updates so far, int32, and the momentum, in the weights' shapes and dtypes."""

    count: jax.Array
    velocity: optax.Updates


def spike_compensation(
    momentum: float, delay: Any = None
) -> optax.GradientTransformationExtraArgs:
    """SGD's momentum for gradients that are `delay` updates late.

        v <- m v + g,    update = a v + b g,    a = m ** D,    b = (1 - m ** D) / (1 - m)

    In D updates momentum would have applied a gradient b times and decayed it to a. So the
    late gradient is applied b times at once, and goes on from a: each gradient counts
    1 / (1 - m) times in all, as in plain momentum, which this is for D = 0.

    Args:
      momentum: m, at least 0 and below 1.
      delay: D in updates, at least 0: a number, or a tree of numbers with one for every
        weight or for a whole branch of them. None takes the extra argument `delay` of
        `update`, which a pipeline gives each stage.

    Returns:
      A transformation with a `SpikeCompensationState`, in place of `optax.trace`: the
      learning rate comes behind it.

    Raises:
      ValueError: if `momentum` is not at least 0 and below 1, a delay is negative, or, at
        the update, there is no delay.

    Example:
      >>> optimizer = optax.chain(
      ...     spike_compensation(0.5, delay=2), optax.scale_by_learning_rate(1.0)
      ... )
      >>> optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))[0]  # 0.25 + 1.5
      Array([-1.75, -1.75], dtype=float32)

    References:
      Kosson et al., Pipelined Backpropagation at Scale, MLSys 2021, arXiv:2003.11666,
      spike compensation.
    """
    if is_wrong(momentum, lambda m: 0 <= m < 1):
        raise ValueError(
            f"`momentum` must be at least 0 and below 1, got {momentum}. 0 is SGD without momentum."
        )
    check_delay(delay)

    def init(params):
        velocity = optax.tree.zeros_like(params)
        return SpikeCompensationState(jnp.zeros([], jnp.int32), velocity)

    def update(updates, state, params=None, **extra_args):
        del params
        late = as_float(given_delay(delay, extra_args, "spike_compensation"))
        a = jax.tree.map(lambda d: momentum**d, late)
        b = jax.tree.map(lambda a: (1 - a) / (1 - momentum), a)
        velocity = jax.tree.map(lambda v, g: momentum * v + g, state.velocity, updates)
        compensated = jax.tree.map(
            lambda v, g, a, b: a * v + b * g,
            velocity,
            updates,
            spread(a, updates),
            spread(b, updates),
        )
        return optax.tree.cast_like(compensated, updates), SpikeCompensationState(
            optax.safe_increment(state.count),
            optax.tree.cast_like(velocity, state.velocity),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def velocity_predicted_params(
    params: Any,
    optimizer_state: Any,
    delay: Any,
    *,
    learning_rate: float | Callable[[jax.Array], Any],
    horizon: Callable[[jax.Array], Any] | float | None = None,
) -> Any:
    """Linear weight prediction by the momentum of `spike_compensation`: `params - T * eta * v`.

    `predicted_params` is the same method in terms of the last movement. They agree if the
    movement is `-eta * v`: no delay in `spike_compensation`, a constant learning rate, and
    nothing else in the chain. With spike compensation the movement has the spike of the
    last gradient in it, which this one leaves out.

    Args:
      params: the weights now.
      optimizer_state: the state now of an optimizer with `spike_compensation`, in a chain
        or in any of Optax's wrappers. Weights that are masked from it are not predicted.
      delay: updates between reading the weights and applying the gradient, at least 0: a
        number, or a tree of numbers with one for every weight or for a whole branch.
      learning_rate: eta, or a learning-rate schedule, taken at the number of updates so far.
      horizon: T in updates, at least 0, where it is not the delay: a function of the
        delay, or a number for all delays, 0 included.

    Returns:
      Weights in the shapes and dtypes of `params`; equal to them where T is 0.

    Raises:
      ValueError: if the state holds none of `spike_compensation`, or a number is negative.

    Example:
      >>> import functools
      >>> forward_params = functools.partial(velocity_predicted_params, learning_rate=0.1)

    References:
      Kosson et al., Pipelined Backpropagation at Scale, MLSys 2021, arXiv:2003.11666,
      linear weight prediction.
    """
    states = find_states(optimizer_state, SpikeCompensationState, "spike_compensation")
    rate = learning_rate
    if callable(rate):
        rate = rate(states[0].count)
    distance = jax.tree.map(lambda T: -T * rate, horizon_of(delay, horizon))
    return move(params, [state.velocity for state in states], distance)
