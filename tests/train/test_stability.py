"""The largest stable learning rate of each stage, as the training script reports it."""

import math
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from train import stability
from train.config import OptimizerConfig
from train.train import main

CURVATURES = np.array([4.0, 1.0, 0.5])


def loss(params, batch):
    """A quadratic; every minibatch has other gradients and the same curvature."""
    w = params[0]["w"]
    return jnp.sum(jnp.asarray(CURVATURES, w.dtype) * w**2) / 2 + jnp.sum(w * batch)


def found(config, schedule, num_steps=10, **options):
    pipe = jpipe.Pipeline(
        [jpipe.Function(jnp.tanh)] * schedule.num_stages,
        loss=lambda y, batch: jnp.mean(y),
        optimizer=optax.sgd(0.1),
        schedule=schedule,
    )
    batches = [jnp.full(3, float(k)) for k in range(20)]
    params = [{"w": jnp.ones(3)}]
    return stability.bounds(config, pipe, loss, params, batches, num_steps, **options)


SCHEDULE = jpipe.schedules.pipemare(4, 1)


def test_is_lemma_1():
    config = OptimizerConfig("sgd", 0.3, momentum=0.0, decay="constant")
    curvature, bounds = found(config, SCHEDULE)
    np.testing.assert_allclose(curvature, 4, rtol=1e-2)
    expected = [2 / 4 * math.sin(math.pi / (4 * tau + 2)) for tau in (3, 2, 1, 0)]
    np.testing.assert_allclose([b.largest for b in bounds], expected, rtol=1e-2)
    assert [b.delay for b in bounds] == [3, 2, 1, 0]
    np.testing.assert_allclose([b.configured for b in bounds], 0.3, rtol=1e-6)
    assert [b.is_stable for b in bounds] == [False, False, False, True]
    message = stability.warning(bounds)
    assert "on 3 of 4 stages: with a delay of 3 updates stage 0 is stable up to" in message
    assert "too large" in stability.text(curvature, bounds)


def test_configured_rates_have_t1_and_begin_after_the_warm_up():
    config = OptimizerConfig("sgd", 0.3, momentum=0.0, decay="constant", annealing_steps=8)
    _, bounds = found(config, SCHEDULE, num_steps=4, first_step=2)
    expected = [0.3 * max(tau, 1) ** -(1 - 3 / 8) for tau in (3, 2, 1, 0)]
    np.testing.assert_allclose([b.configured for b in bounds], expected, rtol=1e-6)
    assert stability.warning(bounds[-1:]) is None


@pytest.mark.parametrize("name, nesterov", [("adamw", False), ("nadamw", True)])
def test_adam_is_momentum_on_scaled_weights(name, nesterov):
    config = OptimizerConfig(name, 0.3, momentum=0.9)
    curvature, bounds = found(config, SCHEDULE)
    gradients = CURVATURES + np.arange(stability.NUM_BATCHES)[:, None]
    size = np.sqrt((gradients**2).mean(axis=0))
    expected = (CURVATURES / size).max()
    np.testing.assert_allclose(curvature, expected, rtol=2e-2)
    of_rate = jpipe.optim.largest_stable_rate(0.1 * curvature, [3, 2, 1, 0], 0.9, nesterov)
    np.testing.assert_allclose([b.largest for b in bounds], of_rate, rtol=1e-6)


def test_where_nothing_curves_upwards_every_rate_is_stable():
    config = OptimizerConfig("sgd", 0.3, momentum=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CURVATURES", -np.ones(3))
        curvature, bounds = found(config, SCHEDULE)
    np.testing.assert_allclose(curvature, -1, rtol=1e-3)
    assert all(b.is_stable and b.largest == math.inf for b in bounds)


def test_stages_with_equal_numbers_share_a_line():
    bounds = [stability.Bound(1, 0.5, 0.1)] * 3 + [stability.Bound(0, 1.0, 0.1)]
    lines = stability.text(2.0, bounds).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0-2", "3"]


TINY = [
    f"--config.{word}"
    for word in (
        "model=MLP",
        "model.widths=16",
        "pipeline.schedule=pipemare",
        "pipeline.num_stages=2",
        "pipeline.num_microbatches=1",
        "batch_size=100",
        "num_steps=2",
        "optimizer.name=sgd",
        "optimizer.momentum=0.0",
        "stability=true",
    )
]


@pytest.mark.exhaustive
@pytest.mark.sampled(2)
@pytest.mark.parametrize("rate, is_wrong", [(100.0, True), (1e-3, False)])
def test_the_script_prints_and_warns(rate, is_wrong, tmp_path, capsys):
    words = [f"--config.optimizer.learning_rate={rate}"]
    words += [f"--config.run_dir={tmp_path / 'run'}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main(["--config", "configs/quickstart.py", *TINY, *words])
    assert "largest curvature of a minibatch: " in capsys.readouterr().out
    said = [str(w.message) for w in caught if "stable range" in str(w.message)]
    assert len(said) == is_wrong


def test_the_script_refuses_other_optimizers(capsys):
    words = ["--config", "configs/quickstart.py", "--config.stability=true"]
    assert main([*words, "--config.optimizer.name=muon"]) == 2
    assert "knows the stable range of sgd, adamw and nadamw" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_evaluations_read_the_average(tmp_path, capsys):
    """Of weights that move far in the last step: the average is nearer to the ones before."""
    losses = []
    for decay in ("none", "0.9"):
        words = [
            "--config.optimizer.learning_rate=3",
            f"--config.optimizer.ema_decay={decay}",
        ]
        words += [
            f"--config.run_dir={tmp_path / decay}",
            "--config.optimizer.decay=constant",
        ]
        words += ["--config.stability=false", "--config.pipeline.num_stages=1"]
        main(
            [
                "--config",
                "configs/quickstart.py",
                *TINY,
                "--config.num_steps=12",
                *words,
            ]
        )
        out = capsys.readouterr().out
        losses.append(float(out.split("held-out images: ")[1].split("loss ")[1].split()[0]))
    assert np.isfinite(losses).all() and losses[0] != losses[1]
