"""Random models, schedules, options, optimizers, meshes and batches against plain JAX.

    python tests/fuzz.py --minutes 60
    python tests/fuzz.py --seed 17
    python tests/fuzz.py --case '{"layers": ["norm", "dense"], "S": 2}'
    python tests/fuzz.py --pairs LOG ...

The first draws cases until the time is over, and shrinks each that fails; the others run one case. A case fails if its numbers are
not those of `fuzz_oracle.py`, or if anything but `ValueError` before a compile refuses it. The last reads what the first has printed,
and says which features have been together in a case that is equal.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # pytest does both
    sys.path[:0] = [str(ROOT)]
    __import__("conftest")

# ruff: noqa: E402
import fuzz_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import optax
from families import HAND_WRITTEN
from flax import nnx
from fuzz_layers import (
    CARRIED,
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

# -- Cases


@dataclasses.dataclass(frozen=True)
class Case:
    """What one run has. The defaults are the simplest choices, towards which a case is shrunken."""

    layers: tuple[str, ...] = ("dense",)
    carried: tuple[str, ...] = ()
    schedule: str = "gpipe"
    S: int = 1
    N: int = 1
    copies: tuple[int, ...] = ()
    emulated: bool = False
    data: int = 1
    fsdp: int = 1
    model: int = 1
    vocabulary: bool = False
    rows: int = 2
    optimizer: str = "sgd"
    loss: str = "mean"
    recompute: str = "none"
    compute: str = ""
    x64: bool = True
    loss_scale: float = 0.0
    scale_moves: bool = False
    nan: bool = False
    hooks: tuple[str, ...] = ()
    tie: bool = False
    skip: bool = False
    cut: int = 0
    shard_optimizer: bool = False
    overlap: bool | None = None
    donate: bool = True
    given: bool = False
    offload: tuple[str, ...] = ()
    compress: tuple[str, ...] = ()
    middle: str = ""
    then: tuple[str, ...] = ()
    steps: int = 2
    seed: int = 0

    @property
    def names(self) -> list[str]:
        """Of all layers."""
        inner = list(self.layers)
        if self.skip:
            inner = [*inner[:1], "stash", *inner[1:], "pop"]
        ends = ("embedding", "head") if self.vocabulary else ("enter", "leave")
        return [ends[0], *inner, ends[1]]

    @property
    def tied_layers(self) -> list[int]:
        return [i for i, name in enumerate(self.names) if name == "dense"][:2]

    @property
    def dtype_of_compute(self):
        return jnp.dtype(self.compute) if self.compute else None

    @property
    def asynchronous(self) -> bool:
        return self.schedule.startswith(("pipedream", "pipemare"))

    @property
    def tolerance(self) -> float:
        """Of the largest number of an array."""
        if self.compute or any(KINDS[name].low for name in self.layers):
            return 5e-2
        if self.compress or not self.x64:
            return 5e-4
        # Flax computes the statistics of batch norms in float32.
        return 2e-5 if any(KINDS[name].norm for name in self.layers) else 1e-8

    def text(self) -> str:
        """What differs from the defaults, as `--case` takes it."""
        fields = {f.name: f.default for f in dataclasses.fields(self)}
        values = dataclasses.asdict(self).items()
        return json.dumps({name: v for name, v in values if v != fields[name]})

    @classmethod
    def from_text(cls, text: str) -> "Case":
        values = json.loads(text)
        return cls(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        )


SYNCHRONOUS = (
    "gpipe", "one_f_one_b/paired", "one_f_one_b/unit", "interleaved/paired", "interleaved/unit", "zero_bubble_h1",
    "zero_bubble_h2", "zero_bubble_v", "hand-written",
)  # fmt: skip
ASYNCHRONOUS = (
    "pipedream/paired", "pipedream/unit", "pipedream/vertical", "pipedream_2bw/paired", "pipedream_2bw/unit", "pipemare/paired", "pipemare/unit",
)  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    # With a large eps an update is a smooth function of gradients near 0, so rounding stays small.
    "adamw": lambda: optax.adamw(0.1, eps=1.0),
    "clip": lambda: optax.chain(
        jpipe.optim.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.5)
    ),
    "every_second": lambda: optax.MultiSteps(
        optax.sgd(0.1), every_k_schedule=2
    ).gradient_transformation(),
    "scaled_by_delay": lambda: optax.chain(
        optax.sgd(0.1), jpipe.optim.scale_by_delay(oracle.ANNEALING_STEPS)
    ),
    "ema": lambda: optax.chain(optax.sgd(0.1), jpipe.optim.ema_weights(0.9)),
    "error_feedback": lambda: optax.chain(
        optax.sgd(0.1, momentum=0.5), jpipe.optim.error_feedback()
    ),
    "master_weights": lambda: jpipe.optim.master_weights(optax.sgd(0.1, momentum=0.5)),
    # Optax computes the rate in float32, where these are without rounding.
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.25, 0.125, 4)),
}
PLAIN_OPTIMIZERS = OPTIMIZERS | {
    "clip": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.5)
    ),
    "scaled_by_delay": OPTIMIZERS["sgd"],
}
"""What the oracle applies."""
ROUNDED = {"lookup", "others", "branch", "sort", "clip", "count"}
"""Layers in which rounding to bfloat16 may choose another branch."""


def draw(seed: int) -> Case:
    """A case from a seed."""
    rng = random.Random(seed)
    often = lambda share: rng.random() < share  # noqa: E731
    asynchronous = often(0.35)
    schedule = rng.choice(ASYNCHRONOUS if asynchronous else SYNCHRONOUS)
    S, N = rng.choice((1, 2, 2, 2, 3, 3)), rng.choice((1, 2, 2, 3, 3))
    if schedule in ("zero_bubble_v", "interleaved/paired", "interleaved/unit"):
        S = rng.choice((2, 4))
    if schedule == "hand-written":
        S, N = 2, 3
    copies: tuple[int, ...] = ()
    if often(0.12) and schedule.partition("/")[0] in (
        "gpipe", "one_f_one_b", "pipedream", "pipemare"
    ):  # fmt: skip
        S, copies = 2, rng.choice(((2, 1), (1, 2), (2, 2), (3, 1)))
    if schedule.startswith("pipedream_2bw") and often(0.9):
        N = 3
    if copies and often(0.9):
        N = max(N, *copies)
    recompute = rng.choice(("none", "none", "none", "full", "dots", "nothing"))
    compute = "bfloat16" if often(0.12) else ""
    rounded = {*ROUNDED, "weighed"} if compute else set()
    pool = [name for name in KINDS if name not in rounded]
    # Backwards that read other weights than forwards: a gradient as PipeMare defines it.
    hooks: tuple[str, ...] = ("prediction",) if asynchronous and often(0.2) else ()
    if schedule.startswith("pipemare") and often(0.3):
        hooks = (*hooks, "correction")
    if schedule.startswith("pipemare") or hooks:
        recompute = rng.choice(("none", "full"))
        if recompute == "none":
            pool = [name for name in pool if KINDS[name].mixed is not None]
    if recompute == "full" and often(0.9):  # their outputs read what has moved on
        pool = [name for name in pool if name not in ("count", "average")]
    state = [name for name in pool if KINDS[name].norm or KINDS[name].state]
    layers = [
        rng.choice(state if state and often(0.25) else pool)
        for _ in range(rng.randint(1, 4))
    ]
    if not any(name in ("dense", "linen") for name in layers):
        layers.insert(rng.randint(0, len(layers)), rng.choice(("dense", "linen")))
    tie, skip = often(0.12), often(0.15)
    layers += ["dense"] * (2 - layers.count("dense")) if tie else []
    loss = rng.choice(("mean", "mean", "weighted", "aux", "reported"))
    reporting = [name for name in ("report", "weighed") if name in pool]
    if loss == "reported" and not set(layers) & set(reporting):
        layers.insert(rng.randint(0, len(layers)), rng.choice(reporting))
    if loss != "reported":
        layers = [name for name in layers if name not in ("report", "weighed")]
    layers += ["tanh"] * (S - len(layers))
    x64 = often(0.6)
    without = {"clip"} if asynchronous else set()
    if hooks or x64 or "complex_weight" in layers:  # its copies are in float32
        without.add("master_weights")
    optimizers = [name for name in OPTIMIZERS if name not in without]
    data = 2 if often(0.25) else 1
    fsdp = 2 if often(0.1) and not copies and S * data <= 4 else 1
    model = 2 if often(0.1) and S * data * fsdp <= 4 else 1
    if model > 1 and "named" not in layers:
        layers.insert(rng.randint(0, len(layers)), "named")
    steps = rng.choice((3, 4, 5)) if asynchronous else rng.choice((1, 2, 3))
    middle = rng.choice(("saved", "moved")) if steps > 1 and often(0.2) else ""
    uses_words = not (asynchronous or copies or model * fsdp > 1) and often(0.12)
    loss_scale = rng.choice((0.0, 0.0, 0.0, 64.0))
    nan = often(0.12)
    return Case(
        layers=tuple(layers),
        carried=() if uses_words else tuple(c for c in CARRIED if often(0.2)),
        schedule=schedule,
        S=S,
        N=N,
        copies=copies,
        emulated=often(0.15) and not copies,
        data=data,
        fsdp=fsdp,
        model=model,
        vocabulary=uses_words,
        middle=middle,
        rows=rng.choice((2, 4)),
        optimizer=rng.choice(optimizers),
        loss=loss,
        recompute=recompute,
        compute=compute,
        x64=x64,
        loss_scale=loss_scale,
        scale_moves=loss_scale > 0 and not asynchronous and often(0.5),
        nan=nan and not uses_words,
        hooks=hooks,
        tie=tie,
        skip=skip,
        cut=rng.choice((0, rng.randint(1, 99))),
        shard_optimizer=often(0.3) and (data > 1 or bool(copies)),
        overlap=rng.choice((None, True, False)),
        donate=often(0.8),
        given=often(0.2),
        offload=rng.choice(
            ((),) * 8 + (("weights",), ("gradients",), ("optimizer",), ("activations",))
        ),
        compress=tuple(
            c
            for c in ("gradients", "messages")
            if often(0.08) and not compute and (data > 1 or c == "messages")
        ),
        then=tuple(t for t in ("predict", "evaluate", "adopt") if often(0.2)),
        steps=steps,
        seed=rng.randint(0, 999),
    )


# -- One case


class Refused(Exception):
    """The library refused a case, in words and before a compile."""


class Differs(Exception):
    """A case computed something else than its oracle."""


def batches_of(case: Case, count: int, rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(case.seed)
    real = np.float64 if case.x64 else np.float32
    result = []
    for _ in range(count):
        x = rng.normal(size=(rows, D)) + rng.normal(size=(rows, 1))
        entries = {
            "complex": (x + 1j * rng.normal(size=(rows, D))).astype(
                np.complex128 if case.x64 else np.complex64
            ),
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
        "pop": jpipe.skip(
            jpipe.Function(lambda a, s: with_x(a, x_of(a) + jnp.tanh(s))), pop="long"
        ),
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
    return oracle.loss_of_rows(case, outputs, batch)


def loss_function(case: Case):
    parts = functools.partial(oracle.loss_parts, of_rows=loss_of_rows)
    if case.loss == "reported":
        return lambda outputs, batch, *, reported: parts(
            case, outputs, batch, reported["size"]
        )[0]

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
        optional["offload"] = jpipe.Offload(
            **{name: 2 if name == "activations" else 1.0 for name in case.offload}
        )
    for what in case.compress:  # to what it is, or to half of it
        optional[f"compress_{what}"] = jpipe.compress.Cast("float32")
    if case.compute:
        optional["compute_dtype"] = case.dtype_of_compute
    if case.loss_scale:
        optional["loss_scale"] = case.loss_scale
    if case.scale_moves:
        optional["loss_scale"] = jpipe.LossScale(
            case.loss_scale, growth_interval=oracle.GROWTH_INTERVAL
        )
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


_compiled = 0


def _count(event: str, *_, **__) -> None:
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def start(case: Case, key, batch):
    """A pipeline and its first state."""
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    with refusals(case):
        pipe = make_pipeline(case, pipeline_layers(case, key), schedule_of(case))
        return pipe, pipe.init(key, abstract)


@contextlib.contextmanager
def refusals(case: Case):
    """Errors of the library become `Refused`; not those of JAX about what the library gave it, nor those after a compile."""
    before = _compiled
    try:
        yield
    except ValueError as error:
        # With axes that XLA splits, layers are compiled alone, to see how.
        late = _compiled != before and case.fsdp * case.model == 1
        if late or "object has no attribute" in str(error):
            raise
        raise Refused(" ".join(str(error).split())) from error


def close(what: str, got, want, case: Case) -> None:
    got, want = (jax.tree.map(np.asarray, jax.device_get(tree)) for tree in (got, want))
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise Differs(
            f"{what}: {jax.tree.structure(got)}, want {jax.tree.structure(want)}"
        )
    for (path, b), a in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got)):
        name = f"{what}{jax.tree_util.keystr(path)}"
        if a.shape != b.shape:
            raise Differs(f"{name}: shape {a.shape}, want {b.shape}")
        single = a.dtype in (np.float32, np.complex64)
        tolerance = max(case.tolerance, 2e-5) if single else case.tolerance
        kind = np.complex128 if jnp.iscomplexobj(b) else np.float64
        a, b = a.astype(kind), b.astype(kind)
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            raise Differs(f"{name}: got {a}, want {b}")
        scale = max(np.abs(b[finite]).max(initial=0), 1e-2)
        error = np.abs(a - b)[finite].max(initial=0) / scale
        if not error <= tolerance:
            raise Differs(f"{name}: error {error:.1e} of {scale:.1e}")


def check(case: Case) -> None:
    """Runs a case against its oracle.

    Raises:
      Refused: the library refused the case, in words.
      Differs: the numbers are others.
      Exception: of any other kind, the library's.
    """
    with jax.enable_x64(case.x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check(case)


def sum_of_losses(metrics) -> float:
    """Over the microbatches that a step has finished, counted once for all replicas."""
    count = int(metrics["num_microbatches"])
    return float(metrics["loss"]) * count if count else 0.0


def part_of(case: Case, pipe, batch, first: int) -> oracle.Part:
    """How a pipeline trains from a minibatch on."""
    starts = [0]
    for record in pipe.partition(batch):
        starts.append(starts[-1] + len(range(*record.layers)))
    if case.vocabulary:  # synchronous, so it does not matter where stages begin
        starts = [*range(case.S), len(case.names)]
    return oracle.Part(first, starts, *delays_of(case))


def in_another_layout(case: Case) -> Case:
    """The case with another number of stages and, if it is synchronous, another schedule."""
    S = case.S - 1 if case.S > 1 else 2
    schedule = case.schedule
    if not case.asynchronous:
        schedule = "gpipe" if "one_f_one_b" in schedule else "one_f_one_b/paired"
    return dataclasses.replace(case, schedule=schedule, S=S, copies=(), cut=0)


def saved_and_restored(case: Case, key, state, batch):
    """A pipeline of a case, and the state in it, by way of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        with jpipe.Checkpoints(folder) as checkpoints:
            checkpoints.save(1, state)
        with refusals(case):
            pipe = make_pipeline(case, pipeline_layers(case, key), schedule_of(case))
        return pipe, jpipe.Checkpoints(folder).restore(pipe, batch).state


