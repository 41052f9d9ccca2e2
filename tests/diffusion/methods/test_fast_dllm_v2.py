"""Fast-dLLM v2: sub-blocks of a seeded model, and confidence within the nucleus."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from diffusion_oracles import NumpyLlama
from diffusion_oracles import fast_dllm_v2 as released

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.fast_dllm_v2 import nucleus
from specjax.types import Sampling

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [3] * 8]


def decode(*, temperature=0.0, key=2, more=None, **options):
    denoiser, settings = toys.causal(4, "seed_and_mask"), {"temperature": temperature, "max_new_tokens": 11}
    method = methods.fast_dllm_v2(denoiser, **options)
    return specjax.denoise(denoiser, method, PROMPTS, key=key, **settings, **(more or {}))


def test_a_sub_block_of_the_block_is_sdar():
    denoiser = toys.causal(4, "seed_and_mask")
    ours = decode(sub_block=4, tau=0.06)
    sdar = specjax.denoise(denoiser, methods.sdar(denoiser, tau=0.06), PROMPTS, key=2, max_new_tokens=11)
    assert ours.to_lists() == sdar.to_lists() and ours.decided_at.tolist() == sdar.decided_at.tolist()
    assert len(set(ours.decided_at[0].tolist())) < 11


def test_the_seed_then_one_sub_block_after_the_other():
    order = np.asarray(decode(sub_block=2, tau=0.0).decided_at)
    decided_at = order[2]  # a prompt of two blocks: the pass that reads the second seeds the third
    np.testing.assert_array_equal(decided_at[:8] - decided_at[0], [0, 1, 2, 2, 3, 4, 5, 5])


def test_a_greedy_text_is_that_of_the_release_whatever_the_nucleus():
    """At its defaults: the nucleus has no part in the confidence where nothing is drawn."""
    denoiser, model = toys.causal(8, "seed_and_mask"), NumpyLlama(toy.tiny_llama(), toys.MASK, shifted=True)
    method = methods.fast_dllm_v2(denoiser, sub_block=4)
    ours = specjax.denoise(denoiser, method, PROMPTS, key=2, max_new_tokens=11)
    for row, prompt in enumerate(PROMPTS):
        expected = released(model, prompt, 11, block=8, sub_block=4, tau=0.9)
        assert (ours.to_lists()[row], ours.decided_at[row].tolist()) == expected
    assert method.score == methods.fast_dllm_v2(denoiser, top_p=0.95).score


def test_tokens_are_drawn_from_the_nucleus_and_their_share_of_it_is_the_confidence():
    """A nucleus of one token has confidence 1, so a whole sub-block is decided in a pass; at temperature 0 it is
    not."""
    greedy = np.asarray(decode(sub_block=2).decided_at)
    ours = decode(sub_block=2, top_p=1e-6, temperature=1.0)
    decided_at = np.asarray(ours.decided_at)[2]
    np.testing.assert_array_equal(decided_at[:8] - decided_at[0], [0, 1, 2, 2, 3, 4, 5, 5])
    assert not np.array_equal(greedy, ours.decided_at) and ours.to_lists() == decode(sub_block=2, tau=0.0).to_lists()
    cut = decode(sub_block=2, top_p=1.0, temperature=1.0, more={"top_p": 1e-6})
    assert cut.to_lists() == ours.to_lists()  # the smaller one, of the method and of the run


def test_of_both_nuclei_the_smaller_one():
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.15, 0.05]] * 2]))
    view = hand_made.window([[True] * 2])._replace(eligible=jnp.array([[False, True]]))
    left = lambda mine, other: jnp.sum(
        nucleus(mine).warp((), logits, Sampling(jnp.float32(1), None, other), view)[0, 1] > -jnp.inf
    )
    assert [int(left(*pair)) for pair in ((0.7, None), (0.7, 0.4), (0.4, 0.9), (1.0, 0.9), (1.0, None))] == [
        2, 1, 1, 3, 4,
    ]  # fmt: skip


def test_the_first_column_of_a_block_is_not_drawn():
    hot = [decode(sub_block=2, top_p=1.0, temperature=50.0, key=key).to_lists()[2] for key in range(3)]
    greedy = decode(sub_block=2).to_lists()[2]
    assert {text[0] for text in hot} == {greedy[0]} and len({text[1] for text in hot}) > 1


def test_a_model_that_is_not_seeded_is_refused_and_so_is_what_is_no_setting():
    for denoiser in (toys.full(), toys.causal()):
        with pytest.raises(UsageError, match="seeding='seed_and_mask'"):
            methods.fast_dllm_v2(denoiser)
    for wrong in ({"sub_block": 3}, {"top_p": 0.0}):
        with pytest.raises(UsageError):
            methods.fast_dllm_v2(toys.causal(4, "seed_and_mask"), **wrong)
