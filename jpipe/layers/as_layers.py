"""What may be given as a layer, read into one form.

Flax NNX modules and their factories, Flax Linen modules, `(init, apply)` pairs and plain functions all become
a `Layer`: pure functions of parameters, mutable state, a key and the activation.

Mutable state follows torchgpipe's deferred batch norm: a microbatch is normalised by its own statistics, and
running statistics move once a minibatch, as if it had been seen whole. So training returns *statistics*, which
are averaged over the microbatches, and `commit` moves the state by their mean.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jpipe.layers.backward import is_inexact


class Function:
    """A layer without parameters.

    Args:
      function: maps one activation (any pytree of arrays) to the next.
    Example:
      >>> import jax.numpy as jnp
      >>> Function(jnp.tanh).function is jnp.tanh
      True
    """

    def __init__(self, function: Callable[..., Any]):
        if not callable(function):
            raise ValueError(
                f"`jpipe.Function` takes a callable, got {type(function).__name__}."
            )
        self.function = function


class InitApply:
    """A layer given as a pair of functions, as Haiku, stax and hand-written code have it.

    Args:
      init: `(key, inputs) -> parameters`, a pytree of dicts of floating-point arrays.
      apply: `(parameters, inputs) -> outputs`.
      name: for tables and messages.
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
    ):
        for what, function in (("init", init), ("apply", apply)):
            if not callable(function):
                raise ValueError(
                    f"`{what}` of `jpipe.InitApply` must be a function, got {type(function).__name__}."
                )
        self.init, self.apply, self.name = init, apply, name


class Linen:
    """A Flax Linen module as a layer, where it needs more than its input.

    A module whose `__call__` takes the activation alone can be given as it is. Collections other than "params" are
    mutable state; `nn.BatchNorm` is recognised wherever it is called.

    Args:
      module: the module.
      train: keyword arguments of its call in training, such as `{"train": True}`.
      evaluate: the same in evaluation.
      rngs: the names of its random streams in training.
    Example:
      >>> import flax.linen as nn
      >>> layer = Linen(nn.Dropout(0.1), train={"deterministic": False}, evaluate={"deterministic": True})
    """

    def __init__(
        self,
        module: linen.Module,
        *,
        train: Mapping[str, Any] | None = None,
        evaluate: Mapping[str, Any] | None = None,
        rngs: Sequence[str] = ("dropout",),
    ):
        if not isinstance(module, linen.Module):
            raise ValueError(
                f"`jpipe.Linen` takes a Flax Linen module, got {type(module).__name__}. NNX modules are given as they are."
            )
        self.module = module
        self.train, self.evaluate = dict(train or {}), dict(evaluate or {})
        self.rngs = (rngs,) if isinstance(rngs, str) else tuple(rngs)


@dataclasses.dataclass(frozen=True)
class Skip:
    """What `skip` returns: a layer, and what it stashes and pops."""

    layer: Any
    stash: tuple[str, ...]
    pop: tuple[str, ...]


