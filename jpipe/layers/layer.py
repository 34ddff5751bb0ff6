"""The forms in which a user gives a layer, and `Layer`, the form in which the library uses it."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests


@suggests
class Function:
    """A layer without parameters.

    Args:
      function: maps one activation (any pytree of arrays) to the next.

    Raises:
      ValueError: if `function` is not callable.

    Example:
      >>> import jax.numpy as jnp
      >>> Function(jnp.tanh).function is jnp.tanh
      True
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ValueError(f"`jpipe.Function` takes a callable, got {type(function).__name__}.")
        self.function = function


@suggests
class InitApply:
    """A layer given as two functions, as in Haiku, stax and hand-written code.

    Args:
      init: `(key, inputs) -> parameters`, a pytree of dicts of floating-point arrays.
      apply: `(parameters, inputs) -> outputs`.
      name: the layer's name in tables and messages.

    Raises:
      ValueError: if `init` or `apply` is not callable.

    Example:
      >>> dense = InitApply(
      ...     lambda key, x: {"kernel": jax.random.normal(key, (x.shape[-1], 4))},
      ...     lambda parameters, x: x @ parameters["kernel"],
      ... )
    """

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        name: str = "InitApply",
    ) -> None:
        for argument, function in (("init", init), ("apply", apply)):
            if not callable(function):
                raise ValueError(
                    f"`{argument}` of `jpipe.InitApply` must be a function, got {type(function).__name__}."
                )
        self.init, self.apply, self.name = init, apply, name


def _keywords(wrapper: str, **given: Any) -> list[dict[str, Any]]:
    """Keyword arguments of calls, which a user gives as dicts, or None for none."""
    for name, keywords in given.items():
        if not (keywords is None or (isinstance(keywords, Mapping) and all(isinstance(key, str) for key in keywords))):
            raise ValueError(
                f"`{name}` of `jpipe.{wrapper}` must be a dict of keyword arguments of the module's call, such as "
                f'`{{"deterministic": True}}`, or None, got {shown(keywords)}.'
            )
    return [dict(keywords or {}) for keywords in given.values()]


@suggests
class Linen:
    """A Flax Linen module as a layer, with further arguments of its call.

    A module whose `__call__` takes only the activation needs no `Linen` around it. Collections
    other than "params" are mutable state. `nn.BatchNorm` is recognised at any depth of the module.

    Args:
      module: the module.
      train: keyword arguments of the call in training, such as `{"train": True}`.
      evaluate: keyword arguments of the call in evaluation.
      rngs: names of the module's random streams. In evaluation they always begin alike, as those of NNX modules do.

    Raises:
      ValueError: if `module` is not a Linen module.

    Example:
      >>> import flax.linen as nn
      >>> layer = Linen(
      ...     nn.Dropout(0.1), train={"deterministic": False}, evaluate={"deterministic": True}
      ... )
    """

    def __init__(
        self,
        module: linen.Module,
        *,
        train: Mapping[str, Any] | None = None,
        evaluate: Mapping[str, Any] | None = None,
        rngs: Sequence[str] = ("dropout",),
    ) -> None:
        if not isinstance(module, linen.Module):
            raise ValueError(
                f"`jpipe.Linen` takes a Flax Linen module, got {type(module).__name__}. NNX modules need no wrapper."
            )
        self.module = module
        self.train, self.evaluate = _keywords("Linen", train=train, evaluate=evaluate)
        self.rngs = (rngs,) if isinstance(rngs, str) else tuple(rngs)


@suggests
class NNX:
    """A Flax NNX module, or a factory of one, with further arguments of its call.

    A module whose `__call__` takes only the activation, or entries of the batch, needs no `NNX` around it.

    Args:
      layer: the module, or a factory called as `factory(rngs=...)`.
      train: keyword arguments of the call in training, such as `{"deterministic": False}`.
      evaluate: keyword arguments of the call in evaluation.

    Raises:
      ValueError: if `layer` is neither.

    Example:
      >>> from flax import nnx
      >>> layer = NNX(
      ...     nnx.Dropout(0.1, rngs=nnx.Rngs(0)), train={"deterministic": False}, evaluate={"deterministic": True}
      ... )
    """

    def __init__(
        self,
        layer: nnx.Module | Callable[..., Any],
        *,
        train: Mapping[str, Any] | None = None,
        evaluate: Mapping[str, Any] | None = None,
    ) -> None:
        if not (isinstance(layer, nnx.Module) or callable(layer)):
            raise ValueError(
                f"`jpipe.NNX` takes a Flax NNX module or a factory of one, got {type(layer).__name__}. Linen modules "
                "are given as `jpipe.Linen`."
            )
        self.layer = layer
        self.train, self.evaluate = _keywords("NNX", train=train, evaluate=evaluate)


