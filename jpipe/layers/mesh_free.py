"""Parts of a traced program as they are without a mesh.

JAX notes the mesh of its surroundings on every value, in the context of every equation and in some of its parameters.
The equations of a layer are traced once and run on other meshes, so none of these may stay.
"""

import contextlib
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpipe.mesh import DATA, STAGE

NO_MESH = jax.sharding.AbstractMesh((), ())


@contextlib.contextmanager
def on_mesh(mesh: Mesh | jax.sharding.AbstractMesh | None) -> Iterator[None]:
    """Code inside is traced on a mesh, whatever mesh the user is on; None: on the mesh that is set.

    It may give the mesh itself to `jax.shard_map`, or none. If it names no axes, it maps over the automatic axes alone.
    """
    if mesh is None or mesh.empty:
        yield
        return
    use = jax.sharding.use_abstract_mesh
    with use(NO_MESH), use(mesh.abstract_mesh):  # JAX goes to another size by none
        with _without_axes({STAGE, DATA} & set(mesh.axis_names)):
            yield


def _without_axes(names: Iterable[str]) -> contextlib.AbstractContextManager:
    """A context in which `jax.shard_map` leaves out axes of the mesh that the call does not name.

    JAX has it for the axes over which `jax.vmap` maps, and no public name for it. Without it JAX maps over the
    pipeline's own axes too, and `jpipe.layers.mapped` refuses that.
    """
    leave_out = getattr(sys.modules.get("jax._src.core"), "add_explicit_mesh_axis_names", None)
    return contextlib.nullcontext() if leave_out is None else leave_out(frozenset(names))


def on_same_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs on the mesh that is set now."""
    mesh = jax.sharding.get_abstract_mesh()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with on_mesh(mesh):
            return function(*args)

    return call


def is_on_mesh(aval: Any) -> bool:
    """Returns whether an abstract value knows a mesh."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def aval_without_mesh(aval: Any) -> Any:
    """An abstract value as it is without a mesh, equal on all devices."""
    if not is_on_mesh(aval):
        return aval
    if hasattr(aval, "inner_aval"):  # of a reference
        return aval.update(inner_aval=aval_without_mesh(aval.inner_aval))
    plain = _plain(aval.shape, aval.dtype)
    return aval.update(sharding=plain.sharding, manual_axis_type=plain.manual_axis_type)


@functools.lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...], dtype: Any) -> Any:
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(lambda value: value)(jax.ShapeDtypeStruct(shape, dtype)).in_avals[0]


@functools.cache
def context_without_mesh(context: Any) -> Any:
    """The context of an equation, such as its precision, but for the mesh."""
    with context.manager, jax.sharding.use_abstract_mesh(NO_MESH):
        (eqn,) = jax.make_jaxpr(jax.lax.neg)(np.float32(0)).jaxpr.eqns
    return eqn.ctx


def value_without_mesh(constant: Any) -> Any:
    """A constant by its value, if it lies on a mesh: it would tie the equations to the mesh."""
    if not lies_on_mesh(constant):
        return constant
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(constant)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(constant))
    return np.asarray(constant)


def lies_on_mesh(value: Any) -> bool:
    """Returns whether an array is on devices of a mesh, or was computed while a function was traced on a mesh."""
    is_array = isinstance(value, jax.Array)
    return is_array and (isinstance(value.sharding, NamedSharding) or is_on_mesh(jax.typeof(value)))


def params_without_mesh(params: dict[str, Any], inner: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]) -> dict[str, Any]:
    """The parameters of an equation; `inner` gives the jaxprs in them."""

    def changed(value: Any) -> Any:
        if type(value) is tuple:  # a named tuple is another parameter
            members = tuple(map(changed, value))
            return value if all(map(operator.is_, members, value)) else members
        if isinstance(value, jex.ClosedJaxpr):
            return inner(value)
        if isinstance(value, jex.Jaxpr):
            return inner(jex.ClosedJaxpr(value, ())).jaxpr
        if isinstance(value, NamedSharding):
            return None
        if isinstance(value, jax.core.ShapedArray):
            return aval_without_mesh(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):  # of a Pallas kernel
            old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            new = {name: changed(field) for name, field in old.items()}
            return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
        return value

    return {name: changed(value) for name, value in params.items()}
