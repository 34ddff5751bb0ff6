"""Configuration: what the command line changes, and what it says of mistakes."""

import dataclasses
import json
import re
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from models import MLP, ResNet, Transformer
from train import flags
from train.config import MeshConfig, OptimizerConfig, PipelineConfig, TrainConfig
from train.mnist import MNIST
from train.text import Text
from train.train import warn_of_short_run


@dataclasses.dataclass(frozen=True)
class Inner:
    """A section."""

    low: int = 1
    """The lower end."""
    high: int = 2
    """The upper end, above `low`."""

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"`high` must be above `low` ({self.low}), got {self.high}.")


@dataclasses.dataclass(frozen=True)
class Other:
    """What may stand in a section's place."""

    name: str = "other"
    """Any text."""


@dataclasses.dataclass(frozen=True)
class Options:
    """One field of every type."""

    count: int = 3
    """How many."""
    rate: float = 0.5
    """How fast."""
    verbose: bool = False
    """Whether to talk."""
    title: str = "none yet"
    """What to call it."""
    mode: Literal["fast", "slow", "lazy"] = "fast"
    """How to go about it."""
    limit: float | None = None
    """The most, if any."""
    cuts: tuple[int, ...] | None = (1, 2)
    """Where to cut."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Anything else."""
    inner: Inner = Inner()
    """A section."""
    choice: Inner | Other = Inner()
    """One of two sections."""


def parsed(tmp_path, *words, source="return Options()"):
    path = tmp_path / "some.py"
    path.write_text(f"from {__name__} import Inner, Options, Other\ndef get_config():\n  {source}\n")
    return flags.parse(["--config", str(path), *words], Options)[1]


@pytest.mark.parametrize(
    "word, field, value",
    [
        ("count=12", "count", 12),
        ("count=-1", "count", -1),
        ("rate=3e-4", "rate", 3e-4),
        ("rate=1", "rate", 1.0),
        ("verbose=true", "verbose", True),
        ("verbose=False", "verbose", False),
        ("title=a = b", "title", "a = b"),
        ("title=none", "title", "none"),
        ("mode=slow", "mode", "slow"),
        ("limit=2.5", "limit", 2.5),
        ("limit=none", "limit", None),
        ("cuts=3,6,9", "cuts", (3, 6, 9)),
        ("cuts=(3, 6)", "cuts", (3, 6)),
        ("cuts=4", "cuts", (4,)),
        ("cuts=", "cuts", ()),
        ("cuts=None", "cuts", None),
        ("extra.ticks=unit", "extra", {"ticks": "unit"}),
        ("extra.num_chunks=2", "extra", {"num_chunks": 2}),
        ("extra.on=True", "extra", {"on": True}),
        ("inner.high=9", "inner", Inner(1, 9)),
        ("choice=Other", "choice", Other()),
        ("choice.low=0", "choice", Inner(0, 2)),
    ],
)
def test_values_are_read_by_annotation(tmp_path, word, field, value):
    expected = dataclasses.replace(Options(), **{field: value})
    got = parsed(tmp_path, f"--config.{word}")
    assert got == expected
    assert type(getattr(got, field)) is type(value)
    # In two words, and as it prints itself.
    flag, _, text = word.partition("=")
    if text:
        assert parsed(tmp_path, f"--config.{flag}", text) == expected
    assert parsed(tmp_path, *flags.to_flags(expected)) == expected


def test_fields_that_belong_together_change_together(tmp_path):
    # Either alone would break the rule of the section.
    got = parsed(tmp_path, "--config.inner.low=5", "--config.inner.high=6")
    assert got.inner == Inner(5, 6)
    words = ["--config.choice.name=x", "--config.choice=Other"]
    assert parsed(tmp_path, *words).choice == Other("x")
    assert parsed(tmp_path, *reversed(words)).choice == Other("x")


def test_the_last_word_wins_and_the_file_comes_first(tmp_path):
    source = "return Options(count=7, rate=0.1)"
    got = parsed(tmp_path, "--config.count=8", "--config.count=9", source=source)
    assert (got.count, got.rate) == (9, 0.1)


