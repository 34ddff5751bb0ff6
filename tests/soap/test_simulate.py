"""The simulators: the full one obeys the rules, and the delta simulation gives the same timeline to the last bit."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soap_graphs

from jpipe import soap
from jpipe.soap.simulate import full_simulation
from jpipe.soap.strategy import Regions
from jpipe.soap.tasks import Tasks

GRAPHS = {
    "transformer": soap_graphs.transformer,
    "lenet": soap_graphs.lenet,
    "branches": soap_graphs.branches,
    "recurrent": soap_graphs.recurrent,
}


def simulator(graph, machine, strategy, sync="ring"):
    return soap.Simulator(graph, machine, soap.Analytic(machine), strategy, sync=sync)


def fresh(one, sync="ring", change=None):
    """A simulator's strategy, perhaps with more changes, built and simulated anew."""
    old = one.tasks
    strategy = [(change or {}).get(i, config) for i, config in enumerate(old.strategy)]
    tasks = Tasks(old.graph, old.machine, old.costs, strategy, sync=sync)
    return tasks, full_simulation(tasks)


def assert_same(one, sync="ring"):
    tasks, timeline = fresh(one, sync)
    assert soap_graphs.by_key(one.tasks, one.timeline) == soap_graphs.by_key(tasks, timeline)
    assert one.seconds == timeline.seconds
    assert one.memory_bytes == tasks.memory
    assert one.tasks.sent_bytes == tasks.sent_bytes
    np.testing.assert_allclose(one.tasks.load, tasks.load, rtol=1e-9, atol=1e-15)


@pytest.mark.first_case
@pytest.mark.parametrize("sync", ["ring", "server"])
@pytest.mark.parametrize("name", GRAPHS)
def test_full_simulation_obeys_the_rules(name, sync):
    graph, machine = GRAPHS[name](), soap_graphs.machine(4, inside=2)
    space = soap.Space(graph, 4)
    rng = np.random.default_rng(0)
    strategies = [soap.random_strategy(space, rng) for _ in range(3)]
    for strategy in [*soap.default_starts(graph, 4).values(), *strategies]:
        tasks = Tasks(graph, machine, soap.Analytic(machine), strategy, sync=sync)
        found = soap_graphs.by_key(tasks, full_simulation(tasks))
        assert found == soap_graphs.by_definition(tasks)


def random_walk(graph, num_devices, num_moves, seed, sync, every, start=None, overlap=True):
    """Random changes, some kept, some undone, some cut off by a limit."""
    machine = dataclasses.replace(
        soap_graphs.machine(num_devices),
        product_item_bytes=2,
        on_chip_bytes=2**13,
        overlap=overlap,
    )
    space = soap.Space(graph, num_devices)
    rng = np.random.default_rng(seed)
    start = soap.random_strategy(space, rng) if start is None else start
    one = simulator(graph, machine, start, sync)
    for move in range(num_moves):
        operator = int(rng.integers(space.num_operators))
        before = one.seconds
        limit = before * rng.uniform(0.95, 1.1) if rng.random() < 0.4 else math.inf
        change = {operator: space.draw(operator, rng)}
        if rng.random() < 0.3:  # several together
            more = rng.integers(space.num_operators, size=3)
            change |= {int(i): space.draw(int(i), rng) for i in more}
            seconds = one.try_changes(change, limit)
        else:
            seconds = one.try_change(operator, change[operator], limit)
        if seconds < math.inf:
            assert seconds <= limit
            if move % every == 0:
                assert_same(one, sync)
        elif move % every == 0:  # the limit must really have been passed
            assert fresh(one, sync, change)[1].seconds > limit
        if seconds < math.inf and rng.random() < 0.5:
            one.keep()
        else:
            one.undo()
            assert one.seconds == before
            if move % every == 1:
                assert_same(one, sync)
    assert_same(one, sync)


