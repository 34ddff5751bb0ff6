"""The optimizer on each stage: any Optax chain, on each layer's own tree.

The chain sees a list with one entry a layer of the model, None for the layers of other stages, so paths and
labels are the same at any stage count. Stages whose update is the same program share it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.layers.backward import Equations, Part
from jpipe.packing import Leaf, Packing, Place
from jpipe.schedule import Schedule
from jpipe.stages.cut import Stages

GIVEN = ("delay", "backward_delay", "global_norm")
"""What an optimizer gets as extra arguments: the stage's delays in updates, float32, and the norm of the gradient."""


READERS = ("forward", "backward")
"""Who may read other weights than those that are updated."""


def read_delays(schedule: Schedule) -> dict[str, np.ndarray]:
    """For each of `READERS`, `[S]`: the updates by which the weights of a forward lag behind the update that they lead to,
    and those of a backward are ahead of the forward's."""
    facts = schedule.facts()
    ahead = facts.forward_delay - facts.backward_delay
    return {"forward": facts.forward_delay, "backward": ahead}


@dataclasses.dataclass(frozen=True)
class Update:
    """One program that updates a stage.

    Attributes:
      groups: the program, in groups of parts that run one after the other, each reading and writing leaves of its own:
        for most optimizers one a weight, so that no more than that is ever beside what is updated.
      shared: what all parts read: the numbers among parameters, gradients and state.
      num_given: how many other numbers follow them: the values of `GIVEN`, and with hooks the delays of `READERS`.
      reads: for each reader the function `(parameters, optimizer_state, delay) -> parameters`, of flat lists.
      parameters: for each parameter leaf, `(place, row)` of all its copies on the stage; more than one if tied.
      state: the place of each leaf of the optimizer's state.
    """

    groups: Sequence["Group"]
    shared: Sequence["Slot"]
    num_given: int
    reads: Mapping[str, Callable]
    parameters: Sequence[Sequence[tuple[Place, int]]]
    state: Sequence[Place]


class Slot(NamedTuple):
    """Where a group's parts have one of their inputs or outputs.

    Attributes:
      arrays: "parameters", "gradients", "optimizer_state", or a reader.
      copies: for each copy of the leaf (more than one if tied) its place, and `[parts]` the first index of each part's.
    """

    arrays: str
    copies: Sequence[tuple[Place, np.ndarray]]


