"""How parameters, microbatches, and the values that a forward stashes, are split over automatic axes of the mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.layers.backward import LayerProgram
from jpipe.layers.layer import Layer
from jpipe.mesh import FSDP
from jpipe.packing import axes, axes_by_dim, without


def parameter_specs(
    layer: Layer, index: int, sizes: Mapping[str, int]
) -> tuple[tuple, ...]:
    """The axes that each parameter is split over, one entry per dim.

    Args:
      layer: the layer, bound to its inputs.
      index: its position, for messages.
      sizes: axis of the mesh -> number of devices. Axes that a parameter names and the mesh does not
        have are left out.

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
        )
        for (path, leaf), spec in zip(leaves, specs, strict=True)
    )


def _parameter_spec(
    name: str, shape: tuple[int, ...], spec: Sequence, sizes: Mapping[str, int]
) -> tuple:
    axes_of_dim = axes_by_dim(spec)
    of_dim = [tuple(axis for axis in names if axis in sizes) for names in axes_of_dim]
    while of_dim and not of_dim[-1]:
        of_dim.pop()
    if FSDP in sizes and not any(FSDP in names for names in axes_of_dim):
        of_dim = _fully_split(of_dim, shape, sizes)
    problem = f"{name} of shape {list(shape)} cannot be split as {spec}"
    if len(of_dim) > len(shape):
        raise ValueError(
            f"{problem}: it has {len(shape)} dims, not {len(of_dim)}. Name one axis, or None, for "
            "each dim."
        )
    for dim, names in enumerate(of_dim):
        parts = math.prod(sizes[axis] for axis in names)
        if shape[dim] % parts:
            raise ValueError(
                f"{problem}: the {parts} devices along {', '.join(map(repr, names))} do not divide "
                f"its dim {dim}, {shape[dim]}. Make the dim a multiple of {parts}, make the axis of "
                "the mesh smaller, or leave the axis out of the parameter's partition."
            )
    named = [n[0] if len(n) == 1 else n or None for n in of_dim]
    return tuple(named) + (None,) * (len(shape) - len(named))


def _fully_split(
    of_dim: Sequence[tuple], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> list[tuple]:
    """The axes of each dim with "fsdp" on the largest dim that it divides and no other axis splits.

    Vectors, such as biases, stay whole: they take no memory, and to gather them takes time.
    """
    of_dim = [*of_dim, *[()] * (len(shape) - len(of_dim))]
    dims = [i for i, n in enumerate(shape) if not of_dim[i] and n % sizes[FSDP] == 0]
    if len(shape) > 1 and dims:
        of_dim[max(dims, key=lambda i: shape[i])] = (FSDP,)
    return of_dim


def microbatch_spec(
    shape: Sequence[int], num_rows: int, sizes: Mapping[str, int]
) -> tuple:
    """How a value of a microbatch is split: along its rows, over the axis "fsdp".

    Args:
      shape: of the value, such as an activation. It has rows if its first dim has as many entries.
      num_rows: of the microbatch.
      sizes: axis of the mesh -> number of devices, of the automatic axes.

    Returns:
      The axis of each dim, or None; `()` without automatic axes.
    """
    if not sizes:
        return ()
    whole = (None,) * len(shape)
    has_rows = bool(shape) and shape[0] == num_rows
    return (FSDP, *whole[1:]) if FSDP in sizes and has_rows else whole


def stash_specs(
    program: LayerProgram,
    parameter_specs: Sequence[tuple],
    num_rows: int,
    mesh: Mesh,
) -> list[tuple]:
    """How the compiler splits the values that a forward stashes, one tuple per value.

    Args:
      program: the layer's programs.
      parameter_specs: how its parameters are split.
      num_rows: of the microbatch.
      mesh: the automatic axes.
    """
    if not program.stash:
        return []

    def split(a: Any, spec: tuple) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    inputs = [
        split(a, microbatch_spec(a.shape, num_rows, mesh.shape)) for a in program.inputs
    ]
    extra = [split(a, ()) for a in program.extra]
    parameters = [
        split(a, without(spec, FSDP))  # a layer gets its weights gathered
        for a, spec in zip(program.parameters, parameter_specs, strict=True)
    ]
    # Only the result of the partitioner is read, so the compiler need not optimise.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options: Any = {"xla_backend_optimization_level": 0} if on_cpu else None
    stash = jax.jit(lambda *args: program.forward_and_stash(*args)[1])
    compiled = stash.lower(parameters, inputs, extra).compile(options)
    return [
        _divisible(aval, sharding, mesh)
        for aval, sharding in zip(program.stash, compiled.output_shardings, strict=True)
    ]


def _divisible(aval: jax.ShapeDtypeStruct, sharding: Any, mesh: Mesh) -> tuple:
    """The spec of a sharding, None for dims that its axes do not divide."""
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    spec += (None,) * (aval.ndim - len(spec))
    return tuple(
        None if n % math.prod(mesh.shape[axis] for axis in axes((names,))) else names
        for n, names in zip(aval.shape, spec)
    )
