"""Traces all layers of a model for one microbatch shape.

Layers that compute the same thing (equal jaxprs, equal shapes) are one *kind*, which is traced and compiled once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.layers.as_layers import Layer
from jpipe.layers.backward import (
    LayerProgram,
    OffloadError,
    is_inexact,
    jaxpr_text,
    trace_layer,
)
from jpipe.packing import Leaf, axes


@dataclasses.dataclass(frozen=True)
class Mutable:
    """The mutable state of one kind of layer.

    Attributes:
      leaves: abstract values of the state, and of the statistics that move it.
      commit: `(state, statistics) -> state`, of flat lists.
    """

    leaves: tuple = ()
    commit: Callable | None = None


@dataclasses.dataclass(frozen=True)
class Traced:
    """Layers traced for one microbatch shape, before they are cut into stages.

    Attributes:
      layers: the layers, bound to the shapes of their inputs.
      kinds, kind_of_layer, mutable, loss, inputs: as in `Stages`.
      outputs: abstract leaves of what each layer hands to the next, skips left out.
      output_tree: tree structure of the last of them.
      skips: name -> (layer that stashes it, layer that pops it, abstract leaves).
      specs: how each kind's parameters are split over automatic axes of the mesh, as `packing.Leaf` has it.
      stash_specs: how what each kind stashes is split: as the compiler splits it in a forward of its own.
      automatic: the mesh of those axes; None if there are none.
    """

    layers: Sequence[Layer]
    kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    mutable: Sequence[Mutable]
    loss: LayerProgram | None
    inputs: Sequence[jax.ShapeDtypeStruct]
    outputs: Sequence[tuple]
    output_tree: Any
    skips: Mapping[str, tuple[int, int, tuple]]
    specs: Sequence[tuple[tuple, ...]]
    stash_specs: Sequence[Sequence[tuple]]
    automatic: Mesh | None

    def whole(self, aval: jax.ShapeDtypeStruct) -> Leaf:
        """A leaf that is not split, such as those of messages."""
        return Leaf(aval, 1, () if self.automatic is None else (None,) * aval.ndim)

    @functools.cached_property
    def flops(self) -> list[float]:
        """Floating-point operations, as XLA counts them, of each layer's forward and backward of one microbatch."""
        of_kind = [_flops(kind) for kind in self.kinds]
        return [of_kind[k] for k in self.kind_of_layer]


def trace_layers(
    layers: Sequence[Layer],
    loss: Callable | None,
    microbatch: Any,
    *,
    compute_dtype: Any = None,
    has_aux: bool = False,
    key_impl: Any = None,
    policy: Callable | None = None,
    automatic: Mesh | None = None,
) -> Traced:
    """Traces every layer, and the loss, for the abstract `microbatch`.

    Args:
      layers: what `as_layers` returned.
      loss: the loss; None traces layers as they are in evaluation.
      microbatch: abstract arrays.
      compute_dtype: cast weights and activations to it in every layer.
      has_aux: whether the loss returns `(scalar, aux)`.
      key_impl: implementation of the random keys that layers get; None is JAX's default.
      policy: the checkpoint policy of the layers; the loss stashes all its residuals.
      automatic: the mesh's automatic axes alone, which parameters may be split over; None if it has none.
    """
    x = inputs = microbatch["inputs"]
    layers = list(layers)
    kinds: list[LayerProgram] = []
    mutable: list[Mutable] = []
    kind_of_layer: list[int] = []
    specs: list[tuple] = []
    by_text: dict[str, int] = {}
    by_layer: dict[tuple, LayerProgram] = {}
    live: dict[str, Any] = {}
    skips: dict[str, tuple] = {}
    handed_on: list[tuple] = []
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key_impl)))

    def trace(i: int, args, **options) -> LayerProgram:
        layer = layers[i]

        def function(parameters, args, extra):
            parameters, args = _cast((parameters, args), compute_dtype)
            if loss is None:
                outputs = layer.evaluate(parameters, extra["state"], args)
                statistics: Any = ()
            else:
                outputs, statistics = layer.train(
                    parameters,
                    extra["state"],
                    jax.random.wrap_key_data(extra["key"], impl=key_impl),
                    args,
                )
                statistics = jax.tree.map(
                    lambda a, like: a.astype(like.dtype), statistics, layer.state
                )
            last = i == len(layers) - 1
            outputs = _cast(
                layer.outputs(outputs), output_dtype if last else compute_dtype
            )
            return outputs, statistics

        extra = {"key": key, "state": layer.state}
        try:
            return trace_layer(
                function,
                layer.parameters,
                args,
                extra,
                has_aux=True,
                policy=policy,
                **options,
            )
        except OffloadError as error:
            raise ValueError(f"layer {i} ({layer.name}): {error}") from None
        except Exception as error:
            taken = args[0] if len(args) == 1 else args
            raise ValueError(
                f"layer {i} ({layer.name}) cannot take {shapes_text(taken)}: {error}"
            ) from error

    output_dtype = None
    for i in range(len(layers)):
        args = (x, *(live.pop(name) for name in layers[i].pop))
        layer = layers[i] = layers[i].bound(args)
        last = i == len(layers) - 1
        if last and compute_dtype is not None:
            weights = [a for one in layers for a in jax.tree.leaves(one.parameters)]
            output_dtype = np.result_type(np.float32, *(a.dtype for a in weights))
        seen = (
            layer.alike,
            last,
            len(layer.stash),
            _avals((args, layer.parameters, layer.state)),
        )
        if layer.alike is None or seen not in by_layer:
            by_layer[seen] = trace(i, args)
        traced = by_layer[seen]
        held = _mutable(layer)
        spec = _split_over(layer, i, {} if automatic is None else automatic.shape)
        text = f"{traced.text}\n{_commit_text(held)}\n{spec}"
        kind = by_text.setdefault(text, len(kinds))
        if kind == len(kinds):
            kinds.append(traced)
            mutable.append(held)
            specs.append(spec)
        kind_of_layer.append(kind)
        x, *kept = traced.output_tree.unflatten(traced.outputs)
        handed_on.append(tuple(jax.tree.leaves(x)))
        for name, value in zip(layer.stash, kept, strict=True):
            live[name] = value
            target = next(j for j, other in enumerate(layers) if name in other.pop)
            skips[name] = (i, target, tuple(jax.tree.leaves(value)))
    if kind_of_layer.count(0) == 1:  # nobody needs the gradient of the model's inputs
        kinds[0] = trace(0, (inputs,), input_grads=False)
    return Traced(
        layers,
        kinds,
        kind_of_layer,
        mutable,
        None if loss is None else _trace_loss(loss, x, microbatch, has_aux),
        jax.tree.leaves(inputs),
        handed_on,
        jax.tree.structure(x),
        skips,
        specs,
        [
            [()] * len(kind.stash)
            if loss is None or automatic is None
            else _stash_specs(kind, spec, automatic)
            for kind, spec in zip(kinds, specs, strict=True)
        ],
        automatic,
    )


