"""Stashes that go to host memory between the forward and the backward of a microbatch.

`jpipe.lowering.spills` says what moves in which tick. The two transfers of a tick need nothing that the tick
computes, so they begin before its operations and end after them.

Rings are written before they are read, as in all of a tick. In host memory, the staged slot is written before the other
slot is read there. On the device, what comes from the host is written into the ring, and then the slot that leaves is
read.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpipe.engine.arrays import Packed, TickArrays
from jpipe.engine.guard import guarded
from jpipe.engine.spec import PassSpec
from jpipe.engine.transport import put_row
from jpipe.lowering.tick_scalars import TickScalars

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


class Transfer(NamedTuple):
    """The transfers of a tick.

    Attributes:
      loaded: a slot that came from the host, `[1, ...]`.
      stored: all slots in host memory, with the staged one.
    """

    loaded: Packed
    stored: Packed


def begin(spec: PassSpec, scalars: TickScalars, arrays: TickArrays) -> dict[str, Transfer]:
    """Begins the transfers of a tick. Returns them by ring."""
    transfers = {}
    for ring, spill in spec.lowered.spills.items():
        now, staged = scalars.spill(ring), arrays.staged[ring]
        store = jnp.where(now.stores < 0, spill.num_slots, now.stores)
        load = jnp.maximum(now.loads, 0)
        loaded, stored = {}, {}
        for name, array in arrays.host_stash[ring].items():
            slot = staged[name].reshape(1, *array.shape[1:])
            # XLA for TPUs knows a transfer into a part of an array only if nothing stands between the two.
            array = put_row(array, jax.device_put(slot, _HOST), store)
            stored[name] = array
            slot = lax.dynamic_index_in_dim(array, load, allow_negative_indices=False)
            loaded[name] = jax.device_put(slot, _DEVICE).reshape(staged[name].shape)
        transfers[ring] = Transfer(loaded, stored)
    return transfers


def end(
    spec: PassSpec,
    scalars: TickScalars,
    arrays: TickArrays,
    transfers: Mapping[str, Transfer],
) -> TickArrays:
    """Ends the transfers of a tick, and stages the slot that leaves in the next one."""
    target = spec.lowered.target
    for ring, (loaded, stored) in transfers.items():
        now = scalars.spill(ring)

        def arrive(stash: Packed, loaded: Packed, slot=now.arrives) -> Packed:
            return {n: put_row(a, loaded[n], slot) for n, a in stash.items()}

        def leave(_: Packed, stash: Packed, slot=now.leaves) -> Packed:
            return {n: lax.dynamic_index_in_dim(a, slot, allow_negative_indices=False) for n, a in stash.items()}

        stash = getattr(arrays, ring)
        stash = guarded(target, now.arrives >= 0, arrive, stash, loaded)
        staged = guarded(target, now.leaves >= 0, leave, arrays.staged[ring], stash)
        arrays = arrays.replace(
            **{ring: stash},
            host_stash={**arrays.host_stash, ring: stored},
            staged={**arrays.staged, ring: staged},
        )
    return arrays
