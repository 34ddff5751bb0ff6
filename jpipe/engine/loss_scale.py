"""Loss scaling: gradients of float16 computations, kept out of the range where they vanish."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Multiplies the loss, and divides its gradient before the optimizer sees it.

    A dynamic scale is divided by `factor` when a gradient is not finite (that update is skipped), and multiplied by
    it after `growth_interval` updates without one.

    Attributes:
      initial: the scale at the start, above 0. A power of two changes no digits.
      growth_interval: updates between two growths; None: a constant scale.
      factor: of growth and of fall, above 1.
      largest: the scale never grows beyond it.

    References:
      Micikevicius et al., ICLR 2018, arXiv:1710.03740, section 3.2.
    """

    initial: float = 2.0**15
    growth_interval: int | None = 2000
    factor: float = 2.0
    largest: float = 2.0**24

    def __post_init__(self):
        if not 0 < self.initial < np.inf:
            raise ValueError(
                f"`initial` of a loss scale must be above 0 and finite, got {self.initial}."
            )
        if self.growth_interval is not None and self.growth_interval < 1:
            raise ValueError(
                f"`growth_interval` must be at least 1 update, or None, got {self.growth_interval}."
            )
        if not self.factor > 1:
            raise ValueError(f"`factor` must be above 1, got {self.factor}.")
        if self.largest < self.initial:
            raise ValueError(
                f"`largest` must be at least `initial` ({self.initial}), got {self.largest}."
            )

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of its arrays, on each device."""
        return {
            "scale": jax.ShapeDtypeStruct((1,), np.float32),
            "num_finite": jax.ShapeDtypeStruct((1,), np.int32),
        }

    def start(self) -> dict[str, np.ndarray]:
        """Its arrays before training."""
        return {
            "scale": np.full(1, self.initial, np.float32),
            "num_finite": np.zeros(1, np.int32),
        }

    def after_update(self, arrays: dict, finite: jax.Array) -> dict:
        """Its arrays after an update whose gradient was `finite`, or not."""
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
