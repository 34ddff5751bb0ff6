"""How much faster a search over splits of operators is with delta simulation than with full simulation.

    python benchmarks/soap_search.py
    python benchmarks/soap_search.py --layers 4 --devices 4 16 64 --proposals 100
    python benchmarks/soap_search.py --devices 4 8 16 32 64 --proposals 40 --draw docs/images/soap_delta.svg

Both searches make the same proposals from data parallelism and take the same ones: the delta simulation returns the
same seconds to the last bit, which the program checks. The full search builds the task graph anew for every proposal,
and simulates all of it (FlexFlow, algorithm 1); regions and their intersections are cached for both. A round of
proposals fills the caches before the clock starts. The seconds are those of the processor in this program alone.
FlexFlow's paper reports 2.2 to 6.9 times, growing with the number of devices (arXiv:1807.05358, table 4). The model is
a transformer.
"""

import argparse
import itertools
import math
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import soap_graphs

from jpipe import soap
from jpipe.soap.search import walk
from jpipe.soap.shards import Shards
from jpipe.soap.simulate import full_simulation, without_collection
from jpipe.soap.tasks import Tasks


class FullSimulator:
    """The interface of `jpipe.soap.Simulator`, but every change builds and simulates everything."""

    def __init__(self, graph, machine, costs, strategy, shards):
        self.tasks = Tasks(graph, machine, costs, strategy, shards=shards)
        self.seconds = full_simulation(self.tasks).seconds

    def try_change(self, operator, config, limit=math.inf, memory_limit=math.inf):
        self._old = operator, self.tasks.strategy[operator]
        self.tasks.strategy[operator] = config
        without_collection(self.tasks.rebuild)()
        self._new = full_simulation(self.tasks).seconds
        return self._new if self._new <= limit else math.inf

    def keep(self):
        self.seconds = self._new

    def undo(self):
        operator, config = self._old
        self.tasks.strategy[operator] = config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--proposals", type=int, default=100)
    parser.add_argument("--draw", metavar="FILE", help="draw the ratio by devices")
    args = parser.parse_args()
    ratios = []
    graph = soap_graphs.transformer(args.layers, 64, 128, 256, 8, 4096)
    print(f"{len(graph.operators)} operators")
    print("devices  tasks  full ms  delta ms  times faster")
    for num_devices in args.devices:
        machine = soap.k80_cluster().with_devices(num_devices)
        costs = soap.Analytic(machine)
        start = soap.data_parallel(graph, num_devices)
        space = soap.Space(graph, num_devices)
        shards = Shards(graph, costs)
        beta = 300 / soap.simulate(graph, machine, start, costs).seconds
        seconds = {}
        for name, kind in (("delta", soap.Simulator), ("full", FullSimulator)):
            for _ in range(2):  # the first time fills what `shards` keeps
                simulator = kind(graph, machine, costs, start, shards=shards)
                chain = walk(simulator, space, beta, np.random.default_rng(0))
                began = time.process_time()
                for _ in itertools.islice(chain, args.proposals):
                    pass
                elapsed = time.process_time() - began
            seconds[name] = elapsed, simulator.seconds
        assert seconds["delta"][1] == seconds["full"][1], "the searches differ"
        d, f = (1e3 * seconds[name][0] / args.proposals for name in ("delta", "full"))
        count = sum(len(block.tasks) for block in simulator.tasks.blocks)
        print(f"{num_devices:7}  {count:5}  {f:7.2f}  {d:8.2f}  {f / d:12.1f}", flush=True)
        ratios.append(f / d)
        if args.draw:
            draw(args.draw, args.devices, ratios)


PAPER = 2.2, 6.9
"""The least and the largest ratio of FlexFlow's table 4."""


def draw(path: str, devices: list[int], ratios: list[float]) -> None:
    """Draws how much faster the search is, by the number of devices."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    matplotlib.rcParams["font.size"] = 8
    axes = figure.subplots()
    known = devices[: len(ratios)]
    axes.axhspan(*PAPER, color="#dddddd", lw=0)
    axes.text(known[0], PAPER[0], " FlexFlow's paper: 2.2 to 6.9", va="bottom", size=8)
    axes.plot(known, ratios, marker="o", color="#2b6cb0")
    for i, (x, y) in enumerate(zip(known, ratios)):
        # The label stands on the side that the line leaves free.
        rises = y < ratios[min(i + 1, len(ratios) - 1)]
        offset, side = ((-2, 6), "right") if rises else ((2, 6), "left")
        axes.annotate(f"{y:.1f}", (x, y), offset, textcoords="offset points", ha=side)
    axes.set_xscale("log", base=2)
    axes.margins(x=0.1)
    axes.set_xticks(known, [str(x) for x in known])
    axes.set_ylim(0, 1.15 * max(*ratios, PAPER[1]))
    axes.set_xlabel("devices")
    axes.set_ylabel("times as fast as a full simulation")
    axes.spines[["top", "right"]].set_visible(False)
    options = {"svg.hashsalt": "jpipe", "svg.fonttype": "none"}
    with matplotlib.rc_context(options):
        is_svg = path.endswith(".svg")
        figure.savefig(path, metadata={"Date": None} if is_svg else None)


if __name__ == "__main__":
    main()
