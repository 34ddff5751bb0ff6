"""How `make docs` builds the pages. Nothing is fetched: no intersphinx, no fonts, no scripts from elsewhere."""

import functools
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

# Importing jpipe must not claim an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from docutils import nodes  # noqa: E402
from sphinx.util import logging  # noqa: E402

import jpipe  # noqa: E402

project = "jpipe"
author = "The jpipe authors"
copyright = author
release = version = jpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
default_role = "code"  # docstrings write code between single backticks
nitpicky = True
# Types of other libraries have no page here.
nitpick_ignore_regex = [
    (r"py:.*", rf"{library}(\..*)?") for library in ("jax", "flax", "numpy", "np", "optax", "jnp", "nnx", "linen")
] + [
    (r"py:.*", r"(?!jpipe)[\w.]+"),
    # Private modules, and classes of the inner packages, which some public functions name in annotations.
    (r"py:.*", r"jpipe\.(?:\w+\.)*_\w+(\..*)?"),
    (
        r"py:.*",
        r"jpipe\.(layers|stages|lowering|engine|packing|program|portable|state|soap\.\w+)(\..*)?",
    ),
]

html_theme = "furo"
html_title = f"jpipe {release}"
html_static_path = ["_static"]
html_css_files = ["jpipe.css"]
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
myst_fence_as_directive = []
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Sphinx would write out what they stand for.
autodoc_type_aliases = {
    name: name
    for name in (
        "NumericTree",
        "chex.Array",
        "chex.ArrayTree",
        "chex.Numeric",
        "optax.Params",
        "optax.ScalarOrSchedule",
        "optax.Schedule",
    )
}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
ARGUMENT_GROUPS = {
    " ".join(title.split()): re.findall(r"`(\w+)`", names)
    for title, names in re.findall(r"([A-Z][^:.`]*): ((?:`\w+`(?:,\s+)?)+)\.", jpipe.Pipeline.__doc__ or "")
}
"""Title of a group of arguments -> names, as the docstring of `Pipeline` has them."""

napoleon_custom_sections = [
    "References",
    *((title, "params_style") for title in ARGUMENT_GROUPS),
]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

PUBLIC = (
    "jpipe.distributed",
    "jpipe",
    "jpipe.schedules",
    "jpipe.optim",
    "jpipe.plan",
    "jpipe.solvers",
    "jpipe.simulate",
    "jpipe.draw",
    "jpipe.reference",
)
"""Modules whose public names the reference must have."""

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|References): *(.*)$")
_DOC_PATH = re.compile(r"`docs/([\w/]+)\.md`")
_AS_WRITTEN: dict[str, list[str]] = {}


def public_names():
    """Every public name as "module.name"."""
    for module_name in PUBLIC:
        module = importlib.import_module(module_name)
        yield from (f"{module_name}.{name}" for name in module.__all__)


def resolve(name):
    """The object that a dotted name stands for; the name itself if there is none."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        try:
            return functools.reduce(getattr, parts[i:], value)
        except AttributeError:
            break
    return name


def check_reference(app, env):
    """Fails the build if the reference lacks a public name. One page for an object that has two names is enough."""
    python = env.domaindata["py"]
    documented = {id(resolve(name)) for name in (*python["objects"], *python["modules"])}
    for name in public_names():
        if id(resolve(name)) not in documented and name not in python["objects"]:
            logging.getLogger(__name__).warning("the API reference lacks %s: name it on a page of docs/api/", name)


def group_arguments(name, text):
    """ "Args:" of `Pipeline` as one section for each of its groups, in place of the paragraph that names them."""
    before, _, rest = text.partition("\nArgs:\n")
    arguments, end, after = re.split(r"\n(?=(\n\S))", rest, maxsplit=1)
    entries = re.findall(r"^  (\w+):.*\n(?:   .*\n)*", arguments + "\n", flags=re.M)
    texts = dict(zip(entries, re.split(r"^(?=  \w)", arguments + "\n", flags=re.M)[1:]))
    named = [each for group in ARGUMENT_GROUPS.values() for each in group]
    if sorted(named) != sorted(texts):
        logging.getLogger(__name__).warning("the groups of arguments of %s name %s, it has %s", name, named, entries)
        return text
    before = re.sub(r"The arguments come in groups\..*?(?=\n\n|$)", "", before, flags=re.S)
    sections = [f"\n{title}:\n" + "".join(texts[each] for each in group) for title, group in ARGUMENT_GROUPS.items()]
    return before + "".join(sections) + after


def methods_table(name, cls):
    """A table of the public methods and properties of a class: name, first sentence of the docstring."""
    rows = ["", ".. list-table::", "   :widths: auto", "   :class: methods", ""]
    bases = [each for each in reversed(cls.__mro__) if each.__module__.startswith("jpipe")]
    members = {name: value for each in bases for name, value in vars(each).items()}.items()
    for each, value in sorted(members, key=lambda item: isinstance(item[1], property)):
        text = inspect.getdoc(value)
        is_method = inspect.isroutine(value) or isinstance(value, property | functools.cached_property)
        if not each.startswith("_") and text and is_method:
            kind = "attr" if isinstance(value, property) else "meth"
            first = " ".join(text.partition("\n\n")[0].split())
            sentence = re.split(r"(?<=[.;])\s", first)[0].rstrip(";")
            rows += [f"   * - :py:{kind}:`~{name}.{each}`", f"     - {sentence}"]
    return [*rows, ""]


def format_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text with Google's sections; Sphinx reads reStructuredText."""
    result: list[str] = []
    in_section = hanging = False
    for i, line in enumerate(lines):
        match = _SECTION.match(line)
        if match:
            section, text = match.groups()
            in_section, hanging = True, bool(text)
            if section == "Returns":
                # Napoleon would read the words before a colon as the type that is returned.
                result += ["", f":returns: {text}".rstrip()]
            else:
                result += ["", f"{section}:", *([f"  {text}"] if text else [])]
            continue
        elif line and not line.startswith(" "):
            in_section = False
        hanging = hanging and bool(line)
        if hanging:  # lines that go on from the line of the section's name
            line = f"  {line}"
        picture = line.startswith("    ") and (i == 0 or not lines[i - 1].strip())
        if picture and not in_section and not line.lstrip().startswith(("-", ">>>")):
            result += [".. code-block:: text", ""]
        if not line.startswith("    "):
            line = re.sub(r"\|(\w+)\|", r"\\|\1\\|", line)  # no substitution
        result.append(line)
    result = _DOC_PATH.sub(r":doc:`/\1`", "\n".join(result)).split("\n")
    if name == "jpipe.Pipeline":
        result = group_arguments(name, "\n".join(result)).split("\n")
    if name in ("jpipe.Pipeline", "jpipe.Schedule", "jpipe.Checkpoints"):
        end = result.index("")
        result[end:end] = methods_table(name, obj)
    lines[:] = result
    if what in ("property", "attribute", "data"):
        _AS_WRITTEN[name] = [*result]


