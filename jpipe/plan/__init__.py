"""Plans how to train a model: measures its layers, predicts time and memory of every plan, ranks the plans.

The names of `jpipe.solvers` are here too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jpipe.plan._loops import PROGRAMS, Seconds
from jpipe.plan._profile import (
    LayerProfile,
    Profile,
    balance_by_memory,
    balance_by_time,
)
from jpipe.plan._profiling import profile
from jpipe.solvers import (
    Blocks,
    Configuration,
    Graph,
    Machine,
    Node,
    Solution,
    Stage,
    block_partition,
    ideals,
    linearised,
    min_max,
    pipedream,
    read_graph,
    split_chain,
    throughput_ip,
    two_bw,
)

if TYPE_CHECKING:
    from jpipe.plan._choose import Candidate, Ranking, Skipped, choose, size_text
    from jpipe.plan._machine import measure_machine
    from jpipe.plan._predict import Prediction, predict

# These modules import `jpipe.pipeline`, which imports this package's profiles: they load on first use.
_LAZY = {
    "Candidate": "_choose",
    "Prediction": "_predict",
    "Ranking": "_choose",
    "Skipped": "_choose",
    "choose": "_choose",
    "measure_machine": "_machine",
    "predict": "_predict",
    "size_text": "_choose",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "PROGRAMS",
    "Blocks",
    "Candidate",
    "Configuration",
    "Graph",
    "LayerProfile",
    "Machine",
    "Node",
    "Prediction",
    "Profile",
    "Ranking",
    "Seconds",
    "Skipped",
    "Solution",
    "Stage",
    "balance_by_memory",
    "balance_by_time",
    "block_partition",
    "choose",
    "ideals",
    "linearised",
    "measure_machine",
    "min_max",
    "pipedream",
    "predict",
    "profile",
    "read_graph",
    "size_text",
    "split_chain",
    "throughput_ip",
    "two_bw",
]
