"""Suggestions for misspelt words in error messages."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from jpipe._util.foreign import shown

T = TypeVar("T", bound=Callable)

_IN_ORDER = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_SCHEDULE = "schedule=jpipe.schedules.one_f_one_b(num_stages=4, num_microbatches=8)"

ARGUMENTS = {
    "num_stages": ("num_stages", "stage", _SCHEDULE),
    "stages": ("num_stages", "stage", _SCHEDULE),
    "pp": ("num_stages", "stage", _SCHEDULE),
    "pipe": ("num_stages", "stage", _SCHEDULE),
    "pipeline": ("num_stages", "stage", _SCHEDULE),
    "num_microbatches": ("num_microbatches", _SCHEDULE),
    "microbatches": ("num_microbatches", _SCHEDULE),
    "n_microbatches": ("num_microbatches", _SCHEDULE),
    "microbatch_size": ("num_microbatches", _SCHEDULE),
    "chunks": ("num_microbatches", _SCHEDULE),
    "dp": ("data",),
    "ddp": ("data",),
    "data_parallel": ("data",),
    "num_replicas": ("data", "mesh=jpipe.make_mesh(stage=4, data=2)"),
    "zero": ("shard_optimizer", "fsdp"),
    "tp": ("model",),
    "mp": ("model",),
    "cp": ("context",),
    "sp": ("context",),
    "sequence": ("context",),
    "context_parallel": ("context",),
    "ep": ("expert",),
    "experts": ("expert",),
    "expert_parallel": ("expert",),
    "tensor": ("model",),
    "tensor_parallel": ("model",),
    "module": ("layers",),
    "model": ("layers",),
    "criterion": ("loss",),
    "tx": ("optimizer",),
    "lr": ("learning_rate", "optimizer=optax.adamw(1e-3)"),
    "learning_rate": ("optimizer=optax.adamw(1e-3)",),
    "split_points": ("boundaries",),
    "partition": ("boundaries",),
    "devices": ("mesh",),
    "remat": ("recompute",),
    "checkpoint": ("recompute",),
    "dtype": ("compute_dtype",),
    "precision": ("compute_dtype",),
    "max_to_keep": ("keep",),
}
"""Usual name of an argument -> its meanings here. A function takes the first meaning that it has."""

ATTRIBUTES = {
    "fit": ("step",),
    "train": ("step",),
    "train_step": ("step",),
    "update": ("step",),
    "forward": ("predict",),
    "apply": ("predict",),
    "test": ("evaluate",),
    "validate": ("evaluate",),
    "params": ("get_params", "parameters"),
    "weights": ("get_params", "parameters"),
    "opt_state": ("optimizer_state",),
    "num_stages": ("schedule.num_stages",),
    "num_microbatches": ("schedule.num_microbatches",),
    "load": ("restore",),
}
"""Usual name of an attribute -> its meanings here. An object takes the first meaning that it has."""


def did_you_mean(
    word: Any,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
    *,
    cutoff: float = 0.6,
) -> str:
    """The end of an error message: the known word nearest to a misspelt one.

    Case and punctuation do not count: "1F1B" and "1f1b" are one word.

    Args:
      word: the word that is not known; what is no text, or a long one, is near to nothing.
      known: the words that are.
      aliases: other usual names, each with the known word that it stands for.
      cutoff: the least similarity of a suggestion, from 0 (anything) to 1 (the same word).

    Returns:
      " Did you mean 'x'?" with a space in front, or "" if no known word is near.

    Example:
      >>> "unknown option 'tick'." + did_you_mean("tick", ["ticks", "num_chunks"])
      "unknown option 'tick'. Did you mean 'ticks'?"
      >>> did_you_mean("1F1B", ["gpipe", "one_f_one_b"], {"1f1b": "one_f_one_b"})
      " Did you mean 'one_f_one_b'?"
      >>> did_you_mean("x", ["ticks"])
      ''
    """
    if not isinstance(word, str) or len(word) > _LONGEST:
        return ""
    candidates = {_letters(alias): name for alias, name in (aliases or {}).items()}
    candidates |= {_letters(name): name for name in known}
    nearest = difflib.get_close_matches(_letters(word), candidates, n=1, cutoff=cutoff)
    return f" Did you mean {candidates[nearest[0]]!r}?" if nearest else ""


def suggests(target: T) -> T:
    """Decorates a public function or class: a wrong keyword, or a missing attribute, is answered with the nearest name.

    A call that works costs one more call of Python. Python's type of error stays: `TypeError`, `AttributeError`.

    Example:
      >>> @suggests
      ... def make(*, stage, data=1): ...
      >>> make(stages=2)
      Traceback (most recent call last):
      TypeError: make() has no argument 'stages'. Did you mean 'stage'? It takes: stage, data.
    """
    if not isinstance(target, type):
        return _with_suggestions(target, target.__name__)
    made: Any = target
    made.__init__ = _with_suggestions(made.__init__, target.__name__)

    def __getattr__(self: Any, name: str) -> Any:
        if hasattr(target, name):  # the code of a property has failed
            return object.__getattribute__(self, name)
        raise missing_attribute(f"{type(self).__name__!r} object", name, dir(self))

    made.__getattr__ = __getattr__
    return made


def missing_attribute(
    owner: str,
    name: str,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
) -> AttributeError:
    """The error for an attribute that is missing, with the nearest one.

    Args:
      owner: the object that lacks it, in words.
      name: the name of the attribute.
      known: the attributes that there are; those that begin with "_" are not suggested.
      aliases: see `did_you_mean`; they come beside `ATTRIBUTES`.
    """
    hint = ""
    if not name.startswith("_"):  # libraries look for such names, in vain and often
        public = [name for name in known if not name.startswith("_")]
        usual = _present(ATTRIBUTES, public)
        hint = did_you_mean(name, public, usual | dict(aliases or {}))
    # With a name, Python does not add a suggestion of its own.
    return AttributeError(f"{owner} has no attribute {shown(name)}.{hint}", name=name)


def _with_suggestions(function: T, name: str) -> T:
    """`function`, whose `TypeError` for an unknown keyword names the nearest one."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function
    known = [parameter for parameter in parameters if parameter != "self"]
    kinds = [parameter.kind for parameter in parameters.values()]
    in_order = [p for p, kind in zip(parameters, kinds) if kind in _IN_ORDER]
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds

    def refuse(args: tuple, arguments: Mapping[str, Any]) -> None:
        if len(args) > len(in_order) and not takes_any:
            first = [p for p in in_order if p != "self"]
            others = ", ".join(p for p in known if p not in first)
            raise TypeError(
                f"{name}() takes {', '.join(first) or 'nothing'} by position, got "
                f"{len(args) - len(in_order) + len(first)} arguments. Give the others by name: {others or 'none'}."
            ) from None
        for word in arguments:
            if word not in known:
                hint = did_you_mean(word, known, _present(ARGUMENTS, known))
                raise TypeError(
                    f"{name}() has no argument {shown(word)}.{hint} It takes: {', '.join(known) or 'none'}."
                ) from None

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            refuse(args, kwargs)
            raise

    # Doctest skips a function whose globals are those of another module.
    call = types.FunctionType(call.__code__, function.__globals__, closure=call.__closure__)
    return cast(T, functools.wraps(function)(call))


def _present(names: Mapping[str, tuple[str, ...]], known: Iterable[str]) -> dict:
    """The first meaning of each usual name that is among the known names."""
    known = {*known}
    meanings = {
        name: [m for m in candidates if m.split("=")[0].split(".")[0] in known] for name, candidates in names.items()
    }
    return {name: candidates[0] for name, candidates in meanings.items() if candidates}


_LONGEST = 200
"""Letters of a word that may be a misspelt one."""


def _letters(word: str) -> str:
    """`word` in lower case, without punctuation; unchanged if nothing would be left."""
    return "".join(filter(str.isalnum, word.lower())) or word
