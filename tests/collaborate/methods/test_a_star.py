"""Searches by hand, and plain sampling where there is nothing to choose from."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import exhaustive

from specjax import UsageError, decode, drafters
from specjax.collaborate.methods.a_star import Nodes, costs, distinct, keep_best
from specjax.numerics.sampling import fold_in

LARGE = lib.history(1)


def grow(nodes, g, rewards, depth, names, frontier=4):
    """The frontier after its first node has been expanded to nodes with these names, their only tokens."""
    count = len(rewards)
    f, g = costs(jnp.array([[g]]), jnp.array([rewards]), jnp.array([[depth]]), jnp.zeros((1, count), bool), 0.0)
    ones, no = jnp.ones((1, count), jnp.int32), jnp.zeros((1, count), bool)
    children = Nodes(f, g, ones * depth, jnp.array(names)[None, :, None], ones, no, no)
    remaining = nodes._replace(f=nodes.f.at[:, 0].set(jnp.inf))
    return keep_best(jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), remaining, children), frontier)


def test_the_order_of_the_card():
    """Rewards .9 of A (1), .8 of B (2), .5 of A's child (3), .8 of B's (4), without a guess."""
    zero, no = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), bool)
    nodes = Nodes(jnp.array([[0, jnp.inf, jnp.inf, jnp.inf]]), jnp.zeros((1, 4)), zero, zero[..., None], zero, no, no)
    popped = []
    for rewards, names in (([0.8, 0.9], [2, 1]), ([0.5], [3]), ([0.8], [4]), ([0.1], [5])):
        nodes = grow(nodes, nodes.g[0, 0], rewards, len(popped) + 1, names)
        popped.append((int(nodes.tokens[0, 0, 0]), float(nodes.f[0, 0])))
    assert [name for name, _ in popped] == [1, 2, 4, 3]
    np.testing.assert_allclose([f for _, f in popped], [0.105, 0.223, 0.446, 0.799], atol=6e-4)


def test_costs_by_hand():
    f, g = costs(
        jnp.array([1.0, 1.0, 1.0, 0.0]), jnp.exp(jnp.array([-0.5, -0.5, -0.5, -jnp.inf])), jnp.array([2, 9, 2, 8]),
        jnp.array([False, False, True, False]), 8.0,
    )  # fmt: skip
    np.testing.assert_allclose(g[:3], 1.5, rtol=1e-6)
    np.testing.assert_allclose(f[:3], [1.5 + 6 * 0.5, 1.5, 1.5], rtol=1e-6)
    assert np.isfinite(f[3]) and f[3] > 60


def test_of_equal_children_one_stays():
    tokens = jnp.array([[[1, 5, 6, 0], [1, 5, 7, 0], [1, 5, 6, 9], [1, 5, 6, 6]]])  # behind the end anything
    assert distinct(tokens, jnp.array([[3, 3, 3, 4]]), jnp.array([1])).tolist() == [[True, True, False, True]]


def searched(row, *, k=3, frontier=4, expected=3.0, budget=6, max_step_tokens=5, eos=None):
    """(text, expansions) by a heap, over steps as plain decoding draws them."""
    prompt = lib.PROMPTS[row]
    limit, order = len(prompt) + 12, 0
    is_finished = lambda text: len(text) == limit or (text[-1] == eos and len(text) > len(prompt))
    nodes = [(0.0, order, 0.0, 0, list(prompt))]
    for expansion in range(budget):
        if is_finished(nodes[0][4]):
            break
        _, _, g, depth, text = heapq.heappop(nodes)
        keys = [fold_in(fold_in(lib.KEYS[row], expansion), child) for child in range(k)] if k > 1 else [lib.KEYS[row]]
        keys += keys[:1] * (3 - k)
        drawn = decode(LARGE, "autoregressive", [text] * 3, key=jnp.stack(keys), max_new_tokens=12, temperature=0.8)
        children = []
        for tokens in drawn.to_lists()[:k]:
            room = min(max_step_tokens, limit - len(text))
            end = next((n + 1 for n, token in enumerate(tokens[:room]) if token in (*lib.ENDS, eos)), room)
            child, last = text + tokens[:end], tokens[end - 1]
            if child in children:
                continue
            children.append(child)
            cost, order = -np.log(0.2 + 0.5 * (last % 2) + 0.25 * last / lib.VOCAB), order + 1
            guess = 0.0 if is_finished(child) else cost * max(0, expected - depth - 1)
            heapq.heappush(nodes, (g + cost + guess, order, g + cost, depth + 1, child))
        nodes = heapq.nsmallest(frontier, nodes)
    else:
        expansion = budget
    best = min([node for node in nodes if is_finished(node[4])] or nodes)
    return best[4][len(prompt) :], expansion, is_finished(best[4])


@pytest.mark.parametrize("options", [
    {}, {"budget": 64, "expected": 0.0, "eos": 5}, {"budget": 2}, exhaustive({"frontier": 1, "budget": 64}),
    exhaustive({"budget": 64, "eos": 5}), exhaustive({"k": 2, "frontier": 2, "budget": 64}),
])  # fmt: skip
def test_the_text_is_that_of_a_search_by_hand(options):
    """An expected number of 0 is the uniform-cost order, a frontier of 1 the greedy search."""
    result = lib.run("a_star", **options, **({} if "eos" in options else {"eos": 99}))
    for row in range(3):
        text, expansions, finished = searched(row, **options)
        assert result.to_lists()[row] == text
        assert (result.log.expansions[row], result.log.finished[row]) == (expansions, finished)


def test_one_step_per_expansion_is_plain_sampling():
    result = lib.run("a_star", k=1, frontier=1, budget=12)
    assert result.to_lists() == lib.plain(LARGE, temperature=0.8)
    assert result.log.tokens.tolist() == [12, 12, 12] and result.log.finished.all()


@pytest.mark.exhaustive
def test_with_drafts_the_search_is_the_same():
    drafted = lib.run("a_star", drafter=drafters.two_model(lib.alike(1), 3), sampling="coupled")
    assert drafted.to_lists() == lib.run("a_star").to_lists()


def test_what_is_wrong_is_one_sentence():
    result = lib.run("a_star", k=1, frontier=1, reward=too_much)
    assert list(result.failures) == [1] and "no number from 0 to 1" in result.failures[1]
    assert [bool(text) for text in result.to_lists()] == [True, False, True]
    with pytest.raises(UsageError, match=r"temperature must be above 0, not 0\.0: steps drawn at 0 are equal"):
        lib.run("a_star", temperature=0.0)
    with pytest.raises(UsageError, match="frontier must be at least 1, not 0"):
        lib.run("a_star", frontier=0)


def too_much(tokens, start, length, ended):
    return jnp.where(jnp.arange(len(length)) == 1, 1.5, 1.0)
