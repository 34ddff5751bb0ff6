"""Lookups, logits and the cross-entropy on parts of a vocabulary equal the plain ones, gradients included."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jpipe
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


# -- Logits that are never whole


def numbers(*shape, dtype=np.float64):
    return jnp.asarray(RNG.normal(size=shape), dtype)


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
@pytest.mark.parametrize("shape", [(7,), (3, 6), (2, 2, 5)])
def test_chunks_equal_the_whole(shape, chunk):
    with jax.enable_x64(True):
        x, table, weights = numbers(*shape, D), numbers(V, D), numbers(*shape)
        labels = jnp.asarray(RNG.integers(-1, V, shape))

        def in_chunks(x, table):
            return jnp.sum(weights * vocabulary.chunked_cross_entropy(x, table, labels, chunk=chunk))

        def whole(x, table):
            log_probabilities = jax.nn.log_softmax(x @ table.T)
            picked = jnp.take_along_axis(log_probabilities, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
            return jnp.sum(weights * jnp.where(labels < 0, 0, -picked))

        got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, table) for f in (in_chunks, whole))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, want)


def arrays(jaxpr):
    """All arrays of a jaxpr, with those of the loops in it."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in eqn.outvars)
        for value in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
                yield from arrays(getattr(value, "jaxpr", value))


def test_logits_are_never_whole_and_sums_are_in_float32():
    length, num_tokens, dim = 64, 96, 8
    x, table = numbers(2, length, dim, dtype=jnp.bfloat16), numbers(num_tokens, dim, dtype=jnp.bfloat16)
    labels = jnp.zeros((2, length), jnp.int32)

    def loss(x, table):
        return vocabulary.chunked_cross_entropy(x, table, labels).mean()

    avals = [*arrays(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, table).jaxpr)]
    # A chunk has 6 of 64 positions: 12 chunks, for 96 / 8 times as many logits as numbers of `x`.
    assert max(a.size for a in avals) <= 2 * max(6 * num_tokens, length * dim)
    gradients = jax.grad(loss, (0, 1))(x, table)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2
    assert {a.dtype.name for a in avals if a.shape == table.shape} == {"float32", "bfloat16"}


class Words(nnx.Module):
    """A language model that returns its loss."""

    def __init__(self, *, rngs):
        self.embedding = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(3)])

    def __call__(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return vocabulary.chunked_cross_entropy(x, self.embedding.embedding[...], labels, chunk=3).mean()


@pytest.mark.parametrize("axes", [{}, pytest.param({"model": 2}, marks=pytest.mark.exhaustive)])
def test_chunks_in_a_pipeline(axes):
    tokens = RNG.integers(0, V, (4, 9), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    graph, params = nnx.split(Words(rngs=nnx.Rngs(0)))

    def plain_loss(params):
        model = nnx.merge(graph, params)
        x = model.embedding(batch["tokens"])
        for block in model.blocks:
            x = x + jnp.tanh(block(x))
        return optax.softmax_cross_entropy_with_integer_labels(model.embedding.attend(x), batch["labels"]).mean()

    table, mesh = jpipe.schedules.one_f_one_b(2, 2), jpipe.make_mesh(stage=2, **axes)
    pipe = jpipe.Pipeline(Words(rngs=nnx.Rngs(0)), loss=None, optimizer=optax.sgd(1.0), schedule=table, mesh=mesh)
    state = pipe.init(jax.random.key(0), batch)
    before = pipe.get_params(state)
    state, metrics = pipe.step(state, batch)
    value, gradient = jax.value_and_grad(plain_loss)(params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    changes = jax.tree.map(np.subtract, before, pipe.get_params(state))
    for a, b in zip(jax.tree.leaves(changes), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (4, D + 1)}, r"takes `x` \[\.\.\., T, D\].*got shapes \(4, 6\), \(11, 5\) and \(4,\)"),
        ({"labels": (3,)}, r"got shapes \(4, 5\), \(11, 5\) and \(3,\)"),
        ({"x": (D,), "labels": ()}, "takes `x`"),
        ({"dtype": jnp.float32}, "`labels` must be integers"),
        ({"chunk": 0}, "`chunk` must be an integer of at least 1"),
        ({"chunk": 2.0}, "`chunk` must be an integer of at least 1"),
    ],
)
def test_wrong_arguments_of_chunks(change, message):
    given = {"x": (4, D), "labels": (4,), "dtype": jnp.int32, "chunk": None} | change
    labels = jnp.zeros(given["labels"], given["dtype"])
    with pytest.raises(ValueError, match=message):
        vocabulary.chunked_cross_entropy(jnp.ones(given["x"]), jnp.ones((V, D)), labels, chunk=given["chunk"])
    with vocabulary.splitting("stage", 2, {V: 2 * V}), pytest.raises(vocabulary.VocabularyError, match="takes a whole"):
        vocabulary.chunked_cross_entropy(jnp.ones((4, D)), jnp.ones((V, D)), jnp.zeros(4, int))
