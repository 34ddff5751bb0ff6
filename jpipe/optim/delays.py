"""Delays as the transforms take them: one number for all weights, or a tree with a number for each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def is_wrong(value, right: Callable) -> bool:
    """Whether `value` is not as `right` wants it; what is being traced is not known to be wrong."""
    return not isinstance(value, jax.core.Tracer) and not right(np.asarray(value))


def check_delay(delay: Any, name: str = "delay") -> None:
    """Raises ValueError unless `delay` is a number of updates, at least 0, or a tree of such."""
    for path, number in jax.tree.leaves_with_path(delay):
        is_number = isinstance(number, (int, float, np.number, np.ndarray, jax.Array))
        if (
            not is_number
            or np.ndim(number)
            or is_wrong(number, lambda n: 0 <= n < np.inf)
        ):
            raise ValueError(
                f"`{name}{jax.tree_util.keystr(path)}` must be a number of updates, at least 0, got {number!r}."
            )


def given_delay(delay: Any, extra_args: dict, transform: str) -> Any:
    """The delay that `transform` was made with, or else the extra argument `delay`.

    Raises:
      ValueError: if there is neither, or it is negative.
    """
    if delay is None:
        delay = extra_args.get("delay")
    if delay is None:
        raise ValueError(
            f"`{transform}` needs a delay, got none. Give it one, `{transform}(..., delay=4)`, or update with "
            "`optimizer.update(grads, state, params, delay=4)`, as a pipeline does on each stage."
        )
    check_delay(delay)
    return delay


def as_float(delay: Any) -> Any:
    """`delay` in JAX's default precision, so that no number of low precision rounds it."""
    return jax.tree.map(lambda number: jnp.asarray(number, float), delay)


def by_path(numbers: Any):
    """A function from the path of a weight to its number in `numbers`, which covers all weights below its own path."""
    found = dict(jax.tree.leaves_with_path(numbers))

    def number(path):
        for length in range(len(path) + 1):
            if path[:length] in found:
                return found[path[:length]]
        places = ", ".join(map(jax.tree_util.keystr, found)) or "nothing"
        raise ValueError(
            f"`delay` must be one number, or a tree with a number for every weight or for a whole branch: got {places}, "
            f"which leaves out {jax.tree_util.keystr(path)}."
        )

    return number


def spread(numbers: Any, tree: Any) -> Any:
    """`numbers` in the structure of `tree`: what is absent from `tree`, None or masked, needs none."""
    number = by_path(numbers)
    return jax.tree.map_with_path(lambda path, _: number(path), tree)


def find_states(optimizer_state: Any, kind: type, transform: str) -> list:
    """The states of `kind` anywhere in `optimizer_state`.

    Raises:
      ValueError: if there is none.
    """

    def is_kind(node):
        return isinstance(node, kind)

    nodes = jax.tree.leaves(optimizer_state, is_leaf=is_kind)
    found = [node for node in nodes if is_kind(node)]
    if not found:
        raise ValueError(
            f"`optimizer_state` holds no state of `{transform}`, got a {type(optimizer_state).__name__}: put "
            f"`jpipe.optim.{transform}` into the optimizer, and give the state that its `init` or `update` returned."
        )
    return found


def move(params: Any, directions: list, distance: Any) -> Any:
    """`params + distance * direction`, weight by weight, in the dtype of `params`.

    Args:
      params: weights.
      directions: trees as `params` with parts masked. A weight that none of them has stays as it is.
      distance: one number, or a tree of them.

    Raises:
      ValueError: if a weight has two directions, or a direction no weight.
    """
    found: dict = {}
    for path, direction in (
        pair for tree in directions for pair in jax.tree.leaves_with_path(tree)
    ):
        if path in found:
            raise ValueError(
                f"`optimizer_state` has params{jax.tree_util.keystr(path)} in two transforms of the same kind. Keep one."
            )
        found[path] = direction
    number = by_path(distance)

    def moved(path, weight):
        if path not in found:
            return weight
        return weight + number(path) * found.pop(path)

    after = jax.tree.map_with_path(moved, params)
    if found:
        raise ValueError(
            f"`optimizer_state` is not of these `params`, which have no {jax.tree_util.keystr(next(iter(found)))}."
        )
    return optax.tree.cast_like(after, params)
