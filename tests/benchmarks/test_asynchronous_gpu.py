"""The runs of asynchronous methods on a GPU: the model's size, the text, the rates, the number of steps, the figures."""

import math

import jax
import pytest
from flax import nnx
from helpers import benchmark
from matplotlib.axes import Axes

study = benchmark("asynchronous_gpu")


def test_the_model_has_120_million_weights():
    model = study.task_of(study.SIZE, 1).model
    shapes = [
        jax.eval_shape(lambda make=make: nnx.to_pure_dict(nnx.state(make(rngs=nnx.Rngs(0))))) for make in model.layers()
    ]
    number = sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))
    assert number == pytest.approx(120e6, rel=0.02)


def test_the_text_is_held_out_by_files():
    data = study.sources(study.REHEARSAL)
    assert len(data["test"]) == study.REHEARSAL.held_out
    assert len(data["train"]) * study.REHEARSAL.seq_len > 5_000_000
    batch = data["train"].batch(jax.numpy.arange(2), None)
    assert batch["inputs"].shape == (2, study.REHEARSAL.seq_len)


def test_every_method_has_a_rate_that_follows_the_width():
    assert {name for _, name in study.RATES} <= set(study.METHODS)
    assert study.rate_of((8, "Adam"), 64) == 10 * study.rate_of((8, "Adam"), 640)
    assert study.rate_of((8, "Muon, error feedback"), 640) == study.RATES[8, "Muon, error feedback"]


@pytest.mark.parametrize(("seconds", "steps"), [(1, 10), (1e9, 20), (121, 15)])
def test_all_runs_end_in_time(seconds, steps, monkeypatch):
    """A trial of 20 steps takes 1 s, and 12 s with its compile. So of 121 s nine methods have 9 s left, at 0.065 s a step."""

    class Trial:
        calls = 0

        def run(self, rate, seed):
            Trial.calls += 1
            return {"seconds": 1.0}

    times = iter((0.0, 12.0))
    monkeypatch.setattr(study, "trainer_of", lambda *args: Trial())
    monkeypatch.setattr(study.time, "perf_counter", lambda: next(times))
    assert study.steps_within(seconds, study.REHEARSAL, {}) == steps
    assert Trial.calls == 2


def test_figures(tmp_path, monkeypatch, capsys):
    curve = [[1, 0.0, 2 * math.log(2), 0.0], [2, 0.0, math.log(2), 0.0]]
    keys = [study.key_of(study.REHEARSAL, cell, 2) for cell in study.RATES]
    runs = {key: {"curve": curve, "seconds": 3.0} for key in keys}
    assert "| 2BW | Muon, error feedback | 0.027 | 1.000 | 3 |" in study.lines_of(runs)
    drawn, plot = [], Axes.plot

    def recorded(self, *args, label, **options):
        drawn.append(label)
        return plot(self, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", recorded)
    study.draw(runs, tmp_path / "curves.png")
    assert drawn == [name for _, name in study.RATES] and (tmp_path / "curves.png").stat().st_size > 1000
    wrong = ["--redraw"], ["--minutes", "0"], []
    for words, message in zip(wrong, ("no finished run", "must be above 0", "JAX finds no GPU"), strict=True):
        monkeypatch.setattr("sys.argv", ["asynchronous_gpu.py", "--out", str(tmp_path), *words])
        with pytest.raises(SystemExit, match=message):
            study.main()
