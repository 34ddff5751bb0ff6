"""The optimizer on each stage: any Optax chain, on each layer's own tree.

The chain sees a list with one entry a layer of the model, None for the layers of other stages, so paths and
labels are the same at any stage count. Stages whose update is the same program share it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax

from jpipe.backward import jaxpr_text, mixes
from jpipe.packing import Packing, Place
from jpipe.stages import Stages


@dataclasses.dataclass(frozen=True)
class Update:
    """One program that updates a stage.

    Attributes:
      function: `(parameters, gradients, optimizer_state, delay, global_norm) -> (parameters, optimizer_state)`,
        all flat lists of arrays.
      parameters: for each parameter leaf, `(place, row)` of all its copies on the stage; more than one if tied.
      state: the place of each leaf of the optimizer's state.
    """

    function: Callable
    parameters: Sequence[Sequence[tuple[Place, int]]]
    state: Sequence[Place]


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of all stages.

    Attributes:
      programs: distinct updates; program_of_stage: which one a stage runs.
      state: how the optimizer's state is packed, one owner a program.
    """

    programs: Sequence[Update]
    program_of_stage: Sequence[int]
    state: Packing


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


def _flat_update(optimizer, tree) -> tuple[Callable, list, int]:
    """One update of `tree` from and to flat lists, its arguments, and how many of them are parameters."""
    leaves, treedef = jax.tree.flatten(tree)
    state_leaves, state_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, tree))
    num_p, num_s = len(leaves), len(state_leaves)

    def flat(*args):
        parameters, gradients = (
            treedef.unflatten(args[:num_p]),
            treedef.unflatten(args[num_p : 2 * num_p]),
        )
        state = state_tree.unflatten(args[2 * num_p : 2 * num_p + num_s])
        delay, global_norm = args[2 * num_p + num_s :]
        updates, state = optimizer.update(
            gradients, state, parameters, delay=delay, global_norm=global_norm
        )
        return [
            *jax.tree.leaves(optax.apply_updates(parameters, updates)),
            *jax.tree.leaves(state),
        ]

    scalar = jax.ShapeDtypeStruct((), np.float32)
    return flat, [*leaves, *leaves, *state_leaves, scalar, scalar], num_p


def make_updates(stages: Stages, optimizer: optax.GradientTransformation) -> Updates:
    """Traces the optimizer on every stage.

    Raises:
      ValueError: if an update of one layer depends on the gradient of another, which a stage cannot see whole.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    texts: dict = {}
    drafts, program_of_stage = [], []
    parameters = [layer.parameters for layer in stages.layers]
    whole = _seen(stages, range(len(stages.layers)), parameters)
    if stages.num_stages > 1:
        flat, avals, num_p = _flat_update(optimizer, whole)
        layer = [i for i, t in enumerate(whole) for _ in jax.tree.leaves(t)]
        everyone = [-1] * (len(avals) - 2 * num_p - 2)
        carried = [(2 * num_p + i, num_p + i) for i in range(len(everyone))]
        groups = [*[-1] * num_p, *layer, *everyone, -1, -1]
        if mixes(flat, avals, groups, [*layer, *everyone], carried):
            raise ValueError(
                "`optimizer` lets the update of one layer depend on the gradients "
                "of others, as `optax.clip_by_global_norm` does: a stage sees "
                "its own layers only, so the result would depend on how the "
                "model is cut. Use `jpipe.optim.clip_by_global_norm` for the "
                "norm over all stages, and otherwise transforms that treat each "
                "layer by itself."
            )
    for s in range(stages.num_stages):
        flat, avals, num_p = _flat_update(optimizer, stage_tree(stages, s, parameters))
        state_leaves = avals[2 * num_p : -2]
        places = tuple(tuple(copies) for copies in _leaf_copies(stages, s))
        key = (stages.program_of_stage[s], places, jaxpr_text(flat, *avals))
        if key not in texts:
            texts[key] = len(drafts)
            drafts.append((flat, places, state_leaves))
        program_of_stage.append(texts[key])
    packing = Packing.of(
        [[(leaf, 1) for leaf in state_leaves] for _, _, state_leaves in drafts]
    )
    programs = []
    for (flat, places, _), state_places in zip(drafts, packing.places):

        def function(parameters, gradients, state, delay, global_norm, flat=flat):
            out = flat(*parameters, *gradients, *state, delay, global_norm)
            return out[: len(parameters)], out[len(parameters) :]

        programs.append(Update(function, places, state_places))
    return Updates(programs, program_of_stage, packing)
