"""The parts of a pipeline that are in the memory of the host, instead of the memory of its devices."""

import dataclasses
import numbers
from typing import Any, NamedTuple

from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe.packing import CHUNK


@suggests
@dataclasses.dataclass(frozen=True)
class Offload:
    """The parts that `Pipeline(offload=...)` keeps in host memory. The operations of a training do not change, with one
    exception: the norm of gradients in host memory is summed chunk by chunk, so its last bits may differ.

    Attributes:
      optimizer: the part of the optimizer's state, from 0 to 1. A weight's part of the state is in host memory
        or on the device as a whole. An update brings the state of one weight, or of a block of weights, to
        the device and back.
      activations: the most microbatches whose stashes stay on a device, at least 2; None: all. The stash of
        another microbatch goes to the host in the tick after its forward, and is back before its backward.
        Which microbatches go follows from the table, by Belady's rule: see `jpipe.lowering.spills`.
      chunk: the most numbers of a weight whose state an update brings to the device at once, at least 1024. A
        few arrays of a chunk are on the device during an update.
      required: whether a pipeline is refused on devices that cannot use host memory. If False, it trains without
        offloading there, and says so.
      weights: the part of the weights of stages, from 0 to 1: whole weights, the largest first. A forward and a
        backward bring the weights of a layer to the device while they run the layer before. An update brings a chunk
        of a weight to the device and back.
      gradients: the part of the gradients of stages. A backward brings the gradients of a layer to the device, adds to
        them, and takes them back.

    References:
      Fang et al., PatrickStar, 2021, arXiv:2108.05818. Belady, A study of replacement algorithms for a
      virtual-storage computer, 1966.

    Example:
      >>> Offload(optimizer=1.0, activations=2)
      Offload(optimizer=1.0, activations=2, chunk=1048576, required=True, weights=0.0, gradients=0.0)
    """

    optimizer: float = 0.0
    activations: int | None = None
    chunk: int = CHUNK
    required: bool = True
    weights: float = 0.0
    gradients: float = 0.0

    def __post_init__(self) -> None:
        _check_share("optimizer", self.optimizer, "optimizer's state")
        _check_share("weights", self.weights, "weights")
        _check_share("gradients", self.gradients, "gradients")
        chunk: Any = self.chunk
        if not isinstance(chunk, numbers.Integral) or chunk < LEAST_CHUNK:
            raise ValueError(
                "`chunk` of `Offload` is the number of weights whose state moves at once, a whole number of at least "
                f"{LEAST_CHUNK} (a tile of a TPU), got {shown(chunk)}."
            )
        kept: Any = self.activations
        if kept is None:
            return
        if not isinstance(kept, numbers.Integral) or isinstance(kept, bool) or kept < LEAST_SLOTS:
            raise ValueError(
                "`activations` of `Offload` is the number of microbatches whose stashes stay on a device, a whole "
                f"number of at least {LEAST_SLOTS} (one that is written and one that is read), got {shown(kept)}. None "
                "keeps all."
            )

    def __bool__(self) -> bool:
        """Returns whether anything is offloaded."""
        shares = self.optimizer, self.weights, self.gradients
        return max(shares) > 0 or self.activations is not None


def _check_share(name: str, share: Any, what: str) -> None:
    is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= 1:
        raise ValueError(
            f"`{name}` of `Offload` is the part of the {what} that goes to host memory, from 0 to 1, got "
            f"{shown(share)}. 1.0 keeps all of it there."
        )


class HostMoves(NamedTuple):
    """Number of moves of values in host memory in a step.

    Attributes:
      optimizer: moves of a byte of the optimizer's state.
      weights: moves of a byte of a weight.
      gradients: moves of a byte of a gradient.
    """

    optimizer: int
    weights: int
    gradients: int

    @classmethod
    def of(cls, num_microbatches: int, passes: int) -> "HostMoves":
        """Counts the moves of a table.

        Every forward and every backward of a microbatch brings a weight. A backward brings a gradient and takes it
        back. An update brings and takes back weight, gradient and state, and brings the gradient once more for its
        norm.

        Args:
          num_microbatches: N.
          passes: reads of a weight for a microbatch: 2, and one more each where a backward is split and where it
            runs the forward again.
        """
        return cls(2, passes * num_microbatches + 2, 2 * num_microbatches + 3)


LEAST_CHUNK = 1024
"""The smallest chunk, in numbers."""

LEAST_SLOTS = 2
"""The fewest slots of a stash on a device: a forward writes one while a backward reads the other."""

NO_OFFLOAD = Offload()
"""All is on the devices."""
