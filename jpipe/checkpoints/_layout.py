"""The text that describes the layout of a training state in the arrays of a checkpoint.

A checkpoint has the packed arrays as the devices hold them, so a save moves nothing between devices. The
*layout* says where each leaf of each layer is, and this is all that a reader with other stages, another
schedule or another mesh needs.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jpipe.engine.state import PipelineState, num_rounds
from jpipe.layers.model_tree import is_whole
from jpipe.program import Program
from jpipe.states.locations import (
    LAYER_ARRAYS,
    WHOLE_ARRAYS,
    Leaves,
    Location,
    PackedBlock,
    locations,
)
from jpipe.states.portable import is_in_flight


def saved_arrays(state: PipelineState, in_flight: bool) -> dict[str, jax.Array]:
    """The arrays of a state (or their shapes) that a checkpoint has, by name.

    With nothing in flight, what is private to a device is zero and is left out.
    """
    private = state.in_flight() if in_flight else {}
    leaves = jax.tree.leaves_with_path({**state.kept(), **private})
    return {jax.tree_util.keystr(path): a for path, a in leaves if a.size}


def array_name(location: Location) -> str:
    """The name of a location's array in a checkpoint."""
    keys = map(jax.tree_util.DictKey, (location.group, location.array))
    return jax.tree_util.keystr(tuple(keys))


def layout_of(program: Program, rounds: int, in_flight: bool) -> dict[str, Any]:
    """The layout of a state, of values that JSON has.

    Args:
      program: the program of the state.
      rounds: the number of rounds of the state.
      in_flight: whether microbatches are in flight.
    """
    settings = program.settings
    schedule, mesh = settings.schedule, settings.mesh
    table = hashlib.sha256()
    for part in settings.parts["schedule"]:
        table.update(part if isinstance(part, bytes) else str(part).encode())
    shapes = saved_arrays(program.abstract_state, in_flight)
    leaves_at = locations(program, rounds)
    copies = {}
    if schedule.has_copies:  # the other copies of a stage have no locations
        copies["copies"] = [list(map(list, c)) for c in program.engine.lowered.copies]
    return {
        "schedule": schedule.name,
        "table": table.hexdigest(),
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "starts": list(program.stages.starts),
        **copies,
        **({"whole_model": True} if is_whole(program.stages.layers) else {}),
        **({"placement": _plain(settings.model.placement[:2])} if settings.model.placement else {}),
        **{n: str(c) for n, c in settings.communication.compressors.items()},
        "mesh": {name: n for name, n in mesh.shape.items() if n > 1},
        "shard_optimizer": settings.communication.shard_optimizer,
        "in_flight": in_flight,
        "optimizer": program.optimizer_identity,
        "hyperparams": {n: a.tolist() for n, a in program.first_hyperparams.items()},
        "arrays": {n: [str(a.dtype), list(a.shape)] for n, a in shapes.items()},
        **{name: [_tree_to_json(tree) for tree in trees] for name, trees in leaves_at.layers.items()},
        "optimizer_state": [
            {path: _to_json(leaf) for path, leaf in leaves.items()} for leaves in leaves_at.optimizer_state
        ],
        **{name: {n: _to_json(leaf) for n, leaf in leaves.items()} for name, leaves in leaves_at.whole.items()},
    }


def layout_of_state(state: PipelineState) -> dict[str, Any]:
    """The layout of a state, of values that JSON has."""
    return layout_of(state.program, num_rounds(state), is_in_flight(state))


_COMPRESSORS = ("compress_messages", "compress_gradients", "accumulate_gradients")
_SCHEDULE = ("schedule", "num_microbatches", "table")
_IN_WORDS = (
    "schedule",
    "num_stages",
    "num_microbatches",
    "starts",
    "copies",
    "mesh",
    "shard_optimizer",
    *_COMPRESSORS,
)


def differences(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Describes the differences between a pipeline's layout and a saved one; empty if there are none.

    With nothing in flight the schedule does not count. The optimizer is compared by `portable.check_same_optimizer`.
    """
    ignored = ("optimizer", "hyperparams", *(() if saved["in_flight"] else _SCHEDULE))
    # Only tables with copies have "copies", and only pipelines with compressors or a placement name them.
    keys = dict.fromkeys([*mine, "copies", "placement", *_COMPRESSORS])
    different = [k for k in keys if k not in ignored and mine.get(k) != saved.get(k)]
    in_words = [key for key in _IN_WORDS if key in different]
    return [f"{k} {mine.get(k)!r} instead of {saved.get(k)!r}" for k in in_words] or different


def first_hyperparams(layout: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The first values of the injected hyperparameters of a saved training, see `Program.first_hyperparams`."""
    saved = layout.get("hyperparams", {})  # old checkpoints do not say it
    return {path: np.asarray(value) for path, value in saved.items()}


def has_learners(layout: Mapping[str, Any]) -> bool:
    """Returns whether a layout is of replicas that train apart."""
    return any(name.startswith("['anchor']") for name in layout["arrays"])


def has_compression(layout: Mapping[str, Any]) -> bool:
    """Returns whether a layout has arrays that compressors keep."""
    return any("_compression'" in name for name in layout["arrays"])


def locations_in(layout: Mapping[str, Any]) -> Leaves:
    """The locations of the leaves in a layout. One from before an array was added does not have it."""
    names = [array.leaves.name for array in LAYER_ARRAYS if array.leaves is not None]
    return Leaves(
        layers={name: [_tree_from_json(tree) for tree in layout[name]] for name in names if name in layout},
        optimizer_state=[
            {path: _from_json(leaf) for path, leaf in leaves.items()} for leaves in layout["optimizer_state"]
        ],
        whole={
            array.name: {n: _from_json(leaf) for n, leaf in layout[array.name].items()}
            for array in WHOLE_ARRAYS
            if array.name in layout
        },
    )


def dtype_of(layout: Mapping[str, Any], location: Location) -> np.dtype:
    """The dtype of a leaf."""
    return jax.numpy.dtype(layout["arrays"][array_name(location)][0])


def _to_json(location: Location) -> list:
    return _plain(dataclasses.astuple(location))


def _plain(value: Any) -> Any:
    """A value with lists in place of tuples, as JSON has it."""
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _from_json(values: Any) -> Location:
    group, array, shape, blocks = values
    return Location(
        group,
        array,
        tuple(shape),
        tuple(
            PackedBlock(
                lead=tuple(lead),
                start=start,
                stop=stop,
                view=tuple(view),
                index=tuple(map(_index, index)),
                shape=tuple(stored),
            )
            for lead, start, stop, view, index, stored in blocks
        ),
    )


def _index(value: Any) -> Any:
    """A slice is a list in JSON."""
    return tuple(value) if isinstance(value, list) else value


def _tree_to_json(tree: Any) -> list:
    """A nested dict as a list of `[keys, leaf]`. Keys may be integers, which JSON's objects have not."""
    return [[[_key(key) for key in path], _to_json(leaf)] for path, leaf in jax.tree.leaves_with_path(tree)]


def _key(key: Any) -> Any:
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key


def _tree_from_json(leaves: list) -> dict:
    return unflatten_dict({tuple(keys): _from_json(leaf) for keys, leaf in leaves})
