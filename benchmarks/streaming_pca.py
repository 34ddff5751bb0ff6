"""Streaming batch PCA: how near its recursion comes to the gradient, and how much memory it saves.

    python benchmarks/streaming_pca.py

The first table has gradients with singular values 10, 6, 3, 0.3, 0.2 and 0.1. Inputs of a layer `[256, 16]` are normal,
and gradients by its outputs `[256, 12]` are a matrix times them. Every batch is new, and comes in parts of 32 rows. The
error of rank 3 is that of X diag(sigma) D^T, relative to the gradient of the batch.

The second table has bytes of a device that runs a step of an MLP, `--layers` dense layers of `--dim` on one stage. They
are what the compiler reserves for arguments (weights, gradients and factors, the batch) and for temporaries, and what
`Pipeline.memory` says of gradients before.
"""

import argparse
import functools

RANKS = 1, 2, 4, 10
VALUES = 10.0, 6.0, 3.0, 0.3, 0.2, 0.1


def errors(seed: int, num_batches: int = 10) -> tuple[list, float, list]:
    """Relative errors after each batch, the best of rank 3 in the last one, and the last sigma, the largest first."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jpipe.compress import StreamingPCA

    rows, part, (a, b) = 256, 32, (16, 12)
    rng, compressor = np.random.default_rng(seed), StreamingPCA(3, seed)
    left, right = (np.linalg.qr(rng.standard_normal((n, len(VALUES))))[0] for n in (a, b))
    layer = (left * VALUES) @ right.T
    factors = compressor.init(jax.ShapeDtypeStruct((a, b), np.float32))
    factors = factors._replace(sigma=jnp.ones(3))  # the paper's first one
    update, found = jax.jit(compressor.update), []
    for _ in range(num_batches):
        x = rng.standard_normal((rows, a))
        d = x @ layer
        for i in range(rows // part):
            of_part = slice(part * i, part * (i + 1))
            factors = update(factors, x[of_part].astype("f"), d[of_part].astype("f"), i)
        exact = x.T @ d / rows
        error = np.linalg.norm(factors.matrix() - exact) / np.linalg.norm(exact)
        found.append(float(error))
    values = np.linalg.svd(exact)[1]
    best = float(np.sqrt((values[3:] ** 2).sum() / (values**2).sum()))
    return found, best, sorted(map(float, factors.sigma), reverse=True)


def memory(layers: int, dim: int, rank: int | None) -> dict[str, int]:
    """Bytes of a device in a step, compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jpipe
    from jpipe.compress import StreamingPCA

    pipe = jpipe.Pipeline(
        [functools.partial(nnx.Linear, dim, dim) for _ in range(layers)],
        loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
        optimizer=optax.sgd(0.1),
        schedule=jpipe.schedules.gpipe(1, 8),
        mesh=jpipe.make_mesh(stage=1),
        accumulate_gradients=None if rank is None else StreamingPCA(rank),
    )
    rows = jax.ShapeDtypeStruct((64, dim), np.float32)
    batch = {"inputs": rows, "targets": rows}
    compiled = pipe.compile(batch).memory_analysis()
    return {
        "predicted": pipe.memory(batch).gradients,
        "arguments": compiled.argument_size_in_bytes,
        "temporaries": compiled.temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    args = parser.parse_args()

    import numpy as np

    found, best, sigma = zip(*(errors(seed) for seed in range(args.seeds)))
    print(f"relative error, {args.seeds} seeds\n")
    print("| batch | median | least | most |\n|---|---|---|---|")
    for batch in (1, 2, 5, 10):
        of = [run[batch - 1] for run in found]
        print(f"| {batch} | {np.median(of):.3f} | {min(of):.3f} | {max(of):.3f} |")
    values = ", ".join(f"{value:.1f}" for value in np.median(sigma, axis=0))
    print(f"| best | {np.median(best):.3f} | {min(best):.3f} | {max(best):.3f} |")
    print(f"\nmedian sigma: {values}\n")
    print(f"{args.layers} layers of {args.dim}, float32, MB\n")
    print("| gradients | `Pipeline.memory` | arguments | temporaries |\n|---|---|---|---|")
    for rank in (None, *RANKS):
        of = memory(args.layers, args.dim, rank)
        row = " | ".join(f"{n / 1e6:.2f}" for n in of.values())
        print(f"| {'formed' if rank is None else f'rank {rank}'} | {row} |")


if __name__ == "__main__":
    main()