def test_the_name_is_that_of_the_file(tmp_path):
    path = tmp_path / "my_run.py"
    path.write_text(f"from {__name__} import Options\nget_config = Options\n")
    assert flags.parse([f"--config={path}"], Options)[0] == "my_run"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--config.cuont=1"], "`--config.cuont`. Did you mean 'count'? Options has: "),
        (["--config.inner.hihg=1"], "`--config.inner.hihg`. Did you mean 'high'?"),
        (["--config.count=many"], "`--config.count` must be int, got 'many'. Write it"),
        (["--config.count=1.5"], "must be int, got '1.5'. Write it like"),
        (["--config.rate=fast"], "must be float, got 'fast'"),
        (["--config.verbose=1"], "must be bool, got '1'. Write it like `--config."),
        (["--config.mode=slwo"], "must be fast, slow or lazy, got 'slwo'. Did you"),
        (["--config.limit=low"], "`--config.limit` must be float, got 'low'"),
        (["--config.cuts=3,x"], "must be int,int,..., got '3,x'. Write it like"),
        (["--config.inner=3"], "is a section, got '3'. Set its fields"),
        (
            ["--config.choice=Outer"],
            "Inner or Other, got 'Outer'. Did you mean 'Other'?",
        ),
        (["--config.choice.name=x"], "unknown option `--config.choice.name`"),
        (["--config.count.x=3"], "`--config.count` has no fields, got"),
        (
            ["--config.extra=3"],
            "takes one entry per option: `--config.extra.KEY=VALUE`",
        ),
        (["--config.inner.low=5"], "--config.inner: `high` must be above `low` (5)"),
        (["--config.count"], "`--config.count` needs a value"),
        (["--cfg.count=3"], "unknown argument `--cfg.count=3`. Did you mean '--config"),
        (["count=3"], "unknown argument `count=3`. Did you mean '--config.count'?"),
    ],
)
def test_messages(tmp_path, words, message):
    with pytest.raises(ValueError) as caught:
        parsed(tmp_path, *words)
    assert message in str(caught.value)


def test_no_configuration_is_named():
    with pytest.raises(ValueError, match="--config configs/quickstart.py"):
        flags.parse([], Options)


