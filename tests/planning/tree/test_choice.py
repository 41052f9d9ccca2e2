"""The choice of a tree from a cost curve."""

from __future__ import annotations

import pytest

from specjax import trees
from specjax.costs.tokens import expected_tokens
from specjax.planning.tree.choice import choose
from specjax.trees.templates import branching_paths

A = (0.6, 0.2, 0.1)


def test_flat_costs_want_the_largest_tree_and_dear_nodes_none():
    flat = choose(A, [(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)], draft=0.0)
    assert flat.num_nodes == 8 and flat.tokens == pytest.approx(trees.sequoia(A, 8)[0])
    assert flat.speedup == pytest.approx(flat.tokens)
    dear = choose(A, [(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)], draft=0.0)
    assert (dear.num_nodes, dear.depth, dear.spec, dear.speedup) == (1, 0, None, 1.0)


def test_the_choice_is_the_minimum_over_all_sizes_and_depths():
    target, draft = [(1, 1.0), (2, 1.02), (4, 1.1), (8, 1.3), (16, 2.0)], 0.15
    choice = choose(A, target, draft)
    every = [
        (depth * draft + seconds) / trees.sequoia(A, n, depth)[0]
        for n, seconds in target[1:]
        for depth in range(1, n)
        if trees.sequoia(A, n, depth)[0] > 0
    ]
    assert choice.seconds_per_token == pytest.approx(min(every))
    assert expected_tokens(choice.paths, A) == pytest.approx(choice.tokens)
    assert max(map(len, choice.paths)) == choice.depth


def test_a_slow_drafter_wants_shallow_trees():
    target = [(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)]
    depths = [choose(A, target, draft).depth for draft in (0.01, 0.2, 0.4)]
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[-1]


def test_the_best_spec_is_one_that_parses_and_is_as_good_as_it_says():
    choice = choose(A, [(1, 1.0), (8, 1.2), (32, 1.5)], draft=0.1)
    builder = trees.parse(choice.spec)
    widths = tuple(int(w) for w in choice.spec.split("x"))
    tokens = expected_tokens(branching_paths(widths), A)
    import numpy as np

    seconds = builder.max_depth * 0.1 + np.interp(builder.num_nodes, [1, 8, 32], [1.0, 1.2, 1.5])
    assert choice.spec_speedup == pytest.approx(tokens / seconds)
    assert choice.spec_speedup <= choice.speedup + 1e-9 or builder.num_nodes not in (8, 32)
