"""Tables that a run prints before it starts."""

import itertools
import math
import platform
import textwrap
from collections.abc import Sequence
from typing import Any

import flax
import jax
import optax

import jpipe
from jpipe.memory import DeviceMemory
from jpipe.plan import (
    Candidate,
    Graph,
    Machine,
    Profile,
    Ranking,
    Skipped,
    Solution,
    size_text,
)

WIDTH = 110  # columns of what the planner prints


def versions() -> str:
    """The versions of jpipe's environment, in a line."""
    packages = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "jpipe": jpipe.__version__,
    }
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def mesh(mesh: jax.sharding.Mesh) -> str:
    """The axes of a mesh and its devices, in a line."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    kinds = ", ".join(sorted({device.device_kind for device in mesh.devices.flat}))
    return f"{axes} ({mesh.size} x {kinds})"


def partition(records: Sequence[jpipe.StageRecord]) -> str:
    """A line for each stage: its device, its layers and their weights."""
    total = sum(record.flops for record in records) or 1
    rows = [("stage", "device", "layers", "", "parameters", "bytes", "FLOPs", "seconds")]
    is_measured = all(record.seconds is not None for record in records)
    for record in records:
        first, stop = record.layers
        rows.append(
            (
                str(record.stage),
                str(record.device),
                f"{first}..{stop - 1}" if stop - first > 1 else str(first),
                _runs(record.names),
                f"{record.num_parameters:,}",
                size_text(record.parameter_bytes),
                f"{record.flops / total:.0%}",
                f"{record.seconds:.3g}" if is_measured else "",
            )
        )
    return _table(rows if is_measured else [row[:-1] for row in rows], left={3})


def shards(records: Sequence[jpipe.ShardRecord]) -> str:
    """A line for each use of memory: its bytes, and the axes of the mesh that it is split over."""
    rows = [("each device holds", "", "split over")]
    for record in records:
        axes = [axis if share > 0.995 else f"{axis} ({share:.0%} of it)" for axis, share in record.split.items()]
        size = size_text(record.num_bytes)
        rows.append((record.use, size, ", ".join(axes) or "no axis"))
    return _table(rows, left={0, 2})


def messages(records: Sequence[jpipe.MessageRecord]) -> str:
    """A line for each kind of message: its bytes with and without compression; equal neighbours are one line."""
    rows = [("message", "stages", "sent", "without compression", "ratio")]
    key = lambda r: (r.what, r.num_bytes, r.plain_bytes)  # noqa: E731
    for _, group in itertools.groupby(records, key):
        alike = list(group)
        first, last = alike[0], alike[-1]
        if first.source == first.target:
            what, places = "gradients of weights, a step", f"{first.source}"
            if last is not first:
                places += f"..{last.source}"
        else:
            what = f"{first.what}, a microbatch"
            places = f"{first.source} to {first.target}"
            if last is not first:
                places += f" .. {last.source} to {last.target}"
        rows.append(
            (
                what,
                places,
                size_text(first.num_bytes),
                size_text(first.plain_bytes),
                f"{first.ratio:.1f}",
            )
        )
    return _table(rows, left={0, 1})


def memory(memory: jpipe.Memory) -> str:
    """A line for each use of a device's memory."""
    uses = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        **({"compression": memory.compression} if memory.compression else {}),
        "activations in flight": memory.activations,
        "minibatch": memory.batch,
        "temporaries": memory.temporaries,
    }
    rows = [(use, size_text(num_bytes)) for use, num_bytes in uses.items()]
    rows.append(("in all", size_text(memory.total)))
    rows.append(("of it padding", size_text(memory.padding)))
    if memory.host:
        rows.append(("in host memory beside it", size_text(memory.host)))
    return _table(rows, left={0})


def memory_by_device(records: Sequence[DeviceMemory]) -> str:
    """A line for each device: what its stages need, and what it allocates."""
    rows = [
        ("device", "stages", "weights", "optimizer", "gradients", "activations", "temporaries", "needs", "allocates")
    ]
    for device, stages, *sizes in records:
        rows.append((str(device), " ".join(map(str, stages)), *map(size_text, sizes)))
    return _table(rows, left={1})


