"""The configurations among which a search chooses."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jpipe._util.foreign import shown
from jpipe.soap.graph import Operator, OperatorGraph
from jpipe.soap.refusals import refusal
from jpipe.soap.specs import factor_axes
from jpipe.soap.strategy import Config

_FEW_DEVICES = 4
"""On so many devices all sets of them are tried, in all orders."""


class Space:
    """The SOAP space of a graph on equal devices.

    A configuration of an operator is a degree per loop, the order in which the shards of the split loops follow each
    other, and a
    regular set of devices: `k` shards run on the devices `start + stride * j`. All configurations of an operator are
    equally likely in `draw`, so proposals are symmetric.

    Args:
      graph: the operators.
      num_devices: the number of devices.
      kinds: the kinds of loops that may be split, a part of "SAPR".
      whole: whether operators must use all devices or, where nothing divides so, as many as they can: no operator
        parallelism.
      executable: whether all strategies must be such that `jpipe.soap.apply` can run them on
        `device_mesh(num_devices)`. It implies `whole`: where fewer devices divide an operator, the others hold copies.
      in_stages: whether all strategies must be such that `jpipe.Pipeline` can run them. Then an operator is split along
        one loop, and only if no shard reads a part of its neighbour, or it is not split. It implies `executable`.
      irregular: whether `irregular_configs` has any: sets of devices at unequal distances, and numbers of shards that
        do not divide the number of devices. Chains do not draw them, the polish of a search tries them at last.

    Raises:
      ValueError: if a number or letter cannot be, or `irregular` is asked of strategies that use whole meshes.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        num_devices: int,
        *,
        kinds: str = "SAPR",
        whole: bool = False,
        executable: bool = False,
        in_stages: bool = False,
        irregular: bool = False,
    ):
        if num_devices < 1:
            raise ValueError(f"`num_devices` must be at least 1, got {shown(num_devices)}.")
        unknown = set(kinds) - set("SAPR")
        if unknown:
            raise ValueError(f'`kinds` must be letters of "SAPR", got {shown(kinds)}.')
        if irregular and (whole or executable or in_stages):
            raise ValueError(
                "`irregular` sets of devices leave some devices out, which strategies for a mesh cannot do: leave out "
                "`irregular`, or `whole`, `executable` and `in_stages`."
            )
        self.graph = graph
        self.num_devices = num_devices
        self.is_irregular = irregular
        self._kinds = kinds
        self._whole = whole or executable or in_stages
        self._in_stages = in_stages
        self._axes: Mapping[str, int] | None = None
        if in_stages:
            self._axes = {"device": num_devices}
        elif executable:
            self._axes = factor_axes("device", num_devices)
        self._configs: dict[int, tuple[Config, ...]] = {}
        self._lists: dict[tuple, tuple[Config, ...]] = {}  # of operators that are alike

    @property
    def num_operators(self) -> int:
        return len(self.graph.operators)

    def configs(self, operator: int) -> tuple[Config, ...]:
        """All configurations of an operator, in a fixed order."""
        if operator not in self._configs:
            self._configs[operator] = self._allowed(self.graph.operators[operator])
        return self._configs[operator]

    def irregular_configs(self, operator: int, config: Config) -> Iterator[Config]:
        """Configurations that are not among `configs`, none unless the space is `irregular`.

        On at most four devices these are all with different devices. On more, those near to `config`: one device for
        another, two devices exchanged, and other numbers of shards on some of its devices or on these and others.

        Args:
          operator: the number of an operator.
          config: its configuration.
        """
        if not self.is_irregular:
            return
        regular = set(self.configs(operator))
        for devices in _irregular_devices(config.devices, self.num_devices):
            for other in self._on_devices(operator, devices):
                if other not in regular and other != config:
                    yield other

    def on_devices(self, operator: int, devices: tuple[int, ...]) -> tuple[Config, ...]:
        """The configurations of an operator on exactly these devices in this order, if the space is `irregular`."""
        return self._on_devices(operator, devices) if self.is_irregular else ()

    def _on_devices(self, operator: int, devices: tuple[int, ...]) -> tuple[Config, ...]:
        sizes = self._sizes(self.graph.operators[operator])
        return tuple(
            Config(degrees, devices)
            for degrees in degree_vectors(sizes, len(devices))
            if math.prod(degrees) == len(devices)
        )

    def _sizes(self, operator: Operator) -> tuple[int, ...]:
        """The turns of each loop, 1 of those that may not be split."""
        return tuple(loop.size if loop.can_split and loop.kind in self._kinds else 1 for loop in operator.loops)

    def _allowed(self, operator: Operator) -> tuple[Config, ...]:
        sizes = self._sizes(operator)
        key: tuple = sizes
        if self._axes is not None:  # what `refusal` looks at
            accesses = tuple(read.access for read in operator.inputs)
            key = sizes, operator.kind, operator.loops, accesses
        if key not in self._lists:
            self._lists[key] = tuple(dict.fromkeys(self._list(operator, sizes)))
        return self._lists[key]

    def _list(self, operator: Operator, sizes: tuple[int, ...]) -> list[Config]:
        configs = [
            Config(degrees, tuple(devices[k] for k in order))
            for degrees in degree_vectors(sizes, self.num_devices)
            for order in _orders(degrees)
            for devices in _placements(math.prod(degrees), self.num_devices)
        ]
        allowed = [config for config in configs if self._is_allowed(operator, config)]
        if not self._whole:
            return allowed
        most = max(len(config.devices) for config in allowed)
        return [config for config in allowed if len(config.devices) == most]

    def _is_allowed(self, operator: Operator, config: Config) -> bool:
        if self._axes is None:
            return True
        options = {"in_stages": self._in_stages}
        return refusal(operator, config, self._axes, **options) is None

    def can_run(self, strategy: Sequence[Config]) -> bool:
        """Returns whether a mesh can run a strategy, if the space is of strategies that one can."""
        return all(map(self._is_allowed, self.graph.operators, strategy))

    def draw(self, operator: int, rng: np.random.Generator) -> Config:
        """One of the configurations, each as likely as the others."""
        configs = self.configs(operator)
        return configs[int(rng.integers(len(configs)))]

    @property
    def size(self) -> int:
        """Number of strategies."""
        return math.prod(len(self.configs(i)) for i in range(len(self.graph.operators)))