@pytest.mark.first_case
@pytest.mark.parametrize("sync", ["ring", "server"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.sampled(4)
def test_delta_simulation_is_exact(name, sync):
    random_walk(GRAPHS[name](), 4, 120, 1, sync, 2)


@pytest.mark.exhaustive
def test_delta_simulation_is_exact_on_random_graphs():
    for seed in range(8):
        rng = np.random.default_rng(seed)
        graph = soap_graphs.random_graph(rng, 8)
        count, overlap = int(rng.choice([2, 3, 4, 6])), seed % 2 == 0
        random_walk(graph, count, 60, seed, "ring", 1, overlap=overlap)


@pytest.mark.first_case
@pytest.mark.parametrize("num_devices", [16, 64])
def test_delta_simulation_is_exact_on_many_devices(num_devices):
    random_walk(soap_graphs.lenet(), num_devices, 50, 2, "ring", 9)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [4, 16, 64])
@pytest.mark.parametrize("name", GRAPHS)
def test_delta_simulation_is_exact_over_tens_of_thousands_of_moves(name, num_devices):
    num_moves = {4: 4000, 16: 2000, 64: 500}[num_devices]
    for sync in ("ring", "server"):
        random_walk(GRAPHS[name](), num_devices, num_moves // 2, 3, sync, 1)


SIX = ("alexnet", "inception", "resnet101", "rnntc", "rnnlm", "nmt")


def walk_over_a_large_model(name, num_devices, num_moves, every):
    """From data parallelism, whose task graph is small, to strategies that are more and more random."""
    graph = soap_graphs.flexflow(name)
    start = soap.data_parallel(graph, num_devices)
    random_walk(graph, num_devices, num_moves, 5, "ring", every, start)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [4, 16, 64])
@pytest.mark.parametrize("name", SIX)
def test_delta_simulation_is_exact_on_large_models(name, num_devices):
    """Thousands of moves each; every 100th timeline is compared, and errors would stay in those after it."""
    num_moves = {4: 2000, 16: 400, 64: 50}[num_devices]
    walk_over_a_large_model(name, num_devices, num_moves, {4: 100, 16: 50, 64: 25}[num_devices])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ("alexnet", "rnnlm"))
def test_delta_simulation_is_exact_on_large_models_for_a_while(name):
    walk_over_a_large_model(name, 4, 100, 25)


@pytest.mark.slow
def test_delta_simulation_is_exact_on_many_random_graphs():
    for seed in range(100):
        rng = np.random.default_rng(seed)
        graph = soap_graphs.random_graph(rng, 10)
        sync = "ring" if seed % 2 else "server"
        random_walk(graph, int(rng.choice([2, 3, 4, 6, 8])), 200, seed, sync, 1)


def test_the_same_change_twice_is_the_same_timeline():
    graph, machine = soap_graphs.lenet(), soap_graphs.machine(4)
    start = soap.data_parallel(graph, 4)
    one = simulator(graph, machine, start)
    wanted = soap_graphs.by_key(one.tasks, one.timeline)
    other = soap.Space(graph, 4).configs(3)[0]
    one.try_change(3, other)
    one.keep()
    assert soap_graphs.by_key(one.tasks, one.timeline) != wanted
    one.try_change(3, start[3])
    one.keep()
    assert soap_graphs.by_key(one.tasks, one.timeline) == wanted


def one_product(rows=8, inner=16, columns=32):
    return soap.trace(
        lambda w, x: x @ w,
        soap_graphs.weight(inner, columns),
        soap_graphs.weight(rows, inner),
    )


