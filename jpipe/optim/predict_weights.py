"""Weight prediction: a forward with an estimate of the weights that it will update."""

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
from jpipe.optim.delays import NumericTree, as_float, check_delay, find_states, move


class PredictWeightsState(NamedTuple):
    """The last movement of the weights, in their shapes and dtypes, and the number of updates, int32, or None."""

    movement: optax.Updates
    count: chex.Array | None = None
    declaration = Declaration(
        "predict_weights",
        hook="forward",
        hook_function="jpipe.optim.predicted_params",
    )


@suggests
def predict_weights(
    learning_rate: optax.Schedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Weight prediction: keeps the last movement of the weights.

    `predicted_params` reads the movement and must be the pipeline's hook `forward_params`;
    without it this transform changes nothing. Updates pass unchanged. They must be the
    movement of the weights, so this transform goes last in the chain. It costs memory of
    the size of the weights.

    Args:
      learning_rate: the learning-rate schedule eta of the optimizer, a function of the number
        of updates so far. With it the movement is multiplied by the rate of the next update
        over the rate of the last: it is the current rate times the last direction, as in the
        papers. None: it is what the last update moved, the same at a constant rate.

    Returns:
      A transformation with a `PredictWeightsState`.

    Raises:
      ValueError: if `learning_rate` is not a function.

    Example:
      >>> optimizer = optax.chain(optax.sgd(0.5), predict_weights())
      >>> params = jnp.zeros(2)
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(jnp.ones(2), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> predicted_params(params, state, delay=3)
      Array([-2., -2.], dtype=float32)

    References:
      See `predicted_params`.
    """

    if learning_rate is not None and not callable(learning_rate):
        raise ValueError(
            "`learning_rate` must be a schedule, a function of the number of updates so far, got "
            f"{shown(learning_rate)}. At a constant rate leave it out."
        )

    def init(params):
        count = None if learning_rate is None else jnp.zeros([], jnp.int32)
        return PredictWeightsState(optax.tree.zeros_like(params), count)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        movement, count = updates, None
        if learning_rate is not None:
            count = optax.safe_increment(state.count)
            last, now = (as_float(learning_rate(t)) for t in (state.count, count))
            # At a rate of 0 nothing has moved.
            change = now / jnp.where(last == 0, 1, last)
            movement = jax.tree.map(lambda u: change * u, updates)
        movement = optax.tree.cast_like(movement, state.movement)
        return updates, PredictWeightsState(movement, count)

    return optax.GradientTransformationExtraArgs(init, update)


@suggests
@reads_state(PredictWeightsState)
def predicted_params(
    params: chex.ArrayTree,
    optimizer_state: chex.ArrayTree,
    delay: NumericTree,
    horizon: Callable[[chex.Array], chex.Numeric] | chex.Numeric | None = None,
) -> chex.ArrayTree:
    """Estimates the weights in `delay` updates: `params + s * movement`.

    It is the hook for the forward of an asynchronous pipeline:
    `Pipeline(forward_params=predicted_params)`. `movement` is the last update that the
    chain made. At a constant learning rate eta this is

    - after SGD with momentum v, SpecTrain's `w - s eta v`;
    - after Adam, XPipe's and PipeOptim's `w - s eta m_hat / (sqrt(v_hat) + eps)`, also with
      AdamW's weight decay, for s = D - rank - 1 with D stages, which is the delay of a
      schedule in unit ticks with one microbatch per minibatch.

    All microbatches of a minibatch that read the same version read the same prediction, as in
    XPipe, where the first of them predicts for all. When the learning rate changes, the
    movement still contains the last rate; the formulas of the papers contain the current one,
    as does `predict_weights(learning_rate=...)`.

    Args:
      params: the current weights.
      optimizer_state: the current state of an optimizer with `predict_weights`, in a chain
        or in any of Optax's wrappers. Masked weights are not predicted.
      delay: updates between reading the weights and applying the gradient, at least 0: a
        number, or a tree with a number for every weight or for a whole branch.
      horizon: s in updates, at least 0, for methods where s is not the delay: a function
        of the delay, or one number for all delays, 0 included. None: s is the delay.

    Returns:
      Weights in the shapes and dtypes of `params`, equal to them where s is 0.

    Raises:
      ValueError: if `optimizer_state` has no state of `predict_weights`, or a number is
        negative.

    Example:
      >>> import functools
      >>> forward_params = functools.partial(predicted_params, horizon=lambda tau: tau / 2)

    References:
      Chen et al., SpecTrain, 2018, arXiv:1809.02839. Guan et al., XPipe, 2019,
      arXiv:1911.04610. Guan et al., PipeOptim, 2023, arXiv:2312.00839.
    """
    states = find_states(optimizer_state, PredictWeightsState, "predict_weights")
    distance = horizon_of(delay, horizon)
    return move(params, [state.movement for state in states], distance)


def horizon_of(delay: NumericTree, horizon: Callable | chex.Numeric | None) -> NumericTree:
    """The number of updates to look ahead: `horizon`, or the delay if that is None."""
    check_delay(delay)
    if horizon is None:
        return as_float(delay)
    if callable(horizon):
        horizon = jax.tree.map(horizon, as_float(delay))
    check_delay(horizon, "horizon")
    return as_float(horizon)
