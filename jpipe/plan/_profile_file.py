"""Reads dataclasses of numbers and abstract arrays from JSON."""

import dataclasses
import json
import math
import re
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def text_of(aval: jax.ShapeDtypeStruct) -> str:
    return f"{np.dtype(aval.dtype)}{list(aval.shape)}"


class WrongField(ValueError):
    """A field of a file has a wrong value."""

    def __init__(self, field: str, want: str, got: Any):
        super().__init__(f"`{field}` must be {want}, got {json.dumps(got)[:80]}")


def decode(kind: Any, value: Any, field: str) -> Any:
    """Converts a JSON value to the type that a dataclass declares for a field."""
    if isinstance(kind, types.UnionType):
        (inner,) = (argument for argument in kind.__args__ if argument is not types.NoneType)
        return None if value is None else decode(inner, value, field)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise WrongField(field, "a list", value)
        of = kind.__args__[0]
        return tuple(decode(of, v, f"{field}[{i}]") for i, v in enumerate(value))
    if kind is jax.ShapeDtypeStruct:
        match = re.fullmatch(r"(\w+)\[((\d+, )*\d+)?\]", str(value))
        try:
            if match is None:
                raise TypeError
            dims = (match[2] or "").split(", ")
            shape = tuple(int(n) for n in dims if n)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(match[1]))
        except TypeError:  # no match, or no such dtype
            raise WrongField(field, "an array, such as 'float32[2, 3]'", value) from None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise WrongField(field, "an object", value)
        dot = f"{field}." if field else ""
        names = typing.get_type_hints(kind)
        for name in value:
            if name not in names:
                raise WrongField(
                    dot + name,
                    f"absent: {kind.__name__} has no such field",
                    value[name],
                )
        for field_of_kind in dataclasses.fields(kind):
            if field_of_kind.name not in value and field_of_kind.default is dataclasses.MISSING:
                raise WrongField(dot + field_of_kind.name, "there", "nothing")
        return kind(**{n: decode(t, value[n], dot + n) for n, t in names.items() if n in value})
    if kind is bool and isinstance(value, bool):
        return value
    number = kind in (int, float)
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) or (number and not 0 <= value < math.inf):
        want = "a finite number, at least 0" if kind is float else f"{kind.__name__}"
        raise WrongField(field, "a whole number, at least 0" if kind is int else want, value)
    return kind(value)
