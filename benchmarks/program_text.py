"""Fingerprints of the program that a step lowers to, for every schedule and several models.

A refactoring must not change any program. So the fingerprints before it and after it are the same:

    python benchmarks/program_text.py > before.txt        # on the old commit
    python benchmarks/program_text.py > after.txt         # on the new one
    diff before.txt after.txt

Each line has the platform, the row (a model and a schedule, or a feature), the program (step, flush, predict or
evaluate), the number of operations, a hash of the text, and a hash of the operations. `--guard` lowers to the form
for another platform. The second hash ignores the order of operations and of loop state, so it stays the
same when an array of the state is renamed.
"""

import argparse
import collections
import functools
import hashlib
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402
from models import MLP, MixtureTransformer, ResNet, Transformer  # noqa: E402

SCHEDULES = {
    "gpipe": (4, {}),
    "one_f_one_b": (4, {"ticks": "paired"}),
    "one_f_one_b/unit": (4, {"ticks": "unit"}),
    "interleaved": (4, {}),
    "zero_bubble_h1": (4, {}),
    "zero_bubble_h2": (4, {}),
    "zero_bubble_v": (4, {}),
    "pipedream": (4, {}),
    "pipedream_2bw": (4, {}),
    "pipemare": (4, {}),
}


def cross_entropy(outputs, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return losses.mean()


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch["labels"]) ** 2), {"mean": jnp.mean(outputs)}


class Norm(nnx.Module):
    """Linear, batch norm and dropout: mutable state and random keys."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def models() -> dict[str, tuple]:
    """Layers, loss, inputs, labels and further arguments of each model."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(16, 6)).astype(np.float32)
    images = rng.normal(size=(16, 8, 8, 1)).astype(np.float32)
    tokens = rng.integers(0, 11, (16, 6), dtype=np.int32)
    classes = rng.integers(0, 5, 16, dtype=np.int32)
    mlp = MLP(num_inputs=6, widths=(8,) * 5, num_outputs=5).layers()
    resnet = ResNet(num_channels=1, widths=(8, 16), num_blocks=(1, 1), group_size=4, num_classes=5).layers()
    transformer = Transformer(vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=4).layers()
    linear = functools.partial(nnx.Linear, 6, 6)
    skips = [
        jpipe.skip(jpipe.Function(lambda x: (jnp.tanh(x), x)), stash="a"),
        linear,
        linear,
        jpipe.skip(jpipe.Function(lambda x, a: x + a), pop="a"),
    ]
    return {
        "mlp": (mlp, cross_entropy, numbers, classes, {}),
        "mlp-full": (mlp, cross_entropy, numbers, classes, {"recompute": "full"}),
        "mlp-overlap": (mlp, cross_entropy, numbers, classes, {"overlap": True}),
        "mlp-policy": (
            mlp,
            cross_entropy,
            numbers,
            classes,
            {"recompute": jax.checkpoint_policies.dots_saveable, "loss_scale": 8.0},
        ),
        "resnet": (resnet, cross_entropy, images, classes, {}),
        "transformer": (transformer, cross_entropy, tokens, tokens, {}),
        "norm-data2": (
            [Norm] * 4,
            mean_square,
            numbers,
            numbers,
            {"has_aux": True, "data": 2},
        ),
        "skips": (skips, mean_square, numbers, numbers, {"has_aux": True}),
    }


def fingerprint(text: str) -> tuple[int, str, str]:
    """The number of operations, a hash of the text, and a hash that ignores order.

    Example:
      >>> a = "stablehlo.add %1, %2 : tensor<4xf32>"
      >>> b = "stablehlo.tanh %3 : tensor<4xf32>"
      >>> first, second = fingerprint(f"{a}\\n{b}"), fingerprint(f"{b}\\n{a}")
      >>> first[0], first[1] == second[1], first[2] == second[2]
      (2, False, True)
    """
    text = re.sub(r"module @\S+", "module", text)
    operations: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        line = re.sub(r"%[\w#:]+|\^\w+|@\w+", "", line)
        operations.update(re.findall(r"stablehlo\.\w+[^()]*", line))
        operations.update(re.findall(r"tensor<[^>]*>", line))
    counted = "\n".join(f"{name} {n}" for name, n in sorted(operations.items()))
    digests = [hashlib.sha256(t.encode()).hexdigest()[:12] for t in (text, counted)]
    return text.count("stablehlo."), *digests


def _table(name: str) -> jpipe.Schedule:
    num_stages, keywords = SCHEDULES[name]
    build = getattr(jpipe.schedules, name.partition("/")[0])
    return build(num_stages, 8, **keywords)


