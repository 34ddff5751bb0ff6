"""Calls of `jax.shard_map` in a layer, in equations that no mesh is tied to.

A layer may map a function over axes that are left to the compiler, and use collectives in it: ring attention, an
all-to-all between experts, a sum of partial products. As with constraints (`jpipe.layers.constraint`), a traced call
becomes a `mapped`, which has no mesh until it runs.

- On a mesh with these axes, such as inside of the `shard_map` of the engine, it is a `jax.shard_map` over them.
- Elsewhere, such as on the one device that measures a layer, it is a `jax.vmap` for each axis. `jax.vmap` computes the
  same collectives between the parts of an array.

JAX also notes over which axes a value varies (`check_vma`). It needs that to differentiate, and all equations here are
differentiated already. So the notes go, and the operations on them: `pvary` is the identity, `psum_invariant`
is `psum`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jaxlib
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jpipe.layers import collectives
from jpipe.layers.mesh_free import NO_MESH
from jpipe.mesh import DATA, STAGE
from jpipe.packing import axes, axes_by_dim, part_shape

NAME = "shard_map"
"""The name of the primitive of `jax.shard_map`."""

mapped_p = jex.Primitive("mapped")
"""`mapped(*values, jaxpr, in_specs, out_specs, sizes)`: stands in a program, and is never bound."""
mapped_p.multiple_results = True

NO_OPERATION = "pvary"
"""The name of an operation that changes only what JAX notes on a value."""

_PLAIN: Mapping[str, Any] = {"psum_invariant": lax.psum_p, "all_gather_invariant": lax.all_gather_p}


def with_plain_collective(eqn: Any) -> Any:
    """A collective whose result JAX notes to be equal on all devices, without this note."""
    if eqn.primitive.name not in _PLAIN:
        return eqn
    return eqn.replace(primitive=_PLAIN[eqn.primitive.name], params={**eqn.params, "axis_index_groups": None})


def without_mesh(eqn: Any, inner: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]) -> Any:
    """The `mapped` of a call of `jax.shard_map`.

    Args:
      eqn: the equation of the call.
      inner: gives the mapped function as it is without a mesh.

    Raises:
      ValueError: if it maps over an axis that the pipeline maps over.
    """
    params = eqn.params
    names = [name for name in params["mesh"].axis_names if name in params["newly_manual_axes"]]
    own = [name for name in names if name in (STAGE, DATA)]
    if own:
        raise ValueError(
            f"`jax.shard_map` maps over {', '.join(map(repr, own))}, and the pipeline itself does: a layer runs on "
            "the devices of one stage and one replica, and gets the rows of its replica. Name other axes in "
            "`axis_names`, and leave these out of the specs."
        )
    check_order(params["mesh"].axis_names, names, "`jax.shard_map`")
    closed = params["jaxpr"]
    if not isinstance(closed, jex.ClosedJaxpr):  # before JAX 0.12
        closed = jex.ClosedJaxpr(closed, ())
    sizes = tuple((name, params["mesh"].shape[name]) for name in names)
    specs = {key: params[key] for key in ("in_specs", "out_specs")}
    return eqn.replace(primitive=mapped_p, params={"jaxpr": inner(closed), "sizes": sizes, **specs})


def equation(
    eqn: Any,
    run: Callable[..., Sequence],
    operands: Sequence[tuple[Any, PartitionSpec]],
    results: Sequence[tuple[Any, PartitionSpec]],
    sizes: Sequence[tuple[str, int]],
) -> Any:
    """A `mapped` in the place of an equation.

    Args:
      eqn: the equation.
      run: the mapped function, from and to the parts of a device. It may use collectives.
      operands, results: for each the atom or variable, and how it is split.
      sizes: the axes, each with its number of devices.
    """
    shapes = [part_shape(v.aval.shape, tuple(spec), dict(sizes)) for v, spec in operands]
    local = [jax.ShapeDtypeStruct(shape, v.aval.dtype) for shape, (v, _) in zip(shapes, operands)]
    with jax.sharding.use_abstract_mesh(NO_MESH), collectives.kept():
        jaxpr = jax.make_jaxpr(run, axis_env=[*sizes])(*local)
    invars, in_specs = zip(*operands) if operands else ((), ())
    outvars, out_specs = zip(*results)
    params = {"jaxpr": jaxpr, "in_specs": in_specs, "out_specs": out_specs, "sizes": tuple(sizes)}
    return eqn.replace(primitive=mapped_p, invars=[*invars], outvars=[*outvars], params=params)


@contextlib.contextmanager
def explained(mesh: Mesh) -> Iterator[None]:
    """Adds what to do to errors of JAX about the mesh or the axes of a `jax.shard_map`.

    Args:
      mesh: the mesh of the pipeline.
    """
    try:
        yield
    except ValueError as error:
        advice = _advice(str(error), mesh)
        if not advice:
            raise
        raise ValueError(f"{str(error).rstrip('.')}. {advice}") from error


def _advice(refusal: str, mesh: Mesh) -> str:
    free = [name for name in mesh.axis_names if name not in (STAGE, DATA)]
    if "context mesh cannot be empty" in refusal or (not free and "unbound axis name" in refusal):
        return (
            f"The mesh of the pipeline has the axes {_listed(mesh.axis_names)} alone, along which a layer cannot "
            "communicate. Give it an axis for the layers, such as `jpipe.make_mesh(stage=2, model=2)`."
        )
    if "should match the mesh passed to shard_map" in refusal:
        sizes = dict(mesh.shape)
        return (
            f"A layer runs on the mesh of the pipeline, {sizes} with automatic axes. Leave out `mesh=`, or give "
            "`pipe.mesh`. `jax.make_mesh` makes explicit axes unless it is told `axis_types`."
        )
    if any(words in refusal for words in ("shard_map requires axis_names", "marked as manual", "unbound axis name")):
        return (
            f"A layer runs on the devices of one stage and one replica, and gets the rows of its replica. It may map "
            f"and communicate over {_listed(free)}, the other axes of the mesh of the pipeline. Leave others out of "
            "`axis_names`, specs and collectives."
        )
    return ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


_AXES_ARE_IN_ORDER = jaxlib.version.__version_info__ >= (0, 11)
"""True if XLA ends the process for a map over an axis that comes before one of a map around it."""


def check_order(axis_names: Sequence[str], names: Sequence[str], call: str) -> None:
    """Refuses a map that XLA cannot compile inside of that of the pipeline."""
    own = [name for name in axis_names if name in (STAGE, DATA)]
    first = next(iter(names), None)
    if not _AXES_ARE_IN_ORDER or first is None or not own or axis_names.index(first) > axis_names.index(own[-1]):
        return
    order = own + [name for name in axis_names if name not in own]
    raise ValueError(
        f"{call} maps over {first!r}, which comes before {own[-1]!r} in the mesh, and XLA cannot compile it "
        "in the pipeline's own map. Make the mesh with its axes in the order that `jpipe.make_mesh` has, "
        f"{_listed(order)}."
    )


def mapped(
    run: Callable[..., list],
    values: Sequence,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    sizes: Sequence[tuple[str, int]],
) -> list:
    """Maps `run` over axes of the mesh of the surroundings; if it has not got them, over parts of the values."""
    mesh = jax.sharding.get_abstract_mesh()
    if not all(name in mesh.auto_axes for name, _ in sizes):
        return _on_one_device(run, values, in_specs, out_specs, sizes)
    mapped_run = jax.shard_map(
        lambda *parts: tuple(run(*parts)),
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names={name for name, _ in sizes},
        check_vma=False,
    )
    return list(mapped_run(*values))


def _on_one_device(
    run: Callable[..., list],
    values: Sequence,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    sizes: Sequence[tuple[str, int]],
) -> list:
    size_of = dict(sizes)
    for name, size in reversed(sizes):
        in_axes = tuple(0 if name in _axes(spec) else None for spec in in_specs)
        run = jax.vmap(run, in_axes=in_axes, out_axes=0, axis_name=name, axis_size=size)
    parts = [_parts(value, spec, size_of) for value, spec in zip(values, in_specs, strict=True)]
    return [_whole(result, spec, size_of) for result, spec in zip(run(*parts), out_specs, strict=True)]


def _axes(spec: PartitionSpec) -> set[str]:
    return set(axes(tuple(spec)))


def _parts(value: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """`[*parts, ...]`: the parts of a value. Each axis that its spec names has a leading dim, in order of `sizes`."""
    shape: list[int] = []
    position: dict[str, int] = {}  # axis -> dim
    names_of_dims = [*axes_by_dim(tuple(spec)), *[()] * value.ndim]
    for size, names in zip(value.shape, names_of_dims):
        for name in names:
            position[name] = len(shape)
            shape.append(sizes[name])
        shape.append(size // math.prod(sizes[name] for name in names))
    leading = [position[name] for name in sizes if name in position]
    rest = [dim for dim in range(len(shape)) if dim not in leading]
    return value.reshape(shape).transpose(*leading, *rest)


def _whole(parts: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """The value of which `[*sizes, ...]` are the parts. Along an axis that its spec does not name all are equal."""
    named = _axes(spec)
    parts = parts[tuple(slice(None) if name in named else 0 for name in sizes)]
    leading = [name for name in sizes if name in named]
    order: list[int] = []
    shape: list[int] = []
    local = parts.shape[len(leading) :]
    names_of_dims = [*axes_by_dim(tuple(spec)), *[()] * len(local)]
    for dim, (size, names) in enumerate(zip(local, names_of_dims)):
        order += [*(leading.index(name) for name in names), len(leading) + dim]
        shape.append(size * math.prod(sizes[name] for name in names))
    return parts.transpose(order).reshape(shape)
