"""Batch norm in microbatches, as torchgpipe's deferred batch norm.

A microbatch is normalised by its own statistics. The running statistics change once per minibatch,
by the statistics of the whole minibatch. A layer therefore runs with momentum 0: the state that it
leaves holds the mean and the variance of this microbatch alone. The means over the microbatches of
`mean` and of `variance + mean^2` give the mean and the variance of the minibatch.

`momenta` maps the path of each batch norm in the state to its momentum.

References:
  Kim et al., "torchgpipe", arXiv:2004.09910, section 3.2 (deferred batch normalisation).
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

Momenta = Mapping[tuple, float]


def to_statistics(state: dict, momenta: Momenta) -> dict:
    """The state after one microbatch, with `variance + mean^2` for each variance.

    Unlike variances, these values can be averaged over microbatches.
    """
    flat = flatten_dict(state)
    for path in momenta:
        mean, variance = flat[*path, "mean"], flat[*path, "var"]
        flat[*path, "var"] = variance + jnp.square(mean)
    return unflatten_dict(flat)


def commit(state: dict, statistics: dict, momenta: Momenta) -> dict:
    """The state after a minibatch, from the mean of the statistics of its microbatches.

    Running statistics decay once. All other state becomes the mean over the microbatches.
    """
    old, new = flatten_dict(state), flatten_dict(statistics)
    for path, momentum in momenta.items():
        mean, second_moment = new[*path, "mean"], new[*path, "var"]
        of_minibatch = {
            "mean": mean,
            "var": jnp.maximum(second_moment - jnp.square(mean), 0),
        }
        for name, value in of_minibatch.items():
            running = old[*path, name]
            new[*path, name] = momentum * running + (1 - momentum) * value
    return unflatten_dict(new)
