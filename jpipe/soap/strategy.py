"""Strategies: the split of each operator, and the devices on which its shards run."""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpipe._util.foreign import read_json, shown
from jpipe._util.suggest import did_you_mean
from jpipe.soap.graph import PARAMETER, REDUCTION, Operator, OperatorGraph
from jpipe.soap.regions import followed, plain, read_all


@dataclasses.dataclass(frozen=True)
class Config:
    """A split of an operator.

    Attributes:
      degrees: the number of equal parts of each loop.
      devices: the device of each shard. Shards are numbered with the last loop running fastest.
    """

    degrees: tuple[int, ...]
    devices: tuple[int, ...]


Strategy = tuple[Config, ...]
"""One `Config` per operator of a graph."""


def check_strategy(graph: OperatorGraph, strategy: Sequence[Config], num_devices: int) -> None:
    """Raises ValueError, which names the operator, if a strategy cannot be."""
    if len(strategy) != len(graph.operators):
        raise ValueError(
            f"the strategy has {len(strategy)} configurations, and the graph {len(graph.operators)} operators. It "
            "belongs to another graph."
        )
    for operator, config in zip(graph.operators, strategy):
        check_config(operator, config, num_devices)


def check_config(operator: Operator, config: Config, num_devices: int) -> None:
    """Raises ValueError if an operator cannot be split so."""
    name, degrees = f"operator {shown(operator.name)}", config.degrees
    if len(degrees) != len(operator.loops):
        raise ValueError(f"{name} has {len(operator.loops)} loops, got {len(degrees)} degrees: {degrees}.")
    for i, (loop, degree) in enumerate(zip(operator.loops, degrees)):
        if degree < 1 or loop.size % degree:
            raise ValueError(
                f"{name}: loop {i} ({loop.kind}) has {loop.size} turns, which cannot be split into {degree} equal "
                f"parts. Choose a divisor of {loop.size}."
            )
        if degree > 1 and not loop.can_split:
            raise ValueError(f"{name}: loop {i} ({loop.kind}) cannot be split, got degree {degree}. Give it degree 1.")
    if math.prod(degrees) != len(config.devices):
        raise ValueError(
            f"{name}: degrees {degrees} make {math.prod(degrees)} shards, got {len(config.devices)} devices."
        )
    wrong = [d for d in config.devices if not 0 <= d < num_devices]
    if wrong:
        raise ValueError(f"{name}: there is no device {wrong[0]}; the devices are 0..{num_devices - 1}.")


@functools.lru_cache(None)
def shard_boxes(sizes: tuple[int, ...], degrees: tuple[int, ...]) -> np.ndarray:
    """`[shards, loops, 2]`, the box of loops of each shard."""
    parts = np.indices(degrees).reshape(len(degrees), math.prod(degrees)).T
    lengths = np.array(sizes, np.int64) // np.array(degrees, np.int64)
    low = parts * lengths
    return np.stack([low, low + lengths], axis=-1).reshape(len(parts), len(sizes), 2)


