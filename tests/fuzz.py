"""Random models, schedules, options, optimizers, meshes and batches against plain JAX.

    python tests/fuzz.py --minutes 60
    python tests/fuzz.py --seed 17
    python tests/fuzz.py --case '{"layers": ["norm", "dense"], "S": 2}'
    python tests/fuzz.py --pairs LOG ...

The first draws cases until the time is over, and shrinks each that fails; the others run one case. A case fails if its
numbers are not those of `fuzz_oracle.py`, or if anything but `ValueError` before a compile refuses it. The last reads
what the first has printed, and says which features have been together in a case that is equal.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # pytest does both
    sys.path[:0] = [str(ROOT)]
    __import__("conftest")

# ruff: noqa: E402
import fuzz_model
import fuzz_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
from fuzz_cases import PLAIN_OPTIMIZERS, Case, draw, features, smaller, valid
from fuzz_pipelines import (
    batches_of,
    delays_of,
    make_pipeline,
    pipeline_layers,
    schedule_of,
)

import jpipe

# -- One case


class Refused(Exception):
    """The library refused a case, in words and before a compile."""


class Differs(Exception):
    """A case computed something else than its oracle."""


_compiled = 0


def _count(event: str, *_, **__) -> None:
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def start(case: Case, key, batch):
    """A pipeline and its first state."""
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    layers = pipeline_layers(case, key)
    with refusals(case):
        pipe = make_pipeline(case, layers, schedule_of(case))
        return pipe, pipe.init(key, abstract)


@contextlib.contextmanager
def refusals(case: Case):
    """Errors of the library become `Refused`; not those of JAX about what the library gave it, nor those after a
    compile.
    """
    before = _compiled
    try:
        yield
    except ValueError as error:
        # With axes that XLA splits, layers are compiled alone, to see how.
        late = _compiled != before and case.fsdp * case.model == 1
        if late or "object has no attribute" in str(error):
            raise
        raise Refused(" ".join(str(error).split())) from error


def close(what: str, got, want, case: Case, exact=None) -> None:
    """Compares two trees.

    Args:
      exact: what would be wanted without a compute dtype. Rounding in plain Flax has moved each array by its distance
        from this, and rounds elsewhere in the pipeline: both are right up to that.
    """
    moved = []
    if exact is not None:
        moved = [
            np.abs(np.asarray(a, np.complex128) - np.asarray(b)).max(initial=0)
            for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(exact))
        ]
    got, want = (jax.tree.map(np.asarray, jax.device_get(tree)) for tree in (got, want))
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise Differs(f"{what}: {jax.tree.structure(got)}, want {jax.tree.structure(want)}")
    leaves = zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got))
    for n, ((path, b), a) in enumerate(leaves):
        name = f"{what}{jax.tree_util.keystr(path)}"
        if a.shape != b.shape:
            raise Differs(f"{name}: shape {a.shape}, want {b.shape}")
        single = a.dtype in (np.float32, np.complex64)
        tolerance = max(case.tolerance, 2e-5) if single else case.tolerance
        kind = np.complex128 if jnp.iscomplexobj(b) else np.float64
        a, b = a.astype(kind), b.astype(kind)
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            raise Differs(f"{name}: got {a}, want {b}")
        scale = max(np.abs(b[finite]).max(initial=0), 1e-2)
        error = np.abs(a - b)[finite].max(initial=0) / scale
        rounding = 2 * moved[n] / scale if moved else 0
        if not error <= max(tolerance, rounding):
            raise Differs(f"{name}: error {error:.1e} of {scale:.1e}")


def check(case: Case) -> None:
    """Runs a case against its oracle.

    Raises:
      Refused: the library refused the case, in words.
      Differs: the numbers are others.
      Exception: of any other kind, the library's.
    """
    with jax.enable_x64(case.x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check(case)


def sum_of_losses(metrics) -> float:
    """Over the microbatches that a step has finished, counted once for all replicas."""
    count = int(metrics["num_microbatches"])
    return float(metrics["loss"]) * count if count else 0.0


def part_of(case: Case, pipe, batch, first: int) -> oracle.Part:
    """How a pipeline trains from a minibatch on."""
    starts = [0]
    for record in pipe.partition(batch):
        starts.append(starts[-1] + len(range(*record.layers)))
    if case.vocabulary:  # synchronous, so it does not matter where stages begin
        starts = [*range(case.S), len(case.names)]
    return oracle.Part(first, starts, *delays_of(case))


def in_another_layout(case: Case) -> Case:
    """The case with another number of stages and, if it is synchronous, another schedule."""
    S = case.S - 1 if case.S > 1 else 2
    schedule = case.schedule
    if not case.asynchronous:
        schedule = "gpipe" if "one_f_one_b" in schedule else "one_f_one_b/paired"
    needs = {"gradients": case.data > 1, "messages": S > 1}
    return dataclasses.replace(
        case,
        schedule=schedule,
        S=S,
        copies=(),
        cut=0,
        shard_optimizer=case.shard_optimizer and case.data > 1,
        compress=tuple(c for c in case.compress if needs[c.partition("/")[0]]),
    )


def saved_and_restored(case: Case, key, state, batch):
    """A pipeline of a case, and the state in it, by way of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        with jpipe.Checkpoints(folder) as checkpoints:
            checkpoints.save(1, state)
        layers = pipeline_layers(case, key)
        with refusals(case):
            pipe = make_pipeline(case, layers, schedule_of(case))
        return pipe, jpipe.Checkpoints(folder).restore(pipe, batch).state


