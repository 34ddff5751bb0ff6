"""What layers cost: seconds measured, and bytes counted, once for each kind of layer.

layers ── traced ──> kinds ── measured among each other ──> Profile ──> file
                                                               ├──> graph, for the solvers
                                                               └──> balance_by_time, balance_by_memory
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import tempfile
import types
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.layers.avals import shapes_text
from jpipe.layers.backward import LayerProgram
from jpipe.layers.trace import Traced
from jpipe.plan.graph import Graph, Node
from jpipe.plan.measure import (
    PROGRAMS,
    Measured,
    Progress,
    Seconds,
    count_cores,
    measure_layers,
    measure_updates,
    num_bytes,
    outputs,
    trace_updates,
)
from jpipe.solvers.min_max import min_max

_FORMAT = "jpipe profile 3"


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
        perhaps the input gradient before it; split_residuals: what the input gradient leaves for the weight gradient.
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
    split_residuals: tuple[jax.ShapeDtypeStruct, ...]
    parameters: tuple[jax.ShapeDtypeStruct, ...]
    optimizer_state: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[jax.ShapeDtypeStruct, ...]
    temporary_bytes: int
    stash: tuple[str, ...]
    pop: tuple[str, ...]

    def avals(self, name: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The abstract arrays of an attribute: "parameters", "split_residuals" and so on."""
        return getattr(self, name)

    @property
    def activation_bytes(self) -> tuple[int, ...]:
        """Of what it hands to the next layer, then of each skip that it stashes."""
        return tuple(map(num_bytes, (self.activations, *self.skips)))

    @property
    def parameter_bytes(self) -> int:
        """Of its weights."""
        return num_bytes(self.parameters)

    @property
    def optimizer_bytes(self) -> int:
        """Of their optimizer state."""
        return num_bytes(self.optimizer_state)

    @property
    def stash_bytes(self) -> int:
        """What a microbatch keeps from its forward to a backward that is not split."""
        return num_bytes(self.input_stash) + num_bytes(self.weight_stash)

    @property
    def weight_bytes(self) -> int:
        """What it takes whatever is in flight: weights, gradients, optimizer state and mutable state."""
        return 2 * self.parameter_bytes + self.optimizer_bytes + num_bytes(self.state)


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
    updates, update_of_layer = trace_updates(traced, optimizer)
    made_with = dict(
        microbatch=shapes_text(microbatch),
        microbatch_size=jax.tree.leaves(microbatch)[0].shape[0],
        microbatch_bytes=num_bytes(jax.tree.leaves(microbatch)),
        recompute=recompute,
        compute_dtype=None if compute_dtype is None else np.dtype(compute_dtype).name,
        reads=tuple(reads),
        ties=tuple(map(tuple, ties)),
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        num_cores=count_cores(),
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
    with jax.default_device(devices[0]), Progress.of(programs) as progress:
        given = programs, min_seconds, devices, progress
        *of_kind, of_loss = measure_layers(traced, microbatch, *given)
        of_update = measure_updates(updates, update_of_layer, *given)
    layers = tuple(
        _record(
            traced.layer_kinds[k],
            {**of_kind[k], **of_update[u]},
            outputs(traced.layer_kinds[k]),
            name=layer.name,
            kind=k,
            parameters=traced.layer_kinds[k].parameters,
            optimizer_state=_abstract(updates[u].state),
            state=_abstract(traced.mutable[k].leaves),
            stash=layer.stash,
            pop=layer.pop,
        )
        for layer, k, u in zip(traced.layers, traced.kind_of_layer, update_of_layer)
    )
    if "update" in programs:
        of_loss["update"] = Measured()
    of_nothing = dict.fromkeys(("parameters", "optimizer_state", "state"), ())
    of_nothing |= {"stash": (), "pop": ()}
    number = len(traced.layer_kinds)
    loss = _record(traced.loss, of_loss, [()], name="loss", kind=number, **of_nothing)
    found = Profile(layers, loss, **made_with)
    if cache is not None:
        found.save(cache)
    return found


def _record(
    program: LayerProgram,
    measured: Mapping[str, Measured],
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
        split_residuals=program.split_residuals,
        temporary_bytes=max((m.temporary_bytes for m in measured.values()), default=0),
        **fields,
    )


def _abstract(leaves: Iterable) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)


# -- The cache


def _model_texts(traced: Traced) -> list[str]:
    layers = zip(traced.layers, traced.kind_of_layer)
    return [
        *(f"{layer.name} {k} {layer.stash} {layer.pop}" for layer, k in layers),
        *(kind.text for kind in traced.layer_kinds),
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