def _check(case: Case) -> None:
    key = jax.random.key(case.seed)
    batches = batches_of(case, case.steps, case.rows * case.N * case.data)
    pipe, state = start(case, key, batches[0])
    params, mutable = pipe.get_params(state), pipe.get_mutable_state(state)
    model = oracle.Plain(case, key)
    if case.seed % 4 == 0:  # the factories' random numbers take long to compile
        first = [
            layer.first() if isinstance(layer, oracle.NNXLayer) else given
            for layer, given in zip(model.layers, zip(params, mutable))
        ]
        made, kept = zip(*first)
        close("initial weights", params, oracle.tied(case, list(made)), case)
        close("initial state", mutable, list(kept), case)
    middle = case.steps // 2 if case.middle else None
    parts, steps = [part_of(case, pipe, batches[0], 0)], []
    total, skipped, later = 0.0, [np.zeros(case.S, int)], case
    for k, batch in enumerate(batches):
        if k == middle:
            if case.middle == "moved":
                state, metrics = pipe.flush(state)
                total += sum_of_losses(metrics)
                skipped[-1] += np.asarray(metrics["skipped_updates"])
                later = in_another_layout(case)
                skipped.append(np.zeros(later.S, int))
            pipe, state = saved_and_restored(later, key, state, batch)
            if case.middle == "moved":
                parts.append(part_of(later, pipe, batch, k))
        state, metrics = pipe.step(state, batch)
        steps.append(jax.device_get(metrics))
        total += sum_of_losses(metrics)
        skipped[-1] += np.asarray(metrics["skipped_updates"])
    state, metrics = pipe.flush(state)
    total += sum_of_losses(metrics)
    skipped[-1] += np.asarray(metrics["skipped_updates"])

    optimizer = PLAIN_OPTIMIZERS[case.optimizer]()
    trained = oracle.train(model, parts, optimizer, params, mutable, batches)
    for k, metrics in enumerate([] if case.asynchronous else steps):
        close(f"loss of step {k}", metrics["loss"], trained.losses[k], case)
        if "gradients" not in case.compress:
            norm = trained.norms[k]
            close(f"norm of step {k}", metrics["gradient_norm"], norm, case)
        if case.loss == "aux":
            close(f"aux of step {k}", metrics["aux"]["squares"], trained.auxes[k], case)
        if case.scale_moves:
            close(f"scale of step {k}", metrics["loss_scale"], trained.scales[k], case)
    if case.asynchronous and case.loss != "weighted":
        close("losses", total / case.N, sum(trained.losses), case)
    firsts = [part.first for part in parts]
    for got, *ends in zip(skipped, firsts, [*firsts[1:], case.steps], strict=True):
        expected = np.sum(trained.skipped[slice(*ends)], axis=0)
        if got.tolist() != expected.tolist():
            raise Differs(f"skipped updates: {got}, want {expected}")
    want, want_state = trained.params, trained.state
    close("weights", pipe.get_params(state), want, case)
    close("state", pipe.get_mutable_state(state), want_state, case)
    after(case, pipe, state, model, want, want_state)


