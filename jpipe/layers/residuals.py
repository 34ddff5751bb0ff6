"""Chooses the values that a forward stashes for its backward: as few bytes as possible.

The backward of a layer reads *residuals*. A residual that depends on the parameters alone is rebuilt
from the weights of the backward. Of the others the stash need not hold each one: the derivative of
GELU, for example, is seven arrays, and all follow from one by elementwise operations. The stash is
the set of values with the least bytes from which *cheap* equations compute all residuals. The cheap
equations run again at the beginning of the backward, where XLA fuses them with the operations that
read their results.

The set is a minimum cut between the values that no cheap equation computes and the residuals, in the
graph of the forward's cheap equations, where a value has its bytes as capacity. The idea is that of
the partitioner of PyTorch 2.

Frozen weights, and state that no call writes, are at hand whenever a backward runs, so they are never stashed.

An equation is cheap if it works element by element. It may read parameters, and what cheap equations
compute of them, only if the backward runs on the weights of its forward. In PipeMare it runs on other
weights, and what the forward has computed from its weights must stay.

References:
  Ford and Fulkerson, "Maximal flow through a network", 1956 (the cut).
  Ansel et al., "PyTorch 2", ASPLOS 2024, section 4 (the partitioner).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jpipe.layers.avals import num_bytes
from jpipe.layers.cut import SINK, SOURCE, Network
from jpipe.layers.elementwise import ELEMENTWISE
from jpipe.layers.equations import Equations, contains, value_of, variables
from jpipe.layers.vjp import Arguments, Forward

_CHEAP = {*ELEMENTWISE, "broadcast_in_dim", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The sources of the residuals that a backward reads.

    Attributes:
      forward: the equations of the forward.
      at_hand: the inputs of the forward that the backward gets again: parameters, then constants.
      varying: the variables of the forward that depend on more than these.
      stash: the stashed variables of the forward, each once.
      inputs: the residual inputs of the backward.
      source: residual input of the backward -> variable or literal of the forward.
    """

    forward: Equations
    at_hand: tuple
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
        rereads_weights: bool,
    ) -> "Residuals":
        """Chooses the stash.

        Args:
          forward, backward, arguments: the forward, backward and arguments of the layer.
          trained, constants: see `LayerProgram`.
          rereads_weights: see `smallest_stash`.
        """
        equations = forward.equations
        parameters, _, extra = map(tuple, arguments.split(equations.inputs))
        constant = tuple(extra[i] for i in constants)
        at_hand = (*parameters, *constant)
        frozen = tuple(v for j, v in enumerate(parameters) if j not in trained)
        varying = equations.depending_on(set(equations.inputs).difference(at_hand))
        wanted = [v for v in variables(forward.residuals) if v in varying]
        inputs = backward.inputs[: len(forward.residuals)]
        return cls(
            forward=equations,
            at_hand=at_hand,
            varying=varying,
            stash=smallest_stash(
                equations,
                [parameters[j] for j in trained],
                (*frozen, *constant),
                varying,
                wanted,
                rereads_weights=rereads_weights,
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
        rebuild = self.forward.slice((*self.at_hand, *self.stash), tuple(wanted))
        read = rebuild.read()
        return Reader(
            equations,
            rebuild,
            sources,
            {i for i, v in enumerate(self.stash) if v in read},
        )


class Reader(NamedTuple):
    """Backward equations, and how their residual inputs are computed.

    Attributes:
      equations: the backward equations.
      rebuild: computes residuals from the parameters, the constants and the stash.
      sources: per residual input, the forward's variable or literal, or None if nothing reads it.
      reads: the positions in the stash that are read.
    """

    equations: Equations
    rebuild: Equations
    sources: list
    reads: set[int]

    def run(self, at_hand: Sequence, stash: Sequence, others: Sequence) -> list:
        """Evaluates the equations.

        Args:
          at_hand: parameters, then constants.
          stash: the stash.
          others: the inputs of the equations after the residuals.
        """
        values = self.rebuild(*at_hand, *stash)
        env = dict(zip(self.rebuild.outputs, values))
        residuals = [None if s is None else value_of(env, s) for s in self.sources]
        return self.equations(*residuals, *others)


# -- The smallest stash


def smallest_stash(
    forward: Equations,
    parameters: Sequence,
    fixed: Sequence,
    varying: set,
    residuals: Iterable,
    rereads_weights: bool,
) -> list:
    """The variables with the least bytes from which cheap equations compute `residuals`.

    Of several sets with the least bytes, the one after which the fewest equations run again.

    Args:
      forward: the equations of the forward.
      parameters: the inputs that are trained parameters.
      fixed: the inputs that never change; cheap equations may read them.
      varying: the variables that depend on more than these.
      residuals: variables in `varying`.
      rereads_weights: whether cheap equations may read parameters.

    Returns:
      The variables in the order in which the forward computes them.
    """
    # What a cheap equation may not read. What takes time to compute of the parameters would be
    # computed again.
    refused = forward.depending_on({*parameters, *fixed}) - varying - set(fixed)
    if rereads_weights:
        refused -= set(parameters)
    order = [v for v in forward.inputs if v in varying]
    network = Network()
    for v in order:
        network.connect(SOURCE, (v, "in"))
    for eqn in forward.equations:
        results = [v for v in eqn.outvars if v in varying]
        order += results
        operands = variables(eqn.invars)
        is_cheap = eqn.primitive.name in _CHEAP and not eqn.effects
        if is_cheap and refused.isdisjoint(operands):
            refused.difference_update(eqn.outvars)
            starts: list = [(u, "out") for u in operands if u in varying]
        else:
            starts = [SOURCE]
        for start, v in itertools.product(starts, results):
            network.connect(start, (v, "in"))
    for v in order:
        network.connect((v, "in"), (v, "out"), num_bytes([v.aval]))
    for v in dict.fromkeys(residuals):
        network.connect((v, "out"), SINK)
    after = network.sink_side()
    return [v for v in order if (v, "out") in after and (v, "in") not in after]
