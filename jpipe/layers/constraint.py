"""Constraints on how values are split, in equations that no mesh is tied to.

`jax.lax.with_sharding_constraint` ties a value, and all that is computed from it, to the mesh on which
it was traced. The equations of a layer are traced once, on the mesh of the axes that are left to the
compiler, and run on other meshes: inside of the `shard_map` of the engine, or on one device that
measures the layer. So a traced constraint becomes a `constrain`, which has no mesh until it runs.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe.packing import axes, divisible

NO_MESH = jax.sharding.AbstractMesh((), ())


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """Code inside is traced on a mesh, whatever mesh the user is on."""
    use = jax.sharding.use_abstract_mesh
    with use(NO_MESH), use(mesh.abstract_mesh):  # JAX goes to another size by none
        yield


constrain_p = jex.Primitive("constrain")
"""`constrain(value, sharding)`: the value, split as `sharding` says."""

constrain_p.def_abstract_eval(lambda value, *, sharding: value)
constrain_p.def_impl(lambda value, *, sharding: value)
# Inside of a loop or a branch of a layer. XLA knows the axes of the mesh by their names.
mlir.register_lowering(
    constrain_p,
    mlir.lower_fun(
        lambda value, *, sharding: lax.with_sharding_constraint(value, sharding),
        multiple_results=False,
    ),
)


def without_mesh(eqn: Any) -> Any:
    """An equation as it is without a mesh.

    A constraint loses the axes that do not divide a dim: XLA would pad the dim, and exchange the padding
    between devices.
    """
    shardings = {n: p for n, p in eqn.params.items() if isinstance(p, NamedSharding)}
    if not shardings or eqn.primitive is constrain_p:
        return eqn
    if eqn.primitive.name != "sharding_constraint":
        return eqn.replace(params={**eqn.params, **dict.fromkeys(shardings)})
    sharding, (value,) = shardings["sharding"], eqn.invars
    mesh = sharding.mesh
    spec = divisible(tuple(sharding.spec), value.aval.shape, mesh.shape)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return eqn.replace(primitive=constrain_p, params={"sharding": sharding})


def constrain(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value, split over the axes that the mesh of the surroundings has."""
    mesh, spec = jax.sharding.get_abstract_mesh(), tuple(sharding.spec)
    if mesh.empty or not set(axes(spec)) <= set(mesh.axis_names):
        return value
    return lax.with_sharding_constraint(value, PartitionSpec(*spec))
