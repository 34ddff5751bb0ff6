"""Diagnostics of late gradients, against a plain loop that keeps every version of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.optim import delay_diagnostics, diagnose_delay

SCHEDULES = jpipe.schedules
RATE, MOMENTUM, NUM_STEPS, ROWS, DIM = 0.3, 0.5, 6, 4, 3


def data():
    rng = np.random.default_rng(0)
    weights = [1 + 0.3 * rng.normal(size=DIM) for _ in range(3)]
    batches = [{n: rng.normal(size=(ROWS, DIM)) for n in ("inputs", "targets")} for _ in range(NUM_STEPS)]
    return weights, batches


def loop(weights, batches, forward, backward):
    """The diagnostics of every update of every stage: `[t][s]`, in plain NumPy.

    Stage s multiplies by its weights, so a backward needs the stashed input of the stage and the weights that it reads.
    """
    S = len(weights)
    versions = [[w] for w in weights]
    mean = [np.zeros(DIM) for _ in weights]
    updates, gradients, read, records = [[] for _ in weights], [[] for _ in weights], [[] for _ in weights], []
    for t, batch in enumerate(batches):
        first = [versions[s][max(t - forward[s], 0)] for s in range(S)]
        second = [versions[s][max(t - backward[s], 0)] for s in range(S)]
        inputs = [batch["inputs"]]
        for w in first:
            inputs.append(inputs[-1] * w)
        cotangent = 2 * (inputs[-1] - batch["targets"]) / (ROWS * DIM)
        record: list = [None] * S
        for s in reversed(range(S)):
            g = (cotangent * inputs[s]).sum(axis=0)
            cotangent = cotangent * second[s]
            mean[s] = MOMENTUM * mean[s] + g
            u, w = -RATE * mean[s], versions[s][-1]
            record[s] = {
                "num_updates": t + 1,
                "delay": forward[s],
                "backward_delay": backward[s],
                "update_cosine": np.nan,
                "forward_discrepancy": np.linalg.norm(w - first[s]),
                "backward_discrepancy": np.linalg.norm(w - second[s]),
                "curvature": np.nan,
            }
            if t:
                before = updates[s][-1]
                record[s]["update_cosine"] = u @ before / np.linalg.norm(u) / np.linalg.norm(before)
                moved = np.linalg.norm(first[s] - read[s][-1])
                if moved:
                    record[s]["curvature"] = np.linalg.norm(g - gradients[s][-1]) / moved
            for kept, value in ((updates, u), (gradients, g), (read, first[s]), (versions, w + u)):
                kept[s].append(value)
        records.append(record)
    return records


def pipeline(weights, schedule, **options):
    layers = [
        jpipe.InitApply(lambda key, x, w=w: {"w": jnp.asarray(w)}, lambda p, x: x * p["w"][None]) for w in weights
    ]
    return jpipe.Pipeline(
        layers,
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=diagnose_delay(optax.sgd(RATE, momentum=MOMENTUM)),
        schedule=schedule,
        **{"boundaries": [1, 2], **options},
    )


# Table -> delays of the weights that forwards and backwards read.
TABLES = {
    "pipedream": (lambda: SCHEDULES.pipedream(3, 1), (2, 1, 0), (2, 1, 0)),
    "pipemare": (lambda: SCHEDULES.pipemare(3, 1), (2, 1, 0), (0, 0, 0)),
    "2bw": (lambda: SCHEDULES.pipedream_2bw(3, 2), (1, 1, 1), (1, 1, 1)),
    "one device": (lambda: SCHEDULES.with_delays([3, 0, 1], 1), (3, 0, 1), (3, 0, 1)),
    "one device, newer backwards": (
        lambda: SCHEDULES.with_delays([3, 0, 2], 1, backward_delays=[0, 0, 2]),
        (3, 0, 2),
        (0, 0, 2),
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("name", TABLES)
def test_equals_a_loop_that_keeps_every_version(name):
    table, forward, backward = TABLES[name]
    with jax.enable_x64(True):
        weights, batches = data()
        expected = loop(weights, batches, forward, backward)
        pipe = pipeline(weights, table())
        state = pipe.init(jax.random.key(0), batches[0])
        seen = set()
        for batch in [*batches, None]:
            state, _ = pipe.flush(state) if batch is None else pipe.step(state, batch)
            values = pipe.get_diagnostics(state)
            for s in range(3):
                t = int(values["num_updates"][s]) - 1
                if t < 0:  # the pipeline still fills
                    continue
                seen.add((t, s))
                assert values.keys() == expected[t][s].keys()
                for key, value in expected[t][s].items():
                    np.testing.assert_allclose(values[key][s], value, rtol=1e-5, atol=1e-12, err_msg=f"{key} {t} {s}")
    assert {(NUM_STEPS - 1, s) for s in range(3)} <= seen and len(seen) >= 3 * NUM_STEPS - 3
    assert np.isfinite(values["curvature"]).all() and np.isfinite(values["update_cosine"]).all()


def test_replicas_that_share_the_update_keep_the_same_numbers():
    weights, batches = data()
    found = []
    for options in ({}, {"mesh": jpipe.make_mesh(stage=3, data=2), "shard_optimizer": True}):
        pipe = pipeline(weights, SCHEDULES.one_f_one_b(3, 2), **options)
        state = pipe.init(jax.random.key(0), batches[0])
        for batch in batches[:3]:
            state, _ = pipe.step(state, batch)
        found.append(pipe.get_diagnostics(state))
    for key, value in found[0].items():
        np.testing.assert_allclose(found[1][key], value, rtol=1e-4, err_msg=key)


@pytest.mark.exhaustive
def test_layers_of_unlike_delays_can_come_to_one_stage():
    weights, batches = data()
    pipe, other = (pipeline(weights, SCHEDULES.pipedream(S, 1), boundaries=[*range(1, S)]) for S in (3, 2))
    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches[:3]:
        state, _ = pipe.step(state, batch)
    state = other.adopt(pipe.flush(state)[0])
    np.testing.assert_array_equal(other.get_diagnostics(state)["num_updates"], [3, 3])
    for batch in batches[3:5]:
        state, _ = other.step(state, batch)
    values = other.get_diagnostics(other.flush(state)[0])
    np.testing.assert_array_equal(values["num_updates"], [5, 5])
    np.testing.assert_array_equal(values["delay"], [1, 0])


def test_a_backward_between_both_is_not_known():
    optimizer, w = diagnose_delay(optax.sgd(0.1), ["discrepancy"]), jnp.ones(2)
    _, state = optimizer.update(w, optimizer.init(w), w, delay=3, backward_delay=1, stale_params=0 * w)
    values = delay_diagnostics(state)
    assert values.keys() == {"num_updates", "delay", "backward_delay", "forward_discrepancy", "backward_discrepancy"}
    assert values["forward_discrepancy"] == pytest.approx(np.sqrt(2)) and np.isnan(values["backward_discrepancy"])


def test_the_secant_of_a_quadratic_is_its_curvature_and_updates_are_those_of_the_optimizer():
    optimizer, plain = diagnose_delay(optax.adam(0.1)), optax.adam(0.1)
    w = jnp.ones(2)
    state, plain_state = optimizer.init(w), plain.init(w)
    for _ in range(4):
        gradient = 7.0 * w
        updates, state = optimizer.update(gradient, state, w, delay=0, stale_params=w)
        expected, plain_state = plain.update(gradient, plain_state)
        np.testing.assert_array_equal(updates, expected)
        w = optax.apply_updates(w, updates)
    assert delay_diagnostics(state)["curvature"] == pytest.approx(7, rel=1e-4)


def test_weights_in_bfloat16_keep_their_dtype():
    optimizer, w = diagnose_delay(optax.sgd(0.1)), {"w": jnp.ones(4, jnp.bfloat16)}
    state = optimizer.init(w)
    _, after = optimizer.update(w, state, w, delay=1, stale_params=w)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, after)


def test_what_is_missing_is_said():
    with pytest.raises(ValueError, match="must be some of angle, discrepancy, curvature, got 'angel'.* 'angle'"):
        diagnose_delay(optax.sgd(0.1), ["angel"])
    w = jnp.ones(2)
    optimizer = diagnose_delay(optax.sgd(0.1))
    with pytest.raises(ValueError, match="or keep the angle alone"):
        optimizer.update(w, optimizer.init(w), w, delay=1)
    alone = diagnose_delay(optax.sgd(0.1), ["angle"])
    with pytest.raises(ValueError, match="`diagnose_delay` needs a delay, got none"):
        alone.update(w, alone.init(w))
    layer = jpipe.InitApply(lambda key, x: jnp.ones(2), lambda p, x: x * p[None])
    plain = jpipe.Pipeline(
        [layer], loss=lambda y, _: y.mean(), optimizer=optax.sgd(0.1), schedule=SCHEDULES.gpipe(1, 1)
    )
    with pytest.raises(ValueError, match="keeps no diagnostics. Wrap it"):
        plain.get_diagnostics(plain.init(jax.random.key(0), {"inputs": jnp.ones((2, 2))}))
