"""Sums of gradients: forms in which the gradient of a parameter is summed over the microbatches of a minibatch.

A sum says which leaves it has, how it takes up a microbatch, how the gradient follows from its leaves, and what it
begins with:

    PlainSum      the sum itself, in the dtype of the parameter or in a wider one
    FactoredSum   the factors of a matrix of low rank: see `jpipe.compress.StreamingPCA`

`GradientSums` chooses between them. `jpipe.stages.cut` packs the leaves, and puts a `PlacedSum` for each parameter into
the programs of stages. The update of a stage reads the leaves, and its equations begin with `gradient`
(`jpipe.stages.flat_update.with_sums`).
"""

import abc
import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import packing
from jpipe.compress import Factors, StreamingPCA
from jpipe.layers.backward import LayerProgram
from jpipe.layers.products import Product, ProductForm
from jpipe.packing import Lead, Leaf, Packing, Place

SUMS, FACTORS = "gradients", "factors"
"""The packed arrays that leaves of sums lie in. The names of arrays of factors begin with the word, so they lie beside
the others.
"""


class Microbatch(NamedTuple):
    """The facts of a microbatch that a sum needs.

    Attributes:
      number: int32 `[]`, the number of the microbatch in its minibatch.
      num_microbatches: the number of microbatches of a minibatch.
      scale: `[]`, the loss scale, or None.
      mean: function that averages a tree over the replicas along "data".
    """

    number: jax.Array
    num_microbatches: int
    scale: jax.Array | None
    mean: Callable[[Any], Any]


