"""Shell completion of the values of flags.

The shell runs it at every press of the tab key, so this module must not import JAX.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import pkgutil
import shlex
from collections.abc import Callable, Iterable, Iterator

import typer

from specjax.catalog import METHODS, SAMPLING, Kind, Method, Option, of_kind
from specjax.catalog.forms import controller_forms, stop_forms, tree_forms
from specjax.catalog.inputs import missing_inputs
from specjax.catalog.rules import rule_summaries
from specjax.cli.output.console import Console

DEMO = "smollm2-135m"
HEADS = ("smollm2-135m-eagle3", "smollm2-135m-p-eagle")
Pairs = list[tuple[str, str]]  # a word and its help
KINDS: dict[str, Kind] = {
    "drafters": "drafter", "decoders": "decoder", "diffusion": "diffusion", "collaboration": "collaboration",
    "adaptive": "adaptive", "compression": "compression",
    "caches": "cache",
}  # fmt: skip
"""The sections of methods that commands run, and the kind of each."""


@functools.cache
def section(name: str) -> dict[str, str]:
    """Return the words of a section and their help: a kind of method, or a flag's values."""
    if name == "heads":
        return _summaries(row for row in of_kind("drafter").values() if "head" in row.needs)
    if name in KINDS:
        return _summaries(row for row in of_kind(KINDS[name]).values() if not missing_inputs(row))
    if name == "rules":
        return rule_summaries()
    if name == "sampling":
        return SAMPLING
    return _beginnings({"trees": tree_forms, "stops": stop_forms, "controllers": controller_forms}[name]())


def _summaries(rows: Iterable[Method]) -> dict[str, str]:
    return {row.name: row.summary for row in rows}


def _beginnings(forms: dict[str, str]) -> dict[str, str]:
    """Return the literal beginning of each form: "beam:" of `beam:WxD`, "bass" of `bass`, none of a leading number."""
    beginnings: dict[str, str] = {}
    for form, summary in forms.items():
        for part in form.split(", "):
            name, colon, _ = part.partition(":")
            if name[:1].islower():
                beginnings.setdefault(name + colon, summary)
    return beginnings


def words(*sections: str, more: Iterable[str] = ()) -> Callable[[str], Pairs]:
    """Return a completion function for the words of sections, such as "drafters" or "rules", and for more words."""

    def complete(incomplete: str) -> Pairs:
        help_of = {word: help for name in sections for word, help in section(name).items()}
        return _matches({**help_of, **dict.fromkeys(more, "")}, incomplete)

    return complete


def one_of(*choices: str) -> Callable[[str], Pairs]:
    """Return a completion function for fixed words."""
    return lambda incomplete: _matches(dict.fromkeys(choices, ""), incomplete)


def config(incomplete: str) -> Pairs:
    """Complete the names of the built-in model configurations."""
    spec = importlib.util.find_spec("specjax.configs")
    folders = spec.submodule_search_locations if spec else None
    return _matches({module.name: "" for module in pkgutil.iter_modules(folders)}, incomplete)


def setting(ctx: typer.Context, incomplete: str) -> Pairs:
    """Complete NAME= for the options of the methods in --method (default: `auto`), and values from a fixed list."""
    methods = ctx.params.get("method") or "auto"
    names = [methods] if isinstance(methods, str) else list(methods)
    settings: dict[str, str] = {}
    for name in names:
        for option in METHODS[name].settable if name in METHODS else ():
            key = option.name if len(names) == 1 else f"{name}.{option.name}"
            settings[f"{key}="] = option.help
            if incomplete.startswith(f"{key}="):
                settings |= {f"{key}={value}": option.help for value in _values(option)}
    return [pair for pair in _matches(settings, incomplete) if pair[0] != incomplete]


def _values(option: Option) -> list[str]:
    return option.form.split("|") if "|" in option.form else []


@contextlib.contextmanager
def joined_bash_words() -> Iterator[None]:
    """Join the words that bash splits at `=` before completion, and shorten the answers accordingly.

    Bash splits `seed_pool=y` into three words and completes the last one.
    """
    parts = _split(os.environ["COMP_WORDS"])
    position = min(int(os.environ["COMP_CWORD"]), len(parts))  # beyond the last word if the completed word is empty
    joined = _join(parts[: position + 1])
    is_nonempty = position < len(parts)
    os.environ |= {"COMP_WORDS": " ".join(joined), "COMP_CWORD": str(len(joined) - is_nonempty)}
    prefix = _fixed_prefix(joined[-1]) if is_nonempty and joined[-1] != parts[position] else ""
    with io.StringIO() as answer:
        try:
            with contextlib.redirect_stdout(answer):
                yield
        finally:
            console = Console()
            for line in answer.getvalue().splitlines():
                console.print(line.removeprefix(prefix), soft_wrap=True)


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, posix=False)
    except ValueError:  # a quotation is still open
        return line.split(" ")


def _join(parts: list[str]) -> list[str]:
    """Join parts around `=`."""
    joined: list[str] = []
    for previous, part in zip(["", *parts], parts, strict=False):
        if joined and "=" in (previous, part):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def _fixed_prefix(word: str) -> str:
    """Return the part of a joined word that bash keeps; of --set=seed_pool=y the parser completes seed_pool=y alone."""
    start, equals, _ = word.rpartition("=")
    flag, separator, value = start.partition("=")
    return (value if separator and flag.startswith("--") else start) + equals


def _matches(help_of: dict[str, str], incomplete: str) -> Pairs:
    return [(word, help) for word, help in help_of.items() if word.startswith(incomplete)]