@dataclasses.dataclass(frozen=True)
class Skip:
    """The result of `skip`: a layer, and the names of the tensors that it stashes and pops."""

    layer: Any
    stash: tuple[str, ...]
    pop: tuple[str, ...]


@suggests
def skip(layer: Any, *, stash: str | Sequence[str] = (), pop: str | Sequence[str] = ()) -> Skip:
    """A layer with a skip connection to a later layer, or from an earlier layer.

    The tensors go directly from the stage that stashes them to the stage that pops them, and their
    gradients go directly back. The stages between do not receive them. Every name is stashed once.
    Any number of later layers may pop it: each stage that reads the tensor receives it once, from the
    reader before it, and the gradients of all readers are summed on the way back.

    Args:
      layer: anything that may be given as a layer. With `pop` it is called as
        `layer(inputs, *popped)`. With `stash` it returns `(outputs, *stashed)`. Both are in the
        order of the names.
      stash: the name, or names, of the tensors that the layer stashes; any pytrees of arrays.
      pop: the name, or names, of the tensors that the layer pops.

    Returns:
      A layer for `Pipeline`.

    Raises:
      ValueError: if neither is given, or a name is not a string.

    Example:
      >>> import jax.numpy as jnp
      >>> down = skip(Function(lambda x: (x[..., ::2], x)), stash="fine")
      >>> up = skip(Function(lambda x, fine: jnp.repeat(x, 2, -1) + fine), pop="fine")

    References:
      Kim et al., "torchgpipe", arXiv:2004.09910, section 3.3 (portals).
    """
    names = {"stash": _names(stash, "stash"), "pop": _names(pop, "pop")}
    if not any(names.values()):
        raise ValueError(
            "`jpipe.skip` needs `stash=` or `pop=`: the names of the tensors that the layer stashes or pops."
        )
    return Skip(layer, **names)


def _names(names: str | Sequence[str], argument: str) -> tuple[str, ...]:
    """One name or several as a tuple."""
    several = not isinstance(names, str) and hasattr(names, "__iter__")
    result: tuple = tuple(names) if several else (names,)
    for name in result:
        if not isinstance(name, str):
            raise ValueError(f"`{argument}` must be a name or several, got {shown(name)} in {shown(result)}.")
    return result


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The user's statements about a layer, beside the layer itself. All of them hold for the bound layer too.

    Attributes:
      stash, pop: names of the skip connections that start and end at the layer.
      segment: of a segment of a whole model the mark of the place at its end, see `jpipe.segments.places.CutPlace`;
        its parameters and state have the paths of the model. None: the layer is a model of its own.
    """

    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()
    segment: tuple | None = None

    @property
    def without_names(self) -> "LayerOptions":
        """The options without those that do not change the program of the layer: the names of skips."""
        stash, pop = ("",) * len(self.stash), ("",) * len(self.pop)
        return dataclasses.replace(self, stash=stash, pop=pop, segment=None)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as pure functions of parameters, mutable state, a random key and its arguments.

    The arguments `args` are `(inputs, *popped)`.

    Attributes:
      name: the layer's name in tables and messages.
      parameters: nested dict of abstract arrays; None before `bind`.
      state: nested dict of abstract arrays, the mutable state.
      train: `(parameters, state, key, args) -> (outputs, state)`, as the layer does it outside of a pipeline.
      evaluate: `(parameters, state, args) -> outputs`.
      init: `key -> (parameters, state)`, or None if the user gave a module with its weights.
      given: the parameters and state of a module given with its weights, or None.
      bind: `args -> Layer`, for layers whose parameters depend on the shape of their inputs, or
        None.
      options: the user's statements about the layer, beside it.
      frozen: numbers of the parameters that are not trained, ascending.
      variables: nested dict with the structure of `parameters`, of the NNX variables; empty of other layers.
      specs: nested dict with the structure of `parameters`: a `PartitionSpec` of the names of each
        parameter's dims, logical names or axes of the mesh, from Flax metadata (`with_partitioning` of NNX or
        Linen, `with_logical_partitioning`). Empty if nothing is named.
      alike: two layers with equal `alike` compute the same from the same arrays. None equals
        nothing.
      has_batch_norm: whether the layer normalises over the rows of a microbatch.
      note: a sentence that ends every error message about this layer.
      call: the function that the user's model is, for its signature; None: it takes one argument.
    """

    name: str
    parameters: Any
    state: Any
    train: Callable[..., Any]
    evaluate: Callable[..., Any]
    init: Callable[[jax.Array], Any] | None = None
    given: Any = None
    bind: Callable[[tuple], "Layer"] | None = None
    options: LayerOptions = LayerOptions()
    frozen: tuple[int, ...] = ()
    variables: Any = dataclasses.field(default_factory=dict, compare=False)
    specs: Any = dataclasses.field(default_factory=dict)
    alike: Hashable = None
    has_batch_norm: bool = False
    note: str = ""
    call: Callable[..., Any] | None = None

    def bound(self, args: tuple) -> "Layer":
        """The layer with the parameters that it has for the abstract `args`."""
        if self.bind is None:
            return self
        return dataclasses.replace(self.bind(args), options=self.options)

    @property
    def trained(self) -> Any:
        """`parameters`, with None in the place of those that are frozen."""
        leaves, tree = jax.tree.flatten(self.parameters)
        return tree.unflatten([None if j in self.frozen else leaf for j, leaf in enumerate(leaves)])

    @property
    def stash(self) -> tuple[str, ...]:
        """Names of the skip connections that start at the layer."""
        return self.options.stash

    @property
    def pop(self) -> tuple[str, ...]:
        """Names of the skip connections that end at the layer."""
        return self.options.pop

    def outputs(self, returned: Any) -> tuple:
        """The value that the layer's function returned, as `(outputs, *stashed)`."""
        if not self.stash:
            return (returned,)
        if not isinstance(returned, tuple) or len(returned) != 1 + len(self.stash):
            got = f"{len(returned)}" if isinstance(returned, tuple) else "one value"
            raise ValueError(
                f"it stashes {', '.join(self.stash)}, so it must return a tuple of "
                f"{1 + len(self.stash)}, its outputs and the stashed tensors, got {got}."
            )
        return returned


