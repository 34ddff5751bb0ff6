"""The static side of a pass over a table: the facts that are known before the program is compiled.

`PassSpec` is what every pass has, `ForwardPass` a pass of a prediction. `jpipe.engine.training` has the other kind.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpipe.engine.layout import REPLICATED, StateLayout, layout_of
from jpipe.engine.shapes import StatePackings
from jpipe.engine.stage_branches import StageBranches
from jpipe.engine.state_arrays import StateFacts
from jpipe.lowering.array_rows import ArrayRows, used_arrays
from jpipe.lowering.channels import Route
from jpipe.lowering.lower import RINGS, Lowered, lower
from jpipe.lowering.scalars import ScalarTable, StageConstants, scalar_table
from jpipe.lowering.target import Target, target_of
from jpipe.lowering.versions import VersionRows
from jpipe.options.local_steps import LocalSteps, num_together
from jpipe.options.numbers import Numbers
from jpipe.packing import Leaf, Packing
from jpipe.schedule import Schedule
from jpipe.stages.codecs import first_states
from jpipe.stages.cut import Stages
from jpipe.stages.messages import find_routes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassSpec(abc.ABC):
    """A pass over a table: a table and a model on a mesh, and all facts that follow from them.

    Attributes:
      schedule: the table.
      stages: the model, cut into stages.
      mesh: the devices: an axis "stage" with the schedule's number of devices, and optionally an axis "data"
        of replicas. Other axes are left to the compiler: weights, gradients and optimizer state are
        split over them as the layers say, stashed activations as the compiler would. Messages and
        batches are split by rows over the axes "fsdp" and "expert", messages also as the layers say.
      microbatch: the abstract microbatch.
      key_impl: implementation of the random keys that layers get.
      numbers: options of the numbers that layers compute in and keep.
    """

    schedule: Schedule
    stages: Stages
    mesh: Mesh
    microbatch: Any = None
    key_impl: Any = None
    numbers: Numbers

    # -- What the two kinds of pass answer differently

    @property
    @abc.abstractmethod
    def lowered(self) -> Lowered:
        """The table as static integers."""

    @property
    @abc.abstractmethod
    def state_table(self) -> Lowered:
        """The lowered table that trains the weights. It says in which rows of the state they are."""

    @property
    @abc.abstractmethod
    def routes(self) -> list[tuple[Route, Packing]]:
        """The kinds of messages, with their packings."""

    @property
    @abc.abstractmethod
    def packings(self) -> StatePackings:
        """The packings of the leaves of the state."""

    @property
    @abc.abstractmethod
    def layout(self) -> StateLayout:
        """The arrays of the state."""

    @property
    @abc.abstractmethod
    def drops_branches(self) -> bool:
        """True if an operation has no branch in a phase in which all devices always run one program of it."""

    @property
    @abc.abstractmethod
    def scalars(self) -> ScalarTable:
        """The scalars of every tick."""

    @property
    @abc.abstractmethod
    def tick_stashes(self) -> frozenset[str]:
        """The stashes whose values live in one tick, from one operation without a branch to another.

        They are no part of the state: see `jpipe.engine.arrays.TickStash`.
        """

    # -- What they share

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage between which a pass exchanges anything, along the axis "data"."""
        return num_together(self.mesh, self.local_steps)

    @property
    def local_steps(self) -> LocalSteps | None:
        """See `StateFacts`. A prediction reads weights that all replicas have."""
        return None

    @property
    def target(self) -> Target:
        """Facts of the platform."""
        return target_of(self.mesh.devices.flat[0].platform)

    @property
    def branches(self) -> StageBranches:
        """The branches of the operations of columns."""
        return StageBranches()

    @property
    def rows_apart(self) -> bool:
        """Whether each row of weights is read in branches for this row alone."""
        return bool(self.branches.forward)

    @property
    def rows(self) -> VersionRows:
        """The rows of the versions of weights."""
        return self.state_table.rows

    @functools.cached_property
    def array_rows(self) -> dict[str, ArrayRows]:
        """Group, or ring of stashes -> the rows of its arrays, for those that have leaves of stages."""
        return self._array_rows()

    @functools.cached_property
    def _facts(self) -> StateFacts:
        """The facts that decide the arrays of a state, as far as both kinds of pass have them."""
        return StateFacts(
            mesh=self.mesh,
            lowered=self.lowered,
            packings=self.packings,
            array_rows=self.array_rows,
            microbatch=self.microbatch,
            local_steps=self.local_steps,
            message_compression=jax.eval_shape(self.first_message_compression),
        )

    def first_message_compression(self) -> dict[str, Any]:
        """The states of the compressors of messages, on one device before training."""
        return first_states(self._message_codecs(), self.lowered.num_chunks)

    # -- The scalars of every tick as an array, which is an argument of every pass

    @property
    def abstract_rows(self) -> jax.ShapeDtypeStruct:
        """int32 `[D, T, integers]`: see `ScalarTable.rows`. Each device has its own."""
        sharding = NamedSharding(self.mesh, REPLICATED)
        shape = self.scalars.rows_shape
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

    @property
    def local_rows(self) -> jax.ShapeDtypeStruct:
        """The local shape of `abstract_rows`, on one device."""
        return jax.ShapeDtypeStruct((1, *self.scalars.rows_shape[1:]), np.int32)

    def place_rows(self) -> jax.Array:
        """Puts the rows of `ScalarTable.rows` on the devices."""
        like = self.abstract_rows

        def rows_of_devices(index: Any) -> np.ndarray:
            return self.scalars.rows(index[0])

        return jax.make_array_from_callback(like.shape, like.sharding, rows_of_devices)

    # -- Parts of the answers

    def _array_rows(self) -> dict[str, ArrayRows]:
        """The rows of "parameters" (also from hooks), "mutable_state", "statistics" and "message_compression"."""
        stages, weights = self.stages, self.stages.parameters
        used = self._arrays_of_stages(weights)
        return {
            "parameters": ArrayRows.per_version(self.state_table, weights.arrays, used, weights.constant),
            "mutable_state": self._rows_of_columns(stages.state),
            "statistics": self._rows_of_columns(stages.statistics),
            "message_compression": ArrayRows.per_stage(self.state_table, [], used),
        }

    def _message_codecs(self) -> dict[str, list]:
        """Inbox of a message of forwards -> the codecs of its leaves, for each sender."""
        stages = self.stages
        return {"activation": [*stages.codecs]} | {
            f"skip{i}": [tuple(itertools.chain(*portal.codecs.values()))] for i, portal in enumerate(stages.portals)
        }

    def _find_routes(self, forward_only: bool) -> list[tuple[Route, Packing]]:
        """`routes`, without messages of backwards if nothing runs backward."""
        stages = self.stages
        codecs = itertools.chain(*itertools.chain(*self._message_codecs().values()))
        return find_routes(
            stages.num_stages,
            stages.messages,
            stages.portals,
            forward_only=forward_only,
            kept=any(codec.compression.is_sparse for codec in codecs),
        )

    def _pack_state(self, **training_packings: Any) -> StatePackings:
        """`packings`; `training_packings` are the fields that only a training pass has."""
        stages, vocabulary = self.stages, self.stages.vocabulary
        return StatePackings(
            parameters=stages.parameters,
            accumulators=stages.accumulators,
            mutable_state=stages.state,
            statistics=stages.statistics,
            rings={ring: getattr(stages, ring) for ring in RINGS},
            messages=self.routes,
            embedded=self._activations(vocabulary.embedded),
            head_input=self._activations(jax.tree.leaves(vocabulary.head_inputs)),
            **training_packings,
        )

    def _activations(self, avals: Sequence[jax.ShapeDtypeStruct]) -> list[Leaf]:
        """Abstract leaves of an activation, with the split of values between layers."""
        return [Leaf(a, spec=self.stages.values.spec(a.shape)) for a in avals]

    def _arrays_of_stages(self, pack: Packing) -> list[set[str]]:
        return used_arrays(pack, self.stages.program_of_stage)

    def _rows_of_columns(self, pack: Packing) -> ArrayRows:
        used = self._arrays_of_stages(pack)
        return ArrayRows.per_stage(self.state_table, pack.arrays, used)

    def _stage_constants(self) -> dict[str, StageConstants]:
        """Operation of both kinds of pass -> its scalars that depend on the stage alone: see `LaneScalars`."""
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
        on_layers = ("forward", "backward", "weight_grad", "commit")
        everywhere = ("embed", "embed_backward", "head")
        return dict.fromkeys(on_layers, constants) | dict.fromkeys(everywhere, self._one_program)

    @property
    def _one_program(self) -> StageConstants:
        """The constants of an operation that has one program for all stages."""
        return {("program",): np.zeros(self.stages.num_stages, int)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPass(PassSpec):
    """A pass over a forward-only table, which collects the outputs of the last stage.

    Attributes:
      trained: the lowered table that trains the weights.
    """

    trained: Lowered

    @property
    def state_table(self) -> Lowered:
        """See `PassSpec`."""
        return self.trained

    @functools.cached_property
    def lowered(self) -> Lowered:
        """See `PassSpec`."""
        together = self.stages.vocabulary.together(self.stages.num_stages)
        forwards = {n: f for n, f in together.items() if f.operation == "forward"}
        routes = [route for route, _ in self.routes]
        return lower(self.schedule, routes=routes, target=self.target, together=forwards)

    @functools.cached_property
    def routes(self) -> list[tuple[Route, Packing]]:
        """See `PassSpec`."""
        return self._find_routes(forward_only=True)

    @functools.cached_property
    def packings(self) -> StatePackings:
        """See `PassSpec`."""
        return self._pack_state()

    @functools.cached_property
    def layout(self) -> StateLayout:
        """See `PassSpec`."""
        return layout_of(self._facts, forward_only=True)

    @functools.cached_property
    def scalars(self) -> ScalarTable:
        """See `PassSpec`."""
        constants = self._stage_constants()
        return scalar_table(self.lowered, constants, self.rows, newest=True)

    @property
    def drops_branches(self) -> bool:
        """See `PassSpec`."""
        return self.target.drops_branches

    @property
    def tick_stashes(self) -> frozenset[str]:
        """No names: a prediction stashes nothing."""
        return frozenset()
