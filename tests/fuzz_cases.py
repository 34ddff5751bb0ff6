"""What `fuzz.py` runs: cases, how they are drawn, and what they have."""

import dataclasses
import json
import random

import jax.numpy as jnp
import optax
from fuzz_layers import CARRIED, KINDS
from fuzz_oracle import ANNEALING_STEPS

import jpipe


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
        if {"gradients", "messages"} & {*self.compress} or not self.x64:
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
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


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
    "clip": lambda: optax.chain(jpipe.optim.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.5)),
    "every_second": lambda: optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2).gradient_transformation(),
    "scaled_by_delay": lambda: optax.chain(optax.sgd(0.1), jpipe.optim.scale_by_delay(ANNEALING_STEPS)),
    "ema": lambda: optax.chain(optax.sgd(0.1), jpipe.optim.ema_weights(0.9)),
    "error_feedback": lambda: optax.chain(optax.sgd(0.1, momentum=0.5), jpipe.optim.error_feedback()),
    "master_weights": lambda: jpipe.optim.master_weights(optax.sgd(0.1, momentum=0.5)),
    # Optax computes the rate in float32, where these are without rounding.
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.25, 0.125, 4)),
}
PLAIN_OPTIMIZERS = OPTIMIZERS | {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.5)),
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
        N = max(3, 2 * S - 1)
    if schedule.startswith("interleaved") and often(0.9):
        N = -(-N // (S // 2)) * (S // 2)
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
    mixes = False
    if schedule.startswith("pipemare") or hooks:
        recompute = rng.choice(("none", "full"))
        mixes = recompute == "none"
        if mixes:
            pool = [name for name in pool if KINDS[name].mixed is not None]
    if recompute == "full" and often(0.9):  # their outputs read what has moved on
        pool = [name for name in pool if name not in ("count", "average")]
    state = [name for name in pool if KINDS[name].norm or KINDS[name].state]
    layers = [rng.choice(state if state and often(0.25) else pool) for _ in range(rng.randint(1, 4))]
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
    devices = (sum(copies) or S) * data
    fsdp = 2 if often(0.1) and not copies and devices <= 4 else 1
    model = 2 if often(0.1) and devices * fsdp <= 4 else 1
    if mixes:  # the oracle has no such gradient of the layer that "model" splits
        model = 1
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
        offload=rng.choice(((),) * 8 + (("weights",), ("gradients",), ("optimizer",), ("activations",))),
        compress=tuple(
            c + rng.choice(("", "/topk", "/threshold"))
            for c in ("gradients", "messages")
            if often(0.08) and not compute and (data > 1 or c == "messages")
        ),
        then=tuple(t for t in ("predict", "evaluate", "adopt") if often(0.2)),
        steps=steps,
        seed=rng.randint(0, 999),
    )


# -- Cases like another


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


# -- What a case has


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
    result |= set(case.then) | {word for name in case.layers for word in words_of(name) if word}
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
