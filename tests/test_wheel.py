"""The package as a stranger gets it: a wheel, built, installed in an empty environment, used outside of the clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
from pages import ROOT, blocks

# It needs the package index, and minutes.
pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = re.search(r'^__version__ = "(.*)"$', (ROOT / "jpipe" / "__init__.py").read_text(), flags=re.M)[1]


def call(*words, cwd, **options):
    variables = {
        key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH", "VIRTUAL_ENV")
    }
    result = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        **options,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the clone."""
    folder = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jpipe", folder / "jpipe", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
    call(*pip, "--wheel-dir", folder / "dist", ".", cwd=folder)
    (path,) = (folder / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel and what it asks for, nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", folder, cwd=folder)
    interpreter = folder / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    call(interpreter, *pip, wheel, cwd=folder)
    return interpreter


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    assert wheel.name.startswith(f"jpipe_jax-{VERSION}-")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"jpipe", f"jpipe_jax-{VERSION}.dist-info"}
    packed = {name for name in names if name.startswith("jpipe/")}
    present = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jpipe").glob("**/*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert packed == present
    metadata = zipfile.ZipFile(wheel).read(f"jpipe_jax-{VERSION}.dist-info/METADATA")
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n".encode() in metadata


def test_the_program_of_the_readme_runs(python, tmp_path):
    (program,) = (b.text for b in blocks(ROOT / "README.md") if b.language == "python")
    printed = call(python, "-c", program, cwd=tmp_path, timeout=600)
    assert float(printed) < 1


def test_what_needs_no_extra_runs_without_one(python, tmp_path):
    installed = call(python, "-m", "pip", "list", cwd=tmp_path)
    assert "matplotlib" not in installed.lower() and "pytest" not in installed.lower()
    draw = ("-m", "jpipe.draw", "gpipe", "--stages", "2", "--microbatches", "4")
    assert "bubble" in call(python, *draw, cwd=tmp_path)
    solve = "import jpipe; print(jpipe.plan.min_max([1, 2, 3, 4, 5, 6], 2))"
    assert call(python, "-c", solve, cwd=tmp_path) == "[4]\n"


def test_a_missing_extra_is_named(python, tmp_path):
    draw = ("-m", "jpipe.draw", "gpipe", "--stages", "2", "--microbatches", "4")
    result = subprocess.run(
        [str(python), *draw, "--out", "gpipe.svg"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "extra `[plot]`" in result.stderr


def test_a_release_has_its_address_in_all_places(tmp_path):
    """The sdist and the wheel that `make dist` builds, checked by Twine."""
    pytest.importorskip("build", reason="`make dist` needs the extra `release`")
    pytest.importorskip("twine", reason="`make dist` needs the extra `release`")
    address = "https://example.org/jpipe"
    call(sys.executable, ROOT / "release" / "package.py", "--address", address, "--out", tmp_path, cwd=tmp_path)
    wheel, sdist = sorted(tmp_path.iterdir())
    assert (wheel.suffix, sdist.name) == (".whl", f"jpipe_jax-{VERSION}.tar.gz")
    metadata = zipfile.ZipFile(wheel).read(f"jpipe_jax-{VERSION}.dist-info/METADATA").decode()
    assert f"Project-URL: Issues, {address}/issues\n" in metadata
    readme = metadata.partition("\n\n")[2]
    assert f"]({address}/blob/v{VERSION}/docs/how_to/memory.md#host-memory)" in readme
    assert f"![1F1B on four stages, drawn by jpipe]({address}/raw/v{VERSION}/docs/images/" in readme
    assert not re.search(r"\]\((?!https:)", readme)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "jpipe/py.typed"} <= names
    assert not {name for name in names if name.startswith(("tests", "train", "models"))}


def test_a_release_needs_a_whole_address(tmp_path):
    program = [sys.executable, str(ROOT / "release" / "package.py"), "--out", str(tmp_path)]
    for address in ("example.org/jpipe", "https://example.org/jpipe/"):
        result = subprocess.run([*program, "--address", address], capture_output=True, text=True)
        assert result.returncode == 2 and "must begin with https://" in result.stderr
    assert not any(tmp_path.iterdir())


def test_the_recipe_for_conda_asks_for_what_the_wheel_asks_for():
    recipe = (ROOT / "release" / "meta.yaml").read_text()
    assert f'{{% set version = "{VERSION}" %}}' in recipe
    run = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    wanted = [f"python {PROJECT['requires-python']}"]
    wanted += [re.sub(r"(?<=\w)(?=[<>=!])", " ", each, count=1) for each in PROJECT["dependencies"]]
    assert re.findall(r"- (.*)", run) == wanted


def test_the_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {VERSION}\n" in citation
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()
