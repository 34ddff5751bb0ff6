"""The arguments of a pipeline, checked, and the facts that follow from them and the shapes of a batch."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jpipe._processes.sharing import BatchRows, is_global, is_shared
from jpipe.layers import mapped
from jpipe.layers.avals import shapes_key
from jpipe.layers.axis_rules import rules_for
from jpipe.layers.layer import Layer
from jpipe.layers.layer_split import LayerSplit
from jpipe.layers.loss import Loss
from jpipe.layers.products import ProductRule
from jpipe.layers.residuals import ELEMENTWISE_ONLY, Rerun
from jpipe.layers.trace import (
    Traced,
    TrainingTrace,
    trace_evaluation,
    trace_layers,
)
from jpipe.layers.trainable import ALL, Trainable
from jpipe.lowering.target import target_of
from jpipe.lowering.versions import num_versions_of
from jpipe.mesh import DATA, STAGE, compilers_part, on_platform, row_axes
from jpipe.options import slices
from jpipe.options.checks import batch_size
from jpipe.options.communication import Communication
from jpipe.options.numbers import Numbers
from jpipe.options.splits import Splits
from jpipe.schedule import Schedule
from jpipe.segments import Model, WholeModel
from jpipe.segments.placement import Placement, StepGraph
from jpipe.segments.trace import Tracing
from jpipe.stages import vocabulary
from jpipe.stages.cut import Stages, cut
from jpipe.stages.extra_args import hooked_passes, keeps_stash, read_delays, weight_accesses
from jpipe.stages.offload import NO_OFFLOAD, Offload
from jpipe.stages.ties import resolve_ties
from jpipe.stages.vocabulary_table import check_table


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of `Pipeline`, checked. See there for their meaning.

    Attributes:
      model: the model that the user gave.
      hooks: "forward" and "backward" with the functions of `forward_params` and `backward_params`.
      ties: `(layer, "dotted.path")` pairs of each parameter that the user has tied.
    """

    model: Model
    loss: Loss
    optimizer: optax.GradientTransformation
    schedule: Schedule
    mesh: Mesh
    splits: Splits
    numbers: Numbers
    communication: Communication
    has_aux: bool
    ties: Sequence[Sequence[tuple[int, str]]]
    hooks: Mapping[str, Callable]
    donate: bool
    compiler_options: Mapping[str, Any]
    offload: Offload = NO_OFFLOAD
    trainable: Trainable = ALL

    @property
    def num_replicas(self) -> int:
        """Replicas of the pipeline, along the axis "data" of the mesh."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def platform(self) -> str:
        """The platform of the devices, such as "cpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def num_parts(self) -> int:
        """Equal parts that the rows of a batch are cut into, over microbatches and devices."""
        return self.schedule.num_row_groups * self.num_replicas * self._num_row_shares

    @property
    def _num_row_shares(self) -> int:
        """Devices that the rows of a microbatch are split over."""
        return math.prod(self.mesh.shape[name] for name in row_axes(self.mesh.shape))

    @functools.cached_property
    def automatic_mesh(self) -> Mesh | None:
        """The mesh of the axes that are left to the compiler; None if there are none."""
        return compilers_part(self.mesh)

    @property
    def mesh_of_layers(self) -> Mesh | None:
        """The mesh that layers are traced on; None if it has the pipeline's own axes alone."""
        return self.mesh if set(self.mesh.axis_names) - {STAGE, DATA} else None

    @property
    def automatic_sizes(self) -> Mapping[str, int]:
        """Axis -> number of devices, of the axes that are left to the compiler."""
        return {} if self.automatic_mesh is None else self.automatic_mesh.shape

    @functools.cached_property
    def rows(self) -> BatchRows | None:
        """The shares of several processes in the rows of a batch; None on a mesh of one process."""
        return BatchRows.of(self.mesh) if is_shared(self.mesh) else None

    def whole(self, batch: Any) -> Any:
        """A batch with the rows of all processes, as abstract arrays if there are several."""
        rows = self.rows
        if rows is None:
            return batch

        def whole(a: Any) -> Any:
            if not getattr(a, "shape", ()):
                return a
            num_rows = a.shape[0] if is_global(a) else rows.whole(a.shape[0])
            return jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), a.dtype)

        return jax.tree.map(whole, batch)

    def microbatch(self, batch: Any, *, whole: bool = False) -> Any:
        """The abstract microbatch of a minibatch that trains: a group of rows, or a slice of its positions.

        Args:
          batch, whole: see `row_group`.

        Raises:
          ValueError: if the minibatch cannot be cut into equal microbatches.
        """
        return slices.microbatch(self.schedule, self.row_group(batch, whole=whole))

    def minibatch(self, microbatch: Any) -> Any:
        """The abstract minibatch that has a microbatch, with the rows of all processes."""
        parts, k = self.schedule.num_row_groups * self.num_replicas, self.schedule.num_slices

        def whole(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            positions = [k * n for n in a.shape[1:2]]
            return jax.ShapeDtypeStruct((parts * a.shape[0], *positions, *a.shape[2:]), a.dtype)

        return jax.tree.map(whole, microbatch)

    def row_group(self, batch: Any, num_groups: int | None = None, *, whole: bool = False) -> Any:
        """The abstract rows of a minibatch that go through the pipeline together: a microbatch, or all its slices.

        Args:
          batch: arrays or abstract arrays `[batch, ...]`; in several processes the rows that this one gives.
          num_groups: the number per minibatch and replica; None: that of the schedule.
          whole: whether `batch` has the rows of all processes.

        Raises:
          ValueError: if the minibatch cannot be cut into equal groups.
        """
        N = num_groups or self.schedule.num_row_groups
        batch = self.model.batch(batch)
        if not whole:
            batch = self.whole(batch)
        size, replicas = batch_size(batch), self.num_replicas
        parts = N * replicas
        if size == 0:
            raise ValueError("the batch is empty: give at least one row.")
        if size % parts:
            nearest = [size // parts * parts, (size // parts + 1) * parts]
            per_replica = f' on each of the {replicas} replicas of axis "data"'
            raise ValueError(
                f"a batch of {size} cannot be cut into {N} equal microbatches"
                f"{per_replica if replicas > 1 else ''}. Use a batch of "
                f"{' or '.join(str(n) for n in nearest if n)}, or a schedule whose "
                "`num_microbatches` divides "
                f"{size if replicas == 1 else 'the share of a replica'}."
            )
        num_rows, shares = size // parts, self._num_row_shares
        if num_rows % shares:
            names = [f'"{name}"' for name in row_axes(self.mesh.shape)]
            axes = f"axis {names[0]}" if len(names) == 1 else f"axes {' and '.join(names)}"
            raise ValueError(
                f"a microbatch of {num_rows} rows (a batch of {size} in {parts} parts) cannot be split over the "
                f"{shares} devices of the {axes}. Use a batch that is a multiple of {parts * shares}, fewer "
                "microbatches, or a smaller axis."
            )
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((num_rows, *a.shape[1:]), abstract(a).dtype),
            dict(batch),
        )

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """The arguments that decide how a state is laid out and are compared without tracing."""
        schedule, mesh = self.schedule, self.mesh
        return {
            "schedule": schedule.identity[1:],
            "mesh": (
                tuple(mesh.shape.items()),
                tuple((d.platform, d.id) for d in mesh.devices.flat),
            ),
            "axis_rules": rules_for(self.automatic_sizes, self.splits.axis_rules),
            "strategy": self.splits.strategy,
            **self.numbers.parts,
            **self.communication.parts,
            "offload": self.offload,
            "has_aux": self.has_aux,
            "ties": tuple(map(tuple, self.ties)),
            "number of layers": self.model.number,
        }

    def trace(self, microbatch: Any, key_impl: Any, like: Sequence[Layer] = ()) -> TrainingTrace:
        """The layers and the loss traced for a microbatch.

        Args:
          microbatch: abstract arrays.
          key_impl: implementation of the random keys.
          like: the layers for another microbatch, which a whole model is cut like; `()`: it is cut anew.
        """
        with on_platform(self.platform), mapped.explained(self.mesh):
            layers = self._layers(microbatch, key_impl, like)
            options = self._trace_options(key_impl, self._layer_splits(layers, microbatch, key_impl))
            return trace_layers(layers, self.loss, microbatch, **options)

    def trace_evaluation(self, microbatch: Any, key_impl: Any, trained: Traced) -> Traced:
        """Traces the layers in evaluation, split like the layers in `trained`."""
        options = self._trace_options(key_impl, trained.splits)
        with on_platform(self.platform), mapped.explained(self.mesh):
            layers = self._layers(microbatch, key_impl, like=trained.layers)
            return trace_evaluation(layers, microbatch, **options)

    def steps(self, microbatch: Any, key_impl: Any) -> StepGraph:
        """The steps of a whole model that a solver can place."""
        assert isinstance(self.model, WholeModel)
        with on_platform(self.platform):
            return self.model.steps(microbatch, self._tracing(key_impl))

    def placed(self, placement: Placement) -> "Settings":
        """The settings of a whole model that is cut as a solver has placed it."""
        assert isinstance(self.model, WholeModel)
        return dataclasses.replace(self, model=self.model.placed(placement))

    def _tracing(self, key_impl: Any) -> Tracing:
        return Tracing(self.numbers.compute_dtype, key_impl, self.mesh_of_layers, self.splits.axis_rules)

    def _layers(self, microbatch: Any, key_impl: Any, like: Sequence[Layer] = ()) -> Sequence[Layer]:
        num_stages = self.schedule.num_stages
        return self.model.layers(microbatch, self._tracing(key_impl), num_stages=num_stages, like=like)

    def _trace_options(self, key_impl: Any, splits: Sequence[LayerSplit]) -> dict[str, Any]:
        accumulate = self.communication.accumulate_gradients
        return dict(
            compute_dtype=self.numbers.compute_dtype,
            key_impl=key_impl,
            policy=self.numbers.policy,
            products=ProductRule(
                factored=None if accumulate is None else accumulate.is_smaller,
                widened=target_of(self.platform).sums_apart,
            ),
            mesh=self.mesh_of_layers,
            axis_rules=self.splits.axis_rules,
            splits=splits,
            trainable=self.trainable,
            rerun=self._rerun,
            num_slices=self.schedule.num_slices,
        )

    @property
    def _rerun(self) -> Rerun:
        """What a backward computes again rather than read from the stash."""
        if not keeps_stash(self.schedule):
            return ELEMENTWISE_ONLY
        target = target_of(self.platform)
        return Rerun(weight_accesses(self.schedule, self.hooks), target.flops_per_byte, target.compares_results)

    def _layer_splits(self, layers: Sequence[Layer], microbatch: Any, key_impl: Any) -> Sequence[LayerSplit]:
        """The split of each layer by the strategy; `()` without one."""
        if self.splits.strategy is None:
            return ()
        return self.splits.strategy.split_layers(
            layers,
            self.loss,
            microbatch,
            self.automatic_sizes,
            compute_dtype=self.numbers.compute_dtype,
            key_impl=key_impl,
        )

    def resolved_ties(self, traced: Traced) -> list[tuple[tuple[int, int], ...]]:
        """The tied parameters as `(layer, leaf)` pairs: see `resolve_ties`."""
        return resolve_ties(traced.layers, [*self.model.ties(traced.layers), *self.ties])

    def vocabulary(self, traced: Traced, microbatch: Any, key_impl: Any) -> vocabulary.Vocabulary:
        """The layers that all stages run together."""
        layers = vocabulary.find(
            traced,
            self.mesh.shape[STAGE],
            self.loss,
            microbatch,
            self.resolved_ties(traced),
            compute_dtype=self.numbers.compute_dtype,
            key_impl=key_impl,
            num_stages=self.schedule.num_stages,
            axis_rules=self.splits.axis_rules,
        )
        if self.loss.num_parts is not None and layers.units:
            raise ValueError(
                "`WholeBatchLoss` takes the outputs of the last stage, and `axis_rules` let all stages run the first "
                'and the last layer together. Leave the axis "stage" out of the rules.'
            )
        delays = read_delays(self.schedule) if self.hooks else {}
        hooked = {name: delays[name] for name in self.hooks}
        check_table(layers, self.schedule, hooked)
        return layers

    def cut(
        self,
        traced: Traced,
        starts: Sequence[int],
        microbatch: Any,
        key_impl: Any,
        trained: Stages | None = None,
    ) -> Stages:
        """The traced layers cut into stages that begin at `starts`; for `trained` see `jpipe.stages.cut.cut`."""
        ties = self.resolved_ties(traced)
        if not self.schedule.splits_backward:
            traced = traced.with_one_stash()
        return cut(
            traced,
            list(starts),
            self.schedule.num_stages,
            ties,
            target=target_of(self.platform),
            vocabulary_layers=self.vocabulary(traced, microbatch, key_impl),
            compression=self.communication.compress_messages,
            gradient_sums=self.numbers.gradient_sums(self.communication.accumulate_gradients),
            devices=self.schedule.copies,
            offload=self.offload,
            num_versions=num_versions_of(self.schedule).tolist(),
            hooked=bool(hooked_passes(self.schedule, self.hooks)),
            trained=trained,
        )


def abstract(a: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, and the dtype that JAX gives it."""
    return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))


def same_shapes(a: Any, b: Any) -> bool:
    """Returns whether two trees of arrays have the same structure, shapes and dtypes."""
    return shapes_key(a) == shapes_key(b)
