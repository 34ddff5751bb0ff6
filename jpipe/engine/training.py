"""The static side of a pass that trains: the facts of a loss and an optimizer, beside those of table and model."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.engine.layout import StateLayout, layout_of
from jpipe.engine.shapes import StatePackings
from jpipe.engine.spec import PassSpec
from jpipe.engine.stage_branches import StageBranches
from jpipe.engine.state import gradient_shapes
from jpipe.gradients.apart import ApartSums, apart_sums
from jpipe.gradients.sums import FACTORS
from jpipe.layers import collectives
from jpipe.layers.backward import LayerProgram
from jpipe.layers.equations import Equations
from jpipe.lowering.array_rows import ArrayRows
from jpipe.lowering.channels import Route
from jpipe.lowering.lower import STASHES, Lowered, lower
from jpipe.lowering.scalars import ScalarTable, StageConstants, scalar_table
from jpipe.mesh import STAGE, stays_in_slices
from jpipe.options.communication import Communication
from jpipe.options.local_steps import LocalSteps
from jpipe.packing import Packing, Place
from jpipe.stages.extra_args import hooked_passes, read_delays
from jpipe.stages.gradient_groups import (
    GradientGroup,
    compressor_states,
    gradient_groups,
)
from jpipe.stages.messages import with_gradients
from jpipe.stages.offload import Offload
from jpipe.stages.optimizer import StageUpdates


class TiedCopy(NamedTuple):
    """One copy of a tied weight.

    Attributes:
      stage_copies: device of every copy of its stage, and the position of the stage among the
        device's stages.
      place: its place in the packed weights.
      gradient: the place of its gradient.
      row: its row at both.
    """

    stage_copies: tuple[tuple[int, int], ...]
    place: Place
    gradient: Place
    row: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPass(PassSpec):
    """A pass over a table that trains.

    Attributes:
      loss: the program of the loss, see `jpipe.layers.loss.TracedLoss`.
      loss_weight: the weight of a microbatch, of the leaves of the batch; None if the loss is a mean.
      has_whole_batch_loss: whether `loss` sees the rows of all microbatches of all replicas at once.
      updates: the optimizer on each stage.
      communication: options of messages. Without `overlap` all messages of a tick leave after its compute, which is
        faster where devices share cores.
      offload: the parts in host memory; `activations` is the most microbatches of which a device keeps a stash.
    """

    loss: LayerProgram
    loss_weight: Equations | None
    has_whole_batch_loss: bool = False
    updates: StageUpdates
    communication: Communication
    offload: Offload

    @property
    def local_steps(self) -> LocalSteps | None:
        """See `StateFacts`."""
        return self.communication.local_steps

    @functools.cached_property
    def routes(self) -> list[tuple[Route, Packing]]:
        """See `PassSpec`."""
        return self._find_routes(forward_only=False)

    def counters(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Takes the counters out of the arrays of a state. The random key gets the type that a pass takes."""
        key = jax.random.wrap_key_data(arrays["key"], impl=self.key_impl)
        return {"round": arrays["round"], "started": arrays["started"], "key": key}

    @functools.cached_property
    def lowered(self) -> Lowered:
        """See `PassSpec`."""
        return lower(
            self.schedule,
            self.numbers.runs_forward_again,
            [route for route, _ in self.routes],
            overlap=self.communication.overlap,
            target=self.target,
            together=self.stages.vocabulary.together(self.stages.num_stages),
            stash_slots=self.offload.activations,
            reads_stale=self.updates.reads_stale,
            weighted=self.loss_weight is not None,
        )

    @property
    def state_table(self) -> Lowered:
        """See `PassSpec`. It is this table."""
        return self.lowered

    @property
    def shares_updates(self) -> bool:
        """True if the replicas of a stage share its update: see `jpipe.stages.shares`."""
        return any(update.replicas.number > 1 for update in self.updates.programs)

    @functools.cached_property
    def gradient_groups(self) -> list[GradientGroup]:
        """The gradients, in groups that are compressed alike; `[]` if none are compressed."""
        if self.communication.compress_gradients is None:
            return []
        return gradient_groups(self.updates.distinct, self.stages.accumulators.arrays)

    def first_gradient_compression(self) -> dict[str, Any]:
        """The state of the compression of gradients, on one device before training; `{}` without."""
        R = self.lowered.num_chunks
        factors = self.stages.gradient_sums.first_factors(self.stages.factors, R)
        if factors:
            return {FACTORS: factors}
        if self.communication.compress_gradients is None or not self.gradient_groups:
            return {}
        shapes = gradient_shapes(self._facts)
        return {
            "error": {n: jnp.zeros(a.shape, a.dtype) for n, a in shapes.items()},
            "states": compressor_states(self.communication.compress_gradients, self.gradient_groups, R),
        }

    @property
    def updates_in_every_tick(self) -> bool:
        """True if every tick runs `jpipe.engine.updates.update`: a few norms cost less than a wait for the host."""
        return self.target.updates_in_every_tick and self._exchanges_little and not self._holds_small_sums

    @property
    def _exchanges_little(self) -> bool:
        """True if an update exchanges nothing between devices but norms."""
        return self.num_replicas == 1 and not self.stages.ties and not self.schedule.has_copies

    @property
    def _holds_small_sums(self) -> bool:
        """True if the branch of an update can hold the sum of a few numbers over all devices."""
        return self.target.holds_small_sums and stays_in_slices(self.mesh, self.mesh.axis_names)

    @property
    def records_collectives(self) -> bool:
        """True if branches hold collectives that a CUDA graph can have.

        They run along all axes but "stage", and along that one in layers that all stages run together, and where the
        update of a tick adds up norms, or what copies of a stage have. CUDA has no call of the host in a branch of a
        graph, and NCCL needs one between nodes.
        """
        axes = [name for name, size in self.mesh.shape.items() if size > 1 and name != STAGE]
        adds_up = self.schedule.has_copies or (self._exchanges_little and self._holds_small_sums)
        if self.stages.vocabulary.layers or (adds_up and self.lowered.updates[:-1].any()):
            axes.append(STAGE)
        return bool(axes) and stays_in_slices(self.mesh, axes)

    def _array_rows(self) -> dict[str, ArrayRows]:
        """Adds "gradients" (also errors of compression), "optimizer_state", "anchor" and `RINGS` to `PassSpec`."""
        stages, updates = self.stages, self.updates
        rings = {
            ring: ArrayRows.per_slot(self.lowered, ring, pack.arrays, self._arrays_of_stages(pack))
            for ring, pack in self.packings.rings.items()
            if self.lowered.num_slots[ring]
        }
        # The owners of the optimizer's state are shares of updates.
        state_arrays = [
            {piece.place.array for pieces in update.state for piece in pieces} for update in updates.owner_updates
        ]
        state = ArrayRows.per_stage(self.lowered, updates.state.arrays, state_arrays)
        return {
            **super()._array_rows(),
            **rings,
            "anchor": self._rows_of_columns(stages.parameters),
            "gradients": self._rows_of_columns(stages.accumulators),
            "optimizer_state": state,
        }

    @functools.cached_property
    def delays(self) -> dict[str, np.ndarray]:
        """Pass -> float `[S]`: see `jpipe.stages.extra_args.read_delays`."""
        return read_delays(self.schedule)

    @functools.cached_property
    def packings(self) -> StatePackings:
        """See `PassSpec`."""
        return self._pack_state(optimizer_state=self.updates.state)

    @functools.cached_property
    def layout(self) -> StateLayout:
        """See `PassSpec`."""
        hooks = self.updates.programs[0].param_hooks
        facts = dataclasses.replace(
            self._facts,
            hooked_passes=hooked_passes(self.schedule, hooks),
            loss_scale=self.numbers.loss_scale,
            key_impl=self.key_impl,
            norm_dtype=self.updates.norm_dtype,
            weight_dtype=self.weight_dtype,
            shares_updates=self.shares_updates,
            tick_stashes=self.tick_stashes,
            sums=self.sums,
            gradient_compression=jax.eval_shape(self.first_gradient_compression),
        )
        return layout_of(facts)

    @functools.cached_property
    def sums(self) -> ApartSums:
        """The sums of gradients that lie apart.

        Of a device with several stages a branch for each says which one runs, and in `pairs` none does.
        """
        packed, rows = self.stages.accumulators, self.array_rows["gradients"]
        if not self.target.sums_apart or (rows.num_rows > 1 and self.pairs):
            return ApartSums()
        shapes = {
            name: (rows.num_rows, packed.arrays[name].shape[0])
            for name in packed.arrays
            if name not in packed.on_host and rows.has_all(name)
        }
        runs = itertools.chain(*(program.runs for program in self.stages.programs))
        leaves = ((place, i) for run in runs for place in run.gradient_places for i in range(run.longest))
        sums = apart_sums(leaves, shapes)
        return dataclasses.replace(sums, orders_all=self._joins_late and not sums.has_rows)

    @functools.cached_property
    def late_sums(self) -> ApartSums:
        """Those of `sums` that an update joins in the branches that read all of them.

        Means over replicas do not need them joined: an array is as good as a part of one.
        """
        late = self._joins_late and (self.num_replicas == 1 or not self.sums.has_rows)
        return self.sums if late else ApartSums()

    @property
    def _joins_late(self) -> bool:
        """Whether nothing but updates of single stages, and means over replicas, reads sums of gradients."""
        plain = self.communication.compress_gradients is None and not self.shares_updates
        return plain and not self.stages.ties and not self.schedule.has_copies

    @property
    def early_sums(self) -> ApartSums:
        """Those of `sums` that an update joins when it begins."""
        return ApartSums() if self.late_sums.arrays else self.sums

    @functools.cached_property
    def branches(self) -> StageBranches:
        """See `PassSpec`. A branch of `pairs` knows a program alone."""
        if not self.target.sums_apart or self.pairs:
            return StageBranches()
        # cuDNN takes no slices, so a slot that is known would only keep XLA from fusing them with sums.
        knows_slots = not self.stages.hold({"conv_general_dilated"})
        facts = {"has_sums": self.sums.has_rows, "branches_forward": not self.tick_stashes, "knows_slots": knows_slots}
        return StageBranches.of(self.lowered, self.stages.program_of_stage, **facts)

    @property
    def weight_dtype(self) -> np.dtype | None:
        """The dtype of the weight of a minibatch; None if the loss is a mean."""
        weight = self.loss_weight
        return None if weight is None else weight.outputs[0].aval.dtype

    @functools.cached_property
    def scalars(self) -> ScalarTable:
        """See `PassSpec`."""
        stage_constants: StageConstants = {
            ("stage",): np.arange(self.stages.num_stages),
            **{("delay", name): delay for name, delay in self.delays.items()},
        }
        programs = np.array(self.updates.program_of_stage)
        constants = {
            **self._stage_constants(),
            "update": {("program",): programs, **stage_constants},
        }
        constants |= dict.fromkeys(self.updates.together, {**self._one_program, **stage_constants})
        return scalar_table(self.lowered, constants, self.rows, newest=False)

    @functools.cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The programs of a forward and a backward that run in one branch, if layers communicate: see
        `jpipe.engine.pairs`. An embedding of all devices has one array for both passes, if a backward runs it again.
        """
        communicates = self.stages.hold(collectives.NAMES)
        embeds_twice = self.numbers.runs_forward_again and self.stages.vocabulary.embedding is not None
        if not (self.target.pairs_passes and communicates) or embeds_twice:
            return []
        program_of = self.stages.program_of_stage
        return sorted({(program_of[s], program_of[r]) for s, r in self.lowered.pairs})

    @property
    def drops_branches(self) -> bool:
        """See `PassSpec`.

        A forward and its recomputation are in branches,
        because XLA would compute both at once and keep what the forward makes.
        """
        return self.target.drops_branches and not self.numbers.runs_forward_again and not self.pairs

    @functools.cached_property
    def tick_stashes(self) -> frozenset[str]:
        """See `PassSpec`."""
        if not self.drops_branches:
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
        """True if copies of stages sum their statistics and then move mutable state."""
        return self.schedule.has_copies and any(
            update.statistics or (self.num_replicas > 1 and update.varying) for update in self.stages.mutable
        )

    def _message_codecs(self) -> dict[str, list]:
        """The codecs of `PassSpec`, and those of backwards."""
        forwards = super()._message_codecs()
        return forwards | {
            "gradient" if inbox == "activation" else f"{inbox}.gradient": [
                with_gradients(codecs) for codecs in codec_lists
            ]
            for inbox, codec_lists in forwards.items()
        }

    @functools.cached_property
    def ties(self) -> list[list[TiedCopy]]:
        """The copies of each tied weight; the optimizer knows the first.

        Those of vocabulary layers have one place, and need nothing.
        """
        stages = self.stages
        copy_of_leaf = {
            (layer, j): TiedCopy(self.lowered.copies[s], run.parameters[j], placed.places[0], row)
            for s in range(stages.num_stages)
            for layer, run, row in stages.layer_runs(s)
            for j, placed in zip(stages.layer_kinds[run.kind].trained, run.gradients)
        }
        return [[copy_of_leaf[leaf] for leaf in leaves] for leaves in stages.ties if leaves[0] in copy_of_leaf]
