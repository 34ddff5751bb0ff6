"""Plans of a mixture of 67 billion weights on pods that are only described: memory, bytes, predicted step.

    python benchmarks/mixture_plan.py
    python benchmarks/mixture_plan.py --json

Nothing is measured or compiled for a pod. The layers of the model are traced on devices of the CPU that stand for the
group of a stage. They give the bytes of weights, stashes and exchanges, and the FLOPs of products. The planner prices
them. So every time is a prediction, of a machine of which this is assumed:

- A device computes at the share of its peak that the row `plain` of `gpu.json` reached on one H100, whose seconds were
  measured: a transformer of 24 blocks of dim 1024, products and everything between them. A v5p gets the same share. A
  layer of experts has smaller products and moves rows beside them, which is not measured.
- An H100 sends 450 GB/s to the others of its 8 (NVLink, half of the 900 GB/s of both directions) and 50 GB/s to more
  distant ones (400 Gb/s). A v5p sends 100 GB/s along an axis of its torus: two of six links, 4,800 Gb/s together in
  both directions. Rows that pass a chip on their way are not counted. Messages have no latency.
- Experts are balanced: with capacity 1, each gets the mean number of choices of a sequence.
- An update reads and writes its arrays once at the speed of the device's memory. Ticks and steps cost nothing more.

The model, by arithmetic alone: L = 32 blocks of dim D = 2,048 with E = 96 experts of F = 5,248 hidden units, K = 2 for
each token, V = 32,000 tokens, T = 4,096 positions. Weights: L (4 D^2 + 2 D F E) + 2 D V = 66.7 billion; those of the
products of a token: L (4 D^2 + 2 D F K) + D V = 1.98 billion. A minibatch has 256 sequences for each 64 devices. FLOPs
are 6 for each of these weights and token, and 12 L D T for attention, as in `gpu_sizes.py`: those that the causal mask
hides count too. Recomputed ones do not.

Columns: the layout, schedule and recomputation; bytes of a device and whether they fit; what the busiest device sends
in a step along "expert", rows by all-to-alls and sums of gradients; the seconds of both; the share of them under
compute if the devices overlap them; and the step without and with overlap. `mixture_overlap.py` says which of them a
compiled program overlaps.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
from gpu_sizes import PEAK_FLOPS, Sizes, model_flops

import jpipe
from jpipe.layers.equations import jaxprs_in
from jpipe.plan import Machine, Prediction, Profile, Seconds, balance_by_time, predict
from jpipe.schedule import Schedule
from models import MixtureTransformer

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = MixtureTransformer(
    vocab_size=32_000,
    seq_len=4_096,
    num_blocks=32,
    dim=2_048,
    num_heads=16,
    num_experts=96,
    num_chosen=2,
    expert_dim=5_248,
    capacity=1.0,
)
SEQUENCES = 256  # of 64 devices
PUBLIC = "public figure, measured: 64 H100s, 8 stages x 8 experts, 603,000 tokens/s, 19.5% of peak"


@dataclasses.dataclass(frozen=True)
class Pod:
    """Described devices.

    Attributes:
      name: of the table.
      machine: the devices.
      peak: FLOPs per second of dense bfloat16 products.
      memory_bandwidth: bytes per second of a device's memory.
      layouts: stages, devices of "expert", replicas.
    """

    name: str
    machine: Machine
    peak: float
    memory_bandwidth: float
    layouts: tuple[tuple[int, int, int], ...]


PODS = {
    "h100": Pod(
        "64 H100",
        Machine(64, 80e9, (450e9, 50e9), devices_per_server=8),
        PEAK_FLOPS["NVIDIA H100 80GB HBM3"],
        3.35e12,
        ((8, 8, 1), (4, 8, 2), (4, 16, 1)),
    ),
    "v5p": Pod(
        "256 v5p",
        Machine(256, 95e9, (100e9, 100e9), hides_sums=False),  # as compiled programs of TPUs
        459e12,
        2.765e12,
        ((8, 8, 4), (4, 8, 8), (4, 16, 4)),
    ),
}
S = jpipe.schedules
SCHEDULES: dict[str, Any] = {
    "one_f_one_b": S.one_f_one_b,
    "one_f_one_b, overlapped": functools.partial(S.one_f_one_b, ticks="overlapped"),
    "interleaved": lambda D, N: S.interleaved(2 * D, N),
    "interleaved, overlapped": lambda D, N: S.interleaved(2 * D, N, ticks="overlapped"),
    "zero_bubble_h1": S.zero_bubble_h1,
    "zero_bubble_v": lambda D, N: S.zero_bubble_v(2 * D, N),
    "dual_pipe_v": lambda D, N: S.dual_pipe_v(2 * D, N),
}


# -- The model


def num_weights(experts: int) -> int:
    """Weights with so many experts of each block."""
    m = MODEL
    return m.num_blocks * (4 * m.dim**2 + 2 * m.dim * m.expert_dim * experts) + m.dim * m.vocab_size


def flops_of_token() -> float:
    """FLOPs of a step for each token."""
    return 6 * num_weights(MODEL.num_chosen) + 12 * MODEL.num_blocks * MODEL.dim * MODEL.seq_len


def share_of_peak() -> tuple[float, str]:
    """The share of peak of the measured row, and what it was measured on."""
    measured = json.loads((ROOT / "benchmarks/gpu.json").read_text())
    names = {field.name for field in dataclasses.fields(Sizes)}
    sizes = Sizes(**{name: value for name, value in measured["sizes"].items() if name in names})
    seconds = measured["rows"]["plain"]["seconds"]
    return model_flops(sizes) / seconds / PEAK_FLOPS[measured["device"]], f"{measured['device']}, {measured['date']}"


def pipeline(num_experts: int) -> jpipe.Pipeline:
    """The model with one of its equal blocks, as one stage of so many devices along "expert"."""
    short = dataclasses.replace(MODEL, num_blocks=1)
    return jpipe.Pipeline(
        short.layers(),
        loss=short.loss(),
        has_aux=True,
        optimizer=optax.adamw(1e-3),
        schedule=S.gpipe(1, 1),
        mesh=jpipe.make_mesh(stage=1, expert=num_experts),
        compute_dtype="bfloat16",
    )


def batch_of(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((rows, MODEL.seq_len), np.int32)
    return {"inputs": tokens, "labels": tokens}


@functools.cache
def counted(rows: int) -> tuple[Profile, list[dict[str, float]]]:
    """The bytes of whole layers for microbatches of so many sequences, and the FLOPs of products of each program."""
    pipe = pipeline(1)
    profile = pipe.profile(batch_of(rows), programs=())
    settings = pipe._settings
    traced = settings.trace(settings.microbatch(batch_of(rows)), jax.config.jax_default_prng_impl)
    flops = [flops_of(kind) for kind in (*traced.layer_kinds, traced.loss)]
    return profile, [flops[k] for k in (*traced.kind_of_layer, -1)]


def flops_of(kind: Any) -> dict[str, float]:
    """FLOPs of the products of each program of a layer."""
    flops = {name: products(jax.make_jaxpr(call)(*arguments).jaxpr) for name, (call, arguments) in kind.calls.items()}
    return flops | {"forward_and_stash": flops["forward"]}


def products(jaxpr: Any) -> float:
    """FLOPs of all products of matrices of a jaxpr."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += (
                2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            )
        inner = [products(j) for j in jaxprs_in(eqn)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += max(inner, default=0.0) if eqn.primitive.name == "cond" else times * sum(inner)
    return total


@functools.cache
def profile_on(pod: str, num_experts: int) -> Profile:
    """The costs of a device of a group. Each of its devices has one sequence of a microbatch."""
    whole, flops = counted(num_experts)
    described = PODS[pod]
    rate = described.peak * share_of_peak()[0]

    def timed(layer: Any, programs: dict[str, float]) -> Any:
        moved = 2 * (layer.parameter_bytes + layer.optimizer_bytes) + layer.gradient_bytes
        seconds = {name: Seconds(number / rate) for name, number in programs.items()}
        return dataclasses.replace(layer, **seconds, update=Seconds(moved / described.memory_bandwidth))

    layers = tuple(map(timed, whole.layers, flops))
    timed_whole = dataclasses.replace(whole, layers=layers, loss=timed(whole.loss, flops[-1]))
    short = pipeline(num_experts).profile(batch_of(num_experts), whole=timed_whole)
    first, block, last = short.layers
    return dataclasses.replace(short, layers=(first, *[block] * MODEL.num_blocks, last))


# -- The rows


def predicted(pod: Pod, profile: Profile, schedule: Schedule, replicas: int, overlaps: bool) -> Prediction:
    machine = dataclasses.replace(pod.machine, overlaps=overlaps)
    cut = balance_by_time(profile, schedule.num_stages, split=schedule.splits_backward)
    return predict(schedule, profile, cut, machine, num_replicas=replicas, shard_optimizer=replicas > 1)


def row(pod: str, layout: tuple[int, int, int], name: str, recompute: str) -> dict[str, Any]:
    """A plan with and without overlap."""
    described = PODS[pod]
    stages, num_experts, replicas = layout
    profile = dataclasses.replace(profile_on(pod, num_experts), recompute=recompute)
    sequences = SEQUENCES * described.machine.num_devices // 64
    schedule = SCHEDULES[name](stages, sequences // (num_experts * replicas))
    plain, hidden = (predicted(described, profile, schedule, replicas, overlaps) for overlaps in (False, True))
    operations = ("forward", "input_grad", "weight_grad") if schedule.splits_backward else ("forward", "backward")
    d = int(hidden.timing.exchange.argmax())
    sent = {"all_to_all": 0.0, "sum": 0.0}
    columns = {int(s) for s in schedule.stage[schedule.device == d]}
    cut = [0, *balance_by_time(profile, schedule.num_stages, split=schedule.splits_backward), len(profile.layers)]
    for operation in operations:
        for s in columns:
            for exchanges in profile.exchanges(operation)[cut[s] : cut[s + 1]]:
                for exchange in exchanges:
                    sent[exchange.kind] += exchange.num_bytes * schedule.num_microbatches
    tokens = sequences * MODEL.seq_len
    useful = tokens * flops_of_token() / described.machine.num_devices / described.peak
    return {
        "pod": described.name,
        "stage x expert x data": " x ".join(map(str, layout)),
        "schedule": name,
        "recompute": recompute,
        "GB": plain.num_bytes / 1e9,
        "fits": plain.num_bytes <= described.machine.memory_limit,
        "rows sent, GB": sent["all_to_all"] / 1e9,
        "sums sent, GB": sent["sum"] / 1e9,
        "sent in, s": float(plain.timing.exchange[d]),
        "under compute": 1 - float(hidden.timing.exposed[d] / hidden.timing.exchange[d]),
        "step, s": plain.seconds,
        "step with overlap, s": hidden.seconds,
        "tokens/s": tokens / plain.seconds,
        "with overlap": tokens / hidden.seconds,
        "of peak": useful / plain.seconds,
        "of peak with overlap": useful / hidden.seconds,
    }


def rows(pods: list[str]) -> list[dict[str, Any]]:
    """Every schedule on the first layout of a pod, with and without recomputation; two of them on the others."""
    plans = []
    for pod in pods:
        first, *others = PODS[pod].layouts
        plans += [(pod, first, name, recompute) for name in SCHEDULES for recompute in ("none", "full")]
        plans += [(pod, layout, name, "full") for layout in others for name in ("one_f_one_b", "dual_pipe_v")]
    return [row(*plan) for plan in plans]


def table(found: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    shown = [
        "pod, stage x expert x data | schedule | recompute | GB a device | rows sent, GB | sums sent, GB | "
        "sent in, s | under compute | step, s: without overlap | with | tokens/s: without | with | "
        "of peak: without | with"
    ]
    shown.append(" | ".join(["---"] * 14))
    for r in found:
        shown.append(
            f"{r['pod']}, {r['stage x expert x data']} | `{r['schedule']}` | {r['recompute']} | {r['GB']:.1f}"
            f"{'' if r['fits'] else ', does not fit'} | {r['rows sent, GB']:.1f} | {r['sums sent, GB']:.1f} | "
            f"{r['sent in, s']:.2f} | {r['under compute']:z.0%} | {r['step, s']:.2f} | "
            f"{r['step with overlap, s']:.2f} | "
            f"{r['tokens/s']:,.0f} | {r['with overlap']:,.0f} | {r['of peak']:.1%} | {r['of peak with overlap']:.1%}"
        )
    return "\n".join(f"| {line} |" for line in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pod", choices=PODS, action="append", help="default: all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 16)
    found = rows(args.pod or list(PODS))
    if args.json:
        print(json.dumps(found))
        return
    share, where = share_of_peak()
    both = num_weights(MODEL.num_experts) + MODEL.dim * MODEL.vocab_size, num_weights(MODEL.num_chosen)
    print(
        f"weights {both[0] / 1e9:.1f} billion, of a token {both[1] / 1e9:.2f}; {flops_of_token() / 1e9:.1f} GFLOP/token"
    )
    print(f"assumed: {share:.1%} of peak in compute, as measured ({where}). All rows are predictions.")
    print(PUBLIC)
    print(table(found))


if __name__ == "__main__":
    main()