class GradientSum(abc.ABC):
    """The sum of the gradient of one parameter."""

    group: str
    """`SUMS` or `FACTORS`."""

    @property
    @abc.abstractmethod
    def leaves(self) -> list[Leaf]:
        """The leaves that the sum keeps."""

    @abc.abstractmethod
    def avals(self, gradient: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
        """The values that the update reads in place of a gradient of this shape and dtype."""

    @abc.abstractmethod
    def gradient(self, values: Sequence[jax.Array], like: jax.ShapeDtypeStruct) -> jax.Array:
        """The gradient of the minibatch, with the dtype of `like`, of the values of `avals`."""


@dataclasses.dataclass(frozen=True)
class PlainSum(GradientSum):
    """The sum itself. `jpipe.packing.add_all` adds the gradient of a microbatch.

    Attributes:
      leaf: the sum.
    """

    leaf: Leaf
    group = SUMS

    @property
    def leaves(self) -> list[Leaf]:
        """See `GradientSum`."""
        return [self.leaf]

    def term(self, gradient: jax.Array | Product) -> jax.Array:
        """The value that the gradient of a microbatch adds to the sum."""
        return gradient.gradient() if isinstance(gradient, Product) else gradient

    def avals(self, gradient: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
        """See `GradientSum`. A part of a vocabulary layer is updated by the equations of the whole."""
        return [jax.ShapeDtypeStruct(gradient.shape, self.leaf.aval.dtype)]

    def gradient(self, values: Sequence[jax.Array], like: jax.ShapeDtypeStruct) -> jax.Array:
        """See `GradientSum`."""
        (value,) = values
        return value.astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class FactoredSum(GradientSum):
    """Factors of low rank: the backward gives both matrices whose product is the gradient, and the product is never
    formed.

    Both update the factors in place of an addition. All replicas along "data" take part: the microbatches of all are
    one part of the batch, and all have the same factors, bit for bit. The long dims of the leaves come last: TPUs pad
    the last dim of an array to 128 numbers.

    A gradient that is not finite leaves x and d as they were, and its sigma is not finite either, so the update is
    skipped. The next minibatch begins with a sigma of 0.

    Attributes:
      compressor: updates the factors.
      form: the function from a product `[a, b]` to the gradient.
    """

    compressor: StreamingPCA
    form: ProductForm
    group = FACTORS

    @property
    def leaves(self) -> list[Leaf]:
        """x `[k, a]`, d `[k, b]` and sigma `[k]`."""
        k, dtype = self.compressor.rank, np.dtype(np.float32)
        shapes = [(k, self.form.rows), (k, self.form.columns), (k,)]
        return [Leaf(jax.ShapeDtypeStruct(shape, dtype)) for shape in shapes]

    def avals(self, gradient: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
        """See `GradientSum`."""
        return [leaf.aval for leaf in self.leaves]

    def gradient(self, values: Sequence[jax.Array], like: jax.ShapeDtypeStruct) -> jax.Array:
        """See `GradientSum`."""
        x, d, sigma = values
        return self.form.gradient(Factors(x.T, d.T, sigma).matrix())

    def add(self, values: Sequence[jax.Array], product: Product, microbatch: Microbatch) -> list[jax.Array]:
        """Returns the leaves after a microbatch.

        Args:
          values: x, d and sigma before it.
          product: the contribution of the microbatch to the minibatch's gradient, with loss scale.
          microbatch: the microbatch.
        """
        x, d, sigma = values
        # Of a minibatch that was not finite.
        lost = (microbatch.number == 0) & ~jnp.isfinite(sigma)
        old = Factors(x.T, d.T, jnp.where(lost, jnp.zeros_like(sigma), sigma))
        rows, row_gradients = (a.astype(sigma.dtype) for a in (product.x, product.d))
        # `update` takes a mean over parts of means over rows, and a minibatch's gradient is a sum of both.
        factor = microbatch.num_microbatches * rows.shape[0]
        row_gradients = row_gradients * jnp.asarray(factor, sigma.dtype)
        if microbatch.scale is not None:
            row_gradients = row_gradients / microbatch.scale.astype(sigma.dtype)
        new = self.compressor.update(old, rows, row_gradients, microbatch.number, microbatch.mean)
        finite = jnp.isfinite(new.sigma).all()
        return [
            jnp.where(finite, new.x.T, x),
            jnp.where(finite, new.d.T, d),
            new.sigma,
        ]


class PlacedSum(NamedTuple):
    """A sum, and the places of its leaves in packed arrays of its group.

    Attributes:
      sum: the sum.
      places: the places of its leaves; leaf i of a place belongs to layer i of a run.
    """

    sum: GradientSum
    places: tuple[Place, ...]


def places_of(sums: Iterable[PlacedSum]) -> list[Place]:
    """The places of the leaves of sums."""
    return [place for placed in sums for place in placed.places]


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The choice of a sum for each gradient.

    Attributes:
      compressor: the compressor of gradients that are products; None: all are summed as they are.
      dtype: dtype of sums of gradients of parameters of fewer bits; None: the dtype of the parameter.
    """

    compressor: StreamingPCA | None = None
    dtype: np.dtype | None = None

    def for_layer(
        self, program: LayerProgram, parameters: Sequence[Leaf], tied: Container[int]
    ) -> tuple[GradientSum, ...]:
        """The sums of the gradients of a layer.

        Args:
          program: the layer.
          parameters: its parameters.
          tied: numbers of the tied parameters. Their gradients are sums of several, and are formed.
        """
        sums: list[GradientSum] = []
        for j, (leaf, form) in enumerate(zip(parameters, program.products, strict=True)):
            if self.compressor is None or form is None or j in tied:
                sums.append(self.plain(leaf))
            else:
                sums.append(FactoredSum(self.compressor, form))
        return tuple(sums)

    def plain(self, leaf: Leaf) -> PlainSum:
        """The sum of the gradient of a parameter as it is."""
        aval = jax.ShapeDtypeStruct(leaf.aval.shape, self.dtype_for(leaf.aval.dtype))
        return PlainSum(leaf._replace(aval=aval))

    def dtype_for(self, dtype: Any) -> np.dtype:
        """The dtype in which gradients of parameters of a dtype are summed.

        Raises:
          ValueError: if the sum would round more than the parameter does.
        """
        if self.dtype in (None, dtype) or not jnp.issubdtype(dtype, jnp.floating):
            return np.dtype(dtype)
        if jnp.finfo(self.dtype).bits <= jnp.finfo(dtype).bits:
            raise ValueError(
                "`accumulate_dtype` must have more bits than the weights whose gradients it sums, or be their dtype, "
                f"got {self.dtype} for weights of {np.dtype(dtype)}: the sums would be less exact than without it. "
                "Choose `jnp.float32`, or leave it out."
            )
        return self.dtype

    def packing_of(self, parameters: Packing) -> Packing:
        """The packing of sums that lie as the parameters do."""
        arrays = {name: jax.ShapeDtypeStruct(a.shape, self.dtype_for(a.dtype)) for name, a in parameters.arrays.items()}
        return dataclasses.replace(parameters, arrays=arrays)

    def first_factors(self, factors: Packing, num_chunks: int) -> dict[str, jax.Array]:
        """Packed factors before training, `[R, ...]`: random orthonormal x and d, and sigma of 0; `{}` without factors.

        Args:
          factors: their packing. All leaves are in pools.
          num_chunks: R.
        """
        if self.compressor is None:
            return {}
        shapes = {p.array: p.shape for places in factors.places for p in places}
        first = {}
        for name, a in factors.arrays.items():
            shape = shapes[name]
            value = np.zeros(shape, a.dtype)
            if len(shape) == 2:
                k, n = shape
                square = jax.ShapeDtypeStruct((n, n), a.dtype)
                value = self.compressor.init(square).x.T
            row = value.reshape(a.shape[1:])
            first[name] = jax.numpy.broadcast_to(row, (num_chunks, *a.shape))
        return first


AS_PARAMETERS = GradientSums()
"""All gradients are summed as they are, in the dtypes of their parameters."""


def add(
    arrays: Mapping[str, jax.Array],
    sums: Sequence[PlacedSum],
    lead: Lead,
    values: Sequence[jax.Array | Product],
    i: jax.Array | int,
    microbatch: Microbatch | None,
    *,
    as_stored: Callable[[Sequence[Place], Sequence[jax.Array]], list[jax.Array]],
    add_plain: Callable[[Mapping[str, jax.Array], Sequence[Place], Sequence[jax.Array]], Mapping[str, jax.Array]],
) -> Mapping[str, jax.Array]:
    """Adds the gradients of a microbatch to packed sums.

    Args:
      arrays: packed leaves of sums.
      sums: one for each gradient.
      lead: leading indices.
      values: the gradients; those of factored sums are products.
      i: row of the places.
      microbatch: the microbatch; None if all sums are plain.
      as_stored: gradients at their places, split as these.
      add_plain: adds values at places, as `jpipe.packing.add_all` does.
    """
    plain: list[tuple[Place, jax.Array]] = []
    for (gradient_sum, places), value in zip(sums, values, strict=True):
        if isinstance(gradient_sum, PlainSum):
            plain.append((places[0], gradient_sum.term(value)))
            continue
        # The layer was traced for sums of products, and every pass that has them names its microbatches.
        assert isinstance(gradient_sum, FactoredSum) and isinstance(value, Product)
        assert microbatch is not None
        leaves = packing.read_all(arrays, places, lead, i)
        leaves = gradient_sum.add(leaves, value, microbatch)
        arrays = packing.write_all(arrays, places, lead, leaves, i)
    added = [place for place, _ in plain]
    return add_plain(arrays, added, as_stored(added, [value for _, value in plain]))
