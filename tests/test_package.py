"""Tests of what is installed and of the list of repetitions: a name that is missing there goes unnoticed elsewhere."""

import pathlib
import tomllib

from tiers import REPEATED

ROOT = pathlib.Path(__file__).parents[1]


def test_every_folder_of_code_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    places = {name: pathlib.Path(place) for name, place in settings["package-dir"].items()}
    packages = set()
    for name, place in places.items():
        for init in (ROOT / place).rglob("__init__.py"):
            packages.add(".".join((name, *init.parent.relative_to(ROOT / place).parts)))
    assert len(packages) > 40
    assert packages == set(settings["packages"])


def test_every_repetition_is_a_test():
    """Each line of repeated.txt names a test function that exists."""
    names = [line.split("[")[0].split("::") for line in sorted(REPEATED) if line]
    texts = {file: (ROOT / "tests" / file).read_text(encoding="utf-8") for file, _ in names}
    assert not [f"{file}::{name}" for file, name in names if f"def {name}(" not in texts[file]]
