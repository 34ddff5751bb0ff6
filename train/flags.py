"""Reads `--config FILE` and `--config.section.field=value` into frozen dataclasses.

Standard library only. Values are read by the annotation of their field:

    int, float, bool, str     12, 3e-4, true, any text
    Literal["a", "b"]         one of these
    X | None                  none, or as X
    tuple[int, ...]           3,6,9
    dict[str, Any]            field.key=value, the value a Python literal or else text
    A | B, both dataclasses   the name of one, whose fields then start as its defaults
"""

import ast
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import pathlib
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

_EXAMPLES = {int: "12", float: "3e-4", bool: "true or false", str: "text"}
_UNIONS = (typing.Union, types.UnionType)


def parse(arguments: Sequence[str], config_class: type) -> tuple[str, Any]:
    """The configuration that a command line asks for.

    Args:
      arguments: the words after the script's name.
      config_class: what `get_config()` of the file must return.

    Returns:
      The name of the file, without suffix, and the configuration.

    Raises:
      ValueError: if the command line or the file is wrong; says how.
      OSError: if the file cannot be read.
    """
    path, overrides = None, {}
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            known = ["--config", "--help", *_flags(config_class)]
            guess = did_you_mean(flag, known) or did_you_mean(f"--config.{flag}", known)
            raise ValueError(
                f"unknown argument `{word}`.{guess} Options are written "
                "`--config FILE` and `--config.FIELD=VALUE`; `--help` lists them."
            )
        if not equals:
            value = next(words, None)
            if value is None:
                raise ValueError(f"`{flag}` needs a value: `{flag}=VALUE`.")
        if flag == "--config":
            path = value
        else:
            _insert(overrides, flag, value)
    if path is None:
        raise ValueError(
            "no configuration. Name a file: `--config configs/quickstart.py`; "
            "`--help` shows more."
        )
    config = load(path, config_class)
    return pathlib.Path(path).stem, override(config, overrides)


def load(path: str, config_class: type) -> Any:
    """What `get_config()` of the Python file `path` returns."""
    if not pathlib.Path(path).is_file():
        known = sorted(str(p) for p in pathlib.Path(path).parent.glob("*.py"))
        raise FileNotFoundError(
            f"there is no configuration file `{path}`.{did_you_mean(path, known)}"
            f"{_listing(' Beside it: ', known)}"
        )
    if not path.endswith(".py"):
        raise ValueError(f"a configuration is a Python file (.py), got `{path}`.")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if get_config is None:
            raise ValueError(
                f"it must define `get_config()`, which returns a {config_class.__name__}."
            )
        config = get_config()
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"`{path}`: {error}") from error
    if not isinstance(config, config_class):
        raise ValueError(
            f"`{path}`: `get_config()` must return a {config_class.__name__}, got "
            f"{type(config).__name__}."
        )
    return config


def override(config: Any, overrides: dict[str, Any], flag: str = "--config") -> Any:
    """`config` with the values of a nested dict of texts in place of its own.

    Fields that belong together change together: each dataclass is made, and so checks
    itself, once.
    """
    hints = typing.get_type_hints(type(config))
    changes = {}
    for name, value in overrides.items():
        here = f"{flag}.{name}"
        if name not in hints:
            raise ValueError(
                f"unknown option `{here}`.{did_you_mean(name, list(hints))}"
                f"{_listing(f' {type(config).__name__} has: ', hints)}"
            )
        old, hint = getattr(config, name), hints[name]
        if isinstance(value, dict):
            chosen = value.pop("", None)
            if isinstance(old, dict):
                changes[name] = old | {k: _literal(v) for k, v in value.items()}
                continue
            if not dataclasses.is_dataclass(old):
                raise ValueError(
                    f"`{here}` has no fields of its own, got `{here}.{next(iter(value))}`. "
                    f"Write `{here}=VALUE`."
                )
            if chosen is not None:
                old = _read(chosen, hint, here)
            changes[name] = override(old, value, here)
        else:
            changes[name] = _read(value, hint, here)
    try:
        return dataclasses.replace(config, **changes) if changes else config
    except ValueError as error:
        where = "" if flag == "--config" else f"{flag}: "
        raise ValueError(f"{where}{error}") from error


def to_flags(config: Any, flag: str = "--config") -> Iterator[str]:
    """Every option of `config`, in words that `parse` reads."""
    hints = typing.get_type_hints(type(config))
    for name, hint in hints.items():
        value, here = getattr(config, name), f"{flag}.{name}"
        if dataclasses.is_dataclass(value):
            if len(_dataclasses(hint)) > 1:
                yield f"{here}={type(value).__name__}"
            yield from to_flags(value, here)
        elif isinstance(value, dict):
            yield from (f"{here}.{key}={item}" for key, item in value.items())
        else:
            yield f"{here}={_text(value)}"


