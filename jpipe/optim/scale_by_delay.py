"""T1 of PipeMare: a smaller learning rate where gradients are late."""

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


class ScaleByDelayState(NamedTuple):
    """Number of updates so far, int32."""

    count: chex.Array
    declaration = Declaration("scale_by_delay", ("delay",))


@suggests
def scale_by_delay(
    annealing_steps: chex.Numeric, delay: NumericTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """PipeMare's T1, learning-rate rescheduling: divides updates by a power of their delay.

        update <- update * tau ** -p_k,    p_k = 1 - min(k / K, 1)

    Here k is the number of updates so far and K the number of annealing steps. The power
    falls from 1 to 0, so after K updates nothing is scaled. Late gradients are stable only
    at a learning rate of about 1 / tau, which matters while the learning rate is large.
    Adam would undo the scaling, so this transform goes after momentum and Adam: last in
    the chain, or next to the learning rate.

    Args:
      annealing_steps: K, above 0, in updates. The updates of a synchronous warm-up count
        too. Good first values are a quarter of the first phase of constant learning rate,
        or five times a linear warm-up. `math.inf` never stops dividing by the delay.
      delay: tau in updates, at least 0: a number, or a tree with a number for every weight
        or for a whole branch. None: the extra argument `delay` of `update`, which a
        pipeline passes to each stage. A delay of at most 1 scales nothing.

    Returns:
      A transformation with a `ScaleByDelayState`.

    Raises:
      ValueError: if `annealing_steps` is not above 0, or a delay is negative. At the
        update: if there is no delay.

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
            f"`annealing_steps` must be above 0, got {shown(annealing_steps)}: it is a number of "
            "updates. To scale nothing, leave `scale_by_delay` out."
        )
    check_delay(delay)

    def init(params):
        del params
        return ScaleByDelayState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, **extra_args):
        del params
        tau = as_float(delay_of(delay, extra_args, "scale_by_delay"))
        scale = jax.tree.map(lambda t: factor(t, annealing_steps, as_float(state.count)), tau)
        scaled = jax.tree.map(jnp.multiply, updates, spread(scale, updates))
        count = optax.safe_increment(state.count)
        return optax.tree.cast_like(scaled, updates), ScaleByDelayState(count)

    return optax.GradientTransformationExtraArgs(init, update)


def factor(delay: chex.Numeric, annealing_steps: chex.Numeric, num_updates: chex.Numeric) -> jax.Array:
    """The factor of T1 for the update after so many."""
    return jnp.maximum(delay, 1) ** -(1 - jnp.minimum(num_updates / annealing_steps, 1))
