"""Compiles training steps for nodes of H100s on a machine without a GPU, and reads the programs.

    python benchmarks/compile_gpu.py --setup    # once: the environment, in benchmarks/gpu_env
    python benchmarks/compile_gpu.py            # all rows: many hours on two cores
    python benchmarks/compile_gpu.py --models ends --schedules plain 1f1b --stages 4
    python benchmarks/compile_gpu.py --further  # other meshes, options and models, on 4 stages
    python benchmarks/compile_gpu.py --small --models equal --schedules 1f1b --stages 2
    python benchmarks/compile_gpu.py --refresh  # brings the saved rows to this commit
    python benchmarks/compile_gpu.py --redraw   # the table of the saved rows

Each row is a process of its own. Rows are saved in `--out` after each compilation, and replace the
saved rows of the same program. Rows with other sizes than the default ones, or of another checkout
(`--root`), are saved only if `--out` is given.

`--refresh` lowers the program of each saved row, which takes a part of the time. It compiles those that differ from
the saved one, in their text, their options, the version of JAX or the reader. All others keep their numbers and get
the commit and the date.

Rows:

- `plain`: a jitted scan over microbatches on one device, with the whole model and equal layers in a scan;
- `plain-unrolled`: the same with layers one after another, as most users of GPUs write it;
- `one-stage`: a pipeline of one stage, for models of `--stages 1`;
- all others: a pipeline on as many devices as stages. `interleaved` and `zb-v` have two stages per
  device.

The README of this folder says what the columns mean.
"""

import argparse
import collections
import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

import gpu_program
import gpu_texts
from checkout import commit
from gpu_program import Activity, Step
from gpu_rows import (
    MODELS,
    SCHEDULES,
    SIZES,
    SMALL,
    USUAL,
    USUALLY,
    VARIANTS,
    further_rows,
    key,
    merged,
    request_of,
    saved,
    table,
    wanted_rows,
)

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = HERE / "gpu_env"
REQUIREMENTS = HERE / "requirements-gpu.txt"
RESULTS = HERE / "compile_gpu.json"

