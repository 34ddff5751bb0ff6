"""What a case of `fuzz.py` must compute: plain Flax and JAX on one device, one microbatch after the other, all weight
versions kept.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fuzz_layers import KINDS
from fuzz_model import loss_parts

ANNEALING_STEPS = 4
DISCREPANCY_DECAY = 0.25
GROWTH_INTERVAL = 2
"""Updates after which a loss scale that moves is doubled."""


def gradient_function(model, starts):
    """`(forward weights, backward weights, state, m, r, batch) -> ` loss parts, gradients, new state, inputs of
    norms.
    """
    case = model.case
    num_layers = len(model.layers)

    def norms(seen):
        return {i: a for i, a in seen.items() if getattr(KINDS.get(model.names[i]), "norm", False)}

    @jax.jit
    def whole(forward, backward, state, m, r, batch):
        def function(params):
            inputs = (batch["inputs"], {}, jnp.zeros(()))
            (outputs, _, total), new, seen = model.run(
                tied(case, params), state, m, r, inputs, training=True,
                old=None if backward is None else tied(case, backward),
            )  # fmt: skip
            value, weight, aux = loss_parts(case, outputs, batch, total)
            return value, (weight, aux, new, norms(seen))

        (value, rest), grads = jax.value_and_grad(function, has_aux=True)(forward)
        return value, *rest, grads

    @jax.jit
    def recomputed(forward, backward, state, m, r, batch):
        """Stages run again by the weights of the backward, from what they got in the forward."""
        forward, backward = tied(case, forward), tied(case, backward)
        given, new, seen = [], state, {}
        values: Any = (batch["inputs"], {}, jnp.zeros(()))
        for span in zip(starts, starts[1:]):
            given.append(values)
            values, new, inputs = model.run(forward, new, m, r, values, training=True, span=span)
            seen |= inputs
        value, weight, aux = loss_parts(case, values[0], batch, values[2])
        grads: list = [None] * num_layers

        def real(tree):
            """What has a gradient, and the rest."""
            leaves, form = jax.tree.flatten(tree)
            moves = [jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in leaves]
            return leaves, form, moves

        cotangent = None
        for s in reversed(range(len(given))):
            span = starts[s], starts[s + 1]
            leaves, form, moves = real(given[s])

            def stage(params, inexact):
                rest = iter(inexact)
                both = [next(rest) if move else a for a, move in zip(leaves, moves)]  # noqa: B023
                full = [None] * span[0] + params  # noqa: B023
                out, _, _ = model.run(
                    full, state, m, r, form.unflatten(both), training=True, span=span  # noqa: B023
                )  # fmt: skip
                if span[1] == num_layers:  # noqa: B023
                    return loss_parts(case, out[0], batch, out[2])[0]
                out, _, moving = real(out)
                return [a for a, move in zip(out, moving) if move]

            inexact = [a for a, move in zip(leaves, moves) if move]
            out, back = jax.vjp(stage, backward[slice(*span)], inexact)
            grads[slice(*span)], cotangent = back(jnp.ones_like(out) if cotangent is None else cotangent)
        if case.tie:
            i, j = case.tied_layers
            kernels = [grads[n]["linear"].pop("kernel") for n in (i, j)]
            grads[i]["linear"]["kernel"] = sum(kernels)
        return value, weight, aux, new, norms(seen), grads

    if case.asynchronous and case.recompute == "full":
        return recomputed
    return whole


def tied(case, params):
    """Parameters in which the later layer of a tie has the kernel of the first."""
    if not case.tie:
        return params
    params, (i, j) = list(params), case.tied_layers
    linear = {**params[j]["linear"], "kernel": params[i]["linear"]["kernel"]}
    params[j] = {**params[j], "linear": linear}
    return params


def untied(case, params):
    """Parameters in which the later layer of a tie has no kernel."""
    if not case.tie:
        return params
    params, (_, j) = list(params), case.tied_layers
    params[j] = {**params[j], "linear": {"bias": params[j]["linear"]["bias"]}}
    return params


def paired_delay(S, N):
    """PipeMare's: forward at slot k + s, backward 2 (S - 1 - s) + 1 later, an update when a minibatch is complete."""
    return lambda s, j: max(0, math.ceil((2 * (S - 1 - s) + 1 - j) / N))


