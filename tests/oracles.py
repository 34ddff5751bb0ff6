"""Answers from formulas and plain loops. Nothing here reads a table or imports the library."""

import jax
import jax.numpy as jnp
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


def train_with_delays(
    model,
    stage_of_layer,
    params,
    loss,
    optimizer,
    microbatches,
    N,
    delay,
    backward_delay,
):
    """Asynchronous training from its definition, keeping every weight version of every stage.

    Microbatch k (from 0) runs forward on stage s with version max(k // N - delay(s, k % N), 0), and backward with
    version max(k // N - backward_delay(s, k % N), 0) in the matrix products; the gradients of a minibatch are averaged
    and applied to the stage's newest weights.

    Args:
      model: `PlainModel`. stage_of_layer: the stage of each layer.
      delay, backward_delay: `(stage, position in the minibatch) -> versions`; equal ones are plain gradients.

    Returns: the loss of every microbatch, and the final weights of the complete minibatches.
    """
    stages = sorted(set(stage_of_layer))

    def of_stage(s, tree):
        return [leaf if stage_of_layer[i] == s else None for i, leaf in enumerate(tree)]

    def joined(per_stage):
        return [per_stage[s][i] for i, s in enumerate(stage_of_layer)]

    @jax.jit
    def gradient(forward, backward, batch):
        if backward is None:
            return jax.value_and_grad(lambda p: loss(model(p, batch["inputs"]), batch))(
                forward
            )
        return mlp_mixed_gradient(forward, backward, batch)

    update = jax.jit(lambda g, state, p: optimizer.update(g, state, p))
    versions = {s: [of_stage(s, params)] for s in stages}
    states = {s: optimizer.init(of_stage(s, params)) for s in stages}
    losses, sums = [], None
    for k, batch in enumerate(microbatches):
        number, j = divmod(k, N)
        forward = joined({s: versions[s][max(number - delay(s, j), 0)] for s in stages})
        backward = joined(
            {s: versions[s][max(number - backward_delay(s, j), 0)] for s in stages}
        )
        same = all(delay(s, j) == backward_delay(s, j) for s in stages)
        value, grads = gradient(forward, None if same else backward, batch)
        losses.append(float(value))
        sums = grads if sums is None else jax.tree.map(np.add, sums, grads)
        if j == N - 1:
            mean = jax.tree.map(lambda g: np.asarray(g) / np.asarray(N, g.dtype), sums)
            for s in stages:
                updates, states[s] = update(
                    of_stage(s, mean), states[s], versions[s][-1]
                )
                versions[s].append(optax.apply_updates(versions[s][-1], updates))
            sums = None
    return losses, jax.tree.map(
        np.asarray, joined({s: versions[s][-1] for s in stages})
    )


def mlp_mixed_gradient(forward, backward, batch):
    """Loss and gradients of `models.MLP` under mean cross-entropy, by hand: products backward use `backward`'s weights.

    Activations and ReLU masks are those of the forward.
    """
    inputs = [batch["inputs"]]
    for layer in forward:
        z = inputs[-1] @ layer["linear"]["kernel"] + layer["linear"]["bias"][None]
        inputs.append(z if layer is forward[-1] else jnp.maximum(z, 0))
    logits, labels = inputs[-1], batch["labels"]
    log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    value = -(log_p * hot).sum() / len(labels)
    delta, grads = (jnp.exp(log_p) - hot) / len(labels), []
    for i in reversed(range(len(forward))):
        if i < len(forward) - 1:
            delta = delta * (inputs[i + 1] > 0)
        grads.append(
            {"linear": {"bias": delta.sum(axis=0), "kernel": inputs[i].T @ delta}}
        )
        delta = delta @ backward[i]["linear"]["kernel"].T
    return value, grads[::-1]
