"""The operator graph: what operators read, against a NaN in one element of an input; kinds of loops; loops of the
program.
"""

import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soap_graphs
from jax import lax

from jpipe import soap
from jpipe.soap.regions import read

weight = soap_graphs.weight


def convolved(**options):
    return lambda x, k: soap_graphs.convolution(x, k, **options)


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


CASES = {
    "product": (lambda x, w: x @ w, (4, 6), (6, 8)),
    "batched product": (
        lambda x, y: jnp.einsum("bij,bkj->bik", x, y),
        (2, 4, 3),
        (2, 6, 3),
    ),
    "product of a transpose": (lambda x, w: x.T @ w, (6, 4), (6, 2)),
    "heads": (
        lambda x, y: jnp.einsum("bshd,bthd->bhst", x.reshape(2, 4, 2, 3), y.reshape(2, 4, 2, 3)),
        (2, 4, 6),
        (2, 4, 6),
    ),
    "flattened product": (lambda x, w: x.reshape(4, 6) @ w, (4, 2, 3), (6, 2)),
    "rows of batches": (lambda x, w: x.reshape(8, 3) @ w, (4, 2, 3), (3, 2)),
    "convolution": (convolved(), (2, 6, 4, 2), (3, 3, 2, 4)),
    "strides": (
        convolved(strides=(2, 1), padding=((1, 0), (0, 2))),
        (2, 6, 4, 2),
        (3, 2, 2, 2),
    ),
    "dilated kernel": (convolved(rhs_dilation=(2, 1)), (1, 8, 4, 1), (3, 1, 1, 2)),
    "transposed": (
        convolved(lhs_dilation=(2, 2), padding=((1, 1), (2, 1))),
        (1, 3, 4, 2),
        (3, 3, 2, 1),
    ),
    "groups": (convolved(feature_group_count=2), (1, 3, 4, 4), (2, 2, 2, 6)),
    "depthwise": (convolved(feature_group_count=4), (1, 4, 4, 4), (3, 3, 1, 4)),
    "pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
        (2, 6, 4, 2),
    ),
    "sum": (lambda x: x.sum((0, 2)), (4, 3, 2)),
    "largest": (lambda x: x.max(1), (4, 6)),
    "softmax": (softmax, (4, 6)),
    "outer": (lambda x, y: x[:, None] * y[None], (4,), (6,)),
    "elementwise": (lambda x, y: jnp.tanh(x) * 2 + y[None], (4, 6), (6,)),
    "clamp": (lambda x: jnp.clip(x, 0.0, 1.0) + 1, (4, 6)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), (4, 2), (4, 6)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (4, 6), (4, 6)),
    "padding": (lambda x: lax.pad(x, 0.0, ((1, 2, 1), (-1, 1, 0))), (4, 4)),
    "slice": (lambda x: jnp.tanh(x[1::2, ::-1]), (8, 4)),
    "split": (lambda x: jnp.tanh(jnp.split(x, 2, 1)[1]), (2, 8)),
    "embedding": (lambda w: w[jnp.array([[3, 1], [1, 0]])], (5, 6)),
    "cumulative": (lambda x: jnp.cumsum(x, 1), (4, 6)),
    "sorted": (lambda x: jnp.sort(x, 0), (4, 6)),
    "top": (lambda x: lax.top_k(x, 2)[0], (4, 6)),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 6)), (4, 6)),
    "update": (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)),
        (4, 6),
        (2, 6),
    ),
}
"""Functions of one operator. Where XLA computes a NaN in another element than arithmetic says, the case is left out."""

LOOSE = {
    "rows of batches": "a box of rows that begins inside of a batch is widened to the whole batches",
    "embedding": "which rows are read is not known",
    "dilated kernel": "between the elements under the kernel are others",
    "transposed": "some elements of the kernel meet inserted zeros alone",
    "cumulative": "it reads the whole of a dim that it mixes",
    "sorted": "NaNs are sorted to the end",
    "top": "a NaN counts as the largest",
    "dynamic slice": "which rows are read is not known",
    "update": "which rows are read is not known",
    "padding": "elements that are cut away are not in any box",
}
"""Cases in which more may be read than one NaN shows."""


def hull(mask):
    """The smallest box that holds all True elements; None if there are none."""
    if not mask.any():
        return None
    return tuple((int(index.min()), int(index.max()) + 1) for index in np.nonzero(mask))