def skip(
    layer: Any, *, stash: str | Sequence[str] = (), pop: str | Sequence[str] = ()
) -> Skip:
    """A layer with a skip connection past the layers after it, or from layers before it.

    The tensors go straight from the stage that stashes them to the stage that pops them, and their gradients back;
    the stages between never see them. A name is stashed once and popped once.

    Args:
      layer: whatever may be given as a layer. With `pop` it is called as `layer(inputs, *popped)`, with `stash` it
        returns `(outputs, *stashed)`, both in the order of the names.
      stash: the name, or names, of what it puts aside; any pytrees of arrays.
      pop: the name, or names, of what it takes up again.

    Raises:
      ValueError: if neither is given, or a name is not a string.

    Example:
      >>> import jax.numpy as jnp
      >>> down = skip(Function(lambda x: (x[..., ::2], x)), stash="fine")
      >>> up = skip(Function(lambda x, fine: jnp.repeat(x, 2, -1) + fine), pop="fine")

    References:
      Kim et al., "torchgpipe", arXiv:2004.09910, section 3.3 (portals).
    """
    names = {}
    for what, given in (("stash", stash), ("pop", pop)):
        several = not isinstance(given, str) and hasattr(given, "__iter__")
        names[what] = given = tuple(given) if several else (given,)
        for name in given:
            if not isinstance(name, str):
                raise ValueError(
                    f"`{what}` must be a name or several, got {name!r} in {given}."
                )
    if not any(names.values()):
        raise ValueError(
            "`jpipe.skip` needs `stash=` or `pop=`: the name of what the layer puts aside or takes up."
        )
    return Skip(layer, **names)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer, whatever it was given as. `args` is `(inputs, *popped)`.

    Attributes:
      name: for tables and messages.
      parameters: nested dict of abstract arrays; None before `bind`.
      state: nested dict of abstract arrays: the mutable state.
      train: `(parameters, state, key, args) -> (outputs, statistics)`; statistics are shaped like the state.
      evaluate: `(parameters, state, args) -> outputs`.
      commit: `(state, statistics) -> state`, the statistics averaged over a minibatch.
      init: `key -> (parameters, state)`, or None if the layer came with its weights.
      given: the parameters and state it came with, or None.
      bind: `args -> Layer` for layers whose parameters depend on the shape of their inputs, else None.
      stash, pop: names of the skips that start and end here.
      specs: nested dict like `parameters`, of the `PartitionSpec` that Flax metadata gives each: `with_partitioning`
        of NNX or Linen. Empty if nothing is split.
      alike: layers whose `alike` are equal compute the same from the same arrays; None is like no other.
    """

    name: str
    parameters: Any
    state: Any
    train: Callable
    evaluate: Callable
    commit: Callable = lambda state, statistics: state
    init: Callable[[jax.Array], Any] | None = None
    given: Any = None
    bind: Callable[[tuple], "Layer"] | None = None
    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()
    specs: Any = dataclasses.field(default_factory=dict)
    alike: Hashable = None

    def bound(self, args: tuple) -> "Layer":
        """The layer for abstract `args`, its parameters known."""
        if self.bind is None:
            return self
        return dataclasses.replace(self.bind(args), stash=self.stash, pop=self.pop)

    def outputs(self, returned: Any) -> tuple:
        """What its function returned, as `(outputs, *stashed)`."""
        if not self.stash:
            return (returned,)
        if not isinstance(returned, tuple) or len(returned) != 1 + len(self.stash):
            got = f"{len(returned)}" if isinstance(returned, tuple) else "one value"
            raise ValueError(
                f"it stashes {', '.join(self.stash)}, so it must return a tuple of {1 + len(self.stash)}, its outputs "
                f"and what it stashes, got {got}."
            )
        return returned


def as_layers(layers: Sequence) -> list[Layer]:
    """Checks what the user gave and reads each layer's parameters, without making any."""
    if callable(layers) or not hasattr(layers, "__len__"):
        raise ValueError(
            f"`layers` must be a sequence of layers, got {type(layers).__name__}: a pipeline cuts a model between "
            "layers. Give them as a list, in order."
        )
    if not len(layers):
        raise ValueError("`layers` must hold at least one layer, got none.")
    read = [_as_layer(layer, i) for i, layer in enumerate(layers)]
    _check_skips(read)
    return read


def shared_weights(layers: Sequence) -> list[list[tuple[int, str]]]:
    """Ties between modules that hold the same variable: each a list of `(layer, "dotted.path")`."""
    found: dict[int, list[tuple[int, str]]] = {}
    variable_of: dict[int, nnx.Variable] = {}
    for i, layer in enumerate(layers):
        layer = layer.layer if isinstance(layer, Skip) else layer
        parts = nnx.iter_graph(layer) if isinstance(layer, nnx.Module) else ()
        for path, part in parts:
            if isinstance(part, nnx.Variable):
                variable_of[id(part)] = part
                at = (i, ".".join(map(str, path)))
                found.setdefault(id(part), []).append(at)
    ties = [places for places in found.values() if len(places) > 1]
    for key, places in found.items():
        if len(places) > 1 and not isinstance(variable_of[key], nnx.Param):
            (first, path), (second, _) = places[:2]
            raise ValueError(
                f"layers {first} and {second} share {path!r}, a {type(variable_of[key]).__name__}: only parameters can "
                "be shared between layers. Give each layer its own."
            )
    return ties


