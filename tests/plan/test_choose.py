"""Choices among plans: each is checked by itself, and cases whose winner is known beforehand."""

import dataclasses
import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import profile_of, timed

import jpipe
from jpipe.plan import Machine, choose, predict, size_text

PROFILE = timed(
    profile_of("mlp"),
    forward=1.0,
    forward_and_stash=1.0,
    backward=2.0,
    input_grad=1.0,
    weight_grad=1.0,
)
FOUR = Machine(4)


def chosen(profile=PROFILE, machine=FOUR, batch_size=16, **options):
    return choose(profile, machine, batch_size, **options)


def of(candidates, **fields):
    return [c for c in candidates if all(getattr(c, name) == value for name, value in fields.items())]


@pytest.mark.exhaustive
def test_every_candidate_is_what_it_says():
    """Tables can be built, use up the minibatch and the devices, and are priced alike."""
    found = chosen(asynchronous=True)
    for c in found:
        assert c.num_microbatches * c.num_replicas * c.microbatch_size == 16
        assert c.num_devices <= 4 and len(c.boundaries) == c.num_stages - 1
        table = c.table()
        assert (table.name, table.num_stages) == (c.schedule, c.num_stages)
        profile = dataclasses.replace(PROFILE, recompute=c.recompute)
        again = predict(table, profile, c.boundaries, FOUR, c.num_replicas)
        assert again.seconds == c.prediction.seconds
    key = [(c.schedule, str(c.options), c.num_stages, c.num_replicas, c.recompute) for c in found]
    assert len(set(key)) == len(key)
    names = {c.schedule for c in found}
    assert names == set(jpipe.schedules.names()) - {"seq_one_f_one_b"}  # a profile is of whole sequences
    assert {c.num_stages for c in found} == {1, 2, 3, 4, 6}


@pytest.mark.exhaustive
def test_they_are_ranked():
    found = chosen(asynchronous=True)
    seconds = [float(f"{c.prediction.seconds:.9g}") for c in found]
    keys = [(s, c.prediction.num_bytes) for s, c in zip(seconds, found)]
    assert keys == sorted(keys) and len({*seconds}) < len(seconds)
    assert found[0].why == "" and all(c.why for c in found[1:])


@pytest.mark.exhaustive
def test_a_policy_is_priced_with_the_programs_that_it_runs():
    policy = dataclasses.replace(PROFILE, recompute="dots_saveable")
    assert {c.recompute for c in chosen()} == {"none", "full"}
    assert {c.recompute for c in chosen(policy)} == {"dots_saveable"}
    none = [c.prediction.seconds for c in of(chosen(), recompute="none")]
    assert none == [c.prediction.seconds for c in chosen(policy)]


@pytest.mark.exhaustive
def test_asynchronous_ones_only_if_allowed():
    assert all(c.table().synchronous for c in chosen())
    assert not chosen(asynchronous=True)[0].table().synchronous
    assert max(c.prediction.delay for c in chosen()) == 0


def refusals(num_stages, num_microbatches, names):
    """What each builder says to each option for these numbers, if it refuses them."""
    reasons = {}
    for name in names:
        parameters = inspect.signature(jpipe.schedules.get(name)).parameters
        ticks = ["paired", "unit"] if "ticks" in parameters else [None]
        chunks = range(1, 7) if "num_chunks" in parameters else [None]
        for tick, chunk in itertools.product(ticks, chunks):
            options = {} if tick is None else {"ticks": tick}
            options |= {} if chunk is None else {"num_chunks": chunk}
            try:
                jpipe.schedules.get(name)(num_stages, num_microbatches, **options)
            except ValueError as error:
                reasons[name, str(options)] = str(error)
    return reasons