@pytest.mark.parametrize("name", CASES)
def test_reads_are_those_that_a_nan_shows(name):
    function, *shapes = CASES[name]
    with jax.debug_nans(False):
        graph = soap.trace(lambda w, *x: function(*x), (), *map(weight_of, shapes))
        assert len(graph.operators) == 1, [each.name for each in graph.operators]
        (operator,) = graph.operators
        (number,) = graph.results
        writes = graph.tensors[number].writes
        # Inputs are tensors 0, 1, ...: which outputs does each element of an input reach?
        rng = np.random.default_rng(0)
        values = [rng.uniform(0.1, 0.9, shape).astype(np.float32) for shape in shapes]
        compiled = jax.jit(function)
        reaches = []
        for i, value in enumerate(values):
            table = {}
            for index in np.ndindex(value.shape):
                spoilt = [v.copy() for v in values]
                spoilt[i][index] = np.nan
                table[index] = np.isnan(np.asarray(compiled(*spoilt)))
            reaches.append(table)
    seen = 0
    for box in boxes_of(operator.loops):
        result = tuple(slice(None) if loop is None else slice(*box[loop]) for loop in writes)
        for each in operator.inputs:
            table = reaches[each.tensor]
            needed = np.zeros(shapes[each.tensor], bool)
            for index, reached in table.items():
                needed[index] = reached[result].any()
            low_high = read(each.access, box)
            inside = np.zeros_like(needed)
            inside[tuple(slice(*r) for r in low_high)] = True
            reduced = any(
                loop not in writes and box[loop] != (0, each.size) for loop, each in enumerate(operator.loops)
            )
            if reduced:  # a part of a sum: its box is checked by the whole sum
                continue
            assert not (needed & ~inside).any(), (box, low_high)
            if name not in LOOSE and needed.any():
                assert hull(needed) == low_high, (box, each.tensor)
                seen += 1
    assert seen or name in LOOSE


def weight_of(shape):
    return weight(*shape)


