"""Seconds to encode and decode an array, and the speed of the link below which a compressor pays.

    python benchmarks/compression_speed.py
    python benchmarks/compression_speed.py --rows 4096 --columns 4096

All compressors run in turns on one device, in several rounds, on an array whose threshold is known. A compressor pays
on a link on which the bytes that it saves take longer than it does: `(bytes - bytes sent) / (seconds to encode and
decode)`.
"""

import argparse
import statistics
import time

COMPRESSORS = (
    "cast",
    "cast:dtype=float8_e4m3fn",
    "quantize:bits=8",
    "quantize:bits=4",
    "threshold:density=0.1",
    "threshold:density=0.005,room=1",
    "topk:density=0.005",
    "powersgd:rank=1",
    "powersgd:rank=4",
    "streaming_pca:rank=4",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    import jax
    import numpy as np

    from jpipe.compress import parse

    shape = args.rows, args.columns
    x = jax.device_put(np.random.default_rng(0).standard_normal(shape).astype("f"))
    programs = {}
    for text in COMPRESSORS:
        compressor = parse(text)

        def encode_decode(x, state, compressor=compressor):
            wire, state = compressor.encode(x, state)
            return compressor.decode(wire, x), state

        run = jax.jit(encode_decode)
        # After the first array the threshold is known.
        _, state = jax.block_until_ready(run(x, compressor.init(x)))
        programs[text] = run, state, compressor.wire_bytes(x)
    seconds: dict[str, list[float]] = {text: [] for text in programs}
    for _ in range(args.rounds):
        for text, (run, state, _) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(x, state))
            seconds[text].append(time.perf_counter() - start)
    device = jax.devices()[0].device_kind
    print(f"float32 {list(shape)}, {x.nbytes / 1e6:.1f} MB, on {device}\n")
    print("| compressor | bytes / | ms | pays below, Gbit/s |\n|---|---|---|---|")
    for text, (_, _, sent) in programs.items():
        median = statistics.median(seconds[text])
        speed = (x.nbytes - sent) * 8 / median / 1e9
        print(f"| `{text}` | {x.nbytes / sent:.1f} | {median * 1e3:.2f} | {speed:.1f} |")


if __name__ == "__main__":
    main()
