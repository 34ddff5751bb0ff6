"""Chooses the values that a forward stashes for its backward: what is cheaper to compute again is not stashed.

The backward of a layer reads *residuals*. A residual that depends on the parameters alone is rebuilt
from the weights of the backward. Of the others the stash need not hold each one: the derivative of
GELU, for example, is seven arrays, and all follow from one by elementwise operations. The probabilities
of attention are positions x positions numbers, and follow from queries and keys by one product.

The stash is the set of values that takes the least time, together with the equations that compute all
residuals from it in the backward. Time is counted in bytes that are written or read in that time:

    a value in the stash              2 x its bytes, written once and read once
    an input that is handed on        its bytes, for the layers of a stage write it once
    an elementwise equation           0, XLA fuses it with the operations that read its result
    a product of activations          its FLOPs / the FLOPs per byte of the platform, and the bytes of its result
    a copy (slice, concatenate, ...)  the bytes of its result
    a map of elementwise equations    0, see `jpipe.layers.mapped_residuals`
    any other equation                never runs again

A product does not count its operands: the products of the backward read them anyway. A product with
parameters never runs again: who wants that asks for `recompute`.

The set is a minimum cut between the values that no equation computes again and the residuals, in the
graph of the forward's equations. A value has the time of its stash as capacity, an equation its time to
run again. The idea is that of the partitioner of PyTorch 2.

Frozen weights, and state that no call writes, are at hand whenever a backward runs, so they are never stashed. So are
the values of `jpipe.whole_sequence`: what a slice has read of them, later slices have not changed.

The equations that run again may read parameters, as those of a norm or a bias do. They need the parameters of the
forward. If the backward runs on these, a parameter is at hand too. In PipeMare, or with parameter hooks, it runs on
others. There a parameter is stashed like another value: the cut chooses it, or what the forward has computed of it
alone, where that is fewer bytes than what follows. It does for a norm, whose scale and bias are two rows beside the
many of its result, and not for a matrix. The bytes are those of whole arrays, also on a mesh that splits the rows of an
activation and not a row of weights. The rest of the backward reads its own weights in all cases.

References:
  Ford and Fulkerson, "Maximal flow through a network", 1956 (the cut).
  Ansel et al., "PyTorch 2", ASPLOS 2024, section 4 (the partitioner).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jpipe._slices import appended_p
from jpipe.layers.avals import num_bytes
from jpipe.layers.cut import SINK, SOURCE, Network
from jpipe.layers.elementwise import ELEMENTWISE
from jpipe.layers.equations import Equations, contains, value_of, variables
from jpipe.layers.mapped import mapped_p
from jpipe.layers.vjp import Arguments, Forward

FUSED = {*ELEMENTWISE, "broadcast_in_dim", "reshape", "squeeze", "transpose"}
COPIES = {"concatenate", "dynamic_slice", "pad", "rev", "slice", "split"}

AT_HAND, STASHED, UNREAD = 0, 2, math.inf
"""How often a stash moves the bytes of a parameter that equations read which run again.

At `AT_HAND` the backward runs on the weights of its forward, at `STASHED` on others. At `UNREAD` no equation that reads
a parameter runs again."""


@dataclasses.dataclass(frozen=True)
class Rerun:
    """What a backward may compute again rather than read from the stash.

    Attributes:
      weight_accesses: how often a stash moves the bytes of a parameter: `AT_HAND`, `STASHED` or `UNREAD`.
      flops_per_byte: the FLOPs that take as long as a byte that is written or read. At 0 only elementwise equations
        run again.
      compares_results: whether a ReLU's derivative reads its result, see `jpipe.layers.rectified`.
    """

    weight_accesses: float = UNREAD
    flops_per_byte: float = 0.0
    compares_results: bool = False

    def time(self, eqn: Any) -> float:
        """The time of an equation, in bytes written or read; infinite if it never runs again."""
        name = eqn.primitive.name
        if eqn.effects:
            return math.inf
        if eqn.primitive is mapped_p:  # what communicates, or multiplies, never runs again
            return math.inf if any(map(self.time, eqn.params["jaxpr"].jaxpr.eqns)) else 0
        if name in FUSED:
            return 0
        written = num_bytes(v.aval for v in eqn.outvars)
        if name in COPIES:
            return written
        if name == "dot_general" and self.flops_per_byte:
            # A whole number, so that flows are exact.
            return written + math.ceil(_product_flops(eqn) / self.flops_per_byte)
        return math.inf


ELEMENTWISE_ONLY = Rerun()


def _product_flops(eqn: Any) -> int:
    (summed, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * eqn.outvars[0].aval.size * math.prod(shape[dim] for dim in summed)


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The sources of the residuals that a backward reads.

    Attributes:
      forward: the equations of the forward.
      weights: the parameters and the constants, in the order in which the backward gets them.
      at_hand: the variables of the forward whose values the backward has, for what it computes again -> the position
        of this value in what it gets: parameters, then constants, then inputs that are kept.
      varying: the variables of the forward that depend on more than `weights`.
      stash: the stashed variables of the forward, each once.
      inputs: the residual inputs of the backward.
      source: residual input of the backward -> variable or literal of the forward.
    """

    forward: Equations
    weights: tuple
    at_hand: dict[Any, int]
    varying: set
    stash: list
    inputs: tuple
    source: dict

    @classmethod
    def of(
        cls,
        forward: Forward,
        backward: Equations,
        arguments: Arguments,
        trained: Sequence[int],
        constants: Sequence[int],
        kept: Sequence[int],
        rerun: Rerun,
    ) -> "Residuals":
        """Chooses the stash.

        Args:
          forward, backward, arguments: the forward, backward and arguments of the layer.
          trained, constants, kept: see `LayerProgram`.
          rerun: what the backward may compute again.
        """
        equations = forward.equations
        parameters, given, extra = map(tuple, arguments.split(equations.inputs))
        constant = tuple(extra[i] for i in constants)
        weights = (*parameters, *constant)
        position = {v: i for i, v in enumerate((*weights, *(given[i] for i in kept)))}
        # The results of `appended` on what is kept have its values in the backward.
        position |= {
            eqn.outvars[0]: position[eqn.invars[0]]
            for eqn in equations.equations
            if eqn.primitive is appended_p and contains(position, eqn.invars[0])
        }
        handed_on = {*variables(forward.results[: len(forward.outputs)])}.intersection(equations.inputs)
        accesses = dict.fromkeys(handed_on, 1) | dict.fromkeys(position, AT_HAND)
        accesses |= dict.fromkeys((parameters[j] for j in trained), rerun.weight_accesses)
        varying = equations.depending_on(set(equations.inputs).difference(weights))
        inputs = backward.inputs[: len(forward.residuals)]
        return cls(
            forward=equations,
            weights=weights,
            at_hand={v: i for v, i in position.items() if accesses[v] == AT_HAND},
            varying=varying,
            stash=cheapest_stash(
                equations, weights, [v for v in variables(forward.residuals) if v in varying], rerun, accesses
            ),
            inputs=inputs,
            source=dict(zip(inputs, forward.residuals)),
        )

    @property
    def varying_inputs(self) -> list:
        """The residual inputs that depend on more than the parameters."""
        return [v for v in self.inputs if contains(self.varying, self.source[v])]

    def reader(self, equations: Equations) -> "Reader":
        """Prepares backward equations to run on the stash, and on parameters and constants."""
        used = equations.read()
        sources = [self.source[v] if v in used else None for v in self.inputs]
        wanted = dict.fromkeys(variables(s for s in sources if s is not None))
        of_weights = self.forward.slice(self.weights, [v for v in wanted if v not in self.varying])
        again = self.forward.slice((*self.at_hand, *self.stash), [v for v in wanted if v in self.varying])
        read = again.read()
        reads = {i for i, v in enumerate(self.stash) if v in read}
        return Reader(equations, of_weights, again, tuple(self.at_hand.values()), sources, reads)


