"""What layers cost: seconds measured, and bytes counted, one kind of layer at a time.

    layers ── traced ──> kinds ── each in a loop of its own ──> Profile ──> file
                                                                   ├──> graph, for the solvers
                                                                   └──> balance_by_time, balance_by_memory

A layer is measured as the engine runs it: compiled into a loop over microbatches, in which its weights are read
out of packed arrays, what it stashes is written into rings, and gradients are added to accumulators, all in place.
So neither the start of a program nor the copying of its results is measured, and what the rings cost is. The loop goes
round copies of the weights, together as large as the weights of a stage, or of all stages that share a core, because in
training the layers between push a layer's weights, gradients and optimizer state out of the caches.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe import packing
from jpipe.backward import Equations, LayerProgram, is_inexact
from jpipe.packing import Leaf, Packing
from jpipe.plan.graph import Graph, Node
from jpipe.plan.min_max import min_max
from jpipe.stages import Traced, shapes_text, shared_jit
from jpipe.update import GIVEN

PROGRAMS = (
    "forward",
    "forward_and_stash",
    "backward",
    "input_grad",
    "weight_grad",
    "update",
)
"""What can be measured of a layer; see `LayerProfile`."""

_FORMAT = "jpipe profile 2"
_SLOTS = 4  # of a ring: what is written and read moves through memory, as in training
_NO_CACHE = 2**26  # bytes that no cache holds
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


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """What one layer costs for one microbatch; or the loss, which has no weights.

    A time is None where it was not measured, and 0 where there is nothing to compute: a layer whose inputs need no
    gradient (the model's first, or one of integers) has no `input_grad`, one without weights no `weight_grad` and no
    `update`, and its `backward` is its `input_grad`.

    Attributes:
      name: of the layer; kind: layers of equal numbers compute the same and were measured once.
      forward: seconds of the forward that keeps nothing; forward_and_stash: of the one that keeps what a backward reads.
      backward: of the whole backward; input_grad, weight_grad: of its two halves in tables that split it.
      update: of the optimizer's update, with the norm of the gradient, once a minibatch.
      activations: abstract arrays that it hands to the next layer; skips: those of each skip that it stashes.
      input_stash: what it keeps from a forward for the input gradient alone; weight_stash: for the weight gradient, and
        perhaps the input gradient before it; crossing: what the input gradient leaves for the weight gradient.
      parameters: its weights; optimizer_state: their part of the optimizer's state; state: its mutable state.
      temporary_bytes: the most that one of the programs measured needs beside all these.
      stash, pop: the names of the skips that start and end here.
    """

    name: str
    kind: int
    forward: Seconds | None
    forward_and_stash: Seconds | None
    backward: Seconds | None
    input_grad: Seconds | None
    weight_grad: Seconds | None
    update: Seconds | None
    activations: tuple[jax.ShapeDtypeStruct, ...]
    skips: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
    input_stash: tuple[jax.ShapeDtypeStruct, ...]
    weight_stash: tuple[jax.ShapeDtypeStruct, ...]
    crossing: tuple[jax.ShapeDtypeStruct, ...]
    parameters: tuple[jax.ShapeDtypeStruct, ...]
    optimizer_state: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[jax.ShapeDtypeStruct, ...]
    temporary_bytes: int
    stash: tuple[str, ...]
    pop: tuple[str, ...]

    def avals(self, name: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The abstract arrays of an attribute: "parameters", "crossing" and so on."""
        return getattr(self, name)

    @property
    def activation_bytes(self) -> tuple[int, ...]:
        """Of what it hands to the next layer, then of each skip that it stashes."""
        return tuple(map(_bytes, (self.activations, *self.skips)))

    @property
    def parameter_bytes(self) -> int:
        """Of its weights."""
        return _bytes(self.parameters)

    @property
    def optimizer_bytes(self) -> int:
        """Of their optimizer state."""
        return _bytes(self.optimizer_state)

    @property
    def stash_bytes(self) -> int:
        """What a microbatch keeps from its forward to a backward that is not split."""
        return _bytes(self.input_stash) + _bytes(self.weight_stash)

    @property
    def weight_bytes(self) -> int:
        """What it takes whatever is in flight: weights, gradients, optimizer state and mutable state."""
        return 2 * self.parameter_bytes + self.optimizer_bytes + _bytes(self.state)


def _bytes(avals: Iterable) -> int:
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in avals)


