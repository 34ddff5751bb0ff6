"""Several processes: which rows of a batch each one gives, and how all of them agree.

Every process runs the same program and calls the same methods in the same order. A mesh may lay any of its
axes across processes. What each process holds follows from the mesh:

- If the axis "data" crosses processes, a process gives the rows of its own replicas, and nothing else.
- If it does not, every process holds a part of every replica, and all give the same whole batch.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpipe._processes import watchdog as _watchdog
from jpipe.mesh import DATA

# -- What a process holds of a mesh


def processes_of(mesh: Mesh) -> list[int]:
    """The processes whose devices a mesh has, in order."""
    return sorted({device.process_index for device in mesh.devices.flat})


def is_shared(mesh: Mesh) -> bool:
    """Returns whether a mesh has devices of several processes.

    In one process it has not: there the devices are described ones, to compile for, and the batch is given whole.
    """
    if jax.process_count() == 1:
        return False
    first = mesh.devices.flat[0].process_index
    return any(d.process_index != first for d in mesh.devices.flat)


def replicas_of(mesh: Mesh, process: int) -> list[int]:
    """The replicas, positions along the axis "data", that a process holds devices of."""
    if DATA not in mesh.shape:
        return [0]
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0)
    return [i for i, devices in enumerate(rows) if any(d.process_index == process for d in devices.flat)]


def check_processes(mesh: Mesh) -> None:
    """Refuses a mesh whose devices are neither all of one process nor some of every process.

    Raises:
      ValueError: for such a mesh, and for one that cuts the axis "data" unevenly.
    """
    if jax.process_count() == 1:
        return
    here, processes = jax.process_index(), processes_of(mesh)
    if here not in processes or len(processes) not in (1, jax.process_count()):
        raise ValueError(
            "`mesh` must have devices of all processes, or of this one alone: it has devices of "
            f"{_names(processes)}, and this is process {here} of {jax.process_count()}. Make it with "
            "`jpipe.make_mesh` from all of `jax.devices()`, or from `jax.local_devices()`."
        )
    replicas = [replicas_of(mesh, process) for process in processes]
    counts: dict[int, int] = {}
    for replica in (i for held in replicas for i in held):
        counts[replica] = counts.get(replica, 0) + 1
    uneven = any(set(a) & set(b) and a != b for i, a in enumerate(replicas) for b in replicas[:i])
    if uneven or len({len(held) for held in replicas}) > 1:
        raise ValueError(
            f'the axis "{DATA}" of `mesh` must be cut evenly by the processes: process i holds devices '
            f"of the replicas {replicas}. Give every process the same number of devices, and let "
            f'"{DATA}" be a multiple or a divisor of the number of processes.'
        )


def _names(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


# -- Batches


def is_global(a: Any) -> bool:
    """Returns whether an array, or an abstract one, lies on devices of several processes."""
    if isinstance(a, jax.Array):
        return not a.is_fully_addressable
    sharding = getattr(a, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


class BatchRows(NamedTuple):
    """The shares of processes in the rows of a batch.

    Attributes:
      num_replicas: the number of replicas of the pipeline.
      held: the replicas that each process of the mesh holds devices of, one list per process.
      process: the position of this process among them.
    """

    num_replicas: int
    held: list[list[int]]
    process: int

    @classmethod
    def of(cls, mesh: Mesh) -> "BatchRows":
        """The share of each process in a mesh."""
        processes = processes_of(mesh)
        held = [replicas_of(mesh, process) for process in processes]
        here = processes.index(jax.process_index())
        return cls(mesh.shape.get(DATA, 1), held, here)

    @property
    def num_held(self) -> int:
        """Replicas whose rows a process gives."""
        return len(self.held[0])

    @property
    def apart(self) -> bool:
        """True if processes give different rows."""
        return self.num_held < self.num_replicas

    def whole(self, num_rows: int) -> int:
        """The rows of a whole batch of which a process gives so many."""
        return num_rows * self.num_replicas // self.num_held

    def given(self, num_rows: int) -> np.ndarray:
        """The rows that this process gives, out of a batch in one piece.

        Example:
          >>> BatchRows(2, [[0], [1]], process=1).given(5)
          array([3, 4])
        """
        blocks = np.array_split(np.arange(num_rows), self.num_replicas)
        return np.concatenate([blocks[replica] for replica in self.held[self.process]])

    def positions(self, sizes: Sequence[int], padded: int) -> np.ndarray:
        """Positions of the rows of all processes in a batch that each of them has padded.

        Args:
          sizes: rows that each process gives.
          padded: rows of each process with the padding.

        Returns:
          int32, the rows that are not padding, in the order of the replicas.

        Example:
          >>> BatchRows(2, [[0], [1]], 0).positions([3, 2], padded=4)
          array([0, 1, 2, 4, 5], dtype=int32)
        """
        share = padded // self.num_held
        kept = []
        for replica in range(self.num_replicas):
            p = next(p for p, held in enumerate(self.held) if replica in held)
            first = self.held[p].index(replica) * share
            count = min(max(sizes[p] - first, 0), share)
            kept.append(replica * share + np.arange(count, dtype=np.int32))
        return np.concatenate(kept)


def assemble(rows: BatchRows, a: Any, sharding: NamedSharding) -> jax.Array:
    """Makes the global array whose rows the processes give; places an array that is global already.

    Nothing is sent: each process copies its rows to its own devices.

    Args:
      rows: the shares of the processes.
      a: this process's rows, or a global array.
      sharding: the split of the first axis.
    """
    if is_global(a):
        return jax.device_put(a, sharding)
    a = np.asarray(a, jax.dtypes.canonicalize_dtype(a.dtype))
    shape = (rows.whole(a.shape[0]), *a.shape[1:])
    return jax.make_array_from_process_local_data(sharding, a, shape)


def own_rows(a: jax.Array, mesh: Mesh) -> jax.Array:
    """The rows of a global array, split over "data" alone, that lie on this process's devices."""
    local = mesh.local_mesh
    shape = (
        a.shape[0] // mesh.shape[DATA] * local.shape[DATA],
        *a.shape[1:],
    )
    sharding = NamedSharding(local, PartitionSpec(DATA))
    shards = {shard.device: shard.data for shard in a.addressable_shards}
    return jax.make_array_from_single_device_arrays(shape, sharding, [shards[device] for device in local.devices.flat])


