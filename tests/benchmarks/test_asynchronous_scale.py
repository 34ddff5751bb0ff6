"""The study of late gradients at about 100 stages, in small: its delays, its figures, its program."""

import dataclasses
import doctest
import json
import sys

import numpy as np
import pytest
from helpers import benchmark

import jpipe

scale = benchmark("asynchronous_scale")
TASKS = scale.tasks(quick=False)


def test_examples():
    tested = doctest.testmod(scale, optionflags=doctest.ELLIPSIS)
    assert tested.attempted and not tested.failed


@pytest.mark.parametrize("name", ["asynchronous", "PipeDream"])
@pytest.mark.parametrize("S, N", [(107, 32), (92, 8), (7, 1)])
def test_delays_are_those_of_the_paper(name, S, N):
    facts = scale.table_of(scale.METHODS[name], S, S, N).facts()
    wanted = [-(-(2 * (S - i) + 1) // N) for i in range(1, S + 1)]
    assert facts.forward_delay.tolist() == wanted
    read_again = wanted if name == "PipeDream" else [0] * S
    assert facts.backward_delay.tolist() == read_again
    warm_up = scale.table_of(scale.METHODS[name], S, S, N, synchronous=True).facts()
    assert not warm_up.forward_delay.any() and not warm_up.backward_delay.any()


def test_one_microbatch_reads_what_the_pipeline_reads():
    """With N = 1 the delays of a stage are the whole table."""
    own = scale.table_of(scale.METHODS["asynchronous"], 6, 6, 1)
    table = jpipe.schedules.emulated(jpipe.schedules.pipemare(6, 1, ticks="paired"))
    for versions in ("forward_versions", "backward_versions"):
        np.testing.assert_array_equal(getattr(own, versions)(), getattr(table, versions)())


def test_layers_have_the_delay_of_their_stage():
    method = scale.Method(ticks="unit")
    facts = scale.table_of(method, 8, 4, 1).facts()
    assert facts.forward_delay.tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    of_2bw = scale.table_of(scale.REMEDIES["2BW"], 107, 64, 8).facts()
    assert of_2bw.forward_delay.tolist() == of_2bw.backward_delay.tolist() == [1] * 107


def test_models_have_about_100_stages():
    assert len(TASKS["resnet"].model.layers()) == 107
    assert len(TASKS["stages"].model.layers()) == 107
    assert len(TASKS["translation"].model.layers()) == 92


def test_accounting_is_that_of_the_paper():
    """Table 1 for 107 stages of one size: 4.3 times the throughput of GPipe."""
    sizes, N = np.ones(107), 32
    rows = {name: scale.accounting(method, sizes, N, 3) for name, method in scale.METHODS.items()}
    assert round(1 / rows["synchronous"]["throughput"], 1) == 4.3
    delays = [-(-(2 * k + 1) // N) for k in range(107)]
    wanted = (2 + np.mean(delays)) / 3
    np.testing.assert_allclose(rows["PipeDream"]["memory"], wanted)
    np.testing.assert_allclose(rows["+T1+T2"]["memory"], 4 / 3)
    half = scale.accounting(scale.METHODS["+T1+T2+T3"], sizes, N, 3, warm_up=0.5)
    np.testing.assert_allclose(half["throughput"], 1 / (0.5 * 138 / 32 + 0.5))


def fake(validation, *metrics):
    """A run with these metrics after 500, 1000, ... steps."""
    curve = [[500 * i, 1.0, value, 1.0] for i, value in enumerate(metrics, 1)]
    return {"curve": curve, "validation": validation, "seconds": 1.0}


def test_summary_chooses_rates_and_finds_targets():
    runs = {
        "synchronous|0.1|0": fake(0.5, 0.6, 0.8),
        "synchronous|0.2|0": fake(0.9, 0.9, 0.95),
        "synchronous|0.1|1": fake(0.7, 0.6, 0.82),
        "+T1|0.1|0": fake(float("inf"), float("nan")),
        "+T1|0.05|0": fake(0.6, 0.4, 0.8),
        "+T1|0.05|1": fake(0.6, 0.5, 0.7),
        "+T1+T2+T3|0.05|0": fake(0.6, 0.7, 0.9),
        "+T1+T2+T3|0.05|1": fake(0.6, 0.7, 0.9),
        # One seed says too little.
        "+T1+T2+T3|0.1|0": fake(0.1, 0.9, 0.99),
    }
    task = dataclasses.replace(TASKS["resnet"], margin=0.01)
    summary = scale.summary_of(task, runs, 64_000)
    rows = summary["methods"]
    assert summary["target"] == pytest.approx(0.81 - task.margin)
    assert rows["synchronous"]["rate"] == 0.1
    assert rows["synchronous"]["best"] == [0.8, 0.82]
    assert rows["synchronous"]["epochs"] == pytest.approx((1000 + 500 + 500 * 0.2 / 0.22) / 2 / 1000)
    # A GPipe of 107 stages and 32 microbatches takes 138 / 32 as long.
    assert rows["synchronous"]["time"] == pytest.approx(rows["synchronous"]["epochs"] * 138 / 32)
    assert rows["+T1"]["rate"] == 0.05
    assert rows["+T1"]["epochs"] is None and rows["+T1"]["reached"] == 1
    steps = 500 + 500 * 0.1 / 0.2
    warm_up = task.warm_up_steps
    assert rows["+T1+T2+T3"]["time"] == pytest.approx((steps - warm_up + warm_up * 138 / 32) / 1000)
    text = scale.markdown("resnet", summary)
    assert "0.8100 ± 0.0141 | 0.1 (0.1, 0.2)" in text
    assert "- (1 of 2)" in text


def quick(monkeypatch, tmp_path, *arguments):
    command = ["asynchronous_scale.py", *arguments, "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    scale.main()
    return json.loads((tmp_path / "runs.json").read_text())


@pytest.mark.exhaustive
def test_quick_study_of_techniques(monkeypatch, tmp_path, capsys):
    arguments = ["resnet", "--seeds", "1", "--methods", "synchronous", "+T1+T2+T3"]
    runs = quick(monkeypatch, tmp_path, *arguments)
    assert list(runs) == ["examples", "synchronous|0.1|0", "+T1+T2+T3|0.1|0"]
    for key in list(runs)[1:]:
        assert [point[0] for point in runs[key]["curve"]] == [4, 8]
        assert np.isfinite(runs[key]["curve"]).all()
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    # Nothing is trained again.
    monkeypatch.setattr(scale.Trainer, "run", None)
    assert quick(monkeypatch, tmp_path, *arguments) == runs
    assert (tmp_path / "table.md").read_text() == table


def test_unknown_method(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="no method T4: there are synchronous; "):
        quick(monkeypatch, tmp_path, "resnet", "--methods", "T4")


def run_of(validation, accuracy):
    return {"curve": [[600, 1.0, accuracy, 1.0]], "validation": validation}


def test_stages_are_shown_at_the_best_rate_of_each_cell():
    runs = {
        "2BW|unit|8|0.05|0": run_of(0.9, 0.70),
        "2BW|unit|8|0.05|1": run_of(0.5, 0.80),
        "2BW|unit|8|0.1|0": run_of(0.8, 0.71),
        "2BW|unit|8|0.1|1": run_of(0.9, 0.73),
        "2BW|unit|8|0.2|0": run_of(0.1, 0.99),  # has not got its second seed yet
        "2BW|unit|16|0.05|0": run_of(np.inf, 0.9),
    }
    points = scale.points_of(runs)
    assert points == {
        "paired": {},
        "unit": {"2BW": {8: (0.1, [0.71, 0.73]), 16: (0.05, [0.1])}},
    }
    accuracies, _, rates = scale.markdown_of_stages(points, scale.tasks(quick=False)["stages"]).split("\n\n")
    assert "| unit | 2BW | 72.0 ± 1.4 | 10.0 |" in accuracies
    assert "| unit | 2BW | 0.1 | 0.05 |" in rates


def test_rates_of_every_number_of_stages_are_searched(monkeypatch, tmp_path):
    """The search ends where both sides are worse; what has the same delays is trained once."""

    class Trainer:
        def __init__(self, task, data, method, S):
            self.best = 0.1 if S == 1 else 0.025

        def run(self, rate, seed, evaluator):
            trained.append((rate, seed))
            return run_of(abs(np.log(rate / self.best)), 0.5) | {"seconds": 0.0}

    trained = []
    monkeypatch.setattr(scale, "Trainer", Trainer)
    task = scale.tasks(quick=True)["stages"]
    runs = scale.Runs(tmp_path / "runs.json")
    methods = {"asynchronous": scale.REMEDIES["asynchronous"]}
    scale.train_stages(task, {"test": scale.images(None)["test"]}, runs, methods, 2, None, (1, 2, 7))
    # In paired ticks the layers of two stages are one update late, as those of one stage.
    assert len(trained) == 5 * 5 and len(runs.found) == 6 * 5
    assert runs.found["asynchronous|paired|2|0.1|1"]
    for S, best in (1, "0.1"), (7, "0.025"):
        for ticks in "paired", "unit":
            assert f"asynchronous|{ticks}|{S}|{best}|1" in runs.found
