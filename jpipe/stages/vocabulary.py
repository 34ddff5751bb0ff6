"""The first and the last layer, where all stages compute them together, each with a part of the vocabulary.

A layer with a parameter that is split over the axis "stage", by its own metadata or by a rule such as
`("vocab", "stage")`, is a *vocabulary layer*: an embedding if it
is the first layer, a head if it is the last. It belongs to no device alone. In the table it runs with its *home*,
the first or the last stage: all devices run it in the ticks in which its home runs, read the version of the weights
that its home reads, and update it when its home updates. `jpipe.vocabulary` says what each device computes.

A device keeps a part of every parameter of the layer. A parameter that is not split by the vocabulary, such as a norm's
scale, is split along its first dim and gathered before the layer reads it. An update of the optimizer that works
element by element changes the parts. Any other gathers them, computes the update of the whole on every device, and
keeps its part.

Letters: P parts, one for each device of the axis "stage"; V versions.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import vocabulary
from jpipe.layers.avals import cast, real_dtype
from jpipe.layers.axis_rules import AxisRules, constraints_on
from jpipe.layers.layer import Layer
from jpipe.layers.loss import Loss, LossTerms
from jpipe.layers.sharding import parameter_specs
from jpipe.layers.trace import Traced
from jpipe.layers.tracer import run_layer
from jpipe.lowering.everywhere import Follows, ticks_before_update
from jpipe.lowering.scalars import UPDATE
from jpipe.mesh import STAGE
from jpipe.packing import Leaf, Packing, Place, axes, axes_by_dim
from jpipe.schedule import Schedule

EMBEDDING, HEAD = "embedding", "head"


class PartedLeaf(NamedTuple):
    """A parameter of a vocabulary layer.

    Attributes:
      aval: the whole parameter.
      dim: the dim along which the parts follow each other. The last part ends with zeros if P does not divide it.
      is_split: whether the layer reads the part; else it reads the whole parameter.
      num_parts: P.
      spec: the split of a part by the compiler over automatic axes of the mesh, as in `jpipe.packing.Leaf`.
    """

    aval: jax.ShapeDtypeStruct
    dim: int
    is_split: bool
    num_parts: int
    spec: tuple = ()

    @property
    def num_rows(self) -> int:
        """Length of a part along `dim`."""
        return -(-self.aval.shape[self.dim] // self.num_parts)

    @property
    def part(self) -> jax.ShapeDtypeStruct:
        """A part."""
        return self.part_like(self.aval.dtype)

    def part_like(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """A part of an array of the parameter's shape and another dtype."""
        shape = list(self.aval.shape)
        shape[self.dim] = self.num_rows
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    def rows(self, number: int) -> slice:
        """The rows of part `number`, along `dim`, without padding."""
        start, stop = (min(n * self.num_rows, self.aval.shape[self.dim]) for n in (number, number + 1))
        return slice(start, stop)

    def padding(self) -> list[tuple[int, int]]:
        """The padding that `pad` adds to the whole parameter, so that it has equal parts."""
        widths = [(0, 0)] * len(self.aval.shape)
        missing = self.num_rows * self.num_parts - self.aval.shape[self.dim]
        widths[self.dim] = (0, missing)
        return widths


@dataclasses.dataclass(frozen=True)
class VocabularyLayer:
    """A layer that all devices run together.

    Attributes:
      index: its number in the model.
      layer: the layer.
      leaves: its parameters.
      compute_dtype: see `Pipeline`.
      key_impl: implementation of its random key.
      places: places of a device's part of each parameter, in the packing of its `Unit`; tied leaves have one place.
    """

    index: int
    layer: Layer
    leaves: tuple[PartedLeaf, ...]
    compute_dtype: Any
    key_impl: Any
    places: tuple[Place, ...] = ()

    def outputs(self, parameters: Sequence, key_data: Any, inputs: Any, train: bool) -> Any:
        """Computes the layer's outputs, on every device.

        Args:
          parameters: this device's part of each leaf, or the whole if the layer reads the whole.
          key_data: data of its random key.
          inputs: its inputs, equal on all devices.
          train: whether it runs as in training.
        """
        tree = jax.tree.structure(self.layer.parameters)
        values, args = cast((tree.unflatten(parameters), (inputs,)), self.compute_dtype)
        rows = {leaf.num_rows: leaf.aval.shape[leaf.dim] for leaf in self.leaves if leaf.is_split}
        num_parts = self.leaves[0].num_parts
        with (
            constraints_on(None, ()),
            vocabulary.splitting(STAGE, num_parts, rows) as splitting,
        ):
            if train:
                key = jax.random.wrap_key_data(key_data, impl=self.key_impl)
                outputs, _ = self.layer.train(values, self.layer.state, key, args)
            else:
                outputs = self.layer.evaluate(values, self.layer.state, args)
        if not splitting.used:
            raise vocabulary.VocabularyError(
                f'layer {self.index} ({self.layer.name}) splits a parameter over the axis "{STAGE}" and gives no part '
                "of it to `jpipe.vocabulary.lookup` or `jpipe.vocabulary.logits`. Use one of them, or leave the axis "
                "out of the parameter's partition."
            )
        return outputs


