"""From layers and boundaries to stage programs and packed parameters.

    layers ── traced ──> kinds ── boundaries ──> stages ── equal lists of kinds ──> programs

Layers that compute the same thing (equal jaxprs, equal shapes) are one *kind*. Consecutive layers of a kind
in a stage are one *run*, a loop over rows of the packed arrays. Stages with the same list of kinds share a
*program*, whatever the length of their runs, so a trunk of equal layers compiles once.
"""

import bisect
import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.backward import (
    LayerProgram,
    OffloadError,
    is_inexact,
    jaxpr_text,
    trace_layer,
)
from jpipe.layers import Layer
from jpipe.lower import Route, neighbours
from jpipe.packing import Leaf, Packing, axes
from jpipe.solvers import min_max


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of one kind in a program.

    Attributes:
      kind: position in `Stages.kinds`.
      longest: the most layers that a stage of the program has here.
      stash, pop: `(name, leaves)` of the skips that start and end here; a run with any is one layer.
      parameters, state, input_stash, weight_stash, crossing: places of one layer's leaves; leaf i of a place is
        layer i's.
    """

    kind: int
    longest: int
    stash: tuple[tuple[str, tuple], ...]
    pop: tuple[tuple[str, tuple], ...]
    parameters: tuple = ()
    state: tuple = ()
    input_stash: tuple = ()
    weight_stash: tuple = ()
    crossing: tuple = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """What the stages with one list of kinds run.

    Attributes:
      runs: in order.
      stages: the stages that run it.
      loss_stash: places of the loss's stash, if the last stage is among them.
    """

    runs: tuple[Run, ...]
    stages: tuple[int, ...]
    loss_stash: tuple = ()


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
class Portal:
    """The way of skips from one stage to a later one, past the stages between.

    Attributes:
      source, target: the stages.
      names: the skips that take it.
      activations, gradients: how the message and its gradient are packed; one owner.
      places, gradient_places: of each skip's leaves in them.
    """

    source: int
    target: int
    names: tuple[str, ...]
    activations: Packing
    gradients: Packing
    places: Mapping[str, tuple]
    gradient_places: Mapping[str, tuple]


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model cut into stages, for one microbatch shape.

    Attributes:
      layers: the layers.
      kinds: `LayerProgram` of each kind; kind_of_layer: which one a layer is.
      mutable: `Mutable` of each kind.
      loss: the loss's program, `((), outputs, microbatch) -> scalar`.
      outputs: abstract values and tree structure of the model's outputs.
      inputs: abstract microbatch of `batch["inputs"]`, as a list of leaves.
      starts: first layer of each stage, and the number of layers at the end.
      programs: the programs; program_of_stage: which one a stage runs.
      lengths: `[S][runs]`: how many layers a stage has in each run of its program.
      parameters, state, input_stash, weight_stash, crossing: how programs' leaves are packed.
      activations, gradients: how the messages between stages are packed; owner s is the message from stage s
        to stage s + 1, and its gradient.
      portals: the ways of skips between stages.
      ties: tied weights, each as `(layer, leaf)` pairs; the first is the one the optimizer knows.
    """

    layers: Sequence[Layer]
    kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    mutable: Sequence[Mutable]
    loss: LayerProgram | None
    inputs: Sequence[jax.ShapeDtypeStruct]
    outputs: tuple[tuple, Any]
    starts: Sequence[int]
    programs: Sequence[Program]
    program_of_stage: Sequence[int]
    lengths: Sequence[Sequence[int]]
    parameters: Packing
    state: Packing
    input_stash: Packing
    weight_stash: Packing
    crossing: Packing
    activations: Packing
    gradients: Packing
    portals: Sequence[Portal] = ()
    ties: Sequence[Sequence[tuple[int, int]]] = ()

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    def stage_of(self, layer: int) -> int:
        """The stage of a layer."""
        return _stage_of(self.starts, layer)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.starts[stage], self.starts[stage + 1])

    def layer_runs(self, stage: int) -> list[tuple[int, Run, int]]:
        """`(layer, run, row)` for each layer of a stage: its leaves are rows `row` of the run's places."""
        runs = self.programs[self.program_of_stage[stage]].runs
        rows = [(run, i) for run, n in zip(runs, self.lengths[stage]) for i in range(n)]
        return [
            (layer, *row)
            for layer, row in zip(self.layers_of(stage), rows, strict=True)
        ]


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


