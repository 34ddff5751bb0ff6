"""Delays of transforms: one number for all weights, or a tree with a number for each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe._util.foreign import shown

NumericTree: TypeAlias = chex.Numeric | Iterable["NumericTree"] | Mapping[Any, "NumericTree"]
"""One number, or a tree with a number for every weight or for a whole branch."""


def is_wrong(value: Any, is_right: Callable) -> bool:
    """Returns whether `is_right(value)` is false. A traced value has no number, so it passes."""
    return not isinstance(value, jax.core.Tracer) and not is_right(np.asarray(value))


def check_delay(delay: Any, name: str = "delay") -> None:
    """Raises ValueError unless `delay` is a number of at least 0, or a tree of them."""
    for path, number in jax.tree.leaves_with_path(delay):
        is_number = isinstance(number, (int, float, np.number, np.ndarray, jax.Array))
        if not is_number or np.ndim(number) or is_wrong(number, lambda n: 0 <= n < np.inf):
            raise ValueError(
                f"`{name}{jax.tree_util.keystr(path)}` must be a number of updates, at least 0, got {shown(number)}."
            )


def delay_of(delay: Any, extra_args: dict, transform: str) -> Any:
    """The delay of an update: the one of `transform`, or else the extra argument `delay`.

    Args:
      delay: the delay that `transform` was made with, or None.
      extra_args: the extra arguments of the update.
      transform: the name of the transform.

    Raises:
      ValueError: if there is neither, or it is negative.
    """
    if delay is None:
        delay = extra_args.get("delay")
    if delay is None:
        raise ValueError(
            f"`{transform}` needs a delay, got none. Pass `{transform}(..., delay=4)`, or "
            "`optimizer.update(grads, state, params, delay=4)`, as a pipeline does on each "
            "stage."
        )
    check_delay(delay)
    return delay


def as_float(delay: Any) -> Any:
    """`delay` in JAX's default precision, so that weights of low precision do not round it."""
    return jax.tree.map(lambda number: jnp.asarray(number, float), delay)


def by_path(numbers: Any) -> Callable[[tuple], Any]:
    """A function from the path of a weight to its number.

    Args:
      numbers: a tree. A number is for all weights below its path.
    """
    number_of = dict(jax.tree.leaves_with_path(numbers))

    def number(path: tuple) -> Any:
        for length in range(len(path) + 1):
            if path[:length] in number_of:
                return number_of[path[:length]]
        paths = ", ".join(map(jax.tree_util.keystr, number_of)) or "nothing"
        raise ValueError(
            "`delay` must be one number, or a tree with a number for every weight or for a "
            f"whole branch: got {paths}, which leaves out {jax.tree_util.keystr(path)}."
        )

    return number


def spread(numbers: Any, tree: Any) -> Any:
    """`numbers` in the structure of `tree`. Leaves that are None or masked need none."""
    number = by_path(numbers)
    return jax.tree.map_with_path(lambda path, _: number(path), tree)


def find_states(optimizer_state: Any, kind: type, transform: str) -> list:
    """The states of type `kind` anywhere in `optimizer_state`.

    Raises:
      ValueError: if there is none. The message names `transform`.
    """

    def is_kind(node):
        return isinstance(node, kind)

    nodes = jax.tree.leaves(optimizer_state, is_leaf=is_kind)
    states = [node for node in nodes if is_kind(node)]
    if not states:
        raise ValueError(
            f"`optimizer_state` holds no state of `{transform}`, got a "
            f"{type(optimizer_state).__name__}. Put `jpipe.optim.{transform}` into the "
            "optimizer, and pass the state that its `init` or `update` returned."
        )
    return states


def move(params: Any, directions: list, distance: Any) -> Any:
    """`params + distance * direction`, weight by weight, in the dtype of `params`.

    Args:
      params: weights.
      directions: trees like `params`, parts of them masked. A weight without a direction
        stays as it is.
      distance: one number, or a tree of them.

    Raises:
      ValueError: if a weight has two directions, or a direction has no weight.
    """
    remaining: dict = {}
    for path, direction in (pair for tree in directions for pair in jax.tree.leaves_with_path(tree)):
        if path in remaining:
            raise ValueError(
                f"`optimizer_state` has params{jax.tree_util.keystr(path)} in two transforms "
                "of the same kind. Keep one."
            )
        remaining[path] = direction
    number = by_path(distance)

    def moved(path, weight):
        if path not in remaining:
            return weight
        return weight + number(path) * remaining.pop(path)

    after = jax.tree.map_with_path(moved, params)
    if remaining:
        raise ValueError(
            f"`optimizer_state` is not of these `params`, which have no {jax.tree_util.keystr(next(iter(remaining)))}."
        )
    return optax.tree.cast_like(after, params)