def test_data_parallel_step_in_closed_form():
    """A product split by rows: forward, backward, a ring of the gradient, an update."""
    graph = one_product()
    machine = soap.Machine("ring", (soap.Level(4, 1e6, 1e-3),), 1e6, 1e5, overhead=0.5)
    config = soap.Config((4, 1, 1), (0, 1, 2, 3))
    found = soap.simulate(graph, machine, (config,))
    flops = 2 * 8 * 16 * 32 / 4
    num_read, written = 4 * (2 * 16 + 16 * 32), 4 * 2 * 32
    forward = 0.5 + max(flops / 1e6, (num_read + written) / 1e5)
    backward = 0.5 + max(flops / 1e6, (2 * num_read + written) / 1e5)
    weight_bytes = 4 * 16 * 32
    ring = 1e-3 + 2 * 3 / 4 * weight_bytes / 1e6
    update = 0.5 + 7 * weight_bytes / 1e5
    total = forward + backward + ring + update
    assert found.seconds == pytest.approx(total, rel=1e-7)
    assert found.sent_bytes == 4 * 2 * 3 / 4 * weight_bytes
    # Weights, gradients and two arrays of the optimizer; the gradient by the result, and the rows of the input.
    assert found.memory_bytes == (4 * weight_bytes + written + 4 * 2 * 16,) * 4


def test_messages_take_turns_with_computing_where_nothing_overlaps():
    """The sums of the weights' gradients: beside the backwards, or the device does one after the other."""

    def two_layers(w, x):
        return (x @ w[0]) @ w[1]

    weights = [soap_graphs.weight(16, 32), soap_graphs.weight(32, 16)]
    graph = soap.trace(two_layers, weights, soap_graphs.weight(8, 16))
    machine = soap.Machine("two", (soap.Level(2, 1e4, 1e-3),), 1e6, 1e5, overhead=0.1)
    strategy = soap.data_parallel(graph, 2)
    found = {
        overlap: soap.simulate(graph, dataclasses.replace(machine, overlap=overlap), strategy)
        for overlap in (True, False)
    }
    messages = 2 * (1e-3 + 4 * 16 * 32 / 1e4)
    assert found[False].busy_seconds == pytest.approx(found[True].busy_seconds)
    one_after_the_other = found[True].busy_seconds[0] + messages
    assert found[False].seconds == pytest.approx(one_after_the_other, rel=1e-7)
    assert found[True].seconds < one_after_the_other - 0.1
    assert found[False].memory_bytes == found[True].memory_bytes