# No device can try which kernel is fastest, so matrix products are calls of cuBLASLt. The kernels
# themselves are not read, so XLA need not optimise them.
BASE_FLAGS = (
    "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# What stands behind the flags of a row.
WITHOUT_GRAPHS = "without CUDA graphs"
LETTERS = {"forward": "F", "backward": "B", "weight_grad": "W"}


# -- The environment


def set_up() -> None:
    """Makes the environment with the compiler."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    pip = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-r", REQUIREMENTS], check=True)


def interpreter() -> pathlib.Path | None:
    """The Python that has the compiler: this one, or of the environment; None if neither has it."""
    if importlib.util.find_spec("jax_cuda12_plugin") is not None:
        return pathlib.Path(sys.executable)
    python = ENVIRONMENT / "bin" / "python"
    return python if python.exists() else None


# -- One row, in a process of its own


def compile_row(request: dict) -> dict:
    """Compiles one program and reads it.

    Args:
      request: "model", "schedule", "stages", "variant", "sizes", "without_graphs", "dump", the folder that XLA writes
        to, and "known", the fingerprint of a program that is not compiled again.

    Returns:
      The numbers of the row; nothing if the program is the known one.
    """
    import gpu_plain
    import gpu_steps
    import jax

    sizes = gpu_steps.Sizes(**request["sizes"])
    num_devices = request["stages"]
    case = gpu_steps.MODELS[request["model"]](num_devices, sizes)
    name, options = SCHEDULES[request["schedule"]]
    variant = VARIANTS[request["variant"]]
    if variant.kernel:
        gpu_steps.let_attention_have_its_kernel()
    schedule, arrivals = None, {}
    start = time.perf_counter()
    if name:
        without_graphs = request["without_graphs"]
        pipe = gpu_steps.pipeline(
            case, sizes, name, options, num_devices, variant=variant, without_graphs=without_graphs
        )
        schedule = pipe.schedule
        lowered = pipe.lower(case.batch)
        arrivals = pipe._program(case.batch).engine.lowered.arrivals
    else:
        lowered = gpu_plain.plain(case, sizes, variant, **options)
    program = fingerprint(lowered)
    if program == request["known"]:
        return {}
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    dump = pathlib.Path(request["dump"])
    (dump / "compiled.txt").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    return {
        "jax": jax.__version__,
        "program": program,
        "seconds": round(seconds, 1),
        "temporaries_gb": round(memory.temp_size_in_bytes / 1e9, 4),
        "state_gb": round(memory.alias_size_in_bytes / 1e9, 4),
        **read(Step.read(compiled.as_text(), dump), schedule, arrivals),
    }


def fingerprint(lowered) -> str:
    """A hash of all that the numbers of a row follow from: the program, options, the versions and the reader.

    Args:
      lowered: a `jax.stages.Lowered`.
    """
    import jax

    options = sorted(lowered._lowering._compiler_options_kvs)
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "xla_dump" not in flag]
    digest = hashlib.sha256(repr([jax.__version__, options, flags]).encode())
    digest.update(lowered.as_text().encode())
    for part in (gpu_program, gpu_texts, read, busy_ticks, _shares):
        digest.update(inspect.getsource(part).encode())
    return digest.hexdigest()[:16]


def read(step: Step, schedule, arrivals: Mapping) -> dict:
    """The part of a row that comes from the program's text.

    Args:
      step: the program.
      schedule: its table; None for the plain scan.
      arrivals: operation -> `jpipe.lowering.arrivals.Arrivals` before it, where devices choose their messages.
    """
    if schedule is None:
        kinds: list = [(0, {Activity(): 1.0})]
        busy, num_updates = {"microbatch": Activity()}, 0
    else:
        from jpipe.schedule import IDLE

        kinds = [
            (stage, {a._replace(operations=frozenset((name, stage) for name in names)): n for a, n in shares.items()})
            for stage in range(schedule.num_stages)
            for names, shares in busy_ticks(schedule, stage, arrivals).items()
        ]
        in_the_middle = schedule.device == schedule.num_devices // 2
        busy = {
            "+".join(LETTERS[name] for name in names): max(shares, key=shares.__getitem__)
            for names, shares in busy_ticks(schedule, min(schedule.stage[in_the_middle]), arrivals).items()
        }
        num_updates = int((schedule.update != IDLE).any(axis=1).sum())
    loops = step.tick_loops()

    def tick(activity: Activity) -> dict:
        """The tick of the loop that does most: a ramp's tick leaves operations out."""
        works = [step.tick(loop, activity) for loop in loops]
        fullest = max(works, key=lambda w: (w.products, w.kernels, w.copied))
        return {name: round(value, 3) for name, value in vars(fullest).items()}

    ticks = {label: tick(activity) for label, activity in busy.items()}
    for label, work in ticks.items():
        if not work["products"]:
            raise ValueError(
                f"the reader finds no matrix product in a tick of {label}: the scopes in "
                "`gpu_program.py` are not those of the engine. Bring them up to date."
            )
    if schedule is not None:
        ticks["idle"] = tick(Activity())
    by_stage: dict[str, dict] = {}
    for stage, shares in kinds:
        works = [(tick(activity), share) for activity, share in shares.items()]
        sums = by_stage.setdefault(str(stage), {"kernels": 0, "products": 0, "traffic": 0.0})
        by_stage[str(stage)] = {
            name: round(value + sum(share * work[name] for work, share in works), 3) for name, value in sums.items()
        }
    return {
        "num_ticks": [loop.trip_count for loop in loops],
        "ticks": ticks,
        "stages_of_microbatch": {} if schedule is None else by_stage,
        "microbatch": {
            name: round(sum(work[name] for work in by_stage.values()), 2) for name in ("kernels", "products")
        },
        "permutes": {
            label: [
                permute._replace(megabytes=round(permute.megabytes, 3))._asdict()
                for loop in loops
                for permute in step.permutes(loop, activity)
            ]
            for label, activity in busy.items()
        },
        "host_waits_step": step.host_waits(num_updates),
        "unknown_loops": step.unknown_loops(),
        "one_command_buffer": step.one_command_buffer,
    }


def busy_ticks(schedule, stage: int, arrivals: Mapping) -> dict[tuple[str, ...], dict[Activity, float]]:
    """The kinds of ticks in which the device of a stage is busy.

    Args:
      schedule: the table.
      stage: the stage.
      arrivals: see `read`.

    Returns:
      Operations of a tick -> what the device does in it: each set of messages that arrive there, with its share of
      these ticks. A kind whose operations are a part of another kind's is left out. A device of several stages runs
      the operations of a tick on the stages that it does so most often.
    """
    from jpipe.schedule import IDLE

    device = schedule.device[schedule.column_of_stage[stage]]
    columns = [c for c in range(schedule.num_columns) if schedule.device[c] == device]
    seen: dict[tuple[str, ...], collections.Counter] = {}
    for t in range(schedule.num_ticks):
        work = [
            (name, int(schedule.stage[c])) for name in LETTERS for c in columns if getattr(schedule, name)[t, c] != IDLE
        ]
        names = tuple(name for name in LETTERS if name in dict(work))
        receives = frozenset(before for before, each in arrivals.items() if each.branch[t, device] >= 0)
        seen.setdefault(names, collections.Counter())[frozenset(work), receives] += 1
    return {
        names: _shares(activities)
        for names, activities in sorted(seen.items(), key=_place)
        if not any(set(names) < set(others) for others in seen)
    }


def _shares(activities: collections.Counter) -> dict[Activity, float]:
    """The share of each set of arriving messages among the ticks with the most common operations."""
    operations: collections.Counter = collections.Counter()
    for (work, _), number in activities.items():
        operations[work] += number
    (most, total), *_ = operations.most_common(1)
    return {
        Activity(work, receives=receives): number / total
        for (work, receives), number in activities.items()
        if work == most
    }


def _place(kind: tuple[tuple[str, ...], object]) -> list[int]:
    """Where a kind of ticks stands among others: forwards first."""
    return [list(LETTERS).index(name) for name in kind[0]]


# -- All rows


def compile_in_process(args: argparse.Namespace, request: dict, known: dict) -> dict:
    """The row of a request: what `compile_row` returns, or the reason why it "failed".

    Args:
      args: those of the command line.
      request: what the row is of.
      known: the saved row, whose numbers are kept if its program is still the same; empty to compile in any case.
    """
    row = request | {"date": time.strftime("%Y-%m-%d"), "commit": commit(args.root)}
    with tempfile.TemporaryDirectory() as temporary:
        dump = pathlib.Path(temporary)
        if args.keep:
            names = [request[name] for name in ("model", "schedule", "stages", "variant")]
            dump = args.keep.absolute() / re.sub(r"\W+", "-", "-".join(map(str, names))).strip("-")
            shutil.rmtree(dump, ignore_errors=True)
            dump.mkdir(parents=True)
        flags = [
            BASE_FLAGS,
            f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
            "--xla_dump_hlo_module_re=.*(run_step|plain_step).*",
            request["flags"].removesuffix(WITHOUT_GRAPHS),
        ]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(flags),
            "PYTHONPATH": str(args.root),
        }
        request = request | {
            "dump": str(dump),
            "without_graphs": request["flags"].endswith(WITHOUT_GRAPHS),
            "known": known.get("program", ""),
        }
        command = [interpreter(), __file__, "--compile", json.dumps(request)]
        try:
            process = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=args.timeout,
            )
        except subprocess.TimeoutExpired:
            return row | {"failed": f"took more than {args.timeout} s"}
        if process.returncode:
            print(process.stderr[-4000:], file=sys.stderr)
            errors = re.findall(r"^[\w.]*Error: .*", process.stderr, re.MULTILINE)
            return row | {"failed": (errors or ["no message"])[-1][:500]}
        numbers = json.loads(process.stdout.splitlines()[-1])
        return (row if numbers else known) | row | numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the environment")
    parser.add_argument("--redraw", action="store_true", help="print the saved rows")
    parser.add_argument("--models", nargs="+", default=list(USUAL), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=[USUALLY], choices=VARIANTS)
    parser.add_argument("--further", action="store_true", help="the rows of `gpu_rows.FURTHER`, on 4 stages")
    parser.add_argument("--refresh", action="store_true", help="the saved rows, where their programs changed")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--flags", default="", help="further flags of XLA")
    parser.add_argument("--without-graphs", action="store_true", help="pipelines without CUDA graphs")
    parser.add_argument("--small", action="store_true", help="small sizes, see `SMALL`")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument(
        "--root",
        type=pathlib.Path,
        default=HERE.parent,
        help="the checkout whose `jpipe` and `models` are compiled",
    )
    parser.add_argument("--out", type=pathlib.Path, help="where rows are saved")
    parser.add_argument("--keep", type=pathlib.Path, help="keep what XLA wrote, here")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds of a row")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        print(json.dumps(compile_row(json.loads(args.compile))))
        return
    if args.setup:
        set_up()
        return
    if args.redraw:
        print(table(saved(args.out or RESULTS)))
        return
    if interpreter() is None:
        parser.error("the compiler for CUDA is missing. Run this script with --setup.")
    sizes = {name: getattr(args, name) for name in SIZES}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    sizes = (SMALL if args.small else {}) | sizes
    own = args.root.resolve() == HERE.parent.resolve()
    out = args.out or (RESULTS if own and not sizes else None)
    rows = []
    flags = " ".join(filter(None, [args.flags, WITHOUT_GRAPHS * args.without_graphs]))
    requests = wanted_rows(args.models, args.schedules, args.stages, sizes, flags, args.variants)
    if args.further:
        requests = further_rows(sizes, flags, stages=4)
    known = {key(row): row for row in saved(out)} if args.refresh else {}
    if args.refresh:
        if not known:
            parser.error(
                f"--refresh brings saved rows up to date, and there are none in {out}. Leave it out, or give --out."
            )
        requests = map(request_of, known.values())
    for request in requests:
        row = compile_in_process(args, request, known.get(key(request), {}))
        rows.append(row)
        print(json.dumps(row), flush=True)
        if out:
            lines = ",\n".join(map(json.dumps, merged(saved(out), row)))
            out.write_text(f"[\n{lines}\n]\n")
    print(table(rows))


if __name__ == "__main__":
    main()
