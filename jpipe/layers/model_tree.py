"""The parameters of layers as users and optimizers see them.

A model that is given as a list of layers is a list with one nested dict per layer. A whole model, which the library has
cut into layers, is its own nested dict: each layer has some leaves of it, at their paths in the model.

A leaf that a loop reads turn by turn, such as the stacked weights of `nn.scan` over blocks, is cut into its turns, so
that each layer has those of its own:

    in a layer       {"kernel": {"[00002 of 12, axis 0]": array [1, ...]}}
    for optimizers   {"kernel": Turns}, a node of the tree with a leaf `[1, ...]` for each turn
    for the user     {"kernel": array [12, ...]}
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from jpipe.layers.layer import Layer

Path = tuple[Any, ...]


class Turn(NamedTuple):
    """A part of a leaf.

    Attributes:
      number: of the turn that reads it.
      of: number of turns.
      axis: of the leaf, along which turns are stacked.
    """

    number: int
    of: int
    axis: int

    @classmethod
    def at(cls, path: Path) -> "Turn | None":
        """The turn that the last key of a path names, if it does."""
        name = getattr(path[-1], "key", None) if path else None
        parts = re.fullmatch(r"\[(\d+) of (\d+), axis (\d+)\]", name) if isinstance(name, str) else None
        return cls(*map(int, parts.groups())) if parts else None

    @property
    def key(self) -> DictKey:
        """Its key in a nested dict."""
        return DictKey(f"[{self.number:05d} of {self.of}, axis {self.axis}]")

    def part(self, leaf: Any) -> Any:
        """The part of a whole leaf, abstract or not, with size 1 along the axis."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = list(leaf.shape)
            shape[self.axis] = 1
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
        rows = (slice(None),) * self.axis + (slice(self.number, self.number + 1),)
        return leaf[rows]


class _TurnKey(SequenceKey):
    """The key of a turn, with the name of the leaf, which functions of paths ask for."""

    def __init__(self, number: int, key: Any):
        super().__init__(number)
        self.key = key


@jax.tree_util.register_pytree_with_keys_class
class Turns:
    """The turns of a leaf on a stage, as a node of a tree.

    Args:
      name: the last key of the path of the leaf.
      turns: their numbers, in order.
      parts: their values.
    """

    def __init__(self, name: str, turns: Sequence[Turn], parts: Sequence[Any]):
        self.name, self.turns, self.parts = name, tuple(turns), tuple(parts)

    def tree_flatten_with_keys(self) -> tuple:
        """The parts with their keys, for JAX."""
        keys = [_TurnKey(turn.number, self.name) for turn in self.turns]
        return tuple(zip(keys, self.parts)), (self.name, self.turns)

    @classmethod
    def tree_unflatten(cls, aux: tuple, parts: Sequence[Any]) -> "Turns":
        """The node with other parts, for JAX."""
        name, turns = aux
        return cls(name, turns, parts)

    def __repr__(self) -> str:
        return f"Turns({self.name!r}, {[turn.number for turn in self.turns]}, {list(self.parts)})"

    def stacked(self) -> Any:
        """The leaf; None if a part is left out."""
        if any(part is None for part in self.parts):
            return None
        numpy = np if all(isinstance(part, np.ndarray) for part in self.parts) else jnp
        return numpy.concatenate(self.parts, self.turns[0].axis)


def whole(tree: Any) -> Any:
    """A tree of `joined` with stacked leaves in the place of their turns."""
    return jax.tree.map(
        lambda a: a.stacked() if isinstance(a, Turns) else a, tree, is_leaf=lambda a: a is None or isinstance(a, Turns)
    )


def is_whole(layers: Sequence[Layer]) -> bool:
    """Whether the layers are segments of a whole model."""
    return bool(layers) and layers[0].options.segment is not None


def num_keys(layers: Sequence[Layer]) -> int:
    """The number of layers that draw from random keys of their own: the segments of a whole model share its key."""
    return 1 if is_whole(layers) else len(layers)


def joined(layers: Sequence[Layer], trees: Sequence[Any] | None, role: str = "parameters") -> Any:
    """The tree of a model from the trees of its layers.

    Args:
      layers: all layers of the model.
      trees: for each layer a tree with the structure of its leaves, or None for layers that are left out; leaves may
        be None too.
      role: the attribute of a layer whose structure the trees have: "parameters" or "state".

    Returns:
      The list; or of a whole model its nested dict, where leaves that are left out are None, and those that are cut
      into turns are `Turns`.
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
    return _with_turns(leaves)


def _with_turns(leaves: Mapping[Path, Any]) -> dict:
    """The nested dict of leaves, with `Turns` for those that are cut."""
    cut: dict[Path, dict[Turn, Any]] = {}
    tree: dict[Path, Any] = {}
    for path, value in leaves.items():
        turn = Turn.at(path)
        if turn is None:
            tree[path] = value
        else:
            cut.setdefault(path[:-1], {})[turn] = value
    for path, parts in cut.items():
        turns = sorted(parts)
        tree[path] = Turns(path[-1].key, turns, [parts[turn] for turn in turns])
    return unflattened(tree.items())


def split(layers: Sequence[Layer], tree: Any, role: str = "parameters") -> Any:
    """The trees of the layers from the tree of a model, the inverse of `joined`; what does not fit is left as it is."""
    if not is_whole(layers):
        return tree
    leaves = dict(jax.tree.leaves_with_path(tree))
    return [picked(getattr(layer, role), leaves) for layer in layers]


def picked(like: Any, leaves: Mapping[Path, Any]) -> dict:
    """The tree with the paths of `like`, of the leaves that there are, and of their turns."""
    chosen: list[tuple[Path, Any]] = []
    for path, _ in jax.tree.leaves_with_path(like):
        turn = Turn.at(path)
        if path in leaves:
            chosen.append((path, leaves[path]))
        elif turn is not None and path[:-1] in leaves:
            leaf = leaves[path[:-1]]
            if np.shape(leaf)[turn.axis : turn.axis + 1] == (turn.of,):
                chosen.append((path, turn.part(leaf)))
    return unflattened(chosen)


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
    return whole(_with_turns(dict(item for tree in trees for item in jax.tree.leaves_with_path(tree))))


def path_text(path: Path) -> str:
    """The dotted path of a leaf in nested dicts."""
    return ".".join(str(key.key) for key in path)


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
