"""Late gradients at the number of stages of the papers: about 100, on one device.

There are three studies. `resnet` and `translation` train a network with a stage for every weight by
each of PipeMare's techniques and by its two rivals. `stages` trains one network at 1 to 107 stages, by
each remedy. The learning rate is searched for every method, and in `stages` at every number of stages.

    python benchmarks/asynchronous_scale.py resnet --data fashion-mnist --out runs/scale-resnet
    python benchmarks/asynchronous_scale.py translation --data translation --out runs/scale-translation
    python benchmarks/asynchronous_scale.py stages --data fashion-mnist --out runs/scale-stages

`accounting` trains nothing: it prints throughput and memory of the paper's networks, as it counts them.

`--data` is a folder: for `resnet` and `stages` with the four gzipped files of Fashion-MNIST or MNIST
(`train-images-idx3-ubyte.gz` and so on), for `translation` with `en_de_train.tsv.gz`,
`en_de_valid.tsv.gz` and `en_de_test.tsv.gz`, a sentence, a tab and its translation per line. `--quick`
needs no data and takes a minute: it shows that everything runs, and its figures mean nothing.

A run is one device with the delays of a pipeline: every stage reads weights as old as the table of
S stages and N microbatches says, and a minibatch passes as one microbatch, as in the paper's own
study. `--steps` trains longer than a study does by itself, and `--rate` trains at one rate, without a
search. A finished run is not repeated, so an interrupted command continues where it stopped. The
output folder has the runs (`runs.json`), the table (`table.md`) and a picture. `--redraw` makes the
last two again from `runs.json`.
"""

import argparse
import dataclasses
import functools
import gzip
import json
import math
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402
from jpipe.states.locations import locations  # noqa: E402
from models import ResNet, Translation  # noqa: E402
from train.data import shuffled  # noqa: E402
from train.mnist import MNIST, Images  # noqa: E402
from train.pairs import VOCAB_SIZE, PaddedPairs, Pairs  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Method:
    """A schedule and the techniques that are used with it."""

    schedule: str = "pipemare"
    rescheduling: bool = False  # T1
    correction: bool = False  # T2
    warm_up: bool = False  # T3
    prediction: bool = False
    ticks: str = "paired"


