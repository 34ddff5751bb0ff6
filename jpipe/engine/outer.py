"""The outer step: learners along "data" come together, see `jpipe.options.local_steps`."""

import math

import jax
from jax import lax

from jpipe.engine.state import moving_weights
from jpipe.engine.training import TrainingPass
from jpipe.mesh import DATA, STAGE

Packed = dict[str, jax.Array]
OUTER = ("anchor", "outer_state")
"""The fields of a state that outer steps alone read and write."""
FIELDS = ("parameters", *OUTER)
"""The fields of a state that an outer step reads and writes."""


def outer_step(spec: TrainingPass, fragment: int | None, arrays: dict[str, Packed]) -> dict[str, Packed]:
    """The fields `FIELDS` after an outer step.

    Args:
      spec: the pass of training.
      fragment: the fragment that comes together; None: all of them.
      arrays: the fields before it, global arrays.
    """
    local_steps = spec.communication.local_steps
    assert local_steps is not None
    shapes = moving_weights(spec.packings, spec.layout["parameters"].shapes)
    leaves = local_steps.state_leaves(shapes)

    def bring_together(k: int, arrays: dict[str, Packed]) -> dict[str, Packed]:
        """The flat arrays after the outer step of a fragment."""
        parts = {name: local_steps.part(k, math.prod(a.shape[1:])) for name, a in shapes.items()}
        indices: dict[str, dict[str, tuple]] = {"parameters": {n: (slice(None), part) for n, part in parts.items()}}
        indices["anchor"] = indices["parameters"]
        indices["outer_state"] = {
            i: (k,) if leaf.weights is None else indices["anchor"][leaf.weights] for i, leaf in leaves.items()
        }
        taken = {field: {n: a[indices[field][n]] for n, a in packed.items()} for field, packed in arrays.items()}
        mean = lax.pmean(taken["parameters"], DATA)
        after, state = local_steps.updated(taken["anchor"], mean, [taken["outer_state"][i] for i in leaves])
        changed = {"parameters": after, "anchor": after, "outer_state": dict(zip(leaves, state, strict=True))}
        return {
            field: {n: a.at[indices[field][n]].set(changed[field][n]) for n, a in packed.items()}
            for field, packed in arrays.items()
        }

    def on_device(arrays: dict[str, Packed]) -> dict[str, Packed]:
        moving = {
            field: {n: a for n, a in packed.items() if n in shapes or n in leaves} for field, packed in arrays.items()
        }
        # In whole numbers of rows fragments would be unlike: many arrays have one or two.
        flat = jax.tree.map(lambda a: a.reshape(len(a), -1) if a.ndim > 2 else a, moving)
        for k in local_steps.fragments(fragment):
            flat = bring_together(k, flat)
        moved = jax.tree.map(lambda a, like: a.reshape(like.shape), flat, moving)
        return {field: packed | moved[field] for field, packed in arrays.items()}

    specs = {name: spec.layout[name].spec for name in FIELDS}
    body = jax.shard_map(
        on_device,
        mesh=spec.mesh,
        in_specs=(specs,),
        out_specs=specs,
        axis_names={STAGE, DATA},
        check_vma=False,
    )
    return body({name: arrays[name] for name in FIELDS})