def profile(profile: Profile) -> str:
    """A line per run of equal layers: seconds and bytes of one of them."""
    rows = [("layers", "", "forward", "backward", "update", "weights", "stash")]
    seconds = zip(*(profile.seconds(o) for o in ("forward", "backward", "update")))
    layers = list(zip(itertools.count(), profile.layers, seconds))
    for _, same in itertools.groupby(layers, key=lambda row: row[1].kind):
        run = list(same)
        (first, layer, times), (last, *_) = run[0], run[-1]
        rows.append(
            (
                f"{first}..{last}" if last > first else str(first),
                f"{layer.name} x {len(run)}" if last > first else layer.name,
                *(f"{t * 1e3:.3f} ms" for t in times),
                size_text(layer.parameter_bytes),
                size_text(layer.stash_bytes),
            )
        )
    where = f"{profile.num_devices} x {profile.device_kind} at once, {count(profile.num_cores, 'core')}"
    return f"profile of a microbatch of {profile.microbatch_size} ({where}):\n" + _table(rows, left={1})


def machine(machine: Machine) -> str:
    """A machine, in a line."""
    words = [count(machine.num_devices, "device")]
    if machine.num_cores is not None:
        words.append(f"on {count(machine.num_cores, 'core')}")
    if machine.memory_limit < math.inf:
        words.append(f"of {size_text(machine.memory_limit)}")
    inside, across = (f"{size_text(bandwidth)}/s" for bandwidth in machine.bandwidth)
    if machine.server_size < machine.num_devices:
        words.append(f"{machine.server_size} in a server, {inside} between two of them, {across} between servers")
    else:
        words.append(f"{inside} between two")
    words.append(f"{machine.tick * 1e6:.0f} us and {machine.jitter:.1%} per tick, {machine.step * 1e3:.2f} ms per step")
    return "machine: " + ", ".join(words)


def plans(ranking: Ranking, batch_size: int, top: int) -> str:
    """Two lines for each of the first plans; then the plans that were skipped, with the reasons."""
    head = "schedule stages replicas batches size recompute ms/step samples/s bubble bytes"
    splits = any(c.num_tensor_devices > 1 for c in ranking)
    rows = [["", *head.split()]]
    if splits:
        rows[0].insert(3, "tensor")
    shares = any(c.axes for c in ranking)
    if shares:
        rows[0].insert(3, "axes")
    notes = []
    for rank, c in enumerate(ranking[:top], 1):
        prediction = c.prediction
        rows.append(
            [
                str(rank),
                c.label,
                str(c.num_stages),
                *([" ".join(f"{axis.name}={axis.size}" for axis in c.axes)] if shares else []),
                *([str(c.num_tensor_devices)] if splits else []),
                str(c.num_replicas),
                str(c.num_microbatches),
                str(c.microbatch_size),
                c.recompute,
                f"{prediction.seconds * 1e3:.1f}",
                f"{batch_size / prediction.seconds:,.0f}",
                f"{prediction.timing.bubble:z.0%}",
                size_text(prediction.num_bytes),
            ]
        )
        cut = "cut at " + ",".join(map(str, c.boundaries)) if c.boundaries else ""
        delay = f"gradients up to {count(prediction.delay, 'update')} late" if prediction.delay else ""
        shared = "replicas share updates" if c.shard_optimizer else ""
        notes.append("; ".join(filter(None, [cut, _across(c), shared, _on_host(c), _sent(c), delay, c.why])))
    header, *lines = _table(rows, left={1}).splitlines()
    text = [
        "plans, as predicted (batches, size: microbatches, their samples; bytes: per device; cut at: first layers of "
        "stages):",
        *(["  axes: devices of each stage, which share its rows, experts and positions"] * shares),
        *(["  tensor: devices of each stage, which split its operators"] * splits),
        header,
    ]
    for line, note in zip(lines, notes):
        text.append(line)
        text += _wrapped(note, indent=" " * 6)
    if len(ranking) > top:
        text.append(f"  and {len(ranking) - top} slower or larger ones")
    return "\n".join([*text, *_skipped(ranking.skipped)])


def _across(plan: Candidate) -> str:
    """What lies on several servers."""
    names = {"stage": "stages", "data": "replicas"}
    parts = [f"{names[axis]} across {number}" for axis, number in plan.dcn.items()]
    if not parts:
        return ""
    ticks = "message_ticks" in plan.options
    return f"{' and '.join(parts)} servers" + ", whose messages have a tick to travel" * ticks


def _sent(plan: Candidate) -> str:
    """What the busiest device sends along axes in a step, and how much of that lies under its compute."""
    parts = [
        f"{size_text(t.num_bytes)} along {' and '.join(t.axes)} in {t.seconds * 1e3:.3g} ms"
        for t in plan.prediction.traffic
    ]
    if not parts:
        return ""
    timing = plan.prediction.timing
    d = int(timing.exchange.argmax())
    hidden = 1 - timing.exposed[d] / max(timing.exchange[d], 1e-30)
    return f"sends {', '.join(parts)}, {hidden:z.0%} of it under compute"


