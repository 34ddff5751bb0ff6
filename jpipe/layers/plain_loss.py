"""The loss of a pipeline's model as one function, without a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.layers.layer import Layer, run_in_order
from jpipe.layers.loss import Loss
from jpipe.layers.report import collect


def plain_loss(
    layers: Sequence[Layer],
    loss: Loss,
    ties: Sequence[Sequence[tuple[int, int]]],
    mutable_state: Sequence,
    key: jax.Array,
) -> Callable[[Sequence, Any], jax.Array]:
    """`(params, batch) -> loss`: the layers in training mode one after the other on the whole batch.

    Args:
      layers: bound to the shapes of a batch.
      loss: the loss of the pipeline.
      ties: `(layer, leaf)` of the copies of each tied weight; all take the value of the first.
      mutable_state: one nested dict per layer, which stays as it is.
      key: the key of random draws, which differ from those of a pipeline.
    """

    def value(params: Sequence, batch: Any) -> jax.Array:
        params = list(params)
        for (i, j), *copies in ties:
            shared = jax.tree.leaves(params[i])[j]
            for k, n in copies:
                leaves, tree = jax.tree.flatten(params[k])
                leaves[n] = shared
                params[k] = tree.unflatten(leaves)

        def call(i: int, args: tuple) -> tuple:
            layer_key = jax.random.fold_in(key, i)
            state = jax.tree.map(jnp.asarray, mutable_state[i])  # a call may write to it
            outputs, _ = layers[i].train(params[i], state, layer_key, args)
            return layers[i].outputs(outputs)

        with collect() as reported:
            outputs = run_in_order(layers, batch["inputs"], call)
        loss_key = jax.random.fold_in(key, len(layers))
        mean, _ = loss.terms(outputs, batch, reported, loss_key).mean()
        return mean

    return value
