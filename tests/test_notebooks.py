"""The notebooks are pairs: a script, and a notebook without outputs; `make notebooks` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.mark.parametrize("script", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_script_and_notebook_agree(script: Path) -> None:
    """Both files of a pair hold the same cells, and the notebook holds no output."""
    notebook = jupytext.read(script.with_suffix(".ipynb"))

    assert [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]
    assert not any(cell.get("outputs") for cell in notebook.cells)
