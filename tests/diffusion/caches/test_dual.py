"""The dual cache: exact where nothing that it kept could have changed, and of fewer columns."""

import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import methods
from specjax.diffusion.caches import dual

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]


def texts(denoiser, memory):
    method = methods.llada(denoiser, block=8).replace(memory=memory)
    return specjax.denoise(denoiser, method, PROMPTS, key=3, max_new_tokens=18, temperature=0.8)


@pytest.mark.parametrize("alignment", ["same", "shifted"])
def test_with_one_layer_it_is_exact_and_computes_less(alignment):
    denoiser = toys.full(alignment, layers=1)
    plain, ours = texts(denoiser, None), texts(denoiser, dual())
    assert ours.to_lists() == plain.to_lists() and np.all(ours.decided_at == plain.decided_at)
    assert plain.columns.tolist() == [18 * (len(prompt) + 18) for prompt in PROMPTS]
    width = 8 + (alignment == "shifted")  # and all of the canvas on entering each of three blocks
    assert ours.columns.tolist() == [18 * width + 3 * (len(prompt) + 18) for prompt in PROMPTS]


def test_with_two_layers_it_is_exact_if_refreshed_in_every_pass_and_only_then():
    denoiser = toys.full()
    plain, always, once = (texts(denoiser, memory) for memory in (None, dual(1), dual()))
    assert always.to_lists() == plain.to_lists() != once.to_lists()


def test_what_it_does_not_fit_is_refused():
    causal, full = toys.causal(), toys.full()
    with pytest.raises(UsageError, match="full attention"):
        specjax.denoise(causal, methods.fast_dllm(causal, memory="dual"), PROMPTS, key=0, max_new_tokens=4)
    with pytest.raises(UsageError, match="needs an exact cache"):
        specjax.denoise(full, methods.freedave(full).replace(memory=dual()), PROMPTS, key=0, max_new_tokens=4)
    with pytest.raises(UsageError, match="at least 1"):
        dual(0)
