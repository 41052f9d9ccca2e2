"""Fast-dLLM v2: sub-blocks of a seeded model, and confidence within the nucleus."""

import numpy as np
import pytest
import toy_denoisers as toys
from hand_made import of_logits, taken

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.fast_dllm_v2 import in_nucleus
from specjax.diffusion.rules import threshold

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [3] * 8]


def decode(**options):
    denoiser = toys.causal(4, "seed_and_mask")
    return specjax.denoise(denoiser, methods.fast_dllm_v2(denoiser, **options), PROMPTS, key=2, max_new_tokens=11)


def test_a_sub_block_of_the_block_and_no_nucleus_is_sdar():
    denoiser = toys.causal(4, "seed_and_mask")
    ours = decode(sub_block=4, top_p=1.0, tau=0.06)
    sdar = specjax.denoise(denoiser, methods.sdar(denoiser, tau=0.06), PROMPTS, key=2, max_new_tokens=11)
    assert ours.to_lists() == sdar.to_lists() and ours.decided_at.tolist() == sdar.decided_at.tolist()
    assert len(set(ours.decided_at[0].tolist())) < 11


def test_the_seed_then_one_sub_block_after_the_other():
    order = np.asarray(decode(sub_block=2, tau=0.0).decided_at)
    whole = order[2]  # a prompt of two blocks: the pass that reads the second seeds the third
    np.testing.assert_array_equal(whole[:8] - whole[0], [0, 1, 2, 2, 3, 4, 5, 5])


def test_confidence_is_the_share_of_the_nucleus():
    columns = of_logits(np.log([[[0.6, 0.36, 0.04], [0.62, 0.19, 0.19]]]))  # .625 of .96, .62 of 1
    assert taken(in_nucleus(threshold(0.624), 0.95), columns) == [[0]]
    assert taken(threshold(0.624), columns) == taken(in_nucleus(threshold(0.624), 1.0), columns) == [[1]]


def test_a_model_that_is_not_seeded_is_refused_and_so_is_what_is_no_setting():
    for denoiser in (toys.full(), toys.causal()):
        with pytest.raises(UsageError, match="seeding='seed_and_mask'"):
            methods.fast_dllm_v2(denoiser)
    for wrong in ({"sub_block": 3}, {"top_p": 0.0}):
        with pytest.raises(UsageError):
            methods.fast_dllm_v2(toys.causal(4, "seed_and_mask"), **wrong)