def peaks(graph, strategy, num_devices):
    """The most bytes of each device, from what it holds at every position of the step."""
    regions, n = Regions(graph), len(graph.operators)

    def has_backward(i):
        return graph.operators[i].has_backward

    def readers(tensor):
        return [i for i, o in enumerate(graph.operators) for each in o.inputs if each.tensor == tensor]

    def sizes(boxes):
        return np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1).tolist()

    def received(source, target, position):
        """Elements that each device reads of an input, if others have a part of it."""
        above, below = strategy[source], strategy[target]
        tensor = graph.operators[target].inputs[position].tensor
        wrote = regions.writes(source, tensor, above.degrees)
        read = regions.reads(target, position, below.degrees)
        found = {}
        for d in set(below.devices):
            common, senders = 0, set()
            for a, b in itertools.product(range(len(wrote)), range(len(read))):
                low = np.maximum(wrote[a, :, 0], read[b, :, 0])
                high = np.minimum(wrote[a, :, 1], read[b, :, 1])
                if below.devices[b] == d and (high > low).all():
                    common += int(np.prod(high - low))
                    senders.add(above.devices[a])
            if senders - {d}:
                found[d] = common
        return found

    def messages(source, target, position):
        """Device -> elements of the largest message, of those that are parts of their sender's array, that it sends or
        gets.
        """
        tensor = graph.operators[target].inputs[position].tensor
        above, below = strategy[source], strategy[target]
        largest: dict[int, int] = {}
        for sender, wrote in zip(above.devices, regions.writes(source, tensor, above.degrees)):
            for receiver, read in zip(below.devices, regions.reads(target, position, below.degrees)):
                low = np.maximum(wrote[:, 0], read[:, 0])
                high = np.minimum(wrote[:, 1], read[:, 1])
                common = int(np.prod(np.maximum(high - low, 0)))
                is_part = 0 < common < np.prod(wrote[:, 1] - wrote[:, 0])
                if sender != receiver and is_part:
                    for end in (sender, receiver):
                        largest[end] = max(largest.get(end, 0), common)
        return largest

    def of_input(i, position, shape):
        """Elements that each shard holds of an input of the function: all that is read if several shards read parts of
        each other's.

        Whether shards take their parts out of it is the second result.
        """
        boxes = regions.reads(i, position, strategy[i].degrees)
        readers_of = np.zeros(shape or (1,), int)
        for box in {box.tobytes(): box for box in boxes}.values():
            readers_of[tuple(slice(a, b) for a, b in box)] += 1
        if (readers_of > 1).any():
            used = np.argwhere(readers_of)
            return [int(np.prod(np.ptp(used, axis=0) + 1))] * len(boxes), True
        return sizes(boxes), False

    def held(t):
        """`(device, bytes)` at position t: forwards, then backwards in reverse, then the update."""
        for i, operator in enumerate(graph.operators):
            config = strategy[i]
            forward, backward = i, 2 * n - 1 - i
            for position, each in enumerate(operator.inputs):
                value = graph.tensors[each.tensor]
                if value.weight is None and value.producer is None:
                    if readers(each.tensor)[0] == i:
                        counts, takes_parts = of_input(i, position, value.shape)
                        yield from ((d, k * value.item_bytes) for d, k in zip(config.devices, counts))
                        last = backward if has_backward(i) else i
                        if takes_parts and forward <= t <= last:
                            parts = regions.reads(i, position, config.degrees)
                            yield from ((d, k * value.item_bytes) for d, k in zip(config.devices, sizes(parts)))
            for tensor in operator.outputs:
                value, used = graph.tensors[tensor], readers(tensor) or [i]
                # An elementwise operator writes its result to the place of what it reads last.
                in_place = graph.operators[max(used)].kind == "elementwise"
                last = max(i, max(used) - in_place)
                if value.kept_for is not None:
                    last = 2 * n - 1 - value.kept_for
                owned = sizes(regions.writes(i, tensor, config.degrees))
                kept = [
                    (j, k)
                    for j, o in enumerate(graph.operators)
                    for k, each in enumerate(o.inputs)
                    if each.tensor == tensor and each.kept
                ]
                replaced: set[int] = set()  # devices where the reader has its own
                if kept and {j for j, _ in kept} == {value.kept_for}:
                    if has_backward(value.kept_for) and t > max(used):
                        replaced = set(received(i, *kept[0]))
                computed = sizes(regions.results(i, tensor, config.degrees))
                item = value.item_bytes * operator.repeats
                times = int(forward <= t <= last)
                again = [j for j in used if has_backward(j)]
                with_gradient = bool(again) and has_backward(i) and value.has_gradient
                if with_gradient:
                    first = 2 * n - 1 - max(again)
                    end = backward - (operator.kind == "elementwise")
                    times += first <= t <= max(first, end)
                gone = int(forward <= t <= last)
                yield from ((d, (times - gone * (d in replaced)) * item * k) for d, k in zip(config.devices, owned))
                boxes = regions.results(i, tensor, config.degrees)
                if len({box.tobytes() for box in boxes}) < len(boxes):  # terms of sums
                    now = (t == forward) + (t == backward and with_gradient)
                    yield from ((d, now * item * k) for d, k in zip(config.devices, computed))
            for tensor in operator.residuals:
                value = graph.tensors[tensor]
                if forward <= t <= 2 * n - 1 - value.kept_for:
                    boxes = sizes(regions.results(i, tensor, config.degrees))
                    item = value.item_bytes * operator.repeats
                    yield from ((d, item * k) for d, k in zip(config.devices, boxes))
        for source, target, position in graph.edges:
            each = graph.operators[target].inputs[position]
            backward = 2 * n - 1 - target
            last = backward if each.kept else target
            value = graph.tensors[each.tensor]
            returned = value.has_gradient and min(has_backward(source), has_backward(target))
            times = (target <= t <= last) + (returned and t == backward)
            item = value.item_bytes * each.repeats
            yield from ((d, times * item * k) for d, k in received(source, target, position).items())
            # Copied out of the sender's array, and not yet in the receiver's.
            times = (t == target) + (returned and t == backward)
            yield from ((d, 2 * times * item * k) for d, k in messages(source, target, position).items())
        for weight, uses in graph.readers_of_weight.items():
            value = graph.tensors[weight]
            if not value.has_gradient:
                continue
            on_device: dict[int, np.ndarray] = {}
            for i, position in uses:
                for d, box in zip(strategy[i].devices, regions.reads(i, position, strategy[i].degrees)):
                    mask = on_device.setdefault(d, np.zeros(value.shape or (1,), bool))
                    mask[tuple(slice(a, b) for a, b in box)] = True
            first = 2 * n - 1 - max(i for i, _ in uses)
            for d, mask in on_device.items():
                yield d, int(mask.sum()) * value.item_bytes * (3 + (t >= first))

    most = np.zeros(num_devices, int)
    for t in range(2 * n + 1):
        now = np.zeros(num_devices, int)
        for device, num_bytes in held(t):
            now[device] += num_bytes
        most = np.maximum(most, now)
    return tuple(most.tolist())


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["branches", "lenet"])
def test_memory_is_the_peak_over_the_step(name):
    graph, machine = GRAPHS[name](), soap_graphs.machine(4)
    space, rng = soap.Space(graph, 4), np.random.default_rng(0)
    for _ in range(4):
        strategy = soap.random_strategy(space, rng)
        found = soap.simulate(graph, machine, strategy)
        assert found.memory_bytes == peaks(graph, strategy, 4)


