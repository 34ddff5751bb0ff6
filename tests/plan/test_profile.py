"""Profiles: bytes counted by hand, equal layers measured once, every kind of layer and model, files and caches."""

import dataclasses
import functools
import json
import os
import sys

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import MODELS as OTHERS
from families import SLOW_MODELS, slow
from flax import nnx

import jpipe
from jpipe.plan._profile import (
    PROGRAMS,
    Profile,
    Seconds,
    balance_by_memory,
    balance_by_time,
    programs_of,
)
from jpipe.solvers import read_graph
from models import MLP

WIDE, NARROW = 256, 4
B = 2  # rows of a microbatch


def loss_fn(outputs, batch):
    return outputs.mean()


def dense(num_inputs, num_outputs):
    return functools.partial(nnx.Linear, num_inputs, num_outputs, use_bias=False)


def layers():
    sizes = NARROW, NARROW, WIDE, WIDE, WIDE, NARROW
    return [dense(m, n) for m, n in zip(sizes, sizes[1:])]


def pipeline(layers, num_microbatches=2, optimizer=None, loss=loss_fn, **options):
    return jpipe.Pipeline(
        layers,
        loss=loss,
        optimizer=optax.adam(0.1) if optimizer is None else optimizer,
        schedule=jpipe.schedules.gpipe(1, num_microbatches),
        **options,
    )


def profiled(pipe, batch, **options):
    """Quickly."""
    return pipe.profile(batch, **{"min_seconds": 0.0, **options})


def batch_of(size=2 * B, width=NARROW):
    rng = np.random.default_rng(0)
    return {"inputs": rng.normal(size=(size, width)).astype(np.float32)}


def made(seconds, num_bytes=(), **fields):
    """A profile by hand: one (forward, backward) a layer, and perhaps the floats of its stash."""
    base = profiled(pipeline([jpipe.Function(jnp.sin)]), batch_of(), programs=())
    numbers = num_bytes or [0] * len(seconds)

    def times(forward, backward):
        given = dict(forward=forward, forward_and_stash=2 * forward, backward=backward)
        given |= dict(input_grad=backward, weight_grad=10 * backward, update=0)
        return {name: Seconds(value) for name, value in given.items()}

    return dataclasses.replace(
        base,
        layers=tuple(
            dataclasses.replace(
                base.layers[0],
                input_stash=(jax.ShapeDtypeStruct((n,), np.float32),),
                **times(*each),
            )
            for each, n in zip(seconds, numbers)
        ),
        loss=dataclasses.replace(base.loss, input_stash=(), **times(0, 0)),
        **fields,
    )


# -- Bytes


def test_bytes_by_hand():
    found = profiled(pipeline(layers()), batch_of(), programs=())
    assert [layer.kind for layer in found.layers] == [0, 1, 2, 2, 3]
    sizes = NARROW, NARROW, WIDE, WIDE, WIDE, NARROW
    for i, (layer, m, n) in enumerate(zip(found.layers, sizes, sizes[1:])):
        assert all(getattr(layer, name) is None for name in PROGRAMS)
        assert layer.parameter_bytes == 4 * m * n
        assert layer.optimizer_bytes == 2 * 4 * m * n + 4  # two moments and a count
        assert layer.activation_bytes == (4 * B * n,)
        # The inputs, for the weight gradient, which gets the output's gradient too.
        assert (layer.input_stash, layer.stash_bytes) == ((), 4 * B * m)
        assert sum(a.size for a in layer.split_residuals) == B * n
        weights = 4 * (4 * m * n) + 4
        assert layer.weight_bytes == weights
        if i < 4:
            assert found.layer_bytes(3)[i] == weights + 3 * 4 * B * m
    assert found.loss.parameter_bytes == found.loss.optimizer_bytes == 0
    assert found.loss.activation_bytes == (0,)
    assert found.microbatch_size == B and found.microbatch_bytes == 4 * B * NARROW


