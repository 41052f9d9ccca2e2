"""The card's hand-worked trees (REST, A7)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from toy import tiny_llama

from specjax import UsageError, decode, make_drafter, parallel, shard
from specjax.drafters import autoregressive, rest
from specjax.retrieval.datastore import from_documents
from specjax.types import Context

CARD = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 6]
TWO_TOKENS = {"num_nodes": 5, "depth": 2, "max_span": 5}


@functools.cache
def index():
    return from_documents([CARD, [4]], 10).to_device()


def proposed(text, limit=9, **options):
    """Return tokens and parents of the valid nodes."""
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


@pytest.mark.parametrize("shape", [(2, 4), exhaustive((1, 8))])
def test_an_index_spread_over_the_targets_mesh(shape):
    """Compare with the text of plain decoding, and with the drafts of the whole index."""
    over = parallel.mesh(*shape)
    target, prompts = tiny_llama(num_heads=8, num_kv_heads=8), [[1, 2, 3], [9, 8], [5], [7, 7, 7]]
    options = {"key": jax.random.key(0), "max_new_tokens": 33}
    plain = decode(target, autoregressive(), prompts, **options).to_lists()
    texts = [prompt + new for prompt, new in zip(prompts, plain, strict=True)]
    store = from_documents([*texts, *(row[9:] + row[:20] for row in texts)], 64, shard_tokens=40)
    small, sharded = {"num_nodes": 6, "depth": 6, "max_span": 4, "num_paths": 4}, shard(target, over)
    local, spread = (make_drafter("rest", model, datastore=store, **small) for model in (target, sharded))
    each = -(-len(store.shards) // shape[1])
    assert len(store.shards) > 4 and {p.data.shape for p in spread.params.tokens.addressable_shards} == {(each, 40)}

    context = lambda model: Context(jnp.asarray([text[:20] for text in texts]), jnp.array([20, 9, 13, 5]))
    trees = [jax.jit(d.propose)(d.params, None, (), context(d), jnp.full(4, 6))[0] for d in (local, spread)]
    for one, eight in zip(jax.tree.leaves(trees[0]), jax.tree.leaves(trees[1]), strict=True):
        np.testing.assert_array_equal(one, eight)
    assert trees[0].valid.sum() > 12

    alone, ours = decode(target, local, prompts, **options), decode(sharded, spread, prompts, **options)
    assert alone.to_lists() == ours.to_lists() == plain
    for one, eight in zip(jax.tree.leaves(alone.stats), jax.tree.leaves(ours.stats), strict=True):
        np.testing.assert_array_equal(one, eight)
    assert ours.stats.accepted.min() > 9


def test_bad_settings():
    with pytest.raises(UsageError, match="num_nodes, depth and num_paths must be at least 1, not 0"):
        rest(index(), num_nodes=0)
    with pytest.raises(UsageError, match="min_span must be from 1 to max_span"):
        rest(index(), min_span=17)
