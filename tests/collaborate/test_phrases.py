"""Counters of phrases against `str.count` in the text itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError
from specjax.collaborate import phrases

PIECES = ["wa", "it", "Wait", " hold", " on", "a", "hold on", "await the", "", "yes", "terday", " CHECK", "ed"]
WORDS = ["wait", "hold on", "yes", "check"]


class Pieces:
    def decode(self, ids):
        return "".join(PIECES[i] for i in ids)


def test_phrases_are_counted_by_substring_whatever_the_tokens_and_the_case():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, len(PIECES), (300, 12))
    start = rng.integers(0, 6, 300)
    end = start + rng.integers(0, 7, 300)
    counter = phrases.count_strings(WORDS, Pieces(), len(PIECES))
    counts = phrases.count(counter, *(jnp.asarray(x, jnp.int32) for x in (tokens, start, end)))
    texts = [Pieces().decode(row[a:b]).lower() for row, a, b in zip(tokens, start, end, strict=True)]
    wanted = [sum(text.count(word) for word in WORDS) for text in texts]
    assert counts.tolist() == wanted and max(wanted) > 2


def test_sequences_of_tokens():
    counter = phrases.count_tokens([[1, 2], [2]], 4)
    tokens = jnp.array([[1, 2, 2, 1], [1, 1, 2, 3]], jnp.int32)
    zero = jnp.zeros((2,), jnp.int32)
    assert phrases.count(counter, tokens, zero, zero + 4).tolist() == [3, 2]
    assert phrases.count(counter, tokens, zero + 1, zero + 3).tolist() == [2, 2]
    assert phrases.count(phrases.count_tokens([], 4), tokens, zero, zero + 4).tolist() == [0, 0]


def test_wrong_phrases_are_one_sentence():
    with pytest.raises(UsageError, match="must not be empty"):
        phrases.count_tokens([[]], 4)
    with pytest.raises(UsageError, match="list of strings"):
        phrases.count_strings("wait", Pieces(), len(PIECES))
