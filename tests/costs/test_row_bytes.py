"""Bytes of recurrent layers, counted by hand for a tiny hybrid model, and the costs that they change."""

import jax
import numpy as np
import pytest
from hybrids import tiny_hybrid
from toy import tiny_llama

from specjax import costs, parallel
from specjax.costs.accelerators import OVERLAP
from specjax.costs.row_bytes import RowBytes, row_bytes
from specjax.models.storage import num_bytes
from specjax.types import Target

CONVOLVED = 2 * 2 * 8 + 4 * 8, 32, 4 * 8 + 2 * 2 * 8  # channels: q, k and v; the width of the model; x, B and C
STATES = 4 * (3 * 64 + 2 * 32 + 3 * 64 + 2 * 4 * 8 * 8)  # windows of 3, 2 and 3 tokens, and two matrix states
DELTA = 2 * 8 + 4 * 8 + 2 * 2 * 4  # keys of 2 heads, values of 4 heads, and two decays of two parts per head
UPDATES = 4 * (sum(CONVOLVED) + 2 * DELTA)
V5E = lambda n: 1 + OVERLAP * n * 2 / 197e12 * 819e9 / 2  # peak and bandwidth of the chip, bfloat16


def test_states_and_updates_are_those_counted_by_hand():
    assert row_bytes(tiny_hybrid()) == RowBytes(STATES, UPDATES)
    assert row_bytes(tiny_hybrid()).moved(3) == 2 * (STATES + 3 * UPDATES)
    assert row_bytes(tiny_llama()) == RowBytes(0, 0)
    sharded = parallel.shard(tiny_hybrid(), parallel.mesh(2, 2))
    assert row_bytes(sharded) == RowBytes(STATES, UPDATES)


@pytest.mark.parametrize(("platform", "of_weights"), [("cpu", lambda n: 1 + 0.035 * (n - 1)), ("v5e", V5E)])
def test_a_wide_pass_of_many_rows_reads_their_states(platform, of_weights):
    """A state costs the same for each width, so it makes a wide pass relatively cheaper; updates grow with it."""
    target, rows = tiny_hybrid(), 16
    weights = num_bytes(target.params)
    shares = costs.shares_of(target, platform)._replace(logits=0.0)
    assert shares == costs.Shares(0.0, STATES / weights, UPDATES / weights)
    moved = lambda width: of_weights(rows * width) + rows * 2 * (STATES + width * UPDATES) / weights
    expected = [moved(width) / moved(1) for width in (1, 4)]
    costs_by_width = costs.estimated((1, 4), rows, "bfloat16", platform, shares)
    np.testing.assert_allclose(costs_by_width, expected, rtol=0.02)
    without = costs.estimated((1, 4), rows, "bfloat16", platform)
    assert abs(without[1] - expected[1]) > 0.1


def test_a_pass_of_a_draft_model_counts_its_states():
    hybrid, llama = tiny_hybrid(), tiny_llama()
    of_hybrid, of_llama = num_bytes(hybrid.params) + 2 * (STATES + UPDATES), num_bytes(llama.params)
    assert costs.of_draft(llama, hybrid, "cpu") == pytest.approx(of_hybrid / of_llama)
    assert costs.of_draft(hybrid, llama, "cpu") == pytest.approx(of_llama / of_hybrid)


def test_shares_are_counted_within_a_program():
    counted = []
    jax.eval_shape(lambda params: counted.append(row_bytes(Target(tiny_hybrid().model, params))), tiny_hybrid().params)
    assert counted == [RowBytes(STATES, UPDATES)]