class Group(NamedTuple):
    """Parts of an update that are one program on different leaves: `(*inputs, *shared, *given) -> outputs`."""

    run: Equations
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    num_parts: int


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of all stages.

    Attributes:
      programs: distinct updates; program_of_stage: which one a stage runs.
      state: how the optimizer's state is packed, one owner a program.
      norm_dtype: of the norm of the gradient, at least float32.
    """

    programs: Sequence[Update]
    program_of_stage: Sequence[int]
    state: Packing
    norm_dtype: np.dtype


def stage_tree(stages: Stages, stage: int, per_layer: Sequence) -> list:
    """What the optimizer sees of the model on a stage: `per_layer` with None in place of what is not there.

    A tied weight is seen once, in the first of its layers.
    """
    return _seen(stages, stages.layers_of(stage), per_layer)


def _seen(stages: Stages, mine: Sequence[int], per_layer: Sequence) -> list:
    elsewhere = {copy for copies in stages.ties for copy in copies[1:]}
    trees: list = [None] * len(stages.layers)
    for i in mine:
        leaves, tree = jax.tree.flatten(per_layer[i])
        kept = [None if (i, j) in elsewhere else leaf for j, leaf in enumerate(leaves)]
        trees[i] = tree.unflatten(kept)
    return trees


def _leaf_copies(stages: Stages, stage: int) -> list[list[tuple[Place, int]]]:
    """For each leaf of `stage_tree`, `(place, row)` of its copies on the stage."""
    places = {
        (layer, j): (place, row)
        for layer, run, row in stages.layer_runs(stage)
        for j, place in enumerate(run.parameters)
    }
    found = {leaf: [place] for leaf, place in places.items()}
    for first, *others in stages.ties:
        here = [places[copy] for copy in others if copy in places]
        found.setdefault(first, []).extend(here)
        for copy in others:
            found.pop(copy, None)
    return [found[leaf] for leaf in places if leaf in found]


@dataclasses.dataclass(frozen=True)
class _Flat:
    """An optimizer on one tree, of and to flat lists.

    Attributes:
      update: `(*parameters, *gradients, *state, *given) -> [*parameters, *state]`, with the values of `GIVEN`.
      init: `(*parameters) -> state`.
      parameters, state: the paths of their leaves.
      state_avals: abstract values of the state.
    """

    update: Equations
    init: Equations
    parameters: Sequence[str]
    state: Sequence[str]
    state_avals: Sequence

    def expressions(self, numbers: dict, own: Mapping[str, Any]) -> dict[str, tuple]:
        """What one step makes of each weight, and init and one step of each leaf of the state, as numbers to compare.

        Args:
          numbers: see `Equations.expressions`.
          own: paths of state that is not what it is elsewhere, each with a name of its own.
        """
        weights = [("weight", path) for path in self.parameters]
        gradients = [("gradient", path) for path in self.parameters]
        state = [("state", own.get(path, path)) for path in self.state]
        names = [*weights, *gradients, *state, *GIVEN]
        after = self.update.expressions(names, numbers)
        first = self.init.expressions(weights, numbers)
        paths = [f"parameters{path}" for path in self.parameters] + list(self.state)
        return dict(zip(paths, zip([None] * len(weights) + first, after), strict=True))


def _given(gradients, *given) -> dict:
    return dict(zip(GIVEN, given, strict=True))


def _norm_dtype(tree) -> np.dtype:
    """Of the norm of a gradient: that of the weights, at least float32."""
    return np.result_type(np.float32, *(a.dtype for a in jax.tree.leaves(tree)))


def _flat(optimizer, tree, norm_dtype, where: str, extra: Callable = _given) -> _Flat:
    """Traces `optimizer` on a tree of abstract arrays, updating with the arguments that `extra` returns."""
    leaves, treedef = jax.tree.flatten(tree)
    num_p = len(leaves)

    def init(*parameters):
        return jax.tree.leaves(optimizer.init(treedef.unflatten(parameters)))

    def update(*args):
        parameters = treedef.unflatten(args[:num_p])
        gradients = treedef.unflatten(args[num_p : 2 * num_p])
        state = state_tree.unflatten(args[2 * num_p : -len(GIVEN)])
        updates, state = optimizer.update(
            gradients, state, parameters, **extra(gradients, *args[-len(GIVEN) :])
        )
        updated = optax.apply_updates(parameters, updates)
        return [*jax.tree.leaves(updated), *jax.tree.leaves(state)]

    def paths(tree) -> list[str]:
        return [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(tree)]

    scalar = jax.ShapeDtypeStruct((), np.float32)
    norm = jax.ShapeDtypeStruct((), norm_dtype)
    try:
        state = jax.eval_shape(optimizer.init, tree)
        state_leaves, state_tree = jax.tree.flatten(state)
        avals = [*leaves, *leaves, *state_leaves, scalar, scalar, norm]
        return _Flat(
            Equations.trace(update, *avals),
            Equations.trace(init, *leaves),
            paths(tree),
            paths(state),
            state_leaves,
        )
    except Exception as error:
        raise ValueError(
            f"`optimizer` cannot update {where}: {type(error).__name__}: {error}\n"
            "It is called as `optimizer.update(gradients, state, parameters, delay=..., backward_delay=..., "
            "global_norm=...)` with lists "
            "that hold one nested dict a layer, and None for the layers of other stages. Masks and labels are given as "
            "functions of such a list; what needs more than that, such as the loss, cannot be used."
        ) from error


def _check_layers_apart(whole: _Flat, on_stages: Sequence[_Flat]) -> None:
    """Raises unless every stage's update makes of its weights what the update of the whole model would."""
    numbers: dict = {}
    different: set[str] = set()  # state that may be another on a stage
    while True:
        expected = whole.expressions(numbers, {p: (p, "whole") for p in different})
        found = [
            flat.expressions(numbers, {p: (p, s) for p in different})
            for s, flat in enumerate(on_stages)
        ]
        wrong = [
            (s, path)
            for s, of_stage in enumerate(found)
            for path, number in of_stage.items()
            if expected.get(path) != number
        ]
        if {path for _, path in wrong} <= different:
            return
        for s, path in wrong:
            if path.startswith("parameters"):
                raise ValueError(
                    "`optimizer` lets the update of one layer depend on others: that of "
                    f"{path} on stage {s} alone is not what it is in the whole model, so the result would depend on "
                    "how the model is cut. Use transforms that treat each layer by itself: not "
                    "`optax.clip_by_global_norm` but `jpipe.optim.clip_by_global_norm`, which takes the norm over all "
                    "stages; no `optax.add_noise`, which draws by the number of layers."
                )
        different |= {path for _, path in wrong}


