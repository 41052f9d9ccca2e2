"""Tests of near-ties: the place at which two greedy texts differ, and the rounding of wide passes there."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

import specjax
from specjax.analysis import last_token_model
from specjax.bench.near_ties import NUM_MEASURED, TextOrigin, find_difference, measured_logits, next_logits
from specjax.models import make_model
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.sampling import fold_in, node_keys
from specjax.types import Sampling, Target

LAWS = np.array([[0.1, 0.5, 0.4], [0.2, 0.2, 0.6], [0.5, 0.4999, 0.0001]])
WIDTH = 4


ORIGIN = TextOrigin((WIDTH,))


def in_wide_passes(batch: int, width: int) -> bool:
    return width > 1


@functools.cache
def rounding_model(where):
    """Return a model that raises its logits of token 1 in the passes (batch, width) that `where` is true for."""
    inner = last_token_model(LAWS)

    def forward(params, tokens, cache, **options):
        output, pending = inner.model.forward(params[0], tokens, cache, **options)
        raised = params[1] * where(*tokens.shape) * (jnp.arange(3) == 1)
        return output._replace(logits=output.logits + raised), pending

    return inner.model._replace(forward=forward), inner.params


def rounded(by: float, where=in_wide_passes) -> Target:
    """Return a model whose logits of token 1 are `by` higher in some passes, by default those of several tokens."""
    model, params = rounding_model(where)
    return Target(model, (params, jnp.float32(by)))


def test_the_logits_are_those_after_the_last_token():
    assert next_logits(last_token_model(LAWS), [0, 2, 1], 1) == pytest.approx(np.log(LAWS[1]), rel=1e-5)


@pytest.mark.parametrize(
    ("ours", "plain", "position", "pair", "near_tie"),
    [
        ([1, 2, 1], [1, 2, 0], 2, (1, 0), True),  # 0.4999 against 0.5: 2e-4, and passes differ by 1e-3
        ([2, 0], [1, 2], 0, (2, 1), False),  # 0.4 against 0.5
        ([1, 2, 2], [1, 2, 0], 2, (2, 0), False),  # the two largest are a near-tie, but this is the third
        ([1], [1, 2], 1, (None, 2), False),  # one text has ended
    ],
)
def test_a_flip_is_a_near_tie_only_within_the_measured_rounding(ours, plain, position, pair, near_tie):
    difference = find_difference(rounded(1e-3), [0], ours, plain, ORIGIN)
    assert (difference.position, (difference.token, difference.plain_token), difference.near_tie) == (
        position,
        pair,
        near_tie,
    )
    assert (
        difference.rounding == pytest.approx(1e-3, rel=0.05) and (difference.behind <= difference.rounding) == near_tie
    )
    # A method that is wrong is not excused where passes do not differ, however small the gap is.
    assert not find_difference(rounded(0.0), [0], ours, plain, ORIGIN).near_tie


def test_a_large_gap_is_a_near_tie_if_passes_differ_by_more():
    """Passes differed by 0.4 in bfloat16 on an H200, and a constant of 0.25 called that a wrong text."""
    ours, plain = [2], [1]
    assert find_difference(rounded(0.4), [0], ours, plain, ORIGIN).near_tie
    assert not find_difference(rounded(0.2), [0], ours, plain, ORIGIN).near_tie


def test_all_widths_of_the_method_count():
    """The rounding of a pass depends on its kernel, so a narrow pass may round more than the widest one."""
    target, ours, plain = rounded(0.4, lambda batch, width: width == 2), [2], [1]
    assert find_difference(target, [0], ours, plain, TextOrigin((1, 2, WIDTH))).near_tie
    assert not find_difference(target, [0], ours, plain, TextOrigin((1, WIDTH))).near_tie


def test_the_rows_of_a_batch_count():
    target, ours, plain = rounded(0.4, lambda batch, width: batch * width > WIDTH), [2], [1]
    assert find_difference(target, [0], ours, plain, TextOrigin((2,), batch=3)).near_tie
    assert not find_difference(target, [0], ours, plain, TextOrigin((2,), batch=1)).near_tie


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_near_ties_of_a_sampled_text_have_its_noise(filters):
    """A sampled token may lie far behind the likeliest one. Rounding by half of the scores' gap exchanges no tokens."""
    sampling = Sampling(jnp.float32(1.0))._replace(**{name: jnp.asarray(value) for name, value in filters.items()})
    laws = np.log(LAWS[2:])
    for seed in range(16):
        key = fold_in(jax.random.key(0), seed)
        at_first = node_keys(key[None], jnp.array([1]), jnp.array([[0]]))[:, 0]
        plain, ours = (int(draw_warped(at_first, laws + by * (np.arange(3) == 1), sampling)[0]) for by in (0.0, 1.0))
        if plain != ours:
            break
    assert plain != ours
    find = lambda by: find_difference(rounded(by), [2], [ours], [plain], TextOrigin((WIDTH,), 1, (), sampling, key))
    assert find(1.0).near_tie, "the draw from rounded logits is excused by their rounding"
    half = find(1.0).top_two_gap / 2
    assert 0 < half < 0.5 and not find(half).near_tie and not find(0.0).near_tie


def test_a_mesh_that_splits_rows():
    target = specjax.shard(tiny_llama(), specjax.mesh(data=2, model=1))
    alone = measured_logits(tiny_llama(), [1, 2, 3, 4, 5], 3, 2)
    np.testing.assert_allclose(measured_logits(target, [1, 2, 3, 4, 5], 3, 2), alone, atol=1e-4)


def test_equal_texts_do_not_part():
    assert find_difference(last_token_model(LAWS), [0], [1, 2], [1, 2], ORIGIN) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_widths_read_the_same_positions(dtype):
    """Rounding alone separates them: about 1e-6 in float32 and 1e-2 in bfloat16."""
    full = tiny_llama()
    config = dataclasses.replace(full.model.config, dtype=dtype)
    target = Target(make_model(config), {**full.params} if dtype == "float32" else cast(full.params))
    text = [int(x) for x in np.random.default_rng(0).integers(0, 64, 29)]
    narrow, wide = (measured_logits(target, text, 8, width) for width in (1, 5))
    assert narrow.shape == wide.shape == (NUM_MEASURED, 64)
    assert np.ptp(narrow) > 1
    limit = 1e-4 if dtype == "float32" else 0.2
    assert 0 < np.max(np.abs(narrow - wide)) < limit
    short = measured_logits(target, text[:11], 8, 5)
    assert short.shape == (4, 64)


def cast(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