@pytest.mark.parametrize(
    "content, message",
    [
        ("raise SystemExit(3)", "some.py`, line 1: SystemExit: 3"),
        ("def get_config():\n  return 3", "must return a Options, got int"),
        ("x = 1", "must define `get_config()`"),
        ("x = 1\ndef get_config(:", "some.py`, line 2: SyntaxError: invalid syntax"),
        ("def get_config():\n  raise ValueError('low')", "some.py`, line 2: low"),
        ("import os\nx = y", "some.py`, line 2: NameError: name 'y' is not defined"),
        ("from train import nope", "some.py`, line 1: ImportError: cannot import name"),
        (
            f"from {__name__} import Inner\ndef get_config():\n\n  return Inner(5, 2)",
            "some.py`, line 4: `high` must be above `low` (5), got 2.",
        ),
        (
            "from train.config import TrainConfig\nget_config = lambda: TrainConfig(\n)",
            "line 2: TypeError: TrainConfig.__init__() missing 2 required positional",
        ),
        ("def get_config():\n  open('/nope')", "line 2: FileNotFoundError: [Errno 2]"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, message):
    path = tmp_path / "some.py"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        flags.parse(["--config", str(path)], Options)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_of_another_kind(tmp_path):
    (tmp_path / "small.py").write_text("")
    with pytest.raises(FileNotFoundError) as caught:
        flags.load(str(tmp_path / "smal.py"), Options)
    assert "Did you mean" in str(caught.value) and "small.py" in str(caught.value)
    (tmp_path / "small.yaml").write_text("")
    with pytest.raises(ValueError, match="is a Python file .* or the `config.json` of"):
        flags.load(str(tmp_path / "small.yaml"), Options)


def test_usage_has_every_option_its_meaning_and_its_value():
    text = flags.usage(Options)
    for line in (
        "--config.count: int; default 3\n      How many.",
        "--config.mode: fast, slow or lazy; default fast",
        "--config.limit: float or none; default none",
        "--config.cuts: int,int,... or none; default 1,2",
        "--config.extra: KEY=VALUE; default empty",
        "--config.inner.high: int; default 2\n      The upper end, above `low`.",
        "--config.choice=Inner has",
        "--config.choice=Other has\n  --config.choice.name: str; default other",
    ):
        assert line in text
    now = flags.usage(Options, Options(count=8, choice=Other()))
    assert "--config.count: int; now 8" in now
    assert "--config.choice.name" in now and "--config.choice.low" not in now


def test_every_option_of_a_run_is_documented():
    assert flags.usage(TrainConfig).count("\n      ") >= 30  # a missing one raises


def test_json_holds_everything():
    config = TrainConfig(model=MLP(widths=(3, 4)), data=MNIST())
    values = json.loads(json.dumps(flags.to_json(config)))
    assert values["model"] == {
        "type": "MLP",
        "num_inputs": 784,
        "widths": [3, 4],
        "num_outputs": 10,
    }
    assert values["pipeline"]["schedule"] == "gpipe"


def test_a_configuration_is_read_back_from_json(tmp_path):
    config = TrainConfig(
        model=Transformer(dim=32),
        data=Text(path="a.txt"),
        pipeline=PipelineConfig("one_f_one_b", options={"ticks": "unit"}, boundaries=(3, 5, 7)),
        optimizer=OptimizerConfig(clip_norm=1.0),
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "mine", **flags.to_json(config)}))
    assert flags.load(str(path), TrainConfig) == config
    words = ["--config", str(path), "--config.seed=3", "--config.model.dim=64"]
    name, changed = flags.parse(words, TrainConfig)
    assert name == "mine" and changed.seed == 3
    assert changed.model == Transformer(dim=64) and changed.pipeline == config.pipeline
    # What an older version did not write has its default.
    values = flags.to_json(config)
    del values["eval_every"]
    path.write_text(json.dumps(values))
    assert flags.parse(["--config", str(path)], TrainConfig) == ("config", config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"type": "Profile"}, "must hold the options of a TrainConfig, as training"),
        ({"num_step": 3}, "unknown option `num_step`. Did you mean 'num_steps'?"),
        ({"num_steps": 0}, "`num_steps` must be at least 1, got 0."),
        ({"num_steps": "3"}, "`num_steps` must be int, got '3'."),
        ({"num_steps": True}, "`num_steps` must be int, got True."),
        ({"eval_every": 1.5}, "`eval_every` must be int or none, got 1.5."),
        ({"data": {"type": "MNST"}}, "`data.type` must be MNIST, MNISTPixels, Text, M"),
        (
            {"data": None},
            "MNISTPixels, Text, MaskedText, LabeledText, Pairs, Instructions, Tokenized, Imported or Grain, got None",
        ),
        ({"model": {"type": "MLP", "widths": [8, "9"]}}, "`model.widths` must be int,"),
        (
            {"model": {"type": "MLP", "width": 8}},
            "option `model.width`. Did you mean 'w",
        ),
        ({"pipeline": {"type": "PipelineConfig", "balance": "x"}}, "must be flops, ti"),
        ({"pipeline": {"type": "PipelineConfig", "options": 3}}, "be KEY=VALUE, got 3"),
    ],
)
def test_json_that_is_no_configuration(tmp_path, change, message):
    values = flags.to_json(TrainConfig(model=MLP(), data=MNIST()))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | change))
    with pytest.raises(ValueError) as caught:
        flags.load(str(path), TrainConfig)
    assert message in str(caught.value) and str(path) in str(caught.value)
    path.write_text("{")
    with pytest.raises(ValueError, match="config.json` is not JSON: Expecting"):
        flags.load(str(path), TrainConfig)


def test_no_flipped_bit_makes_another_configuration(tmp_path):
    config = TrainConfig(model=MLP(), data=MNIST(), num_steps=150)
    path = tmp_path / "config.json"
    content = flags.to_text({"name": "mine", **flags.to_json(config)}).encode()
    refused = 0
    for bit in range(0, 8 * len(content), 29):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = flags.parse(["--config", str(path)], TrainConfig)
        except ValueError:
            refused += 1
        else:
            assert found == ("mine", config)
    assert refused > 300
    values = json.loads(content) | {"num_steps": 151}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="remove the entry `crc32` if you mean the"):
        flags.load(str(path), TrainConfig)
    del values["crc32"]  # as older versions wrote it
    path.write_text(json.dumps(values))
    assert flags.load(str(path), TrainConfig).num_steps == 151


