"""The delays of asynchronous tables from formulas, and corrections of late gradients, for oracles and for pipelines."""

import functools
import math

import optax

import jpipe


def paired_delay(S, N):
    """PipeMare's: forward at slot k + s, backward 2 (S - 1 - s) + 1 later, an update when a minibatch is complete."""

    def delay(s, j):
        # Versions not yet written when microbatch j of its minibatch runs forward: those of backwards due later.
        return math.ceil((2 * (S - 1 - s) + 1 - j) / N) if 2 * (S - 1 - s) + 1 > j else 0

    return delay


def unit_delay(S, N):
    """Time-multiplexed: at N = 1 the gradient of microbatch k meets k - (S - 1 - s) updates (PipeDream's 1F1B)."""

    def delay(s, j):
        return math.ceil((S - 1 - s - j) / N) if S - 1 - s > j else 0

    return delay


def none(s, j):
    return 0


# As `oracles.train_with_delays` takes them.
T1, T2, CLIPPING = dict(annealing_steps=15), dict(decay=0.3), dict(max_norm=0.7)
CORRECTIONS = {
    "none": {},
    "T1": T1,
    "T2": T2,
    "T1+T2": T1 | T2,
    "prediction": dict(predicts=True),
    "clipping": CLIPPING,
    "all": T1 | T2 | CLIPPING | dict(predicts=True),
}
SPIKE = dict(spike=(0.8, 0.02))


def corrected(optimizer, corrections) -> dict:
    """What `jpipe.Pipeline` takes for them."""
    before, after, hooks = [], [], {}
    if "max_norm" in corrections:
        before.append(jpipe.optim.clip_by_global_norm(corrections["max_norm"]))
    if "annealing_steps" in corrections:
        after.append(jpipe.optim.scale_by_delay(corrections["annealing_steps"]))
    if "decay" in corrections:
        after.append(jpipe.optim.correct_discrepancy(corrections["decay"]))
        hooks["backward_params"] = jpipe.optim.corrected_params
    if "predicts" in corrections:
        after.append(jpipe.optim.predict_weights())
        hooks["forward_params"] = jpipe.optim.predicted_params
    if "spike" in corrections:
        hooks["forward_params"] = functools.partial(
            jpipe.optim.velocity_predicted_params,
            learning_rate=corrections["spike"][1],
        )
    return dict(optimizer=optax.chain(*before, optimizer, *after), **hooks)
