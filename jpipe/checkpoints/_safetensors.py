"""Weights in safetensors files, the format in which models are published, and their names there.

    file ──a tensor, when numpy asks for it──> NameMap ──> a leaf of the model

A folder may have several files, and an index that says which file has which tensor.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jpipe._util.foreign import shown
from jpipe._util.paths import replaced
from jpipe._util.suggest import did_you_mean, suggests

ENDING = ".safetensors"
_INDEX = f"model{ENDING}.index.json"
_NUM_LAYERS = "jpipe_num_layers"
_MOST_NAMES = 5
"""Names of one kind in an error message, at most."""
_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    **{f"{letter}{8 * size}": np.dtype(f"{letter.lower()}{size}") for letter in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "C64": np.complex64,
    "BF16": ml_dtypes.bfloat16,
}


def _unchanged(a: Any) -> Any:
    return a


@suggests
@dataclasses.dataclass(frozen=True)
class NameRule:
    """Where a tensor of a published model lies in a model.

    Attributes:
      published: the name of the tensor, in which `{}` stands for a part without a dot, such as the number of a layer.
      model: the path of the leaf, with as many `{}`.
      to_model: the tensor -> the leaf. It may change the order of numbers and the shape, by functions of numpy.
      to_published: the leaf -> the tensor.

    Example:
      >>> rule = NameRule.transposed("h.{}.up.weight", "blocks.{}.up.kernel")
      >>> NameMap([rule]).path("h.3.up.weight")
      'blocks.3.up.kernel'
    """

    published: str
    model: str
    to_model: Callable[[Any], Any] = _unchanged
    to_published: Callable[[Any], Any] = _unchanged

    @classmethod
    def transposed(cls, published: str, model: str) -> "NameRule":
        """A rule for a matrix whose rows are the columns of the leaf, as `torch.nn.Linear` has it."""
        return cls(published, model, np.transpose, np.transpose)


@suggests
@dataclasses.dataclass(frozen=True)
class NameMap:
    """The names of a published layout, and those of a model.

    Attributes:
      rules: the first rule that fits a name counts.
      ignored: published names that are not read, with `{}` as in a rule.
      prefix: the beginning of published names that some files leave out, such as "model.". These are read too.

    Raises:
      ValueError: if a rule has other `{}` on one side than on the other.
      TypeError: if `rules` has something else than `NameRule`, or `ignored` is no list of names.
    """

    rules: Sequence[NameRule]
    ignored: Sequence[str] = ()
    prefix: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.ignored, str) or not all(isinstance(name, str) for name in self.ignored):
            raise TypeError(f"`ignored` must be a list of published names, got {shown(self.ignored)}.")
        for rule in self.rules:
            if not isinstance(rule, NameRule):
                raise TypeError(f"`rules` must be a list of jpipe.NameRule(published, model), got {shown(rule)} in it.")
            if rule.published.count("{}") != rule.model.count("{}"):
                raise ValueError(
                    f"the rule from {rule.published!r} to {rule.model!r} must have as many {{}} on one side as on the "
                    "other: they stand for the same parts of a name."
                )

    def path(self, published: str) -> str | None:
        """The path in the model of a published name; None if it is ignored, or no rule fits."""
        return self._to_model(published)[0]

    def _to_model(self, published: str) -> tuple[str | None, NameRule | None]:
        for name in self._names(published):
            for rule in self.rules:
                parts = _parts(rule.published, name)
                if parts is not None:
                    return rule.model.format(*parts), rule
        return None, None

    def _is_ignored(self, published: str) -> bool:
        names = self._names(published)
        return any(_parts(pattern, name) is not None for pattern in self.ignored for name in names)

    def _names(self, published: str) -> tuple[str, ...]:
        return published, self.prefix + published

    def leaves(self, tensors: Mapping[str, "Leaf"]) -> dict[str, "Leaf"]:
        """The leaves of the model, by their paths.

        Raises:
          ValueError: if a tensor has no place in the model, or two have the same.
        """
        leaves: dict[str, Leaf] = {}
        unexpected = []
        for name, tensor in tensors.items():
            path, rule = self._to_model(name)
            if path is None or rule is None:
                unexpected += [] if self._is_ignored(name) else [name]
            elif path in leaves:
                raise ValueError(
                    f"two tensors of the file are {path!r} of the model, one is {name!r}. Correct the rules."
                )
            else:
                leaves[path] = tensor.changed(rule.to_model)
        if unexpected:
            raise ValueError(
                f"the file has tensors for which `names` has no rule: {_listed(unexpected)}. Add rules, or name them "
                "in `ignored`."
            )
        return leaves

    def tensors(self, leaves: Mapping[str, Any]) -> dict[str, "Leaf"]:
        """The published tensors of the leaves of a model.

        Raises:
          ValueError: if a leaf has no name in the published layout.
        """
        tensors = {}
        for path, leaf in leaves.items():
            rules = ((rule, _parts(rule.model, path)) for rule in self.rules)
            rule, parts = next(((rule, parts) for rule, parts in rules if parts is not None), (None, ()))
            if rule is None:
                known = [other.model for other in self.rules]
                raise ValueError(
                    f"`names` has no rule for {path!r} of the model.{did_you_mean(path, known)} Add a rule, or leave "
                    "the leaf out of `params`."
                )
            name = rule.published.format(*parts or ())
            tensors[name] = Leaf.of(leaf).changed(rule.to_published)
        return tensors


@functools.cache
def _pattern(text: str) -> re.Pattern:
    return re.compile("([^.]+)".join(map(re.escape, text.split("{}"))))


def _parts(pattern: str, name: str) -> tuple[str, ...] | None:
    """What stands for each `{}` of a pattern in a name; None if the name does not fit."""
    match = _pattern(pattern).fullmatch(name)
    return None if match is None else match.groups()


# -- Leaves


class Leaf:
    """An array that is read when numpy asks for it.

    Attributes:
      shape, dtype: of the array.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[], Any]):
        self.shape, self.dtype, self._read = tuple(shape), np.dtype(dtype), read

    @classmethod
    def of(cls, array: Any) -> "Leaf":
        """An array that exists."""
        return cls(np.shape(array), getattr(array, "dtype", None) or np.asarray(array).dtype, lambda: array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._read()).astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}{list(self.shape)})"

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def changed(self, change: Callable[[Any], Any]) -> "Leaf":
        """The array after a function that changes the order of numbers and the shape."""
        shape = np.shape(change(np.broadcast_to(np.zeros((), self.dtype), self.shape)))
        return Leaf(shape, self.dtype, lambda: change(np.asarray(self)))

    def __getitem__(self, key: Any) -> np.ndarray:
        return np.asarray(self)[key]

    def with_dtype(self, dtype: Any) -> "Leaf":
        """The array in another dtype."""
        return Leaf(self.shape, dtype, self._read)


