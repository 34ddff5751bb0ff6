"""Operators whose programs send more bytes than predicted, compiled for CPUs: which, in which splits, and why.

    python benchmarks/soap_bytes.py --devices 2
    python benchmarks/soap_bytes.py --devices 4 --cases dense attention sum
    python benchmarks/soap_bytes.py --devices 2 --models mlp attention

Every kind of operator of `tests/soap/test_execute.py` is split in every way over all devices and compiled with
`jpipe.soap.apply`: the loss, and its gradient by the weight. Bytes are those of the collectives of the program's text,
each by the least that it takes. The prediction is that of `jpipe.soap.simulate`. A row is the split of an operator that
sends the most in proportion. With `--models` the rows are strategies of a model of `benchmarks/soap_measured.py`, and
the operators that send the most beyond the prediction are named.

- *whole sums*: bytes of it that XLA for CPUs sends because it has no reduce-scatter: it adds up the whole result, or
  the whole gradient, on every device. Where these bytes explain the rest, the last column, sent / (predicted + whole
  sums), is at most 1.
"""

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "soap"), str(ROOT / "benchmarks")]


def rows_of(name: str, num_devices: int) -> list[dict]:
    """A row per split of an operator over all devices."""
    import math

    import test_execute as tests

    from jpipe import soap
    from jpipe.soap.refusals import refusal

    case = tests.CASES[name]
    graph = soap.trace(tests.loss_of(case), *tests.arrays(case))
    machine = soap.p100_cluster().with_devices(num_devices)
    (operator, *_) = tests.operators_of(graph.operators, case.operator)
    sizes = soap.device_mesh(num_devices).shape
    rows = []
    for degrees in tests.all_degrees(graph, case.operator, num_devices):
        strategy = tests.with_degrees(graph, case.operator, degrees, num_devices)
        config = strategy[list(graph.operators).index(operator)]
        if math.prod(degrees) < num_devices or refusal(operator, config, sizes):
            continue
        turns = tests.TURNS if name.startswith("scan") else 1
        kinds = [f"{each.kind}{degree}" for each, degree in zip(operator.loops, degrees) if degree > 1]
        rows.append(
            {
                "split": " ".join(kinds),
                "predicted": soap.simulate(graph, machine, strategy).sent_bytes,
                "whole_sums": tests.bytes_of_whole_sums(graph, strategy, num_devices),
                "sent": tests.sent_bytes(tests.compiled_text(case, graph, strategy, num_devices)),
                "turns": turns,
            }
        )
    return rows


def model_rows(name: str, num_devices: int) -> list[str]:
    """A line per strategy of a model: bytes, and the operators that send more."""
    import jax
    import numpy as np
    import soap_measured
    import test_execute as tests

    from jpipe import soap

    loss, shapes, inputs = soap_measured.MODELS[name]()
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    arrays = (jax.tree.map(np.ones, shapes, is_leaf=is_shape), *map(np.ones, inputs))
    arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), arrays)
    graph = soap.trace(loss, *arrays)
    machine, mesh = soap.p100_cluster().with_devices(num_devices), soap.device_mesh(num_devices)
    space, rng = soap.Space(graph, num_devices, executable=True), np.random.default_rng(0)
    starts = {name: start for name, start in soap.starts_of(space).items() if name != "random"}
    starts |= {f"random {i}": soap.random_strategy(space, rng) for i in range(3)}
    starts["found"] = soap.search(graph, machine, space=space, max_proposals=100, max_polish_proposals=300).strategy
    lines = []
    for label, strategy in starts.items():
        shardings = soap.argument_shardings(graph, strategy, mesh)
        tree = jax.tree.structure(arrays)
        split = jax.value_and_grad(soap.apply(loss, graph, strategy, mesh))
        text = jax.jit(split, in_shardings=tree.unflatten(shardings)).lower(*arrays).compile().as_text()
        predicted, sent = soap.simulate(graph, machine, strategy).sent_bytes, tests.sent_bytes(text)
        more = tests.whole_sums(graph, strategy, num_devices)
        most = sorted(more, key=more.get, reverse=True)[:3]
        named = ", ".join(f"{each} {more[each] / 1e6:.2f}" for each in most if more[each])
        lines.append(
            f"| {name} | {label} | {predicted / 1e6:.2f} | {sent / 1e6:.2f} | {sent / predicted:.2f} | "
            f"{sent / (predicted + sum(more.values())):.2f} | {named} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--models", nargs="+", help="whole models instead of operators")
    parser.add_argument("--cases", nargs="+", help="kinds of operators; all if left out")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    if args.models:
        print("| model | strategy | predicted, MB | sent | sent / predicted | with whole sums | whole sums, MB |")
        print("|" + "---|" * 7, flush=True)
        for name in args.models:
            print(*model_rows(name, args.devices), sep="\n", flush=True)
        return
    import test_execute as tests

    print("| operator | split | predicted, bytes | sent | sent / predicted | whole sums | sent / with whole sums |")
    print("|" + "---|" * 7, flush=True)
    no_more = []
    for name in args.cases or tests.CASES:
        rows = rows_of(name, args.devices)
        more = [row for row in rows if row["sent"] > row["predicted"]]
        if not more:
            no_more.append(f"{name} ({len(rows)})")
            continue
        row = max(more, key=lambda row: row["sent"] / max(row["predicted"], 1))
        known = (row["predicted"] + row["whole_sums"]) * row["turns"]
        ratio = f"{row['sent'] / row['predicted']:.2f}" if row["predicted"] else "-"
        print(
            f"| {name} | {row['split']} | {row['predicted']:,} | {row['sent']:,} | {ratio} | {row['whole_sums']:,} | "
            f"{row['sent'] / known:.2f} |",
            flush=True,
        )
    print(f"\nNo split sends more than predicted of (splits): {', '.join(no_more)}.")


if __name__ == "__main__":
    main()
