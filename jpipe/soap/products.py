"""A matrix product whose gradients need no transpose.

A device has a part of the sum for the gradient of a weight, and the compiler sums over devices right after the product
that computes the part. JAX computes the gradient of a `[K, N]` weight as the transpose of an `[N, K]` product. The
transpose then comes after the sum and stays a copy of its own in the compiled program, where without a sum it would
become a part of the product.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = tuple[tuple[str, Any], ...]
"""Parameters of a `dot_general`, by name."""


def product_of(equation_params: Mapping[str, Any], left: jax.Array, right: jax.Array) -> jax.Array:
    """`product` with the parameters of a traced `dot_general`."""
    names = "dimension_numbers", "precision", "preferred_element_type"
    return product(left, right, tuple((n, equation_params[n]) for n in names))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(left: jax.Array, right: jax.Array, params: Params) -> jax.Array:
    """`dot_general` with gradients in the order of its operands' dims.

    Args:
      left: its first operand.
      right: its second operand.
      params: the parameters of the `dot_general`: "dimension_numbers", "precision" and "preferred_element_type".
    """
    named = dict(params)
    return lax.dot_general(
        left,
        right,
        named["dimension_numbers"],
        precision=named["precision"],
        preferred_element_type=named["preferred_element_type"],
    )


def _forward(left: jax.Array, right: jax.Array, params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(left, right, params), (left, right)


def _backward(
    params: Params, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return (
        _gradient(params, operands, cotangent, 0),
        _gradient(params, operands, cotangent, 1),
    )


product.defvjp(_forward, _backward)


def _gradient(
    params: Params,
    operands: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
    number: int,
) -> jax.Array:
    """The gradient by operand `number`."""
    named = dict(params)
    contracting, batch = named["dimension_numbers"]
    operand, other = operands[number], operands[1 - number]
    contracted_dims, others = contracting[number], contracting[1 - number]
    own_batch, other_batch = batch[number], batch[1 - number]
    free = [d for d in range(operand.ndim) if d not in (*contracted_dims, *own_batch)]
    other_free = [d for d in range(other.ndim) if d not in (*others, *other_batch)]
    # The cotangent has the batch dims, the free dims of the first operand and those of the second.
    shared = tuple(range(len(own_batch)))
    start = len(shared) + (len(free) if number == 0 else 0)
    summed = tuple(range(start, start + len(other_free)))
    other_order = sorted(range(len(others)), key=lambda i: others[i])
    contracted = [contracted_dims[i] for i in other_order]
    turned = bool(free) and bool(contracted) and min(contracted) < min(free)
    if turned:
        pair, dims = (other, cotangent), [*own_batch, *contracted, *free]
        sums, batches = (tuple(other_free), summed), (tuple(other_batch), shared)
    else:
        pair, dims = (cotangent, other), [*own_batch, *free, *contracted]
        sums, batches = (summed, tuple(other_free)), (shared, tuple(other_batch))
    gradient = lax.dot_general(
        *pair,
        (sums, batches),
        precision=named["precision"],
        preferred_element_type=named["preferred_element_type"],
    )
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    if order != list(range(len(dims))):
        gradient = jnp.transpose(gradient, order)
    return gradient.astype(operand.dtype)