def test_the_loss_is_part_of_the_last_layer():
    def squares(outputs, batch):
        return jnp.mean((outputs - batch["targets"]) ** 2)

    batch = batch_of() | {"targets": np.zeros((2 * B, NARROW), np.float32)}
    found = profiled(pipeline([dense(4, 4)], loss=squares), batch, programs=())
    assert found.loss.stash_bytes == 4 * B * NARROW  # twice the difference
    own = 4 * B * NARROW  # the layer's inputs
    assert found.layer_bytes(2) == [4 * 64 + 4 + 2 * (own + found.loss.stash_bytes)]
    once = dataclasses.replace(found, recompute="full")
    assert once.layer_bytes(2) == [4 * 64 + 4 + own + found.loss.stash_bytes]


def test_a_policy_and_a_compute_dtype_change_the_stash():
    class Wave(nnx.Module):
        def __init__(self, *, rngs):
            self.inner = nnx.Linear(NARROW, 8, rngs=rngs, use_bias=False)
            self.outer = nnx.Linear(8, NARROW, rngs=rngs, use_bias=False)

        def __call__(self, x):
            return self.outer(jnp.sin(self.inner(x)))

    of = {
        name: profiled(pipeline([Wave, Wave], **options), batch_of(), programs=())
        for name, options in {
            "none": {},
            "policy": {"recompute": jax.checkpoint_policies.nothing_saveable},
            "bfloat16": {"compute_dtype": jnp.bfloat16},
        }.items()
    }
    # The layer's inputs, and those of the sine; the policy keeps the layer's inputs alone.
    assert of["none"].layers[1].stash_bytes == 4 * B * (NARROW + 8)
    assert of["policy"].layers[1].stash_bytes == 4 * B * NARROW
    assert of["policy"].recompute == "nothing_saveable"
    assert of["bfloat16"].layers[1].stash_bytes == 2 * B * (NARROW + 8)
    assert of["bfloat16"].layers[0].activation_bytes == (2 * B * NARROW,)
    assert of["bfloat16"].layers[1].activation_bytes == (4 * B * NARROW,)  # for the loss
    assert of["bfloat16"].layers[0].parameter_bytes == 4 * 2 * NARROW * 8
    assert of["bfloat16"].compute_dtype == "bfloat16"


# -- Seconds


def check(found: Profile, num_layers: int):
    """What every profile is."""
    assert len(found.layers) == num_layers
    for layer in (*found.layers, found.loss):
        for name in PROGRAMS:
            seconds = getattr(layer, name)
            assert 0 <= seconds.lower_quartile <= seconds.median
            assert seconds.median <= seconds.upper_quartile < np.inf
        assert layer.forward.median > 0 and layer.forward_and_stash.median > 0
        assert (layer.weight_grad.median > 0) == (layer.parameter_bytes > 0)
        assert (layer.update.median > 0) == (layer.parameter_bytes > 0)
    of_kind = {}
    for layer in found.layers:  # measured once
        times = [getattr(layer, name) for name in PROGRAMS]
        assert of_kind.setdefault(layer.kind, times) == times
    assert found.num_cores == len(os.sched_getaffinity(0))


class Scaled(flax.linen.Module):
    """A Linen layer with mutable state and a random draw."""

    @flax.linen.compact
    def __call__(self, x, train):
        x = flax.linen.BatchNorm(use_running_average=not train)(flax.linen.Dense(4)(x))
        return flax.linen.Dropout(0.5, deterministic=not train)(x)


def mixed():
    """Every form of layer, with a skip past others."""
    pair = jpipe.InitApply(
        lambda key, x: {"kernel": jax.random.normal(key, (x.shape[-1], 4))},
        lambda parameters, x: x @ parameters["kernel"],
    )
    return [
        functools.partial(nnx.Embed, 5, 4),
        jpipe.skip(jpipe.Function(lambda x: (x, x)), stash="side"),
        jpipe.Linen(Scaled(), train={"train": True}, evaluate={"train": False}),
        jpipe.skip(jpipe.Function(lambda x, side: x + side), pop="side"),
        pair,
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
    ]


