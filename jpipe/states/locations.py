"""Where the packed arrays of a state hold the leaves of the model.

A leaf of the weights lies in one block. A leaf of the optimizer's state whose replicas share it lies in
several, one on each replica.
"""

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.engine.state import PipelineState
from jpipe.lowering.array_rows import ArrayRows
from jpipe.packing import Place
from jpipe.program import Program
from jpipe.stages.cut import Stages
from jpipe.stages.optimizer import StageUpdate, seen_by_optimizer
from jpipe.stages.update_groups import Piece
from jpipe.stages.vocabulary import PartedLeaf, Unit


@dataclasses.dataclass(frozen=True)
class Block:
    """Numbers of a leaf that lie together in a packed array of a state.

    Attributes:
      lead: indices of the array's leading axes; the first axis goes over devices.
      start: first index on the axis behind them.
      stop: one past the last index on that axis.
      view: shape of the leaf from which the numbers are taken.
      index: their index in it; the block has `leaf.reshape(view)[index]`. A slice is `(start, stop)`.
      shape: of what is stored, if it goes on beyond the end of the leaf; `()`: it does not.
    """

    lead: tuple[int, ...]
    start: int
    stop: int
    view: tuple[int, ...]
    index: tuple[int | tuple[int | None, int | None], ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def in_array(self) -> tuple:
        """The index of the block in its array."""
        return (*self.lead, slice(self.start, self.stop))

    @property
    def in_leaf(self) -> tuple:
        """The index of the block in the leaf of shape `view`."""
        return tuple(slice(*i) if isinstance(i, tuple) else i for i in self.index)


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a leaf is in the packed arrays of a state.

    Attributes:
      group: the field of `PipelineState`.
      array: name of the array in the group.
      shape: shape of the leaf.
      blocks: of the array; several if replicas share the leaf.
    """

    group: str
    array: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, group: str, lead: tuple, place: Place, row: int = 0) -> "Location":
        """The location of leaf `row` of a place."""
        block = _block(lead, place, place.shape, (), row)
        return cls(group, place.array, place.shape, (block,))

    def leaf(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The leaf, from what its blocks hold."""
        if len(values) == 1 and not self.blocks[0].index:
            return values[0].reshape(self.shape)
        leaf = np.empty(self.shape, values[0].dtype)
        for block, value in zip(self.blocks, values, strict=True):
            part = leaf.reshape(block.view)[block.in_leaf]
            numbers = value.reshape(block.shape or part.shape)
            part[...] = numbers[tuple(slice(n) for n in part.shape)]
        return leaf


def _lead(
    rows: ArrayRows, place: Place, device: int, row: int, part: int = 0
) -> tuple[int]:
    """The leading index of a place.

    Args:
      rows: of the arrays of its group.
      place: the place.
      device: of its stage.
      row: of the stage's rows on the device.
      part: what the first axis is split over beside the devices: the replica.
    """
    position = part * rows.num_devices + device
    return (position * rows.number(place.array) + rows.row(place.array, device, row),)


def _block(
    lead: tuple, place: Place, view: tuple[int, ...], index: tuple, row: int = 0
) -> Block:
    start = int(place.start(row))
    plain = tuple((i.start, i.stop) if isinstance(i, slice) else i for i in index)
    return Block(tuple(map(int, lead)), start, start + place.block[0], view, plain)


class Locations(NamedTuple):
    """Where a state holds the leaves of the model.

    Attributes:
      params: one nested dict per layer: the newest weights.
      mutable_state: one nested dict per layer.
      optimizer_state: one dict per layer, path -> location. Stages hold the same tree with None for the
        layers of other stages, so a path is the same at any cut. A leaf whose path ends with that of
        a weight belongs to the weight's layer, and only the dict of that layer has it. Other leaves,
        such as a count of updates, are in the dict of every layer of the stage.
      loss_scale: the arrays of a loss scale that moves; empty without one.
    """

    params: list
    mutable_state: list
    optimizer_state: list[dict[str, Location]]
    loss_scale: dict[str, Location]

    def of_layers(self, layers: Container[int]) -> set[Location]:
        """The locations of the leaves of some layers, and of all single numbers, which stages may share."""
        trees = (self.params, self.mutable_state, self.optimizer_state)
        return {
            location
            for tree in trees
            for i, of_layer in enumerate(tree)
            for location in jax.tree.leaves(of_layer)
            if i in layers or math.prod(location.shape) == 1
        } | set(self.loss_scale.values())


def locations(program: Program, rounds: int) -> Locations:
    """Where the states of a program hold the leaves of the model.

    Args:
      program: of the states.
      rounds: of the state; they decide which version of the weights is the newest.
    """
    stages, lowered, scale = (
        program.stages,
        program.engine.lowered,
        program.engine.numbers.loss_scale,
    )
    rows, of_groups = lowered.rows, program.engine.array_rows
    newest = rows.newest_rows(rounds)
    found = Locations(
        params=[None] * len(stages.layers),
        mutable_state=[None] * len(stages.layers),
        optimizer_state=[{} for _ in stages.layers],
        loss_scale={},
    )
    owner_of = {
        _path(i, path): i
        for i, layer in enumerate(stages.layers)
        for path, _ in jax.tree.leaves_with_path(layer.parameters)
    }
    for s in range(stages.num_stages):
        d, chunk = program.placement[s]
        version = int(rows.first[d, chunk] + newest[s])
        for i, run, row in stages.layer_runs(s):
            layer = stages.layers[i]
            for trees, name, own, places, like in (
                (found.params, "parameters", version, run.parameters, layer.parameters),
                (found.mutable_state, "mutable_state", chunk, run.state, layer.state),
            ):
                leaves = [
                    Location.of(name, _lead(of_groups[name], place, d, own), place, row)
                    for place in places
                ]
                trees[i] = jax.tree.structure(like).unflatten(leaves)
        layers = tuple(stages.layers_of(s))
        of_state = _locations_of_state(program, s)
        _add_state(found, of_state, layers, owner_of)
    for number, unit in enumerate(stages.vocabulary.units):
        of_state = _locate_unit(program, number, unit, int(newest[unit.home]), found)
        _add_state(found, of_state, tuple(unit.places), owner_of)
    if scale is not None and scale.growth_interval is not None:
        for name in scale.shapes():
            block = Block((), 0, 1, (1,))
            found.loss_scale[name] = Location("loss_scale", name, (1,), (block,))
    return found


def _add_state(
    found: Locations,
    of_state: Mapping[str, Location],
    layers: Sequence[int],
    owner_of: Mapping[str, int],
) -> None:
    """Adds locations of the optimizer's state for some layers to `found`.

    Args:
      found: is filled in.
      of_state: path -> location.
      layers: that share the leaves which belong to no weight.
      owner_of: path of a parameter -> its layer.
    """
    for path, location in of_state.items():
        owner = next((i for p, i in owner_of.items() if path.endswith(p)), None)
        for i in layers if owner is None else [owner]:
            found.optimizer_state[i][path] = location


def _locations_of_state(program: Program, s: int) -> dict[str, Location]:
    """Path -> location of the leaves of a stage's optimizer state."""
    lowered, update = program.engine.lowered, update_of(program, s)
    rows = program.engine.array_rows["optimizer_state"]

    def block(piece: Piece) -> Block:
        copy, replica = divmod(piece.share or 0, update.replicas.data)
        d, chunk = lowered.copies[s][copy]
        lead = _lead(rows, piece.place, d, chunk, replica)
        return _block(lead, piece.place, piece.view, piece.index)

    return {
        path: Location(
            "optimizer_state",
            pieces[0].place.array,
            tuple(shape.shape),
            tuple(block(piece) for piece in pieces),
        )
        for (path, shape), pieces in zip(
            optimizer_paths(program, tuple(program.stages.layers_of(s))).items(),
            update.state,
            strict=True,
        )
    }


def places_of_leaf(program: Program, path: str) -> list[tuple[str, Block]]:
    """Name of an array of the optimizer's state, and block in it, of every copy of a leaf that stages and replicas have.

    `Locations` has one copy, which is enough to read.

    Args:
      program: of the state.
      path: of the leaf, which belongs to no weight.
    """
    engine, stages = program.engine, program.stages
    rows = engine.array_rows["optimizer_state"]
    num_states = engine.layout.num_replicas if engine.shares_updates else 1
    found = []
    for s, copies in enumerate(engine.lowered.copies):
        paths = list(optimizer_paths(program, tuple(stages.layers_of(s))))
        if path not in paths:
            continue
        for piece in update_of(program, s).state[paths.index(path)]:
            for share in range(len(copies) * num_states):
                if piece.share in (None, share):
                    (d, chunk), replica = (
                        copies[share // num_states],
                        share % num_states,
                    )
                    lead = _lead(rows, piece.place, d, chunk, replica)
                    block = _block(lead, piece.place, piece.view, piece.index)
                    found.append((piece.place.array, block))
    for number, unit in enumerate(stages.vocabulary.units):
        update = engine.updates.of_units[number].update
        paths = list(optimizer_paths(program, tuple(unit.places)))
        if path in paths:
            (piece,) = update.state[paths.index(path)]
            for row in range(num_states * rows.num_devices):
                block = _block((row,), piece.place, piece.view, piece.index)
                found.append((piece.place.array, block))
    return found


def _locate_unit(
    program: Program, number: int, unit: Unit, newest: int, found: Locations
) -> dict[str, Location]:
    """Adds where the weights of a unit of vocabulary layers are to `found`.

    Args:
      program: of the states.
      number: of the unit.
      unit: the unit.
      newest: slot of the newest version of its weights.
      found: is filled in.

    Returns:
      Path -> location of the leaves of the optimizer's state of the unit.
    """
    lowered, stages = program.engine.lowered, program.stages
    V = int(lowered.rows.num_versions[unit.home])
    D = program.settings.schedule.num_devices

    def parted(group: str, leads: list, place: Place, leaf: PartedLeaf) -> Location:
        shape, before = tuple(leaf.aval.shape), [slice(None)] * leaf.dim
        blocks = []
        for d, lead in enumerate(leads):
            first, last = (min(n * leaf.num_rows, shape[leaf.dim]) for n in (d, d + 1))
            block = _block(lead, place, shape, (*before, slice(first, last)))
            stored = tuple(leaf.part.shape)
            blocks.append(dataclasses.replace(block, shape=stored))
        return Location(group, place.array, shape, tuple(blocks))

    versions = [(d * V + newest,) for d in range(D)]
    for layer in unit.layers:
        places = unit.places[layer.index]
        leaves = [
            parted("parameters", versions, place, leaf)
            for place, leaf in zip(places, layer.leaves, strict=True)
        ]
        tree = jax.tree.structure(layer.layer.parameters)
        found.params[layer.index] = tree.unflatten(leaves)
        found.mutable_state[layer.index] = stages.layers[layer.index].state
    rows = [(d,) for d in range(D)]
    update, _, parted_state = program.engine.updates.of_units[number]
    paths = optimizer_paths(program, tuple(unit.places))
    return {
        path: Location.of("optimizer_state", rows[0], piece.place)
        if leaf is None
        else parted("optimizer_state", rows, piece.place, leaf)
        for path, leaf, (piece,) in zip(paths, parted_state, update.state, strict=True)
    }


def read(
    state: PipelineState, wanted: Any, needed: Container[Location] | None = None
) -> Any:
    """Host copies of the leaves at locations, one array of the state after the other.

    Every process must call it with the same locations. A part of an array that is on a device of another
    process is sent to all devices, one device's part at a time, so no device ever holds the whole model.

    Args:
      state: the state.
      wanted: a tree of locations.
      needed: the locations whose leaves this process keeps. None: all.

    Returns:
      The same tree of arrays; abstract arrays where a leaf is not needed.
    """
    leaves, tree = jax.tree.flatten(wanted)
    found: list[Any] = []
    values: list[list[Any]] = [[None] * len(leaf.blocks) for leaf in leaves]
    of_part: dict[tuple, list[tuple[int, int]]] = {}
    for i, location in enumerate(leaves):
        array = getattr(state, location.group)[location.array]
        rows = array.sharding.shard_shape(array.shape)[0]
        for b, block in enumerate(location.blocks):
            part = block.lead[0] // rows if block.lead else 0
            key = location.group, location.array, part
            of_part.setdefault(key, []).append((i, b))
        found.append(jax.ShapeDtypeStruct(location.shape, array.dtype))
    for (group, name, part), numbers in sorted(of_part.items()):
        kept = [(i, b) for i, b in numbers if needed is None or leaves[i] in needed]
        host = _part_on_host(getattr(state, group)[name], part, bool(kept))
        for i, b in kept:
            index = leaves[i].blocks[b].in_array
            if leaves[i].blocks[b].lead:
                index = (index[0] % host.shape[0], *index[1:])
            values[i][b] = host[index].copy()
            if all(value is not None for value in values[i]):
                found[i], values[i] = leaves[i].leaf(values[i]), []
    return tree.unflatten(found)


def _part_on_host(array: jax.Array, part: int, is_needed: bool) -> Any:
    """The rows of one position along the first axis, on the host; None if they are not needed."""
    rows = array.sharding.shard_shape(array.shape)[0]
    here = [
        s for s in array.addressable_shards if (s.index[0].start or 0) == part * rows
    ]
    if (
        here
        and here[0].data.shape[1:] == array.shape[1:]
        and array.is_fully_addressable
    ):
        return np.asarray(here[0].data)
    assert isinstance(array.sharding, NamedSharding)
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    rows_of = jax.jit(_rows_of, static_argnums=(1, 2), out_shardings=everywhere)
    sent = rows_of(array, part * rows, rows).addressable_data(0)
    return np.asarray(sent) if is_needed else None


def _rows_of(array: jax.Array, start: int, size: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, start, start + size)


def _path(layer: int, path: tuple) -> str:
    """The path of a parameter in what the optimizer sees."""
    return jax.tree_util.keystr((jax.tree_util.SequenceKey(layer), *path))


def owners(stages: Stages) -> list[tuple[int, ...]]:
    """The layers of each stage, and of each unit of vocabulary layers."""
    of_stages = [tuple(stages.layers_of(s)) for s in range(stages.num_stages)]
    return of_stages + [tuple(unit.places) for unit in stages.vocabulary.units]


def optimizer_paths(
    program: Program, layers: Sequence[int]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape of each leaf of the optimizer's state for some layers, in order. No leaf is a part."""
    stages = program.stages
    parameters = [layer.parameters for layer in stages.layers]
    tree = seen_by_optimizer(stages, layers, parameters)
    shapes = jax.eval_shape(program.settings.optimizer.init, tree)
    return {jax.tree_util.keystr(p): a for p, a in jax.tree.leaves_with_path(shapes)}


def update_of(program: Program, stage: int) -> StageUpdate:
    """The update of a stage."""
    updates = program.engine.updates
    return updates.programs[updates.program_of_stage[stage]]
