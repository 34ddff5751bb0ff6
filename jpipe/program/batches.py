"""Cuts the minibatches of a pipeline into microbatches, fills them up, and places them on its devices."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe._processes.sharing import BatchRows, assemble, gather, is_global
from jpipe.engine.layout import batch_spec
from jpipe.layers.avals import check_nans, shapes_text
from jpipe.mesh import DATA, with_automatic_axes
from jpipe.options.checks import batch_size
from jpipe.options.settings import Settings


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """The minibatches of a pipeline. Each replica gets consecutive rows."""

    settings: Settings

    def cut(self, batch: Any) -> Any:
        """`[batch, ...]` to `[replicas, groups, rows, ...]`: a replica gets consecutive rows."""
        lead = self.settings.num_replicas, self.settings.schedule.num_row_groups
        return jax.tree.map(
            lambda a: jnp.reshape(a, (*lead, a.shape[0] // math.prod(lead), *a.shape[1:])),
            batch,
        )

    def microbatches(self, batch: Any) -> Any:
        """`[batch, ...]` to `[replicas, N, microbatch, ...]`: the slices of a group of rows follow one another."""
        k, groups = self.settings.schedule.num_slices, self.cut(batch)
        if k == 1:
            return groups

        def sliced(a: jax.Array) -> jax.Array:
            a = a.reshape(*a.shape[:3], k, a.shape[3] // k, *a.shape[4:])
            a = jnp.moveaxis(a, 3, 2)
            return a.reshape(a.shape[0], -1, *a.shape[3:])

        return jax.tree.map(sliced, groups)

    def place(self, batch: Any) -> Any:
        """The batch, each replica's rows on the replica's devices."""
        check_nans(batch, "batch")
        rows = self.settings.rows
        if rows is not None:
            sharding = NamedSharding(self.settings.mesh, batch_spec(self.settings.mesh))
            return jax.tree.map(lambda a: assemble(rows, a, sharding), batch)
        if self.settings.num_replicas == 1:
            return self.on_mesh(batch)
        sharding = NamedSharding(self.settings.mesh, PartitionSpec(DATA))
        return jax.device_put(batch, sharding)

    def on_mesh(self, batch: Any) -> Any:
        """The batch, with arrays that lie elsewhere moved to all devices of the mesh."""
        mesh = self.settings.mesh
        everywhere = NamedSharding(mesh, PartitionSpec())

        def moved(a: Any) -> Any:
            if self.settings.rows is not None:
                return assemble(self.settings.rows, a, everywhere)
            if not isinstance(a, jax.Array):
                return a
            its_mesh = getattr(a.sharding, "mesh", None)
            if its_mesh is None and not a.committed:  # JAX moves it
                return a
            is_here = its_mesh == mesh and a.sharding.memory_kind == everywhere.memory_kind
            return a if is_here else jax.device_put(a, everywhere)

        return jax.tree.map(moved, batch)

    def padded(self, batch: Any, only: str | None = None) -> tuple[int, Any, np.ndarray | None]:
        """A batch with copies of its last row, up to a size that can be cut.

        Args:
          batch: this process's rows, or global arrays.
          only: the entry to keep; None: all.

        Returns:
          The size of `batch`; the padded batch, placed; and, if it has the rows of several processes or is
          global, where the rows that are not padding are in it.
        """
        settings, rows = self.settings, self.settings.rows
        size = batch_size(batch)
        multiple = settings.num_parts
        if only is not None:
            batch = {only: batch[only]}
        batch, sizes = dict(batch), [size]
        if rows is not None:
            given_whole = {is_global(a) for a in jax.tree.leaves(batch)}
            if len(given_whole) > 1:
                raise ValueError(
                    "`batch` has global arrays and arrays of this process, got "
                    f"{shapes_text(batch)}. Make all of them global, or none."
                )
            sizes = self._sizes(rows, size, apart=rows.apart and given_whole == {False})
            if given_whole == {True}:
                padded = self._pad_global(batch, -size % multiple)
                return size, padded, np.arange(size, dtype=np.int32)
            multiple = multiple * rows.num_held // rows.num_replicas
        if max(sizes) == 0:
            raise ValueError("the batch is empty: give at least one row.")
        padded = -(-max(sizes) // multiple) * multiple
        if padded > size:

            def pad(a: Any) -> np.ndarray:
                a = np.asarray(a)
                last = a[-1:] if size else np.zeros((1, *a.shape[1:]), a.dtype)
                return np.concatenate([a, np.repeat(last, padded - size, axis=0)])

            batch = jax.tree.map(pad, batch)
        positions = None
        if rows is not None and rows.apart:
            positions = rows.positions(sizes, padded)
        return size, self.place(batch), positions

    @staticmethod
    def _sizes(rows: BatchRows, size: int, *, apart: bool) -> list[int]:
        """Rows of the batches that all processes give, by process.

        Args:
          rows: the rows that each of them holds.
          size: rows of this process's batch.
          apart: whether processes may differ.

        Raises:
          ValueError: if processes that must give the same rows give different numbers.
        """
        sizes = gather(np.array(size, np.int32)).tolist()
        for p, q in itertools.combinations(range(len(sizes)), 2):
            if sizes[p] != sizes[q] and (not apart or rows.held[p] == rows.held[q]):
                raise ValueError(
                    f"processes {p} and {q} hold parts of the same replicas and must give the same rows, got "
                    f"{sizes[p]} and {sizes[q]}. Give both the same batch."
                )
        return sizes

    def _pad_global(self, batch: Any, padding: int) -> Any:
        """`padded` for global arrays."""
        if not padding:
            return self.place(batch)
        sharding = NamedSharding(self.settings.mesh, batch_spec(self.settings.mesh))
        batch = jax.tree.map(with_automatic_axes, batch)

        def pad(a: jax.Array) -> jax.Array:
            copies = jnp.broadcast_to(a[-1:], (padding, *a.shape[1:]))
            return jnp.concatenate([a, copies])

        pad_all = jax.jit(lambda b: jax.tree.map(pad, b), out_shardings=sharding)
        return pad_all(batch)
