"""Tables whose stages have copies: PipeDream's 1F1B-RR against formulas that read no table."""

import itertools
import json
import math
import warnings

import numpy as np
import oracles
import pytest

from jpipe import draw, schedules
from jpipe.schedule import IDLE, Schedule

REPLICAS = [
    (3, 1),
    (1, 3),
    (2, 3),
    (2, 2),
    (15, 1),
    (2, 1, 1),
    (1, 2, 1),
    (3, 2, 1),
    (4,),
]
KINDS = [
    ("gpipe", {}),
    ("one_f_one_b", {"ticks": "paired"}),
    ("one_f_one_b", {"ticks": "unit"}),
    *itertools.product(
        ("pipedream", "pipedream_2bw", "pipemare"),
        ({"ticks": "paired"}, {"ticks": "unit"}),
    ),
]
COUNTS = [(replicas, max(replicas) + extra) for replicas in REPLICAS for extra in (0, 1, max(replicas), 9)]


def build(name, replicas, N, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few microbatches
        return schedules.get(name)(len(replicas), N, replicas=replicas, **options)


def delays(replicas, N, ticks):
    delay = oracles.delay_with_copies(replicas, N, ticks)
    S = range(len(replicas))
    return [[delay(s, b) for s in S] for b in range(N)]


@pytest.mark.parametrize("replicas,N", COUNTS, ids=str)
@pytest.mark.parametrize("name,options", KINDS, ids=str)
def test_every_table(name, options, replicas, N):
    S, R = len(replicas), sum(replicas)
    refusal = schedules.refusal(name, S, N, replicas=replicas, **options)
    if refusal is not None:
        assert name == "pipedream_2bw"
        with pytest.raises(ValueError) as info:
            build(name, replicas, N, **options)
        assert str(info.value) == refusal
        return
    table = build(name, replicas, N, **options)
    assert table.check() is table and table.name == name
    assert (table.num_stages, table.num_devices) == (S, R)
    assert table.replicas == replicas
    assert table.num_microbatches == N
    ends = [0, *itertools.accumulate(replicas)]
    assert table.copies == tuple(tuple(range(*p)) for p in itertools.pairwise(ends))

    # Microbatch b of a stage with r copies runs on copy b mod r.
    for s, b in itertools.product(range(S), range(N)):
        column = table.column_of_microbatch[b, s]
        assert table.stage[column] == s
        assert table.device[column] == ends[s] + b % replicas[s]

    # An operation of a stage with r copies is r units of work.
    done = table.device_work().sum(axis=0)
    for s, r in enumerate(replicas):
        got = done[ends[s] : ends[s + 1]]
        assert got.tolist() == [3 * r * oracles.share(N, r, k) for k in range(r)]

    again = Schedule.from_text(table.to_text(), name=name)
    assert again == table
    fields = json.loads(json.dumps(table.to_dict()))
    assert fields["stage"] == table.stage.tolist()
    assert len(fields["forward"][0]) == table.num_columns
    labels = draw.text(table).split()
    for s, r in enumerate(replicas):
        wanted = [f"s{s}.{k}" for k in range(r)] if r > 1 else [f"s{s}"]
        assert all(label in labels for label in wanted)

    facts = table.facts()
    assert 0 <= facts.bubble < 1
    assert len(facts.in_flight) == S


@pytest.mark.parametrize("replicas,N", COUNTS, ids=str)
@pytest.mark.parametrize("ticks", ["paired", "unit"])
def test_delays(replicas, N, ticks):
    want = delays(replicas, N, ticks)
    for name in ("pipedream", "pipemare"):
        table = build(name, replicas, N, ticks=ticks)
        got = -table.by_stage(table.forward_versions())
        assert got.tolist() == want
        back = -table.by_stage(table.backward_versions())
        assert back.tolist() == (want if name == "pipedream" else np.zeros_like(got).tolist())
        assert table.facts().forward_delay.tolist() == np.max(want, axis=0).tolist()
    synced = build("pipedream", replicas, N, ticks=ticks, vertical_sync=True)
    read = -synced.by_stage(synced.forward_versions())
    assert (read == np.array(want)[:, :1]).all()


@pytest.mark.parametrize("ticks", ["paired", "unit"])
@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_2bw_takes_what_a_delay_of_one_allows(replicas, ticks):
    """From the least N on, every microbatch of every stage is at most one version behind."""
    for N in range(max(replicas), 3 * sum(replicas)):
        accepts = schedules.refusal("pipedream_2bw", len(replicas), N, ticks=ticks, replicas=replicas)
        assert (accepts is None) == (np.max(delays(replicas, N, ticks)) <= 1)
        if accepts is None:
            facts = build("pipedream_2bw", replicas, N, ticks=ticks).facts()
            assert facts.forward_delay.tolist() == [1] * len(replicas)
            assert facts.weight_versions.tolist() == [2] * len(replicas)


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
@pytest.mark.parametrize("name", ["one_f_one_b", "pipemare"])
def test_the_order_of_unit_ticks_is_that_of_pipedreams_runtime(name, replicas):
    """On every copy: w forwards, then in turn a forward, a backward, a weight gradient."""
    N = 4 * max(replicas)
    table = build(name, replicas, N, ticks="unit")
    for c, s in enumerate(table.stage.tolist()):
        w = oracles.warm_up(replicas)[s]
        ticks = [getattr(table, f"{kind}_ticks")()[:, c] for kind in ("forward", "backward", "weight_grad")]
        F, B, W = (of_kind[of_kind != IDLE] for of_kind in ticks)
        n = len(F)
        if not table.synchronous:  # unroll the round
            F, B, W = (np.concatenate([of_kind + table.num_ticks * r for r in range(w + 2)]) for of_kind in (F, B, W))
        order = sorted([*((t, "F") for t in F), *((t, "B") for t in B), *((t, "W") for t in W)])
        assert len({t for t, _ in order}) == len(order)  # one operation per tick
        got = "".join(kind for _, kind in order)[: w + 3 * (n - w)]
        assert got == "F" * w + "FBW" * (n - w)
        assert table.facts().in_flight[s] == min(w + 1, N // replicas[s])


@pytest.mark.parametrize("replicas", [(3, 1), (2, 2), (15, 1), (2, 1, 1), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_paired_ticks_have_the_bubble_of_a_straight_pipe_of_groups(replicas, groups):
    """If L is a multiple of every r, all devices have equal work in every tick."""
    S, N = len(replicas), groups * max(replicas)
    for name in ("gpipe", "one_f_one_b"):
        facts = build(name, replicas, N).facts()
        assert facts.bubble == pytest.approx((S - 1) / (groups + S - 1))
        assert facts.makespan == 3 * max(replicas) * (groups + S - 1)
    assert build("pipemare", replicas, N, ticks="paired").facts().bubble == 0


def test_a_unit_round_is_as_long_as_its_busiest_copy_works():
    for replicas, N in COUNTS:
        table = build("pipemare", replicas, N, ticks="unit")
        least = 3 * math.ceil(N / min(replicas))
        # Where nothing divides anything, copies wait for each other's gradients.
        assert least <= table.num_ticks <= least + 3 * len(replicas), (replicas, N)


@pytest.mark.parametrize("name,options", KINDS, ids=str)
def test_one_copy_each_is_the_table_without_copies(name, options):
    table = schedules.get(name)(3, 8, **options)
    assert build(name, (1, 1, 1), 8, **options) == table
    assert table == schedules.get(name)(3, 8, replicas=None, **options)
    assert not table.has_copies


@pytest.mark.parametrize("name,options", KINDS, ids=str)
@pytest.mark.parametrize(
    "replicas,N,message",
    [
        ((3, 1, 1), 8, "`replicas` must have one number for each of the 2 stages, got .3, 1, 1"),
        ((3,), 8, "which has 1: it says how many devices run each stage. Pass 2 numbers"),
        ((0, 1), 8, "`replicas` must hold integers of at least 1, got 0 for stage 0"),
        ((1, 2.0), 8, "got 2.0 for stage 1: a stage runs on one device or more"),
        ((1, True), 8, "got True for stage 1"),
        ("31", 8, "`replicas` must be a sequence of integers, one per stage, got '31'"),
        (3, 8, "`replicas` must be a sequence of integers, one per stage, got 3"),
        ((3, 1), 2, "`num_microbatches` must be at least 3, the copies of stage 0, got 2"),
    ],
)  # fmt: skip
def test_wrong_replicas(name, options, replicas, N, message):
    with pytest.raises(ValueError, match=message):
        schedules.get(name)(2, N, replicas=replicas, **options)
    assert schedules.refusal(name, 2, N, replicas=replicas, **options)


def test_schedules_without_copies_say_so():
    with pytest.raises(ValueError, match="interleaved has no option 'replicas'"):
        schedules.refusal("interleaved", 4, 8, replicas=(1, 1, 1, 1))


@pytest.mark.parametrize("replicas,N", COUNTS, ids=str)
def test_prediction_runs_on_all_copies(replicas, N):
    trained = build("gpipe", replicas, N)
    table = schedules.forward_only(len(replicas), N, stage=trained.stage, device=trained.device)
    assert table.forward_only and table.copies == trained.copies
    for s, r in enumerate(replicas):
        devices = table.device[table.column_of_microbatch[:, s]]
        assert devices.tolist() == [trained.copies[s][b % r] for b in range(N)]
