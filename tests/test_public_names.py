"""`import specjax` is light: its names are imported when they are first asked for."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import specjax


@pytest.mark.parametrize(
    "program",
    [
        "import specjax; dir(specjax)",
        "import sys; from specjax.cli import main; main(['--help'])",
        "import sys; from specjax.cli import main; main(['methods', '--help'])",
        "import sys; from specjax.cli import main; main(['--version'])",
        "import sys; from specjax.cli import main; main(['no-such-command'])",
    ],
)
def test_it_imports_nothing_heavy(program):
    heavy = ("jax", "flax", "numpy", "transformers", "matplotlib")
    code = f"import atexit, sys\natexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))\n{program}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]", run


def test_type_checkers_see_the_same_names():
    stub = ast.parse(Path(specjax.__file__).with_name("__init__.pyi").read_text())
    names = {alias.asname for x in stub.body if isinstance(x, ast.ImportFrom) for alias in x.names}
    assert names == set(specjax.__all__)


def test_every_name_is_there():
    assert set(specjax.__all__) <= set(dir(specjax))
    for name in specjax.__all__:
        assert getattr(specjax, name) is not None
    assert specjax.decode is importlib.import_module("specjax.api").decode
    assert specjax.drafters is importlib.import_module("specjax.drafters")
    assert specjax.costs.measured and specjax.types.Target is specjax.Target
    with pytest.raises(AttributeError, match="module 'specjax' has no attribute 'nothing'"):
        specjax.nothing  # noqa: B018