def programs_of(operation: str, recompute: str = "none") -> tuple[str, ...]:
    """The programs of `PROGRAMS` that an operation of the table runs in each layer.

    Args:
      operation: "forward", "backward", "weight_grad" or "update"; or "input_grad", for the backward of a table that
        splits it.
      recompute: of the pipeline.

    Example:
      >>> programs_of("backward", "full")
      ('forward_and_stash', 'backward')
    """
    if operation == "forward":
        return ("forward",) if recompute == "full" else ("forward_and_stash",)
    if operation in ("backward", "input_grad") and recompute == "full":
        return ("forward_and_stash", operation)
    return (operation,)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the layers of a model cost on one device, for one microbatch.

    Under `recompute="full"` the same programs run, in other operations, so a profile made without it becomes one with it
    by `dataclasses.replace(profile, recompute="full")`.

    Attributes:
      layers: one record each.
      loss: the loss, which the last stage computes.
      microbatch: shapes and dtypes of a microbatch; microbatch_size: its leading axis; microbatch_bytes: its bytes.
      recompute: "none", "full" or the name of a policy; compute_dtype: of the pipeline, or None.
      reads: of "forward" and "backward", those that read other weights than are updated, which a device then holds too.
      ties: for each set of tied weights, the layers that share them.
      device_kind: what it was measured on; num_devices: how many at once; num_cores: of the host, those that the process
        could run on.
      jax_version: that compiled it.
      model: hash of what is computed; optimizer: hash of the updates.
    """

    layers: tuple[LayerProfile, ...]
    loss: LayerProfile
    microbatch: str
    microbatch_size: int
    microbatch_bytes: int
    recompute: str
    compute_dtype: str | None
    reads: tuple[str, ...]
    ties: tuple[tuple[int, ...], ...]
    device_kind: str
    num_devices: int
    num_cores: int
    jax_version: str
    model: str
    optimizer: str

    @property
    def skips(self) -> dict[str, tuple[int, int, tuple[jax.ShapeDtypeStruct, ...]]]:
        """Name -> layer that stashes it, layer that pops it, abstract leaves; as of `jpipe.stages.Traced`."""
        pops = {name: i for i, one in enumerate(self.layers) for name in one.pop}
        return {
            name: (i, pops[name], avals)
            for i, one in enumerate(self.layers)
            for name, avals in zip(one.stash, one.skips, strict=True)
        }

    def seconds(self, operation: str) -> list[float]:
        """What an operation of the table takes in each layer, by the medians; the last layer's with the loss.

        Args:
          operation: "forward", "backward", "weight_grad" or "update"; "input_grad" is the backward of a table that
            splits it. Under `recompute="full"` a backward begins with the forward.

        Raises:
          ValueError: if there is no such operation, or it was not measured.
        """
        if operation not in (*PROGRAMS[2:], "forward"):
            raise ValueError(
                f"`operation` must be 'forward', 'backward', 'input_grad', 'weight_grad' or 'update', got {operation!r}."
            )
        programs = programs_of(operation, self.recompute)

        def of(layer: LayerProfile) -> float:
            total = 0.0
            for program in programs:
                seconds = getattr(layer, program)
                if seconds is None:
                    raise ValueError(
                        f"`{program}` of {layer.name} was not measured. Profile it with {program!r} among `programs`."
                    )
                total += seconds.median
            return total

        costs = [of(layer) for layer in self.layers]
        costs[-1] += of(self.loss)
        return costs

    def layer_bytes(self, in_flight: int = 1) -> list[int]:
        """What each layer keeps on its device, the last with the loss: `LayerProfile.weight_bytes`, and stashes.

        Args:
          in_flight: microbatches whose stashes are kept at once; under `recompute="full"` that is one all the same.
        """
        copies = 1 if self.recompute == "full" else in_flight
        costs = [one.weight_bytes + copies * one.stash_bytes for one in self.layers]
        costs[-1] += copies * self.loss.stash_bytes
        return costs

    def graph(self, bandwidth: float | None = None) -> Graph:
        """The layers as a graph for the solvers: each a node, whose id is its number, with edges to the next and to
        where its skips end. The loss is part of the last layer.

        Args:
          bandwidth: bytes per second between a device and the host, for `Node.transfer`; None leaves that out.
        """
        costs = zip(
            self.layers,
            self.seconds("forward"),
            self.seconds("backward"),
            self.layer_bytes(),
            strict=True,
        )
        nodes = tuple(
            Node(
                id=i,
                description=layer.name,
                forward=forward,
                backward=backward,
                activation_bytes=layer.activation_bytes,
                parameter_bytes=layer.parameter_bytes,
                memory_bytes=memory,
                transfer=None
                if bandwidth is None
                else sum(layer.activation_bytes) / bandwidth,
            )
            for i, (layer, forward, backward, memory) in enumerate(costs)
        )
        source = {n: i for i, layer in enumerate(self.layers) for n in layer.stash}
        edges = {(i, i + 1): None for i in range(len(self.layers) - 1)}
        for i, layer in enumerate(self.layers):
            edges |= {(source[name], i): None for name in layer.pop}
        return Graph(nodes, tuple(edges))

    def save(self, path: str | os.PathLike) -> None:
        """Writes it as JSON, one layer a line; a file that is there is replaced whole or not at all."""
        to_json = functools.partial(json.dumps, default=_text)
        lines = []
        for name, value in {"format": _FORMAT, **dataclasses.asdict(self)}.items():
            text = to_json(value)
            if name == "layers":
                text = "[\n  " + ",\n  ".join(map(to_json, value)) + "\n ]"
            lines.append(f"{to_json(name)}: {text}")
        path = os.fspath(path)
        handle, draft = tempfile.mkstemp(
            dir=os.path.dirname(path) or ".", prefix=f".{os.path.basename(path)}."
        )
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write("{\n " + ",\n ".join(lines) + "\n}\n")
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Profile":
        """Reads what `save` wrote.

        Raises:
          ValueError: naming file and field, if something in it is missing or wrong.
          OSError: if the file can't be read.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{error.lineno}: not JSON: {error.msg}. Delete the file to profile again."
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a text file ({error}).") from None
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError(
                f"{path}: `format` must be {_FORMAT!r}: not a profile, or of another version. Delete the file to "
                "profile again."
            )
        try:
            found = _decoded(cls, content, "")
            if not found.layers:
                raise _Wrong("layers", "a list of at least one layer", [])
        except _Wrong as error:
            raise ValueError(
                f"{path}: {error}. Delete the file to profile again."
            ) from None
        return found