def _avals(tree) -> tuple:
    """What a tree of abstract arrays looks like to a trace."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in leaves]
    return structure, tuple(kinds)


def _split_over(
    layer: Layer, index: int, sizes: Mapping[str, int]
) -> tuple[tuple, ...]:
    """For each parameter the axes that its dims are split over; axes that the mesh has not are left out."""
    if not sizes:
        return ((),) * len(jax.tree.leaves(layer.parameters))
    leaves, tree = jax.tree.flatten_with_path(layer.parameters)
    given = tree.flatten_up_to(layer.specs) if layer.specs else [()] * len(leaves)
    found = []
    for (path, leaf), spec in zip(leaves, given, strict=True):
        of_dim = [(names,) if isinstance(names, str) else names or () for names in spec]
        of_dim = [tuple(name for name in names if name in sizes) for names in of_dim]
        while of_dim and not of_dim[-1]:
            of_dim.pop()
        what = (
            f"layer {index} ({layer.name}): parameter {jax.tree_util.keystr(path)} of shape {list(leaf.shape)} cannot be "
            f"split as {spec}"
        )
        if len(of_dim) > len(leaf.shape):
            raise ValueError(
                f"{what}: it has {len(leaf.shape)} dims, not {len(of_dim)}. Name one axis, or None, for each dim."
            )
        for dim, names in enumerate(of_dim):
            parts = math.prod(sizes[name] for name in names)
            if leaf.shape[dim] % parts:
                raise ValueError(
                    f"{what}: the {parts} devices along {', '.join(map(repr, names))} do not divide its dim {dim}, "
                    f"{leaf.shape[dim]}. Make the dim a multiple of {parts}, the axis of the mesh smaller, or leave it out "
                    "of the parameter's partition."
                )
        named = [names[0] if len(names) == 1 else names or None for names in of_dim]
        found.append(tuple(named) + (None,) * (len(leaf.shape) - len(named)))
    return tuple(found)


def _stash_specs(
    kind: LayerProgram, parameter_specs: Sequence[tuple], mesh: Mesh
) -> list[tuple]:
    """How the compiler splits what a forward stashes, given how its parameters are split."""
    if not kind.stash:
        return []
    parameters = [
        jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        for a, spec in zip(kind.parameters, parameter_specs, strict=True)
    ]
    inputs, extra = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec())
        ),
        (list(kind.inputs), list(kind.extra)),
    )
    # The partitioner alone matters here.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    stash = jax.jit(lambda *args: kind.forward_and_stash(*args)[1])
    lowered = stash.lower(parameters, inputs, extra)
    found = []
    for aval, sharding in zip(
        kind.stash, lowered.compile(options).output_shardings, strict=True
    ):
        spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        dims = zip(aval.shape, spec + (None,) * (aval.ndim - len(spec)))
        parts = [(n, names, _size(mesh, names)) for n, names in dims]
        found.append(tuple(None if n % k else names for n, names, k in parts))
    return found


def _size(mesh: Mesh, names: str | tuple | None) -> int:
    """The number of parts that a dim is split into."""
    return math.prod(mesh.shape[name] for name in axes((names,)))


def _mutable(layer: Layer) -> Mutable:
    leaves, tree = jax.tree.flatten(layer.state)
    if not leaves:
        return Mutable()

    def commit(state, statistics):
        return jax.tree.leaves(
            layer.commit(tree.unflatten(state), tree.unflatten(statistics))
        )

    return Mutable(tuple(leaves), commit)


def _commit_text(held: Mutable) -> str:
    """Layers whose state moves differently are different kinds."""
    if held.commit is None:
        return ""
    n = len(held.leaves)
    return jaxpr_text(
        lambda *leaves: held.commit(leaves[:n], leaves[n:]), *held.leaves, *held.leaves
    )


def _cast(tree: Any, dtype: Any) -> Any:
    """`tree` with its inexact leaves in `dtype`; None casts nothing."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda a: a.astype(dtype) if is_inexact(a) else a, tree)