def passing_on(layer: Layer, positions: tuple[int, ...]) -> Layer:
    """Returns `layer`, which also stashes popped tensors again, after what it stashes itself.

    Args:
      layer: the layer, with the names that it stashes itself.
      positions: positions of those tensors among the tensors that the layer pops. Empty: the layer as it is.
    """
    if not positions:
        return layer

    def kept(args: tuple) -> list:
        # A copy of the containers, for a layer may change those that it takes.
        return [jax.tree.map(lambda a: a, args[1 + j]) for j in positions]

    def train(parameters: Any, state: Any, key: jax.Array, args: tuple) -> tuple[tuple, Any]:
        passed = kept(args)
        returned, state = layer.train(parameters, state, key, args)
        return (*layer.outputs(returned), *passed), state

    def evaluate(parameters: Any, state: Any, args: tuple) -> tuple:
        passed = kept(args)
        return (*layer.outputs(layer.evaluate(parameters, state, args)), *passed)

    return dataclasses.replace(
        layer,
        train=train,
        evaluate=evaluate,
        bind=None if layer.bind is None else lambda args: passing_on(layer.bound(args), positions),
        alike=None if layer.alike is None else (layer.alike, "passes on", positions),
    )


def run_in_order(layers: Sequence[Layer], inputs: Any, call: Callable[[int, tuple], Sequence]) -> Any:
    """Runs layers one after the other, with their skip connections.

    Args:
      layers: the layers.
      inputs: the inputs of the first layer.
      call: `(number of a layer, args) -> (outputs, *stashed)`.

    Returns:
      The outputs of the last layer.
    """
    outputs, skips = inputs, dict[str, Any]()
    for i, layer in enumerate(layers):
        args = (outputs, *(skips.pop(name) for name in layer.pop))
        outputs, *stashed = call(i, args)
        skips |= zip(layer.stash, stashed, strict=True)
    return outputs


def check_leaves(parameters: Any, state: Any, name: str, index: int) -> None:
    """Raises `ValueError` if a leaf has a dtype that parameters, or mutable state, cannot have."""
    layer = f"layer {index} ({name})"
    for role, tree in (("parameter", parameters), ("mutable state", state)):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if 0 in leaf.shape:
                raise ValueError(
                    f"{layer}: {role} {jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, and there is nothing "
                    "to train or to keep in an array without elements. Leave it out."
                )
    for path, leaf in jax.tree.leaves_with_path(state):
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"{layer}: mutable state {jax.tree_util.keystr(path)} has dtype {leaf.dtype}, and state "
                "must hold numbers. NNX keeps random keys in `nnx.Rngs`."
            )
