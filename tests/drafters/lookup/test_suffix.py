"""The card's hand-worked matches (SAM-Decoding, A2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import compiled, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import autoregressive, suffix, token_recycling, two_model
from specjax.retrieval.datastore import from_documents
from specjax.retrieval.suffixes import last_tokens, match_length
from specjax.types import Context


def draft(text, limit=99, **options):
    """Return the drafted tokens for one text."""
    tokens = jnp.zeros((1, 64), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    drafter = suffix(**options)
    context = Context(tokens, jnp.array([len(text)]))
    tree, _ = drafter.propose(drafter.params, None, (), context, jnp.array([limit]))
    valid = np.asarray(tree.valid[0])
    assert tree.tokens[0, 0] == text[-1]
    assert (np.diff(valid.astype(int)) <= 0).all()
    return tree.tokens[0][valid].tolist()[1:]


@pytest.mark.parametrize("occurrence", ["latest", "earliest"])
def test_the_cards_chains(occurrence):
    # The text of the card and its root; the chain of the card starts with the root.
    assert draft([1, 2, 3, 4, 5, 1, 2, 3], num_tokens=3, occurrence=occurrence) == [4, 5, 1]
    assert draft([7, 1, 2, 8, 9, 1, 2, 8], num_tokens=2, occurrence=occurrence) == [9, 1]


def test_a_shorter_match_with_a_full_continuation_is_preferred():
    text = [1, 2, 3, 7, 8, 9, 4, 2, 3, 5, 1, 2, 3]  # "1 2 3" at 0, "2 3" at 7: both leave 4 tokens
    assert draft(text, num_tokens=4) == [7, 8, 9, 4]
    text = [2, 3, 7, 8, 9, 9, 1, 2, 3, 5, 1, 2, 3]  # after "1 2 3" only 4 tokens are left
    assert draft(text, num_tokens=5) == [7, 8, 9, 9, 1]
    assert draft(text, num_tokens=4) == [5, 1, 2, 3]
    assert draft([2, 3, 5, 1, 2, 3], num_tokens=9) == [5, 1, 2, 3]  # none is full: what there is


def test_latest_and_earliest_and_thresholds():
    text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
    assert draft(text, num_tokens=2) == [8, 8]
    assert draft(text, num_tokens=2, occurrence="earliest") == [7, 7]
    assert draft(text, num_tokens=2, min_match=3) == []
    assert draft([3, 5, 4, 5], num_tokens=2) == []
    assert draft([3, 5, 4, 5], num_tokens=2, min_match=1) == [4, 5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_match_length_equals_plain_python(text):
    tokens = jnp.zeros((1, 32), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    length = jnp.array([len(text)])
    ours = match_length(tokens, length - 1, last_tokens(tokens, length, 40))[0]
    for i in range(32):
        wanted = 0
        while i < len(text) - 1 and wanted <= i and text[i - wanted] == text[len(text) - 1 - wanted]:
            wanted += 1
        assert ours[i] == wanted


def test_the_fallback_drafts_where_nothing_recurs():
    """Draft with an infinite threshold, which gives the fallback's drafts (card, d), and with a long suffix, a copy."""
    target, recycling = tiny_llama(), token_recycling(64, num_nodes=7)
    run = lambda drafter: decode(target, drafter, [[1, 2, 3], [9]], key=jax.random.key(0), max_new_tokens=24)
    never = run(suffix(5, min_match=16, fallback=recycling))
    alone = run(recycling)
    assert never.to_lists() == alone.to_lists()
    np.testing.assert_array_equal(never.stats.target_passes, alone.stats.target_passes)
    drafter = compiled(suffix(3, min_match=2, fallback=recycling))
    context = Context(jnp.array([[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6]]), jnp.array([6, 6]))
    state = drafter.init(drafter.params, context)
    tree, _ = drafter.propose(drafter.params, None, state, context, jnp.array([9, 9]))
    assert tree.tokens[0, :4].tolist() == [2, 3, 4, 1]
    assert tree.valid.sum(1).tolist() == [4, 1]  # nothing recycled yet


CORPUS = [[7, 1, 2, 3, 8, 9, 4], [5, 6]]


@pytest.mark.parametrize(
    ("text", "bias", "drafted"),
    [
        ([4, 1, 2, 3], 0, [8, 9, 4]),  # three tokens in the corpus, none in the text
        ([4, 1, 2, 3], 1, [8, 9, 4]),
        ([4, 1, 2, 3], 2, []),  # they count as one, and two are needed
        ([2, 3, 5, 5, 1, 2, 3], 0, [8, 9, 4]),  # three against two
        ([2, 3, 5, 5, 1, 2, 3], 1, [5, 5, 1]),  # two each: the text's own
        ([4, 5, 6], 0, []),  # nothing follows in its document
        ([4, 9, 4], 0, []),
    ],
)
def test_the_longer_match_of_text_and_corpus_is_copied(text, bias, drafted):
    corpus = from_documents(CORPUS, 10).to_device()
    assert draft(text, num_tokens=3, max_match=4, corpus=corpus, bias=bias) == drafted
    assert draft(text, limit=2, num_tokens=3, max_match=4, corpus=corpus, bias=bias) == drafted[:2]


def test_text_copied_from_a_corpus_is_the_targets():
    """Save passes with a corpus that has the coming text, also if the fallback stores a matrix."""
    target, prompts = tiny_llama(), [[1, 2, 3], [9]]
    run = lambda drafter: decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=24)
    plain = run(autoregressive())
    corpus = from_documents([p + row for p, row in zip(prompts, plain.to_lists(), strict=True)], 64).to_device()
    fallback = token_recycling(64, num_nodes=7)
    copied = run(suffix(5, corpus=corpus, bias=0, fallback=fallback, min_match=3))
    alone = run(suffix(5, fallback=fallback, min_match=3))
    assert copied.to_lists() == alone.to_lists() == plain.to_lists()
    assert (copied.stats.target_passes < alone.stats.target_passes).all()
    again = decode(target, copied.drafter, prompts, key=jax.random.key(0), max_new_tokens=24)  # what it remembers
    assert again.to_lists() == plain.to_lists()


def test_bad_settings():
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        suffix(0)
    with pytest.raises(UsageError, match="min_match must be from 1 to max_match"):
        suffix(min_match=17)
    with pytest.raises(UsageError, match="bias must be at least 0"):
        suffix(bias=-1)
    with pytest.raises(UsageError, match="fallback must be a drafter without randomness"):
        suffix(fallback=two_model(tiny_llama()))
