"""Plans with experts and context: bytes against compiled programs and closed formulas, and the chosen plan trained."""

import dataclasses
import functools
import types

import jax
import numpy as np
import optax
import oracles
import pytest
from collectives import collectives
from flax import nnx
from helpers import timed

import jpipe
from jpipe.plan import Axis, Exchange, Machine, choose, predict
from models import MixtureTransformer, Transformer
from models.mixture import Mixture

KEY = jax.random.key(3)
B, T, D, N, K, E, F = 8, 8, 8, 2, 2, 4, 16
MIXTURE = MixtureTransformer(
    vocab_size=12,
    seq_len=T,
    num_blocks=2,
    dim=D,
    num_heads=2,
    dropout=0.0,
    num_experts=E,
    num_chosen=K,
    expert_dim=F,
    capacity=1.0,
)
BATCH = {"inputs": np.zeros((B, T), np.int32), "labels": np.zeros((B, T), np.int32)}
FREE = Machine(8)


def pipeline(schedule="one_f_one_b", model=MIXTURE, boundaries=(2,), **axes):
    return jpipe.Pipeline(
        model.layers(),
        loss=model.loss(),
        has_aux=True,
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.get(schedule)(2, N),
        mesh=jpipe.make_mesh(stage=2, **axes),
        boundaries=list(boundaries),
    )


@functools.cache
def whole():
    return pipeline().profile(BATCH, programs=())


@functools.cache
def on_axes(**axes):
    return pipeline(**axes).profile(BATCH, whole=whole())


def sent(profile, operation, kind):
    """Bytes that a device sends in all layers."""
    exchanges = [e for layer in profile.exchanges(operation) for e in layer if e.kind == kind]
    return sum(e.num_bytes for e in exchanges)


# -- Bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"expert": 2}, pytest.param({"context": 2}, marks=pytest.mark.exhaustive)], ids=str)
def test_bytes_are_those_of_the_compiled_program(axes):
    pipe, profile = pipeline(**axes), on_axes(**axes)
    counted = {}
    for c in collectives(pipe.compile(BATCH).as_text()):
        for operation in ("forward", "backward"):
            if f"/{operation}/stage" in c.name and c.kind in ("all-to-all", "all-reduce"):
                share = {"all-to-all": 1 / 2, "all-reduce": 1}[c.kind]  # of 2 devices
                key = operation, c.kind
                counted[key] = counted.get(key, 0) + share * c.num_bytes
    for operation in ("forward", "backward"):
        assert sent(profile, operation, "all_to_all") == counted[operation, "all-to-all"] > 0
    # Weights whose gradients devices have to add up; statistics of routers are numbers.
    assert sent(profile, "backward", "sum") == counted["backward", "all-reduce"] > 0
    for layer in profile.layers:
        halves = {op: [e for e in layer.exchanges if e.operation == op] for op in ("input_grad", "weight_grad")}
        total = sum(e.num_bytes for es in halves.values() for e in es)
        assert total == sum(e.num_bytes for e in layer.exchanges if e.operation == "backward")


@pytest.mark.exhaustive
@pytest.mark.parametrize("P", [2, 4])
def test_bytes_of_experts_are_the_formula(P):
    """With capacity 1 each device hands its choices to the exchange, and keeps 1 of P: there, and back."""
    choices = B // N // P * T * K
    expected = 2 * choices * D * 4 * (P - 1) // P
    block = on_axes(expert=P).layers[1]
    for operation in ("forward", "backward"):
        (exchange,) = (e for e in block.exchanges if e.operation == operation and e.kind == "all_to_all")
        assert (exchange.num_bytes, exchange.axes, exchange.num_messages) == (expected, ("expert",), 2 * (P - 1))


@pytest.mark.first_case
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
@pytest.mark.parametrize("axes", [{"expert": 2}, {"context": 2}], ids=str)
def test_memory_is_that_of_the_pipeline(axes, schedule, monkeypatch):
    pipe = pipeline(schedule, **axes)
    nothing = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(temp_size_in_bytes=0))
    monkeypatch.setattr(pipe, "lower", lambda batch: types.SimpleNamespace(compile=lambda: nothing))
    program = pipe._program(BATCH)
    monkeypatch.setattr(program, "lower", lambda: types.SimpleNamespace(compile=lambda: nothing))
    want, got = pipe.memory(BATCH), predict(pipe.schedule, timed(on_axes(**axes)), [2], FREE).memory
    for part in ("weights", "gradients", "batch"):
        assert getattr(got, part) == getattr(want, part), part
    # Arrays that are equal on a device, and not as a whole, share a place in the prediction: here 128 bytes.
    np.testing.assert_allclose(got.activations, want.activations, rtol=0, atol=0 if axes.get("expert") else 128)
    assert 0 <= got.optimizer - want.optimizer <= 4 * len(MIXTURE.layers())


def test_a_profile_with_axes_is_kept(tmp_path):
    profile = on_axes(expert=2)
    profile.save(tmp_path / "profile.json")
    assert jpipe.plan.Profile.load(tmp_path / "profile.json") == profile
    assert profile.axes == (Axis("expert", 2),) and profile.group_size == 2


