"""Options of the numbers that layers compute and keep."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean
from jpipe.compress import StreamingPCA
from jpipe.gradients.sums import GradientSums
from jpipe.options.loss_scale import LossScale
from jpipe.options.record import Options
from jpipe.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Numbers(Options):
    """The dtypes of layers, the scale of their gradients, and the stash of a forward. `Pipeline` has the meaning.

    Attributes:
      compute_dtype: weights and activations are cast to it in every layer; None: they are not.
      accumulate_dtype: the dtype in which gradients are summed over microbatches; None: in the dtypes of their weights.
      recompute: "none", "full" or a checkpoint policy.
      loss_scale: the factor of the loss before its gradient is computed; None: 1.
    """

    compute_dtype: np.dtype | None
    accumulate_dtype: np.dtype | None
    recompute: str | Callable[..., Any]
    loss_scale: LossScale | None

    @classmethod
    def checked(
        cls,
        schedule: Schedule,
        *,
        compute_dtype: Any,
        accumulate_dtype: Any,
        recompute: Any,
        loss_scale: Any,
    ) -> "Numbers":
        """The options as a user gives them.

        Raises:
          ValueError: if one of them cannot be.
        """
        return cls(
            recompute=check_recompute(recompute),
            compute_dtype=floating_dtype("compute_dtype", compute_dtype),
            accumulate_dtype=floating_dtype("accumulate_dtype", accumulate_dtype),
            loss_scale=_check_loss_scale(loss_scale, schedule),
        )

    @property
    def runs_forward_again(self) -> bool:
        """True if a stage keeps only its inputs, and runs its forward again before its backward."""
        return self.recompute == "full"

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The checkpoint policy of layers; None: it follows from `recompute` by name."""
        return self.recompute if callable(self.recompute) else None

    @property
    def recompute_name(self) -> str:
        """`recompute` as text: "none", "full" or the name of the policy."""
        if callable(self.recompute):
            return getattr(self.recompute, "__name__", "policy")
        return self.recompute

    def gradient_sums(self, compressor: StreamingPCA | None) -> GradientSums:
        """The dtypes and forms in which gradients are summed. `compressor` is for those that are products."""
        return GradientSums(compressor, self.accumulate_dtype)

    @property
    def parts(self) -> dict[str, Any]:
        """See `Options`. A policy is compared by its name."""
        return super().parts | {"recompute": self.recompute_name}


_EXAMPLES = {"compute_dtype": "bfloat16", "accumulate_dtype": "float32"}


def check_recompute(recompute: Any) -> Any:
    """`recompute`, if it is a known name or a checkpoint policy."""
    policies = vars(jax.checkpoint_policies)
    policy_makers = [
        name for name, policy in policies.items() if policy is recompute and name.startswith(("save_", "offload_"))
    ]
    if recompute in ("none", "full") or (callable(recompute) and not policy_makers):
        return recompute
    remedy = ""
    if policy_makers:
        remedy = f" Call it to get a policy: `jax.checkpoint_policies.{policy_makers[0]}(...)`."
    elif isinstance(recompute, str):
        name = recompute.rpartition(".")[2]
        remedy = did_you_mean(name, ["none", "full", *policies])
    raise ValueError(
        f'`recompute` must be "none", "full" or a policy of `jax.checkpoint_policies`, got {shown(recompute)}.{remedy}'
    )


def floating_dtype(name: str, dtype: Any) -> np.dtype | None:
    """The option `name` as a dtype, if it is one of floating-point numbers, or None."""
    try:
        checked = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError, RecursionError):  # it is written out, or not a dtype
        checked = np.dtype(object)
    if checked is not None and not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(
            f"`{name}` must be a floating-point dtype, such as `jnp.{_EXAMPLES[name]}`, or None, got {shown(dtype)}."
        )
    return checked


def _check_loss_scale(scale: Any, schedule: Schedule) -> LossScale | None:
    """`loss_scale` as a `LossScale`, if the schedule can use it, or None."""
    if scale is None:
        return None
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        scale = LossScale(scale, None, largest=np.inf)
    if not isinstance(scale, LossScale):
        raise ValueError(f"`loss_scale` must be a number, a `jpipe.LossScale` or None, got {shown(scale)}.")
    if scale.growth_interval is not None and not schedule.synchronous:
        raise ValueError(
            "a loss scale that moves needs a synchronous schedule: in "
            f"{schedule.name!r} one update would add gradients of different scales. Use a "
            f"constant scale, such as `loss_scale={scale.initial:g}`."
        )
    return scale
