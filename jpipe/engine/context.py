"""The traced side of a pass: the values that one device knows in a pass, and in one lane of a tick."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import TickArrays
from jpipe.engine.spec import PassSpec
from jpipe.engine.stage_branches import ANY, SPLIT, StageBranch
from jpipe.engine.training import TrainingPass
from jpipe.lowering.tick_scalars import LaneScalars
from jpipe.mesh import DATA, STAGE
from jpipe.stages.cut import StageProgram, Stages

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Device:
    """One device in one pass.

    Attributes:
      spec: the pass.
      num_entered: int32 `[]`, microbatches that have entered the pipe since round 0.
      round: int32 `[]`, passes before this one.
      started: int32 `[]`, microbatches of training before round 0.
      key: `[]`, the random key of training.
      replica: int32 `[]`, position along the axis "data", or 0.
      position: int32 `[]`, position along the axis "stage".
      batch: leaves of the minibatches that are kept, `[num_batches * N, microbatch, ...]` each.
      inputs: the leaves of `batch["inputs"]` among them.
      layer_numbers: 0, 1, 2, ..., for each layer of the longest run, int32 `[]` each, as values that
        the compiler does not know; empty where they may know it. See `StageContext.runtime_index`.
    """

    spec: PassSpec
    num_entered: jax.Array
    round: jax.Array
    started: jax.Array
    key: jax.Array
    replica: jax.Array | int
    position: jax.Array
    layer_numbers: tuple[jax.Array, ...] = ()
    batch: tuple[jax.Array, ...] = ()
    inputs: tuple[jax.Array, ...] = ()

    @classmethod
    def here(
        cls,
        spec: PassSpec,
        counters: Mapping[str, jax.Array],
        num_entered: jax.Array,
    ) -> Self:
        """The device that this code runs on, inside of `shard_map`.

        Args:
          spec: the pass.
          counters: "round", "started" and "key", `[1]` each.
          num_entered: int32 `[1]`.
        """
        longest = 0
        if spec.lowered.target.indices_outside:
            longest = max(max(lengths, default=0) for lengths in spec.stages.lengths)
        return cls(
            spec,
            num_entered=num_entered[0],
            round=counters["round"][0],
            started=counters["started"][0],
            key=counters["key"][0],
            replica=lax.axis_index(DATA) if DATA in spec.mesh.shape else 0,
            position=lax.axis_index(STAGE),
            layer_numbers=tuple(jnp.minimum(counters["round"][0], 0) + i for i in range(longest)),
        )

    def with_batch(self, batch: Any) -> Self:
        """The device with a batch, a tree with an entry "inputs"."""
        leaves, inputs = jax.tree.leaves(batch), jax.tree.leaves(batch["inputs"])
        return dataclasses.replace(self, batch=tuple(leaves), inputs=tuple(inputs))

    def stage(
        self,
        program: StageProgram,
        scalars: LaneScalars,
        columns: Mapping[str, Callable[[str], Sequence]],
    ) -> "StageContext":
        """A stage program on this device. For the arguments see `StageContext`."""
        return StageContext(self, program, scalars, columns)

    def random_key(self, number: Any, microbatch_number: jax.Array) -> jax.Array:
        """The random key of layer `number` for a microbatch of this replica."""
        key = jax.random.fold_in(self.key, number)
        key = jax.random.fold_in(key, microbatch_number)
        return jax.random.fold_in(key, self.replica)

    def lead(self, group: str, row: jax.Array | int) -> Callable[[str], Sequence]:
        """The leading index of each array of a group.

        Args:
          group: see `PassSpec.array_rows`.
          row: int32 `[]`, the row in an array that all stages use: the position of a stage on the device, or the
            row of a version of its weights. If the stage does not use the array, the index is valid but belongs to
            another stage; mask the result with `uses`. Arrays of units of vocabulary layers are in no table, and have
            the row itself.
        """
        tables = self.spec.array_rows[group].tables

        def lead_of(name: str) -> list[jax.Array | int]:
            if name not in tables:
                return [row]
            return [jnp.maximum(jnp.asarray(tables[name])[self.position, row], 0)]

        return lead_of

    def uses(self, group: str, name: str, row: jax.Array | int) -> jax.Array | bool:
        """Returns whether the stage at a row uses an array of a group: see `lead`."""
        table = self.spec.array_rows[group].tables.get(name)
        return True if table is None else jnp.asarray(table)[self.position, row] >= 0

    def sum_over_replicas(self, tree: Any) -> Any:
        """The sum over the replicas of a stage."""
        return lax.psum(tree, DATA) if self.spec.num_replicas > 1 else tree

    def mean_over_replicas(self, tree: Any) -> Any:
        """The mean over the replicas of a stage."""
        return lax.pmean(tree, DATA) if self.spec.num_replicas > 1 else tree


@dataclasses.dataclass(frozen=True)
class TrainingDevice(Device):
    """One device in one pass that trains.

    Attributes:
      spec: the pass.
      minibatch_weights: `[num_weights]`, the weight of each minibatch whose loss still has a gradient to take; it
        divides the sums of the loss. None if the loss is a mean.
    """

    spec: TrainingPass
    minibatch_weights: jax.Array | None = None

    def with_weights(self, weights: jax.Array | None) -> Self:
        """The device with the weights of minibatches."""
        return dataclasses.replace(self, minibatch_weights=weights)

    def stage(
        self,
        program: StageProgram,
        scalars: LaneScalars,
        columns: Mapping[str, Callable[[str], Sequence]],
    ) -> "TrainingStage":
        """See `Device`."""
        return TrainingStage(self, program, scalars, columns)

    def loss_scale(self, arrays: TickArrays) -> jax.Array | None:
        """`[]`, the loss scale, or None."""
        return None if self.spec.numbers.loss_scale is None else arrays.loss_scale["scale"][0]


@dataclasses.dataclass(frozen=True)
class StageContext:
    """One stage program on one device, in one lane of a tick.

    Attributes:
      device: the device.
      program: the program, static. It runs on one of `program.stages`.
      scalars: the scalars of the lane: its stage, microbatch, version and slots.
      columns: group -> the leading indices of the stage's column, read before the branch that the stage runs in;
        without an entry they are read where they are needed. See `runtime_index`.
      unrolls: whether no loop runs over the layers: see `jpipe.engine.pairs`.
      copied: the rings of stashes of which the stage gets a copy of its slot alone, `[1, ...]`.
      branch: what the branch that it runs in is for.
    """

    device: Device
    program: StageProgram
    scalars: LaneScalars
    columns: Mapping[str, Callable[[str], Sequence]] = dataclasses.field(default_factory=dict)
    unrolls: bool = False
    copied: frozenset[str] = frozenset()
    branch: StageBranch = StageBranch(ANY)

    @property
    def spec(self) -> PassSpec:
        """The pass."""
        return self.device.spec

    @property
    def stages(self) -> Stages:
        """The model."""
        return self.device.spec.stages

    def column(self, group: str) -> Callable[[str], Sequence]:
        """The leading indices of the stage's column in the arrays of a group."""
        return self.columns.get(group) or self.device.lead(group, self.scalars.chunk)

    def slot(self, ring: str) -> Callable[[str], Sequence]:
        """The leading indices of the slot of a ring of stashes that the lane reads or writes."""
        if ring in self.copied:
            return lambda name: [0]
        knows = ring == SPLIT and self.branch.slot != ANY
        return self.device.lead(ring, self.branch.slot if knows else self.scalars.slot(ring))

    @property
    def has_slices(self) -> bool:
        """True if microbatches are slices of sequences."""
        return self.spec.schedule.num_slices > 1

    @property
    def slice_number(self) -> jax.Array:
        """int32 `[]`, the number of the slice that the lane runs."""
        return self.scalars.microbatch % self.spec.schedule.num_slices

    @property
    def version(self) -> Callable[[str], Sequence]:
        """The leading indices of the weights that the lane reads.

        XLA for GPUs slices weights out of their array by a kernel of its own, unless it knows where they are.
        """
        return self.device.lead("parameters", self.branch.row if self.spec.rows_apart else self.scalars.row)

    @property
    def joins(self) -> bool:
        """True if a layer writes its values at once: see `jpipe.packing.write_all`."""
        return self.spec.lowered.target.joins_writes

    def runtime_index(self, i: jax.Array | int) -> jax.Array | int:
        """`i`, as an index of an array that is read and then written there.

        XLA for GPUs reads and writes in one kernel if both have one and the same index. It computes
        an index once per use, except for those that a branch gets from outside. At a constant index
        it reads in a kernel of its own, and copies the whole array before it writes.
        """
        numbers = self.device.layer_numbers
        return numbers[i] if numbers and isinstance(i, int) else i

    def if_first(self, on_first: Callable[[], Value], elsewhere: Callable[[], Value]) -> Value:
        """`on_first()` if the stage is the first, else `elsewhere()`."""
        return self._first_or_last(0, "is_first", on_first, elsewhere)

    def if_last(self, on_last: Callable[[], Value], elsewhere: Callable[[], Value]) -> Value:
        """`on_last()` if the stage is the last, else `elsewhere()`."""
        return self._first_or_last(self.stages.num_stages - 1, "is_last", on_last, elsewhere)

    def _first_or_last(self, stage: int, scalar: str, on_stage: Callable, elsewhere: Callable) -> Any:
        """`on_stage()` on `stage`, else `elsewhere()`.

        The choice is static if none or all of the program's stages are `stage`.
        """
        if stage not in self.program.stages:
            return elsewhere()
        if len(self.program.stages) == 1:
            return on_stage()
        return lax.cond(getattr(self.scalars, scalar) == 1, on_stage, elsewhere)


@dataclasses.dataclass(frozen=True)
class TrainingStage(StageContext):
    """One stage program in a pass that trains."""

    device: TrainingDevice

    @property
    def spec(self) -> TrainingPass:
        """The pass."""
        return self.device.spec
