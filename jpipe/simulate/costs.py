"""The costs of a table's operations, and the times that follow from them.

Letters: S stages, s a stage; D devices, d a device; C columns, c a column; N microbatches,
m a microbatch; T ticks, t a tick.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from jpipe._util.foreign import shown

_KINDS = ("forward", "backward", "weight_grad")
TRANSFERS = {"forward": "transfer", "backward": "gradient_transfer"}
"""Kind of operation -> the name of the cost of its message."""

# A cost that is None is the sum of these costs.
_SUM_OF = {
    "fused_backward": ("backward", "weight_grad"),
    "gradient_transfer": ("transfer",),
    "gradient_exchange": ("exchange",),
}

EXCHANGES = {"forward": "exchange", "backward": "gradient_exchange", "weight_grad": "weight_exchange"}
"""Kind of operation -> the name of the cost of the collectives in its layers."""

SUMS = {"forward": "sums", "backward": "gradient_sums", "weight_grad": "weight_sums"}
"""The same for the collectives that compute never hides."""

COLLECTIVES = (*EXCHANGES.values(), *SUMS.values())


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the operations of one microbatch, in any one unit.

    A time is a number, or `[S]`, one per stage.

    Attributes:
      forward: time of a stage's forward.
      backward: time of a stage's input gradient.
      weight_grad: time of a stage's weight gradient. In a table that does not split backwards,
        one operation computes both gradients and sends the input gradient at its end.
      transfer: time from the end of a forward until the device of the next stage can read the
        output. `[S]`: entry s is the message from stage s to stage s + 1.
      gradient_transfer: time from the end of a backward until the device of the stage before
        can read the gradient. `[S]`: entry s is the message from stage s + 1 to stage s.
        None: the same as `transfer`.
      fused_backward: time of both gradients in one operation. None: the sum of `backward` and
        `weight_grad`.
      exchange: time of the collectives in the layers of a stage, such as the all-to-alls of
        experts, in a forward, beside its compute. They pass while the device computes for another
        microbatch in the same tick; for the rest of them it waits. Lockstep only.
      gradient_exchange: the same in an input gradient, or in a backward that is not split. None: the same as
        `exchange`.
      weight_exchange: the same in a weight gradient of a split backward.
      sums, gradient_sums, weight_sums: the same for collectives that the device always waits for, such as sums of
        gradients on a TPU.
      overlaps: whether exchanges pass while the device computes, as above. If not, it waits for all of them.
      update: time of a stage's optimizer, once per minibatch, with the sum over its copies.
      tick: time that devices lose by waiting for each other, per tick that sends messages,
        and once more per tick that updates. Lockstep only.
      jitter: fraction by which a tick is longer if several devices compute in it: their
        times vary from run to run, and all wait for the slowest. Lockstep only.
      num_cores: number of cores that all devices share, as simulated devices of a CPU do.
        All times are then of one core. None: every device has its own. Lockstep only.
      cores_per_device: the most cores that one device can use at a time.

    Raises:
      ValueError: if a cost is negative or not a number.
    """

    forward: ArrayLike = 1.0
    backward: ArrayLike = 1.0
    weight_grad: ArrayLike = 1.0
    transfer: ArrayLike = 0.0
    gradient_transfer: ArrayLike | None = None
    fused_backward: ArrayLike | None = None
    exchange: ArrayLike = 0.0
    gradient_exchange: ArrayLike | None = None
    weight_exchange: ArrayLike = 0.0
    sums: ArrayLike = 0.0
    gradient_sums: ArrayLike = 0.0
    weight_sums: ArrayLike = 0.0
    overlaps: bool = True
    update: ArrayLike = 0.0
    tick: float = 0.0
    jitter: float = 0.0
    num_cores: float | None = None
    cores_per_device: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            cost = getattr(self, field.name)
            if field.name == "overlaps" or (cost is None and field.default is None):
                continue
            value = np.asarray(cost)
            is_fraction = field.name == "jitter"
            fits = value.dtype.kind in "iuf" and (value >= 0).all()
            if not fits or (is_fraction and np.isinf(value)):
                if is_fraction:
                    raise ValueError(
                        f"`jitter` must be a fraction of a tick, at least 0, got {shown(cost)}: "
                        "0.05 makes a tick 5% longer."
                    )
                raise ValueError(
                    f"`{field.name}` must be at least 0, got {shown(cost)}: it is a time. Pass "
                    "seconds, or multiples of one forward."
                )
        for name in ("num_cores", "cores_per_device"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)}: nothing would run.")

    def of_stages(self, num_stages: int) -> dict[str, np.ndarray]:
        """Name of a cost -> `[S]`, the time on each stage, with no cost left None.

        Raises:
          ValueError: if a cost is an array for another number of stages.
        """
        costs: dict[str, np.ndarray] = {}
        for name in (*_KINDS, "fused_backward", *COLLECTIVES, "update", *TRANSFERS.values()):
            cost = getattr(self, name)
            if cost is None:
                costs[name] = np.sum([costs[part] for part in _SUM_OF[name]], axis=0)
                continue
            value = np.asarray(cost, float)
            if value.ndim and value.shape != (num_stages,):
                raise ValueError(
                    f"`{name}` must be a number or one for each of the {num_stages} stages, got shape {value.shape}."
                )
            costs[name] = np.broadcast_to(value, num_stages)
        return costs


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """The time of every operation of a table.

    Attributes:
      makespan: the time of a minibatch. In an asynchronous table, of a round of the steady state.
      busy: `[D]`, the time that each device computes. With shared cores, the time that its
        work takes on one core.
      transfer: `[D]`, the time of the messages that each device sends. In lockstep all
        devices wait for the messages of a tick; otherwise messages travel while devices
        compute.
      span: `[D]`, the time from the start of a device's first operation to the end of its last. In
        an asynchronous table, the makespan.
      start: kind of operation -> `[N, C]`, when each operation starts; NaN if the table
        has no such operation. For an asynchronous table these are times of a later round,
        counted from its start.
      end: kind of operation -> `[N, C]`, when each operation ends.
      num_processors: the number of devices that can compute at full speed at a time: D, or fewer if
        they share cores.
      exchange: `[D]`, the time of the collectives in the layers of each device.
      exposed: `[D]`, the part of it in which the device waits, because it computes nothing else. Nonzero only in
        lockstep.
      communicating: the part of the makespan in which all devices wait for messages.
        Nonzero only in lockstep.
    """

    makespan: float
    busy: np.ndarray
    transfer: np.ndarray
    span: np.ndarray
    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]
    num_processors: float
    exchange: np.ndarray
    exposed: np.ndarray
    communicating: float = 0.0

    @property
    def idle(self) -> np.ndarray:
        """`[D]`, the makespan without the time that each device computes."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """The idle fraction of all processors' time."""
        return float(1 - self.busy.sum() / (self.num_processors * self.makespan))

    @property
    def inner_bubble(self) -> float:
        """The idle fraction between each device's first and last operation.

        It remains if the next step fills the gaps at both ends.
        """
        return float(1 - self.busy.sum() / self.span.sum())
