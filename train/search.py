"""Searches for a way to split the operators of a model over devices, and predicts its step.

    python train/search.py --config configs/quickstart.py --devices 4 --budget 10s
    python train/search.py --config configs/gpt_1f1b.py --devices 16 --machine k80 --memory 4GiB --save strategy.json
    python train/search.py --config configs/quickstart.py --devices 4 --machine machine.toml --json
    python train/search.py --config configs/quickstart.py --devices 2 --in-stages --save strategy.json

The model and its loss are traced as one function of a whole batch; nothing is compiled. Every operator may be split by
samples, by other dims of its output, by dims of its weights and along its sums, and run on any of the devices. The
seconds of a step are
simulated on the machine: "p100" (4 servers of 4 P100s), "k80" (16 servers of 4 K80s), or a TOML or JSON file;
`docs/tensor_search.md` describes it. Operators are priced by their FLOPs and bytes, or with `--measure FILE` by
measuring them on the first device here; FILE keeps what was measured. Ctrl-C ends the search with the best strategy so
far. The exit code is 0, or 2 if an option or a file is wrong or no strategy fits.

`--save` writes the strategy, `--draw` pictures of the simulated step and of the search. With `--in-stages` the function
is that of a microbatch of one replica, and every operator uses all devices in the order of a mesh: `train/train.py
--config.strategy=FILE --config.mesh.model=DEVICES` trains by what was found.
"""

import argparse
import json
import math
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jpipe._util.command_line import Parser
from jpipe._util.foreign import shortened, shown
from train import flags
from train.arguments import count, size


def duration(text: str) -> float:
    """Reads seconds, with or without a unit.

    Example:
      >>> duration("90s"), duration("1.5m"), duration("20")
      (90.0, 90.0, 20.0)
    """
    match = re.fullmatch(r"([0-9.]+)\s*(s|m|h)?", text.strip())
    try:
        assert match is not None
        seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"]
        assert 0 < seconds < math.inf
    except (AssertionError, ValueError):
        raise argparse.ArgumentTypeError(f"must be a time above 0 such as 60s, 2m or 1h, got {shown(text)}.") from None
    return seconds


def parser() -> Parser:
    result = Parser(
        prog="search.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--config", help="a configuration; see train/train.py")
    result.add_argument("--devices", type=count, help="number of devices")
    result.add_argument("--machine", default="p100", metavar="FILE", help="p100, k80 or a file")
    result.add_argument("--budget", type=duration, default=60.0, help="time to search, such as 60s")
    result.add_argument(
        "--proposals",
        type=count,
        help="changes to try by chance, and as many after that, instead of a time",
    )
    result.add_argument("--memory", type=size, help="memory per device, such as 16GiB")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument(
        "--in-stages",
        action="store_true",
        help="search what `train.py --config.strategy` can run",
    )
    result.add_argument("--measure", metavar="FILE", help="measure operators")
    result.add_argument("--save", metavar="FILE", help="write the strategy as JSON")
    result.add_argument("--draw", metavar="DIR", help="write pictures (SVG)")
    result.add_argument("--json", action="store_true", help="print the result as JSON")
    return result


def main(argv: list[str]) -> int:
    overrides, rest = flags.split(argv)
    if not argv:
        parser().print_help()
        return 0
    args = parser().parse_args(rest)
    try:
        if args.config is None or args.devices is None:
            raise ValueError(
                "name a configuration and a number of devices: `--config configs/quickstart.py --devices 4`. `--help` "
                "shows more."
            )
        return search_model(args, ["--config", args.config, *overrides])
    except (ValueError, OSError) as error:
        print(f"search.py: {shortened(str(error))}", file=sys.stderr)
        return 2


