"""Declares the needs of a transform in a pipeline: extra arguments of its update, and a hook.

A transform declares it on the type of its state, so that the declaration is found in the
state of every optimizer that contains the transform: in `optax.chain`, behind a mask, in
`optax.inject_hyperparams`, `optax.MultiSteps` and so on.

    class MyState(NamedTuple):
        velocity: optax.Updates
        declaration = Declaration("my_transform", ("delay",), hook="backward")

A *hook* is a function `(params, optimizer_state, delay) -> params` that chooses the weights
of a forward or a backward: `Pipeline(forward_params=..., backward_params=...)`. A hook
declares the state that it reads by `@reads_state(MyState)`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import jax

from jpipe._util.suggest import suggests
from jpipe._util.warn import warn

_Hook = TypeVar("_Hook", bound=Callable)


@suggests
@dataclasses.dataclass(frozen=True)
class Declaration:
    """The needs of a transform in a pipeline: the class attribute `declaration` of its state.

    Attributes:
      transform: the transform's name in messages.
      extra_args: the extra arguments of `update` that the transform may read, such as
        "delay", "backward_delay", "global_norm" or "stale_params".
      hook: the pass whose hook reads the state. None: the transform works without a hook.
      hook_function: the name of the function to pass as that hook, for messages.
    """

    transform: str
    extra_args: tuple[str, ...] = ()
    hook: Literal["forward", "backward"] | None = None
    hook_function: str | None = None


@suggests
def reads_state(state_type: type) -> Callable[[_Hook], _Hook]:
    """Declares that a hook reads the state of a transform.

    Args:
      state_type: a type with a `declaration`.

    Returns:
      A decorator, which returns the hook itself.
    """

    def declare(hook: _Hook) -> _Hook:
        hook.reads_state = state_type  # type: ignore[attr-defined]
        return hook

    return declare


def declared_states(optimizer_state: Any) -> Iterator[Any]:
    """All states with a `declaration` in an optimizer's state, abstract or not.

    Args:
      optimizer_state: any tree that contains optimizer states.

    Returns:
      The states, in the order of the tree. A state in another one comes after it.
    """

    def declares(node: Any) -> bool:
        return isinstance(getattr(type(node), "declaration", None), Declaration)

    for node in jax.tree.leaves(optimizer_state, is_leaf=declares):
        if declares(node):
            yield node
            # `is_leaf` has hidden the inside of `node`.
            one_level = jax.tree_util.default_registry.flatten_one_level(node)
            yield from declared_states(list(one_level[0]) if one_level else [])


@suggests
def requested_extra_args(optimizer_state: Any) -> frozenset[str]:
    """The extra arguments that the transforms of an optimizer declare.

    Args:
      optimizer_state: its state, abstract or not.

    Returns:
      Names of extra arguments. Transforms without a declaration may read others.

    Example:
      >>> import optax
      >>> from jpipe.optim import scale_by_delay
      >>> optimizer = optax.chain(optax.sgd(0.1), scale_by_delay(100))
      >>> sorted(requested_extra_args(optimizer.init({"w": 1.0})))
      ['delay']
    """
    states = declared_states(optimizer_state)
    return frozenset(name for s in states for name in type(s).declaration.extra_args)


@suggests
def check_hooks(
    optimizer_state: Any,
    *,
    forward: Callable | None = None,
    backward: Callable | None = None,
) -> None:
    """Checks the hooks of a pipeline against the transforms of its optimizer.

    Args:
      optimizer_state: the optimizer's state, abstract or not.
      forward: the hook `forward_params`, or None.
      backward: the hook `backward_params`, or None.

    Raises:
      ValueError: if a hook reads the state of a transform that the optimizer lacks.

    Warns:
      UserWarning: if no hook reads the state of a transform that changes nothing without
        one.

    Example:
      >>> import optax
      >>> from jpipe.optim import corrected_params
      >>> check_hooks(optax.sgd(0.1).init({"w": 1.0}), backward=corrected_params)
      Traceback (most recent call last):
      ValueError: `backward_params=corrected_params` reads the state of \
`correct_discrepancy`, which the optimizer lacks. Add `correct_discrepancy` to the end of \
the optimizer's chain, or leave `backward_params` out.
    """
    named = {"forward": forward, "backward": backward}
    hooks = {name: hook for name, hook in named.items() if hook is not None}
    present: list[Any] = list(dict.fromkeys(type(s) for s in declared_states(optimizer_state)))
    read: dict[str, Any] = {name: _state_read(hook) for name, hook in hooks.items()}
    for name, state_type in read.items():
        if state_type is not None and state_type not in present:
            transform = state_type.declaration.transform
            raise ValueError(
                f"`{name}_params={_name(hooks[name])}` reads the state of `{transform}`, "
                f"which the optimizer lacks. Add `{transform}` to the end of the "
                f"optimizer's chain, or leave `{name}_params` out."
            )
    for state_type in present:
        declaration = state_type.declaration
        needed = declaration.hook
        # A hook without a declaration may read any state.
        unknown = needed in hooks and read[needed] is None
        if needed is None or unknown or state_type in read.values():
            continue
        function = declaration.hook_function or "..."
        warn(
            f"`{declaration.transform}` is in the optimizer, but no `{needed}_params` reads "
            f"its state, so it only costs memory. Pass `{needed}_params={function}` to "
            f"`Pipeline`, or leave `{declaration.transform}` out.",
        )


def _unwrapped(hook: Callable) -> Callable:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def _state_read(hook: Callable) -> type | None:
    """The type of state that a hook declares to read; None if it declares none."""
    return getattr(_unwrapped(hook), "reads_state", None)


def _name(hook: Callable) -> str:
    return getattr(_unwrapped(hook), "__name__", repr(hook))
