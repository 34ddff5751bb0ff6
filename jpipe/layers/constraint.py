"""Constraints on how values are split, in equations that no mesh is tied to.

`jax.lax.with_sharding_constraint` ties a value, and all that is computed from it, to the mesh on which
it was traced. The equations of a layer are traced once, on the mesh of the pipeline, and run on
other meshes: inside of the `shard_map` of the engine, or on one device that measures the layer. So a
traced constraint becomes a `constrain`, which has no mesh until it runs.
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe.mesh import DATA, STAGE
from jpipe.packing import axes, divisible

constrain_p = jex.Primitive("constrain")
"""`constrain(value, sharding)`: the value, split as `sharding` says. It stands in a program, and is never bound."""


def without_mesh(eqn: Any) -> Any:
    """The `constrain` of a constraint.

    It loses the axes that do not divide a dim: XLA would pad the dim, and exchange the padding between devices.

    Raises:
      ValueError: if it names an axis that the pipeline itself splits over.
    """
    sharding, (value,) = eqn.params["sharding"], eqn.invars
    refused = [name for name in axes(tuple(sharding.spec)) if name in (STAGE, DATA)]
    if refused:
        raise ValueError(
            f"a constraint, {sharding.spec}, names {refused[0]!r}, and the pipeline itself splits over it: a layer "
            "runs on the devices of one stage and one replica, and gets the rows of its replica. Leave the axis out."
        )
    spec = divisible(tuple(sharding.spec), value.aval.shape, sharding.mesh.shape)
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return eqn.replace(primitive=constrain_p, params={"sharding": sharding})


def constrain(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A value, split over the axes that the mesh of the surroundings has."""
    mesh, spec = jax.sharding.get_abstract_mesh(), tuple(sharding.spec)
    if mesh.empty or not set(axes(spec)) <= set(mesh.axis_names):
        return value
    return lax.with_sharding_constraint(value, PartitionSpec(*spec))
