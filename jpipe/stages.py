"""From layers and boundaries to stage programs and packed parameters.

    layers ── traced ──> kinds ── boundaries ──> stages ── equal lists of kinds ──> programs

Layers that compute the same thing (equal jaxprs, equal shapes) are one *kind*. Consecutive layers of a kind
in a stage are one *run*, a loop over rows of the packed arrays. Stages with the same list of kinds share a
*program*, whatever the length of their runs, so a trunk of equal layers compiles once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from jpipe.backward import LayerProgram, is_inexact, trace_layer
from jpipe.packing import Packing
from jpipe.plan.min_max import min_max


class Function:
    """A layer without parameters.

    Args:
      function: maps one activation (any pytree of arrays) to the next.
    Example:
      >>> import jax.numpy as jnp
      >>> Function(jnp.tanh).function is jnp.tanh
      True
    """

    def __init__(self, function: Callable[[Any], Any]):
        if not callable(function):
            raise ValueError(
                f"`jpipe.Function` takes a callable, got {type(function).__name__}."
            )
        self.function = function


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer, whatever it was given as.

    Attributes:
      name: for tables and messages.
      apply: `(parameters, inputs) -> outputs`.
      init: `key -> parameters`, or None if the layer came with its weights.
      parameters: nested dict of abstract arrays, by attribute names.
      given: the weights it came with, or None.
    """

    name: str
    apply: Callable[[Any, Any], Any]
    init: Callable[[jax.Array], Any] | None
    parameters: Any
    given: Any


def as_layers(layers: Sequence) -> list[Layer]:
    """Checks what the user gave and reads each layer's parameters, without making any."""
    if callable(layers) or not hasattr(layers, "__len__"):
        raise ValueError(
            f"`layers` must be a sequence of layers, got {type(layers).__name__}: a pipeline cuts a model between "
            "layers. Give them as a list, in order."
        )
    if not len(layers):
        raise ValueError("`layers` must hold at least one layer, got none.")
    owner: dict[int, int] = {}
    for i, layer in enumerate(layers):
        parts = nnx.iter_graph(layer) if isinstance(layer, nnx.Module) else ()
        for part in [v for _, v in parts if isinstance(v, nnx.Variable)]:
            first = owner.setdefault(id(part), i)
            if first != i:
                same = layers[first] is layer
                how = "is the same module object as" if same else "has weights of"
                raise ValueError(
                    f"layer {i} {how} layer {first}: sharing weights between layers is not "
                    "supported. Give each layer its own module, or a factory."
                )
    return [_as_layer(layer, i) for i, layer in enumerate(layers)]


def _as_layer(layer, index: int) -> Layer:
    if isinstance(layer, Function):
        name = getattr(layer.function, "__name__", "function")
        return Layer(name, lambda _, x: layer.function(x), lambda _: {}, {}, None)
    make = None
    if isinstance(layer, linen.Module):
        raise ValueError(
            f"layer {index} is a Flax Linen module ({type(layer).__name__}), and only NNX "
            "modules are supported. Write it with `flax.nnx`."
        )
    if isinstance(layer, nnx.Module):
        module = layer
    elif callable(layer):
        make = layer
        try:
            module = nnx.eval_shape(lambda: _called(make, jax.random.key(0)))
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from None
        except Exception as error:
            raise ValueError(
                f"layer {index} could not be built by `factory(rngs=...)`: {error}. A "
                "function of the activation is given as `jpipe.Function(f)`."
            ) from error
    else:
        raise ValueError(
            f"layer {index} must be a Flax NNX module, a factory called as `factory(rngs=...)`, or "
            f"`jpipe.Function(f)` for a layer without parameters, got {type(layer).__name__}."
        )
    graph, state = nnx.split(module)
    name = type(module).__name__
    other = {
        type(v).__name__
        for _, v in nnx.to_flat_state(state)
        if not isinstance(v, nnx.Param)
    }
    if other:
        raise ValueError(
            f"layer {index} ({name}) holds {', '.join(sorted(other))} beside its parameters: mutable state and random "
            "streams inside a layer are not supported. Use a layer whose only variables are `nnx.Param` "
            "(group or layer norm for batch norm)."
        )
    leaves, tree = jax.tree.flatten(state)
    # The order of the leaves of the nested dict, as positions in the state's own order.
    order = jax.tree.leaves(nnx.to_pure_dict(tree.unflatten(range(len(leaves)))))

    def apply(parameters, inputs):
        values = [None] * len(order)
        for i, value in zip(order, jax.tree.leaves(parameters), strict=True):
            values[i] = value
        return nnx.merge(graph, tree.unflatten(values))(inputs)

    def init(key):
        return nnx.to_pure_dict(nnx.split(_called(make, key))[1])

    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), nnx.to_pure_dict(state)
    )
    for path, leaf in jax.tree.leaves_with_path(abstract):
        if not is_inexact(leaf):
            raise ValueError(
                f"layer {index} ({name}): parameter {jax.tree_util.keystr(path)} has dtype {leaf.dtype}, which has no "
                "gradient. Make it a constant of the layer, or a floating-point parameter."
            )
    if make is not None:
        return Layer(name, apply, init, abstract, None)
    return Layer(
        name, apply, None, abstract, jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    )


