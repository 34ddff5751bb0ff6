"""What it costs to split the backward, and what the schedules that need the split save.

    python benchmarks/split_backward.py
    python benchmarks/split_backward.py --tpu benchmarks/compile_tpu.json  # a compiler's estimates

GPipe and schedules in paired ticks run the whole backward of a layer at once. Unit ticks and the
zero-bubble schedules run the input gradient and the weight gradient separately, which may repeat
work or move more data through memory.

For each model, *cost* is (input gradient + weight gradient) / whole backward. For each schedule the
table has the simulated time of a step, divided by that of 1F1B in paired ticks: *shape* with a
split that costs nothing, and *both* with the measured cost of the split.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

PARTS = "forward_and_stash", "backward", "input_grad", "weight_grad"
SCHEDULES = {
    "gpipe": ("gpipe", {}),
    "one_f_one_b": ("one_f_one_b", {"ticks": "paired"}),
    "one_f_one_b, unit": ("one_f_one_b", {"ticks": "unit"}),
    "interleaved": ("interleaved", {"ticks": "paired"}),
    "interleaved, unit": ("interleaved", {"ticks": "unit"}),
    "zero_bubble_h1": ("zero_bubble_h1", {}),
    "zero_bubble_h2": ("zero_bubble_h2", {}),
    "zero_bubble_v": ("zero_bubble_v", {}),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The times of a layer's programs, in any unit."""

    forward: float
    backward: float
    input_grad: float
    weight_grad: float

    @property
    def cost(self) -> float:
        """The cost of the split.

        Example:
          >>> Layer(forward=1.0, backward=2.0, input_grad=1.5, weight_grad=1.0).cost
          1.25
        """
        return (self.input_grad + self.weight_grad) / self.backward


def measured() -> dict[str, Layer]:
    """Layers that are timed now, on one device."""
    import jax
    import numpy as np
    import optax

    import jpipe
    from models import MLP, ResNet, Transformer

    models = {
        "MLP, width 256": (MLP(widths=(256,) * 3), (784,), np.float32),
        "ResNet block, 16 channels": (
            ResNet(num_channels=1, widths=(16,), num_blocks=(3,)),
            (28, 28, 1),
            np.float32,
        ),
        "transformer, dim 128": (
            Transformer(seq_len=64, dim=128, num_heads=4, num_blocks=3),
            (64,),
            np.int32,
        ),
        "transformer, dim 512": (
            Transformer(seq_len=64, dim=512, num_heads=8, num_blocks=3),
            (64,),
            np.int32,
        ),
    }
    layers = {}
    for name, (model, shape, dtype) in models.items():
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=lambda outputs, batch: outputs.mean(),
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(1, 1),
        )
        batch = {"inputs": jax.ShapeDtypeStruct((8, *shape), dtype)}
        layer = pipe.profile(batch, programs=PARTS, min_seconds=0.2).layers[2]
        layers[name] = Layer(*(getattr(layer, part).median for part in PARTS))
    return layers


def compiled(path: pathlib.Path) -> dict[str, Layer]:
    """A transformer block by the TPU compiler's estimates, from `compile_tpu.py --out`."""
    rows = json.loads(path.read_text())
    first = rows[0]["topology"]
    cycles = {r["schedule"]: r["cycles"] for r in rows if r["topology"] == first}
    whole, halves = cycles["one_f_one_b"], cycles["zero_bubble_h1"]
    layer = Layer(whole["forward"], whole["backward"], halves["backward"], halves["weight_grad"])
    return {"transformer, dim 512, cycles on TPU": layer}


def steps(layer: Layer, num_devices: int, num_microbatches: int) -> dict[str, float]:
    """Schedule -> simulated time of a step, in lockstep, on devices with equal work."""
    import jpipe
    from jpipe.simulate import Costs, simulate

    makespans = {}
    for title, (name, options) in SCHEDULES.items():
        stages_per_device = 2 if name in ("interleaved", "zero_bubble_v") else 1
        table = jpipe.schedules.get(name)(stages_per_device * num_devices, num_microbatches, **options)
        makespans[title] = simulate(
            table,
            Costs(
                forward=layer.forward / stages_per_device,
                backward=layer.input_grad / stages_per_device,
                weight_grad=layer.weight_grad / stages_per_device,
                fused_backward=layer.backward / stages_per_device,
            ),
        ).makespan
    return makespans


def table(layers: dict[str, Layer], num_devices: int, num_microbatches: int) -> str:
    """The results as Markdown."""
    lines = [
        "| | " + " | ".join(f"{name}: shape | both" for name in layers) + " |",
        "|---" * (2 * len(layers) + 1) + "|",
    ]
    columns = []
    for layer in layers.values():
        free = dataclasses.replace(
            layer,
            input_grad=layer.input_grad / layer.cost,
            weight_grad=layer.weight_grad / layer.cost,
        )
        base = steps(layer, num_devices, num_microbatches)["one_f_one_b"]
        for split in (free, layer):
            times = steps(split, num_devices, num_microbatches)
            columns.append({title: time / base for title, time in times.items()})
    lines.append("| cost of the split | " + " | ".join(f"| {layer.cost:.2f}" for layer in layers.values()) + " |")
    for title in SCHEDULES:
        cells = " | ".join(f"{column[title]:.2f}" for column in columns)
        lines.append(f"| `{title}` | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tpu", type=pathlib.Path, help="the file that `compile_tpu.py --out` wrote")
    args = parser.parse_args()
    layers = measured() if args.tpu is None else compiled(args.tpu)
    for name, layer in layers.items():
        print(name, layer)
    print(table(layers, args.devices, args.microbatches))


if __name__ == "__main__":
    main()
