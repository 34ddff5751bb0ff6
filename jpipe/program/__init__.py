"""Everything that is derived from the shapes of one minibatch: the engine and the compiled functions.

Settings (the arguments of `Pipeline`)
   └── + microbatch shapes + cut ──> Program: stages, engine, step, flush
                                     └── Predictor: predict, evaluate
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpipe._processes import watchdog as _watchdog
from jpipe._processes.sharing import sampled_checksum
from jpipe.engine import outer
from jpipe.engine.calls import call_bounded
from jpipe.engine.layout import batch_spec
from jpipe.engine.state import PipelineState
from jpipe.engine.training import TrainingPass
from jpipe.layers.avals import check_nans, shapes_key
from jpipe.layers.trace import TrainingTrace
from jpipe.lowering.versions import has_one_row
from jpipe.mesh import DATA
from jpipe.optim import check_hooks
from jpipe.optim.identity import identity
from jpipe.options.checks import check_stages
from jpipe.options.settings import Settings, same_shapes
from jpipe.options.slices import check_states
from jpipe.program.batches import Batches
from jpipe.program.fresh import FreshArrays
from jpipe.program.metrics import StepMetrics
from jpipe.program.passes import Outputs, Passes
from jpipe.program.prediction import Predictor
from jpipe.stages.hyperparams import first_values
from jpipe.stages.optimizer import make_updates
from jpipe.stages.optimizer_tree import seen_by_optimizer


class Program:
    """The computations of a pipeline for minibatches of one shape.

    Args:
      settings: the settings of the pipeline.
      microbatch: the abstract microbatch.
      key_impl: implementation of the random keys that layers get.
      traced: the layers, traced for this microbatch.
      starts: the first layer of each stage, and the number of layers at the end.

    Attributes:
      stages: the model, cut.
      engine: runs the stages.
      prediction: predicts and evaluates.
      fresh: makes arrays of a state that hold no leaves of layers.

    A program is the static part of its states. Two programs are equal if their states have equal
    layouts and equal meaning, so states of two pipelines that are built alike go together. Programs of one pipeline for
    other shapes share its `prediction` if their states have all that they keep at the same places.
    """

    def __init__(
        self,
        settings: Settings,
        microbatch: Any,
        key_impl: Any,
        traced: TrainingTrace,
        starts: Sequence[int],
    ):
        self.settings, self.microbatch, self.traced = settings, microbatch, traced
        self.batches = Batches(settings)
        self.stages = settings.cut(traced, starts, microbatch, key_impl)
        check_stages(self.stages, settings.schedule, settings.numbers.recompute, settings.num_replicas)
        check_states(self.stages, settings.numbers.recompute)
        _check_hooks(settings, traced)
        if settings.communication.local_steps is not None:
            parameters = [layer.trained for layer in traced.layers]
            settings.communication.local_steps.check_optimizer(settings.optimizer, parameters)
        self.engine = TrainingPass(
            schedule=settings.schedule,
            stages=self.stages,
            mesh=settings.mesh,
            microbatch=microbatch,
            key_impl=key_impl,
            numbers=settings.numbers,
            loss=traced.loss,
            loss_weight=traced.loss_weight,
            has_whole_batch_loss=traced.has_whole_batch_loss,
            updates=make_updates(
                self.stages,
                settings.optimizer,
                settings.hooks,
                settings.communication.sharing_replicas(settings.schedule.copies, settings.num_replicas),
                settings.mesh.shape,
                settings.offload,
                settings.schedule.copies,
                one_row=has_one_row(settings.schedule),
            ),
            communication=settings.communication,
            offload=settings.offload,
        )
        _check_compression(settings, self.engine)
        self.metrics = StepMetrics(settings, self.engine, traced.loss)
        self._passes = Passes(settings, self.engine, self.batches, self.metrics)
        # The metrics of learners stay with them.
        everywhere = NamedSharding(settings.mesh, PartitionSpec(*[DATA] * (self.engine.local_steps is not None)))
        options: dict[str, Any] = dict(
            donate_argnums=0 if settings.donate else (),
            out_shardings=(*self._passes.shardings(), everywhere),
        )
        compiler_options = {
            **self.engine.target.compiler_options,
            **(self.engine.target.pair_options if self.engine.pairs else {}),
            **(self.engine.target.collective_options if self.engine.records_collectives else {}),
            **settings.compiler_options,
        }
        options["compiler_options"] = compiler_options
        self._step = jax.jit(self._run_step, **options)
        self._profiled_step = self._step
        if self.engine.target.profiled_options:
            options_of_profile = {**compiler_options, **self.engine.target.profiled_options}
            self._profiled_step = jax.jit(self._run_step, **options | {"compiler_options": options_of_profile})
        self._after_profiled: Callable[[Any], None] | None = None
        self._flush = jax.jit(self._run_flush, **options)
        self.has_stepped = False  # the first step compiles
        self.fresh = FreshArrays(self.engine, settings.platform)
        self.prediction = Predictor(settings, self.engine, traced, compiler_options)

    # -- Identity

    @functools.cached_property
    def parts(self) -> dict[str, Any]:
        """The facts that decide the layout and the meaning of a state, by the argument that causes them.

        A difference in an early entry may cause one in a later entry, not the other way round.
        """
        return _parts(self)

    @functools.cached_property
    def first_hyperparams(self) -> Mapping[str, np.ndarray]:
        """Path in the optimizer's state -> the first value of an injected hyperparameter."""
        layers = [layer.parameters for layer in self.stages.layers]
        seen = seen_by_optimizer(self.stages, range(len(layers)), layers)
        return first_values(self.settings.optimizer, seen)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, Program) or hash(self) != hash(other):
            return False
        return self.parts == other.parts

    def __hash__(self) -> int:
        return hash((shapes_key(self.microbatch), tuple(self.stages.starts)))

    def __deepcopy__(self, memo: dict) -> "Program":
        return self

    def __reduce__(self):
        raise TypeError(
            "a `PipelineState` cannot be pickled: its static part holds compiled functions. "
            "Save it with Orbax, or pickle `jax.tree.map(np.asarray, jax.tree.leaves(state))` "
            "and put the leaves into a state of an equal pipeline: "
            "`jax.tree.unflatten(jax.tree.structure(pipe.init(key, batch)), leaves)`."
        )

    @property
    def placement(self) -> Sequence[tuple[int, int]]:
        """The device of each stage, and the stage's number on that device."""
        return self.engine.lowered.placement

    @functools.cached_property
    def optimizer_identity(self) -> dict[str, Any]:
        """The meaning of the optimizer's state beside its names and shapes, see `jpipe.optim.identity`."""
        parameters = [layer.trained for layer in self.traced.layers]
        return identity(self.settings.optimizer, parameters)

    @functools.cached_property
    def abstract_state(self) -> PipelineState:
        """The training state as abstract arrays, each with its sharding."""
        layout = self.engine.layout
        return PipelineState(**layout.global_shapes(layout.groups), program=self)

    def place_state(self, state: PipelineState) -> PipelineState:
        """The state of this program. Moves the arrays if they are elsewhere."""
        state = dataclasses.replace(state, program=self)
        want = self.abstract_state.round.sharding
        array = state.round
        if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(want, 1):
            return state
        shardings = jax.tree.map(lambda a: a.sharding, self.abstract_state)
        return jax.device_put(state, shardings)

    # -- Calls

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, dict]:
        """One pass over the table, with a minibatch that enters.

        Args:
          state: a state of this program, or of one with the same `prediction` that has nothing in flight.
          batch: the minibatch, of `Model.batch`.
        """
        check_nans(state.parameters, "the state's parameters")
        limit = None if self.has_stepped else _watchdog.LONG
        mesh = self.settings.mesh
        together = self.settings.rows is not None
        with _watchdog.Phase("step", limit, together, self._given(batch)):
            batch = self.batches.place(dict(batch))
            if state.program is not self:
                state = self._taken_over(state, batch)
            step = self._step if self._after_profiled is None else self._profiled_step
            outputs = call_bounded(step, mesh, state.arrays(), batch, self._rows)
            if self._after_profiled is not None:
                self._after_profiled(outputs)
        self.has_stepped = True
        return self._restore(state, *outputs)

    def _taken_over(self, state: PipelineState, batch: Any) -> PipelineState:
        """The state of a program for another shape of batches, with arrays in flight of the shapes here.

        Those of the other shape are deleted first, because memory may not suffice for both.
        """
        like = self.abstract_state
        if not self.has_stepped:  # what fails to compile must fail while the state is whole
            self._step.lower(like.arrays(), batch, self._rows).compile()
        wanted = like.in_flight()
        others = {n: a for n, a in state.in_flight().items() if not same_shapes(a, wanted[n])}
        if self.settings.donate:
            for a in jax.tree.leaves(others):
                if isinstance(a, jax.Array):
                    a.delete()
        # A compressor whose state has the shape of a message begins anew with a message of another shape.
        kept: Mapping[str, Any] = state.message_compression
        if kept.keys() != like.message_compression.keys():
            anew = self.fresh(["message_compression"])["message_compression"]
            kept = {name: kept.get(name, first) for name, first in anew.items()}
        return dataclasses.replace(state, **self.fresh(others), message_compression=kept, program=self)

    def _given(self, batch: Any) -> _watchdog.Batch | None:
        """The record of this process's share of a step, for the watchdog to compare; None without a watchdog."""
        if self.settings.rows is None or _watchdog.running is None:
            return None
        return _watchdog.Batch(self._share, sampled_checksum(batch))

    @functools.cached_property
    def _share(self) -> str:
        """Names this process's rows of every batch. Processes that give the same rows have the same name."""
        rows = self.settings.rows
        assert rows is not None
        held = repr((rows.held, rows.held[rows.process]))
        return f"{zlib.crc32(held.encode()):08x}"

    def flush(self, state: PipelineState) -> tuple[PipelineState, dict]:
        """Passes over the table until nothing is in flight."""
        if self.settings.schedule.synchronous:
            return state, self.metrics.nothing(state)
        outputs = call_bounded(self._flush, self.settings.mesh, state.arrays(), self._rows)
        return self._restore(state, *outputs)

    @functools.cached_property
    def _rows(self) -> jax.Array:
        """The argument of `step` and `flush` that holds the table."""
        return self.engine.place_rows()

    @functools.cached_property
    def _outer_step(self) -> Callable[..., Any]:
        def run(fragment: Any, arrays: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
            return outer.outer_step(self.engine, fragment, arrays, read)

        static = outer.static_arguments(self.engine)
        return jax.jit(run, static_argnums=static, donate_argnums=1 if self.settings.donate else ())

    def outer_step(self, state: PipelineState, fragment: int | None) -> PipelineState:
        """Brings learners together: see `jpipe.options.local_steps`."""
        arrays = {name: dict(getattr(state, name)) for name in outer.FIELDS}
        read = {"counters": state.counters(), "optimizer_state": state.optimizer_state}
        with _watchdog.Phase("outer_step", _watchdog.LONG, self.settings.rows is not None):
            return dataclasses.replace(state, **self._outer_step(fragment, arrays, read))

    @property
    def minibatch(self) -> Any:
        """The abstract minibatch, with the rows of all processes."""
        return self.settings.minibatch(self.microbatch)

    @contextlib.contextmanager
    def profiled(self, after_step: Callable[[Any], None]) -> Iterator[None]:
        """A context in which steps are such that a profiler sees all of their operations.

        Args:
          after_step: is called after each step with its outputs.
        """
        self._after_profiled = after_step
        try:
            yield
        finally:
            self._after_profiled = None

    def lower(self, profiled: bool = False) -> jax.stages.Lowered:
        """The step, traced and lowered but not compiled; or the step of `profiled`."""
        sharding = NamedSharding(self.settings.mesh, batch_spec(self.settings.mesh))

        def placed(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if self.settings.num_replicas == 1 and self.settings.rows is None:
                return a
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        batch = jax.tree.map(placed, self.minibatch)
        state, rows = self.abstract_state, self.engine.abstract_rows
        step = self._profiled_step if profiled else self._step
        return step.lower(state.arrays(), batch, rows)

    # -- Compiled functions

    def _run_step(self, arrays: Mapping[str, Any], batch: Any, rows: jax.Array) -> Outputs:
        return self._passes.step(arrays, batch, rows)

    def _run_flush(self, arrays: Mapping[str, Any], rows: jax.Array) -> Outputs:
        return self._passes.flush(arrays, rows)

    def _restore(self, state: PipelineState, kept: dict, in_flight: dict, metrics: dict) -> tuple[PipelineState, dict]:
        """The new state and metrics out of the outputs of a compiled function."""
        return dataclasses.replace(state, **kept, **in_flight), metrics


def _check_hooks(settings: Settings, traced: TrainingTrace) -> None:
    """Checks that hooks come with the transforms whose state they read, and the other way round."""
    if not settings.hooks and settings.schedule.synchronous:
        return  # no delays: in a synchronous warm-up all passes read the newest weights
    parameters = [layer.trained for layer in traced.layers]
    try:
        optimizer_state = jax.eval_shape(settings.optimizer.init, parameters)
    except Exception:
        return  # `make_updates` says why the optimizer cannot begin
    check_hooks(optimizer_state, **settings.hooks)


def _parts(program: Program) -> dict[str, Any]:
    """See `Program.parts`."""
    traced, stages, updates = program.traced, program.stages, program.engine.updates
    layers = [
        (
            traced.layer_kinds[kind].text,
            traced.specs[kind],
            str(jax.tree.structure((layer.parameters, layer.state))),
            layer.stash,
            layer.pop,
        )
        for kind, layer in zip(traced.kind_of_layer, stages.layers)
    ]
    update_texts = [
        [
            (
                group.run.text(),
                [_slot_key(slot) for slot in (*group.inputs, *group.outputs)],
            )
            for group in update.groups
        ]
        + [[_slot_key(slot) for slot in update.shared]]
        for update in updates.distinct
    ]
    return {
        "batch": shapes_key(program.microbatch),
        "implementation of random keys": str(program.engine.key_impl),
        **program.settings.parts,
        "boundaries": tuple(stages.starts[1:-1]),
        "trainable": [layer.frozen for layer in stages.layers],
        "layers": layers,
        "loss": (
            traced.loss.text,
            traced.loss_weight and traced.loss_weight.text(),
            traced.has_whole_batch_loss,
            sorted(traced.reported),
        ),
        "layers of all stages": [
            (layer.index, tuple((leaf.dim, leaf.is_split) for leaf in layer.leaves))
            for layer in stages.vocabulary.layers
        ],
        "forward_params or backward_params": sorted(program.settings.hooks),
        "optimizer": (
            update_texts,
            updates.program_of_stage,
            {path: a.tolist() for path, a in program.first_hyperparams.items()},
        ),
    }


def _slot_key(slot: Any) -> tuple:
    """`LeafSlots` as a value that compares."""
    return slot.arrays, [(place, starts.tolist()) for place, starts in slot.copies]


def _check_compression(settings: Settings, engine: TrainingPass) -> None:
    """Raises ValueError if a gradient cannot be compressed, or accumulated."""
    compressor = settings.communication.compress_gradients
    accumulate = settings.communication.accumulate_gradients
    if accumulate is not None and not engine.stages.factors.arrays:
        raise ValueError(
            f"`accumulate_gradients` is of rank {accumulate.rank}, and no weight has a gradient that is a product "
            "of two matrices and larger than its factors, k (a + b + 1) numbers for a weight [a, b]. Choose a "
            "smaller `rank`, or leave it out."
        )
    if compressor is None:
        return
    for group in engine.gradient_groups:
        shape = "x".join(map(str, group.like.shape)) or "scalar"
        is_part = group.place.array in engine.array_rows["gradients"].unit_rows
        words = "of a device's part of a weight" if is_part else "of a weight"
        compressor.check(group.like, f"the gradient {words} ({shape})")
