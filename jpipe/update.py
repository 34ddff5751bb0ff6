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
      parameters: `(place, row)` of each parameter leaf.
      state: the place of each leaf of the optimizer's state.
    """

    function: Callable
    parameters: Sequence[tuple[Place, int]]
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
    """`per_layer` with None in place of the layers of other stages."""
    mine = stages.layers_of(stage)
    return [tree if i in mine else None for i, tree in enumerate(per_layer)]


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
    whole = [layer.parameters for layer in stages.layers]
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
        flat, avals, num_p = _flat_update(optimizer, stage_tree(stages, s, whole))
        state_leaves = avals[2 * num_p : -2]
        places = [
            (place, row)
            for _, places, row in stages.layer_places(s)
            for place in places
        ]
        key = (stages.program_of_stage[s], tuple(places), jaxpr_text(flat, *avals))
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
