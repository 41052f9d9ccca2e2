"""Offline trees against golden values, brute force and simulation."""

import itertools
import json

import numpy as np
import pytest
from toy import DATA

from specjax import UsageError, trees
from specjax.trees.templates import Template

GOLDEN = json.loads((DATA / "verification_tree_builders.json").read_text())
ACCEPTANCE = GOLDEN["sequoia"]["acceptance_vector_from_1"]


def nested(paths, root=()):
    children = sorted(p for p in paths if len(p) == len(root) + 1 and p[: len(root)] == root)
    return [nested(paths, child) for child in children]


def value(paths, acceptance):
    return 1 + sum(np.prod([acceptance[r] for r in path]) for path in paths)


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_sequoia_is_golden(size):
    expected, paths = trees.sequoia(ACCEPTANCE, size)
    golden = GOLDEN["sequoia"][f"budget_{size}"]
    np.testing.assert_allclose(expected, golden["expected_tokens"], atol=1e-9)
    np.testing.assert_allclose(value(paths, ACCEPTANCE), expected, atol=1e-9)
    assert len(paths) == size - 1
    assert Template(paths).num_nodes == size  # closed under parents


def test_sequoia_with_few_levels_is_golden():
    expected, paths = trees.sequoia(ACCEPTANCE, 8, max_depth=2)
    assert nested(paths) == GOLDEN["sequoia"]["budget_8_depth_3_levels"]["shape_nested_children"]
    np.testing.assert_allclose(expected, 2.56)


def test_sequoia_values_of_the_systems_card():
    values = [trees.sequoia(ACCEPTANCE, n)[0] for n in range(2, 7)]
    np.testing.assert_allclose(values, [1.6, 1.96, 2.176, 2.376, 2.5056])
    np.testing.assert_allclose(trees.sequoia(ACCEPTANCE, 4, max_depth=2)[0], 1 + 0.6 + 0.36 + 0.2)


def test_sequoia_equals_the_likeliest_paths_without_a_depth_limit():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a = np.sort(rng.dirichlet(np.ones(4))[:3])[::-1]
        size = int(rng.integers(2, 12))
        every = [p for d in range(1, size) for p in itertools.product(range(3), repeat=d)]
        best = sorted((np.prod([a[r] for r in p]) for p in every), reverse=True)[: size - 1]
        np.testing.assert_allclose(trees.sequoia(a, size)[0], 1 + sum(best), atol=1e-9)


def test_sequoia_extremes():
    assert nested(trees.sequoia((1.0, 0.0), 5)[1]) == [[[[[]]]]]  # sure of the first child: a chain
    assert Template(trees.sequoia((0.5, 0.5), 7)[1]).max_depth == 2  # indifferent: level by level


@pytest.mark.filterwarnings("error")
def test_sequoia_with_ranks_that_are_never_accepted():
    acceptance = 0.6, 0.3, 0.0
    expected, paths = trees.sequoia(acceptance, 8, max_depth=2)
    np.testing.assert_allclose(expected, 1 + 0.9 + 0.9**2)  # six useful nodes; the seventh adds nothing
    np.testing.assert_allclose(value(paths, acceptance), expected)
    assert len(set(paths)) == 7 and max(map(len, paths)) == 2
    assert trees.sequoia((1.0, 0.0), 8, max_depth=2) == (-np.inf, ())  # two levels of two hold seven nodes


def test_medusa_is_golden():
    golden = GOLDEN["medusa"]
    expected, paths = trees.medusa(golden["acc_head_rank"], len(golden["nodes_in_order"]))
    assert [list(p) for p in paths] == golden["nodes_in_order"]
    np.testing.assert_allclose(expected, golden["expected_accepted"], atol=1e-9)
    Template(paths)


def test_medusa_equals_brute_force():
    accuracy = GOLDEN["medusa"]["acc_head_rank"]
    every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    worth = {p: np.prod([accuracy[i][r] for i, r in enumerate(p)]) for p in every}
    for size in range(1, 5):
        best = max(
            sum(worth[p] for p in nodes)
            for nodes in itertools.combinations(every, size)
            if all(len(p) == 1 or p[:-1] in nodes for p in nodes)
        )
        np.testing.assert_allclose(trees.medusa(accuracy, size)[0], best)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trees.sequoia((0.9, 0.9), 4), "sum to at most 1"),
        (lambda: trees.sequoia((0.5,), 1), "at least 2"),
        (lambda: trees.medusa([[0.5], []], 2), "rows of probabilities"),
        (lambda: trees.branching("4x2xa"), "4x2x1"),
        (lambda: trees.branching("4x0"), "at least 1 per level"),
        (lambda: trees.beam(0, 3), "width and depth"),
        (lambda: trees.dyspec(threshold=1.5), "threshold"),
        (lambda: trees.dyspec_fixed(0), "num_tokens"),
        (lambda: trees.eagle2(top_k=0), "top_k"),
        (lambda: trees.independent_paths(0, 2), "paths and depth"),
    ],
)
def test_bad_settings_name_the_field(call, message):
    with pytest.raises(UsageError, match=message):
        call()