def after(case: Case, pipe, state, model, params, mutable) -> None:
    """What follows training: outputs and loss of a batch of another size, and another pipeline."""
    (batch,) = batches_of(dataclasses.replace(case, seed=case.seed + 1), 1, 5)
    if {"predict", "evaluate", "adopt"}.isdisjoint(case.then):
        return
    outputs = jax.jit(lambda p, s: oracle.outputs_of(model, p, s, batch))(
        params, mutable
    )
    if "adopt" in case.then:
        simple = dataclasses.replace(
            case, schedule="gpipe", S=1, copies=(), cut=0, data=1, fsdp=1, model=1, N=1,
            shard_optimizer=False, compress=(), offload=(),
        )  # fmt: skip
        layers = pipeline_layers(case, jax.random.key(case.seed))
        other = make_pipeline(simple, layers, schedule_of(simple))
        pipe, state = other, other.adopt(state)
        close("adopted weights", pipe.get_params(state), params, case)
    if "predict" in case.then:
        close("predict", pipe.predict(state, batch), outputs, case)
    if "evaluate" in case.then:
        value, weight, _ = oracle.loss_parts(case, outputs, batch, 0.0)
        close("evaluate", pipe.evaluate(state, batch)["loss"], value / weight, case)


# -- Many cases, and smaller ones


