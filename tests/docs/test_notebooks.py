"""The notebooks: their cells run, their links lead somewhere, and no output is kept in the repository.

    python tests/docs/test_notebooks.py docs/notebooks/whole_model.ipynb

runs the cells of a notebook in order, in one process, as Jupyter would; an error names the cell and its line.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook, kind):
    content = json.loads(notebook.read_text())
    return [(i, "".join(cell["source"]), cell) for i, cell in enumerate(content["cells"]) if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_kept(notebook):
    content = json.loads(notebook.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert set(content["metadata"]) == {"kernelspec", "language_info"}
    ids = [cell["id"] for cell in content["cells"]]
    assert len({*ids}) == len(ids)
    for _, _, cell in cells(notebook, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(notebook):
    text = "\n".join(source for _, source, _ in cells(notebook, "markdown"))
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links and all((notebook.parent / link).exists() for link in links)


@pytest.mark.exhaustive
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run(notebook, tmp_path):
    variables = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, __file__, str(notebook)],
        cwd=tmp_path,
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "bubble 0%" in result.stdout and "in the table" in result.stdout


if __name__ == "__main__":
    namespace = {"__name__": "__main__"}
    for number, source, _ in cells(pathlib.Path(sys.argv[1]), "code"):
        exec(compile(source, f"cell {number}", "exec"), namespace)