def _of_schedule(model: str, name: str) -> tuple[jpipe.Pipeline, dict]:
    """A pipeline of a model under a schedule, and a batch."""
    layers, loss, inputs, labels, arguments = models()[model]
    arguments = dict(arguments)
    data = arguments.pop("data", 1)
    optimizer = optax.adamw(1e-3)
    if name == "pipemare":
        optimizer = optax.chain(
            jpipe.optim.clip_by_global_norm(1.0),
            optimizer,
            jpipe.optim.scale_by_delay(annealing_steps=100),
            jpipe.optim.correct_discrepancy(decay=0.1),
        )
        arguments["backward_params"] = jpipe.optim.corrected_params
    table = _table(name)
    pipe = jpipe.Pipeline(
        layers,
        loss=loss,
        optimizer=optimizer,
        schedule=table,
        mesh=jpipe.make_mesh(stage=table.num_devices, data=data),
        **arguments,
    )
    return pipe, {"inputs": inputs, "labels": labels}


def _linear(table: jpipe.Schedule, data: int = 1, fsdp: int = 1, layers=None, **options) -> tuple[jpipe.Pipeline, dict]:
    """A pipeline of linear layers, and a batch."""
    numbers = np.zeros((32, 16), np.float32)
    mesh = jpipe.make_mesh(stage=table.num_devices, data=data, fsdp=fsdp)
    defaults = {
        "optimizer": optax.adamw(1e-3),
        "loss": lambda outputs, batch: jnp.mean((outputs - batch["labels"]) ** 2),
    }
    layers = layers or [functools.partial(nnx.Linear, 16, 16)] * 8
    pipe = jpipe.Pipeline(layers, schedule=table, mesh=mesh, **(defaults | options))
    return pipe, {"inputs": numbers, "labels": numbers}


def _exchanged(x: jax.Array) -> jax.Array:
    """Values that go round the devices of "fsdp", and their sum."""

    def run(x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])) * jax.lax.psum(x, "fsdp")

    rows = jax.sharding.PartitionSpec("fsdp")
    return jax.shard_map(run, in_specs=rows, out_specs=rows)(x)


def _words(
    table: jpipe.Schedule, model: int = 1, fsdp: int = 1, expert: int = 1, vocabulary=False, **options
) -> tuple[jpipe.Pipeline, dict]:
    """A pipeline of a transformer, and a batch. Its MLPs are mixtures where devices share experts."""
    make = MixtureTransformer if expert > 1 else Transformer
    transformer = make(vocab_size=40, seq_len=8, dim=8, num_heads=2, num_blocks=4)
    tokens = np.zeros((32, 8), np.int32)
    mesh = jpipe.make_mesh(stage=table.num_devices, fsdp=fsdp, expert=expert, model=model)
    rules = ((("vocab", "stage"),) if vocabulary else ()) + jpipe.AXIS_RULES
    pipe = jpipe.Pipeline(
        transformer.layers(),
        loss=transformer.loss(),
        has_aux=True,
        schedule=table,
        mesh=mesh,
        axis_rules=rules,
        **({"optimizer": optax.adamw(1e-3)} | options),
    )
    return pipe, {"inputs": tokens, "labels": tokens}


