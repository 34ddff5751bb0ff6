"""Values of a megabyte, or of thousands of digits, in every argument of the public names."""

import inspect

import flax.nnx as nnx
import optax
import pytest

import jpipe
import jpipe.compress
import jpipe.optim
import jpipe.schedules

LONG = {
    "digits": 10**5000,
    "digits below zero": -(10**5000),
    "text": "x" * 1_000_000,
    "bytes": b"y" * 1_000_000,
    "list": [1] * 100_000,
    "dict": {f"key {i}": i for i in range(100_000)},
    "key": {"z" * 1_000_000: 1},
}

# What a function gets for its other arguments.
OTHERS = {
    "layers": [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2)],
    "layer": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    "loss": lambda outputs, batch: outputs.mean(),
    "optimizer": optax.sgd(0.1),
    "schedule": jpipe.schedules.one_f_one_b(2, 4),
    "learning_rate": 0.1,
    "num_stages": 2,
    "num_microbatches": 4,
    "name": "activity",
    "value": 0.5,
    "directory": "runs",
    "dtype": "bfloat16",
    "density": 0.1,
    "most": 1,
}

# The error is of the operating system, of NumPy or of JAX, which gets the value as numbers.
NOT_OURS = {
    ("load_params", "path"),
    ("read", "path"),
    ("largest_curvature", "key"),
    ("largest_curvature", "scale"),
    ("report", "value"),
    ("random_delays", "seed"),
    ("stage_end", "x"),
}

FUNCTIONS = [
    getattr(module, name)
    for module in (jpipe, jpipe.schedules, jpipe.compress, jpipe.optim)
    for name in module.__all__
    if callable(getattr(module, name))
]


def _arguments(function) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in parameters if p.kind in named]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_no_message_is_long_and_none_is_of_python_about_digits(function):
    if inspect.isclass(function) and issubclass(function, BaseException):
        pytest.skip("an exception, which shows what it is given")
    arguments = _arguments(function)
    required = {p.name: OTHERS.get(p.name, 1) for p in arguments if p.default is p.empty}
    for argument in arguments:
        if (function.__name__, argument.name) in NOT_OURS:
            continue
        for kind, value in LONG.items():
            try:
                function(**required | {argument.name: value})
            except Exception as error:
                case = f"{argument.name}: {kind}: {type(error).__name__}"
                assert len(str(error)) < 5_000, case
                assert "Exceeds the limit" not in str(error), case
                assert isinstance(error, ValueError | TypeError | AttributeError), case
