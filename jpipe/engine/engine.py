"""The one executor: a lowered table, run by `shard_map`, `scan` and `ppermute`.

spec.py          what is static: table, model, optimizer, mesh, and what follows from them
layout.py        every array of the state: shape, sharding, memory, bytes
device.py        the scan over ticks; begin here
arrays.py        the arrays of a tick, and the two records that an operation gets
context.py       what a device and a lane know while they run
guard.py         how a device leaves out an operation
operations.py    forward, backward, weight gradient of a stage
stage_layers.py  the layers of a stage
transport.py     messages between devices, skips
spills.py        stashes that go to host memory, and come back
vocabulary.py    an embedding and a head that all devices run together
factors.py       gradients that are accumulated as factors, and never formed
gradients.py     what replicas exchange if gradients are compressed
updates.py       norms, replicas, tied weights, optimizer
loss_scale.py    loss scaling
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jpipe import packing
from jpipe.engine import layout as layouts
from jpipe.engine.device import run_pass
from jpipe.engine.spec import PassSpec
from jpipe.mesh import DATA, STAGE


class Engine(PassSpec):
    """Runs a table on a mesh."""

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The options of XLA that a pass needs, for `jax.jit`."""
        return dict(self.lowered.target.compiler_options)

    @property
    def abstract_rows(self) -> jax.ShapeDtypeStruct:
        """The scalars of every tick, int32 `[D, T, integers]`: see `ScalarTable.rows`. Each device has its own."""
        sharding = NamedSharding(self.mesh, layouts.REPLICATED)
        shape = self.scalars.rows_shape
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)

    @property
    def local_rows(self) -> jax.ShapeDtypeStruct:
        """Those of one device."""
        return jax.ShapeDtypeStruct((1, *self.scalars.rows_shape[1:]), np.int32)

    def place_rows(self) -> jax.Array:
        """The same on the devices, which is an argument of every pass."""
        like = self.abstract_rows

        def of_devices(index: Any) -> np.ndarray:
            return self.scalars.rows(index[0])

        return jax.make_array_from_callback(like.shape, like.sharding, of_devices)

    def run(
        self,
        kept: Mapping[str, Any],
        in_flight: Mapping[str, Any],
        counters: Mapping[str, jax.Array],
        num_entered: jax.Array,
        batch: Any,
        rows: jax.Array,
    ) -> Any:
        """One pass over the table.

        Args:
          kept: global arrays of `PipelineState.kept`; a forward-only table takes "parameters" and
            "mutable_state".
          in_flight: global arrays of the groups "gradients" and "buffers"; a forward-only table takes
            "buffers".
          counters: "round", int32 `[D]`, passes so far; "started", int32 `[D]`, microbatches before
            round 0; "key", `[D]`, the random key of training.
          num_entered: int32 `[D]`, microbatches that have entered the pipe since round 0, including
            this round's. Cells of microbatches before the first or after the last do nothing.
          batch: tree of `[replicas, N, microbatch, ...]` arrays; None if nothing enters.
          rows: see `place_rows`.

        Returns:
          `kept` and `in_flight`, updated, and a dict of `[devices, ...]` results: "loss" and
          "aux" (sums), "count", "skipped" and "gradient_norm". A forward-only table returns outputs
          `[devices * N, microbatch, ...]` instead.
        """
        replicated_spec = layouts.REPLICATED
        kept_specs = {name: self.layout[name].spec for name in kept}
        per_device_spec = layouts.per_device_spec(self.mesh)
        forward_only = self.schedule.forward_only
        body = jax.shard_map(
            lambda *arguments: run_pass(self, *arguments),
            mesh=self.mesh,
            in_specs=(
                kept_specs,
                per_device_spec,
                replicated_spec,
                replicated_spec,
                layouts.batch_spec(self.mesh),
                replicated_spec,
            ),
            out_specs=per_device_spec
            if forward_only
            else (kept_specs, per_device_spec, per_device_spec),
            axis_names={STAGE, DATA} & set(self.mesh.axis_names),
            check_vma=False,
        )
        return body(kept, in_flight, counters, num_entered, batch, rows)

    def in_all_versions(self, weights: Any, version: jax.Array) -> Any:
        """Weights of which all versions are the one with a number.

        Args:
          weights: global arrays like those of the group "parameters".
          version: int32 `[]`, the number, counted since round 0.
        """
        rows, units = self.rows, self.stages.vocabulary.units
        of_arrays = self.array_rows["parameters"]

        @functools.cache
        def of_rows(name: str) -> tuple[np.ndarray, np.ndarray]:
            """For every row of an array the first row of its stage, and the number of the stage's versions."""
            shape = self.schedule.num_devices, of_arrays.number(name)
            first, modulus = np.zeros(shape, int), np.ones(shape, int)
            for s, copies in enumerate(self.lowered.copies):
                for d, chunk in copies:
                    of_stage = rows.of_chunk(s, d, chunk)
                    if of_arrays.row(name, d, of_stage.start) < 0:
                        continue  # the stage does not use the array
                    own = of_arrays.rows(name, d, of_stage)
                    first[d, own] = own.start
                    modulus[d, own] = rows.num_versions[s]
            return first, modulus

        of_units = {
            name: num_versions
            for unit, num_versions in zip(units, self.rows_of_units)
            for name in unit.packing.arrays
        }

        def copied(name: str, array: jax.Array) -> jax.Array:
            if name in of_units:
                row = jnp.mod(version, of_units[name])
                return jnp.broadcast_to(array[row][None], array.shape)
            first, modulus = of_rows(name)
            if modulus.max() == 1:
                return array
            d = lax.axis_index(STAGE)
            row = jnp.asarray(first)[d] + jnp.mod(version, jnp.asarray(modulus)[d])
            if not packing.is_on_host(array):
                return array[row]
            for i in range(len(array)):
                array = packing.each_row(array, [jnp.int32(i)], lambda a: a, [row[i]])
            return array

        def on_device(weights: Any) -> Any:
            return jax.tree.map_with_path(lambda p, a: copied(p[-1].key, a), weights)

        body = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=layouts.REPLICATED,
            out_specs=layouts.REPLICATED,
            axis_names={STAGE, DATA} & set(self.mesh.axis_names),
            check_vma=False,
        )
        return body(weights)
