"""The one executor: a lowered table, run by `shard_map`, `scan` and `ppermute`.

spec.py          the static facts of a pass: table, model, mesh, and all that follows from them
training.py      the further static facts of a pass that trains: loss, optimizer, gradients
state.py         the list of the arrays of a state; state_arrays.py: the facts of each
layout.py        shape, sharding, memory and bytes of each array; shapes.py: their local shapes
device.py        the scan over ticks; begin here
arrays.py        the arrays of a tick, and the two records that an operation gets
context.py       the values that a device and a lane know while they run
guard.py         guards: a device leaves out an operation
operations.py    forward, backward, weight gradient of a stage
losses.py        the loss on the last stage
stage_layers.py  the layers of a stage; stage_weights.py: their weights
commit.py        moves of mutable state after a minibatch
transport.py     messages between devices, skips
spills.py        stashes that go to host memory, and come back
vocabulary.py    an embedding and a head that all devices run together
sums.py          the sums of gradients in the arrays of a tick
reductions.py    their reduction over replicas
gradients.py     the exchange of compressed gradients between replicas
outer.py         the outer step of replicas that train apart; newest.py: the weights that it moves
updates.py       the update of a tick; norms.py, ties.py: norms and skipped updates, tied weights
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe import packing
from jpipe.engine import layout as layouts
from jpipe.engine.device import PassInputs, forward_pass, training_pass
from jpipe.engine.spec import ForwardPass, PassSpec
from jpipe.engine.training import TrainingPass
from jpipe.mesh import DATA, STAGE


def run_training(spec: TrainingPass, inputs: PassInputs) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Runs one pass over a table that trains.

    Args:
      spec: the pass.
      inputs: global arrays.

    Returns:
      `kept` and `in_flight` of `PassInputs`, updated, and a dict of `[devices, ...]` results: "loss" and
      "aux" (sums), "count", "skipped" and "gradient_norm".
    """
    per_device = layouts.per_device_spec(spec.mesh)
    return _on_mesh(spec, training_pass, inputs, (_specs(spec, inputs.kept), per_device, per_device))


def run_forward(spec: ForwardPass, inputs: PassInputs) -> Any:
    """Runs one pass over a forward-only table.

    Args:
      spec: the pass.
      inputs: global arrays.

    Returns:
      The leaves of the last layer's outputs, `[devices * N, microbatch, ...]` each.
    """
    return _on_mesh(spec, forward_pass, inputs, layouts.per_device_spec(spec.mesh))


def _on_mesh(spec: PassSpec, run: Callable[..., Any], inputs: PassInputs, out_specs: Any) -> Any:
    """Calls `run(spec, inputs)` on every device."""
    in_specs: dict[str, Any] = dict(
        kept=_specs(spec, inputs.kept),
        in_flight=layouts.per_device_spec(spec.mesh),
        counters=layouts.REPLICATED,
        num_entered=layouts.REPLICATED,
        batch=layouts.batch_spec(spec.mesh),
        rows=layouts.REPLICATED,
    )
    body = jax.shard_map(
        functools.partial(run, spec),
        mesh=spec.mesh,
        in_specs=(PassInputs(**in_specs),),
        out_specs=out_specs,
        axis_names={STAGE, DATA} & set(spec.mesh.axis_names),
        check_vma=False,
    )
    return body(inputs)


def _specs(spec: PassSpec, groups: Iterable[str]) -> dict[str, Any]:
    return {name: spec.layout[name].spec for name in groups}


def in_all_versions(spec: TrainingPass, field: str, weights: Any, rounds: jax.Array) -> Any:
    """Copies the weights after some rounds to the rows of all versions.

    Args:
      spec: the pass that has trained the weights.
      field: the field of the state that holds them.
      weights: global arrays, packed like the group "parameters".
      rounds: int32 `[]`, the number of rounds that all stages have completed.
    """
    rows, parameter_rows = spec.rows, spec.array_rows["parameters"]

    @functools.cache
    def rows_of_versions(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each row of an array the first row of its stage, the number of the stage's versions, and the number of
        its updates in a round.
        """
        shape = spec.schedule.num_devices, parameter_rows.number(name)
        first, modulus, updates = np.zeros(shape, int), np.ones(shape, int), np.ones(shape, int)
        for s, copies in enumerate(spec.lowered.copies):
            for d, chunk in copies:
                version_rows = rows.chunk_rows(s, d, chunk)
                if parameter_rows.row(name, d, version_rows.start) < 0:
                    continue  # the stage does not use the array
                array_rows = parameter_rows.rows(name, d, version_rows)
                first[d, array_rows] = array_rows.start
                modulus[d, array_rows] = rows.num_versions[s]
                updates[d, array_rows] = spec.schedule.updates_in_round[s]
        return first, modulus, updates

    def copied(name: str, array: jax.Array) -> jax.Array:
        if name in parameter_rows.unit_rows:
            row = jnp.mod(rounds, parameter_rows.number(name))
            return jnp.broadcast_to(array[row][None], array.shape)
        if name in spec.stages.parameters.constant:
            return array
        first, modulus, updates = rows_of_versions(name)
        if modulus.max() == 1:
            return array
        d = lax.axis_index(STAGE)
        version = rounds * jnp.asarray(updates)[d] if spec.schedule.updates_by_stage else rounds
        row = jnp.asarray(first)[d] + jnp.mod(version, jnp.asarray(modulus)[d])
        if not packing.is_on_host(array):
            return array[row]
        for i in range(len(array)):
            array = packing.each_row(array, [jnp.int32(i)], lambda a: a, [row[i]])
        return array

    def on_device(weights: Any) -> Any:
        return jax.tree.map_with_path(lambda p, a: copied(p[-1].key, a), weights)

    body = jax.shard_map(
        on_device,
        mesh=spec.mesh,
        in_specs=spec.layout[field].spec,
        out_specs=spec.layout[field].spec,
        axis_names={STAGE, DATA} & set(spec.mesh.axis_names),
        check_vma=False,
    )
    return body(weights)
