"""The Python examples of README and docs type-check against the package as it is installed, with its py.typed."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

OPTIONS = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / "build" / "mypy")
"""Those of `make types`, because mypy reads a module anew if an option or the module's path differs."""

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
def linked() -> pathlib.Path:
    """The folder of `make linked`, which has the package in the layout in which it is installed."""
    folder = ROOT / "build" / "linked"
    if not (folder / "specjax").is_dir():
        subprocess.run(["make", "linked"], cwd=ROOT, check=True, capture_output=True)
    return folder


def snippets(page: pathlib.Path) -> str:
    """The examples of a page as one module, because later ones use the names of earlier ones."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    checked = [block for number, block in enumerate(blocks) if (page.name, number) not in FRAGMENTS]
    return "\n".join([CONTEXT, *checked]) if checked else ""


def test_examples_have_the_types_of_the_package(linked, tmp_path):
    """The examples of all pages pass one run of mypy, with the cache of `make types`: 5 s, and 149 s without."""
    for page in PAGES:
        if text := snippets(page):
            source = f"# mypy: allow-redefinition\n{text}"
            (tmp_path / f"page_{page.stem}.py").write_text(source, encoding="utf-8")
    (tmp_path / "checked.py").write_text(CHECKED, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", *OPTIONS, "--no-error-summary", *sorted(tmp_path.glob("*.py"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=linked)
    lines = [line for line in done.stdout.splitlines() if ": note:" not in line]
    errors = [line for line in lines if line.partition(":")[0].endswith("checked.py")]
    assert len(errors) == 1 and "Target" in errors[0], (
        f"mypy does not read the package's types\n{done.stdout}{done.stderr}"
    )
    assert lines == errors, "\n".join(lines)


def test_the_package_says_that_it_has_types():
    assert (ROOT / "specjax" / "py.typed").is_file()