def shapes_text(tree: Any) -> str:
    """Shapes and dtypes of a pytree, for messages."""
    leaves = jax.tree.leaves_with_path(tree)
    texts = [
        f"{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}".strip()
        for path, a in leaves
    ]
    return ", ".join(texts) or str(tree)


def _trace_loss(loss: Callable, outputs, microbatch, has_aux: bool) -> LayerProgram:
    try:
        result = jax.eval_shape(loss, outputs, microbatch)
    except Exception as error:
        raise ValueError(
            f"`loss` cannot take outputs of {shapes_text(outputs)} and a microbatch of "
            f"{shapes_text(microbatch)}: {type(error).__name__}: {error}"
        ) from error
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            "`loss` must return `(scalar, aux)` with `has_aux=True`, got "
            f"{shapes_text(result)}. Return both, or leave `has_aux` out."
        )
    value, aux = result if has_aux else (result, ())
    leaves = jax.tree.leaves(value)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not is_inexact(leaves[0])
        or not hasattr(value, "shape")
    ):
        hint = "Take the mean of the losses of the samples."
        if not has_aux and isinstance(result, tuple) and len(result) == 2:
            hint = "For a loss that returns `(scalar, aux)`, set `has_aux=True`."
        raise ValueError(
            "`loss` must return a floating-point scalar, the mean over one microbatch, "
            f"got {shapes_text(value)}. {hint}"
        )
    for path, leaf in jax.tree.leaves_with_path(aux):
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise ValueError(
                f"`loss` returns aux{jax.tree_util.keystr(path)} of dtype {leaf.dtype}, and only numbers can be "
                "averaged over the microbatches."
            )

    def function(_, outputs, batch):
        result = loss(outputs, batch)
        value, aux = result if has_aux else (result, ())
        return value, jax.tree.map(
            lambda a: jnp.asarray(a, _mean_dtype(jnp.asarray(a))), aux
        )

    return trace_layer(function, (), outputs, microbatch, has_aux=True)


def _mean_dtype(a) -> Any:
    """The dtype that a mean over microbatches has: integers and truths are averaged as floats."""
    return a.dtype if is_inexact(a) else np.float32


def forward_and_backward(kind: LayerProgram) -> tuple[Callable, tuple]:
    """A layer's forward and backward as one function, and its abstract arguments."""

    def function(parameters, inputs, extra, output_grads):
        outputs, stash, _ = kind.forward_and_stash(parameters, inputs, extra)
        return outputs, kind.backward(parameters, stash, output_grads)

    grads = [y for y in kind.outputs if is_inexact(y)]
    given = list(kind.parameters), list(kind.inputs), list(kind.extra), grads
    return function, given


def _flops(kind: LayerProgram) -> float:
    function, arguments = forward_and_backward(kind)
    lowered = jax.jit(function).lower(*arguments)
    # Of the program before optimisation: within 1 % of the compiled one's, and there in a tenth of the time.
    return max(float((lowered.cost_analysis() or {}).get("flops", 0.0)), 0.0)


def shared_jit(platform: str) -> Callable:
    """Calls `function(key)` compiled, once for all functions that trace to the same program."""
    compiled: dict[str, Callable] = {}
    # Random initialisers take XLA:CPU up to ten times longer to optimise than to run unoptimised.
    options = {"xla_backend_optimization_level": 0} if platform == "cpu" else None

    def call(function: Callable, key: jax.Array):
        shape = jax.eval_shape(function, key)
        text = f"{shape}{jaxpr_text(lambda k: jax.tree.leaves(function(k)), key)}"
        return compiled.setdefault(text, jax.jit(function, compiler_options=options))(
            key
        )

    return call
