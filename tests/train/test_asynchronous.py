"""The switch `--config.asynchronous`: what each method sets, what wins beside it, and what is refused."""

import dataclasses

import pytest
from helpers import events_of, log_of

import jpipe
from models import MLP
from train import asynchronous, flags
from train.asynchronous import METHODS, annealing_steps, applied
from train.config import OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST
from train.train import main


def switched(name, *words, config="quickstart"):
    words = [f"--config.{word}" for word in (f"asynchronous={name}", *words)]
    return flags.parse(["--config", config, *words], TrainConfig)[1]


def settings(config):
    pipeline, optimizer = config.pipeline, config.optimizer
    return (
        pipeline.schedule,
        optimizer.name,
        optimizer.momentum,
        optimizer.annealing_steps,
        optimizer.error_feedback,
        optimizer.discrepancy_decay,
        pipeline.synchronous_steps,
    )


# quickstart: 4 stages, 4 microbatches, 800 steps. With one microbatch the delays are 3, 2, 1, 0.
@pytest.mark.parametrize(
    "name, num_microbatches, expected",
    [
        ("2bw-muon", 4, ("pipedream_2bw", "muon", 0.8, None, 1.0, None, 0)),
        ("pipedream-muon", 4, ("pipedream", "muon", 0.8, None, 1.0, None, 0)),
        ("pipedream-muon", 1, ("pipedream", "muon", 0.8, 800, None, None, 0)),
        ("pipedream-basis-rotation", 4, ("pipedream", "basis_rotation", 0.9, None, None, None, 0)),
        ("pipedream-basis-rotation", 1, ("pipedream", "basis_rotation", 0.9, 800, None, None, 0)),
        ("pipemare-adamw", 1, ("pipemare", "adamw", 0.9, 800, None, 0.1, 100)),
    ],
)
def test_what_a_method_sets(name, num_microbatches, expected):
    config = switched(name, f"pipeline.num_microbatches={num_microbatches}")
    assert settings(config) == expected
    assert not config.pipeline.table().synchronous
    # The options of a run say the same, and are the same run.
    assert flags.parse(["--config", "quickstart", *flags.to_flags(config)], TrainConfig)[1] == config


def test_rates_of_late_stages_rise_at_few_stages_and_stay_at_many():
    assert [annealing_steps(delay, 500) for delay in (0, 1, 2, 26, 27, 99)] == [
        None, None, 500, 500, "lasting", "lasting",
    ]  # fmt: skip
    words = ["pipeline.num_microbatches=1", "pipeline.emulate=true"]
    many = switched("pipedream-muon", "pipeline.num_stages=28", *words)
    assert many.pipeline.table().facts().forward_delay.max() == 27
    assert many.optimizer.annealing_steps == "lasting" and many.optimizer.steps_of_rise == float("inf")


def test_the_rate_follows_from_that_of_adam():
    adam = OptimizerConfig(learning_rate=0.01, weight_decay=0.3)
    base = TrainConfig(MLP(), MNIST(), optimizer=adam)
    muon = applied(base, "2bw-muon").optimizer
    assert (muon.learning_rate, muon.adam_rate) == (pytest.approx(0.03), 0.3)
    # A step shrinks the weights by rate * weight_decay.
    assert muon.learning_rate * muon.weight_decay == pytest.approx(0.01 * 0.3)
    assert applied(base, "pipedream-basis-rotation").optimizer.learning_rate == 0.01
    tuned = dataclasses.replace(base, optimizer=dataclasses.replace(muon, weight_decay=0.0))
    assert applied(tuned, "2bw-muon").optimizer.learning_rate == pytest.approx(0.03)
    assert applied(tuned, "pipemare-adamw").optimizer.learning_rate == pytest.approx(0.01)


