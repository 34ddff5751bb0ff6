"""The largest learning rate that the delays of a schedule allow: lemma 1 of PipeMare, at the current weights."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jpipe
from train.config import OptimizerConfig
from train.data import Batch

NUM_BATCHES = 8
"""Minibatches whose gradients give the second moment of Adam."""


class Bound(NamedTuple):
    """The bound of a stage.

    Attributes:
      delay: the delay in updates.
      largest: the largest stable learning rate.
      configured: the largest learning rate that the configuration reaches on the stage.
    """

    delay: int
    largest: float
    configured: float

    @property
    def is_stable(self) -> bool:
        """True if the configured rate stays in the stable range."""
        return self.configured <= self.largest


def bounds(
    config: OptimizerConfig,
    pipe: jpipe.Pipeline,
    loss: Callable[[Any, Batch], jax.Array],
    params: Any,
    batches: Iterable[Batch],
    num_steps: int,
    first_step: int = 0,
) -> tuple[float, list[Bound]]:
    """The curvature of the first minibatch, and the bound of each stage.

    Args:
      config: the configuration of the optimizer.
      pipe: the pipeline whose schedule has the delays.
      loss: `(params, batch) -> loss`.
      params: the weights.
      batches: minibatches of training; Adam reads `NUM_BATCHES`.
      num_steps: the number of steps of the run.
      first_step: the first step, from 0, that the schedule trains.

    Returns:
      The largest curvature, for Adam that of the scaled weights, and one `Bound` per stage. At a
      curvature of 0 or less every rate is stable.

    Raises:
      ValueError: if the optimizer has no stable range that lemma 1 knows, or the curvature is not
        finite.
    """
    momentum, nesterov, is_adam = config.momentum_of_stability()
    first, *others = itertools.islice(batches, NUM_BATCHES if is_adam else 1)
    scale = None
    if is_adam:
        gradient = jax.jit(jax.grad(loss))
        second = jax.tree.map(jnp.zeros_like, params)
        for batch in (first, *others):
            squares = jax.tree.map(jnp.square, gradient(params, batch))
            second = jax.tree.map(jnp.add, second, squares)
        number = 1 + len(others)
        scale = jax.tree.map(lambda v: 1 / (jnp.sqrt(v / number) + 1e-8), second)
    curvature, _ = jpipe.optim.largest_curvature(
        lambda weights: loss(weights, first), params, jax.random.key(0), scale=scale
    )
    delays = pipe.schedule.facts().forward_delay.astype(int)
    # Adam's mean of gradients is momentum at a rate of 1 - b1 times as much.
    curvature_per_rate = curvature * (1 - momentum if is_adam else 1)
    largest = np.full(len(delays), math.inf)
    if curvature > 0:
        largest = jpipe.optim.largest_stable_rate(curvature_per_rate, delays, momentum, nesterov)
    schedule = config.learning_rate_schedule(num_steps)
    steps = np.arange(first_step, num_steps)
    rates = np.asarray(jax.vmap(schedule)(jnp.asarray(steps)), np.float64)
    bounds_of_stages = []
    for delay, rate in zip(delays.tolist(), np.asarray(largest).tolist(), strict=True):
        power = np.zeros(len(steps))
        if config.steps_of_rise:
            power = 1 - np.minimum(steps / config.steps_of_rise, 1)
        configured = float((rates * max(delay, 1) ** -power).max())
        bounds_of_stages.append(Bound(delay, rate, configured))
    return curvature, bounds_of_stages


def text(curvature: float, bounds_of_stages: list[Bound]) -> str:
    """The bounds as a table; stages in a row with equal numbers are one line."""
    lines = [
        f"largest curvature of a minibatch: {curvature:.4g}",
        f"{'stages':>9}  {'delay':>5}  {'stable rate':>11}  {'configured':>10}",
    ]
    stage = 0
    for bound, alike in itertools.groupby(bounds_of_stages):
        last = stage + len(list(alike)) - 1
        stages = f"{stage}" if last == stage else f"{stage}-{last}"
        mark = "" if bound.is_stable else "  too large"
        lines.append(f"{stages:>9}  {bound.delay:>5}  {bound.largest:>11.4g}  {bound.configured:>10.4g}{mark}")
        stage = last + 1
    return "\n".join(lines)


def warning(bounds_of_stages: list[Bound]) -> str | None:
    """Says what to change where a rate leaves the stable range; None if none does."""
    wrong = [(s, bound) for s, bound in enumerate(bounds_of_stages) if not bound.is_stable]
    if not wrong:
        return None
    s, worst = min(wrong, key=lambda pair: pair[1].largest / pair[1].configured)
    return (
        f"the learning rate leaves the stable range of late gradients on {len(wrong)} of {len(bounds_of_stages)} "
        f"stages: with a delay of {worst.delay} updates stage {s} is stable up to {worst.largest:.3g} at the current "
        f"curvature, and the configuration reaches {worst.configured:.3g}. Lower --config.optimizer.learning_rate, set "
        "--config.optimizer.annealing_steps so that late stages begin with less, use more "
        "--config.pipeline.num_microbatches, or train the first steps with --config.pipeline.synchronous_steps."
    )
