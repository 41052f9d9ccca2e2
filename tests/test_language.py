"""The language rules of the developer guide that a script can check, over all code."""

from __future__ import annotations

import ast
import collections
import functools
import json
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
INSTALLED = ("specjax", "models", "pallas_kernels", "configs")
TOPS = (*INSTALLED, "benchmarks", "examples", "colab", "tests")
FILES = sorted(file for top in TOPS for file in (ROOT / top).rglob("*") if file.suffix in (".py", ".ipynb"))
OPENERS = re.compile(
    r"^(Of|As|With|Those|What|Whether|Which|Where|Who|Whose|By|In|To|For|From|How|That|Behind|Beside|Without|Between|"
    r"Over|One|Its|Their|When|Why|Nothing|Also|So)\b"
)
PARTICIPLES = {
    "said", "told", "asked", "kept", "known", "seen", "found", "given", "chosen", "own", "others", "made", "going",
    "taught", "learnt", "begun", "held", "here", "there", "before", "after", "now", "whole", "rest", "least", "most",
}  # fmt: skip
LONGEST = 35  # words of a sentence
SHARED_CLASSES = {"State", "Params", "Config"}


def parse(file: pathlib.Path) -> ast.Module:
    """Return the syntax tree of a file, or of the code cells of a notebook without their commands for pip."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = (cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        text = re.sub(r"(?m)^( *)%", r"\1pass  # %", "\n".join("".join(source) for source in cells))
    return ast.parse(text)


@functools.cache
def all_nodes() -> list[tuple[str, Any]]:
    """Return every node of every file with the file's path. The walk takes 4 s, so all tests share it."""
    trees = ((str(file.relative_to(ROOT)), parse(file)) for file in FILES)
    return [(path, node) for path, tree in trees for node in ast.walk(tree)]


def find_nodes(kinds) -> list[tuple[str, Any]]:
    """Return the path and the node of every node of these kinds."""
    return [(path, node) for path, node in all_nodes() if isinstance(node, kinds)]


def docstrings() -> list[tuple[str, str]]:
    nodes = find_nodes((ast.Module, ast.ClassDef, ast.FunctionDef))
    texts = ((f"{path}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node)) for path, node in nodes)
    return [(place, text) for place, text in texts if text]


def sentences(text: str) -> list[str]:
    """Split at the ends of sentences, blank lines, and the lines of lists. Diagrams and code spans do not count."""
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"(?m)^ {4,}.*$", "", text)
    return re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?=[-*|]|[\w*]+(?:, [\w*]+)*: )", text)


def help_texts() -> list[tuple[str, str]]:
    """Return the texts of `help=` and of the constants HELP in the command line."""
    texts = []
    for path, node in find_nodes((ast.keyword, ast.Assign)):
        is_help = node.arg == "help" if isinstance(node, ast.keyword) else getattr(node.targets[0], "id", "") == "HELP"
        if is_help and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.append((f"{path}:{node.value.lineno}", node.value.value))
    return texts


def test_no_docstring_opens_with_a_fragment():
    assert not [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if OPENERS.match(text)]


@pytest.mark.parametrize("texts", [docstrings, help_texts])
def test_no_sentence_is_too_long(texts):
    long = [(place, s) for place, text in texts() for s in sentences(text) if len(s.split()) > LONGEST]
    assert not [f"{place}: {len(s.split())} words: {' '.join(s.split()[:8])} ..." for place, s in long]


def test_no_local_variable_is_a_participle():
    names = []
    for path, node in find_nodes(ast.FunctionDef):
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        arguments = {argument.arg for argument in node.args.args + node.args.kwonlyargs}
        names += [f"{path}:{node.lineno} {name}" for name in sorted((stored | arguments) & PARTICIPLES)]
    assert not names


def test_no_class_name_is_used_twice():
    homes = collections.defaultdict(list)
    for path, node in find_nodes(ast.ClassDef):
        if path.startswith(INSTALLED):
            homes[node.name].append(path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1 and name not in SHARED_CLASSES}


FULL_FOLDERS = re.compile(
    r"specjax/(drafters|diffusion|collaborate|adaptive|decoders)(/|$)|configs$|models/(loading/)?heads"
)


def test_no_folder_is_crowded():
    """Folders of published methods, of heads, of built-in configs and of tests may have more files."""
    folders = (str(file.parent.relative_to(ROOT)) for file in FILES)
    count = collections.Counter(folder for folder in folders if not folder.startswith("tests"))
    del count["benchmarks"]  # a flat folder of scripts
    assert not {folder: n for folder, n in count.items() if n > 12 and not FULL_FOLDERS.match(folder)}
