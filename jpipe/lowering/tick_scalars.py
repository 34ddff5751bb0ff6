"""Typed views of the scalars of one tick on one device, which `jpipe.lowering.scalars` computes.

Letters: F scalars of a tick.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.lowering.scalars import OF_COLUMNS, ScalarTable


@dataclasses.dataclass(frozen=True)
class TickScalars:
    """The scalars of one tick on one device.

    Attributes:
      table: the place of each scalar.
      values: int32 `[F]`.
      ticks: the ticks of which this is one, as far as they are known when the step is traced; None: any.
    """

    table: ScalarTable
    values: jax.Array
    ticks: range | None = None

    def lane(self, operation: str, lane: int | jax.Array) -> "LaneScalars":
        """The scalars of one lane of an operation. The lane may be known in the program only."""
        return LaneScalars(self, operation, lane)

    def spill(self, ring: str) -> "SpillScalars":
        """The scalars of a ring's traffic with host memory."""
        return SpillScalars(self, ring)

    @property
    def updates(self) -> jax.Array:
        """bool `[]`, whether any device updates in the tick; the same on all devices."""
        return self.get("updates") == 1

    @property
    def reporter(self) -> jax.Array:
        """The stage whose norm the tick reports, int32 `[]`; see `NormTable`."""
        return self.get("reporter")

    def arrivals(self, before: str) -> jax.Array:
        """The branch that receives the messages before an operation, int32 `[]`: see `Arrivals`."""
        return self.get("arrivals", before)

    def channel(self, number: int) -> "ChannelScalars":
        """The scalars of one channel."""
        return ChannelScalars(self, number)

    def get(self, *name: str | int) -> jax.Array:
        """Reads one scalar, int32 `[]`. In the body of a loop, it reads the scalar in the loop."""
        return lax.index_in_dim(self.values, self.table.index[name], keepdims=False)


@dataclasses.dataclass(frozen=True)
class LaneScalars:
    """The scalars of one lane of an operation in one tick, int32 `[]` each.

    Every access reads the scalar anew, at the place of the access.
    """

    tick: TickScalars
    operation: str
    lane: int | jax.Array

    def _get(self, *field: str | int) -> jax.Array:
        if isinstance(self.lane, int):
            return self.tick.get(self.operation, self.lane, *field)
        index_by_lane = self.tick.table.index_of_lanes(self.operation, field)
        index = lax.dynamic_index_in_dim(index_by_lane, self.lane, keepdims=False, allow_negative_indices=False)
        return lax.dynamic_index_in_dim(self.tick.values, index, keepdims=False, allow_negative_indices=False)

    @property
    def program(self) -> jax.Array:
        """The stage program that runs; -1: none."""
        return self._get("program")

    @property
    def only_program(self) -> int | None:
        """See `ScalarTable.only_program`. The result is None also if the tick is not known."""
        if self.tick.ticks is None or not isinstance(self.lane, int):
            return None
        return self.tick.table.only_program(self.operation, self.lane, self.tick.ticks)

    @property
    def branch(self) -> jax.Array | int:
        """The number of the program's branch: a Python integer if all devices run it."""
        only = self.only_program
        return self.program if only is None else only

    @property
    def stage(self) -> jax.Array:
        """The stage that updates."""
        return self._get("stage")

    @property
    def is_of_column(self) -> bool:
        """True if it runs a column of the table, and not layers that all devices run together."""
        return self.operation in OF_COLUMNS

    @property
    def chunk(self) -> jax.Array:
        """Position of the stage's column among the device's columns; 0 for layers that all devices run together, which
        have arrays of their own.
        """
        return self._get("chunk") if self.is_of_column else jnp.int32(0)

    @property
    def microbatch(self) -> jax.Array:
        """Row of the microbatch in the minibatches that are kept."""
        return self._get("microbatch")

    @property
    def microbatch_number(self) -> jax.Array:
        """Number of the microbatch since training began."""
        return self._get("number")

    @property
    def minibatch(self) -> jax.Array | int:
        """Row of its minibatch among the weights of minibatches that are kept."""
        name = (self.operation, 0, "minibatch")
        return self._get("minibatch") if name in self.tick.table.index else 0

    @property
    def completes_minibatch(self) -> jax.Array:
        """1 for the last microbatch of its minibatch, else 0."""
        return self._get("completes")

    @property
    def row(self) -> jax.Array:
        """Row of the weights that are read (update: written): see `jpipe.lowering.versions`."""
        return self._get("row")

    @property
    def previous_row(self) -> jax.Array:
        """Row of the version before the one that an update writes."""
        return self._get("previous_row")

    @property
    def stale_row(self) -> jax.Array:
        """Row of the version that the gradient of an update was computed at: see `VersionRows.stale`."""
        return self._get("stale_row")

    @property
    def absolute_version(self) -> jax.Array:
        """The weight version that is read (update: written), counted since round 0."""
        return self._get("absolute_version")

    @property
    def is_first(self) -> jax.Array:
        """1 if the stage is the first, else 0."""
        return self._get("first")

    @property
    def is_last(self) -> jax.Array:
        """1 if the stage is the last, else 0."""
        return self._get("last")

    def num_layers(self, run: int) -> jax.Array:
        """Layers of the stage in run number `run` of its program."""
        return self._get("length", run)

    def first_layer(self, run: int) -> jax.Array:
        """Number of the first layer of the stage in run number `run` of its program."""
        return self._get("layer", run)

    def slot(self, ring: str) -> jax.Array:
        """Slot of the microbatch in a ring."""
        return self._get("slot", ring)

    def delay(self, weight_pass: str) -> jax.Array:
        """Delay of the weights that a pass reads, in updates; see `read_delays`."""
        return self._get("delay", weight_pass)


@dataclasses.dataclass(frozen=True)
class ChannelScalars:
    """The scalars of one channel in one tick, int32 `[]` each."""

    tick: TickScalars
    number: int

    @property
    def sends(self) -> jax.Array:
        """bool `[]`, whether any device sends; the same on all devices."""
        return self.tick.get("channel", self.number, "sends") == 1

    @property
    def lane(self) -> jax.Array:
        """The output that the device sends, as a position in `Lowered.outgoing`."""
        return self.tick.get("channel", self.number, "lane")

    def slot(self, inbox: str) -> jax.Array:
        """Slot of an inbox for the message that arrives; the last slot discards it."""
        return self.tick.get("channel", self.number, "slot", inbox)


@dataclasses.dataclass(frozen=True)
class SpillScalars:
    """The scalars of a `jpipe.lowering.spills.Spill` in one tick, int32 `[]` each; -1: nothing."""

    tick: TickScalars
    ring: str

    @property
    def leaves(self) -> jax.Array:
        """The slot that is copied to the staging slot at the end of the tick."""
        return self.tick.get("spill", self.ring, "leaves")

    @property
    def stores(self) -> jax.Array:
        """The slot in host memory that takes the staging slot."""
        return self.tick.get("spill", self.ring, "stores")

    @property
    def loads(self) -> jax.Array:
        """The slot in host memory that comes to the device."""
        return self.tick.get("spill", self.ring, "loads")

    @property
    def arrives(self) -> jax.Array:
        """The slot of the device that takes it at the end of the tick."""
        return self.tick.get("spill", self.ring, "arrives")
