"""The largest learning rate at which late gradients are stable: lemma 1 of PipeMare, and the curvature that it
needs.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.delays import check_delay


@suggests
def largest_stable_rate(curvature: Any, delay: Any, momentum: float = 0.0, nesterov: bool = False) -> Any:
    """The largest learning rate at which gradient descent with late gradients is stable.

        alpha = 2 / lambda * sin(pi / (4 tau + 2))

    On the quadratic `lambda w^2 / 2` the weights follow
    `w_{t+1} = w_t - alpha lambda w_{t-tau}`, and every root of
    `x^(tau + 1) - x^tau + alpha lambda` has at most absolute value 1 up to this alpha. It
    falls from 2 / lambda without delay to about pi / (2 tau lambda).

    With momentum, `v <- m v + g` and a step along v, or with Nesterov's along g + m v, the
    polynomial is

        (x - 1) (x - m) x^tau + alpha lambda x               plain
        (x - 1) (x - m) x^tau + alpha lambda ((1 + m) x - m)   Nesterov

    and alpha, up to which all roots stay inside, is found by bisection. It is exact for a
    quadratic with the same delay everywhere. For a model it is a local estimate. Adam's mean
    of gradients is momentum at the rate `(1 - b1) alpha`, along directions that are divided
    by the root of its second moment: see `scale` of `largest_curvature`.

    Args:
      curvature: lambda, above 0: the largest eigenvalue of the loss's Hessian.
      delay: tau in updates, at least 0, and whole: between reading weights and applying their
        gradient.
      momentum: m, at least 0 and below 1.
      nesterov: whether the momentum is Nesterov's.

    Returns:
      alpha, a float, or an array if the curvature or the delay is one.

    Raises:
      ValueError: if the curvature is not above 0, a delay is not a whole number of at least 0,
        or `momentum` is out of its range.

    Example:
      >>> largest_stable_rate(curvature=2.0, delay=0)
      1.0
      >>> largest_stable_rate(1.0, np.array([8, 1, 0])).round(4)
      array([0.1845, 1.    , 2.    ])
      >>> round(largest_stable_rate(1.0, 0, momentum=0.9), 4)  # 2 (1 + m)
      3.8

    References:
      Yang et al., PipeMare, MLSys 2021, arXiv:1910.05124, lemma 1. For Adam: Cohen et al., Adaptive
      gradient methods at the edge of stability, 2022, arXiv:2207.14484.
    """
    if not (np.all(np.asarray(curvature) > 0) and np.all(np.isfinite(curvature))):
        raise ValueError(
            f"`curvature` must be above 0, got {shown(curvature)}: where the loss does not curve upwards, no learning "
            "rate is too large for lemma 1."
        )
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` must be at least 0 and below 1, got {shown(momentum)}.")
    try:
        delays = np.asarray(delay, float)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"`delay` must be a number of updates or an array of them, got {shown(delay)}.") from None
    for number in delays.ravel():
        check_delay(float(number))
        if number != int(number):
            raise ValueError(
                f"`delay` must be a whole number of updates, got {shown(number)}: lemma 1 is about one delay. Take the "
                "largest."
            )
    if momentum:
        largest = {tau: _bisected(int(tau), momentum, nesterov) for tau in {*delays.flat}}
        scaled = np.vectorize(largest.get, otypes=[float])(delays)
    else:
        scaled = 2 * np.sin(math.pi / (4 * delays + 2))
    rate = np.asarray(scaled / np.asarray(curvature, float))
    return float(rate) if rate.ndim == 0 else rate


def _bisected(tau: int, m: float, nesterov: bool) -> float:
    """The rate up to which no root of the polynomial with momentum leaves the circle, for a curvature of 1."""
    polynomial = np.zeros(tau + 3)
    polynomial[:3] = 1, -(1 + m), m

    def is_stable(rate: float) -> bool:
        late = [0, (1 + m) * rate, -m * rate] if nesterov else [0, rate, 0]
        shifted = polynomial.copy()
        shifted[-3:] += late
        return np.abs(np.roots(shifted)).max() <= 1

    # Without delay the bound is 2 (1 + m), or less; a delay lowers it.
    lower, upper = 0.0, 2 * (1 + m)
    while upper - lower > 1e-9 * upper:
        middle = (lower + upper) / 2
        lower, upper = (middle, upper) if is_stable(middle) else (lower, middle)
    return lower


@suggests
def largest_curvature(
    loss: Callable[[Any], jax.Array],
    params: Any,
    key: jax.Array,
    max_iterations: int = 50,
    tolerance: float = 1e-3,
    scale: Any = None,
) -> tuple[float, int]:
    """The largest eigenvalue of the Hessian, by power iteration.

    Every iteration is a product of the Hessian with a vector, which costs about as much as
    two gradients and keeps no Hessian. The iteration finds the eigenvalue of largest absolute
    value. If that is negative, a second iteration on the Hessian less that eigenvalue finds
    the largest one.

    Args:
      loss: a function of the weights to a number, differentiable twice.
      params: the weights.
      key: seeds the first vector.
      max_iterations: the most products of an iteration, at least 1.
      tolerance: an iteration ends when its estimate changes by less than this part of it.
      scale: a tree like `params` of positive numbers d, by which an optimizer multiplies
        gradients: the curvature is that of diag(d)^(1/2) H diag(d)^(1/2), which decides what
        rate is stable. For Adam d is 1 / (sqrt(v) + eps). None: 1.

    Returns:
      The eigenvalue, and the number of products. It is a Rayleigh quotient, so the largest
      eigenvalue is at least as large.

    Raises:
      ValueError: if `max_iterations` is below 1, `params` holds no numbers, or the Hessian has
        values that are not finite.

    Example:
      >>> curvature, _ = largest_curvature(
      ...     lambda w: jnp.sum(jnp.array([1.0, 5.0]) * w**2) / 2, jnp.ones(2), jax.random.key(0)
      ... )
      >>> round(curvature, 3)
      5.0
    """
    if max_iterations < 1:
        raise ValueError(
            f"`max_iterations` must be at least 1, got {shown(max_iterations)}: each is a product of the Hessian with "
            "a vector."
        )
    leaves, tree = jax.tree.flatten(params)
    if not leaves:
        raise ValueError(
            "`params` has no weights, so there is no curvature. Pass the weights that the loss depends on."
        )

    roots = None if scale is None else jax.tree.map(jnp.sqrt, scale)

    def scaled(vector: Any) -> Any:
        if roots is None:
            return vector
        return jax.tree.map(lambda v, d: v * d.astype(v.dtype), vector, roots)

    @jax.jit
    def product(vector: Any, shift: Any) -> tuple[jax.Array, Any]:
        """The Rayleigh quotient of the Hessian, and the shifted Hessian times the vector, with norm 1."""
        _, hessian = jax.jvp(jax.grad(loss), (params,), (scaled(vector),))
        hessian = scaled(hessian)
        shifted = jax.tree.map(lambda h, v: h + shift * v, hessian, vector)
        return optax.tree.vdot(vector, hessian), _with_norm_1(shifted)

    keys = jax.random.split(key, len(leaves))
    normal = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    start = _with_norm_1(tree.unflatten(normal))

    def iterate(shift: float) -> tuple[float, int]:
        vector, estimate, iteration = start, math.inf, 0
        while iteration < max_iterations:
            iteration += 1
            before = estimate
            quotient, vector = product(vector, shift)
            estimate = float(quotient)
            if not math.isfinite(estimate):
                raise ValueError(
                    "the curvature is not finite: the loss or a derivative of it has infinities or NaN at these "
                    "weights. Compute in float32, and check the loss."
                )
            if abs(estimate - before) <= tolerance * abs(estimate):
                break
        return estimate, iteration

    estimate, count = iterate(0.0)
    if estimate < 0:
        estimate, further = iterate(-estimate)
        count += further
    return estimate, count


def _with_norm_1(vector: Any) -> Any:
    """A vector divided by its norm; zero stays zero."""
    norm = optax.tree.norm(vector)
    scale = jnp.where(norm > 0, norm, 1)
    return jax.tree.map(lambda v: v / scale.astype(v.dtype), vector)