def features() -> dict[str, Callable[[], tuple[jpipe.Pipeline, dict]]]:
    """Name of a feature -> a pipeline that has it, and a batch."""
    tables, compress, optim = jpipe.schedules, jpipe.compress, jpipe.optim
    sync, late = tables.one_f_one_b(2, 4), tables.pipemare(4, 4)

    def rows(name: str, of: Callable, *args, **options) -> dict:
        return {name: functools.partial(of, *args, **options)}

    def weighted(outputs, batch):
        return jnp.sum((outputs - batch["labels"]) ** 2), jnp.sum(batch["labels"])

    return {
        **rows("plain", _linear, tables.one_f_one_b(4, 8)),
        **rows("fsdp", _linear, sync, fsdp=2),
        **rows("fsdp-data", _linear, sync, fsdp=2, data=2),
        **rows("model", _words, sync, model=2),
        **rows("experts", _words, sync, expert=2),
        **rows("vocabulary", _words, sync, vocabulary=True),
        **rows("vocabulary-2bw", _words, tables.pipedream_2bw(2, 4), vocabulary=True),
        **rows("vocabulary-fsdp", _words, sync, fsdp=2, vocabulary=True),
        **rows(
            "vocabulary-muon",
            _words,
            sync,
            vocabulary=True,
            optimizer=optax.contrib.muon(1e-3),
        ),
        **rows(
            "collectives",
            _linear,
            tables.zero_bubble_h1(2, 4),
            fsdp=2,
            layers=[functools.partial(nnx.Linear, 16, 16), jpipe.Function(_exchanged)] * 4,
        ),
        **rows("copies", _linear, tables.one_f_one_b(2, 4, replicas=(3, 1))),
        **rows("copies-late", _linear, tables.pipemare(2, 4, replicas=(3, 1))),
        **rows(
            "copies-norm",
            _linear,
            tables.gpipe(2, 4, replicas=(2, 1)),
            layers=[functools.partial(nnx.BatchNorm, 16)] * 4,
        ),
        **rows("shard", _linear, sync, data=2, shard_optimizer=True),
        **rows(
            "shard-copies",
            _linear,
            tables.one_f_one_b(2, 4, replicas=(2, 1)),
            shard_optimizer=True,
        ),
        **rows(
            "powersgd",
            _linear,
            sync,
            data=2,
            compress_gradients=compress.PowerSGD(rank=2),
        ),
        **rows("topk-messages", _linear, sync, compress_messages=compress.TopK(0.25)),
        **rows("cast-messages", _linear, late, compress_messages=compress.Cast()),
        **rows(
            "sums",
            _linear,
            sync,
            data=2,
            layers=[functools.partial(nnx.Linear, 16, 16, param_dtype=jnp.bfloat16)] * 8,
            accumulate_dtype=jnp.float32,
        ),
        **rows("pca", _linear, sync, accumulate_gradients=compress.StreamingPCA(2)),
        **rows(
            "compensate",
            _linear,
            late,
            optimizer=optax.chain(optim.compensate_delay(0.1), optax.sgd(0.1)),
        ),
        **rows(
            "predict",
            _linear,
            late,
            optimizer=optax.chain(optax.adam(1e-3), optim.predict_weights()),
            forward_params=optim.predicted_params,
        ),
        **rows(
            "accumulate",
            _linear,
            sync,
            optimizer=optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        ),
        **rows("clip", _linear, sync, optimizer=optim_chain()),
        **rows("muon", _words, sync, optimizer=optax.contrib.muon(1e-3)),
        **rows("adafactor", _linear, sync, optimizer=optax.adafactor(1e-3)),
        **rows("full", _linear, sync, recompute="full", loss_scale=8.0),
        **rows("scale", _linear, sync, loss_scale=jpipe.LossScale()),
        **rows("bfloat16", _words, sync, compute_dtype=jnp.bfloat16),
        **rows("weighted", _linear, sync, loss=weighted),
        **rows("weighted-late", _linear, late, loss=weighted),
        **rows("ties", _linear, sync, ties=[[(0, "kernel"), (7, "kernel")]]),
        **rows("overlap", _linear, sync, overlap=True),
        **rows("split", _linear, tables.zero_bubble_h1(4, 8)),
        **rows(
            "offload",
            _linear,
            sync,
            offload=jpipe.Offload(optimizer=1.0, gradients=1.0),
        ),
        **rows("offload-weights", _linear, sync, offload=jpipe.Offload(weights=1.0)),
    }


def optim_chain() -> optax.GradientTransformation:
    """An update that reads the norm over all stages."""
    return optax.chain(jpipe.optim.clip_by_global_norm(1.0), optax.adamw(1e-3))


def lowered(pipe: jpipe.Pipeline, batch: dict) -> dict[str, str]:
    """The texts of the programs that train, drain, predict and evaluate."""
    program = pipe._program(batch)
    arrays, rows = program.abstract_state.arrays(), program.engine.abstract_rows
    inputs = {"inputs": batch["inputs"]}
    forward_rows = jax.eval_shape(lambda: program.prediction.rows_of(inputs))
    texts = {"step": program.lower().as_text()}
    if program.engine.lowered.drain_rounds:
        texts["flush"] = program._flush.lower(arrays, rows).as_text()
    texts["predict"] = program.prediction.compiled_predict.lower(arrays, inputs, forward_rows).as_text()
    evaluation = arrays, batch["inputs"], batch, None, forward_rows
    texts["evaluate"] = program.prediction.compiled_evaluate.lower(*evaluation).as_text()
    return texts


def lower_for(platform: str) -> None:
    """Lets pipelines on CPU devices lower to the form for another platform."""
    from jpipe.lowering import target

    target.TARGETS["cpu"] = target.TARGETS[platform]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[], help="only rows that begin with one of these")
    parser.add_argument(
        "--guard",
        choices=("cpu", "tpu", "gpu"),
        default="cpu",
        help="the platform whose form of the programs is lowered",
    )
    parser.add_argument("--texts", help="write the texts to this folder")
    options = parser.parse_args()
    lower_for(options.guard)
    makers: dict[str, Callable[[], tuple[jpipe.Pipeline, dict]]] = {
        f"{model} {name}": functools.partial(_of_schedule, model, name)
        for model, name in itertools.product(models(), SCHEDULES)
    }
    makers |= {f"feature {name}": make for name, make in features().items()}
    for row, make in makers.items():
        if options.rows and not row.startswith(tuple(options.rows)):
            continue
        try:
            texts = lowered(*make())
        except Exception as error:
            print(f"{row:30} {type(error).__name__}: {str(error)[:160]}", flush=True)
            continue
        for program, text in texts.items():
            if options.texts:
                os.makedirs(options.texts, exist_ok=True)
                path = f"{row} {program}.mlir".replace("/", "-").replace(" ", ".")
                with open(os.path.join(options.texts, path), "w") as file:
                    file.write(text)
            count, text_hash, operations_hash = fingerprint(text)
            print(
                f"{options.guard} {row:30} {program:8} {count:6} {text_hash} {operations_hash}",
                flush=True,
            )
        jax.clear_caches()


if __name__ == "__main__":
    sys.exit(main())