def resolve_ties(
    layers: Sequence[Layer], ties: Sequence
) -> list[tuple[tuple[int, int], ...]]:
    """Ties as `(layer, leaf)` pairs, in order of layers.

    Args:
      layers: bound layers.
      ties: each a sequence of `(layer, "dotted.path")` pairs; checked here.
    """
    resolved, owner = [], {}
    for t, tie in enumerate(ties):
        copies = []
        for layer, path in tie:
            name = f"`ties[{t}]`: layer {layer}"
            if not -len(layers) <= layer < len(layers):
                raise ValueError(f"{name}, but there are {len(layers)} layers.")
            layer %= len(layers)
            leaves = {
                ".".join(str(key.key) for key in keys): leaf
                for keys, leaf in jax.tree.leaves_with_path(layers[layer].parameters)
            }
            if path not in leaves:
                close = difflib.get_close_matches(path, leaves, 1, cutoff=0)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"{name} ({layers[layer].name}) has no parameter {path!r}, only {', '.join(leaves) or 'none'}.{hint}"
                )
            copy = layer, list(leaves).index(path)
            if copy in owner:
                raise ValueError(
                    f"{name}: {path!r} is in `ties[{owner[copy]}]` already. Make one tie of the two."
                )
            owner[copy] = t
            copies.append((copy, leaves[path], f"layer {layer}: {path!r}"))
        if len(copies) < 2:
            raise ValueError(
                f"`ties[{t}]` must name at least two parameters, got {list(tie)}."
            )
        texts = [f"{text} is {a.dtype}{list(a.shape)}" for _, a, text in copies]
        if len({(a.shape, a.dtype) for _, a, _ in copies}) > 1:
            raise ValueError(
                f"`ties[{t}]`: tied parameters must have one shape and dtype, got {', '.join(texts)}. A layer that "
                "needs it transposed transposes it in its call."
            )
        resolved.append(tuple(sorted(copy for copy, _, _ in copies)))
    return resolved


BALANCES = ("flops", "time", "memory")


def check_boundaries(
    boundaries: Sequence[int] | str | None, num_layers: int, num_stages: int
) -> list[int] | None:
    """`boundaries` as a list of starts, one a stage, and the number of layers; None for one of `BALANCES`."""
    if num_stages > num_layers:
        raise ValueError(
            f"a schedule of {num_stages} stages needs at least as many layers, got {num_layers}. "
            f"Use `num_stages={num_layers}` or fewer, or split the layers more finely."
        )
    if boundaries is None or (isinstance(boundaries, str) and boundaries in BALANCES):
        return None
    want = "the layer index at which each stage after the first begins"
    if isinstance(boundaries, str) or not hasattr(boundaries, "__iter__"):
        boundaries_are_indices = False
    else:
        boundaries = list(boundaries)
        boundaries_are_indices = all(hasattr(b, "__index__") for b in boundaries)
    if not boundaries_are_indices:
        raise ValueError(
            f"`boundaries` must be a list of whole numbers ({want}), one of {', '.join(map(repr, BALANCES))} to balance "
            f"by that, or None to balance by FLOPs, got {boundaries!r}."
        )
    starts = [0, *(int(b) for b in boundaries), num_layers]
    if len(starts) != num_stages + 1:
        raise ValueError(
            f"`boundaries` must hold {num_stages - 1} numbers for {num_stages} stages ({want}), got {list(boundaries)}."
        )
    for s, (start, stop) in enumerate(itertools.pairwise(starts)):
        if start >= stop:
            raise ValueError(
                f"`boundaries` must rise within 1..{num_layers - 1} ({want}), got {list(boundaries)}: "
                f"stage {s} would hold layers {start}..{stop - 1}, which is none. Give every stage at least one layer."
            )
    return starts