def outcome(case: Case) -> tuple[str, str]:
    """ "equal", "refused" or "failed", and why."""
    try:
        check(case)
    except Refused as error:
        return "refused", str(error)
    except Differs as error:
        return "failed", f"differs: {error}"
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return "failed", f"{type(error).__name__}: {error}\n{text}"
    return "equal", ""


def kind_of(reason: str) -> str:
    """Failures of one kind have this in common."""
    return reason.split()[0] + ("" if "differs" in reason[:8] else reason[:40])


def smaller(case: Case):
    """Cases with one thing less, those that leave most out first."""
    for i in range(len(case.layers)):
        if len(case.layers) > 1:
            rest = case.layers[:i] + case.layers[i + 1 :]
            yield dataclasses.replace(case, layers=rest)
    for field in dataclasses.fields(Case):
        value, simplest = getattr(case, field.name), field.default
        if field.name == "layers" or value == simplest:
            continue
        yield dataclasses.replace(case, **{field.name: simplest})
        if isinstance(value, tuple):
            for i in range(len(value)):
                if len(value) > 1 and field.name != "copies":
                    rest = value[:i] + value[i + 1 :]
                    yield dataclasses.replace(case, **{field.name: rest})
        elif field.name in ("S", "N", "steps") and value > 2:
            yield dataclasses.replace(case, **{field.name: value - 1})
    for i, name in enumerate(case.layers):
        for simple in ("dense", "tanh"):
            if name not in ("dense", "tanh"):
                layers = case.layers[:i] + (simple,) + case.layers[i + 1 :]
                yield dataclasses.replace(case, layers=layers)


