"""The arrays of a checkpoint on disk: Orbax writes them and restores whole arrays, TensorStore reads leaves."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jpipe.checkpoints import _layout
from jpipe.portable import Location, Locations

FOLDER = "arrays"
"""The folder of the arrays, inside the folder of a step."""

_CACHE_BYTES = 1 << 28


def save(
    folder: pathlib.Path, arrays: Mapping[str, jax.Array]
) -> ocp.AsyncCheckpointer:
    """Begins to write arrays; returns once they are copied.

    What is compressed at one time is bounded, because it takes memory beside the copies.

    Returns:
      Its `wait_until_finished` waits, and raises what went wrong.
    """
    largest = max(
        (s.data.nbytes for a in arrays.values() for s in a.addressable_shards),
        default=0,
    )
    handler = ocp.StandardCheckpointHandler(save_concurrent_gb=1 + largest // 10**9)
    # A thread that waits for a folder that cannot be made would keep the process from ending.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)
    try:
        checkpointer.save(folder / FOLDER, args=ocp.args.StandardSave(dict(arrays)))
    except BaseException:
        checkpointer.close()
        raise
    return checkpointer


def restore(folder: pathlib.Path, shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Whole arrays, each with the sharding that it is to have.

    Args:
      folder: of the step.
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
        numbers = self._array[self._location.index].read().result()
        numbers = np.asarray(numbers, self.dtype).reshape(self.shape)
        return numbers if dtype is None else numbers.astype(dtype)


def stored_leaves(folder: pathlib.Path, layout: Mapping[str, Any]) -> Locations:
    """The leaves of the model in a checkpoint: `Locations` with a `StoredLeaf` for each location."""
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
