"""Weight gradients that are products of two matrices, and the matrices.

The gradient of a dense layer is `x^T d`: x its inputs `[s, a]`, d the gradients by its outputs `[s, b]`, s rows. The
backward of `jax.vjp` computes it as a `dot_general`, which this module finds. Whoever needs no gradient, but what
follows from both matrices, gets these instead, and the product is not computed.

A layer that computes in fewer bits than its weights have casts each gradient. XLA for GPUs adds a product to the sum of
a gradient in place, if the product itself has the bits of the sum, which is more exact too.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jpipe.layers.equations import Equations, contains, variables

# What a product may go through before it is the gradient: it stays linear in the product, and in every number of it.
_TAIL = {"convert_element_type", "copy", "reshape", "squeeze", "transpose"}


@dataclasses.dataclass(frozen=True, eq=False)
class ProductForm:
    """A gradient as a product of two matrices.

    Attributes:
      shape: the shape of the product in the backward.
      rows: a, numbers in a row of x.
      columns: b, numbers in a row of d.
      dtype: the dtype of the product.
      transposed: whether the backward has `d^T x`.
      tail: the equations from the product to the gradient.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    dtype: Any
    transposed: bool
    tail: Equations

    def gradient(self, matrix: jax.Array) -> jax.Array:
        """The gradient, of a product `[a, b]`."""
        matrix = matrix.T if self.transposed else matrix
        (gradient,) = self.tail(matrix.astype(self.dtype).reshape(self.shape))
        return gradient


@dataclasses.dataclass(frozen=True)
class Product:
    """A gradient as two matrices.

    Attributes:
      x: `[s, a]`, inputs of the layer.
      d: `[s, b]`, gradients by its outputs.
      form: the way from `x^T d` to the gradient.
    """

    x: jax.Array
    d: jax.Array
    form: ProductForm

    def gradient(self) -> jax.Array:
        """The gradient itself."""
        matrix = jnp.matmul(self.x.T, self.d, preferred_element_type=self.form.dtype)
        return self.form.gradient(matrix)


jax.tree_util.register_dataclass(Product, ["x", "d"], ["form"])


@dataclasses.dataclass(frozen=True)
class GradientForms:
    """The parameter gradients of a layer as functions of the results of its backward.

    Attributes:
      forms: for each parameter the form of its gradient, and the contracted dims of x and of d; None: the gradient is
        computed.
    """

    forms: tuple[tuple[ProductForm, tuple] | None, ...]

    @property
    def num_values(self) -> int:
        """Number of values from which the gradients follow."""
        return sum(1 if form is None else 2 for form in self.forms)

    def gradients(self, values: Sequence) -> list:
        """A gradient or a `Product` for each parameter."""
        rest, gradients = iter(values), []
        for entry in self.forms:
            if entry is None:
                gradients.append(next(rest))
                continue
            form, (x_summed, d_summed) = entry
            x, d = _as_rows(next(rest), x_summed), _as_rows(next(rest), d_summed)
            gradients.append(Product(x, d, form))
        return gradients


@dataclasses.dataclass(frozen=True)
class ProductRule:
    """What a backward gives in the place of gradients that are products.

    Attributes:
      factored: `(a, b)` -> whether the two matrices are given of a product `[a, b]`; None: of no product.
      widened: whether products that are cast to more bits are computed in these bits.
    """

    factored: Callable[[int, int], bool] | None = None
    widened: bool = False


AS_TRACED = ProductRule()


def with_products(
    backward: Equations,
    num_residuals: int,
    num_parameters: int,
    rule: ProductRule,
) -> tuple[Equations, GradientForms]:
    """A backward whose first outputs are gradients, or both operands of the product that gives a gradient.

    Args:
      backward: residuals and output gradients -> gradients of the parameters, then others.
      num_residuals: the number of residuals.
      num_parameters: the number of parameters.
      rule: which gradients are given how.
    """
    if rule.widened:
        backward = _widened(backward, num_parameters)
    wanted = rule.factored or (lambda a, b: False)
    producers = {v: eqn for eqn in backward.equations for v in eqn.outvars}
    output_gradients = backward.depending_on(backward.inputs[num_residuals:])
    outputs: list = []
    forms: list = []
    for gradient in backward.outputs[:num_parameters]:
        product = _product(producers, gradient)
        if product is not None:
            contracted, _ = product.params["dimension_numbers"]
            operands = list(zip(product.invars, contracted, strict=True))
            # The gradients by outputs are second.
            transposed = contains(output_gradients, product.invars[0])
            x, d = reversed(operands) if transposed else operands
            form = _form(backward, product, gradient, x, d, transposed=transposed)
            if wanted(form.rows, form.columns):
                outputs += [x[0], d[0]]
                forms.append((form, (x[1], d[1])))
                continue
        outputs.append(gradient)
        forms.append(None)
    outputs += backward.outputs[num_parameters:]
    changed = dataclasses.replace(backward, outputs=tuple(outputs))
    return changed, GradientForms(tuple(forms))