def unit_delay(S, N):
    """Time-multiplexed: at N = 1 the gradient of microbatch k meets k - (S - 1 - s) updates (PipeDream's 1F1B)."""
    return lambda s, j: max(0, math.ceil((S - 1 - s - j) / N))


@dataclasses.dataclass
class Trained:
    """What a training leaves.

    Attributes:
      params, state: at the end.
      losses, norms, auxes: of each minibatch.
      skipped: of each minibatch, 0 or 1 for each stage.
      scales: the loss scale after each minibatch.
    """

    params: Any
    state: Any
    losses: list = dataclasses.field(default_factory=list)
    norms: list = dataclasses.field(default_factory=list)
    auxes: list = dataclasses.field(default_factory=list)
    skipped: list = dataclasses.field(default_factory=list)
    scales: list = dataclasses.field(default_factory=list)


def is_finite(tree) -> bool:
    return all(np.isfinite(a).all() for a in jax.tree.leaves(tree))


def breaks(old, new) -> bool:
    """Whether a finite number of an array would become infinite or NaN."""
    return any(
        jnp.issubdtype(jnp.result_type(b), jnp.inexact) and (np.isfinite(a) & ~np.isfinite(b)).any()
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new))
    )


def kept_finite(old, new):
    """Mutable state after a write. An array that would break stays."""
    return jax.tree.map(lambda a, b: a if breaks(a, b) else b, old, new)


class Updates:
    """The optimizer of every layer. With a norm over all layers it is one optimizer.

    Attributes:
      stage_of: of each layer.
      delay: see `train`.
      params: the newest weights of every layer.
      movement: of the weights of every layer by its last update.
      velocity: T2's mean of these movements.
    """

    def __init__(self, case, optimizer, params):
        self.case, self.params = case, params
        self.stage_of, self.delay = [], None
        layers = range(len(params))
        self.groups = [layers] if case.optimizer == "clip" else [[i] for i in layers]
        self.states = [jax.device_get(optimizer.init(self.part(group, params))) for group in self.groups]
        self.applied = [0] * len(params)
        zeros = jax.tree.map(np.zeros_like, params)
        self.movement, self.velocity = list(zeros), list(zeros)

        optimizer = optax.with_extra_args_support(optimizer)

        @jax.jit
        def update(grads, opt_state, params, factor, delay):
            updates, opt_state = optimizer.update(grads, opt_state, params, delay=delay)
            updates = jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates)
            return optax.apply_updates(params, updates), updates, opt_state

        self.update = update

    @staticmethod
    def part(group, trees):
        """Some layers; None for the others."""
        return [t if i in group else None for i, t in enumerate(trees)]

    def skipped(self, grads):
        """0 or 1 for each stage: whether it skips the update. Stages that update at the same time skip together."""
        S = max(self.stage_of) + 1
        broken = [not is_finite([g for g, of in zip(grads, self.stage_of) if of == s]) for s in range(S)]
        if not self.case.asynchronous:
            broken = [any(broken)] * S
        return [int(b) for b in broken]

    def apply(self, grads):
        """Updates every stage. Returns `skipped`."""
        skipped, params = self.skipped(grads), list(self.params)
        for n, group in enumerate(self.groups):
            s = self.stage_of[group[0]]
            if skipped[s]:
                continue
            factor = 1.0
            if self.case.optimizer == "scaled_by_delay":  # PipeMare's T1
                power = 1 - min(self.applied[n] / ANNEALING_STEPS, 1)
                factor = max(self.delay(s, 0), 1) ** -power
            new, updates, self.states[n] = self.update(
                self.part(group, grads),
                self.states[n],
                self.part(group, self.params),
                factor,
                float(self.delay(s, 0)),
            )
            self.applied[n] += 1
            for i in group:
                params[i], self.movement[i] = new[i], updates[i]
                self.velocity[i] = self.decayed(s, self.velocity[i], updates[i])
        self.params = params
        return skipped

    def decayed(self, s, velocity, movement):
        """PipeMare's T2: the mean of the movements of a stage's weights."""
        tau = self.delay(s, 0)
        if not tau:
            return jax.tree.map(np.zeros_like, velocity)
        gamma = DISCREPANCY_DECAY ** (1 / tau)
        return jax.tree.map(
            lambda v, u: (gamma * v + (1 - gamma) * u).astype(v.dtype),
            velocity,
            movement,
        )

    def version(self):
        """What forwards and backwards read of the newest weights."""
        hooks, forward, backward = self.case.hooks, self.params, self.params
        if "prediction" in hooks:
            forward = self.ahead(1, self.movement)
        if "correction" in hooks:
            backward = self.ahead(-1, self.velocity)
        return forward, backward

    def ahead(self, sign, directions):
        return [
            jax.tree.map(
                lambda w, d: (w + sign * self.delay(s, 0) * d).astype(w.dtype),  # noqa: B023
                params,
                direction,
            )
            if self.delay(s, 0)
            else params
            for params, direction, s in zip(self.params, directions, self.stage_of)
        ]


