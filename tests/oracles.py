"""Answers from formulas and plain loops. Nothing here reads a table or imports the library."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class PlainModel:
    """The layers one after the other on one device, as one would train them without a pipeline."""

    def __init__(self, factories, key):
        modules = [make(rngs=nnx.Rngs(jax.random.fold_in(key, i))) for i, make in enumerate(factories)]
        split = [nnx.split(module) for module in modules]
        self.graphs = [graph for graph, _ in split]
        self.states = [state for _, state in split]
        self.params = [jax.tree.map(np.asarray, nnx.to_pure_dict(s)) for s in self.states]

    def __call__(self, params, x):
        for graph, state, values in zip(self.graphs, self.states, params):
            nnx.replace_by_pure_dict(state, values)
            x = nnx.merge(graph, state)(x)
        return x


def train(model, params, loss, optimizer, batches):
    """Plain training on whole minibatches: the loss and gradients of every step, and the final weights."""

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: loss(model(p, batch["inputs"]), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads

    opt_state, losses, gradients = optimizer.init(params), [], []
    for batch in batches:
        params, opt_state, value, grads = step(params, opt_state, batch)
        losses.append(float(value))
        gradients.append(jax.tree.map(np.asarray, grads))
    return losses, gradients, jax.tree.map(np.asarray, params)


def minibatches(microbatches, N):
    """The microbatches, N after one another as one minibatch."""
    return [
        jax.tree.map(lambda *rows: np.concatenate(rows), *microbatches[i : i + N])
        for i in range(0, len(microbatches), N)
    ]


def stages_of_layers(records):
    """The stage of each layer, of the records of `Pipeline.partition`."""
    return [record.stage for record in records for _ in range(*record.layers)]


def train_with_delays(*args, **options):
    """Asynchronous training to the end: see `steps_with_delays`.

    Returns: the loss of every microbatch, and the final weights of the complete minibatches.
    """
    *_, (losses, versions) = steps_with_delays(*args, **options)
    newest = {i: leaf for per_stage in versions.values() for i, leaf in enumerate(per_stage[-1]) if leaf is not None}
    return losses, jax.tree.map(np.asarray, [newest[i] for i in sorted(newest)])


def steps_with_delays(
    model,
    stage_of_layer,
    params,
    loss,
    optimizer,
    microbatches,
    N,
    delay,
    backward_delay,
    recompute=False,
    annealing_steps=None,
    decay=None,
    predicts=False,
    max_norm=None,
    spike=None,
    mixed=None,
):
    """Asynchronous training from its definition, keeping every weight version of every stage.

    Microbatch k (from 0) runs forward on stage s with version max(k // N - delay(s, k % N), 0), and backward with
    version max(k // N - backward_delay(s, k % N), 0) in the matrix products; the gradients of a minibatch are averaged
    and applied to the stage's newest weights. With tau the largest delay of a stage, tau_b of its backward, w_t the
    weights after t updates and v_t their movement:

    - T1: update t (from 0) is divided by tau ** (1 - min(t / annealing_steps, 1)), where tau is above 1;
    - T2: a backward reads w_t - (tau - tau_b) d_t, d_t = g d_{t-1} + (1 - g) v_t, g = decay ** (1 / (tau - tau_b));
    - prediction: a forward reads w_t + tau v_t;
    - spike compensation, in place of `optimizer`: m_t = mu m_{t-1} + g, v_t = -eta (a m_t + b g), a = mu ** tau,
      b = 1 + mu + ... + mu ** (tau - 1); a forward reads w_t - tau eta m_t;
    - clipping: to `max_norm` by the latest norms of all stages. Later stages update first; N >= S, so by then they know
      this minibatch's gradient, and earlier stages the last one's.

    Args:
      model: `PlainModel`. stage_of_layer: the stage of each layer.
      delay, backward_delay: `(stage, position in the minibatch) -> versions`; equal ones are plain gradients.
      recompute: whether a backward computes a stage's activations again, from its inputs, by the weights it reads.
      annealing_steps, decay, predicts, max_norm: see above.
      spike: mu and eta of spike compensation, see above.
      mixed: `(forward's weights, backward's, batch) -> (loss, gradients)`; None: `mlp_mixed_gradient`.

    Yields, after each microbatch: the losses so far, and stage -> the versions of its weights, which the caller may
      change: a list with None for layers of other stages.
    """
    stages = sorted(set(stage_of_layer))
    tau, ahead = ({s: max(each(s, j) for j in range(N)) for s in stages} for each in (delay, backward_delay))
    ahead = {s: tau[s] - ahead[s] for s in stages}

    def of_stage(s, tree):
        return [leaf if stage_of_layer[i] == s else None for i, leaf in enumerate(tree)]

    def joined(per_stage):
        return [per_stage[s][i] for i, s in enumerate(stage_of_layer)]

    @jax.jit
    def gradient(forward, backward, batch):
        if backward is None:
            return jax.value_and_grad(lambda p: loss(model(p, batch["inputs"]), batch))(forward)
        if mixed is not None:
            return mixed(forward, backward, batch)
        again = stage_of_layer if recompute else None
        return mlp_mixed_gradient(forward, backward, batch, again)

    def plus(w, factor, v):
        return jax.tree.map(lambda a, b: a + np.asarray(factor, a.dtype) * b, w, v)

    update = jax.jit(lambda g, state, p: optimizer.update(g, state, p))
    versions = {s: [of_stage(s, params)] for s in stages}
    still = {s: jax.tree.map(np.zeros_like, versions[s][0]) for s in stages}
    movements, velocities = ({s: [still[s]] for s in stages} for _ in range(2))
    momenta = {s: [still[s]] for s in stages}
    squares = dict.fromkeys(stages, 0.0)
    states = {s: optimizer.init(of_stage(s, params)) for s in stages}
    losses, sums = [], None
    for k, batch in enumerate(microbatches):
        number, j = divmod(k, N)
        forward, backward = {}, {}
        for s in stages:
            t = max(number - delay(s, j), 0)
            forward[s] = plus(versions[s][t], tau[s] * predicts, movements[s][t])
            if spike is not None:
                forward[s] = plus(forward[s], -tau[s] * spike[1], momenta[s][t])
            t = max(number - backward_delay(s, j), 0)
            backward[s] = plus(versions[s][t], -ahead[s], velocities[s][t])
        forward, backward = joined(forward), joined(backward)
        same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(forward), jax.tree.leaves(backward)))
        value, grads = gradient(forward, None if same else backward, batch)
        losses.append(float(value))
        sums = grads if sums is None else jax.tree.map(np.add, sums, grads)
        if j == N - 1:
            mean = jax.tree.map(lambda g: np.asarray(g) / np.asarray(N, g.dtype), sums)
            for s in reversed(stages):
                mine = of_stage(s, mean)
                squares[s] = sum(np.sum(np.square(g)) for g in jax.tree.leaves(mine))
                norm = np.sqrt(sum(squares.values()))
                if max_norm is not None and norm > max_norm:
                    mine = jax.tree.map(lambda g: g * (max_norm / norm), mine)  # noqa: B023
                if spike is None:
                    updates, states[s] = update(mine, states[s], versions[s][-1])
                else:
                    mu, eta = spike
                    zero = still[s]
                    momenta[s].append(plus(plus(zero, mu, momenta[s][-1]), 1, mine))
                    updates = plus(zero, -eta * mu ** tau[s], momenta[s][-1])
                    b = sum(mu**i for i in range(tau[s]))
                    updates = plus(updates, -eta * b, mine)
                if annealing_steps is not None:
                    power = 1 - min(number / annealing_steps, 1)
                    scale = max(tau[s], 1) ** -power
                    updates = jax.tree.map(lambda u: u * scale, updates)  # noqa: B023
                movements[s].append(updates)
                velocity = velocities[s][-1]
                if decay is not None and ahead[s]:
                    gamma = decay ** (1 / ahead[s])
                    velocity = jax.tree.map(lambda v: gamma * v, velocity)  # noqa: B023
                    velocity = plus(velocity, 1 - gamma, updates)
                velocities[s].append(velocity)
                versions[s].append(optax.apply_updates(versions[s][-1], updates))
            sums = None
        yield losses, versions


def train_by_rhythm(model, stage_of_layer, params, loss, optimizers, microbatches, every, replicas, max_norm=None):
    """PipeDream where a stage updates after `every[s]` microbatches, keeping every weight version of every stage.

    Copy c of stage s runs the microbatches k with k mod r = c, in unit ticks. Its forward number i (from 0) begins when it
    has finished its first i - w microbatches, and reads the newest weights: those of all updates whose microbatches it
    has finished, up to the whole updates. Update v of the stage applies the mean gradient of the microbatches
    v every .. (v + 1) every - 1.

    With `max_norm` (no copies) an update is clipped by the norm over all stages. Of every other stage it counts the
    latest gradient applied by then, but none with a microbatch after its own. The weight gradient of microbatch k on
    stage s is at tick 3 k + 3 S - 1 - s, and the update after its last one.

    Args:
      model: `PlainModel`. stage_of_layer: the stage of each layer. optimizers: one for each stage.

    Returns: the loss of every microbatch, and the final weights of the updates that are complete.
    """
    S = len(every)
    warm = warm_up(replicas)

    def of_stage(s, tree):
        return [leaf if stage_of_layer[i] == s else None for i, leaf in enumerate(tree)]

    def joined(per_stage):
        return [per_stage[s][i] for i, s in enumerate(stage_of_layer)]

    def version(s, k):
        """How many updates the weights have had that the stage reads for microbatch k."""
        finished = max(k // replicas[s] - warm[s], 0)
        return finished * replicas[s] // every[s]

    gradient = jax.jit(jax.value_and_grad(lambda p, batch: loss(model(p, batch["inputs"]), batch)))
    versions = [[of_stage(s, params)] for s in range(S)]
    states = [optimizers[s].init(versions[s][0]) for s in range(S)]
    sums, losses = [None] * S, []
    squares, waiting = [{} for _ in range(S)], []

    def apply(tick, s, v, mean):
        if max_norm is not None:
            total = 0.0
            for j in range(S):
                finished = (tick - (3 * S - 1 - j)) // 3 + 1  # microbatches whose weight gradients stage j has by then
                end = min((v + 1) * every[s] // every[j], finished // every[j])
                total += squares[j].get(end - 1, 0.0)
            norm = np.sqrt(total)
            if norm > max_norm:
                mean = jax.tree.map(lambda g: g * (max_norm / norm), mean)
        updates, states[s] = optimizers[s].update(mean, states[s], versions[s][-1])
        versions[s].append(optax.apply_updates(versions[s][-1], updates))

    for k, batch in enumerate(microbatches):
        # Updates that a forward of this microbatch may read are of microbatches before it.
        value, grads = gradient(joined([versions[s][version(s, k)] for s in range(S)]), batch)
        losses.append(float(value))
        for s in range(S):
            mine = of_stage(s, grads)
            sums[s] = mine if sums[s] is None else jax.tree.map(np.add, sums[s], mine)
            if (k + 1) % every[s] == 0:
                mean = jax.tree.map(lambda g, p=every[s]: np.asarray(g) / np.asarray(p, g.dtype), sums[s])
                sums[s], v = None, k // every[s]
                squares[s][v] = sum(np.sum(np.square(g)) for g in jax.tree.leaves(mean))
                waiting.append((3 * k + 3 * S - 1 - s, s, v, mean))
        # A norm counts no gradient of a later microbatch, so all that it needs is known.
        for entry in sorted(waiting, key=lambda entry: entry[:3]):
            apply(*entry)
        waiting.clear()
    return losses, jax.tree.map(np.asarray, joined([versions[s][-1] for s in range(S)]))


def warm_up(replicas):
    """PipeDream's runtime: the forwards of a copy before its first backward, of R devices in all."""
    R = sum(replicas)
    return [(R - 1 - sum(replicas[:s])) // r for s, r in enumerate(replicas)]


def share(N, r, k):
    """How many of N microbatches copy k of r gets, if they go in turn."""
    return sum(b % r == k for b in range(N))


def delay_with_copies(replicas, N, ticks):
    """`(stage, position in the minibatch) -> versions` for `train_with_delays`, where stages have copies.

    Unit ticks: a copy runs a forward when it has finished all but w of the microbatches that it began before, and has
    applied the minibatches among them. Paired ticks: PipeMare's formula, for groups in place of microbatches.
    """

    def unit(s, b):
        w, (i, k) = warm_up(replicas)[s], divmod(b, replicas[s])
        return max(0, -((i - w) // share(N, replicas[s], k)))

    def paired(s, b):
        L, S = max(replicas), len(replicas)
        num_groups = -(-N // L)
        return max(0, -((b // L - 2 * (S - 1 - s) - 1) // num_groups))

    return paired if ticks == "paired" else unit


def mlp_mixed_gradient(forward, backward, batch, recomputed_stages=None):
    """Loss and gradients of `models.MLP` under mean cross-entropy, by hand: products backward use `backward`'s weights.

    With `batch["row_weights"]` it is the sum of the rows' losses times these. Activations and ReLU masks are those of
    the forward; or, given the stage of each layer, those that `backward`'s weights make of the inputs which the stage
    got.
    """

    def layer(i, weights, x):
        z = x @ weights[i]["linear"]["kernel"] + weights[i]["linear"]["bias"][None]
        return z if i == len(weights) - 1 else jnp.maximum(z, 0)

    def log_softmax(logits):
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    labels, inputs = batch["labels"], [batch["inputs"]]
    row_weights = batch.get("row_weights", np.full(len(labels), 1 / len(labels)))
    row_weights = row_weights.astype(inputs[0].dtype)[:, None]
    for i in range(len(forward)):
        inputs.append(layer(i, forward, inputs[i]))
    hot = jax.nn.one_hot(labels, inputs[-1].shape[-1], dtype=inputs[-1].dtype)
    value = -(log_softmax(inputs[-1]) * hot * row_weights).sum()
    # What each layer's backward remembers of its input and output.
    remembered = list(zip(inputs, inputs[1:]))
    if recomputed_stages is not None:
        x = None
        for i, stage in enumerate(recomputed_stages):
            if i == 0 or stage != recomputed_stages[i - 1]:
                x = inputs[i]
            y = layer(i, backward, x)
            remembered[i] = x, y
            x = y
    delta = (jnp.exp(log_softmax(remembered[-1][1])) - hot) * row_weights
    grads = []
    for i, (x, y) in reversed(list(enumerate(remembered))):
        if i < len(forward) - 1:
            delta = delta * (y > 0)
        grads.append({"linear": {"bias": delta.sum(axis=0), "kernel": x.T @ delta}})
        delta = delta @ backward[i]["linear"]["kernel"].T
    return value, grads[::-1]
