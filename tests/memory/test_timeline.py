"""`jpipe.memory.Timeline` on blocks made by hand."""

import json

import numpy as np
import pytest

from jpipe.memory import Access, Block, Timeline, blocks_of_csv
from jpipe.memory._timeline import idle_blocks


def block(name, use, size, start, stop, *accesses):
    listed = tuple(Access(t, kind) for t, kind in accesses)
    return Block(name, use, size, start, stop, listed)


BLOCKS = (
    block("w", "weights", 100, 0.0, 4.0, (1.0, "read"), (3.0, "write")),
    block("a, one", "input stash", 10, 1.0, 2.0, (1.0, "write"), (2.0, "read")),
    # It lives on into the next step, and the one after that.
    block("a, two", "input stash", 7, 3.0, 9.0, (3.0, "write"), (9.0, "read")),
)
TIMELINE = Timeline(BLOCKS, 4.0, "ticks", "by hand", (0.0, 1.0, 2.0, 3.0))


def test_bytes_by_use():
    assert TIMELINE.moments.tolist() == [0, 1, 2, 3]
    by_use = TIMELINE.by_use()
    assert by_use["weights"].tolist() == [100] * 4
    # From 3 to 9 is from 3 to 4, all of the next step, and 0 to 1 of the third.
    assert by_use["input stash"].tolist() == [14, 17, 7, 14]
    assert TIMELINE.peak == 117
    assert TIMELINE.peak_time == 1.0


def test_idle_blocks_fill_an_allocation():
    free = idle_blocks("ring", 30, BLOCKS[1:], 4.0)
    whole = Timeline((*BLOCKS[1:], *free), 4.0, "ticks")
    assert set(whole.total.tolist()) == {30}
    assert whole.peak_used == 17
    with pytest.raises(AssertionError, match="ring: 17 bytes in use at 1.0"):
        idle_blocks("ring", 16, BLOCKS[1:], 4.0)


def test_categories_sum_to_the_total_at_random():
    rng = np.random.default_rng(0)
    for _ in range(50):
        blocks = []
        for i in range(rng.integers(1, 12)):
            start = int(rng.integers(0, 8))
            stop = start + int(rng.integers(1, 20))
            use = ["weights", "message", "temporary"][rng.integers(3)]
            size = int(rng.integers(1, 50))
            blocks.append(block(f"{i}", use, size, float(start), float(stop)))
        timeline = Timeline(tuple(blocks), 8.0, "ticks")
        # Without a rule for wrapping: steps -5 to 0, moment after moment.
        for t in range(8):
            lives = sum(
                b.num_bytes for b in blocks for step in range(6) if b.allocated - 8 * step <= t < b.freed - 8 * step
            )
            i = np.searchsorted(timeline.moments, t, side="right") - 1
            assert timeline.total[i] == lives
            assert sum(b.num_bytes for b in timeline.at(t)) == lives


def test_intervals_go_round_only_if_the_array_lives_on():
    found = {(i.name, i.start): i.length for i in TIMELINE.intervals()}
    assert found == {
        ("w", 1.0): 2.0,
        ("w", 3.0): 2.0,  # to 1.0 of the next step
        ("a, one", 1.0): 1.0,
        ("a, two", 3.0): 6.0,
    }


def test_swap_rule_of_the_paper():
    """25 microseconds at 6.35 GB/s each way are enough for about 79 kB."""
    rate, interval = 6.35e9, 25e-6

    def candidates(size, **rates):
        both = block("x", "input stash", size, 0.0, interval, (0.0, "write"), (interval, "read"))
        return Timeline((both,), 1.0, "seconds").swap_candidates(**rates)

    assert candidates(79_375, to_host=rate)[0].num_bytes == 79_375
    assert not candidates(79_376, to_host=rate)
    # Back at twice the rate: size (1 / B + 1 / 2B) = 25 us.
    assert candidates(105_833, to_host=rate, to_device=2 * rate)
    assert not candidates(105_834, to_host=rate, to_device=2 * rate)


def test_candidates_come_in_order_of_what_they_save():
    blocks = [
        block(name, "weights", size, 0.0, 8.0, (0.0, "read"), (end, "read"))
        for name, size, end in (("small", 1, 7.0), ("large", 50, 5.0))
    ]
    timeline = Timeline(tuple(blocks), 8.0, "seconds")
    assert [i.name for i in timeline.swap_candidates(100.0)][:2] == ["large", "large"]


def test_json_and_csv_round_trip(tmp_path):
    text = json.dumps(TIMELINE.to_json())
    assert Timeline.from_json(json.loads(text)) == TIMELINE
    assert tuple(blocks_of_csv(TIMELINE.to_csv())) == BLOCKS
    for name in ("t.json", "t.csv"):
        TIMELINE.save(tmp_path / name)
    assert (tmp_path / "t.json").read_text() == text
    assert (tmp_path / "t.csv").read_text() == TIMELINE.to_csv()


def test_text_has_uses_and_blocks():
    text = TIMELINE.text(num_blocks=1)
    assert "117 B allocated" in text
    assert "input stash" in text
    assert "and 2 smaller ones" in text


@pytest.mark.first_case
@pytest.mark.parametrize("panels", [(), ("bytes",), ("blocks", "intervals")])
def test_pictures(tmp_path, panels):
    pytest.importorskip("matplotlib")
    path = tmp_path / "t.svg"
    TIMELINE.draw(path, panels)
    text = path.read_text()
    assert "by hand" in text
    assert ("input stash" in text) == (panels != ("blocks",))


def test_wrong_inputs(tmp_path):
    with pytest.raises(ValueError, match="swap candidates need seconds, and the axis has ticks"):
        TIMELINE.swap_candidates(1e9)
    seconds = Timeline(BLOCKS, 4.0, "seconds")
    with pytest.raises(ValueError, match="`to_host` must be above 0"):
        seconds.swap_candidates(0)
    with pytest.raises(ValueError, match="`use` must be one of 'weights'"):
        block("x", "weight", 1, 0.0, 1.0)
    with pytest.raises(ValueError, match="a block is freed after it is allocated"):
        block("x", "weights", 1, 2.0, 1.0)
    with pytest.raises(ValueError, match="`kind` of an access"):
        block("x", "weights", 1, 0.0, 1.0, (0.0, "free"))
    with pytest.raises(ValueError, match="allocated within the step, before 1"):
        Timeline(BLOCKS, 1.0, "ticks")
    with pytest.raises(ValueError, match="`unit` must be one of"):
        Timeline(BLOCKS, 4.0, "hours")
    with pytest.raises(ValueError, match="no timeline that `to_json` has written"):
        Timeline.from_json({"unit": "ticks"})
    with pytest.raises(ValueError, match="the first line must be name,use"):
        blocks_of_csv("a,b\n1,2\n")
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="`panels` must be some of"):
        TIMELINE.draw(tmp_path / "t.svg", ("pie",))
