"""The parameters of a model that are trained; all others are frozen."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import filterlib

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean
from jpipe.layers.avals import is_inexact
from jpipe.layers.flax_nnx import as_parameters
from jpipe.layers.layer import Layer
from jpipe.layers.model_tree import Turn, is_whole

Path = tuple[Any, ...]
"""Keys of nested dicts, and numbers of entries of lists."""

_LABELS = {"trainable": True, "frozen": False}
"""Labels that stand for bools, as in Flax's guide to transfer learning."""

_FORMS = (
    "a filter of NNX such as `nnx.LoRAParam` or `nnx.PathContains(...)`, a function `(path, leaf) -> bool`, or a tree "
    "of bools or of such filters with the paths of the parameters"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Trainable:
    """The choice of the parameters that are trained.

    Attributes:
      tree: nested dicts, a prefix of the tree of the model's parameters. The leaves are filters. For a list of layers
        the first keys are the numbers of layers. A filter alone is one for the whole model.
    """

    tree: Any

    @classmethod
    def of(cls, choice: Any, num_layers: int | None) -> "Trainable":
        """The choice that a user gives.

        Args:
          choice: `trainable` of `Pipeline`; None: all parameters.
          num_layers: number of layers, if the model is a list of them.

        Raises:
          ValueError: if it is neither a filter nor a tree of filters.
        """
        if choice is None:
            return ALL
        if num_layers is not None and isinstance(choice, list | tuple):
            if len(choice) != num_layers:
                raise ValueError(
                    f"`trainable` has {len(choice)} entries for {num_layers} layers. Give a list with one entry for "
                    "each layer, or one filter for all: of several `nnx.Any(...)`."
                )
            return cls({i: _as_tree(entry, (i,)) for i, entry in enumerate(choice)})
        return cls(_as_tree(choice))

    def applied(self, layer: Layer, index: int) -> Layer:
        """The layer, bound, with the numbers of its frozen parameters.

        Args:
          layer: the layer.
          index: its number in the model.

        Raises:
          ValueError: if the choice says nothing of a parameter, or a filter fails.
        """
        leaves, paths = jax.tree.leaves(layer.parameters), _paths([layer], index)
        if self is ALL:
            trained = [True] * len(leaves)
        else:
            values = jax.tree.leaves(layer.variables, is_leaf=_is_variable) or leaves
            trained = [self._trains(*path, value) for path, value in zip(paths, values, strict=True)]
        for (_, path), is_trained, leaf in zip(paths, trained, leaves, strict=True):
            if is_trained and not is_inexact(leaf):
                raise ValueError(
                    f"layer {index} ({layer.name}): parameter {_text(path)} has dtype {leaf.dtype}, which has no "
                    "gradient. Freeze it with `trainable`, make it a constant of the layer, or a floating-point "
                    "parameter."
                )
        if self is ALL:
            return layer
        return dataclasses.replace(layer, frozen=tuple(j for j, is_trained in enumerate(trained) if not is_trained))

    def _trains(self, path: Path, path_in_layer: Path, value: Any) -> bool:
        """Returns whether a parameter, an NNX variable or an abstract array, is trained."""
        chosen = self.tree
        for depth, key in enumerate(path):
            entries = _entries(chosen, key)
            if entries is None:
                break
            if key not in entries:
                raise ValueError(
                    f"`trainable` says nothing about the parameter {_text(path)}: there is no entry "
                    f"{_text(path[: depth + 1])} in it, only {_keys(entries)}. Give a bool or a filter for each "
                    "parameter, or for all under a key."
                )
            chosen = entries[key]
        if isinstance(chosen, Mapping):
            raise ValueError(
                f"`trainable` has entries under the parameter {_text(path)}, {_keys(chosen)}, and the parameter is one "
                "array. Give a bool or a filter for it."
            )
        try:
            answer = _label(_predicate(chosen)(path_in_layer, value))
        except Exception as error:
            raise ValueError(
                f"`trainable` fails for the parameter {_text(path)}: {type(error).__name__}: {error}. A function is "
                "called as `trainable(path, leaf)`, with the keys of the path as a tuple, and returns a bool."
            ) from error
        if not isinstance(answer, bool | np.bool_):
            raise ValueError(
                f"`trainable` must return a bool, got {shown(answer)} for the parameter {_text(path)}. It is called as "
                "`trainable(path, leaf)`, with the keys of the path as a tuple."
            )
        return bool(answer)

    def check(self, layers: Sequence[Layer]) -> None:
        """Refuses a choice that names what the model does not have, or trains nothing.

        Args:
          layers: all layers of the model, with the numbers of their frozen parameters.

        Raises:
          ValueError: see above.
        """
        if self is ALL:
            return
        paths = _paths(layers)
        known = {path[:n] for path, _ in paths for n in range(len(path) + 1)}
        if not is_whole(layers):
            known |= {(i,) for i in range(len(layers))}
        listed = f"The parameters are {_listed([path for path, _ in paths])}."
        for path, chosen in _leaves(self.tree, known):
            if path not in known:
                hint = did_you_mean(".".join(map(str, path)), [".".join(map(str, other)) for other in known])
                raise ValueError(f"`trainable` names {_text(path)}, and there is no such parameter.{hint} {listed}")
            for named, holds in _named_paths(chosen):
                if not any(holds(inner, None) for _, inner in paths):
                    hint = did_you_mean(str(named), {str(key) for _, inner in paths for key in inner})
                    raise ValueError(
                        f"`trainable` names {shown(named)}, which is in the path of no parameter.{hint} {listed}"
                    )
        if all(len(layer.frozen) == len(jax.tree.leaves(layer.parameters)) for layer in layers):
            chosen = shown(getattr(self.tree, "__name__", self.tree) if isinstance(self.tree, type) else self.tree)
            raise ValueError(f"`trainable` selects no parameter, got {chosen}. {self._advice(layers)} {listed}")

    def _advice(self, layers: Sequence[Layer]) -> str:
        """What to give in the place of a choice that trains nothing."""
        if isinstance(self.tree, str):
            key = f"`nnx.PathContains({self.tree!r})`"
            return f"A text is a tag of variables: select by a key of the path with {key}."
        if isinstance(self.tree, type):
            variables = [jax.tree.leaves(layer.variables, is_leaf=_is_variable) for layer in layers]
            types = sorted({type(variable).__name__ for variable in itertools.chain(*variables)})
            if types:
                return f"The types of its variables are {', '.join(types)}."
            return "Only the variables of NNX modules have types: select by paths."
        return f"Give {_FORMS}."


ALL = Trainable(True)
"""All parameters are trained."""


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _paths(layers: Sequence[Layer], first: int = 0) -> list[tuple[Path, Path]]:
    """For each parameter of some layers the path in the tree of the model, and the path that filters see.

    All turns of a leaf that a loop reads turn by turn have the path of the leaf.

    Args:
      layers: the layers.
      first: the number of the first of them in the model.
    """
    paths = []
    for i, layer in enumerate(layers, first):
        for keys, _ in jax.tree.leaves_with_path(layer.parameters):
            path = tuple(key.key for key in (keys[:-1] if Turn.at(keys) else keys))
            paths.append((path if is_whole(layers) else (i, *path), path))
    return paths


def _as_tree(choice: Any, path: Path = ()) -> Any:
    """The part of a choice at a path, with dicts in the place of what Flax keeps trees in."""
    choice = as_parameters(choice)
    if isinstance(choice, Mapping):
        return {key: _as_tree(entry, (*path, key)) for key, entry in choice.items()}
    if type(choice) in (list, tuple):
        return [_as_tree(entry, (*path, i)) for i, entry in enumerate(choice)]
    try:
        _predicate(choice)
    except Exception:
        where = f" for {_text(path)}" if path else ""
        raise ValueError(f"`trainable` must be {_FORMS}, got {shown(choice)}{where}.") from None
    return choice


def _entries(chosen: Any, key: Any) -> Mapping | None:
    """The entries of a node of a choice, of which one is `key`; None: it is a filter.

    NNX takes a sequence as the filter "any of these". Where the parameters are in a list, it has an entry for each.
    """
    if isinstance(chosen, list) and isinstance(key, int):
        return dict(enumerate(chosen))
    return chosen if isinstance(chosen, Mapping) else None


def _label(value: Any) -> Any:
    """The bool that a label stands for; others as they are."""
    return _LABELS.get(value, value) if isinstance(value, str) else value


def _predicate(chosen: Any) -> Callable[[Path, Any], Any]:
    """A filter as a function of a path and a variable."""
    chosen = _label(chosen)
    if isinstance(chosen, list) and any(isinstance(_label(entry), bool | np.bool_ | Mapping) for entry in chosen):
        raise ValueError("a list of bools or dicts stands for a list of modules, and this parameter is in none")
    return filterlib.to_predicate(bool(chosen) if isinstance(chosen, np.bool_) else chosen)


def _leaves(tree: Any, known: Collection[Path], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The filters in a choice with their paths, where the parameters have these beginnings of paths."""
    keys = (other[-1] for other in known if other and other[:-1] == path) if isinstance(tree, list) else iter(())
    entries = _entries(tree, next(keys, None))
    if entries is None:
        yield path, tree
        return
    for key, inner in entries.items():
        yield from _leaves(inner, known, (*path, key))


def _named_paths(chosen: Any) -> Iterator[tuple[Any, Callable[[Path, Any], bool]]]:
    """The keys and paths that a filter names, each with the filter that tells whether it is in a path."""
    pending = [_predicate(chosen)]
    while pending:
        predicate = pending.pop()
        if isinstance(predicate, filterlib.PathContains):
            yield predicate.key, predicate
        elif isinstance(predicate, filterlib.PathIn):
            yield from ((path, filterlib.PathIn(path)) for path in predicate.paths)
        elif isinstance(predicate, filterlib.Not):
            pending.append(predicate.predicate)
        elif isinstance(predicate, filterlib.Any | filterlib.All):
            pending += predicate.predicates


def _text(path: Path) -> str:
    """A path in words of a message."""
    return shown(".".join(key if isinstance(key, str) else str(key) for key in path))


def _keys(tree: Mapping) -> str:
    """The keys of a dict."""
    return ", ".join(map(shown, tree)) or "none"


def _listed(paths: Sequence[Path]) -> str:
    """The first of some paths."""
    paths = [*dict.fromkeys(paths)]
    few = ", ".join(map(_text, paths[:6]))
    return f"{few} and {len(paths) - 6} more" if len(paths) > 6 else few