def _called(make: Callable, key: jax.Array) -> nnx.Module:
    module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise ValueError(
            f"the factory must return a Flax NNX module, got {type(module).__name__}."
        )
    return module


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of one kind in a program.

    Attributes:
      kind: position in `Stages.kinds`.
      longest: the most layers that a stage of the program has here.
      parameters, input_stash, weight_stash, crossing: places of one layer's leaves; leaf i of a place is layer i's.
    """

    kind: int
    longest: int
    parameters: tuple = ()
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
class Stages:
    """A model cut into stages, for one microbatch shape.

    Attributes:
      layers: the layers.
      kinds: `LayerProgram` of each kind; kind_of_layer: which one a layer is.
      loss: the loss's program, `((), outputs, microbatch) -> scalar`.
      inputs: abstract microbatch of `batch["inputs"]`, as a list of leaves.
      starts: first layer of each stage, and the number of layers at the end.
      programs: the programs; program_of_stage: which one a stage runs.
      lengths: `[S][runs]`: how many layers a stage has in each run of its program.
      parameters, input_stash, weight_stash, crossing: how programs' leaves are packed.
      activations, gradients: how the messages between stages are packed; owner s is the message from stage s
        to stage s + 1, and its gradient.
    """

    layers: Sequence[Layer]
    kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    loss: LayerProgram | None
    inputs: Sequence[jax.ShapeDtypeStruct]
    starts: Sequence[int]
    programs: Sequence[Program]
    program_of_stage: Sequence[int]
    lengths: Sequence[Sequence[int]]
    parameters: Packing
    input_stash: Packing
    weight_stash: Packing
    crossing: Packing
    activations: Packing
    gradients: Packing

    @property
    def num_stages(self) -> int:
        return len(self.starts) - 1

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.starts[stage], self.starts[stage + 1])

    def layer_places(self, stage: int) -> list[tuple[int, tuple, int]]:
        """`(layer, places, row)` for each layer of a stage: its leaf j is row `row` of `places[j]`."""
        runs = self.programs[self.program_of_stage[stage]].runs
        rows = [
            (run.parameters, i)
            for run, n in zip(runs, self.lengths[stage])
            for i in range(n)
        ]
        return [
            (layer, *row)
            for layer, row in zip(self.layers_of(stage), rows, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Traced:
    """Layers traced for one microbatch shape, before they are cut into stages."""

    kinds: Sequence[LayerProgram]
    kind_of_layer: Sequence[int]
    loss: LayerProgram | None
    inputs: Sequence[jax.ShapeDtypeStruct]

    @functools.cached_property
    def flops(self) -> list[float]:
        """Floating-point operations, as XLA counts them, of each layer's forward and backward of one microbatch."""
        of_kind = [_flops(kind) for kind in self.kinds]
        return [of_kind[k] for k in self.kind_of_layer]


