"""Constraints on how values are split, in equations that no mesh is tied to.

`jax.lax.with_sharding_constraint` ties a value, and all that is computed from it, to the mesh on which
it was traced. The equations of a layer are traced once, on the mesh of the axes that are left to the
compiler, and run on other meshes: inside of the `shard_map` of the engine, or on one device that
measures the layer. So a traced constraint becomes a `constrain`, which has no mesh until it runs.
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.packing import axes, divisible

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
    """The `constrain` of a constraint.

    It loses the axes that do not divide a dim: XLA would pad the dim, and exchange the padding between devices.
    """
    sharding, (value,) = eqn.params["sharding"], eqn.invars
    spec = divisible(tuple(sharding.spec), value.aval.shape, sharding.mesh.shape)
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return eqn.replace(primitive=constrain_p, params={"sharding": sharding})


def constrain(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value, split over the axes that the mesh of the surroundings has."""
    mesh, spec = jax.sharding.get_abstract_mesh(), tuple(sharding.spec)
    if mesh.empty or not set(axes(spec)) <= set(mesh.axis_names):
        return value
    return lax.with_sharding_constraint(value, PartitionSpec(*spec))
