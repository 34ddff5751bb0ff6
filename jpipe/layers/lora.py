"""LoRA in a model that has none."""

from typing import Any

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
