"""The loss of a pipeline's model as one function, without a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jpipe.layers.layer import Layer
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
      loss: of the pipeline.
      ties: `(layer, leaf)` of the copies of each tied weight; all take the value of the first.
      mutable_state: one nested dict per layer, which stays as it is.
      key: of random draws; they are others than those of a pipeline.
    """

    def value(params: Sequence, batch: Any) -> jax.Array:
        params = list(params)
        for (i, j), *copies in ties:
            shared = jax.tree.leaves(params[i])[j]
            for k, n in copies:
                leaves, tree = jax.tree.flatten(params[k])
                leaves[n] = shared
                params[k] = tree.unflatten(leaves)
        kept: dict[str, Any] = {}
        outputs = batch["inputs"]
        with collect() as reported:
            for i, layer in enumerate(layers):
                args = outputs, *(kept.pop(name) for name in layer.pop)
                of_layer = jax.random.fold_in(key, i)
                returned, _ = layer.train(params[i], mutable_state[i], of_layer, args)
                outputs, *stashed = layer.outputs(returned)
                kept.update(zip(layer.stash, stashed, strict=True))
        of_loss = jax.random.fold_in(key, len(layers))
        found, _ = loss.terms(outputs, batch, reported, of_loss).mean()
        return found

    return value
