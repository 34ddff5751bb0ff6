"""Solvers: a graph of layers in, stages out.

They need NumPy, some of them SciPy, and none JAX.
"""

from jpipe.solvers._ideals import ideals
from jpipe.solvers._linearised import linearised
from jpipe.solvers._pipedream import pipedream
from jpipe.solvers._placement import TooLarge
from jpipe.solvers._throughput_ip import throughput_ip
from jpipe.solvers._two_bw import Blocks, Configuration, two_bw
from jpipe.solvers.block import block_partition
from jpipe.solvers.chain import split_chain
from jpipe.solvers.formats import read_graph
from jpipe.solvers.graph import Graph, Node, Solution, Stage
from jpipe.solvers.machine import Machine
from jpipe.solvers.registry import SOLVERS, Solver, get, names
from jpipe.stages.min_max import min_max

__all__ = [
    "SOLVERS",
    "Blocks",
    "Configuration",
    "Graph",
    "Machine",
    "Node",
    "Solution",
    "Solver",
    "Stage",
    "TooLarge",
    "block_partition",
    "get",
    "ideals",
    "linearised",
    "min_max",
    "names",
    "pipedream",
    "read_graph",
    "split_chain",
    "throughput_ip",
    "two_bw",
]