def _check_skips(layers: Sequence[Layer]) -> None:
    """Every name is stashed once and then popped once."""
    stashed: dict[str, int] = {}
    popped: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for name in layer.pop:
            if name in popped:
                raise ValueError(
                    f"layer {i} ({layer.name}) pops {name!r}, which layer {popped[name]} popped already. Stash it "
                    "under two names."
                )
            if name not in stashed:
                later = [j for j, other in enumerate(layers) if name in other.stash]
                when = f"only layer {later[0]} does" if later else "no layer does"
                known = ", ".join(repr(n) for n in stashed if n not in popped)
                raise ValueError(
                    f"layer {i} ({layer.name}) pops {name!r}, which no layer before it stashes: {when}. Stashed and "
                    f"not popped before it: {known or 'nothing'}."
                )
            popped[name] = i
        for name in layer.stash:
            if name in stashed:
                raise ValueError(
                    f"layer {i} ({layer.name}) stashes {name!r}, which layer {stashed[name]} stashed already. Give "
                    "each skip a name of its own."
                )
            stashed[name] = i
    for name in stashed:
        if name not in popped:
            raise ValueError(
                f"layer {stashed[name]} ({layers[stashed[name]].name}) stashes {name!r}, which no layer pops. Pop it "
                'with `jpipe.skip(layer, pop="...")`, or leave it out.'
            )


def _as_layer(layer, index: int) -> Layer:
    if isinstance(layer, Skip):
        inner = _as_layer(layer.layer, index)
        return dataclasses.replace(inner, stash=layer.stash, pop=layer.pop)
    if isinstance(layer, Function):
        return _from_function(layer)
    if isinstance(layer, InitApply):
        return _from_pair(layer, index)
    if isinstance(layer, linen.Module):
        layer = Linen(layer)
    if isinstance(layer, Linen):
        return _from_linen(layer, index)
    if isinstance(layer, nnx.Module):
        return _from_nnx(layer, None, index)
    if not callable(layer):
        raise ValueError(
            f"layer {index} must be a Flax module, a factory called as `factory(rngs=...)`, a `jpipe.InitApply`, or "
            f"`jpipe.Function(f)` for a layer without parameters, got {type(layer).__name__}."
        )
    try:
        module = nnx.eval_shape(lambda: _called(layer, jax.random.key(0)))
    except ValueError as error:
        raise ValueError(f"layer {index}: {error}") from None
    except Exception as error:
        raise ValueError(
            f"layer {index} could not be built by `factory(rngs=...)`: {error}. A "
            "function of the activation is given as `jpipe.Function(f)`."
        ) from error
    return _from_nnx(module, layer, index)


def _called(make: Callable, key: jax.Array) -> nnx.Module:
    # Flax would split annotated parameters as they are made, for which it wants the mesh in a context.
    with nnx.use_eager_sharding(False):
        module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"the factory must return a Flax NNX module, got {type(module).__name__}."
        )
    return module


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def _check_inexact(tree: Any, what: str, remedy: str) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_inexact(leaf):
            raise ValueError(
                f"{what} {jax.tree_util.keystr(path)} has dtype {leaf.dtype}, {remedy}"
            )


def _check_leaves(parameters: Any, state: Any, name: str, index: int) -> None:
    _check_inexact(
        parameters,
        f"layer {index} ({name}): parameter",
        "which has no gradient. Make it a constant of the layer, or a floating-point parameter.",
    )
    _check_inexact(
        state,
        f"layer {index} ({name}): mutable state",
        "and only floating-point state can be averaged over the microbatches of a minibatch. Keep counters outside the layer.",
    )


# -- Functions and pairs


def _from_function(layer: Function) -> Layer:
    return Layer(
        getattr(layer.function, "__name__", "function"),
        {},
        {},
        train=lambda parameters, state, key, args: (layer.function(*args), {}),
        evaluate=lambda parameters, state, args: layer.function(*args),
        init=lambda key: ({}, {}),
    )