# -- The options of a run -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: PipelineConfig(num_stages=0),
            "`num_stages` must be at least 1, got 0",
        ),
        (lambda: MeshConfig(data=0), "`data` must be at least 1, got 0."),
        (lambda: MeshConfig(model=0), "`model` must be at least 1, got 0."),
        (
            lambda: MeshConfig(rules={"mlp": "modle"}),
            "`rules.mlp` must be stage, data, fsdp, expert, context or model, several of them separated by commas, or none, got 'modle'.",
        ),
        (
            lambda: MeshConfig(data=2, compress_gradients="topk:density=2"),
            "`compress_gradients`: `density` of TopK must be above 0 and at most 1, got 2.0",
        ),
        (
            lambda: PipelineConfig(accumulate_gradients="streaming_pca:rank=0"),
            "`accumulate_gradients`: `rank` of StreamingPCA must be at least 1, got 0",
        ),
        (
            lambda: PipelineConfig(compress_messages="quantise:bits=8"),
            "`compress_messages`: there is no compressor 'quantise'. Did you mean 'quantize'?",
        ),
        (
            lambda: TrainConfig(MLP(), MNIST(), mesh=MeshConfig(compress_gradients="powersgd:rank=2")),
            "`mesh.compress_gradients` compresses what the replicas of a stage exchange, and there is one.",
        ),
        (lambda: OptimizerConfig(learning_rate=0.0), "`learning_rate` must be above 0"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "above 0, got nan"),
        (lambda: OptimizerConfig(b2=1.0), "`b2` must lie in [0, 1), got 1.0."),
        (lambda: TrainConfig(MLP(), MNIST(), batch_size=0), "`batch_size` must be at"),
        (lambda: TrainConfig(MLP(), MNIST(), eval_every=0), "`eval_every` must be at"),
        (
            lambda: TrainConfig(MLP(), MNIST(), eval_every=1, eval_batches=0),
            "`eval_batches` must be at least 1, got 0.",
        ),
        (
            lambda: TrainConfig(MLP(), MNIST(), eval_batches=3),
            "got 3 without `eval_every`, so there are no such evaluations. Set `eval_e",
        ),
        *(
            (lambda text=text: TrainConfig(MLP(), MNIST(), profile=text), f"the steps 10, 11 and 12, got '{text}'.")
            for text in ("10", "10:10", "0:2", "13:10", "a:b", "-1:3", "1:2:3", "")
        ),
        (
            lambda: TrainConfig(MLP(), MNIST(), num_steps=12, profile="10:14"),
            "`profile` must lie within the 12 steps of the run, got 10:14: it ends with step 13.",
        ),
        (
            lambda: TrainConfig(MLP(), MNIST(), PipelineConfig("pipemare", synchronous_steps=11), profile="10:13"),
            "`profile` must name steps of one schedule, got 10:13: pipemare takes over after step 11",
        ),
        (lambda: TrainConfig(MLP(), MNIST(), seed=-1), "`seed` must lie in [0, 2**32)"),
        (lambda: PipelineConfig(schedule="gpip").table(), "Did you mean 'gpipe'?"),
        (
            lambda: PipelineConfig("one_f_one_b", options={"tick": "unit"}).table(),
            "has no option 'tick'. Did you mean 'ticks'? It takes: ticks, replicas, message_ticks.",
        ),
        (
            lambda: PipelineConfig("gpipe", options={"ticks": "unit"}).table(),
            "gpipe has no option 'ticks'. It takes: replicas, message_ticks.",
        ),
        (
            lambda: PipelineConfig(num_stages=3, delays=(2, 1)),
            "`delays` must have one number for each of the `num_stages=3` stages, got 2: (2, 1).",
        ),
        (
            lambda: PipelineConfig(num_stages=1, delays=(2,), schedule_file="a.txt"),
            "`delays` take the place of a schedule, got `schedule_file=a.txt` too.",
        ),
        (
            lambda: PipelineConfig(num_stages=2, delays=(1, -1)).table(),
            "`delays` must be whole numbers of updates, at least 0",
        ),
    ],
)
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_schedules_by_name_with_options_or_from_a_file(tmp_path):
    unit = PipelineConfig("one_f_one_b", 3, 5, options={"ticks": "unit"}).table()
    assert (unit.num_stages, unit.num_microbatches) == (3, 5)
    assert unit.num_ticks != PipelineConfig("one_f_one_b", 3, 5).table().num_ticks
    path = tmp_path / "mine.txt"
    path.write_text(unit.to_text())
    assert PipelineConfig(schedule_file=str(path)).table().to_text() == unit.to_text()


