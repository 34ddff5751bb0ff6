"""PipeDream's learning rates of stages with several copies."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.delays import NumericTree, as_float, is_wrong, spread


@suggests
def scale_by_copies(copies: NumericTree, first: chex.Numeric = 1) -> optax.GradientTransformation:
    """PipeDream's learning rates: multiplies the updates of a stage by its copies over those of the first stage.

        update <- update * r_s / r_0

    In PipeDream's runtime a stage with r copies updates after r minibatches, by the mean of their gradients, and so
    makes r_0 / r as many updates as the first stage. The factor makes up for that: every stage moves by
    eta / r_0 times the gradient of each minibatch.

    It goes with `jpipe.schedules.pipedream(..., update_every=replicas)`, whose stages update so. Other tables update
    all stages after the same microbatches. There the movement for a microbatch is the same on all stages without this
    transform, and with it stages with more copies move further.

    Args:
      copies: r of each weight, above 0: a number, or a tree with a number for every weight or for a whole branch. In a
        pipeline that is a list with the copies of the stage of each layer.
      first: r_0, the copies of the first stage, above 0.

    Returns:
      A transformation without a state. It goes behind momentum and Adam, next to the learning rate.

    Raises:
      ValueError: if a number is not above 0, or a weight has none.

    Example:
      >>> optimizer = optax.chain(optax.sgd(1.0), scale_by_copies([2, 1], first=2))  # stages with 2 copies and 1
      >>> weights = [jnp.ones(1), jnp.ones(1)]
      >>> optimizer.update(weights, optimizer.init(weights))[0]
      [Array([-1.], dtype=float32), Array([-0.5], dtype=float32)]

    References:
      Narayanan et al., PipeDream, SOSP 2019, arXiv:1806.03377; the factor is that of `get_adjusted_learning_rate` in
      the authors' runtime.
    """
    for path, number in jax.tree.leaves_with_path((copies, first)):
        if is_wrong(number, lambda r: r > 0):
            name = "first" if path[0].idx else f"copies{jax.tree_util.keystr(path[1:])}"
            raise ValueError(f"`{name}` must be above 0, got {shown(number)}: it is a number of copies of a stage.")

    def update(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        del params
        factors = jax.tree.map(lambda r: r / as_float(first), as_float(copies))
        scaled = jax.tree.map(jnp.multiply, updates, spread(factors, updates))
        return optax.tree.cast_like(scaled, updates)

    return optax.with_extra_args_support(optax.stateless(update))
