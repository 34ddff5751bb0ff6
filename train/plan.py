"""Plans how to train a model, or where to cut a profiled graph.

    python train/plan.py --config configs/quickstart.py --devices 4
    python train/plan.py --config configs/gpt_1f1b.py --devices 2 --memory 2GiB --save configs/planned.py
    python train/plan.py --config configs/quickstart.py --devices 4 --microbatches 8 --tensor --save configs/planned.py
    python train/plan.py --config configs/mixture_1f1b.py --config.mesh.expert=1 --devices 4 --axes expert
    python train/plan.py --graph vgg16.txt --format pipedream --solver pipedream --devices 4 --bandwidth 1e9
    python train/plan.py --graph vgg16.txt --format pipedream --solver pipedream --hierarchy 4x4 --bandwidths 1e10,1.25e9
    python train/plan.py --graph bert.json --format placement --solver ideals --json
    python -m jpipe.launch -n 2 --devices 4 train/plan.py --config configs/quickstart.py --devices 4

With `--config`, the program measures every kind of layer and predicts the time and memory of
every schedule, number of stages and replicas, and microbatch size. It prints the best plans, why
the others lost, which plans a schedule refused, and a picture of the winner. `--save` writes a
configuration that `train/train.py` runs. Options of the configuration can be changed by
`--config.section.field=value`. Profiles are kept in `--profiles`, and measured again only if
something has changed. With several processes, the first one measures the layers on its own devices,
all of them measure messages, and the first one decides, prints and writes.

With `--tensor` the stages of a plan may also be groups of devices that split every operator, by a strategy that is
searched for each size of groups and microbatches. `--save configs/planned.py` then writes the strategy beside it,
`configs/planned.strategy.json`.

With `--axes expert,context` the devices of a stage may also share its experts and the rows, or the positions of each
sequence. What they send each other is counted in the layers and priced; `--overlap` prices devices that compute
meanwhile.

With `--graph`, the program runs one solver; `docs/planning.md` describes the solvers. Sizes and
bandwidths may have units: 2GiB, 500MB, 1.25e9. The exit code is 0, or 2 if an option or a file is
wrong or no plan fits.
"""  # noqa: E501

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import shlex
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jpipe import solvers
from jpipe._util.command_line import Parser
from jpipe._util.foreign import shortened
from train import flags
from train.arguments import axes, count, counts, size, sizes


def parser() -> Parser:
    result = Parser(
        prog="plan.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--devices", type=count, help="number of devices")
    result.add_argument("--memory", type=size, help="memory per device, such as 2GiB")
    result.add_argument("--json", action="store_true", help="print the result as JSON")
    result.add_argument(
        "--bandwidth",
        type=size,
        help="bytes per second between two devices; default with `--config`: measured",
    )
    result.add_argument(
        "--host-bandwidth",
        type=size,
        help="bytes per second between a device and its host, such as 16GB; plans that do not fit then use host memory",
    )
    model = result.add_argument_group("a model")
    model.add_argument("--config", help="a configuration; see train/train.py")
    model.add_argument(
        "--machine",
        metavar="FILE",
        help="take the links from a TOML or JSON file of a machine, as of train/search.py, in place of measured ones",
    )
    model.add_argument("--save", metavar="FILE", help="write the best plan as a configuration")
    model.add_argument("--microbatches", type=counts, help="numbers of microbatches to try, as 4,8,16")
    model.add_argument(
        "--asynchronous",
        action="store_true",
        help="allow schedules with delayed gradients",
    )
    model.add_argument(
        "--tensor",
        action="store_true",
        help="allow stages of several devices, which split operators",
    )
    model.add_argument(
        "--axes",
        type=axes,
        default=(),
        help="axes along which the devices of a stage may share experts and positions, as expert,context",
    )
    model.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="price devices that compute while the messages of `--axes` travel (default: on GPUs and TPUs)",
    )
    model.add_argument(
        "--profiles",
        default="profiles",
        metavar="DIR",
        help="folder that keeps the profiles",
    )
    model.add_argument(
        "--cores",
        type=count,
        help="number of cores that CPU devices share; default: all",
    )
    model.add_argument("--top", type=count, default=10, help="number of plans to print")
    graph = result.add_argument_group("a graph")
    graph.add_argument("--graph", metavar="FILE")
    graph.add_argument("--format", choices=("jpipe", "pipedream", "placement"))
    graph.add_argument("--solver", choices=solvers.names())
    graph.add_argument(
        "--hierarchy",
        type=counts,
        help="devices per level, as 4x4, the inner level first",
    )
    graph.add_argument(
        "--bandwidths",
        type=sizes,
        help="bytes per second of the levels, as 1e10,1.25e9",
    )
    graph.add_argument("--cost-model", choices=("pipedream-repo", "sosp19"), help="for `pipedream`")
    graph.add_argument("--straight", action="store_true", help="no replicas; for `pipedream`")
    graph.add_argument("--hosts", type=count, help="number of host processors")
    graph.add_argument(
        "--non-contiguous",
        action="store_true",
        help="stages need not be contiguous; for `ip`",
    )
    graph.add_argument("--time-limit", type=float, help="seconds; for `ip`")
    return result


