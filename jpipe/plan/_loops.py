"""How long layers and updates take among each other: loops that run them as the engine does.

    subjects: kinds of layer, the loss ──┐
    updates ─────────────────────────────┴─> members ── one loop for all of them ──> Measured, of each

A layer is measured as the engine runs it: in a compiled loop over microbatches, in which its weights are read out of
packed arrays, what it stashes is written into rings, and gradients are added to accumulators, all in place. So neither
the start of a program nor the copying of its results is measured, and what the rings cost is.

How long something takes also depends on what ran before it: by itself, a layer finds all that it works with in the
nearest cache, where in training it finds what the others have left. So a loop holds all kinds of layer, and an order
that is given when it runs says whose turn it is: each kind's by itself, and in between the model's own order. What a
round of that takes longer, it takes longer for all in the same proportion.
"""

import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.packing import Packing

PROGRAMS = (
    "forward",
    "forward_and_stash",
    "backward",
    "input_grad",
    "weight_grad",
    "update",
)
"""What can be measured of a layer; see `LayerProfile`."""

SLOTS = 4  # of a ring: what is written and read moves through memory, as in training
_TOGETHER = 2**28  # bytes, more than caches hold; more are measured in several loops
_FEWEST = 3  # calls that a median is taken of
_CALL_SECONDS = 0.1  # of a call: it starts with memory that it has not touched yet


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What something takes: the median of several calls, and the quartiles on both sides of it."""

    median: float = 0.0
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Seconds":
        """Of what each of several calls took.

        Example:
          >>> Seconds.of([5, 1, 2, 4, 3])
          Seconds(median=3.0, lower_quartile=2.0, upper_quartile=4.0)
        """
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper)


class Measured(NamedTuple):
    """What is known of a program: what it takes, and bytes beside its arguments and results."""

    seconds: Seconds = Seconds()
    temporary_bytes: int = 0


def needed_programs(programs: Sequence[str]) -> list[str]:
    """Those programs that are of layers, and those whose results they read.

    Example:
      >>> needed_programs(["weight_grad", "update"])
      ['forward_and_stash', 'input_grad', 'weight_grad']
    """
    found = {*programs} - {"update"}
    if "weight_grad" in found:
        found.add("input_grad")
    if found - {"forward"}:
        found.add("forward_and_stash")
    return [name for name in PROGRAMS if name in found]


class Progress:
    """A line in the terminal, if there is one.

    Attributes:
      total: how often it will have been called at the end, as far as is known.
    """

    def __init__(self, total: int):
        self.total, self._count = total, 0

    @classmethod
    def of(cls, programs: Sequence[str]) -> "Progress":
        """For what `measure_layers` and `measure_updates` call it, if each needs one loop a program."""
        names = needed_programs(programs)
        return cls(bool(names) + len(names) + ("update" in programs))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self._count:
            self._write("")

    def __call__(self, what: str) -> None:
        """What comes next."""
        filled = 20 * self._count // max(self.total, 1)
        self._count += 1
        bar = "#" * filled + "." * (20 - filled)
        self._write(f"profiling [{bar}] {self._count}/{self.total} {what}")

    def _write(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def num_bytes(avals: Iterable) -> int:
    """Of arrays, abstract or not."""
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in avals)


def count_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- Loops


class Member(NamedTuple):
    """What has its turns in a loop.

    Attributes:
      body: `(reads, carry, slot, row) -> carry`.
      reads: the arrays that it reads; carry: those that it works on in place.
      num_rows: `row` goes round so many.
    """

    body: Callable
    reads: dict
    carry: dict
    num_rows: int


class Loop:
    """A compiled loop over turns of its members.

    A member's slot and row go on with each of its turns. As the engine, which reads them out of its table, the compiler
    does not know them, nor whose turn it is; and a body is a branch, out of which nothing that would be the same each time
    is moved.
    """

    def __init__(
        self, members: Sequence[Member], order: Sequence[int], devices: Sequence
    ):
        """`order`: whose turns make a round of the model."""
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
                # A branch of all would copy what other members' turns do not touch.
                return [
                    lax.cond(
                        whose == m, functools.partial(turn, m), lambda *own: own, *own
                    )
                    for m, own in enumerate(carry)
                ]

            return lax.fori_loop(0, num_turns, once, carry)

        each = jax.shard_map(
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
        lowered = jax.jit(each, donate_argnums=4).lower(
            *given, self._reads, self._carry
        )
        self._run = lowered.compile()
        self._alone = [[m] for m in range(len(members))]
        for own in self._alone:
            self._seconds(own, SLOTS)  # each slot holds what a turn leaves

    @property
    def carries(self) -> list[dict]:
        """What each member's turns have left."""
        return [arrays for _, arrays in self._carry]

    def _given(self, order: Sequence[int], num_rounds: int) -> tuple:
        padded = np.zeros(len(self._order), np.int32)
        padded[: len(order)] = order
        given = np.int32(len(order) * num_rounds), padded, np.int32(len(order))
        return jax.block_until_ready(jax.device_put(given, self._everywhere))

    def _seconds(self, order: Sequence[int], num_rounds: int) -> float:
        """What a round takes, of so many."""
        given = self._given(order, num_rounds)
        start = time.perf_counter()
        self._carry = self._run(*given, self._reads, self._carry)
        jax.block_until_ready(self._carry)
        return (time.perf_counter() - start) / num_rounds

    def measure(self, min_seconds: float) -> list[Measured]:
        """What a turn of each member takes among the others, with `min_seconds` for each of them and for all together."""
        orders = [*self._alone, self._order]
        each_call = min(_CALL_SECONDS, min_seconds / _FEWEST)
        rounds = [
            max(math.ceil(each_call / self._seconds(order, 1)), 1) for order in orders
        ]
        found: list[np.ndarray] = []
        end = time.perf_counter() + min_seconds * len(orders)
        while len(found) < _FEWEST or time.perf_counter() < end:
            *alone, together = map(self._seconds, orders, rounds)
            slower = together / sum(alone[m] for m in self._order)
            found.append(slower * np.array(alone))
        analysis = self._run.memory_analysis()
        temporary = 0 if analysis is None else int(analysis.temp_size_in_bytes)
        of_members = np.transpose(found).tolist()
        return [Measured(Seconds.of(own), temporary) for own in of_members]


