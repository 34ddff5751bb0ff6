"""Plans how to train a model: measures its layers, predicts time and memory of every plan, ranks the plans.

The names of `jpipe.solvers` are here too.
"""

from jpipe._util.sizes import size_text
from jpipe.plan._choose import Candidate, Ranking, Skipped, choose
from jpipe.plan._exchanges import Axis, Exchange
from jpipe.plan._groups import Traffic
from jpipe.plan._loops import PROGRAMS, Seconds
from jpipe.plan._machine import measure_machine
from jpipe.plan._predict import Prediction, predict
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

__all__ = [
    "PROGRAMS",
    "Axis",
    "Blocks",
    "Candidate",
    "Configuration",
    "Exchange",
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
    "Traffic",
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
