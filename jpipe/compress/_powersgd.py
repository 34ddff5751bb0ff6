"""PowerSGD: a power iteration that goes on from array to array."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Wire
from jpipe.compress._matrix import LowRankCompressor, orthonormal


class PowerSGDState(NamedTuple):
    """Between two arrays.

    Attributes:
      q: float `[columns, rank]`, the factor of the array before.
    """

    q: jax.Array


@suggests
@dataclasses.dataclass(frozen=True)
class PowerSGD(LowRankCompressor):
    """Sends a matrix M as P Q^T of a low rank, by one step of a power iteration.

        P = M Q;  P = an orthonormal basis of P;  Q = M^T P

    The Q of one array is where the next one begins. The last dim of an array gives the columns of M, all other
    dims its rows. Arrays of less than 2 dims are sent whole, as `values`, and so are arrays whose factors
    would be no smaller, so at the full rank, the smaller of both, nothing is lost.

    Replicas do not exchange wires. They take the mean of P before it becomes a basis, and the mean of Q: all have
    the same factors, those of the mean of their matrices. What a replica has sent is this P Q^T, as in Algorithm 2.

    Attributes:
      rank: columns of P and Q.
      seed: the seed of the first Q.

    Raises:
      ValueError: if `rank` is below 1.

    References:
      Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, arXiv:1905.13727, Algorithms 1 and 2.
    """

    def _first(self, key: jax.Array, rows: int, columns: int, dtype: Any) -> PowerSGDState:
        return PowerSGDState(jax.random.normal(key, (columns, self.rank), dtype))

    def _step(
        self,
        matrix: jax.Array,
        state: PowerSGDState,
        mean: Callable[[jax.Array], jax.Array],
    ) -> tuple[Wire, PowerSGDState]:
        """`p` `[rows, rank]`, an orthonormal basis, and `q` `[columns, rank]`."""
        p = orthonormal(mean(matrix @ state.q))
        q = mean(matrix.T @ p)
        return {"p": p, "q": q}, PowerSGDState(q)

    def _product(self, factors: Mapping[str, jax.Array]) -> jax.Array:
        return factors["p"] @ factors["q"].T
