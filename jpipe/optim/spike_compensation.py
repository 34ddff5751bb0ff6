"""Spike compensation: momentum that applies a late gradient several times at once."""

from __future__ import annotations

from collections.abc import Callable
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
    delay_of,
    find_states,
    is_wrong,
    move,
    spread,
)
from jpipe.optim.predict_weights import horizon_of


class SpikeCompensationState(NamedTuple):
    """Number of updates so far, int32, and the momentum, in the weights' shapes and dtypes."""

    count: chex.Array
    velocity: optax.Updates
    declaration = Declaration("spike_compensation", ("delay",))


@suggests
def spike_compensation(
    momentum: chex.Numeric, delay: NumericTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """SGD with momentum for gradients that are `delay` updates late.

        v <- m v + g,    update = a v + b g,    a = m ** D,    b = (1 - m ** D) / (1 - m)

    In D updates, momentum would have applied a gradient b times in all and decayed it to a.
    The late gradient is therefore applied b times at once and then continues from a. Every
    gradient counts 1 / (1 - m) times in all, as in plain momentum. For D = 0 this is plain
    momentum.

    Args:
      momentum: m, at least 0 and below 1.
      delay: D in updates, at least 0: a number, or a tree with a number for every weight
        or for a whole branch. None: the extra argument `delay` of `update`, which a
        pipeline passes to each stage.

    Returns:
      A transformation with a `SpikeCompensationState`. It replaces `optax.trace`; the
      learning rate comes after it.

    Raises:
      ValueError: if `momentum` is not at least 0 and below 1, or a delay is negative. At
        the update: if there is no delay.

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
            f"`momentum` must be at least 0 and below 1, got {shown(momentum)}. With 0 it is SGD without momentum."
        )
    check_delay(delay)

    def init(params):
        velocity = optax.tree.zeros_like(params)
        return SpikeCompensationState(jnp.zeros([], jnp.int32), velocity)

    def update(updates, state, params=None, **extra_args):
        del params
        num_late = as_float(delay_of(delay, extra_args, "spike_compensation"))
        a = jax.tree.map(lambda d: momentum**d, num_late)
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


@suggests
@reads_state(SpikeCompensationState)
def velocity_predicted_params(
    params: chex.ArrayTree,
    optimizer_state: chex.ArrayTree,
    delay: NumericTree,
    *,
    learning_rate: optax.ScalarOrSchedule,
    horizon: Callable[[chex.Array], chex.Numeric] | chex.Numeric | None = None,
) -> chex.ArrayTree:
    """Linear weight prediction from momentum v: `params - T * eta * v`.

    It is a hook for the forward, `Pipeline(forward_params=...)`, and reads the momentum of
    `spike_compensation`. `predicted_params` is the same method with the last movement of
    the weights. The two agree if the movement is `-eta * v`: with no delay in
    `spike_compensation`, a constant learning rate, and nothing else in the chain. With a
    delay the movement also contains the spike of the last gradient, and v does not.

    Args:
      params: the current weights.
      optimizer_state: the current state of an optimizer with `spike_compensation`, in a
        chain or in any of Optax's wrappers. Masked weights are not predicted.
      delay: updates between reading the weights and applying the gradient, at least 0: a
        number, or a tree with a number for every weight or for a whole branch.
      learning_rate: eta, or a learning-rate schedule, which is evaluated at the number of
        updates so far.
      horizon: T in updates, at least 0, for methods where T is not the delay: a function
        of the delay, or one number for all delays, 0 included. None: T is the delay.

    Returns:
      Weights in the shapes and dtypes of `params`, equal to them where T is 0.

    Raises:
      ValueError: if `optimizer_state` has no state of `spike_compensation`, or a number is
        negative.

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
