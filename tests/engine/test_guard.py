"""Guards: an operation that is left out changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.engine.guard import guarded
from jpipe.lowering.lower import GUARDS, lower
from jpipe.schedules import gpipe


@pytest.mark.parametrize("policy", GUARDS)
def test_guarded(policy):
    def operation(written, read):
        return {"a": written["a"] + read}

    @jax.jit
    def run(now, a, b):
        return guarded(policy, now, operation, {"a": a}, b)

    a, b = jnp.arange(3.0), jnp.full(3, jnp.nan)
    np.testing.assert_array_equal(run(False, a, b)["a"], a)
    np.testing.assert_array_equal(run(True, a, jnp.ones(3))["a"], a + 1)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="`guard` must be one of 'cond', got 'never'"):
        lower(gpipe(2, 2), guard="never")
