"""What several test modules use: comparing trees, states full of NaN, errors before compiling."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest


def with_nan_buffers(state, all_but: str | None = None):
    """The state with NaN in everything in flight and in every idle and unused slot."""

    def nan(a):
        if a.dtype.kind != "f":
            return a
        return jax.device_put(np.full(a.shape, np.nan, a.dtype), a.sharding)

    buffers = {
        name: values if name == all_but else jax.tree.map(nan, values)
        for name, values in state.buffers.items()
    }
    return dataclasses.replace(state, buffers=buffers)


def assert_close(got, want, dtype):
    """float64: rtol 1e-9; float32: 1e-5; both of the leaf's largest magnitude."""
    tolerance = 1e-9 if dtype == "float64" else 1e-5
    paths = jax.tree.leaves_with_path(want)
    for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(
            a,
            b,
            rtol=0,
            atol=tolerance * max(np.abs(b).max(), 1e-30),
            err_msg=jax.tree_util.keystr(path),
        )


@contextlib.contextmanager
def refused(message):
    """A ValueError with this in its message, and nothing compiled before it."""
    compiled = []

    def listen(event, duration, **_):
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(ValueError, match=message):
            yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
