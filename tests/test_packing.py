"""Packing: every leaf comes back from where it was put, and bytes are counted."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import packing
from jpipe.packing import Leaf, Packing


def aval(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# Two owners: what both have is pooled, what one has is flat.
OWNERS = [
    [(aval(3, 2), 2), (aval(), 1), (aval(7), 1), (aval(5, dtype=np.int32), 1)],
    [(aval(3, 2), 3), (aval(), 1), (aval(3, 2), 1), (aval(2, 2), 1), (aval(2, 2), 2)],
]


def arrays_of(pack, *lead, fill=0):
    return {name: jnp.full((*lead, *a.shape), fill, a.dtype) for name, a in pack.arrays.items()}


def leaf(j, i, place, dtype):
    """Numbers that no other leaf has."""
    size = int(np.prod(place.shape))
    return (100 * j + 10 * i + np.arange(size)).astype(dtype).reshape(place.shape)


@pytest.mark.parametrize("occupancy", [0.0, 0.5, np.inf])  # all pools, some, none
@pytest.mark.parametrize("owner", [0, 1])
def test_every_leaf_comes_back(owner, occupancy):
    pack = Packing.of(OWNERS, occupancy)
    places = pack.places[owner]
    want = {
        (j, i): leaf(j, i, place, pack.arrays[place.array].dtype)
        for j, place in enumerate(places)
        for i in range(place.count)
    }
    arrays = arrays_of(pack, 2, 3)
    for (j, i), value in want.items():
        arrays = packing.write(arrays, places[j], [1, 2], jnp.asarray(value), i)
    for (j, i), value in want.items():
        got = packing.read(arrays, places[j], [1, 2], i)
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    for array in arrays.values():  # other rows were left alone
        assert not np.asarray(array)[0].any() and not np.asarray(array)[1, :2].any()


def test_pools_hold_what_most_owners_have():
    pack = Packing.of(OWNERS)
    flat = [[place.flat for place in places] for places in pack.places]
    # [7] and the integers are owner 0's alone: half of two owners, so still pooled;
    # among three owners a third of the pool would be used.
    assert flat == [[False] * 4, [False] * 5]
    pack = Packing.of([*OWNERS, [(aval(3, 2), 4), (aval(), 1)]])
    flat = [[place.flat for place in places] for places in pack.places]
    assert flat == [
        [False, False, True, True],
        [False, False, False, True, True],
        [False] * 2,
    ]


def test_a_pool_that_one_owner_fills_is_flat():
    # 1 + 1 + 9 rows used of 3 x 9.
    pack = Packing.of([[(aval(4), 1)], [(aval(4), 1)], [(aval(4), 9)]])
    assert all(place.flat for places in pack.places for place in places)
    assert pack.arrays["float32"].shape == (36,)


def test_bytes_by_hand():
    pack = Packing.of([*OWNERS, [(aval(3, 2), 4), (aval(), 1)]])
    # Pools [3, 2] of 4 rows, laid out as [6], and [] of 1 row; vectors of max(7, 12, 0) and 5.
    assert {name: a.shape for name, a in pack.arrays.items()} == {
        "float32": (12,),
        "float32[3, 2]": (4, 6),
        "float32[]": (1,),
        "int32": (5,),
    }
    assert pack.num_bytes == 4 * (12 + 24 + 1 + 5)
    assert list(pack.used_bytes) == [4 * (12 + 1 + 7 + 5), 4 * (24 + 1 + 4 + 8), 4 * 25]


@pytest.mark.parametrize(
    "shape,stored",
    [
        ((4, 256, 1), (4, 256)),
        ((1, 4, 256, 4, 64), (4, 256, 256)),
        ((300, 5, 3), (4500,)),
        ((7, 128), (7, 128)),
        ((1,), ()),
        ((), ()),
    ],
)
def test_rows_fill_tiles(shape, stored):
    pack = Packing.of([[(aval(*shape), 3)]])
    (array,) = pack.arrays.values()
    assert array.shape == (3, *stored)
    place = pack.places[0][0]
    value = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    arrays = packing.write(arrays_of(pack, 2), place, [1], value, 2)
    np.testing.assert_array_equal(packing.read(arrays, place, [1], 2), value)


def test_what_may_be_split_keeps_its_shape():
    pack = Packing.of([[(aval(4, 8, 1), 3, (None, "model", None))]])
    assert [a.shape for a in pack.arrays.values()] == [(3, 4, 8, 1)]


def test_bytes_of_mixed_dtypes():
    pack = Packing.of([[(aval(3, dtype=np.float16), 2), (aval(3, dtype=np.int8), 1)]])
    assert pack.num_bytes == 15 and list(pack.used_bytes) == [15]


@pytest.mark.parametrize("occupancy", [0.0, np.inf])
def test_rows_may_be_traced(occupancy):
    pack = Packing.of(OWNERS, occupancy)
    place = pack.places[1][0]

    @jax.jit
    def fill(arrays):
        def body(i, arrays):
            value = jnp.full(place.shape, i, jnp.float32)
            return packing.write(arrays, place, [i % 2], value, i)

        return jax.lax.fori_loop(0, place.count, body, arrays)

    arrays = fill(arrays_of(pack, 2))
    for i in range(place.count):
        got = jax.jit(lambda a, i: packing.read(a, place, [i % 2], i))(arrays, i)
        np.testing.assert_array_equal(got, np.full(place.shape, i))


def test_add():
    pack = Packing.of(OWNERS)
    place, other = pack.places[1][0], pack.places[1][2]
    arrays = arrays_of(pack, 1, fill=1)
    arrays = packing.add_all(arrays, [place], [0], [jnp.full(place.shape, 2.0)], 1)
    np.testing.assert_array_equal(packing.read(arrays, place, [0], 1), np.full((3, 2), 3.0))
    for p, i in ((place, 0), (place, 2), (other, 0)):
        np.testing.assert_array_equal(packing.read(arrays, p, [0], i), np.ones((3, 2)))


@pytest.mark.parametrize("occupancy", [0.0, 0.5, np.inf])
@pytest.mark.parametrize("joined", [False, True])
def test_read_all_write_all_and_add_all(joined, occupancy):
    pack = Packing.of(OWNERS, occupancy)
    places = pack.places[1]
    values = [jnp.asarray(leaf(j, 0, p, np.float32)) for j, p in enumerate(places)]
    arrays = packing.write_all(arrays_of(pack), places, [], values, joined=joined)
    for got, want in zip(packing.read_all(arrays, places, []), values, strict=True):
        np.testing.assert_array_equal(got, want)
    arrays = packing.add_all(arrays, places, [], values, joined=joined)
    for got, want in zip(packing.read_all(arrays, places, []), values, strict=True):
        np.testing.assert_array_equal(got, 2 * want)
    written = sum(p.shape and np.prod(p.shape) or 1 for p in places)
    assert sum(np.count_nonzero(a) for a in arrays.values()) <= written
    with pytest.raises(ValueError, match="shorter"):
        packing.write_all(arrays, places, [], values[:-1], joined=joined)


def num_writes(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    return sum(e.primitive.name == "dynamic_update_slice" for e in jaxpr.eqns)


def test_adding_goes_over_the_leaf_alone():
    """At a constant index too, no kernel reads the array that it writes by a slice of its own."""
    leaves = [(aval(64, 3), 1), (aval(5000, 20), 1), (aval(7), 1)]
    pack = Packing.of([leaves], np.inf)  # all in one vector
    places = pack.places[0]

    def add(arrays, values):
        return packing.add_all(arrays, places, [0], values)

    values = [jnp.ones(place.shape) for place in places]
    lowered = jax.jit(add, donate_argnums=0).lower(arrays_of(pack, 1), values)
    options = {"xla_backend_optimization_level": 0}
    kernels = lowered.compile(options).as_text().split("\n\n")
    writers = [k for k in kernels if "ROOT" in k and "dynamic-update-slice(" in k]
    writers = [k for k in writers if "fused_computation" in k]
    assert writers and not any(" slice(" in kernel for kernel in writers)


@pytest.mark.parametrize("occupancy", [0.0, np.inf])
def test_what_a_layer_writes_lies_side_by_side(occupancy):
    # Three layers with two matrices and two vectors each, then a layer with one matrix.
    run = [(aval(3, 2), 3), (aval(4), 3), (aval(3, 2), 3), (aval(4), 3)]
    pack = Packing.of([[*run, (aval(3, 2), 1)]], occupancy)
    places = pack.places[0][:4]
    arrays = arrays_of(pack, 2)
    want = arrays
    for i in range(3):
        values = [jnp.asarray(leaf(j, i, p, np.float32)) for j, p in enumerate(places)]

        def write(arrays, joined, i=i, values=values):
            return packing.write_all(arrays, places, [1], values, i, joined=joined)

        # One write per pool, or one into the vector.
        assert num_writes(lambda a: write(a, True), arrays) == len(pack.arrays)
        assert num_writes(lambda a: write(a, False), arrays) == 4
        arrays, want = write(arrays, True), write(want, False)
    jax.tree.map(np.testing.assert_array_equal, arrays, want)


def test_values_with_one_spec_are_written_at_once():
    """A device joins its parts of them, and exchanges nothing."""
    spec = (None, "model")
    pack = Packing.of([[(aval(4, 8), 1, spec), (aval(4, 8), 1, spec), (aval(4, 8), 1, ("model", None))]])
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    values = [jnp.full((4, 8), float(n)) for n in range(3)]

    def write(arrays):
        return packing.write_all(arrays, pack.places[0], [], values, joined=True)

    with jax.set_mesh(mesh):
        arrays = arrays_of(pack)
        assert num_writes(write, arrays) == 2
        assert not re.search("all-|collective", jax.jit(write).lower(arrays).compile().as_text())
        written = jax.jit(write)(arrays)
    for place, value in zip(pack.places[0], values, strict=True):
        np.testing.assert_array_equal(written[place.array][place.base], value)


def test_an_owner_of_nothing():
    pack = Packing.of([[], []])
    assert pack.num_bytes == 0 and list(pack.used_bytes) == [0, 0]
    assert Packing.of([[], [(aval(2), 1)]]).places[0] == ()


def test_unlike_owners_of_equal_bytes_share_a_vector():
    """4 encoder blocks and 3 decoder blocks: as many bytes, in other shapes."""
    wide, square = (jax.ShapeDtypeStruct(s, np.float32) for s in ((64, 256), (64, 64)))
    norm = jax.ShapeDtypeStruct((64,), np.float32)
    owners = [
        [Leaf(wide, 8), Leaf(square, 16), Leaf(norm, 8)],
        [Leaf(wide, 6), Leaf(square, 24), Leaf(norm, 8)],
    ]
    loose, tight = (Packing.of(owners, tight=tight) for tight in (False, True))
    assert set(loose.arrays) == {
        "float32[64, 256]",
        "float32[64, 64]",
        "float32[64]",
    }
    assert loose.num_bytes == 4 * (8 * 64 * 256 + 24 * 64 * 64 + 8 * 64)
    assert tight.num_bytes == 4 * (8 * 64 * 256 + 16 * 64 * 64 + 8 * 64)
    assert tight.used_bytes == (tight.num_bytes,) * 2
    # No more pools go than must: that of the norms has no padding.
    assert set(tight.arrays) == {"float32", "float32[64]"}


def test_pools_stay_if_vectors_do_not_make_owners_equal():
    large, small = (jax.ShapeDtypeStruct((n, 8), np.float32) for n in (64, 8))
    owners = [[Leaf(large, 2), Leaf(small, 3)], [Leaf(large, 1), Leaf(small, 4)]]
    assert Packing.of(owners, tight=True) == Packing.of(owners)


def test_leaves_of_a_vector_have_indices_of_int32():
    """The largest leaves get pools until the rest is a vector of fewer than 2^31 numbers."""
    large, small = (jax.ShapeDtypeStruct((2**n,), np.float32) for n in (30, 29))
    owners = [[Leaf(large), Leaf(small, 2)], [Leaf(large), Leaf(small, 1)]]
    pack = Packing.of(owners, occupancy=np.inf)
    assert {n: a.shape for n, a in pack.arrays.items()} == {
        "float32": (2 * 2**29,),
        f"float32[{2**30}]": (1, 2**30),
    }
    short = Packing.of([of[1:] for of in owners], occupancy=np.inf)
    assert set(short.arrays) == {"float32"}


def test_split_leaves_keep_their_pools():
    a, b = (jax.ShapeDtypeStruct((n, 8), np.float32) for n in (8, 16))
    spec = (None, "model")
    owners = [[Leaf(a, 4, spec), Leaf(b, 2)], [Leaf(a, 2, spec), Leaf(b, 3)]]
    assert set(Packing.of(owners, tight=True).specs.values()) == {spec}


@pytest.mark.first_case
@pytest.mark.parametrize("shape", [(64, 256), (2, 3, 8, 128), (16, 130), (7,), (1, 512)])
def test_leaves_in_host_memory_are_cut_into_chunks(shape):
    """A chunk is the same numbers of a leaf wherever the leaf lies: in host memory, in a pool or in a vector."""
    on_host = Packing.of([[Leaf(aval(*shape), 2, on_host=True, chunk=2048)]])
    (host,) = on_host.places[0]
    assert on_host.on_host == {host.array}
    chunks, size = host.num_rows, int(np.prod(shape))
    rows = on_host.arrays[host.array].shape
    assert rows[0] == 2 * chunks and np.prod(rows[1:]) * chunks == size
    others = [Packing.of([[Leaf(aval(*shape), 2, in_vector=v)]]) for v in (False, True)]
    values = np.arange(2 * size, dtype=np.float32).reshape(2, *shape)
    for pack in (on_host, *others):
        (place,) = pack.places[0]
        arrays = arrays_of(pack)
        if pack is on_host:
            kind = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
            arrays = jax.device_put(arrays, kind)
        for i in range(2):
            arrays = jax.jit(packing.write, static_argnums=(1, 2, 4))(arrays, place, (), values[i], i)
        for i in range(2):
            whole = jax.jit(packing.read, static_argnums=(1, 2, 3))(arrays, place, (), i)
            np.testing.assert_array_equal(whole, values[i])
            if chunks == 1:
                continue
            for c in range(chunks):
                part = place.chunk(i, c, chunks)
                got = jax.jit(packing.read, static_argnums=(1, 2))(arrays, part, ())
                want = values[i].reshape(chunks, -1)[c]
                np.testing.assert_array_equal(got.reshape(-1), want)
