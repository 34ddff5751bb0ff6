"""An Optax chain as functions of flat lists, and the checks that it treats layers apart."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe._util.warn import warn
from jpipe.gradients.sums import GradientSum
from jpipe.layers.avals import shapes_text
from jpipe.layers.equations import Equations
from jpipe.stages.extra_args import EXTRA_ARGS, PASSES, STALE_PARAMS


@dataclasses.dataclass(frozen=True)
class FlatUpdate:
    """An optimizer on one tree, as functions of flat lists.

    Attributes:
      update: `(*parameters, *gradients, *state, *stale, *extra) -> [*parameters, *state]`; `stale` are the weights of
        `STALE_PARAMS`, if the update reads them, and `extra` are `EXTRA_ARGS`.
      init: `(*parameters) -> state`.
      parameters: paths of the parameters.
      state: paths of the state's leaves.
      state_avals: abstract values of the state.
      reads_stale: whether the update reads the weights of `STALE_PARAMS`.
    """

    update: Equations
    init: Equations
    parameters: Sequence[str]
    state: Sequence[str]
    state_avals: Sequence
    reads_stale: bool

    def owners(self) -> list[str | None]:
        """The path of the parameter that each leaf of the state belongs to, or None.

        It belongs to the parameter whose path is the end of its own path, if both have the same shape.
        `optax.tree_map_params` cannot be used: it calls `optimizer.init` on a placeholder without layers, and functions
        that label parameters by path fail on that.
        """
        variables = self.update.inputs[: len(self.parameters)]
        shape_of = {p: v.aval.shape for p, v in zip(self.parameters, variables)}
        owners: list[str | None] = []
        for path, aval in zip(self.state, self.state_avals, strict=True):
            owner = next((p for p in shape_of if path.endswith(p)), None)
            fits = owner is not None and shape_of[owner] == tuple(aval.shape)
            owners.append(owner if fits else None)
        return owners

    def expressions(self, numbers: dict, state_names: Mapping[str, Any]) -> dict[str, tuple]:
        """Canonical ids of the expressions for each updated weight and each state leaf.

        Equal ids mean equal math.

        Args:
          numbers: see `Equations.expressions`.
          state_names: path -> name, for state leaves whose value may differ from the whole model's.

        Returns:
          Path -> (id of the initial value, id of the value after one step).
        """
        weights = [("weight", path) for path in self.parameters]
        gradients = [("gradient", path) for path in self.parameters]
        state = [("state", state_names.get(path, path)) for path in self.state]
        stale = [("stale", path) for path in self.parameters] * self.reads_stale
        extra = (arg.name for arg in EXTRA_ARGS)
        names = [*weights, *gradients, *state, *stale, *extra]
        after = self.update.expressions(names, numbers)
        first = self.init.expressions(weights, numbers)
        paths = [f"parameters{path}" for path in self.parameters] + list(self.state)
        before = [*[None] * len(weights), *first]
        return dict(zip(paths, zip(before, after), strict=True))


def _extra_args(gradients: Any, *values: Any) -> dict[str, Any]:
    """`EXTRA_ARGS` by name."""
    return {arg.name: value for arg, value in zip(EXTRA_ARGS, values, strict=True)}


def flat_update(
    optimizer: optax.GradientTransformationExtraArgs,
    tree: Any,
    norm_dtype: np.dtype,
    where: str,
    extra: Callable[..., dict[str, Any]] = _extra_args,
    reads_stale: bool | None = None,
) -> FlatUpdate:
    """Traces `optimizer` on a tree of abstract arrays.

    Args:
      optimizer: the chain.
      tree: the parameters.
      norm_dtype: dtype of gradient norms.
      where: name of the tree in errors.
      extra: `(gradients, *values of EXTRA_ARGS) -> keyword arguments` of the update.
      reads_stale: whether the update of the whole model reads the weights of `STALE_PARAMS`; None: this is the update
        of the whole model, so find out.
    """
    leaves, treedef = jax.tree.flatten(tree)
    num_parameters, num_extra = len(leaves), len(EXTRA_ARGS)

    def init(*parameters: jax.Array) -> list:
        return jax.tree.leaves(optimizer.init(treedef.unflatten(parameters)))

    def update(*args: jax.Array) -> list:
        parameters = treedef.unflatten(args[:num_parameters])
        gradients = treedef.unflatten(args[num_parameters : 2 * num_parameters])
        state_and_stale = args[2 * num_parameters : -num_extra]
        state = state_tree.unflatten(state_and_stale[:num_state])
        # Where nothing reads them, any weights do.
        stale = state_and_stale[num_state:] or args[:num_parameters]
        more = {
            STALE_PARAMS: treedef.unflatten(stale),
            **extra(gradients, *args[-num_extra:]),
        }
        updates, state = optimizer.update(gradients, state, parameters, **more)
        forms.append(_form(state))
        updated = optax.apply_updates(parameters, updates)
        return [*jax.tree.leaves(updated), *jax.tree.leaves(state)]

    def paths(tree: Any) -> list[str]:
        return [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(tree)]

    forms: list[dict[str, str]] = []
    try:
        state = jax.eval_shape(optimizer.init, tree)
        forms.append(_form(state))
        state_leaves, state_tree = jax.tree.flatten(state)
        num_state = len(state_leaves)
        extra_avals = [arg.aval(norm_dtype) for arg in EXTRA_ARGS]
        stale = leaves if reads_stale is not False else []
        avals = [*leaves, *leaves, *state_leaves, *stale, *extra_avals]
        traced = Equations.trace(update, *avals)
        if reads_stale is None:
            traced, reads_stale = _without_unread(traced, 2 * num_parameters + num_state, num_parameters)
        flat = FlatUpdate(
            traced,
            Equations.trace(init, *leaves),
            paths(tree),
            paths(state),
            state_leaves,
            reads_stale,
        )
    except Exception as error:
        raise ValueError(_refusal(where, error)) from error
    _check_form(*forms[:2])
    effects = sorted(str(effect) for effect in flat.update.effects())
    if effects:
        raise ValueError(
            f"`optimizer` has side effects ({', '.join(effects)}) in its update, and the pipeline runs "
            "only the equations of an update that its results need, once for many layers. Leave out "
            "`jax.debug.print` and callbacks there, and print the metrics that `step` returns."
        )
    return flat


def _refusal(where: str, error: Exception) -> str:
    """The message for an optimizer that cannot be traced."""
    if "pytree structure error" in str(error):
        return (
            f"`optimizer` cannot update {where}: a tree in it, such as the mask of `optax.masked` or the labels of "
            "`optax.multi_transform`, has another structure than the parameters. They are a list with one nested dict "
            "per layer, and None for layers of other stages. Give masks and labels as functions of such a list: "
            "`lambda params: jax.tree.map(lambda p: p.ndim > 1, params)`."
        )
    return (
        f"`optimizer` cannot update {where}: {type(error).__name__}: {error}\n"
        "It is called as `optimizer.update(gradients, state, parameters, "
        f"{', '.join(f'{name}=...' for name in (*(arg.name for arg in EXTRA_ARGS), STALE_PARAMS))})` with lists that "
        "hold one nested dict per layer, and None for layers of other stages. Give masks and labels as functions of "
        "such a list. An optimizer that needs more than that, such as the loss, cannot be used."
    )


def _form(state: Any) -> dict[str, str]:
    """The path of every array of a state, with its dtype and shape."""
    return {
        jax.tree_util.keystr(path): shapes_text(jax.typeof(leaf)) for path, leaf in jax.tree.leaves_with_path(state)
    }


def _check_form(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raises if an update leaves other arrays in the state than `init` has made."""
    for path in (*before, *after):
        was, becomes = (form.get(path, "nothing") for form in (before, after))
        if was != becomes:
            raise ValueError(
                f"`optimizer` changes the form of its state: {path} is {was} after `init`, and {becomes} after an "
                "update. A pipeline keeps the arrays that `init` makes, in their shapes and dtypes. Let `init` make "
                "the state as the update leaves it."
            )


