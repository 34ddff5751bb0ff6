"""`jpipe.memory.memory_timeline` of jitted functions."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.memory import _compiled, memory_timeline

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SIZE = 64 * 64 * 4


def peak_of_compiler(f, *args):
    analysis = jax.jit(f).lower(*args).compile().memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def chain(x):
    return jnp.tanh(jnp.sin(x @ x) @ x) @ x


def loop(x):
    body = lambda c, _: (jnp.tanh(c @ x), c.sum())  # noqa: E731
    return jax.lax.scan(body, x, None, length=5)


def branches(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ x) @ x, lambda x: x + 1, x)


def training(x):
    def loss(w):
        h = x
        for i in range(3):
            h = jnp.tanh(h @ w[i])
        return (h**2).mean()

    return jax.grad(loss)([x, x, x])


@pytest.mark.parametrize("f", [chain, loop, branches, training])
def test_peak_is_the_compilers(f):
    timeline = memory_timeline(f, X)
    assert timeline.peak == pytest.approx(peak_of_compiler(f, X), rel=0.02)
    assert set(timeline.total.tolist()) == {timeline.peak}
    for block in timeline.blocks:
        for access in block.accesses:
            assert block.allocated <= access.time <= block.freed


def test_a_chain_by_hand():
    """x @ x, its sine, the next product and its tanh: of four values two live at once."""
    timeline = memory_timeline(chain, X)
    by_use = timeline.by_use()
    assert set(by_use["argument"].tolist()) == {SIZE}
    large = [b for b in timeline.blocks if b.num_bytes == SIZE and b.use in ("temporary", "result")]
    assert len([b for b in large if b.use == "result"]) == 1
    live = [sum(b.allocated <= t < b.freed for b in large) for t in range(int(timeline.period))]
    assert max(live) == 2
    products = [b for b in large if "dot_general" in b.name]
    assert len(products) == 3
    assert all("test_compiled.py" in b.name for b in products)


def test_the_body_of_a_loop_stands_inside():
    timeline = memory_timeline(loop, X)
    (carried,) = (b for b in timeline.blocks if b.num_bytes == SIZE and b.use == "result")
    kinds = [a.kind for a in carried.accesses]
    # Written before the loop and by its body, which also reads it.
    assert kinds.count("write") >= 2
    assert "read" in kinds
    assert carried.freed == timeline.period
    assert timeline.unit == "instructions"


def test_donated_arguments_hold_the_result():
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    timeline = memory_timeline(jitted, X)
    assert timeline.peak_used == SIZE
    assert any(a.kind == "write" for b in timeline.blocks for a in b.accesses if b.use == "argument")


def test_a_compiler_that_says_nothing(monkeypatch):
    monkeypatch.setattr(_compiled, "program_of", lambda compiled: None)
    with pytest.raises(ValueError, match="the compiler for cpu does not say"):
        memory_timeline(chain, X)
