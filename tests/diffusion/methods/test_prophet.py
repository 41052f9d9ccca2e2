"""Tests of the pass in which all columns are filled at once."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import toy
import toy_denoisers as toys
from diffusion_oracles import NumpyLlama
from diffusion_oracles import prophet as released

import specjax
from specjax import UsageError
from specjax.diffusion import Canvas, CanvasOutput, methods
from specjax.diffusion.methods.prophet import sure_of_the_answer

EOS = 5
CONTROL = sure_of_the_answer(7.5, 5.0, 2.5, None, None)


def fills(gaps, best, passes, *, decided=(), eos=(EOS,), count=8):
    """Return whether a row of 8 new columns behind two fills after so many passes; `decided` by column, in earlier
    ones."""
    start, size = jnp.array([2]), 2 + count
    column = jnp.arange(size)
    opened = (column >= 2)[None]
    decided_at = jnp.where(opened, -1, -2)
    tokens = jnp.zeros((1, size), jnp.int32)
    for place, token in decided:
        opened, tokens = opened.at[0, place].set(False), tokens.at[0, place].set(token)
        decided_at = decided_at.at[0, place].set(passes - 1)
    canvas = Canvas(tokens, opened, start, start + count, start, decided_at, jnp.array([passes]))
    wide = CanvasOutput(jnp.array([[0, EOS, *best]]), jnp.array([[99.0, 99.0, *gaps]]))
    state = CONTROL.init((), canvas, count)
    return bool(
        CONTROL.act((), state, canvas, None, hand_made.window([[True] * count], start=2, eos=eos), wide)[0].fill[0]
    )


@pytest.mark.parametrize("gap, at", [(5.2, 2), (2.6, 5), (7.6, 0)])
def test_of_eight_passes_a_constant_gap_is_enough_from_one_on(gap, at):
    assert [fills([gap] * 8, [1] * 8, n) for n in range(8)] == [n >= at for n in range(8)]


@pytest.mark.parametrize(
    "gaps", [(1e9, 3.0, 2.0), tiers.exhaustive((5.0, 1e9, 1e9)), tiers.exhaustive((1e9, 1e9, 3.0))]
)
def test_a_text_is_that_of_the_release(gaps):
    denoiser, model = toys.full(), NumpyLlama(toy.tiny_llama(), toys.MASK)
    method = methods.prophet(denoiser, block=4, steps=4, early=gaps[0], middle=gaps[1], late=gaps[2])
    prompts = [[1, 2, 3], [5, 51, 1, 32]]
    ours = specjax.denoise(denoiser, method, prompts, key=0, max_new_tokens=12)
    for row, prompt in enumerate(prompts):
        expected = released(model, prompt, 12, block=4, steps=4, gaps=gaps)
        assert (ours.to_lists()[row], ours.decided_at[row].tolist()) == expected


def test_the_answer_ends_with_the_first_end():
    words = [1, 2, EOS, 3, EOS, 1, 1, 1]
    assert fills([8, 8, 8, 0, 0, 0, 0, 0], words, 0) and not fills([8, 8, 6, 90, 90, 90, 90, 90], words, 0)
    assert not fills([8, 8, 8, 0, 0, 0, 0, 0], words, 0, eos=None)
    assert fills([0, 9, 9, 0, 0, 0, 0, 0], words, 1, decided=[(2, 1)])  # decided columns count no more
    assert not fills([0, 9, 9, 0, 0, 0, 0, 0], words, 1, decided=[(2, EOS)])  # all behind it is nothing to fill


def test_filled_rows_end_each_by_itself_and_infinite_gaps_are_the_base():
    denoiser, prompts = toys.frozen([0.5] * 6 + [0.97] * 8 + [0.5] * 20), [[1] * 6, [1, 2]]
    gap = lambda p: float(np.log(p / ((1 - p) / 10)))
    never = methods.prophet(denoiser, early=float("inf"), middle=float("inf"), late=float("inf"))
    settings = {"key": 0, "max_new_tokens": 8}
    base = specjax.denoise(denoiser, "llada", prompts, **settings)
    plain = specjax.denoise(denoiser, never, prompts, **settings)
    assert plain.to_lists() == base.to_lists() and plain.decided_at.tolist() == base.decided_at.tolist()
    method = methods.prophet(denoiser, early=gap(0.97) - 0.05, middle=1e9, late=(gap(0.5) + gap(0.97)) / 2)
    ours = specjax.denoise(denoiser, method, prompts, **settings)
    assert ours.stats.target_passes.tolist() == [1, 8] and ours.to_lists() == base.to_lists()
    alone = specjax.denoise(denoiser, method, prompts[1:], **settings)
    assert alone.decided_at[0].tolist() == ours.decided_at[1].tolist()
    at_once = specjax.denoise(denoiser, methods.prophet(denoiser, early=-1.0), prompts, **settings)
    assert at_once.stats.target_passes.tolist() == [1, 1]


def test_a_block_causal_model_is_refused():
    with pytest.raises(UsageError, match="full attention"):
        methods.prophet(toys.causal())
