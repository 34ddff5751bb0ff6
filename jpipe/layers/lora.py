"""LoRA in a model, and in weights, that have none, and out of the weights again."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests


@suggests
def add_lora(module: nnx.Module, rank: int, *, where: Any = ..., rngs: nnx.Rngs) -> nnx.Module:
    """Adds low-rank matrices A and B to the linear layers of a module: `x W + b` becomes `x W + b + x A B`.

    Each `nnx.Linear` becomes an `nnx.LoRALinear` where it stands, with the weights that it has, at the same paths. B is
    0, so the module computes what it computed before. Train A and B alone with `Pipeline(trainable=nnx.LoRAParam)`.

    Args:
      module: changed in place.
      rank: k of A `[in, k]` and B `[k, out]`, at least 1.
      where: the layers: a filter of NNX, which sees the path of a layer and the layer, such as
        `nnx.PathContains("attention")` or a function `(path, layer) -> bool`. All by default.
      rngs: random streams, of which "params" draws A.

    Returns:
      The module.

    Raises:
      ValueError: if `rank` is no whole number from 1 on, or there is no such layer.

    Example:
      >>> model = add_lora(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
      >>> model.kernel.shape, model.lora.lora_a.shape, model.lora.lora_b.shape
      ((3, 4), (3, 2), (2, 4))

    References:
      Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, arXiv:2106.09685, section 4.1.
    """
    if not isinstance(module, nnx.Module):
        raise ValueError(f"`module` must be an NNX module, got {shown(module)}. A factory calls `add_lora` itself.")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"`rank` must be a whole number, at least 1, got {shown(rank)}.")
    linear = [(path, part) for path, part in nnx.iter_graph(module) if type(part) is nnx.Linear]
    chooses = nnx.filterlib.to_predicate(where)
    chosen = [part for path, part in linear if chooses(path, part)]
    if not linear:
        raise ValueError(f"{type(module).__name__} has no `nnx.Linear`, or all have LoRA already.")
    if not chosen:
        names = [repr(".".join(map(str, path))) for path, _ in linear]
        raise ValueError(
            f"`where` selects no `nnx.Linear` of {type(module).__name__}, got {shown(where)}. Its layers are "
            f"{', '.join(names[:6])}{' and others' if len(names) > 6 else ''}."
        )
    part: Any
    for part in chosen:
        part.lora = nnx.LoRA(
            part.in_features, rank, part.out_features, dtype=part.dtype, param_dtype=part.param_dtype, rngs=rngs
        )
        # In place, so that whatever holds the layer has it, also where several modules share it.
        part.__class__ = nnx.LoRALinear
    return module


@suggests
def with_lora(params: Any, like: nnx.Module, key: jax.Array) -> Any:
    """The weights of a model without LoRA, and initial matrices for the same model with it.

    Args:
      params: a tree of dicts, such as `jpipe.load_params` returns.
      like: the model with LoRA; shapes are enough (`nnx.eval_shape`).
      key: a random key, from which each A is drawn as `nnx.LoRA` draws it by default (He uniform). B is 0.

    Returns:
      A tree with the leaves of `params` and the matrices of LoRA, for `Pipeline.init(params=)`.

    Raises:
      ValueError: if `like` has no LoRA, or `params` has no layer where `like` has it.

    Example:
      >>> like = add_lora(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(0))
      >>> params = with_lora({"kernel": np.ones((3, 4)), "bias": np.ones(4)}, like, jax.random.key(0))
      >>> params["lora"]["lora_a"].shape, float(params["lora"]["lora_b"].sum())
      ((3, 2), 0.0)
    """
    if not isinstance(like, nnx.Module):
        raise ValueError(f"`like` must be an NNX module with LoRA, got {shown(like)}.")
    matrices = nnx.to_flat_state(nnx.state(like, nnx.LoRAParam))
    if not matrices:
        raise ValueError(f"{type(like).__name__} has no LoRA. Add it to `like` with `jpipe.add_lora`.")
    tree = _copied(params)
    for number, (path, variable) in enumerate(matrices):
        *layer, adapter, name = path
        node = tree
        for part in layer:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ValueError(f"`params` has no layer {'.'.join(map(str, layer))!r}, which has LoRA in `like`.")
        shape, dtype = variable.shape, variable.dtype
        draw = nnx.initializers.zeros if name == "lora_b" else nnx.initializers.he_uniform()
        node.setdefault(adapter, {})[name] = draw(jax.random.fold_in(key, number), shape, dtype)
    return tree


def _copied(tree: Any) -> Any:
    """The tree in new dicts."""
    return {key: _copied(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


@suggests
def merge_lora(params: Any) -> Any:
    """Adds the low-rank matrices of `add_lora` to the weights beside them: `kernel + A B`.

    Args:
      params: a tree of dicts and lists, such as `Pipeline.get_params` returns. A dict that has "kernel" and "lora" is
        that of a layer.

    Returns:
      The tree of the model without LoRA, on the host. The sums are computed in float32 or wider, and have the dtype of
      the kernel.

    Raises:
      ValueError: if the tree has no such layer, or the matrices of a layer do not fit its kernel.

    Example:
      >>> lora = {"lora_a": np.ones((3, 2)), "lora_b": np.ones((2, 4))}
      >>> merge_lora({"kernel": np.ones((3, 4)), "lora": lora})["kernel"].tolist()[0]
      [3.0, 3.0, 3.0, 3.0]
    """
    merged, number = _merged(params, "")
    if not number:
        raise ValueError('`params` has no layer with "kernel" and "lora", as `jpipe.add_lora` makes them.')
    return merged


def _merged(params: Any, path: str) -> tuple[Any, int]:
    """The tree without LoRA, and the number of layers that had it."""
    if isinstance(params, list):
        parts = [_merged(value, f"{path}.{i}".lstrip(".")) for i, value in enumerate(params)]
        return [value for value, _ in parts], sum(number for _, number in parts)
    if not isinstance(params, Mapping):
        return params, 0
    if "kernel" in params and "lora" in params:
        kernel, a, b = params["kernel"], params["lora"]["lora_a"], params["lora"]["lora_b"]
        if (a.shape[0], b.shape[1]) != tuple(kernel.shape) or a.shape[1] != b.shape[0]:
            raise ValueError(
                f"`lora_a` {list(a.shape)} times `lora_b` {list(b.shape)} must have the shape of the kernel, "
                f"{list(kernel.shape)}, in {path or 'the layer'}."
            )
        dtype = np.promote_types(np.result_type(kernel.dtype, a.dtype, b.dtype), np.float32)
        wide, a, b = (np.asarray(value).astype(dtype) for value in (kernel, a, b))
        others = {name: value for name, value in params.items() if name != "lora"}
        return others | {"kernel": (wide + a @ b).astype(kernel.dtype)}, 1
    children = {key: _merged(value, f"{path}.{key}".lstrip(".")) for key, value in params.items()}
    return {key: value for key, (value, _) in children.items()}, sum(number for _, number in children.values())