def _text(aval: jax.ShapeDtypeStruct) -> str:
    return f"{np.dtype(aval.dtype)}{list(aval.shape)}"


class _Wrong(ValueError):
    """A field of a file is not what it must be."""

    def __init__(self, field: str, want: str, got: Any):
        super().__init__(f"`{field}` must be {want}, got {json.dumps(got)[:80]}")


def _decoded(kind: Any, value: Any, field: str) -> Any:
    """`value`, as JSON has it, as what a dataclass declares a field to be."""
    if isinstance(kind, types.UnionType):
        (inner,) = (one for one in kind.__args__ if one is not types.NoneType)
        return None if value is None else _decoded(inner, value, field)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _Wrong(field, "a list", value)
        of = kind.__args__[0]
        return tuple(_decoded(of, v, f"{field}[{i}]") for i, v in enumerate(value))
    if kind is jax.ShapeDtypeStruct:
        match = re.fullmatch(r"(\w+)\[((\d+, )*\d+)?\]", str(value))
        try:
            dims = (match[2] or "").split(", ")
            shape = tuple(int(n) for n in dims if n)
            return jax.ShapeDtypeStruct(shape, jnp.dtype(match[1]))
        except TypeError:  # no match, or no such dtype
            raise _Wrong(field, "an array, such as 'float32[2, 3]'", value) from None
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise _Wrong(field, "an object", value)
        dot = f"{field}." if field else ""
        names = typing.get_type_hints(kind)
        for name in value:
            if name not in names:
                raise _Wrong(
                    dot + name,
                    f"absent: {kind.__name__} has no such field",
                    value[name],
                )
        for name in names:
            if name not in value:
                raise _Wrong(dot + name, "there", "nothing")
        return kind(**{n: _decoded(t, value[n], dot + n) for n, t in names.items()})
    number = kind in (int, float)
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) or (number and not 0 <= value < math.inf):
        want = "a finite number, at least 0" if kind is float else f"{kind.__name__}"
        raise _Wrong(
            field, "a whole number, at least 0" if kind is int else want, value
        )
    return kind(value)


