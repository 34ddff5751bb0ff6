"""What splitting the backward costs, and what the shapes that need it save.

    python benchmarks/split_backward.py
    python benchmarks/split_backward.py --tpu benchmarks/compile_tpu.json  # by a compiler's estimates instead

A schedule in paired ticks, and GPipe, run a layer's whole backward at once; unit ticks and the zero-bubble schedules run the
input gradient and the weight gradient apart, which may repeat work or pass more through memory. For each model the
*cost* is (input gradient + weight gradient) / whole backward. For each schedule, *shape* is its step with a split that
costs nothing, by that of 1F1B in paired ticks, and *both* the same with the cost; 1F1B's price is 1.
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
    """What a layer takes, in any unit: forward, whole backward, input gradient, weight gradient."""

    forward: float
    backward: float
    input_grad: float
    weight_grad: float

    @property
    def cost(self) -> float:
        return (self.input_grad + self.weight_grad) / self.backward


def measured() -> dict[str, Layer]:
    """Layers timed here, on one device."""
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
    found = {}
    for name, (model, shape, dtype) in models.items():
        pipe = jpipe.Pipeline(
            model.layers(),
            loss=lambda outputs, batch: outputs.mean(),
            optimizer=optax.sgd(0.1),
            schedule=jpipe.schedules.gpipe(1, 1),
        )
        batch = {"inputs": jax.ShapeDtypeStruct((8, *shape), dtype)}
        layer = pipe.profile(batch, programs=PARTS, min_seconds=0.2).layers[2]
        found[name] = Layer(*(getattr(layer, part).median for part in PARTS))
    return found


def compiled(path: pathlib.Path) -> dict[str, Layer]:
    """A transformer block as the TPU compiler estimates it, from what `compile_tpu.py --out` wrote."""
    rows = json.loads(path.read_text())
    fewest = min(row["chips"] for row in rows)
    cycles = {row["schedule"]: row["cycles"] for row in rows if row["chips"] == fewest}
    whole, halves = cycles["one_f_one_b"], cycles["zero_bubble_h1"]
    layer = Layer(
        whole["forward"], whole["backward"], halves["backward"], halves["weight_grad"]
    )
    return {"transformer, dim 512, cycles on TPU": layer}


def steps(layer: Layer, num_devices: int, num_microbatches: int) -> dict[str, float]:
    """Each schedule's step in lockstep, with devices of equal work."""
    import jpipe
    from jpipe.simulate import Costs, simulate

    found = {}
    for title, (name, options) in SCHEDULES.items():
        chunks = 2 if name in ("interleaved", "zero_bubble_v") else 1
        table = jpipe.schedules.get(name)(
            chunks * num_devices, num_microbatches, **options
        )
        found[title] = simulate(
            table,
            Costs(
                forward=layer.forward / chunks,
                backward=layer.input_grad / chunks,
                weight_grad=layer.weight_grad / chunks,
                fused_backward=layer.backward / chunks,
            ),
        ).makespan
    return found


def table(layers: dict[str, Layer], num_devices: int, num_microbatches: int) -> str:
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
        columns += [
            {n: t / base for n, t in steps(one, num_devices, num_microbatches).items()}
            for one in (free, layer)
        ]
    lines.append(
        "| cost of the split | "
        + " | ".join(f"| {layer.cost:.2f}" for layer in layers.values())
        + " |"
    )
    for title in SCHEDULES:
        cells = " | ".join(f"{column[title]:.2f}" for column in columns)
        lines.append(f"| `{title}` | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--tpu", type=pathlib.Path, help="what `compile_tpu.py --out` wrote"
    )
    args = parser.parse_args()
    layers = measured() if args.tpu is None else compiled(args.tpu)
    for name, layer in layers.items():
        print(name, layer)
    print(table(layers, args.devices, args.microbatches))


if __name__ == "__main__":
    main()