@pytest.mark.exhaustive
def test_work_is_divided_by_the_devices_that_split_it():
    times = {"forward_and_stash": 1.0, "backward": 2.0, "update": 1.0}
    profile = pipeline(expert=2).profile(BATCH, whole=timed(whole(), **times))
    assert profile.seconds("forward") == [0.5] * 4 and profile.seconds("backward") == [1.0] * 4
    first, block, *_ = profile.seconds("update")
    assert first == 1.0  # every device has all of the embedding
    weights = [layer.layers[1].parameter_bytes for layer in (profile, whole())]
    assert block == weights[0] / weights[1] < 1


# -- Seconds


def with_exchanges(**seconds):
    """A profile whose layers take 1 and send 100 bytes in a forward, 200 in a backward."""
    profile = timed(whole(), forward_and_stash=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
    sends = (
        Exchange("forward", "all_to_all", ("expert",), 100, 1),
        Exchange("backward", "all_to_all", ("expert",), 200, 1),
        Exchange("input_grad", "all_to_all", ("expert",), 150, 1),
        Exchange("weight_grad", "sum", ("expert",), 50, 2),
    )
    layers = tuple(dataclasses.replace(layer, exchanges=sends) for layer in profile.layers)
    return dataclasses.replace(profile, layers=layers, axes=(Axis("expert", 2),))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
def test_what_is_sent_takes_time(schedule):
    table, profile = jpipe.schedules.get(schedule)(2, 8), with_exchanges()
    free, slow = (predict(table, profile, [2], Machine(4, bandwidth=(b, b))) for b in (np.inf, 100.0))
    bytes_of_step = 2 * 8 * 300  # two layers of a device
    (traffic,) = slow.traffic
    assert traffic == (("expert",), bytes_of_step, bytes_of_step / 100)
    np.testing.assert_allclose(slow.timing.exchange, bytes_of_step / 100)
    np.testing.assert_allclose(slow.timing.exposed, slow.timing.exchange)
    assert slow.seconds >= free.seconds + bytes_of_step / 100
    np.testing.assert_array_equal(free.timing.exposed, 0)


def test_overlapped_ticks_hide_it_where_devices_overlap():
    profile, slow = with_exchanges(), Machine(4, bandwidth=(400.0, 400.0))
    names = {"schedule_names": ["one_f_one_b"], "recompute": "none"}
    plain = choose(profile, slow, B // 2 * 32, **names)
    assert {c.options.get("ticks") for c in plain} == {"paired", "unit"}
    ranking = choose(profile, dataclasses.replace(slow, overlaps=True), B // 2 * 32, **names)
    assert {c.options["ticks"] for c in ranking if c.num_stages == 2} == {"paired", "unit", "overlapped"}
    best = next(c for c in ranking if c.num_stages == 2)
    assert best.options["ticks"] == "overlapped"
    timing = best.prediction.timing
    assert timing.exposed.max() < 0.2 * timing.exchange.max()
    paired = next(c for c in plain if c.num_stages == 2 and c.options["ticks"] == "paired")
    assert best.prediction.seconds < paired.prediction.seconds
    assert best.axes == (Axis("expert", 2),) and best.num_devices == 4


def test_sums_take_their_time_where_devices_do_not_hide_them():
    """On a TPU. In a split backward, 50 of 300 bytes are sums; in the other one, none are."""
    profile, machine = with_exchanges(), Machine(4, bandwidth=(400.0, 400.0), overlaps=True)
    tables = (
        (jpipe.schedules.dual_pipe_v(4, 8), [1, 2, 3]),
        (jpipe.schedules.one_f_one_b(2, 8, ticks="overlapped"), [2]),
    )
    for (table, cut), num_bytes in zip(tables, (50, 0)):
        hidden, waits = (
            predict(table, profile, cut, dataclasses.replace(machine, hides_sums=hides)) for hides in (True, False)
        )
        sums = 2 * 8 * num_bytes / 400  # two layers of a device, eight microbatches
        np.testing.assert_allclose(waits.timing.exchange, hidden.timing.exchange)
        assert waits.traffic == hidden.traffic
        assert (waits.timing.exposed >= sums).all() and (waits.timing.exposed >= hidden.timing.exposed).all()
        assert (waits.seconds > hidden.seconds) == (sums > 0)


def test_cuts_balance_what_is_sent_too():
    """Four layers compute 3 for a microbatch. The first one sends 300 bytes, which take 6."""
    profile = with_exchanges()
    first, *others = profile.layers
    alone = dataclasses.replace(
        profile, layers=(first, *(dataclasses.replace(layer, exchanges=()) for layer in others))
    )
    slow = Machine(4, bandwidth=(50.0, 50.0))
    assert jpipe.plan.balance_by_time(alone, 2) == [2]
    assert jpipe.plan.balance_by_time(alone, 2, machine=slow) == [1]  # 9 and 9, not 12 and 6
    chosen = choose(alone, slow, B // 2 * 32, schedule_names=["gpipe"], recompute="none")
    assert {c.boundaries for c in chosen if c.num_stages == 2} == {(1,)}


def test_links_of_a_group():
    """Four devices on two servers: along "expert" they are on two, along "context" on one."""
    machine = Machine(8, bandwidth=(100.0, 10.0), devices_per_server=2)
    group = Axis("expert", 2), Axis("context", 2)
    seconds = [Exchange("forward", "ring", (axis.name,), 100, 1).seconds(machine, group) for axis in group]
    assert seconds == [10.0, 1.0]
    both = Exchange("forward", "all_to_all", ("expert", "context"), 90, 3).seconds(machine, group)
    assert both == pytest.approx(30 / 100 + 60 / 10)
    later = dataclasses.replace(machine, latency=1.0)
    assert Exchange("forward", "ring", ("context",), 100, 4).seconds(later, group) == 5.0


# -- Choosing, and training what is chosen


def square(outputs, batch):
    return jax.numpy.mean(jax.numpy.square(outputs - 0.5))


class Block(nnx.Module):
    """A residual mixture that is mostly experts."""

    def __init__(self, *, rngs):
        init = nnx.initializers.normal(0.3)
        # With this capacity no choice is dropped.
        self.mixture = Mixture(32, 8 * F, E, K, capacity=E / K, kernel_init=init, out_init=init, rngs=rngs)

    def __call__(self, x):
        return x + self.mixture(x)


LONG = Transformer(vocab_size=12, seq_len=64, num_blocks=2, dim=D, num_heads=2, dropout=0.0)
CASES = {
    # layers, inputs of a minibatch, the axis that memory demands
    "expert": ([Block] * 2, lambda rng: rng.normal(size=(8, 2, 32)).astype(np.float32), "expert"),
    "context": (LONG.layers(), lambda rng: rng.integers(12, size=(2, 64)).astype(np.int32), "context"),
}


def planned(layers, axes=(), stage=1, data=1, schedule=None, boundaries=()):
    return jpipe.Pipeline(
        layers,
        loss=square,
        optimizer=optax.sgd(0.1),
        schedule=schedule or jpipe.schedules.gpipe(1, 2),
        mesh=jpipe.make_mesh(stage=stage, data=data, **{axis.name: axis.size for axis in axes}),
        boundaries=list(boundaries),
    )


@pytest.mark.first_case
@pytest.mark.parametrize("name", CASES)
def test_a_chosen_plan_trains_as_the_plain_model(name):
    layers, inputs, axis = CASES[name]
    rng = np.random.default_rng(0)
    data = [{"inputs": inputs(rng)} for _ in range(2)]
    alone = timed(planned(layers).profile(data[0], programs=()), forward_and_stash=1.0, backward=2.0, input_grad=1.0)
    split = planned(layers, [Axis(axis, 2)]).profile(data[0], whole=alone)
    options = {"schedule_names": ["one_f_one_b", "gpipe"], "recompute": "none"}
    size = len(data[0]["inputs"])

    def best(**machine):
        return choose([alone, split], Machine(4, **machine), size, **options)

    slow = best(bandwidth=(1.0, 1.0))[0]
    assert slow.axes == ()
    least = min(c.prediction.num_bytes for c in best() if not c.axes)
    chosen = best(memory_limit=0.9 * least)[0]
    assert chosen.fits and chosen.axes == (Axis(axis, 2),)
    assert chosen.num_devices <= 4

    table = chosen.table()
    pipe = planned(layers, chosen.axes, table.num_devices, chosen.num_replicas, table, chosen.boundaries)
    state, plain = pipe.init(KEY, data[0]), oracles.PlainModel(layers, KEY)
    losses, _, params = oracles.train(plain, plain.params, square, optax.sgd(0.1), data)
    for batch, wanted in zip(data, losses, strict=True):
        state, metrics = pipe.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    for path, got in jax.tree.leaves_with_path(pipe.get_params(state)):
        want = wanted[jax.tree_util.keystr(path)]
        # The gradient of the bias of an attention's keys is zero, and the bias is rounding errors of zero.
        floor = 1e-2 if "'key'" in jax.tree_util.keystr(path) else 1e-30
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), floor))


# -- Bad input


@pytest.mark.exhaustive
def test_axes_that_are_not_counted():
    with pytest.raises(ValueError, match="sends along 'model' is not counted.*'expert' and 'context' may stay"):
        planned(LONG.layers(), [Axis("model", 2)]).profile({"inputs": np.zeros((2, 64), np.int32)}, whole=whole())
    with pytest.raises(ValueError, match="a profile of whole layers, got one that is split over expert"):
        pipeline(expert=2).profile(BATCH, whole=on_axes(expert=2))
    with pytest.raises(ValueError, match="same layers and microbatch, got 4 layers and 4 rows, not 4 and 2"):
        pipeline(expert=2).profile(BATCH, whole=whole(), num_microbatches=4)
    with pytest.raises(ValueError, match="groups of 2 devices, 'expert' of 2, which do not fill 3"):
        choose(timed(on_axes(expert=2)), Machine(3), B)
    with pytest.raises(ValueError, match="must have at least 4 devices, 2 for each of 2, got 3"):
        predict(jpipe.schedules.gpipe(2, N), timed(on_axes(expert=2)), [2], Machine(3))
