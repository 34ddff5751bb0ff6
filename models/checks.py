"""Checks of the options and inputs of models; all raise `ValueError`."""

import typing
from collections.abc import Mapping
from typing import Any


def at_least_one(options: Any, *names: str) -> None:
    """Checks that each of these fields is at least 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(options, name)}.")


def all_at_least_one(options: Any, *names: str) -> None:
    """Checks that every entry of each of these fields is at least 1."""
    for name in names:
        if any(entry < 1 for entry in getattr(options, name)):
            raise ValueError(f"`{name}` must all be at least 1, got {getattr(options, name)}.")


def one_entry_each(options: Any, name: str, of: str) -> None:
    """Checks that field `name` has one entry per entry of field `of`, and at least one."""
    entries, others = getattr(options, name), getattr(options, of)
    if len(entries) != len(others) or not others:
        raise ValueError(
            f"`{name}` needs one entry for each of `{of}`, got {entries} for {others}. "
            "Give both the same length, at least 1."
        )


def one_of(options: Any, *names: str) -> None:
    """Checks that each of these fields is a value that its `Literal` annotation lists."""
    for name in names:
        allowed = typing.get_args(typing.get_type_hints(type(options))[name])
        if getattr(options, name) not in allowed:
            raise ValueError(f"`{name}` must be {' or '.join(map(repr, allowed))}, got {getattr(options, name)!r}.")


def rate(options: Any, name: str) -> None:
    """Checks that the field is a rate of dropout."""
    if not 0 <= getattr(options, name) < 1:
        raise ValueError(f"`{name}` must lie in [0, 1), got {getattr(options, name)}.")


def heads_divide_dim(options: Any) -> None:
    """Checks that the number of attention heads divides the width."""
    if options.dim % options.num_heads:
        raise ValueError(f"`num_heads` must divide `dim` ({options.dim}), got {options.num_heads}. Change either.")


def entries_of(inputs: Any, *names: str) -> list[Any]:
    """Returns the arrays of these names, and checks that `inputs` has no others."""
    if isinstance(inputs, Mapping):
        got = sorted(inputs)
    else:
        got = "an array" if hasattr(inputs, "shape") else type(inputs).__name__
    if got != sorted(names):
        raise ValueError(f"the inputs must be a dict of {', '.join(names)}, got {got}. Give exactly these entries.")
    return [inputs[name] for name in names]


def fits(num_positions: int, seq_len: int) -> None:
    """Checks that the model has a vector for every position of its input."""
    if num_positions > seq_len:
        raise ValueError(
            f"the input has {num_positions} positions, but `seq_len` of the model is "
            f"{seq_len}. Shorten the input or use a larger `seq_len`."
        )
