"""Tests of which loop takes which model and which method."""

import pytest
import toy
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import methods


def test_models_and_methods_that_do_not_fit_are_refused_in_a_sentence():
    denoiser, target = toys.causal(), toy.tiny_llama()
    settings = {"key": 0, "max_new_tokens": 4}
    for call, words in (
        (lambda: specjax.decode(denoiser, None, [[1]], **settings), "use specjax.denoise"),
        (lambda: specjax.denoise(target, "llada", [[1]], **settings), "use decode for autoregressive models"),
        (lambda: specjax.stream(denoiser, "prompt_lookup", [[1]], **settings), "unknown diffusion method"),
        (lambda: specjax.stream(denoiser, specjax.drafters.prompt_lookup(), [[1]], **settings), "of kind diffusion"),
        (lambda: specjax.stream(target, "llada", [[1]], **settings), "is for diffusion models"),
        (
            lambda: specjax.stream(target, methods.llada(toys.full()), [[1]], **settings),
            "need a Denoiser as target",
        ),
        (lambda: specjax.stream(denoiser, "sdar", [[1]], inputs=1, **settings), "leave inputs out"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
