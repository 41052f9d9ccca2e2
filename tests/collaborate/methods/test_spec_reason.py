"""SpecReason against a loop in numpy, its rating by hand, and its ends."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from toy import markov

from specjax import UsageError, drafters
from specjax.collaborate import segments
from specjax.collaborate.methods.spec_reason import rating, spec_reason

SMALL, LARGE = lib.history(0), lib.history(1)


def by_hand(prompt, threshold, first=0, max_step_tokens=512, count=12):
    """(tokens, authors, ratings) of greedy models; a step that is the end of the text counts too."""
    text, authors, ratings, last = list(prompt), [], [], None
    while len(text) < len(prompt) + count:
        left, who = min(max_step_tokens, count - len(authors)), 1
        if len(ratings) >= first:
            step = lib.greedy(SMALL, text, left, lib.ENDS)
            top = int(lib.table_logits(LARGE, [*text, *step, *lib.JUDGING]).argmax())
            ratings.append(top if top < 10 else 0)
            who = int(ratings[-1] < threshold)
        else:
            ratings.append(None)
        if who:
            step = lib.greedy(LARGE, text, left, lib.ENDS)
        text, authors = text + step, authors + [who] * len(step)
        if step == last:
            break
        last = step
    return text[len(prompt) :], authors, ratings


@pytest.mark.parametrize("options", [{"threshold": 5.0}, {"threshold": 5.0, "first": 2}])
def test_greedy_text_is_that_of_the_loop_by_hand(options):
    result = lib.run("spec_reason", **options)
    both = set()
    for row, prompt in enumerate(lib.PROMPTS):
        tokens, authors, ratings = by_hand(prompt, **options)
        assert result.to_lists()[row] == tokens
        assert result.authors[row, : len(tokens)].tolist() == authors
        steps = int(result.log.steps[row])
        assert steps == len(ratings)
        assert [None if np.isnan(x) else int(x) for x in result.log.score[row, :steps]] == ratings
        assert int(result.log.tokens[row].sum()) == len(tokens)
        both |= set(authors)
    assert both == {0, 1}


def test_a_drafter_inside_changes_no_text():
    plain = lib.run("spec_reason", max_new_tokens=24)
    inside = lib.run("spec_reason", max_new_tokens=24, drafter=drafters.two_model(lib.alike(1), 3))
    assert inside.to_lists() == plain.to_lists()
    assert (inside.authors == plain.authors).all() and (inside.log.score == plain.log.score).sum() > 6
    assert (inside.passes[:, 1] <= plain.passes[:, 1]).all() and (inside.passes[:2, 1] < plain.passes[:2, 1]).all()


def test_never_and_always():
    sampled = {"temperature": 0.8, "top_p": 0.95}
    never = lib.run("spec_reason", threshold=0.0, **sampled)
    assert never.to_lists() == lib.plain(SMALL, **sampled) and (never.share(0) == 1).all()
    always = lib.run("spec_reason", threshold=9.5, **sampled)
    assert always.to_lists() == lib.plain(LARGE, key=lib.keys_of(1), **sampled) and (always.share(1) == 1).all()


def test_ratings_by_hand():
    """The digits are ids 1 to 10; id 0 is a word, which scores 0 if it is the likeliest."""
    uniform = np.log(np.full(10, 0.1))
    two = np.where(np.isin(np.arange(10), (7, 9)), np.log(0.5), -np.inf)
    none = np.full(10, -np.inf)
    words = np.array([-5.0, -5.0, 0.0, 0.0, np.nan])
    logits = jnp.array(np.column_stack([words, [uniform, two, two, none, two]]), jnp.float32)
    digits = jnp.arange(1, 11)
    np.testing.assert_allclose(rating(logits, digits, True), [4.5, 8.0, 8.0, 0.0, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(rating(logits, digits, False), [0, 7, 0, 0, np.nan])


CIRCLE = markov(np.roll(np.eye(6), 1, 1) * 0.94 + 0.01)  # 0 1 2 3 4 5 0 1 ...


def in_a_circle(**options):
    options = {
        "segmenter": segments.after_any([2], 6), "judging": [1], "digits": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3],
        "threshold": 0.0, "key": 0, "max_new_tokens": 40,
    } | options  # fmt: skip
    return spec_reason(CIRCLE, CIRCLE, [[0]], **options)


def test_a_repeated_step_or_an_answer_ends_it():
    assert in_a_circle().to_lists() == [[1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]]
    assert in_a_circle(answer=[[4, 4], [5, 0]]).to_lists() == [[1, 2, 3, 4, 5, 0, 1, 2]]
    assert in_a_circle(max_step_tokens=3, threshold=9.5).log.tokens[0, :5].tolist() == [
        2,
        3,
        3,
        3,
        3,
    ]  # a limit ends a step too


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="digits must be the ten ids of 0 to 9"):
        in_a_circle(digits=[1])
    with pytest.raises(UsageError, match="digits has the token 99, outside of the models' vocabulary of 16"):
        lib.run("spec_reason", digits=[99] * 10)
    with pytest.raises(UsageError, match="only decode records logprobs and debug information"):
        lib.run("spec_reason", logprobs=True)
    with pytest.raises(UsageError, match="max_step_tokens must be at least 1"):
        in_a_circle(max_step_tokens=0)
    with pytest.raises(UsageError, match="must not be empty"):
        in_a_circle(answer=[[]])


def test_a_judge_without_digits_refuses_every_step():
    silent = markov(np.where(np.arange(12) < 2, 0.5, 0.0) * np.ones((12, 1)))
    result = spec_reason(silent, silent, [[0]], key=0, max_new_tokens=4, segmenter=segments.after_any([0], 12),
        judging=[1], digits=range(2, 12))  # fmt: skip
    steps = int(result.log.steps[0])
    assert result.log.score[0, :steps].tolist() == [0.0] * steps and result.share(1).tolist() == [1.0]


def broken(row):
    """The large model, whose logits are NaN after one text of the judge: that of `row`."""
    model = lib.history_model()

    def forward(params, tokens, cache, **options):
        output, pending = model.forward(params, tokens, cache, **options)
        is_row = cache.tokens[:, :1] == lib.PROMPTS[row][0]
        spoilt = jnp.where((is_row & (tokens.shape[1] == 3))[:, :, None], jnp.nan, output.logits)
        return output._replace(logits=spoilt), pending

    return dataclasses.replace(LARGE, model=model._replace(forward=forward))


def test_one_judge_without_a_rating_does_not_lose_the_batch():
    undisturbed = lib.run("spec_reason")
    method, (small, _), settings = lib.calls()["spec_reason"]
    run = lambda prompts, key: method(small, broken(1), prompts, key=key, max_new_tokens=12, **settings)
    result = run(lib.PROMPTS, lib.KEYS)
    assert result.to_lists() == [undisturbed.to_lists()[0], [], undisturbed.to_lists()[2]]
    assert result.failures == {1: "the target's rating is NaN; look at its parameters"}
    assert result.finish_reasons == ["length", "failed", "length"]
    with pytest.raises(UsageError, match="the target's rating is NaN; look at its parameters, in every row"):
        run(lib.PROMPTS[1:2], lib.KEYS[1:2])