def main(argv: list[str]) -> int:
    overrides, rest = flags.split(argv)
    if not argv:
        parser().print_help()
        return 0
    args = parser().parse_args(rest)
    try:
        if (args.config is None) == (args.graph is None):
            raise ValueError(
                "name either a configuration, `--config configs/quickstart.py --devices 4`, or a graph, `--graph FILE "
                "--format pipedream --solver pipedream --devices 4 --bandwidth 1e9`. `--help` shows more."
            )
        if args.graph is not None:
            if overrides:
                raise ValueError(f"`{overrides[0]}` is an option of a configuration.")
            if args.tensor:
                raise ValueError(
                    "`--tensor` splits the operators of a model: name a configuration, `--config "
                    "configs/quickstart.py`, and "
                    "no graph."
                )
            return plan_graph(args)
        return plan_model(args, ["--config", args.config, *overrides], argv)
    except (ValueError, OSError) as error:
        print(f"plan.py: {shortened(str(error))}", file=sys.stderr)
        return 2


# -- A graph


def plan_graph(args: argparse.Namespace) -> int:
    """Runs one solver on a graph and prints its solution."""
    from train import report

    if args.solver is None:
        raise ValueError(f"`--graph` needs a `--solver`: {', '.join(solvers.names())}.")
    graph = solvers.read_graph(args.graph, args.format or "jpipe")
    start = time.perf_counter()
    try:
        solution = solve(graph, args)
    except ImportError as error:  # SciPy, which is optional
        raise ValueError(error) from None
    seconds = time.perf_counter() - start
    if args.json:
        content = {
            "solver": args.solver,
            "objective": solution.objective,
            "stages": [
                {"nodes": list(stage.nodes), "replicas": stage.replicas} | ({"on_host": True} if stage.on_host else {})
                for stage in solution.stages
            ],
            "optimal": solution.optimal,
            "bound": solution.bound,
            "data_parallel": solution.data_parallel,
            "solver_seconds": seconds,
        }
        print(json.dumps(content))
    else:
        print(report.solution(solution, graph, seconds))
    return 0


# Options of the command line -> the solvers' argument and its value.
_SOLVER_OPTIONS = {
    "bandwidth": ("bandwidth", lambda value: value),
    "memory": ("memory_limit", lambda value: value),
    "hosts": ("num_hosts", lambda value: value),
    "cost_model": ("cost_model", lambda value: value),
    "straight": ("straight", lambda value: value),
    "non_contiguous": ("contiguous", lambda value: not value),
    "time_limit": ("time_limit", lambda value: value),
}


def solve(graph: solvers.Graph, args: argparse.Namespace) -> solvers.Solution:
    """Calls the solver that the command line names, with the options that it gives."""
    solver = solvers.get(args.solver)

    def refuse(option: str, takers: list[str]) -> None:
        raise ValueError(
            f"`--{option.replace('_', '-')}` is an option of {', '.join(takers)}, not of {args.solver}. Leave it out."
        )

    for option in ("hierarchy", "bandwidths"):
        if getattr(args, option) and not solver.takes_levels:
            refuse(option, [n for n, s in solvers.SOLVERS.items() if s.takes_levels])
    options = {}
    for option, (argument, value_of) in _SOLVER_OPTIONS.items():
        value = getattr(args, option)
        if value is None or value is False:
            continue
        if not solver.takes(argument):
            refuse(option, [n for n, s in solvers.SOLVERS.items() if s.takes(argument)])
        options[argument] = value_of(value)

    devices = args.devices or graph.num_devices
    if args.hierarchy is not None:
        devices = args.hierarchy
        if args.devices not in (None, math.prod(devices)):
            raise ValueError(
                f"`--hierarchy` has {math.prod(devices)} devices, `--devices` says {args.devices}. Leave one out."
            )
        if "bandwidth" in options:
            options["bandwidth"] = [options["bandwidth"]] * len(devices)
    if devices is None:
        raise ValueError("the graph does not say how many devices there are: add `--devices N`.")
    if args.bandwidths is not None:
        options["bandwidth"] = args.bandwidths
        if args.hierarchy is None:
            devices = (devices,)
    if solver.needs_bandwidth and "bandwidth" not in options:
        raise ValueError(
            f"`{args.solver}` needs `--bandwidth BYTES_PER_S`, or one per level: `--bandwidths 1e10,1.25e9`."
        )
    return solver.solve(graph, devices, **options)


