"""`jpipe.memory.pack_chunks` on random tensors, and on all models."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
import models
from jpipe.memory import best_chunk_size, pack_chunks

MODELS = {
    model.__name__: model
    for model in vars(models).values()
    if isinstance(model, type) and hasattr(model, "layers") and model is not models.Whole
}


def abstract_sizes(model):
    sizes, layers = [], model.layers()
    for factory in [layers] if callable(layers) else layers:  # a whole model, or its layers
        make = getattr(factory, "layer", factory)  # of a skip
        module = nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0)))
        leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
        sizes += [a.size for a in leaves]
    return sizes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in ("BERT", "Inception", "Translation") else name
        for name in MODELS
    ],
)
def test_every_model_fills_its_chunks(name):
    sizes = abstract_sizes(MODELS[name]())
    layout = pack_chunks(sizes, best_chunk_size(sizes))
    assert layout.utilisation >= 0.9
    check(layout, sizes)


def check(layout, sizes):
    """Every tensor lies in one chunk, in order, and none meets another."""
    taken = {}
    for i, size in enumerate(sizes):
        start = layout.offset[i]
        assert 0 <= start <= start + size <= layout.chunk_size
        assert start >= taken.get(layout.chunk[i], 0)
        taken[layout.chunk[i]] = start + size
    assert list(layout.chunk) == sorted(layout.chunk)
    assert layout.num_chunks == len(taken)
    assert layout.utilisation == sum(sizes) / (layout.num_chunks * layout.chunk_size)


def test_random_tensors_against_all_sizes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, 30, rng.integers(1, 9)).tolist()
        best = best_chunk_size(sizes)
        check(pack_chunks(sizes, best), sizes)
        filled = {n: pack_chunks(sizes, n).utilisation for n in range(max(sizes), 8 * max(sizes) + 1)}
        assert filled[best] == max(filled.values())
        assert best == min(n for n in filled if filled[n] == filled[best])


def test_fourteen_bytes_a_parameter():
    """Of real arrays: weights in bfloat16, a float32 copy, and Adam's two moments; gradients lie over the weights."""
    weights = {"a": jnp.zeros((30, 40), jnp.bfloat16), "b": jnp.zeros(48, jnp.bfloat16)}
    master = jax.tree.map(lambda a: a.astype(jnp.float32), weights)
    adam, _ = optax.adam(1e-3).init(master)
    arrays = jax.tree.leaves((weights, master, adam.mu, adam.nu))
    num_weights = 30 * 40 + 48
    assert sum(a.nbytes for a in arrays) == 14 * num_weights
    gradients = jax.tree.map(jnp.zeros_like, weights)
    for weight, gradient in zip(*map(jax.tree.leaves, (weights, gradients))):
        assert gradient.nbytes == weight.nbytes  # it fits the place of its weight
    layout = pack_chunks([30 * 40, 48], num_weights)
    assert layout.num_bytes() == 14 * num_weights
    assert layout.num_bytes([4, 4, 4]) == 12 * num_weights
    assert layout.tensors(0) == [0, 1]


def test_wrong_inputs():
    with pytest.raises(ValueError, match="`chunk_size` must be at least 9, .* got 8"):
        pack_chunks([3, 9], 8)
    with pytest.raises(ValueError, match="`most` must be at least 9"):
        best_chunk_size([3, 9], most=8)
    for wrong in ([], [3, 0]):
        with pytest.raises(ValueError, match="`sizes` must hold at least one tensor"):
            pack_chunks(wrong, 8)


def test_offload_moves_no_room_that_no_tensor_fills():
    """What `Offload` moves instead: pieces of at most a chunk, of all bytes of the state and no others."""
    sizes = [(128, 256), (256, 128), (128, 128)]
    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, *size, param_dtype=jnp.bfloat16) for size in sizes],
        loss=lambda outputs, batch: jnp.mean(outputs**2),
        optimizer=jpipe.optim.master_weights(optax.adamw(1e-3)),
        schedule=jpipe.schedules.gpipe(1, 2),
        offload=jpipe.Offload(optimizer=1.0, chunk=4096),
    )
    batch = {"inputs": jax.ShapeDtypeStruct((4, 128), jnp.bfloat16)}
    group = pipe._program(batch).engine.layout["optimizer_state"]
    pools = [group.shapes[name] for name in group.on_host]  # [1, pieces, *piece]
    numbers = [number for rows, columns in sizes for number in (rows * columns, columns)]
    assert sum(a.size * a.dtype.itemsize for a in pools) == 12 * sum(numbers)
    assert all(math.prod(a.shape[2:]) <= 4096 for a in pools)
    assert sum(a.shape[1] for a in pools) == 3 * sum(-(-number // 4096) for number in numbers)
    layout = pack_chunks(numbers, best_chunk_size(numbers))
    assert layout.num_bytes([4, 4, 4]) >= 12 * sum(numbers)