def _check_global_norm(optimizer, tree, norm_dtype, whole: _Flat) -> None:
    """Warns if the optimizer puts `global_norm` where the norm of something else belongs."""
    if whole.update.inputs[-1] not in whole.update.read():
        return
    numbers: dict = {}

    def weights(extra: Callable) -> list:
        traced = _flat(optimizer, tree, norm_dtype, "the model", extra)
        found = traced.expressions(numbers, {})
        return [found[f"parameters{path}"] for path in whole.parameters]

    def without(gradients, *delays_and_norm) -> dict:
        return dict(zip(GIVEN, delays_and_norm[:-1]))

    def of_gradients(gradients, *delays_and_norm) -> dict:
        return _given(gradients, *delays_and_norm[:-1], optax.tree.norm(gradients))

    try:
        of_itself = weights(without)
    except ValueError:
        return  # it must be given a norm, so it takes none
    if of_itself != weights(of_gradients):
        warnings.warn(
            "`optimizer` clips by `global_norm`, the norm of the gradient, something that is "
            "not the gradient. Put `jpipe.optim.clip_by_global_norm` first in the chain.",
            stacklevel=2,
        )


def _state_leaves(flat: _Flat, places: Sequence) -> list[Leaf]:
    """The optimizer's state, each leaf split as the parameter it belongs to.

    A leaf belongs to the parameter whose path its own ends with, if it has its shape. `optax.tree_map_params` would
    call `optimizer.init` on a stand-in without layers, on which functions that label parameters by path fail.
    """
    owners = {path: copies[0][0] for path, copies in zip(flat.parameters, places)}
    if not any(place.spec for place in owners.values()):
        return [Leaf(aval) for aval in flat.state_avals]

    def spec(path: str, shape: tuple) -> tuple:
        owner = next((owners[p] for p in owners if path.endswith(p)), None)
        if owner is not None and owner.shape == shape:
            return owner.spec
        return (None,) * len(shape)

    return [
        Leaf(aval, 1, spec(path, tuple(aval.shape)))
        for path, aval in zip(flat.state, flat.state_avals, strict=True)
    ]


def _read(name: str, hook: Callable, optimizer, tree) -> Callable:
    """The function of flat lists that `hook`, a function of trees, is on one tree."""
    leaves, treedef = jax.tree.flatten(tree)
    state_leaves, state_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, tree))

    def read(parameters, state, delay) -> list:
        found = hook(treedef.unflatten(parameters), state_tree.unflatten(state), delay)
        shapes, wanted = (
            jax.tree.map(lambda a: (a.shape, np.dtype(a.dtype)), t)
            for t in (found, tree)
        )
        if shapes != wanted:
            raise ValueError("it returns other shapes, dtypes or layers than it gets.")
        return jax.tree.leaves(found)

    try:
        jax.eval_shape(read, leaves, state_leaves, jax.ShapeDtypeStruct((), np.float32))
    except Exception as error:
        raise ValueError(
            f"`{name}_params` cannot give the weights that a {name} reads: {type(error).__name__}: {error}\n"
            f"It is called as `{name}_params(parameters, optimizer_state, delay)` with what the optimizer sees of a stage."
        ) from error
    return read


def _with_reads(flat: _Flat, reads: Mapping[str, Callable]) -> Equations:
    """The update, followed by what the hooks make of its results where their delay is not 0."""
    num_p, num_readers = len(flat.parameters), len(READERS)

    def update(*args):
        out = flat.update(*args[:-num_readers])
        delays = dict(zip(READERS, args[-num_readers:]))
        parameters, state = out[:num_p], out[num_p:]
        for name, read in reads.items():
            found = read(parameters, state, delays[name])
            out += [
                jnp.where(delays[name] > 0, a, b) for a, b in zip(found, parameters)
            ]
        return out

    scalars = [jax.ShapeDtypeStruct((), np.float32)] * num_readers
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.update.inputs
    ]
    return Equations.trace(update, *avals, *scalars)


