"""The weights of a run: what they begin as, which are trained, and the folder that they are written to."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpipe
from jpipe._util.foreign import read_json
from jpipe._util.suggest import did_you_mean
from models import GPT2, Llama, Model
from models.llama import FAMILIES

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_BLOCKS = "blocks"
_FILE_BYTES = 5_000_000_000
"""The most bytes of a file of weights."""

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank matrices beside the weights of linear layers, which alone are trained, of the models Llama and GPT2."""

    rank: int | None = None
    """The rank of the matrices. None: all weights are trained, and there are no such matrices."""
    targets: tuple[str, ...] = ()
    """The linear layers that get matrices, by parts of their names, published or those of the model:
    q_proj,v_proj or attention. Empty: all in the blocks."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"`rank` must be at least 1, got {self.rank}.")
        if self.rank is None and self.targets:
            raise ValueError(
                f"`targets` are for `lora.rank`, got {','.join(self.targets)} without it. Set `--config.lora.rank=8`."
            )


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a run.

    Attributes:
      model: the model, with the sizes of `folder` if there is one.
      folder: the folder of the published model that training begins with; None: weights are drawn.
      lora: the matrices that are trained instead of the weights.
      dtype: the dtype of the weights that come from the folder or are drawn. Matrices of LoRA are in float32.
    """

    model: Model
    folder: pathlib.Path | None = None
    lora: LoRAConfig = LoRAConfig()
    dtype: Dtype = "float32"

    @classmethod
    def of(cls, model: Model, init: str | None, lora: LoRAConfig, dtype: Dtype) -> "Weights":
        """The weights that options of a configuration describe.

        Raises:
          FileNotFoundError: if the folder is not there, or lacks a file.
          ValueError: if it has another model, or the model has no published layout and an option needs one.
        """
        if init is not None:
            folder = pathlib.Path(init).expanduser()
            return cls(_model_of(folder), folder, lora, dtype)
        weights = cls(model, None, lora, dtype)
        if not weights.are_published:
            for option, given in (("lora.rank", lora.rank), ("pipeline.weights_dtype", dtype != "float32")):
                if given:
                    raise ValueError(
                        f"`{option}` is for the models Llama and GPT2, got {type(model).__name__}. Leave it out, or "
                        "take one of these: `--config.model=Llama`."
                    )
        return weights

    @property
    def are_published(self) -> bool:
        """Whether the model has a published layout."""
        return hasattr(self.model, "published")

    @property
    def trainable(self) -> Any:
        """`trainable` of `jpipe.Pipeline`."""
        return None if self.lora.rank is None else nnx.LoRAParam

    @property
    def are_copied(self) -> bool:
        """Whether the optimizer needs a copy in float32 of the weights that it updates."""
        return self.dtype != "float32" and self.lora.rank is None

    def layers(self) -> Any:
        """What `jpipe.Pipeline` takes as `layers`.

        Raises:
          ValueError: if a target of LoRA names no layer.
        """
        make = self.model.layers()
        if self.lora.rank is None:
            return make if self.dtype == "float32" else functools.partial(_of_dtype, make, self.dtype)
        adapted = self._adapted()
        rank = self.lora.rank

        def with_matrices(rngs: nnx.Rngs) -> nnx.Module:
            module = _of_dtype(make, self.dtype, rngs)
            return jpipe.add_lora(module, rank, where=lambda path, part: _name(path) in adapted, rngs=rngs)

        return with_matrices

    def _plain(self) -> nnx.Module:
        """The model without LoRA; shapes alone."""
        return nnx.eval_shape(lambda: _of_dtype(self.model.layers(), self.dtype, nnx.Rngs(0)))

    def _adapted(self) -> set[str]:
        """The paths of the layers that get low-rank matrices."""
        layers = [p for p, part in nnx.iter_graph(self._plain()) if isinstance(part, nnx.Linear)]
        # A head may be read as a matrix, so that LoRA beside it would change nothing.
        paths = [_name(path) for path in layers if path[0] == _BLOCKS]
        if not self.lora.targets:
            return set(paths)
        kernel = np.broadcast_to(np.float32(0), (1, 1))
        names = self.model.names()  # type: ignore[union-attr]
        both = {path: f".{path}.{next(iter(names.tensors({f'{path}.kernel': kernel})))}." for path in paths}
        for target in self.lora.targets:
            if not any(f".{target}." in text for text in both.values()):
                words = {word: None for text in both.values() for word in text.split(".") if not word.isdecimal()}
                known = [w for w in words if w not in ("", _BLOCKS, "weight", *_published_prefix(both))]
                raise ValueError(
                    f"`lora.targets` must name linear layers of the blocks, and {target!r} names none."
                    f"{did_you_mean(target, known)} The parts of their names are {', '.join(known)}."
                )
        return {path for path, text in both.items() if any(f".{target}." in text for target in self.lora.targets)}

    def first_params(self, seed: int) -> Any:
        """What `jpipe.Pipeline.init` takes as `params`: the weights of the folder; None without one.

        Args:
          seed: draws the matrices of LoRA.

        Raises:
          ValueError: if a file of the folder is damaged, or does not fit the model; names the tensors.
          OSError: if one cannot be read.
        """
        params = self._read()
        if params is None or self.lora.rank is None:
            return params
        like = nnx.eval_shape(lambda: self.layers()(rngs=nnx.Rngs(0)))
        return jpipe.with_lora(params, like, jax.random.fold_in(jax.random.key(seed), 1))

    def _read(self) -> Any:
        """The weights of the folder, which are read from disk when numpy asks for them; None without one."""
        if self.folder is None:
            return None
        with _explained(self.folder):
            names = self.model.names()  # type: ignore[union-attr]
            return jpipe.load_params(self.folder, names=names, like=self._plain())

    def check(self) -> None:
        """Refuses what could not be read, or not be written at the end, before anything is compiled.

        Raises:
          ValueError, OSError: says what.
        """
        if not self.are_published:
            return
        if self.folder is None:
            self.model.published()  # type: ignore[union-attr]
        try:
            import safetensors  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"{type(self.model).__name__} is written in its published layout, which needs the package "
                f"`safetensors`: {error}. Install it: `pip install safetensors`."
            ) from error
        self._read()

    def write(self, folder: pathlib.Path, params: Any, write_tokens: Callable[[pathlib.Path], None] | None) -> None:
        """Writes weights and configuration as other libraries read them.

        Args:
          folder: a new folder.
          params: the weights of the run, as `Pipeline.get_params` returns them. Those of LoRA are added up.
          write_tokens: writes the files of the tokenizer, if there is one.

        Raises:
          OSError: if a file cannot be written.
        """
        params = params if self.lora.rank is None else jpipe.merge_lora(params)
        folder.mkdir(parents=True, exist_ok=True)
        names = self.model.names()  # type: ignore[union-attr]
        jpipe.save_params(folder / WEIGHTS, params, names=names, file_bytes=_FILE_BYTES)
        if self.folder is None:
            config = self.model.published()  # type: ignore[union-attr]
        else:
            config = read_json(self.folder / CONFIG)
            for name in ("generation_config.json", "LICENSE"):
                if (self.folder / name).is_file():
                    shutil.copy(self.folder / name, folder)
        dtype = "dtype" if "dtype" in config else "torch_dtype"
        (folder / CONFIG).write_text(json.dumps({**config, dtype: self.dtype}, indent=2) + "\n", encoding="utf-8")
        if write_tokens is not None:
            write_tokens(folder)


