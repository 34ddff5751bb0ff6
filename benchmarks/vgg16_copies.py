"""VGG-16 on four devices: the plan for a slow link, and the bytes that a step sends.

    python benchmarks/vgg16_copies.py                            # profiles VGG-16 here, or reads the profile
    python benchmarks/vgg16_copies.py --bandwidths 1e6,1e8 --profile vgg16.json

The script measures the layers of VGG-16 on images of 224 x 224 on one device of this machine. The
planner then chooses for four such devices, for every bandwidth of the link between them. The
script prints the fastest plan with synchronous updates, and the fastest ones of three kinds: copies
of the pipeline (data parallelism), stages without copies of their own, and stages with copies.

Then steps are compiled, and their collectives are read from the compiled programs: of the plan 3-1 with
all convolutions on three devices and all dense layers on one, as in PipeDream's paper; of 3-1 with the
cut that the planner chose for the slowest link; and of data parallelism. The bytes
are those that all devices send in a step: an all-reduce of n devices sends 2 (n - 1) times its
size, as a ring does, and a permutation the size of its message for each pair, in every tick in
which the table has a message for it.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jpipe  # noqa: E402
from jpipe.lowering.lower import lower  # noqa: E402
from models import VGG  # noqa: E402

DEVICES = 4
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument(
        "--bandwidths",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[1e7, 3e7, 1e8, 1e9],
    )
    parser.add_argument("--profile", default="vgg16.json", help="a file that keeps the profile")
    args = parser.parse_args(argv)
    size = args.batch // args.microbatches
    batch = {
        "inputs": np.zeros((args.batch, args.image_size, args.image_size, 3), np.float32),
        "labels": np.zeros(args.batch, np.int32),
    }
    best = plan(args, {name: a[:size] for name, a in batch.items()})
    print()
    measure(args, batch, best)


def cross_entropy(outputs, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return losses.mean()


def pipeline(args: argparse.Namespace, schedule: jpipe.Schedule, **options):
    model = VGG(image_size=args.image_size)
    return jpipe.Pipeline(
        model.layers(),
        loss=cross_entropy,
        optimizer=optax.sgd(0.01, momentum=0.9),
        schedule=schedule,
        **options,
    )


# -- The plan


def plan(args: argparse.Namespace, microbatch: dict) -> jpipe.plan.Candidate:
    """Prints the fastest plans for every bandwidth, and returns that for the first."""
    pipe = pipeline(args, jpipe.schedules.gpipe(1, 1))
    profile = pipe.profile(microbatch, num_microbatches=1, min_seconds=0.1, cache=args.profile)
    seconds = np.add(profile.seconds("forward"), profile.seconds("backward"))
    print(
        f"a microbatch of {profile.microbatch_size}: convolutions {seconds[:13].sum():.2f} s, "
        f"dense layers {seconds[13:].sum():.2f} s"
    )
    print("seconds of a step, as planned")
    winners = []
    for bandwidth in args.bandwidths:
        machine = jpipe.plan.Machine(DEVICES, bandwidth=(bandwidth, bandwidth))
        ranking = jpipe.plan.choose(profile, machine, args.batch, recompute=profile.recompute)
        winners.append(ranking[0])
        words = [f"{bandwidth / 1e6:>7g} MB/s: {text(ranking[0])}"]
        for kind in ("data parallel", "no copies", "copies"):
            of_kind = (c for c in ranking if kind_of(c) == kind)
            best = next(of_kind, None)
            if best is not None:
                words.append(f"{kind} {text(best)}")
        print("; ".join(words), flush=True)
    return winners[0]


def kind_of(candidate: jpipe.plan.Candidate) -> str:
    if "replicas" in candidate.options:
        return "copies"
    if candidate.num_stages == 1 and candidate.num_replicas > 1:
        return "data parallel"
    return "no copies"


def text(candidate: jpipe.plan.Candidate) -> str:
    """The plan in words, with its seconds."""
    words = [candidate.label]
    if candidate.num_stages == 1:
        words = ["one stage"]
    if candidate.num_replicas > 1:
        words.append(f"x {candidate.num_replicas}")
    if candidate.boundaries:
        words.append(f"cut at {','.join(map(str, candidate.boundaries))}")
    words.append(f"{candidate.prediction.seconds:.1f} s")
    return " ".join(words)


# -- The bytes


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that all devices send in a step.

    Attributes:
      reduced: by all-reduces and all-gathers.
      moved: by permutations.
    """

    reduced: int
    moved: int

    @property
    def total(self) -> int:
        return self.reduced + self.moved


def sent_bytes(pipe: jpipe.Pipeline, batch: dict, channels) -> Sent:
    """Reads the collectives of the compiled step.

    Args:
      pipe: the pipeline.
      batch: a minibatch, or its shapes.
      channels: of the lowered table: they say in how many ticks a permutation runs.
    """
    ticks_of = {c.pairs: int(c.sends.sum()) for c in channels if c.pairs is not None}
    reduced = moved = 0
    for line in pipe.compile(batch).as_text().splitlines():
        match = re.search(r"= (.*?) (all-reduce|all-gather|collective-permute)(?:-start)?\(", line)
        if match is None:
            continue
        num_bytes = sum(
            _BYTES[dtype] * int(np.prod([int(n) for n in dims.split(",") if n]))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        )
        if match[2] == "collective-permute":
            found = re.findall(
                r"\{(\d+),(\d+)\}",
                line.split("source_target_pairs=")[1].split("}}")[0] + "}",
            )
            pairs = tuple(sorted((int(s), int(t)) for s, t in found))
            moved += num_bytes * len(pairs) * ticks_of[pairs]
            continue
        for n in group_sizes(line):
            whole = num_bytes * (2 if match[2] == "all-reduce" else 1)
            reduced += whole * (n - 1)
    return Sent(reduced, moved)


def group_sizes(line: str) -> list[int]:
    """The sizes of the groups of a collective, in either spelling.

    Example:
      >>> group_sizes("replica_groups={{0,1,2},{3}}, x"), group_sizes("replica_groups=[2,4]<=[8]")
      ([3, 1], [4, 4])
    """
    spelled = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if spelled:
        return [len(g.split(",")) for g in re.findall(r"\{([\d,]+)\}", spelled[1])]
    numbers = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if numbers is None:  # all devices
        return [DEVICES]
    return [int(numbers[2])] * int(numbers[1])


def measure(args: argparse.Namespace, batch: dict, best: jpipe.plan.Candidate) -> None:
    """Prints the bytes of a step of 3-1, of the planned one, and of data parallelism."""
    N = args.microbatches
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    one_stage = jpipe.schedules.gpipe(1, N // DEVICES)
    mesh = jpipe.make_mesh(stage=1, data=DEVICES)
    three_one = jpipe.schedules.one_f_one_b(2, N, replicas=(3, 1))
    pipelines = {
        "data parallel": pipeline(args, one_stage, mesh=mesh),
        "3-1, cut at 13": pipeline(args, three_one, boundaries=[13]),
    }
    if kind_of(best) == "copies":
        cut = list(best.boundaries)
        name = f"{best.label}, cut at {','.join(map(str, cut))}"
        pipelines[name] = pipeline(args, best.table(), boundaries=cut)
    everything = None
    for name, pipe in pipelines.items():
        sent = sent_bytes(pipe, shapes, lower(pipe.schedule).channels)
        everything = everything or sent.total
        print(
            f"{name}: {sent.total / 1e6:.1f} MB a step, {sent.reduced / 1e6:.1f} MB of gradients and "
            f"norms, {sent.moved / 1e6:.1f} MB between stages; {1 - sent.total / everything:.1%} fewer",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
