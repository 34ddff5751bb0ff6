"""Weights in one file."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization

import jpipe

PARAMS = [
    {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "list": {0: np.ones(2), 11: np.zeros(())}},
    {},
    {"deep": {"er": {"bias": np.arange(3).astype(ml_dtypes.bfloat16)}}},
]  # fmt: skip


def test_what_is_read_is_what_was_written(tmp_path):
    path = tmp_path / "weights.msgpack"
    jpipe.save_params(path, PARAMS)
    got = jpipe.load_params(path)
    np.testing.assert_equal(got, PARAMS)
    assert got[2]["deep"]["er"]["bias"].dtype == ml_dtypes.bfloat16
    names = list(serialization.msgpack_restore(path.read_bytes())["params"])
    assert names == ["0.kernel", "0.list.0", "0.list.11", "2.deep.er.bias"]
    assert [p.name for p in tmp_path.iterdir()] == ["weights.msgpack"]


def test_every_flipped_byte_is_seen(tmp_path):
    path = tmp_path / "weights.msgpack"
    jpipe.save_params(path, PARAMS)
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        try:
            got = jpipe.load_params(path)
        except ValueError as error:
            assert "is damaged or no file" in str(error)
        else:
            np.testing.assert_equal(got, PARAMS)  # nothing that is read
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is damaged or no file"):
            jpipe.load_params(path)


@pytest.mark.parametrize("name", ["a.b", "3"])
def test_names_that_a_file_cannot_have_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"layer 0 have the name '{name}'"):
        jpipe.save_params(tmp_path / "weights.msgpack", [{name: np.ones(2)}])
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        jpipe.load_params(tmp_path / "weights.msgpack")


@pytest.mark.parametrize("params", ["weights", [np.ones(2)], None])
def test_what_is_no_list_of_layers_is_refused(params, tmp_path):
    with pytest.raises(ValueError, match="one nested dict per layer.*got"):
        jpipe.save_params(tmp_path / "weights.msgpack", params)


def test_plain_flax_and_back(tmp_path):
    """A model of NNX and Linen layers: into a pipeline, trained, and back into the plain modules."""
    first, second = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), linen.Dense(4)
    given = second.init(jax.random.key(1), jnp.ones((2, 4)))["params"]
    jpipe.save_params(tmp_path / "in", [first, given])
    pipe = jpipe.Pipeline(
        [lambda rngs: nnx.Linear(4, 4, rngs=rngs), jpipe.Linen(second)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(2, 2),
    )
    batch = {"inputs": np.ones((4, 4), np.float32), "targets": np.zeros((4, 4))}
    params = jpipe.load_params(tmp_path / "in")
    state = pipe.init(jax.random.key(0), batch, params=params)
    np.testing.assert_equal(pipe.get_params(state), params)
    state, _ = pipe.step(state, batch)
    jpipe.save_params(tmp_path / "out", pipe.get_params(state))
    trained = jpipe.load_params(tmp_path / "out")
    nnx.update(first, trained[0])
    outputs = second.apply({"params": trained[1]}, first(batch["inputs"]))
    np.testing.assert_allclose(outputs, pipe.predict(state, batch), rtol=1e-6, atol=1e-6)


def test_an_address_is_refused():
    for call in (
        lambda: jpipe.load_params("s3://a/b"),
        lambda: jpipe.save_params("s3://a/b", PARAMS),
    ):
        with pytest.raises(ValueError, match="`path` must be in a file system, got the address 's3:"):
            call()