_SAMPLED_BYTES = 2**14


def sampled_checksum(batch: Any) -> int:
    """A checksum of the shapes of a batch and of some rows of each array, which takes microseconds.

    It tells one minibatch of a data set from another one. Global arrays, whose rows may lie elsewhere, do not count.
    """
    total = 0
    for a in jax.tree.leaves(batch):
        if is_global(a):
            continue
        a = np.asarray(a)
        total = zlib.crc32(str(a.shape).encode(), total)
        every = -(-a.nbytes // _SAMPLED_BYTES) or 1
        rows = np.ascontiguousarray(a[::every]).reshape(-1).view(np.uint8)
        total = zlib.crc32(rows[:_SAMPLED_BYTES].tobytes(), total)
    return total


# -- Agreement


def gather_texts(text: str) -> list[str]:
    """The texts that the processes give, by process. Every process must call it."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = gather(np.array([data.size], np.int32))[:, 0]
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    return [row[:n].tobytes().decode() for row, n in zip(gather(padded), sizes)]


def gather(values: np.ndarray) -> np.ndarray:
    """The arrays that the processes give, stacked. Every process must give the same shape."""
    with _watchdog.SharedCall():
        return np.asarray(multihost_utils.process_allgather(values))


def from_first(value: Any) -> Any:
    """Returns on every process the value that process 0 gives, which JSON can hold. The others give None."""
    texts = gather_texts(json.dumps(value) if jax.process_index() == 0 else "")
    return json.loads(texts[0])


def check_agreement(facts: Mapping[str, str], remedy: str) -> None:
    """Raises the same error on every process if they disagree in a fact.

    Args:
      facts: name -> text. A difference in an early fact may cause one in a later one.
      remedy: the last sentence of the message.

    Raises:
      ValueError: naming the first fact that differs, with the texts of two processes.
    """
    texts = gather_texts(json.dumps(facts))
    if len(set(texts)) == 1:
        return
    facts_by_process = [json.loads(text) for text in texts]
    names = dict.fromkeys(name for theirs in facts_by_process for name in theirs)
    for name in names:
        values = [theirs.get(name, "nothing") for theirs in facts_by_process]
        other = next((p for p, v in enumerate(values) if v != values[0]), None)
        if other is not None:
            raise ValueError(
                f"the processes disagree in {name}: process 0 has {_shown(values[0])}, process "
                f"{other} has {_shown(values[other])}. {remedy}"
            )


def _shown(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
