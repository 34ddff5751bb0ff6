"""Checkpoints of a training: saved while it goes on, whole or not at all, restored into any pipeline.

    DIRECTORY/
      00000400/              a step; the folder has this name once it is whole
        arrays/              the packed arrays as the devices hold them, written by Orbax
        manifest.json        the layout, the counters, and the checksum of every file
      00000500.saving/       a save that goes on, or that was cut off; the next save removes it
      00000200.deleting/     a step that is being deleted

A save copies the arrays, and threads write them while training goes on. Nothing moves between devices. Restored into a
pipeline of the same layout, a training goes on bit for bit, microbatches in flight included. Restored into another
pipeline, every device reads the leaves of its own layers.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

import jpipe
from jpipe._processes import restarts as _restarts
from jpipe._processes.sharing import from_first, gather_texts, processes_of
from jpipe._programs import Cut
from jpipe._util.foreign import shown
from jpipe._util.paths import local_path
from jpipe._util.suggest import suggests
from jpipe._util.warn import warn
from jpipe.checkpoints import _arrays, _layout
from jpipe.checkpoints._manifest import DamagedCheckpointError, Manifest
from jpipe.checkpoints._safetensors import NameMap, NameRule
from jpipe.checkpoints._weights_file import load_params, save_params
from jpipe.checkpoints._writing import Writing, folder_of, steps_in
from jpipe.engine.calls import check_state, public
from jpipe.engine.state import PipelineState, num_rounds
from jpipe.layers.model_tree import merged
from jpipe.pipeline import Pipeline
from jpipe.segments.placement import Placement
from jpipe.states import agreement, hyperparams, portable
from jpipe.states.new import with_arrays

__all__ = [
    "Checkpoints",
    "DamagedCheckpointError",
    "NameMap",
    "NameRule",
    "Restored",
    "load_params",
    "save_params",
]


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`.

    Attributes:
      state: the training state.
      step: the step that was restored.
      run: the value that `save` got as `run`.
    """

    state: PipelineState
    step: int
    run: Any


def _saves_together(checkpoints: "Checkpoints", *args: Any, **kwargs: Any) -> bool:
    """Returns whether all processes must call `save`, because the mesh of the state has devices of all of them."""
    given = [*args, *kwargs.values()]
    return any(isinstance(state, PipelineState) and state.program.settings.rows is not None for state in given)


