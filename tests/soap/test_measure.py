"""Shards of operators as programs: they have the shapes of the shards, compute what the function does, and are timed
once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soap_graphs

from jpipe import soap
from jpipe.soap.measure import _backward, local_program, measure
from jpipe.soap.strategy import local_shape

GRAPHS = {
    "transformer": soap_graphs.transformer,
    "lenet": soap_graphs.lenet,
    "branches": soap_graphs.branches,
    "recurrent": soap_graphs.recurrent,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_programs_of_shards_have_the_shapes_of_shards(name):
    graph = GRAPHS[name]()
    space = soap.Space(graph, 4)
    for i, operator in enumerate(graph.operators):
        for degrees in {config.degrees for config in space.configs(i)}:
            shape = local_shape(operator, degrees)
            function, values, _ = local_program(graph, i, shape)
            inputs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values]
            outputs = iter(jax.eval_shape(function, *inputs))
            for member in operator.equations:
                for value, dims in zip(member.equation.outputs, member.writes):
                    wanted = tuple(n if d is None else shape[d] for n, d in zip(value.shape, dims))
                    assert next(outputs).shape == wanted


def test_the_whole_program_of_an_operator_is_the_function():
    """A shard of degree 1 computes what the function computes, statistics of rows included."""

    def function(w, x):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return jnp.tanh(e / e.sum(-1, keepdims=True)) * w[None]

    rng = np.random.default_rng(0)
    w, x = rng.normal(size=6).astype("f4"), rng.normal(size=(4, 6)).astype("f4")
    graph = soap.trace(function, w, x)
    (operator,) = graph.operators
    program, values, tensors = local_program(graph, 0, (4, 6))
    by_shape = {(6,): w, (1, 6): w[None], (4, 6): x}
    *_, result = program(*(by_shape[v.shape] for v in values))
    np.testing.assert_allclose(result, function(w, x), rtol=1e-6)
    is_weight = [graph.tensors[t].weight is not None for t in tensors]
    assert is_weight == [v.shape != (4, 6) for v in values]
    # A shard of two rows computes the first two rows: softmax needs whole rows alone.
    program, values, _ = local_program(graph, 0, (2, 6))
    by_shape = {(6,): w, (1, 6): w[None], (2, 6): x[:2]}
    *_, result = program(*(by_shape[v.shape] for v in values))
    np.testing.assert_allclose(result, function(w, x)[:2], rtol=1e-6)


def test_the_measured_backward_is_the_gradient():
    """By weights and activations alone, from what the forward keeps."""
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(6, 4)), rng.normal(size=(8, 6))
    program = lambda x, w: [jnp.tanh(x @ w)]  # noqa: E731
    given = [np.asarray(a, "f4") for a in (x, weight)]
    backward, arrays, cold = _backward(program, given, [1], [True, True], rng)
    (gradient,) = backward(*arrays)
    cotangent = arrays[-1]
    assert cotangent.shape == (8, 4) and not cold[-1]
    wanted = given[0].T @ (cotangent * (1 - np.tanh(given[0] @ given[1]) ** 2))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)
    # The backward reads the input again, and a step has read other arrays in between.
    assert [a.shape for a, is_cold in zip(arrays, cold) if is_cold] == [(8, 6)]


def test_measured_seconds(tmp_path):
    weight = soap_graphs.weight
    graph = soap.trace(lambda w, x: jnp.tanh(x @ w).sum(), weight(64, 64), weight(32, 64))
    machine = soap_graphs.machine(2)
    path = tmp_path / "profile.json"
    costs = soap.Profile(machine, path, measure)
    found = soap.simulate(graph, machine, soap.data_parallel(graph, 2), costs)
    again = soap.Profile(machine, path)
    assert soap.simulate(graph, machine, soap.data_parallel(graph, 2), again) == found
    forward, backward = costs.seconds(graph, 0, (16, 64, 64))
    assert 0 < forward < 1 and 0 < backward < 1
    bare = soap.OperatorGraph([soap.Operator("x", "x", (), (), (), 1.0)], [], ())
    with pytest.raises(ValueError, match="has no equations to measure"):
        measure(bare, 0, ())
