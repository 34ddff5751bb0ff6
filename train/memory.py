"""Shows where the memory of a training step goes: every array, what for, and when it lives.

    python train/memory.py --config configs/quickstart.py
    python train/memory.py --config configs/quickstart.py --config.pipeline.schedule=one_f_one_b --save memory.svg
    python train/memory.py --config configs/quickstart.py --device 3 --csv memory.csv --json memory.json
    python train/memory.py --config configs/quickstart.py --profile --to-host 16GB/s
    python train/memory.py --config configs/quickstart.py --largest-batch 64MB

The step is compiled for the devices that are here and does not run. The first table has a row for every device of the
pipeline: what its stages need, and what it allocates. Bytes below it are those of one device: by
use at the moment at which most bytes hold something, and the largest arrays then. Times are ticks of the schedule; with
`--profile` each layer is measured and they are seconds. `--to-host` lists the arrays that could leave for the host
between two accesses and be back in time, at a rate in bytes per second; it needs `--profile`. `--save` draws bytes by
use, a chart of the blocks, and the intervals between accesses. `--largest-batch` compiles the step for other batch
sizes, with as many microbatches, until it has the largest whose bytes fit. The exit code is 0, or 2 if an option or a
file is wrong.
"""

import argparse
import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jpipe._util.command_line import Parser
from jpipe._util.foreign import shortened, shown
from train import flags
from train.arguments import count, size

_MOST_CANDIDATES = 12


def rate(text: str) -> float:
    """Reads bytes per second, with or without a unit.

    Example:
      >>> rate("16GB/s"), rate("2GiB")
      (16000000000.0, 2147483648.0)
    """
    return size(text.strip().removesuffix("/s"))


