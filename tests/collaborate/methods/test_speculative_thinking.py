"""Takeovers of models that follow a script, and the small model alone."""

import jax.numpy as jnp
import pytest
import texts as lib
from tiers import exhaustive
from toy import markov, scripted

from specjax import UsageError, drafters
from specjax.collaborate import segments
from specjax.collaborate.methods.speculative_thinking import grow, sentiment, speculative_thinking

SMALL, LARGE = lib.history(0), lib.history(1)


def test_sentiment_by_hand():
    counts = [(0, 0), (1, 1), (2, 1), (0, 3), (1, 0)]
    assert sentiment(*jnp.array(counts).T).tolist() == [0, -1, 1, -1, 1]


def test_without_cues_it_is_the_small_model():
    result = lib.run("speculative_thinking", negative=(), positive=(), verify=(), temperature=0.8)
    assert result.to_lists() == lib.plain(SMALL, temperature=0.8)
    assert (result.share(0) == 1).all() and result.passes[:, 1].tolist() == [0, 0, 0]


def found(text, words):
    return sum(text[i : i + len(word)] == list(word) for word in words for i in range(len(text)))


NEGATIVE = [[4], [7, 11], [1], [2], [12]]


def feeling(tokens):
    positive, negative = found(tokens, [[6]]), found(tokens, [*NEGATIVE, [15]])
    return 1 if positive > negative else -1 if negative else 0


def by_hand(prompt, count, look=3, long=4, patience=2):
    """The authors' loop: the small model draws anew from the delimiter if its look-ahead has no sentiment."""
    text, authors, negatives, length = list(prompt), [], 0, long

    def write(who, limit, ends=()):
        new = lib.greedy((SMALL, LARGE)[who], text, min(limit, count - len(authors)), ends)
        text.extend(new)
        authors.extend([who] * len(new))
        return new

    while len(authors) < count:
        write(0, 512, lib.ENDS)
        if len(authors) == count:
            break
        if negatives >= patience:
            check = [8, 8][: count - len(authors)]
            text.extend(check)
            authors.extend([-1] * len(check))
            write(1, length)
            negatives, patience, length = 0, min(patience + 5, 30), min(length + 25, 200)
            continue
        ahead = lib.greedy(SMALL, text, min(look, count - len(authors)))
        if not feeling(ahead):
            continue
        new = write(1, look)
        negatives += feeling(new) < 0
        if found(new, [[15]]):
            write(1, long)  # which does not grow
    return text[len(prompt) :], authors


@pytest.mark.parametrize("inside", [False, exhaustive(True)])
def test_greedy_text_is_that_of_the_loop_by_hand(inside):
    drafter = drafters.two_model(lib.alike(1), 3) if inside else None
    result = lib.run("speculative_thinking", max_new_tokens=48, drafter=drafter, negative=NEGATIVE)
    checks = 0
    for row, prompt in enumerate(lib.PROMPTS):
        tokens, authors = by_hand(prompt, 48)
        assert result.to_lists()[row] == tokens
        assert result.authors[row].tolist() == authors
        takes = result.log
        written = takes.short[row] + takes.verifying[row] + takes.long[row] + takes.opening[row]
        assert written == authors.count(1)
        checks += authors.count(-1)
    assert checks


DOUBTING = markov(jnp.array([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.8, 0.1, 0.1]]))


def doubts(large, **options):
    """Two models that write one text of 500 tokens; 0 ends a thought and 1 is a doubt of the small model."""
    cues = {"negative": [[1]], "look_ahead": 3} | options
    return speculative_thinking(
        DOUBTING, large, [[0]], key=0, max_new_tokens=500, segmenter=segments.after_any([0], 3), **cues
    )


def test_long_takeovers_grow():
    """Both models always doubt: at the 15th a takeover of 125, at the 20th after that one of 150."""
    result = doubts(scripted([[1] * 1024], 3))
    takes = result.log
    assert takes.long.tolist() == [125 + 150] and takes.patience.tolist() == [25] and takes.length.tolist() == [175]
    assert takes.checks.tolist() == [2] and int(takes.short[0]) + 275 == (result.authors == 1).sum()
    assert result.summary(0)["long_takeover_tokens"] == 275


def test_the_counter_and_the_verifying_cue_are_of_the_large_models_text():
    """A large model without doubts is never called for long, however often the small one doubts."""
    calm = doubts(scripted([[2] * 1024], 3))
    assert calm.log.checks.tolist() == [0] and calm.log.cues[0] > 35 and calm.log.negatives.tolist() == [0]
    small_only = doubts(scripted([[2] * 1024], 3), negative=[], verify=[[1]])
    assert small_only.log.verifying.tolist() == [0] and small_only.log.cues[0] > 35  # a verifying word is a sentiment
    large_too = doubts(scripted([[1] * 1024], 3), negative=[], verify=[[1]], long=7)
    assert large_too.log.verifying[0] >= 7 * (large_too.log.cues[0] - 1) and large_too.log.checks[0] > 0


def test_a_model_that_does_not_reason_is_opened_for():
    never = {"negative": [[99], [99, 99]], "positive": [[99]], "verify": [[99]]}
    result = lib.run("speculative_thinking", reasons=False, **never)
    assert result.to_lists() == lib.plain(LARGE, key=lib.keys_of(1))
    assert result.log.opening.tolist() == [12, 12, 12]


def test_what_the_caller_has_larger_does_not_shrink():
    assert grow(jnp.array([10, 28, 30, 40]), 5, 30).tolist() == [15, 30, 30, 40]


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="patience must be at least 1, not 0"):
        lib.run("speculative_thinking", patience=0)
    with pytest.raises(UsageError, match="check has the token 99, outside of the models' vocabulary of 16"):
        lib.run("speculative_thinking", check=[99])