# -- A model

# Seconds to measure each program of each kind of layer, in three calls.
_MIN_SECONDS = 0.25
# Seconds that the other processes wait for the first one.
_LIMIT_SECONDS = 3600.0


def plan_model(args: argparse.Namespace, words: list[str], argv: list[str]) -> int:
    """Profiles a model, ranks every plan, prints the best plans and saves the winner."""
    if args.devices is None:
        raise ValueError("the number of devices is missing: add `--devices N`.")
    if args.save is not None:
        _check_saves(pathlib.Path(args.save))
    import jax

    import jpipe
    from jpipe import plan
    from train.config import TrainConfig
    from train.devices import cache_compilations, check_devices, prepare_cpu
    from train.planned import check_tensor, with_links
    from train.processes import from_first

    name, config = flags.parse(words, TrainConfig)
    numbers = args.microbatches or _numbers_of_microbatches(config, args.devices)
    for number in numbers:
        if config.batch_size % number:
            raise ValueError(f"`--microbatches` must divide the batch size, {config.batch_size}, got {number}.")
    for axis, number in config.mesh.sizes.items():
        if axis != "data" and number > 1:
            raise ValueError(
                f"a plan gives each stage whole devices, got `--config.mesh.{axis}={number}`, which "
                f"splits stages. Plan with `--config.mesh.{axis}=1`, and "
                + (f"add `--axes {axis}`." if axis in ("expert", "context") else "set the option for train/train.py.")
            )
    if config.strategy is not None:
        raise ValueError(
            f"a plan has a strategy of its own or none, got `--config.strategy={config.strategy}`. Leave it out, and "
            "add `--tensor` to search for strategies."
        )
    if args.tensor:
        check_tensor(config)
    if args.machine is not None:
        with_links(plan.Machine(args.devices), args.machine)  # before minutes of measuring
    if args.asynchronous and config.pipeline.loss_scale == "dynamic":
        raise ValueError(
            "a dynamic loss scale needs all stages to update at the same time. Leave out `--asynchronous`, or add "
            "`--config.pipeline.loss_scale=none`."
        )
    prepare_cpu(args.devices)
    jpipe.distributed.initialize()
    check_devices(args.devices)
    _check_processes(args.devices)
    jpipe.distributed.check_same({"the command": shlex.join(argv), "the configuration": str(config)})
    cache_compilations(config.compilation_cache)
    profiles = _profiles_of_first(name, config, numbers, args)
    cores = args.cores or profiles[0].num_cores
    shares_cores = jax.default_backend() == "cpu"
    machine = plan.measure_machine(
        args.devices,
        memory_limit=args.memory or math.inf,
        num_cores=cores if shares_cores else None,
    )
    if args.overlap is not None:
        machine = dataclasses.replace(machine, overlaps=args.overlap)
    if args.machine is not None:
        machine = with_links(machine, args.machine)
    if args.bandwidth is not None:
        machine = dataclasses.replace(machine, bandwidth=(args.bandwidth,) * 2)
    decide = functools.partial(_decide, profiles, machine, config, args, argv)
    from_first(decide, "choose a plan", _LIMIT_SECONDS)
    return 0


def _check_processes(num_devices: int) -> None:
    """Raises `ValueError` if several processes have more devices than the plan is for."""
    import jax

    if jax.process_count() > 1 and num_devices != jax.device_count():
        raise ValueError(
            f"`--devices` must be the number of devices of all {jax.process_count()} processes, {jax.device_count()}, "
            f"got {num_devices}. Give that number, or plan in one process."
        )


