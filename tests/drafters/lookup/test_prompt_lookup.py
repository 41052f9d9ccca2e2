"""The card's hand-worked drafts (Prompt lookup, A1)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import markov

from specjax import UsageError, decode
from specjax.drafters import prompt_lookup
from specjax.types import Context


def draft(text, **options):
    """Return the drafted tokens for one text."""
    drafter = prompt_lookup(**({"min_ngram": 1} | options))
    tokens = jnp.zeros((1, 64), jnp.int32).at[0, : len(text)].set(jnp.array(text))
    context = Context(tokens, jnp.array([len(text)]))
    tree, _ = drafter.propose((), None, (), context, jnp.array([99]))
    assert tree.tokens[0, 0] == text[-1]
    assert tree.logits is None
    valid = np.asarray(tree.valid[0])
    assert (np.diff(valid.astype(int)) <= 0).all()
    return tree.tokens[0][valid].tolist()[1:]


TEXT = [5, 1, 2, 3, 9, 1, 2, 3]


@pytest.mark.parametrize("mode", ["latest", "reference"])
def test_full_continuation(mode):
    assert draft(TEXT, num_tokens=2, mode=mode) == [9, 1]
    assert draft([4, 1, 2] * 6, num_tokens=3, mode=mode) == [4, 1, 2]
    assert draft([1, 2, 3, 4], num_tokens=3, mode=mode) == []


def passes_on_abc(times, drafter):
    """Return the passes for 20 tokens, for a prompt with `times` repetitions of abc that the target continues."""
    rows = np.full((3, 3), 1e-6, np.float32)
    rows[np.arange(3), (np.arange(3) + 1) % 3] = 1.0
    result = decode(markov(rows), drafter, [[0, 1, 2] * times], key=jax.random.key(0), max_new_tokens=20)
    assert result.to_lists()[0] == [i % 3 for i in range(20)]
    return int(result.stats.target_passes[0])


@pytest.mark.parametrize("mode", ["latest", "reference"])
def test_a_periodic_text_gives_four_tokens_per_pass(mode):
    assert passes_on_abc(6, prompt_lookup(3, mode=mode)) == 5


@pytest.mark.parametrize(("mode", "passes"), [("latest", 4), ("reference", 5)])
def test_while_the_text_is_short_only_cut_continuations_help(mode, passes):
    """Compare with a hand computation: 4 + 6 + 6 + 4 tokens; the reference gives 1 + 1 + 6 + 6 + 6."""
    assert passes_on_abc(2, prompt_lookup(5, mode=mode)) == passes


def test_cut_continuation():
    assert draft(TEXT, num_tokens=5, mode="reference") == []
    assert draft(TEXT, num_tokens=5) == [9, 1, 2, 3]


def test_prefers_the_latest_full_match_of_the_longest_ngram():
    text = [1, 2, 7, 7, 1, 2, 8, 8, 2, 9, 9, 1, 2]
    assert draft(text, num_tokens=2) == [8, 8]
    assert draft(text, num_tokens=2, mode="reference") == [7, 7]
    assert draft(text, num_tokens=2, max_ngram=1) == [9, 9]
    assert draft([3, 5, 4, 5], num_tokens=2, min_ngram=2) == []


def reference(text, k, max_ngram, mode):
    """Compute the draft in plain Python, from the card."""
    length = len(text)
    for n in range(min(max_ngram, length - 1), 0, -1):
        starts = [i + n for i in range(length - n) if text[i : i + n] == text[length - n :]]
        if mode == "reference":
            starts = [s for s in starts if s + k <= length and s < length - n]
            if starts:
                return text[starts[0] : starts[0] + k]
        elif starts:
            full = [s for s in starts if s + k <= length]
            start = full[-1] if full else starts[0]
            return text[start : start + k]
    return []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=20), st.sampled_from(["latest", "reference"]))
def test_equals_plain_python(text, mode):
    assert draft(text, num_tokens=4, mode=mode) == reference(text, 4, 3, mode)


def test_limit_and_options():
    tokens = jnp.array([[1, 2, 1, 2, 1, 2, 1, 2]])
    tree, _ = prompt_lookup(4, min_ngram=1).propose((), None, (), Context(tokens, jnp.array([8])), jnp.array([2]))
    assert tree.valid[0].tolist() == [True, True, True, False, False]
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        prompt_lookup(0)
    with pytest.raises(UsageError, match="min_ngram must be from 1 to max_ngram"):
        prompt_lookup(3, min_ngram=4)
