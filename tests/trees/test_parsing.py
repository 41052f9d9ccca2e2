"""Trees from text."""

from __future__ import annotations

import json

import pytest

from specjax import UsageError, trees
from specjax.trees import inline, parse, parse_paths, static_paths


def test_shapes():
    assert parse_paths("2x1") == ((0,), (1,), (0, 0), (1, 0))
    assert parse_paths("sequoia:.6,.2,.1:8x3") == trees.sequoia([0.6, 0.2, 0.1], 8, 3)[1]
    assert parse_paths("sequoia:.6,.2,.1:8") == trees.sequoia([0.6, 0.2, 0.1], 8)[1]
    assert parse_paths("medusa:.6,.2/.5,.1:4") == trees.medusa([[0.6, 0.2], [0.5, 0.1]], 4)[1]
    assert parse_paths("[[0], [0, 0]]") == ((0,), (0, 0))


def test_the_builder_is_the_one_that_python_makes():
    """The same object, so that nothing compiles anew."""
    assert parse("4x2x1") is trees.branching("4x2x1") and parse("top:4x2") is trees.branching("4x2", "point_mass")
    assert parse("uniform:3x1") is trees.branching("3x1", "without_replacement_then_uniform")
    assert parse("mixed:sequoia:.6,.2:5") is trees.static(parse_paths("sequoia:.6,.2:5"), "top_and_sampled")
    assert parse("paths:3x2") is trees.independent_paths(3, 2) and parse("dyspec:7") is trees.dyspec_fixed(7)
    assert parse("dyspec:7,children=2") is trees.dyspec_fixed(7, children=2)
    assert parse("dyspec:8x3") is trees.dyspec(threshold=1 / 25, width=8, depth=3)
    assert parse("dyspec:8x3,children=2,threshold=.1") is trees.dyspec(threshold=0.1, width=8, depth=3, children=2)
    assert parse("siblings:4") is trees.chain_with_siblings(4)
    assert parse("eagle2:4x5x16") is trees.eagle2(top_k=4, depth=5, total=16)


def test_the_forms_of_a_shape_are_those_that_are_read():
    with pytest.raises(UsageError) as error:
        parse_paths("beam:2x2")
    assert "sequoia:" in str(error.value) and "beam:WxL" not in str(error.value) and "top:" not in str(error.value)


def test_paths_of_trees_whose_shape_is_known():
    assert static_paths("top:2x1") == parse_paths("2x1") and static_paths("paths:2x2") == ((0,), (1,), (0, 0), (1, 0))
    assert [static_paths(spec) for spec in ("beam:2x3", "dyspec:4", "eagle2:2x2x4")] == [None] * 3


def test_a_file_by_what_it_says(tmp_path):
    file = tmp_path / "paths.json"
    file.write_text("[[0], [1], [0, 0]]")
    assert parse_paths(str(file)) == ((0,), (1,), (0, 0))
    written = inline(f"top:{file}")
    file.write_text(
        json.dumps({"choices": [{"side": "schedule", "paths": [[0]]}, {"side": "roofline", "paths": [[1], [0]]}]})
    )
    assert parse(written) is trees.static(((0,), (1,), (0, 0)), "point_mass")  # what the file said then
    assert inline(str(file)) == "[[0]]" and inline(f"{file}:roofline") == "[[1], [0]]" and inline("4x2") == "4x2"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("4x0", '"4x0" is not a tree; the forms are AxBxC'),
        ("beam:4", "is not a tree"),
        ("beam:4x2,children=2", "is not a tree"),
        ("dyspec:4,threshold=.1", "is not a tree"),
        ("dyspec:4x2,children=two", "is not a tree"),
        ("dyspec:4x2,width=2", "is not a tree"),
        ("dyspec:4x2,threshold=2", "threshold must lie between 0 and 1"),
        ("sequoia:.6:2x1x1", "is not a tree"),
        ("sequoia:.6:4x2", "no tree with so few ranks has 4 nodes on 2 levels"),
        ("medusa:1.5:3", "accuracy must be rows of probabilities"),
        ("99999999999x9", "has 999999999990 nodes; a tree may have at most 4096"),
        (f"{'9' * 5000}x9", r"99 \.\.\. 99\d+x9. has over 10\*\*18 nodes; a tree may have at most 4096"),
        ("x".join("9" * 9000), r"has over 10\*\*18 nodes"),
        ("beam:٩٩٩٩x1", "has 9999 nodes"),
        (f"siblings:{'0' * 5000}", "is not a tree"),
        ("top:64x65", "has 4224 nodes; a tree may have at most 4096"),
        ("siblings:20000", "a tree may have at most 4096"),
        ("eagle2:2x2x100", "has only 6 candidates for 100 nodes"),
        ("beam:5000x1", "a tree may have at most 4096"),
        ("sequoia:.5,.2:100000", "a tree may have at most 4096"),
        ("sequoia:nan:4", "acceptance must be probabilities"),
        ("medusa:nan:3", "accuracy must be rows of probabilities"),
        ("bild:4,threshold=2", "is not a tree"),
        ("bild:4,fallback=-1", "must be at least 0"),
        ("[]", "the tree must be rank paths such as"),
        ("[[0], [-1]]", "must be rank paths"),
        ("[[0], [true]]", "must be rank paths"),
        ("[[0", "must be rank paths"),
        ("[[1]]", r"has the path \[1\] without \[0\]; add it"),
        ("[[0, 0]]", r"has the path \[0, 0\] without \[0\]; add it"),
    ],
)
def test_bad_trees(spec, words):
    with pytest.raises(UsageError, match=words):
        parse(spec)


@pytest.mark.parametrize("text", ['{"choices": [1]}', '{"choices": "abc"}', '{"choices": [{"side": "a"}]}', "3"])
def test_a_file_that_is_no_tree_says_so(text, tmp_path):
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(UsageError, match="neither rank paths nor a plan"):
        parse_paths(str(tmp_path / "tree.json"))


def test_a_file_nested_too_deep_says_so(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="nested too deep"):
        parse_paths(str(tmp_path / "deep.json"))
