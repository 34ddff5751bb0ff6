"""Optax transforms for pipelines. Each works in any Optax chain, with or without the engine.

    clip_by_global_norm   clips by the norm of the gradient over all stages
    scale_by_delay        PipeMare's T1: a smaller learning rate where gradients are late
    correct_discrepancy   PipeMare's T2, with `corrected_params` for the backward
    predict_weights       SpecTrain, XPipe, PipeOptim, with `predicted_params` for the forward
    spike_compensation    momentum for late gradients, with `velocity_predicted_params` for the forward
    scale_by_nadam        Nesterov's momentum for late gradients; `nadamw` is the whole optimizer

Delays are counted in updates of the weights. A pipeline gives each stage its own as extra
arguments, `update(grads, state, params, delay=..., backward_delay=...)`; a training loop
without one may do the same, or make the transforms with `delay=`, one number or a tree of
them. Functions `(params, optimizer_state, delay) -> params` give the weights that a forward
or a backward reads. Where there is no delay, nothing is corrected.

Example: PipeMare.
  >>> import jpipe, optax
  >>> optimizer = optax.chain(
  ...     optax.adam(3e-4),
  ...     jpipe.optim.scale_by_delay(annealing_steps=10_000),
  ...     jpipe.optim.correct_discrepancy(decay=0.1),
  ... )
  >>> backward_params = jpipe.optim.corrected_params
"""

from jpipe.optim.clip_by_global_norm import clip_by_global_norm
from jpipe.optim.correct_discrepancy import correct_discrepancy, corrected_params
from jpipe.optim.nadam import nadamw, scale_by_nadam
from jpipe.optim.predict_weights import predict_weights, predicted_params
from jpipe.optim.scale_by_delay import scale_by_delay
from jpipe.optim.spike_compensation import (
    spike_compensation,
    velocity_predicted_params,
)

__all__ = [
    "clip_by_global_norm",
    "correct_discrepancy",
    "corrected_params",
    "nadamw",
    "predict_weights",
    "predicted_params",
    "scale_by_delay",
    "scale_by_nadam",
    "spike_compensation",
    "velocity_predicted_params",
]
