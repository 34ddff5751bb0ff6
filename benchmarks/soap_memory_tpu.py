"""Predicted against compiled memory of a training step on TPUs, for strategies of three models, on a machine without a
TPU.

    pip install -r benchmarks/requirements-tpu.txt
    python benchmarks/soap_memory_tpu.py
    python benchmarks/soap_memory_tpu.py --topologies v5e:2x4 --random 4 --out rows.json

The step is the loss, its gradients, clipped by their norm, and an update of Adam; weights and state are donated.
*Predicted* is the most that a device needs by `jpipe.soap.simulate`. *Compiled* is what the TPU compiler reserves on
each chip: arguments, results and temporaries. The models are large, because the compiler leaves out arrays that it
keeps in the on-chip memory.
"""

import argparse
import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from compile_tpu import environment, reserved_bytes

TOPOLOGIES = ("v5e:2x2", "v5e:2x4")


def machine_of(num_devices: int):
    """v5e chips, from https://cloud.google.com/tpu/docs/v5e. The latency is assumed.

    Of the 128 MiB of on-chip memory (https://jax-ml.github.io/scaling-book/tpus) the compiler keeps 16 for its kernels:
    messages of it name that limit (https://github.com/pytorch/xla/issues/6611).
    """
    from jpipe import soap

    return soap.Machine(
        "v5e",
        (soap.Level(num_devices, 50e9, 1e-6),),
        flops=197e12,
        memory_bandwidth=819e9,
        memory_bytes=16 * 2**30,
        product_item_bytes=2,
        on_chip_bytes=112 * 2**20,
    )


def strategies_of(graph, machine, num_random: int) -> dict:
    """Label -> a strategy that `jpipe.soap.apply` runs."""
    import numpy as np

    from jpipe import soap

    count = machine.num_devices
    space = soap.Space(graph, count, executable=True)
    strategies = {
        "data parallel": soap.data_parallel(graph, count),
        "one weird trick": soap.one_weird_trick(graph, count),
        "megatron": soap.megatron(graph, count),
    }
    for seed in range(num_random):
        rng = np.random.default_rng(seed)
        strategies[f"random {seed}"] = soap.random_strategy(space, rng)
    found = soap.search(graph, machine, space=space, max_proposals=300, seed=0)
    return strategies | {"found": found.strategy}


def larger(name: str) -> tuple:
    """A model of `soap_measured.py`, with larger weights and batches."""
    from soap_measured import MODELS

    loss, weights, inputs = MODELS[name]()
    if name == "mlp":
        weights = {k: tuple(4 * n for n in shape) for k, shape in weights.items()}
        inputs = [(8192, 4 * n) for _, n in inputs]
    elif name == "convolutions":
        inputs = [(8192, *shape) for _, *shape in inputs]
    else:
        inputs = [(256, 512, dim) for *_, dim in inputs]
    return loss, weights, inputs


def compiled_bytes(loss, graph, strategy, arrays, devices) -> tuple[int, int]:
    """Bytes that a step reserves on each chip, and those of them that are in use at a time, at most, by the
    compiler.
    """
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from jpipe import soap

    mesh = soap.device_mesh(devices)
    split = soap.apply(loss, graph, strategy, mesh)
    leaves, tree = jax.tree.flatten(arrays)
    shardings = soap.argument_shardings(graph, strategy, mesh)
    weights, *inputs = tree.unflatten(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(leaves, shardings)
    )

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = jax.eval_shape(optimizer.init, weights)
    of_weights = tree.unflatten(shardings)[0]
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = optax.tree.map_params(
        optimizer,
        lambda _, s: s,
        state,
        of_weights,
        transform_non_params=lambda _: everywhere,
    )
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, placed)

    def step(weights, state, *inputs):
        value, gradients = jax.value_and_grad(split)(weights, *inputs)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    jitted = jax.jit(step, out_shardings=(of_weights, placed, None), donate_argnums=(0, 1))
    compiled = jitted.lower(weights, state, *inputs).compile()
    analysis = compiled.memory_analysis()
    return reserved_bytes(analysis), analysis.peak_memory_in_bytes


def rows_of(name: str, topology: str, num_random: int) -> list[dict]:
    """One row per strategy of a model."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from jpipe import soap

    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    loss, shapes, inputs = larger(name)
    arrays = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        (shapes, *inputs),
        is_leaf=lambda s: isinstance(s, tuple) and all(isinstance(n, int) for n in s),
    )
    graph, machine = soap.trace(loss, *arrays), machine_of(len(devices))
    rows = []
    for label, strategy in strategies_of(graph, machine, num_random).items():
        simulated = soap.simulate(graph, machine, strategy)
        predicted = max(simulated.memory_bytes)
        row = {"model": name, "topology": topology, "strategy": label}
        try:
            found = compiled_bytes(loss, graph, strategy, arrays, devices)
        except Exception as error:  # the compiler's own failures, too
            row["failed"], found = str(error)[:200], (math.nan, math.nan)
        row["predicted"] = predicted
        for what, num_bytes in zip(("reserved", "in_use"), found):
            row |= {what: num_bytes, f"{what}_error": predicted / num_bytes - 1}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    models = ("mlp", "convolutions", "attention")
    parser.add_argument("--models", nargs="+", default=list(models), choices=models)
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--random", type=int, default=4, help="random strategies")
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    args = parser.parse_args()
    environment()
    rows = [row for topology in args.topologies for name in args.models for row in rows_of(name, topology, args.random)]
    print(
        "\n| model | chips | strategy | predicted, MB | in use, MB | error | reserved, MB | error |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for r in rows:
        print(
            f"| {r['model']} | {r['topology']} | {r['strategy']} | {r['predicted'] / 1e6:,.0f} | "
            f"{r['in_use'] / 1e6:,.0f} "
            f"| {r['in_use_error']:+.0%} | {r['reserved'] / 1e6:,.0f} | {r['reserved_error']:+.0%} |"
        )
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
