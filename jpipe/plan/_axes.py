"""The costs of layers whose rows, positions and experts the devices of a stage share.

profile of whole layers ─┐
                         ├──> profile of a device of a group, with what it sends to the others
layers, on a mesh ───────┘
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jpipe.layers.backward import LayerProgram
from jpipe.layers.sharding import KeptSpecs, ValueSplit
from jpipe.layers.trace import TrainingTrace
from jpipe.mesh import CONTEXT, EXPERT, compilers_part
from jpipe.packing import axes
from jpipe.plan._exchanges import Axis, exchanges_of
from jpipe.plan._loops import PROGRAMS
from jpipe.plan._parts import part, parts, scaled, with_parts_of_weights
from jpipe.plan._profile import LayerProfile, Profile
from jpipe.plan._stashes import Avals, stashes_of

PLANNED_AXES = (EXPERT, CONTEXT)
"""The axes of a mesh that plans may have, in the order of the mesh."""


def split(whole: Profile, traced: TrainingTrace, mesh: Mesh) -> Profile:
    """The costs of the layers on each device of a group that shares a stage.

    - A program takes its measured seconds divided by the devices that split the layer's output. What it sends is
      counted (`Exchange`), and priced by `jpipe.plan.predict`.
    - Weights, gradients, optimizer state, stashes and activations take the bytes that the engine gives a device. The
      compiler decides the split of stashes, so each kind of layer is compiled.
    - An update takes its measured seconds times the part of the weights that a device has.

    Args:
      whole: the measured costs of whole layers.
      traced: the same layers, traced on the mesh.
      mesh: the mesh of a pipeline. Its axes "expert" and "context" are the group.

    Raises:
      ValueError: if the mesh splits stages over other axes, or the layers are others.
    """
    others = [n for n, size in mesh.shape.items() if size > 1 and n not in (*PLANNED_AXES, "stage", "data")]
    if others:
        raise ValueError(
            f"what a stage sends along {others[0]!r} is not counted, so a plan cannot have this axis: leave it out of "
            f"the mesh of the profile. {' and '.join(map(repr, PLANNED_AXES))} may stay."
        )
    if whole.axes:
        raise ValueError(
            "`whole` must be a profile of whole layers, got one that is split over "
            f"{', '.join(axis.name for axis in whole.axes)}. Measure it on a mesh without other axes than 'stage'."
        )
    names = [layer.name for layer in whole.layers], [layer.name for layer in traced.layers]
    if names[0] != names[1] or whole.microbatch_size != traced.values.num_rows:
        raise ValueError(
            f"`whole` must be a profile of the same layers and microbatch, got {len(names[0])} layers and "
            f"{whole.microbatch_size} rows, not {len(names[1])} and {traced.values.num_rows}. Profile with the same "
            "`num_microbatches`."
        )
    group = compilers_part(mesh)
    if group is None:
        return whole
    sizes = dict(group.shape)
    splits = [
        _Split.of(program, specs, traced.values, mesh) for program, specs in zip(traced.layer_kinds, traced.specs)
    ]
    layers = tuple(splits[k].of_layer(layer) for layer, k in zip(whole.layers, traced.kind_of_layer, strict=True))
    loss = _Split.of_loss(traced, sizes).of_layer(whole.loss)
    return dataclasses.replace(whole, layers=layers, loss=loss, axes=tuple(Axis(*item) for item in sizes.items()))


@dataclasses.dataclass(frozen=True)
class _Split:
    """How the devices of a group share a layer.

    Attributes:
      values: the splits of what layers pass on.
      share: the part of the work of a device.
      trained, frozen: the splits of weights.
      stashes: the stashes on a device, as the fields of `LayerProfile`.
      exchanges: what a device sends.
    """

    values: ValueSplit
    share: float
    trained: tuple[tuple, ...]
    frozen: tuple[tuple, ...]
    stashes: dict[str, Any]
    exchanges: tuple

    @classmethod
    def of(cls, program: LayerProgram, specs: tuple, values: ValueSplit, mesh: Mesh) -> "_Split":
        group = compilers_part(mesh)
        assert group is not None
        split_residuals: list[Avals] = []

        def local(rerun: LayerProgram) -> Avals:
            kept_specs = KeptSpecs([rerun], [specs], values, mesh)
            if rerun is program:
                split_residuals.append(parts(rerun.split_residuals, kept_specs.split_residuals[0], group.shape))
            return parts(rerun.stash, kept_specs.stash[0], group.shape)

        stashes = stashes_of(program, local)
        stashes["split_residuals"] = split_residuals[0]
        return cls(
            values,
            _share(program.outputs, values),
            tuple(specs[j] for j in program.trained),
            tuple(specs[j] for j in program.frozen),
            stashes,
            exchanges_of(program, specs, values, group),
        )

    @classmethod
    def of_loss(cls, traced: TrainingTrace, sizes: Mapping[str, int]) -> "_Split":
        """The loss is split like its inputs, and what it sends are single numbers."""
        values, loss = traced.values, traced.loss

        def local(rerun: LayerProgram) -> Avals:
            return tuple(part(a, values.spec(a.shape), sizes) for a in rerun.stash)

        stashes = {**stashes_of(loss, local), "split_residuals": loss.split_residuals}
        return cls(values, _share(loss.inputs, values), (), (), stashes, ())

    def of_layer(self, layer: LayerProfile) -> LayerProfile:
        """The layer on one device."""
        sizes = self.values.sizes

        def local(avals: Iterable[jax.ShapeDtypeStruct]) -> Avals:
            return tuple(part(a, self.values.spec(a.shape), sizes) for a in avals)

        split_layer = with_parts_of_weights(layer, parts(layer.parameters, self.trained, sizes))
        kept = split_layer.parameter_bytes / max(layer.parameter_bytes, 1)
        seconds: dict[str, Any] = {
            program: scaled(getattr(layer, program), kept if program == "update" else self.share)
            for program in PROGRAMS
        }
        return dataclasses.replace(
            split_layer,
            **seconds,
            **self.stashes,
            activations=local(layer.activations),
            skips=tuple(map(local, layer.skips)),
            frozen=parts(layer.frozen, self.frozen, sizes),
            temporary_bytes=math.ceil(layer.temporary_bytes * self.share),
            exchanges=self.exchanges,
        )


def _share(avals: Iterable[Any], values: ValueSplit) -> float:
    """The part of values that a device has: of the one that is split most."""
    parts_of = [math.prod(values.sizes[name] for name in axes(values.spec(a.shape))) for a in avals]
    return 1 / max(parts_of, default=1)
