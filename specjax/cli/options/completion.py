"""What a shell is told could stand behind a flag.

A shell asks at every press of a key, and the catalogue takes JAX a second to import: what is needed of it is written
down in words.json, by `python -m specjax.cli.words`, and a test compares them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import pkgutil
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from specjax.cli.output.console import Console

FILE = Path(__file__).parents[1] / "words.json"
DEMO = "smollm2-135m"
HEADS = ("smollm2-135m-eagle3", "smollm2-135m-p-eagle")

Pairs = list[tuple[str, str]]  # a word, and what it means


@functools.cache
def words() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def of(*sections: str, also: Iterable[str] = ()) -> Callable[[str], Pairs]:
    """Completes with the words of sections of words.json, such as methods of a kind or "rules"."""

    def complete(incomplete: str) -> Pairs:
        known = {word: row["help"] for section in sections for word, row in words()[section].items()}
        return _begun({**known, **dict.fromkeys(also, "")}, incomplete)

    return complete


def one_of(*known: str) -> Callable[[str], Pairs]:
    return lambda incomplete: _begun(dict.fromkeys(known, ""), incomplete)


def config(incomplete: str) -> Pairs:
    """The built-in configs."""
    spec = importlib.util.find_spec("specjax.configs")
    places = spec.submodule_search_locations if spec else None
    return _begun({module.name: "" for module in pkgutil.iter_modules(places)}, incomplete)


def setting(ctx: typer.Context, incomplete: str) -> Pairs:
    """NAME= of the methods that --method names, or of `auto`; behind it the values, where these can be told."""
    given = ctx.params.get("method") or "auto"
    names = [given] if isinstance(given, str) else list(given)
    found: dict[str, str] = {}
    for name in names:
        rows = (row for section in words().values() for word, row in section.items() if word == name)
        row: dict[str, Any] = next(rows, {})
        for option, told in row.get("options", {}).items():
            whole = option if len(names) == 1 else f"{name}.{option}"
            found[f"{whole}="] = told["help"]
            if incomplete.startswith(f"{whole}="):
                found |= {f"{whole}={value}": told["help"] for value in told["values"]}
    return [pair for pair in _begun(found, incomplete) if pair[0] != incomplete]


@contextlib.contextmanager
def words_as_bash_parts_them() -> Iterator[None]:
    """Bash takes `seed_pool=y` for three words and completes the last: asked as one word, answered with its end."""
    parts = _parted(os.environ["COMP_WORDS"])
    at = min(int(os.environ["COMP_CWORD"]), len(parts))  # behind the last where what is completed is empty
    whole = _rejoined(parts[: at + 1])
    completed = at < len(parts)
    os.environ |= {"COMP_WORDS": " ".join(whole), "COMP_CWORD": str(len(whole) - completed)}
    stands = _what_stands(whole[-1]) if completed and whole[-1] != parts[at] else ""
    with io.StringIO() as answer:
        try:
            with contextlib.redirect_stdout(answer):
                yield
        finally:
            console = Console()
            for line in answer.getvalue().splitlines():
                console.print(line.removeprefix(stands), soft_wrap=True)


def _parted(line: str) -> list[str]:
    try:
        return shlex.split(line, posix=False)
    except ValueError:  # a quotation that is still open
        return line.split(" ")


def _rejoined(parts: list[str]) -> list[str]:
    whole: list[str] = []
    for before, part in zip(["", *parts], parts, strict=False):
        if whole and "=" in (before, part):
            whole[-1] += part
        else:
            whole.append(part)
    return whole


def _what_stands(word: str) -> str:
    """Before what is completed. Of --set=seed_pool=y the parser is asked about seed_pool=y alone."""
    before, equals, _ = word.rpartition("=")
    flag, parted, value = before.partition("=")
    return (value if parted and flag.startswith("--") else before) + equals


def _begun(known: dict[str, str], incomplete: str) -> Pairs:
    return [(word, meaning) for word, meaning in known.items() if word.startswith(incomplete)]