def degree_vectors(sizes: tuple[int, ...], num_devices: int):
    """All degrees whose product is at most `num_devices` and divides it, of loops of the given sizes."""

    def extend(chosen: tuple[int, ...], left: int):
        if len(chosen) == len(sizes):
            yield chosen
            return
        for degree in _divisors(left):
            if sizes[len(chosen)] % degree == 0:
                yield from extend((*chosen, degree), left // degree)

    yield from extend((), num_devices)


@functools.lru_cache(None)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def _orders(degrees: tuple[int, ...]) -> list[list[int]]:
    """Per order of the split loops, the place of each shard (numbered with the last loop fastest) on the devices."""
    split = [i for i, degree in enumerate(degrees) if degree > 1]
    count = math.prod(degrees)
    shards = np.arange(count).reshape([degrees[i] for i in split])
    orders = []
    for permutation in itertools.permutations(range(len(split))):
        numbered = shards.transpose(permutation).ravel()
        place = np.empty(count, int)
        place[numbered] = np.arange(count)
        orders.append(place.tolist())
    return orders


@functools.lru_cache(None)
def _placements(count: int, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Sets of `count` devices at equal distances, which together cover all devices for every distance."""
    result = []
    for stride in _divisors(num_devices // count):
        for block in range(num_devices // (count * stride)):
            for offset in range(stride):
                start = block * count * stride + offset
                result.append(tuple(start + stride * j for j in range(count)))
    return tuple(dict.fromkeys(result))


def _irregular_devices(devices: tuple[int, ...], num_devices: int) -> Iterator[tuple[int, ...]]:
    """Sets of devices in order: all on few devices, or those near to `devices`."""
    if num_devices <= _FEW_DEVICES:
        for count in range(1, num_devices + 1):
            yield from itertools.permutations(range(num_devices), count)
        return
    others = [device for device in range(num_devices) if device not in devices]
    for i, j in itertools.combinations(range(len(devices)), 2):
        swapped = list(devices)
        swapped[i], swapped[j] = devices[j], devices[i]
        yield tuple(swapped)
    for i, other in itertools.product(range(len(devices)), others):
        yield (*devices[:i], other, *devices[i + 1 :])
    ring = [*devices, *others]
    for count, first in itertools.product(range(1, num_devices + 1), range(num_devices)):
        if count != len(devices):
            yield tuple(ring[(first + k) % num_devices] for k in range(count))


def random_strategy(space: Space, rng: np.random.Generator) -> tuple[Config, ...]:
    """A configuration drawn for every operator."""
    return tuple(space.draw(i, rng) for i in range(len(space.graph.operators)))


def describe(operator: Operator, config: Config) -> str:
    """Degrees and devices in words.

    Example: "S4 P2 on 0-7"
    """
    parts = [f"{loop.kind}{degree}" for loop, degree in zip(operator.loops, config.degrees) if degree > 1]
    return f"{' '.join(parts) or 'whole'} on {ranges(config.devices)}"


def ranges(devices) -> str:
    """Numbers in few words.

    Example:
      >>> ranges((0, 1, 2, 5)), ranges((3, 1))
      ('0-2,5', '1,3')
    """
    numbers = sorted(set(devices))
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        short = str(first) if first == last else f"{first}-{last}"
        parts.append(short if last - first != 1 else f"{first},{last}")
    return ",".join(parts)
