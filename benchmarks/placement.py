"""Stages that a solver of device placement chooses, beside the best cut of the trace.

    python benchmarks/placement.py
    python benchmarks/placement.py towers --stages 2 --rounds 30

Each model is one module, as somebody would write it. The *chain* cut is the best one between two neighbours of the
trace (`boundaries="time"`: the exact min-max cut over all narrow places). A *placement* may put branches on any stages
(`boundaries="placement"`).

*Predicted* are the milliseconds of the slowest stage, a forward and a backward of one microbatch, as the sum of the
parts that each of the two measures. *Measured* are those of whole stages, each one program, one after another on one
device. All stages of both cuts take turns, and medians count. *Bytes* are those that cross forward.
"""

import argparse
import itertools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from jpipe.layers.avals import is_inexact
from jpipe.layers.trace import forward_and_backward
from jpipe.plan.placement import costs_of
from jpipe.segments.placement import Placement
from models.inception import Inception
from models.translation import Translation
from models.unet import UNet


class Whole(nnx.Module):
    """Layers one after the other in one module; the names of skips as in `models.unet.UNet.parts`."""

    def __init__(self, parts, *, rngs):
        self.layers = nnx.List([factory(rngs=rngs) for factory, _ in parts])
        self.names = [dict(names) for _, names in parts]

    def __call__(self, x):
        kept = {}
        for layer, names in zip(self.layers, self.names):
            x = layer(x, *[kept.pop(name) for name in [names.get("pop")] if name])
            if "stash" in names:
                x, kept[names["stash"]] = x
        return x


class Block(nnx.Module):
    """A block of a transformer."""

    def __init__(self, dim, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, dim, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Towers(nnx.Module):
    """A tower for images, of convolutions, and one for texts, of blocks of a transformer; their products are compared.

    They need each other only at the end.
    """

    def __init__(self, *, rngs):
        sizes = [3, 64, 64, 128, 128, 256]
        self.convs = nnx.List(
            [nnx.Conv(a, b, (3, 3), strides=1 + i % 2, rngs=rngs) for i, (a, b) in enumerate(itertools.pairwise(sizes))]
        )
        self.image = nnx.Linear(256, 128, rngs=rngs)
        self.embed = nnx.Embed(1000, 256, rngs=rngs)
        self.blocks = nnx.List([Block(256, rngs=rngs) for _ in range(3)])
        self.text = nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, inputs, tokens):
        x = inputs
        for conv in self.convs:
            x = nnx.relu(conv(x))
        y = self.embed(tokens)
        for block in self.blocks:
            y = block(y)
        image, text = self.image(x.mean((1, 2))), self.text(y.mean(1))
        return image * text


def plain(parts):
    """Layers without skips."""
    return [(factory, {}) for factory in parts]


def image(rows, size):
    """Images."""
    return np.random.default_rng(0).normal(size=(rows, size, size, 3)).astype(np.float32)


def tokens(rows, length):
    """Texts."""
    return np.random.default_rng(1).integers(1, 1000, (rows, length)).astype(np.int32)


def inception():
    """Inception-v3 of half the width, on images of 139 pixels."""
    parts = plain(Inception(width=16, num_classes=10, dropout=0.0).layers())
    return Whole(parts, rngs=nnx.Rngs(0)), {"inputs": image(4, 139)}


def unet():
    """A U-Net of three levels."""
    return Whole(UNet(num_channels=3, width=24).parts(), rngs=nnx.Rngs(0)), {"inputs": image(2, 96)}


def translation():
    """Six blocks of an encoder and six of a decoder."""
    parts = plain(Translation(1000, dim=256, num_heads=4, mlp_dim=1024, dropout=0.0, norm="pre").layers())
    return Whole(parts, rngs=nnx.Rngs(0)), {"inputs": {"source": tokens(8, 32), "target": tokens(8, 32)}}


