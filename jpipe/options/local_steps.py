"""Replicas that train apart for some steps, and then agree: local SGD, DiLoCo and late sparse averages."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.tree_util import DictKey

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.layers.elementwise import ELEMENTWISE
from jpipe.layers.equations import Equations
from jpipe.mesh import DATA, split_axes
from jpipe.schedule import Schedule

Packed = dict[str, jax.Array]


class StateLeaf(NamedTuple):
    """A leaf of the state of the outer optimizer on a device.

    Attributes:
      shape: its shape and dtype. What belongs to no weight has an axis over fragments.
      weights: the array of packed weights that it belongs to; None: it belongs to none, such as a count of updates.
    """

    shape: jax.ShapeDtypeStruct
    weights: str | None


_COPIES = ("convert_element_type", "copy", "copy_p", "reshape")


MEAN, SENT, MOVED = "mean of ", "sent of ", "moved of "
FRAGMENTS, ARRIVALS, NUMBER = "fragments in flight", "arrivals", "outer steps"


@suggests
@dataclasses.dataclass(frozen=True)
class SparseAverage:
    """Averages of random subsets of the weights that arrive late.

    Each fragment of `LocalSteps` is then a random subset of the entries of every array: of each P = `num_fragments`
    neighbouring entries one is in it. All learners know the subsets from the seed. `outer_step(state, fragment=k)`
    begins the mean of subset k, and applies the mean that was begun `delay` outer steps before. Each learner adds what
    it has moved meanwhile, or a moving average of it, to these entries.

    Attributes:
      delay: the outer steps between the begin of a mean and its arrival, at most `num_fragments`; 0: at once.
      correction: the decay of the moving average of the movements of a learner's entry between begin and arrival, in
        [0, 1). 0.0 adds the last movement as it is; None adds nothing.
      seed: decides the subsets.

    Raises:
      ValueError: if a number is out of its range.

    References:
      Ajanthan et al., "AsyncMesh: Fully Asynchronous Optimization for Data and Pipeline Parallelism", 2026,
      arXiv:2601.22442.
    """

    delay: int = 1
    correction: float | None = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("delay", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                raise ValueError(f"`{name}` must be a whole number, from 0 to 2**31 - 1, got {shown(value)}.")
        value = self.correction
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1):
            raise ValueError(
                "`correction` is the decay of a moving average and must lie in [0, 1); None leaves the correction out. "
                f"Got {shown(value)}."
            )

    def subset(self, k: jax.Array | int, array: int, size: int, num_fragments: int) -> jax.Array:
        """The places of a subset in an array, in increasing order; places from `size` on are none.

        Args:
          k: the subset.
          array: the number of the array. Each has subsets of its own.
          size: its entries.
          num_fragments: the subsets, which share the entries among them.
        """
        count = -(-size // num_fragments)
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), array)
        shifts = jax.random.randint(key, (count,), 0, num_fragments)
        return jnp.arange(count) * num_fragments + (shifts + k) % num_fragments

    def state_leaves(self, weights: Mapping[str, jax.ShapeDtypeStruct], num_fragments: int) -> dict[str, StateLeaf]:
        """What a learner keeps for means in flight, and for its correction. All begins with zeros."""
        leaves = {}
        if self.correction is not None:
            leaves = {MOVED + name: StateLeaf(a, name) for name, a in _wide(weights).items()}
            leaves[ARRIVALS] = StateLeaf(jax.ShapeDtypeStruct((num_fragments,), np.dtype(np.int32)), None)
        if self.delay:
            for name, a in weights.items():
                number = a.shape[0] * -(-math.prod(a.shape[1:]) // num_fragments)
                sent = StateLeaf(jax.ShapeDtypeStruct((self.delay, number), a.dtype), None)
                leaves[MEAN + name] = sent
                if self.correction is not None:
                    leaves[SENT + name] = sent
            leaves[FRAGMENTS] = StateLeaf(jax.ShapeDtypeStruct((self.delay,), np.dtype(np.int32)), None)
            leaves[NUMBER] = StateLeaf(jax.ShapeDtypeStruct((1,), np.dtype(np.int32)), None)
        return leaves

    def corrected(
        self, after: Packed, weights: Packed, sent: Packed, averages: Packed, arrivals: jax.Array
    ) -> tuple[Packed, Packed]:
        """The weights of a learner where a mean arrives, and the new moving averages.

        Args:
          after: what the outer optimizer makes of the mean.
          weights: those of the learner now.
          sent: its weights in the mean.
          averages: the moving averages of its movements, from zeros.
          arrivals: the movements in the averages, with this one. Few of them weigh less than 1 together.
        """
        if self.correction is None:
            return after, averages
        decay = self.correction
        moved = {n: weights[n].astype(a.dtype) - sent[n].astype(a.dtype) for n, a in averages.items()}
        averages = {n: decay * a + (1 - decay) * moved[n] for n, a in averages.items()}
        total = 1 - jnp.power(jnp.float32(decay), arrivals)
        ends = {n: (a.astype(averages[n].dtype) + averages[n] / total).astype(a.dtype) for n, a in after.items()}
        return ends, averages


@suggests
@dataclasses.dataclass(frozen=True, eq=False)
class LocalSteps:
    """Replicas along "data" that update weights of their own, until `Pipeline.outer_step` brings them together.

    In a step no gradient is exchanged between replicas: each is a learner, with its rows of the minibatch, its weights,
    its optimizer's state and its moving averages. `Pipeline.outer_step` takes the mean w of their weights and gives the
    difference from the weights of the last outer step, a - w, as a gradient to an optimizer. Its result is the weights
    of all learners from then on. Their optimizers' states stay their own. In an asynchronous schedule it moves the
    newest weights of each stage, and microbatches in flight that read older versions go on with these.

    Attributes:
      outer: the optimizer of the outer step. `optax.sgd(0.7, momentum=0.9, nesterov=True)` is DiLoCo's;
        `optax.sgd(1.0)` takes the mean, which is local SGD. It works element by element, so that the weights of all
        layers may lie in one vector.
      num_fragments: the parts that the weights of each device are cut into. `outer_step(state, fragment=k)` brings
        together part k alone: streaming DiLoCo sends one part at a time.
      sparse: a `jpipe.SparseAverage`: the parts are random subsets of the entries, and their means may arrive late;
        None: they are neighbours, and come together at once.

    Raises:
      ValueError: if `outer` is no optimizer, or looks at more than one element; `num_fragments` is not at least 1, or
        less than the delay of `sparse`.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv:2311.08105,
      algorithm 1. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512, section
      2.1. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767.
    """

    outer: optax.GradientTransformation
    num_fragments: int = 1
    sparse: SparseAverage | None = None

    def __post_init__(self) -> None:
        if not (callable(getattr(self.outer, "init", None)) and callable(getattr(self.outer, "update", None))):
            raise ValueError(f"`outer` must be an Optax transform, such as optax.sgd(0.7), got {shown(self.outer)}.")
        if isinstance(self.num_fragments, bool) or not isinstance(self.num_fragments, int) or self.num_fragments < 1:
            raise ValueError(f"`num_fragments` must be a whole number, at least 1, got {shown(self.num_fragments)}.")
        if not isinstance(self.sparse, SparseAverage | None):
            raise ValueError(f"`sparse` must be a `jpipe.SparseAverage`, got {shown(self.sparse)}.")
        if self.sparse is not None and self.sparse.delay > self.num_fragments:
            raise ValueError(
                f"`delay` must be at most `num_fragments`, got {self.sparse.delay} and {self.num_fragments}: a mean "
                "arrives before its entries are sent again. Take a smaller delay or more fragments."
            )
        wrong = [eqn.primitive.name for eqn in self._traced.equations if not _is_elementwise(eqn)]
        if wrong:
            raise ValueError(
                f"`outer` must work element by element, and its update has `{wrong[0]}`: the weights of all layers lie "
                "in one vector, in which a norm or a product has no meaning. Take SGD, momentum or Adam."
            )

    @functools.cached_property
    def _traced(self) -> Equations:
        """The update of an array."""
        weights = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        state = jax.eval_shape(self.outer.init, weights)
        return Equations.of(jax.make_jaxpr(self.outer.update)(weights, state, weights))

    @property
    def text(self) -> str:
        """What it computes, for the comparison of two pipelines."""
        return f"{self.num_fragments} {self.sparse or ''} {self._traced.text()}"

    def check(self, mesh: Mesh, schedule: Schedule, others: Mapping[str, Any]) -> None:
        """Refuses a pipeline in which replicas cannot be apart.

        Args:
          mesh: the devices.
          schedule: the table.
          others: name -> value of the arguments that exclude it.

        Raises:
          ValueError: says why.
        """
        if mesh.shape.get(DATA, 1) == 1:
            raise ValueError(
                f'`local_steps` is for replicas along the axis "data", and the mesh has {dict(mesh.shape)}. Give the '
                f"mesh one: `jpipe.make_mesh(stage={schedule.num_devices}, data=2)`, or leave `local_steps` out."
            )
        split = split_axes(mesh.shape)
        if split:
            raise ValueError(
                f"`local_steps` takes weights that are whole on a device, and the mesh splits them over {split}. Leave "
                'these axes out, and use "data" alone.'
            )
        if schedule.has_copies:
            raise ValueError(
                '`local_steps` is for replicas along "data", and the schedule has copies of stages. Take one without '
                "`replicas`."
            )
        for name, value in others.items():
            if value:
                raise ValueError(
                    f"`local_steps` and `{name}` exclude each other: replicas share nothing in a step. Leave one of "
                    "them out."
                )

    def check_optimizer(self, optimizer: optax.GradientTransformation, params: Any) -> None:
        """Refuses an optimizer of the learners that would undo an outer step: its state has a copy of the weights.

        Args:
          optimizer: the optimizer of the steps.
          params: the abstract weights that it begins with.

        Raises:
          ValueError: names the copy.
        """
        closed, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
        begun = Equations.of(closed)
        source = {id(e.outvars[0]): e.invars[0] for e in begun.equations if e.primitive.name in _COPIES}
        weights = {id(variable) for variable in begun.inputs}
        for (path, _), value in zip(jax.tree.leaves_with_path(state), begun.outputs, strict=True):
            while id(value) in source:
                value = source[id(value)]
            if id(value) in weights:
                raise ValueError(
                    f"`local_steps` needs an optimizer without weights in its state, and {jax.tree_util.keystr(path)} "
                    "is a copy of weights, from which the next step would undo an outer step. Leave `master_weights`, "
                    "schedule-free and lookahead optimizers out."
                )

    def fragments(self, fragment: int | None) -> range:
        """The fragments that an outer step brings together.

        Raises:
          ValueError: if there is no such fragment.
        """
        P = self.num_fragments
        if fragment is None:
            return range(P)
        if isinstance(fragment, bool) or not isinstance(fragment, int) or not 0 <= fragment < P:
            raise ValueError(f"`fragment` must be from 0 to {P - 1}, of `num_fragments={P}`, got {shown(fragment)}.")
        return range(fragment, fragment + 1)

    def part(self, fragment: Any, array: int, size: int) -> Any:
        """The places of a fragment in an array.

        Args:
          fragment: the fragment.
          array: the number of the array.
          size: its entries.
        """
        if self.sparse is not None:
            return self.sparse.subset(fragment, array, size, self.num_fragments)
        return slice(fragment * size // self.num_fragments, (fragment + 1) * size // self.num_fragments)

    def state_leaves(self, weights: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, StateLeaf]:
        """The leaves of the state of `outer`, and those of `sparse`."""
        leaves = self.outer_leaves(weights)
        return leaves if self.sparse is None else leaves | self.sparse.state_leaves(weights, self.num_fragments)

    def outer_leaves(self, weights: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, StateLeaf]:
        """The leaves of the state of `outer`, by number."""
        state = jax.eval_shape(self.outer.init, _wide(weights))
        leaves = {}
        for i, (path, a) in enumerate(jax.tree.leaves_with_path(state)):
            name = next((n for n, w in weights.items() if a.shape == w.shape and path[-1:] == (DictKey(n),)), None)
            shape = a.shape if name is not None else (self.num_fragments, *a.shape)
            leaves[str(i)] = StateLeaf(jax.ShapeDtypeStruct(shape, a.dtype), name)
        return leaves

    def first_state(self, weights: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The state before training, on a device."""
        zeros = {name: jnp.zeros(a.shape, a.dtype) for name, a in _wide(weights).items()}
        values = jax.tree.leaves(self.outer.init(zeros))
        outer = self.outer_leaves(weights)
        first = {name: jnp.broadcast_to(a, outer[name].shape.shape) for name, a in zip(outer, values, strict=True)}
        return {name: jnp.zeros_like(leaf.shape) for name, leaf in self.state_leaves(weights).items()} | first

    def updated(self, anchor: Packed, mean: Packed, state: Sequence[jax.Array]) -> tuple[Packed, list[jax.Array]]:
        """The weights of a fragment after an outer step, and the leaves of the new state.

        Args:
          anchor: the weights of the last outer step.
          mean: the mean of the learners' weights.
          state: the leaves of the state of `outer` for these weights.
        """
        wide = _wide(anchor)
        before = {name: a.astype(wide[name].dtype) for name, a in anchor.items()}
        tree = jax.tree.structure(jax.eval_shape(self.outer.init, wide))
        moved = {name: a - mean[name].astype(a.dtype) for name, a in before.items()}
        updates, outer_state = self.outer.update(moved, tree.unflatten(state), before)
        weights: Any = optax.apply_updates(anchor, updates)
        return weights, jax.tree.leaves(outer_state)


def num_together(mesh: Mesh, local_steps: LocalSteps | None) -> int:
    """The replicas of a stage along "data" that exchange anything in a step: learners exchange nothing."""
    return mesh.shape.get(DATA, 1) if local_steps is None else 1


def _wide(weights: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Packed weights in at least float32, in which the outer optimizer computes: its steps are small."""
    dtypes = {name: jnp.promote_types(a.dtype, jnp.float32) for name, a in weights.items()}
    return {name: jax.ShapeDtypeStruct(a.shape, dtypes[name]) for name, a in weights.items()}


def _is_elementwise(eqn: Any) -> bool:
    """Whether an equation works element by element, or on single numbers."""
    name, scalar = eqn.primitive.name, not any(v.aval.shape for v in eqn.invars)
    return scalar or name in ELEMENTWISE or name == "broadcast_in_dim"
