"""The frame of every public call: the user's mesh, the watchdog, and checks of the state."""

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe._processes.watchdog import dispatched, watched
from jpipe._util import in_flight
from jpipe.engine.scopes import Scope
from jpipe.engine.state import PipelineState
from jpipe.mesh import compilers_part

P = ParamSpec("P")
R = TypeVar("R")

_NO_MESH = Mesh(np.empty((), object), ())


def public(
    name: str, together: Callable[..., bool] = lambda *_, **__: False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a call of the function is a long phase outside of the user's mesh. See `watched`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return watched(name, together)(outside_mesh(function))

    return decorate


def outside_mesh(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function runs outside of the mesh that the user has set with `jax.set_mesh`.

    JAX refuses to compute with arrays on other devices, or with axes of other types, than those of the mesh that is
    set. The arrays that the function returns are copied to the user's mesh, whole on each device, so that the user can
    compute with them. States stay where they are.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if jax.sharding.get_abstract_mesh().empty:
            return function(*args, **kwargs)
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # inside of a transformation, which the function refuses
            return function(*args, **kwargs)
        everywhere = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(_NO_MESH):
            return jax.tree.map(
                lambda a: _placed(a, everywhere),
                function(*args, **kwargs),
                is_leaf=lambda a: isinstance(a, PipelineState),
            )

    return call


def _placed(a: Any, sharding: NamedSharding) -> Any:
    """An array with a sharding. Other values, and arrays that this process cannot copy, stay as they are."""
    if not isinstance(a, jax.Array):
        return a
    reachable = a.is_fully_addressable and sharding.is_fully_addressable
    if not reachable and a.sharding.device_set != sharding.device_set:
        return a
    return jax.device_put(a, sharding)


def call_bounded(function: Any, mesh: Mesh, *args: Any) -> Any:
    """Calls a jitted function whose last output holds a small array under "num_microbatches".

    Args:
      function: the function.
      mesh: the devices that it runs on. On CPUs few calls are in flight, see `jpipe._util.in_flight`.
      *args: the arguments of the function.

    Raises:
      ValueError: see `check_permutes`.
    """
    in_flight.wait(mesh.devices)
    if function not in _CHECKED:
        if compilers_part(mesh) is not None and mesh.devices.flat[0].platform == "cpu":
            check_permutes(function.lower(*args).compile().as_text())
        _CHECKED.add(function)
    outputs: Any = function(*args)
    in_flight.add(outputs[-1]["num_microbatches"])
    dispatched(outputs[-1]["num_microbatches"])
    return outputs


_CHECKED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The functions whose compiled programs were looked at."""


def check_permutes(program: str) -> None:
    """Refuses a program in which XLA itself moves values within a stage by a collective permute.

    On CPUs all devices take part in a permute, and the devices of other stages are elsewhere: see
    `jpipe.layers.collectives`. The process would end, or the numbers would be wrong.

    Args:
      program: the text of the compiled program.
    """
    for line in re.findall(r"^.* collective-permute\(.*$", program, re.MULTILINE):
        named = re.search(r'op_name="(.*?/stage[\d,-]+/cond)/([^"]*)"', line)
        scope = None if named is None else Scope.found_in(named[1])
        if named is None or scope is None:
            continue
        shape = line.partition(" = ")[2].partition("{")[0]
        operation = named[2].rpartition("/")[2]
        raise ValueError(
            f"in the {scope.operation} of stage {', '.join(map(str, scope.stages))}, XLA exchanges parts of a value "
            f"({shape} on a device) between neighbours, for {operation!r}. On CPUs the devices of all stages would "
            "have to take part. The operation shifts, slices or joins a value along a dim that is split over devices. "
            "Do it inside of the `jax.shard_map`, or make the value whole before: "
            "`jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())`."
        )


def check_state(state: Any) -> None:
    """Raises for a value that is no training state, and for a state with changed or donated arrays."""
    if not isinstance(state, PipelineState):
        raise ValueError(f"`state` must be the state that `init` or `step` returned, got {type(state).__name__}.")
    expected = getattr(state.program, "abstract_state", state)
    (arrays, tree), (like, its_tree) = map(jax.tree.flatten, (state, expected))
    if expected is state or tree != its_tree or [*map(_form, arrays)] != [*map(_form, like)]:
        raise ValueError(
            f"`state` must hold the arrays that `init` or `step` returned, and `{_changed(state, expected)}` holds "
            "others. Give the state as it was returned. To change weights use `pipe.with_params`, to change numbers of "
            "the optimizer `pipe.with_hyperparams`."
        )
    if any(isinstance(a, jax.Array) and a.is_deleted() for a in arrays):
        raise ValueError(
            "`state` was donated to an earlier `step` and its arrays are gone. Keep the "
            "state that step returned: `state, metrics = pipe.step(state, batch)`. To keep "
            "old states usable, make the pipeline with `donate=False`."
        )


def _form(array: Any) -> tuple:
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _changed(state: PipelineState, expected: PipelineState) -> str:
    """The first field of a state that holds other arrays than expected."""
    for name, like in expected.arrays().items():
        arrays = getattr(state, name)
        if jax.tree.structure(arrays) != jax.tree.structure(like):
            return name
        if any(map(lambda a, b: _form(a) != _form(b), *map(jax.tree.leaves, (arrays, like)))):
            return name
    return "program"