def _without_unread(update: Equations, first: int, number: int) -> tuple[Equations, bool]:
    """Removes some inputs of an update if it reads none of them. Returns the update, and whether it reads any."""
    inputs = update.inputs[first : first + number]
    if not update.read().isdisjoint(inputs):
        return update, True
    kept = *update.inputs[:first], *update.inputs[first + number :]
    return update.slice(kept, update.outputs, effects=True), False


# -- Parameter hooks


def flat_hook(
    name: str,
    hook: Callable,
    optimizer: optax.GradientTransformationExtraArgs,
    tree: Any,
) -> Callable:
    """A parameter hook as a function of flat lists: `(parameters, state, delay) -> parameters`.

    Args:
      name: the pass that reads the result of the hook.
      hook: the hook, a function of trees.
      optimizer: the chain.
      tree: abstract parameters of the stage.
    """
    leaves, treedef = jax.tree.flatten(tree)
    state_leaves, state_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, tree))

    def described(tree: Any) -> Any:
        return jax.tree.map(lambda a: (a.shape, np.dtype(a.dtype)), tree)

    def on_lists(parameters: Sequence, state: Sequence, delay: Any) -> list:
        returned = hook(treedef.unflatten(parameters), state_tree.unflatten(state), delay)
        if described(returned) != described(tree):
            raise ValueError("it returns other shapes, dtypes or layers than it gets.")
        return jax.tree.leaves(returned)

    try:
        delay = jax.ShapeDtypeStruct((), np.float32)
        jax.eval_shape(on_lists, leaves, state_leaves, delay)
    except Exception as error:
        raise ValueError(
            f"`{name}_params` cannot give the weights that a {name} reads: {type(error).__name__}: {error}\n"
            f"It is called as `{name}_params(parameters, optimizer_state, delay)` with what the optimizer sees of a "
            "stage."
        ) from error
    return on_lists


