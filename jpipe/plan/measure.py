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
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.layers.avals import is_inexact
from jpipe.layers.backward import LayerProgram
from jpipe.layers.equations import Equations
from jpipe.layers.trace import Traced, shared_jit
from jpipe.packing import Leaf, Packing
from jpipe.stages.optimizer import GIVEN

PROGRAMS = (
    "forward",
    "forward_and_stash",
    "backward",
    "input_grad",
    "weight_grad",
    "update",
)
"""What can be measured of a layer; see `LayerProfile`."""

_SLOTS = 4  # of a ring: what is written and read moves through memory, as in training
_TOGETHER = 2**28  # bytes, more than caches hold; more are measured in several loops
_FEWEST = 5  # calls that a median is taken of
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
        names = _needed(programs)
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


class _Member(NamedTuple):
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


class _Loop:
    """A compiled loop over turns of its members.

    A member's slot and row go on with each of its turns. As the engine, which reads them out of its table, the compiler
    does not know them, nor whose turn it is; and a body is a branch, out of which nothing that would be the same each time
    is moved.
    """

    def __init__(
        self, members: Sequence[_Member], order: Sequence[int], devices: Sequence
    ):
        """`order`: whose turns make a round of the model."""
        self._order = [*order]
        mesh = Mesh(np.asarray(devices), "devices")
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        parts = [(member.body, member.num_rows) for member in members]

        def run(num_turns, order, length, reads, carry):
            def turn(m, count, arrays):
                body, num_rows = parts[m]
                slot, row = (lax.rem(count, np.int32(n)) for n in (_SLOTS, num_rows))
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
            self._seconds(own, _SLOTS)  # each slot holds what a turn leaves

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


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Neighbours of together at most `_TOGETHER` bytes, or single ones that are larger.

    Example:
      >>> _groups([2**27, 2**26, 2**27, 2**30, 8, 8])
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


def _num_rows(count: int, devices: Sequence, parameters: Sequence) -> int:
    """How many of `count` layers are worked on near the same caches, or as many as are larger than caches; at least 1.

    A device has caches of its own, but stages that share a core share its caches.
    """
    num_caches = len(devices)
    if devices[0].platform == "cpu":
        num_caches = min(num_caches, count_cores())
    most = _TOGETHER // max(num_bytes(parameters), 1)
    return max(min(math.ceil(count / num_caches), most), 1)


# -- Layers


def measure_layers(
    traced: Traced,
    microbatch: Any,
    programs: Sequence[str],
    min_seconds: float,
    devices: Sequence[jax.Device],
    progress: Progress,
) -> list[dict[str, Measured]]:
    """Measures each kind of layer, and last the loss.

    Args:
      traced: the layers and the loss.
      microbatch: arrays or abstract arrays, as of `profile`.
      programs: what to measure, of `PROGRAMS`; updates are left to `measure_updates`.
      min_seconds: for each program of each kind.
      devices: where, all at once.
      progress: is told what comes next.
    """
    names = _needed(programs)
    wanted = [name for name in names if name in programs]
    if not names:
        return [{} for _ in (*traced.layer_kinds, traced.loss)]
    progress(f"inputs of {len(traced.layers)} layers")
    subjects = _subjects(traced, microbatch, devices)
    order = [*traced.kind_of_layer, len(traced.layer_kinds)]
    found: list[dict[str, Measured]] = [{} for _ in subjects]
    groups = _groups([subject.size for subject in subjects])
    progress.total += (len(groups) - 1) * len(names)
    for group in groups:
        for name in names:
            progress(f"{name} of {len(group)} kinds of layer")
            members = {}
            for k in group:
                if (
                    name == "input_grad"
                    and "backward" in found[k]
                    and not subjects[k].kind.parameters
                ):
                    found[k][name] = found[k]["backward"]
                elif subjects[k].has(name):
                    members[k] = subjects[k].member(name)
            if not members:
                continue
            place = {k: m for m, k in enumerate(members)}
            own = [place[k] for k in order if k in members]
            loop = _Loop([*members.values()], own, devices)
            if name in wanted:
                for k, one in zip(members, loop.measure(min_seconds)):
                    found[k][name] = one
            for k, carry in zip(members, loop.carries):
                subjects[k].take(carry)
        for k in group:
            subjects[k].free()
    return [{name: one.get(name, Measured()) for name in wanted} for one in found]


