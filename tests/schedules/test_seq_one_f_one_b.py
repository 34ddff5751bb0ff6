"""Seq1F1B against closed forms, and the rules for slices of sequences."""

import itertools
import warnings

import numpy as np
import pytest

import jpipe
from jpipe.lowering.lower import lower
from jpipe.schedules import one_f_one_b, seq_one_f_one_b

GRID = list(itertools.product(range(1, 6), range(1, 5), (1, 2, 3, 4)))  # stages, groups of rows, slices


@pytest.fixture(autouse=True)
def few_microbatches():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(("S", "groups", "k"), GRID)
def test_closed_forms(S, groups, k):
    N = k * groups
    paired, unit = (seq_one_f_one_b(S, N, k, ticks=ticks) for ticks in ("paired", "unit"))
    assert paired.num_ticks == N + 2 * S + k - 3
    assert unit.num_ticks == 3 * N + 2 * (S - 1)
    assert paired.facts().bubble == pytest.approx((S - 1) / (N + S - 1))
    assert unit.facts().bubble == pytest.approx(2 * (S - 1) / (3 * N + 2 * (S - 1)))
    assert paired.facts().in_flight.tolist() == [min(N, 2 * (S - s) + k - 2) for s in range(S)]
    assert unit.facts().in_flight.tolist() == [min(N, S - s + k - 1) for s in range(S)]


@pytest.mark.parametrize(("S", "groups", "k"), GRID)
@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_slices_come_in_order_and_go_back_in_reverse_order(S, groups, k, ticks):
    schedule = seq_one_f_one_b(S, k * groups, k, ticks=ticks)
    by_group = (groups, k, S)
    forward, backward = (a.reshape(by_group) for a in (schedule.forward_ticks(), schedule.backward_ticks()))
    assert (np.diff(forward, axis=1) > 0).all()
    assert (np.diff(backward, axis=1) < 0).all()
    assert (forward[:, -1] <= backward[:, -1]).all()
    assert (np.diff(backward[:, [0, -1]].reshape(-1, S)[1:], axis=0)[::2] > 0).all()


@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_one_slice_is_1f1b(ticks):
    assert seq_one_f_one_b(4, 8, 1, ticks=ticks).identity[1:] == one_f_one_b(4, 8, ticks=ticks).identity[1:]


@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_slots_of_what_is_handed_on(ticks):
    """All slices of a sequence find one slot, which no other sequence has meanwhile."""
    S, groups, k = 3, 5, 4
    schedule = seq_one_f_one_b(S, groups * k, k, ticks=ticks)
    rings = lower(schedule).rings
    first, last = schedule.forward_ticks(), schedule.weight_grad_ticks()
    for s in range(S):
        slots = rings["carry"].slots[s].reshape(groups, k)
        assert (slots == slots[:, :1]).all()
        lives = [(first[g * k : (g + 1) * k, s].min(), last[g * k : (g + 1) * k, s].max()) for g in range(groups)]
        for a, b in itertools.combinations(range(groups), 2):
            apart = lives[a][1] < lives[b][0] or lives[b][1] < lives[a][0]
            assert apart or slots[a, 0] != slots[b, 0]
    assert rings["carry_gradient"].num_slots == 1
    assert lower(one_f_one_b(S, 4)).rings["carry"].num_slots == 0


TABLE = """
slices 2
0@0       1@1
F0        .
F1        F0
.         F1,B1
B1        B0
B0,U1     U1
"""


def test_a_table_as_text():
    table = jpipe.Schedule.from_text(TABLE).check()
    assert (table.num_slices, table.num_row_groups, table.num_microbatches) == (2, 1, 2)
    assert jpipe.Schedule.from_text(table.to_text()) == table
    assert table != jpipe.Schedule.from_text(TABLE.replace("slices 2", ""))
    assert table.to_dict()["num_slices"] == 2
    assert "2 slices of a sequence" in jpipe.draw.text(table)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("slices 2", ""), "backward 0 before backward 1|backward 1 before backward 0"),
        (("slices 2", "slices 3"), "2 microbatches are not a multiple of the 3 slices"),
        (("F1,B1", "F1,B0"), "backward 1 before backward 0|runs twice|no backward"),
        (("slices 2", "slices"), "line 2: write the number of slices"),
        (("slices 2", "slices two"), "line 2: write the number of slices"),
        (("slices 2", "slices 0"), "`num_slices` must be an integer of at least 1"),
    ],
)
def test_illegal_tables(change, words):
    with pytest.raises(ValueError, match=words):
        jpipe.Schedule.from_text(TABLE.replace(*change)).check()


def test_slices_need_one_minibatch_and_one_column():
    m, s = np.arange(4)[:, None], np.arange(2)
    place = m // 2 * 2 + 1 - m % 2
    with pytest.raises(ValueError, match="need a synchronous table"):
        jpipe.Schedule.from_ticks("round", m + s, place + 4 - s, num_ticks=4, num_slices=2)
    copies = one_f_one_b(2, 4, replicas=(2, 1))
    fields = {name: getattr(copies, name) for name in ("stage", "device", "forward", "backward", "weight_grad")}
    fields |= {name: getattr(copies, name) for name in ("forward_version", "backward_version", "update")}
    with pytest.raises(ValueError, match="need one column for each stage"):
        jpipe.Schedule("copies", 4, **fields, num_slices=2).check()


def test_counts_that_do_not_divide():
    with pytest.raises(ValueError, match="must be a multiple of `num_slices`, 4, got 6: .* Use 8."):
        seq_one_f_one_b(2, 6, num_slices=4)
