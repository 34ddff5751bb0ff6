"""The optimizer on stages against the optimizer on the whole model."""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jpipe import optim
from jpipe.layers.as_layers import as_layers
from jpipe.layers.trace import trace_evaluation
from jpipe.lowering.target import CPU, GPU
from jpipe.stages.cut import cut
from jpipe.stages.optimizer import make_updates
from jpipe.stages.optimizer_tree import stage_tree

WIDTHS = [3, 4, 4, 4, 2]
UNLIKE_WIDTHS = [3, 5, 4, 7, 2, 6]


def linear_layers(widths):
    return [lambda rngs, n=n, m=m: nnx.Linear(n, m, rngs=rngs) for n, m in itertools.pairwise(widths)]


LAYERS = linear_layers(WIDTHS)


@pytest.fixture(autouse=True)
def as_optax_is_written():
    with jax.numpy_dtype_promotion("standard"):
        yield


def stages_of(num_stages, layers=LAYERS, width=WIDTHS[0], block=None, target=CPU):
    layers = as_layers(layers)
    inputs = {"inputs": jax.ShapeDtypeStruct((2, width), np.float32)}
    stages = cut(trace_evaluation(layers, inputs), None, num_stages, target=target)
    if block is None:
        return stages
    vectors = stages.vectors._replace(update_block=block)
    return dataclasses.replace(stages, vectors=vectors)


def random_like(stages, seed):
    rng = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), layer.parameters) for layer in stages.layers
    ]


def unknown(like):
    value = np.nan if jnp.issubdtype(like.dtype, jnp.inexact) else -1
    return np.full(like.shape, value, like.dtype)


def on_stages(stages, optimizer, params, gradients, delay=0.0, global_norm=1.0):
    """Weights after one update per gradient, stage by stage, in packed arrays like the engine's."""
    updates = make_updates(stages, optimizer, one_row=stages.vectors.whole)
    params = list(params)
    given = [np.float32(x) for x in (delay, 0.0, global_norm)]
    for s in range(stages.num_stages):
        update = updates.programs[updates.program_of_stage[s]]
        arrays = {
            name: jax.tree.map(unknown, like)
            for name, like in (
                ("parameters", stages.parameters.arrays),
                ("gradients", stages.parameters.arrays),
                ("optimizer_state", updates.state.arrays),
            )
        }

        def at(slot, i, arrays=arrays):
            """The views of a leaf, one a copy."""
            return [arrays[slot.arrays][place.array][starts[i, 0] :][: place.block[0]] for place, starts in slot.copies]

        def fill(name, places, leaves, arrays=arrays):
            for place, leaf in zip(places, leaves, strict=True):
                start = place.start()
                view = arrays[name][place.array][start:][: place.block[0]]
                view[:] = np.asarray(leaf).reshape(place.block)

        def load(slot, i):
            return at(slot, i)[0].reshape(slot.copies[0][0].shape)

        seen = stage_tree(stages, s, params)
        places = [dataclasses.replace(place, base=place.start(row)) for ((place, row),) in update.parameters]
        fill("parameters", places, jax.tree.leaves(seen))
        whole = [piece.place for (piece,) in update.state]
        fill("optimizer_state", whole, jax.tree.leaves(optimizer.init(seen)))
        for gradient in gradients:
            gradient = jax.tree.leaves(stage_tree(stages, s, gradient))
            fill("gradients", places, gradient)
            shared = [np.array(load(slot, 0)) for slot in update.shared]
            for group in update.groups:
                kept = group.kept
                for i in range(group.num_turns):
                    inputs = [load(slot, i) for slot in group.inputs]
                    values = group.run(*inputs, *shared, *given)
                    for slot, value in zip(group.outputs, values, strict=True):
                        for view in at(slot, i):
                            changed = slice(kept[i, 0], len(view) - kept[i, 1])
                            new = np.asarray(value).reshape(view.shape)
                            view[changed] = new[changed]
        tree = jax.tree.structure(seen)
        leaves = [arrays["parameters"][p.array][p.base :][: p.block[0]].reshape(p.shape) for p in places]
        for i, layer in enumerate(tree.unflatten(leaves)):
            if i in stages.layers_of(s):
                params[i] = layer
    return params


