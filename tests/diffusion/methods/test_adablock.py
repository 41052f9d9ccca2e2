"""Tests of the ends of blocks."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Canvas, methods
from specjax.diffusion.methods.adablock import delimited

LINE = 9


def end_of(words, sure, *, tau, count=16, block=8, ahead=4):
    """Columns of the first block."""
    schedule, start = delimited(block, (LINE, 7), tau, ahead), jnp.array([3])
    opened = jnp.arange(32)[None] >= 3
    canvas = Canvas(jnp.zeros((1, 32), jnp.int32), opened, start, start + count, start, None, start * 0)
    state = schedule.init((), canvas, schedule.width)
    first, state = schedule.place(state, canvas)
    proposal = hand_made.proposal([sure], [words], narrow=True)
    end, _, state = schedule.bound(state, canvas, proposal, hand_made.window([[True] * 8], start=3, entered=True))
    later, _, _ = schedule.bound(state, canvas, proposal, hand_made.window([[True] * 8], start=3))
    assert first.tolist() == [3] and later.tolist() == end.tolist()
    return int(end[0]) - 3


def test_the_surest_delimiter_ends_a_block_and_not_the_first():
    words, sure = [1, LINE, 2, LINE, 7, 7, 1, 1], [0.5, 0.35, 0.5, 0.6, 0.9, 0.9, 0.5, 0.5]
    assert end_of(words, sure, tau=0.3) == 4
    assert end_of(words, sure, tau=0.7) == 8
    assert end_of(words, sure, tau=0.7, ahead=5) == 5  # another delimiter
    assert end_of(words, sure, tau=0.7, count=6) == 6  # no block reaches behind the text
    assert end_of([7, *words[1:]], [0.8, *sure[1:]], tau=0.3) == 1
    assert end_of([1] * 8, sure, tau=0.3) == 8


def test_blocks_follow_one_another_to_the_end_of_the_text():
    words = [1, 2, LINE, 3, 4, 5, LINE, 6, 0, 0, 0, 2, 3, 4]
    sure = np.full(14, 0.5)
    sure[[2, 6]] = 0.8, 0.7
    denoiser = toys.frozen([0.5, 0.5, *sure], [1, 1, *words])
    method = methods.adablock(denoiser, block=4, delimiters=(LINE,), ahead=4, tau=0.45)
    result = specjax.denoise(denoiser, method, [[1, 1]], key=0, max_new_tokens=14)
    assert result.to_lists() == [words]
    assert result.decided_at[0].tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3] * 3


def test_without_sure_delimiters_it_is_the_threshold_rule_with_fixed_blocks():
    denoiser, settings, prompts = toys.full(), {"key": 1, "max_new_tokens": 14}, [[1, 2, 3], [4, 5, 6, 7, 8]]
    method = methods.adablock(denoiser, block=4, delimiters=tuple(range(60)), delimiter_tau=1.1, tau=0.03, ahead=6)
    ours = specjax.denoise(denoiser, method, prompts, **settings)
    plain = specjax.denoise(denoiser, methods.fast_dllm(denoiser, block=4, tau=0.03), prompts, **settings)
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()
    assert ours.stats.target_passes[0] < 14


def test_what_it_refuses():
    with pytest.raises(UsageError, match="block-causal"):
        methods.adablock(toys.causal())
    with pytest.raises(UsageError, match="ahead"):
        methods.adablock(toys.full(), ahead=0)
