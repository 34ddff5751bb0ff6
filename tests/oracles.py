"""Answers from formulas and plain loops. Nothing here reads a table or imports the library."""

import jax
import numpy as np
import optax
from flax import nnx


class PlainModel:
    """The layers one after the other on one device, as one would train them without a pipeline."""

    def __init__(self, factories, key):
        modules = [
            make(rngs=nnx.Rngs(jax.random.fold_in(key, i)))
            for i, make in enumerate(factories)
        ]
        split = [nnx.split(module) for module in modules]
        self.graphs = [graph for graph, _ in split]
        self.states = [state for _, state in split]
        self.params = [
            jax.tree.map(np.asarray, nnx.to_pure_dict(s)) for s in self.states
        ]

    def __call__(self, params, x):
        for graph, state, values in zip(self.graphs, self.states, params):
            nnx.replace_by_pure_dict(state, values)
            x = nnx.merge(graph, state)(x)
        return x


def train(model, params, loss, optimizer, batches):
    """Plain training on whole minibatches: the loss and gradients of every step, and the final weights."""

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(
            lambda p: loss(model(p, batch["inputs"]), batch)
        )(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads

    opt_state, losses, gradients = optimizer.init(params), [], []
    for batch in batches:
        params, opt_state, value, grads = step(params, opt_state, batch)
        losses.append(float(value))
        gradients.append(jax.tree.map(np.asarray, grads))
    return losses, gradients, jax.tree.map(np.asarray, params)