@pytest.mark.exhaustive
def test_every_form_of_layer():
    inputs = {"inputs": np.arange(2 * B, dtype=np.int32)}
    found = profiled(pipeline(mixed()), inputs)
    check(found, 6)
    embed, stashes, scaled, pops, pair, given = found.layers
    # Integers have no gradient; a layer without weights has that of its inputs alone.
    assert embed.input_grad == Seconds() and embed.backward.median > 0
    assert stashes.backward == stashes.input_grad and stashes.weight_grad == Seconds()
    assert given.input_grad.median > 0
    assert (stashes.stash, pops.pop) == (("side",), ("side",))
    assert stashes.activation_bytes == (4 * B * 4, 4 * B * 4)
    assert len(scaled.state) == 2 and scaled.weight_bytes > 4 * scaled.parameter_bytes

    graph = found.graph()
    assert graph.edges == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 3))
    assert graph.nodes[1].activation_bytes == (32, 32)
    seconds = [node.seconds for node in graph.nodes]
    np.testing.assert_allclose(seconds, np.add(found.seconds("forward"), found.seconds("backward")))


@pytest.mark.exhaustive
def test_what_is_too_large_for_one_loop_is_measured_in_several(monkeypatch):
    monkeypatch.setattr(sys.modules["jpipe.plan._loops"], "_TOGETHER", 1)
    inputs = {"inputs": np.arange(2 * B, dtype=np.int32)}
    check(profiled(pipeline(mixed()), inputs), 6)


QUICK = "forward_and_stash", "backward"


MODELS = OTHERS | {
    "mlp": (
        MLP(num_inputs=6, widths=(8, 8, 8), num_outputs=5),
        lambda rng: rng.normal(size=(2 * B, 6)).astype(np.float32),
    )
}


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [slow(name) if name in SLOW_MODELS else name for name in MODELS],
)
def test_models(name):
    model, inputs = MODELS[name]
    batch = {"inputs": inputs(np.random.default_rng(0))}
    ties = model.ties() if hasattr(model, "ties") else ()
    found = profiled(pipeline(model.layers(), ties=ties), batch, programs=QUICK)
    assert min(found.seconds("forward") + found.seconds("backward")) > 0
    assert found.layers[0].update is None
    num_skips = sum(len(layer.pop) for layer in found.layers)
    assert len(found.graph().edges) == len(found.layers) - 1 + num_skips
    number = len(found.layers)
    tied = [tuple(sorted(i % number for i, _ in tie)) for tie in ties]
    assert list(found.ties) == tied and (name != "tied transformer" or tied)


def test_layers_run_on_what_those_before_them_make():
    """An index out of range, or a made-up mask, would be another layer."""
    seen = []

    def note(x):
        seen.append(np.asarray(x))
        return np.zeros(2, np.float32)

    def watched(x):
        return jax.pure_callback(note, jax.ShapeDtypeStruct((2,), np.float32), x)

    def double(x):
        return 2 * x

    batch = {"inputs": np.arange(4, dtype=np.int32)}
    forms = [jpipe.Function(double), jpipe.Function(watched)]
    profiled(pipeline(forms, loss=loss_fn), batch, programs=("forward",))
    assert seen and all((a == [0, 2]).all() for a in seen)


def test_a_layer_is_not_computed_once_for_all_turns():
    """The loop's length must show: nothing is moved out of it."""
    found = profiled(
        pipeline([jpipe.Function(jnp.sin), dense(WIDE, WIDE)]),
        batch_of(256, WIDE),
        programs=("forward", "forward_and_stash"),
        min_seconds=0.02,
    )
    num_flops = 2 * 128 * WIDE * WIDE
    for seconds in (found.layers[1].forward, found.layers[1].forward_and_stash):
        assert num_flops / seconds.lower_quartile < 1e12  # more than a core can


def test_what_operations_run():
    found = made([(1, 3), (2, 5)])
    assert found.seconds("forward") == [2, 4]
    assert found.seconds("backward") == [3, 5]
    assert found.seconds("weight_grad") == [30, 50]
    again = dataclasses.replace(found, recompute="full")
    assert again.seconds("forward") == [1, 2]
    assert again.seconds("backward") == again.seconds("input_grad") == [5, 9]
    assert programs_of("input_grad", "full") == ("forward_and_stash", "input_grad")
    with pytest.raises(ValueError, match="'update', got 'steps'"):
        found.seconds("steps")
    layer = dataclasses.replace(found.layers[1], update=None)
    missing = dataclasses.replace(found, layers=(found.layers[0], layer))
    with pytest.raises(ValueError, match="`update` of sin was not measured"):
        missing.seconds("update")


