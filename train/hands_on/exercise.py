"""A ResNet-50 on handwritten digits, on one device and in a pipeline: the exercise.

    python train/hands_on/exercise.py
    python train/hands_on/exercise.py --stages 4 --microbatches 8 --steps 60
    python train/hands_on/exercise.py --small

It trains the same weights twice, with one stage and with `--stages`, and prints for both the losses, the images a
second, and the memory of every device. `--small` takes a network of three layers, to try the program.
Replace each `raise NotImplementedError` by code, gap after gap. `answer.py` beside it has one way to do it.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import optax

import jpipe
from jpipe.plan import size_text
from models import ResNet
from train.data import Dataset, shuffled
from train.devices import prepare_cpu
from train.mnist import MNIST


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    return parser.parse_args(argv)


def network(small: bool) -> ResNet:
    """The description of a network; `network(...).layers()` are its layers, each for one device."""
    if small:
        return ResNet(num_channels=1, widths=(8,), num_blocks=(1,), stem_stride=2, norm="batch")
    return ResNet.of_depth(50, num_channels=1, num_classes=10)


def pipeline(model: ResNet, num_stages: int, num_microbatches: int) -> jpipe.Pipeline:
    """The network as a pipeline."""
    # Gap 1: GPipe's schedule for these numbers of stages and microbatches, from `jpipe.schedules`.
    raise NotImplementedError("gap 1")
    # End of gap 1.
    # Gap 2: a `jpipe.Pipeline` of `model.layers()` with the loss `model.loss()`, which returns metrics too
    # (`has_aux=True`), and AdamW with a learning rate of 1e-3. Stages shall have equal FLOPs.
    raise NotImplementedError("gap 2")
    # End of gap 2.
    return pipe


def train(pipe: jpipe.Pipeline, data: Dataset, batch_size: int, num_steps: int) -> tuple[list[float], float]:
    """Trains, and prints a line for every step.

    Returns:
      The losses, and the images a second without the first step, which compiles.
    """
    batches = shuffled(data.train, batch_size, seed=0)
    # Gap 3: the state of training, with the random key 0 and the shapes of a batch.
    raise NotImplementedError("gap 3")
    # End of gap 3.
    losses, start = [], time.perf_counter()
    for step in range(1, num_steps + 1):
        # Gap 4: train on the next batch, and add the loss to `losses` as a `float`.
        raise NotImplementedError("gap 4")
        # End of gap 4.
        # Gap 5: the share of the steps that are done, the epochs (how often each image has been read, as a
        # fraction), and the images a second since the first step has ended.
        raise NotImplementedError("gap 5")
        # End of gap 5.
        print(f"step {step}/{num_steps}  {done:4.0%}  epoch {epoch:.2f}  loss {losses[-1]:.4f}  {speed:,.1f} images/s")
    # Gap 6: the share of the first 200 held-out images whose class has the largest output of `pipe.predict`.
    raise NotImplementedError("gap 6")
    # End of gap 6.
    print(f"held-out images: accuracy {accuracy:.1%}")
    return losses, speed


def print_memory(pipe: jpipe.Pipeline, batch: dict) -> None:
    """A line for each stage, and one for each device."""
    # Gap 7: the records of the stages and those of the devices. See `Pipeline.partition` and
    # `Pipeline.memory_by_device`.
    raise NotImplementedError("gap 7")
    # End of gap 7.
    for stage in stages:
        print(
            f"stage {stage.stage}: layers {stage.layers[0]} to {stage.layers[1] - 1}, {stage.num_parameters:,} weights"
        )
    print("device     weights  activations       needs   allocates")
    for row in devices:
        sizes = (size_text(n) for n in (row.weights, row.activations, row.needed, row.allocated))
        print("{:6}  {:>10}  {:>11}  {:>10}  {:>10}".format(row.device, *sizes))


def main(argv: list[str]) -> dict[int, list[float]]:
    """Trains with one stage and with several.

    Returns:
      Number of stages -> losses.
    """
    args = parsed(argv)
    prepare_cpu(args.stages)  # stand-ins, if there is no accelerator
    model, data, losses, speeds = network(args.small), MNIST().load(), {}, {}
    for num_stages in (1, args.stages):
        print(f"\n{num_stages} stage{'s' * (num_stages > 1)}")
        pipe = pipeline(model, num_stages, args.microbatches)
        print_memory(pipe, next(shuffled(data.train, args.batch_size, seed=0)))
        losses[num_stages], speeds[num_stages] = train(pipe, data, args.batch_size, args.steps)
    # Gap 8: what the bubble takes: the share of the time that devices are idle (`schedule.facts().bubble`).
    raise NotImplementedError("gap 8")
    # End of gap 8.
    ratio = speeds[args.stages] / max(speeds[1], 1e-9)
    print(f"\n{args.stages} stages: {ratio:.2f} times the images a second of one; {bubble:.0%} of their time is bubble")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