def towers():
    """Two towers."""
    return Towers(rngs=nnx.Rngs(0)), {"inputs": image(8, 48), "tokens": tokens(8, 64)}


MODELS = {"Inception-v3": inception, "U-Net": unet, "translation": translation, "towers": towers}
"""Name -> a model, and a batch of one microbatch."""


def loss(outputs, batch):
    """A loss that needs no labels."""
    return jnp.mean(outputs**2)


def pipeline(model, num_stages, boundaries):
    """A pipeline of one microbatch."""
    return jpipe.Pipeline(
        model,
        loss=loss,
        optimizer=optax.sgd(0.01),
        schedule=jpipe.schedules.gpipe(num_stages, 1),
        boundaries=boundaries,
    )


def chain(model, num_stages, batch):
    """The best cut of the trace as the stage of each step, with the predicted seconds of its stages."""
    pipe = pipeline(model, num_stages, "time")
    program = pipe._program(batch)
    starts, layers = program.stages.starts, program.stages.layers
    last = [layers[stop - 1].options.segment[0] for stop in starts[1:-1]]  # the number of the step before each cut
    steps = program.settings.steps(program.microbatch, program.engine.key_impl).flow.steps
    groups = tuple(sum(number > step for step in last) for number in range(len(steps)))
    *seconds, of_loss = costs_of(program.settings, program.traced, program.microbatch).seconds
    totals = [sum(seconds[i:j]) for i, j in itertools.pairwise(starts)]
    totals[-1] += of_loss
    return Placement(groups, seconds=tuple(totals)), pipe


def placed(model, num_stages, batch):
    """The placement, with the predicted seconds of its stages."""
    pipe = pipeline(model, num_stages, "placement")
    return pipe._program(batch).settings.model.placement, pipe


def stage_programs(pipe, placement, batch):
    """A function for each stage that runs forward and backward of one microbatch, compiled."""
    program = pipe._program(batch)
    settings = program.settings.placed(placement._replace(is_all=True))
    traced = settings.trace(program.microbatch, program.engine.key_impl)
    rng = np.random.default_rng(0)

    def value(a):
        if is_inexact(a):
            return jnp.asarray(0.1 * np.abs(rng.normal(size=a.shape)) + 0.01, a.dtype)
        return jnp.zeros(a.shape, a.dtype)

    def compiled(kind):
        function, arguments = forward_and_backward(kind)
        values = jax.tree.map(value, arguments)
        run = jax.jit(function).lower(*arguments).compile()
        return lambda: jax.block_until_ready(run(*values))

    stages = [[compiled(traced.layer_kinds[k])] for k in traced.kind_of_layer]
    stages[-1].append(compiled(traced.loss))
    return stages


def medians(programs, rounds):
    """Median seconds of each of some lists of programs, which take turns."""
    seconds = [[] for _ in programs]
    for turn in range(rounds + 2):
        for found, runs in zip(seconds, programs):
            start = time.perf_counter()
            for run in runs:
                run()
            if turn >= 2:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in seconds]


def main():
    """Prints a row for each model and number of stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="names of models")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.stages))
    print("| model | stages | cut | predicted, ms | measured, ms | bytes |")
    print("|---|---|---|---|---|---|")
    for name in options.models:
        model, batch = MODELS[name]()
        for num_stages in options.stages:
            cuts = {"chain": chain(model, num_stages, batch), "placement": placed(model, num_stages, batch)}
            programs = [stage for placement, pipe in cuts.values() for stage in stage_programs(pipe, placement, batch)]
            seconds = iter(medians(programs, options.rounds))
            for cut, (placement, pipe) in cuts.items():
                measured = max(itertools.islice(seconds, num_stages))
                crossing = sum(record.sent_bytes for record in pipe.partition(batch)) / 2**20
                numbers = f"{1e3 * max(placement.seconds):.1f} | {1e3 * measured:.1f} | {crossing:.2f} MiB"
                print(f"| {name} | {num_stages} | {cut} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
