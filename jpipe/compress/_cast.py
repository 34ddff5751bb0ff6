"""Arrays in a smaller floating-point type."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.compress._compressor import Compressor, Wire


@suggests
@dataclasses.dataclass(frozen=True)
class Cast(Compressor):
    """Sends values in a smaller floating-point type.

    Finite values beyond the range of the type become its largest ones. Infinities and NaNs stay
    what they are; types without infinities, such as `float8_e4m3fn`, send NaN for them.

    Attributes:
      dtype: the dtype in which values are sent: "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2".

    Raises:
      ValueError: if `dtype` is no floating-point type, or has no sign or no NaN.
    """

    dtype: Any = "bfloat16"

    def __post_init__(self):
        try:
            # NumPy takes None for float64.
            dtype = None if self.dtype is None else jnp.dtype(self.dtype)
        except (TypeError, ValueError):  # NumPy writes it out
            dtype = None
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"`dtype` of Cast must be a floating-point type, got {shown(self.dtype)}. Choose for "
                "example bfloat16, float16 or float8_e4m3fn; integers come of Quantize."
            )
        held = np.array([-1, np.nan]).astype(dtype)
        if held[0] != -1 or not np.isnan(held[1]):
            raise ValueError(
                f"`dtype` of Cast must hold negative numbers and NaN, by which a receiver sees an overflow, and "
                f"{dtype.name} does not. Choose for example bfloat16, float16 or float8_e4m3fn."
            )
        object.__setattr__(self, "dtype", dtype.name)

    def check(self, like: Any, what: str = "the array") -> None:
        """See `Compressor`. Refuses arrays that the cast would make larger as well."""
        super().check(like, what)
        if jnp.dtype(self.dtype).itemsize > jnp.dtype(like.dtype).itemsize:
            raise ValueError(
                f"Cast to {self.dtype} makes {what} larger: it is "
                f"{jnp.dtype(like.dtype).name}{list(like.shape)}. Choose a smaller type."
            )

    def encode(self, x: jax.Array, state: Any) -> tuple[Wire, Any]:
        """`values` in the smaller type, as bits."""
        largest = float(jnp.finfo(self.dtype).max)
        if largest < float(jnp.finfo(x.dtype).max):
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
        return {"values": _as_bits(x.astype(self.dtype))}, state

    def decode(self, wire: Mapping[str, jax.Array], like: Any) -> jax.Array:
        """The values in `like`'s dtype."""
        values = jax.lax.bitcast_convert_type(wire["values"], self.dtype)
        return values.astype(like.dtype)


def _as_bits(values: jax.Array) -> jax.Array:
    """Unsigned integers of the same bits.

    Compilers widen the collectives of types that a device does not compute in: on CPUs bfloat16 is sent as float32, and
    float8 as float16. Integers are sent as they are.
    """
    bits = 8 * values.dtype.itemsize
    return jax.lax.bitcast_convert_type(values, f"uint{bits}")
