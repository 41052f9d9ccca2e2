"""Formulas: roofline, expected tokens, speed-up."""

from __future__ import annotations

import dataclasses

import pytest

from specjax import trees
from specjax.planning import chips, cost, hlo, programs
from specjax.trees.builders.static import branching_paths

CHIP = dataclasses.replace(
    chips.CHIPS["v5e"], hbm_bandwidth=1e9, peak_flops=1e12, flops_per_cycle=1000, link_bandwidth=1e9
)


def test_seconds_of_a_program():
    reduce = hlo.Collective("all-reduce", count=10, bytes=8e6, wire_bytes=14e6, group=8)
    totals = hlo.Totals(2e6, 5e9, 4e6, 100, hlo.Kernel(3, 1e9, 1e6), (reduce,))
    seconds = cost.estimate(CHIP, totals, must_bytes=3e6)
    ring = 14e6 / 2e9 + 10 * 4 * 1e-6  # both directions, half the ring per collective
    assert seconds.memory == pytest.approx(3e-3) and seconds.compute == pytest.approx(5e-3)
    assert seconds.collectives == pytest.approx(ring)
    assert seconds.roofline == pytest.approx(5e-3 + ring)
    assert seconds.schedule == pytest.approx(2e6 / 1e9 + 1e-3 + ring)
    # Weights kept on the chip are moved once.
    assert cost.estimate(CHIP, totals, must_bytes=9e6).memory == pytest.approx(4e-3)


def test_expected_tokens_of_chains_and_trees():
    """The chain values are those of the cost model's card: 1, 1.7, 2.19, 2.533, 2.7731, 2.9412 at 0.7."""
    chain = lambda k: tuple((0,) * depth for depth in range(1, k + 1))
    found = [cost.expected_tokens(chain(k), cost.rank_acceptance(0.7)) for k in range(6)]
    assert found == pytest.approx([1, 1.7, 2.19, 2.533, 2.7731, 2.94117])
    a = (0.6, 0.2, 0.1)
    for n, depth in ((5, None), (6, None), (4, 2)):
        value, paths = trees.sequoia(a, n, depth)
        assert cost.expected_tokens(paths, a) == pytest.approx(value)
    assert cost.expected_tokens(branching_paths((2, 1)), a) == pytest.approx(1 + 0.8 + 0.8 * 0.6)
    assert cost.expected_tokens(((3,),), a) == 1  # a rank that was not measured is worth nothing


def test_rank_acceptance_is_a_law():
    assert cost.rank_acceptance(0.5, 3) == pytest.approx((0.5, 0.25, 0.125))
    assert sum(cost.rank_acceptance(0.9)) <= 1


def test_speedup_of_the_card():
    """0.7, 3 drafted tokens at a quarter of the target's time each, flat verification: 2.533 / 1.75."""
    assert cost.speedup(2.533, 1.0, 1.75) == pytest.approx(1.447, abs=1e-3)


def job(**changes):
    target = programs.load_config("smollm2_135m", "bfloat16")
    return programs.Job(target, chips.parse_topology("v5e:1x1"), **changes)


@pytest.mark.parametrize(
    ("changes", "nodes", "depth", "tokens"),
    [
        ({"method": "prompt_lookup"}, 6, 5, 2.94117),
        ({"method": "two_model", "tree": "2x1"}, 5, 2, 1 + 0.91 + 0.91 * 0.7),
        ({"method": "two_model", "tree": "paths:2x2"}, 5, 2, 1 + 0.91 + 0.91 * 0.7),
    ],
)
def test_tokens_of_a_drafts_shape(changes, nodes, depth, tokens):
    assert cost.draft_shape(job(**changes), nodes, depth)(0.7) == pytest.approx(tokens)


def test_trees_that_grow_count_as_the_best_of_their_size():
    tokens = cost.draft_shape(job(method="two_model", tree="dyspec:4"), 5, 4)
    assert tokens(0.6) == pytest.approx(trees.sequoia(cost.rank_acceptance(0.6, 4), 5, 4)[0])
    recycling = cost.draft_shape(job(method="token_recycling"), 8, 3)
    assert 1 < recycling(0.3) < recycling(0.6)


def test_windowed_layers_read_their_window():
    gemma = programs.load_config("gemma3_270m", "bfloat16")
    assert cost._mean_context(gemma, 4096) == pytest.approx((3 * 4096 + 15 * 512) / 18)
    assert cost._mean_context(programs.load_config("llama3_1b", "bfloat16"), 4096) == 4096
