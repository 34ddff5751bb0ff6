"""The public class: `Pipeline`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jpipe import costs
from jpipe._processes import watchdog as _watchdog
from jpipe._processes.sharing import is_shared
from jpipe._programs import Cut, Programs
from jpipe._util import entry_points
from jpipe._util.foreign import shown
from jpipe._util.suggest import suggests
from jpipe._util.warn import warn
from jpipe.compress import Compressor, StreamingPCA
from jpipe.costs import Memory, ShardRecord, StageRecord
from jpipe.engine import traffic
from jpipe.engine.calls import check_state, outside_mesh, public
from jpipe.engine.state import PipelineState
from jpipe.engine.traffic import MessageRecord
from jpipe.layers import model_tree
from jpipe.layers.axis_rules import AxisRules
from jpipe.layers.call_arguments import batch_text
from jpipe.layers.flax_nnx import as_mutable_state, as_parameters
from jpipe.layers.layer_split import Strategy
from jpipe.layers.loss_check import cut_warning
from jpipe.layers.rows import row_mixing
from jpipe.layers.trainable import Trainable
from jpipe.mesh import make_mesh
from jpipe.options import checks
from jpipe.options.communication import Communication
from jpipe.options.host_memory import check_device_memory, check_offload
from jpipe.options.local_steps import LocalSteps, num_together
from jpipe.options.loss_scale import LossScale
from jpipe.options.numbers import Numbers, check_recompute
from jpipe.options.settings import Settings, same_shapes
from jpipe.options.slices import check_slices
from jpipe.options.splits import Splits
from jpipe.program import Program
from jpipe.schedule import Schedule
from jpipe.segments import model_of
from jpipe.stages.boundaries import check_boundaries
from jpipe.stages.offload import Offload
from jpipe.states import agreement, batch_shapes, diagnostics, hyperparams, portable

if TYPE_CHECKING:
    import jpipe  # names the types of satellites


def _is_shared(pipe: "Pipeline", *args: Any, **kwargs: Any) -> bool:
    """Returns whether all processes must make a call of a pipeline, because its mesh has devices of all of them."""
    return pipe._settings.rows is not None


def _flushes_together(pipe: "Pipeline", *args: Any, **kwargs: Any) -> bool:
    """`_is_shared` of `flush`, which does nothing in a synchronous schedule."""
    return _is_shared(pipe) and not pipe.schedule.synchronous


@suggests
class Pipeline:
    """Trains a model cut into stages over several devices, by a schedule.

    The arguments come in groups. The model and its training: `layers`, `loss`, `has_aux`, `optimizer`, `ties`,
    `trainable`. The pipeline: `schedule`, `boundaries`, `mesh`, `axis_rules`, `strategy`, `overlap`,
    `compiler_options`. Memory and precision: `recompute`, `shard_optimizer`, `offload`, `device_memory`, `donate`,
    `compute_dtype`, `accumulate_dtype`, `loss_scale`.
    Communication: `compress_messages`, `local_steps`, `compress_gradients`, `accumulate_gradients`. Corrections of
    asynchronous schedules: `forward_params`, `backward_params`.

    Args:
      layers: a sequence. Each is a Flax NNX module (its weights are kept), a factory called as
        `factory(rngs=...) -> module` (initialised on the device of its stage), a Flax Linen module,
        `jpipe.Linen`, `jpipe.InitApply`, or `jpipe.Function(f)`. `jpipe.skip` gives any of them
        skip connections. Or a whole model: one module, factory, `jpipe.Linen` or `jpipe.InitApply`, which is
        cut into layers at the narrow places of its trace. Weights, masks and labels then have its paths.
      loss: `(outputs, batch) -> scalar`, the mean over the rows of one microbatch. `outputs` are
        those of the last layer, `batch` has all entries of the same microbatch. A `jpipe.WholeBatchLoss` sees
        those of the whole minibatch. None: a whole model returns its loss.
      optimizer: any Optax chain that updates each layer independently. It sees a list with one
        entry per layer of the model, None for the layers of other stages: `[None, {...}, None]`.
        Masks and labels are functions of such a list. It gets the extra arguments `delay` and
        `backward_delay`, the number of updates between reading the weights of a forward (of a
        backward) and applying the gradient, the most over the stage's microbatches; and
        `global_norm`, the norm of the gradient over all stages.
      schedule: one of `jpipe.schedules`, or a table of your own.
      boundaries: the layer index at which each stage after the first begins, or the costs to balance:
        "flops" as XLA counts them, "time" measured one layer at a time, or "memory" of weights,
        optimizer and activations in flight. None is "flops". "placement" measures time too, counts what the
        bytes that cross take, and may put parts of a whole model that do not need each other on any stages: see
        `docs/how_to/whole_model.md`. The first state that the pipeline makes (or takes from an equal pipeline) fixes
        the cut.
      mesh: has an axis "stage" of as many devices as the schedule; see `jpipe.make_mesh`. None
        makes it. Its axes may be of any type, such as the explicit ones of `jax.make_mesh`. Along an axis "data" the
        pipeline is replicated and each replica gets a share of every minibatch. Other axes, such as "fsdp" and "model",
        are left to the compiler: weights are split over them as the model's annotations say, and so are their
        gradients, their optimizer state, and the stashed activations that follow from them. Names that stand for no
        axis of the mesh count as None, so a model runs on any mesh.
      axis_rules: pairs of a logical name and an axis of the mesh, several axes or None, in order of
        priority. A model annotates the dims of its weights by such names, with Flax's
        `with_partitioning` or `with_logical_partitioning`, and those of activations with
        `flax.linen.with_logical_constraint`. The first rule whose axis the mesh has, the array does not
        use yet and the dim is a multiple of, counts; without one the dim is whole. A dim may also be
        annotated by the axis itself, and must then be a multiple of it. None: the rules of Flax's
        `logical_axis_rules`, if the pipeline is made inside of it, else `jpipe.AXIS_RULES`. A rule with the
        axis "stage", `("vocab", "stage")`, lets all stages run the first and the last layer together, see
        `jpipe.vocabulary`.
      strategy: a file of `jpipe.soap.save_strategy`, such as `train/search.py --in-stages --save` writes. It says how
        the operators of the layers are split over the axes of the mesh that are left to the compiler, instead of the
        model's annotations, and how the weights are split. It was searched for a microbatch of one replica, in the
        graph of `jpipe.soap.layers.layers_graph`. The loss, and evaluation, are left to the compiler. Or an
        object with the method `split_layers`, see `jpipe.layers.layer_split.Strategy`. None: the annotations count.
        `docs/tensor_search.md` has an example.
      recompute: "none": a layer keeps what takes less time to keep than to compute again, and no product with weights
        runs again; "full": a stage keeps only its inputs, and runs its forward again before
        its backward; or a policy of `jax.checkpoint_policies`: a layer keeps its inputs and what
        the policy saves, and its backward computes the rest again, from the weights that the
        backward reads.
      shard_optimizer: whether the replicas of a stage share its update (ZeRO, stage 1: Rajbhandari et al.,
        2020, section 5.1). The replicas are those along the axis "data" of the mesh, and the copies of a
        stage that the schedule has. Each keeps the optimizer's state of its share of the weights, gets
        the sum of the gradients for this share, updates it, and sends the new weights to the others:
        as many bytes as without sharing. An update that works element by element, such as Adam's,
        is shared evenly. Of other updates (Muon, Adafactor, LAMB) each replica gets whole leaves. The
        numbers do not change but for the order of sums.
      compress_messages: a compressor of `jpipe.compress`, by which stages send activations, skips and their
        gradients; or a dict with a compressor for "activations", "gradients" or both. `Threshold` and `TopK` send
        entries of an activation, and of its gradient the same entries, unless "gradients" says otherwise. For other
        compressors the gradient passes what they round. Evaluation sends what training sends. None sends
        messages as they are.
      local_steps: a `jpipe.LocalSteps`: replicas along "data" train apart, each on its rows with weights of its own,
        until `outer_step` brings them together. None: they exchange gradients in every step.
      compress_gradients: a compressor of `jpipe.compress`, by which the replicas of a stage exchange gradients. The
        replicas are those along the axis "data", and the copies of a stage that the schedule has. What
        a replica does not send is added to its next gradient (error feedback). All replicas get the same gradient,
        bit for bit. None exchanges gradients as they are.
      accumulate_gradients: a `jpipe.compress.StreamingPCA` of rank k. The gradient of a dense layer `[a, b]`
        is then not formed before the update: k (a + b + 1) numbers accumulate it, and each microbatch of all
        replicas along "data" is one part of the batch (Huang et al., 2020). Gradients that are no product of two
        matrices, of tied weights, or smaller than their factors, are accumulated as they are. None: all are.
      offload: a `jpipe.Offload`: the arrays that are kept in the memory of the host. None: nothing.
      device_memory: bytes that a device may use, as a number or a text such as "2GiB". What does not fit goes to host
        memory: of all choices that fit, with the compiler's temporaries, the one that moves the fewest bytes. The
        choice compiles the step up to ten times more. The first state that the pipeline makes fixes it. None: no limit.
      compute_dtype: every layer casts weights and activations to it, for example `jnp.bfloat16`.
        The kept weights, the gradients and the outputs that the loss sees have the weights' dtype.
        None casts nothing.
      accumulate_dtype: the dtype in which gradients of weights of fewer bits are summed over microbatches and replicas,
        for example `jnp.float32` for weights in bfloat16. The optimizer gets the sum, rounded once to the weights'
        dtype; norms are of the sum. None: gradients are summed in the weights' dtype.
      loss_scale: a number, or a `jpipe.LossScale`, that multiplies the loss before its gradient is
        taken; float16 needs it. None scales nothing.
      has_aux: `loss` returns `(scalar, aux)`, aux a pytree of numbers. `step` returns the mean of
        each over the microbatches.
      ties: parameters that share one value: each tie is a sequence of `(layer, "dotted.path")`
        pairs, of one shape. Their gradients are summed, and the optimizer sees the parameter once,
        in the first of the layers. NNX modules that hold the same variable are tied without being
        named here.
      trainable: the parameters that are trained. The others are frozen: they have no gradient and no optimizer's state,
        and the optimizer does not see them. A filter of NNX, such as `nnx.LoRAParam`, `nnx.PathContains("head")` or
        `nnx.Not(...)`; a function `(path, leaf) -> bool` of the keys of a path and a variable or an abstract array; or
        a tree of bools, or of filters, with the paths of the parameters or the first keys of them. For a list of layers
        a filter sees the paths in a layer, and a tree is a list with an entry for each layer. None: all are trained.
      forward_params: a function `(params, optimizer_state, delay) -> params` that computes the
        weights which a forward reads, such as `jpipe.optim.predicted_params`. It is called once
        after every update, with what the optimizer sees of one stage, and its result is kept beside
        the weights. `delay` is the stage's forward delay; stages with delay 0 do not call it.
      backward_params: such a function for a backward, for example `jpipe.optim.corrected_params`. `delay` is
        the number of updates by which the weights of the backward are newer than those of the
        forward. Under recompute a backward runs the forward again on the weights that the backward
        reads.
      donate: whether `step` and `flush` write the new state over the old one, whose arrays are gone
        then. False keeps the old state usable, and needs memory for both.
      overlap: whether messages between stages travel during compute: a forward's during the tick's
        backward, a backward's during the next tick's forward. If False, all messages of a tick are
        sent after its compute, which is faster on CPU devices, because they share cores. None is
        False on CPU, else True.
      compiler_options: options of XLA for the programs of the pipeline, name -> value as for
        `jax.jit`. They come on top of those that the pipeline sets on GPUs.

    Randomness: layer i draws for microbatch m, counted from the start of training, on replica r of
    the pipeline from `fold_in(fold_in(fold_in(fold_in(key, num_layers), i), m), r)` with the key of
    `init`, so its draws do not depend on the number of stages. The n-th stream of an NNX module is
    that key, folded with n.

    Several processes: all call the same methods in the same order. If the axis "data" of the mesh crosses
    processes, each gives the rows of its own replicas in a batch, see `jpipe.distributed.process_rows`; if not, all
    give the same batch. A `jax.Array` on all devices of the mesh is a whole batch. Results are equal on all
    processes, except that `predict` returns the outputs of the rows that the process gave.

    Mutable state: in batch norms a microbatch is normalised by its own statistics. Running statistics move once per
    minibatch, by the statistics of all rows on all replicas, as in Flax on the whole minibatch. Other state goes from
    microbatch to microbatch, as in a loop over them; replicas keep the mean of what theirs have left. State that no
    call writes keeps its bits. Writes that turn a finite value into one that is not finite are left out.

    Raises:
      ValueError: for any argument that cannot work, before anything is compiled.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe, optax
      >>> from flax import nnx
      >>> layers = [lambda rngs: nnx.Linear(4, 4, rngs=rngs) for _ in range(4)]
      >>> pipe = jpipe.Pipeline(
      ...     layers,
      ...     loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
      ...     optimizer=optax.sgd(0.1),
      ...     schedule=jpipe.schedules.one_f_one_b(num_stages=2, num_microbatches=4),
      ... )
      >>> batch = {"inputs": jnp.ones((8, 4)), "targets": jnp.zeros((8, 4))}
      >>> state = pipe.init(jax.random.key(0), batch)
      >>> state, metrics = pipe.step(state, batch)
      >>> int(metrics["num_microbatches"])
      4
    """

    @outside_mesh
    def __init__(
        self,
        layers: Sequence,
        *,
        loss: Callable[[Any, Any], jax.Array] | None,
        optimizer: optax.GradientTransformation,
        schedule: Schedule,
        boundaries: Sequence[int] | str | None = None,
        mesh: Mesh | None = None,
        axis_rules: AxisRules | None = None,
        strategy: Strategy | str | os.PathLike[str] | None = None,
        recompute: str | Callable[..., Any] = "none",
        compute_dtype: Any = None,
        accumulate_dtype: Any = None,
        loss_scale: LossScale | float | None = None,
        has_aux: bool = False,
        ties: Sequence[Sequence[tuple[int, str]]] = (),
        trainable: Any = None,
        forward_params: Callable[[Any, Any, Any], Any] | None = None,
        backward_params: Callable[[Any, Any, Any], Any] | None = None,
        overlap: bool | None = None,
        shard_optimizer: bool = False,
        compress_messages: Compressor | Mapping[str, Compressor] | None = None,
        compress_gradients: Compressor | None = None,
        local_steps: LocalSteps | None = None,
        accumulate_gradients: StreamingPCA | None = None,
        offload: Offload | None = None,
        device_memory: float | str | None = None,
        donate: bool = True,
        compiler_options: Mapping[str, bool | int | float | str] | None = None,
    ):
        checks.check_schedule(schedule)
        if loss is not None or isinstance(layers, Sequence):
            checks.check_loss(loss, schedule)
        checks.check_optimizer(optimizer)
        check_recompute(recompute)  # `Numbers` needs it too; here it is refused before layers are read
        model = model_of(layers, loss=loss, boundaries=boundaries)
        self.loss, self.optimizer, self.schedule = loss, optimizer, schedule
        self.has_aux = has_aux = checks.check_truth("has_aux", has_aux)
        numbers = Numbers.checked(
            schedule,
            compute_dtype=compute_dtype,
            accumulate_dtype=accumulate_dtype,
            recompute=recompute,
            loss_scale=loss_scale,
        )
        self.recompute, self.compute_dtype = recompute, numbers.compute_dtype
        self.accumulate_dtype = numbers.accumulate_dtype
        self.loss_scale = numbers.loss_scale
        hooks = checks.check_hooks(forward=forward_params, backward=backward_params)
        self.ties = checks.check_ties(ties)
        starts = None
        if model.number is not None:
            starts = check_boundaries(boundaries, model.number, schedule.num_stages)
        if mesh is None:
            mesh = make_mesh(stage=schedule.num_devices, ring=schedule.ring)
        self.mesh = checks.check_mesh(mesh, schedule)
        checks.advise(self.mesh.devices.flat[0].platform)
        communication = Communication.checked(
            self.mesh,
            schedule,
            overlap=overlap,
            shard_optimizer=shard_optimizer,
            compress_messages=compress_messages,
            compress_gradients=compress_gradients,
            accumulate_gradients=accumulate_gradients,
            local_steps=local_steps,
        )
        self.overlap = communication.overlap
        self.shard_optimizer = communication.shard_optimizer
        self.compress_messages = communication.compress_messages
        self.compress_gradients = communication.compress_gradients
        self.accumulate_gradients = communication.accumulate_gradients
        self.local_steps = communication.local_steps
        communication.check_local_steps(
            self.mesh, schedule, loss_scale=numbers.loss_scale, offload=offload, device_memory=device_memory
        )
        device_memory = check_device_memory(device_memory, offload, self.mesh)
        splits = Splits.checked(self.mesh, axis_rules=axis_rules, strategy=strategy)
        if model.number is None:
            splits.check_whole_model()
        check_slices(
            schedule,
            is_whole_model=model.number is None,
            loss=loss,
            boundaries=boundaries,
            splits=splits,
            communication=communication,
        )
        settings = Settings(
            model=model,
            loss=model.loss(loss, has_aux).with_parts(
                schedule.num_microbatches * num_together(self.mesh, communication.local_steps)
            ),
            optimizer=optimizer,
            schedule=schedule,
            mesh=self.mesh,
            splits=splits,
            numbers=numbers,
            communication=communication,
            has_aux=has_aux,
            ties=self.ties,
            hooks=hooks,
            offload=check_offload(offload, self.mesh, schedule, numbers, communication, hooks),
            trainable=Trainable.of(trainable, model.number),
            donate=checks.check_truth("donate", donate),
            compiler_options=checks.check_compiler_options(compiler_options),
        )
        self._programs = Programs(settings, boundaries, starts, device_memory)

    @property
    def num_replicas(self) -> int:
        """Replicas of the pipeline, along the axis "data" of the mesh."""
        return self._settings.num_replicas

    # -- Programs

    @property
    def _settings(self) -> Settings:
        return self._programs.settings

    def _program(self, batch: Any) -> Program:
        """The program for a minibatch, with the cut that `init` chose or would choose for it."""
        return self._programs.get(self._settings.microbatch(batch))

    def _adopted(self, state: Any) -> PipelineState:
        """Returns the state with this pipeline's program.

        Raises:
          ValueError: if it is no state, its arrays are gone, or another pipeline made it that is not
            equal to this one.
        """
        check_state(state)
        program = state.program
        if program.settings is not self._settings:
            checks.check_same_parts(program.settings.parts, self._settings.parts)
            cut = Cut(list(program.stages.starts), program.settings.model.placement)
            program_here = self._programs.get(program.microbatch, program.engine.key_impl, cut)
            checks.check_same_parts(program.parts, program_here.parts)
            self._programs.fix(program_here)
            program = program_here
        return program.place_state(state)

    def _for_batch(self, state: PipelineState, microbatch: Any) -> tuple[PipelineState, Program]:
        """The state and the program to go on with, for microbatches of another shape than those of the state.

        Raises:
          ValueError: if the state cannot go on with them; nothing is donated then.
        """
        before, shapes = state.program, batch_text(microbatch)
        # The name shows to the watchdog if processes change to different shapes.
        with _watchdog.Phase(f"microbatches of {shapes}", _watchdog.LONG, self._settings.rows is not None):
            batch_shapes.check_can_change(state, microbatch)
            try:
                program = self._programs.get(microbatch, before.engine.key_impl)
            except ValueError as error:
                raise ValueError(
                    f"`state` was made for microbatches of {batch_text(before.microbatch)}, and the pipeline "
                    f"cannot take those of this batch, {shapes}: {error}"
                ) from error
            state = batch_shapes.taken_over(state, program)
            if not program.has_stepped:
                self._programs.check_fits(program)
                batch_shapes.warn_of_many(self._programs.num_stepped)
        return state, program

    def __repr__(self) -> str:
        schedule, sizes = self.schedule, dict(self.mesh.shape)
        starts = self._programs.starts
        cut = f"balanced by {self._programs.balance}" if starts is None else f"boundaries {[*starts[1:-1]]}"
        axes = " x ".join(f"{name}={n}" for name, n in sizes.items())
        return (
            f"Pipeline({schedule.name}: {schedule.num_stages} stages of "
            f"{self._settings.model}, {cut}, {schedule.num_microbatches} microbatches, "
            f"on {self.mesh.size} {self.mesh.devices.flat[0].platform} devices, {axes})"
        )

    # -- States

    @public("init", _is_shared)
    def init(
        self,
        key: jax.Array,
        batch: Any,
        params: Sequence | None = None,
        mutable_state: Sequence | None = None,
    ) -> PipelineState:
        """Makes the training state.

        A factory's layer number i is initialised from `jax.random.fold_in(key, i)` on the device of
        its stage, so the weights depend on the key alone, not on the stages, and no device ever
        holds all of them.

        Args:
          key: seeds the weights of layers given as factories, and the random draws of layers in
            training.
          batch: a minibatch, or abstract arrays shaped like one; only its shapes matter.
          params: start from these weights, in the form of `get_params`.
          mutable_state: start from this mutable state, as `get_mutable_state` returns it.

        Returns:
          A `PipelineState`.

        Raises:
          ValueError: if the batch cannot be cut into microbatches, a layer cannot take its inputs,
            the loss is not a scalar, `params` or `mutable_state` do not fit the layers, or several
            processes differ in what they give or in the program.
        """
        checks.check_not_traced("init", key, batch)
        checks.check_key(key)
        model = self._settings.model
        agreement.check_arguments(self._settings, self._programs.balance, key, batch)
        microbatch = self._settings.microbatch(batch)
        program = self._programs.get(microbatch, jax.random.key_impl(key))
        stages = program.stages
        params = model_tree.per_layer(stages.layers, params, as_parameters)
        mutable_state = model_tree.per_layer(stages.layers, mutable_state, as_mutable_state, "state")
        if params is not None:
            checks.check_fit("params", params, stages.layers, "parameters")
            checks.check_ties_agree(params, stages)
        if mutable_state is not None:
            checks.check_fit("mutable_state", mutable_state, stages.layers, "state")
        agreement.check_program(program, params=params, mutable_state=mutable_state)
        self._programs.fix(program)
        self._warn_about_microbatches(program, self._settings.whole(model.batch(batch)))
        key = checks.placed_key(key)
        return portable.initial(program, key, params, mutable_state)

    def _warn_about_microbatches(self, program: Program, batch: Any) -> None:
        """Warns if the loss of a minibatch does not follow from the losses of its microbatches."""
        if self.schedule.num_microbatches * self.num_replicas == 1:
            return
        traced: Any = program.traced
        outputs = traced.output_tree.unflatten(traced.outputs[-1])
        if traced.reported:
            outputs, _ = outputs
        if not traced.has_whole_batch_loss:
            problem = cut_warning(self._settings.loss, outputs, traced.reported, program.microbatch, batch)
            if problem is not None:
                warn(problem)
        if traced.reported:  # reports may be means over rows, which only the loss sees
            traced = self._settings.trace_evaluation(program.microbatch, program.engine.key_impl, traced)
        for sentence in row_mixing(traced):
            warn(
                f"{sentence}, so what it computes depends on the other rows of its microbatch, and "
                "the result of training on `num_microbatches`. Compute each row by itself, or "
                "choose one microbatch per minibatch.",
            )

    @public("adopt", _is_shared)
    def adopt(self, state: PipelineState, batch: Any = None, *, optimizer: str = "same") -> PipelineState:
        """Takes over the state of another pipeline of the same layers and optimizer, or its own for another shape of
        batches.

        Schedule, stages, boundaries, mesh and recompute may differ, and with `batch` the minibatch. The
        new state continues with the weights, the optimizer's state, the mutable state, the random
        key and, if it moves in both pipelines, the loss scale. An injected hyperparameter
        (`optax.inject_hyperparams`) continues too, unless the two pipelines begin with different values: then
        it has the value that this one begins with.

        Args:
          state: the state of the other pipeline, or of this one; not donated.
          batch: a minibatch, or abstract arrays shaped like one, if minibatches have another number of rows or another
            length from here on. None: they stay as they are.
          optimizer: "same": an optimizer whose state differs is an error. "matching": each leaf that has the same
            place, shape and dtype in the state of both continues, and all else is as before training. So a mask, a
            schedule or a transform may change in the middle of a training.

        Returns:
          A `PipelineState` of this pipeline.

        Raises:
          ValueError: if the layers or the optimizer differ, the state has microbatches in flight, or
            the minibatch cannot be cut into microbatches here.
        """
        check_state(state)
        if optimizer not in ("same", "matching"):
            raise ValueError(f'`optimizer` of `adopt` must be "same" or "matching", got {shown(optimizer)}.')
        portable.check_nothing_in_flight(state)
        if batch is None:
            minibatch = portable.minibatch_of(state)
            microbatch = self._settings.microbatch(minibatch, whole=True)
        else:
            microbatch = self._settings.microbatch(batch)
        program = self._programs.get(microbatch, state.program.engine.key_impl)
        agreement.check_program(program)
        if state.anchor:
            portable.warn_of_learners()
        source = portable.to_portable(state, portable.layers_here(program))
        adopted = portable.from_portable(program, source, matching=optimizer == "matching")
        adopted = portable.with_compression_of(adopted, state)
        adopted = hyperparams.begun_anew(adopted, state.program.first_hyperparams)
        self._programs.fix(program)
        return adopted

    @public("get_params", _is_shared)
    def get_params(self, state: PipelineState) -> Any:
        """The newest weights: one nested dict per layer, by attribute names, of host arrays; that of a whole model.

        With several processes every process must call it, and process 0 gets the weights. The others get
        None.
        """
        state = self._adopted(state)
        return model_tree.whole(model_tree.joined(state.program.stages.layers, portable.parameters(state)))

    @public("get_mutable_state", _is_shared)
    def get_mutable_state(self, state: PipelineState) -> Any:
        """The layers' mutable state, such as running statistics, in the form of `get_params`."""
        state = self._adopted(state)
        return model_tree.whole(model_tree.joined(state.program.stages.layers, portable.mutable_state(state), "state"))

    @public("with_params", _is_shared)
    def with_params(self, state: PipelineState, function: Callable[[Any, Any], Any]) -> PipelineState:
        """A state with other weights, computed from the newest ones and the optimizer's state.

        For `evaluate`, `predict` and `get_params` of weights that the optimizer keeps, such as an average:
        `pipe.with_params(state, jpipe.optim.averaged_params)`. The weights go through host memory.

        Args:
          state: the training state; not donated. Microbatches in flight stay in it.
          function: `(params, optimizer_state) -> params`, called for each stage with what the optimizer sees
            there: a list with one nested dict per layer, and None for layers of other stages.

        Returns:
          A `PipelineState` with nothing in flight, with the optimizer's state and the mutable state of `state`.

        Raises:
          ValueError: if the function returns other shapes, dtypes or layers than it gets.
        """
        checks.check_not_traced("with_params", state)
        return portable.with_params(self._adopted(state), function)

    @public("get_hyperparams", _is_shared)
    def get_hyperparams(self, state: PipelineState) -> dict[str, np.ndarray]:
        """The numbers that `optax.inject_hyperparams` keeps in the optimizer's state, by name, such as "learning_rate".

        A name that several transforms have stands as its path in the state of the optimizer. Of a schedule it is the
        value of the last update. Every process must call it.
        """
        return hyperparams.values(self._adopted(state))

    @public("get_diagnostics", _is_shared)
    def get_diagnostics(self, state: PipelineState) -> dict[str, np.ndarray]:
        """The numbers about late gradients that `jpipe.optim.diagnose_delay` keeps in the optimizer's state.

        Args:
          state: the training state, also with microbatches in flight. Every process must call it.

        Returns:
          Name -> `[S]`: those of `jpipe.optim.delay_diagnostics` at the last update of each stage.

        Raises:
          ValueError: if the optimizer keeps none.
        """
        return diagnostics.values(self._adopted(state))

    @public("with_hyperparams", _is_shared)
    def with_hyperparams(self, state: PipelineState, **values: Any) -> PipelineState:
        """A state with other injected hyperparameters, from the next update on.

        The optimizer must keep them in its state: `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`. Nothing
        else changes, and nothing is compiled again. Every process must call it.

        Args:
          state: the training state, also with microbatches in flight. The returned one shares arrays with it, so use
            the returned one from here on.
          **values: numbers by the names of `get_hyperparams`, for example `learning_rate=1e-4`.

        Returns:
          A `PipelineState`.

        Raises:
          ValueError: if there is no such name, a schedule computes the value, or the value does not fit.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe, optax
          >>> pipe = jpipe.Pipeline(
          ...     [jpipe.InitApply(lambda key, x: jnp.ones(()), lambda w, x: w * x)],
          ...     loss=lambda outputs, batch: jnp.mean(outputs),
          ...     optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
          ...     schedule=jpipe.schedules.gpipe(num_stages=1, num_microbatches=1),
          ... )
          >>> state = pipe.init(jax.random.key(0), {"inputs": jnp.ones(2)})
          >>> state = pipe.with_hyperparams(state, learning_rate=0.25)
          >>> float(pipe.get_hyperparams(state)["learning_rate"])
          0.25
        """
        checks.check_not_traced("with_hyperparams", state)
        return hyperparams.with_values(self._adopted(state), values)

    # -- Training

    @outside_mesh
    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, dict[str, jax.Array]]:
        """Feeds one minibatch and runs one pass over the schedule's table.

        In a synchronous schedule every microbatch runs forward and backward and every stage updates
        once. In an asynchronous schedule microbatches of earlier minibatches finish while those of
        this minibatch enter; nothing drains.

        The number of rows, the length and the dtypes of the batch may change from step to step. Each shape compiles a
        program once. An asynchronous schedule must be flushed before a change.

        Args:
          state: the training state; donated, so use the returned one from here on.
          batch: a minibatch: dict of arrays `[batch, ...]`; "inputs" feeds layer 0, the loss sees
            all entries.

        Returns:
          The new state and metrics: "loss", the mean over the microbatches whose loss was computed
          in this step, NaN if there were none; "num_microbatches", the number of these microbatches;
          "gradient_norm", of the gradient over all stages before the optimizer, at the last update
          of the step; "skipped_updates" int32 `[S]`, 1 where a gradient that is not finite made a
          stage keep its weights; with `has_aux` "aux", means like the loss; with a loss scale
          "loss_scale", after the step; with compression "compression", a dict of numbers over all devices:
          "message_ratio" and "gradient_ratio", how many times fewer bytes are sent, "error_norm", the norm of what
          replicas have not sent of their gradients, and of thresholds "gradient_density", "gradient_overflow",
          "message_density" and "message_overflow". JAX runs the step while Python goes on, and reading a metric
          waits for it.

        Raises:
          ValueError: if the state is not of this pipeline, the batch has other entries than that of `init`, or it has
            another shape and a layer cannot take it, or microbatches are in flight.
        """
        checks.check_not_traced("step", state, batch)
        state = self._adopted(state)
        batch = self._settings.model.batch(batch)
        microbatch, program = self._settings.microbatch(batch), state.program
        if not same_shapes(microbatch, program.microbatch):
            state, program = self._for_batch(state, microbatch)
        return program.step(state, batch)

    @public("trace", _is_shared)
    def trace(
        self, state: PipelineState, batch: Any, *, num_steps: int = 1
    ) -> tuple[PipelineState, "jpipe.trace.Trace"]:
        """Trains on a minibatch under JAX's profiler: what every device does, and when.

        On GPUs it compiles a step without CUDA graphs first. Of several processes each gets the trace of its own
        devices. The first steps of a training are slower than later ones, so trace a state that has stepped.

        Args:
          state: the training state; donated, so use the returned one from here on.
          batch: a minibatch, shaped like that of the step before.
          num_steps: the number of steps, each on this minibatch.

        Returns:
          The new state, and a `jpipe.trace.Trace`. `jpipe.trace.record` traces the steps of a loop.

        Raises:
          ValueError: if the state is not of this pipeline, the batch has another shape, another profile is being
            recorded, or the profiler has lost events.
        """
        checks.check_not_traced("trace", state, batch)
        return entry_points.load("trace")(self, self._adopted(state), batch, num_steps)

    @public("outer_step", _is_shared)
    def outer_step(self, state: PipelineState, fragment: int | None = None) -> PipelineState:
        """Brings the replicas of a pipeline with `local_steps` together: they go on with equal weights.

        Args:
          state: the training state, donated.
          fragment: the part of the weights, from 0 to `local_steps.num_fragments` - 1; None: all of them.

        Raises:
          ValueError: if the pipeline has no `local_steps`, or there is no such fragment.
        """
        checks.check_not_traced("outer_step", state)
        if self.local_steps is None:
            raise ValueError(
                "`outer_step` needs `Pipeline(local_steps=jpipe.LocalSteps(...))`: without it the replicas have equal "
                "weights after every step."
            )
        self.local_steps.fragments(fragment)
        state = self._adopted(state)
        return state.program.outer_step(state, fragment)

    @public("flush", _flushes_together)
    def flush(self, state: PipelineState) -> tuple[PipelineState, dict[str, jax.Array]]:
        """Completes the microbatches in flight, without new ones; nothing, in a synchronous schedule.

        The count of rounds restarts: a flushed state is a fresh one with the weights and optimizer
        state it has.

        Args:
          state: the training state; donated if the schedule is asynchronous.

        Returns:
          The new state, and metrics as of `step` over all that was in flight; in a synchronous
          schedule nothing is, and the loss is NaN.
        """
        checks.check_not_traced("flush", state)
        state = self._adopted(state)
        return state.program.flush(state)

    @public("predict", _is_shared)
    def predict(self, state: PipelineState, batch: Any) -> Any:
        """The last layer's outputs, forward only, through the pipeline, with every layer in evaluation mode.

        Args:
          state: the training state; not donated.
          batch: dict whose "inputs" has a leading axis of any size: a size that the number of
            microbatches does not divide is padded with copies of the last row, whose outputs are
            dropped.

        Returns:
          The outputs, `[batch, ...]`. If processes give rows of their own, each gets the outputs of its rows;
          for a global batch they are a global array.
        """
        checks.check_not_traced("predict", state, batch)
        state = self._adopted(state)
        return state.program.prediction.predict(state, batch)

    @public("evaluate", _is_shared)
    def evaluate(self, state: PipelineState, batch: Any) -> dict[str, Any]:
        """The loss of the newest weights, with every layer in evaluation mode.

        The loss is computed once, on all outputs together, so it is the loss of the batch whatever
        kind of mean it takes, and at any size of batch.

        Args:
          state: the training state; not donated.
          batch: a batch like that of `step`, with a leading axis of any size.

        Returns:
          "loss", and "aux" with `has_aux`, as the loss function returns them for the whole batch.
        """
        checks.check_not_traced("evaluate", state, batch)
        state = self._adopted(state)
        return state.program.prediction.evaluate(state, batch)

    @public("plain_loss")
    def plain_loss(self, state: PipelineState, key: jax.Array | None = None) -> Callable[[Sequence, Any], jax.Array]:
        """The loss as a function of the weights, without a pipeline: for gradients, curvatures and checks.

        All layers run one after the other in training mode, on one device and on a whole batch at once. Weights
        and activations are not cast to `compute_dtype`.

        Args:
          state: the training state, which gives the mutable state of the layers; not donated.
          key: the key of random draws, which are not those of `step`. None: `jax.random.key(0)`.

        Returns:
          `(params, batch) -> loss`, with `params` as `get_params` returns them. A tied weight is read from the
          first of its layers.

        Raises:
          ValueError: if the mesh has several processes.
        """
        checks.check_not_traced("plain_loss", state)
        state = self._adopted(state)
        mutable = portable.mutable_state(state)
        if mutable is None or is_shared(self.mesh):
            raise ValueError(
                "`plain_loss` runs the whole model on one device, and the mesh has several processes. Make a pipeline "
                "of one process."
            )
        stages = state.program.stages
        key = jax.random.key(0) if key is None else key
        checks.check_key(key)
        key = checks.placed_key(key)
        return self._settings.model.plain_loss(stages.layers, self._settings.loss, stages.ties, mutable, key)

    # -- Costs

    @public("partition")
    def partition(self, batch: Any) -> list[StageRecord]:
        """The cut of the layers: one record per stage, for minibatches shaped like `batch`."""
        return costs.partition(self._program(batch))

    @public("shards")
    def shards(self, batch: Any) -> list[ShardRecord]:
        """The arrays that each device holds, and the axes of the mesh over which they are split: one record per use.

        For minibatches shaped like `batch`. Compiles nothing.
        """
        return costs.shards(self._program(batch))

    @public("messages")
    def messages(self, batch: Any) -> list[MessageRecord]:
        """The messages of devices: one record for each message between stages, and for the replicas of each stage.

        For minibatches shaped like `batch`. Compiles nothing.
        """
        return traffic.messages(self._program(batch).engine)

    @public("memory")
    def memory(self, batch: Any) -> Memory:
        """Bytes per device for minibatches shaped like `batch`. Compiles the step if it has not been."""
        return costs.memory(self._program(batch))

    @public("memory_by_device")
    def memory_by_device(self, batch: Any) -> "list[jpipe.memory.DeviceMemory]":
        """What the stages of each device need, beside what every device allocates.

        Compiles the step if it has not been. Runs nothing.

        Args:
          batch: a minibatch, or abstract arrays.

        Returns:
          One `jpipe.memory.DeviceMemory` for each position along the axis "stage".
        """
        return entry_points.load("device memory")(self._program(batch))

    @public("memory_timeline")
    def memory_timeline(
        self,
        batch: Any,
        *,
        device: int = 0,
        profile: "jpipe.plan.Profile | None" = None,
    ) -> "jpipe.memory.Timeline":
        """Every array of a step on one device: its bytes, and when it is allocated, written, read and freed.

        Compiles the step if it has not been. Runs nothing.

        Args:
          batch: a minibatch, or abstract arrays.
          device: the device, as a position along the axis "stage" of the mesh.
          profile: a result of `profile` of this pipeline; then the axis has seconds, of devices in lockstep that
            have cores of their own, where messages take no time. None: it has ticks.

        Returns:
          A `jpipe.memory.Timeline`. Its bytes are those that the compiler reserves, at all times; what holds nothing is
          "idle", and so are temporaries that take less than a thousandth of all.

        Raises:
          ValueError: if the device does not exist, or the profile is of another model.
        """
        return entry_points.load("memory timeline")(self._program(batch), device, profile)

    @public("profile")
    def profile(
        self,
        batch: Any,
        *,
        cache: str | os.PathLike | None = None,
        num_microbatches: int | None = None,
        programs: Sequence[str] | None = None,
        min_seconds: float = 0.5,
        devices: Sequence[jax.Device] | None = None,
        whole: "jpipe.plan.Profile | None" = None,
    ) -> "jpipe.plan.Profile":
        """Measures the time of each layer for one microbatch: see `jpipe.plan.profile`.

        Args:
          batch: a minibatch; the layers run on its first rows. Of abstract arrays only the shapes
            are used.
          cache: a file that keeps the profile. If it fits this pipeline it is read and nothing is
            measured.
          num_microbatches: the number of microbatches of the minibatch; None: that of the schedule.
          programs: the programs to measure, of `jpipe.plan.PROGRAMS`; None: all.
          min_seconds: the fewest seconds for which each program is measured.
          devices: the devices that measure, all at once, as they share memory and cores in training; None: the mesh's
            first device alone. Of several processes the first one measures, on devices of its own.
          whole: a profile of the same layers and microbatch without other axes than "stage". Then nothing is measured,
            and the result is the share of a device where the axes "expert" and "context" of the mesh split layers,
            with the bytes that it sends along them.

        Returns:
          A `jpipe.plan.Profile`.

        Raises:
          ValueError: if the batch cannot be cut into microbatches, a layer cannot take its inputs,
            or the file is not a profile.
        """
        return entry_points.load("profile")(
            self._settings,
            batch,
            cache=cache,
            num_microbatches=num_microbatches,
            programs=programs,
            min_seconds=min_seconds,
            devices=devices,
            whole=whole,
        )

    @public("lower")
    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step for minibatches shaped like `batch`, traced and lowered but not compiled."""
        return self._program(batch).lower()

    @public("compile")
    def compile(self, batch: Any) -> jax.stages.Compiled:
        """The compiled step for minibatches shaped like `batch`: its memory, its cost, its text."""
        return self.lower(batch).compile()
