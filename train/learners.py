"""Replicas that train apart: `--config.mesh.local_steps=H`, see `jpipe.LocalSteps`."""

from typing import Any

import jax
import numpy as np
import optax

import jpipe
from jpipe._processes.sharing import own_rows


def local_steps_of(mesh: Any) -> jpipe.LocalSteps | None:
    """`local_steps` of `jpipe.Pipeline`; None if replicas exchange gradients in every step.

    Args:
      mesh: the `MeshConfig`.

    Raises:
      ValueError: if the steps cannot be parted into fragments.
    """
    if mesh.local_steps is None:
        return None
    if mesh.local_steps % mesh.fragments:
        raise ValueError(
            f"`local_steps` must be a multiple of `fragments`, which come together one after the other, got "
            f"{mesh.local_steps} and {mesh.fragments}."
        )
    outer = optax.sgd(mesh.outer_rate, momentum=mesh.outer_momentum or None, nesterov=mesh.outer_momentum > 0)
    sparse = None if mesh.delay is None else jpipe.SparseAverage(mesh.delay, mesh.correction)
    return jpipe.LocalSteps(outer, mesh.fragments, sparse)


def after_step(config: Any, pipe: jpipe.Pipeline, state: jpipe.PipelineState, step: int) -> jpipe.PipelineState:
    """The state after the outer step that is due after a step; the same state if none is.

    Each of the fragments comes together once in `local_steps`, at even distances. Where means are late, or microbatches
    are in flight, these are completed after the last step, and all fragments come together.
    """
    if pipe.local_steps is None:
        return state
    mesh = config.mesh
    is_late = pipe.local_steps.sparse is not None or not pipe.schedule.synchronous
    if step == config.num_steps and is_late:
        return pipe.outer_step(pipe.flush(state)[0])
    every = mesh.local_steps // mesh.fragments
    return state if step % every else pipe.outer_step(state, (step // every - 1) % mesh.fragments)


def mean_of_learners(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a step as numbers of the whole run: means over the learners of this process, and all skips."""
    if not metrics["loss"].ndim:
        return metrics

    def here(a: jax.Array) -> np.ndarray:
        return np.asarray(a if a.is_fully_addressable else own_rows(a, a.sharding.mesh))

    mine = jax.tree.map(here, metrics)
    means = jax.tree.map(lambda a: a.mean(axis=0), mine)
    return means | {"skipped_updates": mine["skipped_updates"].sum(axis=0)}
