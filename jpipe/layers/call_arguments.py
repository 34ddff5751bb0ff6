"""The arguments of the call of a whole model, taken from the entries of a batch by their names."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jpipe.layers.avals import shapes_text

WHOLE_BATCH = "batch"
"""The name of an argument that gets the whole batch."""

_IN_ORDER = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["positional", "keywords"], meta_fields=["form", "entries"]
)
@dataclasses.dataclass(frozen=True)
class CallArguments:
    """The arguments of the call of a whole model, which stand in its batch as the entry "inputs".

    Attributes:
      positional: a tuple.
      keywords: by name.
      form: what gave the arguments that are not in `entries`: the user's entry "inputs" as "one" argument, as
        arguments in order ("tuple", "list") or by name ("dict"); all of the batch ("batch"); or None.
      entries: names of the entries of the batch that are arguments themselves.
    """

    positional: tuple
    keywords: Mapping[str, Any]
    form: str | None = "one"
    entries: tuple[str, ...] = ()

    def given(self) -> dict[str, Any]:
        """The entries of the user's batch that the arguments were taken from."""
        if self.form == "batch":
            return dict(self.positional[0])
        entries = {name: self.keywords[name] for name in self.entries}
        if self.form == "one":
            entries["inputs"] = self.positional[0]
        elif self.form == "dict":
            entries["inputs"] = {name: a for name, a in self.keywords.items() if name not in entries}
        elif self.form is not None:
            entries["inputs"] = list(self.positional) if self.form == "list" else self.positional
        return entries


def as_given(batch: Any) -> Any:
    """The batch as the user gave it, the inverse of `CallSignature.with_arguments`."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("inputs"), CallArguments):
        return batch
    return {**batch["inputs"].given(), **{name: a for name, a in batch.items() if name != "inputs"}}


def batch_text(batch: Any) -> str:
    """The shapes and dtypes of a batch, by the entries that the user gave, for messages."""
    return shapes_text(as_given(batch))


def arguments_text(arguments: Any) -> str:
    """The shapes and dtypes of what a layer or a model is called with, for messages."""
    if isinstance(arguments, CallArguments):
        arguments = arguments.given()
        if set(arguments) == {"inputs"}:
            arguments = arguments["inputs"]
    return shapes_text(arguments)


class CallSignature:
    """The arguments that the call of a model takes from a batch.

    The entry "inputs" gives the first argument. If it is a dict with the names of arguments, it gives them by name; if
    it is a tuple or a list, it gives as many in order. Every other argument is the entry of the batch that has its
    name. An argument that is called "batch" gets the whole batch.

    Args:
      call: of the model, without `self` and parameters; None: it takes one argument.
      model: name of the model, for messages.
      returns_loss: whether the model returns its loss: a model of one argument then gets the whole batch, if no entry
        is meant for it.
    """

    def __init__(self, call: Callable[..., Any] | None, model: str, returns_loss: bool):
        self._model, self._returns_loss = model, returns_loss
        parameters = _parameters(call)
        self._in_order = [p.name for p in parameters or () if p.kind in _IN_ORDER]
        self._names = [p.name for p in parameters or () if p.kind in _BY_NAME]
        self._required = [
            p.name for p in parameters or () if p.default is p.empty and p.kind in (*_IN_ORDER, *_BY_NAME)
        ]

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys([*self._in_order, *self._names])) or "x"

    def with_arguments(self, batch: Any) -> Any:
        """The batch with the arguments as its entry "inputs", in the place of the entries that they were taken from.

        Args:
          batch: of the user. Anything but a dict is left as it is.

        Raises:
          ValueError: if an argument that has no default is missing.
        """
        if not isinstance(batch, Mapping) or isinstance(batch.get("inputs"), CallArguments):
            return batch
        if self._takes_all(batch):
            return {"inputs": CallArguments((dict(batch),), {}, "batch")}
        arguments = self._from_inputs(batch)
        filled = {*self._in_order[: len(arguments.positional)], *arguments.keywords}
        entries = tuple(name for name in self._names if name in batch and name != "inputs" and name not in filled)
        missing = [name for name in self._required if name not in filled and name not in entries]
        if missing or not (arguments.form or entries):
            what = f"has no {' and no '.join(map(repr, missing))}" if missing else "has no entry with the name of one"
            raise ValueError(
                f"the model ({self._model}) takes the arguments {self}, and `batch` {what}, got entries "
                f'{sorted(batch)}. Every argument is the entry of its name, and "inputs" is the first one. Give '
                "arguments that are the same in every batch once: `jpipe.NNX(model, train={...}, evaluate={...})`, "
                "`jpipe.Linen` with the same."
            )
        keywords = {**arguments.keywords, **{name: batch[name] for name in entries}}
        arguments = dataclasses.replace(arguments, keywords=keywords, entries=entries)
        taken = arguments.given()
        return {**{name: a for name, a in batch.items() if name not in taken}, "inputs": arguments}

    def _takes_all(self, batch: Mapping) -> bool:
        if len(self._required) != 1 or self._required[0] in batch:
            return False
        return self._required == [WHOLE_BATCH] or (self._returns_loss and "inputs" not in batch)

    def _from_inputs(self, batch: Mapping) -> CallArguments:
        """The arguments that the entry "inputs" gives."""
        if "inputs" not in batch:
            return CallArguments((), {}, None)
        inputs = batch["inputs"]
        if isinstance(inputs, Mapping) and inputs and set(inputs) <= set(self._names):
            return CallArguments((), dict(inputs), "dict")
        if type(inputs) in (tuple, list) and 1 < len(inputs) <= len(self._in_order):
            return CallArguments(tuple(inputs), {}, type(inputs).__name__)
        return CallArguments((inputs,), {})


def _parameters(call: Callable[..., Any] | None) -> list[inspect.Parameter] | None:
    """Those of a call that are not bound yet; None if it has no signature."""
    try:
        signature = inspect.signature(call) if call is not None else None
    except (TypeError, ValueError):
        signature = None
    if signature is None:
        return None
    bound = call.keywords if isinstance(call, functools.partial) else {}
    return [p for p in signature.parameters.values() if p.name not in bound]


def call_with(function: Callable[..., Any], args: tuple, **keywords: Any) -> Any:
    """Calls a function for the arguments of a `Layer`."""
    if len(args) == 1 and isinstance(args[0], CallArguments):
        return function(*args[0].positional, **{**args[0].keywords, **keywords})
    return function(*args, **keywords)
