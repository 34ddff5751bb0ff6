"""Suggestions for misspelt words."""

import inspect

import jax.numpy as jnp
import optax
import pytest

import jpipe
from jpipe._util.suggest import did_you_mean, suggests

KNOWN = ["gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_v"]
ALIASES = {"1f1b": "one_f_one_b", "zb_h1": "zero_bubble_h1"}


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("gpip", "gpipe"),
        ("GPipe", "gpipe"),
        ("one-f-one-b", "one_f_one_b"),
        ("1F1B", "one_f_one_b"),
        ("zb-h1", "zero_bubble_h1"),
        ("ZBH1", "zero_bubble_h1"),
        ("zero_bubble_w", "zero_bubble_v"),
    ],
)
def test_the_nearest_word(word, suggestion):
    assert did_you_mean(word, KNOWN, ALIASES) == f" Did you mean {suggestion!r}?"


@pytest.mark.parametrize("word", ["x", "", "--", "learning_rate", 3, None, "gpipe" * 99])
def test_no_word_is_near(word):
    assert did_you_mean(word, KNOWN, ALIASES) == ""


def test_a_known_word_goes_before_an_alias():
    assert did_you_mean("Vb", ["v_b"], {"v-b": "other"}) == " Did you mean 'v_b'?"


def test_the_cutoff():
    assert did_you_mean("weight", ["kernel", "bias"]) == ""
    assert did_you_mean("weight", ["kernel", "bias"], cutoff=0) != ""


# -- Wrong keywords and missing attributes

MODULES = (jpipe, jpipe.schedules, jpipe.optim, jpipe.compress)


def public_calls():
    """Public functions and classes that users call with keywords, by name."""
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type):
                record = hasattr(value, "_fields") or issubclass(value, Exception)
                abstract = inspect.isabstract(value) or getattr(value, "_is_protocol", False)
                if record or abstract or name.endswith(("Record", "Memory")):
                    continue
            elif not inspect.isfunction(value):
                continue
            yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("call", list(public_calls()))
def test_every_public_function_names_the_nearest_argument(call):
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY]
    parameters = inspect.signature(call).parameters.values()
    named = [each.name for each in parameters if each.kind in kinds]
    if not named or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    with pytest.raises(TypeError, match=f"Did you mean '{named[-1]}'"):
        call(**{f"{named[-1]}z": 1})


@pytest.mark.parametrize(
    ("call", "word", "suggestion"),
    [
        (jpipe.make_mesh, "tp", "model"),
        (jpipe.make_mesh, "stages", "stage"),
        (jpipe.make_mesh, "dp", "data"),
        (jpipe.Pipeline, "num_stages", "schedule=jpipe.schedules.one_f_one_b("),
        (jpipe.Pipeline, "num_microbatch", "schedule=jpipe.schedules.one_f_one_b("),
        (jpipe.Pipeline, "model", "layers"),
        (jpipe.schedules.gpipe, "microbatches", "num_microbatches"),
        (jpipe.optim.nadamw, "lr", "learning_rate"),
    ],
)
def test_usual_names_of_arguments(call, word, suggestion):
    with pytest.raises(TypeError) as error:
        call(**{word: 2})
    assert f"no argument {word!r}. Did you mean '{suggestion}" in str(error.value)


def test_too_many_arguments_by_position():
    message = r"Pipeline\(\) takes layers by position, got 3 arguments. Give the others by name: loss, optimizer, sch"
    with pytest.raises(TypeError, match=message):
        jpipe.Pipeline([], jnp.mean, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("fit", "'step'"),
        ("train", "'step'"),
        ("stepp", "'step'"),
        ("params", "'get_params'"),
        ("num_stages", "'schedule.num_stages'"),
    ],
)
def test_missing_attributes_of_a_pipeline(name, suggestion):
    pipe = jpipe.Pipeline(
        [jpipe.Function(lambda x: x)] * 2,
        loss=lambda outputs, batch: jnp.mean(outputs),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
    )
    with pytest.raises(AttributeError, match=f"Did you mean {suggestion}"):
        getattr(pipe, name)
    assert not hasattr(pipe, "nothing_like_it")


def test_missing_attributes_of_modules():
    with pytest.raises(AttributeError, match="Did you mean 'Pipeline'"):
        _ = jpipe.Pipline
    with pytest.raises(AttributeError, match="Did you mean 'zero_bubble_h1'"):
        _ = jpipe.schedules.zb_h1


def test_errors_of_the_call_itself_stay():
    @suggests
    class Thing:
        def __init__(self, *, size):
            self.size = size

        @property
        def broken(self):
            return self.size.nothing

    @suggests
    def fails(size):
        raise TypeError("from inside")

    with pytest.raises(TypeError, match="from inside"):
        fails(size=1)
    with pytest.raises(TypeError, match="missing 1 required"):
        Thing()
    with pytest.raises(AttributeError, match="'int' object has no attribute"):
        _ = Thing(size=1).broken
