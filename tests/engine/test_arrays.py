"""The two records of an operation: what it writes, and what it only reads."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.engine.arrays import ReadOnly, TickArrays, Written


def arrays():
    return TickArrays(
        input_stash={"float32": jnp.ones(3)},
        gradients={"float32": jnp.zeros(2)},
        op_count=jnp.int32(4),
    )


def test_every_array_is_in_one_record():
    written, read = arrays().split(["input_stash"])
    assert isinstance(written, Written) and list(written) == ["input_stash"]
    assert isinstance(read, ReadOnly) and list(read) == ["gradients", "op_count"]


def test_an_operation_cannot_read_a_stale_copy_of_what_it_writes():
    written, read = arrays().split(["input_stash"])
    message = "ReadOnly does not hold `input_stash`, only gradients, op_count.*from `written`"
    with pytest.raises(AttributeError, match=message):
        _ = read.input_stash
    with pytest.raises(AttributeError, match="Written does not hold `gradients`"):
        written.replace(gradients={})
    with pytest.raises(AssertionError, match="has no arrays .'ring'"):
        TickArrays(ring=0)


def test_records_are_trees_in_the_order_of_loop_state():
    leaves, tree = jax.tree.flatten(arrays())
    assert [a.shape for a in leaves] == [(2,), (3,), ()]
    again = tree.unflatten(leaves)
    assert type(again) is TickArrays and list(again) == list(arrays())
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(again)]
    assert paths == [".gradients['float32']", ".input_stash['float32']", ".op_count"]
    assert jax.tree.structure(arrays().split(["input_stash"])[0]) != tree
