"""The policy of the highest rate, against the card's numbers, all policies there are, and a walk by chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tiers import those

from specjax import UsageError
from specjax.trees.shape_search.dynamic_sparse import SparseTree, dynamic_sparse, evaluate

FLAT = (1.0,) * 64
SAMPLES = ((0.6, 0.2), (0.4, 0.1))
OF_THE_CARD = (
    SparseTree((), (2,)),
    SparseTree(((0,), (1,)), (0, 2, 1)),
    SparseTree(((0,), (1,), (0, 0)), (0, 1, 1, 2)),
)


def test_the_card_s_chain_of_states():
    rates = evaluate(OF_THE_CARD, SAMPLES, FLAT[:3])
    np.testing.assert_allclose(rates.shares, [0.166667, 0.343137, 0.490196], atol=1e-6)
    np.testing.assert_allclose(rates.accepted, [0, 0.8, 1.04], atol=1e-9)
    assert rates.expected == pytest.approx(0.784314, abs=1e-6)
    assert rates.rate == pytest.approx(1 + rates.expected)  # passes that cost 1 each


def test_a_prompt_less_and_its_round_without_guesses():
    rates = evaluate((SparseTree((), (1,)), SparseTree(((0,), (1,)), (0, 1, 0))), ((0.6, 0.2),), FLAT[:2])
    np.testing.assert_allclose(rates.shares, [0.714286 - 3 / 7, 5 / 7], atol=1e-6)
    assert rates.expected == pytest.approx(0.571429, abs=1e-6)


def test_guesses_that_hit_by_chance_give_these_rates():
    rng, state, accepted = np.random.default_rng(0), 0, 0
    visits = np.zeros(3)
    for _ in range(10_000):
        shape, path = OF_THE_CARD[state], ()
        visits[state] += 1
        while len(path) < state:  # which rank is right, or none
            right = int(np.searchsorted(np.cumsum(SAMPLES[len(path)]), rng.random()))
            if (*path, right) not in shape.paths:
                break
            path = (*path, right)
        accepted += len(path)
        state = dict(zip(((), *shape.paths), shape.prompts, strict=True))[path]
    np.testing.assert_allclose(visits / 10_000, [0.1667, 0.3431, 0.4902], atol=0.02)
    assert accepted / 10_000 == pytest.approx(0.7843, abs=0.03)


def all_shapes(state: int, ranks: int, prompts: int, room: int, copies: int):
    """Every shape of at most `room` tokens."""
    nodes = [path for depth in range(1, state + 1) for path in itertools.product(range(ranks), repeat=depth)]
    for is_in_shape in itertools.product((False, True), repeat=len(nodes)):
        paths = tuple(path for path, is_in in zip(nodes, is_in_shape, strict=True) if is_in)
        if any(path[:-1] and path[:-1] not in paths for path in paths) or 1 + len(paths) > room:
            continue
        for counts in itertools.product(range(prompts + 1), repeat=1 + len(paths)):
            shape = SparseTree(paths, counts)
            if shape.size(copies) <= room and (state or counts[0]):
                yield shape


CASES = {
    "flat": (((0.6, 0.2),), FLAT[:5], 1),
    "steep": (((0.6, 0.2),), (1.0, 1.1, 1.5, 2.2, 3.0), 1),
    "two distances": (SAMPLES, (1.0, 1.1, 1.15, 1.2, 1.5), 1),
    "two distances, flat": (SAMPLES, FLAT[:5], 1),
    "unsure": (((0.2, 0.1), (0.1, 0.1)), (1.0, 1.3, 1.4, 1.5, 1.6), 1),
    "a later rank is better": (((0.1, 0.5), (0.3, 0.6)), (1.0, 1.05, 1.1, 1.2, 1.3), 1),
    "two copies": (((0.7, 0.2),), (1.0, 1.0, 1.1, 1.2, 1.3, 1.4), 2),
}


@pytest.mark.parametrize("name", those({"steep", "two distances", "two copies"}, CASES))
def test_no_policy_has_a_higher_rate(name):
    accuracy, costs, copies = CASES[name]
    rates, shapes = dynamic_sparse(accuracy, costs, copies)
    cost = lambda shape: costs[shape.size(copies) - 1]
    assert all(shape.size(copies) <= len(costs) for shape in shapes)
    states = len(accuracy)
    every = [list(all_shapes(s, len(accuracy[0]), states, len(costs), copies)) for s in range(states + 1)]
    best = max(evaluate(policy, accuracy, [*map(cost, policy)]).rate for policy in itertools.product(*every))
    assert rates.rate == pytest.approx(best, rel=1e-6)
    assert rates.rate == pytest.approx(evaluate(shapes, accuracy, [*map(cost, shapes)]).rate)


def test_the_tree_follows_the_costs():
    """The tree is small where tokens are dear, and fills the pass where they are cheap; it stays below a step."""
    accuracy = ((0.5, 0.2, 0.1, 0.05), (0.3, 0.15, 0.1, 0.05), (0.2, 0.1, 0.05, 0.05))
    sizes = lambda costs: [shape.size() for shape in dynamic_sparse(accuracy, tuple(costs))[1]]
    tokens = np.arange(1, 33)
    cheap, dear = sizes(1 + 0.001 * tokens), sizes(1 + 0.1 * tokens)
    step = sizes(np.where(tokens <= 12, 1, 3) + 0.001 * tokens)
    assert max(cheap) == 32 and max(dear) < 12 and max(step) == 12
    rate = lambda costs: dynamic_sparse(accuracy, tuple(costs))[0].rate
    assert rate(np.ones(32)) > rate(np.ones(16)) > rate(np.ones(8)) > 1


@pytest.mark.parametrize(
    ("accuracy", "costs", "words"),
    [
        ((), FLAT, "accuracy must be rows"),
        (((0.7, 0.4),), FLAT, "sum to at most 1"),
        (((0.5,),), FLAT[:2], "needs 3 tokens .* up to 2"),
    ],
)
def test_what_cannot_be_built_is_refused(accuracy, costs, words):
    with pytest.raises(UsageError, match=words):
        dynamic_sparse(accuracy, costs)
