"""The splits of parameters, microbatches and stashes over automatic axes of the mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.layers.avals import is_inexact
from jpipe.layers.axis_rules import AxisRules, axes_of_dims
from jpipe.layers.backward import LayerProgram
from jpipe.layers.equations import contains
from jpipe.layers.layer import Layer
from jpipe.layers.mapped import mapped_p
from jpipe.mesh import DATA, FSDP, STAGE, compilers_part, row_axes
from jpipe.packing import axes, axes_by_dim, divisible, without


def parameter_specs(layer: Layer, index: int, sizes: Mapping[str, int], rules: AxisRules) -> tuple[tuple, ...]:
    """The axes that each parameter is split over, one entry per dim.

    Args:
      layer: the layer, bound to its inputs.
      index: its position, for messages.
      sizes: axis of the mesh -> number of devices. Names that stand for no axis of it are left out.
      rules: the axes of each logical name of a dim.

    Returns:
      One tuple per parameter, `()` for each if `sizes` is empty.

    Raises:
      ValueError: if a parameter cannot be split as its metadata says.
    """
    if not sizes:
        return ((),) * len(jax.tree.leaves(layer.parameters))
    leaves, tree = jax.tree.flatten_with_path(layer.parameters)
    specs = tree.flatten_up_to(layer.specs) if layer.specs else [()] * len(leaves)
    return tuple(
        _parameter_spec(
            f"layer {index} ({layer.name}): parameter {jax.tree_util.keystr(path)}",
            leaf.shape,
            spec,
            sizes,
            rules,
        )
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    )


def _parameter_spec(
    name: str,
    shape: tuple[int, ...],
    spec: Sequence,
    sizes: Mapping[str, int],
    rules: AxisRules,
) -> tuple:
    dim_axes = axes_of_dims(spec, shape, sizes, rules)
    while dim_axes and not dim_axes[-1]:
        dim_axes.pop()
    if FSDP in sizes and not any(FSDP in names for names in dim_axes):
        dim_axes = _fully_split(dim_axes, shape, sizes)
    problem = f"{name} of shape {list(shape)} cannot be split as {spec}"
    if len(dim_axes) > len(shape):
        raise ValueError(
            f"{problem}: it has {len(shape)} dims, not {len(dim_axes)}. Name one axis, or None, for each dim."
        )
    for dim, names in enumerate(dim_axes):
        parts = math.prod(sizes[axis] for axis in names)
        if shape[dim] % parts:
            raise ValueError(
                f"{problem}: the {parts} devices along {', '.join(map(repr, names))} do not divide "
                f"its dim {dim}, {shape[dim]}. Make the dim a multiple of {parts}, make the axis of "
                "the mesh smaller, or leave the axis out of the parameter's partition."
            )
    named = [n[0] if len(n) == 1 else n or None for n in dim_axes]
    return tuple(named) + (None,) * (len(shape) - len(named))


def _fully_split(dim_axes: Sequence[tuple], shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[tuple]:
    """The axes of each dim with "fsdp" on the largest dim that it divides and no other axis splits.

    Vectors, such as biases, stay whole: they take no memory, and to gather them takes time.
    """
    dim_axes = [*dim_axes, *[()] * (len(shape) - len(dim_axes))]
    dims = [i for i, n in enumerate(shape) if not dim_axes[i] and n % sizes[FSDP] == 0]
    if len(shape) > 1 and dims:
        dim_axes[max(dims, key=lambda i: shape[i])] = (FSDP,)
    return dim_axes


def microbatch_spec(shape: Sequence[int], num_rows: int, sizes: Mapping[str, int]) -> tuple:
    """The split of a value of a microbatch: along its rows, over the axes "fsdp" and "expert".

    Args:
      shape: the shape of the value, such as an activation. It has rows if its first dim has as many entries.
      num_rows: the number of rows of the microbatch.
      sizes: axis of the mesh -> number of devices, of the automatic axes.

    Returns:
      The axis of each dim, or None; `()` without automatic axes.
    """
    if not sizes:
        return ()
    whole = (None,) * len(shape)
    names = row_axes(sizes)
    has_rows = bool(shape) and shape[0] == num_rows
    return (names[0] if len(names) == 1 else names, *whole[1:]) if names and has_rows else whole


@dataclasses.dataclass(frozen=True)
class ValueSplit:
    """The splits of the values that layers pass on: activations, messages and their gradients.

    A value is split along its rows over the axes "fsdp" and "expert". If a layer says how an output is split, all
    values of the shape of this output are split so. One rule for a shape keeps what goes from layer to
    layer as it is.

    Attributes:
      num_rows: the number of rows of the microbatch.
      sizes: axis of the mesh -> number of devices, of the automatic axes.
      annotated: shape -> spec, of outputs that layers split over more than their rows.
    """

    num_rows: int
    sizes: Mapping[str, int]
    annotated: Mapping[tuple[int, ...], tuple] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, programs: Iterable[LayerProgram], num_rows: int, sizes: Mapping[str, int]) -> "ValueSplit":
        """The split that the outputs of layers ask for. Of two that differ for a shape, the first counts."""
        annotated: dict[tuple[int, ...], tuple] = {}
        for program in programs if sizes else ():
            for aval, spec in zip(program.outputs, _output_specs(program)):
                rows, *rest = microbatch_spec(aval.shape, num_rows, sizes) or (None,)
                taken = axes((rows,))
                free = [tuple(a for a in dim if a in sizes and a not in taken) for dim in axes_by_dim(spec)]
                if any(free):
                    first, *others = [dim or None for dim in free]
                    joined = (rows or first, *others, *rest[len(others) :])
                    split = divisible(joined, aval.shape, sizes)
                    annotated.setdefault(tuple(aval.shape), split)
        return cls(num_rows, sizes, annotated)

    def spec(self, shape: Sequence[int]) -> tuple:
        """The axis of each dim of a value, or None; `()` without automatic axes."""
        rows = microbatch_spec(shape, self.num_rows, self.sizes)
        return self.annotated.get(tuple(shape), rows)

    def constrained(self, values: Sequence[jax.Array], num_leading: int = 0) -> list[jax.Array]:
        """Values, split, behind a number of leading axes. Without rows to split and without annotations the compiler
        decides.

        Values that leave a branch, or go round a loop, must be split alike in every branch and turn. XLA
        does not see to it.
        """

        def constrained(a: jax.Array) -> jax.Array:
            shape = tuple(a.shape[num_leading:])
            if not row_axes(self.sizes) and shape not in self.annotated:
                return a
            spec = [None] * num_leading + list(self.spec(shape))
            return lax.with_sharding_constraint(a, PartitionSpec(*spec))

        return list(map(constrained, values))


def _output_specs(program: LayerProgram) -> list[tuple]:
    """The split that a layer states for each of its outputs; `()` if it states none."""
    equations = program.forward_equations
    maker = {v: eqn for eqn in equations.equations for v in eqn.outvars}

    def spec(output: Any) -> tuple:
        eqn = maker.get(output) if contains(maker, output) else None
        if eqn is not None and eqn.primitive.name == "convert_element_type":
            return spec(eqn.invars[0])
        if eqn is None or eqn.primitive.name != "constrain":
            return ()
        sharding = eqn.params["sharding"]
        return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()

    return [spec(v) for v in equations.outputs[: len(program.outputs)]]


def read_in_parts(program: LayerProgram) -> list[tuple[str, ...]]:
    """The axes of each parameter over which the layer's own maps take it in parts, see `jpipe.layers.mapped`."""
    return [tuple(sorted({name for spec in specs for name in axes(tuple(spec))})) for specs in read_by_maps(program)]


