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
_WHOLE = -1
"""The number of layers of a whole model."""


@suggests
def save_params(path: str | os.PathLike, params: Any) -> None:
    """Writes weights to a file.

    The file is what `flax.serialization.msgpack_serialize` makes of a dict with "params": the name of each
    leaf -> array. A name is the number of the layer and the names inside the layer, with dots between:
    "3.attention.kernel". Of a whole model it is the path in the model. "crc32" has a checksum of each leaf,
    "num_layers" the number of layers, -1 of a whole model.

    Args:
      path: the path of the file. An older file is replaced once the new one is whole.
      params: one nested dict per layer, or that of a whole model, as `Pipeline.get_params` returns them, or NNX modules
        or states.

    Raises:
      ValueError: if it is neither, or a name inside a layer has a dot or is a number in text.
      OSError: if the file cannot be written.

    Example:
      >>> import tempfile
      >>> path = f"{tempfile.mkdtemp()}/weights.msgpack"
      >>> save_params(path, [{"kernel": np.ones((2, 3))}, {}])
      >>> load_params(path)
      [{'kernel': array([[1., 1., 1.], [1., 1., 1.]])}, {}]
    """
    is_list = isinstance(params, Sequence) and not isinstance(params, str)
    layers = list(map(as_parameters, params if is_list else [params]))
    if not all(isinstance(layer, Mapping) for layer in layers):
        raise ValueError(
            "`params` must be a list with one nested dict per layer, or the nested dict of a whole model, as "
            f"`Pipeline.get_params` returns them, got {type(params).__name__}"
            + (f" of {type(params[0]).__name__}." if is_list else ".")
        )
    leaves: dict[str, np.ndarray] = {}
    for i, layer in enumerate(layers):
        for names, leaf in traverse_util.flatten_dict(layer).items():
            for name in names:
                if isinstance(name, str) and ("." in name or name.isdecimal()):
                    where = f" of layer {i}" if is_list else ""
                    raise ValueError(
                        f"`params`{where} have the name {name!r}: in a file, dots separate names and "
                        "numbers are positions in lists. Rename it."
                    )
            leaves[".".join(map(str, (i, *names) if is_list else names))] = np.asarray(leaf)
    num_layers = len(layers) if is_list else _WHOLE
    content = {
        "kind": _KIND,
        "num_layers": num_layers,
        "params": leaves,
        "crc32": {name: _crc(a, num_layers) for name, a in leaves.items()},
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
def load_params(path: str | os.PathLike) -> Any:
    """Reads weights that `save_params` wrote: one nested dict per layer, or that of a whole model, of host arrays.

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
        flat: list[dict] = [{} for _ in range(1 if num_layers == _WHOLE else num_layers)]
        damaged = [n for n, a in leaves.items() if checksums.get(n) != _crc(a, num_layers)]
        if kind != _KIND or set(leaves) != set(checksums):
            raise ValueError("its parts do not fit together")
        if damaged:
            raise ValueError(f"the numbers of {damaged[0]} are not those that were written")
        for name, leaf in leaves.items():
            first, *names = ["0", *name.split(".")] if num_layers == _WHOLE else name.split(".")
            keys = tuple(int(n) if n.isdecimal() else n for n in names)
            flat[int(first)][keys] = leaf
        trees = list(map(traverse_util.unflatten_dict, flat))
        return trees[0] if num_layers == _WHOLE else trees
    except Exception as error:  # msgpack and Flax raise many kinds
        raise ValueError(
            f"`{path}` is damaged or no file of `jpipe.save_params`: {type(error).__name__}: {error}"
        ) from error


def _crc(array: np.ndarray, num_layers: int) -> int:
    """A checksum of the numbers, the dtype, the shape and the number of layers."""
    head = f"{array.dtype}{array.shape}{num_layers}".encode()
    return zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(head))