def _published_prefix(texts: Mapping[str, str]) -> set[str]:
    """The parts that all published names have before the number of a block."""
    return {word for path, text in texts.items() for word in text.removeprefix(f".{path}.").split(".")[:2]}


@contextlib.contextmanager
def _explained(folder: pathlib.Path) -> Iterator[None]:
    """Names the option in errors about the files of a folder."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise ValueError(f"`--config.init={folder}`: {error}") from error


def _name(path: Any) -> str:
    return ".".join(map(str, path))


def _of_dtype(make: Callable[..., nnx.Module], dtype: Dtype, rngs: nnx.Rngs) -> nnx.Module:
    """The module of a factory, with its parameters in a dtype."""
    module = make(rngs=rngs)
    params = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.dtype(dtype)), params))
    return module


def _model_of(folder: pathlib.Path) -> Model:
    """The model whose sizes are in the `config.json` of a folder."""
    option = f"`--config.init={folder}`"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{option}: there is no such folder. Name one with {CONFIG}, {WEIGHTS} and tokenizer.json, such as a model "
            "that you have downloaded, or the folder `model` of a run. Nothing is downloaded."
        )
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{option}: it has no `{CONFIG}`, which says what model it is.")
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise FileNotFoundError(
            f"{option}: it has neither `{WEIGHTS}` nor `{INDEX}`. Weights in files of another ending must be "
            "converted first, such as by `save_pretrained` of the package `transformers`."
        )
    config = read_json(folder / CONFIG)
    kinds: dict[str, Any] = {**dict.fromkeys(FAMILIES, Llama), "gpt2": GPT2}
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in kinds:
        raise ValueError(f"{option}: `model_type` of its `{CONFIG}` must be one of {', '.join(kinds)}, got {family!r}.")
    try:
        return kinds[family].of(config)
    except KeyError as error:
        raise ValueError(f"{option}: its `{CONFIG}` has no entry {error}.") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{option}: its `{CONFIG}`: {error}") from error
