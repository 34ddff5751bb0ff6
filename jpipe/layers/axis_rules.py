"""Logical names of the dims of arrays, and the rules that map them to axes of a mesh.

A model names the dims of its weights and activations by what they are: `("embed", "mlp")`. A rule says
over which axis of the mesh such a dim is split: `("mlp", "model")`. So a model is written once, and the
mesh decides what is split.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax.core.spmd import get_logical_axis_rules, logical_axis_rules
from jax.sharding import Mesh

from jpipe._util.foreign import shown
from jpipe.layers.mesh_free import on_mesh
from jpipe.mesh import CONTEXT, DATA, EXPERT, FSDP, MODEL, ROW_AXES, compilers_part
from jpipe.packing import axes, axes_by_dim

AxisRules = Sequence[tuple[str, str | Sequence[str] | None]]

AXIS_RULES: AxisRules = (
    ("batch", (DATA, *ROW_AXES)),
    ("expert", EXPERT),
    ("vocab", MODEL),
    ("mlp", MODEL),
    ("heads", MODEL),
    ("embed", FSDP),
    ("length", CONTEXT),
    ("positions", CONTEXT),
)
"""The rules of a pipeline that is given none: logical name, then axes of the mesh.

"batch" names the rows of a microbatch; "embed" the width of what layers pass on, such as a residual stream
or the channels of an image; "mlp" hidden units between two matrices, or hidden channels between two
convolutions; "heads" the heads of attention, side by side; "vocab" words; "expert" the experts of a mixture. The
positions of a sequence are "length" in what layers pass on, and "positions" inside of a layer, where "model" splits
hidden units.

The order counts: an axis goes to the first rule that can use it, so the rows of an activation get "fsdp"
before its width. With `("length", ("context", "model"))` before these rules, activations between the parts that "model"
splits are split by positions: sequence parallelism (Korthikanti et al., 2022, arXiv:2205.05198, section 4.2).
"""


def check_axis_rules(rules: Any) -> AxisRules:
    """`axis_rules` of a pipeline as a tuple of pairs.

    Args:
      rules: see `Pipeline`. None: the rules of Flax's `logical_axis_rules`, if the pipeline is made
        inside of it, else `AXIS_RULES`.

    Raises:
      ValueError: if they are no pairs of a name and axes.
    """
    if rules is None:
        rules = get_logical_axis_rules() or AXIS_RULES
    is_sequence = isinstance(rules, Sequence) and not isinstance(rules, str)
    for rule in rules if is_sequence else [rules]:
        if not (is_sequence and _is_rule(rule)):
            raise ValueError(
                "`axis_rules` must be a sequence of pairs of a logical name and an axis of the mesh, several axes "
                f'or None, such as `(("mlp", "model"), ("embed", "fsdp"))`, got {shown(rule)}.'
            )
    return tuple(
        (name, target if target is None or isinstance(target, str) else tuple(target)) for name, target in rules
    )


def _is_rule(rule: Any) -> bool:
    if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) != 2:
        return False
    name, target = rule
    several = isinstance(target, Sequence) and all(isinstance(a, str) for a in target)
    return isinstance(name, str) and (target is None or several)


def rules_for(sizes: Mapping[str, int], rules: AxisRules) -> AxisRules:
    """The rules that count on a mesh, in the order in which they count.

    Rules for axes that the mesh has not are left out. Names of axes stand for themselves where no rule
    names them.

    Args:
      sizes: axis -> number of devices, of the axes that are left to the compiler.
      rules: the rules of the pipeline.

    Example:
      >>> rules_for({"fsdp": 2}, (("mlp", "model"), ("embed", ("data", "fsdp"))))
      (('embed', ('fsdp',)), ('fsdp', ('fsdp',)))
    """
    kept: list[tuple[str, tuple[str, ...] | None]] = []
    for name, target in rules:
        on_mesh = tuple(axis for axis in axes((target,)) if axis in sizes)
        if target is None or on_mesh:
            kept.append((name, None if target is None else on_mesh))
    named = {name for name, _ in rules}
    return (*kept, *((axis, (axis,)) for axis in sizes if axis not in named))


def axes_of_dims(
    names: Sequence, shape: Sequence[int], sizes: Mapping[str, int], rules: AxisRules
) -> list[tuple[str, ...]]:
    """The axes that each dim of an array is split over.

    As in Flax, the rules come in order of priority, and an axis splits one dim of an array at most. A rule
    whose axes do not divide the dim is passed over. Axes that are named themselves come first, whatever
    they divide.

    Args:
      names: a logical name, an axis of the mesh, several axes, or None for each dim.
      shape: the shape of the array.
      sizes: axis -> number of devices, of the axes that are left to the compiler.
      rules: the rules of the pipeline.

    Example:
      >>> axes_of_dims(("embed", "mlp"), (6, 8), {"fsdp": 2, "model": 4}, AXIS_RULES)
      [('fsdp',), ('model',)]
      >>> axes_of_dims(("embed", "mlp"), (6, 9), {"fsdp": 2, "model": 4}, AXIS_RULES)
      [('fsdp',), ()]
    """
    named = {name for name, _ in rules}
    dim_axes: list[tuple[str, ...] | None] = [
        tuple(axis for axis in dim if axis in sizes and axis not in named) or None for dim in axes_by_dim(names)
    ]
    used = {axis for dim in dim_axes for axis in dim or ()}
    for name, target in rules_for(sizes, rules):
        for d, dim in enumerate(names[: len(shape)]):
            if dim != name or dim_axes[d] is not None:
                continue
            wanted = () if target is None else tuple(target)
            divides = shape[d] % math.prod(sizes[axis] for axis in wanted) == 0
            if divides and not used.intersection(wanted):
                dim_axes[d] = wanted
                used.update(wanted)
    return [dim or () for dim in dim_axes]


@contextlib.contextmanager
def constraints_on(mesh: Mesh | None, rules: AxisRules) -> Iterator[None]:
    """Code inside may say how its values are split, by logical names or by axes of the mesh.

    That is, `flax.linen.with_logical_constraint` and `jax.lax.with_sharding_constraint` work in it.

    Args:
      mesh: the mesh of the pipeline, or a part of it; None: nothing is split.
      rules: the rules of the pipeline.
    """
    if mesh is None:
        with logical_axis_rules(()):
            yield
        return
    part = compilers_part(mesh)
    on_this: Any = rules_for({} if part is None else part.shape, rules)
    with on_mesh(mesh), logical_axis_rules(on_this):
        yield


@contextlib.contextmanager
def unannotated_on(mesh: Mesh) -> Iterator[None]:
    """Context: code inside is traced on a mesh, and its statements about logical names do not count."""
    with on_mesh(mesh), logical_axis_rules(()):
        yield
