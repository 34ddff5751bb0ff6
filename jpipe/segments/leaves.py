"""The leaves of a whole model, some of them cut into the turns of a loop."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jpipe.layers.layer import Layer
from jpipe.layers.model_tree import Path, Turn, unflattened
from jpipe.segments.turns import turns_of


class ModelLeaves(NamedTuple):
    """The leaves of a model, parameters and then state.

    Attributes:
      paths: path of each leaf.
      values: abstract arrays.
      given: the values that the user gave, or None.
      specs: names of dims, see `Layer`; None if nothing is named.
      variables: NNX variables, see `Layer`; None if the model has none.
      cut: cuts lists of values of a model into their turns.
    """

    paths: tuple[list[Path], list[Path]]
    values: tuple[list, list]
    given: tuple[list, list] | None
    specs: list | None
    variables: list | None
    cut: Callable[[tuple[list, list]], tuple[list, list]] = lambda lists: lists

    @classmethod
    def of(cls, model: Layer) -> "ModelLeaves":
        """The leaves of a bound model."""
        trees = model.parameters, model.state
        paths, unnamed = ([p for p, _ in jax.tree.leaves_with_path(tree)] for tree in trees)
        specs = jax.tree.leaves(model.specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        given = None if model.given is None else _lists(model.given)
        variables = jax.tree.leaves(model.variables, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        return cls((paths, unnamed), _lists(trees), given, specs or None, variables or None)

    def in_turns(self, parameters: Mapping[int, int], state: Mapping[int, int]) -> "ModelLeaves":
        """The leaves, some of them cut into their turns: number of a leaf -> axis."""
        axes = parameters, state
        turns = [
            {i: turns_of(values[i], axis) for i, axis in role_axes.items()}
            for values, role_axes in zip(self.values, axes)
        ]
        cut = functools.partial(_cut_leaves, turns)
        paths, unnamed = (
            [
                path
                for i, whole in enumerate(role_paths)
                for path in ([(*whole, turn.key) for turn in role_turns[i]] if i in role_turns else [whole])
            ]
            for role_paths, role_turns in zip(self.paths, turns)
        )
        specs = None
        if self.specs is not None:
            specs = [spec for i, spec in enumerate(self.specs) for spec in _specs_of_turns(spec, turns[0].get(i))]
        variables = None
        if self.variables is not None:
            variables = [v for i, v in enumerate(self.variables) for _ in turns[0].get(i, [None])]
        given = None if self.given is None else cut(self.given)
        return ModelLeaves((paths, unnamed), cut(self.values), given, specs, variables, cut)

    def leaves(self, trees: tuple[Any, Any]) -> tuple[list, list]:
        """The leaves of the parameters and the state of the model."""
        return self.cut(_lists(trees))

    def chosen(self, leaves: Sequence, role: int, numbers: Sequence[int]) -> dict:
        """Some of the leaves of a role, as a nested dict."""
        return unflattened((self.paths[role][i], leaves[i]) for i in numbers)


def _cut_leaves(turns: Sequence[Mapping[int, list[Turn]]], lists: tuple[list, list]) -> tuple[list, list]:
    """The parts of the leaves that have turns, and the others as they are."""
    first, second = (
        [part for i, leaf in enumerate(leaves) for part in ([t.part(leaf) for t in of[i]] if i in of else [leaf])]
        for leaves, of in zip(lists, turns)
    )
    return first, second


def _specs_of_turns(spec: PartitionSpec, turns: Sequence[Turn] | None) -> list[PartitionSpec]:
    """The names of the dims of each turn of a leaf: a turn has one row."""
    if turns is None:
        return [spec]
    return [PartitionSpec(*(None if dim == turn.axis else name for dim, name in enumerate(spec))) for turn in turns]


def _lists(trees: tuple[Any, Any]) -> tuple[list, list]:
    parameters, state = map(jax.tree.leaves, trees)
    return parameters, state
