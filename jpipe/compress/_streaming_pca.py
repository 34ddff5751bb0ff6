"""Streaming batch PCA: a gradient of low rank that is updated from parts of a batch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Wire
from jpipe.compress._matrix import LowRankCompressor, orthonormal


class Factors(NamedTuple):
    """A matrix X diag(sigma) D^T of rank k.

    Attributes:
      x: `[a, k]`, orthonormal.
      d: `[b, k]`, orthonormal.
      sigma: `[k]`.
    """

    x: jax.Array
    d: jax.Array
    sigma: jax.Array

    def matrix(self) -> jax.Array:
        """`[a, b]`."""
        return (self.x * self.sigma[None]) @ self.d.T


@suggests
@dataclasses.dataclass(frozen=True)
class StreamingPCA(LowRankCompressor):
    """Keeps the leading singular vectors of a gradient, and updates them part by part of a batch.

    The gradient of a dense layer is the mean of x_j d_j^T over the rows j of a batch, x_j its inputs and d_j
    the gradients by its outputs. `update` takes part i, of s rows, and never forms the gradient. With w =
    (i + 1) / (i + 2):

        X     = w X     + x_i^T (d_i D) / ((i + 2) s) / sigma;     X = its orthonormal basis
        D     = w D     + d_i^T (x_i X) / ((i + 2) s) / sigma;     D = its orthonormal basis
        sigma = w sigma + sum over rows of (d_i D) (x_i X) / ((i + 2) s)

    As a compressor it gets a formed gradient, and takes it for x^T d / s of one part, with i = 0. So half of sigma
    comes of earlier gradients, and only error feedback corrects this.

    The last dim of an array gives the columns, b, and all other dims the rows, a. Arrays of less than 2 dims
    are sent whole, as `values`, and so are arrays whose factors would be no smaller.

    Attributes:
      rank: k.
      seed: the seed of the first X and D. Arrays of one shape begin with the same ones.

    Raises:
      ValueError: if `rank` is below 1.

    References:
      Huang, Hoskins, Daniels, Stiles and Adam, "Memory-efficient training with streaming dimensionality
      reduction", arXiv:2004.12041.
    """

    _rank_counts = "singular vectors"

    def update(
        self,
        factors: Factors,
        x: jax.Array,
        d: jax.Array,
        i: jax.Array | int,
        mean: Callable[[jax.Array], jax.Array] = lambda product: product,
    ) -> Factors:
        """The factors after part i of a batch.

        Args:
          factors: the factors before it. Those of the batch before, if i is 0.
          x: `[s, a]`, inputs of the layer.
          d: `[s, b]`, gradients by its outputs.
          i: the number of the part in its batch.
          mean: computes the mean of products over devices, each of which has as many rows of the part.

        Returns:
          Factors of about the mean of the gradients of rows.
        """
        num_rows = x.shape[0]
        return _updated(
            factors,
            lambda right: mean(x.T @ (d @ right) / num_rows),
            lambda left: mean(d.T @ (x @ left) / num_rows),
            lambda left, right: mean(jnp.sum((x @ left) * (d @ right), axis=0) / num_rows),
            i,
        )

    def _first(self, key: jax.Array, rows: int, columns: int, dtype: Any) -> Factors:
        """Random orthonormal X and D, and sigma of 0. The paper begins with a sigma of 1, so with a random gradient."""
        x, d = (
            orthonormal(jax.random.normal(key, (n, self.rank), dtype))
            for key, n in zip(jax.random.split(key), (rows, columns))
        )
        return Factors(x, d, jnp.zeros(self.rank, dtype))

    def _step(
        self,
        matrix: jax.Array,
        state: Factors,
        mean: Callable[[jax.Array], jax.Array],
    ) -> tuple[Wire, Factors]:
        """`x` `[a, k]`, `d` `[b, k]` and `sigma` `[k]`."""
        state = _updated(
            state,
            lambda right: mean(matrix @ right),
            lambda left: mean(matrix.T @ left),
            lambda left, right: mean(jnp.sum(left * (matrix @ right), axis=0)),
            0,
        )
        return state._asdict(), state

    def _product(self, factors: Mapping[str, jax.Array]) -> jax.Array:
        return Factors(**factors).matrix()


def _updated(
    factors: Factors,
    times_d: Callable[[jax.Array], jax.Array],
    times_x: Callable[[jax.Array], jax.Array],
    diagonal: Callable[[jax.Array, jax.Array], jax.Array],
    i: jax.Array | int,
) -> Factors:
    """The factors after part i.

    Args:
      factors: the factors before it.
      times_d: D -> the gradient of the part times D.
      times_x: X -> its transpose times X.
      diagonal: X, D -> the diagonal of X^T times the gradient times D.
      i: the number of the part.
    """
    x, d, sigma = factors
    keep, new = (i + 1) / (i + 2), 1 / (i + 2)
    # The paper divides what is new by sigma. To multiply what is kept by it scales the columns, and the basis
    # is the same; but sigma may be 0.
    signs = jnp.where(sigma < 0, -1, 1).astype(sigma.dtype)[None]
    x = orthonormal((keep * x * sigma[None] + new * times_d(d)) * signs)
    d = orthonormal((keep * d * sigma[None] + new * times_x(x)) * signs)
    return Factors(x, d, keep * sigma + new * diagonal(x, d))
