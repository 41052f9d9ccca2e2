"""The language rules of the developer guide that a script can check, over all code that is installed."""

from __future__ import annotations

import ast
import collections
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(file for top in ("specjax", "models", "pallas_kernels", "configs") for file in (ROOT / top).rglob("*.py"))
OPENERS = re.compile(
    r"^(Of|As|With|Those|What|Whether|Which|Where|Who|Whose|By|In|To|For|From|How|That|Behind|Beside|Without|Between|"
    r"Over|One|Its|Their|When|Why|Nothing|Also|So)\b"
)
PARTICIPLES = frozenset(
    "said told asked kept known seen found given chosen own others made going taught learnt begun held here there before "
    "after now whole rest least most".split()
)
LONGEST = 35  # words of a sentence
SHARED_CLASSES = {"State", "Params", "Config"}


@functools.cache
def parse(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def places(kinds) -> list[tuple[pathlib.Path, ast.AST]]:
    return [(file, node) for file in FILES for node in ast.walk(parse(file)) if isinstance(node, kinds)]


def docstrings() -> list[tuple[str, str]]:
    nodes = places((ast.Module, ast.ClassDef, ast.FunctionDef))
    named = ((f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node)) for file, node in nodes)
    return [(place, text) for place, text in named if text]


def sentences(text: str) -> list[str]:
    """Split at full stops, colons, semicolons, blank lines, and the lines of a list or a table of arguments."""
    text = re.sub(r"`[^`]*`", "code", text)
    return re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?=[-*|]|[\w*]+(?:, [\w*]+)*: )", text)


def strings_of_help() -> list[tuple[str, str]]:
    """Return the texts of `help=` and of the constants HELP in the command line."""
    found = []
    for file, node in places((ast.keyword, ast.Assign)):
        is_help = node.arg == "help" if isinstance(node, ast.keyword) else getattr(node.targets[0], "id", "") == "HELP"
        if is_help and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.append((f"{file.relative_to(ROOT)}:{node.value.lineno}", node.value.value))
    return found


def test_no_docstring_opens_with_a_fragment():
    assert not [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if OPENERS.match(text)]


@pytest.mark.parametrize("texts", [docstrings, strings_of_help])
def test_no_sentence_is_too_long(texts):
    long = [(place, s) for place, text in texts() for s in sentences(text) if len(s.split()) > LONGEST]
    assert not [f"{place}: {len(s.split())} words: {' '.join(s.split()[:8])} ..." for place, s in long]


def test_no_local_variable_is_a_participle():
    found = []
    for file, node in places(ast.FunctionDef):
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names = stored | {argument.arg for argument in node.args.args + node.args.kwonlyargs}
        found += [f"{file.relative_to(ROOT)}:{node.lineno} {name}" for name in sorted(names & PARTICIPLES)]
    assert not found


def test_no_class_name_is_used_twice():
    homes = collections.defaultdict(list)
    for file, node in places(ast.ClassDef):
        homes[node.name].append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1 and name not in SHARED_CLASSES}


FULL_FOLDERS = re.compile(r"specjax/(drafters|diffusion|collaborate|adaptive|decoders)(/|$)|models/(loading/)?heads")


def test_no_folder_is_crowded():
    """Folders of published methods and of heads may have more files."""
    count = collections.Counter(str(file.parent.relative_to(ROOT)) for file in FILES)
    assert not {folder: n for folder, n in count.items() if n > 12 and not FULL_FOLDERS.match(folder)}
