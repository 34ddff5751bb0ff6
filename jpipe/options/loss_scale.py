"""Loss scaling keeps the gradients of float16 computations from rounding to zero."""

import dataclasses
import numbers
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests


@suggests
@dataclasses.dataclass(frozen=True)
class LossScale:
    """Multiplies the loss by a scale, and divides the gradient by it before the optimizer.

    A dynamic scale is divided by `factor` after an update whose gradient is not finite, which is
    skipped. It is multiplied by `factor` after `growth_interval` updates with finite gradients.

    Attributes:
      initial: the scale at the start, above 0. A power of two causes no rounding.
      growth_interval: finite updates before the scale grows; None: a constant scale.
      factor: factor of growth and of decrease, above 1.
      largest: upper limit of the scale.

    References:
      Micikevicius et al., ICLR 2018, arXiv:1710.03740, section 3.2.
    """

    initial: float = 2.0**15
    growth_interval: int | None = 2000
    factor: float = 2.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        largest = float(np.finfo(np.float32).max)
        limits = {
            "initial": (0.0, largest, "above 0 and finite"),
            "factor": (1.0, largest, "above 1"),
            "growth_interval": (0.0, 2**31 - 1, "at least 1 update, or None"),
            "largest": (0.0, np.inf, "above 0"),
        }
        for name, (above, most, meaning) in limits.items():
            value = getattr(self, name)
            if name == "growth_interval" and value is None:
                continue
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not above < value <= most:
                owner = " of a loss scale" if name == "initial" else ""
                raise ValueError(f"`{name}`{owner} must be {meaning}, got {shown(value)}.")
        if self.largest < self.initial:
            raise ValueError(
                f"`largest` must be at least `initial` ({shown(self.initial)}), got {shown(self.largest)}."
            )

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of "scale" and of "num_finite", the finite updates since the scale changed."""
        return {
            "scale": jax.ShapeDtypeStruct((1,), np.float32),
            "num_finite": jax.ShapeDtypeStruct((1,), np.int32),
        }

    def start(self) -> dict[str, np.ndarray]:
        """The scale's arrays before training."""
        return {
            "scale": np.full(1, self.initial, np.float32),
            "num_finite": np.zeros(1, np.int32),
        }

    def after_update(self, arrays: Mapping[str, jax.Array], finite: jax.Array) -> Mapping[str, jax.Array]:
        """The scale's arrays after an update.

        Args:
          arrays: the arrays before the update, shaped as `shapes` says.
          finite: bool `[]`, whether the gradient of the update was finite.
        """
        if self.growth_interval is None:
            return arrays
        scale, count = arrays["scale"], arrays["num_finite"] + 1
        grows = count >= self.growth_interval
        grown = jnp.where(grows, jnp.minimum(scale * self.factor, self.largest), scale)
        fallen = jnp.maximum(scale / self.factor, np.finfo(np.float32).tiny)
        return {
            "scale": jnp.where(finite, grown, fallen),
            "num_finite": jnp.where(finite & ~grows, count, 0),
        }