def boxes_of(loops):
    """Shards of equal splits."""
    sizes = [loop.size for loop in loops]
    divisors = [[d for d in range(1, n + 1 if loop.can_split else 2) if n % d == 0] for n, loop in zip(sizes, loops)]
    for degrees in itertools.islice(itertools.product(*divisors), 40):
        parts = [[(k * n // d, (k + 1) * n // d) for k in range(d)] for n, d in zip(sizes, degrees)]
        yield from itertools.islice(itertools.product(*parts), 6)


def test_a_part_of_a_sum_reads_its_part():
    graph = soap.trace(lambda w, x: x @ w, weight(6, 8), weight(4, 6))
    (operator,) = graph.operators
    x, w = sorted(operator.inputs, key=lambda each: -each.tensor)
    box = ((0, 2), (4, 8), (3, 6))  # rows, columns, terms
    assert read(x.access, box) == ((0, 2), (3, 6))
    assert read(w.access, box) == ((3, 6), (4, 8))


def kinds(operator):
    return "".join(loop.kind for loop in operator.loops)


def test_kinds_of_dims():
    """FlexFlow, table 1: samples, attributes and parameters of each operator; and sums."""
    graph = soap_graphs.lenet()
    by_name = {each.name: each for each in graph.operators}
    assert kinds(by_name["conv_general_dilated_0"]) == "SAAPR"
    assert kinds(by_name["reduce_window_max_0"]) == "SAAA"
    assert kinds(by_name["dot_general_0"]) == "SPR"
    assert kinds(by_name["elementwise_0"]) == "SAAA"
    last = next(o for o in graph.operators if o.outputs == tuple(graph.results))
    assert not last.loops  # the division of the mean
    graph = soap_graphs.transformer()
    found = {}
    for i, operator in enumerate(graph.operators):
        for name in graph.weights_of(i):
            found.setdefault(name, kinds(operator))
    assert found["embedding"] == "SAP"  # words of a sentence are an attribute
    assert found["layers.0.q"] == "SAPR"
    assert found["layers.0.scale"] == "SAP"
    attention = [kinds(o) for i, o in enumerate(graph.operators) if o.kind == "dot_general" and not graph.weights_of(i)]
    assert attention == ["SAAAR"] * 4  # two per layer


def test_rows_of_softmax_and_of_layer_norm_stay_whole():
    graph = soap_graphs.transformer()
    runs = [o for o in graph.operators if o.kind == "elementwise" and len(o.loops) >= 3]
    softmax_run = next(o for o in runs if len(o.loops) == 4)
    assert [loop.can_split for loop in softmax_run.loops] == [True, True, True, False]
    assert {e.primitive for e in softmax_run.equations} >= {"reduce_max", "reduce_sum"}
    norm = next(o for o in runs if any(e.primitive == "rsqrt" for e in o.equations))
    assert [loop.can_split for loop in norm.loops] == [True, True, False]


def test_one_operator_per_run():
    """A residual block of maps around one product is two runs, not one: the product stands between."""

    def function(w, x):
        y = jnp.tanh(x) * 2 + 1
        return jnp.tanh(y @ w) + y + x

    graph = soap.trace(function, weight(4, 4), weight(2, 4))
    assert [o.kind for o in graph.operators] == [
        "elementwise",
        "dot_general",
        "elementwise",
    ]
    assert sum(len(o.equations) for o in graph.operators) == 3 + 1 + 3


@pytest.mark.parametrize("start", [0, 2])
def test_a_slice_is_read_by_another_operator(start):
    """Shards of one operator would write other parts of the array than those whose slice they read."""
    graph = soap.trace(
        lambda w, x: jnp.sin(jnp.tanh(x * w)[:, start : start + 4]),
        weight(4, 8),
        weight(4, 8),
    )
    assert [[loop.size for loop in o.loops] for o in graph.operators] == [
        [4, 8],
        [4, 4],
    ]


def test_loops_of_the_program_are_unrolled():
    def loss(w, xs):
        def turn(h, x):
            h = jnp.tanh(x + h @ w)
            return h, h * 2

        h, ys = lax.scan(turn, xs[:, 0] * 0, xs.swapaxes(0, 1))
        return (ys.sum() + h.sum(),)

    args = weight(4, 4), weight(2, 6, 4)
    graph = soap.trace(loss, *args)
    products = [o for o in graph.operators if o.kind == "dot_general"]
    assert len(products) == 6 and all(o.repeats == 1 for o in products)
    few = soap.trace(loss, *args, max_equations=8)
    products = [o for o in few.operators if o.kind == "dot_general"]
    assert 1 <= len(products) < 6
    assert len(products) * products[0].repeats == 6
    assert sum(o.flops for o in few.operators) == sum(o.flops for o in graph.operators)
    # Turn t reads column t of the batch: an x of shape [2, 4] each.
    columns = [
        read(each.access, tuple((0, loop.size) for loop in o.loops))
        for o in graph.operators
        for each in o.inputs
        if graph.tensors[each.tensor].shape == (2, 6, 4)
    ]
    wanted = {((0, 2), (t, t + 1), (0, 4)) for t in range(6)}
    assert wanted <= set(columns)


def test_fori_loop_and_calls():
    def function(w, x):
        layer = jax.checkpoint(lambda x: jax.nn.relu(x @ w))
        return lax.fori_loop(0, 3, lambda _, x: layer(x), x)

    graph = soap.trace(function, weight(4, 4), weight(2, 4))
    assert [o.kind for o in graph.operators] == ["dot_general", "elementwise"] * 3


def test_flops_are_those_of_xla():
    graph = soap.trace(lambda w, x: x @ w, weight(16, 32), weight(8, 16))
    assert graph.operators[0].flops == 2 * 8 * 16 * 32
    kernel, image = weight(3, 3, 4, 8), weight(2, 6, 6, 4)
    graph = soap.trace(lambda w, x: soap_graphs.convolution(x, w, padding="VALID"), kernel, image)
    assert graph.operators[0].flops == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 4)
    groups = soap.trace(
        lambda w, x: soap_graphs.convolution(x, w, feature_group_count=4),
        weight(3, 3, 1, 4),
        image,
    )
    assert groups.operators[0].flops == 2 * (2 * 6 * 6 * 4) * 9


def test_backward_of_what_has_gradients():
    """A product of the data needs one gradient, one inside two; integers none."""
    graph = soap.trace(lambda w, x: (x @ w[0]) @ w[1], [weight(4, 4), weight(4, 2)], weight(2, 4))
    assert [o.backward_factor for o in graph.operators] == [1.0, 2.0]
    graph = soap.trace(lambda w, x: jnp.argmax(x @ w, 1), weight(4, 4), weight(2, 4))
    assert [o.has_backward for o in graph.operators] == [True, False]
    graph = soap.trace(lambda w, x: x @ w, weight(4, 4), weight(2, 4), backward=False)
    assert not any(o.has_backward for o in graph.operators)


def test_unknown_primitives_are_named_once():
    def function(w, x):
        return jnp.linalg.cholesky(x) @ jnp.linalg.cholesky(w)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = soap.trace(function, weight(4, 4), weight(4, 4))
    texts = [str(each.message) for each in caught]
    assert len(texts) == 1 and "`cholesky`" in texts[0]
    unknown = [o for o in graph.operators if o.kind == "cholesky"]
    assert len(unknown) == 2
    assert not any(loop.can_split for o in unknown for loop in o.loops)
    machine = soap_graphs.machine(2)
    soap.search(graph, machine, max_proposals=40)


def test_a_function_without_operators():
    with pytest.raises(ValueError, match="has no operator"):
        soap.trace(lambda w, x: x, weight(2), weight(3))


def test_tied_weights_are_synchronised_once():
    graph = soap_graphs.recurrent()
    readers = graph.readers_of_weight
    embedding = next(w for w in readers if graph.tensors[w].weight == "embedding")
    assert len(readers[embedding]) == 1 + 4
    machine = soap_graphs.machine(4)
    found = soap.simulate(graph, machine, soap.data_parallel(graph, 4))
    weights = sum(graph.tensors[w].num_bytes for w in readers)
    # A ring of each weight; and the loss, added up on one device, with its gradient on the way back.
    assert found.sent_bytes == 4 * 2 * 3 / 4 * weights + 2 * 3 * 4


def test_flops_add_up_over_shards():
    graph = soap_graphs.transformer()
    for operator in graph.operators:
        points = math.prod(loop.size for loop in operator.loops)
        assert operator.flops == operator.flops_per_point * points