def test_updates_of_labelled_layers_are_apart():
    """Layers of one kind may have optimizers of their own."""

    def label(tree):
        return [jax.tree.map(lambda _, i=i: "adam" if i == 0 else "sgd", each) for i, each in enumerate(tree)]

    optimizer = optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, label)
    pipe = pipeline([dense(4, 4)] * 3, optimizer=optimizer)
    found = profiled(pipe, batch_of(), programs=("update",))
    first, second, _ = (layer.optimizer_bytes for layer in found.layers)
    assert first == 2 * 64 + 4 and second == 4  # Adam's count is there all the same
    assert found.layers[0].update != found.layers[1].update
    assert found.layers[1].update == found.layers[2].update


# -- Balancing


def test_balances_by_hand():
    found = made([(1, 1), (1, 1), (1, 1), (1, 9)], num_bytes=[100, 1, 1, 100])
    assert balance_by_time(found, 2) == [3]
    # 6, 6, and 2 in a backward or 22 in its halves.
    found_of_halves = made([(3, 0), (3, 0), (0, 2)])
    assert balance_by_time(found_of_halves, 2) == [1]
    assert balance_by_time(found_of_halves, 2, split=True) == [2]
    assert balance_by_memory(found, 3, in_flight=2) == [1, 3]
    with pytest.raises(ValueError, match="`num_stages` must be in 1..4"):
        balance_by_time(found, 5)


@pytest.mark.parametrize("by", ["flops", "time", "memory"])
@pytest.mark.sampled(3)
def test_a_pipeline_balances_by_it(by):
    pipe = jpipe.Pipeline(
        layers(),
        loss=loss_fn,
        optimizer=optax.adam(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
        boundaries=by,
    )
    batch = {"inputs": jax.ShapeDtypeStruct((2048, NARROW), np.float32)}
    starts = [record.layers[0] for record in pipe.partition(batch)]
    assert starts == [0, 3]  # the two large layers apart


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="'flops', 'time', 'memory'.*got 'speed'"):
        pipeline(layers(), boundaries="speed")


# -- Files


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profiled(pipeline([dense(4, 4), dense(4, 4)]), batch_of())


def test_round_trip(measured, tmp_path):
    path = tmp_path / "profile.json"
    measured.save(path)
    assert Profile.load(path) == measured
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    graph = measured.graph(bandwidth=8.0)
    assert graph.nodes[0].transfer == 4 * B * 4 / 8
    graph.save(tmp_path / "graph.json")
    assert read_graph(tmp_path / "graph.json") == graph


