"""Arrays as matrices of low rank."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def matrix_shape(like: Any) -> tuple[int, int]:
    """Rows and columns of an array as a matrix: its last dim gives the columns."""
    return math.prod(like.shape[:-1]), like.shape[-1]


def is_whole(like: Any, rank: int) -> bool:
    """Whether an array is sent as it is: it has less than 2 dims, or its factors are no smaller."""
    if len(like.shape) < 2:
        return True
    rows, columns = matrix_shape(like)
    return rank * (rows + columns) >= rows * columns


def check_rank(compressor: Any, like: Any, what: str) -> None:
    """Refuses a rank above the smaller dim."""
    if len(like.shape) < 2:
        return
    rows, columns = matrix_shape(like)
    if compressor.rank > min(rows, columns):
        raise ValueError(
            f"{type(compressor).__name__} of rank {compressor.rank} cannot compress {what}: as a matrix of "
            f"{rows} x {columns} it has at most rank {min(rows, columns)}. Choose a smaller `rank`."
        )


def orthonormal(columns: jax.Array) -> jax.Array:
    """An orthonormal basis of columns `[n, k]`, each with a positive part of its column.

    It is the Q of a QR decomposition whose R has a positive diagonal.
    """
    q, r = jnp.linalg.qr(columns)
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(q.dtype)
    return q * signs[None]