class Groups(NamedTuple):
    """Stages by the kinds of layers they run, one after the other: those with equal lists share a program.

    Attributes:
      signatures: of each program, the kinds, equal neighbours once.
      program_of_stage: `[S]`; stages_of: of each program, the stages that run it.
      lengths: `[S][runs]`, how many equal neighbours each kind stands for.
      longest: `[programs][runs]`, the most of them in any stage.
    """

    signatures: list[tuple]
    program_of_stage: list[int]
    stages_of: list[tuple[int, ...]]
    lengths: list[tuple[int, ...]]
    longest: list[tuple[int, ...]]

    def pack(
        self, leaves_of: Callable[[Any], Iterable[Leaf]], last: Sequence[Leaf] = ()
    ) -> Packing:
        """Packs what layers have of one sort, such as their parameters.

        Args:
          leaves_of: the leaves of a kind of layer.
          last: what the last stage has beside them.
        """
        owners = [
            [
                leaf._replace(count=n)
                for kind, n in zip(signature, longest, strict=True)
                for leaf in leaves_of(kind)
            ]
            for signature, longest in zip(self.signatures, self.longest, strict=True)
        ]
        owners[self.program_of_stage[-1]] += last
        return Packing.of(owners, num_stages=[len(mine) for mine in self.stages_of])


def group(kinds: Sequence, starts: Sequence[int]) -> Groups:
    """Groups the stages of layers of these kinds, which begin at `starts`; the last is the number of layers."""
    signatures, lengths, program_of_stage = [], [], []
    for start, stop in itertools.pairwise(starts):
        runs = [(k, len(list(g))) for k, g in itertools.groupby(kinds[start:stop])]
        signature = tuple(k for k, _ in runs)
        if signature not in signatures:
            signatures.append(signature)
        program_of_stage.append(signatures.index(signature))
        lengths.append(tuple(n for _, n in runs))
    stages_of = [
        tuple(s for s, q in enumerate(program_of_stage) if q == p)
        for p in range(len(signatures))
    ]
    longest = [
        tuple(max(lengths[s][r] for s in stages_of[p]) for r in range(len(sig)))
        for p, sig in enumerate(signatures)
    ]
    return Groups(signatures, program_of_stage, stages_of, lengths, longest)


def pack_messages(ends: Sequence[Sequence[Leaf]]) -> tuple[Packing, Packing]:
    """How the outputs of all stages but the last travel, and how the gradients that come back for them do.

    One kind of message stays an array of its own shape; several share flat vectors, so that they share transfers.
    """
    alike = len(set(map(tuple, ends))) <= 1
    returned = [[leaf for leaf in leaves if is_inexact(leaf.aval)] for leaves in ends]
    occupancy = 0.5 if alike else np.inf
    return Packing.of(ends, occupancy), Packing.of(returned, occupancy)


