"""The command line of `python -m jpipe.draw`."""

import argparse
import json
import os
import pathlib
import shutil
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jpipe import schedules
from jpipe._util.command_line import Parser
from jpipe._util.foreign import literal, shown
from jpipe.draw._export import summary, trace
from jpipe.draw._figure import SUFFIXES, save
from jpipe.draw._text import text
from jpipe.schedule import Schedule
from jpipe.simulate import simulate


def _option(word: str) -> tuple[str, Any]:
    """Parses `key=value`. A value that is no Python literal is a string."""
    key, equals, value = word.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"must be key=value, got {shown(word)}")
    return key, literal(value)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jpipe.draw",
        description="Draws a schedule and prints its facts.",
        epilog="example: python -m jpipe.draw gpipe --stages 4 --microbatches 8",
    )
    known = ", ".join(schedules.names())
    parser.add_argument("name", nargs="?", help=f"the schedule: {known}")
    parser.add_argument("--stages", type=int, metavar="S")
    parser.add_argument("--microbatches", type=int, metavar="N", help="per minibatch")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another argument of the schedule, such as ticks=unit; may be repeated",
    )
    parser.add_argument("--file", help="a table as text, instead of a name")
    parser.add_argument("--out", help=f"a file to draw to ({', '.join(SUFFIXES)})")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="a file for a trace of one step for Perfetto or chrome://tracing; a forward takes a millisecond",
    )
    parser.add_argument("--json", action="store_true", help="facts and table, no text")
    return parser


def _schedule(args: argparse.Namespace) -> Schedule:
    """The schedule that the command line names."""
    if args.file is not None:
        if args.name or args.stages or args.microbatches or args.option:
            raise ValueError("--file is a whole table: leave out name, counts, options")
        return schedules.read(args.file)
    if args.name is None:
        known = ", ".join(schedules.names())
        raise ValueError(f"name a schedule ({known}) or a --file")
    builder = schedules.get(args.name)
    if args.stages is None or args.microbatches is None:
        raise ValueError(f"{args.name} needs --stages and --microbatches")
    options = dict(args.option)
    schedules.check_options(args.name, options)
    return builder(args.stages, args.microbatches, **options)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
      argv: its words. None: those of the process.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule = _schedule(args)
        for warning in caught:
            print(f"jpipe.draw: warning: {warning.message}", file=sys.stderr)
        if args.out is not None:
            save(schedule, args.out)
        if args.trace is not None:
            tree = trace(schedule, simulate(schedule))
            pathlib.Path(args.trace).write_text(json.dumps(tree) + "\n")
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(summary(schedule)))
    elif sys.stdout.isatty():
        color = "NO_COLOR" not in os.environ
        width = shutil.get_terminal_size().columns
        print(text(schedule, color=color, width=width), end="")
    else:
        print(text(schedule), end="")
