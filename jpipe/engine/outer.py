"""The outer step: learners along "data" come together, see `jpipe.options.local_steps`."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jpipe.engine.context import TrainingDevice
from jpipe.engine.layout import REPLICATED
from jpipe.engine.newest import HookedWeights, NewestRows
from jpipe.engine.state import moving_weights
from jpipe.engine.training import TrainingPass
from jpipe.mesh import DATA, STAGE
from jpipe.options.local_steps import ARRIVALS, FRAGMENTS, MEAN, MOVED, NUMBER, SENT, LocalSteps, SparseAverage

Packed = dict[str, jax.Array]
Fields = dict[str, Any]
"""Field of a state -> its packed arrays."""
OUTER = ("anchor", "outer_state")
"""The fields of a state that outer steps alone read and write."""
FIELDS = ("parameters", "read_parameters", *OUTER)
"""The fields of a state that an outer step changes."""


def static_arguments(spec: TrainingPass) -> tuple[int, ...]:
    """The arguments of the compiled outer step that are static: a part of neighbours is, a random subset is not."""
    assert spec.communication.local_steps is not None
    return (0,) if spec.communication.local_steps.sparse is None else ()


def outer_step(spec: TrainingPass, fragment: Any, arrays: Fields, read: Fields) -> Fields:
    """The fields `FIELDS` after an outer step.

    It moves the newest weights. Microbatches in flight that read older ones go on with these.

    Args:
      spec: the pass of training.
      fragment: the fragment that comes together; None: all of them.
      arrays: the fields before it, global arrays.
      read: the counters of the state, and the optimizer's state.
    """
    local_steps = spec.communication.local_steps
    assert local_steps is not None
    shapes = moving_weights(spec.packings, spec.layout["anchor"].shapes)
    fragments = Fragments(local_steps, shapes)

    def brought_together(subset: Any, arrays: Fields) -> Fields:
        # In whole numbers of rows fragments would be unlike: many arrays have one or two.
        flat = jax.tree.map(lambda a: a.reshape(len(a), -1) if a.ndim > 2 else a, arrays)
        if local_steps.sparse is not None:
            flat = LateFragments(fragments, local_steps.sparse).outer_step(subset, flat)
        else:
            for k in local_steps.fragments(fragment):
                flat = fragments.bring_together(k, flat)
        return jax.tree.map(lambda a, like: a.reshape(like.shape), flat, arrays)

    def on_device(subset: Any, arrays: Fields, read: Fields) -> Fields:
        counters = spec.counters(read["counters"])
        device = TrainingDevice.here(spec, counters, counters["round"])
        newest, weights = NewestRows(device), {n: arrays["parameters"][n] for n in shapes}
        moving = {
            field: {n: a for n, a in arrays[field].items() if n in shapes or n in fragments.leaves} for field in OUTER
        }
        moved = brought_together(subset, {"parameters": newest.take(weights), **moving})
        hooked = HookedWeights(device).computed(moved["parameters"], read["optimizer_state"])
        return {
            "parameters": arrays["parameters"] | newest.put(weights, moved["parameters"]),
            "read_parameters": {n: newest.put(a, hooked[n]) for n, a in arrays["read_parameters"].items()},
            **{field: arrays[field] | moved[field] for field in OUTER},
        }

    specs = {name: spec.layout[name].spec for name in FIELDS}
    specs_read = {"counters": REPLICATED, "optimizer_state": spec.layout["optimizer_state"].spec}
    body = jax.shard_map(
        on_device,
        mesh=spec.mesh,
        in_specs=(PartitionSpec(), specs, specs_read),
        out_specs=specs,
        axis_names={STAGE, DATA},
        check_vma=False,
    )
    subset = None if fragment is None or local_steps.sparse is None else jnp.int32(fragment)
    return body(subset, arrays, read)


class Fragments:
    """Fragments of the weights of a device.

    Args:
      local_steps: the outer step.
      shapes: the arrays of weights that updates change.
    """

    def __init__(self, local_steps: LocalSteps, shapes: Mapping[str, Any]) -> None:
        self.local_steps = local_steps
        self.sizes = {name: math.prod(a.shape[1:]) for name, a in shapes.items()}
        self.leaves = local_steps.state_leaves(shapes)
        self.outer_leaves = local_steps.outer_leaves(shapes)

    def indices(self, k: Any) -> dict[str, dict[str, tuple]]:
        """The places of a fragment in all arrays of the fields that have some."""
        parts = {n: (slice(None), self.local_steps.part(k, i, size)) for i, (n, size) in enumerate(self.sizes.items())}
        state = {
            i: (k,) if leaf.weights is None else parts[leaf.weights]
            for i, leaf in self.leaves.items()
            if i in self.outer_leaves or leaf.weights is not None or i == ARRIVALS
        }
        return {"parameters": parts, "anchor": parts, "outer_state": state}

    def take(self, k: Any, arrays: Fields) -> Fields:
        """A fragment of all arrays."""
        return {field: {n: arrays[field][n][i] for n, i in places.items()} for field, places in self.indices(k).items()}

    def put(self, k: Any, arrays: Fields, changed: Fields) -> Fields:
        """The arrays with the numbers of a fragment."""
        places = self.indices(k)
        return {
            field: packed | {n: packed[n].at[places[field][n]].set(a) for n, a in changed[field].items()}
            for field, packed in arrays.items()
        }

    def applied(self, taken: Fields, mean: Packed) -> Fields:
        """A fragment after the outer step, from its mean."""
        state = [taken["outer_state"][i] for i in self.outer_leaves]
        after, state = self.local_steps.updated(taken["anchor"], mean, state)
        outer_state = taken["outer_state"] | dict(zip(self.outer_leaves, state, strict=True))
        return {"parameters": after, "anchor": after, "outer_state": outer_state}

    def bring_together(self, k: Any, arrays: Fields) -> Fields:
        """The flat arrays after the outer step of a fragment whose mean arrives at once."""
        taken = self.take(k, arrays)
        return self.put(k, arrays, self.applied(taken, lax.pmean(taken["parameters"], DATA)))


class LateFragments:
    """Fragments that are random subsets, and whose means arrive later.

    Args:
      fragments: the fragments.
      sparse: the delay and the correction.
    """

    def __init__(self, fragments: Fragments, sparse: SparseAverage) -> None:
        self.fragments = fragments
        self.sparse = sparse
        self.apart = [leaf for leaf in fragments.leaves if leaf.startswith((MEAN, SENT)) or leaf == FRAGMENTS]

    def outer_step(self, fragment: jax.Array | None, arrays: Fields) -> Fields:
        """The flat arrays after an outer step. None brings all together at once, and forgets what is in flight."""
        delay, together = self.sparse.delay, self.fragments.bring_together
        if fragment is None:
            arrays = lax.fori_loop(0, self.fragments.local_steps.num_fragments, together, arrays)
            return self._counted(arrays, 0) if delay else arrays
        if not delay:
            return self._arrived(self._begun(fragment, arrays), arrays, jnp.bool(True))
        number = arrays["outer_state"][NUMBER][0]
        slot = number % delay
        # What arrives lies in the slot of what begins.
        in_flight = {name: arrays["outer_state"][name][slot] for name in self.apart}
        arrays = self._arrived(in_flight, arrays, number >= delay)
        begun = self._begun(fragment, arrays)
        state = {name: arrays["outer_state"][name].at[slot].set(begun[name]) for name in self.apart}
        return self._counted(arrays | {"outer_state": arrays["outer_state"] | state}, number + 1)

    @staticmethod
    def _counted(arrays: Fields, number: Any) -> Fields:
        """The arrays with the number of the next outer step since all came together."""
        state = arrays["outer_state"]
        return arrays | {"outer_state": state | {NUMBER: jnp.full_like(state[NUMBER], number)}}

    def _begun(self, k: jax.Array, arrays: Fields) -> Packed:
        """What is in flight of a subset: its mean, and what this learner has in it."""
        sent = self.fragments.take(k, arrays)["parameters"]
        means = {MEAN + name: a.reshape(-1) for name, a in lax.pmean(sent, DATA).items()}
        return means | {SENT + name: a.reshape(-1) for name, a in sent.items()} | {FRAGMENTS: k}

    def _arrived(self, in_flight: Packed, arrays: Fields, valid: jax.Array) -> Fields:
        """The arrays after a mean has arrived, if there is one."""
        k = in_flight[FRAGMENTS]
        taken = self.fragments.take(k, arrays)
        weights, state = taken["parameters"], taken["outer_state"]

        def part(kind: str) -> Packed:
            return {n: in_flight[kind + n].reshape(a.shape) for n, a in weights.items() if kind + n in in_flight}

        changed = self.fragments.applied(taken, part(MEAN))
        if self.sparse.correction is not None:
            averages = {n: state[MOVED + n] for n in weights}
            arrivals = state[ARRIVALS] + 1
            after = changed["parameters"]
            ends, averages = self.sparse.corrected(after, weights, part(SENT), averages, arrivals)
            changed["parameters"] = ends
            changed["outer_state"] |= {MOVED + n: a for n, a in averages.items()} | {ARRIVALS: arrivals}
        changed = jax.tree.map(lambda new, old: jnp.where(valid, new, old), changed, taken)
        return self.fragments.put(k, arrays, changed)
