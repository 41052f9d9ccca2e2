"""Files of trees, of plans and of acceptance, made to break what reads them: each is read, or refused in a sentence."""

import json
import os
import pathlib

import pytest
from hostile import as_json, attacks, changed_json, survives

from specjax.costs import planned
from specjax.planning.tree.rank_acceptance import read_acceptance
from specjax.trees.parsing import MAX_NODES, parse_paths

PATHS = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
CHOICE = {"side": "schedule", "num_nodes": 6, "depth": 3, "paths": PATHS, "spec": "2x1"}
WIDTH = {"name": "verify 1", "compiles": True, "seconds": {"schedule": 0.01, "roofline": 0.02}}
PLAN = {"choices": [CHOICE, CHOICE | {"side": "roofline"}], "widths": [WIDTH, WIDTH | {"name": "verify 8"}]}
RULES = [{"rule": name, "n": n, "acceptance": 0.2 * n} for name in ("standard", "specinfer") for n in (1, 2, 3)]
BENCH = {"two_model": {"acceptance_by_depth": [0.5, 0.4, None]}}

READERS = {
    "paths": (PATHS, parse_paths),
    "choices": (PLAN, parse_paths),
    "costs": (PLAN, lambda name: planned(json.loads(pathlib.Path(name).read_bytes()))),
    "rules": ({"rules": RULES}, read_acceptance),
    "overall": ({"overall": BENCH}, read_acceptance),
}


def test_files_that_are_whole(tmp_path):
    for document, read in READERS.values():
        (tmp_path / "x.json").write_text(json.dumps(document))
        assert survives(lambda read=read: read(str(tmp_path / "x.json"))) is None


@pytest.mark.parametrize(("rng", "count"), attacks(200, 20_000))
@pytest.mark.parametrize("name", READERS)
def test_any_change(name, rng, count, tmp_path):
    document, read = READERS[name]
    file = tmp_path / "x.json"
    for case in range(count):
        changed = changed_json(rng, document)
        file.write_bytes(json.dumps(changed).encode() if name == "costs" else as_json(rng, changed))
        survives(lambda: read(str(file)), (case, changed))


@pytest.mark.parametrize("read", [parse_paths, read_acceptance])
def test_what_never_ends_is_not_opened(read, tmp_path):
    os.mkfifo(tmp_path / "x.json")
    assert "is not a regular file" in survives(lambda: read(str(tmp_path / "x.json")))


def test_trees_too_large_or_told_twice(tmp_path):
    wide = [[i] for i in range(MAX_NODES)]
    for paths, words in ((wide, None), ([*wide, [MAX_NODES]], "at most 4096"), ([[0], [0]], "a path twice"),
                         ([[0] * 9999], "without")):  # fmt: skip
        (tmp_path / "x.json").write_text(json.dumps(paths))
        sentence = survives(lambda: parse_paths(str(tmp_path / "x.json")))
        assert sentence is None if words is None else words in sentence


def test_rules_of_a_billion_drafts(tmp_path):
    rules = [{"rule": "standard", "n": 10**9, "acceptance": 0.5}]
    (tmp_path / "x.json").write_text(json.dumps({"rules": rules}))
    assert "1000000000 drafts" in survives(lambda: read_acceptance(str(tmp_path / "x.json")))