def test_remedies_of_the_file_give_way():
    remedies = OptimizerConfig(
        discrepancy_decay=0.5, predict_weights=True, prediction_decay=0.5, delay_compensation=1.0
    )
    pipeline = PipelineConfig("pipemare", 3, 4, options={"max_delay": 2}, synchronous_steps=7)
    config = applied(TrainConfig(MLP(), MNIST(), pipeline=pipeline, optimizer=remedies), "2bw-muon")
    left = config.optimizer
    assert (left.discrepancy_decay, left.predict_weights, left.delay_compensation) == (None, False, None)
    assert config.pipeline == PipelineConfig("pipedream_2bw", 3, 4)


def test_what_is_given_beside_the_switch_wins():
    config = switched(
        "2bw-muon",
        "optimizer.momentum=0.95",
        "optimizer.error_feedback=none",
        "optimizer.learning_rate=0.5",
        "optimizer.annealing_steps=lasting",
        "pipeline.options.ticks=paired",
        "pipeline.num_microbatches=8",
    )
    optimizer = config.optimizer
    assert (optimizer.momentum, optimizer.error_feedback, optimizer.learning_rate) == (0.95, None, 0.5)
    assert optimizer.annealing_steps == "lasting" and optimizer.weight_decay == 0.05
    assert config.pipeline.options == {"ticks": "paired"}
    named = switched("2bw-muon", "pipeline.schedule=pipedream_2bw", "optimizer.name=muon")
    assert settings(named) == settings(switched("2bw-muon"))
    assert named.optimizer.learning_rate == 0.02  # that of the optimizer that is named


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("2bw-moun", [], "got '2bw-moun'. Did you mean '2bw-muon'?"),
        (
            "2bw-muon",
            ["pipeline.schedule=gpipe"],
            "pipedream_2bw with the optimizer muon, got `pipeline.schedule=gpipe`",
        ),
        ("2bw-muon", ["optimizer.name=adamw"], "got `optimizer.name=adamw`. Methods with adamw: pipemare-adamw."),
        (
            "2bw-muon",
            ["pipeline.delays=1,1,1,1"],
            "`pipeline.delays` takes the place of a schedule, got (1, 1, 1, 1). Leave one out",
        ),
        ("2bw-muon", ["pipeline.schedule_file=a.txt"], "`pipeline.schedule_file` takes the place of a schedule"),
        ("2bw-muon", ["pipeline.num_stages=9"], "Use 8 or more. Or choose pipedream-muon, with the same optimizer."),
        (
            "2bw-muon",
            ["diagnostics=angel"],
            "the diagnostics must be some of angle, discrepancy, curvature, got 'angel'",
        ),
        ("2bw-muon", ["pipeline.options.max_delay=1"], "pipedream_2bw has no option 'max_delay'"),
    ],
)
def test_contradictions_are_refused(name, words, message):
    with pytest.raises(ValueError) as caught:
        switched(name, *words)
    assert message in str(caught.value)


def test_a_rate_that_says_nothing_is_refused():
    config = TrainConfig(MLP(), MNIST(), optimizer=OptimizerConfig("sgd", 0.6))
    with pytest.raises(ValueError, match="the configuration has sgd, whose rate of 0.6 says nothing about it. Give"):
        applied(config, "2bw-muon")
    given = {"optimizer": {"learning_rate": "0.6"}}
    assert applied(config, "2bw-muon", given).optimizer.learning_rate == 0.6
    with pytest.raises(ValueError, match="no asynchronous method '2bw'.* Did you mean '2bw-muon'"):
        applied(config, "2bw")


def test_a_name_without_its_settings_is_refused():
    with pytest.raises(
        ValueError, match=r"got `pipeline.schedule=gpipe`.*`asynchronous.applied\(config, '2bw-muon'\)`"
    ):
        TrainConfig(MLP(), MNIST(), asynchronous="2bw-muon")
    run = switched("2bw-muon")
    with pytest.raises(ValueError, match="got `pipeline.schedule=gpipe`"):
        flags.override(run, {"pipeline": {"schedule": "gpipe"}})
    without = flags.override(run, {"asynchronous": "none", "pipeline": {"schedule": "gpipe"}})
    assert without.asynchronous is None and without.optimizer == run.optimizer


