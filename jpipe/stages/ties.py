"""Tied weights: leaves of several layers that are one parameter."""

from collections.abc import Sequence

import jax

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean
from jpipe.layers.layer import Layer
from jpipe.layers.model_tree import path_text


def resolve_ties(layers: Sequence[Layer], ties: Sequence) -> list[tuple[tuple[int, int], ...]]:
    """Resolves ties to `(layer, leaf)` pairs.

    Args:
      layers: bound layers.
      ties: each a sequence of `(layer, "dotted.path")` pairs; negative layers count from the end.

    Returns:
      For each tie its pairs, in order of layers; `leaf` is the position among the layer's
      parameters.

    Raises:
      ValueError: if a layer or a path does not exist, a parameter appears twice, or tied parameters
        differ in shape or dtype, or in whether they are trained.
    """
    resolved: list[tuple] = []
    owner: dict[tuple, int] = {}
    for t, tie in enumerate(ties):
        copies = []
        for layer, path in tie:
            name = f"`ties[{t}]`: layer {layer}"
            if not -len(layers) <= layer < len(layers):
                raise ValueError(f"{name}, but there are {len(layers)} layers.")
            layer %= len(layers)
            leaves = {path_text(keys): leaf for keys, leaf in jax.tree.leaves_with_path(layers[layer].parameters)}
            if path not in leaves:
                hint = did_you_mean(path, leaves, cutoff=0)
                raise ValueError(
                    f"{name} ({layers[layer].name}) has no parameter {shown(path)}, only "
                    f"{', '.join(leaves) or 'none'}.{hint}"
                )
            copy = layer, list(leaves).index(path)
            if copy in owner:
                raise ValueError(f"{name}: {path!r} is in `ties[{owner[copy]}]` already. Make one tie of the two.")
            owner[copy] = t
            copies.append((copy, leaves[path], f"layer {layer}: {path!r}"))
        if len(copies) < 2:
            raise ValueError(f"`ties[{t}]` must name at least two parameters, got {list(tie)}.")
        texts = [f"{text} is {a.dtype}{list(a.shape)}" for _, a, text in copies]
        if len({(a.shape, a.dtype) for _, a, _ in copies}) > 1:
            raise ValueError(
                f"`ties[{t}]`: tied parameters must have one shape and dtype, got {', '.join(texts)}. A layer that "
                "needs it transposed transposes it in its call."
            )
        frozen = [text for (layer, j), _, text in copies if j in layers[layer].frozen]
        if 0 < len(frozen) < len(copies):
            raise ValueError(
                f"`ties[{t}]`: {', '.join(text for *_, text in copies)} are one parameter, and `trainable` freezes "
                f"{', '.join(frozen)} alone. Freeze all of them or none."
            )
        resolved.append(tuple(sorted(copy for copy, _, _ in copies)))
    return resolved
