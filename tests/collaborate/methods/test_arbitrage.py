"""Tests of which model writes which step, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from toy import markov

from specjax import UsageError
from specjax.collaborate import reward_of, segments
from specjax.collaborate.methods.arbitrage import arbitrage

SMALL, LARGE, ROUTER = lib.history(0), lib.history(1), lib.history(2)
SCORES = np.array([[0.8, 0.9], [0.3, 0.2], [0.6, 0.95]], np.float32)  # s_d, s_t of the card's steps


def by_the_card(tokens, start, length, ended):
    """Steps are single tokens behind a prompt of one: 0 of the draft model, 1 of the target."""
    return jnp.asarray(SCORES)[jnp.clip(start - 1, 0, 2), jnp.take_along_axis(tokens, start[:, None], 1)[:, 0]]


def always(token):
    return markov(np.eye(2)[[token, token]] * 0.98 + 0.01)


@pytest.mark.parametrize("form, tau, authors", [("oracle", 0.2, [0, 0, 1]), ("reward", 0.7, [0, 1, 1])])
def test_the_steps_of_the_card(form, tau, authors):
    """A reward threshold has two steps rewritten, one of which the target makes no better. Each step is asked for by
    itself, as two equal ones in a row end a text."""
    writers = []
    for number in range(3):
        result = arbitrage(
            always(0), always(1), [[0] * (number + 1)], key=0, max_new_tokens=1, form=form, tau=tau,
            segmenter=segments.after_any([0, 1], 2), reward=by_the_card,
        )  # fmt: skip
        writers += result.to_lists()[0]
        assert result.log.author[0, 0] == writers[-1]
    assert writers == authors


def test_greedy_text_is_that_of_the_loop_by_hand():
    result, both = lib.run("arbitrage"), set()
    for row, prompt in enumerate(lib.PROMPTS):
        text, authors, last = list(prompt), [], None
        while len(authors) < 12:
            step = lib.greedy(SMALL, text, 12 - len(authors), lib.ENDS)
            y = 1 / (1 + np.exp(-lib.table_logits(ROUTER, [*text, *step]) @ lib.HEAD))
            who = int(y >= 0.5)
            if who:
                step = lib.greedy(LARGE, text, 12 - len(authors), lib.ENDS)
            text, authors = text + step, authors + [who] * len(step)
            if step == last:
                break
            last = step
        assert result.to_lists()[row] == text[len(prompt) :]
        assert result.authors[row, : len(authors)].tolist() == authors
        both |= set(authors)
    assert both == {0, 1}


def test_never_and_always():
    sampled = {"temperature": 0.8}
    assert lib.run("arbitrage", tau=1.01, **sampled).to_lists() == lib.plain(SMALL, **sampled)
    everything = lib.run("arbitrage", tau=0.0, **sampled)
    assert everything.to_lists() == lib.plain(LARGE, key=lib.keys_of(1, writers=3), **sampled)


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match=r"router is needed, a model of collaborate\.reward_of or a function of texts"):
        lib.run("arbitrage", router=None)
    with pytest.raises(UsageError, match="reward is needed, a model"):
        lib.run("arbitrage", form="oracle", router=None)
    with pytest.raises(UsageError, match='form="oracle" reads the reward alone; leave the other one out'):
        lib.run("arbitrage", form="oracle", reward=by_the_card)
    with pytest.raises(UsageError, match="the score of the router is NaN; look at its parameters, in every row"):
        lib.run("arbitrage", router=reward_of(jax.tree.map(lambda x: x * np.nan, ROUTER), (lib.HEAD, 0.0)))