def restore_docstring(app, what, name, obj, options, lines):
    """Of a property, Napoleon would read the words before a colon as its type."""
    if what in ("property", "attribute", "data"):
        lines[:] = _AS_WRITTEN.pop(name)


def name_types(app, what, name, obj, options, signature, returned):
    """Sphinx names an alias in a union by the class of its placeholder."""
    return tuple(part and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", part) for part in (signature, returned))


# Files outside docs/ that a page includes.
_PAGE_OF = {
    ROOT / "CHANGELOG.md": DOCS / "changelog.md",
    ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
    ROOT / "README.md": DOCS / "index.md",
}
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", flags=re.M)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def localise(text, folder, page_folder):
    """Links of a text of `folder`, as they are right on a page of `page_folder`. Files outside docs/ have a name
    only.
    """

    def link(match):
        words, path, fragment = match.groups()
        target = (folder / path).resolve()
        target = _PAGE_OF.get(target, target)
        if target.is_relative_to(DOCS):
            return f"[{words}]({os.path.relpath(target, page_folder)}{fragment or ''})"
        name = target.relative_to(ROOT).as_posix()
        return words if words.strip("`") == name else f"{words} (`{name}`)"

    return _LINK.sub(link, text)


def read_page(app, name, content):
    """Puts included files in their place, and makes all links right for the site."""
    folder = (DOCS / name).parent
    text = localise(content[0], folder, folder)

    def include(match):
        path = (folder / match[1]).resolve()
        return localise(path.read_text(), path.parent, folder)

    text = _INCLUDE.sub(include, text)
    content[0] = _DOC_PATH.sub(lambda match: f"[](/{match[1]}.md)", text)


_NUMBERS = re.compile(r"[-\d\s.,%/=±×–+~]*\d[-\d\s.,%/=±×–+~]*|-|–")


def mark_cells(app, doctree):
    """Gives cells of tables that hold numbers alone the class "numbers", and those with sentences the class "prose"."""
    for entry in doctree.findall(nodes.entry):
        code = sum(len(each.astext()) for each in entry.findall(nodes.literal))
        if _NUMBERS.fullmatch(entry.astext()):
            entry["classes"].append("numbers")
        elif len(entry.astext()) - code > 25:
            entry["classes"].append("prose")


def write_tables(app, exception):
    """The tables of the explorer page, as the builders of this version write them."""
    if exception is None and app.builder.format == "html":
        out = pathlib.Path(app.outdir) / "_static" / "explorer_tables.js"
        # In a process of its own: Sphinx has imported jpipe in its own ways.
        words = [sys.executable, str(DOCS / "explorer_tables.py"), str(out)]
        subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def setup(app):
    app.connect("build-finished", write_tables)
    app.connect("source-read", read_page)
    app.connect("doctree-read", mark_cells)
    app.connect("env-check-consistency", check_reference)
    # Before Napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", format_docstring, priority=100)
    app.connect("autodoc-process-docstring", restore_docstring, priority=900)
    app.connect("autodoc-process-signature", name_types)
    return {"parallel_read_safe": True}
