"""The places of the leaves of the model in the packed arrays of a state.

`owners` walks the leaves of a state, one stage after the other, and says for each in which blocks of which array it
lies: one copy of it, which readers take, and all of its copies, versions and shares, which writers fill. A leaf of the
weights is one block. A leaf of the optimizer's state whose replicas share it is several, one on each replica.
"""

import dataclasses
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.engine.state import STATE_ARRAYS, PipelineState
from jpipe.engine.state_arrays import Adopted, OnReplicas, StateArray
from jpipe.layers.model_tree import path_in_model
from jpipe.lowering.array_rows import ArrayRows
from jpipe.packing import Place
from jpipe.program import Program
from jpipe.stages.optimizer_tree import seen_by_optimizer
from jpipe.stages.stage_update import StageUpdate
from jpipe.stages.update_groups import Piece

LAYER_ARRAYS = tuple(array for array in STATE_ARRAYS if array.leaves is not None)
"""The arrays that hold leaves of each layer."""

WHOLE_ARRAYS = tuple(a for a in STATE_ARRAYS if a.adopted is Adopted.WHOLE)
"""The arrays that a state takes from another one as they are: one number each, equal on all devices."""


@dataclasses.dataclass(frozen=True)
class PackedBlock:
    """Numbers of a leaf that lie together in a packed array of a state.

    Attributes:
      lead: indices of the array's leading axes; the first axis goes over devices.
      start: first index on the axis behind them.
      stop: one past the last index on that axis.
      view: shape of the leaf from which the numbers are taken.
      index: their index in it; the block has `leaf.reshape(view)[index]`. A slice is `(start, stop)`.
      shape: the shape of the stored block, if it goes on beyond the end of the leaf; `()`: it does not.
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

    def write(self, rows: np.ndarray, first: int, leaf: np.ndarray) -> None:
        """Writes the block's numbers of a leaf into rows of its array, from row `first` on."""
        numbers = leaf.reshape(self.view)[self.in_leaf]
        if self.shape:
            missing = zip(self.shape, numbers.shape, strict=True)
            numbers = np.pad(numbers, [(0, n - k) for n, k in missing])
        target = rows[(self.lead[0] - first, *self.in_array[1:])]
        target[...] = numbers.reshape(target.shape)


