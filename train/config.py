"""What can be configured in a training run. Read the fields: this is the reference.

A file in `configs/` has a function `get_config()` that returns a `TrainConfig`. Any
field can be changed on the command line, as `--config.pipeline.num_stages=2`. The
options of a model are in `models/`, those of a data set in `train/mnist.py` and
`train/text.py`.
"""

import dataclasses
import inspect
import math
import warnings
from typing import Any, Literal

import jax
import optax

import jpipe
from models import Model
from train.flags import did_you_mean
from train.mnist import MNIST
from train.text import Text

Data = MNIST | Text


def _decays(params):
    """True for matrices and kernels, False for biases and scales of norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _check(holds: bool, config, name: str, rule: str) -> None:
    if not (holds and math.isfinite(getattr(config, name))):
        raise ValueError(f"`{name}` {rule}, got {getattr(config, name)}.")


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How the model is pipelined."""

    schedule: str = "gpipe"
    """A schedule of `jpipe.schedules`, by name."""
    num_stages: int = 4
    """Stages S that the layers are cut into."""
    num_microbatches: int = 8
    """Microbatches N that a minibatch is cut into."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else the schedule takes, such as `options.ticks=unit`."""
    schedule_file: str | None = None
    """A table written by hand, in the text form of `jpipe.Schedule.to_text`; it takes
    the place of the four fields above."""
    data: int = 1
    """Replicas of the pipeline, which share out every minibatch among them; each has
    devices of its own."""
    boundaries: tuple[int, ...] | None = None
    """The layer at which each stage after the first begins. None: balanced."""
    balance: Literal["flops", "time", "memory"] = "flops"
    """What the stages get equal shares of, where `boundaries` does not say: operations,
    seconds of each layer as measured before the run, or bytes."""
    recompute: Literal[
        "none",
        "full",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
    ] = "none"
    """Whether a stage keeps its activations, or its inputs alone and runs again; or
    which of them a layer keeps, as `jax.checkpoint_policies` names it."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What layers compute in. Weights and their updates stay in float32."""
    loss_scale: Literal["none", "dynamic"] = "none"
    """Whether the loss is scaled up for its gradient, which float16 needs."""
    synchronous_steps: int = 0
    """Steps at the start that are trained by GPipe, before an asynchronous schedule takes
    over: PipeMare's synchronous warm-up (T3)."""

    def __post_init__(self):
        for name in ("num_stages", "num_microbatches", "data"):
            _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        _check(
            self.synchronous_steps >= 0, self, "synchronous_steps", "must be at least 0"
        )

    def options_of_pipeline(self) -> dict[str, Any]:
        """What `jpipe.Pipeline` takes beside model, loss, optimizer, schedule and mesh."""
        recompute: Any = self.recompute
        if recompute not in ("none", "full"):
            recompute = getattr(jax.checkpoint_policies, recompute)
        return {
            "boundaries": self.boundaries or self.balance,
            "recompute": recompute,
            "compute_dtype": self.compute_dtype,
            "loss_scale": jpipe.LossScale() if self.loss_scale == "dynamic" else None,
        }

    def warm_up_table(self, table: jpipe.Schedule) -> jpipe.Schedule | None:
        """The schedule of the first `synchronous_steps`; None if there are none.

        Raises:
          ValueError: if `table`, which takes over, is synchronous itself.
        """
        if not self.synchronous_steps:
            return None
        if table.synchronous:
            raise ValueError(
                f"`synchronous_steps` come before an asynchronous schedule, got {self.synchronous_steps} before "
                f"{table.name!r}, which is synchronous. Leave them at 0, or choose pipemare, pipedream or pipedream_2bw."
            )
        with warnings.catch_warnings():  # of its bubble, which ends
            warnings.simplefilter("ignore", UserWarning)
            return jpipe.schedules.gpipe(table.num_stages, table.num_microbatches)

    def table(self) -> jpipe.Schedule:
        """The schedule that is asked for.

        Raises:
          ValueError: if there is none like it; says what there is.
          OSError: if its file cannot be read.
        """
        if self.schedule_file is not None:
            return jpipe.schedules.read(self.schedule_file)
        builder = jpipe.schedules.get(self.schedule)
        known = list(inspect.signature(builder).parameters)[2:]
        for name in self.options:
            if name not in known:
                raise ValueError(
                    f"the schedule {self.schedule!r} has no option `{name}`."
                    f"{did_you_mean(name, known)} It takes: {', '.join(known) or 'none'}."
                )
        return builder(self.num_stages, self.num_microbatches, **self.options)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "nadamw", "sgd"] = "adamw"
    """Adam with decoupled weight decay, the same with a Nesterov momentum for late
    gradients (`jpipe.optim.nadamw`), or gradient descent with momentum."""
    learning_rate: float = 1e-3
    """The largest learning rate, reached after `warmup_steps`."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0, linearly."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls to 0 by the last step, or that it does not."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of matrices and kernels only."""
    momentum: float = 0.9
    """Decay of the mean gradient: b1 of adamw and nadamw, Nesterov momentum of sgd."""
    b2: float = 0.999
    """Decay of the mean squared gradient; adamw and nadamw only."""
    clip_norm: float | None = None
    """The largest norm of the gradient, over all stages. None: any."""
    annealing_steps: int | None = None
    """Steps in which a stage's learning rate rises from its share of 1 / delay to the
    whole: PipeMare's T1, for asynchronous schedules. None: no such thing."""
    discrepancy_decay: float | None = None
    """D of PipeMare's T2, for asynchronous schedules: backwards read weights moved back to
    what the forward read. None: they do not."""
    predict_weights: bool = False
    """Whether forwards read the weights moved ahead to what their gradient will meet, for
    asynchronous schedules: SpecTrain, XPipe, PipeOptim."""

    def __post_init__(self):
        _check(self.learning_rate > 0, self, "learning_rate", "must be above 0")
        _check(self.warmup_steps >= 0, self, "warmup_steps", "must be at least 0")
        _check(self.weight_decay >= 0, self, "weight_decay", "must be at least 0")
        for name in ("momentum", "b2"):
            _check(0 <= getattr(self, name) < 1, self, name, "must lie in [0, 1)")
        if self.clip_norm is not None:
            _check(self.clip_norm > 0, self, "clip_norm", "must be above 0")
        if self.annealing_steps is not None:
            _check(self.annealing_steps > 0, self, "annealing_steps", "must be above 0")
        if self.discrepancy_decay is not None:
            D = self.discrepancy_decay
            _check(0 < D < 1, self, "discrepancy_decay", "must lie between 0 and 1")

    def learning_rate_schedule(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate, for a run of `num_steps`."""
        peak, warmup = self.learning_rate, self.warmup_steps
        num_decay = max(num_steps - warmup, 1)
        decay = {
            "cosine": optax.cosine_decay_schedule(peak, num_decay),
            "linear": optax.linear_schedule(peak, 0.0, num_decay),
            "constant": optax.constant_schedule(peak),
        }[self.decay]
        if warmup == 0:
            return decay
        # Step 0 already moves: a first step at rate 0 would be a wasted one.
        rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
        return optax.join_schedules([rise, decay], [warmup])

    def transform(self, num_steps: int) -> optax.GradientTransformation:
        """The Optax chain, for a run of `num_steps`."""
        rate = self.learning_rate_schedule(num_steps)
        if self.name in ("adamw", "nadamw"):
            make = optax.adamw if self.name == "adamw" else jpipe.optim.nadamw
            update = make(
                rate,
                b1=self.momentum,
                b2=self.b2,
                weight_decay=self.weight_decay,
                mask=_decays,
            )
        else:
            update = optax.chain(
                optax.trace(self.momentum, nesterov=True),
                optax.add_decayed_weights(self.weight_decay, mask=_decays),
                optax.scale_by_learning_rate(rate),
            )
        chain = [update]
        if self.clip_norm is not None:
            chain.insert(0, jpipe.optim.clip_by_global_norm(self.clip_norm))
        if self.annealing_steps is not None:
            chain.append(jpipe.optim.scale_by_delay(self.annealing_steps))
        if self.discrepancy_decay is not None:
            chain.append(jpipe.optim.correct_discrepancy(self.discrepancy_decay))
        if self.predict_weights:
            chain.append(jpipe.optim.predict_weights())
        return optax.chain(*chain)

    def options_of_pipeline(self) -> dict[str, Any]:
        """The weights that forwards and backwards read, as `jpipe.Pipeline` takes them."""
        predicts, corrects = self.predict_weights, self.discrepancy_decay is not None
        return {
            "forward_params": jpipe.optim.predicted_params if predicts else None,
            "backward_params": jpipe.optim.corrected_params if corrects else None,
        }


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: Model
    """What is trained: a model of `models/`."""
    data: Data
    """What it is trained on."""
    pipeline: PipelineConfig = PipelineConfig()
    """How it is pipelined."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How it is updated."""
    batch_size: int = 128
    """Examples to a minibatch. A multiple of `pipeline.num_microbatches`, times
    `pipeline.data`."""
    num_steps: int = 1000
    """Minibatches to train on; each is one update of the weights."""
    log_every: int = 50
    """Steps to a line of the log."""
    eval_every: int | None = None
    """Steps from one evaluation on the held-out data to the next. None: only after the
    last step, where there always is one, of all of them."""
    eval_batches: int | None = None
    """Minibatches of the held-out data, the first ones, that an evaluation before the
    last step reads. None: all."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    run_dir: str | None = None
    """A new directory for what the run writes. None: `runs/NAME-TIME`."""

    def __post_init__(self):
        for name in ("batch_size", "num_steps", "log_every"):
            _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        for name in ("eval_every", "eval_batches"):
            if getattr(self, name) is not None:
                _check(getattr(self, name) >= 1, self, name, "must be at least 1")
        if self.pipeline.synchronous_steps >= self.num_steps:
            raise ValueError(
                f"`pipeline.synchronous_steps` must be fewer than `num_steps`, got {self.pipeline.synchronous_steps} of "
                f"{self.num_steps}: {self.pipeline.schedule} would never take over. Lower them, or set 0 and "
                "`pipeline.schedule=gpipe`."
            )
        if self.eval_batches is not None and self.eval_every is None:
            raise ValueError(
                f"`eval_batches` is for evaluations before the last step, got "
                f"{self.eval_batches} without an `eval_every`, which says when they are. "
                "Set `eval_every`, or leave `eval_batches` at none."
            )
        _check(0 <= self.seed < 2**32, self, "seed", "must lie in [0, 2**32)")
