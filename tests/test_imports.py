"""Who may import whom: no import upwards, no cycle, no import that works by luck of order."""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys

import pytest

from jpipe._util.entry_points import ENTRY_POINTS

ROOT = pathlib.Path(__file__).parents[1]

LEVELS = [
    {"_util"},
    {"_table", "_slices", "vocabulary", "packing", "mesh"},
    {"optim", "compress", "_attention", "_processes", "schedule"},
    {"simulate", "launch"},
    {"schedules"},
    {"lowering"},
    {"layers"},
    {"gradients", "segments"},
    {"stages"},
    {"options"},
    {"engine"},
    {"program"},
    {"states", "costs"},
    {"_programs"},
    {"pipeline"},
    {"reference", "checkpoints", "distributed", "draw"},
    {"solvers", "memory"},
    {"soap", "trace"},
    {"plan"},
]
"""The modules and packages of `jpipe`, from the bottom. Each may import those of lower levels."""

SATELLITES = {"solvers", "soap", "memory", "plan", "trace"}
"""What a training step never needs. The core calls it by `jpipe._util.entry_points` alone."""

LEVEL_OF = {name: i for i, level in enumerate(LEVELS) for name in level}

WITHOUT_JAX = ("schedule", "schedules", "simulate", "draw", "solvers")


@functools.cache
def modules(package: str) -> dict[str, pathlib.Path]:
    """Every module of a package, by its name without that of the package."""
    folder = ROOT / package
    paths = sorted(folder.rglob("*.py"))
    names = [path.relative_to(folder).with_suffix("").parts for path in paths]
    return {".".join(name[:-1] if name[-1] == "__init__" else name): path for name, path in zip(names, paths)}


MODULES = modules("jpipe")


def imports(name: str, package: str = "jpipe") -> set[str]:
    """The modules of its package that a module imports, anywhere in its text, for type checkers too."""
    names = modules(package)
    tree = ast.parse(names[name].read_text())
    imported: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide their level"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix(f"{package}.") in names
                imported.add(inner if is_module else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return {target.removeprefix(f"{package}.") for target in imported if target.startswith(f"{package}.")}


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_no_module_imports_upwards(name):
    package = name.partition(".")[0]
    assert package in LEVEL_OF, f"`jpipe.{package}` has no place in LEVELS"
    for target in imports(name):
        other = target.partition(".")[0]
        assert other == package or LEVEL_OF[other] < LEVEL_OF[package], (
            f"`jpipe.{name}` imports `jpipe.{target}`, which is not below it"
        )


def test_the_core_imports_no_satellite():
    """What a training step never needs is called by name, and loaded only then."""
    core = [n for n in MODULES if n and n.partition(".")[0] not in SATELLITES]
    doors = {n: {t for t in imports(n) if t.partition(".")[0] in SATELLITES} for n in core}
    assert not {name: targets for name, targets in doors.items() if targets}


@pytest.mark.first_case
@pytest.mark.parametrize("package", ["jpipe", "train", "models"])
def test_no_cycle(package):
    graph = {name: imports(name, package) for name in modules(package) if name}
    for name in graph:  # a package is its `__init__`, which Python runs first
        parents = {name.rpartition(".")[0]} - {""}
        assert parents <= set(graph)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.exhaustive
def test_every_module_can_be_imported_first():
    """One process imports each module with all others of the package forgotten."""
    program = """
import importlib, sys

def forget():
    for name in [n for n in sys.modules if n.partition(".")[0] == "jpipe"]:
        del sys.modules[name]

without_jax, others = eval(sys.stdin.read())
for name in without_jax:
    importlib.import_module(name)
    assert "jax" not in sys.modules, f"{name} loads JAX"
    forget()
for name in others:
    importlib.import_module(name)
    forget()
"""
    without_jax = [f"jpipe.{name}" for name in WITHOUT_JAX]
    others = [f"jpipe.{name}" if name else "jpipe" for name in MODULES]
    others = [name for name in others if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=repr((without_jax, others)),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_entry_points_exist():
    for target in ENTRY_POINTS.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_modules_are_imported_by_name_in_three_places_only():
    by_name = {name for name, path in MODULES.items() if "import_module" in path.read_text()}
    assert by_name == {"", "_util.entry_points", "solvers._scipy"}


def test_no_test_module_imports_another():
    """What test modules share lies in modules that hold no tests."""
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    importing = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                if names & set(target.split(".")):
                    importing.append(f"{path.relative_to(ROOT)}, line {node.lineno}: {target}")
    assert not importing, importing
