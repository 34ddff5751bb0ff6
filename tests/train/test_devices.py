"""Compiled programs that a later run loads."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from train.devices import cache_compilations, prepare_cpu

prepare_cpu(2)
cache_compilations(None if sys.argv[1] == "none" else sys.argv[1])

import jax

loaded = []
jax.monitoring.register_event_listener(
    lambda event, **_: loaded.append(event) if event.endswith("/cache_hits") else None
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.eye(3))), len(loaded) > 0)
"""


def run(folder, warns=False, **environment):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    variables |= {"PYTHONPATH": ".", "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("its entry is replaced" in done.stderr) == warns, done.stderr
    return done.stdout.split()


def test_the_second_run_loads_what_the_first_has_compiled(tmp_path):
    folder = tmp_path / "made" / "when needed"
    assert run(folder) == ["3.0", "False"]
    assert any(folder.iterdir())
    assert run(folder) == ["3.0", "True"]


@pytest.mark.exhaustive
def test_an_entry_that_a_killed_run_has_left_incomplete_is_replaced(tmp_path):
    run(tmp_path)
    entries = {path: path.read_bytes() for path in tmp_path.glob("*-cache")}
    for length in (0, 1, 300):
        for path, content in entries.items():
            path.write_bytes(content[:length])
        assert run(tmp_path, warns=True) == ["3.0", "False"]
        assert all(len(path.read_bytes()) > 300 for path in entries)
    assert run(tmp_path) == ["3.0", "True"]


def test_the_home_directory_is_found(tmp_path):
    run("~/programs", HOME=str(tmp_path))
    assert any((tmp_path / "programs").iterdir())


@pytest.mark.exhaustive
def test_no_folder_and_a_folder_that_the_user_has_named_to_jax(tmp_path):
    assert run("none", JAX_COMPILATION_CACHE_DIR="") == ["3.0", "False"]
    run(tmp_path / "ours", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    assert any((tmp_path / "theirs").iterdir()) and not (tmp_path / "ours").exists()
