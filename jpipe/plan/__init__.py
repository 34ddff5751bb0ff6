"""How to train a model that is too large for one device: profile it, cut it, price every plan, choose."""

from jpipe.plan.block import block_partition
from jpipe.plan.chain import split_chain
from jpipe.plan.choose import Candidate, choose, size_text
from jpipe.plan.graph import Graph, Node, Solution, Stage, read_graph
from jpipe.plan.ideals import ideals
from jpipe.plan.linearised import linearised
from jpipe.plan.machine import Machine, measure_machine
from jpipe.plan.pipedream import pipedream
from jpipe.plan.predict import Prediction, predict
from jpipe.plan.profile import (
    LayerProfile,
    Profile,
    Seconds,
    balance_by_memory,
    balance_by_time,
)
from jpipe.plan.throughput_ip import throughput_ip
from jpipe.plan.two_bw import Blocks, Configuration, two_bw
from jpipe.solvers.min_max import min_max

__all__ = [
    "Blocks",
    "Candidate",
    "Configuration",
    "Graph",
    "LayerProfile",
    "Machine",
    "Node",
    "Prediction",
    "Profile",
    "Seconds",
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
    "read_graph",
    "size_text",
    "split_chain",
    "throughput_ip",
    "two_bw",
]
