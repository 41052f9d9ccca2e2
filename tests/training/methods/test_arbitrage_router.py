"""The examples of a router by hand, and a router that learns when the target's step is better."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib

from specjax import UsageError
from specjax.collaborate import methods, reward_of, segments
from specjax.training import StepExamples, collect_steps, train_router

DRAFT, TARGET, ROUTER = lib.history(0), lib.history(1), lib.history(2)
ENDS = segments.after_any(lib.ENDS, lib.VOCAB)


def collect(**changes):
    settings = {"key": lib.KEYS, "max_new_tokens": 12, "segmenter": ENDS, "reward": lib.likes_odds, "router": ROUTER}
    return collect_steps(DRAFT, TARGET, lib.PROMPTS, **(settings | changes))


def reward(text):
    return 0.2 + 0.5 * (text[-1] % 2) + 0.25 * text[-1] / lib.VOCAB


def test_steps_are_those_of_the_loop_by_hand():
    examples, wanted = collect(), []
    rounds = [(list(prompt), 0) for prompt in lib.PROMPTS]
    while any(count < 12 for _, count in rounds):
        later = []
        for text, count in rounds:
            if count >= 12:
                later.append((text, count))
                continue
            steps = [lib.greedy(model, text, 12 - count, lib.ENDS) for model in (DRAFT, TARGET)]
            scores = [reward([*text, *step]) for step in steps]
            wanted.append((lib.table_logits(ROUTER, [*text, *steps[0]]), scores[1] - scores[0]))
            step = steps[scores[1] > scores[0]]
            later.append(([*text, *step], count + len(step)))
        rounds = later
    np.testing.assert_allclose(examples.features, np.array([h for h, _ in wanted]), rtol=1e-5)
    np.testing.assert_allclose(examples.advantage, np.array([delta for _, delta in wanted]), atol=1e-6)
    assert 0 < examples.labels.mean() < 1


@pytest.mark.exhaustive
def test_the_mean_of_several_steps_of_the_target():
    one, several = (collect(samples=n, temperature=1.0, max_new_tokens=4) for n in (1, 3))
    assert not np.allclose(one.advantage[:3], several.advantage[:3])
    np.testing.assert_array_equal(one.features[:3], several.features[:3])


def test_a_router_decides_as_its_labels():
    """On separable examples the router repeats the oracle, and the method takes it."""
    draw = np.random.default_rng(0)
    features = draw.normal(size=(64, lib.VOCAB)).astype(np.float32)
    examples = StepExamples(features, features @ lib.HEAD)
    router = train_router(examples)
    assert ((router(features) > 0) == (examples.labels > 0)).all()
    result = methods.arbitrage(
        DRAFT, TARGET, lib.PROMPTS, key=0, max_new_tokens=8, segmenter=ENDS, router=reward_of(ROUTER, router)
    )
    assert (result.lengths == 8).all()


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match="a reward is NaN; look at the reward model"):
        collect(reward=lambda tokens, start, length, ended: jnp.full(length.shape, jnp.nan), max_new_tokens=2)
    with pytest.raises(UsageError, match="the target's step is better in none of the 4 steps"):
        train_router(StepExamples(np.ones((4, 3), np.float32), np.zeros(4, np.float32)))
    with pytest.raises(UsageError, match="samples must be at least 1, not 0"):
        collect(samples=0)