def test_learning_rates():
    def rates(num_steps, **options):
        schedule = OptimizerConfig(learning_rate=2.0, **options).learning_rate_schedule(num_steps)
        return [float(schedule(step)) for step in range(num_steps + 1)]

    np.testing.assert_allclose(rates(8, warmup_steps=4, decay="linear"), [0.5, 1, 1.5, 2, 2, 1.5, 1, 0.5, 0])
    np.testing.assert_allclose(rates(2, decay="cosine"), [2, 1, 0], atol=1e-6)
    np.testing.assert_allclose(rates(2, decay="constant"), [2, 2, 2])
    np.testing.assert_allclose(rates(3, decay="constant", warmup_steps=1), [2, 2, 2, 2])
    np.testing.assert_allclose(rates(2, decay="constant", warmup_steps=4), [0.5, 1.0, 1.5])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_decay_kernels_alone(name):
    config = OptimizerConfig(name=name, learning_rate=0.5, decay="constant", weight_decay=0.1)
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    transform = config.transform(10)
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.05)
    np.testing.assert_allclose(updates["scale"], 0)


def test_sgd_is_nesterov_momentum():
    config = OptimizerConfig(name="sgd", learning_rate=0.1, decay="constant", momentum=0.9)
    transform, params, mean = config.transform(10), {"w": jnp.ones((1, 1))}, 0.0
    state = transform.init(params)
    for gradient in (1.0, -2.0, 0.5):
        updates, state = transform.update({"w": jnp.full((1, 1), gradient)}, state, params)
        mean = gradient + 0.9 * mean
        np.testing.assert_allclose(updates["w"], -0.1 * (gradient + 0.9 * mean), rtol=1e-5)


def test_clipping_is_over_all_stages():
    config = OptimizerConfig(name="sgd", learning_rate=1.0, decay="constant", momentum=0.0, clip_norm=2.0)
    transform, params = config.transform(10), {"w": jnp.full((1, 1), 3.0)}
    state = transform.init(params)
    updates, _ = transform.update(params, state, params, global_norm=jnp.array(4.0))
    np.testing.assert_allclose(updates["w"], -1.5)
    with pytest.raises(ValueError, match="`clip_norm` must be above 0, got 0.0"):
        OptimizerConfig(clip_norm=0.0)


