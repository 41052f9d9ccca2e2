"""Guidance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Canvas, Procedure, autoregressive, forward, methods, rules, schedules
from specjax.diffusion.caches import WHOLE, append, guided
from specjax.diffusion.types import Window

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("denoiser, memory", [(toys.full(), WHOLE), (toys.causal(), append())])
def test_logits_are_moved_away_from_those_of_a_masked_prompt(denoiser, memory):
    start, block = jnp.array([3, 7]), denoiser.block
    column = jnp.arange(16)
    opened = jnp.broadcast_to(column >= start[:, None], (2, 16)).at[0, 5].set(False)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 60)
    nothing = jnp.zeros(2, jnp.int32)
    canvas = Canvas(tokens, opened, start, nothing + 16, nothing if block else start, nothing, nothing)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(memory, canvas):
        window = Window(start // 4 * 4 if block else start, jnp.ones(2, bool), jnp.ones(2, bool), 4)
        window_pass, _ = memory.look(denoiser, memory.init(denoiser, canvas, 4), canvas, window)
        return forward.window_logits(denoiser, window_pass)

    masked = canvas._replace(tokens=jnp.where(column < start[:, None], toys.MASK, tokens))
    ours, plain, blind = logits(guided(memory, 1.5), canvas), logits(memory, canvas), logits(memory, masked)
    words = np.arange(64) != toys.MASK
    assert np.all(ours[..., toys.MASK] == -np.inf) and np.abs(plain - blind)[..., words].max() > 0.1
    np.testing.assert_allclose(ours[..., words], (blind + 2.5 * (plain - blind))[..., words], atol=1e-4)
    np.testing.assert_allclose(logits(guided(memory, 1.5), masked)[..., words], blind[..., words], atol=1e-4)


def test_guided_rows_are_independent_and_cost_twice_the_columns():
    denoiser, settings = toys.full(), {"max_new_tokens": 10, "temperature": 0.8}
    assert methods.llada(denoiser, guidance=0.0).memory is None
    plain = specjax.denoise(denoiser, methods.llada(denoiser), PROMPTS, key=3, **settings)
    method = methods.llada(denoiser, guidance=2.0)
    ours = specjax.denoise(denoiser, method, PROMPTS, key=3, **settings)
    assert ours.columns.tolist() == [2 * n for n in plain.columns.tolist()] and ours.to_lists() != plain.to_lists()
    alone = specjax.denoise(denoiser, method, PROMPTS[1:], key=toys.keys_of(3, 2)[1:], **settings)
    assert alone.to_lists()[0] == ours.to_lists()[1]


def test_a_model_without_a_mask_token_has_no_guidance():
    method = Procedure(schedules.blocks(1), rules.quota(), guided(append(), 1.0))
    with pytest.raises(UsageError, match="with a mask_token"):
        specjax.denoise(autoregressive(toy.tiny_llama()), method, PROMPTS, key=0, max_new_tokens=4)