def shrunken(case: Case, reason: str, seconds: float = 300) -> tuple[Case, str]:
    """The smallest case found that fails in the same way."""
    until, again = time.monotonic() + seconds, True
    while again:
        again = False
        for candidate in smaller(case):
            if time.monotonic() > until:
                return case, reason
            if not valid(candidate):
                continue
            result, why = outcome(candidate)
            if result == "failed" and kind_of(why) == kind_of(reason):
                case, reason, again = candidate, why, True
                break
    return case, reason


def valid(case: Case) -> bool:
    """Whether the fields fit each other."""
    if case.tie and case.layers.count("dense") < 2:
        return False
    if case.loss == "reported" and not {"report", "weighed"} & {*case.layers}:
        return False
    if case.schedule == "hand-written" and (case.S, case.N) != (2, 3):
        return False
    if case.middle and case.steps < 2:
        return False
    return len(case.names) >= case.S + 2 * case.vocabulary


def features(case: Case) -> set[str]:
    """What a case has beside the simplest choices."""
    result = {case.schedule.partition("/")[0], f"optimizer {case.optimizer}"}
    result |= {f"loss {case.loss}", f"recompute {case.recompute}"}
    flags = {
        "unit ticks": case.schedule.endswith("unit"),
        "vertical sync": case.schedule.endswith("vertical"),
        "copies": case.copies,
        "axis data": case.data > 1,
        "axis fsdp": case.fsdp > 1,
        "axis model": case.model > 1,
        "bfloat16": case.compute,
        "constant loss scale": case.loss_scale and not case.scale_moves,
        "moving loss scale": case.scale_moves,
        "tied weights": case.tie,
        "boundaries": case.cut,
        "no donation": not case.donate,
        "weights of the user": case.given,
        "checkpoint": case.middle == "saved",
        "checkpoint, other stages": case.middle == "moved",
        "overlap": case.overlap,
    }
    flags |= {
        name: getattr(case, name.replace(" ", "_"))
        for name in ("emulated", "vocabulary", "nan", "skip", "shard optimizer", "x64")
    }
    result |= {name for name, value in flags.items() if value}
    for field in ("hooks", "offload", "compress", "carried"):
        result |= {f"{field} {value}" for value in getattr(case, field)}
    result |= set(case.then) | {
        word for name in case.layers for word in words_of(name) if word
    }
    return result