# -- Measuring


def profile(
    traced: Traced,
    optimizer: optax.GradientTransformation,
    microbatch: Any,
    *,
    recompute: str = "none",
    compute_dtype: Any = None,
    reads: Sequence[str] = (),
    ties: Sequence[Sequence[int]] = (),
    programs: Sequence[str] = PROGRAMS,
    min_seconds: float = 0.5,
    devices: Sequence[jax.Device] | None = None,
    cache: str | os.PathLike | None = None,
) -> Profile:
    """Measures layers, the loss and the optimizer. `Pipeline.profile` calls it.

    Each program of each kind of layer is compiled, run to warm up, and then called until `min_seconds` have passed, at
    least 5 times. A call runs as many microbatches as take a tenth of a second. Layers run on what the layers before
    them make of `microbatch`, with freshly initialised weights.

    On several devices all of them run the same at the same time, so that what they share is measured as they share it:
    memory, and on devices faked on CPU the cores, which XLA's threads work on for all devices. `Profile.num_devices` says
    on how many it was measured, `Profile.num_cores` how many cores there were.

    Weights that a mesh splits over automatic axes are measured whole.

    Args:
      traced: the layers and the loss, traced for training.
      optimizer: the Optax chain. A layer's update is measured by itself.
      microbatch: arrays, or abstract arrays; for those, random numbers, and integers that are 0.
      recompute: "none", "full" or the name of the policy that `traced` was made with; compute_dtype: of `traced`; reads,
        ties: as of `Profile`; all for the record.
      programs: what to measure, of `PROGRAMS`; bytes are always counted. Seconds of others are None.
      min_seconds: how long each program is measured for, at the least.
      devices: where, all at once; None is JAX's first device alone.
      cache: a file. If it is there and holds the same layers, measured by the same version of JAX on the same kind of
        devices and as many of them and of cores, it is read instead; else it is written, with a warning if it was there.

    Returns: The `Profile`.

    Raises:
      ValueError: if `programs` names another, or the file is not a profile.
      OSError: if the file can't be read or written.

    References:
      Narayanan et al., "PipeDream", SOSP 2019, section 3.1 (the profiler); Kim et al., "torchgpipe", arXiv:2004.09910,
      section 2.2, `torchgpipe.balance` (layers measured one at a time).
    """
    for name in programs:
        if name not in PROGRAMS:
            raise ValueError(
                f"`programs` must be of {', '.join(map(repr, PROGRAMS))}, got {name!r}."
            )
    devices = jax.local_devices()[:1] if devices is None else list(devices)
    updates, update_of_layer = _trace_updates(traced, optimizer)
    made_with = dict(
        microbatch=shapes_text(microbatch),
        microbatch_size=jax.tree.leaves(microbatch)[0].shape[0],
        microbatch_bytes=_bytes(jax.tree.leaves(microbatch)),
        recompute=recompute,
        compute_dtype=None if compute_dtype is None else np.dtype(compute_dtype).name,
        reads=tuple(reads),
        ties=tuple(map(tuple, ties)),
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        num_cores=_num_cores(),
        jax_version=jax.__version__,
        model=_hash(_model_texts(traced)),
        optimizer=_hash([updates[u].equations.text() for u in update_of_layer]),
    )
    if cache is not None and os.path.exists(cache):
        found = Profile.load(cache)
        why = _unfit(found, made_with, programs)
        if not why:
            return dataclasses.replace(found, recompute=recompute)
        warnings.warn(f"{os.fspath(cache)}: {why}. Profiling again.", stacklevel=4)
    wanted = [name for name in PROGRAMS if name in programs]
    with jax.default_device(devices[0]), _Progress() as progress:
        of_kind, of_loss, of_update = _measure(
            traced, microbatch, updates, wanted, min_seconds, devices, progress
        )
    layers = tuple(
        _record(
            traced.kinds[k],
            {**of_kind[k], **of_update[u]},
            _outputs(traced.kinds[k]),
            name=layer.name,
            kind=k,
            parameters=traced.kinds[k].parameters,
            optimizer_state=_abstract(updates[u].state),
            state=_abstract(traced.mutable[k].leaves),
            stash=layer.stash,
            pop=layer.pop,
        )
        for layer, k, u in zip(traced.layers, traced.kind_of_layer, update_of_layer)
    )
    if "update" in wanted:
        of_loss["update"] = _Measured()
    of_nothing = dict.fromkeys(("parameters", "optimizer_state", "state"), ())
    of_nothing |= {"stash": (), "pop": ()}
    number = len(traced.kinds)
    loss = _record(traced.loss, of_loss, [()], name="loss", kind=number, **of_nothing)
    found = Profile(layers, loss, **made_with)
    if cache is not None:
        found.save(cache)
    return found


