"""The Python examples of README and docs type-check against the package as it is installed, with its py.typed."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = ("models", "configs", "pallas_kernels")  # folders that are installed as parts of specjax

FRAGMENTS: dict[tuple[str, int], str] = {}
"""Examples that are left out, by page and number of the block, each with the reason."""

CONTEXT = """
import jax
import specjax
from specjax.models.loading import Tokenizer

target: specjax.Target
tokenizer: Tokenizer
prompts: list[list[int]]
key: jax.Array
"""
"""The names that docs/index.md introduces for all examples."""

CHECKED = """
import specjax

target, tokenizer = specjax.load()
wrong: int = target
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """A folder on the path with the package in the layout in which it is installed."""
    folder = tmp_path_factory.mktemp("site")
    package = folder / "specjax"
    package.mkdir()
    for source in (*(ROOT / "specjax").iterdir(), *(ROOT / name for name in ELSEWHERE)):
        (package / source.name).symlink_to(source)
    return folder


def snippets(page: pathlib.Path) -> str:
    """The examples of a page as one module, because later ones use the names of earlier ones."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    checked = [block for number, block in enumerate(blocks) if (page.name, number) not in FRAGMENTS]
    return "\n".join([CONTEXT, *checked]) if checked else ""


def test_examples_have_the_types_of_the_package(site, tmp_path):
    """The examples of all pages pass one run of mypy, whose time is mostly that of the package itself."""
    for page in PAGES:
        if text := snippets(page):
            (tmp_path / f"page_{page.stem}.py").write_text(text, encoding="utf-8")
    (tmp_path / "checked.py").write_text(CHECKED, encoding="utf-8")
    command = [
        sys.executable, "-m", "mypy", "--config-file", os.devnull, "--ignore-missing-imports", "--allow-redefinition",
        "--no-error-summary", "--cache-dir", ROOT / "build" / "mypy_examples", *sorted(tmp_path.glob("*.py")),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    lines = [line for line in done.stdout.splitlines() if ": note:" not in line]
    errors = [line for line in lines if line.startswith("checked.py")]
    assert len(errors) == 1 and "Target" in errors[0], (
        f"mypy does not read the package's types\n{done.stdout}{done.stderr}"
    )
    assert lines == errors, "\n".join(lines)
