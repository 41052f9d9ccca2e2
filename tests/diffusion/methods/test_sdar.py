"""SDAR: the confidence of what is drawn, and quotas by the length of a block."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from diffusion_oracles import NumpyLlama
from diffusion_oracles import sdar as released
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.methods.sdar import dynamic_rule

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [3] * 8]


@pytest.mark.parametrize(("steps", "tau"), [(3, 0.9), exhaustive(2, 0.8)])
def test_a_greedy_text_is_that_of_the_release(steps, tau):
    denoiser, model = toys.causal(), NumpyLlama(toy.tiny_llama(), toys.MASK)
    ours = specjax.denoise(denoiser, methods.sdar(denoiser, steps=steps, tau=tau), PROMPTS, key=0, max_new_tokens=11)
    for row, prompt in enumerate(PROMPTS):
        expected = released(model, prompt, 11, block=4, steps=steps, tau=tau)
        assert (ours.to_lists()[row], ours.decided_at[row].tolist()) == expected


def test_the_first_block_has_the_quotas_of_a_whole_one():
    """The 2 columns left in the first block are decided at once with 2 passes, as 2 of 4; by its masks one would be
    taken."""
    denoiser, settings = toys.causal(), {"key": 0, "max_new_tokens": 6}
    static = methods.sdar(denoiser, steps=2, remasking="static")
    assert specjax.denoise(denoiser, static, [[6, 7]], **settings).decided_at[0, :2].tolist() == [0, 0]
    by_masks = specjax.denoise(denoiser, methods.llada(denoiser, steps=2), [[6, 7]], **settings)
    assert sorted(by_masks.decided_at[0, :2].tolist()) == [0, 1]


def test_confidence_is_that_of_the_distribution_that_is_drawn_from():
    """A single token that is left has all the mass, so a block is decided in a pass; at temperature 0 nothing is
    cut."""
    denoiser = toys.causal()
    run = lambda **settings: specjax.denoise(
        denoiser, methods.sdar(denoiser, tau=0.999), [[3] * 8], key=0, max_new_tokens=8, top_k=1, **settings
    )
    drawn, greedy = run(temperature=1.0), run()
    assert drawn.decided_at[0].tolist() == [0] * 4 + [1] * 4 and greedy.decided_at[0].tolist() != [0] * 4 + [1] * 4
    columns = hand_made.of_logits(np.log([[[0.6, 0.36, 0.04], [0.62, 0.19, 0.19]]]))
    cut = jnp.where(jnp.arange(hand_made.VOCAB) < 2, columns.logits, -jnp.inf)
    sampled = columns._replace(warped=cut, filtered=cut, greedy=jnp.zeros(1, bool))
    assert hand_made.taken(dynamic_rule(0.7), sampled) == [[1]]
    assert hand_made.taken(dynamic_rule(0.61), columns._replace(filtered=cut)) == [[1]]


def test_a_choice_without_effect_is_refused():
    for wrong, words in (({"remasking": "static", "tau": 0.5}, "tau has no effect with remasking=static"),):
        with pytest.raises(UsageError, match=words):
            methods.sdar(toys.causal(), **wrong)
    with pytest.raises(UsageError, match="fuse has no effect for a model with shifted logits"):
        methods.sdar(toys.causal(4, "seed_and_mask"), fuse=True)