def test_help_says_what_each_value_means():
    doc = flags.usage(TrainConfig)
    assert "--config.asynchronous: 2bw-muon, pipedream-muon, " in doc
    text = " ".join(doc.split())
    assert all(f'"{name}":' in text for name in METHODS)
    assert all(method.schedule in jpipe.schedules.names() for method in METHODS.values())


@pytest.mark.parametrize("config", ["gpt_1f1b", "mixture_1f1b", "finetune_llama", "translation_1f1b", "gpt_2bw"])
def test_it_fits_other_configurations(config):
    chosen = switched("pipedream-muon", config=config)
    assert settings(chosen)[:2] == ("pipedream", "muon")
    assert asynchronous.METHODS["pipedream-muon"].check(chosen) is None


def run_small_gpt(tmp_path, config, *words):
    """Runs the script on a short text, into the folder `run`."""
    text = tmp_path / "short.txt"
    text.write_text("To be, or not to be. " * 40)
    words = [
        "model.dim=8", "model.num_heads=2", "model.num_blocks=2", "data.seq_len=16", "optimizer.warmup_steps=1",
        f"data.path={text}", f"run_dir={tmp_path / 'run'}", *words,
    ]  # fmt: skip
    assert main(["--config", config, *(f"--config.{word}" for word in words)]) == 0


@pytest.mark.exhaustive
def test_a_run(tmp_path):
    words = [
        "asynchronous=2bw-muon", "pipeline.num_stages=2", "pipeline.num_microbatches=2", "batch_size=4", "num_steps=4",
        "eval_every=none", "pipeline.emulate=true", "mesh.rules.vocab=none",
    ]  # fmt: skip
    run_small_gpt(tmp_path, "gpt_1f1b", *words)
    assert log_of(tmp_path / "run")[-1]["test_loss"] > 0
    again = flags.load(str(tmp_path / "run" / "config.json"), TrainConfig)
    assert again.asynchronous == "2bw-muon" and again.optimizer.error_feedback == 1.0


@pytest.mark.exhaustive
def test_diagnostics_are_in_the_log_for_each_stage(tmp_path, capsys):
    words = [
        "pipeline.num_stages=4", "pipeline.delays=5,2,1,0", "batch_size=2", "num_steps=6", "log_every=3",
        "optimizer.annealing_steps=10", "log=tensorboard", "optimizer.name=sgd",
        "diagnostics=angle,discrepancy,curvature",
    ]  # fmt: skip
    run_small_gpt(tmp_path, "asynchronous_gpt", *words)
    lines = [line for line in log_of(tmp_path / "run") if "diagnostics" in line]
    assert [line["step"] for line in lines] == [3, 6]
    last = lines[-1]["diagnostics"]
    assert last.keys() == {
        "delay", "backward_delay", "update_cosine", "forward_discrepancy", "backward_discrepancy", "curvature",
        "effective_delay",
    }  # fmt: skip
    assert last["delay"] == {"0": 5, "1": 2, "2": 1, "3": 0}
    # The sixth update is the fifth after the first: T1 divides by delay ** (1 - 5 / 10).
    assert last["effective_delay"] == pytest.approx({"0": 5**0.5, "1": 2**0.5, "2": 1, "3": 0}, rel=1e-5)
    assert last["forward_discrepancy"]["3"] == 0 < last["forward_discrepancy"]["1"] < last["forward_discrepancy"]["0"]
    assert all(-1 <= cosine <= 1 for cosine in last["update_cosine"].values()) and len(last["update_cosine"]) == 4
    assert "effective delay 0 to 2.24" in capsys.readouterr().out
    assert any(values.get("diagnostics/delay/0") == 5 for _, values in events_of(tmp_path / "run"))
    assert (tmp_path / "run" / "run.png").exists()