def trace_layers(
    layers: Sequence[Layer],
    loss: Callable | None,
    microbatch: Any,
    compute_dtype: Any = None,
) -> Traced:
    """Traces every layer, and the loss unless it is None, for the abstract `microbatch`."""
    x = inputs = microbatch["inputs"]
    kinds: list[LayerProgram] = []
    kind_of_layer: list[int] = []
    by_text: dict[str, int] = {}

    def trace(i: int, x, **options) -> LayerProgram:
        layer = layers[i]

        def function(parameters, inputs, _):
            outputs = layer.apply(
                _cast(parameters, compute_dtype), _cast(inputs, compute_dtype)
            )
            return outputs if i < len(layers) - 1 else _cast(outputs, output_dtype)

        try:
            return trace_layer(function, layer.parameters, x, **options)
        except Exception as error:
            raise ValueError(
                f"layer {i} ({layer.name}) cannot take {shapes_text(x)}: {error}"
            ) from error

    output_dtype = None
    if compute_dtype is not None:
        weights = [a for layer in layers for a in jax.tree.leaves(layer.parameters)]
        output_dtype = np.result_type(np.float32, *(a.dtype for a in weights))
    for i in range(len(layers)):
        traced = trace(i, x)
        kind = by_text.setdefault(traced.text, len(kinds))
        if kind == len(kinds):
            kinds.append(traced)
        kind_of_layer.append(kind)
        x = traced.output_tree.unflatten(traced.outputs)
    if kind_of_layer.count(0) == 1:  # nobody needs the gradient of the model's inputs
        kinds[0] = trace(0, inputs, input_grads=False)
    loss_program = None if loss is None else _trace_loss(loss, x, microbatch)
    return Traced(kinds, kind_of_layer, loss_program, jax.tree.leaves(inputs))


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


def _trace_loss(loss: Callable, outputs, microbatch) -> LayerProgram:
    try:
        value = jax.eval_shape(loss, outputs, microbatch)
    except Exception as error:
        raise ValueError(
            f"`loss` cannot take outputs of {shapes_text(outputs)} and a microbatch of "
            f"{shapes_text(microbatch)}: {type(error).__name__}: {error}"
        ) from error
    leaves = jax.tree.leaves(value)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not is_inexact(leaves[0])
        or not hasattr(value, "shape")
    ):
        raise ValueError(
            "`loss` must return a floating-point scalar, the mean over one microbatch, "
            f"got {shapes_text(value)}. Take the mean of the losses of the samples."
        )
    return trace_layer(
        lambda _, outputs, batch: loss(outputs, batch), (), outputs, microbatch
    )


def _flops(kind: LayerProgram) -> float:
    def forward_and_backward(parameters, inputs, output_grads):
        outputs, stash = kind.forward_and_stash(parameters, inputs)
        return outputs, kind.backward(parameters, stash, output_grads)

    grads = [y for y in kind.outputs if is_inexact(y)]
    lowered = jax.jit(forward_and_backward).lower(
        list(kind.parameters), list(kind.inputs), grads
    )
    # Of the program before optimisation: within 1 % of the compiled one's, and there in a tenth of the time.
    return max(float((lowered.cost_analysis() or {}).get("flops", 0.0)), 0.0)


