"""Lookups, logits and the cross-entropy on parts of a vocabulary equal the plain ones, gradients included."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jpipe import vocabulary

V, D = 11, 5
RNG = np.random.default_rng(0)
TOKENS, LABELS = RNG.integers(0, V, (2, 2, 4), dtype=np.int32)


def plain(embedding, head):
    x = jnp.tanh(jnp.take(embedding, TOKENS, axis=0))
    logits = x @ head.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
    return jnp.sum(losses**2), (losses, logits.argmax(axis=-1), logits)


def split(embedding, head):
    x = jnp.tanh(vocabulary.lookup(embedding, TOKENS))
    logits = vocabulary.logits(x, head)
    losses = vocabulary.cross_entropy(logits, LABELS)
    whole = logits.gathered() if hasattr(logits, "gathered") else logits
    return jnp.sum(losses**2), (losses, vocabulary.argmax(logits), whole)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_equal_the_whole(num_parts):
    """11 tokens: the last of 4 parts is shorter than the others."""
    mesh = jax.make_mesh((num_parts,), ("stage",), axis_types=(AxisType.Auto,))
    tables = RNG.normal(size=(2, V, D)).astype(np.float32)
    tables[1, 7] = tables[1, 2]  # two equal logits on different devices
    rows = -(-V // num_parts)
    padded = np.pad(tables, ((0, 0), (0, rows * num_parts - V), (0, 0)))

    def on_device(embedding, head):
        with vocabulary.splitting("stage", num_parts, {rows: V}) as splitting:
            result = jax.value_and_grad(split, (0, 1), has_aux=True)(embedding, head)
        assert splitting.used
        return result

    rows_of, whole = PartitionSpec("stage"), PartitionSpec()
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(rows_of, rows_of),
        out_specs=((whole, whole), (rows_of, rows_of)),
        check_vma=False,
    )
    got = jax.jit(run)(*padded)
    want = jax.value_and_grad(plain, (0, 1), has_aux=True)(*tables)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (got[0], [g[:V] for g in got[1]]),
        (want[0], list(want[1])),
    )
    for gradient in got[1]:
        np.testing.assert_array_equal(gradient[V:], 0)


def test_whole_arrays_give_the_usual_functions():
    tables = RNG.normal(size=(2, V, D)).astype(np.float32)
    jax.tree.map(np.testing.assert_array_equal, split(*tables), plain(*tables))


def test_large_logits_do_not_overflow():
    logits = jnp.array([[1e4, -1e4, 0.0, 1e4]])
    mesh = jax.make_mesh((2,), ("stage",), axis_types=(AxisType.Auto,))

    def on_device(part):
        values = vocabulary.SplitLogits(part, 4, "stage", 2)
        return vocabulary.cross_entropy(values, jnp.array([1]))

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=PartitionSpec(None, "stage"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    want = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([1]))
    np.testing.assert_allclose(run(logits), want, rtol=1e-6)


@pytest.mark.parametrize("use", [jnp.mean, lambda logits: logits.mean(), lambda logits: jnp.exp(logits)])
def test_other_functions_refuse_split_logits(use):
    logits = vocabulary.SplitLogits(jnp.ones((2, 3)), V, "stage", 4)
    assert (logits.shape, logits.ndim) == ((2, V), 2)
    with pytest.raises(TypeError, match="split over the 4 devices of the axis 'stage'"):
        use(logits)


def test_a_table_is_a_matrix():
    with pytest.raises(ValueError, match=r"must be a matrix \[V, D\]"):
        vocabulary.lookup(jnp.ones(3), TOKENS)


def test_labels_are_not_looked_up_where_the_compiler_splits_logits():
    """XLA for TPUs cannot do that if rows and vocabulary are split; loss and gradient are the same."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    logits = jnp.asarray(RNG.normal(size=(2, 4, V)), jnp.float32)

    def loss(logits):
        return vocabulary.cross_entropy(logits, LABELS).mean()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(logits)
    assert "gather" not in str(traced) and "scatter" not in str(traced)
    got = jax.jit(jex.jaxpr_as_fun(traced))(logits)
    want = jax.value_and_grad(loss)(logits)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
