"""`jpipe.attention` against a plain computation of all scores, on one device and with positions split over several."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from helpers import assert_close, refused
from jax.sharding import AxisType, Mesh

import jpipe
from jpipe._attention.one_device import OneDevice
from jpipe._attention.over_heads import OverHeads
from jpipe._attention.ring import Ring
from jpipe._attention.split import Split

B, D = 2, 4


class Case(NamedTuple):
    """An attention.

    Attributes:
      n: devices of the axis "context".
      method: see `jpipe.attention`.
      lengths: T and M.
      heads: H and K.
      is_causal: see `jpipe.attention`.
      mask: "keys" for padding that a row has alone, "all" for a mask of every head, or None.
      segments: whether rows hold several documents.
      block_size: see `jpipe.attention`.
      model: devices of the axis "model", which splits heads.
    """

    n: int
    method: str | None = None
    lengths: tuple[int, int] = (24, 24)
    heads: tuple[int, int] = (4, 2)
    is_causal: bool = False
    mask: str | None = None
    segments: bool = False
    block_size: int = 8
    model: int = 1


def mesh_of(**sizes) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def arrays(case, dtype=np.float64):
    """Queries, keys, values, weights of the outputs; the options of the call."""
    rng = np.random.default_rng(0)
    (T, M), (H, K) = case.lengths, case.heads
    shapes = (B, T, H, D), (B, M, K, D), (B, M, K, D), (B, T, H, D)
    values = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    options: dict[str, Any] = {"is_causal": case.is_causal}
    if case.mask == "keys":
        options["mask"] = rng.random((B, 1, 1, M)) < 0.6
        options["mask"][0] = False
    if case.mask == "all":
        options["mask"] = rng.random((B, H, T, M)) < 0.3
    if case.segments:
        ids = np.sort(rng.integers(0, 3, (B, T)))
        options["segment_ids"] = ids if T == M else (ids, np.sort(rng.integers(0, 3, (B, M))))
    return values, options


def plain(query, key, value, *, is_causal, mask=None, segment_ids=None):
    """Softmax of all scores; a query that sees no key gets the mean of all values."""
    repeats = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, repeats, 2), jnp.repeat(value, repeats, 2)
    scores = jnp.einsum("bthd,bmhd->bhtm", query, key) / np.sqrt(D)
    seen = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(mask, scores.shape)
    if is_causal:
        seen = seen & np.tril(np.ones(scores.shape[2:], bool))[None, None]
    if segment_ids is not None:
        left, right = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen = seen & (left[:, :, None] == right[:, None])[:, None]
    probabilities = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("bhtm,bmhd->bthd", probabilities, value)


def outputs_and_gradients(attend):
    def run(query, key, value, by_output):
        outputs, backward = jax.vjp(attend, query, key, value)
        return outputs, *backward(by_output)

    return run


def calling(case, options):
    return outputs_and_gradients(
        functools.partial(jpipe.attention, method=case.method, block_size=case.block_size, **options)
    )


EVERY = [
    Case(1, lengths=(17, 17), is_causal=True),
    Case(4, "ring", (48, 48), is_causal=True, mask="all", segments=True, block_size=4),
    Case(4, "all_to_all", (24, 16), mask="keys", segments=True),
    Case(1, lengths=(23, 17), mask="keys", segments=True),
    Case(1, lengths=(17, 29), is_causal=True, mask="all", block_size=5),
    Case(1, block_size=64, is_causal=True, mask="all", segments=True),
    Case(2, "ring", is_causal=True),
    Case(2, "ring", (24, 16), mask="all"),
    Case(2, "ring", (24, 16), is_causal=True, mask="keys"),
    Case(2, "ring", heads=(3, 1), is_causal=True, segments=True),
    Case(3, "ring", (36, 36), is_causal=True, mask="all", block_size=4),
    Case(4, "ring", (40, 40), is_causal=True, segments=True, block_size=2),
    Case(4, "ring", (40, 24), mask="keys"),
    Case(4, "ring", (40, 40), is_causal=True, mask="keys", block_size=4, model=2),
    Case(6, "ring", (36, 36), is_causal=True),
    Case(8, "ring", (32, 32), is_causal=True),
    Case(2, "all_to_all", is_causal=True, mask="all", segments=True),
    Case(2, "all_to_all", (24, 24), (4, 4), model=2),
    Case(4, "all_to_all", (24, 24), (4, 1), is_causal=True, mask="all"),
    Case(4, "all_to_all", (24, 24), (8, 2), is_causal=True, mask="all", model=2),
    Case(4, None, (24, 24), (3, 3), segments=True),
]


@pytest.mark.first_case
@pytest.mark.sampled(7, others="exhaustive")
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_outputs_and_gradients_are_those_of_whole_attention(case):
    with jax.enable_x64(True):
        values, options = arrays(case)
        wanted = jax.jit(outputs_and_gradients(functools.partial(plain, **options)))(*values)
        with jax.set_mesh(mesh_of(context=case.n, model=case.model)), jpipe_rules(case):
            got = jax.jit(calling(case, options))(*values)
        assert_close(got, jax.tree.map(np.asarray, wanted), "float64")


def jpipe_rules(case):
    from flax.core.spmd import logical_axis_rules

    return logical_axis_rules((("heads", "model"),) if case.model > 1 else ())


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_sums_of_bfloat16_are_float32(method):
    """The error is that of rounded inputs and outputs, not that of sums in 8 bits."""
    case = Case(4, method, (256, 256), is_causal=True, block_size=16)
    values, options = arrays(case, jnp.bfloat16)
    wanted = outputs_and_gradients(functools.partial(plain, **options))(*(np.float32(a) for a in values))
    with jax.set_mesh(mesh_of(context=4)):
        got = jax.jit(calling(case, options))(*values)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(a), b, rtol=0, atol=0.02 * np.abs(b).max())


# -- What is sent, and what is kept


def compiled(case):
    """The programs of the forward and of the backward. In one program XLA would exchange keys once for both."""
    values, options = arrays(case, np.float32)
    mesh = mesh_of(context=case.n)
    split = jax.sharding.NamedSharding(mesh, jax.P(None, "context"))
    *inputs, by_output = (jax.device_put(a, split) for a in values)
    attend = functools.partial(jpipe.attention, method=case.method, block_size=case.block_size, **options)
    with jax.set_mesh(mesh):
        forward = jax.jit(lambda *inputs: jax.vjp(attend, *inputs)).lower(*inputs).compile()
        _, gradients = forward(*inputs)
        run = jax.jit(lambda gradients, by_output: gradients(by_output), out_shardings=split)
        return forward.as_text() + run.lower(gradients, by_output).compile().as_text()


def sent_bytes(text):
    """The bytes that a device sends: all of a permute, and of an all-to-all the parts of others."""
    found = collectives(text)
    assert {c.kind for c in found} <= {"collective-permute", "all-to-all"}
    return sum(c.num_bytes if c.kind == "collective-permute" else c.num_bytes * (len(c.groups[0]) - 1) // len(c.groups[0]) for c in found)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Case(4, "ring", (512, 512), is_causal=True, block_size=32),
        *(
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in (
                Case(2, "ring", (512, 512), is_causal=True, block_size=32),
                Case(4, "ring", (512, 256), block_size=32),
                Case(4, "all_to_all", (512, 512), is_causal=True, block_size=32),
                Case(2, "all_to_all", (512, 256), (4, 2), block_size=32),
            )
        ),
    ],
    ids=str,
)
def test_what_is_sent_and_the_largest_array(case):
    text = compiled(case)
    n, ((T, M), (H, K)) = case.n, (case.lengths, case.heads)
    queries, keys = B * T * H * D // n, B * M * K * D // n
    if case.method == "ring":
        numbers = 3 * (n - 1) * 2 * keys  # forward, backward, and gradients
        if case.is_causal:  # half of q, k, v and o; of their gradients, and of one number per output
            numbers += (4 * queries + 4 * keys + queries // D) // 2
        assert numbers == Ring(Split("context", n, (), ()), 1.0, case.is_causal, case.is_causal, 8).sent(
            (B, T // n, H, D), M // n, K
        )
    else:
        keys *= n // np.gcd(n, K)
        numbers = (4 * queries + 4 * keys + queries // D) * (n - 1) // n
        over_heads = OverHeads.of(Split("context", n, (), ()), OneDevice(1.0, case.is_causal, 8), K)
        assert numbers == over_heads.sent((B, T // n, H, D), M // n, K)
    assert sent_bytes(text) == 4 * numbers
    sizes = {np.prod(list(map(int, dims.split(",")))) for dims in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    assert max(sizes) <= 2 * max(queries, keys, B * H * case.block_size**2)
    assert max(sizes) < B * T * M // n  # of the scores of one head


def test_work_is_equal_under_a_causal_mask():
    """Every device goes through the tiles that its queries see, in the same number."""
    n, block = 4, 4
    case = Case(n, "ring", (8 * n * block, 8 * n * block), is_causal=True, block_size=block)
    values, options = arrays(case, np.float32)

    def products(jaxpr, times=1):
        for eqn in jaxpr.eqns:
            inner = [j for p in eqn.params.values() for j in (p if isinstance(p, tuple | list) else [p])]
            inner = [getattr(j, "jaxpr", j) for j in inner if hasattr(getattr(j, "jaxpr", j), "eqns")]
            assert eqn.primitive.name not in ("cond", "while")  # so all devices do the same
            length = eqn.params.get("length", 1)
            yield from itertools.repeat(eqn, times * (eqn.primitive.name == "dot_general"))
            for j in inner:
                yield from products(j, times * length)

    with jax.set_mesh(mesh_of(context=n)):
        jaxpr = jax.make_jaxpr(lambda *a: jpipe.attention(*a, method="ring", block_size=block, **options))(*values[:3])
    tiles = len(list(products(jaxpr.jaxpr))) / 2  # a product for scores and one for values
    spans = 4  # tiles of a span
    own = spans * spans + 2 * spans * (spans + 1) // 2
    assert tiles == own + (n - 1) * 2 * spans * spans
    whole = (8 * n) * (8 * n + 1) // 2
    assert tiles * n == whole


# -- The method


def chosen(n, heads, is_causal):
    case = Case(n, None, (64, 64), heads, is_causal)
    values, options = arrays(case, np.float32)
    with jax.set_mesh(mesh_of(context=n)):
        text = str(jax.make_jaxpr(functools.partial(jpipe.attention, **options))(*values[:3]))
    return {name for name in ("ppermute", "all_to_all") if name in text}


def test_the_method_that_sends_fewer_bytes():
    assert chosen(2, (4, 4), False) == {"all_to_all"}
    assert chosen(4, (8, 8), True) == {"all_to_all"}
    assert chosen(4, (3, 3), True) == {"ppermute"}  # heads do not divide
    assert chosen(4, (32, 1), False) == {"ppermute"}  # few keys go round, many queries stay


REFUSED = {
    "length": (dict(lengths=(26, 26)), {}, "4 does not divide 26. Pad the sequence"),
    "keys": (dict(lengths=(24, 26)), {}, "equal parts of the keys, and there are 26"),
    "halves": (dict(lengths=(28, 28), is_causal=True, heads=(3, 3)), {}, "8 does not divide the 28 positions. Pad"),
    "heads": (dict(heads=(6, 6), method="all_to_all"), {}, "4 does not divide the 6 heads of a device. Pad the"),
    "method": (dict(method="rings"), {}, '`method` must be "ring", "all_to_all" or None, got \'rings\''),
    "block": (dict(block_size=0), {}, "`block_size` must be a whole number of positions, at least 1, got 0"),
    "mask": ({}, {"mask": np.ones((B, 1, 1, 23), bool)}, r"`mask` must be bool of shape \[2, 4, 24, 24\]"),
    "mask of numbers": ({}, {"mask": np.ones((B, 1, 1, 24))}, "got float64 of shape"),
    "segments": ({}, {"segment_ids": np.ones((B, 23), int)}, r"of queries must be integers of shape \[2, 24\]"),
    "two of three": ({}, {"segment_ids": (1, 2, 3)}, "a pair for queries and keys, got 3 arrays"),
    "groups": (dict(heads=(4, 3)), {}, "a number of heads that divides its own"),
}


@pytest.mark.parametrize("changes, more, words", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(changes, more, words):
    case = Case(4)._replace(**changes)
    values, options = arrays(case, np.float32)
    with jax.set_mesh(mesh_of(context=4)), refused(words):
        jpipe.attention(*values[:3], method=case.method, block_size=case.block_size, **options | more)


def test_inputs_of_one_dtype_and_four_dims():
    (query, key, value, _), _ = arrays(Case(1), np.float32)
    with refused("must have one dtype, got float32, float16"):
        jpipe.attention(query, key.astype(np.float16), value)
    with refused(r"must be `\[batch, positions, heads, dim\]`, got \[24, 4, 4\]"):
        jpipe.attention(query[0], key, value)


def test_an_axis_that_is_mapped_already():
    (query, key, value, _), _ = arrays(Case(2), np.float32)
    split = jax.P(None, "context")
    with jax.set_mesh(mesh_of(context=2)), pytest.raises(ValueError, match="is mapped already. Call it outside"):
        jax.shard_map(jpipe.attention, in_specs=(split,) * 3, out_specs=split)(query, key, value)


def test_positions_of_any_axis():
    case = Case(2, "ring", is_causal=True)
    values, options = arrays(case, np.float32)
    with jax.set_mesh(mesh_of(sequence=2)):
        run = functools.partial(jpipe.attention, axis="sequence", **options)
        assert "ppermute" in str(jax.make_jaxpr(functools.partial(run, method="ring"))(*values[:3]))
