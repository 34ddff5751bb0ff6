"""Diagnostics of late gradients: how far they are from the weights that they move, and whether updates agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean, suggests
from jpipe.optim.declarations import Declaration
from jpipe.optim.delays import delay_of, spread

QUANTITIES = ("angle", "discrepancy", "curvature")
"""What `diagnose_delay` can keep."""


class DiagnoseDelayState(NamedTuple):
    """Numbers of the last update.

    Attributes:
      inner: the state of the optimizer.
      last: quantity -> what the next update is compared with, trees like the weights.
      delay_facts: "num_updates", int32; "delay" and "backward_delay", in updates, trees with one number for
        each weight, so that layers of unlike delays can come to one stage.
      delay_sums: name -> a tree with one number for each weight, float32. Those of a stage are added up.
    """

    inner: optax.OptState
    last: dict[str, Any]
    delay_facts: dict[str, Any]
    delay_sums: dict[str, Any]
    declaration = Declaration("diagnose_delay", ("delay", "backward_delay", "stale_params"))


@suggests
def diagnose_delay(
    optimizer: optax.GradientTransformation, quantities: Sequence[str] = QUANTITIES
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps numbers about late gradients; its updates are unchanged.

    With u_t the t-th update of a stage, w_t the weights before it, tau the delay, and g_t the gradient, which was
    computed at w_{t - tau}:

        angle         <u_t, u_{t-1}> / (|u_t| |u_{t-1}|), a cosine
        discrepancy   |w_t - w_{t - tau}|, and the same of the weights that the backward read
        curvature     |g_t - g_{t-1}| / |w_{t - tau} - w_{t - 1 - tau}|

    A cosine below 0 says that an update takes back a part of the last one. At the border of the stable range, gradient
    descent with late gradients swings with a period of 4 tau + 2 updates: the roots in lemma 1 of PipeMare are
    exp(+-i pi / (2 tau + 1)). There the cosine is about cos(pi / (2 tau + 1)): -1 without delay, 0.5 at one update, and
    near 1 at many, where weights overshoot for a long time before they turn.

    The discrepancy is how far the weights have moved while a gradient was under way. The curvature is a secant: the
    mean of the Hessian along the movement, so a lower bound of its largest eigenvalue, were both gradients of the same
    examples. Noise of minibatches makes it larger, by about |noise| / |movement|.

    With several microbatches to an update, w_{t - tau} are the weights of the oldest forward. Weights that a hook
    gives, predicted or corrected, are not what is compared. With a backward delay between 0 and tau the discrepancy of
    the backward is not known.

    The optimizer is the whole chain, with its clipping, because gradients are compared as they come and updates as they
    leave. "angle" costs memory of the size of the weights, "curvature" twice that. "discrepancy" and "curvature"
    read `stale_params`, for which a pipeline keeps tau + 1 versions of the weights; `pipedream` and `pipedream_2bw`
    keep them anyway.

    Args:
      optimizer: the optimizer.
      quantities: what is kept, of "angle", "discrepancy" and "curvature". Delays always are.

    Returns:
      A transformation with a `DiagnoseDelayState`. `jpipe.Pipeline.get_diagnostics` reads it for each stage, and
      `delay_diagnostics` without a pipeline.

    Raises:
      ValueError: if there is no quantity of a name. At the update: if there is no delay, or there are no weights or
        stale weights where they are needed.

    Example:
      >>> optimizer = diagnose_delay(optax.sgd(1.0), ["angle"])
      >>> weights = jnp.zeros(2)
      >>> state = optimizer.init(weights)
      >>> for gradient in ([1.0, 0.0], [1.0, 1.0]):
      ...     _, state = optimizer.update(jnp.array(gradient), state, weights, delay=1)
      >>> round(float(delay_diagnostics(state)["update_cosine"]), 4)
      0.7071

    References:
      The curvature is the local Lipschitz constant of Malitsky and Mishchenko, Adaptive gradient descent without
      descent, ICML 2020, arXiv:1910.09529, step 2 of algorithm 1. Cosines of late updates: Jung et al., Mitigating
      staleness in asynchronous pipeline parallelism via basis rotation, ICML 2026, arXiv:2602.03515. The discrepancy
      is that of Yang et al., PipeMare, MLSys 2021, arXiv:1910.05124, section 3.2.
    """
    for name in quantities:
        if name not in QUANTITIES:
            raise ValueError(
                f"the diagnostics must be some of {', '.join(QUANTITIES)}, got {shown(name)}."
                f"{did_you_mean(str(name), QUANTITIES)}"
            )
    optimizer = optax.with_extra_args_support(optimizer)
    sums = [name for quantity in quantities for name in _SUMS[quantity]]

    def init(params: Any) -> DiagnoseDelayState:
        last: dict[str, Any] = {}
        if "angle" in quantities:
            last["update"] = optax.tree.zeros_like(params)
        if "curvature" in quantities:
            last |= {"gradient": optax.tree.zeros_like(params), "weights": optax.tree.zeros_like(params)}

        def zeros(params: Any) -> Any:
            return jax.tree.map(lambda p: jnp.zeros([], jnp.float32), params)

        return DiagnoseDelayState(
            optimizer.init(params),
            last,
            {"num_updates": jnp.zeros([], jnp.int32), **{name: zeros(params) for name in _DELAYS}},
            {name: zeros(params) for name in sums},
        )

    def update(updates: Any, state: DiagnoseDelayState, params: Any = None, **extra_args: Any) -> tuple:
        stale = extra_args.get("stale_params")
        if {"discrepancy", "curvature"} & {*quantities} and (params is None or stale is None):
            raise ValueError(
                "`diagnose_delay` needs the weights, and those that the gradient was computed at: call "
                "`update(gradients, state, params, stale_params=...)`, as a pipeline does, or keep the angle alone: "
                '`diagnose_delay(optimizer, ["angle"])`.'
            )
        moved, inner = optimizer.update(updates, state.inner, params, **extra_args)
        last = state.last
        pairs: dict[str, tuple[Any, Any]] = {}
        if "angle" in quantities:
            pairs |= {
                "update": (moved, moved),
                "last_update": (last["update"], last["update"]),
                "product": (moved, last["update"]),
            }
            last = {**last, "update": optax.tree.cast_like(moved, last["update"])}
        if "discrepancy" in quantities:
            apart = _difference(params, stale)
            pairs["discrepancy"] = apart, apart
        if "curvature" in quantities:
            for name, now in (("gradient", updates), ("weights", stale)):
                change = _difference(now, last[name])
                pairs[f"{name}_change"] = change, change
                last = {**last, name: optax.tree.cast_like(now, last[name])}
        delay = delay_of(None, extra_args, "diagnose_delay")
        facts = {
            "num_updates": optax.safe_increment(state.delay_facts["num_updates"]),
            "delay": spread(_as_float32(delay), updates),
            "backward_delay": spread(_as_float32(extra_args.get("backward_delay", delay)), updates),
        }
        sums_now = {name: jax.tree.map(_product, *pairs[name]) for name in sums}
        return moved, DiagnoseDelayState(inner, last, facts, sums_now)

    return optax.GradientTransformationExtraArgs(init, update)


