"""The arrays of a state before training that hold no leaves of layers."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.engine.state import STATE_ARRAYS
from jpipe.engine.state_arrays import OnReplicas
from jpipe.engine.training import TrainingPass
from jpipe.layers.quick_jit import quick_options

_FIRST = {array.field: array.first for array in STATE_ARRAYS if array.first is not None}
"""Field of a state -> its local values before training, by the engine. Other fields are zero."""


class FreshArrays:
    """Makes arrays of a state where they lie: zeros, or what compressors and the loss scale begin with.

    What makes the arrays of a field is compiled once.

    Args:
      engine: the pass that the state belongs to.
      platform: the platform of its devices.
    """

    def __init__(self, engine: TrainingPass, platform: str):
        self._engine, self._platform = engine, platform
        self._compiled: dict[str, Callable[[], Any]] = {}

    def __call__(self, fields: Iterable[str]) -> dict[str, Any]:
        """The arrays of some fields, by field."""
        return {field: self._arrays(field) for field in fields}

    def _arrays(self, field: str) -> Any:
        if field not in self._compiled:
            self._compiled[field] = self._compile(field)
        return self._compiled[field]()

    def _compile(self, field: str) -> Callable[[], Any]:
        layout = self._engine.layout
        wanted = layout.global_shapes([field])[field]
        if field not in _FIRST:
            return zeros(wanted, self._platform)
        is_equal = layout[field].held is OnReplicas.EQUAL
        number = layout.num_devices * (1 if is_equal else layout.num_replicas)
        first = functools.partial(_FIRST[field], self._engine)

        def parts() -> Any:
            return jax.tree.map(lambda a: jnp.concatenate([a] * number), first())

        return jax.jit(parts, out_shardings=jax.tree.map(lambda a: a.sharding, wanted))


def zeros(shapes: Any, platform: str) -> Callable[[], Any]:
    """A compiled function that makes zeros.

    Args:
      shapes: global shapes with shardings.
      platform: the platform of the devices.
    """
    size = sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))
    return jax.jit(
        lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes),
        out_shardings=jax.tree.map(lambda a: a.sharding, shapes),
        compiler_options=quick_options(platform, size),
    )
