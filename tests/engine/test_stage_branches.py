"""What branches know beside the program of a stage: see `jpipe.engine.stage_branches`."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from families import FAMILIES, cross_entropy, schedule_named
from helpers import assert_close

import jpipe
from jpipe.engine.stage_branches import ANY, StageBranches
from jpipe.lowering.lower import lower
from jpipe.lowering.target import CPU, GPU, TARGETS

exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
AS_ON_GPUS = dataclasses.replace(GPU, compiler_options={}, profiled_options={}, touches_idle=False, sums_apart=True)
FAMILY = FAMILIES["mlp"].in_dtype("float64")
KEY = jax.random.key(0)


def branches_of(table, program_of, has_sums=False, branches_forward=True, knows_slots=True):
    lowered = lower(table, target=AS_ON_GPUS)
    facts = {"has_sums": has_sums, "branches_forward": branches_forward, "knows_slots": knows_slots}
    return StageBranches.of(lowered, program_of, **facts)


def test_no_branch_beside_those_of_programs():
    """One stage on each device, one version of its weights, one slot."""
    schedules = jpipe.schedules
    for table in (schedules.gpipe(4, 8), schedules.one_f_one_b(4, 8, ticks="unit"), schedules.pipemare(4, 8)):
        assert branches_of(table, [0, 1, 1, 2]) == StageBranches()


def test_each_stage_of_a_device():
    table = jpipe.schedules.interleaved(4, 4)
    forward, backward = branches_of(table, [0, 1, 1, 2], has_sums=True)
    assert forward == backward
    # Stages 1 and 2 have one program, on different positions.
    assert forward == ((0, 0, 0, ANY), (1, 0, 0, ANY), (1, 1, 1, ANY), (2, 1, 1, ANY))
    # These are two branches for one program, which only sums are worth.
    assert branches_of(table, [0, 1, 1, 2]) == StageBranches()
    forward, _ = branches_of(table, [0, 1, 2, 3])
    assert [branch.row for branch in forward] == [0, 0, 1, 1]
    # Without branches of forwards, weights are read as in every program.
    forward, backward = branches_of(table, [0, 1, 1, 2], has_sums=True, branches_forward=False)
    assert forward == () and backward == ((0, 0, ANY, ANY), (1, 0, ANY, ANY), (1, 1, ANY, ANY), (2, 1, ANY, ANY))


def test_two_versions_of_weights():
    forward, backward = branches_of(jpipe.schedules.pipedream_2bw(3, 6, ticks="unit"), [0, 1, 2])
    assert forward == backward == tuple((program, 0, row, ANY) for program in range(3) for row in range(2))
    # Three versions would be compiled three times.
    assert branches_of(jpipe.schedules.pipedream(3, 1, ticks="unit"), [0, 1, 2]) == StageBranches()


def test_slots_between_the_halves_of_a_backward():
    """A stage of ZB-H1 has one slot more than the stage before."""
    forward, backward = branches_of(jpipe.schedules.zero_bubble_h1(3, 9), [0, 1, 2])
    assert forward == ()
    assert [(branch.program, branch.slot) for branch in backward] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert branches_of(jpipe.schedules.zero_bubble_h1(6, 18), range(6)) == StageBranches()
    assert branches_of(jpipe.schedules.zero_bubble_h1(3, 9), [0, 1, 2], knows_slots=False) == StageBranches()


CASES = [
    # schedule, stages, options
    ("zero_bubble_h1", 3, {}),
    exhaustive("zero_bubble_h1", 4, {"recompute": "full"}),
    exhaustive("zero_bubble_h2", 2, {}),
    exhaustive("zero_bubble_v", 2, {}),
    exhaustive("zero_bubble_v", 4, {}),
    exhaustive("zero_bubble_h1", 2, {"mesh": {"fsdp": 2}}),
    exhaustive("zero_bubble_h1", 2, {"mesh": {"data": 2}, "shard_optimizer": True}),
    exhaustive("zero_bubble_h1", 3, {"ties": [[(1, "linear.kernel"), (3, "linear.kernel")]]}),
    exhaustive("zero_bubble_h1", 3, {"offload": jpipe.Offload(activations=3, required=False)}),
    exhaustive("dual_pipe_v", 4, {}),
]


@pytest.mark.first_case
@pytest.mark.parametrize("schedule, num_stages, options", CASES, ids=lambda value: str(value)[:40])
@pytest.mark.filterwarnings("ignore:.*bubble", "ignore:.*stages hold")
def test_training_is_that_without_them(schedule, num_stages, options, monkeypatch):
    trainings = []
    for target in (CPU, AS_ON_GPUS):
        monkeypatch.setitem(TARGETS, "cpu", target)
        table = schedule_named(schedule, num_stages, 6)
        mesh = jpipe.make_mesh(stage=table.num_devices, **options.get("mesh", {}))
        with jax.enable_x64(True):
            pipe = jpipe.Pipeline(
                FAMILY.layers,
                loss=cross_entropy,
                optimizer=optax.sgd(0.2, momentum=0.5),
                schedule=table,
                **{**options, "mesh": mesh},
            )
            batches = FAMILY.batches(4, 24)
            state, losses = pipe.init(KEY, batches[0]), []
            for batch in batches:
                state, metrics = pipe.step(state, batch)
                losses.append(np.asarray(metrics["loss"]))
            trainings.append((losses, jax.tree.map(np.asarray, pipe.get_params(state))))
    (want_losses, want), (losses, params) = trainings
    np.testing.assert_allclose(losses, want_losses, rtol=1e-12)
    assert_close(params, want, "float64")
