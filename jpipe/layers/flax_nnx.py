"""Layers given as Flax NNX modules, or as factories of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jpipe.layers.avals import abstract
from jpipe.layers.call_arguments import call_with
from jpipe.layers.flow import Flow
from jpipe.layers.layer import Layer, check_leaves
from jpipe.layers.mesh_free import NO_MESH
from jpipe.layers.report import collect
from jpipe.layers.sameness import sameness

Path = tuple[Any, ...]


class NotAModuleError(ValueError):
    """A factory returned something else than an NNX module."""


def make_module(make: Callable[..., Any], key: jax.Array) -> nnx.Module:
    """The module that a factory makes from a random key.

    Raises:
      NotAModuleError: if the factory returns anything but an NNX module.
    """
    # Flax would split annotated parameters at creation, which needs a mesh in the context.
    with nnx.use_eager_sharding(False):
        module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise NotAModuleError(f"the factory must return a Flax NNX module, got {type(module).__name__}.")
    return module


Parts = tuple[nnx.GraphDef, nnx.State]
"""A module as `nnx.split` returns it."""


def abstract_parts(
    make: Callable[..., Any],
) -> tuple[Parts, Callable[[jax.Array], list]]:
    """Traces a factory: the parts of the abstract module, and a function from a random key to the leaves of its
    `nnx.State`.

    An abstract module cannot be split: of the values inside of a pytree, Flax takes only arrays out.

    It contains a jitted function: JAX traces the factory here, and uses this trace again where weights are made.

    Raises:
      NotAModuleError: see `make_module`.
    """
    forms = []

    @jax.jit
    def traced(key: jax.Array) -> list:
        graph, state = nnx.split(make_module(make, key))
        leaves, tree = jax.tree.flatten(state)
        forms.append((graph, tree))
        return leaves

    def leaves(key: jax.Array) -> list:
        # Flax would look for the names of dims on a mesh of the user's.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return traced(key)

    avals = jax.eval_shape(leaves, jax.eval_shape(jax.random.key, 0))
    graph, tree = forms[0]
    return (graph, tree.unflatten(avals)), leaves


def as_parameters(values: Any) -> Any:
    """The parameters of one layer as nested dicts of arrays, whatever Flax keeps them in.

    Args:
      values: an `nnx.State` such as `nnx.state(module)`, an NNX module, a Linen `FrozenDict`, or
        nested dicts. Variables of an `nnx.State` that are not parameters are left out.

    Returns:
      Nested dicts; anything else as it is.

    Example:
      >>> module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> jax.tree.map(jnp.shape, as_parameters(nnx.state(module)))
      {'bias': (3,), 'kernel': (2, 3)}
    """
    return _as_dicts(values, "parameters")


def as_mutable_state(values: Any) -> Any:
    """The mutable state of one layer as nested dicts of arrays, like `as_parameters`."""
    return _as_dicts(values, "state")


def _as_dicts(values: Any, role: str) -> Any:
    if isinstance(values, nnx.Module):
        values = nnx.state(values)
    if isinstance(values, FrozenDict):
        return values.unfreeze()
    if not isinstance(values, nnx.State):
        return values
    flat = {tuple(path): v for path, v in nnx.to_flat_state(values)}
    chosen = {
        path: v.get_value() if isinstance(v, nnx.Variable) else v
        for path, v in flat.items()
        if not isinstance(v, nnx.Variable) or _role(v) == role
    }
    return unflatten_dict(chosen)


def from_nnx(
    parts: Parts,
    leaves: Callable[[jax.Array], list] | None,
    index: int,
    train_with: Mapping[str, Any],
    evaluate_with: Mapping[str, Any],
) -> Layer:
    """The `Layer` of an NNX module.

    Args:
      parts: the parts of the module; abstract ones if `leaves` is given.
      leaves: makes the leaves of the module's `nnx.State` from a random key; None: the module holds them.
      index: the layer's position, for messages.
      train_with, evaluate_with: keyword arguments of the call.
    """
    module = nnx.merge(*parts)
    name = type(module).__name__
    variables = _Variables(parts, name, index)

    def called(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple[Any, nnx.Module]:
        """The outputs of the module in training, and the module after the call."""
        module = variables.merge(parameters, state, key)
        _train_where_open(module)
        return call_with(module, args, **train_with), module

    def train(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple[Any, Any]:
        outputs, module = called(parameters, state, key, args)
        if variables.may_write(module, parameters):
            check_writes(parameters, state, key, args)
        return outputs, variables.with_role(module, "state")

    def check_writes(*given: Any) -> None:
        """Refuses a module that writes to its parameters. Those that a lifted transform hands back are not written."""
        leaves, tree = jax.tree.flatten(given)

        def parameters_after(*values: jax.Array) -> list:
            with collect():  # what this call reports counts nowhere
                _, module = called(*tree.unflatten(values))
            return jax.tree.leaves(variables.with_role(module, "parameters"))

        flow = Flow.of(parameters_after, *abstract(leaves))
        for j, (path, _) in enumerate(jax.tree.leaves_with_path(given[0])):
            if flow.source(j) != j:
                raise ValueError(
                    f"it writes to its own parameter {jax.tree_util.keystr(path)} in a call. A pipeline changes "
                    "parameters by the optimizer alone, once per minibatch. Compute the new value in the call and do "
                    "not write it, keep it in another kind of `nnx.Variable`, or constrain the weights in the Optax "
                    "chain."
                )

    def evaluate(parameters: Any, state: Any, args: tuple) -> Any:
        module = variables.merge(parameters, state, jax.random.key(0))
        module.eval()
        return call_with(module, args, **evaluate_with)

    parameters, state = abstract(variables.by_role(variables.leaves))
    check_leaves(parameters, state, name, index)
    return Layer(
        name,
        parameters,
        state,
        train,
        evaluate,
        init=None if leaves is None else lambda key: variables.by_role(leaves(key)),
        given=jax.tree.map(np.asarray, variables.by_role(variables.leaves)) if leaves is None else None,
        specs=variables.specs(),
        variables=variables.parameters(),
        alike=sameness((variables.graph, dict(train_with), dict(evaluate_with))),
        call=functools.partial(module.__call__, **train_with) if callable(module) else None,
        has_batch_norm=any(
            isinstance(part, nnx.BatchNorm) and not part.use_running_average for _, part in nnx.iter_graph(module)
        ),
    )


def _train_where_open(module: nnx.Module) -> None:
    """Training mode where nobody chose a mode.

    A module that the user put into evaluation mode stays in it, as in plain Flax: `eval()`, `deterministic=True`,
    `use_running_average=True`.
    """
    for _, part in nnx.iter_graph(module):
        for name in ("deterministic", "use_running_average"):
            if isinstance(part, nnx.Module) and getattr(part, name, False) is None:
                setattr(part, name, False)


class _Variables:
    """The variables of a module: which are parameters, state, or random keys and counts.

    Attributes:
      graph: the module without its arrays.
      leaves: the arrays, in the order of `role_of`.
      role_of: path of each variable -> "parameters", "state" or "random", in Flax's order.
    """

    def __init__(self, parts: Parts, name: str, index: int) -> None:
        self.graph, self._whole = parts
        self.leaves, self._tree = jax.tree.flatten(self._whole)
        variables = [(tuple(path), v) for path, v in nnx.to_flat_state(self._whole)]
        for path, v in variables:
            held = jax.tree.leaves(v)
            if len(held) != 1:
                raise ValueError(
                    f"layer {index} ({name}): every variable must hold one array, and {'.'.join(map(str, path))!r} "
                    f"holds {len(held)}. Give each array a variable of its own, such as in an `nnx.Dict` or `nnx.List`."
                )
        self.role_of: dict[Path, str] = {path: _role(v) for path, v in variables}
        self._keys = [path for path, v in variables if isinstance(v, nnx.RngKey)]
        self._leaf_of = {path: leaf for (path, _), leaf in zip(variables, self.leaves)}
        self._variable_of = dict(variables)

    def merge(self, parameters: Any, state: Any, key: jax.Array) -> nnx.Module:
        """The module with these values; its random streams begin anew from `key`."""
        values = {**flatten_dict(parameters), **flatten_dict(state)}
        for path, role in self.role_of.items():
            if role == "random" and path not in self._keys:  # counts of the streams
                leaf = self._leaf_of[path]
                values[path] = jnp.zeros(leaf.shape, leaf.dtype)
        for i, path in enumerate(self._keys):
            stream = jax.random.fold_in(key, i)
            shape = self._leaf_of[path].shape
            values[path] = jax.random.split(stream, shape) if shape else stream
        leaves = [values[path] for path in self.role_of]
        return nnx.merge(self.graph, self._tree.unflatten(leaves))

    def by_role(self, leaves: Sequence) -> tuple[dict, dict]:
        """The parameters and the state among the leaves of a module, as nested dicts."""
        values = dict(zip(self.role_of, leaves, strict=True))
        return self._with_role(values, "parameters"), self._with_role(values, "state")

    def with_role(self, module: nnx.Module, role: str) -> dict:
        """The parameters or the state of a module after a call, which may have added variables."""
        after = {tuple(path): v for path, v in nnx.to_flat_state(nnx.state(module))}
        paths = [path for path, other in self.role_of.items() if other == role]
        return unflatten_dict({path: after[path][...] for path in paths})

    def may_write(self, module: nnx.Module, parameters: Any) -> bool:
        """Returns whether a call may have written to parameters: they are other objects than those that the module was
        given.
        """
        after = jax.tree.leaves(self.with_role(module, "parameters"))
        return any(a is not b for a, b in zip(after, jax.tree.leaves(parameters), strict=True))

    def parameters(self) -> dict:
        """The variables that are parameters, in a nested dict."""
        return self._with_role(self._variable_of, "parameters")

    def specs(self) -> dict:
        """The names of the dims of each parameter as a `PartitionSpec`, in a nested dict."""
        # Rules of the surroundings are those of the pipeline, which knows the shapes. A parameter's own come first.
        with nnx.logical_axis_rules(()):
            specs = jax.tree.leaves(
                nnx.get_partition_spec(self._whole),
                is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
            )
        return self._with_role(dict(zip(self.role_of, specs, strict=True)), "parameters")

    def _with_role(self, values: Mapping[Path, Any], role: str) -> dict:
        chosen = {p: value for p, value in values.items() if self.role_of[p] == role}
        return unflatten_dict(chosen)


def _role(variable: nnx.Variable) -> str:
    if isinstance(variable, nnx.Param):
        return "parameters"
    return "random" if isinstance(variable, nnx.RngState) else "state"