def _needed(programs: Sequence[str]) -> list[str]:
    """Those programs that are of layers, and those whose results they read.

    Example:
      >>> _needed(["weight_grad", "update"])
      ['forward_and_stash', 'input_grad', 'weight_grad']
    """
    found = {*programs} - {"update"}
    if "weight_grad" in found:
        found.add("input_grad")
    if found - {"forward"}:
        found.add("forward_and_stash")
    return [name for name in PROGRAMS if name in found]


def outputs(kind: LayerProgram, leaves: Sequence | None = None) -> tuple:
    """What a layer hands to the next, and the skips that it stashes."""
    return kind.output_tree.unflatten(kind.outputs if leaves is None else leaves)


def _subjects(
    traced: Traced, microbatch: Any, devices: Sequence[jax.Device]
) -> list["_Subject"]:
    """Every kind of layer, and last the loss, with fresh weights and what the layers before make of the microbatch."""
    key = jax.random.key(0)
    initialise = shared_jit(devices[0].platform)
    kind_of_layer = [*traced.kind_of_layer]
    forward = [jax.jit(kind.forward) for kind in traced.layer_kinds]
    found: dict[int, _Subject] = {}
    x, live = _values(microbatch["inputs"]), {}
    for i, (layer, k) in enumerate(zip(traced.layers, kind_of_layer)):
        kind = traced.layer_kinds[k]
        args = jax.tree.leaves((x, [live.pop(name) for name in layer.pop]))
        if k not in found:
            fresh = layer.given
            if fresh is None:
                fresh = initialise(layer.init, jax.random.fold_in(key, i))
            weights, state = map(jax.tree.leaves, jax.device_get(fresh))
            extra = [jnp.zeros(a.shape, a.dtype) for a in kind.extra[:1]]
            num_rows = _num_rows(kind_of_layer.count(k), devices, kind.parameters)
            found[k] = _Subject(kind, args, extra, weights, state, num_rows)
        of = found[k]
        made, _ = forward[k](of.weights, args, [*of.extra, *of.state])
        x, *kept = outputs(kind, made)
        live |= dict(zip(layer.stash, kept, strict=True))
    loss = _Subject(traced.loss, jax.tree.leaves(x), _values(microbatch))
    return [*(found[k] for k in range(len(traced.layer_kinds))), loss]


def _values(tree: Any) -> list:
    """Arrays as they are; for abstract ones, random numbers and integers that are 0."""
    rng = np.random.default_rng(0)

    def values(a):
        if not isinstance(a, jax.ShapeDtypeStruct):
            return jnp.asarray(a)
        return _random(rng, a) if is_inexact(a) else jnp.zeros(a.shape, a.dtype)

    return [values(a) for a in jax.tree.leaves(tree)]


def _random(rng: np.random.Generator, aval) -> jax.Array:
    return jnp.asarray(rng.normal(size=aval.shape), aval.dtype)


_STASHES = ("input_stash", "weight_stash")
_FORWARD = ("parameters", "state", "inputs", "extra")
_READS = {
    "forward": _FORWARD,
    "forward_and_stash": _FORWARD,
    "backward": ("parameters", *_STASHES, "output_grads"),
    "input_grad": ("parameters", *_STASHES, "output_grads"),
    "weight_grad": ("parameters", "weight_stash", "split_residuals"),
}
_WRITES = {
    "forward": ("outputs", "aux"),
    "forward_and_stash": ("outputs", "aux", *_STASHES),
    "backward": ("gradients", "input_grads"),
    "input_grad": ("split_residuals", "input_grads"),
    "weight_grad": ("gradients",),
}


