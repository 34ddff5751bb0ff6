"""The numbers that `optax.inject_hyperparams` keeps in the state of an optimizer: their names and first values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jpipe.layers.equations import Equations, contains

_PATH = re.compile(r"(?P<owner>.*)\.hyperparams\['(?P<name>[^']*)'\]")


class Hyperparam(NamedTuple):
    """One injected hyperparameter.

    Attributes:
      name: name for the user: the name of the number, or its path if several have this name.
      path: path in the optimizer's state.
      is_scheduled: whether a function of the count of updates computes it.
    """

    name: str
    path: str
    is_scheduled: bool


def hyperparams(paths: Sequence[str]) -> list[Hyperparam]:
    """The injected hyperparameters among the leaves of an optimizer's state.

    Args:
      paths: the paths of the leaves, as `jax.tree_util.keystr` writes them.

    Example:
      >>> hyperparams([".count", ".hyperparams['learning_rate']", ".inner_state[0].mu"])
      [Hyperparam(name='learning_rate', path=".hyperparams['learning_rate']", is_scheduled=False)]
    """
    matches = [match for match in map(_PATH.fullmatch, paths) if match]
    names = [match["name"] for match in matches]

    def is_scheduled(match: re.Match) -> bool:
        states = f"{match['owner']}.hyperparams_states['{match['name']}']"
        return any(path.startswith(states) for path in paths)

    return [
        Hyperparam(
            match["name"] if names.count(match["name"]) == 1 else match.string,
            match.string,
            is_scheduled(match),
        )
        for match in matches
    ]


def first_values(optimizer: optax.GradientTransformation, parameters: Any) -> Mapping[str, np.ndarray]:
    """Path -> first value of a hyperparameter, for those that are not scheduled.

    Args:
      optimizer: the optimizer.
      parameters: abstract parameters, as for its `init`.
    """
    leaves, tree = jax.tree.flatten(parameters)
    shapes = jax.tree.leaves_with_path(jax.eval_shape(optimizer.init, parameters))
    paths = [jax.tree_util.keystr(path) for path, _ in shapes]
    wanted = [h.path for h in hyperparams(paths) if not h.is_scheduled]
    if not wanted:
        return {}

    def init(*leaves: jax.Array) -> list:
        return jax.tree.leaves(optimizer.init(tree.unflatten(leaves)))

    program = Equations.trace(init, *leaves)
    values = {}
    for path in wanted:
        output = [program.outputs[paths.index(path)]]
        hyperparam_program = program.slice(program.inputs, output)
        if any(contains(hyperparam_program.read(), v) for v in program.inputs):
            continue  # it depends on the weights
        (value,) = hyperparam_program.slice((), output)()
        values[path] = np.asarray(value)
    return values