def on_one_device(optimizer, params, gradients):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_updates_as_one_device(stages, optimizer):
    params = random_like(stages, 0)
    gradients = [random_like(stages, 1 + k) for k in range(3)]
    got = on_stages(stages, optimizer, params, gradients)
    want = on_one_device(optimizer, params, gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def kernels(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", tree)


def frozen_from_layer_two(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "frozen" if path[0].idx >= 2 else "trained", tree)


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "decay of kernels": optax.adamw(0.1, weight_decay=0.5, mask=kernels),
    "labels": optax.multi_transform(
        {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()},
        frozen_from_layer_two,
    ),
    "learning-rate schedule": optax.sgd(optax.linear_schedule(1.0, 0.0, 4)),
    "clipped": optax.chain(optax.clip(0.5), optax.clip_by_block_rms(0.3), optax.sgd(0.1)),
}


@pytest.mark.first_case
@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_update_as_one_device_does(name, num_stages):
    assert_updates_as_one_device(stages_of(num_stages), OPTIMIZERS[name])


@pytest.mark.first_case
@pytest.mark.parametrize("block", [7, None])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(2)
def test_vectors_are_updated_in_blocks(name, block):
    """Layers of unlike shapes, whose weights are in flat vectors; 7 numbers cut through kernels."""
    stages = stages_of(3, linear_layers(UNLIKE_WIDTHS), block=block)
    assert_updates_as_one_device(stages, OPTIMIZERS[name])


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["adam", "momentum", "learning-rate schedule"])
def test_groups_do_not_grow_with_the_shapes(name):
    """Blocks of one size on all stages, and nothing else; every number of a vector is updated once."""
    stages = stages_of(3, linear_layers(UNLIKE_WIDTHS), block=7)
    updates = make_updates(stages, OPTIMIZERS[name])
    for s, update in enumerate(updates.programs):
        (group,) = [g for g in update.groups if g.inputs]  # the others count steps
        written = [
            index
            for slots in group.outputs
            if slots.arrays == "parameters"
            for place, starts in slots.copies
            for (start,), (done, padded) in zip(starts, group.kept, strict=True)
            for index in range(start + done, start + place.block[0] - padded)
        ]
        assert sorted(written) == list(range(stages.parameters.used_bytes[s] // 4))
    (merged,) = updates.merged["update"]
    (group,) = [g for g in merged.groups if g.inputs]
    assert group.kept.any()  # vectors of 44 and 34 numbers, beside one of 35
    assert group.num_turns == sum(g.num_turns for u in updates.programs for g in u.groups if g.inputs)


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["adam", "momentum", "learning-rate schedule"])
def test_a_vector_alone_in_its_arrays_is_updated_at_once(name):
    """Stages of 44, 35 and 34 numbers: one block with the padding behind it, and each moment in an array of its own."""
    stages = stages_of(3, linear_layers(UNLIKE_WIDTHS), target=GPU)
    updates = make_updates(stages, OPTIMIZERS[name], one_row=True)
    (size,) = (a.size for a in stages.parameters.arrays.values())
    padding = set()
    for s, update in enumerate(updates.programs):
        (group,) = [g for g in update.groups if g.inputs]
        assert group.num_turns == 1
        ((at_start, at_end),) = group.kept
        padding.add(int(at_end))
        assert at_start == 0
        assert size - at_end == stages.parameters.used_bytes[s] // 4
        for slots in [*group.inputs, *group.outputs]:
            ((place, _),) = slots.copies
            assert place.shape == (size,)
        moments = [s for s in group.outputs if s.arrays == "optimizer_state"]
        arrays = {place.array for slots in moments for place, _ in slots.copies}
        assert len(arrays) == len(moments)
    assert len(padding) > 1
    assert_updates_as_one_device(stages, OPTIMIZERS[name])


def test_vectors_beside_others_are_updated_in_blocks():
    """A mask treats kernels and biases unlike, and several versions of weights are rows of one array."""
    stages = stages_of(3, linear_layers(UNLIKE_WIDTHS), target=GPU)
    mask = OPTIMIZERS["decay of kernels"]
    for optimizer, one_row in ((mask, True), (OPTIMIZERS["adam"], False)):
        for update in make_updates(stages, optimizer, one_row=one_row).programs:
            assert not any(group.kept.any() for group in update.groups)
    assert_updates_as_one_device(stages, mask)


def test_the_chain_sees_none_for_layers_of_other_stages():
    seen = []

    def see(updates, state, params=None):
        seen.append([[i for i, layer in enumerate(t) if layer is not None] for t in (updates, params)])
        return updates, state

    optimizer = optax.GradientTransformation(lambda params: (), see)
    stages = stages_of(3)
    make_updates(stages, optimizer)
    mine = [list(stages.layers_of(s)) for s in range(3)]
    assert sorted(sum(mine, [])) == [0, 1, 2, 3]
    assert all(updates == params for updates, params in seen)
    # All layers together are traced too, to see whether the chain mixes them.
    found = [m for m, _ in itertools.groupby(m for m, _ in seen) if m != [0, 1, 2, 3]]
    assert found == mine


def test_stage_tree():
    stages = stages_of(2)
    trees = [layer.parameters for layer in stages.layers]
    first, second = (stage_tree(stages, s, trees) for s in range(2))
    cut_at = stages.starts[1]
    assert first == trees[:cut_at] + [None] * (4 - cut_at)
    assert second == [None] * cut_at + trees[cut_at:]


def test_delay_and_global_norm_reach_the_chain():
    def update(updates, state, params=None, *, delay, global_norm, **extra):
        return jax.tree.map(lambda g: -g * delay / global_norm, updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    stages = stages_of(2)
    params, gradient = random_like(stages, 0), random_like(stages, 1)
    chain = optax.chain(optax.clip(0.5), optimizer)  # passes them on
    got = on_stages(
        stages,
        chain,
        params,
        [gradient],
        delay=jnp.float32(6),
        global_norm=jnp.float32(4),
    )
    want = jax.tree.map(lambda p, g: p - 1.5 * np.clip(g, -0.5, 0.5), params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), got, want)


def scale_by_last_norm():
    """Mixes layers only through its state, one update later."""

    def update(updates, norm, params=None):
        scaled = jax.tree.map(lambda g: g / (1 + norm), updates)
        return scaled, optax.tree.norm(updates)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def scale_by_sizes():
    """Depends on the weights of all layers, not on their gradients."""

    def update(updates, state, params=None):
        size = optax.tree.norm(params)
        return jax.tree.map(lambda g: g * size, updates), state

    return optax.GradientTransformation(lambda params: (), update)


def mean_over_leaves():
    """Depends on how many leaves there are."""

    def update(updates, state, params=None):
        count = len(jax.tree.leaves(updates))
        return jax.tree.map(lambda g: g / count, updates), state

    return optax.GradientTransformation(lambda params: (), update)


def scale_by_initial_norm():
    """Mixes layers in its first state alone."""

    def update(updates, norm, params=None):
        return jax.tree.map(lambda g: g / norm, updates), norm

    return optax.GradientTransformation(optax.tree.norm, update)


MIXING = {
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "clip after": optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0)),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "by its state": scale_by_last_norm(),
    "by its first state": scale_by_initial_norm(),
    "by weights": scale_by_sizes(),
    "by number": mean_over_leaves(),
}


