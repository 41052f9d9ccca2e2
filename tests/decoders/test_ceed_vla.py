"""The card's tests of Jacobi decoding (B8) and CEED-VLA (B9)."""

import functools

import jax
import numpy as np
import pytest
from toy import markov, scripted, tiny_llama

from specjax import UsageError, decode
from specjax.decoders import ceed_vla
from specjax.drafters import autoregressive

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
NEW = 19


@functools.cache
def greedy(prompts=None, **options):
    result = decode(
        tiny_llama(), autoregressive(), (prompts and [list(prompts)]) or PROMPTS, key=jax.random.key(0),
        max_new_tokens=NEW, **options,
    )  # fmt: skip
    return result.to_lists()


def run(target=None, prompts=PROMPTS, **options):
    return ceed_vla(target or tiny_llama(), prompts, **{"key": 0, "max_new_tokens": NEW} | options)


@pytest.mark.parametrize("block", [1, 5])
def test_the_fixed_point_is_the_greedy_text(block):
    result = run(block=block, iterations=None)
    assert result.to_lists() == greedy()
    if block == 1:
        assert result.stats.target_passes.tolist() == [NEW] * 3
    assert run(block=block, iterations=block, stale_keys=True).to_lists() == greedy()


def test_an_eos_within_a_block():
    eos = greedy()[0][7]
    result = run(block=5, iterations=None, eos=eos)
    assert result.to_lists() == greedy(eos=eos)
    assert result.hit_eos[0]


def test_the_first_tokens_of_a_block_are_right():
    """Check that a block has at least as many right tokens as passes."""
    [text] = run(prompts=PROMPTS[:1], block=5, iterations=2).to_lists()
    assert text != greedy()[0]
    for start in range(0, NEW, 5):
        prefix = tuple(PROMPTS[0] + text[:start])
        assert greedy(prefix)[0][:2] == text[start : start + 2]


def test_keys_of_what_was_left_early_are_read_again():
    """Compare the cache after blocks of one pass with one full pass; stale keys differ."""
    [text] = run(prompts=PROMPTS[:1], block=4, iterations=1).to_lists()
    later = ceed_vla(tiny_llama(), [PROMPTS[0] + text[:8]], key=0, max_new_tokens=1, block=4, iterations=1).to_lists()
    assert later[0][0] == text[8]
    differing = [
        run(block=4, iterations=1, key=seed, stale_keys=True).to_lists()
        != run(block=4, iterations=1, key=seed).to_lists()
        for seed in range(3)
    ]
    assert any(differing)


def test_passes_until_a_fixed_point():
    """Decode a constant text: one pass finds it and one confirms it; a right guess needs one."""
    same = np.full((1, 64), 5)
    assert run(scripted(same, 8), [[5, 5, 5]], block=4, max_new_tokens=8).stats.target_passes.tolist() == [2]
    num_passes = run(scripted(same, 8), [[1, 2, 3]], block=4, max_new_tokens=8).stats.target_passes
    assert num_passes.tolist() == [4]
    rows = np.eye(4, dtype=np.float32)[[1, 2, 3, 0]] * 0.9 + 0.025  # the next token is that of the last
    passes = run(markov(rows), [[0]], block=4, iterations=None, max_new_tokens=4).stats.target_passes
    assert 2 <= int(passes[0]) <= 4


def test_passes_add_up():
    limited = run(block=5, iterations=2, max_new_tokens=20).stats.target_passes
    assert (np.asarray(limited) == 2 * 4).all()  # none of these blocks converges in one


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 0}, "block must be a whole number from 1 to 4096, not 0"),
        ({"iterations": 0}, "iterations must be a whole number of at least 1, not 0"),
    ],
)
def test_settings_out_of_range(options, words):
    with pytest.raises(UsageError, match=words):
        run(**options)