def words_of(name: str) -> list[str]:
    """What layers of a kind have beside weights."""
    kind = KINDS[name]
    looped = name in ("scanned", "norm_scanned", "loop", "branch")
    again = "remat" in name or name == "checkpoint"
    return [
        "batch norm" * kind.norm,
        "state" * kind.state,
        "dropout" * kind.random,
        "bfloat16 weights" * kind.low,
        "complex weights" * (name == "complex_weight"),
        "penalty on weights" * (name == "weighed"),
        "loop or branch" * looped,
        "jax.checkpoint" * again,
    ]


def pairs(logs: Sequence[str]) -> str:
    """Which features have been together in cases, by what a run has printed."""
    seen: dict[str, set] = {"equal": set(), "refused": set(), "failed": set()}
    counts, every, result = collections.Counter(), set(), ""
    for line in itertools.chain(*(pathlib.Path(log).open() for log in logs)):
        words = line.split()
        if line.startswith("seed ") and len(words) > 2:
            result = words[2]
            counts[result] += 1
        elif line.startswith("  case ") and result:
            having = sorted(features(Case.from_text(line.removeprefix("  case "))))
            every.update(having)
            seen[result].update(itertools.combinations(having, 2))
            result = ""
    total = set(itertools.combinations(sorted(every), 2))
    equal, tried = seen["equal"], set().union(*seen.values())
    never: dict[str, list] = {name: [] for name in sorted(every)}
    for a, b in sorted(total - equal):
        never[a].append(b + "*" * ((a, b) in tried))
    lines = [f"{a}: {', '.join(others)}" for a, others in never.items() if others]
    return "\n".join(
        [
            f"{dict(counts)} cases, {len(every)} features",
            f"{len(total)} pairs: {len(equal)} in a case that is equal, {len(tried - equal)} only in others (*)",
            "Not in a case that is equal:",
            *lines,
        ]
    )