def _check(case: Case) -> None:
    key = jax.random.key(case.seed)
    batches = batches_of(case, case.steps, case.rows * case.N * case.data)
    pipe, state = start(case, key, batches[0])
    params, mutable = pipe.get_params(state), pipe.get_mutable_state(state)
    model = fuzz_model.Plain(case, key)
    if case.seed % 4 == 0:  # the factories' random numbers take long to compile
        first = [
            layer.first() if isinstance(layer, fuzz_model.NNXLayer) else given
            for layer, given in zip(model.layers, zip(params, mutable))
        ]
        made, kept = zip(*first)
        close("initial weights", params, oracle.tied(case, list(made)), case)
        close("initial state", mutable, list(kept), case)
    middle = case.steps // 2 if case.middle else None
    parts, steps = [part_of(case, pipe, batches[0], 0)], []
    total, skipped, later = 0.0, [np.zeros(case.S, int)], case
    for k, batch in enumerate(batches):
        if k == middle:
            if case.middle == "moved":
                state, metrics = pipe.flush(state)
                total += sum_of_losses(metrics)
                skipped[-1] += np.asarray(metrics["skipped_updates"])
                later = in_another_layout(case)
                skipped.append(np.zeros(later.S, int))
            pipe, state = saved_and_restored(later, key, state, batch)
            if case.middle == "moved":
                parts.append(part_of(later, pipe, batch, k))
        state, metrics = pipe.step(state, batch)
        steps.append(jax.device_get(metrics))
        total += sum_of_losses(metrics)
        skipped[-1] += np.asarray(metrics["skipped_updates"])
    state, metrics = pipe.flush(state)
    total += sum_of_losses(metrics)
    skipped[-1] += np.asarray(metrics["skipped_updates"])

    optimizer = PLAIN_OPTIMIZERS[case.optimizer]()
    trained = oracle.train(model, parts, optimizer, params, mutable, batches)
    exact = None
    if case.compute:
        model_in_full = fuzz_model.Plain(dataclasses.replace(case, compute=""), key)
        exact = oracle.train(model_in_full, parts, optimizer, params, mutable, batches)
    for k, metrics in enumerate([] if case.asynchronous else steps):
        close(f"loss of step {k}", metrics["loss"], trained.losses[k], case)
        if "gradients" not in case.compress:
            norm = trained.norms[k]
            close(f"norm of step {k}", metrics["gradient_norm"], norm, case)
        if case.loss == "aux":
            close(f"aux of step {k}", metrics["aux"]["squares"], trained.auxes[k], case)
        if case.scale_moves:
            close(f"scale of step {k}", metrics["loss_scale"], trained.scales[k], case)
    if case.asynchronous and case.loss != "weighted":
        close("losses", total / case.N, sum(trained.losses), case)
    firsts = [part.first for part in parts]
    for got, *ends in zip(skipped, firsts, [*firsts[1:], case.steps], strict=True):
        expected = np.sum(trained.skipped[slice(*ends)], axis=0)
        if got.tolist() != expected.tolist():
            raise Differs(f"skipped updates: {got}, want {expected}")
    want, want_state = trained.params, trained.state
    of_weights, of_state = (exact.params, exact.state) if exact else (None, None)
    close("weights", pipe.get_params(state), want, case, of_weights)
    close("state", pipe.get_mutable_state(state), want_state, case, of_state)
    after(case, pipe, state, model, want, want_state)


def after(case: Case, pipe, state, model, params, mutable) -> None:
    """What follows training: outputs and loss of a batch of another size, and another pipeline."""
    (batch,) = batches_of(dataclasses.replace(case, seed=case.seed + 1), 1, 5)
    if {"predict", "evaluate", "adopt"}.isdisjoint(case.then):
        return
    outputs = jax.jit(lambda p, s: fuzz_model.outputs_of(model, p, s, batch))(params, mutable)
    if "adopt" in case.then:
        simple = dataclasses.replace(
            case, schedule="gpipe", S=1, copies=(), cut=0, data=1, fsdp=1, model=1, N=1,
            shard_optimizer=False, compress=(), offload=(),
        )  # fmt: skip
        layers = pipeline_layers(case, jax.random.key(case.seed))
        other = make_pipeline(simple, layers, schedule_of(simple))
        pipe, state = other, other.adopt(state)
        close("adopted weights", pipe.get_params(state), params, case)
    if "predict" in case.then:
        close("predict", pipe.predict(state, batch), outputs, case)
    if "evaluate" in case.then:
        value, weight, _ = fuzz_model.loss_parts(case, outputs, batch, 0.0)
        close("evaluate", pipe.evaluate(state, batch)["loss"], value / weight, case)