@dataclasses.dataclass(frozen=True)
class Location:
    """The place of a leaf in the packed arrays of a state.

    Attributes:
      group: the field of `PipelineState`.
      array: name of the array in the group.
      shape: shape of the leaf.
      blocks: the blocks of the array; several if replicas share the leaf.
    """

    group: str
    array: str
    shape: tuple[int, ...]
    blocks: tuple[PackedBlock, ...]

    def leaf(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Assembles the leaf from the numbers of its blocks."""
        if len(values) == 1 and not self.blocks[0].index:
            return values[0].reshape(self.shape)
        leaf = np.empty(self.shape, values[0].dtype)
        for block, value in zip(self.blocks, values, strict=True):
            part = leaf.reshape(block.view)[block.in_leaf]
            numbers = value.reshape(block.shape or part.shape)
            part[...] = numbers[tuple(slice(n) for n in part.shape)]
        return leaf


class Stored(NamedTuple):
    """A leaf in a state.

    Attributes:
      location: one copy of the leaf, of the newest version.
      blocks: all blocks that hold numbers of it: of every copy, version and share.
    """

    location: Location
    blocks: tuple[PackedBlock, ...]


class Leaves(NamedTuple):
    """Something for each leaf of a training: its location in a state, or its numbers.

    Attributes:
      layers: name of `LayerLeaves`, "params" and "mutable_state" -> one nested dict per layer.
      optimizer_state: one dict per layer, path -> leaf. Stages hold the same tree with None for the
        layers of other stages, so a path is the same at any cut. A leaf whose path ends with that of
        a weight belongs to the weight's layer, and only the dict of that layer has it. Other leaves,
        such as a count of updates, are in the dict of every layer of the stage.
      whole: name of an array of `WHOLE_ARRAYS` -> its arrays, `[1]` each; empty where they do not move.
    """

    layers: dict[str, list]
    optimizer_state: list[dict[str, Any]]
    whole: dict[str, dict[str, Any]]

    @property
    def params(self) -> list:
        """The newest weights, one nested dict per layer."""
        return self.layers["params"]

    def locations_in(self, layers: Container[int]) -> set:
        """The locations in some layers, and all single numbers, which stages may share."""
        trees = (*self.layers.values(), self.optimizer_state)
        return {
            location
            for tree in trees
            for i, layer_tree in enumerate(tree)
            for location in jax.tree.leaves(layer_tree)
            if i in layers or math.prod(location.shape) == 1
        } | set(jax.tree.leaves(self.whole))


# -- The walk


@dataclasses.dataclass(frozen=True)
class Owner:
    """A stage, or a unit of vocabulary layers: the parts that one update changes.

    Attributes:
      layers: the layers.
      home: the stage whose delays its updates have.
      devices: positions along the axis "stage" of the devices that have it.
      update: its update.
      layer_leaves: name of an array -> layer -> its leaves, in the order of `LayerLeaves.like`.
      weights: for each leaf that the optimizer sees, the weights of all layers that are tied to it.
      optimizer_state: path -> leaf.
    """

    layers: tuple[int, ...]
    home: int
    devices: tuple[int, ...]
    update: StageUpdate
    layer_leaves: Mapping[str, Mapping[int, Sequence[Stored]]]
    weights: Sequence[Sequence[Stored]]
    optimizer_state: Mapping[str, Stored]


def owners(program: Program, rounds: int = 0) -> Iterator[Owner]:
    """The stages, then the units of vocabulary layers.

    Args:
      program: the program of the states.
      rounds: the number of rounds of the state; it decides which version of the weights is the newest.
    """
    newest = program.engine.lowered.rows.newest_rows(rounds)
    for number, home in enumerate(program.engine.lowered.owner_homes):
        yield _owner(program, number, int(newest[home]))


def _owner(program: Program, number: int, newest: int) -> Owner:
    engine, stages = program.engine, program.stages
    home, copies = engine.lowered.owner_homes[number], engine.lowered.owner_copies[number]
    update, num_versions = engine.updates.owner_updates[number], int(engine.lowered.rows.num_versions[home])

    def rows_of(array: StateArray) -> list[tuple[int, int]]:
        """`(device, row)` of each copy and version, the newest of all copies first."""
        if not array.has_versions:
            return list(copies)
        is_stage = number < stages.num_stages  # a unit has arrays of its own
        first = [(d, int(engine.lowered.rows.first[d, chunk]) if is_stage else 0) for d, chunk in copies]
        order = sorted(range(num_versions), key=lambda v: v != newest)
        return [(d, row + v) for v in order for d, row in first]

    def stored(array: StateArray, place: Place, row: int) -> Stored:
        rows = engine.array_rows[array.rows or array.name]
        piece = Piece(None, place, place.shape, (), stages.vocabulary.parted.get(place))
        copies = [
            (d, _lead(rows, place.array, d, r, replica))
            for replica in range(_num_states(program, array.name))
            for d, r in rows_of(array)
        ]
        return _stored(array.name, [(piece, copies)], row)

    weights = next(a for a in LAYER_ARRAYS if a.name == "parameters")
    return Owner(
        layers=stages.owners[number],
        home=home,
        devices=tuple(d for d, _ in copies),
        update=update,
        layer_leaves={
            array.name: {
                layer: [stored(array, place, row) for place in places]
                for layer, places, row in array.leaves.places(stages, number)
            }
            for array in LAYER_ARRAYS
            if array.leaves is not None and engine.layout[array.name].shapes
        },
        weights=[[stored(weights, place, row) for place, row in tied_places] for tied_places in update.parameters],
        optimizer_state=_stored_state(program, number),
    )


def _num_states(program: Program, array: str) -> int:
    """The number of replicas with numbers of their own in an array."""
    layout = program.engine.layout
    return 1 if layout[array].held is OnReplicas.EQUAL else layout.num_replicas


def _stored_state(program: Program, number: int) -> dict[str, Stored]:
    """Path -> leaf of the optimizer's state of an owner."""
    engine, copies = program.engine, program.engine.lowered.owner_copies[number]
    rows = engine.array_rows["optimizer_state"]
    num_states = _num_states(program, "optimizer_state")

    def copies_of(piece: Piece) -> list[tuple[int, tuple[int]]]:
        """The device and the lead of the piece, on every replica and copy that have it."""
        return [
            (d, _lead(rows, piece.place.array, d, row, replica))
            for replica, (share, (d, row)) in itertools.product(range(num_states), enumerate(copies))
            if piece.share in (None, share * num_states + replica)
        ]

    paths = optimizer_paths(program, program.stages.owners[number])
    return {
        path: _stored("optimizer_state", [(piece, copies_of(piece)) for piece in pieces], shape=tuple(like.shape))
        for (path, like), pieces in zip(paths.items(), engine.updates.owner_updates[number].state, strict=True)
    }


def _stored(
    group: str,
    pieces: Sequence[tuple[Piece, Sequence[tuple[int, tuple]]]],
    row: int = 0,
    shape: tuple[int, ...] | None = None,
) -> Stored:
    """A leaf.

    Args:
      group: the field of `PipelineState`.
      pieces: the pieces of the leaf, each with the device and the lead of every copy of it. The parts of one copy
        follow each other.
      row: the row at the places.
      shape: the shape of the leaf; None: that of its only piece.
    """
    first, blocks = [], []
    for piece, copies in pieces:
        piece_blocks = [_block(piece, row, d, lead) for d, lead in copies]
        first += piece_blocks[: 1 if piece.parted is None else piece.parted.num_parts]
        blocks += piece_blocks
    piece, _ = pieces[0]
    shape = blocks[0].view if shape is None else shape
    return Stored(Location(group, piece.place.array, shape, tuple(first)), tuple(blocks))


def _lead(rows: ArrayRows, array: str, device: int, row: int, replica: int = 0) -> tuple[int]:
    """The index on the first axis of an array, which goes over replicas and devices.

    Args:
      rows: the rows of the arrays of its group.
      array: the array.
      device: the device of the stage.
      row: the row among the device's rows.
      replica: the index along the axis "data", if replicas hold different numbers.
    """
    position = replica * rows.num_devices + device
    return (position * rows.number(array) + rows.row(array, device, row),)


def _block(piece: Piece, row: int, device: int, lead: tuple) -> PackedBlock:
    """What a device has of a piece, in row `row` of its place."""
    place, view, index, shape = piece.place, piece.view, piece.index, ()
    if piece.parted is not None:
        view, shape = tuple(piece.parted.aval.shape), tuple(piece.parted.part.shape)
        index = (*[slice(None)] * piece.parted.dim, piece.parted.rows(device))
    start = int(place.start(row))
    plain = tuple((i.start, i.stop) if isinstance(i, slice) else i for i in index)
    return PackedBlock(tuple(map(int, lead)), start, start + place.block[0], view, plain, shape)


def locations(program: Program, rounds: int) -> Leaves:
    """The places of the leaves of the model in the states of a program.

    Args:
      program: the program of the states.
      rounds: the number of rounds of the state; it decides which version of the weights is the newest.
    """
    stages, scale = program.stages, program.engine.numbers.loss_scale
    number_of = {
        jax.tree_util.keystr(path_in_model(stages.layers, i, path)): i
        for i, layer in enumerate(stages.layers)
        for path, _ in jax.tree.leaves_with_path(layer.parameters)
    }
    trees: dict[str, list] = {}
    for array in LAYER_ARRAYS:
        assert array.leaves is not None
        # A layer without leaves has an empty tree.
        like = [array.leaves.like(layer) for layer in stages.layers]
        trees[array.leaves.name] = [{} if jax.tree.leaves(t) else t for t in like]
    optimizer_state: list[dict[str, Location]] = [{} for _ in stages.layers]
    for owner in owners(program, rounds):
        for array in LAYER_ARRAYS:
            assert array.leaves is not None
            for i, stored in owner.layer_leaves.get(array.name, {}).items():
                tree = jax.tree.structure(array.leaves.like(stages.layers[i]))
                layer_tree = tree.unflatten([leaf.location for leaf in stored])
                trees[array.leaves.name][i] = layer_tree
        for path, leaf in owner.optimizer_state.items():
            layer = next((i for p, i in number_of.items() if path.endswith(p)), None)
            for i in owner.layers if layer is None else [layer]:
                optimizer_state[i][path] = leaf.location
    moves = scale is not None and scale.growth_interval is not None
    whole = {}
    for array in WHOLE_ARRAYS:
        names = program.engine.layout[array.name].shapes if moves else ()
        block = PackedBlock((), 0, 1, (1,))
        whole[array.name] = {name: Location(array.name, name, (1,), (block,)) for name in names}
    return Leaves(trees, optimizer_state, whole)


# -- Reading


def read(state: PipelineState, wanted: Any, needed: Container[Location] | None = None) -> Any:
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
    arrays: list[Any] = []
    values: list[list[Any]] = [[None] * len(leaf.blocks) for leaf in leaves]
    parts: dict[tuple, list[tuple[int, int]]] = {}
    for i, location in enumerate(leaves):
        array = getattr(state, location.group)[location.array]
        rows = array.sharding.shard_shape(array.shape)[0]
        for b, block in enumerate(location.blocks):
            part = block.lead[0] // rows if block.lead else 0
            key = location.group, location.array, part
            parts.setdefault(key, []).append((i, b))
        arrays.append(jax.ShapeDtypeStruct(location.shape, array.dtype))
    for (group, name, part), numbers in sorted(parts.items()):
        kept = [(i, b) for i, b in numbers if needed is None or leaves[i] in needed]
        host = _part_on_host(getattr(state, group)[name], part, bool(kept))
        for i, b in kept:
            index = leaves[i].blocks[b].in_array
            if leaves[i].blocks[b].lead:
                index = (index[0] % host.shape[0], *index[1:])
            values[i][b] = host[index].copy()
            if all(value is not None for value in values[i]):
                arrays[i], values[i] = leaves[i].leaf(values[i]), []
    return tree.unflatten(arrays)


def _part_on_host(array: jax.Array, part: int, is_needed: bool) -> Any:
    """The rows of one position along the first axis, on the host; None if they are not needed."""
    rows = array.sharding.shard_shape(array.shape)[0]
    here = [s for s in array.addressable_shards if (s.index[0].start or 0) == part * rows]
    if here and here[0].data.shape[1:] == array.shape[1:] and array.is_fully_addressable:
        return np.asarray(here[0].data)
    assert isinstance(array.sharding, NamedSharding)
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    rows_of = jax.jit(_slice_rows, static_argnums=(1, 2), out_shardings=everywhere)
    sent = rows_of(array, part * rows, rows).addressable_data(0)
    return np.asarray(sent) if is_needed else None


def _slice_rows(array: jax.Array, start: int, size: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, start, start + size)


def optimizer_paths(program: Program, layers: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape of each leaf of the optimizer's state for some layers, in order. No leaf is a part."""
    stages = program.stages
    parameters = [layer.parameters for layer in stages.layers]
    tree = seen_by_optimizer(stages, layers, parameters)
    shapes = jax.eval_shape(program.settings.optimizer.init, tree)
    return {jax.tree_util.keystr(p): a for p, a in jax.tree.leaves_with_path(shapes)}