@pytest.mark.first_case
@pytest.mark.parametrize("num_stages", [2, 4])  # 4: a layer a stage
@pytest.mark.parametrize("name", MIXING)
def test_optimizers_that_mix_layers_are_refused(name, num_stages):
    message = (
        "`optimizer` lets the update of one layer depend on others: that of "
        r"parameters\[0\]\['bias'\] on stage 0"
    )
    with pytest.raises(ValueError, match=message):
        make_updates(stages_of(num_stages), MIXING[name])


def test_noise_by_the_number_of_leaves_is_refused():
    noise = optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1))
    with pytest.raises(ValueError, match="depend on others.*add_noise"):
        make_updates(stages_of(2), noise)
    with pytest.raises(ValueError, match=r"keeps \[0\].rng_key of dtype key<.*key_data"):
        make_updates(stages_of(1), noise)


def test_state_that_is_only_looked_at_may_mix():
    """A stage sees its own norm, but no weight depends on a norm."""
    seen = optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(0.1))
    make_updates(stages_of(2), seen)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.polyak_sgd(), "the model: TypeError: .*'value'.*such as the loss"),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "the model: AttributeError: .*fast"),
    ],
    ids=["asks for the loss", "asks for other weights"],
)
def test_optimizers_that_ask_for_more_are_refused(optimizer, message, num_stages):
    with pytest.raises(ValueError, match=f"(?s)`optimizer` cannot update {message}"):
        make_updates(stages_of(num_stages), optimizer)