@pytest.mark.exhaustive
def test_cache(tmp_path, monkeypatch, recwarn):
    path = tmp_path / "profile.json"
    calls = []

    def pipe(**options):
        return pipeline([dense(4, 4), dense(4, 4)], **options)

    def cached(pipe, batch=None, **options):
        """The profile, and whether anything was measured for it."""
        calls.clear()
        options = {"programs": ("forward", "update"), **options}
        return profiled(pipe, batch or batch_of(), cache=path, **options), bool(calls)

    module = sys.modules["jpipe.plan._profiling"]
    measure = module.measure_layers
    monkeypatch.setattr(
        module,
        "measure_layers",
        lambda *args: calls.append(args) or measure(*args),
    )
    first, fresh = cached(pipe())
    assert fresh and not recwarn
    again, fresh = cached(pipe())  # other objects that compute the same
    assert not fresh and again == first
    full, fresh = cached(pipe(recompute="full"))  # of the same programs
    assert not fresh and full == dataclasses.replace(first, recompute="full")
    assert cached(pipe(), programs=("forward",))[0] == first

    for change, message in (
        ((pipe(num_microbatches=4),), "`microbatch` is .*float32.2, 4., not .*1, 4"),
        ((pipe(), None, {"num_microbatches": 4}), None),  # the same once more
        ((pipe(compute_dtype=jnp.bfloat16),), "`microbatch` is"),
        ((pipe(),), "`compute_dtype` is bfloat16, not None"),
        ((pipe(optimizer=optax.sgd(0.1)),), "made for another optimizer"),
        ((pipeline([dense(4, 8), dense(8, 4)]),), "made for another model"),
        (
            (pipe(recompute=jax.checkpoint_policies.nothing_saveable),),
            "`recompute` is none, not nothing_saveable",
        ),
    ):
        recwarn.clear()
        args, options = change[:2], dict(*change[2:])
        if message is None:
            assert not cached(*args, **options)[1]
            assert not recwarn
            continue
        with pytest.warns(UserWarning, match=f"profile.json: .*{message}.*again"):
            _, fresh = cached(*args, **options)
        assert fresh and not cached(*args, **options)[1]

    with pytest.warns(UserWarning, match="`backward` was not measured"):
        found, _ = cached(*change[:1], programs=("forward", "backward"))
    monkeypatch.setattr(jax, "__version__", "0.0")
    with pytest.warns(UserWarning, match="`jax_version` is .*, not 0.0"):
        cached(*change[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("layers"), "`layers` must be there"),
        (lambda c: c.update(layers=[]), "`layers` must be a list of at least one"),
        (lambda c: c.update(layers=3), "`layers` must be a list, got 3"),
        (lambda c: c["layers"][1].pop("name"), r"`layers\[1\].name` must be there"),
        (
            lambda c: c["layers"][1]["forward"].update(median=-1),
            r"`layers\[1\].forward.median` must be a finite number, at least 0, got -1",
        ),
        (
            lambda c: c["layers"][0].update(parameters=["float33[2]"]),
            r"`layers\[0\].parameters\[0\]` must be an array",
        ),
        (
            lambda c: c["layers"][0].update(parameters=["float32[2"]),
            r"`layers\[0\].parameters\[0\]` must be an array",
        ),
        (lambda c: c["loss"].update(kind=True), "`loss.kind` must be a whole number"),
        (lambda c: c.update(num_cores="2"), "`num_cores` must be a whole number"),
        (lambda c: c.update(device_kind=2), "`device_kind` must be str, got 2"),
        (lambda c: c.update(colour="red"), "`colour` must be absent"),
        (lambda c: c.update(format="jpipe profile 0"), "`format` must be"),
    ],
)
def test_a_wrong_file_is_named(measured, tmp_path, change, message):
    path = tmp_path / "profile.json"
    measured.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"profile.json: {message}"):
        Profile.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_corrupted_cache_is_named(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="profile.json.*Delete the file"):
        profiled(pipeline([dense(4, 4)]), batch_of(), cache=path, programs=())
    assert path.read_text() == text
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="profile.json: not a text file"):
        Profile.load(path)


def test_an_interruption_leaves_no_half_file(measured, tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    path.write_text("old")

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measured.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    assert path.read_text() == "old"


def test_a_wrong_call():
    pipe = pipeline([dense(4, 4)])
    with pytest.raises(ValueError, match="`programs` must be of .*got 'step'"):
        pipe.profile(batch_of(), programs=("step",))
    with pytest.raises(ValueError, match="`num_microbatches` must be .* got 0"):
        pipe.profile(batch_of(), num_microbatches=0)
    with pytest.raises(ValueError, match="cannot be cut into 3 equal"):
        pipe.profile(batch_of(), num_microbatches=3)


@pytest.mark.exhaustive
def test_progress_is_for_terminals(monkeypatch, capsys):
    pipe = pipeline([dense(4, 4)])
    profiled(pipe, batch_of(), programs=("forward",))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    profiled(pipe, batch_of(), programs=("forward",))
    lines = capsys.readouterr().err.split("\r\x1b[K")
    assert lines[1].endswith("1/2 inputs of 1 layers")
    assert lines[2].endswith("2/2 forward of 2 kinds of layer") and lines[-1] == ""
