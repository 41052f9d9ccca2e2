"""Rollouts as a text to copy from: their rows, their ends, and the vote on a continuation."""

import jax.numpy as jnp
import numpy as np

from specjax.retrieval.rollouts import END, extend, find_sources, likeliest_copy, pack, prompt_hash
from specjax.types import Context


def context_of(rows, size=8):
    tokens = np.array([row + [0] * (size - len(row)) for row in rows], np.int32)
    return Context(jnp.asarray(tokens), jnp.array([len(row) for row in rows]))


def test_a_hash_depends_on_the_prompt_and_not_on_its_padding():
    prompts = [[1, 2], [2, 1], [1, 2, 0], [1]]
    short, long = (prompt_hash(c.tokens, c.length) for c in (context_of(prompts, 3), context_of(prompts, 40)))
    assert short.tolist() == long.tolist() and len(set(short.tolist())) == 4


def test_a_row_reads_the_samples_of_its_prompt_and_its_nearest_siblings():
    rollouts = pack([[4, 5], [1, 2]], [[[9]], [[6, 7], [8]]], 6, siblings=1)
    start = context_of([[1, 2], [1, 2], [3], [1, 2]])
    sources = find_sources(rollouts, start)
    assert sources.earlier.tolist() == [1, 1, -1, 1]
    assert sources.siblings.tolist() == [[1], [0], [-1], [1]]
    later = context_of([[1, 2, 30], [1, 2, 31, 32], [3], [1, 2]])
    extended = extend(rollouts, sources, later)
    rows = [[t for t in row[:n] if t != END] for row, n in zip(extended.tokens.tolist(), extended.length, strict=True)]
    assert rows == [
        [6, 7, 8, 1, 2, 31, 32, 1, 2, 30], [6, 7, 8, 1, 2, 30, 1, 2, 31, 32], [3], [6, 7, 8, 1, 2, 31, 32, 1, 2],
    ]  # fmt: skip


def test_the_majority_wins_over_the_latest_place_and_no_copy_crosses_an_end():
    samples = [[1, 5, 6, 7], [1, 5, 6], [1, 5, 8], [1, 9]]
    rollouts = pack([[2]], [samples], 32)
    text = context_of([[2, 1]])
    extended = extend(rollouts, find_sources(rollouts, context_of([[2]])), text)
    copy = likeliest_copy(extended.tokens, extended.length, 4)
    assert copy.tokens[0, :3].tolist() == [5, 6, 7] and copy.valid[0].tolist() == [True, True, True, False]
    np.testing.assert_allclose(copy.chance[0, :3], [3 / 5, 2 / 4, 1 / 3])
    nothing = likeliest_copy(*context_of([[1, 2, 3]])[:2], 4)
    assert not nothing.valid.any()
