"""S2D2: the text of the model with blocks of one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Denoiser, Procedure, methods, rules, schedules

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]


def test_greedy_text_is_that_of_blocks_of_one():
    denoiser = toys.causal()
    settings = {"key": 3, "max_new_tokens": 18, "eos": 38, "logprobs": True}
    one = dataclasses.replace(denoiser, block=1)
    plain = specjax.denoise(one, Procedure(schedules.blocks(1), rules.quota()), PROMPTS, **settings)
    ours = specjax.denoise(denoiser, "s2d2", PROMPTS, **settings)
    assert ours.to_lists() == plain.to_lists() and ours.finish_reasons == plain.finish_reasons
    np.testing.assert_allclose(ours.logprobs, plain.logprobs, atol=1e-4)


def test_what_it_drafts_from_is_what_it_is_judged_by_where_columns_do_not_matter():
    """Whatever stands around it a mask says the same, so p = q and everything drafted is accepted."""
    rows = jnp.array([[0.6, 0.1, 0.3, 1e-9]] * 4, jnp.float32)
    denoiser = Denoiser(toy.markov_model(4), rows, 3, "block_causal", 3)
    result = specjax.denoise(denoiser, "s2d2", [[0]] * 4000, key=5, max_new_tokens=8, temperature=1.0)
    assert np.all(np.asarray(result.stats.target_passes) == 4)  # two rounds, of four tokens each
    assert result.columns[0] == 2 * (4 + 8)
    share = np.bincount(np.asarray(result.tokens).ravel(), minlength=3) / result.tokens.size
    np.testing.assert_allclose(share, [0.6, 0.1, 0.3], atol=0.012)


def test_models_that_do_not_fit_are_refused():
    for denoiser, words in ((toys.full(), "full attention"), (toys.causal(4, "seed_and_mask"), "choose linear_spec")):
        with pytest.raises(UsageError, match=words):
            methods.s2d2(denoiser)
