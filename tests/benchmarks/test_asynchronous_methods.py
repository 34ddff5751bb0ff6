"""The comparison of methods for late gradients, in small: its optimizers, its figures, its program."""

import dataclasses
import doctest
import json
import math
import sys
import warnings

import jax
import numpy as np
import optax
import pytest
from helpers import benchmark

import jpipe
from train.data import shuffled
from train.text import Windows

methods = benchmark("asynchronous_methods")
TASKS = methods.tasks(quick=False)


def test_examples():
    tested = doctest.testmod(methods, optionflags=doctest.ELLIPSIS)
    assert tested.attempted and not tested.failed


@pytest.mark.parametrize("name", TASKS)
def test_first_stage_is_latest_and_last_stage_has_no_delay(name):
    num_layers = len(TASKS[name].model.layers())
    for S in (1, 8, 100):
        delays = methods.delays_of(num_layers, S)
        assert len(delays) == num_layers
        assert delays[0] == S - 1 and delays[-1] == 0
        gaps = -np.diff(delays)
        assert gaps.min() >= 0 and np.ptp(gaps) <= 1  # evenly, up to rounding


@pytest.mark.parametrize("name", methods.METHODS)
def test_every_method_is_a_configuration(name):
    method = methods.METHODS[name]
    config = methods.optimizer_config(method, 40)
    assert config.annealing_steps in (None, 40, 80, 40_000)
    # PipeMare's correction is for backwards that read other weights than their forwards.
    assert method.discrepancy == (config.discrepancy_decay is not None)
    state = config.transform(40).init({"w": np.ones((2, 2), np.float32)})
    hooks = config.options_of_pipeline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jpipe.optim.check_hooks(state, forward=hooks["forward_params"], backward=hooks["backward_params"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Muon +T1", "PipeMare T1+T2"])
def test_a_rate_in_the_state_trains_like_a_rate_in_the_program(name):
    task = methods.tasks(quick=True)["gpt"]
    task = task._replace(model=dataclasses.replace(task.model, dim=8, num_blocks=1))
    data, method = task.data(None), methods.METHODS[name]
    trainer = methods.Trainer(task, data, method, 5)
    config = methods.optimizer_config(method, task.num_steps)
    config = dataclasses.replace(config, learning_rate=0.02)
    layers = task.model.layers()
    delays = methods.delays_of(len(layers), 5)
    backward = 0 * delays if method.discrepancy else None
    plain = jpipe.Pipeline(
        layers,
        loss=task.model.loss(),
        has_aux=True,
        optimizer=config.transform(task.num_steps),
        schedule=jpipe.schedules.with_delays(delays, backward_delays=backward),
        boundaries=[1, 2],
        **config.options_of_pipeline(),
    )
    batches = shuffled(data["train"], task.batch_size, 0)
    states = [
        methods.with_rate(trainer.first_state(0), 0.02),
        plain.init(jax.random.key(0), next(batches)),
    ]
    before = trainer.pipe.get_params(states[0])
    for _ in range(4):
        batch = next(batches)
        states = [pipe.step(state, batch)[0] for pipe, state in zip((trainer.pipe, plain), states, strict=True)]
    found, wanted = (pipe.get_params(state) for pipe, state in zip((trainer.pipe, plain), states, strict=True))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.isfinite(a).all()
    assert optax.tree.norm(jax.tree.map(np.subtract, before, found)) > 0.01


@pytest.mark.slow
def test_steps_of_a_warm_up_have_no_delays():
    """As long as the warm-up lasts, T1 + T2 + T3 trains like Adam without delays: T1 and T2 change nothing then."""
    task = methods.tasks(quick=True)["gpt"]
    task = task._replace(model=dataclasses.replace(task.model, dim=8, num_blocks=1))
    data, losses = task.data(None), {}
    short = Windows(data["test"].text[:129].tobytes(), methods.SEQ_LEN)
    data |= {"test": short, "validation": short}
    for name, S, warm_up in ("Adam", 1, 0.0), ("PipeMare T1+T2+T3", 5, 0.5):
        method = methods.METHODS[name]._replace(warm_up=warm_up)
        trainer = methods.Trainer(task, data, method, S)
        run = trainer.run(0.02, 0)
        losses[name] = [point[1] for point in run["curve"]]
    plain, warm = losses.values()
    assert len(plain) == 4 and np.isfinite([plain, warm]).all()
    # The first step with delays has no older weights than the newest ones.
    np.testing.assert_allclose(warm[:3], plain[:3], rtol=1e-5)
    assert abs(warm[3] - plain[3]) > 1e-3


def fake(validation, *metrics):
    """A run with these metrics after 50, 100, ... steps."""
    curve = [[50 * i, 1.0, value, 1.0] for i, value in enumerate(metrics, 1)]
    return {
        "curve": curve,
        "validation": validation,
        "averaged": metrics[-1],
        "seconds": 1.0,
    }


RUNS = {
    "images|1|Adam|0.01|0": fake(0.5, 0.6, 0.8),
    "images|1|Adam|0.03|0": fake(0.6, 0.9, 0.9),
    "images|1|Adam|0.01|1": fake(0.5, 0.6, 0.82),
    "images|1|Muon|0.01|0": fake(0.5, 0.5, 0.7),
    "images|1|Muon|0.01|1": fake(0.5, 0.5, 0.7),
    "images|8|Adam|0.01|0": fake(0.9, 0.4, 0.5),
    "images|8|Adam|0.01|1": fake(0.9, 0.4, 0.6),
    "images|8|Muon|0.01|0": fake(0.7, 0.6, 0.79),
    "images|8|Muon|0.01|1": fake(0.7, 0.6, 0.85),
    "images|8|NAdam|0.01|0": fake(0.1, 0.6, 0.99),  # one seed says too little
    "images|8|DC-ASGD|0.01|0": fake(math.inf, math.nan),
    "gpt|8|Adam|0.01|0": fake(0.5, 0.6, 0.8),
}


def test_figures():
    task = TASKS["images"]
    rows = methods.rows_of("images", task, RUNS)
    assert {cell[0] for cell in rows} == {1, 8} and len(rows) == 6
    sync = rows[1, "Adam"]
    assert sync.rate == 0.01 and sync.tried == {0.01: 0.5, 0.03: 0.6}
    np.testing.assert_allclose(sync.ends, [80, 82])
    assert methods.winner(task, rows, 8) == "Muon"
    # The worst seed of Muon ends at 79.
    assert methods.target_of(task, rows, 8) == pytest.approx(79)
    steps = 50 + 50 * (0.19 / 0.2 + 0.19 / 0.22) / 2
    assert sync.steps_to(task, 79) == pytest.approx(steps)
    late = rows[8, "Muon"]
    assert late.steps_to(task, 79) == pytest.approx((100 + 50 + 50 * 0.19 / 0.25) / 2)
    assert late.steps_to(task, 80) is None  # one seed does not
    text = methods.markdown(task, rows, 8)
    order = [line.split(" | ")[0] for line in text.split("\n")[2:8]]
    assert order == [
        "| synchronous Adam",
        "| synchronous Muon",
        "| NAdam",
        "| **Muon**",
        "| Adam",
        "| DC-ASGD",
    ]
    assert "0.01 (0.01, 0.03) | 81.00 ± 1.41" in text
    assert f"| {steps:,.0f} | {8 * steps:,.0f} |" in text  # idle for 7 of 8 stages
    assert "Target: 79.000, " in text
    overview = methods.summary({"images": (task, rows)}).split("\n")[-1]
    assert "| 8 | Muon | 82.00 ± 4.24 | 81.00 ± 1.41 (Adam) | -1.000 |" in overview
    assert overview.endswith(f"| {8 * steps:,.0f} |")


def test_synchronous_steps_of_a_warm_up_take_longer():
    method = "PipeMare T1+T2+T3"
    task = TASKS["images"]._replace(num_steps=160)  # 20 of them have no delays
    runs = {
        f"images|{S}|{of}|0.01|0": fake(0.5, *metrics)
        for S, of, metrics in ((1, "Adam", (0.7, 0.9)), (8, method, (0.6, 0.8)))
    }
    rows = methods.rows_of("images", task, runs)
    assert methods.time_to(task, rows, (8, method), 8) == pytest.approx(100 + 7 * 20)
    assert methods.time_to(task, rows, (1, "Adam"), 8) == pytest.approx(8 * 75)
    rows = methods.rows_of("images", task, runs | {f"images|8|{method}|0.01|0": fake(0.5, 0.8)})
    assert methods.time_to(task, rows, (8, method), 8) == pytest.approx(50 + 7 * 20)


def test_search_stops_when_all_diverge():
    tried = []

    def result(rate):
        tried.append(rate)
        return math.inf

    methods.search(1.0, result, methods.FACTOR, methods.MOST_RATES)
    assert len(tried) == methods.MOST_RATES == len(set(tried))
    assert min(tried) < 1 / 3


def quick(monkeypatch, tmp_path, *arguments):
    command = ["asynchronous_methods.py", *arguments, "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    methods.main()
    return json.loads((tmp_path / "runs.json").read_text())


@pytest.mark.slow
def test_quick_run(monkeypatch, tmp_path, capsys):
    arguments = ["--tasks", "images", "--stages", "1", "8", "--seeds", "1"]
    arguments += ["--methods", "Adam"]
    runs = quick(monkeypatch, tmp_path, *arguments)
    assert list(runs) == ["images|1|Adam|0.081|0", "images|8|Adam|0.027|0"]
    for run in runs.values():
        assert [point[0] for point in run["curve"]] == [1, 2, 3, 4]
        assert np.isfinite(run["curve"]).all() and np.isfinite(run["averaged"])
    assert (tmp_path / "methods.png").stat().st_size > 10_000
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out and "**Adam**" in table
    # Nothing is trained again.
    monkeypatch.setattr(methods.Trainer, "run", None)
    assert quick(monkeypatch, tmp_path, *arguments) == runs


def test_refusals(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="no method T4: there are Adam; Muon; "):
        quick(monkeypatch, tmp_path, "--methods", "T4")
    monkeypatch.setattr(sys, "argv", ["asynchronous_methods.py", "--out", "x"])
    with pytest.raises(SystemExit, match="`--data` must name the folder"):
        methods.main()
