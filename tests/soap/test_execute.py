"""Strategies that run: the numbers are those of the plain function, and the collectives those that the strategy
implies.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jpipe import soap
from jpipe.soap.execute import with_splits
from jpipe.soap.refusals import refusal
from jpipe.soap.space import degree_vectors
from jpipe.soap.specs import loop_axes
from jpipe.soap.splits import splits
from jpipe.soap.strategy import Regions, placed


class Case(NamedTuple):
    """A function with one operator of a kind.

    Attributes:
      operator: the name of the operator whose degrees the tests vary.
      function: `(weight, x) -> array`.
      weight, x: shapes.
    """

    operator: str
    function: Callable[..., Any]
    weight: tuple[int, ...]
    x: tuple[int, ...] = (8, 8)


def _conv(weight, x):
    return lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _embed(weight, x):
    words = jnp.arange(x.shape[0] * 8).reshape(-1, 8) * 5 % 16 + (0 * x).astype(int)
    return weight[words]


def _recurrent(weight, x):
    def cell(state, row):
        state = jnp.tanh(state @ weight + row)
        return state, state

    return lax.scan(cell, jnp.zeros((8, 8), x.dtype), jnp.stack([x] * TURNS))[1]


def _window(weight, x):
    pooled = lax.reduce_window(x * weight, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME")
    return pooled * pooled


CASES = {
    "dense": Case("dot_general_0", lambda w, x: x @ w, (8, 8)),
    "attention": Case(
        "dot_general_0",
        lambda w, x: jnp.einsum("bhqd,bhkd->bhqk", x * w, x),
        (8, 8, 8, 8),
        (8, 8, 8, 8),
    ),
    "convolution": Case("conv_general_dilated_0", _conv, (3, 3, 8, 8), (8, 8, 8, 8)),
    "sum": Case("reduce_sum_0", lambda w, x: (x * w).sum(0), (8, 8)),
    "maximum": Case("reduce_max_0", lambda w, x: (x * w).max(1), (8, 8)),
    "embedding": Case("gather_0", _embed, (16, 8)),
    "elementwise": Case("elementwise_0", lambda w, x: jnp.tanh(x * w) + jax.nn.gelu(x), (8, 8)),
    "own derivative": Case("elementwise_0", lambda w, x: jax.nn.relu(x * w), (8, 8)),
    "softmax": Case("elementwise_0", lambda w, x: jax.nn.softmax(x * w), (8, 8)),
    "cumulative sum": Case("cumsum_0", lambda w, x: jnp.cumsum(x * w, 1), (8, 8)),
    "concatenate": Case("concatenate_0", lambda w, x: jnp.concatenate([x * w, x * x], 1), (8, 8)),
    "stack": Case("stack_0", lambda w, x: jnp.stack([x * w, x * x], 1), (8, 8)),
    "pad": Case("pad_0", lambda w, x: jnp.pad(x * w, ((0, 0), (4, 4))), (8, 8)),
    "window": Case("reduce_window_sum_0", _window, (8, 8, 8), (8, 8, 8)),
    "sort": Case("sort_0", lambda w, x: jnp.sort(x * w, 1), (8, 8)),
    "top k": Case("top_k_0", lambda w, x: lax.top_k(x * w, 4)[0], (8, 8)),
    "slice": Case(
        "dynamic_slice_0",
        lambda w, x: lax.dynamic_slice(x * w, (0, x[0, 0].astype(int)), (8, 4)),
        (8, 8),
    ),
    "update": Case(
        "dynamic_update_slice_0",
        lambda w, x: lax.dynamic_update_slice(x * w, x[:, :4], (0, x[0, 0].astype(int))),
        (8, 8),
    ),
    "scan": Case("dot_general_0", _recurrent, (8, 8)),
    "scan, all turns": Case("dot_general_*", _recurrent, (8, 8)),
}


def _strided(weight, x):
    """Shards of rows read windows of several shapes, and the last rows of `x` are not read."""
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x * x, weight, (2, 1), ((0, 0), (2, 0)), dimension_numbers=names)


def _dilated(weight, x):
    names, ones = ("NCHW", "OIHW", "NCHW"), (1, 1)
    return lax.conv_general_dilated(x * x, weight, ones, "SAME", rhs_dilation=(2, 3), dimension_numbers=names)


def _transposed(weight, x):
    return lax.conv_transpose(x * x, weight, (2, 1), "SAME")


def _grouped(groups):
    def function(weight, x):
        return lax.conv_general_dilated(x * x, weight, (1, 1), "SAME", feature_group_count=groups)

    return function


def _largest(weight, x):
    args = lax.max, (1, 3, 2), (1, 2, 1), ((0, 0), (0, 1), (1, 0))
    return lax.reduce_window(x * weight, -jnp.inf, *args)


WINDOWS = {
    "strided": Case("conv_general_dilated_0", _strided, (3, 3, 4, 4), (4, 10, 8, 4)),
    "dilated": Case("conv_general_dilated_0", _dilated, (4, 4, 3, 2), (4, 4, 8, 8)),
    "transposed": Case("conv_general_dilated_0", _transposed, (3, 3, 4, 4), (4,) * 4),
    "two groups": Case("conv_general_dilated_0", _grouped(2), (4, 2, 3, 3), (4, 4, 8, 8)),
    "depthwise": Case("conv_general_dilated_0", _grouped(4), (8, 1, 3, 3), (4, 4, 4, 4)),
    "three groups": Case("conv_general_dilated_0", _grouped(3), (12, 2, 3, 3), (4, 6, 4, 4)),
    "largest": Case("reduce_window_max_0", _largest, (8, 8, 8), (8, 8, 8)),
    "negative pad": Case(
        "pad_0",
        lambda w, x: lax.pad(x * w, 2.0, ((2, 2, 0), (-2, 6, 0))),
        (4, 8),
        (4, 8),
    ),
    "pad between": Case("pad_0", lambda w, x: lax.pad(x * w, 1.0, ((0, 0, 0), (1, 0, 1))), (8, 8)),
    "unequal parts": Case(
        "concatenate_0",
        lambda w, x: jnp.concatenate([x[:, :1] * w[:, :1], x * w, x[:, :7]], 1),
        (8, 8),
    ),
}
LONG_WINDOWS = (
    "strided",
    "dilated",
    "transposed",
    "two groups",
    "three groups",
    "largest",
    "depthwise",
)
"""More operators whose shards read parts of others, or whose windows XLA splits."""


@pytest.fixture(autouse=True)
def _double_precision():
    """Sums in another order differ by 1e-15 then, far below the tolerance of 1e-6."""
    with jax.enable_x64(True):
        yield


def arrays(case: Case) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    weight, x = (rng.uniform(0.2, 0.9, shape) for shape in (case.weight, case.x))
    return jnp.asarray(weight), jnp.asarray(x)


def loss_of(case: Case) -> Callable[..., Any]:
    """The outputs, and a loss in which every output counts differently."""

    def loss(weight, x):
        y = case.function(weight, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    return loss


def with_degrees(graph, name: str, degrees: tuple[int, ...], num_devices: int):
    """Data parallelism, but for one operator, or all whose names begin so. Operators without samples are split, too, if
    they can be.
    """
    space = soap.Space(graph, num_devices, executable=True)
    strategy = list(soap.data_parallel(graph, num_devices))
    for i, operator in enumerate(graph.operators):
        if len(strategy[i].devices) < num_devices:
            strategy[i] = space.configs(i)[0]
        if operators_of([operator], name):
            count = math.prod(degrees)
            strategy[i] = soap.Config(degrees, placed(count, num_devices))
    return tuple(strategy)


def operators_of(operators, name: str):
    """The operator of a name, or all whose names begin so, if it ends with a star."""
    begins = name.rstrip("*")
    return [o for o in operators if o.name == name or begins != name and o.name.startswith(begins)]


def all_degrees(graph, name: str, num_devices: int):
    """Every degree vector of an operator."""
    operator, *_ = operators_of(graph.operators, name)
    sizes = tuple(o.size if o.can_split else 1 for o in operator.loops)
    return list(degree_vectors(sizes, num_devices))


def check_equal(found, expected, message: str = "") -> None:
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * scale, err_msg=message)


def check_numbers(case: Case, num_devices: int, *, in_stages: bool = False) -> None:
    """Numbers of all degrees of an operator.

    Args:
      case: has the operator.
      num_devices: how many there are.
      in_stages: whether XLA alone splits it, as in the stages of a pipeline.
    """
    given, loss = arrays(case), loss_of(case)
    graph = soap.trace(loss, *given)
    mesh = soap.device_mesh(num_devices)
    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    expected = jax.jit(both)(*given)
    options: dict = {"xla_backend_optimization_level": 0}  # compiles sooner
    tried = all_degrees(graph, case.operator, num_devices)
    assert len(tried) > 1
    (operator, *_) = operators_of(graph.operators, case.operator)
    for degrees in tried:
        strategy = with_degrees(graph, case.operator, degrees, num_devices)
        config = strategy[list(graph.operators).index(operator)]
        if refusal(operator, config, mesh.shape, in_stages=in_stages):
            what = "wrong numbers|several groups|parts of their neighbours" if in_stages else "several groups"
            with pytest.raises(ValueError, match=what):
                splits(graph, strategy, mesh.shape, in_stages=in_stages)
            continue
        split = soap.apply(loss, graph, strategy, mesh)
        if in_stages:
            found = splits(graph, strategy, mesh.shape, in_stages=True)
            split = with_splits(loss, found.plan, mesh)
        both = jax.value_and_grad(split, argnums=(0, 1), has_aux=True)
        run = jax.jit(both, compiler_options=options)
        check_equal(run(*given), expected, f"{degrees}")


@pytest.mark.first_case
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_every_degree(name):
    check_numbers(CASES[name], 2)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive) if name in LONG_WINDOWS else name for name in WINDOWS],
)
def test_numbers_of_windows_of_every_shape(name):
    check_numbers(WINDOWS[name], 4)


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["two groups", "depthwise", "three groups"])
def test_numbers_of_groups_that_only_xla_splits(name):
    check_numbers(WINDOWS[name], 4, in_stages=True)


def test_space_knows_operators_of_the_same_sizes_apart():
    """A convolution with groups of channels and one without have as many loops of the same turns."""

    def loss(kernel, x):
        wide = jnp.concatenate([x, 2 * x, 3 * x], 1)
        grouped = lax.conv_general_dilated(wide, kernel, (1, 1), "SAME", feature_group_count=3)
        return (lax.conv_general_dilated(x, kernel, (1, 1), "SAME") * grouped).sum()

    graph = soap.trace(loss, jnp.ones((12, 4, 3, 3)), jnp.ones((4, 4, 4, 4)))
    space = soap.Space(graph, 2, executable=True)
    mesh = soap.device_mesh(2)
    first, second = (i for i, each in enumerate(graph.operators) if each.kind == "conv_general_dilated")
    for i in (first, second):
        for config in space.configs(i):
            assert refusal(graph.operators[i], config, mesh.shape) is None
    assert len(space.configs(first)) != len(space.configs(second))


@pytest.mark.exhaustive
@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_every_degree_on_more_devices(name, num_devices):
    check_numbers(CASES[name], num_devices)


def runs_of(text: str) -> dict[str, int]:
    """Text of each computation of a program -> how often it runs: the body of a loop as often as the loop turns."""
    blocks = {
        name: body for name, body in re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }
    turns = {}
    for block, body in blocks.items():
        for line in body.splitlines():
            if loop := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert count, "XLA does not say how often a loop turns"
                turns[loop[1]] = block, int(count[1])

    def runs(block: str) -> int:
        above, count = turns.get(block, (None, 1))
        return count if above is None else count * runs(above)

    return {body: runs(block) for block, body in blocks.items()}


def sent_bytes(text: str) -> int:
    """Bytes that all devices send in the collectives of a compiled program, each collective by the least that it
    takes.
    """
    return sum(_sent_once(body) * count for body, count in runs_of(text).items())


def _sent_once(text: str) -> int:
    total = 0
    for each in collectives(text):
        if each.groups is None:  # of a permutation every pair of two devices sends
            total += each.num_bytes * each.num_pairs
            continue
        size, count = len(each.groups[0]), len(each.groups)
        rounds = {"all-reduce": 2 * (size - 1), "reduce-scatter": size * (size - 1)}
        # What each device gets, of what it has after an all-gather or an all-to-all.
        total += each.num_bytes * count * rounds.get(each.kind, size - 1)
    return total


def compiled_text(case: Case, graph, strategy, num_devices: int) -> str:
    """The text of the program of a loss and the gradient of its weight, which lies where it is read. Every device has
    the input.
    """
    mesh = soap.device_mesh(num_devices)
    given = arrays(case)
    split = soap.apply(loss_of(case), graph, strategy, mesh)
    placed_as, _ = soap.argument_shardings(graph, strategy, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(jax.value_and_grad(split, has_aux=True), in_shardings=(placed_as, everywhere))
    return run.lower(*given).compile().as_text()


TURNS = 4
"""Of the loops of `_recurrent`. XLA sends in every turn what the simulator sends once: it adds up the gradient of a
weight so.
"""


def bytes_of_whole_sums(graph, strategy, num_devices: int) -> int:
    """What XLA sends on CPUs because it has no reduce-scatter there: it adds up the whole result on every device.

    So it does with terms of sums, and with gradients by what several shards read. A scatter of the result would send
    half.
    """
    return sum(whole_sums(graph, strategy, num_devices).values())


def whole_sums(graph, strategy, num_devices: int) -> dict[str, int]:
    """The bytes of `bytes_of_whole_sums` by operator."""
    regions, result = Regions(graph), {}
    for i, (operator, config) in enumerate(zip(graph.operators, strategy)):
        more = 0
        parts = math.prod(d for d, each in zip(config.degrees, operator.loops) if each.kind == "R")
        for output in operator.outputs:
            num_bytes = graph.tensors[output].num_bytes
            more += (parts - 1) * num_bytes * num_devices // parts
        for position, each in enumerate(operator.inputs):
            tensor = graph.tensors[each.tensor]
            if tensor.producer is None or not tensor.has_gradient:
                continue
            read = regions.reads(i, position, config.degrees)
            _, readers = np.unique(read, axis=0, return_counts=True)
            read_bytes = np.prod(read[0, :, 1] - read[0, :, 0]) * tensor.item_bytes
            more += int((readers - 1).sum()) * int(read_bytes)
        result[operator.name] = more
    return result


def check_bytes(case: Case, num_devices: int, turns: int = 1) -> None:
    graph = soap.trace(loss_of(case), *arrays(case))
    machine = soap.p100_cluster().with_devices(num_devices)
    (operator, *_) = operators_of(graph.operators, case.operator)
    for degrees in all_degrees(graph, case.operator, num_devices):
        if math.prod(degrees) < num_devices:
            continue  # copies on other devices, of which the simulator knows nothing
        strategy = with_degrees(graph, case.operator, degrees, num_devices)
        config = strategy[list(graph.operators).index(operator)]
        if refusal(operator, config, soap.device_mesh(num_devices).shape):
            continue  # refused: see `check_numbers`
        predicted = soap.simulate(graph, machine, strategy).sent_bytes
        predicted += bytes_of_whole_sums(graph, strategy, num_devices)
        predicted *= turns
        text = compiled_text(case, graph, strategy, num_devices)
        assert 0 < sent_bytes(text) <= predicted, degrees


@pytest.mark.parametrize("name", ["dense", "embedding", "softmax", "sort", "concatenate", "top k", "window"])
def test_collectives_send_no_more_than_predicted(name):
    check_bytes(CASES[name], 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WINDOWS)
def test_collectives_of_windows_of_every_shape(name):
    check_bytes(WINDOWS[name], 4)


@pytest.mark.exhaustive
@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_collectives_of_every_kind(name, num_devices):
    check_bytes(CASES[name], num_devices, TURNS if name.startswith("scan") else 1)


def _convolutional(weights, x):
    for kernel in weights["kernels"]:
        x = jax.nn.relu(_conv(kernel, x))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return jnp.tanh(x.reshape(len(x), -1) @ weights["dense"])


def _attentive(weights, x):
    def heads(w):
        return (x @ w).reshape(*x.shape[:2], 4, -1).transpose(0, 2, 1, 3)

    queries, keys, values = map(heads, weights["in"])
    shares = jax.nn.softmax(jnp.einsum("bhsd,bhtd->bhst", queries, keys))
    found = jnp.einsum("bhst,bhtd->bhsd", shares, values)
    x = x + found.transpose(0, 2, 1, 3).reshape(x.shape) @ weights["out"]
    return x + jax.nn.relu(x @ weights["up"]) @ weights["down"]


MODELS = {
    "convolutional": (
        _convolutional,
        {"kernels": [(5, 5, 4, 8), (5, 5, 8, 8)], "dense": (128, 16)},
        (8, 16, 16, 4),
    ),
    "attentive": (
        _attentive,
        {"in": [(16, 16)] * 3, "out": (16, 16), "up": (16, 64), "down": (64, 16)},
        (8, 8, 16),
    ),
}


def _viewed(view):
    """A function with an operator that reads a view of what another one writes."""
    return lambda weight, x: jnp.sin(view(jnp.tanh(x * weight)))


VIEWS = {
    "cut": (_viewed(lambda x: x.reshape(8, 2, 12).sum(1)), (16, 12), (16, 12)),
    "merged": (
        _viewed(lambda x: x.transpose(1, 0, 2).reshape(8, -1)),
        (4, 8, 4),
        (4, 8, 4),
    ),
    "flat": (
        _viewed(lambda x: x.reshape(4, -1) @ jnp.ones((96, 8))),
        (4, 4, 4, 6),
        (4, 4, 4, 6),
    ),
    "heads": (
        _viewed(lambda x: x.reshape(4, 8, 3, 4).transpose(0, 2, 1, 3)),
        (4, 8, 12),
        (4, 8, 12),
    ),
    "reversed": (_viewed(lambda x: x[::-1]), (8, 8), (8, 8)),
    "own derivative": (lambda w, x: jax.nn.relu((x * w)[:, ::-1]), (8, 8), (8, 8)),
    "slice": (_viewed(lambda x: x[:, 2:6]), (8, 8), (8, 8)),
    "stride": (_viewed(lambda x: x[:, ::2]), (8, 8), (8, 8)),
    "first half": (_viewed(lambda x: x[:, :4] * x[:, 4:]), (8, 8), (8, 8)),
    "part": (_viewed(lambda x: jnp.split(x, 2, 1)[1].T), (8, 8), (8, 8)),
}


def check_model(name: str, seed: int, num_devices: int = 4) -> None:
    """Numbers and bytes of a random strategy of a whole model, or of a function with a view."""
    model, shapes, shape = (MODELS | VIEWS)[name]
    rng = np.random.default_rng(seed)
    weights, x = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s) / 4),
        (shapes, shape),
        is_leaf=lambda s: isinstance(s, tuple) and isinstance(s[0], int),
    )

    loss = loss_of(Case("", model, (), shape))
    graph = soap.trace(loss, weights, x)
    space = soap.Space(graph, num_devices, executable=True)
    strategy = soap.random_strategy(space, rng)
    mesh = soap.device_mesh(num_devices)
    *placed_as, _ = soap.argument_shardings(graph, strategy, mesh)
    placed_as = jax.tree.unflatten(jax.tree.structure(weights), placed_as)
    split = jax.jit(
        jax.value_and_grad(soap.apply(loss, graph, strategy, mesh), has_aux=True),
        in_shardings=(placed_as, NamedSharding(mesh, PartitionSpec())),
        out_shardings=(None, placed_as),
    )
    compiled = split.lower(weights, x).compile()
    found = compiled(jax.device_put(weights, placed_as), x)
    expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights, x)
    check_equal(found, expected)
    machine = soap.p100_cluster().with_devices(num_devices)
    predicted = soap.simulate(graph, machine, strategy).sent_bytes
    predicted += bytes_of_whole_sums(graph, strategy, num_devices)
    assert 0 < sent_bytes(compiled.as_text()) <= predicted


@pytest.mark.first_case
@pytest.mark.parametrize("name", [*MODELS, *VIEWS])
def test_a_random_strategy_of_a_model(name):
    check_model(name, 1)


@pytest.mark.exhaustive
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", MODELS)
def test_random_strategies_of_models(name, seed):
    check_model(name, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VIEWS)
def test_random_strategies_of_views(name):
    for seed in range(2, 14):
        check_model(name, seed)


def test_a_loop_adds_up_the_gradient_of_its_weight_in_every_turn():
    """The simulator adds it up once, after the loop. All else is the same, to the byte."""
    case = CASES["scan"]
    graph = soap.trace(loss_of(case), *arrays(case))
    strategy = soap.data_parallel(graph, 2)
    machine = soap.p100_cluster().with_devices(2)
    predicted = soap.simulate(graph, machine, strategy).sent_bytes
    text = compiled_text(case, graph, strategy, 2)
    assert TURNS in runs_of(text).values()
    in_ring = 2 * 8 * math.prod(case.weight)
    assert sent_bytes(text) == predicted + (TURNS - 1) * in_ring


@pytest.mark.parametrize(
    "degrees, kinds",
    [
        ((2, 1, 1), {"all-reduce"}),  # the gradient of the weight
        ((1, 2, 1), {"all-reduce", "all-to-all"}),  # samples to columns and back
        ((1, 1, 2), {"all-reduce", "all-gather"}),  # terms of sums
    ],
)
def test_kinds_of_collectives_of_a_dense_layer(degrees, kinds):
    case = CASES["dense"]
    graph = soap.trace(loss_of(case), *arrays(case))
    strategy = with_degrees(graph, case.operator, degrees, 2)
    found = collectives(compiled_text(case, graph, strategy, 2))
    assert {each.kind for each in found} == kinds


@pytest.mark.parametrize("degrees, whole", [((2, 1, 1, 1, 1), False), ((1, 2, 1, 1, 1), True)])
def test_an_input_is_whole_where_shards_share_parts_of_it(degrees, whole):
    case = CASES["convolution"]
    graph = soap.trace(loss_of(case), *arrays(case))
    strategy = with_degrees(graph, case.operator, degrees, 2)
    _, of_input = soap.argument_shardings(graph, strategy, soap.device_mesh(2))
    assert of_input.is_fully_replicated == whole


def test_a_mask_is_computed_together_with_its_result():
    """Otherwise XLA may hold the array below the mask until the backward."""
    case = CASES["own derivative"]
    graph = soap.trace(loss_of(case), *arrays(case))
    split = soap.apply(loss_of(case), graph, soap.data_parallel(graph, 2), soap.device_mesh(2))
    program = jax.make_jaxpr(jax.grad(split, has_aux=True))(*arrays(case))
    barriers = [
        {v.aval.dtype.name for v in eqn.outvars} for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"
    ]
    assert barriers == [{"bool", "float64"}]


def test_axes_of_placements():
    sizes = {"a": 2, "b": 2}
    axes = {
        devices: loop_axes(soap.Config((2, 2), devices), sizes)
        for devices in [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 3, 2)]
    }
    assert list(axes.values()) == [[("a",), ("b",)], [("b",), ("a",)], None, None]
    assert loop_axes(soap.Config((4,), (0, 2, 1, 3)), sizes) == [("b", "a")]
    assert loop_axes(soap.Config((2,), (0, 2)), sizes) == [("a",)]
    assert loop_axes(soap.Config((1,), (1,)), sizes) is None


def test_refuses_what_no_mesh_can_do_and_other_functions():
    case = CASES["dense"]
    given = arrays(case)
    graph = soap.trace(loss_of(case), *given)
    mesh = soap.device_mesh(2)
    with pytest.raises(ValueError, match=r"operator 'dot_general_0' .*on devices \(1,"):
        strategy = list(soap.data_parallel(graph, 2))
        strategy[0] = soap.Config((2, 1, 1), (1, 0))
        soap.apply(loss_of(case), graph, tuple(strategy), mesh)
    split = soap.apply(loss_of(case), graph, soap.data_parallel(graph, 2), mesh)
    with pytest.raises(ValueError, match="arguments must be those of the graph"):
        split(given[0], given[1][:4])


def test_space_of_strategies_that_a_mesh_runs():
    case = CASES["dense"]
    graph = soap.trace(loss_of(case), *arrays(case))
    space = soap.Space(graph, 4, executable=True)
    assert 1 < space.size < soap.Space(graph, 4, whole=True).size + 1
    for i in range(space.num_operators):
        most = max(math.prod(c.degrees) for c in space.configs(i))
        for config in space.configs(i):
            assert math.prod(config.degrees) == most
            assert loop_axes(config, soap.device_mesh(4).shape) is not None