def position(text: str) -> int:
    """Reads a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {shown(text)}.")
    return int(text)


def picture(text: str) -> str:
    """Reads the name of a picture."""
    if pathlib.Path(text).suffix not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .svg, .png or .pdf, got {shown(text)}.")
    return text


def parser() -> Parser:
    result = Parser(
        prog="memory.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--config", help="a configuration; see train/train.py")
    result.add_argument(
        "--device",
        type=position,
        default=0,
        help='which device: a position along the axis "stage"',
    )
    result.add_argument(
        "--largest-batch",
        type=size,
        metavar="MEMORY",
        help="search for the largest batch_size that fits a device of this memory, such as 16GB",
    )
    result.add_argument("--profile", action="store_true", help="measure layers, and show seconds")
    result.add_argument("--to-host", type=rate, help="bytes per second to the host, such as 16GB/s")
    result.add_argument("--to-device", type=rate, help="bytes per second back; default: as `--to-host`")
    result.add_argument("--top", type=count, default=12, help="number of arrays to print")
    result.add_argument("--save", type=picture, metavar="FILE", help="draw into this file")
    result.add_argument(
        "--panels",
        type=lambda text: text.split(","),
        default=(),
        help="what to draw, of bytes,blocks,intervals; default: all",
    )
    result.add_argument("--json", metavar="FILE", help="write everything as JSON")
    result.add_argument("--csv", metavar="FILE", help="write the blocks as CSV")
    return result


def main(argv: list[str]) -> int:
    overrides, rest = flags.split(argv)
    if not argv:
        parser().print_help()
        return 0
    args = parser().parse_args(rest)
    try:
        if args.config is None:
            raise ValueError("name a configuration: `--config configs/quickstart.py`. `--help` shows more.")
        if args.to_host is not None and not args.profile:
            raise ValueError("`--to-host` compares transfers with seconds between accesses: add `--profile`.")
        if args.to_device is not None and args.to_host is None:
            raise ValueError("`--to-device` goes with `--to-host`: add it.")
        pipe, batch, config, num_examples = prepare(["--config", args.config, *overrides], args.device)
        if args.largest_batch is not None:
            print(largest(pipe, batch, config, num_examples, args.largest_batch))
            return 0
        return show(args, pipe, batch)
    except (ValueError, OSError, ImportError) as error:
        print(f"memory.py: {shortened(str(error))}", file=sys.stderr)
        return 2


def prepare(words: list[str], device: int):
    """Builds the pipeline of a configuration.

    Returns:
      The pipeline, a minibatch, the configuration, and the number of training examples; None of a stream.
    """
    import jpipe
    from train.config import TrainConfig
    from train.data import shuffled
    from train.devices import cache_compilations, check_devices, prepare_cpu

    _, config = flags.parse(words, TrainConfig)
    schedule = config.pipeline.table()
    if device >= schedule.num_devices:
        raise ValueError(f"`--device` must be below {schedule.num_devices}, the devices of the pipeline, got {device}.")
    examples = config.load_data().train
    batch = next(shuffled(examples, config.batch_size, config.seed))
    sizes = config.mesh.sizes
    prepare_cpu(schedule.num_devices * math.prod(sizes.values()))
    check_devices(schedule.num_devices, **sizes)
    cache_compilations(config.compilation_cache)
    mesh = config.mesh.make(schedule)
    options = config.options_of_pipeline(mesh)
    with config.mesh.names_rules():
        pipe = jpipe.Pipeline(config.weights.layers(), schedule=schedule, **options)
        pipe.partition(batch)
    return pipe, batch, config, len(examples) if hasattr(examples, "__len__") else None


def show(args: argparse.Namespace, pipe, batch) -> int:
    """Compiles the step, prints its memory, and writes the files."""
    from train import report

    print(f"{report.memory_by_device(pipe.memory_by_device(batch))}\n")
    profile = pipe.profile(batch) if args.profile else None
    timeline = pipe.memory_timeline(batch, device=args.device, profile=profile)
    print(timeline.text(args.top))
    if args.to_host is not None:
        print(f"\n{candidates(timeline, args.to_host, args.to_device)}")
    if args.json is not None:
        pathlib.Path(args.json).write_text(json.dumps(timeline.to_json()))
    if args.csv is not None:
        pathlib.Path(args.csv).write_text(timeline.to_csv())
    if args.save is not None:
        timeline.draw(args.save, args.panels)
    return 0


def largest(pipe, batch, config, num_examples: int | None, memory: float) -> str:
    """The largest batch that fits, in words; prints each size that is tried."""
    import jax

    from jpipe.plan import size_text
    from train.largest_batch import Tried, search

    def num_bytes(batch_size: int) -> int:
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch_size, *a.shape[1:]), a.dtype), batch)
        return pipe.memory(rows).total

    def report(tried: Tried) -> None:
        word = "fits" if tried.num_bytes <= memory else "too large"
        print(f"batch {tried.batch_size:>6,}  {size_text(tried.num_bytes):>10} a device  {word}", flush=True)

    unit = pipe.schedule.num_microbatches * math.prod(config.mesh.sizes[axis] for axis in ("data", "fsdp", "expert"))
    most = (MOST_ROWS if num_examples is None else num_examples) // unit * unit
    if not most:
        raise ValueError(f"a batch is a multiple of {unit}, and there are {num_examples} training examples.")
    fits, too_large = search(num_bytes, memory, unit=unit, most=most, first=config.batch_size, report=report)
    if fits is None:
        return f"no batch fits into {size_text(memory)}: the smallest, {unit}, needs {size_text(too_large.num_bytes)}."
    text = f"--config.batch_size={fits.batch_size} is the largest that fits into {size_text(memory)}"
    if too_large is None:
        return f"{text}: there are {most if num_examples is None else num_examples:,} training examples."
    return f"{text}; batches are multiples of {unit}."


MOST_ROWS = 2**20
"""The largest batch of a stream that is looked at."""


def candidates(timeline, to_host: float, to_device: float | None) -> str:
    """The intervals in which arrays could be on the host, as a table."""
    from jpipe.plan import size_text

    candidates = timeline.swap_candidates(to_host, to_device)
    intervals = timeline.intervals()
    lines = [
        f"{len(candidates)} of {len(intervals)} intervals between accesses are long enough to go to the host and back"
    ]
    shown = candidates[:_MOST_CANDIDATES]
    width = max([len(i.name) for i in shown], default=0)
    for i in shown:
        lines.append(
            f"{i.name:{width}}  {size_text(i.num_bytes):>10}  {i.length * 1e3:10.4g} ms from {i.start * 1e3:.4g} ms"
        )
    if len(candidates) > len(shown):
        lines.append(f"and {len(candidates) - len(shown)} others")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
