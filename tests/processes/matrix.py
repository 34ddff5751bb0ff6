"""Restores a training from every layout into every other, saved and restored by one process and by two.

    python tests/processes/matrix.py 1 FOLDER EVERY
    python -m jpipe.launch -n 2 --devices 8 tests/processes/matrix.py 2 FOLDER EVERY
    python tests/processes/matrix.py 1 FOLDER EVERY

The first command saves the training in every layout, and writes the arrays that its state has in each. The second one
restores what one process has saved, compares it with those arrays, saves it in every layout, and restores that too.
The third one restores what two processes have saved. Of the pairs of layouts every EVERY-th one is taken.

A layout of one device cannot lie on two processes: each process restores it on a device of its own, and it is not
saved. `FOLDER/N` has what N processes have saved.
"""

import itertools
import pathlib
import sys
import time

import jax
import numpy as np
from layouts import LAYOUTS, batches, of_layout, own_rows, schedule_of, source, trained

import jpipe

PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
ASYNCHRONOUS = [layout for layout in LAYOUTS if not schedule_of(layout).synchronous]
IN_FLIGHT = "in flight"


def saved_by(num_processes, layouts):
    """The layouts that have a device for every process."""
    return [
        (name, S, data)
        for name, S, data in layouts
        if schedule_of((name, S, data)).num_devices * data >= num_processes
    ]


def name_of(layout):
    return "-".join(map(str, layout))


def arrays_of(state):
    """Name -> array, the counters included."""
    tree = {**state.replicated(), **state.per_device(), **state.counters()}
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): a for path, a in leaves}


class Matrix:
    """The checkpoints and the expected arrays in a folder.

    Args:
      folder: the folder.
      every: see the module.
    """

    def __init__(self, folder, every):
        self.folder = folder
        self.pairs = PAIRS[::every]
        used = {layout for pair in self.pairs for layout in pair}
        self.layouts = [layout for layout in LAYOUTS if layout in used]
        self.in_flight = ASYNCHRONOUS[::every]

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
        pipe = of_layout(after)
        batch = own_rows(pipe.mesh, batches(1)[0])
        state = jpipe.Checkpoints(path).restore(pipe, batch).state
        found = arrays_of(state)
        want = np.load(self.folder.joinpath("expected", *more, f"{name_of(after)}.npz"))
        assert found.keys() == set(want)
        for name, a in found.items():
            whole = want[name]
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(
                    shard.data, whole[shard.index], f"{path} {after} {name}"
                )
        return state

    def in_one_process(self):
        """Saves, or restores what two processes have saved."""
        if (self.folder / "2").exists():
            return self.restore(2)
        for layout in self.layouts:
            state = of_layout(layout).adopt(source())
            self.save(state, name_of(layout))
            self.write(state, name_of(layout))
        for layout in self.in_flight:
            pipe, data = of_layout(layout), batches(3, first=1)
            state, _ = trained(pipe, pipe.adopt(source()), data)
            self.save(state, IN_FLIGHT, name_of(layout))
            self.write(state, IN_FLIGHT, name_of(layout))
        return 0

    def in_two_processes(self):
        """Restores what one process has saved, saves it, and restores that."""
        count = self.restore(1)
        for layout in saved_by(2, self.layouts):
            state = self.restored(1, self.layouts[0], layout)
            self.save(state, name_of(layout))
        for layout in saved_by(2, self.in_flight):
            state = self.restored(1, layout, layout, IN_FLIGHT)
            self.save(state, IN_FLIGHT, name_of(layout))
        return count + self.restore(2)

    def restore(self, num_processes):
        """Restores what so many processes have saved; how many pairs of layouts."""
        sources = saved_by(num_processes, self.layouts)
        pairs = [pair for pair in self.pairs if pair[0] in sources]
        in_flight = saved_by(num_processes, self.in_flight)
        pairs += [(layout, layout, IN_FLIGHT) for layout in in_flight]
        for pair in pairs:
            self.restored(num_processes, *pair)
        return len(pairs)


def main(folder, every):
    """Does the part of this number of processes."""
    start = time.perf_counter()
    matrix = Matrix(pathlib.Path(folder), int(every))
    alone = jax.process_count() == 1
    count = matrix.in_one_process() if alone else matrix.in_two_processes()
    print(f"restored {count} in {time.perf_counter() - start:.0f} s", flush=True)
    return count


if __name__ == "__main__":
    if sys.argv[1] == "1":
        jax.config.update("jax_num_cpu_devices", 8)
    jpipe.distributed.initialize()
    main(*sys.argv[2:])
