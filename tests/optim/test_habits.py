"""What every transform does as Optax's own do, and every function that gives weights for a pass."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized

from jpipe import optim

TRANSFORMS = {
    "scale_by_delay": (optim.scale_by_delay, dict(annealing_steps=5)),
    "correct_discrepancy": (optim.correct_discrepancy, dict(decay=0.5)),
    "theory": (optim.correct_discrepancy, {}),
    "predict_weights": (optim.predict_weights, {}),
    "spike_compensation": (optim.spike_compensation, dict(momentum=0.9)),
    "scale_by_nadam": (optim.scale_by_nadam, {}),
    "scale_by_basis_rotation": (optim.scale_by_basis_rotation, dict(frequency=2)),
    "rotation by momentum": (
        functools.partial(optim.scale_by_basis_rotation, source="momentum", sides="smaller"),
        dict(frequency=2),
    ),
    "error_feedback": (optim.error_feedback, {}),
    "ema_weights": (optim.ema_weights, dict(decay=0.5)),
    "nadamw": (optim.nadamw, dict(learning_rate=0.1)),
}
HOOKS = {
    "correct_discrepancy": optim.corrected_params,
    "predict_weights": optim.predicted_params,
    "spike_compensation": functools.partial(optim.velocity_predicted_params, learning_rate=0.5),
}
DELAYS = dict(delay=3.0, backward_delay=1.0)

every_transform = pytest.mark.parametrize("name", TRANSFORMS)
every_hook = pytest.mark.parametrize("name", HOOKS)


def make(name):
    transform, arguments = TRANSFORMS[name]
    return transform(**arguments)


def tree(seed=0, dtype=float):
    """What a stage sees: one nested dict a layer, None for the layers of other stages."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    layer = {"linear": {"kernel": array(2, 3), "bias": array(3)}, "none": None}
    return [None, layer, None, {"scale": array()}]


def run(optimizer, num_steps=3, **extra_args):
    """Weights and state after some updates, and the last of them."""
    params = tree()
    state = optimizer.init(params)

    @jax.jit
    def step(grads, state, params):
        delays = {**DELAYS, **extra_args}
        updates, state = optimizer.update(grads, state, params, **delays)
        return optax.apply_updates(params, updates), state, updates

    for seed in range(1, num_steps + 1):
        params, state, updates = step(tree(seed), state, params)
    return params, state, updates


@functools.cache
def run_plain(name):
    return run(make(name))


@functools.cache
def first_updates(name):
    return run(make(name), num_steps=1)[2]


assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-5)


# -- Transforms -----------------------------------------------------------------------


@every_transform
def test_runs_in_a_chain_and_takes_no_notice_of_other_extra_arguments(name):
    params, _, _ = run(optax.chain(make(name)), global_norm=1.0, value=2.0)
    assert_close(params, run_plain(name)[0])


@every_transform
def test_keeps_dtypes_and_the_structure_of_its_state(name):
    transform, params = make(name), tree(dtype=jnp.bfloat16)
    params[3] = tree()[3]  # one layer in float32
    delays = {key: jnp.float32(value) for key, value in DELAYS.items()}
    before = jax.eval_shape(lambda: (params, transform.init(params)))
    after = jax.eval_shape(transform.update, *before, params, **delays)
    assert after == before


@every_transform
def test_is_compiled_once_for_all_delays(name):
    transform, params = make(name), tree()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def update(grads, state, params, delay, backward_delay):
        delays = dict(delay=delay, backward_delay=backward_delay)
        return transform.update(grads, state, params, **delays)

    state, delays = transform.init(params), map(jnp.float32, DELAYS.values())
    found, state = update(tree(1), state, params, *delays)
    assert_close(found, first_updates(name))
    update(tree(1), state, params, jnp.float32(0), jnp.float32(0))


@every_transform
def test_runs_with_injected_hyperparameters(name):
    transform, arguments = TRANSFORMS[name]
    with jax.enable_x64(True):  # float32 has no 1 - 0.999 to compare
        params, state, _ = run(optax.inject_hyperparams(transform)(**arguments))
        expected, _, _ = run(make(name))
    assert set(arguments) <= set(state.hyperparams)
    assert_close(params, expected, rtol=1e-12)


@every_transform
def test_runs_in_multi_steps(name):
    transform, params = make(name), tree()
    steps = optax.MultiSteps(transform, every_k_schedule=2)
    state = steps.init(params)
    update = jax.jit(functools.partial(steps.update, **DELAYS))
    waiting, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(waiting))
    twice = jax.tree.map(lambda leaf: 2 * leaf, tree(1))
    assert_close(update(twice, state, params)[0], first_updates(name))


def layer_three(params):
    return [None if layer is None else i == 3 for i, layer in enumerate(params)]


@every_transform
def test_runs_masked(name):
    transform, params = make(name), tree()
    masked = optax.masked(transform, layer_three)
    found, _ = masked.update(tree(1), masked.init(params), params, **DELAYS)
    assert_close(found, [*tree(1)[:3], first_updates(name)[3]])


