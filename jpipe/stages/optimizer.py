"""The optimizer on each stage: any Optax chain that treats every layer by itself.

    optimizer ── traced on the whole model and on each stage ──> flat updates ── equal? ──> refused, or
    flat update ── parameter hooks ── independent parts ── equal parts ──> `StageUpdate`

The chain sees a list with one entry per layer of the model, and None for layers of other stages, so paths and labels
are the same at any number of stages. Stages whose updates are the same program share it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.layers.equations import Equations, Part
from jpipe.packing import Leaf, Packing, Place
from jpipe.schedule import Schedule
from jpipe.stages.cut import Stages

# -- What an optimizer may ask for


class UpdateFacts(NamedTuple):
    """What is known when a stage updates.

    Attributes:
      forward_delay: float32 `[]`, updates between reading the forward's weights and applying its gradient.
      backward_lead: float32 `[]`, by how many updates the backward's weights are newer than the forward's.
      global_norm: `[]`, norm of the gradient over all stages.
    """

    forward_delay: Any
    backward_lead: Any
    global_norm: Any


class ExtraArg(NamedTuple):
    """An extra argument that every `optimizer.update` gets.

    Attributes:
      name: keyword of the argument.
      value: where the value comes from.
      shape: shape of the value.
      dtype: dtype of the value; None: the dtype of gradient norms.
    """

    name: str
    value: Callable[[UpdateFacts], Any]
    shape: tuple[int, ...] = ()
    dtype: Any = np.float32

    def aval(self, norm_dtype: Any) -> jax.ShapeDtypeStruct:
        """The abstract value."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype or norm_dtype)


EXTRA_ARGS = (
    ExtraArg("delay", lambda facts: facts.forward_delay),
    ExtraArg("backward_delay", lambda facts: facts.forward_delay - facts.backward_lead),
    ExtraArg("global_norm", lambda facts: facts.global_norm, dtype=None),
)
"""The extra arguments of an optimizer, in order: the one place that declares them."""

GIVEN = tuple(arg.name for arg in EXTRA_ARGS)
"""The names of `EXTRA_ARGS`."""

PASSES = ("forward", "backward")
"""The passes that may read other weights than the newest, from a parameter hook."""


def read_delays(schedule: Schedule) -> dict[str, np.ndarray]:
    """Pass -> float `[S]`, how old or new the weights are that the pass reads.

    "forward": optimizer updates between reading the forward's weights and applying its gradient. "backward": by how many
    updates the backward's weights are newer than the forward's.
    """
    facts = schedule.facts()
    lead = facts.forward_delay - facts.backward_delay
    return {"forward": facts.forward_delay, "backward": lead}


# -- The update of a stage, as a program on packed arrays


class LeafSlots(NamedTuple):
    """Where the parts of a group have one of their inputs or outputs.

    Attributes:
      arrays: "parameters", "gradients", "optimizer_state", or a pass whose weights a hook gives.
      copies: for each copy of the leaf (several if tied) its place, and int32 `[parts]`, the first index of each part's
        leaf in that array.
    """

    arrays: str
    copies: Sequence[tuple[Place, np.ndarray]]


class UpdateGroup(NamedTuple):
    """Parts of an update that are one program on different leaves.

    Attributes:
      run: `(*inputs, *shared, *extra) -> outputs`.
      inputs: where the inputs are.
      outputs: where the outputs go.
      num_parts: how many parts there are.
    """

    run: Equations
    inputs: Sequence[LeafSlots]
    outputs: Sequence[LeafSlots]
    num_parts: int


@dataclasses.dataclass(frozen=True)
class StageUpdate:
    """One program that updates a stage.

    Parts run one after the other, and each reads and writes leaves of its own. For most optimizers a part is one weight,
    so an update needs temporary memory for one weight only.

    Attributes:
      groups: the program, in groups of equal parts.
      shared: inputs of every part: scalars among parameters, gradients and state. They are followed by the values of
        `EXTRA_ARGS`, and with hooks by the delays of `PASSES`.
      param_hooks: pass -> the function `(parameters, optimizer_state, delay) -> parameters`, of flat lists.
      parameters: for each parameter leaf, `(place, row)` of all its copies on the stage; several if tied.
      state: the place of each leaf of the optimizer's state.
    """

    groups: Sequence[UpdateGroup]
    shared: Sequence[LeafSlots]
    param_hooks: Mapping[str, Callable]
    parameters: Sequence[Sequence[tuple[Place, int]]]
    state: Sequence[Place]

    @property
    def reads(self) -> Mapping[str, Callable]:
        """The same as `param_hooks`."""
        return self.param_hooks


