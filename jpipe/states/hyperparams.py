"""Injected hyperparameters of a training state: read and set."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jpipe._util.suggest import did_you_mean
from jpipe.engine.state import PipelineState, num_rounds
from jpipe.program import Program
from jpipe.stages.hyperparams import Hyperparam, hyperparams
from jpipe.states.locations import (
    PackedBlock,
    locations,
    optimizer_paths,
    owners,
    read,
)


def values(state: PipelineState) -> dict[str, np.ndarray]:
    """Name -> value of every injected hyperparameter. Every process must call it."""
    state_leaves = locations(state.program, num_rounds(state)).optimizer_state
    where = {
        h.name: next(leaves[h.path] for leaves in state_leaves if h.path in leaves) for h in _hyperparams(state.program)
    }
    return read(state, where)


def with_values(state: PipelineState, new: Mapping[str, Any]) -> PipelineState:
    """The state with other values, by name. It shares its other arrays with the given state.

    Raises:
      ValueError: if there is no hyperparameter of a name, or it cannot be set to the value.
    """
    known = {h.name: h for h in _hyperparams(state.program)}
    return _with_leaves(
        state,
        {known[n].path: v for n, v in new.items() if _check_name(n, known)},
    )


def begun_anew(state: PipelineState, before: Mapping[str, np.ndarray] | None) -> PipelineState:
    """A state from another pipeline, with the first values of this pipeline where they differ from those of the other.

    Args:
      state: the state of the pipeline.
      before: path -> the first value in the pipeline that the state comes from; None: it is not known.
    """
    mine = state.program.first_hyperparams
    changed = {
        path: value
        for path, value in mine.items()
        if before and path in before and not np.array_equal(before[path], value)
    }
    return _with_leaves(state, changed)


def _hyperparams(program: Program) -> list[Hyperparam]:
    paths = [p for layers in program.stages.owners for p in optimizer_paths(program, layers)]
    return hyperparams(list(dict.fromkeys(paths)))


def _check_name(name: str, known: Mapping[str, Hyperparam]) -> bool:
    if name in known and not known[name].is_scheduled:
        return True
    if name in known:
        raise ValueError(
            f"`{name}` is computed from the number of updates by the schedule that `optax.inject_hyperparams` got, and "
            "would be computed again in the next step. Make a pipeline with another schedule, and let it `adopt` the "
            "state."
        )
    if not known:
        raise ValueError(
            f"the optimizer's state has no `{name}`: it holds no hyperparameters. Let Optax keep them there, for "
            "example by `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`, or make a pipeline with another "
            "optimizer of the same form, and let it `adopt` the state."
        )
    paths = [h.path for h in known.values() if h.path.endswith(f"['{name}']")]
    if paths:
        raise ValueError(
            f"{len(paths)} hyperparameters are named `{name}`. Give the path of one, or of each: "
            f"`with_hyperparams(state, **{{path: value}})` with a path of {paths}."
        )
    raise ValueError(
        f"the optimizer's state has no hyperparameter `{name}`, it has {sorted(known)}.{did_you_mean(name, known)}"
    )


def _with_leaves(state: PipelineState, leaves: Mapping[str, Any]) -> PipelineState:
    """The state with other values of leaves of the optimizer's state, by path, in all their copies."""
    blocks: dict[str, list[tuple[PackedBlock, np.ndarray]]] = {}
    shapes = {
        path: shape
        for layers in state.program.stages.owners
        for path, shape in optimizer_paths(state.program, layers).items()
    }
    holders = list(owners(state.program)) if leaves else []
    for path, value in leaves.items():
        leaf = _checked(path, value, shapes[path])
        for owner in holders:
            stored = owner.optimizer_state.get(path)
            if stored is not None:
                listed = blocks.setdefault(stored.location.array, [])
                listed += [(block, leaf) for block in stored.blocks]
    changed = {name: _written(state.optimizer_state[name], array_blocks) for name, array_blocks in blocks.items()}
    return dataclasses.replace(state, optimizer_state={**state.optimizer_state, **changed})


def _checked(path: str, value: Any, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """A value as a leaf like another one."""
    try:
        given = np.asarray(value)
        if not np.issubdtype(given.dtype, np.number):
            raise TypeError
        return np.broadcast_to(given, like.shape).astype(like.dtype)
    except (TypeError, ValueError):
        raise ValueError(
            f"{path} of the optimizer's state is a number {like.dtype}{list(like.shape)}, and cannot be {value!r}."
        ) from None


def _written(array: jax.Array, blocks: list[tuple[PackedBlock, np.ndarray]]) -> jax.Array:
    """An array with other values in blocks of its rows: each process writes those on its devices."""
    rows = array.sharding.shard_shape(array.shape)[0]
    parts = []
    for shard in array.addressable_shards:
        first = shard.index[0].start or 0
        here = [(b, v) for b, v in blocks if first <= b.lead[0] < first + rows]
        data = shard.data
        if here:
            host = np.array(data)
            for block, leaf in here:
                block.write(host, first, leaf)
            data = jax.device_put(host, data.sharding)
        parts.append(data)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
