"""Models of other people's packages train as in plain JAX, where the packages are installed."""

import importlib.util
import pathlib
import sys

import pytest

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "zoo.py"
spec = importlib.util.spec_from_file_location("zoo_of_packages", PATH)
zoo = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = zoo
spec.loader.exec_module(zoo)


LARGE = ("unet", "resnet", "bart", "bert", "griffin", "dit")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * name.startswith(LARGE)) for name in zoo.MODELS],
)
@pytest.mark.filterwarnings("ignore")
def test_models_of_packages(name):
    try:
        case = zoo.MODELS[name]()
    except ImportError as error:
        pytest.skip(f"its package is not installed: {error}")
    result = zoo.trained(case, num_stages=2)
    assert result.losses < 1e-5
    assert result.updates < 2e-3  # of weights before a group norm, whose gradients nearly cancel; see the benchmark


def test_differences_are_relative_to_each_leaf():
    wanted = {"large": zoo.np.array([100.0]), "small": zoo.np.array([0.1]), "zero": zoo.np.array([1e-9])}
    found = {"large": zoo.np.array([100.0]), "small": zoo.np.array([0.11]), "zero": zoo.np.array([2e-9])}
    assert abs(zoo.difference(found, wanted) - 0.1) < 1e-6
    assert abs(zoo.difference(wanted | {"zero": found["zero"]}, wanted) - 1e-7) < 1e-9