class _Measured(NamedTuple):
    """What is known of a program: what it takes, and bytes beside its arguments and results."""

    seconds: Seconds = Seconds()
    temporary_bytes: int = 0


def _record(
    program: LayerProgram,
    measured: Mapping[str, _Measured],
    outputs: Sequence,
    **fields,
) -> LayerProfile:
    seconds = {p: measured[p].seconds if p in measured else None for p in PROGRAMS}
    activations, *skips = (_abstract(jax.tree.leaves(y)) for y in outputs)
    return LayerProfile(
        **seconds,
        activations=activations,
        skips=tuple(skips),
        input_stash=tuple(program.stash[j] for j in program.input_stash),
        weight_stash=tuple(program.stash[j] for j in program.weight_stash),
        crossing=program.crossing,
        temporary_bytes=max((m.temporary_bytes for m in measured.values()), default=0),
        **fields,
    )


def _abstract(leaves: Iterable) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)


def _outputs(kind: LayerProgram, leaves: Sequence | None = None) -> tuple:
    """What a layer hands to the next, and the skips that it stashes."""
    return kind.output_tree.unflatten(kind.outputs if leaves is None else leaves)


def _measure(
    traced, microbatch, updates, wanted, min_seconds, devices, progress
) -> tuple:
    """For each kind of layer, for the loss, and for each update: what was measured of its programs."""
    kinds = (traced.kinds[k] for k in traced.kind_of_layer)
    model_bytes = sum(_bytes(kind.parameters) for kind in kinds)
    # Stages that share a core share its caches.
    shares = devices[0].platform == "cpu"
    num_caches = min(len(devices), _num_cores()) if shares else len(devices)
    num_copies = functools.partial(_num_copies, model_bytes / num_caches)
    of_kind: list[dict] = [{} for _ in traced.kinds]
    of_loss: dict = {}
    of_update: list[dict] = [{} for _ in updates]
    of_layers = [name for name in wanted if name != "update"]
    num_layers = len(traced.layers)
    progress.total = ("update" in wanted) * len(updates)
    if of_layers:
        progress.total += len(traced.kinds) + 1
        kind_of_layer = traced.kind_of_layer
        key = jax.random.key(0)
        initialise = shared_jit(devices[0].platform)
        x, live, loops = _values(microbatch["inputs"]), {}, {}
        for i, (layer, k) in enumerate(zip(traced.layers, kind_of_layer)):
            args = jax.tree.leaves((x, [live.pop(name) for name in layer.pop]))
            if k not in loops:
                progress(f"layer {i} of {num_layers}, {layer.name}")
                fresh = layer.given
                if fresh is None:
                    fresh = initialise(layer.init, jax.random.fold_in(key, i))
                weights, state = map(jax.tree.leaves, fresh)
                extra = [jnp.zeros(a.shape, a.dtype) for a in traced.kinds[k].extra[:1]]
                num_rows = num_copies(traced.kinds[k].parameters)
                loops[k] = _Loops(traced.kinds[k], devices, weights, state, num_rows)
                of_kind[k] = loops[k].measure(of_layers, args, extra, min_seconds)
            x, *kept = _outputs(traced.kinds[k], loops[k].outputs(args, extra))
            live |= dict(zip(layer.stash, kept, strict=True))
            if k not in kind_of_layer[i + 1 :]:
                del loops[k]
        progress("loss")
        of_loss = _Loops(traced.loss, devices).measure(
            of_layers, jax.tree.leaves(x), _values(microbatch), min_seconds
        )
    if "update" in wanted:
        for u, update in enumerate(updates):
            progress(f"update {u} of {len(updates)}")
            num_rows = num_copies(update.parameters)
            of_update[u] = {
                "update": _measure_update(update, devices, num_rows, min_seconds)
            }
    return of_kind, of_loss, of_update


