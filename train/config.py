"""The options of a training run. The text below each field is its reference.

A file in `configs/` has a function `get_config()` that returns a `TrainConfig`. Any
field can be changed on the command line, as `--config.pipeline.num_stages=2`. The
options of a model are in `models/`, those of a data set in `train/mnist.py`,
`train/text.py`, `train/pairs.py`, `train/instructions.py` and `train/tokenized.py`.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

import jpipe
from jpipe._util.foreign import shown
from jpipe._util.sizes import parse_size
from jpipe.mesh import AXES, STAGE
from jpipe.options import exclusions
from models import Model
from train import asynchronous as methods
from train.data import Dataset
from train.imported import Imported
from train.instructions import Instructions
from train.learners import local_steps_of
from train.mnist import MNIST, MNISTPixels
from train.pairs import Pairs
from train.streamed import Grain
from train.text import LabeledText, MaskedText, Text
from train.tokenized import Tokenized
from train.tracing import parse_steps
from train.weights import Dtype, LoRAConfig, Weights
from train.writers import check_names

_OFFLOADED = ("optimizer", "weights", "gradients", "activations")

Data = MNIST | MNISTPixels | Text | MaskedText | LabeledText | Pairs | Instructions | Tokenized | Imported | Grain


def _decays(params: Any) -> Any:
    """True for matrices and kernels, False for biases and scales of norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _matrices(params: Any) -> Any:
    """Marks for Muon the kernels and matrices, which have their output on the last axis. None for other weights."""

    def axes(p: Any) -> Any:
        if p.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(p.ndim - 1)), p.ndim - 1)

    return jax.tree.map(axes, params)


def _check(holds: bool, config: Any, name: str, rule: str) -> None:
    """Raises `ValueError` if a rule of a numeric field is broken."""
    if not (holds and math.isfinite(getattr(config, name))):
        raise ValueError(f"`{name}` {rule}, got {getattr(config, name)}.")