def test_corrections_of_late_gradients():
    corrections = OptimizerConfig(
        name="nadamw",
        annealing_steps=10,
        discrepancy_decay=0.5,
        predict_weights=True,
    )
    state = corrections.transform(100).init({"w": jnp.zeros(2)})
    kinds = {type(each).__name__ for each in state}
    assert {"CorrectDiscrepancyState", "PredictWeightsState"} <= kinds
    hooks = corrections.options_of_pipeline()
    assert hooks["forward_params"] is jpipe.optim.predicted_params
    assert hooks["backward_params"] is jpipe.optim.corrected_params
    assert not any(OptimizerConfig().options_of_pipeline().values())
    with pytest.raises(ValueError, match="`annealing_steps` must be above 0, got 0"):
        OptimizerConfig(annealing_steps=0)
    with pytest.raises(ValueError, match="`discrepancy_decay` must lie between 0 and"):
        OptimizerConfig(discrepancy_decay=1.0)


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["basis_rotation", "muon"])
def test_optimizers_for_late_gradients(name):
    """Against the transforms written out; the rate is constant and matrices decay."""
    config = OptimizerConfig(
        name=name,
        learning_rate=0.1,
        decay="constant",
        momentum=0.8,
        b2=0.9,
        adam_rate=0.3,
        weight_decay=0.5,
    )
    params = {"w": jnp.eye(3) + 1, "b": jnp.ones(3), "conv": jnp.ones((2, 2, 1, 3))}
    grads = {
        "w": jnp.arange(9.0).reshape(3, 3) - 3,
        "b": jnp.arange(3.0),
        "conv": jnp.sin(jnp.arange(12.0)).reshape(2, 2, 1, 3),
    }
    mask = {"w": True, "b": False, "conv": True}
    if name == "muon":
        expected = optax.contrib.muon(
            0.1,
            beta=0.8,
            weight_decay=0.5,
            weight_decay_mask=mask,
            adam_b2=0.9,
            adam_learning_rate=0.03,
        )
        # A kernel of a convolution is a matrix of 2 x 2 x 1 rows.
        shape = params["conv"].shape
        params["conv"], grads["conv"] = (tree["conv"].reshape(4, 3) for tree in (params, grads))
    else:
        expected = optax.chain(
            jpipe.optim.scale_by_basis_rotation(0.8, 0.9),
            optax.add_decayed_weights(0.5, mask),
            optax.scale(-0.1),
        )
    wanted = expected.update(grads, expected.init(params), params)[0]
    if name == "muon":
        params["conv"], grads["conv"], wanted["conv"] = (
            tree["conv"].reshape(shape) for tree in (params, grads, wanted)
        )
    transform = config.transform(10)
    found = transform.update(grads, transform.init(params), params)[0]
    for key in params:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-5)


def test_predictions_that_fade():
    """They look b + b^2 + ... updates ahead, one term for each update of delay."""
    config = OptimizerConfig(predict_weights=True, prediction_decay=0.5)
    transform, params = config.transform(10), {"w": jnp.zeros(2)}
    state = transform.init(params)
    updates, state = transform.update({"w": jnp.ones(2)}, state, params)
    ahead = config.options_of_pipeline()["forward_params"]
    for delay, distance in ((0, 0.0), (1, 0.5), (3, 0.5 + 0.25 + 0.125)):
        found = ahead(params, state, jnp.array(delay))["w"]
        np.testing.assert_allclose(found, distance * updates["w"], rtol=1e-6)
    with pytest.raises(ValueError, match="`prediction_decay` is for `predict_weights"):
        OptimizerConfig(prediction_decay=0.5)
    with pytest.raises(ValueError, match="`prediction_decay` must lie between 0 and 1"):
        OptimizerConfig(predict_weights=True, prediction_decay=1.0)
    with pytest.raises(ValueError, match="`adam_rate` must be above 0, got 0.0"):
        OptimizerConfig(adam_rate=0.0)


def test_a_peak_in_place_of_the_configured_rate():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, decay="linear")
    own, other = config.learning_rate_schedule(8), config.learning_rate_schedule(8, 0.5)
    for step in range(9):
        np.testing.assert_allclose(other(step), own(step) / 4, rtol=1e-6)
    params = {"w": jnp.ones((2, 2))}
    for name in ("muon", "basis_rotation"):
        config = OptimizerConfig(name=name, learning_rate=2.0, decay="constant")
        own, other = (
            transform.update(params, transform.init(params), params)[0]["w"]
            for transform in (config.transform(8), config.transform(8, 0.5))
        )
        np.testing.assert_allclose(other, own / 4, rtol=1e-6)


