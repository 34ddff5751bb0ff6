"""Restores a training from every layout into every other, saved and restored by one process and by two.

    python tests/processes/matrix.py 1 FOLDER FAMILY EVERY
    python -m jpipe.launch -n 2 --devices 8 tests/processes/matrix.py 2 FOLDER FAMILY EVERY
    python tests/processes/matrix.py 1 FOLDER FAMILY EVERY

The first command saves the training in every layout, and writes the arrays that its state has in each. The second one
restores what one process has saved, compares it with those arrays, saves it in every layout, and restores that too.
The third one restores what two processes have saved. FAMILY is one of `FAMILIES`. Of the pairs of layouts every
EVERY-th one is taken.

A layout of one device cannot lie on two processes: each process restores it on a device of its own, and it is not
saved. `FOLDER/N` has what N processes have saved.
"""

import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import layouts
import numpy as np

import jpipe


class Family(NamedTuple):
    """Layouts of one training.

    Attributes:
      layouts: their names.
      pipeline: layout -> pipeline, always the same.
      batches: a number, and how many to leave out -> batches.
    """

    layouts: list[tuple]
    pipeline: Callable[[tuple], jpipe.Pipeline]
    batches: Callable[..., list[dict[str, np.ndarray]]]

    def source(self) -> jpipe.PipelineState:
        """A state after two steps."""
        pipe, batches = self.pipeline(self.layouts[0]), self.batches(2)
        state = pipe.init(jax.random.key(3), batches[0])
        return layouts.trained(pipe, state, batches)[0]


def parts(optimizer):
    pipeline = functools.partial(layouts.of_parts, optimizer)
    return Family(layouts.PARTS, pipeline, layouts.batches_of_parts)


FAMILIES: dict[str, Any] = {
    "stages": Family(layouts.LAYOUTS, layouts.of_layout, layouts.batches),
    "parts, adam": parts("adam"),
    "parts, sgd": parts("sgd"),
}
IN_FLIGHT = "in flight"


def name_of(layout):
    return "-".join(map(str, layout))


def arrays_of(state):
    """Name -> array, the counters included."""
    tree = {**state.kept(), **state.in_flight(), **state.counters()}
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): a for path, a in leaves}


class Matrix:
    """The checkpoints and the expected arrays in a folder.

    Args:
      folder: the folder.
      family: the name of the layouts.
      every: see the module.
    """

    def __init__(self, folder, family, every):
        self.folder, self.family = folder, FAMILIES[family]
        known = self.family.layouts
        self.pairs = list(itertools.product(known, known))[::every]
        used = {layout for pair in self.pairs for layout in pair}
        self.layouts = [layout for layout in known if layout in used]
        self.in_flight = [layout for layout in known if self.is_asynchronous(layout)]
        self.in_flight = self.in_flight[::every]

    def is_asynchronous(self, layout):
        return not self.family.pipeline(layout).schedule.synchronous

    def saved_by(self, num_processes, layouts):
        """The layouts that have a device for every process."""
        pipelines = map(self.family.pipeline, layouts)
        sizes = [pipe.mesh.size for pipe in pipelines]
        return [each for each, size in zip(layouts, sizes) if size >= num_processes]

    def save(self, state, *names):
        """Saves a state in a folder of this number of processes."""
        path = self.folder.joinpath(str(jax.process_count()), *names)
        with jpipe.Checkpoints(path) as checkpoints:
            checkpoints.save(2, state)

    def write(self, state, *names):
        """Writes the arrays of a state, which one process has."""
        path = self.folder.joinpath("expected", *names)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path.with_suffix(".npz"), **arrays_of(state))

    def restored(self, num_processes, before, after, *more):
        """What some processes have saved in one layout, restored into another and compared."""
        path = self.folder.joinpath(str(num_processes), *more, name_of(before))
        pipe = self.family.pipeline(after)
        batch = layouts.own_rows(pipe.mesh, self.family.batches(1)[0])
        state = jpipe.Checkpoints(path).restore(pipe, batch).state
        found = arrays_of(state)
        want = np.load(self.folder.joinpath("expected", *more, f"{name_of(after)}.npz"))
        assert found.keys() == set(want)
        for name, a in found.items():
            whole = want[name]
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(shard.data, whole[shard.index], f"{path} {after} {name}")
        return state

    def in_one_process(self):
        """Saves, or restores what two processes have saved."""
        if (self.folder / "2").exists():
            return self.restore(2)
        source = self.family.source()
        for layout in self.layouts:
            state = self.family.pipeline(layout).adopt(source)
            self.save(state, name_of(layout))
            self.write(state, name_of(layout))
        for layout in self.in_flight:
            pipe, batches = self.family.pipeline(layout), self.family.batches(3, 2)
            state, _ = layouts.trained(pipe, pipe.adopt(source), batches)
            self.save(state, IN_FLIGHT, name_of(layout))
            self.write(state, IN_FLIGHT, name_of(layout))
        return 0

    def in_two_processes(self):
        """Restores what one process has saved, saves it, and restores that."""
        count = self.restore(1)
        for layout in self.saved_by(2, self.layouts):
            state = self.restored(1, self.layouts[0], layout)
            self.save(state, name_of(layout))
        for layout in self.saved_by(2, self.in_flight):
            state = self.restored(1, layout, layout, IN_FLIGHT)
            self.save(state, IN_FLIGHT, name_of(layout))
        return count + self.restore(2)

    def restore(self, num_processes):
        """Restores what so many processes have saved; how many pairs of layouts."""
        sources = self.saved_by(num_processes, self.layouts)
        pairs = [pair for pair in self.pairs if pair[0] in sources]
        in_flight = self.saved_by(num_processes, self.in_flight)
        pairs += [(layout, layout, IN_FLIGHT) for layout in in_flight]
        for pair in pairs:
            self.restored(num_processes, *pair)
        return len(pairs)


def main(folder, family, every):
    """Does the part of this number of processes."""
    start = time.perf_counter()
    matrix = Matrix(pathlib.Path(folder), family, int(every))
    alone = jax.process_count() == 1
    count = matrix.in_one_process() if alone else matrix.in_two_processes()
    print(f"restored {count} in {time.perf_counter() - start:.0f} s", flush=True)
    return count


if __name__ == "__main__":
    if sys.argv[1] == "1":
        jax.config.update("jax_num_cpu_devices", 8)
    jpipe.distributed.initialize()
    main(*sys.argv[2:])