@dataclasses.dataclass(frozen=True)
class StageUpdates:
    """The updates of all stages.

    Attributes:
      programs: distinct updates.
      program_of_stage: `[S]`, position in `programs`.
      state: how the optimizer's state is packed, one owner per program.
      norm_dtype: dtype of the gradient's norm, at least float32.
    """

    programs: Sequence[StageUpdate]
    program_of_stage: Sequence[int]
    state: Packing
    norm_dtype: np.dtype


# -- What the optimizer sees of a stage


def stage_tree(stages: Stages, stage: int, per_layer: Sequence) -> list:
    """What the optimizer sees on a stage: `per_layer`, with None for layers of other stages.

    A tied weight appears once, in the first of its layers.
    """
    return _seen(stages, stages.layers_of(stage), per_layer)


def _seen(stages: Stages, layers: Sequence[int], per_layer: Sequence) -> list:
    """`per_layer` with None for layers outside of `layers`, and for copies of tied weights."""
    tied_copies = {copy for copies in stages.ties for copy in copies[1:]}
    trees: list = [None] * len(stages.layers)
    for i in layers:
        leaves, tree = jax.tree.flatten(per_layer[i])
        kept = [None if (i, j) in tied_copies else a for j, a in enumerate(leaves)]
        trees[i] = tree.unflatten(kept)
    return trees


def _leaf_copies(
    stages: Stages, stage: int
) -> tuple[tuple[tuple[Place, int], ...], ...]:
    """For each leaf of `stage_tree`, `(place, row)` of its copies on the stage."""
    places = {
        (layer, j): (place, row)
        for layer, run, row in stages.layer_runs(stage)
        for j, place in enumerate(run.parameters)
    }
    copies = {leaf: [place] for leaf, place in places.items()}
    for first, *others in stages.ties:
        on_stage = [places[leaf] for leaf in others if leaf in places]
        copies.setdefault(first, []).extend(on_stage)
        for leaf in others:
            copies.pop(leaf, None)
    return tuple(tuple(copies[leaf]) for leaf in places if leaf in copies)


# -- Tracing


@dataclasses.dataclass(frozen=True)
class _FlatUpdate:
    """An optimizer on one tree, as functions of flat lists.

    Attributes:
      update: `(*parameters, *gradients, *state, *extra) -> [*parameters, *state]`; `extra` are `EXTRA_ARGS`.
      init: `(*parameters) -> state`.
      parameters: paths of the parameters.
      state: paths of the state's leaves.
      state_avals: abstract values of the state.
    """

    update: Equations
    init: Equations
    parameters: Sequence[str]
    state: Sequence[str]
    state_avals: Sequence

    def expressions(
        self, numbers: dict, state_names: Mapping[str, Any]
    ) -> dict[str, tuple]:
        """Canonical ids of the expressions for each updated weight and each state leaf; equal ids mean equal math.

        Args:
          numbers: see `Equations.expressions`.
          state_names: path -> name, for state leaves whose value may differ from the whole model's.

        Returns:
          Path -> (id of the initial value, id of the value after one step).
        """
        weights = [("weight", path) for path in self.parameters]
        gradients = [("gradient", path) for path in self.parameters]
        state = [("state", state_names.get(path, path)) for path in self.state]
        names = [*weights, *gradients, *state, *(arg.name for arg in EXTRA_ARGS)]
        after = self.update.expressions(names, numbers)
        first = self.init.expressions(weights, numbers)
        paths = [f"parameters{path}" for path in self.parameters] + list(self.state)
        return dict(zip(paths, zip([None] * len(weights) + first, after), strict=True))


def _extra_args(gradients: Any, *values: Any) -> dict[str, Any]:
    """`EXTRA_ARGS` by name."""
    return {arg.name: value for arg, value in zip(EXTRA_ARGS, values, strict=True)}


def _norm_dtype(tree: Any) -> np.dtype:
    """Dtype of a gradient's norm: the dtype of the weights, but at least float32."""
    return np.result_type(np.float32, *(a.dtype for a in jax.tree.leaves(tree)))


