"""Splits the operators of any JAX function over devices: a search over the SOAP space.

SOAP stands for the ways to split: by Samples, by other dims of an output (Attributes), by dims of weights (Parameters),
and by Operators on different devices. Sums are split too (Reduction).

`trace` makes a graph of operators, `simulate` predicts a step of a strategy, and `search` finds a fast one:

    graph = soap.trace(loss, weights, inputs, targets)
    result = soap.search(graph, soap.read_machine("p100"), budget_seconds=60)

References: Jia, Zaharia, Aiken, "Beyond data and model parallelism for deep neural networks", MLSys 2019,
arXiv:1807.05358 (FlexFlow).
"""

from jpipe.soap.chain import AdditiveCosts, chain_optimum
from jpipe.soap.costs import Analytic, Costs, Profile
from jpipe.soap.delta import Simulator
from jpipe.soap.execute import (
    apply,
    argument_shardings,
    device_mesh,
)
from jpipe.soap.exhaustive import Optimum, exhaustive
from jpipe.soap.graph import Input, Loop, Operator, OperatorGraph, Tensor
from jpipe.soap.machine import (
    Level,
    Link,
    Machine,
    k80_cluster,
    measured,
    p100_cluster,
    read_machine,
)
from jpipe.soap.search import Found, default_starts, search, starts_of
from jpipe.soap.simulate import Simulated, simulate
from jpipe.soap.space import Space, random_strategy
from jpipe.soap.strategy import (
    EXPERTS,
    Config,
    Strategy,
    as_records,
    check_strategy,
    data_parallel,
    from_records,
    load_strategy,
    megatron,
    model_parallel,
    one_weird_trick,
    save_strategy,
)
from jpipe.soap.trace import trace

__all__ = [
    "EXPERTS",
    "AdditiveCosts",
    "Analytic",
    "Config",
    "Costs",
    "Found",
    "Input",
    "Level",
    "Link",
    "Loop",
    "Machine",
    "Operator",
    "OperatorGraph",
    "Optimum",
    "Profile",
    "Simulated",
    "Simulator",
    "Space",
    "Strategy",
    "Tensor",
    "apply",
    "argument_shardings",
    "as_records",
    "chain_optimum",
    "check_strategy",
    "data_parallel",
    "default_starts",
    "device_mesh",
    "exhaustive",
    "from_records",
    "k80_cluster",
    "load_strategy",
    "measured",
    "megatron",
    "model_parallel",
    "one_weird_trick",
    "p100_cluster",
    "random_strategy",
    "read_machine",
    "save_strategy",
    "search",
    "simulate",
    "starts_of",
    "trace",
]