METHODS = {
    "synchronous": Method("gpipe"),
    "asynchronous": Method(),
    "+T1": Method(rescheduling=True),
    "+T1+T2": Method(rescheduling=True, correction=True),
    "+T1+T2+T3": Method(rescheduling=True, correction=True, warm_up=True),
    "PipeDream": Method("pipedream"),
}
STAGES = (1, 2, 4, 8, 16, 32, 64, 107)
REMEDIES = {
    "asynchronous": Method(),
    "PipeMare (T1+T2)": Method(rescheduling=True, correction=True),
    "weight prediction": Method(prediction=True),
    "PipeDream": Method("pipedream"),
    "2BW": Method("pipedream_2bw"),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, on what, and the budget.

    Attributes:
      model: of `models/`.
      num_microbatches: N of the table that gives the delays.
      batch_size: of a minibatch.
      num_steps: of a run.
      annealing_steps: K of T1, by the rule of the paper.
      decay: D of T2.
      warm_up_steps: of T3.
      copies: tensors per weight that the paper counts: weight, gradient and optimizer state.
      metric: the name of the result; `better` is max or min, `margin` how far from the mean synchronous
        result the target is.
      optimizer: learning rate -> the Optax chain without techniques.
      rate: where the search of the learning rate begins.
      num_evaluations: of a run.
    """

    model: Any
    num_microbatches: int
    batch_size: int
    num_steps: int
    annealing_steps: int
    decay: float
    warm_up_steps: int
    copies: int
    metric: str
    better: Callable
    margin: float
    optimizer: Callable
    rate: float
    num_evaluations: int = 8


def _is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def momentum_of(num_steps: int) -> Callable:
    """SGD with momentum and weight decay; the rate falls to a tenth after 1/2 and after 3/4 of the steps."""

    def optimizer(rate: float) -> optax.GradientTransformation:
        drops = {num_steps // 2: 0.1, num_steps * 3 // 4: 0.1}
        return optax.chain(
            optax.add_decayed_weights(5e-4, mask=_is_kernel),
            optax.trace(0.9),
            optax.scale_by_learning_rate(optax.piecewise_constant_schedule(rate, drops)),
        )

    return optimizer


def adam_of(rise: int) -> Callable:
    """Adam; the rate rises linearly in `rise` steps and then falls with the root of the step."""

    def optimizer(rate: float) -> optax.GradientTransformation:
        def schedule(step: Any) -> Any:
            step = step + 1.0
            return rate * jax.numpy.minimum(step / rise, (rise / step) ** 0.5)

        return optax.adam(schedule, b1=0.9, b2=0.98)

    return optimizer


def tasks(quick: bool, num_steps: int | None = None) -> dict[str, Task]:
    """The three studies. With `quick`, far smaller ones.

    Args:
      quick: few steps and a few layers.
      num_steps: of a run; None: as many as the study has.
    """
    steps = num_steps or (8 if quick else 1000)
    resnet = Task(
        model=ResNet(
            num_channels=1,
            widths=(8,) if quick else (8, 8, 8, 8),
            num_blocks=(1,) if quick else (3, 4, 6, 3),
            block="bottleneck",
            stem_stride=2,
            norm="batch",
            fine_grained=True,
        ),
        num_microbatches=2 if quick else 32,
        batch_size=8 if quick else 64,
        num_steps=steps,
        annealing_steps=steps // 8,
        decay=0.5,
        warm_up_steps=steps // 16,
        copies=3,
        metric="test accuracy",
        better=max,
        margin=0.04,
        optimizer=momentum_of(steps),
        rate=0.1,
        num_evaluations=2 if quick else 8,
    )
    # 107 layers again, in blocks that are all alike, which makes the program small.
    steps = num_steps or (8 if quick else 600)
    stages = dataclasses.replace(
        resnet,
        model=dataclasses.replace(resnet.model, widths=(8,), num_blocks=(1 if quick else 17,), stem_stride=4),
        num_microbatches=8,
        batch_size=8 if quick else 32,
        num_steps=steps,
        annealing_steps=steps // 8,
        optimizer=momentum_of(steps),
        rate=0.05,
        num_evaluations=2,
    )
    steps, rise = num_steps or (8 if quick else 1000), 2 if quick else 100
    translation = Task(
        model=Translation(
            vocab_size=VOCAB_SIZE,
            dim=8 if quick else 32,
            num_heads=2 if quick else 4,
            mlp_dim=16 if quick else 64,
            num_encoder_blocks=1 if quick else 6,
            num_decoder_blocks=1 if quick else 6,
            dropout=0.0,
            # Copies of a tied matrix on stages with delays would be updated at different times.
            tie_embeddings=False,
            fine_grained=True,
        ),
        num_microbatches=2 if quick else 32,
        batch_size=8 if quick else 32,
        num_steps=steps,
        annealing_steps=5 * rise,
        decay=0.1,
        warm_up_steps=steps // 4,
        copies=4,
        metric="test loss, nats per byte",
        better=min,
        margin=0.05,
        optimizer=adam_of(rise),
        rate=4e-3,
        num_evaluations=2 if quick else 8,
    )
    return {"resnet": resnet, "translation": translation, "stages": stages}


# -- Data


def small(images: np.ndarray) -> np.ndarray:
    """Images of 28 x 28 as 14 x 14: the mean of every 2 x 2 pixels."""
    squares = images.reshape(len(images), 14, 2, 14, 2).astype(np.float32)
    return squares.mean(axis=(2, 4)).round().astype(np.uint8)


def read_idx(path: pathlib.Path) -> np.ndarray:
    """The array of a gzipped idx file of bytes."""
    content = gzip.decompress(path.read_bytes())
    num_dims = content[3]
    shape = np.frombuffer(content, ">i4", num_dims, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def images(folder: pathlib.Path | None, num_validation: int = 5000) -> dict:
    """Training, validation and test images. Without a folder the digits of the project."""
    if folder is None:
        data = MNIST().load()
        parts = {"train": data.train, "test": data.test}
        parts = {name: (part.images, part.labels) for name, part in parts.items()}
        num_validation = 200
    else:
        parts = {
            name: tuple(read_idx(folder / f"{prefix}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
            for name, prefix in (("train", "train"), ("test", "t10k"))
        }
    (x, y), (test_x, test_y) = parts["train"], parts["test"]
    x, test_x = small(x), small(test_x)
    return {
        "train": Images(x[:-num_validation], y[:-num_validation]),
        "validation": Images(x[-num_validation:], y[-num_validation:]),
        "test": Images(test_x[:num_validation], test_y[:num_validation]),
    }


def pairs(folder: pathlib.Path | None) -> dict:
    """Pairs of English and German. Without a folder: numbers, and the same numbers backwards."""
    if folder is None:
        words = [str(number).encode() for number in range(100, 400)]
        backwards = PaddedPairs([(word, word[::-1]) for word in words], 8)
        return dict.fromkeys(("train", "validation", "test"), backwards)

    def read(part: str) -> PaddedPairs:
        path = str(folder / f"en_de_{part}.tsv.gz")
        return Pairs(path, test_path=path, seq_len=48).load().test

    names = {"train": "train", "validation": "valid", "test": "test"}
    return {name: read(part) for name, part in names.items()}


def data_of(study: str, folder: pathlib.Path | None) -> dict:
    """The parts "train", "validation" and "test" of a study's data."""
    return (pairs if study == "translation" else images)(folder)


# -- Runs


def facts_of(method: Method, S: int, N: int) -> Any:
    """The facts of the table of a method."""
    options = {} if method.schedule == "gpipe" else {"ticks": method.ticks}
    if method.schedule == "pipedream_2bw":
        N = max(N, 2 * S - 1)  # what it needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # GPipe's bubble
        return jpipe.schedules.get(method.schedule)(S, N, **options).facts()


def table_of(method: Method, num_layers: int, S: int, N: int, synchronous: bool = False) -> jpipe.Schedule:
    """A table of one device with the delays of a method, one stage per layer.

    Args:
      method: what decides the delays.
      num_layers: L. A layer has the delay of its stage: stages have L / S layers each, rounded.
      S: number of stages of the pipeline.
      N: number of microbatches of a minibatch. A stage's delay is the largest over them.
      synchronous: no delays, for a warm-up.
    """
    facts = facts_of(method, S, N)
    stage = np.arange(num_layers) * S // num_layers
    keep = 0 if synchronous else 1
    forward = keep * np.asarray(facts.forward_delay)[stage]
    backward = keep * np.asarray(facts.backward_delay)[stage]
    return jpipe.schedules.with_delays(forward, backward_delays=backward)


class Trainer:
    """Trains a task by a method, with any rate and seed. The rate is a number in the optimizer's state."""

    def __init__(self, task: Task, data: dict, method: Method, S: int):
        self.task, self.data, self.method = task, data, method
        techniques, hooks = [], {}
        if method.rescheduling:
            techniques.append(jpipe.optim.scale_by_delay(task.annealing_steps))
        if method.correction:
            techniques.append(jpipe.optim.correct_discrepancy(task.decay))
            hooks["backward_params"] = jpipe.optim.corrected_params
        if method.prediction:
            techniques.append(jpipe.optim.predict_weights())
            hooks["forward_params"] = jpipe.optim.predicted_params

        def optimizer(learning_rate: Any) -> optax.GradientTransformation:
            return optax.chain(task.optimizer(learning_rate), *techniques)

        layers = task.model.layers()
        make = functools.partial(
            jpipe.Pipeline,
            layers,
            loss=task.model.loss(),
            has_aux=True,
            optimizer=optax.inject_hyperparams(optimizer)(learning_rate=1.0),
            ties=task.model.ties() if hasattr(task.model, "ties") else (),
            **hooks,
        )
        table = functools.partial(table_of, method, len(layers), S, task.num_microbatches)
        self.pipe = make(schedule=table())
        self.first = make(schedule=table(synchronous=True)) if method.warm_up else None

    def run(self, rate: float, seed: int, evaluator: "Evaluator") -> dict:
        """One run.

        Returns:
          "curve", a list of [step, training loss since the last entry, test metric, test loss];
          "validation", the loss of the last weights on the validation examples, infinite if the loss
          was not finite at some step; "seconds".
        """
        task, start = self.task, time.perf_counter()
        batches = shuffled(self.data["train"], task.batch_size, seed)
        key = jax.random.key(seed)
        pipe = self.first or self.pipe
        batch = next(batches)
        state, losses, curve = with_rate(pipe.init(key, batch), rate), [], []
        every = task.num_steps // task.num_evaluations
        for step in range(1, task.num_steps + 1):
            if pipe is self.first and step > task.warm_up_steps:
                pipe = self.pipe
                state = pipe.adopt(state)
            state, metrics = pipe.step(state, batch)
            losses.append(metrics["loss"])
            batch = next(batches)
            if step % every == 0:
                mean = float(np.mean(jax.device_get(losses)))
                losses = []
                found = evaluator(pipe, state, self.data["test"])
                curve.append([step, mean, found["metric"], found["loss"]])
                if not (math.isfinite(mean) and math.isfinite(found["loss"])):
                    break
        validation = evaluator(pipe, state, self.data["validation"])["loss"]
        if not math.isfinite(curve[-1][1] + validation):
            validation = math.inf
        return {
            "curve": curve,
            "validation": validation,
            "seconds": round(time.perf_counter() - start, 1),
        }


def with_rate(state: jpipe.PipelineState, rate: float) -> jpipe.PipelineState:
    """The state with another learning rate, which is a number in the optimizer's state of each stage."""
    for of_layer in locations(state.program, 0).optimizer_state:
        for path, location in of_layer.items():
            if "learning_rate" in path:
                array = state.optimizer_state[location.array]
                index = location.blocks[0].in_array
                state.optimizer_state[location.array] = array.at[index].set(rate)
    return state


class Evaluator:
    """Loss and metric of the newest weights of any pipeline, without delays."""

    def __init__(self, task: Task, data: dict):
        self.task, self.microbatch = task, data["test"].batch(np.arange(8), None)
        self.pipe = jpipe.Pipeline(
            task.model.layers(),
            loss=task.model.loss(),
            has_aux=True,
            optimizer=optax.identity(),
            schedule=jpipe.schedules.gpipe(1, 1),
            ties=task.model.ties() if hasattr(task.model, "ties") else (),
        )

    def __call__(self, pipe: jpipe.Pipeline, state: Any, examples: Any) -> dict:
        params, mutable = pipe.get_params(state), pipe.get_mutable_state(state)
        own = self.pipe.init(jax.random.key(0), self.microbatch, params=params, mutable_state=mutable)
        batch = examples.batch(np.arange(len(examples)), None)
        found = self.pipe.evaluate(own, batch)
        loss = float(found["loss"])
        metric = loss if self.task.better is min else float(found["aux"]["accuracy"])
        return {"loss": loss, "metric": metric}


class Runs:
    """The finished runs, in a file."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.found = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str, make: Callable[[], dict]) -> dict:
        """The run of this name; makes and keeps it if there is none."""
        if key not in self.found:
            self.found[key] = make()
            self.path.write_text(json.dumps(self.found, indent=0))
            row = self.found[key]
            print(
                f"{key}: {row['curve'][-1]} {row['validation']:.4f} {row['seconds']} s",
                flush=True,
            )
        return self.found[key]


def train_all(
    task: Task,
    data: dict,
    runs: Runs,
    methods: dict,
    seeds: int,
    only_rate: float | None,
) -> None:
    """Finds the learning rate of every method with seed 0 and trains the other seeds at it.

    Rates are powers of 2 times the task's rate. The search goes on until the rates on both sides of
    the best one have been tried, judged by the validation loss. `only_rate`: there is no search.
    """
    evaluator = Evaluator(task, data)
    S = len(task.model.layers())
    start = task.rate
    for name, method in methods.items():

        @functools.cache
        def trainer(method: Method = method) -> Trainer:
            return Trainer(task, data, method, S)

        def result(rate: float, seed: int = 0, name: str = name) -> float:
            run = runs.get(f"{name}|{rate:g}|{seed}", lambda: trainer().run(rate, seed, evaluator))
            return run["validation"]

        best = train_seeds(start, result, seeds, only_rate)
        start = best if name != "synchronous" else best / 2
        jax.clear_caches()


def train_seeds(
    start: float,
    result: Callable[[float, int], float],
    seeds: int,
    only_rate: float | None,
) -> float:
    """Searches the rate with seed 0, unless there is only one, and trains the other seeds at it."""
    best = only_rate or search(start, lambda rate: result(rate, 0), factor=2.0)
    for seed in range(seeds):
        result(best, seed)
    return best


def search(
    first: float,
    result: Callable[[float], float],
    factor: float,
    most: int | None = None,
) -> float:
    """The rate of the smallest result among `first` times powers of a factor, tried until both sides are worse.

    Args:
      first: the first rate.
      result: rate -> its result.
      factor: between neighbouring rates.
      most: rates that are tried at most; None: as many as it takes.

    Example:
      >>> search(1.0, lambda rate: abs(rate - 9.5), 3.0)
      9.0
      >>> search(1.0, lambda rate: rate, 3.0, most=3)
      0.333...
    """
    found = {power: result(first * factor**power) for power in (0, -1, 1)[:most]}
    while most is None or len(found) < most:
        best = min(found, key=found.__getitem__)
        if math.isfinite(found[best]):
            beyond = {best - 1, best + 1} - set(found)
        else:
            beyond = {min(found) - 1}  # all diverged
        if not beyond:
            break
        power = min(beyond)
        found[power] = result(first * factor**power)
    return first * factor ** min(found, key=found.__getitem__)


def best_rate(tried: dict[float, list[dict]]) -> float:
    """The rate with the smallest validation loss of the first seed, of the rates with the most seeds.

    A rate that has not got all its seeds yet is not the best one.

    Args:
      tried: rate -> its runs, of `Trainer.run`.
    """
    most = max(map(len, tried.values()))
    complete = [rate for rate in tried if len(tried[rate]) == most]
    return min(complete, key=lambda rate: tried[rate][0]["validation"])


def train_stages(
    task: Task,
    data: dict,
    runs: Runs,
    methods: dict,
    seeds: int,
    only_rate: float | None,
    stages: tuple[int, ...] = STAGES,
) -> None:
    """Trains by each remedy at each number of stages, in both kinds of ticks, at the best rate of each.

    Coarse steps come first, so that an interrupted study covers the whole range.
    """
    evaluator = Evaluator(task, data)
    num_layers = len(task.model.layers())
    first = (1, 8, 32, 107)
    same: dict[tuple, dict] = {}  # runs with the same delays are the same
    for S in sorted(stages, key=lambda S: (S not in first, S)):
        for ticks in ("paired", "unit"):
            for name, method in methods.items():
                method = dataclasses.replace(method, ticks=ticks)
                table = table_of(method, num_layers, S, task.num_microbatches)
                facts = table.facts()
                delays = (name, *facts.forward_delay, *facts.backward_delay)

                @functools.cache
                def trainer(method: Method = method, S: int = S) -> Trainer:
                    return Trainer(task, data, method, S)

                def result(
                    rate: float,
                    seed: int,
                    key: str = f"{name}|{ticks}|{S}",
                    delays: tuple = delays,
                    trainer: Callable = trainer,
                ) -> float:
                    of = (delays, rate, seed)
                    same[of] = runs.get(
                        f"{key}|{rate:g}|{seed}",
                        lambda: same.get(of) or trainer().run(rate, seed, evaluator),
                    )
                    return same[of]["validation"]

                train_seeds(task.rate, result, seeds, only_rate)
        jax.clear_caches()


# -- Figures


def sizes_of(model: Any) -> np.ndarray:
    """Numbers in the parameters of each layer."""

    def size(make: Callable) -> int:
        layer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        return sum(a.size for a in jax.tree.leaves(nnx.state(layer, nnx.Param)))

    return np.array([size(make) for make in model.layers()])


def accounting(method: Method, sizes: np.ndarray, N: int, copies: int, warm_up: float = 0.0) -> dict:
    """Throughput and memory as the paper counts them.

    Args:
      method: of one stage per layer.
      sizes: numbers in the weights of each stage.
      N: microbatches per update.
      copies: tensors per weight: the weight, its gradient, and the optimizer's state.
      warm_up: fraction of the steps that are synchronous.

    Returns:
      "throughput", 1 where no stage is ever idle, and N / (N + S - 1) of synchronous steps; "memory",
      that of weights, gradients and optimizer, where synchronous training has 1. PipeDream has as
      many versions of a stage's weights as its delay, and T2 one more tensor.

    Example:
      >>> accounting(Method("gpipe"), np.ones(4), 4, 3)["throughput"]
      0.571...
      >>> accounting(METHODS["+T1+T2"], np.ones(4), 4, 3)
      {'throughput': 1.0, 'memory': 1.333...}
      >>> accounting(Method("pipedream"), np.ones(4), 1, 3)["memory"]  # delays 7, 5, 3, 1
      2.0
    """
    S = len(sizes)
    slow = N / (N + S - 1)
    part = 1.0 if method.schedule == "gpipe" else warm_up
    versions = 1.0
    if method.schedule == "pipedream":
        delays = np.asarray(facts_of(method, S, N).forward_delay)
        versions = float((sizes * delays).sum() / sizes.sum())
    return {
        "throughput": 1 / (part / slow + 1 - part),
        "memory": (copies - 1 + versions + method.correction) / copies,
    }


def crossing(curve: list, reaches: Callable[[float], float]) -> float | None:
    """The step at which the metric of a curve, linear between its points, reaches a target.

    Args:
      curve: of `Trainer.run`.
      reaches: how far a metric is past the target, negative before it.

    Example:
      >>> crossing([[10, 0, 1.0, 0], [20, 0, 3.0, 0]], lambda value: value - 2.0)
      15.0
    """
    before = None
    for step, _, metric, _ in curve:
        past = reaches(metric)
        if past >= 0:
            if before is None:
                return float(step)
            then, short = before
            return then + (step - then) * short / (short - past)
        before = step, past
    return None


def summary_of(task: Task, runs: dict, per_epoch: int) -> dict:
    """The figures of every method that has been trained, at its best rate.

    Args:
      task: the study.
      runs: of `Runs`.
      per_epoch: training examples.
    """
    sizes = sizes_of(task.model)
    sign = 1 if task.better is max else -1
    methods: dict[str, dict] = {}
    for name, method in METHODS.items():
        tried: dict[float, list] = {}
        for key, run in runs.items():
            of, rate, _ = key.split("|")
            if of == name:
                tried.setdefault(float(rate), []).append(run)
        if not tried:
            continue
        rate = best_rate(tried)
        warm = task.warm_up_steps if method.warm_up else 0
        methods[name] = {
            "rate": rate,
            "tried": {f"{r:g}": tried[r][0]["validation"] for r in sorted(tried)},
            "best": [task.better(p[2] for p in run["curve"]) for run in tried[rate]],
            "curves": [run["curve"] for run in tried[rate]],
            "warm_up": warm,
            "facts": accounting(
                method,
                sizes,
                task.num_microbatches,
                task.copies,
                warm / task.num_steps,
            ),
        }
    if "synchronous" not in methods:
        raise SystemExit("the target needs the synchronous runs: add the method.")
    end = statistics.mean(methods["synchronous"]["best"])
    target = end - sign * task.margin
    slow = accounting(METHODS["synchronous"], sizes, task.num_microbatches, 1)
    for row in methods.values():
        steps = [crossing(curve, lambda value: sign * (value - target)) for curve in row["curves"]]
        row["reached"] = sum(step is not None for step in steps)
        row["epochs"] = row["time"] = None
        if None not in steps:
            epochs = task.batch_size / per_epoch
            row["epochs"] = statistics.mean(steps) * epochs
            late = row["warm_up"] / slow["throughput"] - row["warm_up"]
            full = row["facts"]["throughput"]
            row["time"] = row["epochs"] / full if not row["warm_up"] else (statistics.mean(steps) + late) * epochs
    return {
        "num_stages": len(sizes),
        "num_microbatches": task.num_microbatches,
        "num_steps": task.num_steps,
        "epochs": task.num_steps * task.batch_size / per_epoch,
        "metric": task.metric,
        "target": target,
        "methods": methods,
    }


# Of the paper: best metric, epochs to the target, throughput, memory, all as far as they are known.
PAPER = {
    "resnet": {
        "synchronous": "95.0 %, throughput 0.3, memory 1",
        "+T1+T2": "about 95.0 %, throughput 1, memory 1.33",
        "PipeDream": "94.8 %, throughput 1, memory 2.70",
    },
    "translation": {
        "synchronous": "BLEU 34.5, memory 1",
        "+T1+T2+T3": "BLEU 34.5, memory 1.25, 1.7 times as fast",
        "PipeDream": "BLEU about 0, memory 2.06",
    },
}


def mean_of(values: list[float], digits: int = 4) -> str:
    """The mean of some seeds and their standard deviation, as text."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def markdown(study: str, summary: dict) -> str:
    """The figures of a study of techniques as a table."""
    lines = [
        f"| method | best {summary['metric']} | rate (tried) | epochs to target | throughput | memory | time to target "
        "| the paper |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summary["methods"].items():
        tried = ", ".join(row["tried"])
        epochs, time_ = (
            f"{row[key]:.2f}" if row[key] is not None else f"- ({row['reached']} of {len(row['best'])})"
            for key in ("epochs", "time")
        )
        facts = row["facts"]
        lines.append(
            f"| {name} | {mean_of(row['best'])} | {row['rate']:g} ({tried}) | {epochs} | {facts['throughput']:.2f} | "
            f"{facts['memory']:.2f} | {time_} | {PAPER[study].get(name, '')} |"
        )
    lines.append(
        f"\n{summary['num_stages']} stages, {summary['num_microbatches']} microbatches, {summary['num_steps']:,} steps "
        f"({summary['epochs']:.2f} epochs). Target: {summary['target']:.4f}."
    )
    return "\n".join(lines)


def accounting_table() -> str:
    """Throughput and memory, as the paper counts them, of its own networks at several N."""
    networks = {
        "ResNet-50": (
            ResNet.of_depth(50, stem="small", num_classes=10, fine_grained=True),
            tasks(quick=False)["resnet"].copies,
        ),
        "Transformer": (
            Translation(
                vocab_size=10_000,
                mlp_dim=1024,
                num_heads=4,
                tie_embeddings=False,
                fine_grained=True,
            ),
            tasks(quick=False)["translation"].copies,
        ),
    }
    lines = [
        "| network | stages | N | throughput against GPipe | memory of PipeDream | memory of PipeMare with T2 |",
        "|---|---|---|---|---|---|",
    ]
    for name, (model, copies) in networks.items():
        sizes = sizes_of(model)
        for N in (8, 16, 32, 64):
            sync, late, stashing = (
                accounting(METHODS[method], sizes, N, copies) for method in ("synchronous", "+T1+T2", "PipeDream")
            )
            lines.append(
                f"| {name} | {len(sizes)} | {N} | {late['throughput'] / sync['throughput']:.1f} | "
                f"{stashing['memory']:.2f} | {late['memory']:.2f} |"
            )
    return "\n".join(lines)


def points_of(runs: dict) -> dict:
    """The study of stages: ticks -> remedy -> {S: (best rate, final test accuracy of each seed at it)}."""
    tried: dict[tuple, dict[float, list]] = {}
    for key, run in runs.items():
        name, ticks, S, rate, _ = key.split("|")
        cell = tried.setdefault((ticks, name, int(S)), {})
        cell.setdefault(float(rate), []).append(run)
    points: dict[str, dict] = {"paired": {}, "unit": {}}
    for (ticks, name, S), of in tried.items():
        rate = best_rate(of)
        # A loss that was not finite: the accuracy of a guess.
        last = [run["curve"][-1][2] if math.isfinite(run["validation"]) else 0.1 for run in of[rate]]
        points[ticks].setdefault(name, {})[S] = (rate, last)
    return points


def markdown_of_stages(points: dict, task: Task) -> str:
    """The study of stages as two tables: accuracies, and the rates that gave them."""
    stages = sorted({S for of in points.values() for row in of.values() for S in row})
    parts = []
    for show in (lambda cell: _percent(cell[1]), lambda cell: f"{cell[0]:g}"):
        lines = [
            "| ticks | remedy | " + " | ".join(f"S = {S}" for S in stages) + " |",
            "|---" * (len(stages) + 2) + "|",
        ]
        for ticks, of_ticks in points.items():
            for name in REMEDIES:
                row = of_ticks.get(name, {})
                words = [show(row[S]) if S in row else "" for S in stages]
                lines.append(f"| {ticks} | {name} | " + " | ".join(words) + " |")
        parts.append("\n".join(lines))
    parts.insert(
        1,
        f"Test accuracy in % after {task.num_steps} steps, the mean of the seeds and their standard deviation. "
        "The learning rates:",
    )
    return "\n\n".join(parts)


def _percent(values: list[float]) -> str:
    return mean_of([100 * value for value in values], digits=1)


def draw(task: Task, summary: dict, path: pathlib.Path) -> None:
    """Training loss and metric of every method: the mean of the seeds, and their range."""
    from matplotlib import pyplot

    # An accuracy is in percent, as in the other pictures.
    is_accuracy = summary["metric"].endswith("accuracy")
    factors = (1, 100 if is_accuracy else 1)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for i, (name, row) in enumerate(summary["methods"].items()):
        color = "black" if name == "synchronous" else f"C{i - 1}"
        for ax, column, factor in zip(axes, (1, 2), factors):
            whole = [c for c in row["curves"] if all(map(math.isfinite, c[-1]))]
            if not whole:
                continue
            steps = [point[0] for point in whole[0]]
            values = np.array([[factor * point[column] for point in c] for c in whole])
            ax.plot(steps, values.mean(0), color=color, label=name, marker="o", ms=3)
            ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15)
            ax.grid(alpha=0.3)
            ax.set_xlabel("step")
    axes[0].set_ylabel("training loss")
    target = factors[1] * summary["target"]
    axes[1].set_ylabel(summary["metric"] + (", %" if is_accuracy else ""))
    axes[1].axhline(target, color="silver", linewidth=1, linestyle=":", zorder=0)
    axes[1].annotate(
        "target",
        (0, target),
        xycoords=("axes fraction", "data"),
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=8,
        color="grey",
    )
    axes[0].legend(frameon=False, fontsize=8)
    num_seeds = max(len(row["best"]) for row in summary["methods"].values())
    lines = f"lines: mean of {num_seeds} seeds, bands: their range"
    figure.suptitle(
        f"{summary['num_stages']} stages, {summary['num_microbatches']} microbatches per update; "
        + (lines if num_seeds > 1 else "one seed"),
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_stages(task: Task, points: dict, path: pathlib.Path) -> None:
    """Final accuracy against the number of stages, for both kinds of ticks: means of the seeds, and their range."""
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for ax, (ticks, of_ticks) in zip(axes, points.items()):
        for i, name in enumerate(REMEDIES):
            row = sorted(of_ticks.get(name, {}).items())
            style = "--" if name == "2BW" else "-"
            stages = [S for S, _ in row]
            means, low, high = ([100 * of(values) for _, (_, values) in row] for of in (statistics.mean, min, max))
            ax.plot(stages, means, style, color=f"C{i}", marker="o", ms=4, label=name)
            ax.fill_between(stages, low, high, color=f"C{i}", alpha=0.12, lw=0)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(STAGES))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_ylim(bottom=45)
        ax.set_xlabel("stages")
        ax.set_title(f"{ticks} ticks", fontsize=11)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, % (a guess: 10)")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(study: str, task: Task, runs: dict, per_epoch: int, out: pathlib.Path):
    """Writes the table and the picture of the runs so far."""
    import matplotlib

    matplotlib.use("Agg")
    if study == "stages":
        points = points_of(runs)
        text = markdown_of_stages(points, task)
        draw_stages(task, points, out / "stages.png")
    else:
        summary = summary_of(task, runs, per_epoch)
        text = markdown(study, summary)
        draw(task, summary, out / "curves.png")
    print(text)
    (out / "table.md").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["resnet", "translation", "stages", "accounting"])
    parser.add_argument("--data", type=pathlib.Path, help="folder of the data")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run")
    parser.add_argument("--rate", type=float, help="the only one; else it is searched")
    parser.add_argument("--methods", nargs="+", help="some of them, by name")
    parser.add_argument("--quick", action="store_true", help="far smaller, without data")
    parser.add_argument("--redraw", action="store_true", help="only draw, from OUT/runs.json")
    args = parser.parse_args()
    if args.study == "accounting":
        print(accounting_table())
        return
    if args.out is None:
        raise SystemExit("`--out` must name the folder of the results.")
    if args.data is None and not (args.quick or args.redraw):
        raise SystemExit("`--data` must name the folder of the data. Or pass `--quick`.")
    known = REMEDIES if args.study == "stages" else METHODS
    names = args.methods or list(known)
    if unknown := set(names) - set(known):
        raise SystemExit(f"no method {', '.join(sorted(unknown))}: there are {'; '.join(known)}.")
    methods = {name: known[name] for name in known if name in names}
    args.out.mkdir(parents=True, exist_ok=True)
    task = tasks(args.quick, args.steps)[args.study]
    runs = Runs(args.out / "runs.json")
    if not args.redraw:
        data = data_of(args.study, None if args.quick else args.data)
        runs.found["examples"] = len(data["train"])
        rate = args.rate or (task.rate if args.quick else None)
        if args.study == "stages":
            stages = (1, 7) if args.quick else STAGES
            train_stages(task, data, runs, methods, args.seeds, rate, stages)
        else:
            train_all(task, data, runs, methods, args.seeds, rate)
    found = {key: run for key, run in runs.found.items() if key != "examples"}
    report(args.study, task, found, runs.found["examples"], args.out)


if __name__ == "__main__":
    main()