def _flat_update(
    optimizer: optax.GradientTransformationExtraArgs,
    tree: Any,
    norm_dtype: np.dtype,
    where: str,
    extra: Callable[..., dict[str, Any]] = _extra_args,
) -> _FlatUpdate:
    """Traces `optimizer` on a tree of abstract arrays.

    Args:
      optimizer: the chain.
      tree: the parameters.
      norm_dtype: dtype of gradient norms.
      where: what the tree is, for the error.
      extra: `(gradients, *values of EXTRA_ARGS) -> keyword arguments` of the update.
    """
    leaves, treedef = jax.tree.flatten(tree)
    num_parameters, num_extra = len(leaves), len(EXTRA_ARGS)

    def init(*parameters):
        return jax.tree.leaves(optimizer.init(treedef.unflatten(parameters)))

    def update(*args):
        parameters = treedef.unflatten(args[:num_parameters])
        gradients = treedef.unflatten(args[num_parameters : 2 * num_parameters])
        state = state_tree.unflatten(args[2 * num_parameters : -num_extra])
        updates, state = optimizer.update(
            gradients, state, parameters, **extra(gradients, *args[-num_extra:])
        )
        updated = optax.apply_updates(parameters, updates)
        return [*jax.tree.leaves(updated), *jax.tree.leaves(state)]

    def paths(tree: Any) -> list[str]:
        return [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(tree)]

    try:
        state = jax.eval_shape(optimizer.init, tree)
        state_leaves, state_tree = jax.tree.flatten(state)
        extra_avals = [arg.aval(norm_dtype) for arg in EXTRA_ARGS]
        avals = [*leaves, *leaves, *state_leaves, *extra_avals]
        return _FlatUpdate(
            Equations.trace(update, *avals),
            Equations.trace(init, *leaves),
            paths(tree),
            paths(state),
            state_leaves,
        )
    except Exception as error:
        raise ValueError(
            f"`optimizer` cannot update {where}: {type(error).__name__}: {error}\n"
            "It is called as `optimizer.update(gradients, state, parameters, "
            f"{', '.join(f'{arg.name}=...' for arg in EXTRA_ARGS)})` with lists that hold one nested dict per layer, and "
            "None for layers of other stages. Give masks and labels as functions of such a list. An optimizer that needs "
            "more than that, such as the loss, cannot be used."
        ) from error


# -- Checks


def _check_layers_apart(whole: _FlatUpdate, on_stages: Sequence[_FlatUpdate]) -> None:
    """Raises unless every stage updates its weights as the update of the whole model would."""
    numbers: dict = {}
    # State leaves that may have another value on a stage than in the whole model. Starting from none, every leaf that
    # turns out to differ is added, until no weight and no further leaf differs.
    different: set[str] = set()
    while True:
        expected = whole.expressions(numbers, {p: (p, "whole") for p in different})
        of_stages = [
            flat.expressions(numbers, {p: (p, s) for p in different})
            for s, flat in enumerate(on_stages)
        ]
        wrong = [
            (s, path)
            for s, of_stage in enumerate(of_stages)
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


def _check_global_norm(
    optimizer: optax.GradientTransformationExtraArgs,
    tree: Any,
    norm_dtype: np.dtype,
    whole: _FlatUpdate,
) -> None:
    """Warns if the optimizer applies `global_norm` to something other than the gradient."""
    position = [arg.name for arg in EXTRA_ARGS].index("global_norm") - len(EXTRA_ARGS)
    if whole.update.inputs[position] not in whole.update.read():
        return
    numbers: dict = {}

    def weights(extra: Callable) -> list:
        flat = _flat_update(optimizer, tree, norm_dtype, "the model", extra)
        expressions = flat.expressions(numbers, {})
        return [expressions[f"parameters{path}"] for path in whole.parameters]

    def without_norm(gradients: Any, *values: Any) -> dict:
        args = _extra_args(gradients, *values)
        del args["global_norm"]
        return args

    def norm_of_gradients(gradients: Any, *values: Any) -> dict:
        norm = optax.tree.norm(gradients)
        return {**_extra_args(gradients, *values), "global_norm": norm}

    try:
        # Without the argument, a transform takes the norm of its own input.
        norm_of_input = weights(without_norm)
    except ValueError:
        return  # the optimizer requires the argument, so it takes no norm by itself
    if norm_of_input != weights(norm_of_gradients):
        warnings.warn(
            "`optimizer` clips something that is not the gradient by `global_norm`, which is the norm of the gradient. "
            "Put `jpipe.optim.clip_by_global_norm` first in the chain.",
            stacklevel=2,
        )


def _check_state_dtypes(flat: _FlatUpdate) -> None:
    """Raises if the state holds anything but numbers."""
    for path, leaf in zip(flat.state, flat.state_avals):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(
                f"`optimizer` keeps {path} of dtype {leaf.dtype} in its state, and only numbers can be kept there. "
                "Keep `jax.random.key_data` of a random key."
            )


# -- From a flat update to a stage update


def _state_leaves(flat: _FlatUpdate, parameters: Sequence) -> list[Leaf]:
    """The optimizer's state, each leaf split as the parameter that it belongs to.

    A state leaf belongs to the parameter whose path is the end of its own path, if both have the same shape.
    `optax.tree_map_params` cannot be used: it calls `optimizer.init` on a placeholder without layers, and functions that
    label parameters by path fail on that.
    """
    owners = {path: copies[0][0] for path, copies in zip(flat.parameters, parameters)}
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


def _flat_hook(
    name: str,
    hook: Callable,
    optimizer: optax.GradientTransformationExtraArgs,
    tree: Any,
) -> Callable:
    """A parameter hook as a function of flat lists: `(parameters, state, delay) -> parameters`.

    Args:
      name: the pass that reads what the hook returns.
      hook: the same as a function of trees.
      optimizer: the chain.
      tree: abstract parameters of the stage.
    """
    leaves, treedef = jax.tree.flatten(tree)
    state_leaves, state_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, tree))

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda a: (a.shape, np.dtype(a.dtype)), tree)

    def flat_hook(parameters: Sequence, state: Sequence, delay: Any) -> list:
        returned = hook(
            treedef.unflatten(parameters), state_tree.unflatten(state), delay
        )
        if described(returned) != described(tree):
            raise ValueError("it returns other shapes, dtypes or layers than it gets.")
        return jax.tree.leaves(returned)

    try:
        delay = jax.ShapeDtypeStruct((), np.float32)
        jax.eval_shape(flat_hook, leaves, state_leaves, delay)
    except Exception as error:
        raise ValueError(
            f"`{name}_params` cannot give the weights that a {name} reads: {type(error).__name__}: {error}\n"
            f"It is called as `{name}_params(parameters, optimizer_state, delay)` with what the optimizer sees of a stage."
        ) from error
    return flat_hook


