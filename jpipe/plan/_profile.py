"""What layers cost: seconds measured, and bytes counted, once for each kind of layer.

layers ── traced ──> kinds ── measured among each other ──> Profile ──> file
                                                               ├──> graph, for the solvers
                                                               └──> balance_by_time, balance_by_memory
"""

import dataclasses
import functools
import json
import os
import tempfile

import jax

from jpipe.plan._loops import PROGRAMS, Seconds, num_bytes
from jpipe.plan._profile_file import WrongField, decode, text_of
from jpipe.solvers import Graph, Node, min_max

_FORMAT = "jpipe profile 2"


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

    def with_updates_of(self, other: "Profile") -> "Profile":
        """Takes the seconds of the updates from a profile at another microbatch size, on which they do not depend.

        Args:
          other: a profile of the same model and optimizer on the same devices, in which updates were measured.

        Raises:
          ValueError: if `other` is of another model, optimizer or machine.
        """
        for name in ("optimizer", "device_kind", "num_devices", "num_cores"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                raise ValueError(
                    f"`other` must be a profile with the same `{name}`, {mine!r}, got {its!r}. Measure the updates again."
                )
        layers = tuple(
            dataclasses.replace(layer, update=its.update)
            for layer, its in zip(self.layers, other.layers, strict=True)
        )
        loss = dataclasses.replace(self.loss, update=other.loss.update)
        return dataclasses.replace(self, layers=layers, loss=loss)

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
        to_json = functools.partial(json.dumps, default=text_of)
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
            found = decode(cls, content, "")
            if not found.layers:
                raise WrongField("layers", "a list of at least one layer", [])
        except WrongField as error:
            raise ValueError(
                f"{path}: {error}. Delete the file to profile again."
            ) from None
        return found


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
