"""Small functions of abstract arrays (avals) and of pytrees of them."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf is of floating-point or complex numbers, so that it has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is of typed random keys (`jax.random.key`)."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_real(leaf: Any) -> bool:
    """Returns whether a leaf is of real floating-point numbers, which a compute dtype casts."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def is_narrower(dtype: np.dtype, other: np.dtype) -> bool:
    """Returns whether both are of real floating-point numbers, and the first one has fewer bytes."""
    are_real = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(other, jnp.floating)
    return bool(are_real and dtype.itemsize < other.itemsize)


def num_bytes(avals: Iterable) -> int:
    """Bytes of arrays, abstract or not, of numbers or of random keys."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


def abstract(tree: Any) -> Any:
    """The pytree with a `jax.ShapeDtypeStruct` for each array."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def shapes_key(tree: Any) -> tuple:
    """The structure, shapes and dtypes of a tree of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((tuple(a.shape), np.dtype(a.dtype)) for a in leaves)


def zeros(tree: Any) -> Any:
    """The pytree with an array of zeros for each abstract array."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)


def cast(tree: Any, dtype: Any) -> Any:
    """The pytree with its real floating-point leaves in `dtype`; None casts nothing.

    Complex numbers stay as they are: no complex dtype has the precision of bfloat16, and a real dtype drops imaginary
    parts.
    """
    if dtype is None:
        return tree

    def cast_one(a: Any) -> Any:
        if isinstance(a, float):  # a number of Python, which takes the dtype of what it meets
            return jnp.asarray(a, dtype)
        return a.astype(dtype) if hasattr(a, "dtype") and is_real(a) else a

    return jax.tree.map(cast_one, tree)


def real_dtype(tree: Any) -> np.dtype:
    """The real dtype of the highest precision among arrays and complex arrays, at least float32.

    Example:
      >>> real_dtype([np.zeros(3, np.complex64), np.zeros(3, np.float16)])
      dtype('float32')
    """
    parts = [np.zeros((), a.dtype).real.dtype for a in jax.tree.leaves(tree)]
    return np.result_type(np.float32, *parts)


def squares(array: jax.Array, dtype: Any) -> jax.Array:
    """|z|^2 of each number, computed in a real dtype."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return squares(array.real, dtype) + squares(array.imag, dtype)
    return jnp.square(array.astype(dtype))


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
            raise FloatingPointError(f"{name}{jax.tree_util.keystr(path)} has NaN, and `jax_debug_nans` is set.")


def shapes_text(tree: Any) -> str:
    """Shapes and dtypes of a pytree, for messages.

    Example:
      >>> shapes_text({"x": jax.ShapeDtypeStruct((2, 3), "float32")})
      "['x'] float32[2, 3]"
    """
    leaves = jax.tree.leaves_with_path(tree)
    texts = [f"{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}".strip() for path, a in leaves]
    return ", ".join(texts) or str(tree)
