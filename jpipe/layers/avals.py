"""Small functions of abstract arrays (avals) and of pytrees of them."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is of floating-point or complex numbers, so that it has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def num_bytes(avals: Iterable) -> int:
    """Bytes of arrays, abstract or not, of numbers or of random keys."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


def abstract(tree: Any) -> Any:
    """The pytree with a `jax.ShapeDtypeStruct` for each array."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def zeros(tree: Any) -> Any:
    """The pytree with an array of zeros for each abstract array."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def cast(tree: Any, dtype: Any) -> Any:
    """The pytree with its inexact leaves in `dtype`; None casts nothing."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda a: a.astype(dtype) if is_inexact(a) else a, tree)


def check_nans(tree: Any, name: str) -> None:
    """Raises `FloatingPointError` if an array holds NaN while `jax_debug_nans` is set.

    JAX looks for the source of a NaN by running the program again without `jit`. If a `shard_map`
    gets the NaN as an argument, JAX calls itself until it raises `RecursionError`.

    Args:
      tree: pytree of arrays.
      name: the name of the pytree in the message.
    """
    if not jax.config.jax_debug_nans:
        return
    for path, leaf in jax.tree.leaves_with_path(tree):
        parts = [leaf]
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            parts = [shard.data for shard in leaf.addressable_shards]
        if is_inexact(leaf) and any(np.isnan(np.asarray(a)).any() for a in parts):
            raise FloatingPointError(
                f"{name}{jax.tree_util.keystr(path)} has NaN, and `jax_debug_nans` is set."
            )


def shapes_text(tree: Any) -> str:
    """Shapes and dtypes of a pytree, for messages.

    Example:
      >>> shapes_text({"x": jax.ShapeDtypeStruct((2, 3), "float32")})
      "['x'] float32[2, 3]"
    """
    leaves = jax.tree.leaves_with_path(tree)
    texts = [
        f"{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}".strip()
        for path, a in leaves
    ]
    return ", ".join(texts) or str(tree)
