"""The registry of solvers: every entry solves a graph.

Solvers load no JAX and say what SciPy is needed for.
"""

import pathlib
import re
import subprocess
import sys

import pytest

from jpipe import solvers
from jpipe.solvers import Graph, Node

ROOT = pathlib.Path(__file__).parents[2]
CHAIN = Graph(
    tuple(Node(name, forward=t) for name, t in zip("abcd", (1.0, 2.0, 3.0, 4.0))),
    ((0, 1), (1, 2), (2, 3)),
)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", solvers.names())
def test_every_solver_solves(name):
    solver = solvers.get(name)
    options = {"bandwidth": 1e9} if solver.needs_bandwidth else {}
    solution = solver.solve(CHAIN, 2, **options)
    assert [n for stage in solution.stages for n in stage.nodes] == list("abcd")
    assert solution.objective >= 5 and solution.bound <= solution.objective
    assert sum(stage.replicas for stage in solution.stages) <= 2


def test_options_are_those_of_the_functions():
    takes = {
        option: [name for name in solvers.names() if solvers.get(name).takes(option)]
        for option in ("bandwidth", "num_hosts", "time_limit", "straight")
    }
    assert takes == {
        "bandwidth": ["pipedream", "ideals", "linearised", "ip"],
        "num_hosts": ["ideals", "linearised", "ip"],
        "time_limit": ["ip"],
        "straight": ["pipedream"],
    }


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'pipedream'"):
        solvers.get("pipedreem")


def test_the_page_lists_every_solver():
    page = (ROOT / "docs" / "planning.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", page, flags=re.M)
    wanted = [(name, s.finds, s.proof) for name, s in solvers.SOLVERS.items()]
    assert [row for row in rows if row[0] in solvers.SOLVERS] == wanted


def test_solvers_load_no_jax():
    run = python("import sys; import jpipe.solvers; assert 'jax' not in sys.modules")
    assert run.returncode == 0, run.stderr


def test_solvers_import_nothing_that_loads_jax():
    """Holds whatever `jpipe/__init__.py` imports: the package is loaded without it."""
    run = python(
        "import sys, types; package = types.ModuleType('jpipe'); package.__path__ = ['jpipe'];"
        "sys.modules['jpipe'] = package; import jpipe.solvers;"
        "assert not {'jax', 'scipy', 'flax', 'optax'} & {*sys.modules}"
    )
    assert run.returncode == 0, run.stderr


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    for name in ("scipy", "scipy.sparse", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("ideals", "linearised", "ip"):
        with pytest.raises(ImportError, match=r'pip install "scipy>=1\.15".*\[plan\]'):
            solvers.get(name).solve(CHAIN, 2)
    for name in ("pipedream", "min-max", "block"):  # these need NumPy alone
        options = {"bandwidth": 1e9} if name == "pipedream" else {}
        assert solvers.get(name).solve(CHAIN, 2, **options).stages


def test_solvers_import_what_stands_below_them():
    """What stands below them in the package: an import upwards would make a circle."""
    for path in (ROOT / "jpipe" / "solvers").glob("*.py"):
        modules = re.findall(r"^\s*(?:from|import) (jpipe\S*)", path.read_text(), re.M)
        for module in modules:
            below = module in (
                "jpipe._util.foreign",
                "jpipe._table.counts",
                "jpipe.stages.min_max",
                "jpipe._util.suggest",
            )
            assert below or module.startswith("jpipe.solvers")
