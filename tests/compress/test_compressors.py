"""Each compressor by itself: what is sent, what arrives, and what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jpipe.compress import (
    AlongAxis,
    Cast,
    Factors,
    PowerSGD,
    Quantize,
    StreamingPCA,
    Threshold,
    TopK,
    compress_gradients,
    parse,
)

ALL = {
    "bfloat16": Cast(),
    "float8": Cast("float8_e4m3fn"),
    "8 bits": Quantize(8, block=32),
    "4 bits": Quantize(4, block=32),
    "stochastic": Quantize(8, block=32, stochastic=True),
    "threshold": Threshold(0.02),
    "bitmap": Threshold(0.2),
    "dense": Threshold(0.9),
    "all": Threshold(1.0),
    "top": TopK(0.05),
    "powersgd": PowerSGD(2),
    "pca": StreamingPCA(2),
}
PROJECTIONS = [name for name in ALL if name not in ("stochastic", "pca")]
SHAPE = (24, 30)


def array(seed=0, shape=SHAPE, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@functools.cache
def compiled(compressor):
    """JAX forgets what it has compiled of a bound method as soon as the method is gone."""
    return jax.jit(compressor.encode), jax.jit(compressor.decode)


def sent(compressor, x, state=None):
    """What arrives, and the next state."""
    state = compressor.init(x) if state is None else state
    encode, decode = compiled(compressor)
    wire, state = encode(x, state)
    return np.asarray(decode(wire, x)), state


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sampled(2)
def test_shapes_of_a_wire_are_known(name, dtype):
    compressor, x = ALL[name], jnp.asarray(array(), dtype)
    wire, state = jax.jit(compressor.encode)(x, compressor.init(x))
    want = {n: (a.shape, a.dtype) for n, a in compressor.wire_of(x).items()}
    assert {n: (a.shape, a.dtype) for n, a in wire.items()} == want
    assert compressor.wire_bytes(x) == sum(a.nbytes for a in wire.values())
    shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), s) for s in (state, compressor.init(x))]
    assert shapes[0] == shapes[1]
    decoded = compressor.decode(wire, x)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_what_arrives_arrives_again(name):
    once, state = sent(ALL[name], array())
    again, _ = sent(ALL[name], once, state)
    # The scale of a block is a quotient, rounded.
    rounding = 3e-7 if isinstance(ALL[name], Quantize) else 0
    # Matrix products are rounded.
    absolute = 1e-5 if isinstance(ALL[name], PowerSGD) else 0
    np.testing.assert_allclose(again, once, rtol=rounding, atol=absolute)
    assert (once != 0).any()


@pytest.mark.parametrize("name", ["all", "powersgd", "pca"])
def test_nothing_is_lost(name):
    """A density of 1, and the full rank."""
    x = array(shape=(6, 9))
    compressor = {"powersgd": PowerSGD(6), "pca": StreamingPCA(6)}.get(name, ALL[name])
    np.testing.assert_array_equal(sent(compressor, x)[0], x)


# -- Rounding


@pytest.mark.parametrize("bits,largest", [(8, 127), (4, 7)])
@pytest.mark.parametrize("size", [64, 77])
def test_quantisation_is_within_half_a_step(bits, largest, size):
    x, block = array(shape=(size,)) * 100, 32
    got, _ = sent(Quantize(bits, block), x)
    for i in range(0, size, block):
        step = np.abs(x[i : i + block]).max() / largest
        assert np.abs(got - x)[i : i + block].max() <= step / 2 * (1 + 1e-5)
        assert np.abs(got - x)[i : i + block].max() > step / 8  # it does round


def test_stochastic_rounding_is_right_on_average():
    compressor, x = Quantize(4, block=16, stochastic=True), array(shape=(16,))
    step, number = np.abs(x).max() / 7, 2000
    keys = jax.random.split(jax.random.key(1), number)

    def draw(key):
        state = compressor.init(x)._replace(key=jax.random.key_data(key))
        return compressor.decode(compressor.encode(x, state)[0], x)

    draws = np.asarray(jax.jit(jax.vmap(draw))(keys))
    assert np.abs(draws - x).max() < step
    # Four standard errors of a mean of draws that are up to a step apart.
    assert np.abs(draws.mean(0) - x).max() < 4 * step / 2 / np.sqrt(number)
    _, state = sent(compressor, x)
    assert (np.asarray(state.key) != np.asarray(compressor.init(x).key)).any()


def test_a_cast_keeps_infinities_and_its_range():
    x = np.array([1.0, -1e9, np.inf, np.nan, 448.0], "float32")
    got, _ = sent(Cast("float8_e5m2"), x)
    np.testing.assert_array_equal(got, np.array([1, -57344, np.inf, np.nan, 448], "f"))
    np.testing.assert_array_equal(sent(Cast("float8_e4m3fn"), x)[0][[0, 1, 4]], [1, -448, 448])


@pytest.mark.parametrize("name", ["8 bits", "4 bits", "threshold", "top", "powersgd", "pca"])
def test_zeros_stay_zeros(name):
    zeros, state = np.zeros(SHAPE, "float32"), None
    for _ in range(3):
        got, state = sent(ALL[name], zeros, state)
        np.testing.assert_array_equal(got, zeros)
    # And what comes after them arrives.
    x, error = array(), []
    for _ in range(30):
        got, state = sent(ALL[name], x, state)
        error.append(np.abs(got - x).max())
    assert error[-1] < np.abs(x).max() * (1 + 1e-6) and (got != 0).any()


@pytest.mark.parametrize("name", ["8 bits", "4 bits", "threshold", "bitmap", "dense", "top"])
def test_the_receiver_sees_a_nan(name):
    x = array()
    x[3, 4] = np.nan
    assert np.isnan(sent(ALL[name], x)[0]).any()


# -- Sparse


@pytest.mark.parametrize("compressor", [Threshold(0.03), TopK(0.03), Threshold(0.4), TopK(0.4)])
def test_the_largest_entries_arrive_exactly(compressor):
    x = array()
    kept = int(compressor.density * x.size)
    smallest = np.sort(np.abs(x).ravel())[-kept]
    got, _ = sent(compressor, x)
    np.testing.assert_array_equal(got, np.where(np.abs(x) >= smallest, x, 0))


def test_a_wire_takes_the_smaller_form():
    wires = {d: set(Threshold(d, room=1).wire_of(np.zeros(3200, "f"))) for d in (0.02, 0.05, 0.99)}
    assert wires == {
        0.02: {"values", "indices"},  # 64 indices, 100 words
        0.05: {"values", "bitmap"},
        0.99: {"values"},
    }


def test_a_threshold_is_kept_until_it_is_old():
    compressor, x = Threshold(0.1, every=3), array(shape=(1000,))
    state, thresholds = compressor.init(x), []
    for scale in (1.0, 1.1, 1.2, 1.3):
        _, state = sent(compressor, scale * x, state)
        thresholds.append(float(state.threshold))
    exact = np.sort(np.abs(x))[-100]
    np.testing.assert_allclose(thresholds, exact * np.array([1, 1, 1, 1.3]), rtol=1e-6)


def test_the_density_stays_near_on_like_arrays():
    compressor, state = Threshold(0.05, every=50), None
    densities = []
    for seed in range(20):
        _, state = sent(compressor, array(seed, (4000,)), state)
        densities.append(float(state.density))
    assert 0.025 < min(densities) < max(densities) < 0.1
    assert len(set(densities)) > 1


def test_entries_without_room_are_counted_and_the_threshold_is_renewed():
    compressor, x = Threshold(0.1, every=1000, room=1.5), array(shape=(1000,))
    _, state = sent(compressor, x)
    got, state = sent(compressor, 10 * x, state)
    passing = int((np.abs(10 * x) >= np.sort(np.abs(x))[-100]).sum())
    assert (got != 0).sum() == 150
    assert int(state.overflow) == passing - 150
    assert int(state.age) == 0
    got, state = sent(compressor, 10 * x, state)
    assert (got != 0).sum() == 100 and int(state.overflow) == passing - 150
    np.testing.assert_allclose(compressor.counts(state)["density"], 0.1)


def test_the_count_of_entries_without_room_does_not_wrap():
    compressor, most = Threshold(0.1, every=1000), 2**31 - 1
    _, state = sent(compressor, array(shape=(1000,)))
    state = state._replace(overflow=jnp.int32(most - 5))
    _, state = sent(compressor, 10 * array(shape=(1000,)), state)
    assert int(state.overflow) == most


def test_equal_entries():
    got, state = sent(Threshold(0.1), np.ones(100, "f"))
    assert got.sum() == 15 and int(state.overflow) == 85  # all pass, and there is room for 15
    assert sent(TopK(0.1), np.ones(100, "f"))[0].sum() == 10


def test_only_a_renewed_threshold_sorts():
    compressor, x = Threshold(0.1), np.zeros(1000, "f")
    jaxpr = jax.make_jaxpr(compressor.encode)(x, compressor.init(x))
    outside = {equation.primitive.name for equation in jaxpr.eqns}
    assert not outside & {"sort", "top_k", "approx_top_k"} and "cond" in outside
    inside = str([e.params["branches"] for e in jaxpr.eqns if e.primitive.name == "cond"])
    assert "top_k" in inside


@pytest.mark.first_case
@pytest.mark.parametrize("compressor", [Threshold(0.05), TopK(0.05), Threshold(0.3), TopK(0.9), TopK(1.0)])
def test_the_gradient_is_that_of_a_mask(compressor):
    x, weights = array(), array(1)
    wire, _ = compressor.encode(x, compressor.init(x))
    mask = np.asarray(compressor.decode(wire, x)) != 0
    want = jax.grad(lambda x: (jnp.sin(jnp.where(mask, x, 0)) * weights).sum())(x)
    arrived = compressor.decode(wire, x)
    gradient = jax.grad(lambda y: (jnp.sin(y) * weights).sum())(arrived)
    back = compressor.encode_at(gradient, compressor.support(wire))
    assert {n: a.shape for n, a in back.items()} == {n: a.shape for n, a in wire.items()}
    np.testing.assert_array_equal(compressor.decode(back, x), want)


# -- Low rank


def test_powersgd_finds_a_matrix_of_its_rank():
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((40, 3)), rng.standard_normal((3, 50))
    x = (left @ right).astype("float32").reshape(8, 5, 50)  # dims but the last are rows
    compressor, state = PowerSGD(3), None
    for _ in range(2):
        got, state = sent(compressor, x, state)
    np.testing.assert_allclose(got, x, atol=1e-4)


def test_powersgd_nears_the_best_approximation():
    x, compressor, state = array(shape=(40, 50)), PowerSGD(4), None
    u, s, v = np.linalg.svd(x)
    for _ in range(300):
        got, state = sent(compressor, x, state)
    best = (u[:, :4] * s[:4]) @ v[:4]
    np.testing.assert_allclose(got, best, atol=2e-3)


def test_streaming_pca_learns_the_leading_vectors():
    """Rank 3 of gradients with singular values 10, 6, 3, 0.3, ...: batches of 256 rows in parts of 32, 40 runs.

    The expected figures are of one run of an independent program, in NumPy, of the recursion as the paper has it.
    """
    num_runs, num_rows, part, (a, b) = 40, 256, 32, (16, 12)
    values, rng = np.array([10, 6, 3, 0.3, 0.2, 0.1]), np.random.default_rng(0)
    compressors = [StreamingPCA(3, seed) for seed in range(num_runs)]
    like = jax.ShapeDtypeStruct((a, b), np.float32)
    first = [c.init(like)._replace(sigma=jnp.ones(3)) for c in compressors]
    factors = jax.tree.map(lambda *of_runs: jnp.stack(of_runs), *first)
    left, right = (np.linalg.qr(rng.standard_normal((num_runs, n, len(values))))[0] for n in (a, b))
    layers = (left * values) @ right.transpose(0, 2, 1)
    update = jax.jit(jax.vmap(compressors[0].update, in_axes=(0, 0, 0, None)))
    errors = {}
    for batch in range(1, 11):
        x = rng.standard_normal((num_runs, num_rows, a))
        d = x @ layers
        for i in range(num_rows // part):
            rows = slice(part * i, part * (i + 1))
            factors = update(factors, x[:, rows].astype("f"), d[:, rows].astype("f"), i)
        exact = x.transpose(0, 2, 1) @ d / num_rows
        difference = jax.vmap(Factors.matrix)(factors) - exact
        norms = (np.linalg.norm(m, axis=(1, 2)) for m in (difference, exact))
        errors[batch] = np.divide(*norms)
    for batch, expected in {1: 0.174, 2: 0.107, 5: 0.094, 10: 0.054}.items():
        assert errors[batch].min() < expected < errors[batch].max()
    singular = np.linalg.svd(exact)[1]
    best = np.sqrt((singular[:, 3:] ** 2).sum(1) / (singular**2).sum(1))
    np.testing.assert_allclose(np.median(best), 0.031, rtol=0.05)
    assert (best < errors[10]).all()
    assert np.median(errors[10]) < 0.5 * np.median(errors[1])
    sigma = np.median(np.sort(factors.sigma, axis=1)[:, ::-1], axis=0)
    np.testing.assert_allclose(sigma, [10.7, 5.9, 3.0], rtol=0.1)
    assert sum(n.size for n in factors) == num_runs * 3 * (a + b + 1)


def test_streaming_pca_is_its_definition():
    """One update by plain numpy in float64, signs and all."""
    with jax.enable_x64(True):
        compressor, rng = StreamingPCA(2), np.random.default_rng(3)
        x, d = rng.standard_normal((5, 7)), rng.standard_normal((5, 6))
        factors = Factors(*(np.asarray(a) for a in compressor.init(np.zeros((7, 6)))))
        factors = factors._replace(sigma=np.array([0.7, -1.3]))
        got = compressor.update(factors, x, d, 3)

        def basis(columns):
            q, r = np.linalg.qr(columns)
            return q * np.sign(np.diag(r))

        w, s = 4 / 5, 5
        X = basis(w * factors.x + x.T @ (d @ factors.d) / (5 * s) / factors.sigma)
        D = basis(w * factors.d + d.T @ (x @ X) / (5 * s) / factors.sigma)
        sigma = w * factors.sigma + ((d @ D) * (x @ X)).sum(0) / (5 * s)
        for a, b in zip(got, (X, D, sigma)):
            np.testing.assert_allclose(a, b, rtol=1e-10)


# -- Error feedback


@pytest.mark.parametrize(
    "name",
    ["8 bits", "stochastic", "float8", "threshold", "bitmap", "top", "powersgd", "pca"],
)
@pytest.mark.sampled(2)
def test_errors_are_sent_later(name):
    """What was sent and the last error are the gradients, to float precision."""
    with jax.enable_x64(True):
        transform = compress_gradients(ALL[name])
        params = {"w": np.zeros((12, 14)), "b": np.zeros(5)}
        state, update = transform.init(params), jax.jit(transform.update)
        rng = np.random.default_rng(0)
        given, got = (jax.tree.map(np.zeros_like, params) for _ in range(2))
        for _ in range(300):
            gradient = {n: rng.standard_normal(a.shape) for n, a in params.items()}
            updates, state = update(gradient, state)
            given = jax.tree.map(np.add, given, gradient)
            got = jax.tree.map(np.add, got, updates)
        for n in params:
            np.testing.assert_allclose(got[n] + state.error[n], given[n], atol=1e-9)
            error = np.abs(state.error[n]).max()
            assert error < 100, error  # it does not grow without end
        assert np.abs(state.error["w"]).max() > 1e-6


def test_without_error_feedback_nothing_is_kept():
    transform = compress_gradients(TopK(0.1), error_feedback=False)
    x = {"w": array()}
    updates, state = transform.update(x, transform.init(x))
    assert state.error is None
    np.testing.assert_array_equal(updates["w"], sent(TopK(0.1), x["w"])[0])


# -- Replicas


@pytest.mark.first_case
@pytest.mark.parametrize("name", ALL)
def test_replicas_get_one_mean(name):
    """Bit for bit the same on all; what each has sent is its error's counterpart."""
    compressor, P = ALL[name], 4
    xs = np.stack([array(seed) for seed in range(P)])
    mesh = Mesh(np.array(jax.devices()[:P]), "data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    def exchange(x):
        state = compressor.init(x[0])
        mean, own, state = compressor.mean_over(x[0], state, AlongAxis("data", P))
        return mean[None], own[None]

    means, own = map(np.asarray, exchange(xs))
    for mean in means[1:]:
        np.testing.assert_array_equal(mean, means[0])
    if name == "powersgd" or name == "pca":
        np.testing.assert_array_equal(own, means)
        alone, _ = sent(compressor, xs.mean(0))
        np.testing.assert_allclose(means[0], alone, atol=1e-5)
    else:
        want = [sent(compressor, x)[0] for x in xs]
        np.testing.assert_array_equal(own, want)
        np.testing.assert_allclose(means[0], np.mean(want, axis=0), rtol=1e-6, atol=1e-6)


def test_bytes_between_replicas():
    like = jax.ShapeDtypeStruct((100, 100), np.float32)
    assert Cast().exchanged_bytes(like, 4) == 3 * 20_000
    assert PowerSGD(1).exchanged_bytes(like, 4) == 1.5 * 4 * 200
    # Means are taken of products in float32, and of what has no smaller factors as it is.
    short = jax.ShapeDtypeStruct((100, 100), jnp.bfloat16)
    assert PowerSGD(1).exchanged_bytes(short, 4) == 1.5 * 4 * 200
    assert PowerSGD(50).exchanged_bytes(short, 4) == 1.5 * 2 * 10_000
    assert Threshold(0.005, room=1).wire_bytes(like) == 50 * 8


# -- Texts, and what is refused


@pytest.mark.parametrize(
    "text,want",
    [
        ("cast", Cast()),
        ("cast:dtype=float8_e5m2", Cast("float8_e5m2")),
        ("quantize:bits=4,stochastic=true", Quantize(4, stochastic=True)),
        ("threshold:density=0.01,every=100", Threshold(0.01, 100)),
        ("topk:density=0.01", TopK(0.01)),
        ("powersgd:rank=2", PowerSGD(2)),
        ("streaming_pca:rank=3,seed=1", StreamingPCA(3, 1)),
    ],
)
def test_texts(text, want):
    assert parse(text) == want


@pytest.mark.parametrize(
    "text,message",
    [
        ("powersdg:rank=2", "no compressor 'powersdg'.*Did you mean 'powersgd'"),
        ("topk", "topk needs a value for density"),
        ("topk:densty=0.1", "no option 'densty=0.1'.*Did you mean 'density'"),
        ("topk:density", "no option 'density'"),
        ("topk:density=much", "`density` of topk must be a number, got 'much'"),
        ("quantize:bits=8.0", "`bits` of quantize must be a whole number"),
        ("quantize:stochastic=yes", "must be true or false"),
        ("topk:density=0.1,density=0.2", "topk has `density` twice"),
        (None, "named by a text such as 'powersgd:rank=4', got None"),
        ("topk:density=0", "`density` of TopK must be above 0"),
    ],
)
def test_wrong_texts(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Threshold(0), "above 0 and at most 1, got 0"),
        (lambda: Threshold(1.5), "above 0 and at most 1, got 1.5"),
        (lambda: TopK(float("nan")), "above 0 and at most 1"),
        (lambda: Threshold(0.1, every=0), "`every` of Threshold must be at least 1"),
        (lambda: Threshold(0.1, room=0.5), "`room` of Threshold must be at least 1"),
        (lambda: Quantize(3), "`bits` of Quantize must be 8 or 4, got 3"),
        (lambda: Quantize(8, block=0), "`block` of Quantize must be at least 1"),
        (
            lambda: Threshold("0.1"),
            "`density` of Threshold must be a number, got '0.1'",
        ),
        (lambda: TopK(True), "`density` of TopK must be a number, got True"),
        (lambda: Threshold(0.1, every=2.5), "must be a whole number, got 2.5"),
        (lambda: Threshold(0.1, room="big"), "must be a number, got 'big'"),
        (lambda: Quantize(8.0), "`bits` of Quantize must be a whole number"),
        (lambda: Quantize(8, stochastic="yes"), "must be True or False, got 'yes'"),
        (lambda: PowerSGD(None), "`rank` of PowerSGD must be a whole number, got None"),
        (lambda: StreamingPCA(2, seed="a"), "`seed` of StreamingPCA must be a whole"),
        (lambda: Cast(None), "must be a floating-point type, got None"),
        (lambda: Cast("float4_e2m1fn"), "NaN.*float4_e2m1fn does not"),
        (lambda: Cast("float8_e8m0fnu"), "negative numbers.*float8_e8m0fnu does not"),
        (lambda: compress_gradients("topk"), "must be a compressor.*got 'topk'"),
        (lambda: PowerSGD(0), "`rank` of PowerSGD must be at least 1"),
        (lambda: StreamingPCA(0), "`rank` of StreamingPCA must be at least 1"),
        (lambda: Cast("int8"), "must be a floating-point type, got 'int8'"),
        (lambda: Cast("float9"), "must be a floating-point type, got 'float9'"),
        (lambda: PowerSGD(5).check(np.zeros((4, 9), "f")), "at most rank 4"),
        (lambda: StreamingPCA(5).check(np.zeros((4, 9), "f")), "at most rank 4"),
        (
            lambda: TopK(0.1).check(np.zeros(4, int)),
            "floating-point arrays, but the array is int",
        ),
        (lambda: TopK(0.1).check(np.zeros((4, 0), "f")), "no entries"),
        (lambda: Cast().check(jnp.zeros(4, "float8_e5m2")), "makes the array larger"),
        (
            lambda: TopK(0.1).check(jax.ShapeDtypeStruct((2**16, 2**15), "float32")),
            "indices of 32 bits",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_refused_gradient_is_named():
    with pytest.raises(ValueError, match=r"the gradient of \['w'\]"):
        compress_gradients(PowerSGD(5)).init({"w": np.zeros((4, 9), "f")})
