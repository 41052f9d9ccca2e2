"""LinearSpec: the text of the model's own autoregressive mode."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import toy
import toy_denoisers as toys
from scipy.stats import chisquare

import specjax
from specjax import UsageError
from specjax.diffusion import Denoiser, Procedure, methods, rules, schedules
from specjax.diffusion.caches import append

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]
ONE_A_PASS = Procedure(schedules.blocks(1), rules.quota())


def own_mode(denoiser: Denoiser) -> Denoiser:
    """The same weights with blocks of one, whose row of a column predicts the next."""
    return dataclasses.replace(denoiser, block=1, alignment="shifted", seeding="seed_and_mask")


@pytest.mark.parametrize("seeding", ["all_masked", tiers.exhaustive("seed_and_mask")])
def test_greedy_text_is_that_of_blocks_of_one(seeding):
    denoiser = toys.causal(4, seeding)
    settings = {"key": 3, "max_new_tokens": 18, "eos": 38, "logprobs": True}
    plain = specjax.denoise(own_mode(denoiser), ONE_A_PASS, PROMPTS, **settings)
    ours = specjax.denoise(denoiser, "linear_spec", PROMPTS, **settings)
    assert ours.to_lists() == plain.to_lists() and ours.finish_reasons == plain.finish_reasons
    np.testing.assert_allclose(ours.logprobs, plain.logprobs, atol=1e-4)


def markov(draft_row):
    """Three tokens, whose next one depends on the last alone; behind a mask, which is drafted from, `draft_row`."""
    rows = jnp.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], draft_row], jnp.float32)
    rows = jnp.concatenate([rows, jnp.full((4, 1), 1e-9)], 1)
    return Denoiser(toy.markov_model(4), rows, 3, "block_causal", 3), np.asarray(rows[:3, :3], np.float64)


@pytest.mark.parametrize("draft_row", [[0.9, 0.02, 0.08], tiers.exhaustive([0.6, 0.1, 0.3])])
def test_sampled_text_has_the_law_of_blocks_of_one(draft_row):
    denoiser, rows = markov(draft_row)
    result = specjax.denoise(denoiser, "linear_spec", [[0]] * 20000, key=5, max_new_tokens=5, temperature=1.0)
    tokens = np.asarray(result.tokens[:, :5])
    assert 2 < np.mean(result.stats.target_passes) < 9
    rows = rows / rows.sum(1, keepdims=True)
    law = np.einsum("a,ab,bc->abc", rows[0], rows, rows).ravel()
    for first in (0, 2):  # of the second triple given the token before it, summed over that
        triple = tokens[:, first : first + 3]
        counts = np.bincount(triple @ [9, 3, 1], minlength=27)
        start = law if first == 0 else np.einsum("a,ab,bc->abc", rows[0] @ rows @ rows, rows, rows).ravel()
        assert chisquare(counts, start * len(tokens) / start.sum()).pvalue > 1e-4


def test_a_draft_of_the_models_own_text_is_kept_whole():
    """All say 0, the mask too."""
    chain = jnp.array([[1, 1e-9, 1e-9, 1e-9]] * 4, jnp.float32)
    denoiser = Denoiser(toy.markov_model(4), chain, 3, "block_causal", 3)
    result = specjax.denoise(denoiser, "linear_spec", [[0]], key=5, max_new_tokens=12)
    assert result.to_lists() == [[0] * 12] and result.stats.target_passes.tolist() == [6]  # three rounds of four
    assert result.columns.tolist() == [3 * 2 * 4]


def test_models_and_memories_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="full attention"):
        methods.linear_spec(toys.full())
    denoiser = toys.causal()
    method = methods.linear_spec(denoiser).replace(memory=append())
    with pytest.raises(UsageError, match="needs the cache `token_causal`"):
        specjax.denoise(denoiser, method, PROMPTS, key=0, max_new_tokens=4)