def test_side_effects_of_an_update_are_refused():
    def update(gradients, state, params=None):
        jax.debug.print("{}", optax.tree.norm(gradients))
        return gradients, state

    printing = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match=r"side effects \(Debug\) in its update"):
        make_updates(stages_of(2), optax.chain(printing, optax.sgd(0.1)))


def test_masks_that_are_trees_are_refused():
    mask = [{"kernel": True, "bias": False}] * 4
    optimizer = optax.adamw(0.1, mask=mask)
    make_updates(stages_of(1), optimizer)
    message = "(?s)`optimizer` cannot update stage 0 by itself.*Give masks and labels as functions"
    with pytest.raises(ValueError, match=message):
        make_updates(stages_of(2), optimizer)
    # A mask of one layer, and JAX's words for it, which name no argument of the user's.
    masked = optax.masked(optax.sgd(0.1), {"kernel": True, "bias": False})
    with pytest.raises(ValueError, match="the mask of `optax.masked`") as caught:
        make_updates(stages_of(2), masked)
    assert "pytree structure error" not in str(caught.value)


CLIP = optim.clip_by_global_norm(0.1)


@pytest.mark.first_case
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "warns"),
    [
        (optax.chain(CLIP, optax.adam(0.1)), False),
        (optax.sgd(0.1), False),
        (optax.chain(optax.adam(0.1), CLIP), True),
        (optax.chain(optax.masked(CLIP, kernels), optax.sgd(0.1)), True),
    ],
    ids=["first", "not at all", "last", "masked"],
)
def test_clipping_anything_but_the_gradient_warns(optimizer, warns, num_stages):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_updates(stages_of(num_stages), optimizer)
    texts = [str(w.message) for w in caught]
    assert warns == any("`jpipe.optim.clip_by_global_norm` first" in t for t in texts)


@pytest.mark.first_case
@pytest.mark.parametrize("name", MIXING)
def test_one_stage_may_mix_its_layers(name):
    stages = stages_of(1)
    params, gradient = random_like(stages, 0), random_like(stages, 1)
    got = on_stages(stages, MIXING[name], params, [gradient])
    want = on_one_device(MIXING[name], params, [gradient])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_equal_stages_share_an_update():
    equal = [LAYERS[1]] * 4
    assert len(make_updates(stages_of(4, equal, 4), optax.adam(0.1)).programs) == 1
    # The label of a layer is part of its update.
    assert make_updates(stages_of(4, equal, 4), OPTIMIZERS["labels"]).program_of_stage == [0, 0, 1, 1]
    # Longer runs have more leaves.
    assert len(make_updates(stages_of(3, equal, 4), optax.adam(0.1)).programs) == 2


def test_state_packing_by_hand():
    # Adam keeps a count and two moments: layers of 16, 20, 20 and 10 numbers, 2 a stage.
    stages = stages_of(2)
    assert stages.starts == [0, 2, 4]
    state = make_updates(stages, optax.adam(0.1)).state
    assert list(state.used_bytes) == [4 + 2 * 4 * 36, 4 + 2 * 4 * 30]
    assert state.num_bytes >= max(state.used_bytes)
    assert make_updates(stages, optax.sgd(0.1)).state.num_bytes == 0