class _Subject:
    """A kind of layer, its arrays, and the bodies of its programs."""

    def __init__(
        self,
        kind: LayerProgram,
        inputs: Sequence[jax.Array],
        extra: Sequence[jax.Array],
        weights: Sequence = (),
        state: Sequence = (),
        num_rows: int = 1,
    ):
        self.kind, self.num_rows = kind, num_rows
        self.inputs, self.extra = inputs, extra
        self.weights, self.state = weights, state
        leaves = {n: [kind.stash[j] for j in getattr(kind, n)] for n in _STASHES}
        leaves |= {
            "parameters": weights,
            "state": state,
            "split_residuals": kind.split_residuals,
        }
        self.packs = {n: Packing.of([map(Leaf, own)]) for n, own in leaves.items()}
        self._output_grads = [y for y in kind.outputs if is_inexact(y)]
        lists = list(kind.parameters), list(kind.stash), self._output_grads
        _, self._input_grads = jax.eval_shape(kind.backward, *lists)
        self._held: dict = {}

    @property
    def size(self) -> int:
        """Bytes of the arrays that its largest program needs, about."""
        moved = (*self.kind.stash, *self.kind.split_residuals, *self.kind.outputs)
        weights = 2 * self.num_rows * num_bytes(self.kind.parameters)
        return weights + _SLOTS * num_bytes(moved)

    def has(self, name: str) -> bool:
        """Whether a program has anything to compute."""
        return {
            "backward": bool(self._input_grads or self.kind.parameters),
            "input_grad": bool(self._input_grads),
            "weight_grad": bool(self.kind.parameters),
        }.get(name, True)

    def member(self, name: str) -> _Member:
        """A program, with its arrays."""
        held = self._held
        if not held:
            rng = np.random.default_rng(0)
            held |= {"inputs": self.inputs, "extra": self.extra}
            held["parameters"] = _packed(
                self.packs["parameters"], self.weights, self.num_rows
            )
            held["state"] = _packed(self.packs["state"], self.state, self.num_rows)
            held["output_grads"] = [_random(rng, y) for y in self._output_grads]
        empty = {
            "outputs": lambda: _zeros(self.kind.outputs),
            "aux": lambda: _zeros(self.kind.aux),
            "input_grads": lambda: _zeros(self._input_grads),
            "gradients": lambda: self._empty("parameters", self.num_rows),
        }
        for ring in (*_STASHES, "split_residuals"):
            empty[ring] = functools.partial(self._empty, ring, _SLOTS)
        reads = {n: held[n] if n in held else empty[n]() for n in _READS[name]}
        carry = {n: empty[n]() for n in _WRITES[name]}
        return _Member(getattr(self, f"_{name}"), reads, carry, self.num_rows)

    def take(self, carry: dict) -> None:
        """What a program has left for others."""
        names = (*_STASHES, "split_residuals")
        self._held |= {n: carry[n] for n in names if n in carry}

    def free(self) -> None:
        """Gives up all arrays that measuring needed."""
        self._held = {}

    def _empty(self, name: str, *lead: int) -> dict:
        arrays = self.packs[name].arrays
        return {n: jnp.zeros((*lead, *a.shape), a.dtype) for n, a in arrays.items()}

    def _read(self, arrays: dict, name: str, *lead) -> list[jax.Array]:
        return packing.read_all(arrays[name], self.packs[name].places[0], lead)

    def _write(self, arrays: dict, name: str, values: Sequence, *lead) -> dict:
        places = self.packs[name].places[0]
        return {name: packing.write_all(arrays[name], places, lead, values)}

    # -- Bodies: `(reads, carry, slot, row) -> carry`

    def _arguments(self, reads: dict, row) -> tuple:
        extra = [*reads["extra"], *self._read(reads, "state", row)]
        return self._read(reads, "parameters", row), reads["inputs"], extra

    def _forward(self, reads: dict, carry: dict, slot, row) -> dict:
        outputs, statistics = self.kind.forward(*self._arguments(reads, row))
        return {"outputs": outputs, "aux": _added(carry["aux"], statistics)}

    def _forward_and_stash(self, reads: dict, carry: dict, slot, row) -> dict:
        given = self._arguments(reads, row)
        outputs, kept, statistics = self.kind.forward_and_stash(*given)
        rings: dict = {}
        for name in _STASHES:
            values = [kept[j] for j in getattr(self.kind, name)]
            rings |= self._write(carry, name, values, slot)
        return {"outputs": outputs, "aux": _added(carry["aux"], statistics), **rings}

    def _stash(self, reads: dict, slot) -> list:
        stash: list = [None] * len(self.kind.stash)
        for name in _STASHES:
            if name in reads:
                for j, value in zip(
                    getattr(self.kind, name), self._read(reads, name, slot)
                ):
                    stash[j] = value
        return stash

    def _accumulated(self, carry: dict, gradients: Sequence, row) -> dict:
        arrays = carry["gradients"]
        for place, value in zip(
            self.packs["parameters"].places[0], gradients, strict=True
        ):
            arrays = packing.add(arrays, place, [row], value)
        return {"gradients": arrays}

    def _of_output_grads(self, program: Callable, reads: dict, slot, row) -> tuple:
        parameters = self._read(reads, "parameters", row)
        return program(parameters, self._stash(reads, slot), reads["output_grads"])

    def _backward(self, reads: dict, carry: dict, slot, row) -> dict:
        own, inputs = self._of_output_grads(self.kind.backward, reads, slot, row)
        return {"input_grads": inputs, **self._accumulated(carry, own, row)}

    def _input_grad(self, reads: dict, carry: dict, slot, row) -> dict:
        inputs, left = self._of_output_grads(self.kind.input_grad, reads, slot, row)
        return {
            "input_grads": inputs,
            **self._write(carry, "split_residuals", left, slot),
        }

    def _weight_grad(self, reads: dict, carry: dict, slot, row) -> dict:
        parameters = self._read(reads, "parameters", row)
        split_residuals = self._read(reads, "split_residuals", slot)
        stash = self._stash(reads, slot)
        gradients = self.kind.weight_grad(parameters, stash, split_residuals)
        return self._accumulated(carry, gradients, row)


