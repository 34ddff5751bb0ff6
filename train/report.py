"""Tables that a run prints before it starts."""

import itertools
import platform
from collections.abc import Sequence

import flax
import jax
import optax

import jpipe


def versions() -> str:
    """What the run runs on, in a line."""
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
    """A line for each stage: where it runs, its layers and what they weigh."""
    total = sum(record.flops for record in records) or 1
    rows = [("stage", "device", "layers", "", "parameters", "bytes", "FLOPs")]
    for record in records:
        first, stop = record.layers
        rows.append(
            (
                str(record.stage),
                str(record.device),
                f"{first}..{stop - 1}" if stop - first > 1 else str(first),
                _runs(record.names),
                f"{record.num_parameters:,}",
                _size(record.parameter_bytes),
                f"{record.flops / total:.0%}",
            )
        )
    return _table(rows, left={3})


def memory(memory: jpipe.Memory) -> str:
    """A line for each use of a device's memory."""
    uses = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations in flight": memory.activations,
        "minibatch": memory.batch,
        "temporaries": memory.temporaries,
    }
    rows = [(use, _size(num_bytes)) for use, num_bytes in uses.items()]
    rows.append(("in all", _size(sum(uses.values()))))
    rows.append(("of it padding", _size(memory.padding)))
    return _table(rows, left={0})


def _runs(names: Sequence[str]) -> str:
    """`Stem, BasicBlock x 2`."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in runs)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, {"B": "KiB", "KiB": "MiB"}.get(unit, "GiB")
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


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
