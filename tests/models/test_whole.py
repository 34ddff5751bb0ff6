"""A whole model in the configurations of scripts."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from models import Whole


def test_a_whole_model_is_one_module_and_trains():
    model = Whole()
    loss = model.loss()
    pipe = jpipe.Pipeline(
        model.layers(),
        loss=loss,
        has_aux=True,
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.one_f_one_b(3, 2),
    )
    rng = np.random.default_rng(0)
    batch = {"inputs": rng.random((4, 28, 28, 1), np.float32), "labels": rng.integers(0, 10, 4)}
    state = pipe.init(jax.random.key(0), batch)
    plain = model.layers()(rngs=nnx.Rngs(jax.random.fold_in(jax.random.key(0), 0)))
    want, _ = loss(plain(batch["inputs"]), batch)
    np.testing.assert_allclose(pipe.evaluate(state, batch)["loss"], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("models.whole", "must be package.module:name"),
        (":Residual", "must be package.module:name"),
        ("models.nothing:Net", "cannot be imported: No module named 'models.nothing'"),
        ("models.whole:Net", "cannot be imported: module 'models.whole' has no attribute 'Net'"),
    ],
)
def test_modules_that_are_not_there(module, message):
    with pytest.raises(ValueError, match=message):
        Whole(module).layers()
