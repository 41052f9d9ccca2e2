"""Tests of what is installed: every folder of code, since setuptools takes them one by one."""

import pathlib
import tomllib

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