@pytest.mark.parametrize(
    "options, expected",
    [
        # Weights and state 1.5, the input 1, a gradient of a weight 0.25, and gradients by the results of both
        # products, 0.5 each; what is gathered, and the gradient by it.
        ({}, 3.75 + 1 + 1),
        ({"product_item_bytes": 2}, 3.75 + 0.5 + 1),
        ({"product_item_bytes": 8}, 3.75 + 1 + 1),
        # Gradients are on the chip beside the input. The most is held in the second forward: both the columns and what
        # is gathered.
        ({"on_chip_bytes": 3 * 8192}, 2.5 + 0.5 + 1),
        # A product alone reads the columns.
        ({"on_chip_bytes": 3 * 8192, "product_item_bytes": 2}, 2.5 + 0.25 + 0.5),
        # Of the gradients by results one fits, and neither the input nor the gradient by what is gathered.
        ({"on_chip_bytes": 8192 // 2}, 3.25 + 1 + 1),
        # The input leaves no room.
        ({"on_chip_bytes": 8192}, 3.75 + 1 + 1),
    ],
)
def test_memory_of_what_is_gathered_for_a_product(options, expected):
    """Two products split by columns, by hand, in units of an array of all columns."""
    rows, width = 64, 32

    def loss(w, x):
        return (x @ w[0] @ w[1]).sum()

    weights = [soap_graphs.weight(width, width)] * 2
    graph = soap.trace(loss, weights, soap_graphs.weight(rows, width))
    products = [soap.Config((1, 2, 1), (0, 1))] * 2
    (total,) = graph.operators[2:]
    assert len(total.loops) == 2
    strategy = (*products, soap.Config((1, 2), (0, 1)))
    machine = dataclasses.replace(soap_graphs.machine(2), **options)
    array = rows * width * 4
    found = soap.simulate(graph, machine, strategy).memory_bytes
    # The sum of all numbers takes a few bytes.
    np.testing.assert_allclose(found, expected * array, atol=16)


@pytest.mark.parametrize(
    "options, expected",
    [
        # Half of the input 0.5, weights and state 0.75, a gradient 0.25; of the result's gradient a half, and all of
        # it, which is gathered.
        ({}, 3.0),
        # Rounded, that takes less than the forward: a term 1 and half of their sum 0.5.
        ({"product_item_bytes": 2}, 2.75),
    ],
)
def test_memory_of_the_gradient_by_a_sum_of_terms(options, expected):
    """A product split by its terms over two devices, by hand, in units of its result."""
    rows, width = 64, 32

    def loss(w, x):
        return (x @ w).sum()

    weight, x = soap_graphs.weight(width, width), soap_graphs.weight(rows, width)
    graph = soap.trace(loss, weight, x)
    strategy = soap.Config((1, 1, 2), (0, 1)), soap.Config((2, 1), (0, 1))
    machine = dataclasses.replace(soap_graphs.machine(2), **options)
    found = soap.simulate(graph, machine, strategy).memory_bytes
    array = rows * width * 4
    np.testing.assert_allclose(found, expected * array, atol=16)


@pytest.mark.parametrize(
    "options, expected",
    [
        # The input 1, five of its eight rows 0.625, half of the result's gradient 1; weights, state and gradient.
        ({}, (2.625, 4)),
        ({"product_item_bytes": 2}, (2.3125, 4)),
        # In the forward the input leaves no room for the result on the chip. In the backward it is there no more.
        ({"on_chip_bytes": 4096}, (2.625, 3)),
    ],
)
def test_memory_of_windows_of_an_input(options, expected):
    """A convolution split by rows over two devices, by hand, in units of its input and its kernel."""

    def loss(w, x):
        return soap_graphs.convolution(x, w).sum()

    kernel, x = soap_graphs.weight(3, 3, 2, 4), soap_graphs.weight(4, 8, 16, 2)
    graph = soap.trace(loss, kernel, x)
    assert [each.kind for each in graph.operators][:2] == [
        "conv_general_dilated",
        "reduce_sum",
    ]
    strategy = (
        soap.Config((1, 2, 1, 1, 1), (0, 1)),
        soap.Config((1, 2, 1, 1), (0, 1)),
    )
    machine = dataclasses.replace(soap_graphs.machine(2), **options)
    found = soap.simulate(graph, machine, strategy).memory_bytes
    of_input, of_kernel = expected
    array, weight = 4 * 8 * 16 * 2 * 4, 3 * 3 * 2 * 4 * 4
    np.testing.assert_allclose(found, of_input * array + of_kernel * weight, atol=16)


def test_messages_are_not_on_the_chip():
    """Two convolutions split by rows over two devices, by hand, in units of their arrays, with room for all arrays on
    the chip.
    """

    def loss(w, x):
        return soap_graphs.convolution(soap_graphs.convolution(x, w[0]), w[1]).sum()

    kernels, x = [soap_graphs.weight(3, 3, 2, 2)] * 2, soap_graphs.weight(4, 8, 16, 2)
    graph = soap.trace(loss, kernels, x)
    rows = soap.Config((1, 2, 1, 1, 1), (0, 1))
    strategy = rows, rows, soap.Config((1, 2, 1, 1), (0, 1))
    machine = dataclasses.replace(soap_graphs.machine(2), on_chip_bytes=2**30)
    found = soap.simulate(graph, machine, strategy).memory_bytes
    array, weight = 4 * 8 * 16 * 2 * 4, 3 * 3 * 2 * 2 * 4
    # In the backward of the second: the input, five of its eight rows and of those of the first result, the gradient by
    # these, and a message of a row at both of its ends.
    expected = (1 + 3 * 5 / 8 + 2 / 8) * array + 7 * weight
    np.testing.assert_allclose(found, expected, atol=16)


def test_less_is_held_at_a_time_than_in_all():
    """A deep chain frees activations as gradients come."""

    def loss(w, x):
        for each in w:
            x = jnp.tanh(x @ each)
        return x.sum()

    rows, width, depth = 512, 16, 8
    graph = soap.trace(
        loss,
        [soap_graphs.weight(width, width)] * depth,
        soap_graphs.weight(rows, width),
    )
    (peak,) = soap.simulate(graph, soap_graphs.machine(1), soap.data_parallel(graph, 1)).memory_bytes
    weights, array = depth * width * width * 4, rows * width * 4
    # Of each layer the product or its tanh, and the input; a gradient and what comes of it.
    kept = (depth + 1) * array
    assert kept + 3 * weights < peak < kept + 4 * weights + 3 * array


def test_a_split_sum_is_scattered_and_gathered():
    graph = one_product()
    machine = soap.Machine("two", (soap.Level(2, 1e6, 1e-3),), 1e6, 1e5, overhead=0.5)
    found = soap.simulate(graph, machine, (soap.Config((1, 1, 2), (0, 1)),))
    half = 4 * 8 * 32 // 2
    # Each shard sends half of its part of the result, and gets half of the gradient. No weights are shared.
    assert found.sent_bytes == 4 * half
    num_read = 4 * (8 * 8 + 8 * 32)
    flops = 2 * 8 * 8 * 32
    forward = 0.5 + max(flops / 1e6, (num_read + 2 * half) / 1e5)
    backward = 0.5 + max(flops / 1e6, (2 * num_read + 2 * half) / 1e5)
    message, add = 1e-3 + half / 1e6, 0.5 + 3 * half / 1e5
    update = 0.5 + 7 * (4 * 8 * 32) / 1e5
    total = forward + message + add + message + backward + update
    assert found.seconds == pytest.approx(total, rel=1e-7)


def test_bytes_are_intersections_of_regions():
    """Rows on two devices, then columns on two devices: each device lacks half of the rows."""
    graph = soap.trace(
        lambda w, x: jnp.cumsum(x @ w, 0),
        soap_graphs.weight(4, 8),
        soap_graphs.weight(6, 4),
        backward=False,
    )
    assert [each.kind for each in graph.operators] == ["dot_general", "cumsum"]
    machine = soap_graphs.machine(2)
    by_rows, by_columns = soap.Config((2, 1, 1), (0, 1)), soap.Config((1, 2), (0, 1))
    found = soap.simulate(graph, machine, (by_rows, by_columns))
    assert found.sent_bytes == 2 * (3 * 4) * 4
    whole = soap.simulate(graph, machine, (by_rows, soap.Config((1, 1), (1,))))
    assert whole.sent_bytes == 3 * 8 * 4


def test_wrong_strategies():
    graph, machine = one_product(), soap_graphs.machine(4)
    for config, words in [
        (soap.Config((3, 1, 1), (0, 1, 2)), "8 turns, which cannot be split into 3"),
        (soap.Config((2, 1), (0, 1)), "has 3 loops, got 2 degrees"),
        (soap.Config((2, 1, 1), (0,)), "make 2 shards, got 1 devices"),
        (soap.Config((2, 1, 1), (0, 7)), "there is no device 7"),
        (soap.Config((0, 1, 1), ()), "cannot be split into 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            soap.simulate(graph, machine, (config,))
    with pytest.raises(ValueError, match="belongs to another graph"):
        soap.simulate(graph, machine, ())
    with pytest.raises(ValueError, match="`sync` must be"):
        soap.simulate(graph, machine, (soap.Config((1, 1, 1), (0,)),), sync="tree")
    weight = soap_graphs.weight
    top = soap.trace(lambda w, x: jax.lax.top_k(x * w, 2)[0], weight(), weight(4, 8))
    configs = [soap.Config((1,) * len(o.loops), (0,)) for o in top.operators]
    configs[-1] = soap.Config((1, 2), (0, 1))
    with pytest.raises(ValueError, match="loop 1 .* cannot be split, got degree 2"):
        soap.simulate(top, machine, configs)
