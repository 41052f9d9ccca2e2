"""Tests of one quantity, computed three ways: suffix automaton, vectorised match lengths, suffix array (SAM-Decoding,
A2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suffix_automaton import SuffixAutomaton

from specjax.retrieval.datastore import from_documents
from specjax.retrieval.suffixes import last_tokens, match_length


def matched(tokens, length, longest):
    """Lengths of the matches of a text's end within it, int32[B, L]."""
    return match_length(tokens, length - 1, last_tokens(tokens, length, longest))


def fed(tokens):
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.feed(token)
    return automaton


@pytest.mark.parametrize(
    ("text", "match", "end", "follows"),
    [([1, 2, 3, 4, 5, 1, 2, 3], 3, 3, [4, 5, 1]), ([7, 1, 2, 8, 9, 1, 2, 8], 3, 4, [9, 1, 2])],
)
def test_the_cards_matches(text, match, end, follows):
    automaton = fed(text)
    assert (automaton.match, automaton.end) == (match, end)
    assert automaton.text[automaton.end : automaton.end + 3] == follows
    assert int(matched(jnp.array([text]), jnp.array([len(text)]), 8)[0, end - 1]) == match


def test_match_lengths_at_every_prefix_of_random_texts():
    size = 40
    lengths = jax.jit(jax.vmap(lambda text, n: matched(text[None], n[None], size)[0], (None, 0)))
    for seed in range(4):
        text = np.random.default_rng(seed).integers(0, 3, size)
        ml = np.asarray(lengths(jnp.asarray(text), jnp.arange(1, size + 1)))
        automaton = SuffixAutomaton()
        for n, token in enumerate(text.tolist()):
            automaton.feed(token)
            assert automaton.match == ml[n].max()
            if automaton.match:
                assert automaton.end == ml[n].argmax() + 1


def test_the_longest_match_in_a_corpus():
    """The static corpus of SAM: a suffix array finds what walking the automaton of the corpus finds."""
    rng = np.random.default_rng(0)
    corpus, text = rng.integers(0, 3, 60).tolist(), rng.integers(0, 3, 40).tolist()
    store = from_documents([corpus], 3)
    automaton = fed(corpus)
    state, match = 0, 0
    for n, token in enumerate(text, 1):
        state, match = automaton.transfer(state, match, token)
        result = store.search(text[:n], max_span=n, min_span=1)
        assert result.span == match
