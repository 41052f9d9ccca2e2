"""The card's hand-worked matches (SAM-Decoding, A2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import compiled, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import suffix, token_recycling, two_model
from specjax.suffixes import last_tokens, match_length
from specjax.types import Context


def draft(text, **options):
    """The drafted tokens for one text."""
    tokens = jnp.zeros((1, 64), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    tree, _ = suffix(**options).propose((), None, (), Context(tokens, jnp.array([len(text)])), jnp.array([99]))
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
    """With an infinite threshold every draft is the fallback's (card, d); where a long suffix recurs it is a copy."""
    target, recycling = tiny_llama(), token_recycling(64, num_nodes=7)
    run = lambda drafter: decode(target, drafter, [[1, 2, 3], [9]], key=jax.random.key(0), max_new_tokens=24)
    never = run(suffix(5, min_match=16, fallback=recycling))
    alone = run(recycling)
    assert never.to_lists() == alone.to_lists()
    np.testing.assert_array_equal(never.stats.target_passes, alone.stats.target_passes)
    drafter = compiled(suffix(3, min_match=2, fallback=recycling))
    context = Context(jnp.array([[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6]]), jnp.array([6, 6]))
    tree, _ = drafter.propose((), None, drafter.init((), context), context, jnp.array([9, 9]))
    assert tree.tokens[0, :4].tolist() == [2, 3, 4, 1]
    assert tree.valid.sum(1).tolist() == [4, 1]  # nothing recycled yet


def test_bad_settings():
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        suffix(0)
    with pytest.raises(UsageError, match="min_match must be from 1 to max_match"):
        suffix(min_match=17)
    with pytest.raises(UsageError, match="fallback must be a drafter without randomness"):
        suffix(fallback=two_model(tiny_llama()))
