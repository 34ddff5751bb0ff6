"""Keys of values that no program can tell apart.

Python equality does not prove it: a class defines its own `__eq__`, a dataclass leaves fields out of comparisons, and
`1 == True`. Here two values are the same if they are one object, or consist of builtin values of the same types that
print alike.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

_PRINTED = (type(None), bool, int, float, complex, str, bytes, np.dtype)
"""Types whose values `repr` tells apart, -0.0 and NaN included."""


class _Identity:
    """A key that equals only itself. It keeps its object alive, so that no other object gets the address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Parts(NamedTuple):
    """A value of a known structure, by its type and its parts."""

    type: type
    parts: Hashable


def sameness(value: Any) -> Hashable:
    """A key that is equal for two values only if no program can tell them apart.

    Args:
      value: static data of a layer, such as the `nnx.GraphDef` of a module.

    Example:
      >>> sameness([1, ("a", None)]) == sameness([1, ("a", None)])
      True
      >>> sameness(1) == sameness(True), sameness(object()) == sameness(object())
      (False, False)
    """
    kind = type(value)
    if kind in _PRINTED or isinstance(value, np.dtype):
        return _Parts(kind, repr(value))
    is_plain = not getattr(value, "__dict__", None)
    if kind is list or (isinstance(value, tuple) and is_plain):
        return _Parts(kind, tuple(map(sameness, value)))
    is_of_flax = kind.__module__.startswith("flax.")
    if kind is dict or (is_of_flax and isinstance(value, Mapping)):
        items = [(sameness(k), sameness(v)) for k, v in value.items()]
        return _Parts(kind, tuple(items))
    if kind.__module__.startswith("flax.nnx.") and dataclasses.is_dataclass(value):
        # The graphs of modules, whose fields say all that a module is.
        values = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return _Parts(kind, tuple(map(sameness, values)))
    if kind is jax.tree_util.PyTreeDef:
        return _Parts(kind, (sameness(value.node_data()), sameness(value.children())))
    return _Identity(value)
