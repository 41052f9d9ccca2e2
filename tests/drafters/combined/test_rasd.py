"""The card's worked example of fusion (RASD, A8)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import those
from toy import tiny_llama

from specjax import UsageError, decode
from specjax.drafters import (
    autoregressive,
    early_exit,
    prompt_lookup,
    rasd,
    rest,
    suffix,
    token_recycling,
    two_model,
)
from specjax.retrieval.datastore import from_documents
from specjax.trees import operations, parse
from specjax.trees.operations import fuse, keep_likely
from specjax.types import TokenTree
from specjax.verifiers import greedy

ROOT, A, B, C, D, E, F, G, H = range(9)


def from_paths(paths, nodes):
    """Return a trie in breadth-first order, padded to `nodes`."""
    node_of = {(): 0}
    tokens, parents = [ROOT], [-1]
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        for path in paths:
            if len(path) >= depth and tuple(path[:depth]) not in node_of:
                node_of[tuple(path[:depth])] = len(tokens)
                tokens.append(path[depth - 1])
                parents.append(node_of[tuple(path[: depth - 1])])
    more = nodes - len(tokens)
    assert more >= 0
    return TokenTree(
        jnp.array([tokens + [0] * more]),
        jnp.array([parents + [0] * more]),
        jnp.arange(nodes)[None] < len(tokens),
    )


def paths_of(tree):
    """Return all paths of valid nodes as a set of token tuples."""
    path_of = {0: ()}
    for i in range(1, tree.tokens.shape[1]):
        if tree.valid[0, i]:
            path_of[i] = (*path_of[int(tree.parents[0, i])], int(tree.tokens[0, i]))
    return set(path_of.values())


def test_the_cards_fusion():
    drafted = from_paths([[A, B], [C]], 4)
    retrieved = from_paths([[A, B, D, E], [C, F], [G, H]], 9)
    fused, order = fuse(drafted, keep_likely(drafted, retrieved))
    count = int(fused.valid.sum())
    # The card lists the nodes by depth; here those of the draft tree stand first, in their own order.
    assert fused.tokens[0, :count].tolist() == [ROOT, A, C, B, F, D, E]
    assert fused.parents[0, :count].tolist() == [-1, 0, 0, 1, 2, 3, 5]
    assert order[0, :4].tolist() == [0, 1, 2, 3]


def test_limits():
    drafted, nothing = from_paths([[A, B], [C]], 4), from_paths([], 3)
    retrieved = from_paths([[A, D], [G]], 5)
    fused, _ = fuse(drafted, nothing)
    for ours, theirs in zip(operations.cut(fused, 4)[:3], drafted[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert paths_of(fuse(from_paths([], 2), retrieved)[0]) == paths_of(retrieved)
    assert paths_of(keep_likely(nothing, retrieved)) == {()}


@settings(max_examples=40, deadline=None)
@given(*[st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), max_size=3)] * 2, st.integers(0, 99))
def test_the_union_accepts_what_the_better_of_the_two_does(ours, theirs, seed):
    first, second = from_paths(ours, 10), from_paths(theirs, 10)
    fused, _ = fuse(first, second)
    assert paths_of(fused) == paths_of(first) | paths_of(second)
    rule, keys = jax.jit(greedy), jax.random.split(jax.random.key(0), 1)
    # The same prefix gives the same logits, whatever node it is.
    distribution = np.random.default_rng(seed).normal(size=(4, 4, 4, 4))

    def accepted(tree):
        logits = np.zeros((1, tree.tokens.shape[1], 4), np.float32)
        path = {0: ()}
        for i in range(1, tree.tokens.shape[1]):
            if tree.valid[0, i]:
                path[i] = (*path[int(tree.parents[0, i])], int(tree.tokens[0, i]))
        for i, spelled in path.items():
            logits[0, i] = distribution[tuple((*spelled, 0, 0, 0)[:3])] + len(spelled)
        return int(rule(keys, tree, logits).num_nodes[0])

    assert accepted(fused) == max(accepted(first), accepted(second))


def test_with_a_draft_model():
    """The draft model keeps in step though retrieval adds tokens it never saw: with the target as draft every round
    accepts its whole tree."""
    target, prompts = tiny_llama(), [[1, 2, 3, 1, 2, 3, 1], [5]]
    run = lambda drafter: decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=25)
    plain = run(autoregressive())
    itself = run(rasd(target, prompt_lookup(4, min_ngram=1), "top:1x1x1x1"))
    alone = run(two_model(target, 4))
    assert itself.to_lists() == plain.to_lists()
    assert (itself.stats.target_passes <= alone.stats.target_passes).all()
    other = run(rasd(tiny_llama(seed=1, layers=1), suffix(5, min_match=1), "top:2x1", prune=False))
    assert other.to_lists() == plain.to_lists()


@pytest.mark.parametrize("base", those(["early_exit"], ["token_recycling", "early_exit", "rest"]))
def test_any_drafter_of_point_mass_trees_can_be_fused(base):
    """Decode with and without pruning; the text equals the target's."""
    target, prompts = tiny_llama(), [[1, 2, 3, 1, 2, 3, 1], [5]]
    run = lambda drafter: decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=25)
    plain = run(autoregressive())
    corpus = from_documents([p + row for p, row in zip(prompts, plain.to_lists(), strict=True)], 64).to_device()
    drafters = {
        "token_recycling": token_recycling(64, num_nodes=7, read_prompt=True),
        "early_exit": early_exit(target, 1, tree=parse("top:2x1")),
        "rest": rest(corpus, num_nodes=7, min_span=1),
    }
    fused = run(rasd(drafters[base], suffix(5, min_match=1), prune=False))
    assert fused.to_lists() == plain.to_lists()
    assert int(fused.stats.accepted.sum()) > 0
    if base == "rest":  # it knows the text
        assert (fused.stats.target_passes <= run(drafters[base]).stats.target_passes).all()
    pruned = run(rasd(drafters[base], suffix(5, min_match=1)))
    assert pruned.to_lists() == plain.to_lists()


def test_what_the_fused_drafters_learn_is_kept():
    target, prompts = tiny_llama(), [[1, 2, 3, 1, 2, 3, 1], [5]]
    run = lambda drafter: decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=25)
    first = run(rasd(token_recycling(64, num_nodes=7, read_prompt=True), suffix(5), prune=False))
    second = run(first.drafter)
    assert second.to_lists() == first.to_lists()
    assert int(second.stats.target_passes.sum()) < int(first.stats.target_passes.sum())


def test_bad_settings():
    with pytest.raises(UsageError, match="tree must be grown without randomness"):
        rasd(tiny_llama(), tree="2x1")
    with pytest.raises(UsageError, match="the same drafter twice"):
        rasd(suffix(5), suffix(5))
    with pytest.raises(UsageError, match="draft must be a model, or a drafter without randomness"):
        rasd(two_model(tiny_llama()))
    with pytest.raises(UsageError, match="retrieval must be a drafter without randomness"):
        rasd(tiny_llama(), two_model(tiny_llama()))
