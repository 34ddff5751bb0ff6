"""Batches, layers and pipelines of the cases of `fuzz.py`."""

import functools
import random
from typing import Any

import fuzz_model
import fuzz_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
from families import HAND_WRITTEN
from flax import nnx
from fuzz_cases import OPTIMIZERS, Case
from fuzz_layers import (
    KINDS,
    NUM_WORDS,
    D,
    Embedding,
    Head,
    enter,
    leave,
    with_x,
    x_of,
)
from oracles import delay_with_copies

import jpipe


def batches_of(case: Case, count: int, rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(case.seed)
    real = np.float64 if case.x64 else np.float32
    result = []
    for _ in range(count):
        x = rng.normal(size=(rows, D)) + rng.normal(size=(rows, 1))
        entries = {
            "complex": (x + 1j * rng.normal(size=(rows, D))).astype(np.complex128 if case.x64 else np.complex64),
            "integer": rng.integers(0, 9, rows, dtype=np.int32),
            "truth": rng.random(rows) < 0.6,
            "key": rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
            "number": np.ones(rows, real),
            "empty": np.ones(rows, real),
        }
        inputs: Any = x.astype(real)
        labels = rng.integers(0, NUM_WORDS, rows, dtype=np.int32)
        if case.vocabulary:
            inputs = rng.integers(0, NUM_WORDS, rows, dtype=np.int32)
        elif case.carried:
            inputs = {"x": inputs, **{name: entries[name] for name in case.carried}}
        weights = rng.integers(0, 3, rows).astype(real)
        weights[0] = 1  # a minibatch has a weight, a microbatch may have none
        if case.nan and len(result) == count // 2:
            x[rng.integers(rows), 0] = np.nan
        targets = rng.normal(size=(rows, D)).astype(real)
        batch = {"inputs": inputs, "targets": targets, "weights": weights}
        result.append({**batch, "labels": labels} if case.vocabulary else batch)
    return result


def schedule_of(case: Case) -> jpipe.Schedule:
    name, _, ticks = case.schedule.partition("/")
    options: dict[str, Any] = {"ticks": ticks} if ticks else {}
    if ticks == "vertical":
        options = {"ticks": "unit", "vertical_sync": True}
    if case.copies:
        options["replicas"] = case.copies
    if name == "hand-written":
        return jpipe.Schedule.from_text(HAND_WRITTEN, name=name).check()
    schedule = getattr(jpipe.schedules, name)(case.S, case.N, **options)
    return jpipe.schedules.emulated(schedule) if case.emulated else schedule


def delays_of(case: Case):
    """Formulas of the versions that a forward and a backward read."""
    none = lambda s, j: 0  # noqa: E731
    if not case.asynchronous:
        return none, none
    name, _, ticks = case.schedule.partition("/")
    if case.copies:
        delay = delay_with_copies(case.copies, case.N, ticks)
    elif name == "pipedream_2bw":
        delay = lambda s, j: 1  # noqa: E731
    else:
        formula = oracle.paired_delay if ticks == "paired" else oracle.unit_delay
        delay = formula(case.S, case.N)
    if ticks == "vertical":
        of_first = functools.partial(delay, 0)
        delay = lambda s, j: of_first(j)  # noqa: E731
    return delay, none if name == "pipemare" else delay


def pipeline_layers(case: Case, key) -> list:
    special = {
        "enter": jpipe.Function(enter),
        "leave": jpipe.Function(leave),
        "embedding": Embedding,
        "head": Head,
        "stash": jpipe.skip(jpipe.Function(lambda a: (a, x_of(a))), stash="long"),
        "pop": jpipe.skip(jpipe.Function(lambda a, s: with_x(a, x_of(a) + jnp.tanh(s))), pop="long"),
    }
    layers = []
    for i, name in enumerate(case.names):
        layer = special.get(name) or KINDS[name].layer
        if case.given and isinstance(layer, type) and issubclass(layer, nnx.Module):
            layer = layer(rngs=nnx.Rngs(jax.random.fold_in(key, i)))
        layers.append(layer)
    return layers


def loss_of_rows(case: Case, outputs, batch):
    """As the oracle's, but for logits of which a device has a part."""
    if case.vocabulary:
        return jpipe.vocabulary.cross_entropy(outputs, batch["labels"])
    return fuzz_model.loss_of_rows(case, outputs, batch)


def loss_function(case: Case):
    parts = functools.partial(fuzz_model.loss_parts, of_rows=loss_of_rows)
    if case.loss == "reported":
        return lambda outputs, batch, *, reported: parts(case, outputs, batch, reported["size"])[0]

    def loss(outputs, batch):
        value, weight, aux = parts(case, outputs, batch, 0.0)
        if case.loss == "weighted":
            return value, weight
        return (value, {"squares": aux}) if case.loss == "aux" else value

    return loss


HOOKS = {
    "prediction": (
        jpipe.optim.predict_weights,
        "forward_params",
        jpipe.optim.predicted_params,
    ),
    "correction": (
        lambda: jpipe.optim.correct_discrepancy(oracle.DISCREPANCY_DECAY),
        "backward_params",
        jpipe.optim.corrected_params,
    ),
}
COMPRESSORS = {
    "": jpipe.compress.Cast("float32"),  # to what it is, or to half of it
    "topk": jpipe.compress.TopK(1.0),
    "threshold": jpipe.compress.Threshold(1.0),
}
"""All but the first lose nothing."""
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def make_pipeline(case: Case, layers: list, schedule: jpipe.Schedule) -> jpipe.Pipeline:
    boundaries = None
    if case.cut and case.S > 1:
        inner = range(1, len(case.names))
        boundaries = sorted(random.Random(case.cut).sample(inner, case.S - 1))
    ties = []
    if case.tie:
        ties = [[(i, "linear.kernel") for i in case.tied_layers]]
    optional: dict[str, Any] = {}
    if case.offload:
        optional["offload"] = jpipe.Offload(**{name: 2 if name == "activations" else 1.0 for name in case.offload})
    for text in case.compress:
        what, _, compressor = text.partition("/")
        optional[f"compress_{what}"] = COMPRESSORS[compressor]
    if case.compute:
        optional["compute_dtype"] = case.dtype_of_compute
    if case.loss_scale:
        optional["loss_scale"] = case.loss_scale
    if case.scale_moves:
        optional["loss_scale"] = jpipe.LossScale(case.loss_scale, growth_interval=oracle.GROWTH_INTERVAL)
    optimizer = OPTIMIZERS[case.optimizer]()
    for hook in case.hooks:
        transform, passes, function = HOOKS[hook]
        optimizer = optax.chain(optimizer, transform())
        optional[passes] = function
    if case.vocabulary:
        optional["axis_rules"] = (("vocab", "stage"), *jpipe.AXIS_RULES)
    sizes = {"fsdp": case.fsdp, "model": case.model}
    axes = {name: size for name, size in sizes.items() if size > 1}
    return jpipe.Pipeline(
        layers,
        loss=loss_function(case),
        has_aux=case.loss == "aux",
        optimizer=optimizer,
        schedule=schedule,
        boundaries=boundaries,
        mesh=jpipe.make_mesh(stage=schedule.num_devices, data=case.data, **axes),
        recompute=POLICIES.get(case.recompute, case.recompute),
        ties=ties,
        shard_optimizer=case.shard_optimizer,
        overlap=case.overlap,
        donate=case.donate,
        **optional,
    )
