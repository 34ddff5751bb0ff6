"""The tree of the model that the optimizer sees on a stage."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from jpipe.layers.model_tree import joined
from jpipe.stages.cut import Stages


def stage_tree(stages: Stages, stage: int, per_layer: Sequence) -> Any:
    """The tree that the optimizer sees on a stage: see `seen_by_optimizer`."""
    return seen_by_optimizer(stages, stages.layers_of(stage), per_layer)


def seen_by_optimizer(stages: Stages, layers: Sequence[int], per_layer: Sequence) -> Any:
    """The tree of the model that the optimizer sees, with None for other layers than the given ones.

    A tied weight appears once, in the first of its layers. Frozen weights are None.
    """
    unseen = {copy for copies in stages.ties for copy in copies[1:]}
    unseen |= {(i, j) for i in layers for j in stages.layers[i].frozen}
    trees: list = [None] * len(stages.layers)
    for i in layers:
        leaves, tree = jax.tree.flatten(per_layer[i])
        kept = [None if (i, j) in unseen else a for j, a in enumerate(leaves)]
        trees[i] = tree.unflatten(kept)
    return joined(stages.layers, trees)


def leaves_seen(stages: Stages, layers: Sequence[int]) -> list[tuple[int, int]]:
    """The `(layer, leaf)` that each leaf of `seen_by_optimizer` is."""
    numbers = itertools.count()
    structures = [jax.tree.structure(layer.parameters) for layer in stages.layers]
    of_number = [(i, j) for i, tree in enumerate(structures) for j in range(tree.num_leaves)]
    numbered = [tree.unflatten(itertools.islice(numbers, tree.num_leaves)) for tree in structures]
    return [of_number[n] for n in jax.tree.leaves(seen_by_optimizer(stages, layers, numbered))]
