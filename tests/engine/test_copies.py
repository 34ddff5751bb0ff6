"""Sums over the copies of a stage, by permutes as on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.engine.copies import ring_sum
from jpipe.mesh import STAGE


@pytest.mark.parametrize("group", [[0, 1], [0, 1, 2], [5, 2, 3, 7, 0]], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (4, 3)], ids=str)
def test_a_ring_adds_what_the_devices_of_a_group_have(group, shape):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(8, *shape)).astype(np.float32)

    def body(mine):
        position = jax.lax.axis_index(STAGE)
        (total,) = ring_sum([mine[0]], group, 8, position)
        return total[None]

    split = PartitionSpec(STAGE)
    mesh = jpipe.make_mesh(stage=8)
    function = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split)
    everywhere = np.asarray(jax.jit(function)(jnp.asarray(numbers)))
    others = [d for d in range(8) if d not in group]
    np.testing.assert_array_equal(everywhere[others], numbers[others])
    got = everywhere[group]
    want = numbers[group].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
    for other in got[1:]:
        np.testing.assert_array_equal(other, got[0])
