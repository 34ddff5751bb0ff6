"""The programs of a pipeline: one for each shape of its minibatches, all with one cut."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jpipe._processes.sharing import from_first
from jpipe._util import entry_points
from jpipe.costs.fit import check_fits, fit
from jpipe.layers import model_tree
from jpipe.layers.avals import shapes_key
from jpipe.layers.layer import Layer
from jpipe.layers.trace import TrainingTrace
from jpipe.options.settings import Settings
from jpipe.program import Program
from jpipe.segments.placement import Placement
from jpipe.stages.boundaries import check_boundaries
from jpipe.stages.offload import Offload


class Cut(NamedTuple):
    """The cut of a state that comes from elsewhere.

    Attributes:
      starts: the first layer of each stage, and the number of layers at the end.
      placement: the steps of a whole model on stages, if it was placed.
    """

    starts: Sequence[int]
    placement: Placement | None


class Programs:
    """The programs of a pipeline, each made once.

    Until the pipeline has a state, each shape of minibatches may have a cut and an offload of its own: they are chosen
    by what its layers cost. The first state fixes both.

    Args:
      settings: the settings of the pipeline.
      boundaries: as `jpipe.Pipeline` has them.
      starts: the first layer of each stage, and the number of layers at the end; None: the programs choose them.
      device_memory: the bytes that a device may need; None: all that it needs.

    Attributes:
      settings: the settings, with the choices of the first state if there is one.
      starts: as above; the cut of the first state if there is one.
      balance: what the stages are balanced by.
    """

    def __init__(
        self,
        settings: Settings,
        boundaries: Sequence[int] | str | None,
        starts: Sequence[int] | None,
        device_memory: float | None,
    ):
        self.settings, self.starts = settings, starts
        self.balance = boundaries if isinstance(boundaries, str) else "flops"
        self._boundaries, self._device_memory = boundaries, device_memory
        self._fixed: Program | None = None
        self._traced: dict[tuple, TrainingTrace] = {}
        self._balanced: dict[tuple, list[int]] = {}
        self._placements: dict[tuple, Settings] = {}
        self._made: dict[tuple, Program] = {}

    def get(self, microbatch: Any, key_impl: Any = None, cut: Cut | None = None) -> Program:
        """The program for an abstract microbatch.

        Args:
          microbatch: the abstract microbatch.
          key_impl: implementation of the random keys; None: JAX's default.
          cut: counts if there is no state yet.
        """
        if key_impl is None:
            key_impl = jax.config.jax_default_prng_impl
        settings = self._placed(microbatch, key_impl, cut)
        key = self._trace_key(settings, microbatch, key_impl)
        if key not in self._traced:
            self._traced[key] = settings.trace(microbatch, key_impl, self._fixed_layers)
        traced = self._traced[key]
        starts = self._starts(key, settings, traced, microbatch, cut)
        chooses_offload = self._device_memory is not None and self._fixed is None
        key = self._program_key(key, starts, None if chooses_offload else settings.offload)
        if key not in self._made:

            def make(offload: Offload) -> Program:
                changed = settings if offload == settings.offload else dataclasses.replace(settings, offload=offload)
                return Program(changed, microbatch, key_impl, traced, starts)

            if chooses_offload:
                assert self._device_memory is not None
                self._made[key] = fit(make, self._device_memory)
            else:
                self._made[key] = make(settings.offload)
        return self._made[key]

    def to_restore(self, microbatch: Any, key_impl: str, cut: Cut) -> Program:
        """The program for a state that was saved. It has the cut of that state if it fits."""
        fits = len(cut.starts) == self.settings.schedule.num_stages + 1
        fits = fits and self.settings.model.number in (None, cut.starts[-1])
        return self.get(microbatch, key_impl, cut if fits else None)

    def fix(self, program: Program) -> None:
        """Fixes the cut and the offloaded arrays to those of a program whose state the pipeline has made."""
        self.starts, self._fixed, self.settings = list(program.stages.starts), program, program.settings
        key = self._trace_key(self.settings, program.microbatch, program.engine.key_impl)
        self._traced[key] = program.traced
        self._made[self._program_key(key, self.starts, self.settings.offload)] = program

    def __len__(self) -> int:
        return len(self._made)

    def check_fits(self, program: Program) -> None:
        """Raises ValueError if a program needs more of a device than the pipeline may have."""
        if self._device_memory is not None:
            check_fits(program, self._device_memory)

    @property
    def num_stepped(self) -> int:
        """The number of programs whose step is compiled."""
        return sum(program.has_stepped for program in self._made.values())

    # -- The choices of a program

    @property
    def _fixed_layers(self) -> Sequence[Layer]:
        """The layers of the first state's program; none without a state."""
        return () if self._fixed is None else self._fixed.stages.layers

    def _trace_key(self, settings: Settings, microbatch: Any, key_impl: Any) -> tuple:
        """Names a trace. Once there is a state, whole models are cut where they were for it."""
        like = self._fixed_layers
        marks = [layer.options.segment for layer in like if model_tree.is_whole(like)]
        return shapes_key(microbatch), str(key_impl), tuple(marks), settings.model.placement

    def _program_key(self, trace_key: tuple, starts: Sequence[int], offload: Offload | None) -> tuple:
        """Names a program. `offload` is None if it is chosen for the program."""
        return *trace_key, *starts, offload

    def _placed(self, microbatch: Any, key_impl: Any, cut: Cut | None) -> Settings:
        """The settings, with the steps of a whole model placed on stages if `boundaries` are "placement"."""
        settings, num_stages = self.settings, self.settings.schedule.num_stages
        is_placed = settings.model.number is not None or settings.model.placement is not None
        if self.balance != "placement" or is_placed or num_stages == 1:
            return settings
        placement = None if cut is None else cut.placement
        if placement is not None and placement.num_groups == num_stages:
            return settings.placed(placement)
        key = shapes_key(microbatch), str(key_impl)
        if key not in self._placements:
            place = entry_points.load("placement")
            steps = self._of_first_process(lambda: place(settings, microbatch, key_impl, self._device_memory))
            self._placements[key] = settings.placed(Placement.of(steps))
        return self._placements[key]

    def _starts(
        self, trace_key: tuple, settings: Settings, traced: TrainingTrace, microbatch: Any, cut: Cut | None
    ) -> Sequence[int]:
        """The first layer of each stage, and the number of layers at the end."""
        if self.starts is not None:
            return self.starts
        # A whole model has a number of layers only now, so only now are its boundaries numbers of layers.
        num_stages, num_layers = settings.schedule.num_stages, len(traced.layers)
        boundaries = settings.model.boundaries(self._boundaries, traced.layers, num_stages)
        starts = check_boundaries(boundaries, num_layers, num_stages)
        if starts:
            return starts
        if cut is not None and cut.starts[-1] == num_layers and cut.placement == settings.model.placement:
            return cut.starts
        if trace_key not in self._balanced:
            balance = entry_points.load(f"boundaries by {self.balance}")
            inner = self._of_first_process(lambda: balance(settings, traced, microbatch))
            self._balanced[trace_key] = [0, *inner, num_layers]
        return self._balanced[trace_key]

    def _of_first_process(self, decide: Callable[[], Sequence]) -> Sequence:
        """What process 0 decides, because what each process measures differs. All raise its `ValueError`."""
        if self.settings.rows is None:
            return decide()
        outcome: Any = None
        if jax.process_index() == 0:
            try:
                outcome = list(decide()), None
            except ValueError as error:
                outcome = None, str(error)
        decided, refused = from_first(outcome)
        if refused is not None:
            raise ValueError(refused)
        return decided
