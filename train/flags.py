"""Reads `--config FILE` and `--config.section.field=value` into frozen dataclasses.

The annotation of a field says how its value is read:

    int, float, bool, str     12, 3e-4, true, any text
    Literal["a", "b"]         one of these
    X | None                  none, or as X
    tuple[int, ...]           3,6,9
    dict[str, Any]            field.key=value, the value a Python literal or else text
    A | B, both dataclasses   the name of one, whose fields then start as its defaults

A field whose metadata has "applies", a function `(config, value, given) -> config`, is a switch: its value changes
other fields, after all that is `given` beside it.
"""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import textwrap
import traceback
import types
import typing
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from jpipe._util.foreign import literal, read_json, shortened, shown
from jpipe._util.suggest import did_you_mean

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
"""The folder of configurations that a name without a folder is looked for in."""

_EXAMPLES = {int: "12", float: "3e-4", bool: "true or false", str: "text"}
_UNIONS = (typing.Union, types.UnionType)


def parse(arguments: Sequence[str], config_class: type, others: Sequence[str] = ()) -> tuple[str, Any]:
    """Reads the configuration that a command line names.

    Args:
      arguments: the words after the script's name, without options of the script's own.
      config_class: the class that `get_config()` of the file must return.
      others: options of the script's own, for suggestions.

    Returns:
      The name of the configuration and the configuration. The name is that of the Python
      file, without suffix, also where a run is repeated from its `config.json`.

    Raises:
      ValueError: if the command line or the file is wrong; says what.
      OSError: if the file cannot be read.
    """
    path: str | None = None
    overrides: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            known = ["--config", "--help", *others, *_flags(config_class)]
            guess = did_you_mean(flag, known) or did_you_mean(f"--config.{flag}", known)
            raise ValueError(
                f"unknown argument `{shortened(word, 200)}`.{guess} Options are written "
                "`--config FILE` and `--config.FIELD=VALUE`; `--help` lists them."
            )
        if not equals:
            try:
                value = next(words)
            except StopIteration:
                raise ValueError(f"`{flag}` needs a value: `{flag}=VALUE`.") from None
        if flag == "--config":
            path = value
        else:
            _insert(overrides, flag, value)
    if path is None:
        raise ValueError("no configuration. Name a file: `--config configs/quickstart.py`; `--help` shows more.")
    name, config = _load(path, config_class)
    return name, override(config, overrides)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that change fields of a configuration, and the other words.

    Example:
      >>> split(["--devices", "2", "--config.seed=1"])
      (['--config.seed=1'], ['--devices', '2'])
    """
    overrides = [word for word in argv if word.startswith("--config.")]
    return overrides, [word for word in argv if not word.startswith("--config.")]


def load(path: str, config_class: type) -> Any:
    """Reads a configuration from a file.

    Args:
      path: a Python file with a function `get_config()`, or the `config.json` of a run.
      config_class: the class of the configuration.

    Returns:
      An instance of `config_class`.

    Raises:
      ValueError: if the file is not such a configuration; names the line.
      OSError: if the file cannot be read.
    """
    return _load(path, config_class)[1]


def _load(path: str, config_class: type) -> tuple[str, Any]:
    """The name and the configuration of a file."""
    path = _file(path)
    if path.endswith(".json"):
        return _load_json(path, config_class)
    if path.endswith(".py"):
        return pathlib.Path(path).stem, _load_python(path, config_class)
    raise ValueError(f"a configuration is a Python file (.py) or the `config.json` of a run, got `{path}`.")


def _file(name: str) -> str:
    """The path of a configuration. A name without a folder is also looked for in `configs/`, and ".py" may be left out.

    Raises:
      FileNotFoundError: if there is none; lists those that there are.
    """
    path = pathlib.Path(name)
    places = [path] if path.parent.name or path.is_absolute() else [path, CONFIGS / path]
    for place in places:
        for file in (place, place.with_name(f"{place.name}.py")):
            if file.is_file():
                return str(file)
    folder = places[-1].parent
    known = sorted([*folder.glob("*.py"), *folder.glob("*.json")])
    names = [str(file) if len(places) == 1 else file.stem for file in known]
    raise FileNotFoundError(
        f"there is no configuration file `{name}`.{did_you_mean(name, names)}"
        f"{_listing(f' `{folder.name}` has: ', names)}"
    )


def _load_python(path: str, config_class: type) -> Any:
    """The result of `get_config()` in a Python file."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # as the suffix is .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if hasattr(module, "get_config"):
            config = module.get_config()
    except (Exception, SystemExit) as error:  # the file may do anything
        raise ValueError(f"{_location(error, path)}: {_reason(error)}") from error
    if not hasattr(module, "get_config"):
        raise ValueError(f"`{path}`: it must define `get_config()`, which returns a {config_class.__name__}.")
    if not isinstance(config, config_class):
        raise ValueError(
            f"`{path}`: `get_config()` must return a {config_class.__name__}, got {type(config).__name__}."
        )
    return config


