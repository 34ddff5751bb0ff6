"""A `jax.shard_map` as equations without a mesh: it computes on a mesh and alone what it computed in JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jpipe.layers.axis_rules import AXIS_RULES, constraints_on
from jpipe.layers.backward import trace_layer
from jpipe.layers.collectives import _rounds
from jpipe.layers.equations import Equations
from jpipe.layers.mesh_free import on_mesh

MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("stage", "a", "b"), axis_types=(AxisType.Auto,) * 3)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8)).astype(np.float32)
ROWS, COLUMNS, BOTH, BACK = P("a"), P(None, "a"), P("a", "b"), P(("b", "a"))


def shift(x, axis, by=1):
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])


def loop(x):
    def turn(c, _):
        return jnp.sin(shift(c, "a")) + lax.psum(c, "a"), c

    carry, each = lax.scan(turn, x, length=3)
    return carry + each.sum(0)


def two_axes(x):  # [1, 8]
    y = lax.all_to_all(jnp.sin(x), ("b", "a"), 1, 0, tiled=True)  # [4, 2]
    z = lax.all_gather(y, ("b", "a"), axis=1, tiled=True)  # [4, 8]
    w = lax.all_to_all(z.reshape(4, 4, 2), ("b", "a"), 0, 0)  # [4, 4, 2]
    return lax.psum_scatter(z * w.reshape(4, 8), ("b", "a"), tiled=True) * x


def map_in_a_map(x):
    inner = jax.shard_map(
        lambda y: y * lax.psum(y, ("a", "b")), in_specs=P("b"), out_specs=P("b"), axis_names={"b"}, check_vma=False
    )
    return inner(jnp.sin(x))


BODIES = {
    "psum": (lambda x: x * lax.psum(x, "a"), ROWS, ROWS),
    "equal results": (lambda x: lax.psum(jnp.sin(x), "a"), ROWS, P()),
    "max": (lambda x: x - lax.stop_gradient(lax.pmax(lax.stop_gradient(x), ("a", "b"))), BOTH, BOTH),
    "gather": (lambda x: lax.all_gather(jnp.sin(x), "a", axis=1, tiled=True) * x.sum(), COLUMNS, COLUMNS),
    "scatter": (lambda x: lax.psum_scatter(x * x, "a", scatter_dimension=1, tiled=True), P(), COLUMNS),
    "all to all": (lambda x: lax.all_to_all(jnp.sin(x), "a", 1, 0, tiled=True), ROWS, COLUMNS),
    "permute": (lambda x: jnp.sin(shift(x, "a")) * x, ROWS, ROWS),
    "permute of two axes": (lambda x: jnp.sin(shift(x, ("a", "b"))) * x, P(("a", "b")), P(("a", "b"))),
    "permute of some": (lambda x: lax.ppermute(x, "a", [(1, 0)]) * x, ROWS, ROWS),
    "index": (lambda x: x * (1 + lax.axis_index("b") + 2 * lax.axis_index("a")), BACK, BACK),
    "loop": (loop, ROWS, ROWS),
    "branch": (lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda x: x * 2, x), P(("a", "b")), P(("a", "b"))),
    "over two axes": (two_axes, P(("b", "a")), P(("b", "a"))),
    "map in a map": (map_in_a_map, COLUMNS, COLUMNS),
}  # fmt: skip


def layer(name, *, checks=True, axes=("a", "b"), **options):
    """`(parameters, inputs, extra) -> outputs`, with an element-wise weight."""
    body, in_specs, out_specs = BODIES[name]
    axes = {"a"} if name == "map in a map" else set(axes)
    run = jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=checks, **options)
    return lambda p, x, extra: run(p * x)


def plain_gradients(function, p, x, g):
    """Outputs and gradients of JAX on the mesh."""
    with jax.set_mesh(MESH):

        @jax.jit
        def run(p, x, g):
            y, vjp = jax.vjp(lambda p, x: function(p, x, ()), p, x)
            return y, *vjp(g)

        return jax.tree.map(np.asarray, run(p, x, g))


def traced(function, *args):
    with constraints_on(MESH, AXIS_RULES):
        return trace_layer(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args))


def results(program, p, x, g):
    outputs, stash, _ = program.forward_and_stash([p], [x])
    grads, input_grads = program.backward([p], stash, [g])
    return outputs[0], grads[0], input_grads[0]


# JAX cannot tell that some results are equal on all devices.
UNCHECKED = ("branch", "map in a map")


@pytest.mark.parametrize("name", BODIES)
def test_alone_and_on_the_mesh(name):
    function = layer(name, checks=name not in UNCHECKED)
    p = RNG.normal(size=X.shape).astype(np.float32)
    program = traced(function, p, X)
    assert "'stage'" not in program.text
    g = RNG.normal(size=program.outputs[0].shape).astype(np.float32)
    want = plain_gradients(function, p, X, g)
    run = functools.partial(results, program)
    assert_close(jax.jit(run)(p, X, g), want, "float32")
    on_devices = jax.shard_map(run, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False)
    compiled = jax.jit(on_devices).lower(p, X, g).compile()
    assert_close(compiled(p, X, g), want, "float32")
    assert "collective-permute" not in compiled.as_text()


@pytest.mark.parametrize("name", ["psum", "loop"])
def test_equal_calls_have_equal_texts(name):
    """Whatever way the mesh is named in, and for other calls of the same function."""
    checks = name not in UNCHECKED
    ways = [{}, {"mesh": MESH}, {"mesh": MESH.abstract_mesh}, {"checks": not checks}]
    texts = {traced(layer(name, **{"checks": checks} | way), X, X).forward_equations.text() for way in ways[:3]}
    assert len(texts) == 1
    others = [traced(layer(other), X, X).forward_equations.text() for other in ("gather", "permute")]
    assert texts.isdisjoint(others)


def test_axes_and_specs_make_texts_differ():
    def text(**change):
        options = {"in_specs": ROWS, "out_specs": ROWS, "axis_names": {"a", "b"}} | change
        with on_mesh(MESH):
            return Equations.trace(lambda x: [jax.shard_map(jnp.sin, **options)(x)], X).text()

    texts = [text(), text(axis_names={"a"}), text(in_specs=P("b"), out_specs=P("b"))]
    assert len(set(texts)) == 3


def test_a_map_keeps_its_place_in_a_loop_of_the_layer():
    """A loop whose turns are mapped: the collective runs on the devices, in each turn."""

    def function(p, x, extra):
        run = jax.shard_map(lambda x: jnp.sin(x + lax.psum(x, "a")), in_specs=ROWS, out_specs=ROWS)
        return lax.scan(lambda x, w: (jax.checkpoint(run)(x * w), None), x, p)[0]

    p = RNG.normal(size=(3, 1, 8)).astype(np.float32)
    g = RNG.normal(size=X.shape).astype(np.float32)
    program = traced(function, p, X)
    run = functools.partial(results, program)
    want = plain_gradients(function, p, X, g)
    assert_close(jax.jit(run)(p, X, g), want, "float32")
    on_devices = jax.shard_map(run, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False)
    compiled = jax.jit(on_devices).lower(p, X, g).compile()
    assert_close(compiled(p, X, g), want, "float32")
    assert compiled.as_text().count(" all-reduce(") >= 2


def test_a_constraint_keeps_its_place_in_a_loop():
    def function(p, x, extra):
        def turn(x, w):
            return lax.with_sharding_constraint(jnp.sin(x * w), P("a")), None

        return lax.scan(turn, x, p)[0]

    p = RNG.normal(size=(3, 1, 8)).astype(np.float32)
    g = RNG.normal(size=X.shape).astype(np.float32)
    program = traced(function, p, X)
    run = functools.partial(results, program)
    want = plain_gradients(function, p, X, g)
    assert_close(jax.jit(run)(p, X, g), want, "float32")
    on_devices = jax.shard_map(run, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False)
    lowered = jax.jit(on_devices).lower(p, X, g)
    assert_close(lowered.compile()(p, X, g), want, "float32")
    assert lowered.as_text().count("sdy.sharding_constraint") >= 1


@pytest.mark.parametrize("size", range(1, 6))
def test_a_permute_is_all_gathers_of_pairs(size):
    """Every permutation, and every part of one, arrives; a ring of an even number takes two rounds."""
    for count in range(size + 1):
        for sources, targets in itertools.product(
            itertools.combinations(range(size), count), itertools.permutations(range(size), count)
        ):
            arrived: dict[int, int] = {}
            for groups, position in _rounds(size, tuple(zip(sources, targets)), in_pairs=True):
                for group in groups or [list(range(size))]:
                    assert size % 2 or len(group) == 2
                    arrived |= {i: group[position[i]] for i in group if position[i] >= 0}
                assert groups is None or sorted(itertools.chain(*groups)) == list(range(size))
            assert arrived == dict(zip(targets, sources))
    if size % 2 == 0:
        ring = tuple((i, (i + 1) % size) for i in range(size))
        assert len(_rounds(size, ring, in_pairs=True)) == min(2, size - 1)


@pytest.mark.first_case
@pytest.mark.parametrize("spec", [ROWS, P(("a", "b"))], ids=str)
def test_ragged_products_alone(spec):
    """`jax.vmap` does not know them over two axes, nor their gradients."""
    sizes = jnp.array([[1, 1], [2, 0]] * 2)

    def ragged(x, w, sizes):
        return lax.ragged_dot(jnp.sin(x), w, sizes.reshape(-1, 2).sum(0))

    count = 2 if spec == ROWS else 4
    x, w = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 3), (2, 3, 5)))
    sizes = sizes[:count] * (4 // count)
    run = jax.shard_map(ragged, in_specs=(spec, P(), spec), out_specs=spec, axis_names={"a", "b"}, check_vma=False)
    with constraints_on(MESH, AXIS_RULES):
        equations = Equations.trace(
            jax.value_and_grad(lambda x, w: (run(x, w, sizes) ** 2).sum(), argnums=(0, 1)), x, w
        )

    def plain(x, w):
        group = np.concatenate([np.repeat([0, 1], part) for part in np.asarray(sizes)])
        return (jnp.einsum("rd,rdf->rf", jnp.sin(x), w[group]) ** 2).sum()

    value, gradients = jax.value_and_grad(plain, argnums=(0, 1))(x, w)
    assert_close(equations(x, w), [value, *gradients], "float32")


def test_ragged_all_to_all_alone():
    """CPUs do not have it, and `jax.vmap` does not know it; on one device it is computed by its definition."""
    sizes = jnp.array([[1, 2], [0, 3]])  # from a device to a device

    def ragged(x, sizes):  # [4, 8], [1, 2]
        sent, (got,) = sizes[0], lax.all_to_all(sizes, "a", 1, 1, tiled=True)
        starts, places = jnp.cumsum(sent) - sent, jnp.cumsum(got) - got
        there = lax.all_to_all(places, "a", 0, 0, tiled=True)
        return lax.ragged_all_to_all(jnp.sin(x), jnp.ones((6, 8)), starts, sent, there, got, axis_name="a")

    x = RNG.normal(size=(8, 8)).astype(np.float32)
    run = jax.shard_map(ragged, in_specs=(ROWS, ROWS), out_specs=ROWS, axis_names={"a"}, check_vma=False)
    weights = RNG.normal(size=(12, 8)).astype(np.float32)
    with constraints_on(MESH, AXIS_RULES):
        equations = Equations.trace(jax.value_and_grad(lambda x: [(run(x, sizes) * weights).sum()][0]), x)
    rows = np.array([0, -1, -1, -1, -1, -1, 1, 2, 4, 5, 6, -1])  # the source of each row of the results
    want = np.where(rows[:, None] >= 0, np.sin(x)[rows], 1)
    gradient = np.zeros_like(x)
    np.add.at(gradient, rows[rows >= 0], (weights * np.cos(x)[rows])[rows >= 0])
    assert_close(equations(x), [(want * weights).sum(), gradient], "float32")
