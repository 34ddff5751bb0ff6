"""Stashes a value once in a stage, however many layers of the stage read it.

A mask, or the memory of an encoder, goes from layer to layer unchanged, and each layer that reads it has it in its
stash. A layer such as `tanh` stashes its result, and so does the layer that multiplies it. The layers of a stage share
one place for such a value, which the first of them writes.

    layer 0   computes memory -> stash
    layer 1   reads memory -> (same place), hands memory on
    layer 2   reads memory -> (same place)

A run of equal layers is a loop, which carries its values in fixed positions. So the layers of a run share what they
hand on in the position that they read it from.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jpipe.layers.backward import LayerValues
from jpipe.packing import Leaf, Place
from jpipe.stages.groups import Groups


class SharedValue(NamedTuple):
    """A value of the stash of a run that is in one place for all layers of the run.

    Attributes:
      ring: the ring of the stash.
      position: position among the places of the run in this ring.
      input: the input of the run that it is.
      writer: the run that writes it, and its position there: this run, which writes it before its layers run, or an
        earlier one.
    """

    ring: str
    position: int
    input: int
    writer: tuple[int, int]


class SharedStashes:
    """The values that layers of the stages of a model share.

    Attributes:
      values: `[programs][runs]`, the shared values of a run.
    """

    def __init__(
        self,
        groups: Groups,
        values_of: Callable[[Any], LayerValues],
        num_leaves: Mapping[str, int],
    ):
        """Finds them.

        Args:
          groups: the stages; a kind has the names `stash` and `pop` of skips.
          values_of: kind -> the values of a layer of this kind.
          num_leaves: name of a skip -> its number of leaves.
        """
        self.values = [
            _shared_values([(kind, values_of(kind), n) for kind, n in zip(signature, longest, strict=True)], num_leaves)
            for signature, longest in zip(groups.signatures, groups.longest, strict=True)
        ]

    def written(self, ring: str, p: int, r: int, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves that run `r` of program `p` writes in a ring: those of each layer, then those of all layers."""
        alone, once = self._positions(ring, p, r, len(leaves))
        return [*(leaves[j] for j in alone), *(leaves[j]._replace(count=1) for j in once)]

    def places(self, ring: str, p: int, numbers: Sequence[int], places: Iterator[Place]) -> list[tuple[Place, ...]]:
        """The places of the stash of a layer, for each run of program `p`.

        Args:
          ring: the ring.
          p: number of the program.
          numbers: for each run the number of values that a layer stashes in the ring.
          places: those of the leaves that the runs write, in the order of `written`.
        """
        at: dict[tuple[int, int], Place] = {}
        for r, number in enumerate(numbers):
            alone, once = self._positions(ring, p, r, number)
            at |= {(r, j): next(places) for j in alone}
            at |= {(r, j): dataclasses.replace(next(places), stride=0) for j in once}
            at |= {(r, v.position): at[v.writer] for v in self.values[p][r] if v.ring == ring}
        return [tuple(at[r, j] for j in range(number)) for r, number in enumerate(numbers)]

    def _positions(self, ring: str, p: int, r: int, number: int) -> tuple[list[int], list[int]]:
        """The positions of what each layer writes, and of what the run writes once."""
        shared = {v.position: v.writer for v in self.values[p][r] if v.ring == ring}
        once = [j for j, writer in shared.items() if writer == (r, j)]
        return [j for j in range(number) if j not in shared], once


def _shared_values(
    runs: Sequence[tuple[Any, LayerValues, int]], num_leaves: Mapping[str, int]
) -> list[tuple[SharedValue, ...]]:
    """The shared values of each run of a program, from the kind, the values and the number of its layers."""
    writers: dict[tuple[str, Any], tuple[int, int]] = {}
    skips: dict[str, list] = {}
    arriving: list = []  # a name for each value that arrives at the run, equal for equal values
    result = []
    for r, (kind, values, length) in enumerate(runs):
        popped = [name for skip in kind.pop for name in skips.pop(skip, _names(skip, num_leaves[skip]))]
        inputs = (arriving or _names("inputs", values.num_inputs - len(popped))) + popped
        is_loop = length > 1
        stays = [j for j, _ in enumerate(inputs) if not is_loop or values.handed_on[j : j + 1] == (j,)]
        outputs = [inputs[j] if j in stays else (r, k) for k, j in enumerate(values.handed_on)]
        shared = []
        for ring, stashed in (("input_stash", values.input_stash), ("weight_stash", values.weight_stash)):
            for position, value in enumerate(stashed):
                if value.input in stays:
                    writer = writers.setdefault((ring, inputs[value.input]), (r, position))
                    shared.append(SharedValue(ring, position, value.input, writer))
                elif value.output is not None and not is_loop:
                    writers[ring, outputs[value.output]] = r, position
        result.append(tuple(shared))
        for skip in reversed(kind.stash):
            start = len(outputs) - num_leaves[skip]
            skips[skip], outputs = outputs[start:], outputs[:start]
        arriving = outputs
    return result


def _names(name: str, number: int) -> list:
    return [(name, i) for i in range(number)]
