"""Adam with Nesterov's momentum, which tolerates late gradients if the momentum is high."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.delays import is_wrong


class ScaleByNadamState(NamedTuple):
    """Number of updates, product of all mu so far, and both moments like the weights."""

    count: chex.Array
    mu_product: chex.Array
    mu: optax.Updates
    nu: optax.Updates


@suggests
def scale_by_nadam(
    b1: chex.Numeric = 0.99,
    b2: chex.Numeric = 0.999,
    eps: chex.Numeric = 1e-8,
    momentum_decay: chex.Numeric = 4e-3,
) -> optax.GradientTransformationExtraArgs:
    """NAdam with a momentum that warms up: a remedy for late gradients.

        mu_t = b1 (1 - 0.96 ** (t psi) / 2)
        m <- b1 m + (1 - b1) g,    v <- b2 v + (1 - b2) g ** 2
        m_hat = mu_{t+1} m / (1 - mu_1 ... mu_{t+1}) + (1 - mu_t) g / (1 - mu_1 ... mu_t)
        update = m_hat / (sqrt(v / (1 - b2 ** t)) + eps)

    Here t is the number of the update, from 1, and psi the momentum decay. Nesterov's
    method for a pipeline with delay tau looks ahead by d_t = gamma (w_t - w_{t-1}) and steps

        w_{t+1} = w_t + d_t - eta (1 - gamma) grad f(w_{t-tau} + d_{t-tau})

    If gamma is close to 1, the look-ahead compensates the delay, and a late gradient has a
    small weight. This transform keeps the weights y = w + d at which the gradient is
    taken. In terms of y the step is -eta (gamma m + (1 - gamma) g), which is the m_hat
    above without its corrections of the first updates. The authors train with this NAdam,
    b1 = 0.99 and decoupled weight decay. Nothing in it depends on the delay.

    `optax.scale_by_adam(nesterov=True)` has mu = b1 from the first update on, the limit of
    large psi. Here the momentum starts at about b1 / 2. With the default psi it is halfway
    from there to b1 after 4,245 updates.

    Args:
      b1: decay of the first moment, at least 0 and below 1.
      b2: decay of the second moment, at least 0 and below 1.
      eps: added to the denominator.
      momentum_decay: psi per update, at least 0. 0 keeps mu at b1 / 2.

    Returns:
      A transformation with a `ScaleByNadamState`.

    Raises:
      ValueError: if `b1`, `b2` or `momentum_decay` is out of its range.

    Example:
      >>> scale = scale_by_nadam()
      >>> updates, state = scale.update(jnp.ones(2), scale.init(jnp.ones(2)))

    References:
      Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel Optimization,
      ICML 2025, arXiv:2505.01099. Dozat, Incorporating Nesterov Momentum into Adam, ICLR
      workshop 2016, in the form of `torch.optim.NAdam`.
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        if is_wrong(decay, lambda b: 0 <= b < 1):
            raise ValueError(f"`{name}` must be at least 0 and below 1, got {shown(decay)}.")
    if is_wrong(momentum_decay, lambda psi: psi >= 0):
        raise ValueError(f"`momentum_decay` must be at least 0, got {shown(momentum_decay)}.")

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return ScaleByNadamState(jnp.zeros([], jnp.int32), jnp.ones([], float), zeros, zeros)

    def momentum(t):
        return b1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        count = optax.safe_increment(state.count)
        t = count.astype(float)
        product = state.mu_product * momentum(t)
        by_m = momentum(t + 1) / (1 - product * momentum(t + 1))
        by_g = (1 - momentum(t)) / (1 - product)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        scaled = jax.tree.map(
            lambda m, v, g: (by_m * m + by_g * g) / (jnp.sqrt(v / (1 - b2**t)) + eps),
            mu,
            nu,
            updates,
        )
        return optax.tree.cast_like(scaled, updates), ScaleByNadamState(
            count,
            product.astype(state.mu_product.dtype),
            optax.tree.cast_like(mu, state.mu),
            optax.tree.cast_like(nu, state.nu),
        )

    return optax.GradientTransformationExtraArgs(init, update)


@suggests
def nadamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: chex.Numeric = 0.99,
    b2: chex.Numeric = 0.999,
    eps: chex.Numeric = 1e-8,
    momentum_decay: chex.Numeric = 4e-3,
    weight_decay: chex.Numeric = 1e-4,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`scale_by_nadam` with decoupled weight decay: the optimizer of asynchronous Nesterov.

    `optax.nadamw` has b1 = 0.9 and no warm-up of the momentum.

    Args:
      learning_rate: a number or a learning-rate schedule.
      b1: see `scale_by_nadam`.
      b2: see `scale_by_nadam`.
      eps: see `scale_by_nadam`.
      momentum_decay: see `scale_by_nadam`.
      weight_decay: strength of the decay, multiplied by the learning rate as in Optax.
      mask: the weights that decay: a tree of booleans like the params or a prefix of it,
        or a function from the params to such a tree. None: all.

    Returns:
      The transformation.

    Raises:
      ValueError: if `b1`, `b2` or `momentum_decay` is out of its range.

    Example:
      >>> optimizer = nadamw(optax.cosine_decay_schedule(3e-4, 1000), weight_decay=0.01)
    """
    return optax.chain(
        scale_by_nadam(b1, b2, eps, momentum_decay),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
