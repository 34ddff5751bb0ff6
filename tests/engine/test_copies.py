"""Sums over the copies of a stage, by permutes as on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jpipe
from jpipe.engine.copies import CopyRing
from jpipe.mesh import STAGE


def ring_of(group, position):
    ranks = np.zeros(8, np.int32)
    ranks[group] = np.arange(len(group))
    is_member = jnp.isin(position, np.array(group))
    rank = jnp.asarray(ranks)[position]
    return CopyRing(tuple(group), 8, rank, jnp.int32(0), is_member)


@pytest.mark.parametrize("group", [[0, 1], [0, 1, 2], [5, 2, 3, 7, 0]], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (4, 3)], ids=str)
def test_a_ring_adds_what_the_devices_of_a_group_have(group, shape):
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(8, *shape)).astype(np.float32)

    def body(mine):
        position = jax.lax.axis_index(STAGE)
        ring = ring_of(group, position)
        (total,) = ring.on_members([ring.sum(mine[0])], [mine[0]])
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


@pytest.mark.parametrize("group", [[0, 1], [5, 2, 3, 7, 0]], ids=str)
def test_a_ring_scatters_sums_and_gathers_parts(group):
    r = len(group)
    numbers = np.random.default_rng(0).normal(size=(8, r, 3)).astype(np.float32)

    def body(mine):
        ring = ring_of(group, jax.lax.axis_index(STAGE))
        part = ring.scatter(lambda number: jnp.take(mine[0], number, axis=0))
        return part[None], ring.gather(part)[None]

    split = PartitionSpec(STAGE)
    mesh = jpipe.make_mesh(stage=8)
    function = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=(split, split))
    parts, gathered = map(np.asarray, jax.jit(function)(jnp.asarray(numbers)))
    want = numbers[group].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(parts[group], want, rtol=1e-5, atol=1e-6)
    for d in group:
        np.testing.assert_array_equal(gathered[d], parts[group])
