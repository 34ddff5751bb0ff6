"""Options of messages between devices, and of the arrays that devices keep instead."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jpipe._util.foreign import shown
from jpipe.compress import Compressor, SparseCompressor, StreamingPCA
from jpipe.mesh import DATA
from jpipe.options import exclusions
from jpipe.options.checks import check_truth
from jpipe.options.local_steps import LocalSteps
from jpipe.options.record import Options
from jpipe.schedule import Schedule
from jpipe.stages.codecs import NO_COMPRESSION, MessageCompression
from jpipe.stages.shares import ReplicaCounts


@dataclasses.dataclass(frozen=True)
class Communication(Options):
    """The messages of devices, and their form. `Pipeline` has the meaning of the options.

    Attributes:
      overlap: whether messages are sent while the devices compute.
      shard_optimizer: whether the replicas of a stage share its update.
      compress_messages: the compressors of activations between stages, and of their gradients.
      compress_gradients: the compressor of gradients between replicas; None: they are sent as they are.
      accumulate_gradients: the form in which gradients that are products are accumulated; None: as they are.
      local_steps: the outer step of replicas that train apart; None: they exchange gradients.
    """

    overlap: bool
    shard_optimizer: bool
    compress_messages: MessageCompression
    compress_gradients: Compressor | None
    accumulate_gradients: StreamingPCA | None
    local_steps: LocalSteps | None = None

    @classmethod
    def checked(
        cls,
        mesh: Mesh,
        schedule: Schedule,
        *,
        overlap: Any,
        shard_optimizer: Any,
        compress_messages: Any,
        compress_gradients: Any,
        accumulate_gradients: Any,
        local_steps: Any = None,
    ) -> "Communication":
        """The options as a user gives them.

        Raises:
          ValueError: if one of them cannot be, on this mesh, in this schedule, or beside the others.
        """
        overlap = _check_overlap(overlap, mesh)
        shard = _check_shard_optimizer(shard_optimizer, mesh, schedule)
        messages = _check_compress_messages(compress_messages, mesh, schedule)
        gradients = _check_compress_gradients(compress_gradients, mesh, schedule, shard)
        exclude = {"compress_gradients": gradients, "shard_optimizer": shard}
        accumulate = _check_accumulate_gradients(accumulate_gradients, mesh, schedule, exclude)
        if not isinstance(local_steps, LocalSteps | None):
            raise ValueError(f"`local_steps` must be a `jpipe.LocalSteps`, got {shown(local_steps)}.")
        return cls(overlap, shard, messages, gradients, accumulate, local_steps)

    def check_local_steps(self, mesh: Mesh, schedule: Schedule, **others: Any) -> None:
        """Refuses `local_steps` where replicas cannot train apart.

        Args:
          mesh: the devices.
          schedule: the table.
          **others: further arguments of the pipeline that exclude it.

        Raises:
          ValueError: says why.
        """
        if self.local_steps is not None:
            names = ("shard_optimizer", "compress_gradients", "accumulate_gradients")
            self.local_steps.check(mesh, schedule, {name: getattr(self, name) for name in names} | others)

    @property
    def compresses(self) -> bool:
        """True if anything that is sent is compressed."""
        return self.compress_messages != NO_COMPRESSION or bool(self.compress_gradients)

    @property
    def compressors(self) -> dict[str, Any]:
        """Argument -> the compressor that is given for it; only those that are given."""
        given = {
            "compress_messages": self.compress_messages,
            "compress_gradients": self.compress_gradients,
            "accumulate_gradients": self.accumulate_gradients,
        }
        return {n: c for n, c in given.items() if c not in (None, NO_COMPRESSION)}

    def sharing_replicas(self, copies: Sequence[Sequence[int]], num_replicas: int) -> list[ReplicaCounts] | None:
        """For each stage the replicas that share its update; None if every replica updates all weights.

        Args:
          copies: for each stage the devices of its copies.
          num_replicas: replicas along the axis "data".
        """
        if not self.shard_optimizer:
            return None
        return [ReplicaCounts(len(devices), num_replicas) for devices in copies]

    @property
    def parts(self) -> dict[str, Any]:
        """See `Options`."""
        local_steps = None if self.local_steps is None else self.local_steps.text
        return super().parts | {"compress_messages": tuple(self.compress_messages), "local_steps": local_steps}


def _check_replicas(argument: str, mesh: Mesh, schedule: Schedule) -> None:
    """Refuses an argument for replicas where no stage has any."""
    if mesh.shape.get(DATA, 1) > 1 or schedule.has_copies:
        return
    raise ValueError(
        f"`{argument}` {exclusions.without_replicas(argument)} replica: the mesh has the axes {dict(mesh.shape)}. Give "
        "the mesh an "
        f'axis "data", for example by `jpipe.make_mesh(stage={schedule.num_devices}, data=2)`, give the schedule '
        f"`replicas`, or leave `{argument}` out."
    )


def _check_whole(argument: str, mesh: Mesh) -> None:
    """Refuses a mesh that splits arrays inside of a stage."""
    if why := exclusions.on_split_arrays(mesh.shape):
        raise ValueError(
            f"`{argument}` {why}: it has the axes {dict(mesh.shape)}. Leave these axes or `{argument}` out."
        )


def _check_overlap(overlap: Any, mesh: Mesh) -> bool:
    """`overlap`, decided by the platform of the devices if it is None."""
    if overlap not in (None, True, False):
        raise ValueError(
            f"`overlap` must be True, False or None, got {shown(overlap)}. With None the "
            "platform of the devices decides."
        )
    if overlap is None:
        return mesh.devices.flat[0].platform != "cpu"
    return overlap


def _check_shard_optimizer(shard: Any, mesh: Mesh, schedule: Schedule) -> bool:
    """`shard_optimizer`; there must be replicas that can share an update."""
    is_shared = check_truth("shard_optimizer", shard)
    if is_shared:
        _check_replicas("shard_optimizer", mesh, schedule)
    return is_shared


def _check_compress_messages(compress: Any, mesh: Mesh, schedule: Schedule) -> MessageCompression:
    """`compress_messages`; there must be several stages, whose messages are whole."""
    messages = message_compression(compress)
    if messages == NO_COMPRESSION:
        return messages
    if schedule.num_stages == 1:
        raise ValueError(
            "`compress_messages` compresses what stages send to each other, and there is one stage. Choose a schedule "
            "with more stages, or leave it out."
        )
    _check_whole("compress_messages", mesh)
    return messages


def _check_compress_gradients(
    compressor: Any, mesh: Mesh, schedule: Schedule, shard_optimizer: bool
) -> Compressor | None:
    """`compress_gradients`; there must be replicas whose weights are whole."""
    if compressor is None:
        return None
    if not isinstance(compressor, Compressor):
        raise ValueError(
            f"`compress_gradients` must be a compressor of `jpipe.compress`, got {shown(compressor)}. For example "
            "`jpipe.compress.PowerSGD(rank=4)`."
        )
    _check_replicas("compress_gradients", mesh, schedule)
    if shard_optimizer:
        raise ValueError(
            "`compress_gradients` and `shard_optimizer` exclude each other: every replica needs the whole gradient to "
            "know what it has not sent, and a shared update gives it a share. Leave one of them out."
        )
    _check_whole("compress_gradients", mesh)
    return compressor


def _check_accumulate_gradients(
    compressor: Any, mesh: Mesh, schedule: Schedule, others: Mapping[str, Any]
) -> StreamingPCA | None:
    """`accumulate_gradients`; weights are whole, and one device has a stage.

    Args:
      compressor: the argument.
      mesh: the devices.
      schedule: the table.
      others: name -> value of the arguments that exclude it.
    """
    if compressor is None:
        return None
    if not isinstance(compressor, StreamingPCA):
        raise ValueError(
            "`accumulate_gradients` must be a `jpipe.compress.StreamingPCA`, which updates factors from the inputs of "
            f"a layer and the gradients by its outputs, got {shown(compressor)}. For example "
            "`jpipe.compress.StreamingPCA(rank=4)`. Other compressors need the gradient: they are for "
            "`compress_gradients`."
        )
    for name, value in others.items():
        if value:
            raise ValueError(
                f"`accumulate_gradients` and `{name}` exclude each other: replicas have equal factors already, and no "
                f"gradient to exchange. Leave `{name}` or `accumulate_gradients` out."
            )
    if schedule.has_copies:
        raise ValueError(
            "`accumulate_gradients` updates factors microbatch by microbatch, and the schedule has several copies of a "
            "stage, "
            'of which each sees some microbatches. Take a schedule without `replicas`, or replicas along "data".'
        )
    if schedule.updates_by_stage:
        raise ValueError(
            "`accumulate_gradients` begins its factors anew with every minibatch, and stages of the schedule "
            f"{shown(schedule.name)} update several times in one. Take a schedule without `update_every`."
        )
    _check_whole("accumulate_gradients", mesh)
    return compressor


def message_compression(compress: Any) -> MessageCompression:
    """`compress_messages` as a compressor of activations and one of gradients."""
    if compress is None:
        return NO_COMPRESSION
    if isinstance(compress, Mapping):
        unknown = [name for name in compress if name not in MessageCompression._fields]
        if unknown or not compress:
            raise ValueError(
                '`compress_messages` must be a compressor or a dict with one for "activations", "gradients" or both, '
                f"got a dict with {shown(list(compress)) if compress else 'nothing'}. For example "
                '`{"activations": jpipe.compress.Quantize(8)}`.'
            )
        messages = MessageCompression(**compress)
    elif isinstance(compress, SparseCompressor):
        messages = MessageCompression(compress)
    else:
        messages = MessageCompression(compress, compress)
    for compressor in messages:
        if not isinstance(compressor, Compressor | None):
            raise ValueError(
                f"`compress_messages` must be a compressor of `jpipe.compress`, got {shown(compressor)}. For example "
                "`jpipe.compress.Quantize(bits=8)`."
            )
    return messages
