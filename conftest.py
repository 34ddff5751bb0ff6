"""Eight CPU devices and strict numerics for every test.

XLA reads its flags when JAX first runs, so they are set while this file is imported.
"""

import collections
import gc
import importlib.metadata
import os

import pytest

_WANTED = {
    # A test that deadlocks should die in seconds, not in XLA's minute.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 20,
    "xla_cpu_collective_call_terminate_timeout_seconds": 60,
    # Tests compile more than they compute.
    "xla_backend_optimization_level": 0,
}
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # The older emitters compile twice as fast. Later versions of XLA do not know this flag, and
    # XLA ends the process at an unknown flag.
    _WANTED["xla_cpu_use_fusion_emitters"] = "false"
_FLAGS = os.environ.get("XLA_FLAGS", "")
for _flag, _value in _WANTED.items():
    if _flag not in _FLAGS:
        _FLAGS += f" --{_flag}={_value}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()
# The training script keeps compiled programs in the home directory. Tests, and scripts that tests
# start, do not.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax  # noqa: E402

if "xla_force_host_platform_device_count" not in _FLAGS:
    jax.config.update("jax_num_cpu_devices", 8)  # it would override the user's number
jax.config.update("jax_numpy_rank_promotion", "raise")

import jpipe  # noqa: E402

# `main` of the training script calls it too, which is too late once a test has used a device.
jpipe.distributed.initialize()
# Strict dtype promotion would be good too, but Optax's Adam does not run under it:
# its bias correction raises a Python float to an int32 power.


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs of a module are of no use to the next: thousands of them slow every later test down."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked `sampled(n)`, all but every n-th are `exhaustive`."""
    seen = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            item.add_marker(pytest.mark.exhaustive)
        seen[test] += 1