@every_transform
def test_is_mapped_over(name):
    transform = make(name)
    stacked, delays = {"w": jnp.eye(2, 3), "none": None}, jnp.array([3.0, 5.0])

    @jax.jit
    def two_steps(params, delay):
        state = transform.init(params)
        for _ in range(2):
            updates, state = transform.update(params, state, params, delay=delay, backward_delay=0.0)
        return updates, state

    found = jax.vmap(two_steps)(stacked, delays)
    for i in range(2):
        expected = two_steps({"w": stacked["w"][i], "none": None}, delays[i])
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], found), expected)


@every_transform
def test_runs_on_a_stage_without_parameters(name):
    transform, params = make(name), [None, {}, None]
    updates, _ = transform.update(params, transform.init(params), params, **DELAYS)
    assert updates == params


ALL_TRANSFORMS = TRANSFORMS | {
    "clip_by_global_norm": (optim.clip_by_global_norm, dict(max_norm=0.5)),
    "compensate_delay": (optim.compensate_delay, dict(strength=0.5)),
    "diagnose_delay": (optim.diagnose_delay, dict(optimizer=optax.adam(0.1))),
    "master_weights": (optim.master_weights, dict(optimizer=optax.adam(0.1))),
    "scale_by_copies": (optim.scale_by_copies, dict(copies=2.0, first=4.0)),
}


def makes_a_transform(function) -> bool:
    """Whether a function returns a transform, by its annotation."""
    annotations = getattr(function, "__annotations__", {})
    return "GradientTransformation" in str(annotations.get("return"))


def test_every_transform_is_here():
    exported = {name for name in optim.__all__ if makes_a_transform(getattr(optim, name))}
    functions = (transform for transform, _ in ALL_TRANSFORMS.values())
    assert exported == {f.__name__ for f in functions if hasattr(f, "__name__")}


class VariantsTest(chex.TestCase):
    """With and without jit, on arrays of JAX and of NumPy, and mapped over devices."""

    @chex.all_variants
    @parameterized.parameters(*ALL_TRANSFORMS)
    def test_update(self, name):
        transform, arguments = ALL_TRANSFORMS[name]
        transform, params = transform(**arguments), tree()
        update = functools.partial(transform.update, **DELAYS)
        call = tree(1), transform.init(params), params
        stale = dict(stale_params=tree(2))
        found = self.variant(update)(*call, **stale)
        chex.assert_tree_all_finite(found)
        assert_close(found, update(*call, **stale))


# -- Weights for a pass ---------------------------------------------------------------


@every_hook
def test_weights_are_themselves_without_delay(name):
    params, state, _ = run_plain(name)
    for delay in (0, 0.0, jnp.float32(0), [0, 0, 0, 0]):
        found = HOOKS[name](params, state, delay)
        jax.tree.map(np.testing.assert_array_equal, found, params)


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.identity(), optax.chain(tx)),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda: tx)(),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda _: True, p)),
    "partition": lambda tx: optax.partition({True: tx, False: optax.chain(tx)}, layer_three),
}


@every_hook
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_find_their_state(name, wrapper):
    plain, plain_state, _ = run_plain(name)
    params, state, _ = run(WRAPPERS[wrapper](make(name)))
    assert_close(params, plain)
    found = HOOKS[name](params, state, 2)
    assert_close(found, HOOKS[name](plain, plain_state, 2))


@every_hook
def test_masked_weights_stay(name):
    params, state, _ = run(optax.masked(make(name), layer_three))
    found = HOOKS[name](params, state, [None, None, None, 2])
    jax.tree.map(np.testing.assert_array_equal, found[:3], params[:3])
    assert found[3]["scale"] != params[3]["scale"]


@every_hook
def test_weights_keep_their_dtype(name):
    params = tree(dtype=jnp.bfloat16)
    state = make(name).init(params)
    found = jax.eval_shape(HOOKS[name], params, state, jnp.float32(2))
    assert found == jax.eval_shape(lambda: params)


@every_hook
def test_weights_refuse_a_state_that_is_not_theirs(name):
    params, weights = tree(), HOOKS[name]
    with pytest.raises(ValueError, match=f"no state of `{name}`, got a tuple. Put"):
        weights(params, optax.sgd(0.1).init(params), 2)
    with pytest.raises(ValueError, match="two transforms of the same kind. Keep one"):
        weights(params, optax.chain(make(name), make(name)).init(params), 2)
    with pytest.raises(ValueError, match=r"not of these `params`, .* no \[1\]\['linea"):
        weights([None, None, None, params[3]], make(name).init(params), 2)
    with pytest.raises(ValueError, match="`delay` must be a number of updates, .* -2"):
        weights(params, make(name).init(params), -2)
    with pytest.raises(ValueError, match=r"got \[0\], which leaves out \[1\]"):
        weights(params, make(name).init(params), [2])
