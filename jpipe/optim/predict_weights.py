"""Weight prediction: a forward on the weights that its gradient will be applied to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jpipe.optim.delays import as_float, check_delay, find_states, move


class PredictWeightsState(NamedTuple):
    """The last movement of the weights, in their shapes and dtypes."""

    movement: optax.Updates


def predict_weights() -> optax.GradientTransformationExtraArgs:
    """Remembers the last movement of the weights, for `predicted_params`.

    Updates pass unchanged; as they must be what the weights move by, it goes last in the
    chain. It costs memory of the size of the weights.

    Returns:
      A transformation with a `PredictWeightsState`.

    Example:
      >>> import jax.numpy as jnp
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

    def init(params):
        return PredictWeightsState(optax.tree.zeros_like(params))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        movement = optax.tree.cast_like(updates, state.movement)
        return updates, PredictWeightsState(movement)

    return optax.GradientTransformationExtraArgs(init, update)


def predicted_params(
    params: Any,
    optimizer_state: Any,
    delay: Any,
    horizon: Callable[[jax.Array], Any] | float | None = None,
) -> Any:
    """What the weights will be in `delay` updates if they keep moving: `params + s * movement`.

    The weights for the forward of an asynchronous pipeline
    (`Pipeline(forward_params=predicted_params)`). `movement` is the last update, whatever
    the chain makes it of. At a constant learning rate eta that is

    - SpecTrain's `w - s eta v` behind SGD with momentum, v the momentum,
    - XPipe's and PipeOptim's `w - s eta m_hat / (sqrt(v_hat) + eps)` behind Adam, and with
      AdamW's weight decay, s = D - rank - 1 for D stages: the delay of a schedule in unit
      ticks with one microbatch a minibatch.

    When the learning rate changes, the movement was made with the last one, the formulas
    take the current one.

    Args:
      params: the weights now.
      optimizer_state: the state now of an optimizer with `predict_weights`, in a chain or
        in any of Optax's wrappers. Weights that are masked from it are not predicted.
      delay: updates between reading the weights and applying the gradient, at least 0: a
        number, or a tree of numbers with one for every weight or for a whole branch.
      horizon: s in updates, at least 0, for methods where it is not the delay: a function
        of the delay, or a number for all delays, 0 included.

    Returns:
      Weights in the shapes and dtypes of `params`; equal to them where s is 0.

    Raises:
      ValueError: if the state holds none of `predict_weights`, or a number is negative.

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


def horizon_of(delay: Any, horizon: Callable | float | None) -> Any:
    """How many updates to look ahead: the delay, unless `horizon` says otherwise."""
    check_delay(delay)
    if horizon is None:
        return as_float(delay)
    if callable(horizon):
        horizon = jax.tree.map(horizon, as_float(delay))
    check_delay(horizon, "horizon")
    return as_float(horizon)
