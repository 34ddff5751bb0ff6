"""The static side of a pass over the table: what is known before the program is compiled."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jpipe.compress import Compressor, StreamingPCA
from jpipe.engine.layout import (
    StateLayout,
    StatePackings,
    forward_only_layout,
    training_layout,
)
from jpipe.engine.loss_scale import LossScale
from jpipe.lowering.array_rows import ArrayRows, used_arrays
from jpipe.lowering.channels import Route
from jpipe.lowering.lower import STASHES, Lowered, lower
from jpipe.lowering.scalars import ScalarTable, StageConstants, scalar_table
from jpipe.lowering.target import target_of
from jpipe.lowering.versions import VersionRows
from jpipe.mesh import DATA
from jpipe.packing import Leaf, Packing, Place
from jpipe.schedule import Schedule
from jpipe.stages.accumulators import FACTORS, first_factors
from jpipe.stages.codecs import first_states
from jpipe.stages.cut import Stages
from jpipe.stages.extra_args import hooked_passes, read_delays
from jpipe.stages.gradient_groups import (
    GradientGroup,
    compressor_states,
    gradient_groups,
)
from jpipe.stages.messages import find_routes, with_gradients
from jpipe.stages.optimizer import StageUpdates


class TiedCopy(NamedTuple):
    """One copy of a tied weight.

    Attributes:
      stage_copies: for every copy of its stage the device, and the position of the stage among the
        device's stages.
      place: its place in the packed weights.
      gradient: the place of its gradient.
      row: its row at both.
    """

    stage_copies: tuple[tuple[int, int], ...]
    place: Place
    gradient: Any
    row: int


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """A table, a model and an optimizer on a mesh, and all that follows from them.

    Attributes:
      schedule: the table. A forward-only table collects the outputs of the last stage instead of
        losses.
      stages: the model, cut into stages.
      updates: the optimizer on each stage, or None for a forward-only table.
      mesh: has an axis "stage" with the schedule's number of devices, and optionally an axis "data"
        of replicas. Other axes are left to the compiler: weights, gradients and optimizer state are
        split over them as the layers say, stashed activations as the compiler would. Messages and
        batches are split by rows over the axis "fsdp", messages also as the layers say.
      recompute: whether a stage keeps only its inputs from forward to backward.
      microbatch: the abstract microbatch.
      loss_scale: the factor of the loss for its gradient, or None.
      key_impl: implementation of the random keys that layers get.
      trained: for a forward-only table, the lowered table that trains the weights.
      overlap: whether transfers overlap with compute. If False, all messages of a tick are sent
        after its compute, which is faster where devices share cores.
      compute_dtype: to which layers cast weights; None: they cast nothing.
      compress_gradients: how replicas exchange gradients: see `jpipe.engine.gradients`. None: as they are.
      accumulate_gradients: how gradients that are products are accumulated: see `jpipe.engine.factors`. None: as
        they are.
      stash_slots: the most microbatches of which a device keeps a stash; None: all.
    """

    schedule: Schedule
    stages: Stages
    updates: StageUpdates | None
    mesh: Mesh
    recompute: bool = False
    microbatch: Any = None
    loss_scale: LossScale | None = None
    key_impl: Any = None
    trained: Lowered | None = None
    overlap: bool = False
    compute_dtype: np.dtype | None = None
    compress_gradients: Compressor | None = None
    accumulate_gradients: StreamingPCA | None = None
    stash_slots: int | None = None

    @functools.cached_property
    def routes(self) -> list[tuple[Route, Packing]]:
        """Every kind of message, with its packing."""
        stages = self.stages
        gradients = None if self.schedule.forward_only else stages.gradients
        codecs = [
            *itertools.chain(*stages.codecs),
            *(c for p in stages.portals for cs in p.codecs.values() for c in cs),
        ]
        return find_routes(
            stages.num_stages,
            stages.activations,
            gradients,
            stages.portals,
            kept=any(codec.compression.is_sparse for codec in codecs),
        )

    @functools.cached_property
    def lowered(self) -> Lowered:
        """The table as static integers."""
        routes = [route for route, _ in self.routes]
        target = target_of(self.mesh.devices.flat[0].platform)
        together = self.stages.vocabulary.together(self.stages.num_stages)
        if self.schedule.forward_only:
            together = {n: f for n, f in together.items() if f.operation == "forward"}
        return lower(
            self.schedule,
            self.recompute,
            routes,
            self.overlap,
            target,
            together,
            self.stash_slots,
            reads_stale=self.updates is not None and self.updates.reads_stale,
            weighted=self.stages.loss_weight is not None,
        )

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage, along the axis "data"."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def shares_updates(self) -> bool:
        """Whether the replicas of a stage share its update: see `jpipe.stages.shares`."""
        if self.updates is None:
            return False
        return any(update.replicas.number > 1 for update in self.updates.programs)

    @functools.cached_property
    def gradient_groups(self) -> list[GradientGroup]:
        """The gradients, in groups that are compressed alike; `[]` if none are compressed."""
        if self.updates is None or self.compress_gradients is None:
            return []
        arrays = dict(self.stages.accumulators.arrays)
        for unit in self.stages.vocabulary.units:
            arrays |= unit.packing.arrays
        return gradient_groups(self.updates.of_all, arrays)

    def first_gradient_compression(self) -> dict[str, Any]:
        """What compression of gradients keeps, on one device before training; `{}` without."""
        if self.accumulate_gradients is not None:
            chunks, factors = self.lowered.num_chunks, self.stages.factors
            return {FACTORS: first_factors(self.accumulate_gradients, factors, chunks)}
        if not self.gradient_groups:
            return {}
        assert self.compress_gradients is not None
        R = self.lowered.num_chunks
        shapes = self.packings.of_gradients(self.mesh, self.array_rows["gradients"])
        return {
            "error": {n: jnp.zeros(a.shape, a.dtype) for n, a in shapes.items()},
            "states": compressor_states(
                self.compress_gradients, self.gradient_groups, R
            ),
        }

    def first_message_compression(self) -> dict[str, Any]:
        """What the compressors of messages keep, on one device before training."""
        stages = self.stages
        messages: dict[str, list] = {"activation": [*stages.codecs]}
        messages |= {
            f"skip{i}": [tuple(itertools.chain(*portal.codecs.values()))]
            for i, portal in enumerate(stages.portals)
        }
        if not self.schedule.forward_only:
            messages |= {
                "gradient" if inbox == "activation" else f"{inbox}.gradient": [
                    with_gradients(codecs) for codecs in of_inbox
                ]
                for inbox, of_inbox in messages.items()
            }
        return first_states(messages, self.lowered.num_chunks)

    @property
    def updates_in_every_tick(self) -> bool:
        """Whether every tick runs `jpipe.engine.updates.update`, with or without a column to update.

        What all updates exchange is a few numbers, and exchanging them in every tick costs less than a wait for the host. Means
        over replicas, sums over copies and sums of tied gradients are large.
        """
        small = self.num_replicas == 1 and not self.stages.ties
        small = small and not self.schedule.has_copies
        return self.lowered.target.updates_in_every_tick and small

    @property
    def rows(self) -> VersionRows:
        """Where the versions of weights are."""
        return (self.trained or self.lowered).rows

    @functools.cached_property
    def array_rows(self) -> dict[str, ArrayRows]:
        """The rows of arrays with leaves of stages: of "parameters" (also as hooks give them), "mutable_state",
        "statistics", "gradients" (also errors of compression), "optimizer_state", "message_compression", and each of
        `STASHES` that the table has."""
        lowered, stages = self.trained or self.lowered, self.stages

        def used(pack: Packing) -> list[set[str]]:
            return used_arrays(pack, stages.program_of_stage)

        def of_columns(pack: Packing) -> ArrayRows:
            return ArrayRows.of_columns(lowered, pack.arrays, used(pack))

        weights = stages.parameters
        found = {
            "parameters": ArrayRows.of_versions(lowered, weights.arrays, used(weights)),
            "mutable_state": of_columns(stages.state),
            "statistics": of_columns(stages.statistics),
            "message_compression": ArrayRows.of_columns(lowered, [], used(weights)),
        }
        if self.updates is None:
            return found
        for ring, pack in self.packings.rings.items():
            if lowered.num_slots[ring]:
                found[ring] = ArrayRows.of_slots(lowered, ring, pack.arrays, used(pack))
        # The owners of the optimizer's state are shares of updates.
        of_updates = [
            {piece.place.array for of_leaf in update.state for piece in of_leaf}
            for update in self.updates.programs
        ]
        of_state = [of_updates[u] for u in self.updates.program_of_stage]
        return found | {
            "gradients": of_columns(stages.accumulators),
            "optimizer_state": ArrayRows.of_columns(
                lowered, self.updates.state.arrays, of_state
            ),
        }

    @property
    def rows_of_units(self) -> list[int]:
        """For each unit of vocabulary layers the versions that are kept of it."""
        units = self.stages.vocabulary.units
        return [int(self.rows.num_versions[unit.home]) for unit in units]

    @functools.cached_property
    def delays(self) -> dict[str, np.ndarray]:
        """Pass -> float `[S]`: see `jpipe.stages.extra_args.read_delays`."""
        return read_delays(self.schedule)

    @functools.cached_property
    def packings(self) -> StatePackings:
        """How the leaves of the state are packed."""
        stages, found = self.stages, self.stages.vocabulary
        of_units = () if self.updates is None else self.updates.of_units
        return StatePackings(
            parameters=stages.parameters,
            accumulators=stages.accumulators,
            mutable_state=stages.state,
            statistics=stages.statistics,
            rings={ring: getattr(stages, ring) for ring in STASHES},
            messages=self.routes,
            optimizer_state=None if self.updates is None else self.updates.state,
            units=[unit.packing for unit in found.units],
            unit_states=[unit.packing for unit in of_units],
            embedded=self._activations(found.embedded),
            head_input=self._activations(jax.tree.leaves(found.head_inputs)),
        )

    def _activations(self, avals: Sequence[jax.ShapeDtypeStruct]) -> list[Leaf]:
        """Abstract leaves of an activation, split as what layers pass on."""
        return [Leaf(a, spec=self.stages.values.spec(a.shape)) for a in avals]

    @functools.cached_property
    def layout(self) -> StateLayout:
        """The arrays of the state."""
        if self.updates is None:
            return forward_only_layout(
                self.mesh,
                self.lowered,
                self.packings,
                self.array_rows,
                rows_of_units=self.rows_of_units,
                microbatch=self.microbatch,
                message_compression=jax.eval_shape(self.first_message_compression),
            )
        hooks = self.updates.programs[0].param_hooks
        return training_layout(
            self.mesh,
            self.lowered,
            self.packings,
            self.array_rows,
            microbatch=self.microbatch,
            norm_dtype=self.updates.norm_dtype,
            weight_dtype=self.weight_dtype,
            rows_of_units=self.rows_of_units,
            hooked_passes=hooked_passes(self.schedule, hooks),
            loss_scale=self.loss_scale,
            key_impl=self.key_impl,
            shares_updates=self.shares_updates,
            tick_stashes=self.tick_stashes,
            gradient_compression=jax.eval_shape(self.first_gradient_compression),
            message_compression=jax.eval_shape(self.first_message_compression),
        )

    @property
    def weight_dtype(self) -> np.dtype | None:
        """The dtype of the weight of a minibatch; None if the loss is a mean."""
        weight = self.stages.loss_weight
        return None if weight is None else weight.outputs[0].aval.dtype

    @functools.cached_property
    def scalars(self) -> ScalarTable:
        """The scalars of every tick."""
        newest = self.trained is not None
        constants = self._stage_constants()
        on_layers = ("forward", "backward", "weight_grad", "commit")
        of_operation = dict.fromkeys(on_layers, constants)
        one: StageConstants = {("program",): np.zeros(self.stages.num_stages, int)}
        of_operation |= dict.fromkeys(("embed", "embed_backward", "head"), one)
        if self.updates is not None:
            of_stage: StageConstants = {
                ("stage",): np.arange(self.stages.num_stages),
                **{("delay", name): delay for name, delay in self.delays.items()},
            }
            programs = np.array(self.updates.program_of_stage)
            of_operation["update"] = {("program",): programs, **of_stage}
            for unit in self.stages.vocabulary.units:
                of_operation[unit.update] = {**one, **of_stage}
        return scalar_table(self.lowered, of_operation, self.rows, newest)

    @property
    def drops_branches(self) -> bool:
        """Whether an operation has no branch in the ticks of a phase if all devices run one program of it in all of them.

        A forward and its recomputation are in branches,
        because XLA would compute both at once and keep what the forward makes.
        """
        return self.lowered.target.drops_branches and not self.recompute

    @functools.cached_property
    def tick_stashes(self) -> frozenset[str]:
        """The stashes whose values live in one tick, from one operation without a branch to another.

        They are no part of the state: see `jpipe.engine.arrays.TickStash`.
        """
        if self.schedule.forward_only or not self.drops_branches:
            return frozenset()
        programs = [
            self.scalars.only_program(name, lane, phase.ticks)
            for phase in self.lowered.phases
            for name in phase.operations & {"forward", "backward", "weight_grad"}
            for lane in range(self.lowered.operations[name].num_lanes)
        ]
        if None in programs:
            return frozenset()
        return frozenset(n for n in STASHES if self.lowered.rings[n].in_tick)

    @property
    def commits(self) -> bool:
        """Whether copies of stages put their statistics together and then move mutable state."""
        if self.schedule.forward_only or not self.schedule.has_copies:
            return False
        return any(
            update.statistics or (self.num_replicas > 1 and update.varying)
            for update in self.stages.mutable
        )

    def _stage_constants(self) -> StageConstants:
        """Scalars of operations on layers that depend on the stage alone: see `LaneScalars`."""
        stages, stage = self.stages, np.arange(self.stages.num_stages)
        constants: dict[tuple, np.ndarray] = {
            ("program",): np.array(stages.program_of_stage),
            ("first",): stage == 0,
            ("last",): stage == stages.num_stages - 1,
        }
        for r in range(max(map(len, stages.lengths))):
            lengths = [sum(n[r : r + 1]) for n in stages.lengths]
            layers_before = [sum(n[:r]) for n in stages.lengths]
            constants["length", r] = np.array(lengths)
            firsts = [stages.layers_of(s).start for s in stage.tolist()]
            constants["layer", r] = np.add(firsts, layers_before)
        return constants

    @functools.cached_property
    def ties(self) -> list[list[TiedCopy]]:
        """The copies of each tied weight; the optimizer knows the first.

        Those of vocabulary layers have one place, and need nothing.
        """
        stages = self.stages
        copy_of_leaf = {
            (layer, j): TiedCopy(self.lowered.copies[s], place, gradient, row)
            for s in range(stages.num_stages)
            for layer, run, row in stages.layer_runs(s)
            for j, (place, gradient) in enumerate(zip(run.parameters, run.gradients))
        }
        return [
            [copy_of_leaf[leaf] for leaf in leaves]
            for leaves in stages.ties
            if leaves[0] in copy_of_leaf
        ]
