"""Tests of near-ties: the place at which two greedy texts differ, and the rounding of wide passes there."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax.analysis import last_token_model
from specjax.bench.near_ties import NUM_MEASURED, find_difference, measured_logits, next_logits
from specjax.models import make_model
from specjax.types import Target

LAWS = np.array([[0.1, 0.5, 0.4], [0.2, 0.2, 0.6], [0.5, 0.4999, 0.0001]])
WIDTH = 4


def rounded(by: float) -> Target:
    """Return a model whose logits of token 1 are `by` higher in passes of several tokens."""
    target = last_token_model(LAWS)

    def forward(params, tokens, cache, **options):
        output, pending = target.model.forward(params, tokens, cache, **options)
        raised = by * (tokens.shape[1] > 1) * (jnp.arange(3) == 1)
        return output._replace(logits=output.logits + raised), pending

    return Target(target.model._replace(forward=forward), target.params)


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
    difference = find_difference(rounded(1e-3), [0], ours, plain, WIDTH)
    assert (difference.position, (difference.token, difference.plain_token), difference.near_tie) == (
        position,
        pair,
        near_tie,
    )
    assert (
        difference.rounding == pytest.approx(1e-3, rel=0.05) and (difference.behind <= difference.rounding) == near_tie
    )
    # A method that is wrong is not excused where passes do not differ, however small the gap is.
    assert not find_difference(rounded(0.0), [0], ours, plain, WIDTH).near_tie


def test_a_large_gap_is_a_near_tie_if_passes_differ_by_more():
    """Passes differed by 0.4 in bfloat16 on an H200, and a constant of 0.25 called that a wrong text."""
    ours, plain = [2], [1]
    assert find_difference(rounded(0.4), [0], ours, plain, WIDTH).near_tie
    assert not find_difference(rounded(0.2), [0], ours, plain, WIDTH).near_tie


def test_equal_texts_do_not_part():
    assert find_difference(last_token_model(LAWS), [0], [1, 2], [1, 2], WIDTH) is None


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
    import jax

    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