ASYNCHRONOUS = {"pipedream", "pipedream_2bw", "pipemare"}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*bubble:UserWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.sampled(4)
def test_every_number_of_microbatches_is_planned(num_devices, asynchronous):
    """Each plan is priced, or skipped with the reason of its builder; none is both or lost."""
    names = {*jpipe.schedules.names()} - {"forward_only"}
    names -= set() if asynchronous else ASYNCHRONOUS
    for num_microbatches in range(1, 2 * num_devices + 1):
        ranked = chosen(
            machine=Machine(num_devices),
            batch_size=2 * num_microbatches,
            asynchronous=asynchronous,
            recompute="none",
        )
        assert [c.why == "" for c in ranked] == [True] + [False] * (len(ranked) - 1)

        def key(c):
            return c.schedule, str(c.options), c.num_stages, c.num_replicas

        priced, skipped = {key(c) for c in ranked}, {key(c) for c in ranked.skipped}
        assert not priced & skipped
        assert len(priced) == len(ranked) and len(skipped) == len(ranked.skipped)
        for plan in ranked.skipped:
            N = num_microbatches // plan.num_replicas
            assert plan.num_microbatches == N and plan.microbatch_size == 2
            reasons = refusals(plan.num_stages, N, names)
            assert plan.why == reasons[plan.schedule, str(plan.options)]
        # One stage per device: every schedule that has as few is there.
        for name in names - {"dual_pipe_v", "interleaved", "seq_one_f_one_b", "zero_bubble_v"}:
            for S in range(2, num_devices + 1):
                there = {k[1] for k in priced | skipped if k[::2] == (name, S)}
                assert len(there) == 1 + ("{}" not in there), (name, S)


def test_two_bw_needs_as_many_microbatches_as_its_builder_says():
    """Two stages in paired ticks need three microbatches."""
    two = {N: chosen(machine=Machine(2), batch_size=2 * N, asynchronous=True) for N in (2, 3)}
    (plan,) = (plan for plan in two[2].skipped if plan.schedule == "pipedream_2bw")
    assert plan.label == "pipedream_2bw paired"
    assert "must be at least 3 for 2 stages in paired ticks, got 2" in plan.why
    assert "pipedream_2bw" not in {plan.schedule for plan in two[3].skipped}
    options = {"ticks": "paired"}
    assert of(two[3], schedule="pipedream_2bw", num_stages=2, options=options)