_SUMS = {
    "angle": ("update", "last_update", "product"),
    "discrepancy": ("discrepancy",),
    "curvature": ("gradient_change", "weights_change"),
}
"""Quantity -> the sums that it follows from."""


_DELAYS = ("delay", "backward_delay")


def _as_float32(delay: Any) -> Any:
    return jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), delay)


def _wide(a: jax.Array) -> jax.Array:
    """An array in float32, or in its own dtype if that is wider."""
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def _difference(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: _wide(x) - _wide(y), a, b)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(_wide(a) * _wide(b)).astype(jnp.float32)


@suggests
def delay_diagnostics(state: Any) -> dict[str, np.ndarray]:
    """The diagnostics in a state of `diagnose_delay`, of all of its weights together.

    Args:
      state: the `DiagnoseDelayState` that the update of `diagnose_delay` returned.

    Returns:
      Name -> number: "num_updates"; "delay" and "backward_delay", in updates; and of the quantities that are kept
      "update_cosine", "forward_discrepancy" and "backward_discrepancy", and "curvature". NaN where it is not known,
      such as before the second update.
    """
    totals = {name: sum(map(np.asarray, jax.tree.leaves(tree))) for name, tree in state.delay_sums.items()}
    facts = {name: np.asarray(jax.tree.leaves(tree)[0]) for name, tree in state.delay_facts.items()}
    return quantities_from(facts, totals)


def quantities_from(facts: Mapping[str, Any], sums: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The numbers of `delay_diagnostics`, element by element.

    Args:
      facts: name -> one of the numbers of `DiagnoseDelayState.delay_facts`, which are equal on a stage.
      sums: name -> the sum over weights of its `delay_sums`.
    """
    values = {name: np.asarray(value, np.float64) for name, value in facts.items()}
    compares = values["num_updates"] > 1
    squares = {name: np.asarray(value, np.float64) for name, value in sums.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        if "product" in squares:
            cosine = squares["product"] / np.sqrt(squares["update"] * squares["last_update"])
            values["update_cosine"] = np.where(compares, cosine, np.nan)
        if "discrepancy" in squares:
            forward = np.sqrt(squares["discrepancy"])
            same, none = values["backward_delay"] == values["delay"], values["backward_delay"] == 0
            values["forward_discrepancy"] = forward
            values["backward_discrepancy"] = np.where(same, forward, np.where(none, 0.0, np.nan))
        if "gradient_change" in squares:
            secant = np.sqrt(squares["gradient_change"] / squares["weights_change"])
            values["curvature"] = np.where(compares & (squares["weights_change"] > 0), secant, np.nan)
    return values
