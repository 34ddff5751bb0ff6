"""Weights in one file: msgpack, as Flax writes it."""

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import serialization, traverse_util

from jpipe._util.paths import local_path
from jpipe._util.suggest import suggests
from jpipe.layers.flax_nnx import as_parameters

_KIND = "jpipe params 1"


@suggests
def save_params(path: str | os.PathLike, params: Sequence[Any]) -> None:
    """Writes weights to a file.

    The file is what `flax.serialization.msgpack_serialize` makes of a dict with "params": the name of each
    leaf -> array. A name is the number of the layer and the names inside the layer, with dots between:
    "3.attention.kernel". "crc32" has a checksum of each leaf, "num_layers" the number of layers.

    Args:
      path: the path of the file. An older file is replaced once the new one is whole.
      params: one nested dict per layer, as `Pipeline.get_params` returns them, or an NNX module or state.

    Raises:
      ValueError: if it is no such list, or a name inside a layer has a dot or is a number in text.
      OSError: if the file cannot be written.

    Example:
      >>> import tempfile
      >>> path = f"{tempfile.mkdtemp()}/weights.msgpack"
      >>> save_params(path, [{"kernel": np.ones((2, 3))}, {}])
      >>> load_params(path)
      [{'kernel': array([[1., 1., 1.], [1., 1., 1.]])}, {}]
    """
    layers = list(map(as_parameters, params)) if isinstance(params, Sequence) else None
    if layers is None or not all(isinstance(layer, Mapping) for layer in layers):
        raise ValueError(
            "`params` must be a list with one nested dict per layer, as `Pipeline.get_params` returns "
            f"them, got {type(params).__name__}" + (f" of {type(params[0]).__name__}." if layers else ".")
        )
    leaves: dict[str, np.ndarray] = {}
    for i, layer in enumerate(layers):
        for names, leaf in traverse_util.flatten_dict(layer).items():
            for name in names:
                if isinstance(name, str) and ("." in name or name.isdecimal()):
                    raise ValueError(
                        f"`params` of layer {i} have the name {name!r}: in a file, dots separate names and "
                        "numbers are positions in lists. Rename it."
                    )
            leaves[".".join(map(str, (i, *names)))] = np.asarray(leaf)
    content = {
        "kind": _KIND,
        "num_layers": len(layers),
        "params": leaves,
        "crc32": {name: _crc(a, len(layers)) for name, a in leaves.items()},
    }
    path = local_path(path, "path")
    unfinished = path.with_name(f"{path.name}.saving")
    try:
        unfinished.write_bytes(serialization.msgpack_serialize(content))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@suggests
def load_params(path: str | os.PathLike) -> list:
    """Reads weights that `save_params` wrote: one nested dict per layer, of host arrays.

    `Pipeline.init` takes them as `params`, and `flax.nnx.update(module, params[i])` puts those of a layer
    into a module.

    Args:
      path: the path of the file.

    Raises:
      ValueError: if the file is damaged or no file of weights.
      OSError: if it cannot be read.
    """
    data = local_path(path, "path").read_bytes()
    try:
        content = serialization.msgpack_restore(data)
        kind, leaves, checksums = (content[n] for n in ("kind", "params", "crc32"))
        num_layers = content["num_layers"]
        flat: list[dict] = [{} for _ in range(num_layers)]
        damaged = [n for n, a in leaves.items() if checksums.get(n) != _crc(a, num_layers)]
        if kind != _KIND or set(leaves) != set(checksums):
            raise ValueError("its parts do not fit together")
        if damaged:
            raise ValueError(f"the numbers of {damaged[0]} are not those that were written")
        for name, leaf in leaves.items():
            first, *names = name.split(".")
            keys = tuple(int(n) if n.isdecimal() else n for n in names)
            flat[int(first)][keys] = leaf
        return list(map(traverse_util.unflatten_dict, flat))
    except Exception as error:  # msgpack and Flax raise many kinds
        raise ValueError(
            f"`{path}` is damaged or no file of `jpipe.save_params`: {type(error).__name__}: {error}"
        ) from error


def _crc(array: np.ndarray, num_layers: int) -> int:
    """A checksum of the numbers, the dtype, the shape and the number of layers."""
    head = f"{array.dtype}{array.shape}{num_layers}".encode()
    return zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(head))
