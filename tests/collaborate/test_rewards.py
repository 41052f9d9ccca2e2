"""A reward model inside of a loop scores as in one pass over each text, whatever is copied or taken back."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib
from tiers import those

from specjax import UsageError
from specjax.collaborate import reward_of
from specjax.training import JudgeClassifier

JUDGE = lib.history(2)
MODEL = reward_of(JUDGE, (lib.HEAD, 0.3))
WITH_SUFFIX = reward_of(JUDGE, (0.5 * lib.HEAD, 0.0), suffix=(4, 7))
CALLS = {
    "reward_smc": {"router": None}, "look-ahead": {"lookahead": 2}, "a_star": {},
    "reward": {"form": "reward", "tau": 0.5}, "oracle": {"form": "oracle"}, "router": {},
}  # fmt: skip


def as_function(reward):
    """The same score as a function of the text, in one pass."""
    return lambda tokens, start, length, ended: reward(tokens, start, length, ended)


def run(name, reward, **more):
    method = {"look-ahead": "reward_smc"}.get(name, name if name in lib.calls() else "arbitrage")
    options = {key: value for key, value in CALLS[name].items() if key != "router"}
    if method == "arbitrage":
        options["reward" if "form" in options else "router"] = reward
        options |= {"router": None} if "form" in options else {}
    else:
        options["reward"] = reward
    return lib.run(method, **options, **more)


QUICK = {("reward_smc", "plain"), ("a_star", "suffix"), ("oracle", "suffix"), ("router", "plain")}
PAIRS = [(name, kind) for name in CALLS for kind in ("plain", "suffix")]


@pytest.mark.parametrize("pair", those(QUICK, PAIRS), ids="-".join)
def test_texts_are_those_of_the_same_function(pair):
    """The texts follow from the scores, and these from every token that the cache holds."""
    name, reward = pair[0], MODEL if pair[1] == "plain" else WITH_SUFFIX
    model, function = run(name, reward), run(name, as_function(reward))
    assert model.to_lists() == function.to_lists()
    assert model.passes.shape[1] == function.passes.shape[1] + 1
    assert (model.passes[:, :-1] == function.passes).all() and (model.read[:, :-1] == function.read).all()
    assert (model.passes[:, -1] > 0).all()


@pytest.mark.parametrize("name", those({"a_star"}, ["reward_smc", "a_star", "oracle"]))
def test_a_cache_that_takes_nothing_back_is_seen(name):
    """The test above can fail."""
    forgetful = JUDGE.model._replace(rewind=lambda cache, length: cache, name="forgetful")
    broken = dataclasses.replace(MODEL, target=dataclasses.replace(JUDGE, model=forgetful))
    assert run(name, broken).to_lists() != run(name, as_function(MODEL)).to_lists()


def test_each_token_is_read_once():
    """The reader of a search with one node at a time reads the prompt, each step, and its last token again."""
    result = lib.run("arbitrage", form="reward", tau=-1.0, reward=MODEL, router=None)
    steps = np.asarray(result.log.steps)
    assert (result.passes[:, 2] <= 2 * steps).all()
    assert (result.read[:, 2] <= np.asarray(result.lengths) + steps + 1).all()


def test_scores_by_hand():
    tokens = jnp.asarray([[1, 2, 3, 0], [4, 5, 6, 7]])
    length = jnp.asarray([3, 4])
    odds = [lib.table_logits(JUDGE, row[:n]) @ lib.HEAD + 0.3 for row, n in zip(tokens.tolist(), (3, 4), strict=True)]
    zero, ended = jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    np.testing.assert_allclose(MODEL(tokens, zero, length, ended), 1 / (1 + np.exp(-np.array(odds))), rtol=1e-5)
    for link, wanted in (("exp", np.exp(odds)), ("identity", odds)):
        linked = reward_of(JUDGE, JudgeClassifier(lib.HEAD, 0.3), link=link)
        np.testing.assert_allclose(linked(tokens, zero, length, ended), wanted, rtol=1e-5)
    two = reward_of(JUDGE, (np.stack([lib.HEAD, 3 * lib.HEAD]), [1.0, 1.6]), link="identity")
    np.testing.assert_allclose(two(tokens, zero, length, ended), 2 * (np.array(odds) - 0.3) + 0.6, rtol=1e-5)
    outside = MODEL(tokens.at[0, 1].set(lib.VOCAB), zero, length, ended)
    assert np.isnan(outside[0]) and not np.isnan(outside[1])


def test_a_reward_model_of_fewer_tokens_reads_texts_of_the_others():
    """Vocabularies that differ by their padding fit; a text with a token beyond fails alone."""
    small = reward_of(lib.history(2, vocab=8), (lib.HEAD[:8], 0.0))
    function = lambda tokens, start, length, ended: jnp.where(small.can_read(tokens, length), 0.0, jnp.nan)
    options = {"max_new_tokens": 1, "prompts": [[1, 2], [4, 5], [6, 7]]}
    result, wanted = (lib.run("arbitrage", router=router, tau=2.0, **options) for router in (small, function))
    assert 0 < len(result.failures) < 3 and result.failures == wanted.failures


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="the head reads 3 numbers, and the model has a width of 16"):
        reward_of(JUDGE, (np.ones(3), 0.0))
    with pytest.raises(UsageError, match=r"the head has no weight with one or two rows.*\[3, 16\]"):
        reward_of(JUDGE, (np.ones((3, 16)), np.zeros(3)))
    with pytest.raises(UsageError, match='link must be one of sigmoid, exp, identity, not "tanh"'):
        reward_of(JUDGE, (lib.HEAD, 0.0), link="tanh")
    with pytest.raises(UsageError, match="suffix has 16, which is not one of the model's 16 tokens"):
        reward_of(JUDGE, (lib.HEAD, 0.0), suffix=(16,))
    with pytest.raises(UsageError, match="the head has values that are not finite"):
        reward_of(JUDGE, (lib.HEAD, np.nan))
    size, zero = JUDGE.model.max_positions, jnp.zeros(1, jnp.int32)
    tokens = jnp.zeros((1, size), jnp.int32)
    for reward, length, words in ((WITH_SUFFIX, size - 1, f"from 0 to {size - 2} tokens"), (MODEL, 0, "from 1 to")):
        with pytest.raises(UsageError, match=f"length must be {words}"):
            reward(tokens, zero, zero + length, zero == 0)
    with pytest.raises(UsageError, match="a reward must return one number per row"):
        lib.run("a_star", reward=lambda tokens, start, length, ended: jnp.float32(0.5))
