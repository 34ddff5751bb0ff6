"""The facts of each array of the state: see the list `STATE_ARRAYS` in `jpipe.engine.state`."""

import dataclasses
import enum
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jpipe.engine.shapes import StatePackings
from jpipe.gradients.apart import ApartSums
from jpipe.layers.layer import Layer
from jpipe.lowering.array_rows import ArrayRows
from jpipe.lowering.lower import Lowered
from jpipe.options.local_steps import LocalSteps
from jpipe.options.loss_scale import LossScale
from jpipe.packing import Place
from jpipe.stages.cut import Stages

BUFFERS = "buffers"
"""The field of `PipelineState` that holds the arrays of microbatches in flight, by name."""


class Lives(enum.Enum):
    """The time for which an array holds something."""

    KEPT = "between two minibatches: it is part of the training, and every checkpoint has it"
    IN_FLIGHT = "while a minibatch is not complete: it is zero, or never read, when nothing is in flight"
    COUNTER = "it says where the training is, and only the program moves it"


class OnReplicas(enum.Enum):
    """The relation between the arrays of a stage's replicas, along the axis "data" and as copies."""

    EQUAL = "all replicas have the same numbers"
    TERM = "each replica has its term of a sum"
    PART = "each replica has numbers of its own"


class Adopted(enum.Enum):
    """The treatment of an array in a pipeline of another layout, by `adopt` and by a checkpoint that it restores."""

    ANEW = "it begins as before training"
    LEAVES = "each leaf goes to where the other pipeline has its layer"
    WHOLE = "it is taken as it is"
    ALIKE = "it is taken if stages, replicas and compressors are equal; if not, it begins anew with a warning"
    COMPUTED = "it is computed from other arrays"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateFacts:
    """The facts that decide the arrays of a state.

    Attributes:
      mesh: the devices; None: all arrays are whole on their device.
      lowered: the lowered table.
      packings: the packings of the leaves.
      array_rows: name of an array -> the rows of its packed arrays: see `PassSpec.array_rows`.
      microbatch: the abstract microbatch.
      hooked_passes: the passes ("forward", "backward") that read weights of their own, from a parameter hook.
      loss_scale: the loss scale, or None.
      key_impl: implementation of the random keys.
      norm_dtype: dtype of gradient norms.
      weight_dtype: dtype of the weights of minibatches; None: the loss is a mean.
      shares_updates: whether each replica of a stage keeps a share of the optimizer's state.
      local_steps: the outer step of replicas whose weights are their own; None: those of replicas are equal.
      tick_stashes: the stashes that are no part of the state.
      sums: the sums of gradients that lie apart.
      gradient_compression: local shapes of the state of the compression of gradients.
      message_compression: local shapes of the state of the compression of messages.
    """

    mesh: Mesh | None
    lowered: Lowered
    packings: StatePackings
    array_rows: Mapping[str, ArrayRows]
    microbatch: Any
    hooked_passes: Sequence[str] = ()
    loss_scale: LossScale | None = None
    key_impl: Any = None
    norm_dtype: Any = np.dtype(np.float32)
    weight_dtype: Any = None
    shares_updates: bool = False
    local_steps: LocalSteps | None = None
    tick_stashes: Container[str] = ()
    sums: ApartSums = ApartSums()
    gradient_compression: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    message_compression: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class LayerLeaves(NamedTuple):
    """The leaves of each layer in an array.

    Attributes:
      name: its name in the portable form of a state, and in the manifests of checkpoints.
      places: `(stages, owner) -> (layer, place of each of its leaves, row of the place)` for each layer of one of
        `Stages.owners`.
      like: the tree of a layer's leaves, abstract.
    """

    name: str
    places: Callable[[Stages, int], Iterable[tuple[int, Sequence[Place], int]]]
    like: Callable[[Layer], Any]


def equal_on_replicas(facts: StateFacts) -> OnReplicas:
    return OnReplicas.EQUAL


def as_learners_hold(facts: StateFacts) -> OnReplicas:
    """What an update writes is equal on replicas, but for those that train apart."""
    return OnReplicas.EQUAL if facts.local_steps is None else OnReplicas.PART


def apart_on_replicas(facts: StateFacts) -> OnReplicas:
    return OnReplicas.PART


def on_devices(facts: StateFacts) -> frozenset[str]:
    """No names: nothing is in host memory."""
    return frozenset()


@dataclasses.dataclass(frozen=True)
class StateArray:
    """An array of the state, or a tree of arrays with one use.

    Attributes:
      name: the field of `PipelineState` and the attribute of `TickArrays`. Arrays in flight are in the field
        `buffers`.
      use: its purpose: "weights", "optimizer", "gradients", "activations" (kept from a forward to its backward),
        "messages" (between stages), "vocabulary" (between stages and layers that all stages run), "host stashes",
        "batch", "compression" or "state".
      shapes: its local shapes on a device, by `StateFacts`. The first axis is split over devices. None: there is no
        such array.
      lives: the time for which it holds something.
      held: the relation between the arrays of replicas, by `StateFacts`.
      adopted: its treatment in another layout.
      memory: the field of `jpipe.Memory` that counts it; None: it is small, and none does.
      words: its name in the memory timeline, if that is not its name with spaces.
      on_host: the names of those of its arrays that are in host memory, by `StateFacts`.
      first: its local values before training, by the engine; None: zeros, or leaves of layers.
      leaves: the leaves of each layer in it, if `adopted` is `LEAVES`; None: those of an optimizer.
      rows: the key of `PassSpec.array_rows` for its packed arrays; empty: the array's name.
      has_versions: whether it has a row for every version of the weights.
      in_forward_only: whether forward-only tables have it.
      in_buffers: whether it lies in the field `buffers`.
    """

    name: str
    use: str
    shapes: Callable[[StateFacts], Any]
    lives: Lives = Lives.KEPT
    held: Callable[[StateFacts], OnReplicas] = equal_on_replicas
    adopted: Adopted = Adopted.ANEW
    memory: str | None = None
    words: str = ""
    on_host: Callable[[StateFacts], frozenset[str]] = on_devices
    first: Callable[[Any], Any] | None = None
    leaves: LayerLeaves | None = None
    rows: str = ""
    has_versions: bool = False
    in_forward_only: bool = False
    in_buffers: bool = False

    @property
    def field(self) -> str:
        """The field of `PipelineState` for it."""
        return BUFFERS if self.in_buffers else self.name

    @property
    def text(self) -> str:
        """The name in words."""
        return self.words or self.name.replace("_", " ")


def buffer(name: str, use: str, shapes: Callable[[StateFacts], Any], **options: Any) -> StateArray:
    """An array in the field `buffers`."""
    defaults: dict[str, Any] = {
        "lives": Lives.IN_FLIGHT,
        "held": apart_on_replicas,
        "memory": "activations",
        "in_buffers": True,
    }
    return StateArray(name, use, shapes, **(defaults | options))
