"""The card's hand-worked trees (REST, A7)."""

import functools

import jax
import jax.numpy as jnp
import pytest
from toy import tiny_llama

from specjax import UsageError, decode
from specjax.datastore import from_documents
from specjax.drafters import autoregressive, rest
from specjax.types import Context

CARD = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 6]
TWO_TOKENS = {"num_nodes": 5, "depth": 2, "max_span": 5}


@functools.cache
def index():
    return from_documents([CARD, [4]], 10).to_device()


def proposed(text, limit=9, **options):
    """Tokens and parents of the valid nodes."""
    drafter = rest(index(), **options)
    tokens = jnp.array([text + [0] * (8 - len(text))])
    propose = jax.jit(drafter.propose)
    tree, _ = propose(drafter.params, None, (), Context(tokens, jnp.array([len(text)])), jnp.array([limit]))
    count = int(tree.valid[0].sum())
    assert tree.tokens.shape == (1, drafter.num_nodes)
    assert tree.valid[0].tolist() == [True] * count + [False] * (drafter.num_nodes - count)
    return tree.tokens[0, :count].tolist(), tree.parents[0, :count].tolist()


def test_the_cards_tree():
    assert proposed([1, 2, 3], **TWO_TOKENS) == ([3, 4, 5, 6, 9, 9], [-1, 0, 0, 1, 1, 2])
    assert proposed([1, 2, 3], limit=1, **TWO_TOKENS) == ([3, 4, 5], [-1, 0, 0])
    assert proposed([1, 2, 3], limit=0, **TWO_TOKENS) == ([3], [-1])


def test_two_nodes_keep_the_heaviest_and_the_smaller_id():
    two = {"num_nodes": 2, "depth": 2, "max_span": 3}
    assert proposed([1, 2, 3], **two) == ([3, 4, 5], [-1, 0, 0])
    assert proposed([4, 9, 1, 2, 3], **two) == ([3, 4, 5], [-1, 0, 0])  # no longer span is looked for
    assert proposed([4, 9], **two) == ([9, 1, 2], [-1, 0, 1])


def test_the_longest_span_alone_counts():
    assert proposed([9, 1, 2, 3], **TWO_TOKENS) == ([3, 4, 5, 6, 9], [-1, 0, 0, 1, 2])  # not the first "1 2 3"
    assert proposed([4, 9, 1, 2, 3], **TWO_TOKENS) == ([3, 5, 9], [-1, 0, 1])


def test_empty_hits():
    assert proposed([9, 4], **TWO_TOKENS) == ([4], [-1])
    assert proposed([4], **TWO_TOKENS) == ([4], [-1])  # shorter than the shortest span
    assert proposed([4, 6], **TWO_TOKENS) == ([6], [-1])  # only at a document's end, and not across it


def test_a_corpus_of_the_targets_own_text_is_accepted_in_blocks():
    target, prompts = tiny_llama(), [[1, 2, 3], [9, 8]]
    options = {"key": jax.random.key(0), "max_new_tokens": 33}
    plain = decode(target, autoregressive(), prompts, **options).to_lists()
    texts = [prompt + new for prompt, new in zip(prompts, plain, strict=True)]
    ours = decode(
        target,
        rest(from_documents(texts, 64).to_device(), num_nodes=6, depth=6, max_span=4, num_paths=4),
        prompts,
        **options,
    )
    assert ours.to_lists() == plain
    assert ours.stats.target_passes.max() <= 6  # at most 7 tokens each


def test_bad_settings():
    with pytest.raises(UsageError, match="num_nodes, depth and num_paths must be at least 1, not 0"):
        rest(index(), num_nodes=0)
    with pytest.raises(UsageError, match="min_span must be from 1 to max_span"):
        rest(index(), min_span=17)
