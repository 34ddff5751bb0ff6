"""Learners: a small model, pipelines of it, and plain loops of replicas that train apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from jpipe import schedules

DIM, LEARNERS, N, ROWS, KEY = 4, 2, 2, 2, jax.random.key(0)
LAYERS = [functools.partial(nnx.Linear, DIM, DIM) for _ in range(4)]
INNER = optax.chain(jpipe.optim.clip_by_global_norm(0.5), optax.adam(0.05))
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)


def plain(params, batch):
    x = batch["inputs"]
    for layer in params:
        x = x @ layer["kernel"] + layer["bias"][None]
    return loss(x, batch)


def batches(number):
    arrays = np.random.default_rng(0).standard_normal((number, 2, LEARNERS * N * ROWS, DIM)).astype("float32")
    return [{"inputs": x, "targets": y} for x, y in arrays]


def rows_of(batch, r):
    """The rows of a learner."""
    size = len(batch["inputs"]) // LEARNERS
    return {name: a[r * size : (r + 1) * size] for name, a in batch.items()}


DILOCO = jpipe.LocalSteps(NESTEROV)


def pipeline(local_steps=DILOCO, schedule=schedules.one_f_one_b, S=2, data=LEARNERS, **options):
    schedule = schedule(S, N)
    return jpipe.Pipeline(
        LAYERS,
        **{"loss": loss, "optimizer": INNER, **options},
        schedule=schedule,
        mesh=jpipe.make_mesh(stage=schedule.num_devices, data=data),
        local_steps=local_steps,
    )


class Learners:
    """The plain loop: every learner with weights of its own, on one device."""

    def __init__(self, params, optimizer):
        self.anchor, self.outer, self.outer_state = params, optimizer, optimizer.init(params)
        self.weights, self.states = [params] * LEARNERS, [optax.adam(0.05).init(params)] * LEARNERS

    def step(self, batch):
        losses, norms = [], []
        for r in range(LEARNERS):
            value, gradients = jax.value_and_grad(plain)(self.weights[r], rows_of(batch, r))
            norm = float(optax.global_norm(gradients))
            gradients = jax.tree.map(lambda g: g * min(1, 0.5 / norm), gradients)  # noqa: B023
            updates, self.states[r] = optax.adam(0.05).update(gradients, self.states[r])
            self.weights[r] = optax.apply_updates(self.weights[r], updates)
            losses.append(float(value))
            norms.append(norm)
        return losses, norms

    def outer_step(self):
        mean = jax.tree.map(lambda *each: sum(each) / LEARNERS, *self.weights)
        moved = jax.tree.map(jnp.subtract, self.anchor, mean)
        updates, self.outer_state = self.outer.update(moved, self.outer_state, self.anchor)
        self.anchor = optax.apply_updates(self.anchor, updates)
        self.weights = [self.anchor] * LEARNERS


class LateLearners(Learners):
    """The plain loop of late averages of subsets, which keeps all that was sent: one outer optimizer for each subset."""

    def __init__(self, params, local_steps, masks):
        super().__init__(params, local_steps.outer)
        self.sparse, self.masks, self.in_flight = local_steps.sparse, masks, []
        self.outer_states = [self.outer_state] * len(masks)
        self.averages = [jax.tree.map(jnp.zeros_like, params)] * LEARNERS
        self.arrivals = [0] * len(masks)

    def outer_step(self, k=0):
        """Subset k is sent; the mean that was sent `delay` outer steps before arrives."""
        delay = self.sparse.delay
        if delay and len(self.in_flight) >= delay:
            self.arrive(*self.in_flight[-delay])
        self.in_flight.append((k, list(self.weights)))
        if not delay:
            self.arrive(*self.in_flight[-1])

    def arrive(self, k, sent):
        mask = self.masks[k]
        mean = jax.tree.map(lambda *each: sum(each) / LEARNERS, *sent)
        moved = jax.tree.map(jnp.subtract, self.anchor, mean)
        updates, self.outer_states[k] = self.outer.update(moved, self.outer_states[k], self.anchor)
        self.anchor = self.where(mask, optax.apply_updates(self.anchor, updates), self.anchor)
        self.arrivals[k] += 1
        for r in range(LEARNERS):
            corrected = self.anchor
            if self.sparse.correction is not None:
                decay = self.sparse.correction
                averages = jax.tree.map(
                    lambda e, w, s: decay * e + (1 - decay) * (w - s),  # noqa: B023
                    self.averages[r],
                    self.weights[r],
                    sent[r],
                )
                self.averages[r] = self.where(mask, averages, self.averages[r])
                debiased = 1 - decay ** self.arrivals[k]
                corrected = jax.tree.map(lambda a, e: a + e / debiased, self.anchor, averages)  # noqa: B023
            self.weights[r] = self.where(mask, corrected, self.weights[r])

    def together(self):
        """All of them at once, each with the outer optimizer of its subset."""
        self.in_flight = []
        mean = jax.tree.map(lambda *each: sum(each) / LEARNERS, *self.weights)
        moved, anchor = jax.tree.map(jnp.subtract, self.anchor, mean), self.anchor
        for k, mask in enumerate(self.masks):
            updates, self.outer_states[k] = self.outer.update(moved, self.outer_states[k], anchor)
            self.anchor = self.where(mask, optax.apply_updates(anchor, updates), self.anchor)
        self.weights = [self.anchor] * LEARNERS

    @staticmethod
    def where(mask, new, old):
        return jax.tree.map(jnp.where, mask, new, old)


def subsets(local_steps, **options):
    """For each subset, which entries of the weights are in it: those that an outer step without delay moves."""
    at_once = jpipe.SparseAverage(delay=0, correction=None, seed=local_steps.sparse.seed)
    pipe = pipeline(jpipe.LocalSteps(optax.sgd(1.0), local_steps.num_fragments, at_once), **options)
    state = pipe.init(KEY, batches(1)[0])
    state = dataclasses.replace(state, parameters=jax.tree.map(lambda a: a + 1, state.parameters))
    masks = []
    for k in range(local_steps.num_fragments):
        before = pipe.get_params(state)
        state = pipe.outer_step(state, k)
        masks.append(jax.tree.map(lambda a, b: np.asarray(a != b), before, pipe.get_params(state)))
    jax.tree.map(lambda *each: np.testing.assert_array_equal(sum(a.astype(int) for a in each), 1), *masks)
    return masks


def check_resumed(pipe, again, state, data, fragment, folder):
    """A checkpoint of a state of a pipeline goes on bit for bit when the pipeline `again`, which is equal, restores it."""
    with jpipe.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        restored = checkpoints.restore(again, data[0]).state
    ends = []
    for resumed in (state, restored):
        for batch in data:
            resumed, metrics = pipe.step(resumed, batch)
            resumed = pipe.outer_step(resumed, fragment)
        ends.append((np.asarray(metrics["loss"]), pipe.get_params(resumed)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
