"""Measures the programs of every kind of layer, and of the loss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import packing
from jpipe.engine.stage_layers import (
    read_layer_stash,
    write_layer_stash,
    write_stash,
)
from jpipe.engine.stage_weights import gathered_along_fsdp
from jpipe.gradients import sums
from jpipe.gradients.sums import AS_PARAMETERS, PlacedSum
from jpipe.layers.avals import is_inexact, num_bytes, zeros
from jpipe.layers.backward import LayerProgram
from jpipe.layers.layer import run_in_order
from jpipe.layers.quick_jit import shared_jit
from jpipe.layers.trace import TrainingTrace
from jpipe.packing import Leaf, Packing
from jpipe.plan._loops import (
    SLOTS,
    Measured,
    ProgressBar,
    TimedLoop,
    TimedProgram,
    groups_of,
    needed_programs,
    num_rows_of,
    packed,
    random_like,
)
from jpipe.stages.cut import LayerRun


def measure_layers(
    traced: TrainingTrace,
    microbatch: Any,
    programs: Sequence[str],
    min_seconds: float,
    devices: Sequence[jax.Device],
    progress: ProgressBar,
) -> list[dict[str, Measured]]:
    """Measures each kind of layer, and the loss.

    Args:
      traced: the layers and the loss.
      microbatch: arrays or abstract arrays, as of `profile`.
      programs: the programs of `PROGRAMS` to measure; `measure_updates` does "update".
      min_seconds: seconds per program and kind, at least.
      devices: the devices, which all run the same at the same time.
      progress: shows the next piece of work.

    Returns:
      For each kind, and last for the loss, the results by program.
    """
    names = needed_programs(programs)
    wanted = [name for name in names if name in programs]
    if not names:
        return [{} for _ in (*traced.layer_kinds, traced.loss)]
    progress(f"inputs of {len(traced.layers)} layers")
    subjects = _subjects(traced, microbatch, devices)
    order = [*traced.kind_of_layer, len(traced.layer_kinds)]
    results: list[dict[str, Measured]] = [{} for _ in subjects]
    groups = groups_of([subject.size for subject in subjects])
    progress.total += (len(groups) - 1) * len(names)
    for group in groups:
        for name in names:
            progress(f"{name} of {len(group)} kinds of layer")
            members = {}
            for k in group:
                if name == "input_grad" and "backward" in results[k] and not subjects[k].kind.trained:
                    results[k][name] = results[k]["backward"]
                elif subjects[k].has(name):
                    members[k] = subjects[k].member(name)
            if not members:
                continue
            place = {k: m for m, k in enumerate(members)}
            turns = [place[k] for k in order if k in members]
            loop = TimedLoop([*members.values()], turns, devices)
            if name in wanted:
                for k, measured in zip(members, loop.measure(min_seconds)):
                    results[k][name] = measured
            for k, carry in zip(members, loop.carries):
                subjects[k].take(carry)
        for k in group:
            subjects[k].free()
    return [{name: r.get(name, Measured()) for name in wanted} for r in results]


def outputs(kind: LayerProgram, leaves: Sequence | None = None) -> tuple:
    """The outputs of a layer: the input of the next layer, then the skips that it stashes."""
    return kind.output_tree.unflatten(kind.outputs if leaves is None else leaves)


def _subjects(traced: TrainingTrace, microbatch: Any, devices: Sequence[jax.Device]) -> list["_Subject"]:
    """Every kind of layer, and last the loss.

    Each gets fresh weights, and as inputs the outputs of the layers before.
    """
    key = jax.random.key(0)
    initialise = shared_jit(devices[0].platform)
    kind_of_layer = [*traced.kind_of_layer]
    forward = [jax.jit(kind.forward) for kind in traced.layer_kinds]
    subjects: dict[int, _Subject] = {}

    def call(i: int, inputs: tuple) -> tuple:
        layer, k = traced.layers[i], kind_of_layer[i]
        kind, args = traced.layer_kinds[k], jax.tree.leaves(inputs)
        if k not in subjects:
            fresh = layer.given
            if fresh is None:
                assert layer.init is not None
                fresh = initialise(layer.init, jax.random.fold_in(key, i))
            weights, state = map(jax.tree.leaves, jax.device_get(fresh))
            extra = zeros(list(kind.extra[:1]))
            num_rows = num_rows_of(kind_of_layer.count(k), devices, kind.parameters)
            subjects[k] = _Subject(kind, args, extra, weights, state, num_rows=num_rows)
        subject = subjects[k]
        extra = [*subject.extra, *subject.state]
        leaves, _ = forward[k](subject.weights, args, extra)
        return outputs(kind, leaves)

    x = run_in_order(traced.layers, _values(microbatch["inputs"]), call)
    loss = _Subject(traced.loss, jax.tree.leaves(x), _values(microbatch))
    return [*(subjects[k] for k in range(len(traced.layer_kinds))), loss]


_STASHES = ("input_stash", "weight_stash")
_FORWARD = ("parameters", "state", "inputs", "extra")
_READS = {
    "forward": _FORWARD,
    "forward_and_stash": _FORWARD,
    "backward": ("parameters", "state", *_STASHES, "output_grads"),
    "input_grad": ("parameters", "state", *_STASHES, "output_grads"),
    "weight_grad": ("parameters", "state", "weight_stash", "split_residuals"),
}
_WRITES = {
    "forward": ("outputs", "aux"),
    "forward_and_stash": ("outputs", "aux", *_STASHES),
    "backward": ("gradients", "input_grads"),
    "input_grad": ("split_residuals", "input_grads"),
    "weight_grad": ("gradients",),
}


class _Subject:
    """A kind of layer with its arrays, and the bodies of its programs."""

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
        leaves: dict[str, Sequence] = {n: kind.stashed(n) for n in _STASHES}
        leaves |= {
            "parameters": weights,
            "gradients": kind.trained_parameters,
            "state": state,
            "split_residuals": kind.split_residuals,
        }
        self.packs = {n: Packing.of([[*map(Leaf, avals)]]) for n, avals in leaves.items()}
        places: dict[str, Any] = {name: tuple(pack.places[0]) for name, pack in self.packs.items()}
        sums = tuple(
            PlacedSum(AS_PARAMETERS.plain(Leaf(kind.parameters[j])), (places["gradients"][n],))
            for n, j in enumerate(kind.trained)
        )
        places.pop("gradients")
        self._run = LayerRun(0, 1, stash=(), pop=(), gradients=sums, **places)
        self._output_grads = [y for y in kind.outputs if is_inexact(y)]
        lists = list(kind.parameters), list(kind.stash), self._output_grads
        constants = [kind.extra[i] for i in kind.constants]
        _, self._input_grads = jax.eval_shape(kind.backward, [*lists[0], *constants], *lists[1:])
        self._held: dict = {}

    @property
    def size(self) -> int:
        """Approximate bytes of the arrays of the largest program."""
        moved = (*self.kind.stash, *self.kind.split_residuals, *self.kind.outputs)
        weights = 2 * self.num_rows * num_bytes(self.kind.parameters)
        return weights + SLOTS * num_bytes(moved)

    def has(self, name: str) -> bool:
        """Returns whether a program has anything to compute."""
        return {
            "backward": bool(self._input_grads or self.kind.trained),
            "input_grad": bool(self._input_grads),
            "weight_grad": bool(self.kind.trained),
        }.get(name, True)

    def member(self, name: str) -> TimedProgram:
        """A program with its arrays."""
        held = self._held
        if not held:
            rng = np.random.default_rng(0)
            held |= {"inputs": self.inputs, "extra": self.extra}
            held["parameters"] = packed(self.packs["parameters"], self.weights, self.num_rows)
            held["state"] = packed(self.packs["state"], self.state, self.num_rows)
            held["output_grads"] = [random_like(rng, y) for y in self._output_grads]
        empty = {
            "outputs": lambda: zeros(list(self.kind.outputs)),
            "aux": lambda: zeros(list(self.kind.aux)),
            "input_grads": lambda: zeros(list(self._input_grads)),
            "gradients": lambda: self._empty("gradients", self.num_rows),
        }
        for ring in (*_STASHES, "split_residuals"):
            empty[ring] = functools.partial(self._empty, ring, SLOTS)
        reads = {n: held[n] if n in held else empty[n]() for n in _READS[name]}
        carry = {n: empty[n]() for n in _WRITES[name]}
        return TimedProgram(getattr(self, f"_{name}"), reads, carry, self.num_rows)

    def take(self, carry: dict) -> None:
        """Keeps the results of a program that other programs read."""
        names = (*_STASHES, "split_residuals")
        self._held |= {n: carry[n] for n in names if n in carry}

    def free(self) -> None:
        """Drops all arrays that measuring needed."""
        self._held = {}

    def _empty(self, name: str, *lead: int) -> dict:
        arrays = self.packs[name].arrays
        return {n: jnp.zeros((*lead, *a.shape), a.dtype) for n, a in arrays.items()}

    def _read(self, arrays: dict, name: str, *lead) -> list[jax.Array]:
        return packing.read_all(arrays[name], self.packs[name].places[0], lead)

    # -- Bodies: `(reads, carry, slot, row) -> carry`

    def _arguments(self, reads: dict, row) -> tuple:
        extra = [*reads["extra"], *self._read(reads, "state", row)]
        return self._read(reads, "parameters", row), reads["inputs"], extra

    def _at_hand(self, reads: dict, row) -> list[jax.Array]:
        """The weights, then the constants of the state."""
        state = self._read(reads, "state", row)
        first = len(self.extra)
        constants = [state[i - first] for i in self.kind.constants]
        return [*self._read(reads, "parameters", row), *constants]

    def _forward(self, reads: dict, carry: dict, slot, row) -> dict:
        outputs, aux = self.kind.forward(*self._arguments(reads, row))
        return {"outputs": outputs, "aux": _added(carry["aux"], aux)}

    def _forward_and_stash(self, reads: dict, carry: dict, slot, row) -> dict:
        given = self._arguments(reads, row)
        outputs, kept, aux = self.kind.forward_and_stash(*given)
        old = {name: carry[name] for name in _STASHES}
        rings = write_layer_stash(old, self._run, self.kind, kept, lambda _: [slot], i=0)
        return {"outputs": outputs, "aux": _added(carry["aux"], aux), **rings}

    def _stash(self, reads: dict, slot, only: str | None = None) -> list:
        return read_layer_stash(reads, self._run, self.kind, lambda _: [slot], 0, only=only)

    def _accumulated(self, carry: dict, gradients: Sequence, row) -> dict:
        arrays = sums.add(
            carry["gradients"],
            self._run.gradients,
            [row],
            gradients,
            0,
            None,
            as_stored=gathered_along_fsdp,
            add_plain=lambda arrays, places, values: packing.add_all(arrays, places, [row], values),
        )
        return {"gradients": arrays}

    def _with_output_grads(self, program: Callable, reads: dict, slot, row) -> tuple:
        parameters = self._at_hand(reads, row)
        return program(parameters, self._stash(reads, slot), reads["output_grads"])

    def _backward(self, reads: dict, carry: dict, slot, row) -> dict:
        gradients, inputs = self._with_output_grads(self.kind.backward, reads, slot, row)
        return {"input_grads": inputs, **self._accumulated(carry, gradients, row)}

    def _input_grad(self, reads: dict, carry: dict, slot, row) -> dict:
        inputs, left = self._with_output_grads(self.kind.input_grad, reads, slot, row)
        old = {"split_residuals": carry["split_residuals"]}
        places = self._run.split_residuals
        rings = write_stash(old, "split_residuals", places, left, lambda _: [slot])
        return {"input_grads": inputs, **rings}

    def _weight_grad(self, reads: dict, carry: dict, slot, row) -> dict:
        parameters = self._at_hand(reads, row)
        split_residuals = self._read(reads, "split_residuals", slot)
        stash = self._stash(reads, slot, only="weight_stash")
        gradients = self.kind.weight_grad(parameters, stash, split_residuals)
        return self._accumulated(carry, gradients, row)


def _values(tree: Any) -> list:
    """Concrete arrays unchanged; abstract ones as random numbers, or zeros for integers."""
    rng = np.random.default_rng(0)

    def values(a):
        if not isinstance(a, jax.ShapeDtypeStruct):
            return jnp.asarray(a)
        return random_like(rng, a) if is_inexact(a) else jnp.zeros(a.shape, a.dtype)

    return [values(a) for a in jax.tree.leaves(tree)]


def _added(a: Sequence, b: Sequence) -> list[jax.Array]:
    return [x + y for x, y in zip(a, b, strict=True)]
