"""Denoisers that draft for an autoregressive target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import as_drafter, autoregressive
from specjax.types import Context, Sampling

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11]
DENOISERS = {"full": toys.full("shifted"), "causal": toys.causal(), "seeded": toys.causal(4, "seed_and_mask")}


@pytest.mark.parametrize(
    "name, rounds, sampling",
    [("full", 2, "greedy"), ("causal", 3, "coupled"), ("seeded", 1, "coupled"), ("causal", 1, "greedy")],
)
def test_texts_are_those_of_plain_decoding(name, rounds, sampling):
    drafter = as_drafter(DENOISERS[name], width=5, rounds=rounds)
    settings = {"key": 3, "max_new_tokens": 24}
    if sampling == "coupled":
        settings |= {"temperature": 0.9, "sampling": "coupled"}
    plain = specjax.decode(toy.tiny_llama(), "autoregressive", PROMPTS, **settings)
    ours = specjax.decode(toy.tiny_llama(), drafter, PROMPTS, **settings)
    assert ours.to_lists() == plain.to_lists()


def test_a_model_that_drafts_for_itself_with_its_own_next_token_is_always_right():
    """Blocks of one with the shifted alignment: the first drafted token is what the target says."""
    target = toy.tiny_llama()
    drafter = as_drafter(autoregressive(target), width=1)
    result = specjax.decode(target, drafter, PROMPTS, key=3, max_new_tokens=24)
    assert result.stats.target_passes.tolist() == [12, 12, 12]


@pytest.mark.parametrize("name", ["causal", "seeded"])
def test_what_is_drafted_does_not_depend_on_what_was_kept(name):
    """After some rounds the draft is that of a drafter that reads the text anew."""
    drafter = as_drafter(DENOISERS[name], width=5, rounds=2)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 64)), jnp.int32)
    keys, limit = toys.keys_of(0, 2), jnp.array([5, 5])
    context = lambda *length: Context(tokens, jnp.array(length), Sampling())
    propose = jax.jit(drafter.propose)
    state = drafter.init(drafter.params, context(7, 9))
    for lengths in ((7, 9), (8, 15), (14, 15), (19, 20)):
        tree, state = propose(drafter.params, keys, state, context(*lengths), limit)
        anew = drafter.init(drafter.params, context(*lengths))
        other, _ = propose(drafter.params, keys, anew, context(*lengths), limit)
        np.testing.assert_array_equal(tree.tokens, other.tokens)


def test_one_round_keeps_the_distribution_and_drawn_tokens_of_two_rounds_would_not():
    """Two columns that must differ, in a law of the target's own: what p/q needs is q(x_2 | x_1)."""
    rows = np.full((12, 12), 1e-9)
    rows[:, 0], rows[:, 1] = 0.7, 0.3
    target = toy.markov(rows / rows.sum(1, keepdims=True))
    prompts = [[2]] * 4000
    result = specjax.decode(
        target, as_drafter(toys.coupled(), width=2), prompts, key=0, max_new_tokens=2, temperature=1.0
    )
    share = np.mean(np.asarray(result.tokens) == 0, 0)
    np.testing.assert_allclose(share, 0.7, atol=0.025)
    assert as_drafter(toys.coupled(), width=2, rounds=2).traits.draws == "point_mass"


def test_bad_input_is_one_sentence():
    for wrong in ({"width": 0}, {"width": 2, "rounds": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            as_drafter(toys.causal(), **wrong)
    with pytest.raises(UsageError, match="12 tokens in its vocabulary"):
        specjax.decode(toy.tiny_llama(), as_drafter(toys.coupled(), width=2), PROMPTS, key=0, max_new_tokens=4)
