"""Measures the optimizer's update of every kind of layer."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jpipe import packing
from jpipe.layers.avals import num_bytes, real_dtype, squares, zeros
from jpipe.layers.equations import Equations
from jpipe.layers.trace import Traced
from jpipe.packing import Leaf, Packing
from jpipe.plan._loops import (
    Measured,
    ProgressBar,
    TimedLoop,
    TimedProgram,
    groups_of,
    num_rows_of,
    packed,
    random_like,
)
from jpipe.stages.extra_args import EXTRA_ARGS, STALE_PARAMS


class LayerUpdate(NamedTuple):
    """The optimizer's update of one layer.

    `equations` computes `(*parameters, *gradients, *state, *extra) -> [*parameters, *state]`, where
    `extra` are the arguments that `jpipe.stages.extra_args.EXTRA_ARGS` names.
    """

    equations: Equations
    parameters: Sequence
    state: Sequence
    norm_dtype: np.dtype


def trace_updates(traced: Traced, optimizer) -> tuple[list[LayerUpdate], list[int]]:
    """The distinct updates of the layers, and the number of each layer's update."""
    optimizer = optax.with_extra_args_support(optimizer)
    everything = [layer.trained for layer in traced.layers]
    norm_dtype = real_dtype(everything)
    extra = [jax.ShapeDtypeStruct((), t) for t in (np.float32, np.float32, norm_dtype)]
    update_of_text: dict[str, LayerUpdate] = {}
    update_of_layer = []
    for i, parameters in enumerate(everything):
        tree: list = [None] * len(everything)
        tree[i] = parameters
        leaves, treedef = jax.tree.flatten(tree)
        state_leaves, state_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, tree))

        n = len(leaves)

        def update(*args, treedef=treedef, state_tree=state_tree, n=n):
            weights, gradients = (
                treedef.unflatten(args[:n]),
                treedef.unflatten(args[n : 2 * n]),
            )
            changes, state = optimizer.update(
                gradients,
                state_tree.unflatten(args[2 * n : -len(EXTRA_ARGS)]),
                weights,
                **dict(zip((arg.name for arg in EXTRA_ARGS), args[-len(EXTRA_ARGS) :])),
                # The time to read another version of the weights is not counted.
                **{STALE_PARAMS: weights},
            )
            return jax.tree.leaves((optax.apply_updates(weights, changes), state))

        equations = Equations.trace(update, *leaves, *leaves, *state_leaves, *extra)
        text = equations.text()
        traced_update = LayerUpdate(equations, leaves, state_leaves, norm_dtype)
        update_of_text.setdefault(text, traced_update)
        update_of_layer.append(list(update_of_text).index(text))
    return list(update_of_text.values()), update_of_layer


def measure_updates(
    updates: Sequence[LayerUpdate],
    update_of_layer: Sequence[int],
    programs: Sequence[str],
    min_seconds: float,
    devices: Sequence[jax.Device],
    progress: ProgressBar,
) -> list[dict[str, Measured]]:
    """Measures each update if "update" is among `programs`.

    Arguments and result as of `measure_layers`.
    """
    if "update" not in programs:
        return [{} for _ in updates]
    results = [{"update": Measured()} for _ in updates]
    order = [u for u in update_of_layer if updates[u].parameters]
    distinct = sorted({*order})
    num_rows = {u: num_rows_of(order.count(u), devices, updates[u].parameters) for u in distinct}
    sizes = [
        num_rows[u] * num_bytes((*updates[u].parameters, *updates[u].parameters, *updates[u].state)) for u in distinct
    ]
    groups = groups_of(sizes)
    progress.total += len(groups) - 1
    for group in groups:
        looped = [distinct[m] for m in group]
        progress(f"update of {len(looped)} kinds of layer")
        members = [_update(updates[u], num_rows[u]) for u in looped]
        loop = TimedLoop(members, [looped.index(u) for u in order if u in looped], devices)
        for u, measured in zip(looped, loop.measure(min_seconds), strict=True):
            results[u]["update"] = measured
    return results


def _update(update: LayerUpdate, num_rows: int) -> TimedProgram:
    pack, state = (Packing.of([[*map(Leaf, a)]]) for a in (update.parameters, update.state))
    rng = np.random.default_rng(0)
    weights = [random_like(rng, a) for a in update.parameters]

    def body(reads, carry, slot, row):
        names = "parameters", "gradients", "state"
        places = {n: p.places[0] for n, p in zip(names, (pack, pack, state))}
        leaves = {n: packing.read_all(carry[n], places[n], [row]) for n in names}
        sums = [jnp.sum(squares(a, update.norm_dtype)) for a in leaves["gradients"]]
        norm = jnp.sqrt(functools.reduce(jnp.add, sums))
        # 0, which the compiler does not know.
        delay = lax.min(row, np.int32(0)).astype(np.float32)
        flat = list(itertools.chain(*leaves.values()))
        num_weights = len(update.parameters)

        def compute():
            # In a branch: otherwise XLA reads the inputs again, from copies, after the writes.
            return update.equations(*flat, delay, delay, norm)

        before = [*leaves["parameters"], *leaves["state"]]
        new = lax.cond(row >= 0, compute, lambda: before)
        new = {
            "parameters": new[:num_weights],
            "gradients": [jnp.zeros_like(a) for a in leaves["gradients"]],
            "state": new[num_weights:],
        }
        return {n: packing.write_all(carry[n], places[n], [row], new[n]) for n in names}

    carry = {
        "parameters": packed(pack, weights, num_rows),
        "gradients": packed(pack, weights, num_rows),
        "state": packed(state, zeros(update.state), num_rows),
    }
    return TimedProgram(body, {}, carry, num_rows)
