"""Mutable state of integers and truth values, such as a count of steps.

Every microbatch of a minibatch begins with the state that the last minibatch left. Floating-point
state then becomes the mean over the microbatches, which has no meaning for integers. Integer state
has one meaning if all microbatches leave the same value: if the new value depends on the old state
alone. The new value is then computed from the old state, once per minibatch, so a count that a
layer increments in each call counts minibatches. All other integer state is refused.
"""

import dataclasses
from typing import Any

import jax

from jpipe.layers.avals import is_inexact
from jpipe.layers.equations import Equations, contains
from jpipe.layers.layer import Layer


@dataclasses.dataclass(frozen=True)
class IntegerUpdate:
    """The update of a layer's integer state.

    Attributes:
      equations: from all leaves of the state to the new values of its integer leaves.
      positions: of the integer leaves in the state.
    """

    equations: Equations
    positions: tuple[int, ...]

    def __call__(self, old: list, new: list) -> list:
        """The leaves `new`, the integer leaves computed from the leaves `old`."""
        values = dict(zip(self.positions, self.equations(*old), strict=True))
        return [values.get(i, leaf) for i, leaf in enumerate(new)]


def integer_update(
    layer: Layer, index: int, key_data: Any, key_impl: Any, args: tuple
) -> IntegerUpdate | None:
    """The update of the integer state of a layer, or None if all its state is inexact.

    Args:
      layer: the layer, bound to its arguments.
      index: its position, for messages.
      key_data: abstract data of the layer's random key.
      key_impl: the key's implementation.
      args: abstract arguments.

    Raises:
      ValueError: if a new value depends on more than the old state.
    """
    leaves = jax.tree.leaves_with_path(layer.state)
    integer = [i for i, (_, leaf) in enumerate(leaves) if not is_inexact(leaf)]
    if not integer:
        return None
    avals, tree = jax.tree.flatten((layer.state, layer.parameters, key_data, args))

    def after(*values: jax.Array) -> list:
        state, parameters, key_data, args = tree.unflatten(values)
        key = jax.random.wrap_key_data(key_data, impl=key_impl)
        _, statistics = layer.train(parameters, state, key, args)
        new = jax.tree.leaves(statistics)
        return [new[i].astype(leaves[i][1].dtype) for i in integer]

    equations = Equations.trace(after, *avals)
    state = equations.inputs[: len(leaves)]
    varying = equations.depending_on(equations.inputs[len(leaves) :])
    for i, output in zip(integer, equations.outputs, strict=True):
        if contains(varying, output):
            path, leaf = leaves[i]
            raise ValueError(
                f"layer {index} ({layer.name}): mutable state {jax.tree_util.keystr(path)} has dtype "
                f"{leaf.dtype}, and its new value depends on more than the old state. The microbatches "
                "of a minibatch then leave different values, and a mean of integers has no meaning. "
                "Make it float32, which becomes the mean over the microbatches, or change it by "
                "the state alone, such as `count + 1`, which counts minibatches."
            )
    return IntegerUpdate(equations.slice(state, equations.outputs), tuple(integer))
