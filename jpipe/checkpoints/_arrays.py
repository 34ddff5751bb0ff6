"""The arrays of a checkpoint on disk: Orbax writes them and restores whole arrays, TensorStore reads leaves."""

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jpipe.checkpoints import _layout
from jpipe.states.locations import Leaves, Location

FOLDER = "arrays"
"""The folder of the arrays, inside the folder of a step."""

TIMEOUT_SECONDS = 300
"""Seconds that a process waits for the parts of the others."""

_CACHE_BYTES = 1 << 28
_LEAST_WRITING_BYTES = 1 << 26


def save(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> ocp.AsyncCheckpointer:
    """Begins to write arrays; returns once they are copied.

    What is compressed waits for the disk and takes memory beside the arrays, so it is bounded: by an eighth
    of the bytes of this process, but at least by the largest part that Orbax writes at once.

    Returns:
      Its `wait_until_finished` waits, and raises what went wrong.
    """
    parts = [s.data.nbytes for a in arrays.values() for s in a.addressable_shards]
    most = max(sum(parts) // 8, max(parts, default=0) + 1, _LEAST_WRITING_BYTES)
    writer = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=most)
    handler = ocp.PyTreeCheckpointHandler(handler_impl=writer)
    # A thread that waits for a folder that cannot be made would keep the process from ending.
    options = ocp.AsyncOptions(timeout_secs=TIMEOUT_SECONDS, create_directories_asynchronously=False)
    checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)
    try:
        checkpointer.save(folder / FOLDER, args=ocp.args.PyTreeSave(dict(arrays)))
    except BaseException:
        checkpointer.close()
        raise
    return checkpointer


def files_by_process(names: Iterable[str]) -> dict[int, list[str]]:
    """The files of a step by the process that has written them. Process 0 has also written the files that all share."""
    by_process: dict[int, list[str]] = {0: []}
    for name in names:
        match = re.match(rf"{FOLDER}/ocdbt\.process_(\d+)/", name)
        by_process.setdefault(int(match[1]) if match else 0, []).append(name)
    return by_process


def restore(folder: pathlib.Path, shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Whole arrays, each with the sharding that it is to have.

    Args:
      folder: the folder of the step.
      shapes: name -> abstract array with a sharding; all arrays of the checkpoint.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / FOLDER, dict(shapes))


class StoredLeaf:
    """A leaf on disk, which is read when numpy asks for it.

    Attributes:
      shape: shape of the leaf.
      dtype: dtype of the leaf.
    """

    def __init__(self, location: Location, dtype: np.dtype, array: Any):
        self.shape, self.dtype = location.shape, dtype
        self._location, self._array = location, array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        reads = [self._array[b.in_array].read() for b in self._location.blocks]
        numbers = self._location.leaf([np.asarray(r.result(), self.dtype) for r in reads])
        return numbers if dtype is None else numbers.astype(dtype)


def stored_leaves(folder: pathlib.Path, layout: Mapping[str, Any]) -> Leaves:
    """The leaves of the model in a checkpoint: `Leaves` with a `StoredLeaf` for each location."""
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    arrays: dict[str, Any] = {}

    def leaf(location: Location) -> StoredLeaf:
        name = _layout.array_name(location)
        if name not in arrays:
            kvstore = {
                "driver": "ocdbt",
                "base": f"file://{(folder / FOLDER).as_posix()}/",
                "path": f"{name}/",
            }
            spec = {"driver": "zarr", "kvstore": kvstore}
            arrays[name] = tensorstore.open(spec, context=context, open=True).result()
        dtype = _layout.dtype_of(layout, location)
        return StoredLeaf(location, dtype, arrays[name])

    return jax.tree.map(leaf, _layout.locations_in(layout))
