"""The facts that all processes of one training must share, compared once when a state is made.

Each process compiles its own program. Processes with different programs, keys or batches would wait for each
other for ever, or train on garbage without a word.
"""

import hashlib
import importlib.metadata
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe._processes.sharing import check_agreement
from jpipe.layers.avals import shapes_text
from jpipe.options.checks import batch_size
from jpipe.options.settings import Settings
from jpipe.program import Program

_PACKAGES = ("jax", "jaxlib", "flax", "optax")
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
)


def check_arguments(settings: Settings, balance: str, key: jax.Array, batch: Any) -> None:
    """Refuses processes that differ in facts that are known before the layers are traced.

    Args:
      settings: the settings of the pipeline.
      balance: the costs that boundaries which are not given balance.
      key: the random key of `init`.
      batch: the batch of `init`, as this process gives it.

    Raises:
      ValueError: on every process, naming the fact that differs; also if the batch is no dict of arrays.
    """
    if settings.rows is None:
        return
    batch_size(settings.model.batch(batch))
    schedule, mesh = settings.schedule, settings.mesh
    facts = {"the version of jpipe": jpipe.__version__}
    facts |= {f"the version of {p}": importlib.metadata.version(p) for p in _PACKAGES}
    facts |= {f"the option {name}": str(getattr(jax.config, name)) for name in _OPTIONS}
    facts["the random key"] = f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"
    facts["the batch"] = shapes_text(batch)
    facts["`schedule`"] = (
        f"{schedule.name} of {schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
    )
    parts = dict(settings.parts)
    facts["the table of `schedule`"] = _hash(parts.pop("schedule"))
    facts["`mesh`"] = f"{dict(mesh.shape)}, devices {[d.id for d in mesh.devices.flat]}"
    del parts["mesh"]
    facts |= {f"`{name}`": str(part) for name, part in parts.items()}
    facts["`donate`"] = str(settings.donate)
    facts["`compiler_options`"] = str(sorted(settings.compiler_options.items()))
    facts["what `boundaries` balance"] = balance
    check_agreement(
        facts,
        "Run the same program with the same arguments and the same versions on every process.",
    )


def check_program(program: Program, **values: Any) -> None:
    """Refuses processes that differ in the traced model, its cut, or the values that it starts from.

    Args:
      program: the program of this process.
      **values: pytrees of arrays that are given to every process, or None.

    Raises:
      ValueError: on every process, naming the fact that differs.
    """
    if program.settings.rows is None:
        return
    parts = dict(program.parts)
    facts = {"`boundaries`": str(list(parts.pop("boundaries")))}
    for i, (layer, part) in enumerate(zip(program.stages.layers, parts.pop("layers"))):
        facts[f"layer {i}"] = f"{layer.name}, {_hash(part)}, parameters {shapes_text(layer.parameters)}"
    facts["`loss`"] = _hash(parts["loss"])
    facts["`optimizer`"] = _hash(parts["optimizer"])
    hooks = parts["forward_params or backward_params"]
    facts["`forward_params` or `backward_params`"] = str(hooks)
    for name, tree in values.items():
        facts[f"`{name}`"] = _checksum(tree)
    check_agreement(
        facts,
        "Build the same model, loss and optimizer from the same arguments on every process.",
    )


def _hash(part: Any) -> str:
    """Names a part of a program by a hash, without addresses, which differ from process to process."""
    text = re.sub(r" at 0x[0-9a-f]+", "", _text(part))
    return f"traced as {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _text(part: Any) -> str:
    """A text that is the same in every process, of a set too."""
    if isinstance(part, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, part)))}}}"
    if isinstance(part, Mapping):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in part.items())}}}"
    if isinstance(part, (tuple, list)):
        return f"({', '.join(map(_text, part))})"
    return part if isinstance(part, str) else repr(part)


def _checksum(tree: Any) -> str:
    if tree is None:
        return "none"
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.asarray(leaf).tobytes(), total)
    return f"checksum {total:08x}"