class Reader(NamedTuple):
    """Backward equations, and how their residual inputs are computed.

    Attributes:
      equations: the backward equations.
      of_weights: computes the residuals that depend on the parameters and the constants alone.
      again: computes the other residuals from values at hand and the stash.
      at_hand: the positions of these values in what the backward gets.
      sources: per residual input, the forward's variable or literal, or None if nothing reads it.
      reads: the positions in the stash that are read.
    """

    equations: Equations
    of_weights: Equations
    again: Equations
    at_hand: tuple[int, ...]
    sources: list
    reads: set[int]

    def run(self, given: Sequence, stash: Sequence, others: Sequence) -> list:
        """Evaluates the equations.

        Args:
          given: parameters, then constants, then inputs that are kept.
          stash: the stash.
          others: the inputs of the equations after the residuals.
        """
        weights = given[: len(self.of_weights.inputs)]
        env = dict(zip(self.of_weights.outputs, self.of_weights(*weights)))
        env |= zip(self.again.outputs, self.again(*(given[i] for i in self.at_hand), *stash))
        residuals = [None if s is None else value_of(env, s) for s in self.sources]
        return self.equations(*residuals, *others)


# -- The cheapest stash


def cheapest_stash(
    forward: Equations,
    weights: Sequence,
    residuals: Iterable,
    rerun: Rerun,
    accesses: Mapping,
) -> list:
    """The variables from which `residuals` follow in the least time, that of the stash included.

    Of several such sets, the one after which the fewest equations run again.

    Args:
      forward: the equations of the forward.
      weights: the inputs that are parameters or constants.
      residuals: variables that depend on other inputs too.
      rerun: what may run again, and how long it takes.
      accesses: inputs, and other variables -> how often a stash moves their bytes; 2 times without an entry. What is
        handed on is written once for all layers of a stage. `AT_HAND` for what the backward gets again.

    Returns:
      The variables in the order in which the forward computes them.
    """
    moving = forward.depending_on(forward.inputs)
    of_weights = forward.depending_on(weights) - forward.depending_on(set(forward.inputs).difference(weights))
    network = Network()
    for v in forward.inputs:
        network.connect(SOURCE, (v, "in"))
    for i, eqn in enumerate(forward.equations):
        operands = [u for u in variables(eqn.invars) if u in moving]
        time = rerun.time(eqn)
        if time > 0 and not of_weights.isdisjoint(operands):
            time = math.inf
        # An equation runs again if it is on the side of the sink.
        network.connect(SOURCE, i, time)
        for u in operands if time < math.inf else ():
            network.connect((u, "out"), i)
        for v in eqn.outvars if operands else ():
            network.connect(i, (v, "in"))
    order = [*forward.inputs, *(v for eqn in forward.equations for v in eqn.outvars if v in moving)]
    for v in order:
        times = accesses.get(v, max(STASHED, rerun.weight_accesses) if v in of_weights else STASHED)
        network.connect((v, "in"), (v, "out"), times and times * max(num_bytes([v.aval]), 1))
    for v in dict.fromkeys(residuals):
        network.connect((v, "out"), SINK)
    after = network.sink_side()
    return [v for v in order if (v, "out") in after and (v, "in") not in after and accesses.get(v, STASHED)]
