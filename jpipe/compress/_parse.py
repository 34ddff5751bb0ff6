"""Compressors from text, for configuration files and the command line."""

import dataclasses
import typing

from jpipe._util.foreign import shown
from jpipe._util.suggest import did_you_mean, suggests
from jpipe.compress._cast import Cast
from jpipe.compress._compressor import Compressor
from jpipe.compress._powersgd import PowerSGD
from jpipe.compress._quantize import Quantize
from jpipe.compress._streaming_pca import StreamingPCA
from jpipe.compress._threshold import Threshold
from jpipe.compress._topk import TopK

COMPRESSORS: dict[str, type[Compressor]] = {
    "cast": Cast,
    "quantize": Quantize,
    "threshold": Threshold,
    "topk": TopK,
    "powersgd": PowerSGD,
    "streaming_pca": StreamingPCA,
}
"""Name in texts -> compressor."""


@suggests
def parse(text: str) -> Compressor:
    """The compressor that a text names, with its options.

    Args:
      text: `name` or `name:option=value,option=value`; names are those of `COMPRESSORS`, options the attributes of
        the class.

    Raises:
      ValueError: if there is no such compressor or option, an option is missing, or a value is out of range.

    Example:
      >>> parse("quantize:bits=4,block=64")
      Quantize(bits=4, block=64, stochastic=False, seed=0)
      >>> parse("topk:density=0.01")
      TopK(density=0.01)
    """
    if not isinstance(text, str):
        raise ValueError(f"a compressor is named by a text such as 'powersgd:rank=4', got {shown(text)}.")
    name, _, options = text.partition(":")
    if name not in COMPRESSORS:
        raise ValueError(
            f"there is no compressor {shown(name)}.{did_you_mean(name, COMPRESSORS)} Choose one of "
            f"{', '.join(COMPRESSORS)}."
        )
    compressor = COMPRESSORS[name]
    fields = {f.name: f for f in dataclasses.fields(compressor)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(compressor)
    values = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if key not in fields or not equals:
            raise ValueError(
                f"{name} has no option {shown(option)}.{did_you_mean(key, fields)} Write `{name}:option=value,...`; "
                f"the options are {', '.join(fields)}."
            )
        if key in values:
            raise ValueError(f"{name} has `{key}` twice in {shown(text)}. Leave one out.")
        values[key] = _value(name, key, value, hints[key])
    missing = [key for key, f in fields.items() if f.default is dataclasses.MISSING and key not in values]
    if missing:
        raise ValueError(f"{name} needs a value for {', '.join(missing)}: write `{name}:{missing[0]}=...`.")
    return compressor(**values)


def _value(name: str, key: str, text: str, kind: typing.Any) -> typing.Any:
    """The value of an option."""
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise ValueError(f"`{key}` of {name} must be true or false, got {shown(text)}.")
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        number = "whole number" if kind is int else "number"
        raise ValueError(f"`{key}` of {name} must be a {number}, got {shown(text)}.") from None
