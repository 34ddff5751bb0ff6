"""A small example of every optimizer, transform, wrapper and schedule that `optax` and `optax.contrib` export."""

import dataclasses
import inspect
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from optax import contrib

APART = "`optimizer` lets the update of one layer depend on others"
MORE = r"(?s)`optimizer` cannot update .*It is called as"
FORM = "`optimizer` changes the form of its state"


@dataclasses.dataclass(frozen=True)
class Example:
    """How a function of Optax is used.

    Attributes:
      make: a whole optimizer. The test calls it, as some make arrays.
      complex: whether it is compared with complex weights too.
      bfloat16: whether it is compared in bfloat16. Not: what moves weights in three updates by less than the tolerance
        (COCOB), what divides by zero because Optax rounds a decay of 0.999 to 1 (hyperparameters in the state), and
        what changes the dtype of its state from update to update, so that the pipeline refuses it (distance over
        gradients).
      refused: what the pipeline says if it does not take it.
    """

    make: Callable[[], optax.GradientTransformation]
    complex: bool = False
    bfloat16: bool = True
    refused: str | None = None


def exported() -> list[str]:
    """The public names that can be called, without the types of states."""
    return [
        f"{prefix}{name}"
        for module, prefix in ((optax, "optax."), (contrib, "contrib."))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (inspect.isroutine(value) or name == "MultiSteps" or hasattr(value, "func"))
    ]


LOSSES_AND_TOOLS = """
optax.apply_updates optax.bias_correction optax.convex_kl_divergence optax.cosine_distance optax.cosine_similarity
optax.ctc_loss optax.ctc_loss_with_forward_probs optax.generalized_kl_divergence optax.global_norm optax.hinge_loss
optax.huber_loss optax.incremental_update optax.init_empty_state optax.kl_divergence optax.l2_loss optax.log_cosh
optax.matrix_inverse_pth_root optax.microbatch optax.multi_normal optax.nnls optax.ntxent
optax.per_example_global_norm_clip optax.per_example_layer_norm_clip optax.periodic_update optax.power_iteration
optax.safe_increment optax.safe_int32_increment optax.safe_norm optax.safe_root_mean_squares
optax.safe_softmax_cross_entropy optax.scale_gradient optax.sigmoid_binary_cross_entropy optax.sigmoid_focal_loss
optax.skip_large_updates optax.skip_not_finite optax.smooth_labels optax.softmax_cross_entropy
optax.softmax_cross_entropy_with_integer_labels optax.squared_error optax.tree_map_params
optax.update_infinity_moment optax.update_moment optax.update_moment_per_elem_norm optax.value_and_grad_from_state
contrib.schedule_free_eval_params
""".split()
"""Names that are no optimizers, transforms, wrappers or schedules."""


def whole(optimizer, *arguments, **options):
    """Example of an optimizer."""
    special = {k: options.pop(k) for k in ("refused", "complex", "bfloat16") if k in options}
    return Example(lambda: optimizer(*arguments, **options), **special)


def scaled(transform, *arguments, rate=0.1, **options):
    """Example of a transform, in front of a learning rate."""
    special = {k: options.pop(k) for k in ("refused", "complex", "bfloat16") if k in options}
    return Example(
        lambda: optax.chain(transform(*arguments, **options), optax.scale(-rate)),
        **special,
    )


def around(wrapper, *arguments, **options):
    """Example of a wrapper of an optimizer."""
    return whole(lambda: wrapper(optax.adam(0.1), *arguments), **options)


def scheduled(schedule, *arguments, **options):
    """Example of a learning-rate schedule."""
    return whole(lambda: optax.sgd(schedule(*arguments, **options)))


def matrices(params):
    return jax.tree.map(lambda a: a.ndim > 1, params)


def vectors(params):
    return jax.tree.map(lambda a: a.ndim == 1, params)


def by_layer(params):
    return jax.tree.map_with_path(lambda path, _: "first" if path[0].idx == 0 else "others", params)


def after_the_first(step, **extra_args):
    del extra_args
    return step > 0


def by_label(combine):
    return combine({"first": optax.adam(0.1), "others": optax.sgd(0.1)}, by_layer)


def norms(updates, *others, **extra_args):
    """Of every weight by itself."""
    del others, extra_args
    return jax.tree.map(jnp.linalg.norm, updates)


def in_and_out(params):
    """The dims of matrices, as Muon takes them."""
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)


SGD, SEED = optax.sgd(0.1), 0
COSINE = dict(init_value=0.0, peak_value=0.2, warmup_steps=1, decay_steps=3)