def local_shape(operator: Operator, degrees: Sequence[int]) -> tuple[int, ...]:
    """Turns of each loop in one shard."""
    return tuple(loop.size // d for loop, d in zip(operator.loops, degrees))


class Regions:
    """The boxes of arrays that shards write and read, each computed once. Scalars have one dim of one element."""

    def __init__(self, graph: OperatorGraph):
        self._graph = graph
        self._reads: dict[tuple, np.ndarray] = {}
        self._results: dict[tuple, np.ndarray] = {}
        self._writes: dict[tuple, np.ndarray] = {}

    def _boxes(self, operator: int, degrees: tuple[int, ...]) -> np.ndarray:
        sizes = tuple(loop.size for loop in self._graph.operators[operator].loops)
        return shard_boxes(sizes, degrees)

    def reads(self, operator: int, position: int, degrees: tuple[int, ...]) -> np.ndarray:
        """`[shards, rank, 2]`, the box of an input that each shard reads."""
        key = operator, position, degrees
        if key not in self._reads:
            access = self._graph.operators[operator].inputs[position].access
            boxes = read_all(access, self._boxes(operator, degrees))
            self._reads[key] = _with_rank(boxes)
        return self._reads[key]

    def results(self, operator: int, tensor: int, degrees: tuple[int, ...]) -> np.ndarray:
        """`[shards, rank, 2]`, the box of a tensor that each shard computes, wholly or as a part of a sum."""
        key = operator, tensor, degrees
        if key not in self._results:
            value = self._graph.tensors[tensor]
            boxes = read_all((plain(value.shape, value.writes),), self._boxes(operator, degrees))
            self._results[key] = _with_rank(boxes)
        return self._results[key]

    def writes(self, operator: int, tensor: int, degrees: tuple[int, ...]) -> np.ndarray:
        """`[shards, rank, 2]`, the box of its operator's tensor that each shard owns.

        Shards that differ in a part of a sum alone have partial results of one box. After these are added up, every one
        of the shards owns an equal part of the box, along its longest dim.
        """
        key = operator, tensor, degrees
        if key not in self._writes:
            boxes = self.results(operator, tensor, degrees)
            _, group, counts = np.unique(boxes, axis=0, return_inverse=True, return_counts=True)
            count = counts[group.ravel()]
            if count.max() > 1:
                boxes = _owned(boxes, group.ravel(), count)
            self._writes[key] = boxes
        return self._writes[key]


def _with_rank(boxes: np.ndarray) -> np.ndarray:
    if boxes.shape[1]:
        return boxes
    return np.tile(np.array([[[0, 1]]], np.int64), (len(boxes), 1, 1))


def _owned(boxes: np.ndarray, group: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The part of its box that each member of a group owns."""
    order = np.argsort(group, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group))[:-1]])
    rank = np.empty(len(group), np.int64)
    rank[order] = np.arange(len(group)) - starts[group[order]]
    axis = int(np.argmax(boxes[0, :, 1] - boxes[0, :, 0]))  # of boxes of equal shape
    low = boxes[:, axis, 0]
    length = boxes[:, axis, 1] - low
    owned = boxes.copy()
    # Rounded up, so that the first members own what cannot be shared.
    owned[:, axis, 0] = low - (-rank * length // count)
    owned[:, axis, 1] = low - (-(rank + 1) * length // count)
    return owned


# Ready-made strategies.


def placed(count: int, num_devices: int, start: int = 0) -> tuple[int, ...]:
    return tuple((start + k) % num_devices for k in range(count))


def _largest_divisor(size: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if size % d == 0 and limit % d == 0)


def data_parallel(graph: OperatorGraph, num_devices: int) -> Strategy:
    """Splits every operator by samples over as many devices as divide them; others run on device 0."""
    return tuple(_by_samples(operator, num_devices) for operator in graph.operators)


def _by_samples(operator: Operator, num_devices: int) -> Config:
    degrees = [1] * len(operator.loops)
    for i, loop in enumerate(operator.loops):
        if loop.samples and loop.can_split:
            degrees[i] = _largest_divisor(loop.size, num_devices)
            break
    return Config(tuple(degrees), placed(math.prod(degrees), num_devices))


def model_parallel(graph: OperatorGraph, num_devices: int) -> Strategy:
    """Every operator runs whole, on one device: runs of operators of about equal FLOPs follow each other over the
    devices.
    """
    work = np.array([o.flops * (1 + o.backward_factor) + 1 for o in graph.operators])
    middle = np.cumsum(work) - work / 2
    stage = np.minimum(middle / work.sum() * num_devices, num_devices - 1).astype(int)
    return tuple(Config((1,) * len(o.loops), (int(d),)) for o, d in zip(graph.operators, stage))


def one_weird_trick(graph: OperatorGraph, num_devices: int) -> Strategy:
    """Convolutions by samples, dense layers by their output features (Krizhevsky 2014, arXiv:1404.5997).

    Operators that follow a dense layer and have no weights keep its split of the features where they can; all others
    are split by samples.
    """
    result: list[Config] = []
    for operator in graph.operators:
        config = _by_samples(operator, num_devices)
        if operator.kind == "dot_general":
            config = _by_features(operator, num_devices) or config
        result.append(config)
    return tuple(result)


def _by_features(operator: Operator, num_devices: int) -> Config | None:
    for i, loop in enumerate(operator.loops):
        degree = _largest_divisor(loop.size, num_devices)
        if loop.kind == PARAMETER and loop.can_split and degree > 1:
            degrees = tuple(degree if k == i else 1 for k in range(len(operator.loops)))
            return Config(degrees, placed(degree, num_devices))
    return None


def megatron(graph: OperatorGraph, num_devices: int) -> Strategy:
    """Matrix products by columns, then by rows (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

    A product of a weight and a whole array is split by its columns. What follows keeps that split, attention by its
    heads, up to
    the next product with a weight: it is split by its rows, a sum of parts. Its result is whole again for what follows.
    """
    tensors = graph.tensors
    split_dim: dict[int, int] = {}  # tensor -> the dim that is split
    result: list[Config] = []
    for operator in graph.operators:
        loop = None
        has_weight = False
        for operand in operator.inputs:
            has_weight |= tensors[operand.tensor].weight is not None
            dim = split_dim.get(operand.tensor)
            if dim is not None and loop is None:
                # The loop that follows the split dim, whatever the views between do to it.
                loop = followed(operand.access)[dim]
        if loop is None and operator.kind == "dot_general" and has_weight:
            columns = [
                i
                for i, looped in enumerate(operator.loops)
                if looped.kind == PARAMETER and looped.size % num_devices == 0
            ]
            loop = columns[-1] if columns else None
        splits = loop is not None and operator.loops[loop].can_split and operator.loops[loop].size % num_devices == 0
        if not splits:
            result.append(_by_samples(operator, 1))
            continue
        assert loop is not None
        degrees = tuple(num_devices if i == loop else 1 for i in range(len(operator.loops)))
        result.append(Config(degrees, placed(num_devices, num_devices)))
        if operator.loops[loop].kind != REDUCTION:
            for number in operator.outputs:
                writes = tensors[number].writes
                if loop in writes:
                    split_dim[number] = writes.index(loop)
    return tuple(result)


EXPERTS = {"megatron": megatron, "one_weird_trick": one_weird_trick}
"""Strategies that experts designed, by name."""


# Files.


def as_records(graph: OperatorGraph, strategy: Sequence[Config]) -> list[dict]:
    """A strategy as `{"operator", "degrees", "devices"}` per operator; degrees are by kind and number of the loop."""
    return [
        {
            "operator": operator.name,
            "degrees": {
                f"{loop.kind}{i}": degree for i, (loop, degree) in enumerate(zip(operator.loops, config.degrees))
            },
            "devices": list(config.devices),
        }
        for operator, config in zip(graph.operators, strategy)
    ]


def from_records(graph: OperatorGraph, records: Sequence[Mapping], num_devices: int) -> Strategy:
    """The strategy that `as_records` wrote.

    Raises:
      ValueError: if it does not fit the graph or the devices.
    """
    names = [operator.name for operator in graph.operators]
    given: dict[str, Mapping] = {}
    if not isinstance(records, list | tuple):
        raise ValueError(f"a strategy is a list, got {shown(records)}.")
    for record in records:
        if not isinstance(record, Mapping) or set(record) != _FIELDS:
            raise ValueError(f"a strategy is a list of `operator`, `degrees` and `devices`, got {shown(record)}.")
        name = record["operator"]
        if name not in names:
            raise ValueError(f"the graph has no operator {shown(name)}.{did_you_mean(name, names)}")
        if not isinstance(record["degrees"], Mapping):
            raise ValueError(
                f"operator {shown(name)}: degrees are by kind and number of the loop, got {shown(record['degrees'])}."
            )
        given[name] = record
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"the strategy lacks operator {shown(missing[0])}.")
    strategy = []
    for operator in graph.operators:
        record = given[operator.name]
        wanted = [f"{loop.kind}{i}" for i, loop in enumerate(operator.loops)]
        if set(record["degrees"]) != set(wanted):
            raise ValueError(
                f"operator {shown(operator.name)} has the loops {', '.join(wanted)}, got "
                f"{shown(list(record['degrees']))}."
            )
        degrees = [record["degrees"][name] for name in wanted]
        strategy.append(
            Config(
                _whole_numbers(operator.name, "degrees", degrees),
                _whole_numbers(operator.name, "devices", record["devices"]),
            )
        )
    check_strategy(graph, strategy, num_devices)
    return tuple(strategy)


_FIELDS = {"operator", "degrees", "devices"}


def _whole_numbers(operator: str, what: str, values: Any) -> tuple[int, ...]:
    """The degrees or the devices of an operator, as a file has them."""
    are_whole = isinstance(values, list | tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) for value in values
    )
    if not are_whole:
        raise ValueError(f"operator {shown(operator)}: {what} must be whole numbers, got {shown(values)}.")
    return tuple(values)


def save_strategy(
    path: str | os.PathLike[str],
    graph: OperatorGraph,
    strategy: Sequence[Config],
    num_devices: int,
) -> None:
    """Writes a strategy as JSON."""
    content = {"num_devices": num_devices, "strategy": as_records(graph, strategy)}
    pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")


def load_strategy(path: str | os.PathLike[str], graph: OperatorGraph, num_devices: int) -> Strategy:
    """Reads a strategy from JSON.

    Raises:
      ValueError: if the file holds none, or it does not fit the graph or the devices.
      OSError: if the file cannot be read.
    """
    content = read_json(path)
    try:
        records, made_for = content["strategy"], content["num_devices"]
    except (KeyError, TypeError):
        raise ValueError(f"`{path}` holds no strategy: it must be JSON with `num_devices` and `strategy`.") from None
    if made_for != num_devices:
        raise ValueError(
            f"`{path}` is for {shown(made_for)} devices, got {shown(num_devices)}. Search again for {num_devices}."
        )
    return from_records(graph, records, num_devices)