def test_compensation_feedback_and_averages():
    config = OptimizerConfig(
        name="sgd",
        learning_rate=1.0,
        decay="constant",
        momentum=0.0,
        delay_compensation=2.0,
        error_feedback=0.5,
        ema_decay=0.9,
    )
    transform, params = config.transform(10), {"w": jnp.ones((1, 1))}
    state, updates = transform.init(params), params
    stale = {"w": jnp.full((1, 1), 0.5)}
    for _ in range(2):
        updates, state = transform.update({"w": jnp.ones((1, 1))}, state, params, delay=1, stale_params=stale)
    # DC-ASGD-a: 1 + 2 / sqrt(s) (1 - 0.5), s = 0.05 and 0.0975; then half of the error.
    first, second = (-1 - 1 / np.sqrt(s + 1e-7) for s in (0.05, 0.0975))
    np.testing.assert_allclose(updates["w"], second + 0.5 * (second - first), rtol=1e-5)
    averaged = jpipe.optim.averaged_params(params, state)["w"]
    weights = 1 + first, 1 + updates["w"]
    np.testing.assert_allclose(averaged, (0.9 * weights[0] + weights[1]) / 1.9, rtol=1e-5)
    for name in ("delay_compensation", "error_feedback"):
        with pytest.raises(ValueError, match=f"`{name}` must be above 0, got 0"):
            OptimizerConfig(**{name: 0.0})
    with pytest.raises(ValueError, match=r"`ema_decay` must lie in \[0, 1\), got 1.0"):
        OptimizerConfig(ema_decay=1.0)


def test_a_warm_up_is_synchronous_and_what_follows_is_not():
    pipemare = PipelineConfig("pipemare", 3, 2, synchronous_steps=5)
    warm_up = pipemare.warm_up_table(pipemare.table())
    assert warm_up.synchronous and warm_up.num_stages == 3
    assert warm_up.num_microbatches == 2
    assert PipelineConfig().warm_up_table(pipemare.table()) is None
    gpipe = PipelineConfig("gpipe", 3, 4, synchronous_steps=5)
    with pytest.raises(ValueError, match="before 'gpipe', which is synchronous"):
        gpipe.warm_up_table(gpipe.table())
    with pytest.raises(ValueError, match="got 5 of 5: pipemare would never take over"):
        TrainConfig(MLP(), MNIST(), pipemare, num_steps=5)


def test_one_device_emulates_many_or_has_the_delays_that_are_given():
    pipemare = PipelineConfig("pipemare", 3, 1, emulate=True, synchronous_steps=5)
    table = pipemare.table()
    assert table.num_devices == 1
    assert table.emulates == jpipe.schedules.pipemare(3, 1)
    warm_up = pipemare.warm_up_table(table)
    assert warm_up.synchronous and warm_up.num_devices == 1
    given = PipelineConfig(num_stages=3, num_microbatches=2, delays=(4, 0, 1))
    assert given.table().facts().forward_delay.tolist() == [4, 0, 1]
    assert given.table().num_devices == 1


def test_the_network_between_slices_cuts_axes():
    config = flags.override(TrainConfig(MLP(), MNIST()), {"mesh": {"data": "2", "dcn": {"data": "2"}}})
    mesh = config.mesh.make(jpipe.schedules.gpipe(4, 4))
    assert [device.id for device in mesh.devices.flat] == [*range(8)]
    mesh = flags.override(config, {"mesh": {"dcn": {"stage": "2", "data": "1"}}}).mesh.make(jpipe.schedules.gpipe(4, 4))
    assert [device.id for device in mesh.devices.flat] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_rules_come_before_the_usual_ones():
    config = TrainConfig(MLP(), MNIST())
    assert config.mesh.axis_rules() == jpipe.AXIS_RULES
    rules = {"length": "model", "embed": "fsdp, model", "mlp": "none"}
    changed = flags.override(config, {"mesh": {"fsdp": "2", "expert": "4", "rules": rules}})
    assert changed.mesh.sizes == {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "model": 1}
    own = (("length", ("model",)), ("embed", ("fsdp", "model")), ("mlp", None))
    assert changed.mesh.axis_rules() == (*own, *jpipe.AXIS_RULES)


def test_an_option_of_another_section_is_named():
    config = TrainConfig(MLP(), MNIST())
    with pytest.raises(
        ValueError,
        match="`--config.pipeline.fsdp`. Did you mean `--config.mesh.fsdp`[?]",
    ):
        flags.override(config, {"pipeline": {"fsdp": "2"}})
    with pytest.raises(ValueError, match="Did you mean `--config.mesh.data`[?]"):
        flags.override(config, {"pipeline": {"data": "2"}})