def _with_hooks(flat: _FlatUpdate, param_hooks: Mapping[str, Callable]) -> Equations:
    """The update, followed by the weights of the hooks.

    Its inputs end with the delays of `PASSES`. Where the delay of a pass is 0, the pass reads the updated weights.
    """
    if not param_hooks:
        return flat.update
    num_parameters, num_passes = len(flat.parameters), len(PASSES)

    def update(*args):
        outputs = flat.update(*args[:-num_passes])
        delays = dict(zip(PASSES, args[-num_passes:]))
        parameters, state = outputs[:num_parameters], outputs[num_parameters:]
        for name, hook in param_hooks.items():
            hooked = hook(parameters, state, delays[name])
            outputs += [
                jnp.where(delays[name] > 0, a, b) for a, b in zip(hooked, parameters)
            ]
        return outputs

    delay_avals = [jax.ShapeDtypeStruct((), np.float32)] * num_passes
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.update.inputs
    ]
    return Equations.trace(update, *avals, *delay_avals)


class _PackedLeaf(NamedTuple):
    """One input or output of a flat update, in packed arrays.

    Attributes:
      arrays: as in `LeafSlots`.
      copies: `(place, row)` of each copy.
    """

    arrays: str
    copies: Sequence[tuple[Place, int]]

    def layout(self) -> tuple:
        """What leaves of one group have in common."""
        return self.arrays, tuple(place.array for place, _ in self.copies)


def _stage_update(
    equations: Equations,
    param_hooks: Mapping[str, Callable],
    parameters: Sequence,
    state: Sequence[Place],
) -> StageUpdate:
    """The update `equations` on packed arrays.

    Args:
      equations: as `_with_hooks` returns them.
      param_hooks: pass -> hook.
      parameters: for each parameter leaf, `(place, row)` of its copies.
      state: for each leaf of the optimizer's state, its place.
    """
    state_leaves = [_PackedLeaf("optimizer_state", [(place, 0)]) for place in state]
    weights = [_PackedLeaf("parameters", copies) for copies in parameters]
    gradients = [_PackedLeaf("gradients", copies[:1]) for copies in parameters]
    hooked = [
        _PackedLeaf(name, copies) for name in param_hooks for copies in parameters
    ]
    inputs, outputs = (
        weights + gradients + state_leaves,
        weights + state_leaves + hooked,
    )
    # Scalars are read by every part.
    small = [i for i, v in enumerate(equations.inputs) if v.aval.size == 1]
    groups = _grouped(equations.parts(small), len(small), inputs, outputs)
    shared = [_slots([inputs[i]]) for i in small if i < len(inputs)]
    return StageUpdate(groups, shared, param_hooks, parameters, state)