def cut(
    traced: Traced,
    starts: list[int] | None,
    num_stages: int,
    ties: Sequence[Sequence[tuple[int, int]]] = (),
) -> Stages:
    """Cuts traced layers into stages; `starts=None` balances by FLOPs."""
    layers = traced.layers
    if starts is None:
        starts = [0, *min_max(traced.flops, num_stages), len(layers)]
    kinds = traced.kinds
    shared = [
        (k, layer.stash, layer.pop) for k, layer in zip(traced.kind_of_layer, layers)
    ]
    groups = group(shared, starts)
    signatures, stages_of, longest = groups.signatures, groups.stages_of, groups.longest
    # What a layer keeps, by the ring or array it is kept in: one kind's leaves.
    leaves_of: dict[str, Callable] = {
        "parameters": lambda k: kinds[k].parameters,
        "state": lambda k: traced.mutable[k].leaves,
        "input_stash": lambda k: [kinds[k].stash[i] for i in kinds[k].input_stash],
        "weight_stash": lambda k: [kinds[k].stash[i] for i in kinds[k].weight_stash],
        "crossing": lambda k: kinds[k].crossing,
    }

    specs_of: dict[str, Callable] = {
        "parameters": lambda k: traced.specs[k],
        "input_stash": lambda k: [
            traced.stash_specs[k][i] for i in kinds[k].input_stash
        ],
        "weight_stash": lambda k: [
            traced.stash_specs[k][i] for i in kinds[k].weight_stash
        ],
    }

    def packed(name: str) -> Packing:
        def leaves(shared: tuple) -> list[Leaf]:
            k, *_ = shared
            avals = leaves_of[name](k)
            specs = specs_of[name](k) if name in specs_of else [()] * len(avals)
            return [Leaf(a, spec=spec) for a, spec in zip(avals, specs, strict=True)]

        loss = traced.loss.stash if name == "input_stash" and traced.loss else ()
        return groups.pack(leaves, [traced.whole(a) for a in loss])

    packings = {name: packed(name) for name in leaves_of}
    programs = []
    for p, signature in enumerate(signatures):
        left = {name: iter(packing.places[p]) for name, packing in packings.items()}
        runs = []
        for (k, stash, pop), n in zip(signature, longest[p]):
            places = {
                name: tuple(itertools.islice(left[name], len(leaves(k))))
                for name, leaves in leaves_of.items()
            }
            skips = [
                tuple((name, traced.skips[name][2]) for name in names)
                for names in (stash, pop)
            ]
            runs.append(Run(k, n, *skips, **places))
        programs.append(Program(tuple(runs), stages_of[p], tuple(left["input_stash"])))

    outputs = [traced.outputs[stop - 1] for stop in starts[1:-1]]
    messages = [[traced.whole(a) for a in leaves] for leaves in outputs]
    activations, gradients = pack_messages(messages)
    return Stages(
        layers=layers,
        kinds=kinds,
        kind_of_layer=traced.kind_of_layer,
        mutable=traced.mutable,
        loss=traced.loss,
        inputs=traced.inputs,
        outputs=(traced.outputs[-1], traced.output_tree),
        starts=starts,
        programs=programs,
        program_of_stage=groups.program_of_stage,
        lengths=groups.lengths,
        **packings,
        activations=activations,
        gradients=gradients,
        ties=ties,
        portals=find_portals(traced.skips, starts, traced.whole),
    )


def _stage_of(starts: Sequence[int], layer: int) -> int:
    return bisect.bisect_right(starts, layer) - 1


def find_portals(
    skips: Mapping[str, tuple[int, int, tuple]],
    starts: Sequence[int],
    whole: Callable[[Any], Leaf] = Leaf,
) -> list[Portal]:
    """One portal for each pair of stages that skips connect.

    Args:
      skips: as of `Traced`.
      starts: first layer of each stage, and the number of layers at the end.
      whole: how an abstract leaf travels.
    """
    ways: dict[tuple[int, int], list[str]] = {}
    for name, (first, last, _) in skips.items():
        way = _stage_of(starts, first), _stage_of(starts, last)
        if way[0] != way[1]:
            ways.setdefault(way, []).append(name)
    portals = []
    for (source, target), names in ways.items():
        packings, places = [], []
        for wanted in (lambda a: True, is_inexact):
            leaves = {n: [a for a in skips[n][2] if wanted(a)] for n in names}
            sent = [whole(a) for n in names for a in leaves[n]]
            packing = Packing.of([sent])
            left = iter(packing.places[0])
            packings.append(packing)
            places.append(
                {n: tuple(itertools.islice(left, len(leaves[n]))) for n in names}
            )
        portals.append(Portal(source, target, tuple(names), *packings, *places))
    return portals


def find_routes(
    num_stages: int,
    activations: Packing,
    gradients: Packing | None,
    portals: Sequence[Portal],
) -> list[tuple[Route, Packing]]:
    """Every kind of message: its way, and how it is packed.

    Args:
      num_stages: S.
      activations, gradients, portals: as of `Stages`; gradients are None if nothing runs backward.
    """
    backward = () if gradients is None else gradients.arrays
    down, up = neighbours(num_stages, activations.arrays, backward)
    found = [(down, activations)]
    for i, portal in enumerate(portals):
        way, pack = {portal.source: portal.target}, portal.activations
        found.append((Route(f"skip{i}", "forward", way, pack.arrays), pack))
    if gradients is None:
        return found
    found.append((up, gradients))
    for i, portal in enumerate(portals):
        way, pack = {portal.target: portal.source}, portal.gradients
        if pack.arrays:
            route = Route(f"skip{i}.gradient", "backward", way, pack.arrays)
            found.append((route, pack))
    return found
