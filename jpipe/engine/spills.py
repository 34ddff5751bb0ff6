"""Stashes that go to host memory between the forward and the backward of a microbatch.

`jpipe.lowering.spills` says what moves in which tick. The two transfers of a tick need nothing that the tick
computes, so they begin before its operations and end after them.

Rings are written before they are read, as in all of a tick: what comes from the host is written into the ring, and then
the slot that leaves is read. What was staged is written into host memory after the other slot has been read there.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.guard import guarded
from jpipe.engine.layout import stored_on_host
from jpipe.engine.spec import PassSpec
from jpipe.engine.transport import put_row
from jpipe.lowering.scalars import TickScalars

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


class Transfer(NamedTuple):
    """What moves in a tick.

    Attributes:
      loaded: a slot that came from the host, `[1, ...]`.
      leaving: the staged slot, in host memory.
    """

    loaded: Packed
    leaving: Packed


def begin(
    spec: PassSpec, scalars: TickScalars, arrays: TickArrays
) -> dict[str, Transfer]:
    """Begins the transfers of a tick, by ring."""
    transfers = {}
    for ring in spec.lowered.spills:
        slot, staged = scalars.spill(ring).loads, arrays.staged[ring]
        loaded, leaving = {}, {}
        for name, stored in arrays.host_stash[ring].items():
            value = lax.dynamic_index_in_dim(
                stored, jnp.maximum(slot, 0), allow_negative_indices=False
            )
            shape = staged[name].shape
            loaded[name] = jax.device_put(value, _DEVICE).reshape(shape)
            of_host = staged[name].reshape(stored_on_host(shape))
            leaving[name] = jax.device_put(of_host, _HOST)
        transfers[ring] = Transfer(loaded, leaving)
    return transfers


def end(
    spec: PassSpec,
    scalars: TickScalars,
    arrays: TickArrays,
    transfers: Mapping[str, Transfer],
) -> TickArrays:
    """Ends the transfers of a tick, and stages the slot that leaves in the next one."""
    guard = spec.lowered.guard
    for ring, transfer in transfers.items():
        # The host's slot is read before another one is written, so that its array is not copied.
        loaded, leaving = lax.optimization_barrier(tuple(transfer))
        now, num_slots = scalars.spill(ring), spec.lowered.spills[ring].num_slots
        stores = jnp.where(now.stores < 0, num_slots, now.stores)
        stored = {
            name: put_row(array, leaving[name], stores)
            for name, array in arrays.host_stash[ring].items()
        }

        def arrive(stash: Packed, loaded: Packed, slot=now.arrives) -> Packed:
            return {n: put_row(a, loaded[n], slot) for n, a in stash.items()}

        def leave(_: Packed, stash: Packed, slot=now.leaves) -> Packed:
            return {
                n: lax.dynamic_index_in_dim(a, slot, allow_negative_indices=False)
                for n, a in stash.items()
            }

        stash = getattr(arrays, ring)
        stash = guarded(guard, now.arrives >= 0, arrive, stash, loaded)
        staged = guarded(guard, now.leaves >= 0, leave, arrays.staged[ring], stash)
        arrays = arrays.replace(
            **{ring: stash},
            host_stash={**arrays.host_stash, ring: stored},
            staged={**arrays.staged, ring: staged},
        )
    return arrays