def _num_copies(num_bytes: float, parameters: Sequence) -> int:
    """How many copies of a layer's weights are `num_bytes` large, or as large as what no cache holds; at least 1.

    Example:
      >>> weights = [jax.ShapeDtypeStruct([256, 256], np.float32)]
      >>> [_num_copies(n, weights) for n in (1e5, 3e6, 1e12)]
      [1, 11, 256]
    """
    layer_bytes = _bytes(parameters)
    return max(int(min(num_bytes, _NO_CACHE) // max(layer_bytes, 1)), 1)


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
    "weight_grad": ("parameters", "weight_stash", "crossing"),
}


class _Loops:
    """A kind of layer: its programs, each as a loop over microbatches, and the arrays that they read."""

    def __init__(
        self,
        kind: LayerProgram,
        devices: Sequence[jax.Device],
        weights: Sequence = (),
        state: Sequence = (),
        num_rows: int = 1,
    ):
        self.kind, self.devices, self.num_rows = kind, devices, num_rows
        leaves = {n: [kind.stash[j] for j in getattr(kind, n)] for n in _STASHES}
        leaves |= {"parameters": weights, "state": state, "crossing": kind.crossing}
        self.packs = {n: Packing.of([map(Leaf, own)]) for n, own in leaves.items()}
        self.held: dict[str, Any] = {
            "parameters": _packed(self.packs["parameters"], weights, num_rows),
            "state": _packed(self.packs["state"], state, num_rows),
        }

    def measure(
        self,
        programs: Sequence[str],
        inputs: Sequence[jax.Array],
        extra: Sequence[jax.Array],
        min_seconds: float,
    ) -> dict[str, _Measured]:
        """Measures `programs` on these inputs, and on what a forward of them leaves behind."""
        kind, held, found = self.kind, self.held, {}
        avals = [y for y in kind.outputs if is_inexact(y)]
        lists = list(kind.parameters), list(kind.stash), avals
        _, input_grads = jax.eval_shape(kind.backward, *lists)
        rng = np.random.default_rng(0)
        held |= {"inputs": inputs, "extra": extra}
        held["output_grads"] = [_random(rng, y) for y in avals]

        def run(name: str, **carry) -> dict:
            """What the loop of a program leaves; measured, if that is wanted."""
            reads = {n: held[n] for n in _READS[name]}
            body = getattr(self, f"_{name}")
            loop = _Loop(body, reads, carry, self.num_rows, self.devices)
            carry = loop(reads, carry)
            if name in programs:
                found[name], carry = loop.timed(reads, carry, min_seconds)
            if name.startswith("forward"):
                self._forward_loop = loop, carry
            return carry

        def forward(name: str, **rings) -> dict:
            results = {"outputs": _zeros(kind.outputs), "aux": _zeros(kind.aux)}
            return run(name, **results, **rings)

        def accumulators() -> dict:
            return self._empty("parameters", self.num_rows)

        if "forward" in programs:
            forward("forward")
        if {*programs} == {"forward"}:
            return found
        rings = {name: self._empty(name, _SLOTS) for name in _STASHES}
        kept = forward("forward_and_stash", **rings)
        held |= {name: kept[name] for name in _STASHES}
        if "backward" in programs and (input_grads or kind.parameters):
            run("backward", gradients=accumulators(), input_grads=_zeros(input_grads))
        if "backward" in found and not kind.parameters:
            found["input_grad"] = found["backward"]
        elif "input_grad" in programs or (
            "weight_grad" in programs and kind.parameters
        ):
            held["crossing"] = self._empty("crossing", _SLOTS)
            if input_grads:
                grads = _zeros(input_grads)
                left = run("input_grad", crossing=held["crossing"], input_grads=grads)
                held["crossing"] = left["crossing"]
            if "weight_grad" in programs and kind.parameters:
                run("weight_grad", gradients=accumulators())
        return {name: found.get(name, _Measured()) for name in programs}

    def outputs(self, inputs: Sequence, extra: Sequence) -> list[jax.Array]:
        """Of a forward of these inputs, by a program that was measured."""
        loop, carry = self._forward_loop
        reads = {**self.held, "inputs": inputs, "extra": extra}
        reads = {name: reads[name] for name in _FORWARD}
        carry = loop(reads, carry, times=1)
        self._forward_loop = loop, carry
        return [jnp.copy(y) for y in carry["outputs"]]  # the next call takes the carry

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
        outputs, told = self.kind.forward(*self._arguments(reads, row))
        return {"outputs": outputs, "aux": _added(carry["aux"], told)}

    def _forward_and_stash(self, reads: dict, carry: dict, slot, row) -> dict:
        given = self._arguments(reads, row)
        outputs, kept, told = self.kind.forward_and_stash(*given)
        rings: dict = {}
        for name in _STASHES:
            values = [kept[j] for j in getattr(self.kind, name)]
            rings |= self._write(carry, name, values, slot)
        return {"outputs": outputs, "aux": _added(carry["aux"], told), **rings}

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
        return {"input_grads": inputs, **self._write(carry, "crossing", left, slot)}

    def _weight_grad(self, reads: dict, carry: dict, slot, row) -> dict:
        parameters = self._read(reads, "parameters", row)
        crossing = self._read(reads, "crossing", slot)
        stash = self._stash(reads, slot)
        gradients = self.kind.weight_grad(parameters, stash, crossing)
        return self._accumulated(carry, gradients, row)


class _Loop:
    """A compiled loop: `body(reads, carry, slot, row) -> carry` over and over, the carry in place.

    The slot of the rings goes round; the row is always 0, which the compiler does not know: the engine reads both out
    of its table. As there, the body is a branch, out of which nothing that would be the same each time is moved.
    """

    def __init__(
        self,
        body: Callable,
        reads: dict,
        carry: dict,
        num_rows: int,
        devices: Sequence[jax.Device],
    ):
        mesh = Mesh(np.asarray(devices), "devices")
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._rows = np.arange(num_rows, dtype=np.int32)

        def run(times, rows, reads, carry):
            def once(i, carry):
                slot = lax.rem(i, np.int32(_SLOTS))
                at = lax.rem(i, np.int32(num_rows))
                row = lax.dynamic_index_in_dim(rows, at, keepdims=False)

                def now(carry):
                    return body(reads, carry, slot, row)

                return lax.cond(row >= 0, now, lambda carry: carry, carry)

            return lax.fori_loop(0, times, once, carry)

        each = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        jitted = jax.jit(each, donate_argnums=3)
        self._run = jitted.lower(*self._arguments(1, reads, carry)).compile()

    def _arguments(self, times: int, reads: dict, carry: dict) -> tuple:
        return jax.device_put(
            (np.int32(times), self._rows, reads, carry), self._everywhere
        )

    def __call__(self, reads: dict, carry: dict, times: int = _SLOTS) -> dict:
        carry = self._run(*self._arguments(times, reads, carry))
        return jax.block_until_ready(carry)

    def timed(self, reads: dict, carry: dict, min_seconds: float) -> tuple:
        """What a turn takes, and the carry. The loop must have run once."""

        def call(carry, times: int):
            given = jax.block_until_ready(self._arguments(times, reads, carry))
            start = time.perf_counter()
            carry = jax.block_until_ready(self._run(*given))
            return (time.perf_counter() - start) / times, carry

        *_, reads, carry = self._arguments(1, reads, carry)
        once, carry = call(carry, 1)
        times = max(math.ceil(min(_CALL_SECONDS, min_seconds / _FEWEST) / once), 1)
        seconds: list[float] = []
        while len(seconds) < _FEWEST or sum(seconds) * times < min_seconds:
            each, carry = call(carry, times)
            seconds.append(each)
        analysis = self._run.memory_analysis()
        num_bytes = 0 if analysis is None else int(analysis.temp_size_in_bytes)
        return _Measured(Seconds.of(seconds), num_bytes), carry


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


# -- The optimizer


class _Update(NamedTuple):
    """The update of a layer: `(*parameters, *gradients, *state, *given) -> [*parameters, *state]`; see `update.GIVEN`."""

    equations: Equations
    parameters: Sequence
    state: Sequence
    norm_dtype: np.dtype


def _trace_updates(traced: Traced, optimizer) -> tuple[list[_Update], list[int]]:
    """The updates that differ, and which one each layer has."""
    optimizer = optax.with_extra_args_support(optimizer)
    everything = [layer.parameters for layer in traced.layers]
    dtypes = [a.dtype for a in jax.tree.leaves(everything)]
    norm_dtype = np.result_type(np.float32, *dtypes)
    given = [jax.ShapeDtypeStruct((), t) for t in (np.float32, np.float32, norm_dtype)]
    found: dict[str, _Update] = {}
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
        made = _Update(equations, leaves, state_leaves, norm_dtype)
        text = equations.text()
        found.setdefault(text, made)
        of_layer.append(list(found).index(text))
    return list(found.values()), of_layer


def _measure_update(
    update: _Update,
    devices: Sequence[jax.Device],
    num_rows: int,
    min_seconds: float,
) -> _Measured:
    if not update.parameters:
        return _Measured()
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
    loop = _Loop(body, {}, carry, num_rows, devices)
    return loop.timed({}, loop({}, carry), min_seconds)[0]


# -- The cache


def _num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _model_texts(traced: Traced) -> list[str]:
    layers = zip(traced.layers, traced.kind_of_layer)
    return [
        *(f"{layer.name} {k} {layer.stash} {layer.pop}" for layer, k in layers),
        *(kind.text for kind in traced.kinds),
        traced.loss.text,
    ]


def _hash(texts: Iterable[str]) -> str:
    """Of what is computed; functions are named by their addresses in places, which tell nothing."""
    found = hashlib.sha256()
    for text in texts:
        found.update(re.sub(r" at 0x[0-9a-f]+", "", text).encode() + b"\0")
    return found.hexdigest()[:16]


def _unfit(
    found: Profile, made_with: Mapping[str, Any], programs: Sequence[str]
) -> str:
    """Why a profile is not the one that is asked for; empty if it is."""

    def same(name: str, was: Any, now: Any) -> bool:
        if name == "recompute":  # "full" runs the same programs
            was, now = ("none" if one == "full" else one for one in (was, now))
        if name == "num_cores" and made_with["device_kind"] != "cpu":
            return True  # other devices compute without them
        return was == now

    for name, now in made_with.items():
        was = getattr(found, name)
        if same(name, was, now):
            continue
        if name in ("model", "optimizer"):
            return f"it was made for another {name}"
        return f"its `{name}` is {was}, not {now}"
    for program in programs:
        if any(getattr(one, program) is None for one in (*found.layers, found.loss)):
            return f"`{program}` was not measured"
    return ""


class _Progress:
    """A line in the terminal, if there is one."""

    def __init__(self):
        self.total, self._count = 0, 0

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


# -- Balancing


def balance_by_time(
    profile: Profile, num_stages: int, *, split: bool = False
) -> list[int]:
    """Cuts layers into stages so that the slowest takes as little time as can be for one microbatch.

    Args:
      profile: of the layers.
      num_stages: S, at most the number of layers.
      split: count input and weight gradient instead of the whole backward, as tables that split it run them.

    Returns: The S - 1 boundaries: the layer at which each stage after the first begins.

    Raises:
      ValueError: if S is below 1 or above the number of layers, or what is counted was not measured.

    References:
      Kim et al., "torchgpipe", arXiv:2004.09910, section 2.2; `torchgpipe.balance.balance_by_time`.
    """
    operations = operations_of(split)
    return min_max(
        [sum(of) for of in zip(*map(profile.seconds, operations))], num_stages
    )


def balance_by_memory(
    profile: Profile, num_stages: int, *, in_flight: int = 1
) -> list[int]:
    """Cuts layers into stages so that the largest takes as few bytes as can be: weights, gradients, optimizer state and
    stashes.

    Args:
      profile: of the layers.
      num_stages: S, at most the number of layers.
      in_flight: microbatches whose stashes a stage keeps at once, at the most.

    Returns: The S - 1 boundaries: the layer at which each stage after the first begins.

    Raises:
      ValueError: if S is below 1 or above the number of layers.

    References:
      `torchgpipe.balance.balance_by_size`.
    """
    return min_max(profile.layer_bytes(in_flight), num_stages)


def operations_of(split: bool) -> tuple[str, ...]:
    """What a table runs for every microbatch."""
    backward = ("input_grad", "weight_grad") if split else ("backward",)
    return ("forward", *backward)
