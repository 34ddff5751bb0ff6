"""Compiled loops that time programs of layers and updates in the form in which the engine runs them.

    subjects: kinds of layer, the loss ──┐
    updates ─────────────────────────────┴─> members ── one loop over all members ──> Measured, per member

The engine runs a layer in a compiled loop over microbatches. The loop reads weights from packed
arrays, writes stashes into rings, and adds gradients to accumulators, all in place. A layer is
measured in a loop of the same kind: the start of a program and the copying of its results are then
not part of the time, and the cost of the rings is.

The time of a program also depends on the program before it. A layer in a loop of its own finds its
data in the nearest cache; in training the caches hold other layers' data. So one loop contains all
kinds of layer, and an argument of the loop gives the order of their turns. The loop runs each kind
alone, and in between all layers in model order. If a round in model order takes longer than the sum
of its turns, every layer's time is scaled by that factor.
"""

import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.layers.avals import num_bytes
from jpipe.packing import Packing

PROGRAMS = (
    "forward",
    "forward_and_stash",
    "backward",
    "input_grad",
    "weight_grad",
    "update",
)
"""The programs of a layer that can be measured; see `LayerProfile`."""

SLOTS = 4  # slots of a ring: what is written and read moves through memory, as in training
_TOGETHER = 2**28  # bytes of one loop, more than caches hold; more layers need more loops
_FEWEST = 3  # calls per median, at least
_CALL_SECONDS = 0.1  # of a call: long, because a call starts with cold caches


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The seconds of a program: the median of several calls, and the quartiles."""

    median: float = 0.0
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Seconds":
        """The quartiles of the seconds of several calls.

        Example:
          >>> Seconds.of([5, 1, 2, 4, 3])
          Seconds(median=3.0, lower_quartile=2.0, upper_quartile=4.0)
        """
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper)


class Measured(NamedTuple):
    """The measured seconds of a program, and its bytes beside arguments and results."""

    seconds: Seconds = Seconds()
    temporary_bytes: int = 0


def needed_programs(programs: Sequence[str]) -> list[str]:
    """The programs of layers among `programs`, and the programs whose results they read.

    Example:
      >>> needed_programs(["weight_grad", "update"])
      ['forward_and_stash', 'input_grad', 'weight_grad']
    """
    needed = {*programs} - {"update"}
    if "weight_grad" in needed:
        needed.add("input_grad")
    if needed - {"forward"}:
        needed.add("forward_and_stash")
    return [name for name in PROGRAMS if name in needed]


class ProgressBar:
    """A progress bar on standard error, if that is a terminal.

    Attributes:
      total: the number of calls until the end, as far as it is known.
    """

    def __init__(self, total: int):
        self.total, self._count = total, 0

    @classmethod
    def of(cls, programs: Sequence[str]) -> "ProgressBar":
        """A bar for `measure_layers` and `measure_updates`, if each program needs one loop."""
        names = needed_programs(programs)
        return cls(bool(names) + len(names) + ("update" in programs))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._count:
            self._write("")

    def __call__(self, what: str) -> None:
        """Shows the next piece of work."""
        filled = 20 * self._count // max(self.total, 1)
        self._count += 1
        bar = "#" * filled + "." * (20 - filled)
        self._write(f"profiling [{bar}] {self._count}/{self.total} {what}")

    def _write(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def count_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- Loops


class TimedProgram(NamedTuple):
    """A program in a loop, with its arrays.

    Attributes:
      body: the program, `(reads, carry, slot, row) -> carry`.
      reads: the arrays that it reads.
      carry: the arrays that it updates in place.
      num_rows: the number of rows; `row` is the count of the member's turns modulo this number.
    """

    body: Callable
    reads: dict
    carry: dict
    num_rows: int


class TimedLoop:
    """A compiled loop over turns of its members.

    A member's slot and row advance with each of its turns. The compiler knows neither them nor the
    order of the turns, as in the engine, which reads them from its table. A body is a branch,
    because the compiler moves no loop-invariant work out of a branch.
    """

    def __init__(self, members: Sequence[TimedProgram], order: Sequence[int], devices: Sequence):
        """Compiles the loop. `order` lists the members of one round in model order."""
        self._order = [*order]
        mesh = Mesh(np.asarray(devices), "devices")
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        parts = [(member.body, member.num_rows) for member in members]

        def run(num_turns, order, length, reads, carry):
            def turn(m, count, arrays):
                body, num_rows = parts[m]
                slot, row = (lax.rem(count, np.int32(n)) for n in (SLOTS, num_rows))
                return count + 1, body(reads[m], arrays, slot, row)

            def once(i, carry):
                at = lax.rem(i, length)
                whose = lax.dynamic_index_in_dim(order, at, keepdims=False)
                # One `cond` per member: a `switch` over all of them would copy the arrays of the
                # members that it does not run.
                return [
                    lax.cond(whose == m, functools.partial(turn, m), lambda *arrays: arrays, *arrays)
                    for m, arrays in enumerate(carry)
                ]

            return lax.fori_loop(0, num_turns, once, carry)

        loop = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        carry = [(np.int32(0), member.carry) for member in members]
        reads = [member.reads for member in members]
        self._reads, self._carry = jax.device_put((reads, carry), self._everywhere)
        given = self._given([0], 1)
        lowered = jax.jit(loop, donate_argnums=4).lower(*given, self._reads, self._carry)
        self._run = lowered.compile()
        self._alone = [[m] for m in range(len(members))]
        for members_alone in self._alone:
            self._seconds(members_alone, SLOTS)  # fills every slot with the result of a turn

    @property
    def carries(self) -> list[dict]:
        """The arrays that each member has updated."""
        return [arrays for _, arrays in self._carry]

    def _given(self, order: Sequence[int], num_rounds: int) -> tuple:
        padded = np.zeros(len(self._order), np.int32)
        padded[: len(order)] = order
        given = np.int32(len(order) * num_rounds), padded, np.int32(len(order))
        return jax.block_until_ready(jax.device_put(given, self._everywhere))

    def _seconds(self, order: Sequence[int], num_rounds: int) -> float:
        """Seconds of one round, as the mean of `num_rounds`."""
        given = self._given(order, num_rounds)
        start = time.perf_counter()
        self._carry = self._run(*given, self._reads, self._carry)
        jax.block_until_ready(self._carry)
        return (time.perf_counter() - start) / num_rounds

    def measure(self, min_seconds: float) -> list[Measured]:
        """Times a turn of each member, scaled to model order.

        Args:
          min_seconds: seconds to measure each member, and the model's order, at least.

        Returns:
          The results by member.
        """
        orders = [*self._alone, self._order]
        each_call = min(_CALL_SECONDS, min_seconds / _FEWEST)
        rounds = [max(math.ceil(each_call / self._seconds(order, 1)), 1) for order in orders]
        samples: list[np.ndarray] = []
        end = time.perf_counter() + min_seconds * len(orders)
        while len(samples) < _FEWEST or time.perf_counter() < end:
            *alone, together = map(self._seconds, orders, rounds)
            slower = together / sum(alone[m] for m in self._order)
            samples.append(slower * np.array(alone))
        analysis = self._run.memory_analysis()
        temporary = 0 if analysis is None else int(analysis.temp_size_in_bytes)
        member_seconds = np.transpose(samples).tolist()
        return [Measured(Seconds.of(samples_of_member), temporary) for samples_of_member in member_seconds]


def groups_of(sizes: Sequence[int]) -> list[list[int]]:
    """Groups of neighbours with at most `_TOGETHER` bytes together. A larger one is a group by itself.

    Example:
      >>> groups_of([2**27, 2**26, 2**27, 2**30, 8, 8])
      [[0, 1], [2], [3], [4, 5]]
    """
    groups: list[list[int]] = []
    total = math.inf
    for i, size in enumerate(sizes):
        total += size
        if total > _TOGETHER:
            groups.append([])
            total = size
        groups[-1].append(i)
    return groups


def num_rows_of(count: int, devices: Sequence, parameters: Sequence) -> int:
    """Number of copies of its weights that a kind of layer cycles through, at least 1.

    In training, `count` layers of the kind are spread over the caches. The copies are the layers
    that share one cache, or as many layers as are larger than a cache. A device has its own cache,
    but CPU devices that share a core share its cache.
    """
    num_caches = len(devices)
    if devices[0].platform == "cpu":
        num_caches = min(num_caches, count_cores())
    most = _TOGETHER // max(num_bytes(parameters), 1)
    return max(min(math.ceil(count / num_caches), most), 1)


# -- Arrays to work on


def random_like(rng: np.random.Generator, aval) -> jax.Array:
    return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)


def packed(pack: Packing, values: Sequence, num_rows: int) -> dict:
    """The packed arrays of one owner, repeated `num_rows` times along a leading axis."""
    arrays = {n: np.zeros(a.shape, a.dtype) for n, a in pack.arrays.items()}
    for place, value in zip(pack.places[0], values, strict=True):
        rows = slice(place.start(), place.start() + place.block[0])
        arrays[place.array][rows] = np.asarray(value).reshape(place.block)
    return {n: jnp.asarray(np.broadcast_to(a, (num_rows, *a.shape))) for n, a in arrays.items()}