def _check_writable(path: pathlib.Path) -> None:
    """Checks that the file can be written, before the search whose result would be lost."""
    if path.is_dir():
        raise ValueError(f"--save {path}: this is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise ValueError(f"--save {path}: there is no folder `{path.parent}`. Make it, or name a file in another one.")


def search_model(args: argparse.Namespace, words: list[str]) -> int:
    """Traces the model, searches, and prints the strategy."""
    from jpipe import soap

    if args.save is not None:
        _check_writable(pathlib.Path(args.save))
    machine = soap.read_machine(args.machine).with_devices(args.devices)
    from train.config import TrainConfig

    _, config = flags.parse(words, TrainConfig)
    graph = graph_of(config, whole=not args.in_stages)
    irregular = bool(machine.links) and not args.in_stages
    space = soap.Space(graph, args.devices, in_stages=args.in_stages, irregular=irregular)
    costs = None
    if args.measure is not None:
        from jpipe.soap.measure import measure

        costs = soap.Profile(machine, args.measure, measure)
    result = soap.search(
        graph,
        machine,
        costs=costs,
        budget_seconds=None if args.proposals else args.budget,
        max_proposals=args.proposals,
        max_polish_proposals=args.proposals,
        memory_limit=args.memory,
        seed=args.seed,
        starts=soap.starts_of(space, args.seed) if args.in_stages else None,
        space=space,
        progress=None if args.json or not sys.stderr.isatty() else _show,
    )
    if sys.stderr.isatty() and not args.json:
        print(file=sys.stderr)
    known = soap.default_starts(graph, args.devices)
    known["model_parallel"] = soap.model_parallel(graph, args.devices)
    known_groups = {
        name: result.starts[name] if name in result.starts else soap.simulate(graph, machine, strategy, costs).seconds
        for name, strategy in known.items()
    }
    seconds = {
        "data_parallel": known_groups["data_parallel"],
        "model_parallel": known_groups["model_parallel"],
        "expert": min(known_groups[name] for name in soap.EXPERTS),
        "best": result.seconds,
    }
    if args.save is not None:
        soap.save_strategy(args.save, graph, result.strategy, args.devices)
    if args.draw is not None:
        _draw(pathlib.Path(args.draw), graph, machine, costs, result)
    if args.json:
        content = {f"{name}_seconds": value for name, value in seconds.items()}
        content |= {
            "proposals": result.proposals,
            "seconds": result.elapsed,
            "strategy": soap.as_records(graph, result.strategy),
            "memory_bytes": max(result.simulated.memory_bytes),
            "sent_bytes": result.simulated.sent_bytes,
            "is_local_optimum": result.is_local_optimum,
            "interrupted": result.interrupted,
        }
        print(json.dumps(content))
        return 0
    print(table(graph, result.strategy), end="\n\n")
    data = seconds["data_parallel"]
    for name, value in seconds.items():
        word = name.replace("_", " ")
        print(f"{word:15} {value * 1e3:10.4g} ms per step, {data / value:6.3g} x data parallel")
    print(
        f"\n{result.proposals} changes tried in {result.elapsed:.1f} s on {machine.name}, {args.devices} devices; "
        f"at most {max(result.simulated.memory_bytes) / 2**20:.4g} MiB per device."
    )
    if result.interrupted:
        print("Ctrl-C ended the search.")
    elif result.is_local_optimum:
        print("No change of one operator makes the fastest strategy faster.")
    return 0


def graph_of(config, *, whole: bool = True):
    """The operator graph of a training step: the model, its loss and their gradients.

    Args:
      config: the configuration of the run.
      whole: whether the graph is of a whole batch, or else of a microbatch of one replica of a pipeline, in its dtype.
    """
    if whole:
        return traced_layers(config, 1).graph
    parts = config.pipeline.num_microbatches * config.mesh.data
    dtype = config.pipeline.options_of_pipeline()["compute_dtype"]
    return traced_layers(config, parts, dtype).graph


def traced_layers(config, parts: int, compute_dtype=None):
    """The operators of the layers of a model and its loss.

    Args:
      config: the configuration of the run.
      parts: number of microbatches of all replicas; the operators are those of one.
      compute_dtype: weights and activations are cast to it; None casts nothing.

    Returns:
      A `jpipe.soap.layers.LayersGraph`.
    """
    import jax

    from jpipe.layers.loss import Loss
    from jpipe.segments import model_of
    from jpipe.segments.trace import Tracing
    from jpipe.soap.layers import layers_graph
    from train.data import shuffled

    batch = next(shuffled(config.load_data().train, config.batch_size, config.seed))
    if config.batch_size % parts:
        raise ValueError(
            f"a batch of {config.batch_size} cannot be cut into {parts} equal microbatches. Change `batch_size`."
        )
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(a) // parts, *a.shape[1:]), a.dtype), batch)
    loss = config.weights.model.loss()
    model = model_of(config.weights.layers(), loss=loss, boundaries=None)
    batch = model.batch(batch)
    tracing = Tracing(compute_dtype, jax.config.jax_default_prng_impl, None, ())
    layers = model.layers(batch, tracing, num_stages=1)
    return layers_graph(layers, Loss.of(loss, True), batch, compute_dtype=compute_dtype)


def table(graph, strategy) -> str:
    """The configurations of the operators: a line per operator, or per run of operators that got the same."""
    from jpipe.soap.space import ranges

    header = ("operator", "loops", *"SAPR", "devices")
    rows = []
    for i, (operator, config) in enumerate(zip(graph.operators, strategy)):
        degrees = dict.fromkeys("SAPR", 1)
        for loop, degree in zip(operator.loops, config.degrees):
            degrees[loop.kind] *= degree
        names = ", ".join(graph.weights_of(i))
        rows.append(
            (
                operator.name + (f" ({names})" if names else ""),
                " ".join(f"{loop.kind}{loop.size}" for loop in operator.loops) or "1",
                *(str(d) if d > 1 else "." for d in degrees.values()),
                ranges(config.devices),
            )
        )
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in (header, *rows)]
    return "\n".join(lines)


def _show(elapsed: float, seconds: float, proposals: int) -> None:
    text = f"\r{elapsed:6.1f} s  {proposals:8} changes  best {seconds * 1e3:.4g} ms "
    print(text, end="", file=sys.stderr, flush=True)


def _draw(folder: pathlib.Path, graph, machine, costs, result) -> None:
    from jpipe import soap
    from jpipe.soap import picture

    folder.mkdir(parents=True, exist_ok=True)
    costs = soap.Analytic(machine) if costs is None else costs
    simulator = soap.Simulator(graph, machine, costs, result.strategy)
    title = f"{result.seconds * 1e3:.4g} ms per step on {machine.name}"
    path = folder / "timeline.svg"
    picture.save_timeline(path, simulator.tasks, simulator.timeline, title)
    picture.save_history(folder / "search.svg", result.history, result.elapsed, dict(result.starts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
