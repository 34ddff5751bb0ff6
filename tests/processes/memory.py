"""Measures the memory of each process while several they make, train, save, restore and move a model of 200 MB.

    python -m jpipe.launch -n 2 --devices 4 tests/processes/memory.py FOLDER

On CPU devices an array of a device is memory of its process. Each process prints a line of JSON: what it did -> bytes
above those before: the peak, and what is left afterwards.
"""

import ctypes
import functools
import gc
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import jpipe
from jpipe import schedules

WIDTHS = 1536, 2048
NUM_LAYERS = 16  # of two shapes in turn, so that no array of a stage is padded
ROWS = 16


def status(name: str) -> int:
    """Bytes of a line of `/proc/self/status`."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


class Peaks:
    """Measures calls.

    Attributes:
      found: name -> bytes; see the module.
    """

    def __init__(self):
        self.found = {}

    def of(self, name, function, *arguments):
        """Calls a function and returns what it returns."""
        collect()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now
        before = status("VmRSS")
        result = jax.block_until_ready(function(*arguments))
        peak = status("VmHWM")
        collect()
        self.found[name] = {"peak": peak - before, "left": status("VmRSS") - before}
        return result


def collect():
    """Gives free memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def bytes_here(tree) -> int:
    """Bytes of arrays on the devices of this process."""
    shards = [s for a in jax.tree.leaves(tree) for s in a.addressable_shards]
    return sum(shard.data.nbytes for shard in shards)


def pipeline(schedule):
    widths, S = WIDTHS * NUM_LAYERS, schedule.num_stages
    return jpipe.Pipeline(
        [lambda rngs, i=i: nnx.Linear(*widths[i : i + 2], rngs=rngs) for i in range(NUM_LAYERS)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.adam(1e-3),
        schedule=schedule,
        boundaries=[NUM_LAYERS // S * s for s in range(1, S)],
    )


def sizes_of(state, memory):
    """Bytes that the peaks are made of."""
    return {
        "weights": sum(a.nbytes for a in state.parameters.values()),
        "state": sum(a.nbytes for a in jax.tree.leaves(state.kept())),
        "own": bytes_here(state.kept()),
        "private": bytes_here(state.in_flight()),
        "part": max(shard.data.nbytes for a in state.parameters.values() for shard in a.addressable_shards),
        "temporaries": memory.temporaries * jax.local_device_count(),
    }


def main(folder):
    peaks, checkpoints = Peaks(), jpipe.Checkpoints(folder)
    pipe = pipeline(schedules.gpipe(4, 4))
    other = pipeline(schedules.interleaved(8, 4))
    rows = np.ones((ROWS, WIDTHS[0]), np.float32)
    batch = {"inputs": rows, "targets": np.zeros((ROWS, WIDTHS[0]), np.float32)}
    pipe.init(jax.random.key(0), batch)  # what is compiled stays

    state = peaks.of("init", pipe.init, jax.random.key(0), batch)
    state, _ = pipe.step(state, batch)
    state, _ = peaks.of("step", pipe.step, state, batch)
    sizes = sizes_of(state, pipe.memory(batch))
    peaks.of("get_params", pipe.get_params, state)
    peaks.of("save", lambda s: [checkpoints.save(1, s), checkpoints.wait()], state)
    other.adopt(state)
    adopted = peaks.of("adopt", other.adopt, state)
    assert bytes_here(adopted.kept()) < 1.01 * sizes["own"]
    del adopted
    gather = functools.partial(multihost_utils.process_allgather, tiled=True)
    peaks.of("control", gather, state.parameters)
    del state
    for name, each in (("restore", pipe), ("restore elsewhere", other)):
        restored = peaks.of(name, checkpoints.restore, each, batch)
        assert bytes_here(restored.state.kept()) < 1.01 * sizes["own"]
        del restored
    print(json.dumps({"sizes": sizes, "peaks": peaks.found}), flush=True)


if __name__ == "__main__":
    jpipe.distributed.initialize()
    main(sys.argv[1])
