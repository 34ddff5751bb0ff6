"""Averages of the weights, for evaluation."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.delays import find_states, is_wrong


class EmaWeightsState(NamedTuple):
    """A decayed sum of the weights, like them but at least float32, and the sum of its coefficients, `[]`."""

    average: optax.Params
    total: chex.Array


@suggests
def ema_weights(decay: chex.Numeric) -> optax.GradientTransformationExtraArgs:
    """Keeps an exponential moving average of the weights.

        a <- d a + (1 - d) w,    total <- d total + 1 - d,    average = a / total

    Here w are the weights after the update. Both start at 0, so the average is a mean of
    the weights after all updates, with coefficients that fall by d for each update since.
    It is smoother than the weights, whose noise grows with the delay of gradients.
    `averaged_params` reads it. Updates pass unchanged. They must be the movement of the
    weights, so this transform goes last in the chain. It costs memory of the size of the
    weights. A stage that skips an update keeps its average.

    Args:
      decay: d, at least 0 and below 1. It averages over about 1 / (1 - d) updates.

    Returns:
      A transformation with an `EmaWeightsState`.

    Raises:
      ValueError: if `decay` is not at least 0 and below 1. At the update: if there are no
        weights.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), ema_weights(0.5))
      >>> weights = jnp.zeros(1)
      >>> state = optimizer.init(weights)
      >>> for _ in range(2):
      ...     updates, state = optimizer.update(jnp.full(1, -3.0), state, weights)
      ...     weights = optax.apply_updates(weights, updates)
      >>> averaged_params(weights, state)  # (3 / 4 + 6 / 2) / (1 / 4 + 1 / 2)
      Array([5.], dtype=float32)

    References:
      Polyak and Juditsky, SIAM J. Control and Optimization 1992. Izmailov et al., UAI 2018,
      arXiv:1803.05407. The division by the total is Adam's (Kingma and Ba, ICLR 2015,
      arXiv:1412.6980, section 3).
    """
    if is_wrong(decay, lambda d: 0 <= d < 1):
        raise ValueError(
            f"`decay` must be at least 0 and below 1, got {shown(decay)}: the average is over about "
            "1 / (1 - decay) updates."
        )

    def init(params):
        zeros = jax.tree.map(
            lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)),
            params,
        )
        return EmaWeightsState(zeros, jnp.zeros([], float))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("`ema_weights` averages weights: call `update(gradients, state, params)`.")
        weights = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda a, w: (decay * a + (1 - decay) * w.astype(a.dtype)).astype(a.dtype),
            state.average,
            weights,
        )
        total = (decay * state.total + (1 - decay)).astype(state.total.dtype)
        return updates, EmaWeightsState(average, total)

    return optax.GradientTransformationExtraArgs(init, update)


@suggests
def averaged_params(params: chex.ArrayTree, optimizer_state: chex.ArrayTree) -> chex.ArrayTree:
    """The average that `ema_weights` keeps.

    `pipe.with_params(state, averaged_params)` is the state of a pipeline with these
    weights, for `evaluate` and `predict`.

    Args:
      params: the current weights.
      optimizer_state: the current state of an optimizer with `ema_weights`, in a chain or in
        any of Optax's wrappers. Masked weights are not averaged.

    Returns:
      Weights in the shapes and dtypes of `params`, equal to them before the first update.

    Raises:
      ValueError: if `optimizer_state` has no state of `ema_weights`, or a weight is in two.
    """
    averages: dict = {}
    for state in find_states(optimizer_state, EmaWeightsState, "ema_weights"):
        for path, average in jax.tree.leaves_with_path(state.average):
            if path in averages:
                raise ValueError(
                    f"`optimizer_state` has params{jax.tree_util.keystr(path)} in two `ema_weights`. Keep one."
                )
            averages[path] = average, state.total

    def averaged(path, weight):
        if path not in averages:
            return weight
        average, total = averages.pop(path)
        mean = average / jnp.where(total > 0, total, 1).astype(average.dtype)
        return jnp.where(total > 0, mean.astype(weight.dtype), weight)

    means = jax.tree.map_with_path(averaged, params)
    if averages:
        raise ValueError(
            f"`optimizer_state` is not of these `params`, which have no {jax.tree_util.keystr(next(iter(averages)))}."
        )
    return means
