"""Dream: its grid, its scores, and what chance has a say in."""

import hand_made
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from diffusion_oracles import NumpyLlama
from diffusion_oracles import dream as oracle
from hand_made import shares
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import forward, methods, schedules
from specjax.diffusion.methods.dream import SCORES, at_their_times, by_chance
from specjax.diffusion.rules import quota

RNG = np.random.default_rng(0)


def released(columns, steps, eps=1e-3):
    """The release's loop, without the steps that take nothing."""
    times, left, taken = np.linspace(1, eps, steps + 1), columns, []
    for k in range(steps):
        taken.append(left if k == steps - 1 else int(left * (1 - times[k + 1] / times[k])))
        left -= taken[-1]
    return [count for count in taken if count]


def test_the_share_of_a_step_is_cut_to_a_whole_number():
    assert shares(schedules.timesteps(steps=4), 8) == [1, 2, 2, 3]
    for columns, steps in ((7, 3), (5, 12), (20, 6), (3, 1), (13, 512)):
        assert shares(schedules.timesteps(steps=steps), columns) == released(columns, steps)
    assert shares(schedules.timesteps(), 14) == released(14, 14)
    assert shares(schedules.timesteps(steps=4, eps=0), 8) == [2, 2, 2, 2]


def test_a_decode_takes_these_shares_by_the_score():
    denoiser = toys.frozen(np.linspace(0.9, 0.4, 12))
    for alg in SCORES:
        result = specjax.denoise(denoiser, methods.dream(denoiser, alg=alg, steps=4), [[1, 2]], key=0, max_new_tokens=8)
        assert result.decided_at[0].tolist() == [0, 1, 1, 2, 2, 3, 3, 3]


def test_shifted_logits_predict_the_next_column():
    ids = jnp.arange(10, dtype=jnp.float32)[None, :, None]
    for denoiser, first in ((toys.full("shifted"), 2), (toys.full(), 3)):
        rows = forward.align_rows(denoiser, ids, jnp.array([3]), 4)
        assert rows[0, :, 0].tolist() == [first + n for n in range(4)]


@pytest.mark.parametrize("score", SCORES.values())
def test_the_coldest_chance_is_none(score):
    proposed = hand_made.of_logits(RNG.normal(size=(64, 6, 5)))
    cold, none = (hand_made.select(rule, proposed, quota=3)[0] for rule in (by_chance(score, 1e-5), quota(score)))
    np.testing.assert_array_equal(cold, none)


def test_with_two_words_margin_and_probability_order_alike():
    proposed = hand_made.of_logits(RNG.normal(size=(64, 6, 2)))
    by = [hand_made.select(quota(SCORES[alg]), proposed, quota=2)[0] for alg in ("maskgit_plus", "topk_margin")]
    np.testing.assert_array_equal(*by)


def test_scores_are_of_the_distribution_that_is_drawn_from():
    """Column 0 is the surer one, unless the logits are cut to their two largest."""
    p = np.log([[[0.5, 0.45, 0.05], [0.48, 0.26, 0.26]]])
    proposed = hand_made.of_logits(p)
    assert hand_made.taken(quota(SCORES["maskgit_plus"]), proposed) == [[0]]
    cut = proposed._replace(filtered=jnp.where(jnp.arange(hand_made.VOCAB) < 2, proposed.logits, -jnp.inf))
    for alg in SCORES:
        assert hand_made.taken(quota(SCORES[alg]), cut) == [[1]]


@pytest.mark.parametrize("alg", ["entropy", exhaustive("maskgit_plus"), exhaustive("topk_margin")])
def test_a_greedy_text_with_a_nucleus_is_that_of_the_release(alg):
    """The nucleus cuts the scores at temperature 0 too."""
    denoiser, model = toys.full("shifted"), NumpyLlama(toy.tiny_llama(), toys.MASK, shifted=True)
    prompts, texts = [[1, 2, 3], [6]], []
    for top_p in (0.9, 1.0):
        ours = specjax.denoise(
            denoiser, methods.dream(denoiser, alg=alg, steps=5), prompts, key=0, max_new_tokens=9, top_p=top_p
        )
        texts += [(ours.to_lists()[row], ours.decided_at[row].tolist()) for row in range(2)]
        assert texts[-2:] == [oracle(model, prompt, 9, steps=5, alg=alg, top_p=top_p) for prompt in prompts]
    assert texts[:2] != texts[2:]


def test_columns_are_drawn_by_the_weights_of_their_scores():
    rows, temperature = 2000, 0.5
    proposed = hand_made.proposal(np.tile([0.9, 0.3], (rows, 1)))
    first = np.asarray(hand_made.select(by_chance("confidence", temperature), proposed)[0])[:, 0]
    expected = 1 / (1 + np.exp((0.3 - 0.9) / temperature))
    assert abs(first.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / rows)


def test_origin_decides_every_column_at_a_step_of_its_own_by_chance():
    """Step k of S with probability t_k - t_{k+1}, the last with what is left."""
    rows, width, steps = 2000, 8, 4
    rule = at_their_times(steps, 0.1)
    proposed = hand_made.proposal(np.full((rows, width), 0.5))
    take, _, steps_of = hand_made.select(rule, proposed)
    steps_of, state = np.asarray(steps_of)[:, :width], steps_of
    take = np.asarray(take)[:, :width]
    law = np.array([0.225, 0.225, 0.225, 0.325])
    frequencies = np.bincount(steps_of.ravel(), minlength=steps) / steps_of.size
    assert np.all(np.abs(frequencies - law) < 4 * np.sqrt(law * (1 - law) / steps_of.size))
    assert abs(np.corrcoef(steps_of[:, 0], steps_of[:, 1])[0, 1]) < 4 / np.sqrt(rows)
    np.testing.assert_array_equal(take, steps_of == steps_of.min(1, keepdims=True))
    later = hand_made.view(~take, entered=False, seed=9)  # other noise, the same steps
    again, _, next_state = hand_made.select(rule, proposed, later, state=state)
    np.testing.assert_array_equal(next_state, state)
    remaining = np.where(take, steps, steps_of)
    np.testing.assert_array_equal(np.asarray(again)[:, :width], ~take & (remaining == remaining.min(1, keepdims=True)))


def test_what_is_no_setting_is_refused():
    for wrong in ({"alg": "best"}, {"alg": "entropy", "alg_temp": -1.0}, {"steps": 0}, {"alg": "entropy", "eps": 1.0}):
        with pytest.raises(UsageError):
            methods.dream(toys.full(), **wrong)