def _on_host(plan: Candidate) -> str:
    """The arrays that a plan keeps in host memory; empty: nothing."""
    parts = []
    if plan.offload.optimizer:
        parts.append(f"{plan.offload.optimizer:.0%} of the optimizer's state")
    if plan.offload.weights:
        parts.append(f"{plan.offload.weights:.0%} of the weights")
    if plan.offload.gradients:
        parts.append(f"{plan.offload.gradients:.0%} of the gradients")
    if plan.offload.activations is not None:
        parts.append(f"stashes of all but {plan.offload.activations} microbatches")
    if not parts:
        return ""
    return f"{', '.join(parts)} in host memory ({size_text(plan.prediction.memory.host)})"


def _skipped(skipped: Sequence[Skipped]) -> list[str]:
    """Lines of the plans that were not priced.

    Plans with one schedule and one reason share theirs.
    """
    if not skipped:
        return []
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for plan in skipped:
        labels.setdefault((plan.schedule, plan.why), {})[plan.label] = None
    lines = ["", f"skipped ({count(len(skipped), 'plan')}):"]
    for (_, why), names in labels.items():
        lines += _wrapped(f"{', '.join(names)}: {why}", indent="  ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def plan_record(plan: Candidate | Skipped) -> dict[str, Any]:
    """A plan for programs: its configuration and its prediction, which a skipped plan lacks."""
    record = {
        "schedule": plan.schedule,
        "options": plan.options,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "tensor": plan.num_tensor_devices,
        "num_replicas": plan.num_replicas,
        "axes": {axis.name: axis.size for axis in plan.axes},
        "microbatch_size": plan.microbatch_size,
        "dcn": dict(plan.dcn),
    }
    if isinstance(plan, Skipped):
        return record | {"recompute": None, "fits": False, "why": plan.why}
    prediction = plan.prediction
    return record | {
        "recompute": plan.recompute,
        "shard_optimizer": plan.shard_optimizer,
        "offload_optimizer": plan.offload.optimizer,
        "offload_weights": plan.offload.weights,
        "offload_gradients": plan.offload.gradients,
        "offload_activations": plan.offload.activations,
        "host_seconds": prediction.host_seconds,
        "boundaries": list(plan.boundaries),
        "seconds": prediction.seconds,
        "bubble": prediction.timing.bubble,
        "busy_seconds": prediction.timing.busy.tolist(),
        "idle_seconds": prediction.timing.idle.tolist(),
        "transfer_seconds": prediction.timing.transfer.tolist(),
        "sent_along_axes": [traffic._asdict() for traffic in prediction.traffic],
        "exchange_seconds": prediction.timing.exchange.tolist(),
        "exposed_seconds": prediction.timing.exposed.tolist(),
        "memory_bytes": prediction.memory._asdict(),
        "num_bytes": prediction.num_bytes,
        "delay": prediction.delay,
        "fits": plan.fits,
        "why": plan.why,
    }


def solution(solution: Solution, graph: Graph, seconds: float) -> str:
    """The solution of a solver: a line per stage, and the proof."""
    nodes = {node.id: node for node in graph.nodes}
    rows = [("stage", "on", "nodes", "", "compute", "bytes")]
    for s, stage in enumerate(solution.stages):
        stage_nodes = [nodes[id] for id in stage.nodes]
        on = "host" if stage.on_host else count(stage.replicas, "device")
        first, last = stage.nodes[0], stage.nodes[-1]
        compute = sum((n.host or 0.0) if stage.on_host else n.seconds for n in stage_nodes)
        rows.append(
            (
                str(s),
                on,
                str(len(stage_nodes)),
                f"{first} .. {last}" if len(stage_nodes) > 1 else str(first),
                f"{compute:.6g}",
                size_text(sum(node.device_bytes for node in stage_nodes)),
            )
        )
    proof = "optimal" if solution.optimal else f"at least {solution.bound:.9g}"
    lines = [
        _table(rows, left={1, 3}),
        "",
        f"{solution.solver}: {solution.objective:.9g} per stage ({proof}), found in {seconds:.3g} s",
    ]
    if solution.data_parallel is not None:
        ratio = solution.data_parallel / solution.objective
        lines.append(f"data parallelism: {solution.data_parallel:.9g}, {ratio:.6g} times as long")
    return "\n".join(lines)


def count(number: float, noun: str) -> str:
    """A number of things.

    Example:
      >>> count(1, "stage"), count(2, "stage")
      ('1 stage', '2 stages')
    """
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _runs(names: Sequence[str]) -> str:
    """`Stem, BasicBlock x 2`."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in runs)


def _table(rows: Sequence[Sequence[str]], left: set[int]) -> str:
    """Aligned columns, indented; those in `left` to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
