"""ETE: passes counted by hand, and the bound that explains it."""

import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax.diffusion import methods
from specjax.diffusion.methods.ete import most_bits


def run(denoiser, count, **options):
    return specjax.denoise(denoiser, methods.ete(denoiser, **options), [[5]], key=0, max_new_tokens=count)


@pytest.mark.parametrize(("factor", "nats"), [(1.0, 3.497), (0.9, 2.061), (0.75, 1.299), (0.5, 0.663), (0.0, 0.0)])
def test_a_pass_carries_at_most_so_much(factor, nats):
    assert most_bits(32, factor) == pytest.approx(nats, abs=1e-3)
    assert all(most_bits(n, factor) <= most_bits(n + 1, factor) for n in range(1, 40))


def test_one_uncertain_column_makes_seven_sure():
    """The threshold rule leaves column 1 for last, as it is the least sure."""
    denoiser = toys.cascade(0)
    plain = specjax.denoise(denoiser, methods.fast_dllm(denoiser, block=8), [[5]], key=0, max_new_tokens=8)
    ours = run(denoiser, 8, block=8, words=1)
    assert plain.stats.target_passes.tolist() == [8] and ours.stats.target_passes.tolist() == [2]
    assert ours.to_lists() == plain.to_lists() == [list(range(8))[:1] + list(range(2, 9))]
    assert ours.decided_at.tolist() == [[1] * 8] and ours.columns.tolist() == [2 * 9]


def test_the_word_that_leads_on_wins_where_that_is_worth_it():
    denoiser = toys.cascade(1)  # log .48 - log .44 is .087, and seven columns are worth .1 each
    ours = run(denoiser, 8, block=8)
    assert ours.to_lists()[0][0] == 1 and ours.stats.target_passes.tolist() == [2]
    assert ours.columns.tolist() == [3 * 9]  # a look, and one at two canvases
    assert run(denoiser, 8, block=8, gain=0.01).to_lists()[0][0] == 0


def test_no_pass_is_wasted_and_the_last_column_needs_none():
    """Column after column of the ladder: sure, tried, sure, tried; a block that ends is no reason to look again."""
    ours = run(toys.ladder(), 8, block=4, ahead=0, words=1)
    assert ours.to_lists() == [list(range(1, 9))] and ours.stats.target_passes.tolist() == [4]
    assert ours.decided_at.tolist() == [[0, 1, 1, 2, 2, 3, 3, 3]]


def test_blocks_ahead_are_decided_and_the_first_one_is_sure_to_go_on():
    sure = np.array([0.9, 0.6, 0.5, 0.4, 0.3, 0.95, 0.95, 0.2, 0.2])
    ours = run(toys.frozen(sure), 8, block=4, ahead=1)
    assert ours.decided_at[0, 4:6].tolist() == [0, 0]
    ours = run(toys.frozen(sure), 8, block=4, ahead=1, min_columns=0)
    assert ours.decided_at.tolist() == [[0, 1, 2, 3, 0, 0, 4, 5]]


def test_without_exploring_it_is_the_threshold_rule():
    denoiser = toys.full()
    prompts, settings = [[1, 2, 3, 4, 5], [6, 7, 8]], {"key": 4, "max_new_tokens": 10, "temperature": 0.8}
    plain = specjax.denoise(denoiser, methods.fast_dllm(denoiser, block=5, tau=0.03), prompts, **settings)
    ours = methods.ete(denoiser, block=5, tau=0.03, ahead=0, min_columns=0)
    ours = specjax.denoise(denoiser, ours, prompts, **settings)
    assert ours.to_lists() == plain.to_lists() and np.all(ours.decided_at == plain.decided_at)
    assert np.all(ours.columns == plain.columns)
