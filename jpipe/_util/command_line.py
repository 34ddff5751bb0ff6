"""The parser of a command: a wrong command line is one line on stderr, and a wrong option is answered with the
nearest.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from jpipe._util.suggest import did_you_mean


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that prints no usage before an error. The exit status is 2.

    A letter stands for the option that begins with it, or that has it as its metavar: "-n" for `--microbatches N`.
    """

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None):  # type: ignore[override]
        result, unknown = self.parse_known_args(args, namespace)
        if unknown:
            words = [word.partition("=")[0] for word in unknown if word[:1] == "-"]
            hints = "".join(dict.fromkeys(map(self._near, words)))
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{hints} `--help` lists the options.")
        return result

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message}\n")

    def _near(self, word: str) -> str:
        """The end of a message about an unknown option."""
        names: list[str] = []
        letters: dict[str, str] = {}
        for action in self._actions:
            long = [option for option in action.option_strings if option.startswith("--")]
            names += long
            for name in long[:1]:
                letters.setdefault(name[2], name)
                if isinstance(action.metavar, str) and len(action.metavar) == 1:
                    letters[action.metavar.lower()] = name
        return did_you_mean(word, names, letters)