class Unit(NamedTuple):
    """Vocabulary layers that are updated together.

    Attributes:
      name: `EMBEDDING` or `HEAD`; tied layers are one unit, `EMBEDDING`.
      home: the stage whose updates it follows.
      layers: the layers.
      packing: the packing of a device's parts, in arrays of their own. The sums of their gradients have the same
        places.
    """

    name: str
    home: int
    layers: tuple[VocabularyLayer, ...]
    packing: Packing

    def stored(self) -> dict[Place, PartedLeaf]:
        """The place of each leaf that is stored, once for tied leaves, and the leaf."""
        return {place: leaf for layer in self.layers for place, leaf in zip(layer.places, layer.leaves, strict=True)}

    @property
    def update(self) -> str:
        """Name of its update among the operations of a table."""
        return f"{UPDATE}_{self.name}"

    @property
    def indices(self) -> tuple[int, ...]:
        """The numbers of its layers in the model."""
        return tuple(layer.index for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The vocabulary layers of a model; without any, all is None or empty.

    Attributes:
      embedding: the first layer, or None.
      head: the last layer, or None.
      units: the groups of layers that are updated together.
      loss: the loss of the pipeline.
      output_dtype: the dtype of the head's outputs; None: as they are.
      embedded: abstract leaves of the outputs of the embedding.
      head_inputs: tree of the abstract inputs of the head.
      head_reads: for each leaf of `head_inputs` whether the head reads it.
      microbatch: tree of an abstract microbatch.
      reported: abstract values that layers report to the loss, by name. Their sums travel beside the activations, as
        `(activation, sums)`; without reports the activation is alone.
    """

    embedding: VocabularyLayer | None = None
    head: VocabularyLayer | None = None
    units: tuple[Unit, ...] = ()
    loss: Loss | None = None
    output_dtype: Any = None
    embedded: tuple = ()
    head_inputs: Any = None
    head_reads: tuple[bool, ...] = ()
    microbatch: Any = None
    reported: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layers(self) -> list[VocabularyLayer]:
        """The embedding and the head, if the model has them."""
        return [layer for layer in (self.embedding, self.head) if layer is not None]

    def inner(self, num_layers: int) -> range:
        """The layers of the model that belong to one stage each."""
        return range(self.embedding is not None, num_layers - (self.head is not None))

    def together(self, num_stages: int) -> dict[str, Follows]:
        """Operation that all devices run together -> the operation that it follows."""
        followed = {}
        if self.embedding is not None:
            followed["embed"] = Follows("forward", 0)
            followed["embed_backward"] = Follows("backward", 0)
        if self.head is not None:
            followed["head"] = Follows("forward", num_stages - 1)
        for unit in self.units:
            followed[unit.update] = Follows("update", unit.home)
        return followed

    @functools.cached_property
    def parted(self) -> dict[Place, PartedLeaf]:
        """The place and the split of each parameter."""
        return {place: leaf for unit in self.units for place, leaf in unit.stored().items()}

    def embedding_outputs(self, parameters: Sequence, key_data: Any, inputs: Sequence, train: bool) -> Any:
        """Computes the embedding's outputs for a list of its inputs, equal on all devices."""
        assert self.embedding is not None
        inputs = jax.tree.structure(self.microbatch["inputs"]).unflatten(inputs)
        outputs = self.embedding.outputs(parameters, key_data, inputs, train)
        return cast(outputs, self.embedding.compute_dtype)

    def head_outputs(self, parameters: Sequence, key_data: Any, inputs: Sequence, train: bool) -> Any:
        """Computes the head's outputs for a list of its inputs, with `SplitLogits` in it."""
        assert self.head is not None
        inputs, _ = self._head_inputs_and_sums(inputs)
        outputs = self.head.outputs(parameters, key_data, inputs, train)
        return cast(outputs, self.output_dtype)

    def _head_inputs_and_sums(self, inputs: Sequence) -> tuple[Any, Mapping[str, Any]]:
        """The activation that the head takes, and the sums of the reports of layers."""
        tree = jax.tree.structure(self.head_inputs).unflatten(inputs)
        return tree if self.reported else (tree, {})

    def first_sums(self) -> list[jax.Array]:
        """The leaves that follow the embedding's outputs: the first sums of the reports of layers."""
        sums = {name: jnp.zeros(a.shape, a.dtype) for name, a in self.reported.items()}
        return jax.tree.leaves(sums)

    def loss_terms(
        self,
        outputs: Any,
        inputs: Sequence[jax.Array],
        batch: Sequence[jax.Array],
        loss_key: Any,
    ) -> LossTerms:
        """Computes the loss of a microbatch, equal on all devices.

        Args:
          outputs: the outputs of the head.
          inputs: a list of the head's inputs.
          batch: leaves of the microbatch.
          loss_key: data of the random key of the loss.
        """
        assert self.loss is not None and self.head is not None
        _, reported = self._head_inputs_and_sums(inputs)
        batch = jax.tree.structure(self.microbatch).unflatten(batch)
        key = None
        if "key" in self.loss.asks:
            key = jax.random.wrap_key_data(loss_key, impl=self.head.key_impl)
        return self.loss.terms(outputs, batch, reported, key)


NO_VOCABULARY = Vocabulary()


def find(
    traced: Traced,
    num_parts: int,
    loss: Loss,
    microbatch: Any,
    ties: Sequence[Sequence[tuple[int, int]]],
    *,
    compute_dtype: Any,
    key_impl: Any,
    num_stages: int,
    axis_rules: AxisRules,
) -> Vocabulary:
    """Finds the vocabulary layers of a traced model.

    Args:
      traced: the layers, traced as whole layers.
      num_parts: P, devices of the axis "stage"; 1: every layer is whole.
      loss: the loss.
      microbatch: tree of an abstract microbatch.
      ties: see `jpipe.stages.cut.Stages`.
      compute_dtype: see `Pipeline`.
      key_impl: implementation of the random keys.
      num_stages: S.
      axis_rules: the rules from the logical names of dims to axes.

    Raises:
      ValueError: if another layer than the first or the last names the axis "stage", or a layer cannot be split.
    """
    layers = traced.layers
    if num_parts == 1:
        return NO_VOCABULARY
    split_layers: dict[int, VocabularyLayer] = {}
    for i, layer in enumerate(layers):
        leaves = _parted(layer, i, num_parts, axis_rules, traced.values.sizes)
        if not any(leaf.is_split for leaf in leaves):
            continue
        _check_layer(layer, i, len(layers), leaves)
        split_layers[i] = VocabularyLayer(i, layer, leaves, compute_dtype, key_impl)
    if not split_layers:
        return NO_VOCABULARY
    if traced.splits:
        raise vocabulary.VocabularyError(
            f'layer {min(split_layers)} names the axis "{STAGE}", and `strategy` says how every layer is split. Leave '
            "`strategy` out, or leave the axis out of the parameter's partition."
        )
    units = tuple(_units(split_layers, ties, num_stages))
    placed = {layer.index: layer for unit in units for layer in unit.layers}
    embedding, head = placed.get(0), placed.get(len(layers) - 1)
    head_inputs: Any = None
    head_reads: tuple[bool, ...] = ()
    if head is not None:
        head_inputs, head_reads = _inputs_of_last(traced)
    if traced.reported:
        inputs_of = {0: microbatch["inputs"], len(layers) - 1: head_inputs}
        for i, split in split_layers.items():
            _check_no_report(split, inputs_of[i], traced.reported)
    return Vocabulary(
        embedding,
        head,
        units,
        loss,
        _output_dtype(layers, compute_dtype),
        () if embedding is None else tuple(traced.outputs[0]),
        head_inputs,
        head_reads,
        microbatch,
        traced.reported,
    )


def _parted(
    layer: Layer,
    index: int,
    num_parts: int,
    rules: AxisRules,
    sizes: Mapping[str, int],
) -> tuple[PartedLeaf, ...]:
    """Splits the parameters of a layer. The compiler splits each part as it splits other weights."""
    leaves, tree = jax.tree.flatten(layer.parameters)
    specs = tree.flatten_up_to(layer.specs) if layer.specs else [()] * len(leaves)
    result = []
    for aval, spec in zip(leaves, specs, strict=True):
        dims = [d for d, names in enumerate(axes_by_dim(spec)) if any(_is_over_stages(name, rules) for name in names)]
        if len(dims) > 1 or (dims and dims[0] >= len(aval.shape)):
            raise vocabulary.VocabularyError(
                f"layer {index} ({layer.name}): a parameter of shape {list(aval.shape)} cannot be split as {spec}. "
                "Name "
                f'"{STAGE}" for one of its dims.'
            )
        dim = dims[0] if dims else 0
        result.append(PartedLeaf(aval, dim, bool(dims), num_parts))
    if not any(leaf.is_split for leaf in result):  # the layer stays whole, and axes need not divide parts of it
        return tuple(result)
    parts = tree.unflatten([leaf.part if leaf.aval.shape else leaf.aval for leaf in result])
    layer_of_parts = dataclasses.replace(layer, parameters=parts)
    inner = parameter_specs(layer_of_parts, index, sizes, rules)
    return tuple(leaf._replace(spec=spec) for leaf, spec in zip(result, inner, strict=True))


def _is_over_stages(name: str, rules: AxisRules) -> bool:
    """Returns whether a dim of this name is split over the axis "stage": by the first rule for the name, or as the axis
    itself.
    """
    targets = [target for known, target in rules if known == name]
    return STAGE in axes((targets[0],)) if targets else name == STAGE


def _check_layer(layer: Layer, index: int, num_layers: int, leaves: Sequence[PartedLeaf]) -> None:
    """Raises `ValueError` if a layer cannot be a vocabulary layer."""
    name = f'layer {index} ({layer.name}) names the axis "{STAGE}"'
    remedy = "leave the axis out of the parameter's partition"
    if index not in (0, num_layers - 1):
        raise vocabulary.VocabularyError(
            f"{name}, and only the first and the last layer can be split over it, got layer {index} of {num_layers}: "
            f"{remedy}."
        )
    problems = {
        "has mutable state": jax.tree.leaves(layer.state),
        "has frozen parameters": layer.frozen,
        "has skips": layer.stash or layer.pop,
        "has a parameter without dims": any(not leaf.aval.shape for leaf in leaves),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise vocabulary.VocabularyError(
                f"{name} and {problem}, which all stages cannot share. Move that into a layer of its own, or {remedy}."
            )
    sizes: dict[int, int] = {}
    for leaf in leaves:
        size = leaf.aval.shape[leaf.dim] if leaf.is_split else None
        if size is not None and sizes.setdefault(leaf.num_rows, size) != size:
            raise vocabulary.VocabularyError(
                f"{name} for vocabularies of {sizes[leaf.num_rows]} and {size} tokens, whose parts have equally many "
                f"rows ({leaf.num_rows}) and cannot be told apart. Pad one vocabulary to the size of the other."
            )


def _check_no_report(split_layer: VocabularyLayer, inputs: Any, reported: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a vocabulary layer reports: each device would report values of its part alone."""
    layer, key = (
        split_layer.layer,
        jax.eval_shape(lambda: jax.random.key(0, impl=split_layer.key_impl)),
    )
    if split_layer.index > 0:
        inputs, _ = inputs
    run = run_layer(layer, split_layer.compute_dtype)
    *_, names = jax.eval_shape(run, layer.parameters, layer.state, key, (inputs,))
    if names := sorted(set(names) & set(reported)):
        raise vocabulary.VocabularyError(
            f'layer {split_layer.index} ({layer.name}) names the axis "{STAGE}" and reports {names[0]!r}, and each '
            "device has a part of its parameters only. Report in a layer between the first and the last, or leave the "
            "axis out of the parameter's partition."
        )


def _inputs_of_last(traced: Traced) -> tuple[Any, tuple[bool, ...]]:
    """The abstract inputs of the last layer, and which of their leaves it reads."""
    before = traced.layer_kinds[traced.kind_of_layer[-2]]
    inputs, *_ = before.output_tree.unflatten(before.outputs)
    kind = traced.layer_kinds[traced.kind_of_layer[-1]]
    equations = kind.forward_equations
    outputs = equations.outputs[: len(kind.outputs)]
    read = equations.slice(equations.inputs, outputs).read()
    first = len(kind.parameters)
    variables = equations.inputs[first : first + len(kind.inputs)]
    return inputs, tuple(v in read for v in variables)


def _output_dtype(layers: Sequence[Layer], compute_dtype: Any) -> Any:
    """The dtype of the model's outputs: of its weights, and at least float32; see `trace_layers`."""
    if compute_dtype is None:
        return None
    return real_dtype([layer.parameters for layer in layers])


def _units(
    split_layers: Mapping[int, VocabularyLayer],
    ties: Sequence[Sequence[tuple[int, int]]],
    num_stages: int,
) -> Iterable[Unit]:
    """Groups vocabulary layers to units: tied layers are one unit."""
    owner_of: dict[tuple[int, int], tuple[int, int]] = {}
    for tie in ties:
        inside = [(i, j) for i, j in tie if i in split_layers]
        if not inside:
            continue
        ways = {(split_layers[i].leaves[j].is_split, split_layers[i].leaves[j].dim) for i, j in inside}
        if len(inside) < len(tie) or len(ways) > 1:
            raise vocabulary.VocabularyError(
                f"tied parameters of layers {', '.join(str(i) for i, _ in tie)} must all be split over the axis "
                f'"{STAGE}", along one dim, or none of them. Name the axis in the same way in each.'
            )
        owner_of |= dict.fromkeys(inside, inside[0])
    tied = any(len({i for i, _ in tie if i in split_layers}) > 1 for tie in ties)
    numbers = sorted(split_layers)
    groups = [numbers] if tied else [[i] for i in numbers]
    for group in groups:
        is_embedding = group[0] == 0
        name = EMBEDDING if is_embedding else HEAD
        owners = [
            (i, j) for i in group for j in range(len(split_layers[i].leaves)) if owner_of.get((i, j), (i, j)) == (i, j)
        ]
        leaves = [split_layers[i].leaves[j] for i, j in owners]
        packing = Packing.of([[Leaf(leaf.part, spec=leaf.spec) for leaf in leaves]])
        packing = packing.named(name)
        place_of = dict(zip(owners, packing.places[0], strict=True))
        placed = [
            dataclasses.replace(
                split_layers[i],
                places=tuple(place_of[owner_of.get((i, j), (i, j))] for j in range(len(split_layers[i].leaves))),
            )
            for i in group
        ]
        home = 0 if is_embedding else num_stages - 1
        yield Unit(name, home, tuple(placed), packing)


# -- Checks of the table


def check_table(layers: Vocabulary, schedule: Schedule, delays: Mapping[str, np.ndarray]) -> None:
    """Raises `ValueError` if a table cannot run the vocabulary layers.

    Args:
      layers: the vocabulary layers.
      schedule: the table.
      delays: pass with a parameter hook -> `[S]`, its delays.
    """
    if not layers.layers:
        return
    remedy = f'leave "{STAGE}" out of the parameter\'s partition'
    if schedule.has_copies:
        raise vocabulary.VocabularyError(
            f"layer {layers.layers[0].index} is split over all stages, and `schedule` runs stages with copies, got "
            f"{schedule.name!r}. Choose a schedule without copies, or {remedy}."
        )
    if schedule.updates_by_stage:
        raise vocabulary.VocabularyError(
            f"layer {layers.layers[0].index} is split over all stages, and stages of {schedule.name!r} update several "
            f"times in a minibatch, each by its own rhythm. Choose a schedule without `update_every`, or {remedy}."
        )
    for layer, cells, stage, words in (
        (layers.embedding, schedule.backward_ticks(), 0, "backward of the first"),
        (layers.head, schedule.forward_ticks(), -1, "forward of the last"),
    ):
        if layer is None or schedule.drains:
            continue
        # A gradient that is added before the update of the minibatch before would be a part of that update.
        too_early = ticks_before_update(schedule, cells, stage)
        if too_early == 0 and layer is layers.head and _is_read_later(schedule):
            continue  # see `head_after_update`
        if too_early >= 0:
            raise vocabulary.VocabularyError(
                f"layer {layer.index} is split over all stages, which add up its gradient in the {words} stage, and in "
                f"{schedule.name!r} this stage begins the next minibatch {too_early} ticks before it has updated with "
                f'the last one. Choose another schedule, for asynchronous ones with `ticks="unit"`, or {remedy}.'
            )
    if layers.head is None:
        return
    last = schedule.by_stage(schedule.forward_versions())[:, -1]
    if (last != schedule.by_stage(schedule.backward_versions())[:, -1]).any():
        raise vocabulary.VocabularyError(
            f"the head (layer {layers.head.index}) is split over all stages, which takes its gradient in its forward, "
            f"and the last stage of {schedule.name!r} reads newer weights in its backward. Choose another schedule, or "
            f"{remedy}."
        )
    for name, delay in delays.items():
        if delay[-1]:
            raise vocabulary.VocabularyError(
                f"the head (layer {layers.head.index}) is split over all stages, which takes its gradient in its "
                f"forward, and `{name}_params` changes the weights of the last stage in {schedule.name!r}. Leave out "
                f"`{name}_params`, or {remedy}."
            )


def _is_read_later(schedule: Schedule) -> bool:
    """Returns whether each backward of the last stage is in a later tick than its forward."""
    ticks = schedule.forward_ticks(), schedule.backward_ticks()
    forward, backward = (schedule.by_stage(cells)[:, -1] for cells in ticks)
    return bool((forward < backward).all())