def test_models_in_place_of_each_other():
    config = TrainConfig(model=MLP(), data=MNIST())
    changed = flags.override(config, {"model": {"": "ResNet", "num_channels": "1"}})
    assert changed.model == ResNet(num_channels=1)


def test_copies_of_stages():
    config = PipelineConfig("one_f_one_b", 2, 6, replicas=(3, 1))
    table = config.table()
    assert table.replicas == (3, 1) and table.num_devices == 4
    asynchronous = dataclasses.replace(config, schedule="pipedream", synchronous_steps=3)
    warm_up = asynchronous.warm_up_table(asynchronous.table())
    assert warm_up.synchronous and warm_up.copies == asynchronous.table().copies
    with pytest.raises(ValueError, match="zero_bubble_h1 has no option 'replicas'"):
        dataclasses.replace(config, schedule="zero_bubble_h1").table()
    with pytest.raises(ValueError, match="one number for each of the 2 stages"):
        dataclasses.replace(config, replicas=(3,)).table()


def test_errors_about_layers_of_all_stages_name_the_rule():
    mesh = MeshConfig(rules={"vocab": "stage", "length": "model"})
    with pytest.raises(
        ValueError,
        match=r"^Why\. In this script leave it out by `--config.mesh.rules.vocab=none`\.$",
    ):
        with mesh.names_rules():
            raise jpipe.vocabulary.VocabularyError("Why.")


# -- Names of configurations


@pytest.mark.parametrize("name", ["quickstart", "quickstart.py", "configs/quickstart"])
def test_a_configuration_by_its_name(name):
    assert flags.parse(["--config", name], TrainConfig)[0] == "quickstart"


def test_a_name_without_a_folder_means_one_of_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        flags.parse(["--config", "quickstrat"], TrainConfig)
    assert "Did you mean 'quickstart'? `configs` has: asynchronous_gpt, " in str(error.value)
    # A file of the working directory comes first.
    (tmp_path / "quickstart.py").write_text("def get_config(): return 3")
    with pytest.raises(ValueError, match="must return a TrainConfig, got int"):
        flags.parse(["--config", "quickstart"], TrainConfig)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"warmup_steps": 50}, "warmup_steps=50` is more than `num_steps=8`.* 16% "),
        ({"annealing_steps": 16}, "annealing_steps=16` is more than .* 50% "),
        ({"warmup_steps": 8}, None),
    ],
)
def test_a_run_that_ends_during_its_warm_up_is_told(options, told):
    config = TrainConfig(
        model=Transformer(),
        data=Text(),
        num_steps=8,
        optimizer=OptimizerConfig(**options),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_short_run(config)
    assert len(caught) == (told is not None)
    assert told is None or re.search(told, str(caught[0].message))


@pytest.mark.parametrize("given,want", [("none", None), ("float32", "float32")])
def test_the_dtype_of_sums_goes_to_the_pipeline(given, want):
    options = PipelineConfig(accumulate_dtype=given).options_of_pipeline()
    assert options["accumulate_dtype"] == want


def test_an_option_of_a_section_is_named_without_it():
    with pytest.raises(
        ValueError, match="option `--config.num_stages`. Did you mean `--config.pipeline.num_stages`[?]"
    ):
        flags.parse(["--config", "quickstart", "--config.num_stages=2"], TrainConfig)


def test_rates_do_not_change_with_the_updates_of_a_stage():
    """Where stages update several times in a step, an optimizer would take updates for steps."""
    pipeline = PipelineConfig("pipedream", 2, 6, replicas=(3, 1), options={"update_every": (3, 1)})
    table = pipeline.table()
    assert table.updates_in_round.tolist() == [2, 6]
    constant = OptimizerConfig(decay="constant")
    constant.check_rhythm(table)
    dataclasses.replace(constant, annealing_steps="lasting").check_rhythm(table)
    for change in ({"decay": "cosine"}, {"warmup_steps": 3}, {"annealing_steps": 5}):
        (name,) = change
        wrong = dataclasses.replace(constant, **change)
        with pytest.raises(ValueError, match=f"`optimizer.{name}` must be .* Set `--config.optimizer.{name}="):
            wrong.check_rhythm(table)
        wrong.check_rhythm(dataclasses.replace(pipeline, options={}).table())