def _decide(profiles: list, machine, config, args, argv: list[str]) -> None:
    """Ranks the plans, prints the best ones and saves the winner."""
    from jpipe import draw, plan
    from jpipe.plan import tensor
    from train import report
    from train.config import TrainConfig
    from train.planned import save_plan, splits_of

    splits = splits_of(profiles, machine, config) if args.tensor else []
    ranking = tensor.choose(
        profiles,
        machine,
        config.batch_size,
        splits,
        asynchronous=args.asynchronous,
        shard_optimizer=(False, True),
        compress_messages=config.pipeline.message_compressors(),
        compress_gradients=config.mesh.gradient_compressor(),
        host_bandwidth=args.host_bandwidth,
    )
    best = ranking[0]
    if args.json:
        records = map(report.plan_record, [*ranking, *ranking.skipped])
        print(json.dumps(list(records)))
    else:
        print(report.profile(profiles[0]), end="\n\n")
        print(report.machine(machine), end="\n\n")
        print(report.plans(ranking, config.batch_size, args.top), end="\n\n")
    if not best.fits:
        raise ValueError(
            f"no plan fits: the smallest needs {plan.size_text(best.prediction.num_bytes)} per device, the limit is "
            f"{plan.size_text(machine.memory_limit)}. Use more devices, a smaller batch, or host memory "
            "(`--host-bandwidth`)."
        )
    if not args.json:
        color = sys.stdout.isatty()
        print(draw.text(best.table(), color=color, width=report.WIDTH))
    if args.save is not None:
        planned = save_plan(pathlib.Path(args.save), config, best, splits, argv)
        assert flags.load(args.save, TrainConfig) == planned
        if not args.json:
            print(f"saved: python train/train.py --config {args.save}")


def _check_saves(path: pathlib.Path) -> None:
    """Raises `ValueError` if the plan could not be written, before minutes of measuring."""
    if path.suffix != ".py":
        raise ValueError(f"`--save` must be a Python file (.py), got `{path}`.")
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(
            f"`--save` must be a file in a folder that exists, got `{path}`: there is no folder "
            f"`{folder}`. Create it, or save the plan somewhere else."
        )
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"`--save` must be a file that can be written, got `{path}`. Save the plan somewhere else.")


def _numbers_of_microbatches(config, devices: int) -> list[int]:
    """The default numbers to try: 1, 2, 4 and 8 per device, and the configuration's own number."""
    pipeline = config.pipeline
    wanted = {devices * n for n in (1, 2, 4, 8)}
    wanted.add(pipeline.num_microbatches * config.mesh.data)
    fitting = [n for n in sorted(wanted) if config.batch_size % n == 0]
    if not fitting:
        raise ValueError(
            f"none of the numbers of microbatches {sorted(wanted)} divides the batch size, {config.batch_size}. Name "
            "others: `--microbatches 5,10`."
        )
    return fitting


def _profiles_of_first(name: str, config, numbers, args) -> list:
    """The profiles that process 0 has measured, in every process."""
    from jpipe.plan import Profile
    from train.planned import shared_profiles
    from train.processes import from_first

    def texts() -> list[str]:
        whole = _profiles(name, config, numbers, args)
        return [profile.text() for profile in [*whole, *shared_profiles(whole, config, args.axes, args.devices)]]

    measured = from_first(texts, "profile", _LIMIT_SECONDS)
    return [Profile.from_json(json.loads(text), "process 0") for text in measured]


def _profiles(name: str, config, numbers, args) -> list:
    """One profile per number of microbatches, measured on all devices of this process at the same time."""
    import jax

    import jpipe
    from jpipe.plan import PROGRAMS
    from train.planned import batch_of, one_stage

    batch = batch_of(config)
    folder = pathlib.Path(args.profiles)
    folder.mkdir(parents=True, exist_ok=True)
    devices = jax.local_devices()[: args.devices]
    pipe = one_stage(config, jpipe.make_mesh(stage=1, devices=devices))
    profiles: list = []
    for number in numbers:
        size = config.batch_size // number
        cache = folder / f"{name}-{size}-on-{len(devices)}.json"
        # An update does not depend on the microbatch: it is measured once, for all sizes.
        programs = [p for p in PROGRAMS if p != "update" or not profiles]
        profile = pipe.profile(
            batch,
            num_microbatches=number,
            programs=programs,
            min_seconds=_MIN_SECONDS,
            devices=devices,
            cache=cache,
        )
        if profile.layers[0].update is None:
            profile = profile.with_updates_of(profiles[0])
            profile.save(cache)
        profiles.append(profile)
    return profiles


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if "jax" in sys.modules:  # graphs are planned without it
        from train.processes import leave

        leave(code)
    sys.exit(code)
