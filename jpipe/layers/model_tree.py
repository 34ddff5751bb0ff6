"""The parameters of layers as users and optimizers see them.

A model that is given as a list of layers is a list with one nested dict per layer. A whole model, which the library has
cut into layers, is its own nested dict: each layer has some leaves of it, at their paths in the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import SequenceKey

from jpipe.layers.layer import Layer

Path = tuple[Any, ...]


def is_whole(layers: Sequence[Layer]) -> bool:
    """Whether the layers are segments of a whole model."""
    return bool(layers) and layers[0].options.segment is not None


def joined(layers: Sequence[Layer], trees: Sequence[Any] | None, role: str = "parameters") -> Any:
    """The tree of a model from the trees of its layers.

    Args:
      layers: all layers of the model.
      trees: for each layer a tree with the structure of its leaves, or None for layers that are left out; leaves may
        be None too.
      role: the attribute of a layer whose structure the trees have: "parameters" or "state".

    Returns:
      The list; or of a whole model its nested dict, where leaves that are left out are None.
    """
    if trees is None or not is_whole(layers):
        return trees
    leaves: dict[Path, Any] = {}
    for layer, tree in zip(layers, trees, strict=True):
        like = jax.tree.leaves_with_path(getattr(layer, role))
        values = [None] * len(like) if tree is None else jax.tree.leaves(tree, is_leaf=lambda a: a is None)
        for (path, _), value in zip(like, values, strict=True):
            if leaves.get(path) is None:
                leaves[path] = value
    return unflattened(leaves.items())


def split(layers: Sequence[Layer], tree: Any, role: str = "parameters") -> Any:
    """The trees of the layers from the tree of a model, the inverse of `joined`; what does not fit is left as it is."""
    if not is_whole(layers):
        return tree
    leaves = dict(jax.tree.leaves_with_path(tree))
    return [picked(getattr(layer, role), leaves) for layer in layers]


def picked(like: Any, leaves: Mapping[Path, Any]) -> dict:
    """The tree with the paths of `like`, of the leaves that there are."""
    return unflattened((path, leaves[path]) for path, _ in jax.tree.leaves_with_path(like) if path in leaves)


def per_layer(layers: Sequence[Layer], given: Any, as_dicts: Callable[[Any], Any], role: str = "parameters") -> Any:
    """What a user gives as the parameters, or the state, of a model, as one nested dict per layer.

    Args:
      layers: of the model.
      given: a list, or the tree of a whole model; None: None.
      as_dicts: makes nested dicts of what Flax keeps leaves in.
      role: as of `joined`.

    Raises:
      ValueError: if a list is given for a whole model.
    """
    if is_whole(layers) and given is not None:
        if isinstance(given, list | tuple):
            raise ValueError(
                f"the {role} of a whole model are one nested dict with its paths, got a {type(given).__name__} of "
                f"{len(given)}. Pass what `get_params` or `get_mutable_state` returned, or an NNX module or state."
            )
        return split(layers, as_dicts(given), role)
    return [as_dicts(values) for values in given] if isinstance(given, Sequence) else given


def merged(trees: Iterable[Any]) -> dict:
    """The tree of a whole model from the trees of its segments, without layers."""
    return unflattened(item for tree in trees for item in jax.tree.leaves_with_path(tree))


def path_in_model(layers: Sequence[Layer], layer: int, path: Path) -> Path:
    """The path of a parameter of a layer in the tree of the model."""
    return path if is_whole(layers) else (SequenceKey(layer), *path)


def unflattened(leaves: Iterable[tuple[Path, Any]]) -> dict:
    """Nested dicts from paths of dict keys."""
    tree: dict = {}
    for path, leaf in leaves:
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key.key, {})
        inner[path[-1].key] = leaf
    return tree
