"""T1 of PipeMare: a smaller learning rate where gradients are late."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.optim.delays import as_float, check_delay, given_delay, is_wrong, spread


class ScaleByDelayState(NamedTuple):
    """Number of updates so far, int32."""

    count: jax.Array


def scale_by_delay(
    annealing_steps: int | float, delay: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Divides updates by a power of their delay that falls to 0: PipeMare's T1, learning-rate rescheduling.

        update <- update * tau ** -p_k,    p_k = 1 - min(k / K, 1)

    for the k-th update, counted from 0, and K annealing steps. Late gradients are stable
    only at a learning rate of about 1 / tau, which matters while the learning rate is
    large; after K updates nothing is scaled. It goes behind momentum and Adam (which
    would undo it), so last in the chain or next to the learning rate.

    Args:
      annealing_steps: K, above 0, in updates, those of a synchronous warm-up included.
        Places to start are a quarter of the first phase of constant learning rate, or
        five times a linear warm-up; `math.inf` divides by the delay for ever.
      delay: tau in updates, at least 0: a number, or a tree of numbers with one for every
        weight or for a whole branch of them. None takes the extra argument `delay` of
        `update`, which a pipeline gives each stage. A delay of at most 1 scales nothing.

    Returns:
      A transformation with a `ScaleByDelayState`.

    Raises:
      ValueError: if `annealing_steps` is not above 0, a delay is negative, or, at the
        update, there is no delay.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), scale_by_delay(annealing_steps=2))
      >>> state = optimizer.init(jnp.zeros(2))
      >>> for _ in range(3):
      ...     updates, state = optimizer.update(jnp.ones(2), state, delay=4)
      ...     print(updates)
      [-0.25 -0.25]
      [-0.5 -0.5]
      [-1. -1.]

    References:
      Yang et al., PipeMare, MLSys 2021, arXiv:1910.05124, T1.
    """
    if is_wrong(annealing_steps, lambda k: k > 0):
        raise ValueError(
            f"`annealing_steps` must be above 0, got {annealing_steps}. Without annealing, leave `scale_by_delay` out."
        )
    check_delay(delay)

    def init(params):
        del params
        return ScaleByDelayState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, **extra_args):
        del params
        tau = as_float(given_delay(delay, extra_args, "scale_by_delay"))
        power = 1 - jnp.minimum(as_float(state.count) / annealing_steps, 1)
        scale = jax.tree.map(lambda t: jnp.maximum(t, 1) ** -power, tau)
        scaled = jax.tree.map(jnp.multiply, updates, spread(scale, updates))
        count = optax.safe_increment(state.count)
        return optax.tree.cast_like(scaled, updates), ScaleByDelayState(count)

    return optax.GradientTransformationExtraArgs(init, update)