def _zeros(avals: Iterable) -> list[jax.Array]:
    return [jnp.zeros(a.shape, a.dtype) for a in avals]


def _added(a: Sequence, b: Sequence) -> list[jax.Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _packed(pack: Packing, values: Sequence, num_rows: int) -> dict:
    """The arrays of a packing's one owner, `num_rows` times along a leading axis."""
    arrays = {n: np.zeros(a.shape, a.dtype) for n, a in pack.arrays.items()}
    for place, value in zip(pack.places[0], values, strict=True):
        rows = slice(place.start(), place.start() + place.block[0])
        arrays[place.array][rows] = np.asarray(value).reshape(place.block)
    return {
        n: jnp.asarray(np.broadcast_to(a, (num_rows, *a.shape)))
        for n, a in arrays.items()
    }


# -- Updates


class Update(NamedTuple):
    """The update of a layer: `(*parameters, *gradients, *state, *given) -> [*parameters, *state]`; see `update.GIVEN`."""

    equations: Equations
    parameters: Sequence
    state: Sequence
    norm_dtype: np.dtype


def trace_updates(traced: Traced, optimizer) -> tuple[list[Update], list[int]]:
    """The updates that differ, and which one each layer has."""
    optimizer = optax.with_extra_args_support(optimizer)
    everything = [layer.parameters for layer in traced.layers]
    dtypes = [a.dtype for a in jax.tree.leaves(everything)]
    norm_dtype = np.result_type(np.float32, *dtypes)
    given = [jax.ShapeDtypeStruct((), t) for t in (np.float32, np.float32, norm_dtype)]
    found: dict[str, Update] = {}
    of_layer = []
    for i, parameters in enumerate(everything):
        tree: list = [None] * len(everything)
        tree[i] = parameters
        leaves, treedef = jax.tree.flatten(tree)
        state_leaves, state_tree = jax.tree.flatten(
            jax.eval_shape(optimizer.init, tree)
        )

        n = len(leaves)

        def update(*args, treedef=treedef, state_tree=state_tree, n=n):
            weights, gradients = (
                treedef.unflatten(args[:n]),
                treedef.unflatten(args[n : 2 * n]),
            )
            changes, state = optimizer.update(
                gradients,
                state_tree.unflatten(args[2 * n : -len(GIVEN)]),
                weights,
                **dict(zip(GIVEN, args[-len(GIVEN) :])),
            )
            return jax.tree.leaves((optax.apply_updates(weights, changes), state))

        equations = Equations.trace(update, *leaves, *leaves, *state_leaves, *given)
        made = Update(equations, leaves, state_leaves, norm_dtype)
        text = equations.text()
        found.setdefault(text, made)
        of_layer.append(list(found).index(text))
    return list(found.values()), of_layer


def measure_updates(
    updates: Sequence[Update],
    update_of_layer: Sequence[int],
    programs: Sequence[str],
    min_seconds: float,
    devices: Sequence[jax.Device],
    progress: Progress,
) -> list[dict[str, Measured]]:
    """Measures each update, if "update" is among `programs`; arguments and result as of `measure_layers`."""
    if "update" not in programs:
        return [{} for _ in updates]
    found = [{"update": Measured()} for _ in updates]
    order = [u for u in update_of_layer if updates[u].parameters]
    some = sorted({*order})
    num_rows = {
        u: _num_rows(order.count(u), devices, updates[u].parameters) for u in some
    }
    sizes = [
        num_rows[u] * num_bytes((*updates[u].parameters * 2, *updates[u].state))
        for u in some
    ]
    groups = _groups(sizes)
    progress.total += len(groups) - 1
    for group in groups:
        of = [some[m] for m in group]
        progress(f"update of {len(of)} kinds of layer")
        members = [_update(updates[u], num_rows[u]) for u in of]
        loop = _Loop(members, [of.index(u) for u in order if u in of], devices)
        for u, one in zip(of, loop.measure(min_seconds), strict=True):
            found[u]["update"] = one
    return found


def _update(update: Update, num_rows: int) -> _Member:
    pack, state = (
        Packing.of([map(Leaf, a)]) for a in (update.parameters, update.state)
    )
    rng = np.random.default_rng(0)
    weights = [_random(rng, a) for a in update.parameters]

    def body(reads, carry, slot, row):
        names = "parameters", "gradients", "state"
        places = {n: p.places[0] for n, p in zip(names, (pack, pack, state))}
        leaves = {n: packing.read_all(carry[n], places[n], [row]) for n in names}
        squares = [
            jnp.sum(jnp.square(a.astype(update.norm_dtype)))
            for a in leaves["gradients"]
        ]
        norm = jnp.sqrt(functools.reduce(jnp.add, squares))
        delay = lax.min(row, np.int32(0)).astype(np.float32)  # not known to be 0
        flat = list(itertools.chain(*leaves.values()))
        num_weights = len(update.parameters)

        def compute():
            """In a branch of its own, or what it reads would be read again, from copies, behind the writes."""
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
        "parameters": _packed(pack, weights, num_rows),
        "gradients": _packed(pack, weights, num_rows),
        "state": _packed(state, _zeros(update.state), num_rows),
    }
    return _Member(body, {}, carry, num_rows)
