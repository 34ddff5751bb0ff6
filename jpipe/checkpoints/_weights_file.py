"""Weights in files: msgpack, as Flax writes it, or safetensors."""

import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import serialization, traverse_util

from jpipe._util.foreign import shown
from jpipe._util.paths import local_path, replaced
from jpipe._util.suggest import suggests
from jpipe.checkpoints import _safetensors
from jpipe.checkpoints._safetensors import NameMap
from jpipe.layers.flax_nnx import as_parameters

_KIND = "jpipe params 1"
_WHOLE = -1
"""The number of layers of a whole model."""


@suggests
def save_params(
    path: str | os.PathLike, params: Any, *, names: NameMap | None = None, file_bytes: int | None = None
) -> None:
    """Writes weights to a file.

    A name is the number of the layer and the names inside the layer, with dots between: "3.attention.kernel". Of a
    whole model it is the path in the model.

    A file that ends in ".safetensors" has the tensors by name. It needs the package `safetensors`. Any other file is
    what `flax.serialization.msgpack_serialize` makes of a dict with "params": the name of each leaf -> array; "crc32"
    has a checksum of each leaf, "num_layers" the number of layers, -1 of a whole model.

    Args:
      path: the path of the file. An older file is replaced once the new one is whole.
      params: one nested dict per layer, or that of a whole model, as `Pipeline.get_params` returns them, or NNX modules
        or states.
      names: the published layout to write; None: the names are those of `params`. For safetensors alone.
      file_bytes: the most bytes of a file, at least one tensor; more go into files beside it, with an index. None: one
        file. For safetensors alone.

    Raises:
      ValueError: if it is neither, or a name inside a layer has a dot or is a number in text, or the published layout
        has no name for a leaf.
      OSError: if the file cannot be written.

    Example:
      >>> import tempfile
      >>> path = f"{tempfile.mkdtemp()}/weights.msgpack"
      >>> save_params(path, [{"kernel": np.ones((2, 3))}, {}])
      >>> load_params(path)
      [{'kernel': array([[1., 1., 1.], [1., 1., 1.]])}, {}]
    """
    leaves, num_layers = _by_name(params, "params")
    path = local_path(path, "path")
    if file_bytes is not None and (not hasattr(file_bytes, "__index__") or file_bytes < 1):
        raise ValueError(f"`file_bytes` must be a whole number of bytes, at least 1, got {shown(file_bytes)}.")
    if path.name.endswith(_safetensors.ENDING):
        _safetensors.write(path, leaves, num_layers, names, file_bytes)
        return
    _check_options(path, names=names, file_bytes=file_bytes)
    arrays = {name: np.asarray(a) for name, a in leaves.items()}
    content = {
        "kind": _KIND,
        "num_layers": num_layers,
        "params": arrays,
        "crc32": {name: _crc(a, num_layers) for name, a in arrays.items()},
    }
    with replaced(path) as unfinished:
        unfinished.write_bytes(serialization.msgpack_serialize(content))


@suggests
def load_params(path: str | os.PathLike, *, names: NameMap | None = None, like: Any = None) -> Any:
    """Reads weights: one nested dict per layer, or that of a whole model.

    `Pipeline.init` takes them as `params`, and `flax.nnx.update(module, params[i])` puts those of a layer
    into a module.

    Args:
      path: a file of `save_params`; or a published model: a file that ends in ".safetensors", its index, or the folder
        with either.
      names: the published layout of the file; None: its names are those of the model. For safetensors alone.
      like: the model that the weights are for: params, an NNX module or state, which may be abstract, as
        `nnx.eval_shape` makes it. The names and shapes are checked, and leaves get its dtypes. None: what the file has.
        For safetensors alone.

    Returns:
      Host arrays. Of a safetensors file each leaf has `shape` and `dtype`, and is read from disk when numpy asks for
      it: `Pipeline.init` asks for those of one stage at a time.

    Raises:
      ValueError: if the file is damaged or no file of weights, or does not fit `names` or `like`; the message names
        what is missing, unexpected, or of another shape.
      OSError: if it cannot be read.
    """
    path = local_path(path, "path")
    if path.is_dir() or path.name.endswith((_safetensors.ENDING, f"{_safetensors.ENDING}.index.json")):
        wanted, num_layers = (None, None) if like is None else _by_name(like, "like")
        leaves, noted = _safetensors.read(path, names, wanted)
        return _in_layers(leaves, noted if num_layers is None else num_layers)
    _check_options(path, names=names, like=like)
    data = path.read_bytes()
    try:
        content = serialization.msgpack_restore(data)
        kind, leaves, checksums = (content[n] for n in ("kind", "params", "crc32"))
        num_layers = content["num_layers"]
        damaged = [n for n, a in leaves.items() if checksums.get(n) != _crc(a, num_layers)]
        if kind != _KIND or set(leaves) != set(checksums):
            raise ValueError("its parts do not fit together")
        if damaged:
            raise ValueError(f"the numbers of {damaged[0]} are not those that were written")
        return _in_layers(leaves, num_layers)
    except Exception as error:  # msgpack and Flax raise many kinds
        raise ValueError(
            f"`{path}` is damaged or no file of `jpipe.save_params`: {type(error).__name__}: {error}"
        ) from error


def _check_options(path: pathlib.Path, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"`{name}` is for safetensors files, got the file {path.name!r}. Name a file that ends in "
                f'"{_safetensors.ENDING}", or leave `{name}` out.'
            )


def _by_name(params: Any, argument: str) -> tuple[dict[str, Any], int]:
    """The leaves by their names in a file, and the number of layers; -1 of a whole model."""
    is_list = isinstance(params, Sequence) and not isinstance(params, str)
    layers = list(map(as_parameters, params if is_list else [params]))
    if not all(isinstance(layer, Mapping) for layer in layers):
        raise ValueError(
            f"`{argument}` must be a list with one nested dict per layer, or the nested dict of a whole model, as "
            f"`Pipeline.get_params` returns them, got {type(params).__name__}"
            + (f" of {type(params[0]).__name__}." if is_list else ".")
        )
    leaves: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        for names, leaf in traverse_util.flatten_dict(layer).items():
            for name in names:
                if isinstance(name, str) and ("." in name or name.isdecimal()):
                    where = f" of layer {i}" if is_list else ""
                    raise ValueError(
                        f"`{argument}`{where} have the name {name!r}: in a file, dots separate names and "
                        "numbers are positions in lists. Rename it."
                    )
            leaves[".".join(map(str, (i, *names) if is_list else names))] = leaf
    return leaves, len(layers) if is_list else _WHOLE


def _in_layers(leaves: Mapping[str, Any], num_layers: int) -> Any:
    """Nested dicts of leaves by name."""
    flat: list[dict] = [{} for _ in range(1 if num_layers == _WHOLE else num_layers)]
    for name, leaf in leaves.items():
        first, *names = ["0", *name.split(".")] if num_layers == _WHOLE else name.split(".")
        flat[int(first)][tuple(int(n) if n.isdecimal() else n for n in names)] = leaf
    trees = list(map(traverse_util.unflatten_dict, flat))
    return trees[0] if num_layers == _WHOLE else trees


def _crc(array: np.ndarray, num_layers: int) -> int:
    """A checksum of the numbers, the dtype, the shape and the number of layers."""
    head = f"{array.dtype}{array.shape}{num_layers}".encode()
    return zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(head))
