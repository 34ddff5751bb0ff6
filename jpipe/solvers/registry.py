"""The solvers of graphs by name.

A new solver is a file beside this one and an entry in `SOLVERS`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean
from jpipe.solvers._ideals import ideals
from jpipe.solvers._linearised import linearised
from jpipe.solvers._pipedream import pipedream
from jpipe.solvers._throughput_ip import throughput_ip
from jpipe.solvers.chain import split_chain
from jpipe.solvers.graph import Solution


@dataclasses.dataclass(frozen=True)
class Solver:
    """A solver and its description.

    Attributes:
      solve: `(graph, num_devices, **options) -> Solution`. Its signature defines the options.
      finds: the result, in a phrase.
      proof: the proof about the result.
      takes_levels: whether `num_devices` and `bandwidth` may be sequences, with one number per
        level of the machine.
      needs_bandwidth: whether `bandwidth` must be given for every graph.
    """

    solve: Callable[..., Solution]
    finds: str
    proof: str
    takes_levels: bool = False
    needs_bandwidth: bool = False

    def takes(self, option: str) -> bool:
        """Returns whether `solve` has a keyword argument of this name."""
        return option in inspect.signature(self.solve).parameters


SOLVERS: dict[str, Solver] = {
    "pipedream": Solver(
        pipedream,
        finds="stages with replicas, on one level or several levels of a machine, by PipeDream's dynamic program",
        proof="optimal in its cost model",
        takes_levels=True,
        needs_bandwidth=True,
    ),
    "ideals": Solver(
        ideals,
        finds="contiguous stages of any graph; transfers are counted, and backward nodes share their forward's device",
        proof="optimal",
    ),
    "linearised": Solver(
        linearised,
        finds="contiguous stages along one topological order: fast, and close to the best",
        proof="a lower bound",
    ),
    "ip": Solver(
        throughput_ip,
        finds="the stages of `ideals` by an integer program, or stages that need not be contiguous",
        proof="optimal up to a gap, or a lower bound when time is up",
    ),
    "min-max": Solver(
        functools.partial(split_chain, solver="min-max"),
        finds="the chain of layers cut so that the slowest stage takes the least time",
        proof="optimal",
    ),
    "block": Solver(
        functools.partial(split_chain, solver="block"),
        finds="torchgpipe's cut of the same chain, for comparison",
        proof="none: up to 1.29 times as slow on random chains",
    ),
}


def names() -> list[str]:
    """The names that `get` knows."""
    return list(SOLVERS)


def get(name: str) -> Solver:
    """The solver called `name`.

    Raises:
      ValueError: if there is no solver of that name; suggests the nearest one.

    Example:
      >>> get("ideals").takes("num_hosts"), get("min-max").takes("bandwidth")
      (True, False)
    """
    if name in SOLVERS:
        return SOLVERS[name]
    guess = did_you_mean(name, names(), cutoff=0.4)
    raise ValueError(f"unknown solver {shown(name)}.{guess} Known: {', '.join(names())}.")
