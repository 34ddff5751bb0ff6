"""Fingerprints of the program that a step lowers to, for every schedule and several models.

A refactoring must not change any program. So the fingerprints before it and after it are the same:

    python benchmarks/program_text.py > before.txt        # on the old commit
    python benchmarks/program_text.py > after.txt         # on the new one
    diff before.txt after.txt

Each line has the model, the schedule, the number of operations, a hash of the text, and a hash of
the operations. The second hash ignores the order of operations and of loop state, so it stays the
same when an array of the state is renamed.
"""

import argparse
import collections
import functools
import hashlib
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jpipe  # noqa: E402
from models import MLP, ResNet, Transformer  # noqa: E402

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
    resnet = ResNet(
        num_channels=1, widths=(8, 16), num_blocks=(1, 1), group_size=4, num_classes=5
    ).layers()
    transformer = Transformer(
        vocab_size=11, seq_len=6, dim=8, num_heads=2, num_blocks=4
    ).layers()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", default="", help="only these models, separated by commas"
    )
    parser.add_argument("--texts", help="write the texts to this folder")
    options = parser.parse_args()
    for model, (layers, loss, inputs, labels, arguments) in models().items():
        if options.models and model not in options.models.split(","):
            continue
        arguments = dict(arguments)
        data = arguments.pop("data", 1)
        for name, (num_stages, keywords) in SCHEDULES.items():
            build = getattr(jpipe.schedules, name.partition("/")[0])
            table = build(num_stages, 8, **keywords)
            optimizer = optax.adamw(1e-3)
            keyword_arguments = dict(arguments)
            if name == "pipemare":
                optimizer = optax.chain(
                    jpipe.optim.clip_by_global_norm(1.0),
                    optimizer,
                    jpipe.optim.scale_by_delay(annealing_steps=100),
                    jpipe.optim.correct_discrepancy(decay=0.1),
                )
                keyword_arguments["backward_params"] = jpipe.optim.corrected_params
            pipe = jpipe.Pipeline(
                layers,
                loss=loss,
                optimizer=optimizer,
                schedule=table,
                mesh=jpipe.make_mesh(stage=table.num_devices, data=data),
                **keyword_arguments,
            )
            text = pipe.lower({"inputs": inputs, "labels": labels}).as_text()
            if options.texts:
                os.makedirs(options.texts, exist_ok=True)
                path = f"{model}.{name.replace('/', '-')}.mlir"
                with open(os.path.join(options.texts, path), "w") as file:
                    file.write(text)
            count, text_hash, operations_hash = fingerprint(text)
            print(
                f"{model:12} {name:17} {count:6} {text_hash} {operations_hash}",
                flush=True,
            )
            jax.clear_caches()


if __name__ == "__main__":
    sys.exit(main())