def _compressor(name: str, text: str | None) -> Any:
    """The compressor that a field names; None without one."""
    if text is None:
        return None
    try:
        return jpipe.compress.parse(text)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The pipeline: schedule and stages."""

    schedule: str = "gpipe"
    """The name of a schedule of `jpipe.schedules`."""
    num_stages: int = 4
    """Number of stages S that the layers are cut into."""
    num_microbatches: int = 8
    """Number of microbatches N that a minibatch is cut into."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the schedule, such as `options.ticks=unit`, `options.update_every=3,1` for the microbatches
    of an update of each stage, or `options.message_ticks=2` where stages are across slices or nodes: a message then has
    a whole tick to travel."""
    replicas: tuple[int, ...] | None = None
    """Number of copies of each stage, for example (3, 1): a stage with several copies has
    a device for each, and its microbatches take turns. None: one each. For gpipe,
    one_f_one_b, pipedream, pipedream_2bw and pipemare."""
    schedule_file: str | None = None
    """A file with a schedule in the text form of `jpipe.Schedule.to_text`. It replaces
    the five fields above."""
    emulate: bool = False
    """True lets one device stand for all: it reads the weights that the schedule's devices would read,
    and runs one microbatch after the other. For studies of late gradients at any number of stages."""
    delays: tuple[int, ...] | None = None
    """The delay of the weights that each stage reads, in updates, such as (3, 2, 1, 0), in place of a
    schedule. One device runs all stages."""
    boundaries: tuple[int, ...] | None = None
    """The number of the first layer of each stage but stage 0. None: `balance` decides."""
    balance: Literal["flops", "time", "memory", "placement"] = "flops"
    """Without `boundaries`, stages get equal shares of this: floating-point operations,
    the measured time of each layer, or bytes. "placement" measures too, and lets parts of a
    whole model that do not need each other be on any stages."""
    recompute: Literal[
        "none",
        "full",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
    ] = "none"
    """The stash of a stage for its backward: all activations ("none"), only its inputs
    ("full"), or the activations that a policy of `jax.checkpoint_policies` selects. The
    backward computes the others again."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype that layers compute in. Weights and their updates stay in `weights_dtype`."""
    weights_dtype: Dtype = "float32"
    """The dtype of the weights of the models Llama and GPT2. Those in bfloat16 that are trained have a copy in float32
    in the optimizer's state, which is updated. Set `accumulate_dtype=float32` too."""
    accumulate_dtype: Literal["none", "float32"] = "none"
    """The dtype in which gradients of weights of fewer bits are summed over microbatches. "none":
    the weights' dtype."""
    loss_scale: Literal["none", "dynamic"] = "none"
    """dynamic multiplies the loss by a dynamic scale before its gradient is computed.
    float16 needs this."""
    compress_messages: str | None = None
    """The compressor of activations between stages, and of their gradients, such as
    quantize:bits=8, cast:dtype=bfloat16, threshold:density=0.05 or topk:density=0.05. None:
    they are sent as they are."""
    compress_message_gradients: str | None = None
    """The compressor of the gradients alone. None: that of `compress_messages`; of threshold and topk
    the entries that were sent forward."""
    accumulate_gradients: str | None = None
    """The form in which gradients of dense layers are accumulated: streaming_pca:rank=4, for example,
    keeps 4 singular vectors of each. None: as they are."""
    synchronous_steps: int = 0
    """Number of steps at the start that GPipe trains, before an asynchronous schedule
    takes over: PipeMare's synchronous warm-up (T3)."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_microbatches"):
            _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        _check(self.synchronous_steps >= 0, self, "synchronous_steps", "must be at least 0")
        if self.delays is not None and len(self.delays) != self.num_stages:
            raise ValueError(
                f"`delays` must have one number for each of the `num_stages={self.num_stages}` stages, got "
                f"{len(self.delays)}: {self.delays}."
            )
        if self.delays is not None and self.schedule_file is not None:
            raise ValueError(
                f"`delays` take the place of a schedule, got `schedule_file={self.schedule_file}` too. Leave one out."
            )
        self.message_compressors()
        _compressor("accumulate_gradients", self.accumulate_gradients)

    def options_of_pipeline(self) -> dict[str, Any]:
        """Further arguments of `jpipe.Pipeline` that this section sets."""
        recompute: Any = self.recompute
        if recompute not in ("none", "full"):
            recompute = getattr(jax.checkpoint_policies, recompute)
        return {
            "boundaries": self.boundaries or self.balance,
            "recompute": recompute,
            "compute_dtype": self.compute_dtype,
            "accumulate_dtype": None if self.accumulate_dtype == "none" else self.accumulate_dtype,
            "loss_scale": jpipe.LossScale() if self.loss_scale == "dynamic" else None,
            "compress_messages": self.message_compressors(),
            "accumulate_gradients": _compressor("accumulate_gradients", self.accumulate_gradients),
        }

    def message_compressors(self) -> Any:
        """`compress_messages` of `jpipe.Pipeline`.

        Raises:
          ValueError: if a text names no compressor.
        """
        activations = _compressor("compress_messages", self.compress_messages)
        gradients = _compressor("compress_message_gradients", self.compress_message_gradients)
        if gradients is None:
            return activations
        both = {"activations": activations, "gradients": gradients}
        return {use: c for use, c in both.items() if c is not None}

    def warm_up_table(self, table: jpipe.Schedule) -> jpipe.Schedule | None:
        """The schedule of the first `synchronous_steps`.

        Args:
          table: the schedule that takes over after them.

        Returns:
          A GPipe schedule of the same shape; None if `synchronous_steps` is 0.

        Raises:
          ValueError: if `table` is synchronous.
        """
        if not self.synchronous_steps:
            return None
        if table.synchronous:
            raise ValueError(
                "`synchronous_steps` come before an asynchronous schedule, got "
                f"{self.synchronous_steps} before {table.name!r}, which is synchronous. "
                "Leave them at 0, or choose pipemare, pipedream or pipedream_2bw."
            )
        # GPipe warns about its bubble, but runs for the first steps only.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            same_devices = table.num_devices == sum(table.replicas)
            gpipe = jpipe.schedules.gpipe(
                table.num_stages,
                table.num_microbatches,
                table.replicas,
                message_ticks=table.message_ticks if same_devices else 1,
            )
        return jpipe.schedules.emulated(gpipe) if self.on_one_device else gpipe

    @property
    def on_one_device(self) -> bool:
        """True if one device runs all stages."""
        return self.emulate or self.delays is not None

    def table(self) -> jpipe.Schedule:
        """The schedule that the fields describe.

        Raises:
          ValueError: if there is no such schedule; the message lists the schedules.
          OSError: if `schedule_file` cannot be read.
        """
        if self.delays is not None:
            return jpipe.schedules.with_delays(self.delays, self.num_microbatches)
        if not self.emulate:
            return self._pipeline_table()
        # A bubble of the schedule takes no time on one device.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return jpipe.schedules.emulated(self._pipeline_table())

    def _pipeline_table(self) -> jpipe.Schedule:
        """The schedule of the pipeline: one stage per device, or as many as the configuration says."""
        if self.schedule_file is not None:
            return jpipe.schedules.read(self.schedule_file)
        options = dict(self.options)
        if self.replicas is not None:
            options["replicas"] = self.replicas
        jpipe.schedules.check_options(self.schedule, options)
        builder = jpipe.schedules.get(self.schedule)
        return builder(self.num_stages, self.num_microbatches, **options)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices of each stage: axes of the mesh beside "stage"."""

    data: int = 1
    """Number of replicas of the pipeline (data parallelism). Each replica has its own
    devices and trains on its share of every minibatch."""
    fsdp: int = 1
    """Number of devices that share the weights and the microbatches of each stage (fully
    sharded data parallelism)."""
    expert: int = 1
    """Number of devices that share the experts and the microbatches of each stage (expert
    parallelism)."""
    context: int = 1
    """Number of devices that share the positions of each sequence (context parallelism)."""
    model: int = 1
    """Number of devices that share the work of each stage (tensor parallelism)."""
    shard_optimizer: bool = False
    """True if the replicas of a stage share its update and the optimizer's state (ZeRO, stage
    1). The replicas are those of `mesh.data` and of `pipeline.replicas`."""
    compress_gradients: str | None = None
    """The compressor of gradients between the replicas of a stage, such as powersgd:rank=4,
    threshold:density=0.01 or cast:dtype=bfloat16. Each keeps what it has not sent for its next
    gradient. None: as they are."""
    device_memory: str | None = None
    """Bytes that a device may use, such as 2GiB. What does not fit goes to host memory: of all choices
    that fit, the one that moves the fewest bytes. None: no limit."""
    offload_optimizer: float = 0.0
    """The part of the optimizer's state that is in host memory, from 0 to 1."""
    offload_weights: float = 0.0
    """The part of the weights that is in host memory, from 0 to 1: the largest first."""
    offload_gradients: float = 0.0
    """The part of the gradients that is in host memory, from 0 to 1: the largest first."""
    offload_activations: int | None = None
    """The most microbatches whose stashes stay on a device; others go to host memory between their
    forward and their backward. None: all stay."""
    local_steps: int | None = None
    """The number of steps that the replicas of `mesh.data` train apart, each on its rows with weights of its own, until
    they come together: DiLoCo. In between nothing is sent between them. `num_steps` is a multiple of it, and
    evaluations have the weights of the last time. None: replicas exchange gradients in every step."""
    outer_rate: float = 0.7
    """With `local_steps`, the learning rate of the outer optimizer, which takes the replicas' mean movement as a
    gradient. 1 with `outer_momentum=0` takes the mean of their weights."""
    outer_momentum: float = 0.9
    """With `local_steps`, the Nesterov momentum of the outer optimizer."""
    fragments: int = 1
    """With `local_steps`, the parts of the weights that come together one after the other within them, so that less is
    sent at once: streaming DiLoCo."""
    delay: int | None = None
    """With `local_steps`, makes the fragments random subsets of the weights, whose means arrive so many outer steps
    late; all come together after the last step. None: fragments are neighbours, and their means arrive at once."""
    correction: float | None = 0.5
    """With `delay`, the decay of the moving average of a replica's movements that corrects a late mean; 0 takes the
    last movement, None none."""
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Rules before those of `jpipe.AXIS_RULES`: the axes, separated by commas, that dims
    of a logical name are split over, or none. `rules.length=model` splits activations of a
    transformer by positions where "model" splits no matrix (sequence parallelism).
    `rules.vocab=stage` splits the embedding and the head over all stages."""
    dcn: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The parts into which the network between slices of TPUs, or nodes of GPUs, cuts the axes: `dcn.data=2`.
    Without an entry, those that the devices name: stages go across."""

    def __post_init__(self) -> None:
        for name in self.sizes:
            _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        self.gradient_compressor()
        self.offload()
        if self.local_steps is not None:
            _check(self.local_steps >= 1, self, "local_steps", "must be at least 1")
        _check(self.fragments >= 1, self, "fragments", "must be at least 1")
        _check(self.outer_rate > 0, self, "outer_rate", "must be above 0")
        _check(0 <= self.outer_momentum < 1, self, "outer_momentum", "must lie in [0, 1)")
        local_steps_of(self)
        if self.device_memory is not None:
            if self.offload() is not None:
                names = [f"offload_{part}" for part in _OFFLOADED]
                raise ValueError(
                    f"{exclusions.chosen_and_given(*names)}, got {self.device_memory}. Leave it out, or leave them out."
                )
            try:
                parse_size(self.device_memory)
            except ValueError as error:
                raise ValueError(f"`device_memory` {error}") from None
        for name, axes in self.rules.items():
            *others, last = ("stage", *self.sizes)
            if set(_axes(axes) or ()) - {*others, last}:
                raise ValueError(
                    f"`rules.{name}` must be {', '.join(others)} or {last}, several of them separated "
                    f"by commas, or none, got {shown(axes)}."
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> number of devices, for `jpipe.make_mesh`."""
        return {name: getattr(self, name) for name in AXES if name != STAGE}

    def make(self, schedule: jpipe.Schedule) -> Mesh:
        """The mesh for a table."""
        return jpipe.make_mesh(stage=schedule.num_devices, ring=schedule.ring, dcn=self.dcn or None, **self.sizes)

    @contextlib.contextmanager
    def names_rules(self) -> Iterator[None]:
        """A context: an error about layers that all stages share names the option that gives each stage its own."""
        try:
            yield
        except jpipe.vocabulary.VocabularyError as error:
            rules = [n for n, to in self.rules.items() if "stage" in (_axes(to) or ())]
            words = " ".join(f"--config.mesh.rules.{name}=none" for name in rules)
            raise ValueError(f"{error} In this script leave it out by `{words}`.") from error

    def options_of_pipeline(self) -> dict[str, Any]:
        """Further arguments of `jpipe.Pipeline` that this section sets."""
        return {
            "axis_rules": self.axis_rules(),
            "shard_optimizer": self.shard_optimizer,
            "compress_gradients": self.gradient_compressor(),
            "offload": self.offload(),
            "device_memory": self.device_memory,
            "local_steps": local_steps_of(self),
        }

    def gradient_compressor(self) -> Any:
        """`compress_gradients` of `jpipe.Pipeline`.

        Raises:
          ValueError: if the text names no compressor.
        """
        return _compressor("compress_gradients", self.compress_gradients)

    def offload(self) -> jpipe.Offload | None:
        """`offload` of `jpipe.Pipeline`."""
        offload = jpipe.Offload(
            self.offload_optimizer,
            self.offload_activations,
            weights=self.offload_weights,
            gradients=self.offload_gradients,
        )
        return offload or None

    def axis_rules(self) -> tuple:
        """The rules of the run, for `jpipe.Pipeline`."""
        given = [(name, _axes(axes)) for name, axes in self.rules.items()]
        return (*given, *jpipe.AXIS_RULES)


def _axes(text: str | None) -> tuple[str, ...] | None:
    """The axes of a rule as a tuple; None for "none"."""
    words = [word.strip() for word in str(text).split(",")]
    return None if words in (["none"], ["None"]) else tuple(words)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "nadamw", "sgd", "basis_rotation", "muon"] = "adamw"
    """AdamW; AdamW with Nesterov momentum for delayed gradients (`jpipe.optim.nadamw`);
    gradient descent with Nesterov momentum; AdamW in the eigenbasis of the gradients
    (`jpipe.optim.scale_by_basis_rotation`); or Muon of Optax, which updates matrices and
    kernels of convolutions, with AdamW for the other weights."""
    learning_rate: float = 1e-3
    """The largest learning rate, reached after `warmup_steps`."""
    warmup_steps: int = 0
    """Number of steps in which the learning rate rises linearly from 0. A run of fewer steps ends before
    it has risen; a warning says so."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """The curve by which the learning rate falls to 0 at the last step; "constant" keeps
    it."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of matrices and kernels only."""
    momentum: float = 0.9
    """Decay of the mean gradient: b1 of adamw, nadamw and basis_rotation, Nesterov momentum
    of sgd and muon."""
    b2: float = 0.999
    """Decay of the mean squared gradient; not of sgd and the matrices of muon."""
    adam_rate: float = 1.0
    """The learning rate of the weights that muon leaves to AdamW, in multiples of
    `learning_rate`. Muon's updates of a matrix are smaller than AdamW's at the same rate."""
    clip_norm: float | None = None
    """The largest norm of the gradient, over all stages. None: no clipping."""
    annealing_steps: int | Literal["lasting"] | None = None
    """Number of steps in which the learning rate of a stage with delayed gradients rises
    from learning_rate / delay to learning_rate: PipeMare's T1, for asynchronous
    schedules. "lasting": it stays learning_rate / delay. None: it is learning_rate."""
    discrepancy_decay: float | None = None
    """Decay D of PipeMare's T2, for asynchronous schedules: a backward reads an estimate
    of the weights that its forward read. None: a backward reads the current weights."""
    predict_weights: bool = False
    """True if a forward reads a prediction of the weights that its gradient will be
    applied to, for asynchronous schedules: SpecTrain, XPipe, PipeOptim."""
    prediction_decay: float | None = None
    """Decay b by which a prediction trusts the last movement less with every update: it looks
    b + b^2 + ... + b^delay updates ahead instead of the whole delay. The momentum of the optimizer
    fits. None: the whole delay."""
    delay_compensation: float | None = None
    """Strength of DC-ASGD, for asynchronous schedules: late gradients are moved from the
    weights that they were computed at to the newest ones, by their own squares. Each stage
    keeps as many versions of its weights as its delay plus one. None: they stay as they are."""
    error_feedback: float | None = None
    """The part of the last update's error that is added to the next update, for
    asynchronous schedules, best with a delay of one: 1 adds all of it. None: nothing."""
    ema_decay: float | None = None
    """Decay of an average of the weights, which evaluations read instead of the weights,
    such as 0.999. None: they read the weights."""

    def __post_init__(self) -> None:
        _check(self.learning_rate > 0, self, "learning_rate", "must be above 0")
        _check(self.warmup_steps >= 0, self, "warmup_steps", "must be at least 0")
        _check(self.weight_decay >= 0, self, "weight_decay", "must be at least 0")
        for name in ("momentum", "b2"):
            _check(0 <= getattr(self, name) < 1, self, name, "must lie in [0, 1)")
        if self.clip_norm is not None:
            _check(self.clip_norm > 0, self, "clip_norm", "must be above 0")
        if isinstance(self.annealing_steps, int):
            _check(self.annealing_steps > 0, self, "annealing_steps", "must be above 0")
        if self.discrepancy_decay is not None:
            D = self.discrepancy_decay
            _check(0 < D < 1, self, "discrepancy_decay", "must lie between 0 and 1")
        if self.prediction_decay is not None:
            b = self.prediction_decay
            _check(0 < b < 1, self, "prediction_decay", "must lie between 0 and 1")
            if not self.predict_weights:
                raise ValueError(f"`prediction_decay` is for `predict_weights=true`, got {b} without it. Set it too.")
        _check(self.adam_rate > 0, self, "adam_rate", "must be above 0")
        for name in ("delay_compensation", "error_feedback"):
            if getattr(self, name) is not None:
                _check(getattr(self, name) > 0, self, name, "must be above 0")
        if self.ema_decay is not None:
            _check(0 <= self.ema_decay < 1, self, "ema_decay", "must lie in [0, 1)")

    def check_rhythm(self, table: jpipe.Schedule) -> None:
        """Refuses rates that change from step to step if stages of a table update several times in one.

        Raises:
          ValueError: naming the option.
        """
        changing = {
            "warmup_steps": (self.warmup_steps, 0),
            "decay": (self.decay, "constant"),
            "annealing_steps": (self.annealing_steps, "lasting" if self.annealing_steps == "lasting" else None),
        }
        for name, (value, constant) in changing.items():
            if table.updates_by_stage and value != constant:
                raise ValueError(
                    f"`optimizer.{name}` must be {constant} with stages that update several times in a step, got "
                    f"{value}: an optimizer counts the updates of its stage, and would take them for steps. Set "
                    f"`--config.optimizer.{name}={'none' if constant is None else constant}`, or leave "
                    "`pipeline.options.update_every` out."
                )

    @property
    def steps_of_rise(self) -> float:
        """The steps in which the rates of late stages rise: 0 without T1, infinite where they do not."""
        return math.inf if self.annealing_steps == "lasting" else self.annealing_steps or 0

    def learning_rate_schedule(self, num_steps: int, peak: Any = None) -> optax.Schedule:
        """A function from step to learning rate, for a run of `num_steps`.

        Args:
          num_steps: the number of steps of the run.
          peak: the largest rate, also a number inside of a program. None: `learning_rate`.
        """
        peak = self.learning_rate if peak is None else peak
        warmup = self.warmup_steps
        num_decay = max(num_steps - warmup, 1)
        decay = {
            "cosine": optax.cosine_decay_schedule(peak, num_decay),
            "linear": optax.linear_schedule(peak, 0.0, num_decay),
            "constant": optax.constant_schedule(peak),
        }[self.decay]
        if warmup == 0:
            return decay
        # The rise starts above 0: a first step at rate 0 would be wasted.
        rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
        return optax.join_schedules([rise, decay], [warmup])

    def transform(self, num_steps: int, peak: Any = None, *, copies: bool = False) -> optax.GradientTransformation:
        """The Optax chain, for a run of `num_steps`; `peak` is that of `learning_rate_schedule`.

        With `copies` it updates copies of the weights in float32.
        """
        rate = self.learning_rate_schedule(num_steps, peak)
        decayed = optax.add_decayed_weights(self.weight_decay, mask=_decays)
        if self.name in ("adamw", "nadamw"):
            make = optax.adamw if self.name == "adamw" else jpipe.optim.nadamw
            update = make(
                rate,
                b1=self.momentum,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=_decays,
            )
        elif self.name == "basis_rotation":
            update = optax.chain(
                jpipe.optim.scale_by_basis_rotation(self.momentum, self.b2),
                decayed,
                optax.scale_by_learning_rate(rate),
            )
        elif self.name == "muon":
            update = optax.contrib.muon(
                rate,
                beta=self.momentum,
                weight_decay=self.weight_decay,
                weight_decay_mask=_decays,
                adam_b2=self.b2,
                adam_learning_rate=lambda step: self.adam_rate * rate(step),
                muon_weight_dimension_numbers=_matrices,
            )
        else:
            update = optax.chain(
                optax.trace(self.momentum, nesterov=True),
                decayed,
                optax.scale_by_learning_rate(rate),
            )
        chain = [update]
        if self.delay_compensation is not None:
            chain.insert(0, jpipe.optim.compensate_delay(self.delay_compensation))
        if self.error_feedback is not None:
            chain.append(jpipe.optim.error_feedback(self.error_feedback))
        if self.steps_of_rise:
            chain.append(jpipe.optim.scale_by_delay(self.steps_of_rise))
        if self.discrepancy_decay is not None:
            chain.append(jpipe.optim.correct_discrepancy(self.discrepancy_decay))
        if self.predict_weights:
            chain.append(jpipe.optim.predict_weights())
        if self.ema_decay is not None:
            chain.append(jpipe.optim.ema_weights(self.ema_decay))
        if copies:
            chain = [jpipe.optim.master_weights(optax.chain(*chain))]
        if self.clip_norm is not None:
            chain.insert(0, jpipe.optim.clip_by_global_norm(self.clip_norm))
        return optax.chain(*chain)

    def momentum_of_stability(self) -> tuple[float, bool, bool]:
        """Momentum, whether it is Nesterov's, and whether Adam scales the gradients, for the stable range.

        Raises:
          ValueError: if lemma 1 says nothing about the optimizer.
        """
        if self.name not in ("adamw", "nadamw", "sgd"):
            raise ValueError(
                f"`stability` knows the stable range of sgd, adamw and nadamw, got the optimizer {self.name!r}, whose "
                "steps are not the gradient times a fixed scale. Leave `stability` out."
            )
        return self.momentum, self.name != "adamw", self.name != "sgd"

    def options_of_pipeline(self) -> dict[str, Any]:
        """The arguments of `jpipe.Pipeline` that choose the weights which are read."""
        predicts, corrects = self.predict_weights, self.discrepancy_decay is not None
        predicted: Any = jpipe.optim.predicted_params
        if self.prediction_decay is not None:
            b = self.prediction_decay
            predicted = functools.partial(predicted, horizon=lambda delay: b * (1 - b**delay) / (1 - b))
        return {
            "forward_params": predicted if predicts else None,
            "backward_params": jpipe.optim.corrected_params if corrects else None,
        }


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints of a run, in the folder `checkpoints` of its folder."""

    every: int | None = None
    """Number of steps between checkpoints. There is also one at the end, and one after
    Ctrl-C or SIGTERM. None: no checkpoints."""
    keep: int = 3
    """The number of the newest checkpoints that stay."""
    memory: bool = False
    """True if the newest checkpoint is also kept in memory, from where a run that `python -m jpipe.launch --restarts`
    starts again reads it."""

    def __post_init__(self) -> None:
        if self.every is not None:
            _check(self.every >= 1, self, "every", "must be at least 1")
        elif self.memory:
            raise ValueError(
                "`checkpoint.memory` keeps the newest checkpoint in memory, and this run would have none. Add "
                "`--config.checkpoint.every=STEPS`."
            )
        _check(self.keep >= 1, self, "keep", "must be at least 1")

    def open(self, run_dir: pathlib.Path) -> jpipe.Checkpoints:
        """The checkpoints of the run in a folder."""
        return jpipe.Checkpoints(run_dir / "checkpoints", keep=self.keep, memory=self.memory)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: Model
    """The model, one of `models/`. It also chooses the loss."""
    data: Data
    """The data set."""
    pipeline: PipelineConfig = PipelineConfig()
    """The pipeline: schedule and stages."""
    mesh: MeshConfig = MeshConfig()
    """The devices of each stage."""
    strategy: str | None = None
    """A file of `train/search.py --in-stages --save`: how the operators of the layers are
    split over the `mesh.model` devices of a stage, instead of the annotations of the model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints of a run, in the folder `checkpoints` of its folder."""
    init: str | None = None
    """The folder of a published model, with config.json, safetensors and tokenizer.json: training begins with its
    weights, and its sizes replace the options of `model`. None: weights are drawn."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank matrices that are trained instead of the weights."""
    batch_size: int = 128
    """Number of examples per minibatch. A multiple of `pipeline.num_microbatches` times
    `mesh.data` times `mesh.fsdp` times `mesh.expert`."""
    num_steps: int = 1000
    """Number of minibatches to train on; each is one update of the weights."""
    log_every: int = 50
    """Number of steps per line of the log."""
    log: tuple[str, ...] = ("tensorboard",)
    """Where the log goes beside its JSON file: tensorboard, wandb, mlflow, or several of them with commas between. Each
    needs its package. Empty: nowhere else."""
    eval_every: int | None = None
    """Number of steps between evaluations on the held-out data. None: only after the last
    step. An evaluation after the last step always takes place, on all held-out data."""
    eval_batches: int | None = None
    """Number of held-out minibatches, from the first on, that an evaluation before the
    last step reads. None: all."""
    stability: bool = False
    """True if the largest stable learning rate of each stage is printed before training, from
    its delay and the largest curvature of the loss at the first weights, with a warning if the
    configured rate exceeds it: lemma 1 of PipeMare. It takes some 50 times as long as a
    gradient, on one device. For sgd, adamw and nadamw."""
    diagnostics: tuple[str, ...] = ()
    """Numbers about late gradients that each line of the log has for every stage: "angle", the cosine between
    an update and the one before; "discrepancy", how far the weights have moved since a forward or a backward read them;
    "curvature", a secant of the gradient; or several of them with commas between. With any of them the log also has
    the delays, and how much of them T1 leaves. They cost copies of the weights, see `jpipe.optim.diagnose_delay`, and a
    run that is resumed keeps them. Empty: none."""
    asynchronous: methods.Name | None = dataclasses.field(default=None, metadata={"applies": methods.applied})
    """A method of asynchronous training. It sets the schedule, the optimizer and the remedies for late gradients that
    `docs/asynchronous_winners.md` has found, for the delays of the run. "2bw-muon": PipeDream-2BW, with a delay of one
    update, Muon and error feedback; for `num_microbatches` of at least `num_stages` - 1. "pipedream-muon": PipeDream,
    whose stages keep old weights, with Muon and T1; for any number of microbatches. "pipedream-basis-rotation":
    PipeDream with AdamW in the eigenbasis of the gradients and T1. "pipemare-adamw": PipeMare, which keeps no old
    weights, with T1, T2 and synchronous first steps (T3). The learning rate follows from that of AdamW in the
    configuration. Other options beside the switch win, but for another schedule or optimizer, which are refused. None:
    what the other options say."""
    profile: str | None = None
    """Steps that run under JAX's profiler, such as 10:13 for the steps 10, 11 and 12: their measured
    Gantt chart is `trace.svg` in the folder of the run, `trace.json` its cells, and
    `trace.perfetto.json` a file for Perfetto. None: no steps."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    run_dir: str | None = None
    """A new folder for the files of the run. None: `runs/NAME-TIME`."""
    compilation_cache: str | None = "~/.cache/jpipe"
    """The folder that keeps compiled programs, so that the next run of the same programs
    starts sooner. None: every run compiles anew. `JAX_COMPILATION_CACHE_DIR` names
    another folder."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_steps", "log_every"):
            _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        for name in ("eval_every", "eval_batches"):
            if getattr(self, name) is not None:
                _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        if self.pipeline.synchronous_steps >= self.num_steps:
            raise ValueError(
                "`pipeline.synchronous_steps` must be fewer than `num_steps`, got "
                f"{self.pipeline.synchronous_steps} of {self.num_steps}: "
                f"{self.pipeline.schedule} would never take over. Lower them, or set 0 and "
                "`pipeline.schedule=gpipe`."
            )
        if self.eval_batches is not None and self.eval_every is None:
            raise ValueError(
                "`eval_batches` is for evaluations before the last step, got "
                f"{self.eval_batches} without `eval_every`, so there are no such "
                "evaluations. Set `eval_every`, or leave `eval_batches` at none."
            )
        self._check_profile()
        if self.mesh.local_steps is not None and self.num_steps % self.mesh.local_steps:
            raise ValueError(
                f"`num_steps` must be a multiple of `mesh.local_steps`, got {self.num_steps} and "
                f"{self.mesh.local_steps}: the replicas' last steps would be in no weights."
            )
        jpipe.optim.diagnose_delay(optax.identity(), self.diagnostics)  # refuses unknown names
        if self.asynchronous is not None:
            methods.METHODS[self.asynchronous].check(self)
        check_names(self.log)
        _check(0 <= self.seed < 2**32, self, "seed", "must lie in [0, 2**32)")
        if self.stability:
            self.optimizer.momentum_of_stability()
        # A table in a file may have copies of its own.
        if not self.pipeline.schedule_file:
            self._check_replicas()

    @functools.cached_property
    def weights(self) -> Weights:
        """The model, what its weights begin as, and which are trained.

        Raises:
          OSError, ValueError: if the folder of `init` is wrong, or the model does not fit an option.
        """
        return Weights.of(self.model, self.init, self.lora, self.pipeline.weights_dtype)

    @property
    def tokenized_data(self) -> Data:
        """The data set; instructions with the tokens of the model that training begins with."""
        if self.init is None or not isinstance(self.data, Instructions) or self.data.tokenizer is not None:
            return self.data
        return dataclasses.replace(self.data, tokenizer=self.init)

    def load_data(self) -> Dataset:
        """The examples.

        Raises:
          OSError, ValueError: if a file of the data is wrong, or the model has too few tokens for it.
        """
        known = getattr(self.weights.model, "vocab_size", None)
        data = self.tokenized_data.load()
        if None not in (data.num_tokens, known) and data.num_tokens > known:
            raise ValueError(
                f"the data has the token {data.num_tokens - 1}, and the model has {known} tokens, from 0 on. Set "
                f"`--config.model.vocab_size={data.num_tokens}`, or `--config.data.tokenizer` to the tokenizer of the "
                "model."
            )
        return data

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`, counted from 1."""
        return range(0) if self.profile is None else parse_steps(self.profile)

    def _check_profile(self) -> None:
        """Refuses steps that the run does not have, or that are of two schedules."""
        steps, synchronous = self.profiled_steps, self.pipeline.synchronous_steps
        if steps and steps[-1] > self.num_steps:
            raise ValueError(
                f"`profile` must lie within the {self.num_steps} steps of the run, got {self.profile}: it ends with "
                f"step {steps[-1]}. Name earlier steps, or raise `num_steps`."
            )
        if synchronous in steps and synchronous + 1 in steps:
            raise ValueError(
                f"`profile` must name steps of one schedule, got {self.profile}: {self.pipeline.schedule} takes over "
                f"after step {synchronous} (`pipeline.synchronous_steps`). End before step {synchronous + 1}, or begin "
                "with it."
            )

    def options_of_pipeline(self, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        """The arguments of `jpipe.Pipeline` beside the layers and the schedule."""
        weights = self.weights
        optimizer = self.optimizer.transform(self.num_steps, copies=weights.are_copied)
        if self.diagnostics:
            optimizer = jpipe.optim.diagnose_delay(optimizer, self.diagnostics)
        return {
            "loss": weights.model.loss(),
            "has_aux": True,
            "optimizer": optimizer,
            "mesh": mesh,
            "strategy": self.strategy,
            "ties": weights.model.ties() if hasattr(weights.model, "ties") else (),
            "trainable": weights.trainable,
            **self.mesh.options_of_pipeline(),
            **self.pipeline.options_of_pipeline(),
            **self.optimizer.options_of_pipeline(),
        }

    def _check_replicas(self) -> None:
        """Refuses options for the replicas of a stage where there is one."""
        if self.mesh.data * max(self.pipeline.replicas or (1,)) > 1:
            return
        for name in ("compress_gradients", "shard_optimizer", "local_steps"):
            if getattr(self.mesh, name):
                raise ValueError(
                    f"`mesh.{name}` {exclusions.without_replicas(name)}. Set `--config.mesh.data=2` or "
                    "`--config.pipeline.replicas=2,1`, or leave it out."
                )
