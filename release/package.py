"""Builds the source distribution and the wheel of a release, and checks them.

    make dist ADDRESS=https://example.org/jpipe
    python release/package.py --address https://example.org/jpipe --out dist

`--address` is where the project lives: it is the only place where that stands. The package then has links to its
source, its pages, its issues and its changes, and the README of the package, whose links and pictures are relative in
the clone, points there. Without it there are no links: what is built can be installed and not published.
The packages `build` and `twine` do the work: the extra `release`.
"""

import argparse
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?!https?:|#)(?P<path>[^)\s#]+)(?P<fragment>#[^)\s]*)?\)")


def version() -> str:
    text = (ROOT / "jpipe" / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.*)"$', text, flags=re.M)[1]


def urls(address: str) -> str:
    """The table of links in `pyproject.toml`."""
    files = f"{address}/blob/v{version()}"
    links = {
        "Homepage": address,
        "Documentation": f"{files}/docs/index.md",
        "Source": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{files}/CHANGELOG.md",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{link}"\n' for name, link in links.items())


def with_whole_links(text: str, address: str) -> str:
    """A page whose links and pictures lead to the files of this version."""

    def whole(match):
        kind = "raw" if match["picture"] else "blob"
        path = f"{address}/{kind}/v{version()}/{match['path']}{match['fragment'] or ''}"
        return f"{match['picture']}[{match['words']}]({path})"

    return _LINK.sub(whole, text)


def lay_out(folder: pathlib.Path, address: str | None) -> None:
    """Copies what the package is made of, with the address in it."""
    shutil.copytree(ROOT / "jpipe", folder / "jpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    project = (ROOT / "pyproject.toml").read_text()
    if address is not None:
        before, name, after = project.partition("\n[project.optional-dependencies]")
        project = before + urls(address) + name + after
        (folder / "README.md").write_text(with_whole_links((ROOT / "README.md").read_text(), address))
        with (folder / "CITATION.cff").open("a") as file:
            file.write(f'repository-code: "{address}"\n')
    (folder / "pyproject.toml").write_text(project)


def build(out: pathlib.Path, address: str | None) -> list[pathlib.Path]:
    """Builds and checks the package.

    Raises:
      subprocess.CalledProcessError: if `build` or `twine` fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        lay_out(folder, address)
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(out.resolve()), str(folder)], check=True)
    built = sorted(out.glob(f"jpipe_jax-{version()}*"))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], check=True)
    return built


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the project's page, such as https://example.org/jpipe")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    args = parser.parse_args(argv)
    if args.address is not None and not re.fullmatch(r"https://\S+[^/\s]", args.address):
        parser.error(f"`--address` must begin with https:// and end without a slash, got {args.address!r}.")
    missing = [name for name in ("build", "twine") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"needs the packages {' and '.join(missing)}. `make dist` installs them.")
    for path in build(args.out, args.address):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
