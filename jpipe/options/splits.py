"""Options of how the layers of a stage are split over its devices."""

import dataclasses
import os
from typing import Any

from jax.sharding import Mesh

from jpipe._util.entry_points import load
from jpipe.layers.axis_rules import AxisRules, check_axis_rules
from jpipe.layers.layer_split import Strategy
from jpipe.mesh import FSDP, STAGE, split_axes
from jpipe.packing import axes


@dataclasses.dataclass(frozen=True)
class Splits:
    """The splits of layers over the axes of the mesh that are left to the compiler. `Pipeline` has the meaning.

    Attributes:
      axis_rules: pairs of a logical name and axes of the mesh.
      strategy: splits layers instead of the annotations of the model; None: these count.
    """

    axis_rules: AxisRules
    strategy: Strategy | None

    def check_whole_model(self) -> None:
        """Refuses what splits layers that a whole model does not have by itself.

        Raises:
          ValueError: if a strategy or a rule for layers that all stages run is given.
        """
        remedy = "Leave it out, or give the model as a list of layers."
        if self.strategy is not None:
            raise ValueError(f"`strategy` splits a list of layers, and the layers are a whole model. {remedy}")
        for name, target in self.axis_rules:
            if STAGE in axes((target,)):
                raise ValueError(
                    f"the rule ({name!r}, {target!r}) of `axis_rules` splits the first and the last layer over all "
                    f"stages, and the layers are a whole model. {remedy}"
                )

    @classmethod
    def checked(cls, mesh: Mesh, *, axis_rules: Any, strategy: Any) -> "Splits":
        """The options as a user gives them.

        Raises:
          ValueError: if one of them cannot be, on this mesh or beside the other.
        """
        rules = check_axis_rules(axis_rules)
        return cls(rules, _check_strategy(strategy, mesh, axis_rules))


def _check_strategy(strategy: Any, mesh: Mesh, axis_rules: Any) -> Strategy | None:
    """`strategy` of a pipeline: an object that splits layers, the one in a file, or None.

    Raises:
      ValueError: if it is neither, or the mesh or the rules split the layers in other ways.
    """
    if strategy is None:
        return None
    if not isinstance(strategy, Strategy | str | os.PathLike):
        raise ValueError(
            "`strategy` must be the path of a file of `jpipe.soap.save_strategy`, an object with `split_layers`, or "
            f"None, got {type(strategy).__name__}."
        )
    if mesh.shape.get(FSDP, 1) > 1:
        raise ValueError(
            f"`strategy` splits weights as its operators read them, and the mesh has fsdp={mesh.shape[FSDP]}, which "
            "splits "
            'them all. Use a mesh without the axis "fsdp".'
        )
    shared = split_axes(mesh.shape)
    if len(shared) > 1:
        raise ValueError(
            f"`strategy` splits each operator over one axis of the mesh, and {' and '.join(map(repr, shared))} are "
            "left to it. Use one axis with all their devices, `make_mesh(stage=, data=, model=)`."
        )
    if any(STAGE in axes((target,)) for _, target in axis_rules or ()):
        raise ValueError(
            '`axis_rules` split layers over "stage", and `strategy` says how every layer is split. Leave one of them '
            "out."
        )
    if isinstance(strategy, Strategy):
        return strategy
    return load("strategy of a file")(os.fspath(strategy))