def _from_pair(layer: InitApply, index: int) -> Layer:
    unbound = Layer(
        layer.name,
        None,
        {},
        train=lambda parameters, state, key, args: (layer.apply(parameters, *args), {}),
        evaluate=lambda parameters, state, args: layer.apply(parameters, *args),
    )

    def bind(args):
        def init(key):
            return layer.init(key, *_zeros(args))

        try:
            parameters = _abstract(jax.eval_shape(init, jax.random.key(0)))
        except Exception as error:
            raise ValueError(
                f"layer {index} ({layer.name}): `init(key, inputs)` failed: {error}"
            ) from error
        _check_leaves(parameters, {}, layer.name, index)
        return dataclasses.replace(
            unbound, parameters=parameters, init=lambda key: (init(key), {}), bind=None
        )

    return dataclasses.replace(unbound, bind=bind)


def _zeros(args: tuple) -> tuple:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), args)


# -- Batch norm: momentum is set to 0 while a layer runs, so that what it leaves behind are the microbatch's own
# statistics. Those of a minibatch follow from the means of mean and of variance + mean^2.


def _to_statistics(state: dict, momenta: Mapping[tuple, float]) -> dict:
    """What one microbatch left in the state, in a form whose mean over microbatches means something."""
    flat = flatten_dict(state)
    for path in momenta:
        mean, variance = flat[*path, "mean"], flat[*path, "var"]
        flat[*path, "var"] = variance + jnp.square(mean)
    return unflatten_dict(flat)


def _commit(state: dict, statistics: dict, momenta: Mapping[tuple, float]) -> dict:
    """The state after a minibatch: running statistics decayed once, other state as its microbatches left it."""
    old, new = flatten_dict(state), flatten_dict(statistics)
    for path, momentum in momenta.items():
        mean, second = new[*path, "mean"], new[*path, "var"]
        of_minibatch = {
            "mean": mean,
            "var": jnp.maximum(second - jnp.square(mean), 0),
        }
        for name, value in of_minibatch.items():
            kept = old[*path, name]
            new[*path, name] = momentum * kept + (1 - momentum) * value
    return unflatten_dict(new)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


# -- Flax NNX


def _from_nnx(module: nnx.Module, make: Callable | None, index: int) -> Layer:
    name = type(module).__name__
    graph, whole = nnx.split(module)
    leaves, tree = jax.tree.flatten(whole)
    variables = [(tuple(path), v) for path, v in nnx.to_flat_state(whole)]
    if len(variables) != len(leaves):
        raise ValueError(f"layer {index} ({name}): every variable must hold one array.")
    role_of = {
        path: "parameters"
        if isinstance(v, nnx.Param)
        else "random"
        if isinstance(v, nnx.RngState)
        else "state"
        for path, v in variables
    }
    keys = [path for path, v in variables if isinstance(v, nnx.RngKey)]
    shape_of = {path: leaf for (path, _), leaf in zip(variables, leaves)}
    momenta = {
        tuple(path): part.momentum
        for path, part in nnx.iter_graph(module)
        if isinstance(part, nnx.BatchNorm)
    }

    def with_role(values: Mapping[tuple, Any], role: str) -> dict:
        return unflatten_dict({p: v for p, v in values.items() if role_of[p] == role})

    def merged(parameters, state, key) -> nnx.Module:
        values = {**flatten_dict(parameters), **flatten_dict(state)}
        for path, role in role_of.items():
            if role == "random" and path not in keys:  # the counts of the streams
                values[path] = jnp.zeros(shape_of[path].shape, shape_of[path].dtype)
        for i, path in enumerate(keys):
            mine = jax.random.fold_in(key, i)
            shape = shape_of[path].shape
            values[path] = jax.random.split(mine, shape) if shape else mine
        return nnx.merge(graph, tree.unflatten([values[path] for path in role_of]))

    def train(parameters, state, key, args):
        module = merged(parameters, state, key)
        module.train()
        for _, part in nnx.iter_graph(module):
            if isinstance(part, nnx.BatchNorm):
                part.momentum = 0.0
        outputs = module(*args)
        if not state:
            return outputs, {}
        after = {tuple(p): v for p, v in nnx.to_flat_state(nnx.state(module))}
        left = {p: after[p][...] for p, role in role_of.items() if role == "state"}
        return outputs, _to_statistics(unflatten_dict(left), momenta)

    def evaluate(parameters, state, args):
        module = merged(parameters, state, jax.random.key(0))
        module.eval()
        return module(*args)

    def roles(module: nnx.Module) -> tuple[dict, dict]:
        _, whole = nnx.split(module)
        values = dict(zip(role_of, jax.tree.leaves(whole), strict=True))
        return with_role(values, "parameters"), with_role(values, "state")

    split = jax.tree.leaves(nnx.get_partition_spec(whole), is_leaf=_is_spec)
    parameters, state = _abstract(roles(module))
    _check_leaves(parameters, state, name, index)
    return Layer(
        name,
        parameters,
        state,
        train,
        evaluate,
        commit=lambda state, statistics: _commit(state, statistics, momenta),
        init=None if make is None else lambda key: roles(_called(make, key)),
        given=jax.tree.map(np.asarray, roles(module)) if make is None else None,
        specs=with_role(dict(zip(role_of, split, strict=True)), "parameters"),
        alike=_hashable(graph),
    )