def _location(error: BaseException, path: str) -> str:
    """The file, and the line in it that an error comes from."""
    absolute = os.path.abspath(path)  # as the import system names it
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == absolute]
    if isinstance(error, SyntaxError) and error.filename == absolute:
        lines = [error.lineno]
    return f"`{path}`, line {lines[-1]}" if lines else f"`{path}`"


def _reason(error: BaseException) -> str:
    """An error in one line. A `ValueError` of a configuration needs no name."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(text.split())
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _load_json(path: str, config_class: type) -> tuple[str, Any]:
    """The name and the configuration in a file that `to_json` made."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("type") != config_class.__name__:
        raise ValueError(
            f"`{path}` must hold the options of a {config_class.__name__}, as training "
            "writes them to `config.json` in the folder of a run."
        )
    checksum = values.pop(_CHECKSUM, None)
    if checksum not in (None, _checksum(values)):
        raise ValueError(
            f"`{path}` is not what training wrote: its `{_CHECKSUM}` does not fit the options. It was damaged, or "
            f"edited. Change options on the command line, or remove the entry `{_CHECKSUM}` if you mean the edit."
        )
    name = values.pop("name", pathlib.Path(path).stem)
    try:
        return name, _from_json(values, config_class, "")
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{path}`: {error}") from error


def _from_json(value: Any, hint: Any, where: str) -> Any:
    """A value of the type `hint` from its JSON form; `where` is its dotted name."""
    sections = _dataclasses(hint)
    if sections:
        fields = dict(value) if isinstance(value, dict) else {}
        prefix = f"{where}." if where else ""
        names = [section.__name__ for section in sections]
        kind = fields.pop("type", None)
        if kind not in names:
            raise ValueError(f"`{prefix}type` must be {_either(names)}, got {shown(kind)}.")
        section = sections[names.index(kind)]
        hints = typing.get_type_hints(section)
        for name in fields:
            if name not in hints:
                raise ValueError(
                    f"unknown option `{prefix}{name}`."
                    f"{did_you_mean(name, list(hints))}"
                    f"{_listing(f' {kind} has: ', hints)}"
                )
        values = {name: _from_json(item, hints[name], prefix + name) for name, item in fields.items()}
        return section(**values)
    if not _fits(value, hint):
        raise ValueError(f"`{where}` must be {_name(hint)}, got {shown(value)}.")
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a JSON value has the type that a field's annotation names."""
    if typing.get_origin(hint) in _UNIONS:
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, list) and all(_fits(item_value, item) for item_value in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, int | float if hint is float else hint)


def override(
    config: Any,
    overrides: dict[str, Any],
    flag: str = "--config",
    known: Sequence[str] | None = None,
) -> Any:
    """Changes fields of a configuration.

    All fields of a dataclass change at once, so that it checks the new values together.

    Args:
      config: a dataclass.
      overrides: a nested dict of texts, one per field to change.
      flag: the option that names `config` on the command line.
      known: all options of the command line, for suggestions; None: those of `config`.

    Returns:
      A new dataclass.

    Raises:
      ValueError: if there is no such field, or a text is not a value for it.
    """
    hints = typing.get_type_hints(type(config))
    known = _flags(type(config), flag) if known is None else known
    switches = {f.name: f.metadata["applies"] for f in dataclasses.fields(config) if "applies" in f.metadata}
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        here = f"{flag}.{name}"
        if name not in hints:
            moved = [k for k in known if k.endswith(f".{name}")]
            moved.sort(key=lambda k: abs(k.count(".") - here.count(".")))
            guess = did_you_mean(name, list(hints))
            if moved:
                guess = f" Did you mean `{moved[0]}`?"
            raise ValueError(
                f"unknown option `{shortened(here, 200)}`.{guess}{_listing(f' {type(config).__name__} has: ', hints)}"
            )
        old, hint = getattr(config, name), hints[name]
        if isinstance(value, dict):
            fields = {k: v for k, v in value.items() if k}
            if isinstance(old, dict):
                changes[name] = old | {k: literal(v) for k, v in fields.items()}
                continue
            if not dataclasses.is_dataclass(old):
                raise ValueError(f"`{here}` has no fields, got `{here}.{next(iter(fields))}`. Write `{here}=VALUE`.")
            if "" in value:
                old = _read(value[""], hint, here)
            changes[name] = override(old, fields, here, known)
        else:
            changes[name] = _read(value, hint, here)
    # Nothing is switched on while the fields beside it change.
    switched = {name: changes[name] for name in switches.keys() & changes.keys()}
    changes |= dict.fromkeys(switched)
    try:
        config = dataclasses.replace(config, **changes) if changes else config
        for name, value in switched.items():
            config = config if value is None else switches[name](config, value, overrides)
        return config
    except ValueError as error:
        where = "" if flag == "--config" else f"{flag}: "
        raise ValueError(f"{where}{error}") from error


def to_flags(config: Any, flag: str = "--config") -> Iterator[str]:
    """Yields every option of `config` in the form that `parse` reads."""
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


_CHECKSUM = "crc32"


def _checksum(values: dict[str, Any]) -> int:
    """A checksum of options in the form that JSON can hold; spaces and order do not count."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def to_text(values: dict[str, Any]) -> str:
    """The text of a `config.json`: the options, as `to_json` returns them, and a checksum that `load` compares."""
    values = json.loads(json.dumps(values))  # as they are read
    return json.dumps({**values, _CHECKSUM: _checksum(values)}, indent=2) + "\n"


def to_json(config: Any) -> dict[str, Any]:
    """The configuration in a form that JSON can hold, with class names under "type".

    `load` reads it back. An entry "name" beside it becomes the name of the configuration.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {"type": type(config).__name__} | {
        name: to_json(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()
    }


def usage(config_class: type, config: Any = None, flag: str = "--config") -> str:
    """A text with every option, its meaning, and its value in `config` or by default."""
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
            shown = f"{'default' if config is None else 'now'} {_text(value) or 'empty'}"
            parts.append(
                f"  {name}: {_name(hint)}; {shown}\n" + textwrap.indent(textwrap.fill(docs[field.name], 80), " " * 6)
            )
    return "\n".join(parts)


def _insert(overrides: dict, flag: str, value: str) -> None:
    """Puts one flag into the nested dict; the key "" holds the value of a section."""
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
        raise ValueError(f"`{flag}` is a section, got {shown(text)}. Set its fields: `{flag}.FIELD=VALUE`.")
    if choices:
        names = [choice.__name__ for choice in choices]
        kind, colon, value = text.partition(":")
        if colon and kind.lower() in map(str.lower, names):  # and the value of its first field
            choice = choices[[name.lower() for name in names].index(kind.lower())]
            field = dataclasses.fields(choice)[0].name
            return override(choice(), {field: value}, flag)
        if text not in names:
            raise ValueError(f"`{flag}` must be {_either(names)}, got {shown(text)}.{did_you_mean(text, names)}")
        return choices[names.index(text)]()
    if typing.get_origin(hint) in _UNIONS:
        if text.lower() == "none":
            return None
        kinds = [a for a in typing.get_args(hint) if a is not type(None)]
        if len(kinds) == 1:
            return _read(text, kinds[0], flag)
        words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
        if text in words:
            return text
        (number,) = (kind for kind in kinds if typing.get_origin(kind) is not Literal)
        try:
            return _read(text, number, flag)
        except ValueError:
            raise ValueError(f"`{flag}` must be {_name(hint)}, got {shown(text)}.{did_you_mean(text, words)}") from None
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if text not in allowed:
            raise ValueError(f"`{flag}` must be {_either(allowed)}, got {shown(text)}.{did_you_mean(text, allowed)}")
        return text
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        words = [word.strip() for word in text.strip("()[]").split(",")]
        try:
            return tuple(item(word) for word in words if word)
        except ValueError:
            raise ValueError(
                f"`{flag}` must be {_name(hint)}, got {shown(text)}. Write it like `{flag}=3,6,9`."
            ) from None
    if typing.get_origin(hint) is dict:
        raise ValueError(f"`{flag}` takes one entry per option: `{flag}.KEY=VALUE`, got {shown(text)}.")
    try:
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        return hint(text)
    except (KeyError, ValueError):
        raise ValueError(
            f"`{flag}` must be {_name(hint)}, got {shown(text)}. Write it like `{flag}={_EXAMPLES[hint]}`."
        ) from None


def _dataclasses(hint: Any) -> list[type]:
    """The dataclasses that a field's annotation allows."""
    options = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else [hint]
    return [option for option in options if dataclasses.is_dataclass(option)]


def _flags(config_class: type, flag: str = "--config") -> list[str]:
    """Every option, sections and fields."""
    names = []
    for name, hint in typing.get_type_hints(config_class).items():
        names.append(f"{flag}.{name}")
        for section in _dataclasses(hint):
            names.extend(_flags(section, f"{flag}.{name}"))
    return names


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _text(value: Any) -> str:
    """A value in the form that `_read` reads."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | dict):
        return ",".join(map(_text, value))
    return str(value)


@functools.cache
def _field_docs(config_class: type) -> dict[str, str]:
    """The text below each field in the source, also of inherited fields."""
    docs = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, text in zip(node.body, node.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs


def _name(hint: Any) -> str:
    """A type, as messages name it."""
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


def _listing(before: str, names: Collection[str]) -> str:
    return f"{before}{', '.join(names)}." if names else ""
