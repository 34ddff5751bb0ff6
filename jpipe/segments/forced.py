"""Places that the user names: markers in the model, and modules with which a stage begins."""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean, suggests
from jpipe.layers.layer import Layer
from jpipe.segments.places import CutError, CutPlace, DataFlow
from jpipe.segments.trace import Trace

_NAME = "jpipe.stage_end"


@suggests
def stage_end(x: Any) -> Any:
    """Marks the end of a stage in a whole model; returns `x`.

    With as many marks as the schedule has stages, less one, every stage but the last ends at a mark. With more, the
    pipeline chooses among the marks. Outside of a pipeline it does nothing.

    Args:
      x: a pytree of arrays, such as the activation.

    Example:
      >>> import jax.numpy as jnp
      >>> float(stage_end(jnp.float32(2)))
      2.0
    """
    return checkpoint_name(x, _NAME)


class ForcedPlaces:
    """The places of a model that its user names.

    Args:
      modules: paths of modules, such as "blocks.4": there is a place before the first equation that reads their
        weights or state, where the least crosses since the step before.
    """

    def __init__(self, modules: Sequence[str]):
        self._modules = modules

    def arranged(self, trained: Trace, evaluated: Trace) -> tuple[Trace, Trace]:
        """The model in training and in evaluation, its equations in the order in which they are cut: as they are."""
        return trained, evaluated

    def are_all(self, places: Sequence[CutPlace], num_stages: int) -> bool:
        """Whether the model is cut at these places alone: with so many marks the user says where stages may end."""
        return sum(place.mark[0] == "stage_end" for place in places) >= num_stages

    def places(self, flow: DataFlow, paths: Sequence[str], state_paths: Sequence[str] = ()) -> list[CutPlace]:
        """The places in a traced model, in order.

        Args:
          flow: of the traced model.
          paths, state_paths: dotted path of each parameter, and of each leaf of the state.

        Raises:
          ValueError: if no weights of a module are read.
        """
        marks = [i for i, eqn in enumerate(flow.program.equations) if eqn.params.get("name") == _NAME]
        # A marked tree has an equation for each of its arrays.
        ends = [i for i, after in itertools.pairwise([*marks, -1]) if after != i + 1]
        positions: dict[tuple, int] = {("stage_end", n): i + 1 for n, i in enumerate(ends)}
        for module in self._modules:
            inside = [
                v
                for v, path in zip(flow.roles.parameters, paths, strict=True)
                if f"{path}.".startswith(f"{module}.") and v in flow.first_reads
            ]
            if not inside:
                parts = [path.split(".")[:-1] for path in paths]
                known = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
                raise CutError(
                    f"`boundaries` names {shown(module)}, and the model reads no weights of such a module."
                    f"{did_you_mean(module, known)} It has {', '.join(dict.fromkeys(p[0] for p in parts if p))}."
                )
            first = min(flow.first_reads[v] for v in inside)
            read = [n for n, path in enumerate(state_paths) if f"{path}.".startswith(f"{module}.")]
            begin = min([first, *(i for n in read for i in flow.reads_for_results.get(n, ()))])
            # A norm has read its inputs before its weights.
            positions["module", module] = flow.narrowest_before(begin)
            if first == min(flow.first_reads.values()):
                raise CutError(
                    f"`boundaries` names {shown(module)}, with which the model begins. Name the modules with which the "
                    "stages after the first begin."
                )
        return sorted((flow.place_at(i, mark) for mark, i in positions.items()), key=lambda place: place.position)

    def boundaries(self, boundaries: Any, layers: Sequence[Layer], num_stages: int) -> Any:
        """The `boundaries` of a pipeline as numbers of segments, as far as they are named.

        Raises:
          ValueError: if two modules begin at one place, or there are fewer marks than stages need.
        """
        marks = [layer.options.segment or ("",) for layer in layers]
        if self._modules:
            numbers = [k + 1 for k, mark in enumerate(marks) if mark[0] == "module"]
            if not len(numbers) == len(self._modules) == num_stages - 1:
                raise CutError(
                    f"`boundaries` names the modules {', '.join(self._modules)}, which begin at {len(numbers)} places "
                    f"of the model, and {num_stages} stages need {num_stages - 1}. Name one module for each stage "
                    "after the first."
                )
            return numbers
        ends = [k + 1 for k, mark in enumerate(marks) if mark[0] == "stage_end"]
        if not ends or not (boundaries is None or isinstance(boundaries, str)):
            return boundaries
        if len(ends) < num_stages - 1:
            raise CutError(
                f"the model has {len(ends)} marks `jpipe.stage_end`, and {num_stages} stages need {num_stages - 1}. "
                "Mark the end of every stage but the last, or give `boundaries`."
            )
        return ends if len(ends) == num_stages - 1 else boundaries
