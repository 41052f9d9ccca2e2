"""Diffusion models in `serve`: rows come and go, each with its own settings, and texts are those of `denoise`."""

import jax
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import Request
from specjax.diffusion import Control, ControlAction, methods

ASKED = [
    ([1, 2, 3, 4, 5], 7, {}), ([6, 7, 8], 14, {"temperature": 0.9}), ([9] * 9, 3, {"eos": 38}), ([3] * 8, 11, {}),
]  # fmt: skip


@pytest.mark.parametrize("denoiser, method", [(toys.causal(), "sdar"), (toys.full(), "fast_dllm")])
def test_texts_are_those_of_denoise(denoiser, method):
    requests = [Request(prompt, seed, count, **options) for seed, (prompt, count, options) in enumerate(ASKED)]
    served, ends = [[] for _ in ASKED], {}
    for one in specjax.serve(denoiser, method, requests, slots=2, longest_prompt=9, max_new_tokens=16):
        served[one.request] += one.tokens
        if one.finish_reason:
            ends[one.request] = one.finish_reason
    assert set(ends) == set(range(4)) and set(ends.values()) <= {"length", "eos"}
    for seed, ((prompt, count, options), tokens) in enumerate(zip(ASKED, served, strict=True)):
        options = {"temperature": 0.0, "eos": ()} | options
        key = jax.random.key(seed)[None]
        alone = specjax.denoise(denoiser, method, [prompt], key=key, max_new_tokens=count, **options)
        assert tokens == alone.to_lists()[0], seed


def test_a_row_that_a_control_ends_makes_room_for_the_next():
    """Before it has all its tokens, and without an eos."""
    short = Control(lambda params, state, canvas, proposal, view, wide: (ControlAction(end=canvas.start + 3), state))
    denoiser = toys.frozen(np.linspace(0.8, 0.4, 40))
    method = methods.llada(denoiser, block=None).replace(control=short)
    requests = [Request([1, 2], seed, 8) for seed in range(3)]
    served, ends = [[] for _ in requests], {}
    for count, one in enumerate(specjax.serve(denoiser, method, requests, slots=1, longest_prompt=4, max_new_tokens=8)):
        served[one.request] += one.tokens
        ends |= {one.request: one.finish_reason} if one.finish_reason else {}
        assert count < 30
    assert served == [[2, 3, 4]] * 3 and set(ends.values()) == {"length"} and len(ends) == 3