def test_only_what_is_asked_for_is_built(monkeypatch):
    """An asynchronous schedule that is not allowed is built once, to learn what it is."""
    built = []
    get = jpipe.schedules.get

    def recorded(name):
        def build(S, N, **options):
            built.append((name, S, N))
            return get(name)(S, N, **options)

        return functools.wraps(get(name))(build)

    monkeypatch.setattr(jpipe.schedules, "get", recorded)
    chosen(schedule_names=["gpipe", "pipemare"])
    assert {name for name, *size in built if size != [2, 8]} == {"gpipe"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tie, num_stages", [((0, 5), {1}), ((0, 1), {1, 2, 3, 4})])
def test_weights_tied_over_stages_are_not_delayed(tie, num_stages):
    tied = dataclasses.replace(PROFILE, ties=(tie,))
    found = chosen(tied, asynchronous=True)
    assert {c.num_stages for c in found} == {1, 2, 3, 4, 6}
    delayed = [c for c in found if not c.table().synchronous]
    for c in delayed:
        first, second = (np.searchsorted(c.boundaries, i, "right") for i in tie)
        assert first == second
    skipped = [plan for plan in found.skipped if "share weights" in plan.why]
    assert {plan.num_stages for plan in skipped} == {2, 3, 4} - num_stages
    for plan in skipped:
        assert plan.schedule in ASYNCHRONOUS
        assert f"layers {tie[0]}, {tie[1]} share weights" in plan.why
    assert {c.num_stages for c in delayed} | {1} == num_stages


def test_free_links_make_replicas_best():
    """Six equal layers on four devices leave one idle; four replicas do not."""
    best = chosen()[0]
    assert (best.num_stages, best.num_replicas) == (1, 4)
    np.testing.assert_allclose(best.prediction.seconds, 6 * 3 * 2)


def test_slow_links_make_stages_best():
    """Gradients of all weights are more than activations of 2 samples."""
    slow = Machine(2, bandwidth=(30.0, 30.0))
    best, *others = chosen(machine=slow)
    assert (best.num_stages, best.num_replicas) == (2, 1)
    (replicas,) = of(others, num_replicas=2, recompute="none")
    assert " x the time: compute takes" in replicas.why


@pytest.mark.exhaustive
def test_a_memory_limit_is_kept():
    found = chosen()
    sizes = sorted({c.prediction.num_bytes for c in found})
    limit = sizes[len(sizes) // 3]
    kept = chosen(machine=Machine(4, memory_limit=limit))
    fitting = [c for c in kept if c.fits]
    assert fitting == kept[: len(fitting)] and 0 < len(fitting) < len(kept)
    assert all(c.prediction.num_bytes <= limit for c in fitting)
    assert all(f"the limit is {size_text(limit)}" in c.why for c in kept[len(fitting) :])
    best = min(c.prediction.seconds for c in found if c.prediction.num_bytes <= limit)
    assert kept[0].prediction.seconds == best


class Counts(nnx.Module):
    """A layer that reads what its calls move, as a router reads its bias."""

    def __init__(self, is_read, *, rngs):
        self.linear, self.count, self.is_read = nnx.Linear(4, 4, rngs=rngs), nnx.Variable(jnp.zeros(())), is_read

    def __call__(self, x):
        x = x + self.count[...] if self.is_read else x
        self.count[...] = self.count[...] + jnp.sum(x) * 0 + 1
        return self.linear(x)


@pytest.mark.first_case
@pytest.mark.parametrize("is_read", [True, False])
def test_no_plan_runs_a_forward_again_that_reads_moved_state(is_read, tmp_path):
    pipe = jpipe.Pipeline(
        [Counts(is_read, rngs=nnx.Rngs(i)) for i in range(2)],
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(1, 2),
    )
    measured = pipe.profile({"inputs": np.ones((4, 4), np.float32)}, programs=())
    measured.save(tmp_path / "profile.json")
    measured = jpipe.plan.Profile.load(tmp_path / "profile.json")
    assert [layer.reads_moved_state for layer in measured.layers] == [is_read] * 2
    layers = [dataclasses.replace(layer, reads_moved_state=is_read) for layer in PROFILE.layers]
    profile = dataclasses.replace(PROFILE, layers=tuple(layers))
    tried = {c.recompute for c in chosen(profile)}
    assert tried == ({"none"} if is_read else {"none", "full"})
    if is_read:
        with pytest.raises(ValueError, match="can run. The first says: .* reads mutable state that has moved on"):
            chosen(profile, recompute="full")


def test_nothing_fits():
    found = chosen(machine=Machine(4, memory_limit=10.0))
    assert not found[0].fits
    assert found[0].prediction.num_bytes == min(c.prediction.num_bytes for c in found)


def test_stages_with_fewer_bytes_where_the_fastest_cut_does_not_fit():
    """The first layer takes all the time and two of the last three all the weights."""
    slow, one, two, *heavy, last = PROFILE.layers
    slow = dataclasses.replace(slow, forward_and_stash=jpipe.plan.Seconds(100.0))
    large = tuple(jax.ShapeDtypeStruct((100, *a.shape), a.dtype) for a in heavy[0].parameters)
    heavy = [dataclasses.replace(h, kind=99, parameters=large, gradients=large) for h in heavy]
    profile = dataclasses.replace(PROFILE, layers=(slow, one, two, *heavy, last))
    free = of(chosen(profile, Machine(2)), schedule="gpipe", num_stages=2)[0]
    assert free.boundaries == (1,)
    limit = 0.8 * free.prediction.num_bytes
    tight = chosen(profile, Machine(2, memory_limit=limit))
    (found,) = of(tight, schedule="gpipe", num_stages=2, recompute="none")
    assert found.boundaries == (4,) and found.fits


def test_several_sizes_of_microbatch():
    """A larger microbatch that takes no longer wins; sizes that do not divide are left out."""
    large = timed(profile_of("mlp", 4), forward_and_stash=1.0, backward=2.0, input_grad=1.0)
    odd = timed(profile_of("mlp", 3))
    found = chosen([PROFILE, large, odd], Machine(1))
    assert [(c.microbatch_size, c.num_microbatches) for c in found if not c.why] == [(4, 4)]
    assert {c.microbatch_size for c in found} == {2, 4}


def test_reasons():
    _, again = chosen(machine=Machine(1))
    assert again.recompute == "full"
    assert "compute takes 1.92e+05 ms, not 1.44e+05 (forwards run twice)" in again.why
    found = chosen(machine=Machine(2, bandwidth=(1e2, 1e2), latency=1.0, tick=0.5))
    waits = [c for c in found if "wait for" in c.why]
    assert waits and all("bubble" in c.why for c in waits)
    total = chosen(machine=Machine(2, memory_limit=1000.0))[-1]
    assert total.why.startswith(f"needs {size_text(total.prediction.num_bytes)} per device")


def test_wrong_input():
    with pytest.raises(ValueError, match=r"profiled .* sizes, \[2\], fits a minibatch of 7"):
        chosen(batch_size=7)
    with pytest.raises(ValueError, match="Did you mean 'gpipe'"):
        chosen(schedule_names=["gpip"])
    with pytest.raises(ValueError, match="got 'dots_saveable'. To price a policy"):
        chosen(recompute="dots_saveable")
    assert math.isinf(Machine(1).memory_limit)


def with_weights(layer, count):
    """A layer of as many weights in one array."""
    weights = jax.ShapeDtypeStruct((int(count),), np.float32)
    return dataclasses.replace(layer, parameters=(weights,), gradients=(weights,))


@pytest.mark.exhaustive
def test_a_heavy_last_layer_behind_a_slow_link_gets_a_device_of_its_own():
    """PipeDream's case: weights in one layer, work in the others."""
    layers = [with_weights(layer, 1) for layer in PROFILE.layers[:-1]]
    layers.append(with_weights(PROFILE.layers[-1], 2.5e8))
    for i in range(len(layers) - 1):
        for program in ("forward", "forward_and_stash", "backward", "input_grad"):
            seconds = getattr(layers[i], program)
            more = type(seconds)(3.0 * seconds.median / (len(layers) - 1))
            layers[i] = dataclasses.replace(layers[i], **{program: more})
    heavy = dataclasses.replace(PROFILE, layers=tuple(layers))
    slow = Machine(4, bandwidth=(1e8, 1e8))
    found = chosen(heavy, slow, batch_size=48, recompute="none", asynchronous=True)
    best = found[0]
    assert best.options["replicas"] == (3, 1)
    assert best.boundaries == (len(layers) - 1,)
    assert best.num_devices == 4 and best.label.endswith("3-1")
    table = best.table()
    assert table.replicas == (3, 1)
    again = predict(table, heavy, best.boundaries, slow)
    assert again.seconds == best.prediction.seconds
    # Without a bandwidth nobody pays for gradients, and there is nothing to plan.
    assert not any("replicas" in c.options for c in chosen(heavy, recompute="none"))


def test_copies_are_reduced_once_per_minibatch():
    table = jpipe.schedules.gpipe(2, 6, replicas=(3, 1))
    slow = Machine(4, bandwidth=(1e6, 1e6))
    fast = Machine(4, bandwidth=(1e15, 1e15))
    profile = timed(PROFILE, forward=1.0, backward=1.0, forward_and_stash=1.0, update=0.0)
    light, lighter = (
        dataclasses.replace(profile, layers=tuple(with_weights(layer, n) for layer in profile.layers))
        for n in (1.5e6, 0.75e6)
    )
    difference = [predict(table, p, [5], slow).seconds - predict(table, p, [5], fast).seconds for p in (light, lighter)]
    # Five layers on three devices: four turns of a third of their bytes.
    assert difference[0] - difference[1] == pytest.approx(4 * 5 * 3e6 / 3 / 1e6)