def _grouped(
    parts: Sequence[Part],
    num_shared: int,
    inputs: Sequence[_PackedLeaf],
    outputs: Sequence[_PackedLeaf],
) -> list[UpdateGroup]:
    """Groups parts that are one program on leaves of the same arrays."""
    alike: dict[tuple, list[Part]] = {}
    for part in parts:
        part = part._replace(inputs=part.inputs[: len(part.inputs) - num_shared])
        key = (
            part.equations.text(),
            tuple(inputs[i].layout() for i in part.inputs),
            tuple(outputs[i].layout() for i in part.outputs),
        )
        alike.setdefault(key, []).append(part)
    groups = []
    for members in alike.values():
        of_inputs = zip(*(part.inputs for part in members))
        of_outputs = zip(*(part.outputs for part in members))
        groups.append(
            UpdateGroup(
                run=members[0].equations,
                inputs=[_slots([inputs[i] for i in column]) for column in of_inputs],
                outputs=[_slots([outputs[i] for i in column]) for column in of_outputs],
                num_parts=len(members),
            )
        )
    return groups


def _slots(leaves: Sequence[_PackedLeaf]) -> LeafSlots:
    """Where a group's parts have one input or output; `leaves` has one leaf per part."""
    first = leaves[0]
    copies = []
    for c, (place, _) in enumerate(first.copies):
        starts = [leaf.copies[c][0].start(leaf.copies[c][1]) for leaf in leaves]
        copies.append((place, np.array(starts, np.int32)))
    return LeafSlots(first.arrays, copies)


# -- All stages


class _Draft(NamedTuple):
    """An update of a stage before the optimizer's state is packed, which needs all stages."""

    equations: Equations
    param_hooks: Mapping[str, Callable]
    parameters: Sequence
    state_leaves: Sequence[Leaf]


def make_updates(
    stages: Stages,
    optimizer: optax.GradientTransformation,
    hooks: Mapping[str, Callable] | None = None,
) -> StageUpdates:
    """Traces the optimizer on every stage.

    Args:
      stages: the model, cut.
      optimizer: any Optax chain.
      hooks: of `PASSES`: functions of trees that give the weights of the pass, see `StageUpdate.param_hooks`.

    Returns:
      The updates of all stages.

    Raises:
      ValueError: if the update of a stage's layers depends on layers of other stages, the optimizer asks for other
        arguments than `EXTRA_ARGS`, its state holds anything but numbers, or a hook returns other shapes than it gets.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    parameters = [layer.parameters for layer in stages.layers]
    tree = _seen(stages, range(len(stages.layers)), parameters)
    norm_dtype = _norm_dtype(tree)
    whole = _flat_update(optimizer, tree, norm_dtype, "the model")
    trees = [stage_tree(stages, s, parameters) for s in range(stages.num_stages)]
    on_stages = [
        _flat_update(optimizer, tree, norm_dtype, f"stage {s} by itself")
        for s, tree in enumerate(trees)
    ]
    if stages.num_stages > 1:
        _check_layers_apart(whole, on_stages)
    _check_global_norm(optimizer, tree, norm_dtype, whole)

    drafts: dict[tuple, _Draft] = {}
    program_of_stage = []
    for s, (flat, tree) in enumerate(zip(on_stages, trees)):
        _check_state_dtypes(flat)
        flat_hooks = {
            name: _flat_hook(name, hook, optimizer, tree)
            for name, hook in (hooks or {}).items()
        }
        equations, copies = _with_hooks(flat, flat_hooks), _leaf_copies(stages, s)
        key = stages.program_of_stage[s], copies, equations.text()
        if key not in drafts:
            state_leaves = _state_leaves(flat, copies)
            drafts[key] = _Draft(equations, flat_hooks, copies, state_leaves)
        program_of_stage.append(list(drafts).index(key))
    packing = Packing.of(
        [draft.state_leaves for draft in drafts.values()],
        num_stages=[program_of_stage.count(u) for u in range(len(drafts))],
    )
    programs = [
        _stage_update(draft.equations, draft.param_hooks, draft.parameters, places)
        for draft, places in zip(drafts.values(), packing.places)
    ]
    return StageUpdates(programs, program_of_stage, packing, norm_dtype)
