"""The pages, README.md and docs/, as programs: what of them is code, and how it is run.

    python tests/pages.py docs/faq.md

runs the Python blocks of a page in order, in one process, as a reader would who copies them. Five conventions:

- `<!-- prints -->` above a `text` block: the Python block before it prints this text. `...` stands for anything.
- `<!-- not run: REASON -->` above a block: it is shown, not run.
- `<!-- needs PACKAGE -->` above a Python block: it is left out, and said so, where the package is not installed.
- `<!-- with this change -->` above a Python block: it runs apart, with a copy of `jpipe/` to which the `diff` blocks
  above it are applied, back to the Python block before.
- In a `console` block, `$ ` begins a command and the lines below it are what it prints; `$ cat FILE` shows a file that
  later commands of the page read.
"""

import contextlib
import doctest
import importlib.util
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts),
]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>prints|with this change|needs \w+|not run:[^>]*?) -->\n\n?)?"
    r"^(?P<fence>```+)(?P<language>\w+)\n(?P<text>.*?)^(?P=fence)$",
    flags=re.M | re.S,
)


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
      line: the number of the line before its first, so that line n of the text is line `line + n` of the page.
      mark: "prints", "needs PACKAGE", "with this change", "not run: REASON" or "".
    """

    language: str
    text: str
    line: int
    mark: str

    @property
    def is_program(self) -> bool:
        """Whether it is Python that runs with the page, at least where a package is installed."""
        return self.language == "python" and (not self.mark or bool(self.needs))

    @property
    def needs(self) -> str:
        """The package without which it does not run; empty if there is none."""
        return self.mark.removeprefix("needs ") if self.mark.startswith("needs ") else ""


class Command(NamedTuple):
    """A command of a console block.

    Attributes:
      printed: the lines below it in the block.
      mark: that of its block.
    """

    text: str
    printed: str
    mark: str


def name(page: pathlib.Path) -> str:
    """The page as seen from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: pathlib.Path) -> list[Block]:
    """The fenced blocks of a page that name a language."""
    text = page.read_text()
    return [
        Block(
            match["language"],
            match["text"],
            text.count("\n", 0, match.start("text")),
            match["mark"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def commands(page: pathlib.Path) -> list[Command]:
    """The commands of a page, lines that a backslash continues joined."""
    return [
        Command(re.sub(r"\s*\\\n\s*", " ", command), printed, block.mark)
        for block in blocks(page)
        if block.language == "console"
        for command, printed in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.text, flags=re.M)
    ]


def has_program(page: pathlib.Path) -> bool:
    """Whether a page has a Python block that runs."""
    return any(b.is_program for b in blocks(page))


def run(page: pathlib.Path) -> None:
    """Runs the Python blocks of a page, and compares what they print with what the page says."""
    namespace: dict = {"__name__": "__main__"}
    printed = None
    for block in blocks(page):
        if block.is_program:
            if block.needs and importlib.util.find_spec(block.needs) is None:
                print(f"{page}, line {block.line}: skipped, {block.needs} is not installed")
                continue
            code = compile("\n" * block.line + block.text, str(page), "exec")
            stdout = io.StringIO()
            with contextlib.redirect_stdout(stdout):
                exec(code, namespace)
            # A page does not show the empty lines at the end, which a text that ends a line leaves behind `print`.
            printed = stdout.getvalue().rstrip("\n") + "\n"
        elif block.mark == "prints":
            where = f"{page}, line {block.line}"
            if printed is None:
                raise AssertionError(f"{where}: no Python block before this text")
            example = doctest.Example("", block.text)
            checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
            if not checker.check_output(block.text, printed, flags):
                raise AssertionError(f"{where}\n{checker.output_difference(example, printed, flags)}")


def run_apart(page: pathlib.Path, folder: pathlib.Path, **environment: str):
    """`run` in a process of its own, as pages choose their devices, in `folder`."""
    variables = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, __file__, str(page)],
        cwd=folder,
        env={**variables, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def changes(page: pathlib.Path) -> list[tuple[Block, str]]:
    """The Python blocks of a page that run with a change of `jpipe/`, each with its change."""
    result, change = [], ""
    for block in blocks(page):
        if block.language == "diff":
            change += block.text
        elif block.language == "python":
            if block.mark == "with this change":
                result.append((block, change))
            change = ""
    return result


def run_changed(block: Block, change: str, folder: pathlib.Path):
    """Runs a Python block in a process of its own, with a changed copy of `jpipe/` in `folder`."""
    shutil.copytree(ROOT / "jpipe", folder / "jpipe", ignore=shutil.ignore_patterns("__pycache__"))
    patch = folder / "change.patch"
    patch.write_text(change)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True, timeout=60)
    return subprocess.run(
        [sys.executable, "-c", block.text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]).resolve())
