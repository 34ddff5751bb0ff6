"""The training state."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jpipe._util.suggest import suggests


@suggests
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PipelineState:
    """The training state. A pytree; every array is split over the devices along its first axis.

    An array that a layer splits over another axis of the mesh ("model") is also split along its
    own dims; so are its gradient and its optimizer state.

    D is the number of devices of the pipeline, V the number of weight versions, R the most stages
    on one device.

    Attributes:
      parameters: packed weights, `[D * W, ...]`, W rows for the versions of a device's stages; `Pipeline.get_params` unpacks them.
      read_parameters: the weights that the hooks compute for a "forward" or a "backward", packed
        like `parameters`; empty without hooks or delays.
      optimizer_state: packed state of the Optax chain, `[D * R, ...]`; `[devices * R, ...]` if replicas
        share it.
      mutable_state: packed mutable state of the layers, `[D * R, ...]`;
        `Pipeline.get_mutable_state` unpacks it.
      loss_scale: the loss scale and its counter, `[D]` each; empty without a loss scale.
      gradient_compression: what the compression of gradients keeps on each device: "error", packed like
        `gradients`, and "states" of the compressor, `[devices * R, ...]`; empty without compression.
      message_compression: what the compressors of messages keep on each device, `[devices * R, ...]`; empty without.
      gradients: packed gradient accumulators, `[devices * R, ...]`; zero between minibatches.
      buffers: activations and gradients in flight.
      round: int32 `[D]`, steps since `init` or `flush`.
      started: int32 `[D]`, microbatches of training before those steps.
      key: uint32 `[D, ...]`, the data of the random key of training.
      program: the `jpipe.program.Program` that says how the arrays are laid out; static.
    """

    parameters: Mapping[str, jax.Array]
    read_parameters: Mapping[str, Mapping[str, jax.Array]]
    optimizer_state: Mapping[str, jax.Array]
    mutable_state: Mapping[str, jax.Array]
    loss_scale: Mapping[str, jax.Array]
    gradient_compression: Mapping[str, Any]
    message_compression: Mapping[str, Any]
    gradients: Mapping[str, jax.Array]
    buffers: Any
    round: jax.Array
    started: jax.Array
    key: jax.Array
    program: Any = dataclasses.field(metadata=dict(static=True))

    def __repr__(self) -> str:
        """Shapes and bytes; the numbers themselves would fill the screen."""

        def size(a: Any) -> int:
            return getattr(a, "size", 0) * getattr(a, "dtype", np.dtype(bool)).itemsize

        def line(name: str) -> str:
            leaves = jax.tree.leaves_with_path(getattr(self, name))
            texts = [
                f"{jax.tree_util.keystr(path)} {getattr(a, 'dtype', type(a).__name__)}"
                f"{list(np.shape(a))}".strip()
                for path, a in leaves
            ]
            num_bytes = sum(size(a) for _, a in leaves)
            return f"  {name}: {num_bytes:,} bytes: {', '.join(texts) or 'nothing'}"

        names = [f.name for f in dataclasses.fields(self) if f.name != "program"]
        return "\n".join(["PipelineState(", *map(line, names), ")"])

    def arrays(self) -> collections.OrderedDict[str, Any]:
        """All arrays by field, in the order of the fields, without the program.

        Compiled functions take these. JAX keeps the structure of arguments after the function is gone, and the structure of a
        state holds the program.
        """
        names = (f.name for f in dataclasses.fields(self) if f.name != "program")
        return collections.OrderedDict((name, getattr(self, name)) for name in names)

    def kept(self) -> dict[str, Any]:
        """The arrays that hold the training between two minibatches, by the engine's names."""
        names = (
            "parameters",
            "read_parameters",
            "optimizer_state",
            "mutable_state",
            "loss_scale",
            "gradient_compression",
            "message_compression",
        )
        return {name: getattr(self, name) for name in names}

    def in_flight(self) -> dict[str, Any]:
        """The arrays of minibatches that are not complete, by the engine's names."""
        return {"gradients": self.gradients, "buffers": self.buffers}

    def counters(self) -> dict[str, jax.Array]:
        """The position in training: rounds, microbatches before them, and the random key."""
        return {"round": self.round, "started": self.started, "key": self.key}


def num_rounds(state: PipelineState) -> int:
    """Rounds since `init` or `flush`."""
    return int(state.round.addressable_data(0)[0])


def check_state(state: Any) -> None:
    """Refuses what is not a training state, one whose arrays were changed, or were donated."""
    if not isinstance(state, PipelineState):
        raise ValueError(
            "`state` must be the state that `init` or `step` returned, got "
            f"{type(state).__name__}."
        )
    expected = getattr(state.program, "abstract_state", state)
    (arrays, tree), (like, its_tree) = map(jax.tree.flatten, (state, expected))
    if (
        expected is state
        or tree != its_tree
        or [*map(_form, arrays)] != [*map(_form, like)]
    ):
        raise ValueError(
            f"`state` must hold the arrays that `init` or `step` returned, and `{_changed(state, expected)}` holds others. "
            "Give the state as it was returned. To change weights use `pipe.with_params`, to change numbers of the "
            "optimizer `pipe.with_hyperparams`."
        )
    if any(isinstance(a, jax.Array) and a.is_deleted() for a in arrays):
        raise ValueError(
            "`state` was donated to an earlier `step` and its arrays are gone. Keep the "
            "state that step returned: `state, metrics = pipe.step(state, batch)`. To keep "
            "old states usable, make the pipeline with `donate=False`."
        )


def _form(array: Any) -> tuple:
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _changed(state: PipelineState, expected: PipelineState) -> str:
    """The first field of a state that holds other arrays than expected."""
    for name, like in expected.arrays().items():
        arrays = getattr(state, name)
        if jax.tree.structure(arrays) != jax.tree.structure(like):
            return name
        if any(
            map(
                lambda a, b: _form(a) != _form(b), *map(jax.tree.leaves, (arrays, like))
            )
        ):
            return name
    return "program"