EXAMPLES: dict[str, Example] = {
    "optax.MultiSteps": around(optax.MultiSteps, 2),
    "optax.adabelief": whole(optax.adabelief, 0.1, complex=True),
    "optax.adadelta": whole(optax.adadelta, 10.0),
    "optax.adafactor": whole(optax.adafactor, 0.1, min_dim_size_to_factor=4),
    "optax.adagrad": whole(optax.adagrad, 0.1),
    "optax.adam": whole(optax.adam, 0.1, complex=True),
    "optax.adamax": whole(optax.adamax, 0.1),
    "optax.adamaxw": whole(optax.adamaxw, 0.1, weight_decay=0.1, mask=matrices),
    "optax.adamw": whole(optax.adamw, 0.1, weight_decay=0.1, mask=matrices, complex=True),
    "optax.adan": whole(optax.adan, 0.1),
    "optax.adaptive_grad_clip": scaled(optax.adaptive_grad_clip, 0.1, rate=1.0),
    "optax.add_decayed_weights": scaled(optax.add_decayed_weights, 0.5, matrices),
    "optax.add_noise": scaled(optax.add_noise, 0.1, 0.5, key=SEED, refused=APART),
    "optax.amsgrad": whole(optax.amsgrad, 0.1, complex=True),
    "optax.apply_every": scaled(optax.apply_every, 2),
    "optax.apply_if_finite": around(optax.apply_if_finite, 3, refused=APART),
    "optax.centralize": scaled(optax.centralize),
    "optax.chain": whole(optax.chain, optax.scale_by_adam(), optax.scale(-0.1)),
    "optax.clip": scaled(optax.clip, 0.1, rate=1.0),
    "optax.clip_by_block_rms": scaled(optax.clip_by_block_rms, 0.1, rate=1.0),
    "optax.clip_by_global_norm": scaled(optax.clip_by_global_norm, 0.1, refused=APART),
    "optax.conditionally_mask": around(optax.conditionally_mask, after_the_first),
    "optax.conditionally_transform": around(optax.conditionally_transform, after_the_first),
    "optax.ema": scaled(optax.ema, 0.9, complex=True),
    "optax.flatten": around(optax.flatten, refused=APART),
    "optax.freeze": whole(lambda: optax.chain(SGD, optax.freeze(vectors))),
    "optax.fromage": whole(optax.fromage, 0.1),
    "optax.identity": scaled(optax.identity),
    "optax.inject_hyperparams": whole(
        lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.2, 3)),
        bfloat16=False,
    ),
    "optax.inject_stateful_hyperparams": whole(
        lambda: optax.inject_stateful_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.2, 3)),
        bfloat16=False,
    ),
    "optax.keep_params_nonnegative": whole(lambda: optax.chain(optax.sgd(1.0), optax.keep_params_nonnegative())),
    "optax.lamb": whole(optax.lamb, 0.1, weight_decay=0.1),
    "optax.lars": whole(optax.lars, 1.0, weight_decay=0.1, trust_coefficient=0.1),
    "optax.lbfgs": whole(optax.lbfgs, refused=MORE),
    "optax.lion": whole(optax.lion, 0.1),
    "optax.lookahead": around(optax.lookahead, 2, 0.5, refused=MORE),
    "optax.masked": whole(lambda: optax.chain(optax.masked(optax.scale_by_adam(), matrices), optax.scale(-0.1))),
    "optax.measure_with_ema": scaled(
        lambda: optax.monitor({"norm": optax.measure_with_ema(norms, 0.9)}),
        refused=FORM,
    ),
    "optax.monitor": scaled(lambda: optax.monitor({"norm": norms}), refused=FORM),
    "optax.multi_transform": whole(by_label, optax.multi_transform),
    "optax.nadam": whole(optax.nadam, 0.1),
    "optax.nadamw": whole(optax.nadamw, 0.1),
    "optax.named_chain": whole(lambda: optax.named_chain(("adam", optax.scale_by_adam()), ("lr", optax.scale(-0.1)))),
    "optax.noisy_sgd": whole(optax.noisy_sgd, 0.1, key=SEED, refused=APART),
    "optax.normalize_by_update_norm": scaled(optax.normalize_by_update_norm, refused=APART),
    "optax.novograd": whole(optax.novograd, 0.1),
    "optax.optimistic_adam": whole(optax.optimistic_adam, 0.1),
    "optax.optimistic_adam_v2": whole(optax.optimistic_adam_v2, 0.1),
    "optax.optimistic_gradient_descent": whole(optax.optimistic_gradient_descent, 0.1),
    "optax.partition": whole(by_label, optax.partition),
    "optax.polyak_sgd": whole(optax.polyak_sgd, refused=MORE),
    "optax.radam": whole(optax.radam, 0.1),
    "optax.rmsprop": whole(optax.rmsprop, 0.1, momentum=0.9, complex=True),
    "optax.rprop": whole(optax.rprop, 0.1),
    "optax.scale": whole(optax.scale, -0.1, complex=True),
    "optax.scale_by_adadelta": scaled(optax.scale_by_adadelta, rate=10.0),
    "optax.scale_by_adam": scaled(optax.scale_by_adam),
    "optax.scale_by_adamax": scaled(optax.scale_by_adamax),
    "optax.scale_by_adan": scaled(optax.scale_by_adan),
    "optax.scale_by_amsgrad": scaled(optax.scale_by_amsgrad),
    "optax.scale_by_backtracking_linesearch": whole(optax.scale_by_backtracking_linesearch, 3, refused=MORE),
    "optax.scale_by_belief": scaled(optax.scale_by_belief),
    "optax.scale_by_distance_over_gradients": scaled(
        optax.scale_by_distance_over_gradients, reps_rel=0.1, bfloat16=False
    ),
    "optax.scale_by_factored_rms": scaled(optax.scale_by_factored_rms, min_dim_size_to_factor=4),
    "optax.scale_by_lbfgs": scaled(optax.scale_by_lbfgs, refused=APART),
    "optax.scale_by_learning_rate": whole(optax.scale_by_learning_rate, 0.1),
    "optax.scale_by_lion": scaled(optax.scale_by_lion),
    "optax.scale_by_novograd": scaled(optax.scale_by_novograd),
    "optax.scale_by_optimistic_gradient": scaled(optax.scale_by_optimistic_gradient),
    "optax.scale_by_param_block_norm": scaled(optax.scale_by_param_block_norm),
    "optax.scale_by_param_block_rms": scaled(optax.scale_by_param_block_rms),
    "optax.scale_by_polyak": whole(optax.scale_by_polyak, refused=MORE),
    "optax.scale_by_radam": scaled(optax.scale_by_radam),
    "optax.scale_by_rms": scaled(optax.scale_by_rms),
    "optax.scale_by_rprop": scaled(optax.scale_by_rprop, 0.1, rate=1.0),
    "optax.scale_by_rss": scaled(optax.scale_by_rss),
    "optax.scale_by_schedule": scaled(lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.5, 3))),
    "optax.scale_by_sign": scaled(optax.scale_by_sign),
    "optax.scale_by_sm3": scaled(optax.scale_by_sm3, rate=1.0),
    "optax.scale_by_stddev": scaled(optax.scale_by_stddev),
    "optax.scale_by_trust_ratio": scaled(optax.scale_by_trust_ratio),
    "optax.scale_by_yogi": scaled(optax.scale_by_yogi),
    "optax.scale_by_zoom_linesearch": whole(optax.scale_by_zoom_linesearch, 3, refused=MORE),
    "optax.selective_transform": around(lambda adam: optax.selective_transform(adam, freeze_mask=False)),
    "optax.set_to_zero": whole(lambda: optax.partition({"first": SGD, "others": optax.set_to_zero()}, by_layer)),
    "optax.sgd": whole(optax.sgd, 0.1, momentum=0.9, nesterov=True, complex=True),
    "optax.sign_sgd": whole(optax.sign_sgd, 0.1),
    "optax.signum": whole(optax.signum, 0.1),
    "optax.sm3": whole(optax.sm3, 1.0),
    "optax.snapshot": scaled(optax.snapshot, "norm", norms),
    "optax.stateless": scaled(lambda: optax.stateless(lambda updates, _: jax.tree.map(jnp.tanh, updates))),
    "optax.stateless_with_tree_map": scaled(lambda: optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p)),
    "optax.trace": scaled(optax.trace, 0.9, complex=True),
    "optax.with_extra_args_support": around(optax.with_extra_args_support),
    "optax.yogi": whole(optax.yogi, 0.1, complex=True),
    "optax.zero_nans": scaled(optax.zero_nans),
    "contrib.acprop": whole(contrib.acprop, 0.1),
    "contrib.ademamix": whole(contrib.ademamix, 0.1),
    "contrib.adopt": whole(contrib.adopt, 1.0),
    "contrib.cocob": whole(contrib.cocob, bfloat16=False),
    "contrib.dadapt_adamw": whole(contrib.dadapt_adamw, refused=APART),
    "contrib.differentially_private_aggregate": scaled(
        contrib.differentially_private_aggregate, 1.0, 0.1, key=SEED, refused=MORE
    ),
    "contrib.dog": whole(contrib.dog, refused=APART),
    "contrib.dowg": whole(contrib.dowg, refused=APART),
    "contrib.dpsgd": whole(contrib.dpsgd, 0.1, 1.0, 0.1, SEED, refused=MORE),
    "contrib.galore": whole(contrib.galore, 0.1, rank=2, refused=MORE),
    "contrib.hutchinson_estimator_diag_hessian": scaled(contrib.hutchinson_estimator_diag_hessian, refused=MORE),
    "contrib.madgrad": whole(contrib.madgrad, 0.1),
    "contrib.mechanize": whole(lambda: contrib.mechanize(SGD), refused=APART),
    "contrib.momo": whole(contrib.momo, refused=MORE),
    "contrib.momo_adam": whole(contrib.momo_adam, refused=MORE),
    "contrib.muon": whole(contrib.muon, 0.1, ns_steps=3),  # as `scale_by_muon` below
    "contrib.normalize": scaled(contrib.normalize, refused=APART),
    "contrib.prodigy": whole(contrib.prodigy, refused=APART),
    "contrib.reduce_on_plateau": scaled(contrib.reduce_on_plateau, refused=MORE),
    "contrib.sam": whole(lambda: contrib.sam(SGD, optax.sgd(0.05)), refused=MORE),
    "contrib.scale_by_acprop": scaled(contrib.scale_by_acprop),
    "contrib.scale_by_ademamix": scaled(contrib.scale_by_ademamix),
    "contrib.scale_by_adopt": scaled(contrib.scale_by_adopt, rate=1.0),
    "contrib.scale_by_cocob": whole(contrib.scale_by_cocob, bfloat16=False),
    "contrib.scale_by_galore": scaled(contrib.scale_by_galore, rank=2, refused=MORE),
    "contrib.scale_by_madgrad": whole(contrib.scale_by_madgrad, 0.1),
    # Each step of Newton-Schulz multiplies small singular values, and their roundings, by 3.4: the default of 5 steps
    # by 480, which puts float32 as far from float64 as the tolerance. What the pipeline does is the same after 3 steps.
    "contrib.scale_by_muon": scaled(
        lambda: optax.masked(contrib.scale_by_muon(weight_dimension_numbers=in_and_out, ns_steps=3), matrices)
    ),
    "contrib.scale_by_simplified_ademamix": scaled(contrib.scale_by_simplified_ademamix),
    "contrib.schedule_free": around(contrib.schedule_free, 0.1),
    "contrib.schedule_free_adamw": whole(contrib.schedule_free_adamw, 0.1),
    "contrib.schedule_free_sgd": whole(contrib.schedule_free_sgd, 0.1),
    "contrib.simplified_ademamix": whole(contrib.simplified_ademamix, 0.1),
    "contrib.sophia": whole(contrib.sophia, 0.1, refused=MORE),
    "contrib.split_real_and_imaginary": around(contrib.split_real_and_imaginary, complex=True),
    "optax.constant_schedule": scheduled(optax.constant_schedule, 0.1),
    "optax.cosine_decay_schedule": scheduled(optax.cosine_decay_schedule, 0.1, 4),
    "optax.cosine_onecycle_schedule": scheduled(optax.cosine_onecycle_schedule, 4, 0.1),
    "optax.exponential_decay": scheduled(optax.exponential_decay, 0.1, 2, 0.5),
    "optax.join_schedules": scheduled(optax.join_schedules, [optax.constant_schedule(r) for r in (0.1, 0.2)], [1]),
    "optax.linear_onecycle_schedule": scheduled(optax.linear_onecycle_schedule, 4, 0.1),
    "optax.linear_schedule": scheduled(optax.linear_schedule, 0.2, 0.1, 3),
    "optax.piecewise_constant_schedule": scheduled(optax.piecewise_constant_schedule, 0.2, {1: 0.5}),
    "optax.piecewise_interpolate_schedule": scheduled(optax.piecewise_interpolate_schedule, "linear", 0.2, {2: 0.5}),
    "optax.polynomial_schedule": scheduled(optax.polynomial_schedule, 0.2, 0.1, 2, 3),
    "optax.sgdr_schedule": scheduled(optax.sgdr_schedule, [COSINE, COSINE]),
    "optax.warmup_constant_schedule": scheduled(optax.warmup_constant_schedule, 0.1, 0.2, 2),
    "optax.warmup_cosine_decay_schedule": scheduled(optax.warmup_cosine_decay_schedule, **COSINE),
    "optax.warmup_exponential_decay_schedule": scheduled(optax.warmup_exponential_decay_schedule, 0.1, 0.2, 1, 2, 0.5),
}
"""Of every name of `exported` but `LOSSES_AND_TOOLS`."""