def check_boundaries(
    boundaries: Sequence[int] | None, num_layers: int, num_stages: int
) -> list[int] | None:
    """`boundaries` as a list of starts, one a stage, and the number of layers; None stays None."""
    if num_stages > num_layers:
        raise ValueError(
            f"a schedule of {num_stages} stages needs at least as many layers, got {num_layers}. "
            f"Use `num_stages={num_layers}` or fewer, or split the layers more finely."
        )
    if boundaries is None:
        return None
    want = "the layer index at which each stage after the first begins"
    if isinstance(boundaries, str) or not hasattr(boundaries, "__iter__"):
        boundaries_are_indices = False
    else:
        boundaries = list(boundaries)
        boundaries_are_indices = all(hasattr(b, "__index__") for b in boundaries)
    if not boundaries_are_indices:
        raise ValueError(
            f"`boundaries` must be a list of whole numbers ({want}) or None to balance by "
            f"FLOPs, got {boundaries!r}."
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


def cut(
    layers: Sequence[Layer], traced: Traced, starts: list[int] | None, num_stages: int
) -> Stages:
    """Cuts traced layers into stages; `starts=None` balances by FLOPs."""
    if starts is None:
        starts = [0, *min_max(traced.flops, num_stages), len(layers)]
    kinds, last = traced.kinds, num_stages - 1
    signatures, lengths, program_of_stage = [], [], []
    for start, stop in itertools.pairwise(starts):
        groups = [
            (k, len(list(g)))
            for k, g in itertools.groupby(traced.kind_of_layer[start:stop])
        ]
        signature = tuple(k for k, _ in groups)
        if signature not in signatures:
            signatures.append(signature)
        program_of_stage.append(signatures.index(signature))
        lengths.append(tuple(n for _, n in groups))

    stages_of = [
        tuple(s for s in range(num_stages) if program_of_stage[s] == p)
        for p in range(len(signatures))
    ]
    longest = [
        tuple(max(lengths[s][r] for s in stages_of[p]) for r in range(len(sig)))
        for p, sig in enumerate(signatures)
    ]

    def packed(leaves_of_kind: Callable, loss_leaves: Sequence = ()) -> Packing:
        owners = []
        for p, signature in enumerate(signatures):
            leaves = [
                (a, n)
                for k, n in zip(signature, longest[p])
                for a in leaves_of_kind(kinds[k])
            ]
            owners.append(
                leaves + [(a, 1) for a in loss_leaves if last in stages_of[p]]
            )
        return Packing.of(owners)

    def stash(kind: LayerProgram, which: Sequence[int]) -> list:
        return [kind.stash[i] for i in which]

    parameters = packed(lambda kind: kind.parameters)
    input_stash = packed(
        lambda kind: stash(kind, kind.input_stash),
        traced.loss.stash if traced.loss else (),
    )
    weight_stash = packed(lambda kind: stash(kind, kind.weight_stash))
    crossing = packed(lambda kind: kind.crossing)

    programs = []
    for p, signature in enumerate(signatures):
        left = [
            iter(packing.places[p])
            for packing in (parameters, input_stash, weight_stash, crossing)
        ]
        runs = []
        for k, n in zip(signature, longest[p]):
            kind = kinds[k]
            sizes = (
                len(kind.parameters),
                len(kind.input_stash),
                len(kind.weight_stash),
                len(kind.crossing),
            )
            runs.append(
                Run(
                    k,
                    n,
                    *(
                        tuple(itertools.islice(it, size))
                        for it, size in zip(left, sizes)
                    ),
                )
            )
        programs.append(Program(tuple(runs), stages_of[p], tuple(left[1])))

    outputs = [kinds[traced.kind_of_layer[stop - 1]].outputs for stop in starts[1:-1]]
    # One kind of message stays an array of its own shape; several share flat vectors, so that they share transfers.
    occupancy = 0.5 if len(set(outputs)) <= 1 else np.inf
    return Stages(
        layers=layers,
        kinds=kinds,
        kind_of_layer=traced.kind_of_layer,
        loss=traced.loss,
        inputs=traced.inputs,
        starts=starts,
        programs=programs,
        program_of_stage=program_of_stage,
        lengths=lengths,
        parameters=parameters,
        input_stash=input_stash,
        weight_stash=weight_stash,
        crossing=crossing,
        activations=Packing.of(
            [[(a, 1) for a in leaves] for leaves in outputs], occupancy
        ),
        gradients=Packing.of(
            [[(a, 1) for a in leaves if is_inexact(a)] for leaves in outputs], occupancy
        ),
    )
