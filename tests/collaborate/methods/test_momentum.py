"""Depths and choices by hand, and greedy decoding."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib

from specjax import UsageError, processors
from specjax.collaborate.methods.momentum import choose_candidate, depths

LARGE = lib.history(1)


def test_depths_by_hand():
    a, b, c, d = range(4)
    tokens = jnp.array([[a, b, a, c, c, c, c], [a, b, c, d, d, d, d], [a, b, c, d, a, b, c]])
    candidates = jnp.array([[b, c, a], [a, d, b], [d, a, b]])
    length = jnp.array([3, 3, 7])
    # "a b" is there, c is not, a is; nothing of "c d"; "a b c d" is there, of "c a" only "a"
    assert depths(tokens, length, candidates).tolist() == [[2, 0, 1], [1, 0, 1], [4, 1, 1]]
    long = jnp.array([[*range(8), *range(7)]])
    assert depths(long, jnp.array([15]), jnp.array([[7]])).tolist() == [[5]]  # of 8


def test_choices_by_hand():
    p, depth = jnp.array([[0.6, 0.35], [0.6, 0.35], [0.3, 0.29]]), jnp.array([[2, 0], [0, 0], [1, 0]])
    assert choose_candidate(p, depth, jnp.float32(0.2)).tolist() == [1, 0, 1]
    assert choose_candidate(p, depth, jnp.float32(0.0)).tolist() == [0, 0, 0]


def test_without_resistance_it_is_greedy():
    assert lib.run("momentum", alpha=0.0).to_lists() == lib.plain(LARGE)
    assert lib.run("momentum", k=1).to_lists() == lib.plain(LARGE)


def test_text_is_that_of_the_loop_by_hand():
    result, other = lib.run("momentum", max_new_tokens=40), 0
    for row, prompt in enumerate(lib.PROMPTS):
        text = list(prompt)
        for _ in range(40):
            logits = lib.table_logits(LARGE, text).astype(np.float64)
            p = np.exp(logits) / np.exp(logits).sum()
            best = np.argsort(-p, kind="stable")[:5]
            depth = [max((n for n in range(1, 6) if occurs([*text, v][-n:], text)), default=0) for v in best]
            score = p[best] - 0.2 * np.array(depth)
            choice = 0 if depth[0] == 0 else int(score.argmax())
            text.append(int(best[choice]))
            other += choice > 0
        assert result.to_lists()[row] == text[len(prompt) :]
    assert other > 10


def occurs(part, text):
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r"temperature must be 0, as this method draws no token, not 0\.7"):
        lib.run("momentum", temperature=0.7)
    with pytest.raises(UsageError, match="top_k would change the token that this method chooses"):
        lib.run("momentum", top_k=3)
    with pytest.raises(UsageError, match="processors would change the token that this method chooses"):
        lib.run("momentum", processors=[processors.repetition(2.0)])
    with pytest.raises(UsageError, match="k must be from 1 to the vocabulary, not 17"):
        lib.run("momentum", k=17)