def to_json(config: Any) -> dict[str, Any]:
    """The configuration as JSON can hold it, a dataclass's name under "type"."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {"type": type(config).__name__} | {
        name: to_json(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def usage(config_class: type, config: Any = None, flag: str = "--config") -> str:
    """Every option, what it means, and its value in `config` or by default."""
    hints, docs = typing.get_type_hints(config_class), _field_docs(config_class)
    parts = []
    for field in dataclasses.fields(config_class):
        name, hint = f"{flag}.{field.name}", hints[field.name]
        value = _default(field) if config is None else getattr(config, field.name)
        sections = _dataclasses(hint)
        if config is not None and sections:
            parts.append(usage(type(value), value, name))
        elif sections:
            for section in sections:
                choice = f"  {name}={section.__name__} has\n" if sections[1:] else ""
                parts.append(choice + usage(section, None, name))
        else:
            shown = (
                f"{'default' if config is None else 'now'} {_text(value) or 'empty'}"
            )
            parts.append(
                f"  {name}: {_name(hint)}; {shown}\n"
                + textwrap.indent(textwrap.fill(docs[field.name], 80), " " * 6)
            )
    return "\n".join(parts)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """ " Did you mean `x`?" for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else ""


def _insert(overrides: dict, flag: str, value: str) -> None:
    """Puts one flag into the nested dict; "" holds a section's own value."""
    *sections, name = flag.split(".")[1:]
    for section in sections:
        inner = overrides.get(section, {})
        inner = inner if isinstance(inner, dict) else {"": inner}
        overrides[section] = overrides = inner
    if isinstance(overrides.get(name), dict):
        overrides[name][""] = value
    else:
        overrides[name] = value


def _read(text: str, hint: Any, flag: str) -> Any:
    """`text` as a value of the type `hint`."""
    choices = _dataclasses(hint)
    if len(choices) == 1:
        raise ValueError(
            f"`{flag}` is a section, got {text!r}. Set its fields: `{flag}.FIELD=VALUE`."
        )
    if choices:
        names = [choice.__name__ for choice in choices]
        if text not in names:
            raise ValueError(
                f"`{flag}` must be {_either(names)}, got {text!r}."
                f"{did_you_mean(text, names)}"
            )
        return choices[names.index(text)]()
    if typing.get_origin(hint) in _UNIONS:
        if text.lower() == "none":
            return None
        (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _read(text, hint, flag)
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if text not in allowed:
            raise ValueError(
                f"`{flag}` must be {_either(allowed)}, got {text!r}."
                f"{did_you_mean(text, allowed)}"
            )
        return text
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        words = [word.strip() for word in text.strip("()[]").split(",")]
        try:
            return tuple(item(word) for word in words if word)
        except ValueError:
            raise ValueError(
                f"`{flag}` must be {_name(hint)}, got {text!r}. "
                f"Write it like `{flag}=3,6,9`."
            ) from None
    if typing.get_origin(hint) is dict:
        raise ValueError(
            f"`{flag}` is set one by one: `{flag}.KEY=VALUE`, got {text!r}."
        )
    try:
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        return hint(text)
    except (KeyError, ValueError):
        raise ValueError(
            f"`{flag}` must be {_name(hint)}, got {text!r}. "
            f"Write it like `{flag}={_EXAMPLES[hint]}`."
        ) from None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _dataclasses(hint: Any) -> list[type]:
    """The dataclasses that a field's annotation allows."""
    options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else [hint]
    return [option for option in options if dataclasses.is_dataclass(option)]


def _flags(config_class: type, flag: str = "--config") -> list[str]:
    found = []
    for name, hint in typing.get_type_hints(config_class).items():
        found.append(f"{flag}.{name}")
        for section in _dataclasses(hint):
            found.extend(_flags(section, f"{flag}.{name}"))
    return found


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _text(value: Any) -> str:
    """A value in the words that `_read` understands."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | dict):
        return ",".join(map(_text, value))
    return str(value)


@functools.cache
def _field_docs(config_class: type) -> dict[str, str]:
    """The text that stands under each field in the source."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    docs = {}
    for field, text in zip(node.body, node.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs


def _name(hint: Any) -> str:
    """A type in the words of a message."""
    if typing.get_origin(hint) is Literal:
        return _either(typing.get_args(hint))
    if typing.get_origin(hint) in _UNIONS:
        return _either([_name(option) for option in typing.get_args(hint)])
    if typing.get_origin(hint) is tuple:
        return "{0},{0},...".format(_name(typing.get_args(hint)[0]))
    if typing.get_origin(hint) is dict:
        return "KEY=VALUE"
    return {type(None): "none"}.get(hint, hint.__name__)


def _either(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _listing(before: str, names) -> str:
    return f"{before}{', '.join(names)}." if names else ""