# -- Many cases, and smaller ones


def outcome(case: Case) -> tuple[str, str]:
    """ "equal", "refused" or "failed", and why."""
    try:
        check(case)
    except Refused as error:
        return "refused", str(error)
    except Differs as error:
        return "failed", f"differs: {error}"
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return "failed", f"{type(error).__name__}: {error}\n{text}"
    return "equal", ""


def kind_of(reason: str) -> str:
    """Failures of one kind have this in common."""
    return reason.split()[0] + ("" if "differs" in reason[:8] else reason[:40])


def shrunken(case: Case, reason: str, seconds: float = 300) -> tuple[Case, str]:
    """The smallest case found that fails in the same way."""
    until, again = time.monotonic() + seconds, True
    while again:
        again = False
        for candidate in smaller(case):
            if time.monotonic() > until:
                return case, reason
            if not valid(candidate):
                continue
            result, why = outcome(candidate)
            if result == "failed" and kind_of(why) == kind_of(reason):
                case, reason, again = candidate, why, True
                break
    return case, reason


def pairs(logs: Sequence[str]) -> str:
    """Which features have been together in cases, by what a run has printed."""
    seen: dict[str, set] = {"equal": set(), "refused": set(), "failed": set()}
    counts, every, result = collections.Counter(), set(), ""
    for line in itertools.chain(*(pathlib.Path(log).open() for log in logs)):
        words = line.split()
        if line.startswith("seed ") and len(words) > 2:
            result = words[2]
            counts[result] += 1
        elif line.startswith("  case ") and result:
            having = sorted(features(Case.from_text(line.removeprefix("  case "))))
            every.update(having)
            seen[result].update(itertools.combinations(having, 2))
            result = ""
    total = set(itertools.combinations(sorted(every), 2))
    equal, tried = seen["equal"], set().union(*seen.values())
    never: dict[str, list] = {name: [] for name in sorted(every)}
    for a, b in sorted(total - equal):
        never[a].append(b + "*" * ((a, b) in tried))
    lines = [f"{a}: {', '.join(others)}" for a, others in never.items() if others]
    return "\n".join(
        [
            f"{dict(counts)} cases, {len(every)} features",
            f"{len(total)} pairs: {len(equal)} in a case that is equal, {len(tried - equal)} only in others (*)",
            "Not in a case that is equal:",
            *lines,
        ]
    )


def run(seeds, shrink: float) -> collections.Counter:
    """Runs the cases of seeds, and prints what they came to."""
    counts: collections.Counter = collections.Counter()
    for number, seed in enumerate(seeds):
        case, begin = draw(seed), time.monotonic()
        print(f"seed {seed}", end=" ", flush=True)
        result, reason = outcome(case)
        counts[result] += 1
        seconds = time.monotonic() - begin
        print(f"{result} {seconds:.0f} s {reason.splitlines()[0][:300] if reason else ''}", flush=True)  # fmt: skip
        print(f"  case {case.text()}", flush=True)
        if result == "failed":
            if shrink:
                case, reason = shrunken(case, reason, shrink)
                print(f"  python tests/fuzz.py --case '{case.text()}'\n  {reason}", flush=True)  # fmt: skip
        if number % 10 == 9:
            jax.clear_caches()
    return counts


def endless(minutes: float, first: int, shrink: float) -> int:
    """Runs seeds in processes of their own, a few in each, so that a crash is a failure of one seed."""
    until, total = time.monotonic() + 60 * minutes, collections.Counter()
    while time.monotonic() < until:
        command = [sys.executable, os.fspath(ROOT / "tests" / "fuzz.py")]
        command += ["--seed", str(first), "--count", "20", "--shrink", str(shrink)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line if line.startswith("seed ") else last
                for word in ("equal", "refused", "failed"):
                    total[word] += line.startswith("seed ") and f" {word} " in line
        seed = int(last.split()[1]) if last else first
        if process.returncode < 0:
            print(f"failed: seed {seed} ended its process by signal {-process.returncode}", flush=True)  # fmt: skip
            total["failed"] += 1
        first = seed + 1
        print(dict(total), flush=True)
    return total["failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--minutes", type=float, help="how long new seeds are run")
    parser.add_argument("--shrink", type=float, default=300, help="seconds for a smaller case; 0: none")
    parser.add_argument("--pairs", nargs="+", help="logs of `--minutes`")
    arguments = parser.parse_args()
    if arguments.pairs:
        print(pairs(arguments.pairs))
        return 0
    if arguments.case:
        result, reason = outcome(Case.from_text(arguments.case))
        print(result, reason)
        return int(result == "failed")
    if arguments.minutes:
        first = int(time.time()) if arguments.seed is None else arguments.seed
        return int(endless(arguments.minutes, first, arguments.shrink) > 0)
    first = arguments.seed or 0
    counts = run(range(first, first + arguments.count), arguments.shrink)
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
