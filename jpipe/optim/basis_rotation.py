"""Basis rotation: Adam in the eigenbasis of the gradient's covariances, for late gradients."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.optim.delays import is_wrong

Source = Literal["second_moment", "momentum"]
Sides = Literal["both", "smaller"]


class Basis(NamedTuple):
    """Moments and eigenvectors of a weight, seen as a matrix `[m, n]`; at least float32. None: the side is not rotated.

    Attributes:
      left, right: `[m, m]` and `[n, n]`, orthogonal; the columns are the basis.
      left_moment, right_moment: decayed means of `G G^T` and `G^T G`; None with the momentum as source.
    """

    left: jax.Array | None
    right: jax.Array | None
    left_moment: jax.Array | None
    right_moment: jax.Array | None


class ScaleByBasisRotationState(NamedTuple):
    """Number of updates, int32; both moments like the weights; and a `Basis` for each weight.

    The first moment is in the basis of the weights, the second in the rotated one.
    """

    count: chex.Array
    mu: optax.Updates
    nu: optax.Updates
    basis: Any


@suggests
def scale_by_basis_rotation(
    b1: chex.Numeric = 0.9,
    b2: chex.Numeric = 0.999,
    eps: chex.Numeric = 1e-8,
    frequency: int = 10,
    source: Source = "second_moment",
    sides: Sides = "both",
    max_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam in a rotated basis, in which late gradients do less harm.

        M <- b1 M + (1 - b1) G
        L <- b2 L + (1 - b2) G G^T,    R <- b2 R + (1 - b2) G^T G
        if `frequency` divides t:  U <- qr(L U),    V <- qr(R V)
        N <- b2 N + (1 - b2) (U^T G V) ** 2
        update = U [(U^T M V / (1 - b1^t)) / (sqrt(N / (1 - b2^t)) + eps)] V^T

    G is the gradient of a weight matrix, t the number of the update from 1, and qr the
    orthogonal factor: one step of the power iteration for the eigenvectors of L and R. U and
    V start at the identity. Adam divides every coordinate by its own size. Where the Hessian
    is not diagonal, its steps oscillate along directions of large curvature, and a late step
    may point against the current one. In the eigenbasis of the Hessian, which L and R
    estimate, they do not. Nothing in the method depends on the delay.

    A weight with more than two axes is a matrix of its last axis and all others: a kernel of
    a convolution has one column for each output channel. Weights with fewer axes get plain
    Adam. The rotation takes 2 m n (m + n) multiplications and, every `frequency` updates, the
    qr of both sides; the state has 2 (m^2 + n^2) numbers more than Adam's, half of that with
    the momentum as source.

    Args:
      b1: decay of the first moment, at least 0 and below 1.
      b2: decay of the second moment and of L and R, at least 0 and below 1.
      eps: added to the denominator.
      frequency: updates between changes of the basis, at least 1.
      source: "second_moment": of L and R as above; "momentum": `L = M M^T`, `R = M^T M`, which are
        not kept.
      sides: "both": U and V; "smaller": only that of the smaller side, the left one of a square.
      max_size: sides of more rows than this are not rotated. None: all are.

    Returns:
      A transformation with a `ScaleByBasisRotationState`. The learning rate comes after it.

    Raises:
      ValueError: if an argument is out of its range.

    Example:
      >>> optimizer = optax.chain(scale_by_basis_rotation(), optax.scale_by_learning_rate(1e-3))
      >>> weights = jnp.ones((2, 3))
      >>> updates, state = optimizer.update(weights, optimizer.init(weights), weights)
      >>> state[0].basis.left.shape, state[0].basis.right.shape
      ((2, 2), (3, 3))

    References:
      Jung et al., Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation,
      ICML 2026, arXiv:2602.03515, algorithms 1 and 2. The corrections of the first updates and
      the place of eps are Adam's. With "second_moment" and "both" it is close to SOAP (Vyas et
      al., ICLR 2025, arXiv:2409.11321).
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        if is_wrong(decay, lambda b: 0 <= b < 1):
            raise ValueError(f"`{name}` must be at least 0 and below 1, got {shown(decay)}.")
    if is_wrong(frequency, lambda f: f >= 1 and f == f // 1):
        raise ValueError(f"`frequency` must be a whole number of updates, at least 1, got {shown(frequency)}.")
    for name, value, known in (("source", source, Source), ("sides", sides, Sides)):
        if value not in get_args(known):
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, get_args(known)))}, got {shown(value)}.")
    if max_size is not None and is_wrong(max_size, lambda size: size >= 1):
        raise ValueError(f"`max_size` must be at least 1, got {shown(max_size)}.")

    def first_basis(weight):
        rotated = _rotated_sides(weight, sides, max_size)
        keeps = source == "second_moment"
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        identities = [jnp.eye(n, dtype=dtype) if n else None for n in rotated]
        zeros = [jnp.zeros((n, n), dtype) if n and keeps else None for n in rotated]
        return Basis(*identities, *zeros)

    def init(params):
        zeros = optax.tree.zeros_like(params)
        basis = jax.tree.map(first_basis, params)
        return ScaleByBasisRotationState(jnp.zeros([], jnp.int32), zeros, zeros, basis)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        count = optax.safe_increment(state.count)
        t = count.astype(float)
        changes = count % frequency == 0

        def update_leaf(g, m, v, basis):
            matrix = _as_matrix(g)
            momentum = jnp.asarray(b1 * _as_matrix(m) + (1 - b1) * matrix)
            basis = _next_basis(basis, matrix, momentum, b2, changes)
            rotated = _rotate(basis, matrix)
            second = b2 * _as_matrix(v) + (1 - b2) * rotated**2
            first = _rotate(basis, momentum) / (1 - b1**t)
            scaled = first / (jnp.sqrt(second / (1 - b2**t)) + eps)
            results = _rotate_back(basis, scaled), momentum, second
            shaped = [a.reshape(g.shape) for a in results]
            dtypes = g.dtype, m.dtype, v.dtype
            return *[a.astype(d) for a, d in zip(shaped, dtypes, strict=True)], basis

        leaves, tree = jax.tree.flatten(updates)
        others = [tree.flatten_up_to(a) for a in (state.mu, state.nu, state.basis)]
        results = [update_leaf(*values) for values in zip(leaves, *others, strict=True)]
        scaled, mu, nu, basis = (tree.unflatten([result[i] for result in results]) for i in range(4))
        return scaled, ScaleByBasisRotationState(count, mu, nu, basis)

    return optax.GradientTransformationExtraArgs(init, update)


def _rotated_sides(weight: Any, sides: Sides, max_size: int | None) -> tuple[int | None, int | None]:
    """The sizes of the sides of a weight that are rotated, each None if it is not."""
    if np.ndim(weight) < 2:
        return None, None
    m, n = weight.size // max(weight.shape[-1], 1), weight.shape[-1]
    rotates_left, rotates_right = (True, True) if sides == "both" else (m <= n, n < m)

    def rotated(size: int, is_wanted: bool) -> int | None:
        fits = size > 0 and (max_size is None or size <= max_size)
        return size if is_wanted and fits else None

    return rotated(m, rotates_left), rotated(n, rotates_right)


def _as_matrix(weight: jax.Array) -> jax.Array:
    """Reshapes to `[m, n]` if it has two axes or more. Casts to at least float32."""
    weight = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    if weight.ndim > 2:
        return weight.reshape(-1, weight.shape[-1])
    return weight


def _next_basis(
    basis: Basis,
    gradient: jax.Array,
    momentum: jax.Array,
    b2: chex.Numeric,
    changes: jax.Array,
) -> Basis:
    """The basis after the gradient's covariances, and with a step of the power iteration if it changes."""
    vectors, moments = [], []
    for side, (vector, moment) in enumerate(((basis.left, basis.left_moment), (basis.right, basis.right_moment))):
        if vector is not None:
            gradient_side, momentum_side = (
                (a if side == 0 else a.T).astype(vector.dtype) for a in (gradient, momentum)
            )
            if moment is None:
                covariance = momentum_side @ momentum_side.T
            else:
                moment = b2 * moment + (1 - b2) * (gradient_side @ gradient_side.T)
                moment = covariance = moment.astype(vector.dtype)
            vector = jax.lax.cond(
                changes,
                lambda covariance, vector: jnp.linalg.qr(covariance @ vector)[0],
                lambda covariance, vector: vector,
                covariance,
                vector,
            )
        vectors.append(vector)
        moments.append(moment)
    return Basis(*vectors, *moments)


def _rotate(basis: Basis, matrix: jax.Array) -> jax.Array:
    """`U^T matrix V`."""
    if basis.left is not None:
        matrix = basis.left.T.astype(matrix.dtype) @ matrix
    if basis.right is not None:
        matrix = matrix @ basis.right.astype(matrix.dtype)
    return matrix


def _rotate_back(basis: Basis, matrix: jax.Array) -> jax.Array:
    """`U matrix V^T`."""
    if basis.left is not None:
        matrix = basis.left.astype(matrix.dtype) @ matrix
    if basis.right is not None:
        matrix = matrix @ basis.right.T.astype(matrix.dtype)
    return matrix