def _hashable(value: Any) -> Hashable:
    """`value`, or None if it cannot be told from others."""
    try:
        hash(value)
    except TypeError:
        return None
    return value


# -- Flax Linen


def _from_linen(layer: Linen, index: int) -> Layer:
    module, name = layer.module, type(layer.module).__name__

    def streams(key) -> dict:
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(layer.rngs)}

    def train(parameters, state, key, args, momenta=None):
        found = {} if momenta is None else momenta

        def own_statistics(call, args, kwargs, context):
            """Runs batch norm with momentum 0, and notes the momentum it has."""
            part = context.module
            if not isinstance(part, linen.BatchNorm):
                return call(*args, **kwargs)
            found["batch_stats", *part.path] = momentum = part.momentum
            object.__setattr__(part, "momentum", 0.0)
            try:
                return call(*args, **kwargs)
            finally:
                object.__setattr__(part, "momentum", momentum)

        with linen.intercept_methods(own_statistics):
            outputs, left = module.apply(
                {"params": parameters, **state},
                *args,
                rngs=streams(key),
                mutable=list(state),
                **layer.train,
            )
        used = {path: m for path, m in found.items() if "batch_stats" in left}
        return outputs, _to_statistics({**state, **left}, used) if state else {}

    def evaluate(parameters, state, args):
        return module.apply({"params": parameters, **state}, *args, **layer.evaluate)

    unbound = Layer(name, None, {}, train, evaluate)

    def bind(args):
        split: dict = {}

        def init(key):
            first, second = jax.random.split(key)
            rngs = {"params": first, **streams(second)}
            boxed = dict(module.init(rngs, *_zeros(args), **layer.train))
            split.update(linen.get_partition_spec(boxed).get("params", {}))
            variables = meta.unbox(boxed)
            parameters = variables.pop("params", {})
            variables.pop("intermediates", None)
            return parameters, variables

        try:
            parameters, state = _abstract(jax.eval_shape(init, jax.random.key(0)))
            momenta: dict = {}
            jax.eval_shape(
                lambda *rest: train(*rest, momenta=momenta)[0],
                parameters,
                state,
                jax.random.key(0),
                args,
            )
        except Exception as error:
            raise ValueError(
                f"layer {index} ({name}) cannot be initialised: {error}\nA module whose call takes more than the "
                "activation is given as `jpipe.Linen(module, train=..., evaluate=...)`."
            ) from error
        _check_leaves(parameters, state, name, index)
        return dataclasses.replace(
            unbound,
            parameters=parameters,
            state=state,
            commit=lambda state, statistics: _commit(state, statistics, momenta),
            init=init,
            bind=None,
            specs=split,
        )

    return dataclasses.replace(unbound, bind=bind)