def with_hooks(flat: FlatUpdate, param_hooks: Mapping[str, Callable]) -> Equations:
    """The update, followed by the weights of the hooks.

    Its inputs end with the delays of `PASSES`. Where the delay of a pass is 0, the pass reads the
    updated weights.
    """
    if not param_hooks:
        return flat.update
    num_parameters, num_passes = len(flat.parameters), len(PASSES)

    def update(*args: jax.Array) -> list:
        outputs = flat.update(*args[:-num_passes])
        delays = dict(zip(PASSES, args[-num_passes:]))
        parameters, state = outputs[:num_parameters], outputs[num_parameters:]
        for name, hook in param_hooks.items():
            hooked = hook(parameters, state, delays[name])
            outputs += [jnp.where(delays[name] > 0, a, b) for a, b in zip(hooked, parameters)]
        return outputs

    delay_avals = [jax.ShapeDtypeStruct((), np.float32)] * num_passes
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in flat.update.inputs]
    return Equations.trace(update, *avals, *delay_avals)


# -- Sums of gradients


def with_sums(update: Equations, sums: Sequence[GradientSum]) -> Equations:
    """The update, with the leaves of the sums of gradients in the place of gradients.

    Args:
      update: the update of `with_hooks`.
      sums: the sum of the gradient of each parameter.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in update.inputs]
    number = len(sums)
    weights, formed = avals[:number], avals[number : 2 * number]
    kept = [gradient_sum.avals(aval) for gradient_sum, aval in zip(sums, formed, strict=True)]
    if kept == [[aval] for aval in formed]:
        return update

    def from_sums(*args: jax.Array) -> list:
        left = iter(args[number:])
        gradients = [
            gradient_sum.gradient([next(left) for _ in leaves], aval)
            for gradient_sum, leaves, aval in zip(sums, kept, formed)
        ]
        return update(*args[:number], *gradients, *left)

    read = itertools.chain(*kept)
    return Equations.trace(from_sums, *weights, *read, *avals[2 * number :])


# -- Checks


def check_layers_apart(whole: FlatUpdate, on_stages: Sequence[FlatUpdate]) -> None:
    """Raises unless every stage updates its weights as the update of the whole model would."""
    numbers: dict = {}
    # State leaves that may have another value on a stage than in the whole model. Starting from
    # none, every leaf that turns out to differ is added, until no weight and no further leaf
    # differs.
    different: set[str] = set()
    while True:
        expected = whole.expressions(numbers, {p: (p, "whole") for p in different})
        stage_expressions = [
            flat.expressions(numbers, {p: (p, s) for p in different}) for s, flat in enumerate(on_stages)
        ]
        wrong = [
            (s, path)
            for s, expressions in enumerate(stage_expressions)
            for path, number in expressions.items()
            if expected.get(path) != number
        ]
        if {path for _, path in wrong} <= different:
            return
        for s, path in wrong:
            if path.startswith("parameters"):
                raise ValueError(
                    "`optimizer` lets the update of one layer depend on others: that of "
                    f"{path} on stage {s} alone is not what it is in the whole model, so the result would depend on "
                    "how the model is cut. Use transforms that treat each layer by itself: not "
                    "`optax.clip_by_global_norm` but `jpipe.optim.clip_by_global_norm`, which takes the norm over all "
                    "stages; no `optax.add_noise`, which draws by the number of layers."
                )
        different |= {path for _, path in wrong}


def check_global_norm(
    optimizer: optax.GradientTransformationExtraArgs,
    tree: Any,
    norm_dtype: np.dtype,
    whole: FlatUpdate,
) -> None:
    """Warns if the optimizer applies `global_norm` to something other than the gradient."""
    position = [arg.name for arg in EXTRA_ARGS].index("global_norm") - len(EXTRA_ARGS)
    if whole.update.inputs[position] not in whole.update.read():
        return
    numbers: dict = {}

    def weights(extra: Callable) -> list:
        stale = whole.reads_stale
        flat = flat_update(optimizer, tree, norm_dtype, "the model", extra, stale)
        expressions = flat.expressions(numbers, {})
        return [expressions[f"parameters{path}"] for path in whole.parameters]

    def without_norm(gradients: Any, *values: Any) -> dict:
        args = _extra_args(gradients, *values)
        del args["global_norm"]
        return args

    def norm_of_gradients(gradients: Any, *values: Any) -> dict:
        norm = optax.tree.norm(gradients)
        return {**_extra_args(gradients, *values), "global_norm": norm}

    try:
        # Without the argument, a transform takes the norm of its own input.
        norm_of_input = weights(without_norm)
    except ValueError:
        return  # the optimizer requires the argument, so it takes no norm by itself
    if norm_of_input != weights(norm_of_gradients):
        warn(
            "`optimizer` clips something that is not the gradient by `global_norm`, which is the norm of the gradient. "
            "Put `jpipe.optim.clip_by_global_norm` first in the chain.",
        )


def check_state_dtypes(flat: FlatUpdate) -> None:
    """Raises if the state holds anything but numbers."""
    for path, leaf in zip(flat.state, flat.state_avals):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(
                f"`optimizer` keeps {path} of dtype {leaf.dtype} in its state, and only numbers can be kept there. "
                "Keep `jax.random.key_data` of a random key."
            )