def groups_of(sizes: Sequence[int]) -> list[list[int]]:
    """Neighbours of together at most `_TOGETHER` bytes, or single ones that are larger.

    Example:
      >>> groups_of([2**27, 2**26, 2**27, 2**30, 8, 8])
      [[0, 1], [2], [3], [4, 5]]
    """
    found: list[list[int]] = []
    total = math.inf
    for i, size in enumerate(sizes):
        total += size
        if total > _TOGETHER:
            found.append([])
            total = size
        found[-1].append(i)
    return found


def num_rows_of(count: int, devices: Sequence, parameters: Sequence) -> int:
    """How many of `count` layers are worked on near the same caches, or as many as are larger than caches; at least 1.

    A device has caches of its own, but stages that share a core share its caches.
    """
    num_caches = len(devices)
    if devices[0].platform == "cpu":
        num_caches = min(num_caches, count_cores())
    most = _TOGETHER // max(num_bytes(parameters), 1)
    return max(min(math.ceil(count / num_caches), most), 1)


# -- Arrays to work on


def random_like(rng: np.random.Generator, aval) -> jax.Array:
    return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)


def zeros(avals: Iterable) -> list[jax.Array]:
    return [jnp.zeros(a.shape, a.dtype) for a in avals]


def packed(pack: Packing, values: Sequence, num_rows: int) -> dict:
    """The arrays of a packing's one owner, `num_rows` times along a leading axis."""
    arrays = {n: np.zeros(a.shape, a.dtype) for n, a in pack.arrays.items()}
    for place, value in zip(pack.places[0], values, strict=True):
        rows = slice(place.start(), place.start() + place.block[0])
        arrays[place.array][rows] = np.asarray(value).reshape(place.block)
    return {
        n: jnp.asarray(np.broadcast_to(a, (num_rows, *a.shape)))
        for n, a in arrays.items()
    }
