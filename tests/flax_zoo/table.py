"""Prints what the zoo holds: how many classes of Flax and names of Optax there are, which are equal, which are refused
and why.

    python tests/flax_zoo/table.py

The tests beside it compare every line with plain Flax and Optax.
"""

import pathlib
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from flax_zoo import layers, optimizers  # noqa: E402

PARTS = {
    "flax.nnx": ("nnx.", layers.ALL_EXAMPLES),
    "flax.linen": ("linen.", layers.ALL_EXAMPLES),
    "optax": ("optax.", optimizers.EXAMPLES),
    "optax.contrib": ("contrib.", optimizers.EXAMPLES),
}


def counts(part: str) -> tuple[int, int]:
    """Of a library: how many names do what they do without a pipeline, and how many are refused."""
    prefix, all_examples = PARTS[part]
    examples = [e for name, e in all_examples.items() if name.startswith(prefix)]
    refused = sum(e.refused is not None for e in examples)
    return len(examples) - refused, refused


def rows() -> Iterator[str]:
    yield f"{'':16}equal  refused"
    for part in PARTS:
        equal, refused = counts(part)
        yield f"{part:16}{equal:5}  {refused:7}"
    reasons: dict[str, list[str]] = {}
    for name, example in {**layers.ALL_EXAMPLES, **optimizers.EXAMPLES}.items():
        if example.refused:
            reasons.setdefault(example.refused, []).append(name)
    for reason, names in reasons.items():
        yield f"refused, {reason!r}: {', '.join(names)}"
    for name, reason in layers.NO_LAYERS.items():
        yield f"not compared: {name}, {reason}"


if __name__ == "__main__":
    print("\n".join(rows()))