class Part(NamedTuple):
    """Minibatches that follow each other in one layout.

    Attributes:
      first: the number of the first of them. Its forwards read no weights of before.
      starts: the first layer of each stage, and the number of layers.
      delay, backward_delay: `(stage, position in the minibatch) -> versions`.
    """

    first: int
    starts: Sequence[int]
    delay: Callable
    backward_delay: Callable


def train(model, parts, optimizer, params, state, batches):
    """Trains by the definition.

    Args:
      parts: list of `Part`.

    Returns: `Trained`.
    """
    case = model.case
    N, data = case.N, case.data
    updates = Updates(case, optimizer, untied(case, params))
    versions: list = []
    part_of = {part.first: part for part in parts}
    moved = jax.jit(model.moved)
    trained = Trained(params, state)
    scale, num_finite = case.loss_scale, 0
    replicas = [state] * data
    for number, batch in enumerate(batches):
        if number in part_of:
            base, starts, delay, backward_delay = part_of[number]
            gradient = gradient_function(model, starts)
            stage_of = [s for s, n in enumerate(np.diff(starts)) for _ in range(n)]
            updates.stage_of, updates.delay = stage_of, delay
            versions = [*versions[:-1], updates.version()]
        grads: Any = None
        values, weights, aux, seen, first = 0.0, 0.0, [], [], replicas[0]
        for r in range(data):
            for j in range(N):
                rows = len(batch["targets"]) // (N * data)
                at = slice((r * N + j) * rows, (r * N + j + 1) * rows)
                forward, backward = (
                    [
                        versions[max(number - late(s, j), base)][n][i]  # noqa: B023
                        for i, s in enumerate(stage_of)
                    ]
                    for n, late in enumerate((delay, backward_delay))
                )
                same = all(a is b for a, b in zip(forward, backward))
                if same and (case.recompute != "full" or not case.asynchronous):
                    backward = None
                last = replicas[r]
                value, weight, extra, replicas[r], inputs, g = gradient(
                    forward,
                    backward,
                    replicas[r],
                    number * N + j,
                    r,
                    jax.tree.map(lambda a: a[at], batch),  # noqa: B023
                )
                replicas[r] = [
                    old if name in KINDS and KINDS[name].norm else kept_finite(before, new)
                    for name, old, before, new in zip(model.names, first, last, replicas[r])
                ]
                values, weights = values + float(value), weights + float(weight)
                aux.append(float(extra))
                seen.append(inputs)
                g = jax.tree.map(np.asarray, g)
                grads = g if grads is None else jax.tree.map(np.add, grads, g)
        grads = jax.tree.map(
            lambda g: (g / weights).astype(g.dtype),  # noqa: B023
            grads,
        )
        trained.losses.append(values / weights)
        trained.auxes.append(np.mean(aux))
        trained.norms.append(optax.global_norm(grads))
        trained.skipped.append(updates.apply(grads))
        versions.append(updates.version())
        if case.scale_moves:
            num_finite = 0 if max(trained.skipped[-1]) else num_finite + 1
            if num_finite == 0:
                scale /= 2
            elif num_finite == GROWTH_INTERVAL:
                scale, num_finite = scale * 2, 0
        trained.scales.append(scale)
        mean = jax.tree.map(
            lambda *a: np.asarray(sum(map(np.asarray, a)) / data, a[0].dtype) if data > 1 else a[0],
            *replicas,
        )
        after = moved(tied(case, params), mean, seen)
        # The statistics of a layer stay together.
        mean = [old if breaks(old, new) else new for old, new in zip(mean, after)]
        replicas = [mean] * data
    trained.params, trained.state = tied(case, updates.params), replicas[0]
    return trained
