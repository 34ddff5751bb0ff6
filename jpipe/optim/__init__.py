"""Optax transforms for pipelines. Each works in any Optax chain, also without a pipeline.

    clip_by_global_norm   clips by the norm of the gradient over all stages
    scale_by_delay        PipeMare's T1: a smaller learning rate where gradients are late
    scale_by_copies       PipeDream's rates of stages with several copies
    correct_discrepancy   PipeMare's T2; needs the hook `corrected_params` for the backward
    predict_weights       SpecTrain, XPipe, PipeOptim; needs `predicted_params` for the forward
    spike_compensation    momentum for late gradients; has `velocity_predicted_params`
    master_weights        weights of low precision, with a copy in float32 that is updated
    scale_by_nadam        Nesterov's momentum for late gradients; `nadamw` is the whole optimizer
    scale_by_basis_rotation  Adam in the eigenbasis of the gradient's covariances
    compensate_delay      DC-ASGD: a Taylor step by the weights that the gradient was computed at
    error_feedback        adds what the last update should have been, behind Adam or Muon
    diagnose_delay        keeps the angle between updates, the discrepancy of weights, and the curvature
    ema_weights           an average of the weights, which `averaged_params` reads

Delays are counted in updates of the weights. A pipeline passes every stage its own as extra
arguments, `update(grads, state, params, delay=..., backward_delay=...)`, and as
`stale_params` the weights that the gradient was computed at. A training loop
without a pipeline can do the same, or make the transforms with `delay=`, one number or a
tree of them. Functions `(params, optimizer_state, delay) -> params` are *hooks* of a
pipeline: they choose the weights of a forward or a backward. Where there is no delay,
nothing is corrected.

A transform of your own declares what it asks of a pipeline by a `Declaration` on the type
of its state; `check_hooks` compares hooks with transforms.

Example:
  PipeMare.

  >>> import jpipe, optax
  >>> optimizer = optax.chain(
  ...     optax.adam(3e-4),
  ...     jpipe.optim.scale_by_delay(annealing_steps=10_000),
  ...     jpipe.optim.correct_discrepancy(decay=0.1),
  ... )
  >>> backward_params = jpipe.optim.corrected_params
"""

from jpipe.optim.basis_rotation import scale_by_basis_rotation
from jpipe.optim.clip_by_global_norm import clip_by_global_norm
from jpipe.optim.compensate_delay import compensate_delay
from jpipe.optim.correct_discrepancy import correct_discrepancy, corrected_params
from jpipe.optim.declarations import (
    Declaration,
    check_hooks,
    reads_state,
    requested_extra_args,
)
from jpipe.optim.diagnose_delay import delay_diagnostics, diagnose_delay
from jpipe.optim.ema_weights import averaged_params, ema_weights
from jpipe.optim.error_feedback import error_feedback
from jpipe.optim.master_weights import master_weights
from jpipe.optim.nadam import nadamw, scale_by_nadam
from jpipe.optim.predict_weights import predict_weights, predicted_params
from jpipe.optim.scale_by_copies import scale_by_copies
from jpipe.optim.scale_by_delay import scale_by_delay
from jpipe.optim.spike_compensation import (
    spike_compensation,
    velocity_predicted_params,
)
from jpipe.optim.stability import largest_curvature, largest_stable_rate

__all__ = [
    "Declaration",
    "averaged_params",
    "check_hooks",
    "clip_by_global_norm",
    "compensate_delay",
    "correct_discrepancy",
    "corrected_params",
    "delay_diagnostics",
    "diagnose_delay",
    "ema_weights",
    "error_feedback",
    "largest_curvature",
    "largest_stable_rate",
    "master_weights",
    "nadamw",
    "predict_weights",
    "predicted_params",
    "reads_state",
    "requested_extra_args",
    "scale_by_basis_rotation",
    "scale_by_copies",
    "scale_by_delay",
    "scale_by_nadam",
    "spike_compensation",
    "velocity_predicted_params",
]
