"""The functions for several processes, in one process, and on meshes that only name their devices."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import jpipe
from jpipe._processes import sharing as processes
from jpipe._processes.sharing import BatchRows


@dataclasses.dataclass
class Mesh:
    """A mesh of devices that are only numbers of processes."""

    rows: list

    def __post_init__(self):
        numbers = np.array(self.rows)
        self.devices = np.empty(numbers.shape, object)
        for index, process in np.ndenumerate(numbers):
            self.devices[index] = types.SimpleNamespace(process_index=process)
        self.axis_names = ("data", "stage")
        self.shape = dict(zip(self.axis_names, numbers.shape))


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    monkeypatch.setattr(jax, "process_index", lambda *_: 1)


def test_in_one_process_nothing_is_shared():
    mesh = jpipe.make_mesh(stage=2, data=2)
    np.testing.assert_array_equal(jpipe.distributed.process_rows(mesh, 5), np.arange(5))
    assert not jpipe.distributed.stop_requested(0)
    assert jpipe.distributed.stop_requested(1, requested=True)
    jpipe.distributed.initialize(num_processes=1)


def test_a_process_gives_the_rows_of_its_replicas(two_processes):
    rows = BatchRows.of(Mesh([[0, 0], [1, 1]]))
    assert rows == BatchRows(2, [[0], [1]], 1)
    assert (rows.apart, rows.whole(4)) == (True, 8)
    np.testing.assert_array_equal(rows.given(8), [4, 5, 6, 7])
    np.testing.assert_array_equal(rows.given(3), [2])
    assert rows.given(1).size == 0


def test_processes_that_hold_all_replicas_give_all_rows(two_processes):
    rows = BatchRows.of(Mesh([[0, 1], [0, 1]]))
    assert (rows.apart, rows.whole(4)) == (False, 4)
    np.testing.assert_array_equal(rows.given(3), [0, 1, 2])


def test_the_replicas_of_a_process_need_not_be_neighbours(two_processes):
    rows = BatchRows.of(Mesh([[0], [1], [0], [1]]))
    np.testing.assert_array_equal(rows.given(8), [2, 3, 6, 7])
    positions = rows.positions([4, 4], padded=4)
    np.testing.assert_array_equal(positions, np.arange(8))


@pytest.mark.parametrize("num_rows", range(1, 13))
@pytest.mark.parametrize("held", [[[0], [1]], [[0, 1], [2, 3]], [[0, 1]] * 2, [[0], [0], [1], [1]]])
def test_padded_shares_lie_in_the_order_of_the_batch(held, num_rows):
    num_replicas = max(map(max, held)) + 1
    shares = [BatchRows(num_replicas, held, p).given(num_rows) for p in range(len(held))]
    rows, multiple = BatchRows(num_replicas, held, 0), 3 * len(held[0])
    padded = -(-max(map(len, shares)) // multiple) * multiple
    batch = np.full(padded // len(held[0]) * num_replicas, -1)
    for replicas, share in zip(held, shares):
        filled = np.concatenate([share, np.full(padded - len(share), -1)])
        for i, replica in enumerate(replicas):
            size = padded // len(replicas)
            batch[replica * size : (replica + 1) * size] = filled[i * size : (i + 1) * size]
    positions = rows.positions([len(share) for share in shares], padded)
    np.testing.assert_array_equal(batch[positions], np.arange(num_rows))


@pytest.mark.parametrize(
    "devices, message",
    [
        ([[0, 0]], "it has devices of process 0, and this is process 1 of 2"),
        (
            [[0, 2], [1, 3]],
            "it has devices of processes 0, 1, 2, 3, and this is process 1",
        ),
        ([[0], [0], [1]], 'the axis "data" of `mesh` must be cut evenly'),
        ([[0, 0], [0, 1]], 'the axis "data" of `mesh` must be cut evenly'),
    ],
)
def test_meshes_that_are_refused(two_processes, devices, message):
    with pytest.raises(ValueError, match=message):
        processes.check_processes(Mesh(devices))


@pytest.mark.parametrize("devices", [[[1, 1]], [[0, 1]], [[0], [1]], [[1, 0], [1, 0]]])
def test_meshes_that_are_taken(two_processes, devices):
    processes.check_processes(Mesh(devices))