@suggests
class Checkpoints:
    """The checkpoints of one training, in a directory.

    With several processes, every process makes this object with the same directory, which all of them
    can reach, and calls the same methods. Each process writes and reads its own parts of the arrays.

    Args:
      directory: a folder in a file system, made by the first save; no address of object storage. Only one training may
        save there.
      keep: the number of the newest steps that stay. None: all.
      memory: whether the newest step is also kept in the memory of this machine, from where `restore` takes it. Under
        `python -m jpipe.launch --restarts` it is there as long as the launcher: it outlives every process, and not the
        machine. Elsewhere nothing is kept, and a warning says so.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, jpipe, optax
      >>> from flax import nnx
      >>> pipe = jpipe.Pipeline(
      ...     [lambda rngs: nnx.Linear(4, 4, rngs=rngs) for _ in range(4)],
      ...     loss=lambda outputs, batch: jnp.mean((outputs - batch["targets"]) ** 2),
      ...     optimizer=optax.sgd(0.1),
      ...     schedule=jpipe.schedules.one_f_one_b(num_stages=2, num_microbatches=4),
      ... )
      >>> batch = {"inputs": jnp.ones((8, 4)), "targets": jnp.zeros((8, 4))}
      >>> state = pipe.init(jax.random.key(0), batch)
      >>> with jpipe.Checkpoints(tempfile.mkdtemp(), keep=3) as checkpoints:
      ...     checkpoints.save(1, state, run={"epoch": 0})
      ...     checkpoints.wait()
      ...     restored = checkpoints.restore(pipe, batch)
      >>> restored.step, restored.run
      (1, {'epoch': 0})
    """

    def __init__(self, directory: str | os.PathLike, keep: int | None = 3, *, memory: bool = False):
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"`keep` must be a number of steps, at least 1, or None, got {shown(keep)}.")
        if not isinstance(memory, bool):
            raise ValueError(f"`memory` must be True or False, got {shown(memory)}.")
        # Orbax needs an absolute path.
        self.directory = pathlib.Path(os.path.abspath(local_path(directory, "directory")))
        self.keep = keep
        self._writing: Writing | None = None
        self._damaged: set[int] = set()  # steps that `restore` has found damaged
        name = f"checkpoints-{zlib.crc32(os.fsencode(self.directory))}"
        self._memory = _restarts.memory_folder(name) if memory else None
        if memory and self._memory is None:
            warn(
                "`memory=True` keeps nothing: no memory outlives this process. `python -m jpipe.launch --restarts` has "
                "some, where there is a folder /dev/shm. Steps are saved to the directory as usual."
            )
        _restarts.tell(_restarts.SAVES)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- Saving

    @public("save a checkpoint", _saves_together)
    def save(self, step: int, state: PipelineState, run: Any = None) -> None:
        """Saves a state. Returns as soon as training may go on with the state, also by a donating step.

        Waits for the save before, if it still goes on. A step of the same number is replaced.

        Args:
          step: the number of the step, at least 0.
          state: the training state, also with microbatches in flight; not donated.
          run: a value for JSON, such as the position in the data; `restore` returns it.

        Raises:
          ValueError: if `step`, `state` or `run` cannot be saved.
          OSError: if the directory cannot be written, in this save or the one before. Steps that
            were saved stay.
        """
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise ValueError(f"`step` must be an integer of at least 0, got {shown(step)}.")
        check_state(state)
        _check_processes(state.program.settings.mesh)
        try:
            run = json.loads(json.dumps(run))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`run` must be values that JSON has, such as dicts, lists, numbers and text: {error}."
            ) from error
        self.wait()
        named = steps_in(self.directory)
        if later := [n for n in named if n > step and self._seems_whole(self.directory, n)]:
            raise ValueError(
                f"`step` must not be before the steps that `{self.directory}` has, got {shown(step)} after "
                f"{later[-1]}: the newest step is the one that `restore` takes. Use another directory, "
                "or delete the folders of the later steps."
            )
        layout = _layout.layout_of_state(state)
        manifest = Manifest(
            step=int(step),
            layout=layout,
            counters={
                "round": num_rounds(state),
                "started": int(state.started.addressable_data(0)[0]),
                "key": np.asarray(state.key.addressable_data(0)[0]).tolist(),
                "key_impl": str(state.program.engine.key_impl),
            },
            run=run,
            versions={
                "jpipe": jpipe.__version__,
                "jax": jax.__version__,
                "orbax": ocp.__version__,
            },
            files={},
        )
        self._writing = Writing(
            self.directory,
            manifest,
            _layout.saved_arrays(state, layout["in_flight"]),
            self.keep,
            [folder_of(self.directory, damaged) for damaged in self._damaged - {step}],
            memory=self._memory,
        )
        self._damaged.clear()

    @public("wait for a checkpoint")
    def wait(self) -> None:
        """Waits until the last save is whole.

        Raises:
          OSError: if it failed; see `save`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def close(self) -> None:
        """Waits for the last save. The object can be used again."""
        self.wait()

    # -- Reading

    def steps(self) -> list[int]:
        """The steps that can be restored, in order: their files have the right sizes."""
        return sorted({step for step, place in self._copies() if self._seems_whole(place, step)})

    @public("restore a checkpoint", lambda *_, **__: True)
    def restore(self, pipe: Pipeline, batch: Any, step: int | None = None) -> Restored:
        """Restores a state for a pipeline.

        If the state has the layout of the pipeline's states, all of it is restored, microbatches in
        flight included. Else the weights, the optimizer's state, the mutable state, the random key
        and, if it moves in both, the loss scale are restored layer by layer, as `Pipeline.adopt` does.
        A pipeline whose cut is not fixed takes over the cut of the checkpoint if it has as many
        stages.

        Args:
          pipe: the pipeline. Its layers must be those of the training; stages, boundaries, schedule
            and mesh may differ.
          batch: a minibatch, or abstract arrays shaped like one.
          step: the step. None is the newest one that is not damaged; a warning names the damaged
            ones.

        Raises:
          FileNotFoundError: if there is no step, or not this one.
          DamagedCheckpointError: if a file of `step` is damaged.
          ValueError: if the layers or the optimizer differ, microbatches are in flight and the layout
            differs, or the checkpoint has a newer format.
        """
        if not isinstance(pipe, Pipeline):
            raise ValueError(
                f"`pipe` must be a `jpipe.Pipeline`, got {type(pipe).__name__}. Write "
                "`checkpoints.restore(pipe, batch)`."
            )
        folder, manifest = self._whole(step)
        try:
            state = _restored(pipe, batch, folder, manifest)
        except ValueError as error:
            raise ValueError(f"`{folder}` does not fit: {error}") from error
        _restarts.tell(_restarts.SAVED, str(manifest.step))
        return Restored(state, manifest.step, manifest.run)

    def params(self, step: int | None = None) -> Any:
        """The newest weights of a step, without a pipeline, in the form of `Pipeline.get_params`.

        With several processes every process must call it. A leaf is then read when `numpy.asarray` asks for
        it, so that `init(key, batch, params=checkpoints.params())` keeps what each process needs.

        Args:
          step: see `restore`.

        Raises:
          FileNotFoundError: if there is no step, or not this one.
          DamagedCheckpointError: if a file of `step` is damaged.
        """
        folder, manifest = self._whole(step)
        leaves = _arrays.stored_leaves(folder, manifest.layout)
        params = merged(leaves.params) if manifest.layout.get("whole_model") else leaves.params
        return params if jax.process_count() > 1 else jax.tree.map(np.asarray, params)

    def _copies(self) -> list[tuple[int, pathlib.Path]]:
        """The steps, damaged or not, and the folders that they are in: the newest first, memory before the disk."""
        places = [place for place in (self._memory, self.directory) if place is not None]
        return sorted(((step, place) for place in places for step in steps_in(place)), key=lambda copy: -copy[0])

    def _manifest(self, folder: pathlib.Path, step: int) -> Manifest:
        """The manifest of a step; see `Manifest.read` for errors."""
        manifest = Manifest.read(folder)
        if manifest.step != step:
            raise DamagedCheckpointError(
                f"`{folder}` has step {manifest.step} by its manifest: it was renamed or copied. Name it "
                f"`{folder_of(self.directory, manifest.step).name}`"
            )
        return manifest

    def _seems_whole(self, place: pathlib.Path, step: int) -> bool:
        """Returns whether the manifest and the sizes of the files are right."""
        if place == self.directory and step in self._damaged:
            return False
        folder = folder_of(place, step)
        try:
            self._manifest(folder, step).check_sizes(folder)
        except DamagedCheckpointError:
            return False
        return True

    def _whole(self, step: int | None) -> tuple[pathlib.Path, Manifest]:
        """The folder of a step whose files are all as written, and its manifest; the same on every process."""
        copies = from_first([(n, str(place)) for n, place in self._copies()])
        candidates = [(n, pathlib.Path(place)) for n, place in copies if step is None or n == step]
        if step is not None and not candidates:
            raise FileNotFoundError(f"`{self.directory}` has no step {step}. It has {_listed(self.steps())}.")
        for candidate, place in candidates:
            manifest, error, folder = None, None, folder_of(place, candidate)
            try:
                manifest = self._manifest(folder, candidate)
                share = jax.process_index(), jax.process_count()
                manifest.check_content(folder, share)
            except ValueError as caught:
                error = caught
            problems = filter(None, gather_texts(str(error or "")))
            problem = next(problems, None)
            if problem is None:
                assert manifest is not None
                return folder, manifest
            if error is not None and not isinstance(error, DamagedCheckpointError):
                raise error
            if step is not None and (candidate, place) == candidates[-1]:
                raise DamagedCheckpointError(problem)
            if place == self.directory:
                self._damaged.add(candidate)
            then = "the one before" if place == self.directory else "the directory"
            warn(f"step {candidate} cannot be restored: {problem}. Trying {then}.")
        named = sorted({n for n, _ in copies})
        raise FileNotFoundError(f"`{self.directory}` has no step that can be restored. It has {_listed(named)}.")


def _check_processes(mesh: Mesh) -> None:
    """Raises ValueError for the mesh of a state that has no devices of some process."""
    if len(processes_of(mesh)) < jax.process_count():
        raise ValueError(
            "the mesh of `state` must have devices of all processes, which write a checkpoint together, got devices "
            f"of process {jax.process_index()} alone. Make the mesh with `jpipe.make_mesh` from all of "
            "`jax.devices()`, or write the weights with `jpipe.save_params`."
        )


def _listed(steps: Sequence[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "no steps"


# -- Restoring


def _restored(pipe: Pipeline, batch: Any, folder: pathlib.Path, manifest: Manifest) -> PipelineState:
    layout, counters = manifest.layout, manifest.counters
    in_flight, rounds = layout["in_flight"], counters["round"]
    groups, held = map(tuple, layout.get("placement", ((), ())))
    placement = Placement(groups, held) if groups else None
    microbatch = pipe._settings.microbatch(batch)
    program = pipe._programs.to_restore(microbatch, counters["key_impl"], Cut(layout["starts"], placement))
    key = np.array(counters["key"], np.uint32)
    num_started = counters["started"] + rounds * layout["num_microbatches"]
    agreement.check_program(program)
    mine = _layout.layout_of(program, rounds, in_flight)
    different = _layout.differences(mine, layout)
    if not different:
        portable.check_same_optimizer(program, layout.get("optimizer"))
        shapes = _layout.saved_arrays(program.abstract_state, in_flight)
        arrays = _arrays.restore(folder, shapes)
        counts = (rounds, counters["started"]) if in_flight else (0, num_started)
        state = with_arrays(program, arrays, key, *counts)
    elif in_flight:
        shape = "The batch has another shape than that of the last step: give one of that shape. "
        raise ValueError(
            "it has microbatches in flight, which only a pipeline of the same layout can complete, and this pipeline "
            f"has another: {'; '.join(different)}. {shape if different == ['arrays'] else ''}Restore it into a "
            "pipeline of the same layout, `flush` it and let this one `adopt` it, or start a new optimizer from the "
            "newest weights: `init(key, batch, params=checkpoints.params())`."
        )
    else:
        leaves = _arrays.stored_leaves(folder, layout)
        source = portable.Portable(
            leaves=leaves,
            num_microbatches=num_started,
            key_data=key,
            key_impl=program.engine.key_impl,
            optimizer=layout.get("optimizer"),
        )
        state = portable.from_portable(program, source)
        if _layout.has_learners(layout):
            portable.warn_of_learners()
        if _layout.has_compression(layout) or _layout.has_compression(mine):
            portable.warn_of_new_compression()
    pipe._programs.fix(program)
    return hyperparams.begun_anew(state, _layout.first_hyperparams(layout))