def _product(producers: dict, gradient: Any) -> Any:
    """The `dot_general` that a gradient follows from; None if it follows from more."""
    product, *_ = _chain(producers, gradient) or [None]
    return product


def _chain(producers: dict, gradient: Any) -> list:
    """The `dot_general` that a gradient follows from, and the equations after it; `[]` if it follows from more."""
    chain: list = []
    eqn = producers[gradient] if contains(producers, gradient) else None
    while eqn is not None and eqn.primitive.name in _TAIL and len(eqn.invars) == 1:
        chain.append(eqn)
        (operand,) = eqn.invars
        eqn = producers[operand] if contains(producers, operand) else None
    if eqn is None or eqn.primitive.name != "dot_general":
        return []
    _, batched = eqn.params["dimension_numbers"]
    return [] if any(batched) else [eqn, *reversed(chain)]


def _widened(backward: Equations, num_parameters: int) -> Equations:
    """A backward that computes products in the dtype that it casts them to, where they are parameter gradients."""
    producers = {v: eqn for eqn in backward.equations for v in eqn.outvars}
    reads = collections.Counter(v for eqn in backward.equations for v in variables(eqn.invars))
    reads.update(variables(backward.outputs))
    changed: dict[int, Any] = {}
    for gradient in backward.outputs[:num_parameters]:
        chain = _chain(producers, gradient)
        if not chain or any(reads[v] > 1 for eqn in chain for v in eqn.outvars):
            continue
        operands = {v.aval.dtype for v in chain[0].invars}
        dtypes = [eqn.outvars[0].aval.dtype for eqn in chain]
        wide, is_float = dtypes[-1], all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
        # A dtype of fewer bits on the way rounds, which the layer may want.
        rises = all(a.itemsize <= b.itemsize for a, b in itertools.pairwise(dtypes))
        if not is_float or not rises or operands != {dtypes[0]} or dtypes[0].itemsize != 2 or wide != np.float32:
            continue
        kept = [eqn for eqn in chain if eqn.primitive.name != "convert_element_type"]
        before = chain[0].invars
        for number, eqn in enumerate(kept):
            (old,) = eqn.outvars
            new = gradient if number == len(kept) - 1 else jex.Var(old.aval.update(dtype=wide))
            params = {**eqn.params, "preferred_element_type": wide} if number == 0 else eqn.params
            changed[id(eqn)] = eqn.replace(invars=before, outvars=[new], params=params)
            before = [new]
        changed |= {id(eqn): None for eqn in chain if id(eqn) not in changed}
    equations = (changed.get(id(eqn), eqn) for eqn in backward.equations)
    return dataclasses.replace(backward, equations=tuple(eqn for eqn in equations if eqn is not None))


def _form(
    backward: Equations,
    product: Any,
    gradient: Any,
    x: tuple[Any, Sequence[int]],
    d: tuple[Any, Sequence[int]],
    transposed: bool,
) -> ProductForm:
    """The form of a gradient, of a product of operands `(variable, contracted dims)`."""
    (value,) = product.outvars
    return ProductForm(
        tuple(value.aval.shape),
        _free_size(x[0].aval.shape, x[1]),
        _free_size(d[0].aval.shape, d[1]),
        value.aval.dtype,
        transposed=transposed,
        tail=backward.slice([value], [gradient]),
    )


def _free_size(shape: Sequence[int], contracted: Sequence[int]) -> int:
    return math.prod(n for dim, n in enumerate(shape) if dim not in contracted)


def _as_rows(operand: jax.Array, contracted: Sequence[int]) -> jax.Array:
    """`[s, n]`: the contracted dims give the rows."""
    free = [dim for dim in range(operand.ndim) if dim not in contracted]
    num_rows = math.prod(operand.shape[dim] for dim in contracted)
    return operand.transpose(*contracted, *free).reshape(num_rows, -1)
