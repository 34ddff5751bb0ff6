"""Eight CPU devices and strict numerics for every test.

XLA reads its flags when JAX first uses a device, so they are set while this file is imported.
"""

import collections
import functools
import gc
import os
import random
import time
from typing import Any

import pytest

# JAX reads this one when it is imported. The training script keeps compiled programs in the home
# directory. Tests, and scripts that tests start, do not.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import chex  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import cache_key, compiler  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

import jpipe  # noqa: E402
from jpipe.layers.quick_jit import quick_options  # noqa: E402

_WANTED = {
    # A test that deadlocks should die in seconds, not in XLA's minute.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 20,
    "xla_cpu_collective_call_terminate_timeout_seconds": 60,
    # Tests compile more than they compute.
    **quick_options("cpu"),
}
_FLAGS = os.environ.get("XLA_FLAGS", "")
for _flag, _value in _WANTED.items():
    if _flag not in _FLAGS:
        _FLAGS += f" --{_flag}={str(_value).lower()}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

if "xla_force_host_platform_device_count" not in _FLAGS:
    chex.set_n_cpu_devices(8)  # it would replace the user's number
jax.config.update("jax_numpy_rank_promotion", "raise")

# `main` of the training script calls it too, which is too late once a test has used a device.
jpipe.distributed.initialize()
# JAX reads the flags here. Programs that tests start choose the number of their devices themselves.
jax.devices()
os.environ["XLA_FLAGS"] = _FLAGS.strip()
# Strict dtype promotion would be good too, but Optax's Adam does not run under it:
# its bias correction raises a Python float to an int32 power.


# A third of the seconds of XLA go to programs that this process has compiled before. JAX's cache on disk costs as much
# as it saves, so executables are kept as they are, by JAX's key of that cache.
_executables: dict[str, Any] = {}


def _compiled_once(compile_program):
    def compile_once(backend, module, devices, options, host_callbacks):
        if host_callbacks:  # the executable holds the Python functions
            return compile_program(backend, module, devices, options, host_callbacks)
        key = cache_key.get(module, np.array(list(devices)), options, backend)
        if key not in _executables:
            _executables[key] = compile_program(backend, module, devices, options, host_callbacks)
        return _executables[key]

    return compile_once


# The names are private: without them the tests take longer.
if hasattr(compiler, "backend_compile_and_load") and hasattr(cache_key, "get"):
    compiler.backend_compile_and_load = _compiled_once(compiler.backend_compile_and_load)
# JAX makes a context of MLIR for every program, which takes longer than to lower a small program.
_contexts = functools.cache(getattr(mlir, "make_ir_context", object))
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = _contexts


@pytest.fixture
def forget_executables():
    """A function after which an executable lives only if something else than these tests holds it."""
    return _executables.clear


_PROGRAMS_KEPT = 500


@pytest.fixture(autouse=True)
def _forget_programs():
    """Thousands of compiled programs slow every later test down. Each takes dozens of the 65,530 areas of memory that
    Linux gives a process, and without one XLA ends the process.
    """
    yield
    if len(_executables) > _PROGRAMS_KEPT:
        _executables.clear()
        _contexts.cache_clear()
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish():
    """Most objects are modules and tests, which stay. The garbage collector looks at them no more, and less often at
    the others.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


_UNTIL = os.environ.get("JPIPE_EXHAUSTIVE_UNTIL", "inf")


def pytest_runtest_setup(item):
    """On a slow machine `.ci/run` leaves out the last exhaustive tests, and says so."""
    if item.get_closest_marker("exhaustive") and time.time() > float(_UNTIL):
        pytest.skip("its time is over (JPIPE_EXHAUSTIVE_UNTIL)")


_SHARE_OF_EXHAUSTIVE = 10


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items):
    """Marks most cases of a test marked `sampled(n)`.

    Every n-th case keeps the marks of the test. Of the others every tenth is `exhaustive`, and the rest are `slow`; all
    are `exhaustive` with `sampled(n, others="exhaustive")`. All are `slow` if the test is `exhaustive`.

    Of a test marked `first_case`, the first case without such a mark keeps its marks, and the others are `exhaustive`.
    """
    seen, others = collections.Counter(), collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            rare = item.get_closest_marker("exhaustive") or (
                others[test] % _SHARE_OF_EXHAUSTIVE and mark.kwargs.get("others") != "exhaustive"
            )
            item.add_marker("slow" if rare else "exhaustive")
            others[test] += 1
        seen[test] += 1
    begun = set()
    for item in items:
        if item.get_closest_marker("first_case") and not {"slow", "exhaustive"} & {
            mark.name for mark in item.iter_markers()
        }:
            test = item.nodeid.partition("[")[0]
            if test in begun:
                item.add_marker("exhaustive")
            begun.add(test)
    if _UNTIL != "inf":
        _shuffle(items)


def _shuffle(items):
    """Every run leaves out other tests. The tests of a file stay together; all processes find the same order."""
    files = collections.defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order = list(files)
    random.Random(_UNTIL).shuffle(order)
    items[:] = [item for path in order for item in files[path]]
