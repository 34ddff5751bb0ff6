"""The outer step: learners along "data" come together, see `jpipe.options.local_steps`."""

import jax
from jax import lax

from jpipe.engine import layout as layouts
from jpipe.engine.training import TrainingPass
from jpipe.mesh import DATA, STAGE
from jpipe.options.local_steps import StateLeaf

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
    shapes = spec.layout["parameters"].shapes
    leaves = local_steps.state_leaves(shapes)

    def bring_together(k: int, arrays: dict[str, Packed]) -> dict[str, Packed]:
        parts = {name: local_steps.part(k, a.shape[1]) for name, a in shapes.items()}
        parts = {name: part for name, part in parts.items() if part.start < part.stop}

        def index(leaf: StateLeaf) -> tuple:
            return (k,) if leaf.weights is None else (slice(None), parts[leaf.weights])

        def of_weights(field: str) -> dict[str, jax.Array]:
            return {name: arrays[field][name][:, part] for name, part in parts.items()}

        held = {i: leaf for i, leaf in leaves.items() if leaf.weights is None or leaf.weights in parts}
        state = [arrays["outer_state"][i][index(leaf)] for i, leaf in held.items()]
        after, state = local_steps.updated(of_weights("anchor"), lax.pmean(of_weights("parameters"), DATA), state)
        weights = {
            field: arrays[field] | {name: arrays[field][name].at[:, part].set(after[name]) for name, part in parts.items()}
            for field in ("parameters", "anchor")
        }
        moved = {i: arrays["outer_state"][i].at[index(leaf)].set(a) for (i, leaf), a in zip(held.items(), state)}
        return {**weights, "outer_state": arrays["outer_state"] | moved}

    def on_device(arrays: dict[str, Packed]) -> dict[str, Packed]:
        for k in local_steps.fragments(fragment):
            arrays = bring_together(k, arrays)
        return arrays

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