# -- Reading


def read(path: pathlib.Path, names: NameMap | None, like: Mapping[str, Any] | None) -> tuple[dict[str, Leaf], int]:
    """The leaves of a file or a folder by name, and the number of layers that `write` has noted; -1 without it.

    Args:
      path: a file, an index, or a folder with one of them.
      names: from published names to those of the model; None: they are the same.
      like: the leaves of the model by name; None: what the file has is not checked.

    Raises:
      ValueError: if a file is damaged, or its tensors are not those of the model.
    """
    tensors: dict[str, Leaf] = {}
    num_layers = "-1"
    for file, wanted in _files(path):
        with _explained(file):
            opened = _safetensors().safe_open(file, framework="numpy")
            num_layers = (opened.metadata() or {}).get(_NUM_LAYERS, num_layers)
            for name in opened.keys() if wanted is None else wanted:
                part = opened.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(f"{name!r} is {dtype}, and what can be read is {', '.join(_DTYPES)}")
                tensors[name] = Leaf(part.get_shape(), _DTYPES[dtype], functools.partial(opened.get_tensor, name))
    leaves = tensors if names is None else names.leaves(tensors)
    return leaves if like is None else _fitted(leaves, like), int(num_layers)


def _fitted(leaves: Mapping[str, Leaf], like: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves in the order and the dtypes of the model's, if they are these."""
    problems = [
        f"{text} {_listed(found)}"
        for text, found in (
            ("the file has nothing for", [name for name in like if name not in leaves]),
            ("the model has no", [name for name in leaves if name not in like]),
            (
                "other shapes have",
                [
                    f"{name} (the model {list(np.shape(a))}, the file {list(leaves[name].shape)})"
                    for name, a in like.items()
                    if name in leaves and leaves[name].shape != np.shape(a)
                ],
            ),
        )
        if found
    ]
    if problems:
        raise ValueError(
            f"the file does not fit `like`: {'; '.join(problems)}. Give the model that was written, or `names` with a "
            "rule for each name."
        )
    return {name: leaves[name].with_dtype(a.dtype) for name, a in like.items()}


def _files(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str] | None]]:
    """Each file with the names of the tensors to read from it; None: all."""
    if path.is_dir():
        path = next((path / n for n in (_INDEX, f"model{ENDING}") if (path / n).exists()), path / f"model{ENDING}")
    elif not path.exists() and path.with_name(f"{path.name}.index.json").exists():
        path = path.with_name(f"{path.name}.index.json")
    if path.name.endswith(ENDING):
        yield path, None
        return
    with _explained(path):
        file_of = json.loads(path.read_text())["weight_map"]
        names: dict[str, list[str]] = {}
        for name, file in file_of.items():
            if pathlib.PurePath(file).name != file:
                raise ValueError(f"it names {file!r}, which is no file beside it")
            names.setdefault(file, []).append(name)
    for file, wanted in names.items():
        yield path.with_name(file), wanted


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
    """Names the file in errors about it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # `SafetensorError` is no `ValueError`
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"`{path}` is damaged or no safetensors file: {type(error).__name__}: {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.numpy

        return safetensors
    except ImportError as error:
        raise ImportError(
            f"files that end in {ENDING} need the package `safetensors`, which cannot be imported ({error}). Install "
            "it: `pip install safetensors`, or this package with its extra `[safetensors]`. Files of other endings "
            "need nothing."
        ) from error


# -- Writing


def write(
    path: pathlib.Path,
    leaves: Mapping[str, Any],
    num_layers: int,
    names: NameMap | None,
    file_bytes: int | None,
) -> None:
    """Writes leaves into a file, or into several beside it with an index.

    Args:
      path: the file. An older one is replaced once the new one is whole.
      leaves: name -> array.
      num_layers: see `read`.
      names: from published names to those of the model; None: they are the same.
      file_bytes: the most bytes of a file, if it has several tensors; None: one file.
    """
    tensors = {n: Leaf.of(a) for n, a in leaves.items()} if names is None else names.tensors(leaves)
    for name, tensor in tensors.items():
        if tensor.dtype not in map(np.dtype, _DTYPES.values()):
            raise ValueError(
                f"`params` have {name!r} of the dtype {tensor.dtype}, which safetensors cannot read into numpy. "
                "Convert it to another dtype, or write a file of another ending."
            )
    groups = list(_grouped(tensors, file_bytes))
    # Other libraries ask for a format; "pt" is the one that all of them read.
    metadata = {"format": "pt", _NUM_LAYERS: str(num_layers)}
    save = _safetensors().numpy.save_file
    files = {path.name: groups[0]} if len(groups) == 1 else _numbered(path, groups)
    for name, group in files.items():
        with replaced(path.with_name(name)) as unfinished:
            # An array in another order would be written as it lies in memory: as wrong numbers.
            arrays = {n: np.asarray(tensors[n], order="C") for n in group}
            try:
                save(arrays, unfinished, metadata=metadata)
            except _safetensors().SafetensorError as error:  # it is no `OSError`
                raise OSError(f"cannot write `{path}`: {error}") from error
    index = path.with_name(f"{path.name}.index.json")
    if len(groups) == 1:
        index.unlink(missing_ok=True)
        return
    path.unlink(missing_ok=True)  # of an older model
    weight_map = {n: file for file, group in files.items() for n in group}
    total = sum(tensors[n].nbytes for n in weight_map)
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _numbered(path: pathlib.Path, groups: Sequence[list[str]]) -> dict[str, list[str]]:
    stem = path.name.removesuffix(ENDING)
    return {f"{stem}-{i:05}-of-{len(groups):05}{ENDING}": group for i, group in enumerate(groups, 1)}


def _grouped(tensors: Mapping[str, Leaf], file_bytes: int | None) -> Iterator[list[str]]:
    """The names of the tensors of each file."""
    group: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if group and file_bytes is not None and size + tensor.nbytes > file_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor.nbytes
    yield group


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _MOST_NAMES
    return ", ".join(listed[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
