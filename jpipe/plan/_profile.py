"""The costs of layers: seconds measured and bytes counted, once per kind of layer.

layers ── traced ──> kinds ── measured among each other ──> Profile ──> file
                                                               ├──> graph, for the solvers
                                                               └──> balance_by_time, balance_by_memory
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import tempfile
from typing import Any

import jax

from jpipe._util.foreign import read_json, shown
from jpipe.layers.avals import num_bytes
from jpipe.layers.backward import LayerValues
from jpipe.layers.residuals import AT_HAND, STASHED, UNREAD
from jpipe.plan._exchanges import Axis, Exchange
from jpipe.plan._loops import PROGRAMS, Seconds
from jpipe.plan._profile_file import WrongField, decode, text_of
from jpipe.plan._stashes import Stash
from jpipe.schedule import Schedule
from jpipe.solvers import Graph, Machine, Node, min_max
from jpipe.stages.extra_args import weight_accesses

_FORMAT = "jpipe profile 7"


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """The costs of one layer for one microbatch, or of the loss, which has no weights.

    A time is None if it was not measured, and 0 if there is nothing to compute. A layer whose
    inputs need no gradient (the model's first layer, or one with integer inputs) has no
    `input_grad`. A layer without weights has no `weight_grad` and no `update`, and its `backward`
    is its `input_grad`.

    Attributes:
      name: name of the layer.
      kind: layers of equal kinds compute the same and were measured once.
      forward: seconds of the forward that keeps nothing.
      forward_and_stash: seconds of the forward that keeps the stash of the backward.
      backward: seconds of the whole backward.
      input_grad: seconds of the input gradient alone, for tables that split the backward.
      weight_grad: seconds of the weight gradient alone, for the same tables.
      update: seconds of the optimizer's update and the norm of the gradient, per minibatch.
      activations: abstract arrays that the layer passes to the next layer.
      skips: abstract arrays of each skip that the layer stashes.
      input_stash: arrays kept from the forward for the input gradient alone.
      weight_stash: arrays kept from the forward for the weight gradient, and perhaps for the
        input gradient too.
      stale_stash: both stashes where backwards run on other weights than their forwards.
      whole_stash: both stashes if the backward computes nothing again from weights.
      split_residuals: arrays that the input gradient keeps for the weight gradient.
      parameters: the weights that are trained.
      gradients: the arrays in which their gradients are summed over microbatches.
      optimizer_state: the part of the optimizer's state that belongs to the weights.
      state: the mutable state.
      statistics: the arrays kept of a minibatch until the state moves.
      temporary_bytes: the most bytes that a measured program needs beside all these.
      stash: names of the skips that start here.
      pop: names of the skips that end here.
      frozen: the weights that are not trained.
      exchanges: what a device sends to the others that share the layer, see `Profile.axes`.
      values: the values of `input_stash` and `weight_stash` that other layers may have as well.
      reads_moved_state: whether its training reads mutable state that the same call moves, so that nothing can run the
        call again.
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
    stale_stash: Stash
    whole_stash: Stash
    split_residuals: tuple[jax.ShapeDtypeStruct, ...]
    parameters: tuple[jax.ShapeDtypeStruct, ...]
    gradients: tuple[jax.ShapeDtypeStruct, ...]
    optimizer_state: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[jax.ShapeDtypeStruct, ...]
    statistics: tuple[jax.ShapeDtypeStruct, ...]
    temporary_bytes: int
    stash: tuple[str, ...]
    pop: tuple[str, ...]
    frozen: tuple[jax.ShapeDtypeStruct, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    values: LayerValues = LayerValues()
    reads_moved_state: bool = False

    def avals(self, name: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The abstract arrays of the attribute `name`, such as "parameters" or "split_residuals"."""
        return getattr(self, name)

    def in_table(self, weight_accesses: float, splits_backward: bool) -> "LayerProfile":
        """The layer with the stash that a table needs.

        Args:
          weight_accesses: what it takes its backwards to read weights again.
          splits_backward: whether it splits backwards.
        """
        at_hand = Stash(self.input_stash, self.weight_stash, self.values)
        kept = {AT_HAND: at_hand, STASHED: self.stale_stash, UNREAD: self.whole_stash}[weight_accesses]
        if not splits_backward:
            kept = kept.joined
        return dataclasses.replace(
            self,
            input_stash=kept.for_inputs,
            weight_stash=kept.for_weights,
            values=kept.values,
            stale_stash=kept,
            whole_stash=kept,
        )

    @property
    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes of the activations, then of each skip that the layer stashes."""
        return tuple(map(num_bytes, (self.activations, *self.skips)))

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights that are trained."""
        return num_bytes(self.parameters)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights that are not trained."""
        return num_bytes(self.frozen)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the sums of gradients."""
        return num_bytes(self.gradients)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer state."""
        return num_bytes(self.optimizer_state)

    @property
    def stash_bytes(self) -> int:
        """Bytes that a microbatch keeps from its forward to its (whole) backward."""
        return num_bytes(self.input_stash) + num_bytes(self.weight_stash)

    @property
    def weight_bytes(self) -> int:
        """Bytes that do not depend on microbatches in flight.

        Weights, gradients, optimizer state and mutable state.
        """
        weights = self.parameter_bytes + self.frozen_bytes
        return weights + self.gradient_bytes + self.optimizer_bytes + num_bytes(self.state)


def programs_of(operation: str, recompute: str = "none") -> tuple[str, ...]:
    """The programs of `PROGRAMS` that an operation of a table runs in each layer.

    Args:
      operation: "forward", "backward", "weight_grad" or "update"; or "input_grad", the backward of
        a table that splits it.
      recompute: the pipeline's `recompute`.

    Returns:
      Names of programs, in the order in which they run.

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
    """The costs of a model's layers on one device, for one microbatch.

    Under `recompute="full"` the same programs run, in other operations. So a profile made without
    recomputation becomes one with it by `dataclasses.replace(profile, recompute="full")`.

    Attributes:
      layers: one record per layer.
      loss: the loss, which the last stage computes.
      microbatch: shapes and dtypes of a microbatch.
      microbatch_size: samples per microbatch, the leading axis.
      microbatch_bytes: bytes of a microbatch.
      recompute: "none", "full" or the name of a policy.
      compute_dtype: the pipeline's compute dtype, or None.
      reads: the passes ("forward", "backward") that read other weights than the updated ones. A device
        then holds these weights too. "stale_params" if the optimizer reads the weights that a
        gradient was computed at, so that a stage keeps as many versions as its delay plus one.
      ties: for each set of tied weights, the layers that share them.
      device_kind: the kind of the devices.
      num_devices: the number of devices that were measured at the same time.
      num_cores: the number of cores that the process could run on.
      jax_version: the version of JAX that compiled the programs.
      model: hash of the layers' programs.
      optimizer: hash of the updates.
      axes: axes of a mesh, each with its number of devices, that share each layer as a group: the costs are those of
        one of them. `()`: a device has whole layers.
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
    axes: tuple[Axis, ...] = ()

    @property
    def group_size(self) -> int:
        """The number of devices that share each layer."""
        return math.prod(axis.size for axis in self.axes)

    def exchanges(self, operation: str) -> list[list[Exchange]]:
        """What a device sends in an operation of each layer; for `operation` see `seconds`."""
        sends = [name.removesuffix("_and_stash") for name in programs_of(operation, self.recompute)]
        return [[e for name in sends for e in layer.exchanges if e.operation == name] for layer in self.layers]

    @property
    def skips(self) -> dict[str, tuple[int, int, tuple[jax.ShapeDtypeStruct, ...]]]:
        """Name of a skip -> layer that stashes it, layer that pops it, abstract leaves.

        As of `jpipe.stages.Traced`.
        """
        pops = {name: i for i, layer in enumerate(self.layers) for name in layer.pop}
        return {
            name: (i, pops[name], avals)
            for i, layer in enumerate(self.layers)
            for name, avals in zip(layer.stash, layer.skips, strict=True)
        }

    def seconds(self, operation: str) -> list[float]:
        """Median seconds of an operation in each layer. The last layer includes the loss.

        Args:
          operation: "forward", "backward", "weight_grad" or "update"; or "input_grad", the backward
            of a table that splits it. Under `recompute="full"` a backward begins with the forward.

        Raises:
          ValueError: if there is no such operation, or it was not measured.
        """
        if operation not in (*PROGRAMS[2:], "forward"):
            raise ValueError(
                "`operation` must be 'forward', 'backward', 'input_grad', 'weight_grad' or 'update', got "
                f"{shown(operation)}."
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

    def in_table(self, schedule: Schedule) -> "Profile":
        """The profile with the stashes that a table needs, see `LayerProfile.in_table`."""
        kind_of_table = weight_accesses(schedule, self.reads), schedule.splits_backward
        return dataclasses.replace(
            self,
            layers=tuple(layer.in_table(*kind_of_table) for layer in self.layers),
            loss=self.loss.in_table(*kind_of_table),
        )

    def with_updates_of(self, other: "Profile") -> "Profile":
        """This profile with the seconds of the updates of another one.

        An update does not depend on the microbatch, so profiles at several microbatch sizes can
        share its seconds.

        Args:
          other: a profile of the same layers and optimizer on the same devices, in which updates
            were measured.

        Returns:
          The new `Profile`.

        Raises:
          ValueError: if the optimizer or the devices of `other` differ.
        """
        for name in ("optimizer", "device_kind", "num_devices", "num_cores"):
            wanted, got = getattr(self, name), getattr(other, name)
            if wanted != got:
                raise ValueError(
                    f"`other` must be a profile with the same `{name}`, {wanted!r}, got {shown(got)}. Measure the "
                    "updates again."
                )
        layers = tuple(
            dataclasses.replace(layer, update=measured.update)
            for layer, measured in zip(self.layers, other.layers, strict=True)
        )
        loss = dataclasses.replace(self.loss, update=other.loss.update)
        return dataclasses.replace(self, layers=layers, loss=loss)

    def layer_bytes(self, in_flight: int = 1) -> list[int]:
        """Bytes of each layer on its device: `LayerProfile.weight_bytes` and stashes. The last layer includes the loss.

        Args:
          in_flight: number of microbatches whose stashes are kept at once. Under `recompute="full"`
            it does not count: one stash is kept.
        """
        copies = 1 if self.recompute == "full" else in_flight
        costs = [layer.weight_bytes + copies * layer.stash_bytes for layer in self.layers]
        costs[-1] += copies * self.loss.stash_bytes
        return costs

    def graph(self, bandwidth: float | None = None) -> Graph:
        """The layers as a graph for the solvers.

        Each layer is a node with its number as id. Edges lead to the next layer and to the ends of
        the layer's skips. The loss is part of the last layer.

        Args:
          bandwidth: bytes per second between a device and the host, for `Node.transfer`; None
            leaves `transfer` out.
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
                transfer=None if bandwidth is None else sum(layer.activation_bytes) / bandwidth,
            )
            for i, (layer, forward, backward, memory) in enumerate(costs)
        )
        source = {n: i for i, layer in enumerate(self.layers) for n in layer.stash}
        edges = {(i, i + 1): None for i in range(len(self.layers) - 1)}
        for i, layer in enumerate(self.layers):
            edges |= {(source[name], i): None for name in layer.pop}
        return Graph(nodes, tuple(edges))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON, one layer per line.

        An existing file is replaced whole or not at all.
        """
        path = os.fspath(path)
        handle, draft = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=f".{os.path.basename(path)}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(self.text())
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise

    def text(self) -> str:
        """The profile as JSON, as `save` writes it."""
        to_json = functools.partial(json.dumps, default=text_of)
        lines = []
        for name, value in {"format": _FORMAT, **dataclasses.asdict(self)}.items():
            text = to_json(value)
            if name == "layers":
                text = "[\n  " + ",\n  ".join(map(to_json, value)) + "\n ]"
            lines.append(f"{to_json(name)}: {text}")
        return "{\n " + ",\n ".join(lines) + "\n}\n"

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Profile":
        """Reads a profile that `save` wrote.

        Raises:
          ValueError: if something in the file is missing or wrong; names file and field.
          OSError: if the file cannot be read.
        """
        try:
            content = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error} Delete the file to profile again.") from None
        return cls.from_json(content, path)

    @classmethod
    def from_json(cls, content: Any, path: str | os.PathLike) -> "Profile":
        """The profile of parsed JSON, which came from the file at `path`."""
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError(
                f"{path}: `format` must be {_FORMAT!r}: not a profile, or of another version. Delete the file to "
                "profile again."
            )
        try:
            profile = decode(cls, content, "")
            if not profile.layers:
                raise WrongField("layers", "a list of at least one layer", [])
        except WrongField as error:
            raise ValueError(f"{path}: {error}. Delete the file to profile again.") from None
        return profile


# -- Balancing


def balance_by_time(
    profile: Profile, num_stages: int, *, split: bool = False, machine: Machine | None = None
) -> list[int]:
    """Cuts layers into stages so that the slowest stage takes the least time per microbatch.

    Args:
      profile: the costs of the layers.
      num_stages: S, at most the number of layers.
      split: whether to count input gradient and weight gradient instead of the whole backward.
      machine: the devices, if those of a group send to each other inside of layers. What they send then counts too,
        as if none of it were hidden.

    Returns:
      The S - 1 boundaries: the layer at which each stage after the first begins.

    Raises:
      ValueError: if S is below 1 or above the number of layers, or a program was not measured.

    References:
      Kim et al., "torchgpipe", arXiv:2004.09910, section 2.2; `torchgpipe.balance.balance_by_time`.
    """
    operations = operations_of(split)
    seconds = [sum(of) for of in zip(*map(profile.seconds, operations))]
    if machine is not None and profile.group_size > 1:
        for i, sent in enumerate(zip(*map(profile.exchanges, operations))):
            seconds[i] += sum(e.seconds(machine, profile.axes) for e in itertools.chain(*sent))
    return min_max(seconds, num_stages)


def balance_by_memory(profile: Profile, num_stages: int, *, in_flight: int = 1) -> list[int]:
    """Cuts layers into stages so that the largest stage takes the fewest bytes.

    Weights, gradients, optimizer state and stashes count.

    Args:
      profile: the costs of the layers.
      num_stages: S, at most the number of layers.
      in_flight: the most microbatches whose stashes a stage keeps at once.

    Returns:
      The S - 1 boundaries: the layer at which each stage after the first begins.

    Raises:
      ValueError: if S is below 1 or above the number of layers.

    References:
      `torchgpipe.balance.balance_by_size`.
    """
    return min_max(profile.layer_bytes(in_flight), num_stages)


def operations_of(split: bool) -> tuple[str, ...]:
    """The operations of a table for every microbatch."""
    backward = ("input_grad", "weight_grad") if split else ("backward",)
    return ("forward", *backward)
