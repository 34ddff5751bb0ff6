"""Separates the terms of a loss that consist of reported values alone.

A loss that returns `(sum, weight)` may add values that layers report: `(losses * mask).sum() + 0.1 *
reported["penalty"]`. The weight counts rows, and divides what is summed over rows. The penalty is one number of a
microbatch, as in a loss that is a mean. So the returned sum is split into two terms:

    sum = rest + reported        reported: computed of reported values and constants alone
                                 rest: all other terms, also products with reported values

The function is evaluated equation by equation. A value is a constant, or has one of the two terms, or both. Operations
that are linear in a value with both terms are applied to each.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.layers.equations import bind, value_of

_SUMS = ("add", "add_any", "concatenate", "stack", "sub")
_LINEAR = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "gather",
    "neg",
    "reduce_sum",
    "reshape",
    "slice",
    "squeeze",
    "transpose",
)
_PRODUCTS = ("div", "dot_general", "mul", "select_n")
_CALLS = ("jit", "pjit")


class Terms(NamedTuple):
    """A value as the sum of its terms; None: a term that it does not have.

    Attributes:
      constant: the value, if it depends on no argument; the others are None then.
      rest: the term that depends on other arguments than reported values.
      reported: the term that depends on reported values alone.
      mixed_by: the operation, neither sum nor product, that was applied to both terms. All of the value is `rest` then.
    """

    constant: Any = None
    rest: Any = None
    reported: Any = None
    mixed_by: str | None = None

    def whole(self) -> Any:
        """The value."""
        first, *others = [a for a in self[:3] if a is not None]
        return first + others[0] if others else first

    def rest_and_reported(self) -> tuple[Any, Any]:
        """The two terms of the value, zero where it has none. A constant belongs to the rest."""
        rest = self.constant if self.rest is None else self.rest
        zero = jnp.zeros_like(self.whole())
        return (
            zero if rest is None else rest,
            zero if self.reported is None else self.reported,
        )


def split_terms(function: Callable, reported: Any, others: Any) -> list[Terms]:
    """The leaves of `function(reported, others)`, a function of two trees of arrays, each as its terms."""
    closed = jax.make_jaxpr(function)(reported, others)
    arguments = [Terms(reported=a) for a in jax.tree.leaves(reported)]
    arguments += [Terms(rest=a) for a in jax.tree.leaves(others)]
    return _evaluated(closed, arguments)


def _evaluated(closed: Any, arguments: Sequence[Terms]) -> list[Terms]:
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, map(Terms, closed.consts), strict=True))
    env |= zip(jaxpr.invars, arguments, strict=True)

    def read(atom: Any) -> Terms:
        value = value_of(env, atom)
        return value if isinstance(value, Terms) else Terms(value)  # of a literal

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _results(eqn, [read(v) for v in eqn.invars])))
    return [read(v) for v in jaxpr.outvars]


def _results(eqn: Any, operands: Sequence[Terms]) -> list[Terms]:
    """The results of an equation."""
    name = eqn.primitive.name
    has_rest = any(a.rest is not None for a in operands)
    has_reported = any(a.reported is not None for a in operands)
    mixed_by = next((a.mixed_by for a in operands if a.mixed_by), None)
    if has_rest and has_reported and not mixed_by:
        if name in _CALLS:
            return _evaluated(eqn.params["jaxpr"], operands)
        if name in _SUMS or _is_linear(name, operands):
            return [_linear_result(eqn, operands)]
        mixed_by = None if name in _PRODUCTS else name
    kind = "rest" if has_rest else "reported" if has_reported else "constant"
    values = bind(eqn, [a.whole() for a in operands])
    return [Terms(**{kind: value}, mixed_by=mixed_by) for value in values]


def _is_linear(name: str, operands: Sequence[Terms]) -> bool:
    """Returns whether an operation is linear in those of its operands that are not constant."""
    changing = [i for i, a in enumerate(operands) if a.constant is None]
    if name == "select_n":
        return 0 not in changing
    if name in ("dot_general", "mul"):
        return len(changing) == 1
    return name in (*_LINEAR, "div") and changing == [0]


def _linear_result(eqn: Any, operands: Sequence[Terms]) -> Terms:
    """The result of a linear operation."""
    if eqn.primitive.name in _SUMS:
        terms = zip(*(a.rest_and_reported() for a in operands), strict=True)
    else:
        is_factor = [a.constant is not None for a in operands]
        if eqn.primitive.name == "select_n":  # its first operand selects
            is_factor = [True] + [False] * (len(operands) - 1)
        terms = zip(
            *(
                (a.constant, a.constant) if factor else a.rest_and_reported()
                for a, factor in zip(operands, is_factor, strict=True)
            ),
            strict=True,
        )
    rest, reported = (bind(eqn, list(values))[0] for values in terms)
    return Terms(rest=rest, reported=reported)