def read_by_maps(program: LayerProgram) -> list[list[PartitionSpec]]:
    """The specs by which the layer's own maps take each parameter."""
    equations = program.forward_equations
    number_of = {v: j for j, v in enumerate(equations.inputs[: len(program.parameters)])}
    specs: list[list[PartitionSpec]] = [[] for _ in program.parameters]
    for eqn in equations.equations:
        numbers = [number_of[v] if contains(number_of, v) else None for v in eqn.invars]
        if eqn.primitive.name in _AS_SPLIT and numbers[0] is not None:
            number_of[eqn.outvars[0]] = numbers[0]
        if eqn.primitive is mapped_p:
            for j, spec in zip(numbers, eqn.params["in_specs"], strict=True):
                if j is not None:
                    specs[j].append(spec)
    return specs


_AS_SPLIT = ("convert_element_type", "constrain", "copy")
"""Operations whose result is split as their operand."""


@dataclasses.dataclass(frozen=True)
class KeptSpecs:
    """The compiler's splits of what layers keep between their passes. Layers are compiled when it is first asked.

    Attributes:
      programs: the programs of each layer kind.
      parameter_specs: the splits of the parameters of each kind.
      values: the splits of the values that layers pass on.
      mesh: the mesh of the pipeline. TPUs compile for all chips of a slice or none, so a layer is compiled for all
        devices, and does the same along the axes that are not automatic. None: nothing is split.
    """

    programs: Sequence[LayerProgram]
    parameter_specs: Sequence[Sequence[tuple]]
    values: ValueSplit
    mesh: Mesh | None

    @functools.cached_property
    def stash(self) -> list[list[tuple]]:
        """For each kind the split of each value of the stash."""
        return [self._of_stash(k) for k in range(len(self.programs))]

    @functools.cached_property
    def split_residuals(self) -> list[list[tuple]]:
        """For each kind the split of each value between the halves of a split backward."""
        return [self._of_split_residuals(k) for k in range(len(self.programs))]

    def _of_stash(self, k: int) -> list[tuple]:
        program = self.programs[k]
        inputs = [self._split(a, self.values.spec(a.shape)) for a in program.inputs]
        extra = [self._split(a, ()) for a in program.extra]
        arguments = self._parameters(k), inputs, extra
        return self._found(lambda *args: program.forward_and_stash(*args)[1], arguments, program.stash)

    def _of_split_residuals(self, k: int) -> list[tuple]:
        program = self.programs[k]
        parameters = [*self._parameters(k), *(self._split(program.extra[i], ()) for i in program.constants)]
        stash = [self._split(a, spec) for a, spec in zip(program.stash, self.stash[k], strict=True)]
        gradients = [self._split(y, self.values.spec(y.shape)) for y in program.outputs if is_inexact(y)]
        arguments = parameters, stash, gradients
        return self._found(lambda *args: program.input_grad(*args)[1], arguments, program.split_residuals)

    def _parameters(self, k: int) -> list[jax.ShapeDtypeStruct]:
        program = self.programs[k]
        parts = zip(program.parameters, self.parameter_specs[k], read_in_parts(program), strict=True)
        # Where no map of its own takes a part, a layer gets its weights gathered.
        return [self._split(a, spec if FSDP in names else without(spec, FSDP)) for a, spec, names in parts]

    def _split(self, a: Any, spec: tuple) -> jax.ShapeDtypeStruct:
        sharding = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def _found(self, function: Callable[..., Sequence], arguments: tuple, avals: Sequence) -> list[tuple]:
        """The splits of the results of a function."""
        mesh = self.mesh
        if mesh is None or compilers_part(mesh) is None or not avals:
            return [()] * len(avals)
        # Only the result of the partitioner is read, so the compiler need not optimise.
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        options: Any = {"xla_backend_optimization_level": 0} if on_cpu else None
        with jax.set_mesh(mesh):  # whatever mesh the user is on
            run = jax.shard_map(  # as the engine does, so that constraints in loops know the mesh
                function,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(),
                axis_names={STAGE, DATA} & set(mesh.axis_names),
                check_vma=False,
            )
            compiled = jax.jit(run).lower(*arguments).compile(options)
        return [
            divisible(tuple(s.spec) if isinstance(s, NamedSharding) else (), aval.shape, mesh.shape)
            for aval, s in zip(avals, compiled.output_shardings, strict=True)
        ]
