"""What transforms ask of a pipeline, found in the state of any optimizer that has them."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from jpipe import optim
from jpipe.optim.declarations import Declaration, declared_states, reads_state

PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}
velocity_hook = functools.partial(optim.velocity_predicted_params, learning_rate=0.1)

# Each puts a transform into an optimizer of Optax's own.
WRAPPERS = {
    "alone": lambda t: t,
    "chain": lambda t: optax.chain(optax.adam(0.1), t),
    "nested chain": lambda t: optax.chain(optax.chain(optax.sgd(0.1), t), optax.adam(1)),
    "named chain": lambda t: optax.named_chain(("sgd", optax.sgd(0.1)), ("last", t)),
    "masked": lambda t: optax.masked(t, {"a": True, "b": False}),
    "partition": lambda t: optax.partition(
        {"x": optax.chain(optax.sgd(0.1), t), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}
    ),
    "multi steps": lambda t: optax.MultiSteps(t, 4).gradient_transformation(),
    "apply if finite": lambda t: optax.apply_if_finite(t, 3),
    "per stage": lambda t: t,
}
TRANSFORMS = {
    "clip_by_global_norm": (lambda: optim.clip_by_global_norm(1.0), {"global_norm"}),
    "scale_by_delay": (lambda: optim.scale_by_delay(10), {"delay"}),
    "correct_discrepancy": (optim.correct_discrepancy, {"delay", "backward_delay"}),
    "compensate_delay": (lambda: optim.compensate_delay(1.0), {"stale_params"}),
    "error_feedback": (optim.error_feedback, {"delay"}),
    "diagnose_delay": (
        lambda: optim.diagnose_delay(optax.sgd(0.1)),
        {"delay", "backward_delay", "stale_params"},
    ),
    "predict_weights": (optim.predict_weights, set()),
    "spike_compensation": (lambda: optim.spike_compensation(0.9), {"delay"}),
}


def state_of(optimizer, wrapper="alone") -> Any:
    """Abstract, as a pipeline knows it before anything is computed."""
    state = jax.eval_shape(optimizer.init, PARAMS)
    return [state, None, {"stage": state}] if wrapper == "per stage" else state


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_declaration_is_found_in_every_wrapper(name, wrapper):
    make, extra_args = TRANSFORMS[name]
    state = state_of(WRAPPERS[wrapper](make()), wrapper)
    names = {type(s).declaration.transform for s in declared_states(state)}
    assert names == {name}
    assert optim.requested_extra_args(state) == extra_args


def test_injected_hyperparameters():
    make = optax.inject_hyperparams(lambda max_norm: optim.clip_by_global_norm(1.0))
    assert optim.requested_extra_args(state_of(make(max_norm=1.0))) == {"global_norm"}
    make = optax.inject_hyperparams(lambda decay: optim.correct_discrepancy(0.5))
    state = state_of(make(decay=0.5))
    assert optim.requested_extra_args(state) == {"delay", "backward_delay"}


def test_extra_arguments_of_several_transforms():
    chain = optax.chain(optim.clip_by_global_norm(1.0), optax.adamw(0.1), optim.scale_by_delay(10))
    assert optim.requested_extra_args(state_of(chain)) == {"global_norm", "delay"}
    assert optim.requested_extra_args(state_of(optax.adamw(0.1))) == frozenset()


def test_a_declared_state_may_contain_another():
    class Outer(NamedTuple):
        inner: Any
        declaration = Declaration("outer", ("stale_weights",))

    def wrap(inner):
        return optax.GradientTransformation(lambda p: Outer(inner.init(p)), inner.update)

    state = state_of(wrap(optax.chain(optax.sgd(1), wrap(optim.scale_by_delay(10)))))
    names = [type(s).declaration.transform for s in declared_states(state)]
    assert names == ["outer", "outer", "scale_by_delay"]
    assert optim.requested_extra_args(state) == {"stale_weights", "delay"}


# -- Hooks ----------------------------------------------------------------------------

PAIRS = {
    "backward": (optim.correct_discrepancy, optim.corrected_params),
    "forward": (optim.predict_weights, optim.predicted_params),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_hook_with_its_transform(name, wrapper, no_warning):
    make, hook = PAIRS[name]
    state = state_of(WRAPPERS[wrapper](make()), wrapper)
    optim.check_hooks(state, **{name: hook})
    optim.check_hooks(state, **{name: functools.partial(hook)})
    optim.check_hooks(state, **{name: lambda params, state, delay: params})


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_transform_without_its_hook(name, wrapper):
    make, hook = PAIRS[name]
    state = state_of(WRAPPERS[wrapper](make()), wrapper)
    transform, function = make.__name__, hook.__name__
    words = (
        f"`{transform}` is in the optimizer, but no `{name}_params` reads its state.*"
        f"Pass `{name}_params=jpipe.optim.{function}`"
    )
    with pytest.warns(UserWarning, match=words) as caught:
        optim.check_hooks(state)
    assert len(caught) == 1


@pytest.mark.parametrize("name", PAIRS)
def test_a_hook_without_its_transform(name):
    make, hook = PAIRS[name]
    words = (
        f"`{name}_params={hook.__name__}` reads the state of `{make.__name__}`, which "
        f"the optimizer lacks. Add `{make.__name__}`.*or leave `{name}_params` out"
    )
    for function in (hook, functools.partial(functools.partial(hook))):
        with pytest.raises(ValueError, match=words):
            optim.check_hooks(state_of(optax.adam(0.1)), **{name: function})


def test_the_hook_of_another_transform():
    """A hook for the right pass that reads another state leaves the transform unread."""
    both = optax.chain(optim.correct_discrepancy(), optim.predict_weights())
    hook = optim.predicted_params
    with pytest.warns(UserWarning, match="`correct_discrepancy` .* no `backward_params`"):
        optim.check_hooks(state_of(both), forward=hook, backward=hook)
    with pytest.raises(ValueError, match="reads the state of `predict_weights`"):
        optim.check_hooks(state_of(optim.correct_discrepancy()), backward=hook)


def test_spike_compensation_works_with_and_without_its_hook(no_warning):
    chain = optax.chain(optim.spike_compensation(0.9), optax.scale_by_learning_rate(0.1))
    optim.check_hooks(state_of(chain))
    optim.check_hooks(state_of(chain), forward=velocity_hook)
    with pytest.raises(ValueError, match="velocity_predicted_params` reads the state of"):
        optim.check_hooks(state_of(optax.sgd(0.1)), forward=velocity_hook)


def test_hooks_of_ones_own(no_warning):
    class MeanState(NamedTuple):
        mean: optax.Updates
        declaration = Declaration("keep_mean", hook="forward", hook_function="mean_of")

    @reads_state(MeanState)
    def mean_of(params, optimizer_state, delay):
        return params

    def plain(params, optimizer_state, delay):
        return params

    keep_mean = optax.GradientTransformation(MeanState, lambda u, s, p=None: (u, s))
    optim.check_hooks(state_of(keep_mean), forward=mean_of)
    optim.check_hooks(state_of(optax.sgd(0.1)), forward=plain, backward=plain)
    with pytest.raises(ValueError, match="`backward_params=mean_of` .* of `keep_mean`"):
        optim.check_hooks(state_of(optax.sgd(0.1)), backward=mean_of)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.warns(UserWarning, match="Pass `forward_params=mean_of` to"):
            optim.check_hooks(state_of(keep_mean), backward=plain)
