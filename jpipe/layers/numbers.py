"""Activations as arrays of numbers.

Messages, stashes and packed arrays hold numbers. So random keys that layers pass on, or that a backward needs, travel
as their data, and become keys again where a layer reads them. Arrays without elements do not travel: they are made
again.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.layers.avals import is_key


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["impl"])
@dataclasses.dataclass(frozen=True)
class KeyData:
    """Random keys of an implementation, in the place of the keys in a pytree.

    Attributes:
      data: `[*shape, words]` of uint32, for keys `[*shape]`.
      impl: the implementation, as `jax.random.key_impl` names it.
    """

    data: Any
    impl: Any

    def value(self) -> jax.Array:
        """The keys."""
        return jax.random.wrap_key_data(self.data, impl=self.impl)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["shape", "dtype"])
@dataclasses.dataclass(frozen=True)
class NoElements:
    """An array without elements, in its place in a pytree."""

    shape: tuple[int, ...]
    dtype: Any

    def value(self) -> jax.Array:
        """The array."""
        return jnp.zeros(self.shape, self.dtype)


def as_numbers(tree: Any) -> Any:
    """The pytree with `KeyData` for each array of random keys, and `NoElements` for each array without elements."""
    return jax.tree.map(_node, tree)


def from_numbers(tree: Any) -> Any:
    """The inverse of `as_numbers`; leaves may be abstract."""

    def value(node: Any) -> Any:
        if not isinstance(node, KeyData | NoElements):
            return node
        if is_abstract:
            return jax.eval_shape(type(node).value, node)
        return node.value()

    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
    return jax.tree.map(value, tree, is_leaf=lambda node: isinstance(node, KeyData | NoElements))


def _node(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf
    if is_key(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(_node, leaf)
        return KeyData(jax.random.key_data(leaf), jax.random.key_impl(leaf))
    if math.prod(leaf.shape) == 0:
        return NoElements(tuple(leaf.shape), leaf.dtype)
    return leaf