def run(seeds, shrink: float) -> collections.Counter:
    """Runs the cases of seeds, and prints what they came to."""
    counts: collections.Counter = collections.Counter()
    for number, seed in enumerate(seeds):
        case, begin = draw(seed), time.monotonic()
        print(f"seed {seed}", end=" ", flush=True)
        result, reason = outcome(case)
        counts[result] += 1
        seconds = time.monotonic() - begin
        print(f"{result} {seconds:.0f} s {reason.splitlines()[0][:300] if reason else ''}", flush=True)  # fmt: skip
        print(f"  case {case.text()}", flush=True)
        if result == "failed":
            if shrink:
                case, reason = shrunken(case, reason, shrink)
                print(f"  python tests/fuzz.py --case '{case.text()}'\n  {reason}", flush=True)  # fmt: skip
        if number % 10 == 9:
            jax.clear_caches()
    return counts


def endless(minutes: float, first: int, shrink: float) -> int:
    """Runs seeds in processes of their own, a few in each, so that a crash is a failure of one seed."""
    until, total = time.monotonic() + 60 * minutes, collections.Counter()
    while time.monotonic() < until:
        command = [sys.executable, os.fspath(ROOT / "tests" / "fuzz.py")]
        command += ["--seed", str(first), "--count", "20", "--shrink", str(shrink)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line if line.startswith("seed ") else last
                for word in ("equal", "refused", "failed"):
                    total[word] += line.startswith("seed ") and f" {word} " in line
        seed = int(last.split()[1]) if last else first
        if process.returncode < 0:
            print(f"failed: seed {seed} ended its process by signal {-process.returncode}", flush=True)  # fmt: skip
            total["failed"] += 1
        first = seed + 1
        print(dict(total), flush=True)
    return total["failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--minutes", type=float, help="how long new seeds are run")
    parser.add_argument(
        "--shrink", type=float, default=300, help="seconds for a smaller case; 0: none"
    )
    parser.add_argument("--pairs", nargs="+", help="logs of `--minutes`")
    arguments = parser.parse_args()
    if arguments.pairs:
        print(pairs(arguments.pairs))
        return 0
    if arguments.case:
        result, reason = outcome(Case.from_text(arguments.case))
        print(result, reason)
        return int(result == "failed")
    if arguments.minutes:
        first = int(time.time()) if arguments.seed is None else arguments.seed
        return int(endless(arguments.minutes, first, arguments.shrink) > 0)
    first = arguments.seed or 0
    counts = run(range(first, first + arguments.count), arguments.shrink)
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
