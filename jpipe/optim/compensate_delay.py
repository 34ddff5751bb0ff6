"""Delay compensation: moves a late gradient to the newest weights by an estimate of the curvature."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.declarations import Declaration
from jpipe.optim.delays import is_wrong


class CompensateDelayState(NamedTuple):
    """Decayed mean of squared gradients, in the weights' shapes and dtypes; None with a constant strength."""

    mean_square: optax.Updates | None
    declaration = Declaration("compensate_delay", ("stale_params",))


@suggests
def compensate_delay(
    strength: chex.Numeric,
    decay: chex.Numeric | None = 0.95,
    eps: chex.Numeric = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """DC-ASGD: a first-order Taylor step from the weights of the gradient to the newest ones.

        g <- g + lambda g^2 (w - w_stale)
        s <- m s + (1 - m) g^2,    lambda = lambda_0 / sqrt(s + eps)      adaptive

    The gradient g was computed at the weights w_stale of tau updates ago. At the newest
    weights w it is about g + H (w - w_stale), and lambda g^2 stands for the diagonal of the
    Hessian H. Without delay nothing is changed.

    The stale weights are the extra argument `stale_params` of the update. A pipeline passes
    it, and keeps as many versions of a stage's weights as the stage's delay plus one: memory
    that `pipedream` needs anyway and `pipemare` does not. With several microbatches to an
    update they are the weights of the oldest forward, `delay` updates before the newest;
    later microbatches may have read newer ones. A schedule whose backwards read other
    weights than their forwards has no one gradient, and the stale weights are those of the
    forward.

    The square is that of the averaged gradient of a minibatch, as in the paper. It is an
    estimate of the Hessian for losses that are negative log-likelihoods, near the optimum and
    for small batches.

    Args:
      strength: lambda_0, at least 0; in the paper 2 on CIFAR-10 with the default decay, and 0.04
        constant.
      decay: m, at least 0 and below 1; None: lambda is constant, lambda_0.
      eps: added to the mean of squares, above 0.

    Returns:
      A transformation with a `CompensateDelayState`. It comes first in the chain, before
      momentum and Adam.

    Raises:
      ValueError: if an argument is out of its range. At the update: if there are no weights or
        no stale weights.

    Example:
      >>> optimizer = optax.chain(compensate_delay(0.5, decay=None), optax.sgd(1.0))
      >>> weights, stale = jnp.ones(1), jnp.zeros(1)
      >>> state = optimizer.init(weights)
      >>> optimizer.update(jnp.full(1, 2.0), state, weights, stale_params=stale)[0]
      Array([-4.], dtype=float32)

    References:
      Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017,
      arXiv:1609.08326, DC-ASGD-a and, with `decay=None`, DC-ASGD-c.
    """
    if is_wrong(strength, lambda s: 0 <= s < jnp.inf):
        raise ValueError(f"`strength` must be at least 0, got {shown(strength)}: it multiplies the squared gradient.")
    if decay is not None and is_wrong(decay, lambda m: 0 <= m < 1):
        raise ValueError(
            f"`decay` must be at least 0 and below 1, got {shown(decay)}. Pass None for a constant strength."
        )
    if is_wrong(eps, lambda e: e > 0):
        raise ValueError(f"`eps` must be above 0, got {shown(eps)}.")

    def init(params):
        if decay is None:
            return CompensateDelayState(None)
        return CompensateDelayState(optax.tree.zeros_like(params))

    def update(updates, state, params=None, *, stale_params=None, **extra_args):
        del extra_args
        if params is None or stale_params is None:
            raise ValueError(
                "`compensate_delay` needs the weights, and those that the gradient was computed at: call "
                "`update(gradients, state, params, stale_params=...)`, as a pipeline does."
            )
        mean_square = state.mean_square
        factor = jax.tree.map(lambda g: strength, updates)
        if decay is not None:
            mean_square = jax.tree.map(lambda s, g: decay * s + (1 - decay) * g**2, mean_square, updates)
            factor = jax.tree.map(lambda s: strength / jnp.sqrt(s + eps), mean_square)
            mean_square = optax.tree.cast_like(mean_square, state.mean_square)
        # Optax's masks leave extra arguments as they are, so weights are found by path.
        stale_of = dict(jax.tree.leaves_with_path(stale_params))
        compensated = jax.tree.map_with_path(
            lambda path, g, f, w: g + f * g**2 * (w - stale_of[path]),
            updates,
            factor,
            params,
        )
        compensated = optax.tree.cast_like(compensated, updates)
        return compensated, CompensateDelayState(mean_square)

    return optax.GradientTransformationExtraArgs(init, update)