def _update(
    equations: Equations, reads: Mapping, parameters: Sequence, state: Sequence[Place]
) -> Update:
    """The update that `equations` are, of leaves at these places."""
    of_state = [[(place, 0)] for place in state]
    inputs = [
        *(("parameters", copies) for copies in parameters),
        *(("gradients", copies[:1]) for copies in parameters),
        *(("optimizer_state", copies) for copies in of_state),
    ]
    outputs = [
        *(("parameters", copies) for copies in parameters),
        *(("optimizer_state", copies) for copies in of_state),
        *((reader, copies) for reader in reads for copies in parameters),
    ]

    def slot(leaves: Sequence[tuple]) -> Slot:
        """One leaf a part."""
        arrays, copies = leaves[0]
        starts = [
            np.array([leaf[c][0].start(leaf[c][1]) for _, leaf in leaves], np.int32)
            for c in range(len(copies))
        ]
        copies = [(place, start) for (place, _), start in zip(copies, starts)]
        return Slot(arrays, copies)

    def kind(leaf: tuple) -> tuple:
        arrays, copies = leaf
        return arrays, tuple(place.array for place, _ in copies)

    small = [i for i, v in enumerate(equations.inputs) if v.aval.size == 1]
    alike: dict[tuple, list[Part]] = {}
    for part in equations.parts(small):
        own = part.inputs[: len(part.inputs) - len(small)]
        key = (
            part.equations.text(),
            tuple(kind(inputs[i]) for i in own),
            tuple(kind(outputs[i]) for i in part.outputs),
        )
        alike.setdefault(key, []).append(part._replace(inputs=own))
    groups = [
        Group(
            parts[0].equations,
            [slot([inputs[i] for i in at]) for at in zip(*(p.inputs for p in parts))],
            [slot([outputs[i] for i in at]) for at in zip(*(p.outputs for p in parts))],
            len(parts),
        )
        for parts in alike.values()
    ]
    shared = [slot([inputs[i]]) for i in small if i < len(inputs)]
    num_given = len(equations.inputs) - len(inputs)
    return Update(groups, shared, num_given, reads, parameters, state)


def make_updates(
    stages: Stages,
    optimizer: optax.GradientTransformation,
    hooks: Mapping[str, Callable] | None = None,
) -> Updates:
    """Traces the optimizer on every stage.

    Args:
      stages: the model, cut.
      optimizer: any Optax chain.
      hooks: "forward" and "backward": functions of trees that give the weights these read; see `Update.reads`.

    Raises:
      ValueError: if the optimizer cannot update the layers of a stage by themselves, as it would in the whole model, or
        a hook does not give what it should.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    texts: dict = {}
    drafts, program_of_stage = [], []
    parameters = [layer.parameters for layer in stages.layers]
    tree = _seen(stages, range(len(stages.layers)), parameters)
    norm_dtype = _norm_dtype(tree)
    whole = _flat(optimizer, tree, norm_dtype, "the model")
    on_stages = [
        _flat(
            optimizer,
            stage_tree(stages, s, parameters),
            norm_dtype,
            f"stage {s} by itself",
        )
        for s in range(stages.num_stages)
    ]
    if stages.num_stages > 1:
        _check_layers_apart(whole, on_stages)
    _check_global_norm(optimizer, tree, norm_dtype, whole)
    for s, flat in enumerate(on_stages):
        for path, leaf in zip(flat.state, flat.state_avals):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise ValueError(
                    f"`optimizer` keeps {path} of dtype {leaf.dtype} in its state, and only numbers can be kept there. "
                    "Keep `jax.random.key_data` of a random key."
                )
        places = tuple(tuple(copies) for copies in _leaf_copies(stages, s))
        seen = stage_tree(stages, s, parameters)
        reads = {
            name: _read(name, hook, optimizer, seen)
            for name, hook in (hooks or {}).items()
        }
        equations = _with_reads(flat, reads) if reads else flat.update
        key = stages.program_of_stage[s], places, equations.text()
        if key not in texts:
            texts[key] = len(drafts)
            drafts.append((equations, reads, places, _state_leaves(flat, places)))
        program_of_stage.append(texts[key])
    packing = Packing.of(
        [state_leaves for *_, state_leaves in drafts],
        num_stages=[program_of_stage.count(u) for u in range(len(drafts))],
    )
    programs = [
        _update(equations, reads, places, state_places)
        for (equations, reads, places, _), state_places in zip(drafts, packing.places)
    ]
    return Updates(programs, program_of_stage, packing, norm_dtype)
