"""Where the gradient of each weight is accumulated: as it is, or as the factors of a matrix of low rank.

A dense layer's gradient is a product of two matrices (`jpipe.layers.products`). Its factors are updated from both, and
the product is computed nowhere but in the update.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jpipe.compress import StreamingPCA
from jpipe.layers.backward import LayerProgram
from jpipe.packing import Leaf, Packing, Place

FACTORS = "factors"
"""Prefix of the names of packed arrays of factors, which so lie beside those of gradients."""


class FactorPlaces(NamedTuple):
    """Places of the factors of one gradient, in packed arrays.

    The long dims come last: TPUs pad the last dim of an array to 128 numbers.

    Attributes:
      x: `[k, a]`.
      d: `[k, b]`.
      sigma: `[k]`.
    """

    x: Place
    d: Place
    sigma: Place


GradientPlace = Place | FactorPlaces
"""Where a gradient is accumulated."""


def flat_places(places: Sequence[GradientPlace]) -> list[Place]:
    """The places of gradients, and of each factor of a gradient."""
    found: list[Place] = []
    for place in places:
        found += place if isinstance(place, FactorPlaces) else [place]
    return found


class Accumulators(NamedTuple):
    """Which gradients are accumulated as factors.

    Attributes:
      compressor: of these; None: none are.
      are_factors: for each kind of layers and each of its parameters, whether its gradient is accumulated as factors.
    """

    compressor: StreamingPCA | None
    are_factors: Sequence[Sequence[bool]]

    @classmethod
    def of(
        cls,
        compressor: StreamingPCA | None,
        kinds: Sequence[LayerProgram],
        kind_of_layer: Sequence[int],
        ties: Sequence[Sequence[tuple[int, int]]],
    ) -> "Accumulators":
        """The gradients that are products; those of tied weights are sums of several, and are formed."""
        tied = {
            (kind_of_layer[layer], j)
            for leaves in ties
            if len(leaves) > 1
            for layer, j in leaves
        }
        are_factors = [
            tuple(
                form is not None and (k, j) not in tied
                for j, form in enumerate(kind.products)
            )
            for k, kind in enumerate(kinds)
        ]
        return cls(compressor, are_factors)

    def plain(self, kind: int, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Of the parameters of a kind those whose gradients are accumulated as they are."""
        are_factors = self.are_factors[kind]
        return [
            a for a, factors in zip(leaves, are_factors, strict=True) if not factors
        ]

    def factors(self, kind: int, program: LayerProgram) -> list[Leaf]:
        """The factors of all other gradients of a kind, three each."""
        leaves: list[Leaf] = []
        for form, factors in zip(program.products, self.are_factors[kind]):
            if factors:
                assert form is not None and self.compressor is not None
                k, dtype = self.compressor.rank, np.dtype(np.float32)
                shapes = [(k, form.rows), (k, form.columns), (k,)]
                leaves += [Leaf(jax.ShapeDtypeStruct(s, dtype)) for s in shapes]
        return leaves

    def places(
        self, kind: int, plain: Callable[[], Place], factor: Callable[[], Place]
    ) -> tuple[GradientPlace, ...]:
        """Where the gradient of each parameter of a kind is accumulated.

        Args:
          kind: the kind.
          plain: gives the places of `plain`, one after the other.
          factor: gives those of `factors`.
        """
        return tuple(
            FactorPlaces(factor(), factor(), factor()) if factors else plain()
            for factors in self.are_factors[kind]
        )


def first_factors(
    compressor: StreamingPCA, factors: Packing, num_chunks: int
) -> dict[str, jax.Array]:
    """Packed factors before training, `[R, ...]`: random orthonormal x and d, and sigma of 0.

    Args:
      compressor: whose they are.
      factors: their packing. All leaves are in pools.
      num_chunks: R.
    """
    shapes = {p.array: p.shape for places in factors.places for p in places}
    first = {}
    for name, a in factors.arrays.items():
        shape = shapes[name]
        value = np.zeros(shape, a.dtype)
        if len(shape) == 2:
            k, n = shape
            value = compressor.init(jax.ShapeDtypeStruct((n, n), a.dtype)).x.T
        row = value.reshape(a.shape[1:])
        first[name] = jax.numpy.broadcast_to(row, (num_chunks, *a.shape))
    return first
